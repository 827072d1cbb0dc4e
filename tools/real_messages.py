"""Real messages of runs whose config is known, beside the forecast for it on that GPU: a table of docs/accuracy.md.

The messages, their threads and configs are those of tests/diagnosis/messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import show_bytes
from fitgpt.diagnosis.case import Case, ExplainedRun, build_case
from fitgpt.diagnosis.input import message_in, read_input
from fitgpt.hardware.gpus import find
from fitgpt.planning.budget import budget_for, platform_for
from fitgpt.planning.forecast import MemoryPlan
from memory_page import markdown

MESSAGES = Path(__file__).resolve().parent.parent / "tests" / "diagnosis" / "messages"
NEAR = 0.1  # of what the message has allocated
OTHER_CAUSES = ("OOM-ROOM", "OOM-NEIGHBOUR")
SCORE_BYTES = 9  # kept per attention score in float32: softmax, its dropout and the mask


def messages_part() -> str:
    """One row per message with a config: its figures, the forecast's, and whether they agree."""
    index: dict[str, dict[str, Any]] = json.loads((MESSAGES / "index.json").read_text(encoding="utf-8"))["messages"]
    rows = [_row(name, entry) for name, entry in index.items() if "config" in entry]
    results = [row[-1].partition(":")[0] for row in rows]
    counts = ", ".join(f"{results.count(result)} {result}" for result in sorted(set(results), key=results.index))
    table = markdown(["thread", "GPU", "layers/heads/width, batch, dtype", "requested", "allocated", "forecast: needs",
                      "can reserve", "allocated at that request", "peak with scores", "result"], rows)
    return f"{len(rows)} messages: {counts}.\n\n{table}"


def _row(name: str, entry: dict[str, Any]) -> list[str]:
    card = find(entry["card"])
    with open(MESSAGES / f"{name}.txt", "rb") as file:
        message = message_in(read_input(file))
    assert message is not None
    run = ExplainedRun(RunConfig(**entry["config"]), entry["trainer"], platform_for(card))
    case, plan = build_case(message, run, card), MemoryPlan(run.forecast, budget_for(card))
    config = run.config
    scores = config.n_layer * config.n_head * config.batch_size * config.block_size**2 * SCORE_BYTES
    shape = f"{config.n_layer}/{config.n_head}/{config.n_embd}, {config.batch_size} × {config.block_size}"
    return [f"[{name}]({entry['url']})", card.name, f"{shape}, {config.dtype}", _shown(message.requested),
            _shown(message.allocated),
            show_bytes(run.forecast.needs), show_bytes(plan.budget.reserve_limit),
            show_bytes(case.match.allocated) if case.match else "no such request",
            show_bytes(run.forecast.allocated + scores) if entry.get("keeps_scores") else "",
            _result(case, plan, entry)]


def _result(case: Case, plan: MemoryPlan, entry: dict[str, Any]) -> str:
    """hit: does not fit, and at such a request; verdict: does not fit; other cause: it fits, and so it was; miss."""
    rule = entry["without"][0] if "without" in entry else entry["rule"]
    if not plan.fits:
        allocated = case.message.allocated
        near = case.match is not None and (
            case.match.fails_here if allocated is None else abs(case.match.allocated / allocated - 1) <= NEAR)
        return "hit" if near else "verdict"
    return f"other cause: {rule}" if rule in OTHER_CAUSES else "miss"


def _shown(nbytes: int | None) -> str:
    return "" if nbytes is None else show_bytes(nbytes)


PARTS: dict[str, Callable[..., str]] = {"messages": messages_part}
