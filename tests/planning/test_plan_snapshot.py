"""Forecasts change only on purpose: every tenth of 302 plans of both trainers against recorded bytes, verdicts and
owners. CI compares all of them: `python tests/plan_snapshot.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plan_snapshot import SNAPSHOT, answer, differences, generate

ROWS = {tuple(row["argv"]): row for row in json.loads(SNAPSHOT.read_text(encoding="utf-8"))["plans"]}


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_plans_are_those_of_the_snapshot(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python tests/plan_snapshot.py` names each figure that changed; with --write it records the new ones."""
    monkeypatch.chdir(tmp_path)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    lines = [argv for argv in generate() if f"--trainer={trainer}" in argv][::10]
    assert len(lines) > 14
    changed = {" ".join(argv): found for argv in lines
               if (found := differences(ROWS[tuple(argv)], {"argv": argv, **answer(argv)}))}
    assert changed == {}
