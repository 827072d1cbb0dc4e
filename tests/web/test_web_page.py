"""The page in a real Chromium: what it shows, what its controls do, by pointer and by keys; and its pictures."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fitgpt.web.settings import KNOBS
from web_server import HOSTILE, NOTES, run_going_on, serving

LARGEST_PICTURE = 250_000
SMALL = "gpu=RTX+4070&n_layer=2"  # answered soonest
OOM = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity of 11.65 "
       "GiB of which 1.10 GiB is free. Process 1201 has 2.07 GiB memory in use. Including non-PyTorch memory, this "
       "process has 8.48 GiB memory in use. Of the allocated memory 8.05 GiB is allocated by PyTorch, and 184.00 MiB "
       "is reserved by PyTorch but unallocated.")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with run_going_on(tmp_path_factory.mktemp("served")) as folder:
        yield folder


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with serving(run.parent.parent) as (found, _):
        yield found


@pytest.fixture(scope="module")
def shown(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Shows the page with some settings; afterwards, nothing may have gone wrong or gone out."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(20_000)
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(f"{said.type}: {said.text}"))
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
    """Waits until the page says so, with the exact figure."""
    page.wait_for_selector(f'#verdict[data-state="{state}"] #short:not(:empty)')
    text: str = page.inner_text("#verdict")
    return text


def width(page: Any, phase: str, part: str) -> float:
    return float(page.get_attribute(f'[data-phase="{phase}"] rect[data-part="{part}"]', "width").rstrip("%"))


def taken(what: Any, where: Path) -> None:
    """A picture of the page, or of a part of it."""
    page = getattr(what, "page", what)
    page.mouse.move(0, 0)
    page.wait_for_timeout(350)  # bars glide
    what.screenshot(path=str(where))
    assert where.stat().st_size < LARGEST_PICTURE


# ---- loading


def test_the_page_loads_and_answers_with_nothing_from_outside(
        shown: Callable[..., Any], picture: Callable[[str], Path]) -> None:
    with shown("gpu=RTX+4070") as page:
        assert "Fits" in verdict(page, "fits")
        assert "to spare" in page.inner_text("#short")
        assert page.locator(".phase-line").count() == 6
        page.wait_for_selector("#step figure[data-live]")
        page.wait_for_selector("#cards button")
        assert page.locator("#cards button").count() > 60
        assert page.get_attribute('#cards [data-card="RTX 4070"]', "aria-current") == "true"
        assert page.text_content("#phases").count("GiB") > 5
        assert "fitgpt train" in page.inner_text("#command")
        page.wait_for_selector("#fix-buttons button")  # they come late, and move what is below them
        taken(page.locator("#step figure"), picture("timeline"))
        page.focus("#step .frame")
        page.keyboard.press("ArrowRight")
        assert "activations" in page.inner_text("#step .readout")


def test_every_control_has_a_label_and_every_knob_a_control(shown: Callable[..., Any]) -> None:
    with shown() as page:
        for name in KNOBS:
            assert page.locator(f'label[for="k-{name}"]').count() == 1
        unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, select, textarea")].filter(
            (each) => !each.labels?.length && !each.getAttribute("aria-label") && !each.innerText.trim()
                      && each.checkVisibility()).map((each) => each.outerHTML)""")
        assert unnamed == []


# ---- the bars follow


def test_a_slider_moves_the_bars_and_the_address(shown: Callable[..., Any]) -> None:
    with shown() as page:
        verdict(page, "fits")
        before = width(page, "first_train", "activations")
        page.focus("#s-batch_size")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        page.wait_for_selector("#title:has-text('batch 24')")
        assert page.input_value("#k-batch_size") == "24"
        assert width(page, "first_train", "activations") > 1.5 * before
        page.wait_for_url("**batch_size=24**")


