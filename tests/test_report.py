"""`fitgpt report`: whatever a run folder holds becomes a page, and the page works in a browser."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from fitgpt.cli import main
from fitgpt.errors import UsageError
from fitgpt.options import ReportOptions
from fitgpt.report import read_run, record_of, report, run_names
from fitgpt.runfolder import read_metrics
from fitgpt.show.report import report_page
from fitgpt.units import GiB
from test_charts import HOSTILE, Outline, data_of

FACTS: dict[str, Any] = dict(
    kind="run", config={"n_layer": 2, "learning_rate": 1e-3, "out_dir": "runs/x"}, params=123_456, device="cpu",
    device_name="A computer", dtype="float32", compiled=False, peak_flops=None, peak_source="", tokens_per_step=1000,
    train_tokens=10**6, val_tokens=10**4, start_step=0, max_iters=100,
    versions={"fitgpt": "0.1", "torch": "2.13", "python": "3.12"}, notes=["compile: off."])


def step(number: int, **told: Any) -> dict[str, Any]:
    memory = dict(allocated=GiB, reserved=2 * GiB, peak_allocated=3 * GiB, peak_reserved=4 * GiB)
    return dict(kind="step", step=number, loss=3.0, lr=1e-3, grad_norm=1.0, seconds=0.5, tokens_per_s=2000.0, mfu=None,
                skipped=0, loss_scale=1.0, memory=memory, seconds_left=1.0) | told


def evaluation(number: int, val: float = 3.5, **told: Any) -> dict[str, Any]:
    losses = [dict(split=split, mean=mean, stderr=0.01, windows=8, block=64) for split, mean in (("train", 3.4),
                                                                                                ("val", val))]
    return dict(kind="eval", step=number, best=True, losses=losses, tokens_per_s=1.0, memory={}) | told


def write_run(folder: Path, rows: Iterable[dict[str, Any]], tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + tail, encoding="utf-8")
    return folder


def page_of(rows: list[dict[str, Any]]) -> str:
    html = report_page([record_of("x", rows, None)], "fitgpt")
    Outline(html)
    return html


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
                    {"kind": "sample", "step": 6, "texts": ["a", "b"]}])
    assert "Once &lt;upon&gt;" in html
    assert html.count('<pre class="sample">') == 3


PLAN = {"kind": "plan", "phases": {"train": {"allocated_bytes": 3 * GiB, "reserved_bytes": 5 * GiB}, "save": None},
        "owners_at_peak": {"weights": GiB, "logits": 2 * GiB}, "reserve_limit_bytes": 11 * GiB}


def test_memory_is_shown_against_the_plan() -> None:
    html = page_of([FACTS, PLAN, step(0), step(1), evaluation(2, memory={"peak_reserved": GiB})])
    assert "planned 5.00 GiB" in html
    assert "limit 11.00 GiB" in html
    assert "-20.00%" in html  # 4 GiB were reserved where 5 were planned
    assert "save" not in html
    assert "logits</span> <b>2.00 GiB" in html


def test_what_the_guard_measured_goes_before_what_the_log_says() -> None:
    measured = {"kind": "plan_measured", "phases": {"train": {"allocated_bytes": GiB, "reserved_bytes": 5 * GiB}}}
    assert "+0.00%" in page_of([FACTS, PLAN, measured, step(0)])


def test_owners_may_come_as_a_list() -> None:
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
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    assert main(["report", str(run), "-o", str(tmp_path / "absent" / "x.html")]) == 2
    assert main(["report", str(run), "-o", "/dev/null"]) == 2
    assert main(["report"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_report_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [FACTS, step(0), evaluation(1)])
    script = ("import sys, fitgpt.cli\nassert fitgpt.cli.main(['report', *sys.argv[1:]]) == 0\n"
              "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script, str(run), "-o", str(tmp_path / "x.html")],
                           capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


# ---- in a browser

PHONE, DESKTOP = 390, 1200


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT trained on a CPU, stopped halfway and resumed."""
    from dataclasses import replace

    from fitgpt.run import run
    from helpers import tiny_config

    folder = tmp_path_factory.mktemp("real")
    config = tiny_config(folder, out_dir=str(folder / "tiny"), max_iters=60, lr_decay_iters=120, warmup_iters=12,
                         eval_interval=20, eval_iters=4)
    run(config.to_dict(), [], lambda: False)
    run(replace(config, max_iters=120, init_from="resume").to_dict(), [], lambda: False)
    return folder / "tiny"


