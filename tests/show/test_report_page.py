"""The report page in a real browser: on any screen, by mouse, touch or keyboard, and without scripts."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands.main import main
from fitgpt.commands.report import report
from fitgpt.config.command_options import ReportOptions
from fitgpt.runs.metrics import read_metrics
from tests.html_outline import HOSTILE_TEXTS, check_accessibility
from tests.report_rows import FACTS, PLAN, evaluation, step, write_run

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("report page")]  # one process makes them and starts the browser

PHONE, DESKTOP = 390, 1200
RECORDED = Path(__file__).parents[1] / "recorded" / "runs" / "h200" / "metrics.jsonl"


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT trained on a CPU, stopped halfway and resumed."""
    from dataclasses import replace

    from fitgpt.training.run import run
    from tests.helpers import tiny_config

    folder = tmp_path_factory.mktemp("real")
    config = tiny_config(folder, out_dir=str(folder / "tiny"), max_iters=60, lr_decay_iters=120, warmup_iters=12,
                         eval_interval=20, eval_iters=4)
    run(config.to_dict(), [], lambda: False)
    run(replace(config, max_iters=120, init_from="resume").to_dict(), [], lambda: False)
    return folder / "tiny"


@pytest.fixture(scope="module")
def reports(real_run: Path) -> dict[str, Path]:
    """Pages to open: a real run; one with a plan, spikes and hostile text; the two together."""
    rng = random.Random(1)
    config = dict(n_layer=4, n_head=4, n_embd=256, block_size=256, batch_size=8, gradient_accumulation_steps=2,
                  vocab_size=4096, dtype="bfloat16", compile=False, dataset="<img src=x onerror=hacked()>")
    facts = FACTS | dict(device="cuda:0", device_name="NVIDIA GeForce RTX 4070", config=config)
    steps = [step(n, loss=3 + 4 * math.exp(-n / 50) + rng.gauss(0, 0.05)) for n in range(400)]
    steps[250]["loss"], steps[300]["loss"] = 900.0, math.nan
    hostile = [{"kind": "warning", "step": 20 * n, "text": text} for n, text in enumerate(HOSTILE_TEXTS)]
    evaluations = [evaluation(n) for n in range(0, 401, 50)]
    gpu = write_run(real_run.parent / "gpu", [facts, PLAN, *evaluations, *steps, *hostile])
    made = {"real": (real_run,), "gpu": (gpu,), "both": (real_run, gpu)}
    for name, runs in made.items():
        report(ReportOptions(runs=tuple(map(str, runs)), out=str(real_run.parent / f"{name}.html")))
    return {name: real_run.parent / f"{name}.html" for name in made}


def opened(browser: Any, path: Path, width: int = DESKTOP, **more: Any) -> tuple[Any, list[str]]:
    """The page, and its console messages, errors, dialogs and requests, of which there should be none."""
    tab = browser.new_page(viewport={"width": width, "height": 900}, **more)
    wrong: list[str] = []
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("dialog", lambda dialog: wrong.append(dialog.message))
    tab.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    tab.goto(path.as_uri())
    tab.wait_for_function("document.fonts.ready.then(() => true)")
    return tab, wrong


# Words of up to 16 letters that are broken over two lines: their first and last letters differ in height.
BROKEN_WORDS = """() => {
  const broken = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    if (!node.parentElement.checkVisibility() || node.parentElement.closest('script, style, svg')) continue;
    for (const word of node.textContent.matchAll(/(?<![^\\s/_-])[^\\s/_-]{2,16}(?![^\\s/_-])/g)) {
      const range = document.createRange(), heights = [word.index, word.index + word[0].length - 1].map(place => {
        range.setStart(node, place); range.setEnd(node, place + 1);
        return range.getBoundingClientRect().top; });
      if (Math.abs(heights[0] - heights[1]) > 4) broken.push(word[0]);
    }
  }
  return broken;
}"""


@pytest.mark.parametrize("name", ["real", "gpu", "both"])
def test_a_page_fits_its_screen_loads_nothing_and_has_no_errors(browser: Any, reports: dict[str, Path],
                                                                name: str) -> None:
    tab, wrong = opened(browser, reports[name])
    labels = ("[...document.querySelectorAll('.plot text')].filter(one => !one.closest('.alt') && one.checkVisibility({"
              "visibilityProperty: true})).map(one => one.getBoundingClientRect()).map(box => [box.right, box.height])")
    for width in (DESKTOP, PHONE):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.wait_for_timeout(50)  # charts are laid out again
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        rights, heights = zip(*tab.evaluate(labels), strict=True)
        assert max(rights) <= width
        assert min(heights) >= 12  # text is not shrunk with the chart
    assert tab.evaluate(BROKEN_WORDS) == []  # on the phone
    grounds = []
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        grounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(247, 247, 245)", "rgb(18, 20, 24)"]
    assert wrong == []
    tab.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    config = Path(__file__).parents[2] / "config" / "gpt2_124m.py"
    assert main(["plan", str(config), "--gpu=4070", f"--timeline={folder / 'timeline.html'}"]) == 0
    assert main(["fit", str(config), "--gpu=4070", f"--html={folder / 'fit.html'}"]) == 0
    return {"timeline": folder / "timeline.html", "fit": folder / "fit.html"}


@pytest.mark.parametrize("name", ["timeline", "fit"])
def test_no_word_is_broken_on_a_phone(browser: Any, pages: dict[str, Path], name: str) -> None:
    tab, wrong = opened(browser, pages[name], PHONE)
    assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE
    assert tab.evaluate(BROKEN_WORDS) == []
    assert wrong == []
    tab.close()