def test_while_a_slider_moves_the_page_shows_what_it_passes(shown: Callable[..., Any]) -> None:
    with shown() as page:
        verdict(page, "fits")
        page.evaluate("""() => { window.titles = new Set(); const place = document.getElementById("title");
            new MutationObserver(() => titles.add(place.textContent)).observe(place, { childList: true }); }""")
        page.route("**/api/plan?*", lambda route: (time.sleep(0.05), route.continue_()))
        page.focus("#s-batch_size")
        for _ in range(12):  # each before the answer to the one before it
            page.keyboard.press("ArrowRight")
            page.wait_for_timeout(20)
        page.unroute("**/api/plan?*")
        verdict(page, "fits")
        assert page.evaluate("titles.size") > 2


def test_what_a_first_answer_left_out_is_filled_in_when_the_exact_one_comes(shown: Callable[..., Any]) -> None:
    with shown("gpu=RTX+4070&trainer=nanogpt&n_layer=24&n_head=16&n_embd=1024") as page:
        assert "too much" in verdict(page, "full")
        assert width(page, "train", "rest") > 0
        exact = page.text_content("#phases tr:has-text('training') td:nth-child(2)")
        assert exact == page.inner_text('[data-phase="train"] span:last-child')
        weights = page.text_content("#owners tr:has-text('weights') td:nth-child(2)")
        assert f"weights {weights}" in " ".join(page.inner_text("#bars-legend").split())


def test_a_deep_run_whose_tensors_fit_is_neither_green_nor_red_until_it_is_replayed(shown: Callable[..., Any]) -> None:
    with shown("gpu=RTX+4090&trainer=nanogpt&n_layer=12&n_head=8&n_embd=512&batch_size=4") as page:
        verdict(page, "fits")
        page.evaluate("""() => { window.states = []; const place = document.getElementById("verdict");
            new MutationObserver(() => states.push([place.dataset.state, place.querySelector("#word").textContent]))
                .observe(place, { attributes: true, childList: true, subtree: true }); }""")
        page.fill("#k-n_layer", "24")
        page.keyboard.press("Enter")
        page.wait_for_selector("#title:has-text('24 layers')")
        verdict(page, "fits")
        assert ["waiting", "Its tensors fit"] in page.evaluate("states")
        assert not [seen for seen in page.evaluate("states") if seen[0] == "full"]
        room, speed = page.inner_text("#short").split(" · ")
        assert f"Fits: {room}." in page.text_content("#config")
        assert speed.endswith(" tokens/s")


def test_what_cannot_be_is_said_and_mended(shown: Callable[..., Any]) -> None:
    with shown("gpu=RTX+2060&dtype=bfloat16") as page:
        page.wait_for_selector('#verdict[data-state="problem"]')
        assert "compute capability" in page.inner_text("#words")
        assert page.evaluate("document.getElementById('fixes').inert")  # what is there is another run's
        assert page.inner_text("#mend button") == "Set dtype=float16"
        page.click("#mend button")
        verdict(page, "fits")
        assert not page.evaluate("document.getElementById('fixes').inert")
        assert "dtype=float16" in page.url


# ---- the run of the notes


def test_the_notes_run_turns_green_with_fitgpt_or_without_other_programs(
        shown: Callable[..., Any], picture: Callable[[str], Path]) -> None:
    with shown(NOTES, height=1130) as page:
        assert "Does not fit" in verdict(page, "full")
        assert page.input_value("#k-n_embd") == "576"  # the address carries the settings
        assert page.locator("#k-preset option:checked").inner_text() == "notes_77m: 77M, float16"
        assert page.is_checked("#trainer-nanogpt")
        page.wait_for_selector('#fix-buttons [data-family="block"]')
        page.wait_for_selector("#step figure[data-live]")
        page.wait_for_selector("#cards button")
        taken(page, picture("page"))
        page.click("text=train it with fitgpt")
        assert "Fits" in verdict(page, "fits")
        assert re.search(r"train it with fitgpt: 9\.\d+ GiB → 3\.\d+ GiB at the peak", page.inner_text("#difference"))
        assert "trainer" not in page.url  # fitgpt is the default
        page.click("#difference button")
        verdict(page, "full")
        assert "trainer=nanogpt" in page.url
        assert page.is_hidden("#difference")
        page.go_back()
        verdict(page, "fits")
        page.go_back()
        verdict(page, "full")
        others = width(page, "train", "others")
        page.fill("#k-others", "0")
        verdict(page, "fits")
        assert others > 0 == width(page, "train", "others")
        page.wait_for_selector("#said:has-text('Fits')", state="attached")  # for those who listen