@pytest.fixture(scope="module")
def reports(real_run: Path) -> dict[str, Path]:
    """Pages to open: a real run; one with a plan, a tape, spikes and hostile words; the two together."""
    dice = random.Random(1)
    config = dict(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=8, gradient_accumulation_steps=2,
                  vocab_size=4096, dtype="bfloat16", compile=False, dataset="<img src=x onerror=hacked()>")
    facts = FACTS | dict(device="cuda:0", device_name="NVIDIA GeForce RTX 4070", config=config)
    steps = [step(n, loss=3 + 4 * math.exp(-n / 50) + dice.gauss(0, 0.05)) for n in range(400)]
    steps[250]["loss"], steps[300]["loss"] = 900.0, math.nan
    hostile = [{"kind": "warning", "step": 20 * n, "text": words} for n, words in enumerate(HOSTILE)]
    evaluations = [evaluation(n) for n in range(0, 401, 50)]
    gpu = write_run(real_run.parent / "gpu", [facts, PLAN, *evaluations, *steps, *hostile])
    made = {"real": (real_run,), "gpu": (gpu,), "both": (real_run, gpu)}
    for name, runs in made.items():
        report(ReportOptions(runs=tuple(map(str, runs)), out=str(real_run.parent / f"{name}.html")))
    return {name: real_run.parent / f"{name}.html" for name in made}


def opened(browser: Any, path: Path, width: int = DESKTOP, **more: Any) -> tuple[Any, list[str]]:
    """The page, and what it said or asked for that it should not have."""
    tab = browser.new_page(viewport={"width": width, "height": 900}, **more)
    wrong: list[str] = []
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("dialog", lambda dialog: wrong.append(dialog.message))
    tab.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    tab.goto(path.as_uri())
    tab.wait_for_function("document.fonts.ready.then(() => true)")
    return tab, wrong


@pytest.mark.parametrize("name", ["real", "gpu", "both"])
def test_a_page_fits_its_screen_asks_for_nothing_and_says_no_error(browser: Any, reports: dict[str, Path],
                                                                   name: str) -> None:
    tab, wrong = opened(browser, reports[name])
    labels = ("[...document.querySelectorAll('.plot text')].filter(one => one.checkVisibility({visibilityProperty: true"
              "})).map(one => one.getBoundingClientRect()).map(box => [box.right, box.height])")
    for width in (DESKTOP, PHONE):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.wait_for_timeout(50)  # charts are laid out again
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        rights, heights = zip(*tab.evaluate(labels), strict=True)
        assert max(rights) <= width
        assert min(heights) >= 12  # text is not shrunk with the chart
    grounds = []
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        grounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(247, 247, 245)", "rgb(18, 20, 24)"]
    assert wrong == []
    tab.close()


def test_pointing_at_a_curve_shows_its_values(browser: Any, reports: dict[str, Path]) -> None:
    tab, _ = opened(browser, reports["gpu"])
    box = tab.locator(".plot").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    told = tab.locator(".readout").first.inner_text()
    assert "training" in told
    assert "validation" in told
    assert "3.5000" in told
    tab.mouse.move(5, 5)
    assert not tab.locator(".readout").first.is_visible()
    tab.close()


def ticks_of(tab: Any, place: int = 0) -> list[str]:
    found: list[str] = tab.locator(".plot").nth(place).locator(".axis.x text").all_text_contents()
    return found


def test_dragging_zooms_in_and_the_button_shows_everything_again(browser: Any, reports: dict[str, Path]) -> None:
    tab, _ = opened(browser, reports["gpu"])
    whole = ticks_of(tab)
    box = tab.locator(".plot").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60)
    tab.mouse.up()
    zoomed = [int(label) for label in ticks_of(tab)]
    assert min(zoomed) >= 200
    assert max(zoomed) <= 245
    tab.locator(".reset").first.click()
    assert ticks_of(tab) == whole
    assert not tab.locator(".reset").first.is_visible()
    tab.close()


