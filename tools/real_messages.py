"""Real messages of runs whose script is known, beside the forecast for it on that GPU: a table of docs/accuracy.md.

    python tools/real_messages.py --check [NAME …]    traces the scripts again, and compares with the stored traces
    python tools/real_messages.py --write [NAME …]    stores them

The messages, their threads, configs and scripts are those of tests/diagnosis/messages.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.core.units import show_bytes  # noqa: E402
from fitgpt.diagnosis.case import ExplainedRun, budget_at_failure, build_case, has_requested_size, usage_in  # noqa: E402
from fitgpt.diagnosis.input import message_in, read_input  # noqa: E402
from fitgpt.diagnosis.oom_message import OomMessage  # noqa: E402
from fitgpt.diagnosis.traced import requested_event  # noqa: E402
from fitgpt.hardware.gpus import GpuModel, find  # noqa: E402
from fitgpt.memory.timeline import Timeline, replay  # noqa: E402
from fitgpt.planning.budget import Target, budget_for, platform_for  # noqa: E402
from fitgpt.planning.forecast import MemoryPlan  # noqa: E402
from fitgpt.tracing.plan import plan_trace  # noqa: E402
from fitgpt.tracing.script import trace_script  # noqa: E402
from fitgpt.tracing.trace_file import Trace  # noqa: E402
from memory_page import markdown  # noqa: E402
from traces import allocations, store, stored  # noqa: E402

MESSAGES = ROOT / "tests" / "diagnosis" / "messages"
NEAR = 0.1  # of what the message has allocated
TORCH = "2.11"  # whose workspaces the older versions of the messages have
OTHER_CAUSES = ("OOM-ROOM", "OOM-NEIGHBOUR")
Entry = dict[str, Any]


class Comparison(NamedTuple):
    """A forecast beside a message."""

    plan: MemoryPlan         # on the GPU without other processes
    allocated: int | None    # before the allocation that has the requested size; None: there is none
    replayed: str            # with the memory that the process had by the message
    fails_there: bool        # and at an allocation of the requested size


@cache
def entries() -> dict[str, Entry]:
    """Those of which a forecast can be made."""
    index: dict[str, Entry] = json.loads((MESSAGES / "index.json").read_text(encoding="utf-8"))["messages"]
    return {name: entry for name, entry in index.items() if "config" in entry or "script" in entry}


# ---- traces


def trace_path(name: str) -> Path:
    return MESSAGES / "traces" / f"{name}.json.xz"


def traced_now(name: str) -> Trace:
    """The script of a message, traced for the GPU of the message by the rules of torch 2.11, which were measured."""
    entry = entries()[name]
    return trace_script([os.path.relpath(MESSAGES / "train.py"), *shlex.split(entry["script"])], gpu=entry["card"],
                        steps=3, torch="2.11")


# ---- the table


def messages_part() -> str:
    """One row per message: its figures, the forecast's, and whether they agree."""
    rows = [_row(name, entry) for name, entry in entries().items()]
    results = [row[-1].partition(":")[0] for row in rows]
    counts = ", ".join(f"{results.count(result)} {result}" for result in ("hit", "verdict", "other cause", "miss"))
    table = markdown(["thread", "GPU", "forecast of", "requested", "allocated", "forecast: needs", "can reserve",
                      "allocated at that request", "replayed in what the process had", "result"], rows)
    consumer = sum(is_consumer(entry) for entry in entries().values())
    return f"{len(rows)} messages, {consumer} of them from GeForce, TITAN or T4: {counts}.\n\n{table}"


def is_consumer(entry: Entry) -> bool:
    return find(entry["card"]).name.startswith(("GTX ", "RTX ", "TITAN ", "T4"))


