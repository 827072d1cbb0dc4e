"""The accuracy that `plan` prints comes from the recorded runs."""

from __future__ import annotations

from typing import Any

import pytest

from accuracy import TRACK_RECORD, basis
from fitgpt.planning.forecast import recorded_runs
from tests.plan_command import SMALL

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("recorded")]  # replays every recorded run


def test_the_track_record_is_what_the_recorded_runs_give(run_plan: Any) -> None:
    rows = [row for record in TRACK_RECORD for row in basis(record, "H200", "2.11")]
    assert recorded_runs() == [{key: str(value) for key, value in row.items()} for row in rows]
    for trainer in ("nanogpt", "fitgpt"):
        errors = [row["worst_percent"] for row in rows if row["trainer"] == trainer]
        track_record = run_plan(*SMALL, "--gpu=h200", f"--trainer={trainer}", "--json").json["track_record"]
        assert track_record == {"recorded_runs_on_this_gpu": len(errors), "recorded_runs_in_all": len(errors),
                                "worst_error_percent": max(errors, key=abs), "recorded_with_torch": ["2.11"]}
    worst = "worst error −0.49 % over"  # of docs/accuracy.md's runs as a user has them
    assert worst in " ".join(run_plan(*SMALL, "--gpu=h200").out.split())