def test_a_card_and_a_preset_are_chosen_with_a_click(shown: Callable[..., Any]) -> None:
    with shown(f"{SMALL}&grad_checkpoint=True&batch_size=7") as page:
        page.click('#cards [data-card="RTX 3090"]')
        page.wait_for_selector("#title:has-text('RTX 3090')")
        page.wait_for_url("**gpu=RTX+3090**")
        page.select_option("#k-preset", label="notes_30m: 30M, float16")
        page.wait_for_selector("#title:has-text('6 layers of width 384, batch 16 × 512, float16')")
        assert page.input_value("#k-batch_size") == "16"
        assert not page.is_checked("#k-grad_checkpoint")


def test_a_fix_changes_the_run_in_the_dark(shown: Callable[..., Any], picture: Callable[[str], Path]) -> None:
    with shown("gpu=RTX+4070&batch_size=40&budget=8GiB", height=1000, scheme="dark") as page:
        verdict(page, "full")
        fix = page.wait_for_selector('#fix-buttons [data-family="recompute"].enough')
        label = fix.inner_text().split("\n")[0]
        assert re.fullmatch(r"recompute \d+ layers?", label)
        fix.click()
        verdict(page, "fits")
        assert re.search(r"recompute=\d+\*\w+%2C\d+\*products", page.url)
        assert label in page.inner_text("#difference")
        page.wait_for_selector('#fix-buttons [data-family="muon"]')
        page.wait_for_selector("#cards button")
        taken(page, picture("page_dark"))


def test_a_button_that_is_held_while_others_come_is_clicked(shown: Callable[..., Any]) -> None:
    waiting: list[Any] = []
    with shown("gpu=RTX+4070&batch_size=40&budget=8GiB", height=1000) as page:
        page.route("**/api/fix?family=offload*", lambda route: waiting.append(route))
        page.reload()
        fix = page.wait_for_selector('#fix-buttons [data-family="recompute"].enough')
        while not waiting:
            page.wait_for_timeout(50)
        box = fix.bounding_box()
        page.mouse.move(box["x"] + 20, box["y"] + 10)
        page.mouse.down()
        waiting.pop().continue_()
        page.wait_for_selector('#fix-buttons [data-family="offload"]')
        page.mouse.up()
        page.unroute("**/api/fix?family=offload*")
        verdict(page, "fits")


def test_fitting_it_finds_settings_that_fit_and_says_why(shown: Callable[..., Any]) -> None:
    with shown("gpu=RTX+4070&batch_size=24&budget=2GiB&n_layer=2") as page:
        verdict(page, "full")
        page.click("text=fit it for me")
        verdict(page, "fits")
        page.wait_for_selector("#difference li:has-text('batch_size 24 →')")
        assert "tokens/s" in page.inner_text("#short")


# ---- keys alone


def tabbed_to(page: Any, selector: str, most: int = 80) -> None:
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} cannot be reached by Tab")


def test_all_of_it_works_by_keys_alone(shown: Callable[..., Any]) -> None:
    with shown(f"{SMALL}&batch_size=16&trainer=nanogpt&budget=4GiB") as page:
        verdict(page, "full")
        page.wait_for_selector('#fix-buttons [data-family="block"]')
        tabbed_to(page, "#trainer-nanogpt")
        page.keyboard.press("ArrowLeft")
        verdict(page, "fits")
        assert page.is_checked("#trainer-fitgpt")
        tabbed_to(page, "#s-batch_size")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
        page.keyboard.press("End")
        verdict(page, "full")
        tabbed_to(page, "#less > summary")
        page.keyboard.press("Enter")
        tabbed_to(page, "#k-recompute")
        page.keyboard.press("i")  # input
        page.wait_for_selector("#command:has-text('--recompute=input')")
        page.wait_for_selector('#fix-buttons:not(.stale) [data-family="batch"]')
        tabbed_to(page, '[data-family="batch"]')
        page.keyboard.press("Enter")
        page.wait_for_selector("#difference:has-text('batch')")
        page.focus("#tab-plan")
        page.keyboard.press("ArrowRight")
        assert page.is_visible("#pasted")
        assert page.is_hidden("#form")


