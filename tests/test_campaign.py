"""The driver of the campaigns: what counts as passed."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import __main__ as campaign


@pytest.mark.parametrize(("done", "failures"), [(0, 1), (1, 1), (2, 0)])
def test_a_campaign_that_runs_none_of_its_remaining_cases_fails(
        done: int, failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    started = subprocess.Popen

    def idle(*_: object, **__: object) -> subprocess.Popen[bytes]:
        return started([sys.executable, "-c", ""])

    monkeypatch.setenv("CAMPAIGN_RESULTS", str(tmp_path))
    monkeypatch.setattr(campaign.subprocess, "Popen", idle)
    monkeypatch.setattr(campaign, "worker_environment", nullcontext)
    kept = campaign.results_folder("fuzz")
    (kept / "total").write_text("2")
    row: dict[str, Any] = {"kind": "accepted", "ok": True, "note": "", "count": 1}
    (kept / "0.jsonl").write_text("".join(json.dumps({"case": str(number), **row}) + "\n" for number in range(done)))
    assert campaign.run_campaigns(["fuzz"], 1, 5.0) == failures
    assert ("no case was run" in capsys.readouterr().out) == bool(failures)
