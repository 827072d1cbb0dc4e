"""The page in a real Chromium: what it shows, what its controls do by pointer and keyboard, its accessibility
(axe-core, layout shift, print, forced colours), and its screenshots.

`make test` tests the page of `fitgpt serve`, `make test-site` the static site: FITGPT_PAGE says which."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fitgpt.web.form import RUN_OPTIONS
from tests.conftest import PICTURES
from tests.html_outline import check_accessibility
from tests.web.test_paste import SMI
from tests.web_server import HOSTILE, NOTES, built_site, recorded_rows, running_run, serving, serving_files

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("page")]  # one process starts the server and the browser

ON_SITE = os.environ.get("FITGPT_PAGE") == "site"
TAKING_PICTURES = bool(os.environ.get("FITGPT_PICTURES"))  # of larger runs than the tests need
LARGEST_PICTURE = 250_000
MOST_SHIFT = 0.1  # cumulative layout shift: "good" up to this value, by web.dev
SHIFTS = """window.shift = 0; new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
}).observe({ type: "layout-shift", buffered: true });"""
SMALL = "gpu=RTX+4070&n_layer=2"  # computed fastest
TOO_LARGE = f"{SMALL}&trainer=nanogpt&budget=2GiB&batch_size=24&gradient_accumulation_steps=2"
OOM = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity of 11.65 "
       "GiB of which 1.10 GiB is free. Process 1201 has 2.07 GiB memory in use. Including non-PyTorch memory, this "
       "process has 8.48 GiB memory in use. Of the allocated memory 8.05 GiB is allocated by PyTorch, and 184.00 MiB "
       "is reserved by PyTorch but unallocated.")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with running_run(tmp_path_factory.mktemp("served")) as folder:
        yield folder


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with serving_files(built_site()) if ON_SITE else serving(run.parent.parent) as (found, _):
        yield found


@pytest.fixture(scope="module")
def shown(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens the page with some settings. At the end there must be no console output, no error, no foreign request."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], service_workers="block")
    context.add_init_script(SHIFTS)
    page = context.new_page()
    page.set_default_timeout(60_000 if ON_SITE else 20_000)  # Python starts anew with every page of the site
    wrong: list[str] = []
    page.on("console", lambda message: "blocked by Playwright" in message.text  # the site's service worker
            or wrong.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: request.url.startswith(address) or wrong.append(request.url))
    page.on("response", lambda reply: reply.status < 400 or wrong.append(f"{reply.status} {reply.url}"))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))

    @contextmanager
    def opened(query: str = SMALL, width: int = 1280, height: int = 900,
               scheme: str = "light") -> Iterator[Any]:
        wrong.clear()
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{address}?{query}")
        page.wait_for_selector("html[data-ready]", state="attached")
        yield page
        assert wrong == []

    yield opened
    context.close()


def verdict(page: Any, state: str) -> str:
    """Waits for the verdict with its exact headroom."""
    page.wait_for_selector(f'#verdict[data-state="{state}"] #headroom:not(:empty)')
    text: str = page.inner_text("#verdict")
    return text


def width(page: Any, phase: str, part: str) -> float:
    return float(page.get_attribute(f'[data-phase="{phase}"] rect[data-part="{part}"]', "width").rstrip("%"))


def taken(what: Any, where: Path) -> None:
    """Saves a screenshot of the page or a part of it, for the docs."""
    if TAKING_PICTURES:
        page = getattr(what, "page", what)
        page.mouse.move(0, 0)
        page.wait_for_timeout(350)  # bars are animated
        what.screenshot(path=str(where))


def test_pictures_in_the_docs_are_small() -> None:
    sizes = {file.name: file.stat().st_size for file in PICTURES.glob("*.png")}
    assert {"timeline.png", "page.png", "page_dark.png", "page_fit.png", "page_explain.png", "page_live.png",
            "report.png"} == sizes.keys()
    assert max(sizes.values()) < LARGEST_PICTURE


# ---- loading


def test_the_page_loads_without_requests_to_other_hosts_or_layout_shift(
        shown: Callable[..., Any], picture: Callable[[str], Path]) -> None:
    with shown("gpu=4070&tab=plan" + ("" if TAKING_PICTURES else "&n_layer=4")) as page:
        assert "Fits" in verdict(page, "fits")
        assert "to spare" in page.inner_text("#headroom")
        assert "tokens/s" in page.inner_text("#headroom")
        assert "600,000 steps" in page.inner_text("#length")
        assert page.locator(".phase-line").count() == 6
        page.wait_for_selector("#step figure[data-live]")
        page.wait_for_selector("#gpus button")
        assert page.locator("#gpus button").count() > 60
        assert page.get_attribute('#gpus [data-gpu="RTX 4070"]', "aria-current") == "true"  # 4070 is one name of it
        assert page.locator("#k-gpu option:checked").inner_text() == "RTX 4070 · 12 GB"
        assert page.text_content("#phases").count("GiB") > 5
        assert "fitgpt train" in page.inner_text("#command")
        page.wait_for_selector('#fix-buttons:not(.stale) [data-family="muon"]')
        assert page.locator("#fix-buttons .enough").count() == 0  # it fits already: nothing has to be fixed
        assert page.evaluate("shift") < MOST_SHIFT

        assert page.locator("main").count() == page.locator("main:visible").count() == 1
        scope = page.inner_text("footer")
        assert "one NVIDIA GPU" in scope
        assert "Not covered" in scope
        assert page.request.get(page.locator("footer a").first.evaluate("(link) => link.href")).ok

        taken(page.locator("#step figure"), picture("timeline"))
        page.focus("#step .frame")
        page.keyboard.press("ArrowRight")
        assert "activations" in page.inner_text("#step .readout")
        page.click("#length button")
        page.wait_for_selector("#length:has-text('20 per parameter')")
        page.wait_for_url("**max_iters=**")


def test_every_option_has_a_control_with_a_label_and_help(shown: Callable[..., Any]) -> None:
    with shown() as page:
        for name in RUN_OPTIONS:
            assert page.locator(f'label[for="k-{name}"]').count() == 1
        unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, select, textarea")].filter(
            (each) => !each.labels?.length && !each.getAttribute("aria-label") && !each.innerText.trim()
                      && each.checkVisibility()).map((each) => each.outerHTML)""")
        assert unnamed == []
        page.click('[popovertarget="h-others"]')
        assert page.is_visible("#h-others")
        page.keyboard.press("Escape")
        assert page.is_hidden("#h-others")


