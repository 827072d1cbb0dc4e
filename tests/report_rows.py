"""Rows of metrics.jsonl, and the report page of a run with them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fitgpt.core.units import GiB
from fitgpt.runs.record import record_of
from fitgpt.show.report_page import report_page
from tests.html_outline import Outline

FACTS: dict[str, Any] = dict(
    kind="run", config={"n_layer": 2, "learning_rate": 1e-3, "out_dir": "runs/x"}, params=123_456, device="cpu",
    device_name="A computer", dtype="float32", compiled=False, peak_flops=None, peak_source="", tokens_per_step=1000,
    train_tokens=10**6, val_tokens=10**4, start_step=0, max_iters=100,
    versions={"fitgpt": "0.1", "torch": "2.13", "python": "3.12"}, notes=["compile: off."])


PLAN = {"kind": "plan", "phases": {"train": {"allocated_bytes": 3 * GiB, "reserved_bytes": 5 * GiB}, "save": None},
        "owners_at_peak": [{"owner": "weights", "nbytes": GiB}, {"owner": "logits", "nbytes": 2 * GiB}],
        "reserve_limit_bytes": 11 * GiB}


def step(number: int, **changes: Any) -> dict[str, Any]:
    memory = dict(allocated=GiB, reserved=2 * GiB, peak_allocated=3 * GiB, peak_reserved=4 * GiB)
    return dict(kind="step", step=number, loss=3.0, lr=1e-3, grad_norm=1.0, seconds=0.5, tokens_per_s=2000.0, mfu=None,
                skipped=0, loss_scale=1.0, memory=memory, seconds_left=1.0) | changes


def evaluation(number: int, val: float = 3.5, **changes: Any) -> dict[str, Any]:
    losses = [dict(split=split, mean=mean, stderr=0.01, windows=8, block=64) for split, mean in (("train", 3.4),
                                                                                                 ("val", val))]
    return dict(kind="eval", step=number, best=True, losses=losses, tokens_per_s=1.0, memory={}) | changes


def write_run(folder: Path, rows: Iterable[dict[str, Any]], tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + tail, encoding="utf-8")
    return folder


def page_of(rows: list[dict[str, Any]]) -> str:
    html = report_page([record_of("x", rows, None)], "fitgpt")
    Outline(html)
    return html
