"""`fitgpt report`: whatever a run folder holds becomes a page."""

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
from fitgpt.commands.report import read_run, record_of, report, run_names
from fitgpt.config.command_options import ReportOptions
from fitgpt.core.errors import UsageError
from fitgpt.core.units import GiB
from fitgpt.runs import metrics
from fitgpt.show.report import report_page
from report_rows import FACTS, PLAN, evaluation, page_of, step, write_run
from test_charts import HOSTILE, Outline, data_of

# ---- reading


def test_a_record_holds_every_step_and_evaluation_in_order(tmp_path: Path) -> None:
    run = write_run(tmp_path, [FACTS, evaluation(0), *(step(n, loss=3 - n / 10) for n in range(5)), evaluation(5)])
    record = read_run(str(run))
    assert [each.loss for each in record.steps] == pytest.approx([3.0, 2.9, 2.8, 2.7, 2.6])
    assert [each.step for each in record.evaluations] == [0, 5]
    assert record.unreadable == ()
    assert record.config == FACTS["config"]
    assert record.unusual == ("n_layer", "learning_rate", "out_dir")


def test_broken_and_half_written_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path, [FACTS, step(0), step(1)], 'no json\n[1, 2]\n\n{"kind": "step", "st')
    record = read_run(str(run))
    assert len(record.steps) == 2
    assert record.unreadable == ("3 lines of metrics.jsonl are broken or half-written, and passed over.",)
    assert "3 lines of metrics.jsonl" in report_page([record], "fitgpt")


@pytest.mark.parametrize("depth", [100, 700, 100_000])
def test_a_line_nested_as_deep_as_can_be_is_no_crash(tmp_path: Path, depth: int) -> None:
    run = write_run(tmp_path / "run", [FACTS, step(0)], f'{{"kind": "note", "text": {"[" * depth}{"]" * depth}}}\n')
    assert main(["report", str(run), "-o", str(tmp_path / "x.html")]) == 0


def test_a_resume_a_warning_and_skipped_steps_are_told_at_their_steps() -> None:
    rows = [FACTS, step(0), step(10), {"kind": "warning", "text": "The disk is full."}, FACTS | {"start_step": 11},
            step(20, skipped=2, loss_scale=512.0), step(30, skipped=2), step(40, skipped=3)]
    events = record_of("x", rows, None).events
    assert [(event.step, event.kind) for event in events] == [
        (0, "note"), (10, "warning"), (11, "resumed"), (20, "skipped"), (40, "skipped")]
    assert "2 steps were skipped" in events[3].text
    assert "the loss scale is now 512" in events[3].text
    assert "1 step was skipped" in events[4].text


def test_kinds_of_lines_nobody_foresaw_are_shown_as_they_are() -> None:
    html = page_of([FACTS, {"kind": "oom", "step": 7, "text": "Evaluation goes on with 4 windows at a time."},
                    {"kind": "stepped_down", "step": 8, "plan": "recompute=input"}])
    assert "Evaluation goes on with 4 windows at a time." in html
    assert "stepped_down" in html
    assert "plan recompute=input" in html


def test_what_the_model_wrote_is_shown() -> None:
    html = page_of([FACTS, {"kind": "sample", "step": 5, "text": "Once <upon>"},
                    {"kind": "sample", "step": 6, "text": "a"}, {"kind": "sample", "text": 7}])
    assert "Once &lt;upon&gt;" in html
    assert html.count('<pre class="sample">') == 2


def test_memory_is_shown_against_the_plan() -> None:
    html = page_of([FACTS, PLAN, step(0), step(1), evaluation(2, memory={"peak_reserved": GiB})])
    assert "planned 5.00 GiB" in html
    assert "limit 11.00 GiB" in html
    assert "-20.00%" in html  # 4 GiB were reserved where 5 were planned
    assert "saving" not in html
    assert "logits</span> <b>2.00 GiB" in html


def test_what_the_guard_measured_goes_before_what_the_log_says() -> None:
    measured = {"kind": "plan_measured", "phases": {"train": {"allocated_bytes": GiB, "reserved_bytes": 5 * GiB}}}
    assert "+0.00%" in page_of([FACTS, PLAN, measured, step(0)])


def test_a_knob_that_a_config_worked_out_is_shown_as_it_was_meant() -> None:
    page = page_of([{**FACTS, "config": {"min_lr": 6e-4 / 10, "dropout": 0.0}}, step(0)])
    assert "6e-05" in page
    assert "5.99999" not in page
    assert "<dd>0.0</dd>" in page