def test_without_javascript_there_is_only_a_note(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert "needs JavaScript" in page.inner_text("main")
    assert len(page.inner_text("body")) < 150
    context.close()


# ---- the bars


def test_a_slider_moves_the_bars_and_the_address_while_it_moves(shown: Callable[..., Any]) -> None:
    with shown() as page:
        verdict(page, "fits")
        before = width(page, "first_train", "activations")
        page.evaluate("""() => { window.titles = new Set(); const place = document.getElementById("title");
            new MutationObserver(() => titles.add(place.textContent)).observe(place, { childList: true }); }""")
        page.route("**/api/plan?*", lambda route: (time.sleep(0.05), route.continue_()))
        page.focus("#s-batch_size")
        for _ in range(8):  # each before the answer to the one before it
            page.keyboard.press("ArrowRight")
            page.wait_for_timeout(20)
        page.unroute("**/api/plan?*")
        page.wait_for_selector("#title:has-text('batch 80')")
        assert page.evaluate("titles.size") > 2
        assert page.input_value("#k-batch_size") == "80"
        assert width(page, "first_train", "activations") > 1.5 * before
        page.wait_for_url("**batch_size=80**")


def test_a_tight_run_is_neither_green_nor_red_and_says_what_a_desktop_takes(shown: Callable[..., Any]) -> None:
    snug = "gpu=RTX+4070&n_layer=4&compile=False"
    with shown(f"{snug}&batch_size=118") as page:
        assert "Tight" in verdict(page, "tight")
        assert "to spare" in page.inner_text("#headroom")
        assert "A desktop takes 0.3 to 2 GiB" in page.inner_text(".summary")
        mark = page.evaluate("getComputedStyle(document.querySelector('#verdict .mark'), '::before').content")
        assert mark == '"!"'
        page.wait_for_selector('#gpus [data-gpu="RTX 4070"] span.tight:text("tight")')
        fitting, count = map(int, re.findall(r"\d+", page.inner_text("#gpus-note"))[:2])
        assert fitting == page.locator("#gpus button span.yes").count() < count
        page.fill("#k-others", "0")
        assert "Fits" in verdict(page, "fits")
        assert "desktop" not in page.inner_text(".summary")


def test_bars_and_tables_show_the_same_figures_of_a_run_that_does_not_fit(shown: Callable[..., Any]) -> None:
    with shown("gpu=RTX+4070&trainer=nanogpt&n_layer=24&n_head=16&n_embd=1024&others=1GiB") as page:
        assert "too much" in verdict(page, "does_not_fit")
        assert "tokens/s" not in page.inner_text("#headroom")  # the speed of a run that cannot be
        assert "tokens" in page.inner_text("#length")
        assert width(page, "train", "unallocated") > 0
        process = float(page.text_content("#phases tr:has-text('training') td:nth-child(4)").removesuffix(" GiB"))
        total = float(page.inner_text('[data-phase="train"] span:last-child').removesuffix(" GiB"))
        assert total == pytest.approx(process + 1, abs=0.011)  # with other programs
        assert "GPU in total" in page.inner_text(".ends.above")
        weights = page.text_content("#owners tr:has-text('weights') td:nth-child(2)")
        assert f"weights {weights}" in " ".join(page.inner_text("#bars-legend").split())
        assert f"Does not fit: {page.inner_text('#headroom')}." in page.text_content("#config")

        page.click("#savers > summary")  # options that nanoGPT does not have
        assert page.is_disabled("#k-saved_activations")
        assert page.is_disabled("#s-loss_chunk")
        assert page.is_visible("#savers .badge >> nth=0")
        page.check("#trainer-fitgpt")
        assert page.is_enabled("#k-saved_activations")
        assert page.is_hidden("#savers .badge >> nth=0")


@pytest.mark.served
def test_the_page_is_busy_until_a_slow_plan_arrives(shown: Callable[..., Any]) -> None:
    waiting: list[Any] = []
    with shown() as page:
        verdict(page, "fits")
        assert page.get_attribute("#results", "aria-busy") is None
        page.route("**/api/plan?*", lambda route: waiting.append(route))
        page.fill("#k-n_layer", "24")
        page.wait_for_selector('#results[aria-busy="true"]')
        assert "2 layers" in page.inner_text("#title")  # the earlier plan stays, dimmed
        assert float(page.evaluate("getComputedStyle(document.querySelector('.bars')).opacity")) < 1
        waiting.pop().continue_()
        page.unroute("**/api/plan?*")
        page.wait_for_selector("#title:has-text('24 layers')")
        page.wait_for_selector("#results:not([aria-busy])")


def test_invalid_settings_are_explained_with_a_button_per_fix(shown: Callable[..., Any]) -> None:
    with shown("gpu=RTX+2060&dtype=bfloat16") as page:
        page.wait_for_selector('#verdict[data-state="problem"]')
        assert "compute capability" in page.inner_text("#summary")
        assert page.evaluate("document.getElementById('fixes').inert")  # it shows an earlier run
        assert page.inner_text("#problem-fix button") == "Set dtype=float16"
        page.click("#problem-fix button")
        verdict(page, "fits")
        assert not page.evaluate("document.getElementById('fixes').inert")
        assert "dtype=float16" in page.url
        page.fill("#k-n_embd", "770")
        page.wait_for_selector('#verdict[data-state="problem"]')
        assert page.locator("#problem-fix button").count() == 4
        assert "--" not in page.inner_text("#results > .callout:visible")
        page.click("text=Set n_embd=768")
        verdict(page, "fits")


@pytest.mark.served
def test_a_server_that_is_gone_is_reported_once(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}?{SMALL}")
    verdict(page, "fits")
    page.route("**/api/*", lambda route: route.abort())
    page.fill("#k-n_layer", "3")
    page.wait_for_selector("#offline:visible")
    assert "Fits" in page.inner_text("#verdict")  # of the earlier run, whose details cannot be used
    assert page.evaluate("document.getElementById('fixes').inert")
    assert page.inner_text("main").count("does not answer") == 1
    page.close()


@pytest.mark.served
def test_a_page_that_cannot_start_says_why(browser: Any, address: str) -> None:
    page = browser.new_page()
    problem = {"problem": {"what": "It ended.", "fix": "Reload the page.", "settings": {}}}
    page.route("**/api/form", lambda route: route.fulfill(status=503, json=problem))
    page.goto(address)
    page.wait_for_selector("#offline:visible")
    assert page.inner_text("main").strip() == "It ended. Reload the page."
    page.close()


# ---- the run of the notes


def test_the_notes_run_fits_with_fitgpt_or_without_other_programs(
        shown: Callable[..., Any], picture: Callable[[str], Path]) -> None:
    with shown(NOTES, height=1130) as page:
        assert "Does not fit" in verdict(page, "does_not_fit")
        assert page.input_value("#k-n_embd") == "576"  # the address carries the settings
        assert page.locator("#k-preset option:checked").inner_text() == "notes_77m: 77.36M"
        assert page.is_checked("#trainer-nanogpt")
        page.wait_for_selector('#fix-buttons [data-family="block"]')
        page.wait_for_selector("#step figure[data-live]")
        page.wait_for_selector("#gpus button")
        assert page.evaluate("shift") < MOST_SHIFT
        taken(page, picture("page"))
        page.click("text=train with fitgpt")
        assert "Fits" in verdict(page, "fits")
        assert re.search(r"train with fitgpt: 9\.\d+ GiB → 3\.\d+ GiB at the peak", page.inner_text("#difference"))
        assert "trainer" not in page.url  # fitgpt is the default
        page.click("#undo")
        verdict(page, "does_not_fit")
        assert "trainer=nanogpt" in page.url
        assert page.is_hidden("#difference")
        page.go_back()
        verdict(page, "fits")
        page.go_back()
        verdict(page, "does_not_fit")
        others = width(page, "train", "others")
        page.fill("#k-others", "0")
        verdict(page, "fits")
        assert others > 0 == width(page, "train", "others")
        page.wait_for_selector("#status:has-text('Fits')", state="attached")  # for screen readers


def test_a_gpu_and_a_preset_are_chosen_with_a_click(shown: Callable[..., Any]) -> None:
    with shown(f"{SMALL}&grad_checkpoint=True&batch_size=7") as page:
        page.click('#gpus [data-gpu="RTX 3090"]')
        page.wait_for_selector("#title:has-text('RTX 3090')")
        page.wait_for_url("**gpu=RTX+3090**")
        page.select_option("#k-preset", label="notes_77m: 77.36M")
        page.wait_for_selector("#title:has-text('12 layers of width 576, batch 16 × 1,024, float16')")
        assert page.input_value("#k-batch_size") == "16"
        assert page.input_value("#k-max_iters") == "10000"
        assert not page.is_checked("#k-grad_checkpoint")


@pytest.mark.served
def test_a_fix_button_pressed_while_others_arrive_changes_the_run_in_dark_mode(
        shown: Callable[..., Any], picture: Callable[[str], Path]) -> None:
    waiting: list[Any] = []
    size = "budget=8GiB" if TAKING_PICTURES else "n_layer=4&budget=3500MiB"
    with shown(f"gpu=RTX+4070&batch_size=40&{size}", height=1000, scheme="dark") as page:
        page.route("**/api/fix?family=offload*", lambda route: waiting.append(route))
        page.reload()
        verdict(page, "does_not_fit")
        fix = page.wait_for_selector('#fix-buttons [data-family="saved_activations"].enough')
        label = fix.inner_text().split("\n")[0]
        assert re.fullmatch(r"gradient checkpointing: \d+ layers?", label)
        for _ in range(400):
            if not waiting:
                page.wait_for_timeout(50)
        fix.scroll_into_view_if_needed()
        box = fix.bounding_box()
        page.mouse.move(box["x"] + 20, box["y"] + 10)
        page.mouse.down()
        waiting.pop().continue_()
        page.wait_for_selector('#fix-buttons [data-family="offload"]')
        page.mouse.up()
        page.unroute("**/api/fix?family=offload*")
        verdict(page, "fits")
        assert re.search(r"saved_activations=\d+\*\w+%2C\d+\*matmuls", page.url)
        assert label in page.inner_text("#difference")
        page.wait_for_selector('#fix-buttons [data-family="muon"]')
        page.wait_for_selector("#gpus button")
        taken(page, picture("page_dark"))


def test_the_fastest_that_fits_is_found_with_a_chart_whose_points_fill_the_form(
        shown: Callable[..., Any], picture: Callable[[str], Path]) -> None:
    with shown(NOTES if TAKING_PICTURES else TOO_LARGE) as page:
        verdict(page, "does_not_fit")
        page.click("text=Fastest that fits")
        verdict(page, "fits")
        assert page.locator("#difference li").first.inner_text().startswith("trainer nano")
        assert page.is_checked("#trainer-fitgpt")
        page.wait_for_selector("#fix-buttons:not(.stale, :has(.stale)) button")
        page.wait_for_selector("#gpus button")
        check_accessibility(page)
        taken(page.locator("#fit"), picture("page_fit"))

        chosen = page.inner_text("#plan-command")
        page.locator(".point").nth(1).focus()  # less memory, by keyboard
        page.keyboard.press("Enter")
        page.wait_for_function("(before) => document.getElementById('plan-command').textContent !== before", arg=chosen)
        verdict(page, "fits")
        assert page.is_visible("#fit-chart")
        assert page.locator("#fit-plot .chosen").count() == 1
        page.click("#runners-up button >> nth=0")  # what was chosen first
        page.wait_for_function("(before) => document.getElementById('plan-command').textContent === before", arg=chosen)
        page.fill("#k-n_layer", "3")  # another run: the chart is not of it
        page.wait_for_selector("#fit-result", state="hidden")


# ---- keyboard


def tabbed_to(page: Any, selector: str, most: int = 120) -> None:
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} cannot be reached by Tab")