def _row(name: str, entry: Entry) -> list[str]:
    card = find(entry["card"])
    with open(MESSAGES / f"{name}.txt", "rb") as file:
        message = message_in(read_input(file))
    assert message is not None
    found = (of_script if "script" in entry else of_config)(name, message, card)
    plan = found.plan
    return [f"[{name}]({entry['url']})", card.name, _program(entry), _shown(message.requested),
            _shown(message.allocated), show_bytes(plan.forecast.needs), show_bytes(plan.budget.reserve_limit),
            "no such request" if found.allocated is None else show_bytes(found.allocated), found.replayed,
            _result(message, found, entry)]


def of_script(name: str, message: OomMessage, card: GpuModel) -> Comparison:
    plan = plan_trace(stored(trace_path(name)), Target(platform_for(card, torch=TORCH), budget_for(card), card))
    tape = plan.trace.tape
    timeline = replay(tape, limit_in(message, card))
    requested = requested_event(message, plan.trace, timeline)
    allocated = None if requested is None else (0, *replay(tape).allocated)[requested]
    return Comparison(plan, allocated, *_replayed(message, timeline))


def of_config(name: str, message: OomMessage, card: GpuModel) -> Comparison:
    entry = entries()[name]
    run = ExplainedRun(RunConfig(**entry["config"]), entry["trainer"], platform_for(card, torch=TORCH))
    match = build_case(message, run, card).match
    timeline = replay(run.tape, limit_in(message, card), expandable=run.expandable)
    return Comparison(MemoryPlan(run.forecast, budget_for(card)), match and match.allocated,
                      *_replayed(message, timeline))


def limit_in(message: OomMessage, card: GpuModel) -> int:
    """What PyTorch could reserve by the message; by the table of GPUs if the message does not say."""
    budget = budget_at_failure(message, usage_in(message), card, 0)
    assert budget is not None
    return budget.reserve_limit


def _replayed(message: OomMessage, timeline: Timeline) -> tuple[str, bool]:
    if timeline.failed is None:
        return "fits", False
    event = timeline.tape.events[timeline.failed]
    there = message.requested is not None and has_requested_size(event.nbytes, message)
    before = (0, *timeline.allocated)[timeline.failed]
    return f"fails at {'that request' if there else show_bytes(event.nbytes)}, {show_bytes(before)} allocated", there


def _program(entry: Entry) -> str:
    if "script" not in entry:
        config = RunConfig(**entry["config"])
        return (f"nanoGPT {config.n_layer}/{config.n_head}/{config.n_embd}, {config.batch_size} × {config.block_size}, "
                f"{config.dtype}")
    words = shlex.split(entry["script"])
    options = dict(pairwise(words))
    dtype = options.get("--autocast") or options.get("--weights") or "float32"
    return f"{options['--model']}, {options['--batch']} × {options['--tokens']}, {dtype}"


def _result(message: OomMessage, found: Comparison, entry: Entry) -> str:
    """hit: does not fit, and at such a request; verdict: does not fit; other cause: it fits, and so it was; miss."""
    rule = entry["without"][0] if "without" in entry else entry["rule"]
    if found.plan.headroom >= 0:
        return f"other cause: {rule}" if rule in OTHER_CAUSES else "miss"
    near = found.allocated is not None and message.allocated is not None and (
        abs(found.allocated / message.allocated - 1) <= NEAR)
    return "hit" if near or found.fails_there else "verdict"


def _shown(nbytes: int | None) -> str:
    return "" if nbytes is None else show_bytes(nbytes)


PARTS: dict[str, Callable[..., str]] = {"messages": messages_part}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", help="of messages with a script; by default all")
    options = parser.parse_args()
    different = []
    for name in options.names or [name for name, entry in entries().items() if "script" in entry]:
        trace = traced_now(name)
        if options.write:
            store(trace, trace_path(name))
        elif allocations(trace) != allocations(stored(trace_path(name))):
            different.append(name)
        print(f"{name}: {len(trace.tensors):,} tensors{', not as stored' if name in different else ''}", flush=True)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
