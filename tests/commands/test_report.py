"""`fitgpt report`: a run folder, whatever is in it, becomes a page."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands.main import main
from fitgpt.commands.report import report, run_names, with_timeline
from fitgpt.config.command_options import ReportOptions
from fitgpt.core.errors import UsageError
from fitgpt.core.units import GiB
from fitgpt.runs import metrics
from fitgpt.runs.record import read_run, record_of
from fitgpt.show.report_page import report_page
from tests.html_outline import HOSTILE_TEXTS, Outline, chart_data
from tests.report_rows import FACTS, PLAN, evaluation, page_of, step, write_run

# ---- reading


def test_a_record_contains_every_step_and_evaluation_in_order(tmp_path: Path) -> None:
    run = write_run(tmp_path, [FACTS, evaluation(0), *(step(n, loss=3 - n / 10) for n in range(5)), evaluation(5)])
    record = read_run(str(run))
    assert [each.loss for each in record.steps] == pytest.approx([3.0, 2.9, 2.8, 2.7, 2.6])
    assert [each.step for each in record.evaluations] == [0, 5]
    assert record.unreadable == ()
    assert record.config == FACTS["config"]
    assert record.unusual == ("n_layer", "learning_rate", "out_dir")


def test_broken_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path, [FACTS, step(0), step(1)], 'no json\n[1, 2]\n\n{"kind": "step", "st')
    record = read_run(str(run))
    assert len(record.steps) == 2
    assert record.unreadable == ("3 lines of metrics.jsonl are broken or half-written, and skipped.",)
    assert "3 lines of metrics.jsonl" in report_page([record], "fitgpt")


@pytest.mark.parametrize("depth", [100, 700, 100_000])
def test_deeply_nested_json_is_no_crash(tmp_path: Path, depth: int) -> None:
    run = write_run(tmp_path / "run", [FACTS, step(0)], f'{{"kind": "note", "text": {"[" * depth}{"]" * depth}}}\n')
    assert main(["report", str(run), "-o", str(tmp_path / "x.html")]) == 0


def test_resumes_warnings_and_skipped_steps_are_events() -> None:
    rows = [FACTS, step(0), step(10), {"kind": "warning", "text": "The disk is full."}, FACTS | {"start_step": 11},
            step(20, skipped=2, loss_scale=512.0), step(30, skipped=2), step(40, skipped=3)]
    events = record_of("x", rows, None).events
    assert [(event.step, event.kind) for event in events] == [
        (0, "note"), (10, "warning"), (11, "resumed"), (20, "skipped"), (40, "skipped")]
    assert "2 steps were skipped" in events[3].text
    assert "the loss scale is now 512" in events[3].text
    assert "1 step was skipped" in events[4].text


def test_rows_of_unknown_kinds_are_events() -> None:
    html = page_of([FACTS, {"kind": "oom", "step": 7, "text": "Evaluation goes on with 4 windows at a time."},
                    {"kind": "stepped_down", "step": 8, "plan": "saved_activations=input"}])
    assert "Evaluation goes on with 4 windows at a time." in html
    assert "stepped_down" in html
    assert "plan saved_activations=input" in html


def test_samples_are_shown() -> None:
    html = page_of([FACTS, {"kind": "sample", "step": 5, "text": "Once <upon>"},
                    {"kind": "sample", "step": 6, "text": "a"}, {"kind": "sample", "text": 7}])
    assert "Once &lt;upon&gt;" in html
    assert html.count('<pre class="sample"') == 2


def test_memory_is_shown_beside_the_plan() -> None:
    html = page_of([FACTS, PLAN, step(0), step(1), evaluation(2, memory={"peak_reserved": GiB})])
    assert "planned 5.00 GiB" in html
    assert "limit 11.00 GiB" in html
    assert "-20.00%" in html  # 4 GiB were reserved where 5 were planned
    assert ">checkpoint</th>" not in html
    assert ">training</th>" in html
    assert "logits</span> <b>2.00 GiB" in html


def test_measured_phases_replace_the_peaks_of_step_reports() -> None:
    measured = {"kind": "plan_measured", "phases": {"train": {"allocated_bytes": GiB, "reserved_bytes": 5 * GiB}}}
    assert "+0.00%" in page_of([FACTS, PLAN, measured, step(0)])


def test_options_are_shown_without_rounding_errors() -> None:
    page = page_of([{**FACTS, "config": {"min_lr": 6e-4 / 10, "dropout": 0.0}}, step(0)]).split("<h2>Config")[1]
    assert "6e-05" in page
    assert "5.99999" not in page
    assert "<dd>0.0</dd>" in page


def test_malformed_owners_are_skipped() -> None:
    plan = {"kind": "plan", "owners_at_peak": [{"owner": "casts", "nbytes": 7}, {"owner": "data"}, 5, None]}
    assert record_of("x", [plan], None).owners_at_peak == {"casts": 7}


def test_a_run_on_a_known_gpu_has_the_tape_of_one_step() -> None:
    config = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=4, gradient_accumulation_steps=2,
                  vocab_size=512, dtype="bfloat16", compile=False)
    rows = [FACTS | dict(device="cuda:0", device_name="NVIDIA GeForce RTX 4070", config=config), step(0)]
    record = with_timeline(record_of("x", rows, None))
    assert record.timeline is not None
    assert "One step by owner" in report_page([record], "fitgpt")
    for change in (dict(device="cpu"), dict(device_name="A card of the future"), dict(config={"n_layer": -1}),
                   dict(config=config | {"n_layer": 9999})):
        assert with_timeline(record_of("x", [rows[0] | change], None)).timeline is None


# ---- folders that are not what they should be


def test_a_folder_without_a_run_is_an_error_with_a_command_that_works(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_run(str(tmp_path))
    assert "contains no run" in caught.value.what
    write_run(tmp_path / "inner", [FACTS])
    with pytest.raises(UsageError) as caught:
        read_run(str(tmp_path))
    assert caught.value.fix == f"fitgpt report {tmp_path / 'inner'}"
    with pytest.raises(UsageError) as caught:
        read_run(str(tmp_path / "inner" / "metrics.jsonl"))
    assert caught.value.fix == f"fitgpt report {tmp_path / 'inner'}"
    with pytest.raises(UsageError, match="does not exist"):
        read_run(str(tmp_path / "absent"))


def test_an_empty_run_gives_an_empty_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    html = report_page([read_run(str(tmp_path))], "fitgpt")
    assert html.count("Nothing recorded yet.") == 4
    assert "not evaluated yet" in html
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints").mkdir()
    assert "metrics.jsonl is missing" in report_page([read_run(str(tmp_path))], "fitgpt")


def test_with_a_damaged_run_json_the_config_is_taken_from_the_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path, [FACTS, step(0)])
    (run / "run.json").write_text('{"config": ', encoding="utf-8")
    record = read_run(str(run))
    assert record.config == FACTS["config"]
    assert "run.json is damaged" in record.unreadable[0]


def test_a_run_without_an_evaluation_shows_its_steps() -> None:
    html = page_of([FACTS, step(0), step(1)])
    assert "not evaluated yet" in html
    assert len(chart_data(html)["series"]) == 1


def test_nonfinite_losses_do_not_break_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, [FACTS, step(0), step(1, loss="NaN"), step(2, loss="Infinity"), step(3),
                               evaluation(3, val=math.inf)])
    record = read_run(str(run))
    assert math.isnan(record.steps[1].loss)
    html = report_page([record], "fitgpt")
    Outline(html)
    assert "3 values are not finite" in html
    assert "not evaluated yet" in html  # no finite validation loss, hence no best one


def anything(rng: random.Random, depth: int = 0) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: None, lambda: True, lambda: -1, lambda: 0, lambda: 10**400, lambda: 2**63, lambda: 1.5,
        lambda: math.nan, lambda: math.inf, lambda: 1e308, lambda: -1e308, lambda: 1e-308,
        lambda: rng.choice(HOSTILE_TEXTS), lambda: "x" * 20_000, lambda: rng.randrange(100)]
    if depth < 3:
        kinds += [lambda: [anything(rng, depth + 1) for _ in range(rng.randrange(4))],
                  lambda: {rng.choice([*HOSTILE_TEXTS, "split", "mean", "peak_reserved", "train", "owner"]):
                           anything(rng, depth + 1) for _ in range(rng.randrange(4))}]
    return rng.choice(kinds)()


@pytest.mark.parametrize("seed", range(25))
def test_no_value_breaks_or_escapes_the_page(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [FACTS, step(1), evaluation(2), PLAN, PLAN | {"kind": "plan_measured"}, {"kind": "save", "step": 3},
              {"kind": "sample", "step": 4, "text": ""}, {"kind": "warning", "text": ""}, {"kind": ""}]
    rows = [{key: value if rng.random() < 0.5 else anything(rng) for key, value in rng.choice(shapes).items()}
            for _ in range(40)]
    html = report_page([record_of(rng.choice(HOSTILE_TEXTS), rows, None)], "fitgpt")
    html.encode("utf-8")
    outline = Outline(html)
    assert not {tag for tag, _ in outline.tags} & {"img", "iframe", "object", "form"}
    assert all(attributes["href"].startswith("data:text/csv;") for tag, attributes in outline.tags if tag == "a")
    assert [attributes for _, attributes in outline.tags if any(name.startswith("on") for name in attributes)] == []
    assert len(html) < 2_000_000


def test_the_page_of_100_000_steps_is_small_and_keeps_every_spike(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = (f'{{"kind": "step", "step": {n}, "loss": {61.5 if n == 54_321 else rng.gauss(3, 0.1)}, "lr": 0.001, '
             f'"tokens_per_s": {rng.gauss(1e5, 1e3)}, "memory": {{"peak_reserved": {GiB + n}}}}}\n'
             for n in range(100_000))
    run = write_run(tmp_path / "long", [FACTS], "".join(lines))
    assert report(ReportOptions(runs=(str(run),), out=str(tmp_path / "long.html"))) == 0
    html = (tmp_path / "long.html").read_text(encoding="utf-8")
    assert len(html.encode()) < 700_000
    assert "Spikes reach 61.50: marked at the edge." in html
    assert 61.5 in chart_data(html)["series"][0]["high"]


def test_of_a_very_long_file_some_steps_are_read_with_a_note(tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LONG_FILE", 2**20)
    monkeypatch.setattr(metrics, "END_BYTES", 2**12)
    lines = (f'{{"kind": "step", "step": {n}, "loss": 3.0, "text": "{"x" * 100}"}}\n' for n in range(40_000))
    run = write_run(tmp_path / "long", [FACTS], "".join(lines) + '{"kind": "warn')
    record = read_run(str(run))
    assert 5_000 < len(record.steps) < 10_000
    assert [step.step for step in record.steps[-20:]] == [*range(39_980, 40_000)]
    assert record.facts is not None
    assert any("every 6th step was read" in line for line in record.unreadable)
    assert any("Line 40,002 of metrics.jsonl is broken" in line for line in record.unreadable)


# ---- several runs


def test_two_runs_share_charts_and_a_table_of_differences() -> None:
    other = FACTS | {"config": {"n_layer": 4, "learning_rate": 1e-3, "only_here": "yes"}}
    records = [record_of("a", [FACTS, step(0), step(1), evaluation(2)], None),
               record_of("b", [other, step(0), step(1), evaluation(2, 3.1)], None)]
    html = report_page(records, "fitgpt")
    Outline(html)
    data = chart_data(html)
    assert [one["name"] for one in data["series"]] == ["a, training", "a, validation", "b, training", "b, validation"]
    assert data["xName"] == "step"
    differing = html.split("Config: differences")[1].split("<details>")[0]
    assert ">n_layer</th><td>2</td><td>4</td>" in differing
    assert ">only_here</th><td>–</td><td>yes</td>" in differing
    assert "learning_rate" not in differing


def test_runs_with_different_batch_sizes_are_compared_by_tokens() -> None:
    records = [record_of("a", [FACTS, step(0), step(10)], None),
               record_of("b", [FACTS | {"tokens_per_step": 2000}, step(0), step(10)], None)]
    data = chart_data(report_page(records, "fitgpt"))
    assert data["xName"] == "tokens"
    assert [one["x"][-1] for one in data["series"]] == [10_000, 20_000]


def test_losses_at_different_block_sizes_have_a_note_and_no_difference() -> None:
    def page_with(block: int) -> str:
        other = evaluation(2, losses=[dict(split="val", mean=1.0, stderr=0.1, windows=8, block=block)])
        return report_page([record_of("a", [FACTS, evaluation(2)], None), record_of("b", [FACTS, other], None)],
                           "fitgpt")

    assert "do not compare" in page_with(128)
    assert "Difference in validation loss" not in page_with(128)
    assert "do not compare" not in page_with(64)
    assert "Difference in validation loss" in page_with(64)


def test_runs_are_named_by_the_part_of_the_path_that_differs(tmp_path: Path) -> None:
    assert run_names([str(tmp_path / "a"), str(tmp_path / "b")]) == ["a", "b"]
    assert run_names([str(tmp_path / "one" / "run"), str(tmp_path / "two" / "run")]) == ["one/run", "two/run"]
    with pytest.raises(UsageError, match="twice"):
        run_names([str(tmp_path), f"{tmp_path}/."])


def test_more_runs_than_colours_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 6 runs"):
        report(ReportOptions(runs=tuple(f"r{n}" for n in range(7)), out=str(tmp_path / "x.html")))


# ---- the command


def test_only_a_report_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, target = write_run(tmp_path / "run", [FACTS, step(0)]), tmp_path / "report.html"
    for _ in range(2):
        assert main(["report", str(run), "-o", str(target)]) == 0
    assert "one file that opens in any browser" in capsys.readouterr().out
    target.write_text("my notes", encoding="utf-8")
    assert main(["report", str(run), "-o", str(target)]) == 2
    assert target.read_text(encoding="utf-8") == "my notes"
    assert f"-o {tmp_path / 'report_report.html'}" in capsys.readouterr().err  # a name that is free
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    assert f"-o {tmp_path / 'report.html'}" in capsys.readouterr().err
    assert main(["report", str(run), "-o", str(tmp_path / "absent" / "x.html")]) == 2
    assert main(["report", str(run), "-o", "/dev/null"]) == 2
    assert main(["report"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_report_loads_no_torch_and_no_numpy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [FACTS, step(0), evaluation(1)])
    script = ("import sys, fitgpt.commands.main\nassert fitgpt.commands.main.main(['report', *sys.argv[1:]]) == 0\n"
              "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script, str(run), "-o", str(tmp_path / "x.html")],
                           capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