def test_owners_that_are_none_are_passed_over() -> None:
    plan = {"kind": "plan", "owners_at_peak": [{"owner": "casts", "nbytes": 7}, {"owner": "data"}, 5, None]}
    assert record_of("x", [plan], None).owners_at_peak == {"casts": 7}


def test_a_run_on_a_known_card_has_the_tape_of_its_step_drawn() -> None:
    config = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=4, gradient_accumulation_steps=2,
                  vocab_size=512, dtype="bfloat16", compile=False)
    rows = [FACTS | dict(device="cuda:0", device_name="NVIDIA GeForce RTX 4070", config=config), step(0)]
    record = record_of("x", rows, None)
    assert record.timeline is not None
    assert "One step by owner" in report_page([record], "fitgpt")
    for change in (dict(device="cpu"), dict(device_name="A card of the future"), dict(config={"n_layer": -1}),
                   dict(config=config | {"n_layer": 9999})):
        assert record_of("x", [rows[0] | change], None).timeline is None


# ---- folders that are not what they should be


def test_a_folder_that_is_no_run_is_refused_with_a_command_that_works(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_run(str(tmp_path))
    assert "holds no run" in caught.value.what
    write_run(tmp_path / "inner", [FACTS])
    with pytest.raises(UsageError) as caught:
        read_run(str(tmp_path))
    assert caught.value.fix == f"fitgpt report {tmp_path / 'inner'}"
    with pytest.raises(UsageError) as caught:
        read_run(str(tmp_path / "inner" / "metrics.jsonl"))
    assert caught.value.fix == f"fitgpt report {tmp_path / 'inner'}"
    with pytest.raises(UsageError, match="not there"):
        read_run(str(tmp_path / "absent"))


def test_a_run_that_has_recorded_nothing_yet_is_a_page_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    html = report_page([read_run(str(tmp_path))], "fitgpt")
    assert html.count("Nothing recorded yet.") == 5
    assert "not evaluated yet" in html
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints").mkdir()
    assert "metrics.jsonl is missing" in report_page([read_run(str(tmp_path))], "fitgpt")


def test_a_damaged_run_json_is_said_and_the_config_taken_from_the_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path, [FACTS, step(0)])
    (run / "run.json").write_text('{"config": ', encoding="utf-8")
    record = read_run(str(run))
    assert record.config == FACTS["config"]
    assert "run.json is damaged" in record.unreadable[0]


def test_a_run_without_an_evaluation_shows_its_steps() -> None:
    html = page_of([FACTS, step(0), step(1)])
    assert "not evaluated yet" in html
    assert len(data_of(html)["series"]) == 1


def test_losses_that_are_not_finite_do_not_break_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, [FACTS, step(0), step(1, loss="NaN"), step(2, loss="Infinity"), step(3),
                               evaluation(3, val=math.inf)])
    record = read_run(str(run))
    assert math.isnan(record.steps[1].loss)
    html = report_page([record], "fitgpt")
    Outline(html)
    assert "3 values are not finite" in html
    assert "not evaluated yet" in html  # no finite validation loss, hence no best one


def anything(dice: random.Random, depth: int = 0) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: None, lambda: True, lambda: -1, lambda: 0, lambda: 10**400, lambda: 2**63, lambda: 1.5,
        lambda: math.nan, lambda: math.inf, lambda: 1e308, lambda: -1e308, lambda: 1e-308,
        lambda: dice.choice(HOSTILE), lambda: "x" * 20_000, lambda: dice.randrange(100)]
    if depth < 3:
        kinds += [lambda: [anything(dice, depth + 1) for _ in range(dice.randrange(4))],
                  lambda: {dice.choice([*HOSTILE, "split", "mean", "peak_reserved", "train", "owner"]):
                           anything(dice, depth + 1) for _ in range(dice.randrange(4))}]
    return dice.choice(kinds)()


@pytest.mark.parametrize("seed", range(25))
def test_no_value_of_any_kind_breaks_the_page_or_gets_out_of_it(seed: int) -> None:
    dice = random.Random(seed)
    shapes = [FACTS, step(1), evaluation(2), PLAN, PLAN | {"kind": "plan_measured"}, {"kind": "save", "step": 3},
              {"kind": "sample", "step": 4, "text": ""}, {"kind": "warning", "text": ""}, {"kind": ""}]
    rows = [{key: value if dice.random() < 0.5 else anything(dice) for key, value in dice.choice(shapes).items()}
            for _ in range(40)]
    html = report_page([record_of(dice.choice(HOSTILE), rows, None)], "fitgpt")
    html.encode("utf-8")
    outline = Outline(html)
    assert not {tag for tag, _ in outline.tags} & {"img", "iframe", "a", "object", "form"}
    assert [attributes for _, attributes in outline.tags if any(name.startswith("on") for name in attributes)] == []
    assert len(html) < 2_000_000


