"""Training as text: a header, one line per report, one line per evaluation, plan against measurement, a closing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..core.units import show_bytes, show_count, show_seconds, show_steps
from ..planning.forecast import MemoryPlan
from ..runs.metrics import PHASES, Evaluation, MemoryReading, PhaseMemory, RunFacts, SplitLoss, StepReport
from .plan_text import phase_table, verdict
from .terminal import LABEL_WIDTH, table


def run_header(facts: RunFacts) -> str:
    return "\n".join(f"{label:<{LABEL_WIDTH}}{text}" for label, text in header_rows(facts))


def header_rows(facts: RunFacts) -> list[tuple[str, str]]:
    """(label, text), the notes last, each in a row of its own."""
    config = facts.config
    shape = ", ".join(f"{name} {config[option]}" for name, option in (
        ("layers", "n_layer"), ("heads", "n_head"), ("width", "n_embd"), ("block", "block_size")) if option in config)
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
    """The verdict, and the forecast of each phase."""
    return f"{'memory':<{LABEL_WIDTH}}{verdict(plan)}\n{phase_table(plan)}"


def plan_vs_measured(planned: Mapping[str, PhaseMemory], measured: Mapping[str, PhaseMemory]) -> str:
    """Measured and forecast memory, phase by phase; '=' where they agree to the byte."""
    rows = [("", "allocated", "forecast", "", "reserved", "forecast", "")]
    for phase, memory in measured.items():
        if phase in planned:
            rows.append((PHASES.get(phase, phase), *_compared(memory.allocated, planned[phase].allocated),
                         *_compared(memory.reserved, planned[phase].reserved)))
    return "memory, measured against forecast\n" + table(rows)


def _compared(measured: int, forecast: int) -> tuple[str, str, str]:
    difference = "=" if measured == forecast else f"{100 * (measured / forecast - 1):+.2f} %" if forecast else ""
    return show_bytes(measured), show_bytes(forecast), difference


def iter_line(report: StepReport) -> str:
    """nanoGPT's line, so that scripts that parse its logs work, with more figures at its end."""
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
    """nanoGPT's line, then standard errors and block sizes: losses at different block sizes do not compare."""
    losses = ", ".join(f"{loss.split} loss {loss.mean:.4f}" for loss in evaluation.losses)
    blocks = " and ".join(dict.fromkeys(str(loss.block) for loss in evaluation.losses))
    errors = [error for loss in evaluation.losses if (error := _standard_error(loss))]
    return f"step {evaluation.step}: {losses} ({', '.join([*errors, f'block {blocks}'])}, " \
           f"{evaluation.tokens_per_s:,.0f} tok/s)"


def _standard_error(loss: SplitLoss) -> str:
    """Empty if it was not measured: one window has no standard error."""
    return f"± {loss.stderr:.4f}" if math.isfinite(loss.stderr) else ""


def saved_line(path: str, seconds: float, nbytes: int) -> str:
    return f"saved {path} ({show_bytes(nbytes)} in {show_seconds(seconds)})"


def closing(run_dir: str, steps: int, seconds: float, best: SplitLoss | None, hints: Sequence[str]) -> str:
    """How many steps the run made, its best loss, where it is, and hints on what to do next."""
    loss = ""
    if best:
        error = _standard_error(best)
        loss = f"; best {best.split} loss {best.mean:.4f}{f' {error}' if error else ''} at block {best.block}"
    return "\n".join([f"{show_steps(steps)} in {show_seconds(seconds)}{loss}", f"The run is in {run_dir}.", *hints])


def show_mfu(mfu: float | None) -> str:
    return "n/a" if mfu is None else f"{mfu:.2%}"


def has_counters(memory: MemoryReading) -> bool:
    return memory != MemoryReading()


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in at most `width` characters, each the mean of an equal share of the values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    cells = min(width, len(finite))
    cuts = [round(cell * len(finite) / cells) for cell in range(cells + 1)]
    means = [sum(finite[start:end]) / (end - start) for start, end in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / span) if span else 0] for mean in means)


def fit_parts(parts: Sequence[tuple[int, str]], width: int) -> list[str]:
    """The texts of (rank, text) pairs in their order, those that do not fit replaced by "". Lower ranks are placed
    first; two blanks separate the texts."""
    kept: set[int] = set()
    left = width
    for index in sorted(range(len(parts)), key=lambda index: parts[index][0]):
        needed = len(parts[index][1]) + (2 if kept else 0)
        if needed <= left:
            kept.add(index)
            left -= needed
    return [text if index in kept else "" for index, (_, text) in enumerate(parts)]