# ---- the other tabs


def test_a_pasted_message_is_explained(shown: Callable[..., Any], picture: Callable[[str], Path]) -> None:
    with shown(f"{NOTES}&compile=False", height=1180) as page:
        verdict(page, "full")
        page.click("#tab-explain")
        page.fill("#pasted", OOM)
        page.check("#with-plan")
        page.click("text=Explain")
        page.wait_for_selector("#diagnosis section")
        told = page.inner_text("#diagnosis")
        assert "16 × 1,024 × 50,304 × 4" in told
        taken(page, picture("page_explain"))
        page.click("#diagnosis button >> nth=0")
        assert page.is_visible("#verdict")
        page.wait_for_selector("#difference:not([hidden])")
        page.click("#tab-explain")
        page.fill("#pasted", f'Traceback (most recent call last):\n  File "{HOSTILE}", line 5, in f\n    x\n{OOM}')
        page.uncheck("#with-plan")
        page.click("text=Explain")
        page.wait_for_selector("#diagnosis:has-text('<b>bold</b>')")
        assert page.locator("#diagnosis img, #diagnosis b").count() == 0
        page.fill("#pasted", HOSTILE)
        page.click("text=Explain")
        page.wait_for_selector("#diagnosis:has-text('does not guess')")


def test_the_run_that_goes_on_here_is_shown_live(shown: Callable[..., Any], picture: Callable[[str], Path],
                                                 run: Path) -> None:
    with shown(height=760) as page:
        page.wait_for_selector("#tab-live.going")
        page.click("#tab-live")
        page.wait_for_selector("#live-charts figure[data-live]")
        assert page.inner_text("#live-name") == "runs/fineweb"
        assert "211" in page.inner_text("#live-tiles")
        assert "running" in page.inner_text("#live-status")
        assert float(page.get_attribute("#live-progress", "value")) == pytest.approx(211 / 400)
        taken(page, picture("page_live"))
        with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:  # a run may write anything
            file.write(json.dumps({"kind": "warning", "text": HOSTILE}) + "\n")
        page.wait_for_selector("#live-status:has-text('<b>bold</b>')")
        assert page.locator("#live img, #live-status b").count() == 0


# ---- and


def test_command_config_and_link_are_copied(shown: Callable[..., Any]) -> None:
    with shown() as page:
        verdict(page, "fits")
        for name in ("command", "config", "plan-command"):
            page.click(f'[data-copy="{name}"]')
            page.wait_for_selector(f'[data-copy="{name}"]:text("Copied")')
            assert page.evaluate("navigator.clipboard.readText()") == page.text_content(f"#{name}")
        page.click('[data-copy="address"]')
        page.wait_for_selector('[data-copy="address"]:text("Copied")')
        assert page.evaluate("navigator.clipboard.readText()") == page.url


@pytest.mark.parametrize("query", [NOTES, "gpu=<img/src=x>&batch_size=<script>alert(1)</script>&<b>=<b>"])
def test_it_fits_a_phone_whatever_it_says(shown: Callable[..., Any], picture: Callable[[str], Path],
                                          query: str) -> None:
    with shown(query, width=390, height=844) as page:
        page.wait_for_selector('#verdict:not([data-state="waiting"])')
        if query == NOTES:
            verdict(page, "full")
            page.wait_for_selector("#cards button")
            taken(page, picture("page_phone"))
        for tab in ("plan", "explain", "live"):
            page.evaluate(f"document.getElementById('tab-{tab}').click()")
            page.wait_for_timeout(50)
            assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
        assert page.locator("#plan script:not([type='application/json']), #plan img").count() == 0