def test_everything_works_by_keyboard(shown: Callable[..., Any]) -> None:
    with shown(f"{SMALL}&batch_size=16&trainer=nanogpt&budget=4GiB") as page:
        verdict(page, "does_not_fit")
        page.wait_for_selector('#fix-buttons [data-family="block"]')
        tabbed_to(page, "#trainer-nanogpt")
        page.keyboard.press("ArrowLeft")
        verdict(page, "fits")
        assert page.is_checked("#trainer-fitgpt")
        tabbed_to(page, "#s-batch_size")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
        page.keyboard.press("End")
        verdict(page, "does_not_fit")
        tabbed_to(page, "#savers > summary")
        page.keyboard.press("Enter")
        tabbed_to(page, "#k-saved_activations")
        page.keyboard.press("i")  # input
        page.wait_for_selector("#command:has-text('--saved_activations=input')")
        page.wait_for_selector('#fix-buttons:not(.stale) [data-family="batch"]')
        tabbed_to(page, '[data-family="batch"]')
        page.keyboard.press("Enter")
        page.wait_for_selector("#difference:has-text('batch')")
        page.focus("#tab-plan")
        page.keyboard.press("ArrowRight")
        assert page.is_visible("#explain")
        assert page.is_hidden("#form")


# ---- the paste box


