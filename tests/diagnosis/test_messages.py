"""Every real message in messages/ gets an answer, and the cause that its thread and its figures show."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from fitgpt.diagnosis.input import explain, message_in, read_input
from fitgpt.diagnosis.traced import explain_traced_message
from fitgpt.hardware import gpus
from real_messages import entries, is_consumer, trace_path
from traces import stored

FOLDER = Path(__file__).parent / "messages"
INDEX: dict[str, dict[str, Any]] = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))["messages"]


def test_every_message_cites_its_thread_and_its_cause() -> None:
    assert {path.name.removesuffix(".txt") for path in FOLDER.glob("*.txt")} == set(INDEX)
    assert len(INDEX) >= 70
    for entry in INDEX.values():
        assert entry["url"].startswith("https://github.com/")
        assert entry["why"] if "without" in entry else entry["cause"] and "rule" in entry


@pytest.mark.parametrize("name", [name for name, entry in INDEX.items() if "rule" in entry])
def test_each_message_gets_an_answer_and_the_deciding_cause_of_its_thread(name: str) -> None:
    diagnosis = explain((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    assert diagnosis.subject != "unknown"
    if INDEX[name]["rule"]:
        assert diagnosis.causes[0].code == INDEX[name]["rule"]


@pytest.mark.parametrize(("name", "named"), [("simpletransformers-500", True), ("transformers-15170", False)])
def test_a_full_gpu_names_memory_outside_pytorch_if_it_is_a_tenth(name: str, named: bool) -> None:
    diagnosis = explain((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    assert ("neither free nor reserved by PyTorch" in diagnosis.causes[0].what) == named
    assert any("nvidia-smi" in remedy.todo for remedy in diagnosis.remedies) == named


# ---- threads whose script is known


def test_at_least_20_messages_of_consumer_gpus_have_a_forecast() -> None:
    assert sum(map(is_consumer, entries().values())) >= 20


def test_every_script_of_a_thread_was_traced_with_its_arguments() -> None:
    scripts = {name: entry["script"] for name, entry in INDEX.items() if "script" in entry}
    assert {path.name.removesuffix(".json.xz") for path in (FOLDER / "traces").iterdir()} == set(scripts)
    assert {name: " ".join(stored(trace_path(name)).command[1:]) for name in scripts} == scripts


@pytest.mark.parametrize(("name", "tensor"), [
    ("transformers-1819", "1,023 × 50,257 × float32"), ("transformers-7177", "8 × 12 × 1,024 × 1,024 × float32"),
    ("lit-llama-137", "11,008 × 4,096 × float32")])
def test_with_the_trace_of_its_script_a_message_is_explained_by_the_allocation_that_fails(name: str,
                                                                                          tensor: str) -> None:
    with open(FOLDER / f"{name}.txt", "rb") as file:
        message = message_in(read_input(file))
    assert message is not None
    found = explain_traced_message(message, stored(trace_path(name)), gpus.find(INDEX[name]["card"]), 0)
    assert found.what.startswith(tensor)
    assert found.what.endswith("the trace runs out of memory at exactly this allocation.")


def test_a_message_without_a_size_is_explained_with_a_trace() -> None:
    message = message_in(read_input(BytesIO(b"RuntimeError: CUDA out of memory.")))
    assert message is not None
    assert explain_traced_message(message, stored(trace_path("transformers-2784")), gpus.find("RTX 2060"), 0).causes
