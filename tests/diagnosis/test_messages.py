"""Every real message in messages/ gets an answer, and the cause that its thread and its figures show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fitgpt.diagnosis.input import explain

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
