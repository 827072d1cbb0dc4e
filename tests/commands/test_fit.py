"""`fitgpt fit` and `fitgpt.fit`: output, files, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fitgpt
from fitgpt.commands import fit, main
from fitgpt.config.argv import walk
from fitgpt.config.fields import build
from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.core.errors import DoesNotFit, UsageError
from fitgpt.core.units import GiB, MiB, show_bytes
from fitgpt.hardware import host, nvidia
from fitgpt.hardware.gpus import find
from fitgpt.hardware.nvidia import GpuProcess, GpuReading, Survey
from fitgpt.planning import fit as fit_planning
from fitgpt.planning import plan_file
from fitgpt.planning.budget import named, platform_for
from fitgpt.planning.changes import memory_use
from fitgpt.planning.fit import FitRequest, fit_from, fit_target, for_train, with_margin
from fitgpt.planning.fit_goals import OUTSIDE_ERROR, FitResult
from fitgpt.planning.measure import TimingProcess

SMALL = """# A small run.
out_dir = 'runs/small'
dataset = 'none'
n_layer = 2
n_head = 4
n_embd = 256
block_size = 256
batch_size = 4
gradient_accumulation_steps = 4
vocab_size = 5000
eval_iters = 6
learning_rate = 1e-3
"""
TIGHT = ["run.py", "--gpu", "4070", "--budget", "300MiB"]


class FitOutput(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Standard output with single spaces, without line breaks."""
        return " ".join(self.out.split())


results: dict[FitRequest, FitResult] = {}


def fit_once(request: FitRequest, say: Callable[[str], None] = print) -> FitResult:
    """One search for all tests that ask the same; most of them are about what is printed or written. Not shared on the
    GPU of this machine: there the answer depends on what was measured before."""
    if not request.options.gpu:
        return fit_from(request, say)
    question = request._replace(options=replace(request.options, out="", html="", json=False))
    if question not in results:
        results[question] = fit_from(question, say)
    return results[question]


@pytest.fixture
def run_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FITGPT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fit, "fit_from", fit_once)
    Path("run.py").write_text(SMALL)

    def run_fit(*argv: str) -> FitOutput:
        code = main.main(["fit", *argv])
        return FitOutput(code, *capsys.readouterr())

    return run_fit


def test_the_output_has_given_and_chosen_settings_reasons_and_a_chart(run_fit: Any) -> None:
    output = run_fit(*TIGHT)
    assert output.code == 0
    for expected in ("does not fit as given; with these changes it does", "given chosen", "headroom", "tokens/s", "Why",
                     "Runners-up", "fastest run within this memory", "nothing was recorded on this GPU",
                     "candidates by closed forms",
                     "fitgpt fit run.py --gpu=4070 --budget=300MiB -o config/my_run.py"):
        assert expected in output.text
    assert "●" in output.out
    assert output.out.count("○") == 2  # drawn, and explained
    assert [line for line in output.out.splitlines() if len(line) > 100] == []


NOTES_77M = str(Path(__file__).parents[2] / "config" / "notes_77m.py")


def test_a_run_that_fits_stays_and_the_next_step_up_is_printed(run_fit: Any) -> None:
    output = run_fit(NOTES_77M, "--gpu=4070")
    document = json.loads(run_fit(NOTES_77M, "--gpu=4070", "--json").out)
    assert document["chosen"]["flags"] == []
    assert "fits as given, and nothing is faster by more than the estimate's error (±" in output.text
    price = document["step_up"]["needs_bytes"] - document["chosen"]["needs_bytes"]
    assert f"for {show_bytes(price)} more: {' '.join(document['step_up']['flags'])}" in output.text
    assert document["step_up"]["tokens_per_s"]["likely"] < (
        1 + document["speed_error"]) * document["chosen"]["tokens_per_s"]["likely"]


def test_marks_beyond_the_chart_are_not_in_its_key(run_fit: Any) -> None:
    assert "○" not in run_fit(NOTES_77M, "--gpu=4070", "--others=8GiB").out