def test_a_hundred_thousand_steps_make_a_small_page_with_every_spike(tmp_path: Path) -> None:
    dice = random.Random(0)
    lines = (f'{{"kind": "step", "step": {n}, "loss": {61.5 if n == 54_321 else dice.gauss(3, 0.1)}, "lr": 0.001, '
             f'"tokens_per_s": {dice.gauss(1e5, 1e3)}, "memory": {{"peak_reserved": {GiB + n}}}}}\n'
             for n in range(100_000))
    run = write_run(tmp_path / "long", [FACTS], "".join(lines))
    assert report(ReportOptions(runs=(str(run),), out=str(tmp_path / "long.html"))) == 0
    html = (tmp_path / "long.html").read_text(encoding="utf-8")
    assert len(html.encode()) < 700_000
    assert "Spikes reach 61.50: marked at the edge." in html
    assert 61.5 in data_of(html)["series"][0]["high"]


def test_of_a_very_long_record_a_part_is_read_and_the_page_says_so(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LONG_RECORD", 2**20)
    monkeypatch.setattr(metrics, "LONGEST_LINE", 2**12)
    lines = (f'{{"kind": "step", "step": {n}, "loss": 3.0, "text": "{"x" * 100}"}}\n' for n in range(40_000))
    run = write_run(tmp_path / "long", [FACTS], "".join(lines) + '{"kind": "warn')
    record = read_run(str(run))
    assert 5_000 < len(record.steps) < 10_000
    assert [step.step for step in record.steps[-20:]] == [*range(39_980, 40_000)]
    assert record.facts is not None
    assert any("of its steps every 6th was read" in words for words in record.unreadable)
    assert any("Line 40,002 of metrics.jsonl is broken" in words for words in record.unreadable)


# ---- several runs


def test_two_runs_share_charts_and_a_table_of_what_differs() -> None:
    other = FACTS | {"config": {"n_layer": 4, "learning_rate": 1e-3, "only_here": "yes"}}
    records = [record_of("a", [FACTS, step(0), step(1), evaluation(2)], None),
               record_of("b", [other, step(0), step(1), evaluation(2, 3.1)], None)]
    html = report_page(records, "fitgpt")
    Outline(html)
    data = data_of(html)
    assert [one["name"] for one in data["series"]] == ["a, training", "a, validation", "b, training", "b, validation"]
    assert data["xName"] == "step"
    differing = html.split("Config: where they differ")[1].split("<details>")[0]
    assert "<th>n_layer</th><td>2</td><td>4</td>" in differing
    assert "<th>only_here</th><td>–</td><td>yes</td>" in differing
    assert "learning_rate" not in differing


def test_runs_whose_steps_differ_in_size_are_laid_over_each_other_by_tokens() -> None:
    records = [record_of("a", [FACTS, step(0), step(10)], None),
               record_of("b", [FACTS | {"tokens_per_step": 2000}, step(0), step(10)], None)]
    data = data_of(report_page(records, "fitgpt"))
    assert data["xName"] == "tokens"
    assert [one["x"][-1] for one in data["series"]] == [10_000, 20_000]


def test_losses_at_different_blocks_are_said_not_to_compare() -> None:
    other = evaluation(2, losses=[dict(split="val", mean=1.0, stderr=0.1, windows=8, block=128)])
    assert "do not compare" in report_page([record_of("a", [FACTS, evaluation(2)], None),
                                            record_of("b", [FACTS, other], None)], "fitgpt")


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    assert run_names([str(tmp_path / "a"), str(tmp_path / "b")]) == ["a", "b"]
    assert run_names([str(tmp_path / "one" / "run"), str(tmp_path / "two" / "run")]) == ["one/run", "two/run"]
    with pytest.raises(UsageError, match="twice"):
        run_names([str(tmp_path), f"{tmp_path}/."])


def test_more_runs_than_there_are_colours_are_refused(tmp_path: Path) -> None:
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


def test_a_report_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [FACTS, step(0), evaluation(1)])
    script = ("import sys, fitgpt.commands.main\nassert fitgpt.commands.main.main(['report', *sys.argv[1:]]) == 0\n"
              "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script, str(run), "-o", str(tmp_path / "x.html")],
                           capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
