"""The static site: the same answers as CPython's, the first page without Python, use without a network, its size."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlencode

import pytest

from fitgpt.hardware import gpus
from fitgpt.memory.platform import TORCH_VERSIONS
from fitgpt.web.api import ApiRequest, answer_json
from static_site import build
from tests.web.test_page import OOM, SMALL, verdict
from tests.web.test_paste import SMI
from tests.web_server import built_site, serving_files

pytestmark = [pytest.mark.site, pytest.mark.xdist_group("page")]

MOST_BYTES = 8_000_000  # on the first visit, where the host compresses nothing
ANSWERS = 200
SAME_TORCH = f"{SMALL}&torch=2.13"  # else the one that is installed: none in Pyodide


@pytest.fixture(scope="module")
def site() -> Path:
    return built_site()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(60_000)
    yield page
    context.close()


def random_query(rng: Random) -> str:
    trainer, heads = rng.choice(("fitgpt", "nanogpt")), rng.choice((1, 2, 6, 12))
    settings = {
        "gpu": rng.choice([card.name for card in gpus.load() if card.vendor == "nvidia"]), "trainer": trainer,
        "torch": rng.choice(list(TORCH_VERSIONS)), "n_layer": rng.randint(1, 12), "n_head": heads,
        "n_embd": heads * rng.choice((8, 33, 64)), "batch_size": rng.randint(1, 24),
        "block_size": rng.choice((64, 333, 1024)), "compile": rng.choice(("auto", "False")),
        "others": rng.choice(("", "2118MiB"))}
    if trainer == "fitgpt":
        settings |= rng.choice(({}, {"offload": "optimizer"}, {"saved_activations": "input"},
                                {"grad_checkpoint": "True"}, {"optimizer": "muon"}))
    return urlencode({name: value for name, value in settings.items() if value != ""})


def random_questions() -> list[ApiRequest]:
    """Most are what a moving slider asks; some of every other kind."""
    rng = Random(314)
    found = [ApiRequest("form"), ApiRequest("paste", None, SMI), ApiRequest("paste", SAME_TORCH, OOM),
             ApiRequest("paste", None, "n_layer = 3\nexperts = 8"), ApiRequest("plan", "gpu=4070&n_embd=500")]
    found += [ApiRequest("fit", f"{SAME_TORCH}&goal={goal}") for goal in ("fastest", "smallest-memory")]
    found += [ApiRequest("gpus", random_query(rng)) for _ in range(4)]
    while len(found) < ANSWERS:
        query = random_query(rng)
        found += [ApiRequest(name, query) for name in ("plan", "step", "exact", "fixes")]
        found += [ApiRequest("fix", f"family={rng.choice(('batch', 'saved_activations', 'offload'))}&{query}")]
    return found[:ANSWERS]


def test_answers_in_pyodide_and_in_cpython_are_equal(site: Path, tmp_path: Path) -> None:
    questions, asked, answered = random_questions(), tmp_path / "questions.json", tmp_path / "answers.json"
    asked.write_text(json.dumps(questions), encoding="utf-8")
    build.run_in_pyodide(build.HERE / "answer.py", site, asked, answered, stdlib=site / "python" / "python_stdlib.zip")
    for question, text in zip(questions, json.loads(answered.read_text(encoding="utf-8")), strict=True):
        found, expected = json.loads(text), json.loads(answer_json(question))
        for each in (found, expected):
            if question.name == "form":
                del each["has_docs"], each["here"]
            if question.name == "step" and "trainer=fitgpt" in question.query:
                each["html"] = re.findall(r'<ul class="legend">.*?</ul>', each["html"])
        assert same(found, expected), question
        assert "bug" not in found


def same(found: Any, expected: Any) -> bool:
    """Equal in every string and byte. Python 3.12 made sum() of floats more exact: speeds may differ in their last bit.
    Python 3.14 releases a function's variables from the last to the first, earlier ones from the first to the last: two
    tensors that are freed when a function of the engine returns are freed in another order, which only the curve of
    `step` shows."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return math.isclose(found, expected, rel_tol=1e-14) if isinstance(expected, float) else bool(found == expected)


def test_the_first_page_needs_no_python_and_says_when_it_cannot_start(page: Any, site: Path) -> None:
    with serving_files(site) as (address, _):
        page.route("**/python/*", lambda route: route.abort())
        page.goto(address)
        assert "Fits" in verdict(page, "fits")
        page.wait_for_selector("#gpus button")
        page.wait_for_selector('#fix-buttons [data-family="muon"]')
        assert page.is_hidden("#offline")
        page.fill("#k-n_layer", "3")
        page.wait_for_selector("#offline:has-text('Python could not be started')")
        page.unroute("**/python/*")
        page.fill("#k-n_layer", "4")  # another attempt
        page.wait_for_selector("#title:has-text('4 layers')")
        assert page.is_hidden("#offline")


def test_the_site_works_without_a_network_after_the_first_visit(page: Any, site: Path) -> None:
    with serving_files(site) as (address, _):
        page.goto(f"{address}#{SMALL}")
        verdict(page, "fits")
        page.evaluate("navigator.serviceWorker.ready.then(() => null)")
    page.goto("about:blank")
    page.goto(f"{address}#{SMALL}&batch_size=7&tab=explain&{urlencode({'paste': OOM})}")  # the server is gone
    page.wait_for_selector("#diagnosis:has-text('3.07 GiB')")
    page.click("#tab-plan")
    page.wait_for_selector("#title:has-text('batch 7')")


def test_the_page_allows_no_other_host_and_says_what_it_cannot_do(page: Any, site: Path) -> None:
    with serving_files(site) as (address, _):
        page.goto(f"{address}#{SMALL}&tab=live")
        verdict(page, "fits")
        assert "leaves your browser" in page.inner_text("#paste")
        assert "cannot see your GPU" in page.inner_text("footer")
        assert page.locator("#tab-live, #live").count() == 0
        assert page.evaluate("""() => new Promise((done) => {
            addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective));
            fetch("https://example.org/").catch(() => null);
        })""") == "connect-src"


def test_the_first_visit_loads_at_most_8_mb(site: Path) -> None:
    text = (site / "service_worker.js").read_text(encoding="utf-8")
    names = json.loads(text.partition("FILES = ")[2].partition(";")[0])
    assert {"./", "index.html", "static/answers.json", "python/fitgpt.zip"} < set(names)
    assert sum((site / name).stat().st_size for name in names if name != "./") < MOST_BYTES


def test_a_pyodide_with_another_checksum_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / f"pyodide-{build.VERSION}.tgz"
    monkeypatch.setattr(build, "DOWNLOADED", tmp_path)
    monkeypatch.setattr(build, "PYODIDE", tmp_path / "package")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: packed.write_bytes(b"another"))
    with pytest.raises(SystemExit, match="SHA-512"):
        build.download()
    assert not packed.exists()
