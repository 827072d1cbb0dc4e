"""What a run says of itself, as text: a header, one line a report, one line an evaluation, a closing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..core.units import show_bytes, show_count, show_seconds
from ..nouns import Evaluation, MemoryPlan, MemoryReading, PhaseForecast, RunFacts, SplitLoss, StepReport
from .planning import PHASES, phase_table, table, verdict


def run_header(facts: RunFacts) -> str:
    return "\n".join(f"{label:<8}{words}" for label, words in header_rows(facts))


def header_rows(facts: RunFacts) -> list[tuple[str, str]]:
    """(label, words), the notes last, each on a row of its own."""
    config = facts.config
    shape = ", ".join(f"{what} {config[knob]}" for what, knob in (
        ("layers", "n_layer"), ("heads", "n_head"), ("width", "n_embd"), ("block", "block_size")) if knob in config)
    compiled = "compiled" if facts.compiled else "not compiled"
    batch = (f" = {config['gradient_accumulation_steps']} × {config['batch_size']} × {config['block_size']}"
             if {"gradient_accumulation_steps", "batch_size", "block_size"} <= config.keys() else "")
    resumed = f"from step {facts.start_step:,} " if facts.start_step else ""
    rows = [
        ("model", f"{show_count(facts.params)} parameters" + (f": {shape}" if shape else "")),
        ("device", f"{facts.device_name} ({facts.device}), {facts.dtype}, {compiled}"),
        ("data", f"{show_count(facts.train_tokens)} tokens to train on, {show_count(facts.val_tokens)} to validate"),
        ("steps", f"{resumed}to {facts.max_iters:,}, of {facts.tokens_per_step:,} tokens{batch}"),
    ]
    if facts.peak_flops:
        rows.append(("mfu", f"of {facts.peak_source}"))
    return rows + [("note", note) for note in facts.notes]


def memory_plan(plan: MemoryPlan) -> str:
    """What each phase will hold, and what there is."""
    return f"memory  {verdict(plan)}\n{phase_table(plan)}"


def plan_beside_measured(planned: Mapping[str, PhaseForecast], measured: Mapping[str, PhaseForecast]) -> str:
    """Phase by phase, what was foreseen and what was seen; '=' where they agree to the byte."""
    rows = [("", "allocated", "foreseen", "", "reserved", "foreseen", "")]
    for phase, seen in measured.items():
        if phase in planned:
            rows.append((PHASES.get(phase, phase), *_beside(seen.allocated, planned[phase].allocated),
                         *_beside(seen.reserved, planned[phase].reserved)))
    return "memory, measured beside foreseen\n" + table(rows)


def _beside(seen: int, foreseen: int) -> tuple[str, str, str]:
    off = "=" if seen == foreseen else f"{100 * (seen / foreseen - 1):+.2f} %" if foreseen else ""
    return show_bytes(seen), show_bytes(foreseen), off


def iter_line(report: StepReport) -> str:
    """nanoGPT's line, and what it never said after it."""
    parts = [f"iter {report.step}: loss {report.loss:.4f}", f"time {report.seconds * 1000:.2f}ms",
             f"mfu {show_mfu(report.mfu)}", f"{report.tokens_per_s:,.0f} tok/s"]
    if has_counters(report.memory):
        parts.append(f"mem {show_bytes(report.memory.reserved)} peak {show_bytes(report.memory.peak_reserved)}")
    if report.skipped:
        parts.append(f"skipped {report.skipped}")
    if report.loss_scale != 1.0:
        parts.append(f"scale {report.loss_scale:g}")
    if math.isfinite(report.seconds_left):
        parts.append(f"left {show_seconds(report.seconds_left)}")
    return ", ".join(parts)


def eval_line(evaluation: Evaluation) -> str:
    """nanoGPT's line, then how far to trust it. Losses taken at different blocks do not compare, so blocks are said."""
    losses = ", ".join(f"{loss.split} loss {loss.mean:.4f}" for loss in evaluation.losses)
    blocks = " and ".join(dict.fromkeys(str(loss.block) for loss in evaluation.losses))
    more = [*filter(None, map(_error, evaluation.losses)), f"block {blocks}", f"{evaluation.tokens_per_s:,.0f} tok/s"]
    return f"step {evaluation.step}: {losses} ({', '.join(more)})"


def _error(loss: SplitLoss, before: str = "") -> str:
    """Of one window nothing tells how far it is off."""
    return f"{before}± {loss.stderr:.4f}" if math.isfinite(loss.stderr) else ""


def saved_line(path: str, seconds: float, nbytes: int) -> str:
    return f"saved {path} ({show_bytes(nbytes)} in {show_seconds(seconds)})"


def closing(run_dir: str, steps: int, seconds: float, best: SplitLoss | None, more: Sequence[str]) -> str:
    """How it ended, where it is, and what else there is to say."""
    loss = f"; best {best.split} loss {best.mean:.4f}{_error(best, ' ')} at block {best.block}" if best else ""
    plural = "" if steps == 1 else "s"
    return "\n".join([f"{steps:,} step{plural} in {show_seconds(seconds)}{loss}", f"The run is in {run_dir}.", *more])


def show_mfu(mfu: float | None) -> str:
    return "n/a" if mfu is None else f"{mfu:.2%}"


def has_counters(memory: MemoryReading) -> bool:
    return memory != MemoryReading()


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of the values in `width` cells, each the mean of its stretch, the lowest cell lowest."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    cells = min(width, len(finite))
    cuts = [round(cell * len(finite) / cells) for cell in range(cells + 1)]
    means = [sum(finite[start:end]) / (end - start) for start, end in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / span) if span else 0] for mean in means)


def fit_parts(parts: Sequence[tuple[int, str]], width: int) -> list[str]:
    """Of (rank, words) pairs, in their order, as many as the width holds with two blanks between them, those of the
    lowest rank first."""
    kept: set[int] = set()
    left = width
    for place in sorted(range(len(parts)), key=lambda place: parts[place][0]):
        needed = len(parts[place][1]) + (2 if kept else 0)
        if needed <= left:
            kept.add(place)
            left -= needed
    return [words if place in kept else "" for place, (_, words) in enumerate(parts)]
