"""The driver of the campaigns: what counts as passed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import __main__ as campaign
from tests.campaign.outcome import Campaign, Outcome


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


def test_a_worker_runs_one_case_however_late_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the set-up alone can take longer than `--quick` allows."""
    monkeypatch.setenv("CAMPAIGN_RESULTS", str(tmp_path))
    monkeypatch.setattr(campaign, "opened", lambda name, folder: Campaign(["a", "b", "c"], lambda case: Outcome(case)))
    previous = signal.getsignal(signal.SIGTERM)
    try:
        assert campaign.work("fuzz", "0/1", until=0.0) == 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert len(campaign.results("fuzz")) == 1