def paste(page: Any, text: str) -> None:
    page.fill("#pasted", text)
    page.click("text=Read it")


def test_a_pasted_message_is_explained(shown: Callable[..., Any], picture: Callable[[str], Path]) -> None:
    with shown(NOTES, height=1180) as page:
        verdict(page, "does_not_fit")
        paste(page, f'Traceback (most recent call last):\n  File "{HOSTILE}", line 5, in f\n    x\n{OOM}')
        page.wait_for_selector("#diagnosis:has-text('<b>bold</b>')")
        assert page.locator("#diagnosis img, #diagnosis b").count() == 0
        paste(page, HOSTILE)
        page.wait_for_selector("#paste-note:has-text('no out-of-memory message')")

        paste(page, OOM)
        page.click("text=Explain it with the plan")  # the plan is of the compiled run, the message of the eager one
        page.wait_for_selector("#diagnosis .callout:has-text('compile=False')")
        assert page.is_checked("#with-plan")
        assert "16 × 1,024 × 50,304 × 4" in page.inner_text("#diagnosis")
        check_accessibility(page)
        taken(page, picture("page_explain"))
        promised = page.inner_text("#diagnosis li:has(button:text('Try it')) >> nth=1")
        page.click("text=Try it in the plan >> nth=1")
        page.wait_for_selector("#difference:not([hidden])")
        assert "tab=" not in page.url
        assert "paste=" not in page.url  # a link to a plan does not contain a traceback
        assert re.search(r"→ (\S+ GiB)", page.inner_text("#difference"))[1] in promised
        page.go_back()
        page.wait_for_selector("#diagnosis section:visible")