def test_the_wheel_zooms_only_a_chart_that_was_chosen(browser: Any, reports: dict[str, Path]) -> None:
    tab, _ = opened(browser, reports["gpu"])
    whole = ticks_of(tab)
    box = tab.locator(".plot").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    tab.mouse.wheel(0, -200)
    assert ticks_of(tab) == whole
    tab.evaluate("scrollTo(0, 0)")
    tab.mouse.click(box["x"] + box["width"] / 2, box["y"] + 50)
    tab.mouse.wheel(0, -600)
    tab.wait_for_function("document.querySelector('.zoomed')")
    assert ticks_of(tab) != whole
    tab.close()


def test_keys_alone_show_values_zoom_and_go_back(browser: Any, reports: dict[str, Path]) -> None:
    tab, _ = opened(browser, reports["gpu"])
    whole = ticks_of(tab)
    tab.keyboard.press("Tab")
    tab.keyboard.press("End")
    assert "step\n400" in tab.locator(".readout").first.inner_text()
    tab.keyboard.press("ArrowLeft")
    assert "step\n399" in tab.locator(".readout").first.inner_text()
    tab.keyboard.press("+")
    assert ticks_of(tab) != whole
    tab.keyboard.press("0")
    assert ticks_of(tab) == whole
    tab.close()


def test_the_tape_shows_owners_under_the_pointer_and_zooms(browser: Any, reports: dict[str, Path]) -> None:
    tab, wrong = opened(browser, reports["gpu"])
    chart = tab.locator("[data-chart=stacked]")
    chart.scroll_into_view_if_needed()
    box = chart.locator(".plot").bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    told = chart.locator(".readout").inner_text()
    assert told.startswith("training")
    assert {"weights", "activations", "optimizer"} <= set(told.split("\n"))
    before = chart.locator(".inner").get_attribute("viewBox")
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    tab.mouse.up()
    assert chart.locator(".inner").get_attribute("viewBox") != before
    assert wrong == []
    tab.close()


def test_fingers_show_values_and_pinch(browser: Any, reports: dict[str, Path]) -> None:
    tab, wrong = opened(browser, reports["gpu"], PHONE, has_touch=True)
    plot = tab.locator(".plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    tab.touchscreen.tap(box["x"] + 150, box["y"] + 50)
    assert tab.locator(".readout").first.is_visible()
    whole = ticks_of(tab)
    session, middle = tab.context.new_cdp_session(tab), box["x"] + 150

    def touch(kind: str, apart: float) -> None:
        places = [middle - apart, middle + apart] if kind != "touchEnd" else []
        points = [{"x": x, "y": box["y"] + 50, "id": number} for number, x in enumerate(places)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 20)
    for apart in (40, 60, 80):
        touch("touchMove", apart)
    touch("touchEnd", 0)
    assert ticks_of(tab) != whole
    assert wrong == []
    tab.close()


def test_without_scripts_the_curves_and_figures_are_there(browser: Any, reports: dict[str, Path]) -> None:
    tab = browser.new_context(java_script_enabled=False).new_page()
    tab.goto(reports["gpu"].as_uri())
    assert tab.locator(".plot").count() == 6
    assert tab.locator(".curve").first.bounding_box()["width"] > 300
    assert tab.get_by_text("peak ", exact=False).first.is_visible()
    assert len(tab.locator(".plot").first.locator(".axis.x text").all_text_contents()) >= 3
    tab.close()


def test_the_picture_in_the_docs_is_of_a_real_run(browser: Any, real_run: Path, reports: dict[str, Path],
                                                  picture: Callable[[str], Path]) -> None:
    """FITGPT_PICTURES=1 python -m pytest tests/test_report.py -k picture writes it anew."""
    rows = read_metrics(real_run / "metrics.jsonl")
    assert sum(row["kind"] == "step" for row in rows) == 120
    tab, _ = opened(browser, reports["real"], 1080)
    box = tab.locator(".plot").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + 60)
    tab.screenshot(path=picture("report"))
    tab.close()
    assert picture("report").stat().st_size > 20_000
    assert (Path(__file__).parent.parent / "docs" / "pictures" / "report.png").stat().st_size < 200_000