def test_the_written_config_has_the_chosen_settings_and_reasons(run_fit: Any) -> None:
    output = run_fit(*TIGHT, "-o", "config/mine.py")
    assert "Wrote config/mine.py." in output.out
    assert "To train it: fitgpt train config/mine.py" in output.out
    text = Path("config/mine.py").read_text()
    config = build(RunConfig, walk(["config/mine.py"], RunConfig))
    original = build(RunConfig, walk(["run.py"], RunConfig))
    assert config.tokens_per_step == original.tokens_per_step
    assert config.learning_rate == original.learning_rate
    assert config.out_dir == "runs/small"
    assert config.budget == "300MiB"
    platform = platform_for(find("4070"))
    assert memory_use(resolve_run(config, platform), platform).needs <= 300 * MiB - 196 * MiB
    changed = {key: value for key, value in config.to_dict().items()
               if key in ("batch_size", "loss_chunk", "saved_activations", "offload")
               and value != original.to_dict()[key]}
    assert changed
    for key, value in changed.items():
        assert f"{key} = {value!r}  # was {original.to_dict()[key]!r}" in text
    assert text.startswith("# Fitted by `fitgpt fit` for RTX 4070, from run.py.")


def test_the_written_plan_is_one_that_train_takes_with_fallback_plans(run_fit: Any) -> None:
    run_fit(*TIGHT, "-o", "config/mine.py")
    document = json.loads(Path("config/mine.plan.json").read_text())
    assert {"schema", "config", "gpu", "budget", "forecast", "tokens_per_s", "ladder"} <= document.keys()
    assert document["schema"] == 2
    assert document["budget"]["budget"] == 300 * MiB
    assert set(document["ladder"][0]) == {"changes", "needs_bytes", "why"}
    needs = [each["needs_bytes"] for each in document["ladder"]]
    assert needs == sorted(needs, reverse=True)
    assert needs[0] < document["forecast"]["needs_bytes"]
    read = plan_file.read("config/mine.plan.json")
    assert read.card == "RTX 4070"
    assert read.needs == document["forecast"]["needs_bytes"] <= document["reserve_limit_bytes"]
    assert read.options["batch_size"] == document["config"]["batch_size"]
    assert read.fallback_plans is not None
    assert len(read.fallback_plans) == len(needs)
    document["config"]["learning_rate"] *= 2
    Path("config/mine.plan.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="its own checksum"):
        plan_file.read("config/mine.plan.json")
    Path("config/mine.plan.json").write_text(json.dumps({key: document[key] for key in document if key != "checksum"}))
    assert plan_file.read("config/mine.plan.json").options["learning_rate"] == document["config"]["learning_rate"]


def test_only_the_plan_is_written_to_a_json_file(run_fit: Any) -> None:
    run_fit(*TIGHT, "-o", "p.json")
    assert sorted(path.name for path in Path().iterdir()) == ["p.json", "run.py"]


def test_a_config_that_fit_did_not_write_is_not_replaced(run_fit: Any) -> None:
    output = run_fit(*TIGHT, "-o", "run.py")
    assert output.code == 2
    assert "did not write it" in output.err
    assert "-o run_fit.py" in output.err
    assert Path("run.py").read_text() == SMALL


def test_two_configs_in_one_folder_have_a_plan_each(run_fit: Any) -> None:
    run_fit(*TIGHT, "-o", "config/one.py")
    run_fit("run.py", "--gpu", "4070", "--budget", "2GiB", "-o", "config/two.py")
    assert sorted(path.name for path in Path("config").iterdir()) == [
        "one.plan.json", "one.py", "two.plan.json", "two.py"]
    budgets = [json.loads(Path(f"config/{name}.plan.json").read_text())["budget"]["budget"] for name in ("one", "two")]
    assert budgets == [300 * MiB, 2 * GiB]


@pytest.mark.parametrize(("file", "flags", "fix"), [
    ("mine.plan.json", ["-o", "mine.py"], "-o mine_fit.py"), ("p.json", ["-o", "p.json"], "-o p_fit.json"),
    ("page.html", ["--html", "page.html"], "--html page_fit.html")])
@pytest.mark.parametrize("content", ["", "not ours", '{"schema": 1}', "[" * 100_000, "<!doctype html>\n<p>mine</p>"],
                         ids=lambda text: text[:8])
def test_a_plan_or_page_that_fit_did_not_write_is_not_replaced(
        run_fit: Any, monkeypatch: pytest.MonkeyPatch, file: str, flags: list[str], fix: str, content: str) -> None:
    monkeypatch.setattr(fit, "fit_from", lambda *request: pytest.fail("rejected before the search"))
    Path(file).write_text(content)
    output = run_fit(*TIGHT, *flags)
    assert (output.code, output.out) == (2, "")
    assert f"{file} is there already, and `fitgpt fit` did not write it" in output.err
    assert fix in output.err
    assert Path(file).read_text() == content
    assert not Path("mine.py").exists()


def test_its_own_files_are_replaced_with_a_note(run_fit: Any) -> None:
    argv = [*TIGHT, "-o", "mine.py", "--html", "page.html"]
    run_fit(*argv)
    out = run_fit(*argv).out
    for file in ("mine.py", "mine.plan.json", "page.html"):
        assert f"Wrote {file} (it replaced the one that was there)." in out


def test_exit_code_1_and_suggestions_where_nothing_fits(run_fit: Any) -> None:
    output = run_fit("run.py", "--gpu", "4070", "--budget", "230MiB", "-o", "mine.py")
    assert output.code == 1
    assert "nothing fits: the minimum memory is" in output.text
    assert "--allow" in output.text
    assert "Nothing fits, so nothing was written." in output.out
    assert not Path("mine.py").exists()
    too_small = run_fit("run.py", "--gpu", "4070", "--budget", "90MiB")
    assert "CUDA itself takes 196.0 MiB, which leaves nothing" in too_small.text
    assert "┤" not in too_small.out  # there is no memory to draw
    assert "no memory of the GPU is left" in run_fit("run.py", "--gpu", "4070", "--others=11GiB", "--leave=1GiB").text
    caught = run_fit("run.py", "--gpu", "4070", "--leave", "20GiB")
    assert (caught.code, "--leave 20GiB leaves the run nothing: CUDA offers 11.65 GiB" in caught.err) == (2, True)


def test_the_result_is_printed_even_if_a_file_cannot_be_written(run_fit: Any) -> None:
    Path("file").write_text("")
    output = run_fit(*TIGHT, "-o", "file/mine.py")
    assert output.code == 7
    assert "Runners-up" in output.out
    assert "mine.py" in output.err
    assert "Wrote" not in output.out
    assert "To train" not in output.out


def test_the_written_config_has_no_rounding_errors_of_floats(run_fit: Any) -> None:
    Path("run.py").write_text(f"{SMALL}learning_rate = 3e-4\nmin_lr = learning_rate / 10\n")
    assert run_fit(*TIGHT, "-o", "mine.py").code == 0
    assert "min_lr = 3e-05\n" in Path("mine.py").read_text()
    assert json.loads(Path("mine.plan.json").read_text())["config"]["min_lr"] == 3e-05


def test_no_line_starts_with_a_percent_sign(run_fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in range(50, 80, 3):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = run_fit("run.py", "--gpu", "4070").out.splitlines()
        assert not [line for line in lines if line.lstrip().startswith("%")]


def test_json_has_the_whole_result(run_fit: Any) -> None:
    document = json.loads(run_fit(*TIGHT, "--json", "-o", "mine.py").out)
    assert document["fits"]
    assert document["wrote"] == ["mine.py", "mine.plan.json"]
    assert document["chosen"]["needs_bytes"] + document["chosen"]["headroom_bytes"] == document["reserve_limit_bytes"]
    assert not document["asked"]["fits"]
    assert document["decisions"][0].keys() == {"changes", "why"}
    assert document["frontier"][0].keys() == {"bytes", "tokens_per_s"}
    assert document["considered"] > 100
    caught = run_fit("run.py", "--gpu", "4070", "--budget", "230MiB", "--json")
    assert caught.code == 1
    assert json.loads(caught.out)["chosen"] is None
    assert json.loads(caught.out)["least"]["needs_bytes"] > 34 * MiB


def test_the_page_has_the_frontier_and_escapes_markup(run_fit: Any) -> None:
    Path("<b>x.py").write_text(SMALL)
    assert run_fit("<b>x.py", *TIGHT[1:], "--html", "page.html").code == 0
    page = Path("page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Tokens per second against memory, MiB" in page  # a run of less than 2 GiB
    assert "<h2>Runners-up</h2>" in page
    assert "may be reserved: the dotted line" in page
    assert "candidates by closed forms" in page
    assert "<b>x.py" not in page
    assert "&lt;b&gt;x.py" in page
    assert run_fit("run.py", "--gpu", "4070", "--goal=smallest-memory", "--html", "least.html").code == 0
    assert re.search(r"<p>The minimum memory is [\d.]+ MiB", Path("least.html").read_text())


@pytest.mark.parametrize(("argv", "code", "message"), [
    (["run.py", "--gpu", "4070", "--allow", "losy"], 2, "Did you mean --allow lossy?"),
    (["run.py", "--gpu", "4070", "--goal", "fast"], 2, "goal is one of"),
    (["run.py", "--gpu", "4070", "--measure"], 2, "Leave out one of them"),
    (["run.py", "--measure"], 5, "There is no GPU here to measure on"),
    (["run.py"], 2, "There is no GPU here"),
    (["run.py", "--gpu", "4070", "--budget", "100GiB"], 2, "is more than the"),
    (["run.py", "--gpu", "4070", "--html", "nowhere/\n"], 2, "contains a line break"),
    (["missing.py", "--gpu", "4070"], 2, "missing.py"),
    (["run.py", "--gpu", "4070", "-o", "."], 2, "-o my_run.py"),
    (["run.py", "--gpu", "4070", "-o", "mine"], 2, "-o mine.py"),
    (["run.py", "--gpu", "4070", "--html", "."], 2, "--html . is a folder"),
    (["run.py", "--gpu", "4070", "-o", "mine.py", "--html", "./mine.py"], 2, "-o and --html both write mine.py"),
])
def test_mistakes_give_a_message_and_an_exit_code(run_fit: Any, monkeypatch: pytest.MonkeyPatch, argv: list[str],
                                                  code: int, message: str) -> None:
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey(reason="no driver"))
    output = run_fit(*argv)
    assert output.code == code
    assert message in output.err
    assert "Traceback" not in output.err


def test_the_goal_smallest_memory(run_fit: Any) -> None:
    output = run_fit(*TIGHT, "--goal", "smallest-memory")
    assert output.code == 0
    assert "the minimum memory is" in output.text


def test_the_goal_largest_model_assumes_cpu_ram(run_fit: Any) -> None:
    output = run_fit("run.py", "--gpu", "4070", "--budget", "260MiB", "--goal", "largest-model")
    assert output.code == 0
    assert "the largest model that trains there." in output.text
    assert "The machine is assumed to have 32.00 GiB of CPU RAM" in output.text


def test_only_available_cpu_ram_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 10 * GiB)
    target = named("4070", others=None, budget=None)
    assert fit_target(target, RunConfig(budget="9GiB"), is_here=True).host_bytes == 8 * GiB
    elsewhere = fit_target(target, RunConfig(), is_here=False)
    assert elsewhere.host_bytes == int(host.SHARE * fit_planning.ASSUMED_HOST)
    monkeypatch.setattr(host, "available_memory", lambda: None)
    assert fit_target(target, RunConfig(budget="9GiB"), is_here=True).host_bytes is None


def test_fallback_plans_stay_within_the_cpu_ram(run_fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def offloading() -> list[Any]:
        run_fit("run.py", "--gpu", "4070", "--budget", "9GiB", "-o", "p.json")
        plans = json.loads(Path("p.json").read_text())["ladder"]
        return [each for each in plans if each["changes"].get("offload", "none") != "none"]

    assert offloading()
    monkeypatch.setattr(fit_planning, "ASSUMED_HOST", 1 * MiB)
    assert not offloading()


def test_leave_is_subtracted_from_the_budget(run_fit: Any) -> None:
    document = json.loads(run_fit("run.py", "--gpu", "4070", "--leave", "11GiB", "--json").out)
    assert document["reserve_limit_bytes"] == (11930 - 11 * 1024 - 196) * MiB


def reading(*processes: GpuProcess) -> GpuReading:
    return GpuReading(0, "NVIDIA GeForce RTX 4070", "GPU-1", "8.9", total_bytes=12282 * MiB, free_bytes=11 * GiB,
                      used_bytes=GiB, reserved_bytes=352 * MiB, processes=processes)


@pytest.mark.parametrize(("owner", "name", "keeps_small"), [
    ("another", "python3.11", True), ("own", "python3.11", False), ("another", "Xorg", False)])
def test_the_micro_batch_is_not_raised_on_a_gpu_that_another_user_uses(
        run_fit: Any, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, keeps_small: bool) -> None:
    seen = Survey((reading(*nvidia.identified([(77, name, GiB)], None)),))
    monkeypatch.setattr(nvidia, "survey", lambda env=None: seen)
    monkeypatch.setattr(fit_planning, "is_own_process", lambda pid: owner == "own")
    document = json.loads(run_fit("run.py", "--json").out)
    assert any("Another user computes" in note for note in document["notes"]) == keeps_small
    batches = [each["config"]["batch_size"] for each in document["runners_up"]]
    assert (max(batches) <= 4) == keeps_small
    if keeps_small:
        with_budget = json.loads(run_fit("run.py", "--budget", "9GiB", "--json").out)
        assert max(each["config"]["batch_size"] for each in with_budget["runners_up"]) > 4


def test_own_processes_are_recognised() -> None:
    assert fit_planning.is_own_process(os.getpid())
    assert not fit_planning.is_own_process(2**22 + 1)


def test_measure_chooses_the_fastest_by_timing(run_fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey((reading(),)))
    caps = []

    def timed(process: TimingProcess, config: RunConfig, cap: int) -> float | str:
        caps.append(cap)
        return 1000.0 * (2 if config.batch_size == 16 else 1)

    monkeypatch.setattr(TimingProcess, "time", timed)
    document = json.loads(run_fit("run.py", "--measure", "--json").out)
    assert document["chosen"]["config"]["batch_size"] == 16
    assert document["chosen"]["tokens_per_s"]["measured"] == 2000.0
    assert {option for decision in document["decisions"] for option in decision["changes"]} == {
        flag.partition("=")[0].removeprefix("--") for flag in document["chosen"]["flags"]}
    assert set(caps) == {document["reserve_limit_bytes"]}
    again = json.loads(run_fit("run.py", "--json").out)  # what was measured is kept, and used without --measure
    assert again["chosen"]["config"]["batch_size"] == 16
    assert "measured here on" in again["chosen"]["tokens_per_s"]["basis"]


def test_free_savers_are_turned_on_with_a_reason(run_fit: Any) -> None:
    plain, off = (json.loads(run_fit(*TIGHT, *more, "--json").out)
                  for more in ((), ("--gradients=kept", "--states=late")))
    more = {"--gradients=freed", "--states=early"}
    assert set(off["chosen"]["flags"]) == {*plain["chosen"]["flags"], *more}
    assert {option for decision in off["decisions"] for option in decision["changes"]} >= {"gradients", "states"}


def test_free_savers_alone_do_not_change_a_run_that_fits(run_fit: Any) -> None:
    kept = json.loads(run_fit("run.py", "--gpu=4070", "--batch_size=16", "--gradient_accumulation_steps=1",
                              "--gradients=kept", "--states=late", "--json").out)
    assert kept["asked"]["fits"]
    assert kept["chosen"]["flags"] == []


@pytest.mark.parametrize("question", [
    ["--budget=300MiB", "--goal=smallest-memory"], ["--budget=260MiB", "--goal=largest-model"], ["--budget=230MiB"]])
def test_free_savers_are_turned_on_for_every_goal(run_fit: Any, question: list[str]) -> None:
    plain, off = (json.loads(run_fit("run.py", "--gpu", "4070", *question, *more, "--json").out)
                  for more in ((), ("--gradients=kept", "--states=late")))
    plain, off = ((output["chosen"] or output["least"]) for output in (plain, off))
    assert off["needs_bytes"] == plain["needs_bytes"]
    assert set(off["flags"]) == {*plain["flags"], "--gradients=freed", "--states=early"}


def test_eval_only_is_not_fitted(run_fit: Any) -> None:
    output = run_fit("run.py", "--gpu", "4070", "--eval_only")
    assert output.code == 2
    assert "fitgpt plan" in output.err
    config = RunConfig(fit=True, eval_only=True)
    assert for_train(config) == (
        replace(config, fit=False), ["fit: nothing to choose, because nothing is trained."])


def test_the_function_returns_what_the_command_prints(run_fit: Any) -> None:
    printed = json.loads(run_fit(*TIGHT, "--allow=residual", "--json").out)
    result = fitgpt.fit("run.py", gpu=4070, budget="300MiB", allow="residual")
    assert result.chosen is not None
    assert list(result.chosen.flags) == printed["chosen"]["flags"]
    assert list(result.notes) == printed["notes"]
    assert fitgpt.fit({"n_layer": 1, "vocab_size": 65, "gradient_accumulation_steps": 1}, gpu="4070",
                      goal="smallest-memory").least is not None
    for wrong in ({"bach_size": 8}, {"json": True}, {"goal": "fast"}, {"allow": "losy"}):
        with pytest.raises(UsageError):
            fitgpt.fit("run.py", gpu="4070", **wrong)


def test_neither_torch_nor_numpy_is_loaded(run_fit: Any) -> None:
    script = ("import sys, fitgpt.commands.main\nassert fitgpt.commands.main.main(['fit', *sys.argv[1:]]) == 0\n"
              "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script, *TIGHT], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_train_with_fit_uses_the_chosen_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey((reading(),)))
    monkeypatch.chdir(tmp_path)
    small = RunConfig(n_layer=2, n_head=4, n_embd=256, block_size=256, vocab_size=5000)
    chosen, notes = for_train(replace(small, fit=True, batch_size=16, gradient_accumulation_steps=1, budget="300MiB"))
    assert not chosen.fit
    assert chosen.batch_size < 16
    assert chosen.batch_size * chosen.gradient_accumulation_steps == 16
    assert notes
    assert all("fit: " in note and "=" in note for note in notes)
    fast = replace(small, batch_size=16, gradient_accumulation_steps=1)
    kept, notes = for_train(replace(fast, fit=True))
    assert kept == fast
    assert "nothing is faster by more than the estimate's error" in notes[0]


def test_train_with_fit_keeps_its_settings_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey(reason="no driver"))
    said = RunConfig(fit=True, batch_size=4)
    chosen, notes = for_train(said)
    assert chosen == RunConfig(batch_size=4)
    assert "no NVIDIA GPU" in notes[0]


def test_the_margin_is_shown_with_the_budget_that_uses_it(run_fit: Any) -> None:
    output = run_fit("run.py", "--gpu", "4070")
    assert "margin 128.0 MiB of the GPU are left free, besides the headroom" in output.text
    assert "--budget=11930MiB uses them too" in output.text
    document = json.loads(run_fit("run.py", "--gpu", "4070", "--json").out)
    assert document["margin_bytes"] == 128 * MiB
    assert document["reserve_limit_bytes"] == (11930 - 128) * MiB - document["outside_bytes"]
    budgeted = run_fit("run.py", "--gpu", "4070", "--budget", "11930MiB")
    assert "margin" not in budgeted.text
    assert json.loads(run_fit("run.py", "--gpu", "4070", "--budget", "11930MiB", "--json").out)["margin_bytes"] == 0


def test_the_suggested_command_works(run_fit: Any) -> None:
    output = run_fit("run.py", "--gpu", "RTX 4070", "--budget", "230MiB")
    assert output.code == 1
    command = output.out.splitlines()[-1].removeprefix("This fits: ")
    again = run_fit(*shlex.split(command)[2:])
    assert again.code == 0
    assert Path("config/my_run.py").exists()


def test_train_with_fit_suggests_what_fits_where_nothing_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey((reading(),)))
    monkeypatch.chdir(tmp_path)
    said = RunConfig(fit=True, n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=5000, budget="200MiB")
    with pytest.raises(DoesNotFit) as caught:
        for_train(said)
    assert "the smallest memory this run can be trained in is" in str(caught.value.what)
    assert "It fits with --budget=" in str(caught.value.fix)


def test_gpus_with_an_estimated_context_keep_a_margin() -> None:
    target = named("4070", others=None, budget=None)
    assert target.card is not None
    assert target.card.outside_src != "seen"
    budget = with_margin(target)
    assert budget.reserve_limit == target.budget.reserve_limit - OUTSIDE_ERROR
    assert budget.outside == target.budget.outside
    measured = named("h200", others=None, budget=None)
    assert with_margin(measured) == measured.budget