def test_pasted_text_fills_the_form_and_tabs_are_in_the_address(shown: Callable[..., Any]) -> None:
    with shown("gpu=RTX+3090&n_layer=2") as page:
        paste(page, SMI)
        page.wait_for_selector("#diagnosis section")
        assert "tab=explain" in page.url
        page.reload()
        page.wait_for_selector("#diagnosis section:visible")
        assert page.input_value("#pasted") == SMI
        page.go_back()
        page.wait_for_selector("#plan:visible")
        page.go_forward()
        page.wait_for_selector("#explain:visible")

        paste(page, SMI)
        page.click("text=Plan with this GPU and these programs")
        page.wait_for_selector("#title:has-text('RTX 4070')")
        assert page.input_value("#k-others") == "2118"
        paste(page, "n_layer = 3\nbatch_size = 2 * 4\nlearning_rate = 1e-3\nexperts = 8\n")
        page.wait_for_selector("#title:has-text('3 layers')")
        assert page.input_value("#k-batch_size") == "8"
        assert "RTX 4070" in page.inner_text("#title")  # a config file leaves the GPU
        note = page.inner_text("#paste-note")
        assert "learning_rate" in note
        assert "Not known as options: experts" in note
        paste(page, "python train.py --n_layer=2 --block_size=512")
        page.wait_for_selector("#title:has-text('× 512')")
        assert page.is_checked("#trainer-nanogpt")
        paste(page, "n_layer = 3\nimport os\n")
        page.wait_for_selector("#paste-note:has-text('pasted text:2')")