def test_pointing_at_a_curve_shows_its_values(browser: Any, reports: dict[str, Path]) -> None:
    tab, _ = opened(browser, reports["gpu"])
    box = tab.locator(".plot").first.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    readout = tab.locator(".readout").first.inner_text()
    assert "training" in readout
    assert "validation" in readout
    assert "3.5000" in readout
    tab.mouse.move(5, 5)
    assert not tab.locator(".readout").first.is_visible()
    tab.close()


def focus_first_chart(tab: Any) -> None:
    """By the keyboard alone."""
    for _ in range(10):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.classList.contains('frame')"):
            return
    pytest.fail("no chart can be reached with the Tab key")


def ticks_of(tab: Any, place: int = 0) -> list[str]:
    found: list[str] = tab.locator(".plot").nth(place).locator(".axis.x text").all_text_contents()
    return found


def test_dragging_zooms_in_and_the_button_resets_the_view(browser: Any, reports: dict[str, Path]) -> None:
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


def test_the_wheel_zooms_only_a_focused_chart(browser: Any, reports: dict[str, Path]) -> None:
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


def test_the_keyboard_alone_shows_values_zooms_and_resets(browser: Any, reports: dict[str, Path]) -> None:
    tab, _ = opened(browser, reports["gpu"])
    whole = ticks_of(tab)
    focus_first_chart(tab)
    tab.keyboard.press("End")
    assert "step\n400" in tab.locator(".readout").first.inner_text()
    tab.keyboard.press("ArrowLeft")
    assert "step\n399" in tab.locator(".readout").first.inner_text()
    tab.keyboard.press("+")
    assert ticks_of(tab) != whole
    tab.keyboard.press("0")
    assert ticks_of(tab) == whole
    tab.close()


def test_the_stacked_chart_shows_owners_under_the_pointer_and_zooms(browser: Any, reports: dict[str, Path]) -> None:
    tab, wrong = opened(browser, reports["gpu"])
    chart = tab.locator("[data-chart=stacked]")
    chart.scroll_into_view_if_needed()
    box = chart.locator(".plot").bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    readout = chart.locator(".readout").inner_text()
    assert readout.startswith("training")
    assert {"weights", "activations", "optimizer"} <= set(readout.split("\n"))
    before = chart.locator(".inner").get_attribute("viewBox")
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    tab.mouse.up()
    assert chart.locator(".inner").get_attribute("viewBox") != before
    assert wrong == []
    tab.close()


def test_touch_shows_values_and_pinching_zooms(browser: Any, reports: dict[str, Path]) -> None:
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


def test_curves_axes_and_the_download_work_without_javascript(browser: Any, reports: dict[str, Path]) -> None:
    tab = browser.new_context(java_script_enabled=False).new_page()
    tab.goto(reports["gpu"].as_uri())
    assert tab.locator(".plot").count() == 6
    names = tab.locator("figure.wide").first.locator(".name:visible")
    assert names.all_text_contents() == ["step", "nats per token"]
    for kind, name in (("tokens", "tokens"), ("time", "minutes of training steps")):
        tab.locator(f"#x-{kind}").check()
        assert names.all_text_contents() == ["nats per token", name]
        assert not tab.locator(".axis.x").first.is_visible()
    with tab.expect_download() as download:
        tab.get_by_text("Download the figures").click()
    rows = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert rows[0].startswith("run,step,tokens,hours,loss")
    assert rows[1].startswith("gpu,0,")
    assert len(rows) == 1 + 400 + 9
    assert tab.locator(".curve").first.bounding_box()["width"] > 300
    assert tab.get_by_text("peak ", exact=False).first.is_visible()
    assert len(tab.locator(".plot").first.locator(".axis.x text").all_text_contents()) >= 3
    tab.close()


def test_keys_of_charts_keep_their_colours_in_print_and_in_forced_colours(browser: Any,
                                                                         reports: dict[str, Path]) -> None:
    tab, _ = opened(browser, reports["both"])
    colours = """() => [...document.querySelectorAll('figure.wide .legend li i, figure.wide .curve')].map(
        one => getComputedStyle(one).color + getComputedStyle(one).printColorAdjust)"""
    shown = tab.evaluate(colours)
    assert len(set(shown)) > 1
    assert all(each.endswith("exact") for each in shown)
    tab.emulate_media(forced_colors="active")
    assert tab.evaluate(colours) == shown
    tab.emulate_media(forced_colors="none", media="print")
    assert tab.evaluate(colours) == shown
    tab.close()


def test_the_picture_in_the_docs_is_of_a_run_on_a_gpu(browser: Any, tmp_path: Path,
                                                      picture: Callable[[str], Path]) -> None:
    """FITGPT_PICTURES=1 python -m pytest tests/show/test_report_page.py -k picture rewrites it."""
    run = write_run(tmp_path / "gpt2_124m", list(read_metrics(RECORDED)))
    report(ReportOptions(runs=(str(run),), out=str(tmp_path / "report.html")))
    tab, wrong = opened(browser, tmp_path / "report.html", 1080)
    assert "NVIDIA H200" in tab.inner_text("body")
    check_accessibility(tab)
    assert wrong == []
    if os.environ.get("FITGPT_PICTURES"):
        tab.screenshot(path=picture("report"))
    tab.close()


def test_axe_finds_no_violation_in_two_runs_with_hostile_text(browser: Any, reports: dict[str, Path]) -> None:
    tab, _ = opened(browser, reports["both"])
    check_accessibility(tab)
    tab.close()
