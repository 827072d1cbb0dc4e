"""runs.metrics: rows are readable whatever their numbers, after a crash, a resume and a rollback."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from fitgpt.core.errors import SystemFault
from fitgpt.runs.folder import open_run
from fitgpt.runs.metrics import append_sample, read_metrics


def test_rows_are_valid_json_even_with_nan_and_infinity(tmp_path: Path) -> None:
    rows = [{"step": 0, "loss": math.nan, "deep": [math.inf, {"x": -math.inf}], "text": "é\n"},
            {"step": 1, "loss": 2.5}]
    with open_run(tmp_path, {}, resume=False) as run:
        for row in rows:
            run.append_metrics(row)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # readable while the run is on
    assert [json.loads(line, parse_constant=pytest.fail)["step"] for line in lines] == [0, 1]
    back = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(back[0]["loss"])
    assert back[0]["deep"] == [math.inf, {"x": -math.inf}]
    assert back[1] == rows[1]


@pytest.mark.parametrize(("tail", "kept", "noted"), [
    (b'{"step": 2, "lo', [1], True),
    (b'{"step": 2}', [1, 2], False),
    (b"\0" * 200_000, [1], True),
    (b"7", [1], True),
    (b"", [1], False),
])
def test_a_partial_last_line_is_repaired_on_resume(tmp_path: Path, tail: bytes, kept: list[int], noted: bool) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + tail)
    with open_run(tmp_path, {}, resume=True) as run:
        assert bool(run.notes) is noted
        run.append_metrics({"step": 3})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*kept, 3]


def test_a_file_with_only_a_half_written_line_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"st')
    open_run(tmp_path, {}, resume=True).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_failed_append_leaves_other_lines_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.write
    with open_run(tmp_path, {}, resume=False) as run:
        run.append_metrics({"step": 1})
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:5]))
            with pytest.raises(SystemFault, match="No space left"):
                run.append_metrics({"step": 2})
        run.append_metrics({"step": 3})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 3]


def test_rows_of_a_resumed_run_replace_those_beyond_its_start(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "start", "start_step": 0},
        *({"kind": "step", "step": step, "loss": 1} for step in range(5)),
        {"kind": "eval", "step": 2, "loss": 1},
        {"kind": "start", "start_step": 2},
        {"kind": "step", "step": 2, "loss": 2},
        {"kind": "step", "step": 3, "loss": 2},
    ]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(["not json", *map(json.dumps, rows), "[1]", ""]))
    assert [(row["kind"], row.get("step"), row.get("loss")) for row in read_metrics(path)] == [
        ("start", None, None), ("step", 0, 1), ("step", 1, 1), ("eval", 2, 1), ("start", None, None),
        ("step", 2, 2), ("step", 3, 2),
    ]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_events_are_kept_after_a_rollback_and_if_repeated(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        *({"kind": "step", "step": step} for step in range(5)),
        {"kind": "oom", "step": 5, "text": "Memory ran out."},
        {"kind": "oom", "step": 5},
        {"kind": "went_back", "start_step": 3},
    ]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, {"kind": ["oom"], "step": 1}])))
    assert read_metrics(path) == [*rows[:3], *rows[5:], {"kind": ["oom"], "step": 1}]


def test_a_sample_is_not_written_to_what_a_link_points_to(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").symlink_to(tmp_path / "notes")
    append_sample(tmp_path, 1, "Once")
    assert not (tmp_path / "notes").exists()