@pytest.mark.reproduction
@pytest.mark.parametrize(("text", "note"), [
    ("import torch\nmodel = torch.nn.Linear(8, 8)\n", "fitgpt trace --gpu \"RTX 4070\" train.py"),
    ("fitgpt trace --gpu 3060 vit.py 128", "fitgpt trace --gpu 3060 vit.py 128"),
    ("Qwen/Qwen3-0.6B LoRA", "no config file"), ("n_layer = 3\nimport os\n", "pasted text:2")])
def test_a_text_that_cannot_be_planned_clears_the_answer(shown: Callable[..., Any], text: str, note: str) -> None:
    with shown() as page:
        fitting = verdict(page, "fits")
        paste(page, OOM)
        page.wait_for_selector("#diagnosis section")
        paste(page, text)
        page.wait_for_selector('#verdict[data-state="none"]', state="attached")
        assert note in page.inner_text("#paste-note")
        assert page.locator("#diagnosis section").count() == 0
        page.click("#tab-plan")
        assert page.inner_text("#verdict").strip() == "Nothing planned"
        assert page.inner_text("#summary") + page.inner_text("#length") + page.inner_text("#title") == ""
        assert page.locator("#results > section:not(.verdict):not([inert])").count() == 0
        page.fill("#pasted", "")
        assert verdict(page, "fits") == fitting


@pytest.mark.served
def test_a_running_run_is_shown_live(shown: Callable[..., Any], picture: Callable[[str], Path],
                                     run: Path) -> None:
    rows = recorded_rows()
    done = max(row["step"] for row in rows if row["kind"] == "step") + 1
    of = next(row["max_iters"] for row in rows if row["kind"] == "run")
    with shown(height=760) as page:
        page.wait_for_selector("#tab-live.running")
        page.click("#tab-live")
        page.reload()  # the address has the tab
        page.wait_for_selector("#live-charts figure[data-live]")
        assert page.inner_text("#live-name") == "runs/fineweb"
        assert f"{done:,}" in page.inner_text("#live-tiles")
        assert "running" in page.inner_text("#live-status")
        assert float(page.get_attribute("#live-progress", "value")) == pytest.approx(done / of)
        check_accessibility(page)
        taken(page, picture("page_live"))
        with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:  # a run may write anything
            file.write(json.dumps({"kind": "warning", "text": HOSTILE}) + "\n")
        page.wait_for_selector("#live-status:has-text('<b>bold</b>')")
        assert page.locator("#live img, #live-status b").count() == 0


# ---- copying, printing, small screens, languages


def test_command_config_and_link_are_copied_and_the_config_is_saved(shown: Callable[..., Any]) -> None:
    with shown() as page:
        verdict(page, "fits")
        for name in ("command", "config", "plan-command"):
            page.click(f'[data-copy="{name}"]')
            page.wait_for_selector(f'[data-copy="{name}"]:text("Copied")')
            assert page.evaluate("navigator.clipboard.readText()") == page.text_content(f"#{name}")
        page.click('[data-copy="address"]')
        page.wait_for_selector('[data-copy="address"]:text("Copied")')
        assert page.evaluate("navigator.clipboard.readText()") == page.url
        with page.expect_download() as saving:
            page.click("#download")
        assert saving.value.suggested_filename == "config.py"
        assert Path(saving.value.path()).read_text(encoding="utf-8") == page.text_content("#config")

        # Legends keep their colours in print and in forced colours.
        colours = """() => [...document.querySelectorAll(".legend i")].map(
            (key) => getComputedStyle(key).backgroundColor)"""
        page.wait_for_selector("#step .legend i")
        shown_in = page.evaluate(colours)
        assert len(set(shown_in)) > 5
        page.emulate_media(forced_colors="active")
        assert page.evaluate(colours) == shown_in
        page.emulate_media(forced_colors="none", media="print")
        assert page.evaluate("getComputedStyle(document.querySelector('.legend i')).printColorAdjust") == "exact"
        assert page.is_hidden("#form")  # the plan is printed, not its controls
        page.set_viewport_size({"width": 718, "height": 1000})  # A4
        headline, length = (page.locator(each).bounding_box() for each in ("#headline", "#length"))
        assert headline["y"] + headline["height"] <= length["y"]
        page.emulate_media(media="screen")


@pytest.mark.parametrize("query", [TOO_LARGE, "gpu=<img/src=x>&batch_size=<script>alert(1)</script>&<b>=<b>"])
def test_the_page_fits_a_phone_in_both_directions(shown: Callable[..., Any], query: str) -> None:
    with shown(query, width=390, height=844) as page:
        page.wait_for_selector('#verdict:not([data-state="waiting"])')
        if query == TOO_LARGE:
            verdict(page, "does_not_fit")
            page.wait_for_selector("#gpus button")
            assert page.evaluate("shift") < MOST_SHIFT
        for direction in ("ltr", "rtl"):
            page.evaluate(f"document.documentElement.dir = '{direction}'")
            for tab in range(page.locator('[role="tab"]').count()):
                page.evaluate(f"document.querySelectorAll('[role=tab]')[{tab}].click()")
                page.wait_for_timeout(50)
                assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
        assert page.locator("#plan script:not([type='application/json']), #plan img").count() == 0


def test_the_language_is_the_browsers_or_the_chosen_one(shown: Callable[..., Any]) -> None:
    with shown() as page:
        assert page.locator("html").get_attribute("lang") == "en"
        assert page.is_hidden("#language") == (page.locator("#language option").count() < 2)
        english = page.evaluate("async () => (await (await fetch('static/strings.json')).json()).en")
        other = {key: f"x{text}" for key, text in english.items()} | {"direction": "rtl", "language": "Other"}
        page.route("**/static/strings.json", lambda route: route.fulfill(json={"en": english, "ar": other}))
        page.reload()
        page.select_option("#language", label="Other")
        page.wait_for_url("**lang=ar**")
        page.wait_for_selector("html[lang=ar][dir=rtl] #verdict[data-state=fits] #word:text('xFits')")
        assert page.evaluate("""() => [...document.querySelectorAll("[data-t]")].every(
            (each) => each.textContent.startsWith("x") || each.id === "live-name" || each.id === "gpus-note")""")
        check_accessibility(page, ("light",))  # no colour depends on the language
        page.unroute("**/static/strings.json")
