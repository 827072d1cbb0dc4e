"""Plans as plain text: what `fitgpt plan` and `fitgpt cards` print, and the page of --timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..config.run_config import RunConfig
from ..core.units import MiB, show_bytes, show_count, show_seconds, show_steps, with_article
from ..memory.timeline import OwnerTimeline
from ..planning.changes import Change, PricedChange
from ..planning.forecast import MemoryPlan, TrackRecord
from ..runs.metrics import PHASES
from .terminal import MIN_TEXT_WIDTH, labelled_rows, paragraph, table, wrap

if TYPE_CHECKING:  # a plan imports this module to print itself
    from ..planning.plan import Duration, GpuVerdict, Plan

TRAINERS = {"fitgpt": "fitgpt", "nanogpt": "nanoGPT's train.py"}
VERDICTS = {True: "Fits", False: "Does not fit"}
RESULTS = {"exact": "same result", "lossy": "changes the result", "other": "losses no longer compare",
           "batch": "changes the effective batch size, and so what is trained"}  # by Change.kind
GPUS_NOTE = ("Usable is the memory that CUDA can allocate; TFLOP/s are dense, half precision. Where each of the two "
             "comes from: seen on such a GPU, printed by the vendor, worked out by a formula, or recalled and to be "
             "checked. --json has every figure.")


# ---- the plan


def plan_text(plan: Plan, width: int = 80, *, colour: bool = False) -> str:
    """The whole plan; with --options the table of all changes follows."""
    forecast, budget, run, priced = plan.forecast, plan.budget, plan.run, plan.options is not None
    title = run_title(run, forecast.trainer, forecast.params, with_article(budget.card) if budget.card else "")
    word = VERDICTS[plan.fits]
    result = paragraph(f"{word}: {verdict(plan, plan.target.neighbours)}", width)
    if colour:
        result = f"\x1b[1;{32 if plan.fits else 31}m{word}\x1b[0m{result[len(word):]}"
    parts = [paragraph(title, width), phase_table(plan, width), owner_table(plan, width), result]
    if not plan.fits:
        parts.append(suggestion_text(plan.changes, forecast.trainer, width, priced=priced))
    rows = [("run", run_text(plan.duration)), ("assumes", assumptions_text(plan)),
            ("accuracy", accuracy_text(plan, plan.track_record)), ("GPU", " ".join(budget.sources)),
            *(("note", note) for note in plan.notes)]
    parts.append(labelled_rows(rows, width))
    if plan.options is not None:
        parts.append(option_table(plan.options, forecast.needs, budget.reserve_limit, width).rstrip("\n"))
    return "\n\n".join(parts) + "\n"


def run_title(run: RunConfig, trainer: str, params: int, gpu: str) -> str:
    """A run in one line. `gpu`: with its article; empty if it has no name."""
    layers = f"{run.n_layer} layer{'s' if run.n_layer > 1 else ''}"
    return (f"{TRAINERS[trainer]}{f' on {gpu}' if gpu else ''}: {show_count(params)} parameters, {layers} of width "
            f"{run.n_embd:,}, batch {run.batch_size:,} × {run.block_size:,}, {run.dtype}, "
            f"{'compiled' if run.compile else 'eager'}")


def phase_table(plan: MemoryPlan, width: int = 80) -> str:
    """The memory of each phase, with the peak marked. Reserved is the maximum since the process started."""
    rows = [("", "allocated", "reserved", "process", "")]
    for phase, label in PHASES.items():
        memory = plan.forecast.phases.get(phase)
        if memory is not None:
            rows.append((label, show_bytes(memory.allocated), show_bytes(memory.reserved),
                         show_bytes(memory.reserved + plan.budget.outside),
                         "← peak" if phase == plan.forecast.peak_phase else ""))
    return table(rows, left=(0, 4), width=width, optional=(1, 4, 3))


def owner_table(plan: MemoryPlan, width: int) -> str:
    """What the memory at the peak consists of, each share with its formula."""
    forecast = plan.forecast
    total = sum(share.nbytes for share in forecast.owners_at_peak)
    lines = [f"At the peak, {show_bytes(total)} allocated:"]
    for share in forecast.owners_at_peak:
        start = f"{share.owner:<12}{show_bytes(share.nbytes):>10}{share.nbytes / total:>7.1%}  "
        if len(start) + MIN_TEXT_WIDTH > width:
            lines += [start.rstrip(), *wrap(share.formula, width, "  ")]
        else:
            lines += wrap(share.formula, width, start)
    return "\n".join(lines)


def verdict(plan: MemoryPlan, neighbours: str = "") -> str:
    """What the run needs, what it may reserve, the headroom, and how much other processes may use."""
    forecast, budget = plan.forecast, plan.budget
    limit = f"may reserve {show_bytes(budget.reserve_limit) if budget.reserve_limit > 0 else 'nothing'}"
    takes_all = bool(budget.card) and budget.budget == budget.usable - budget.others
    if takes_all:
        limit += f" ({show_bytes(budget.usable)} usable"
        limit += f", {show_bytes(budget.others)} used by others" if budget.others else ""
    else:
        limit += f" (a budget of {show_bytes(budget.budget)}"
    limit += f", {show_bytes(budget.outside)} outside the allocator)"
    difference = show_bytes(abs(plan.headroom))
    headroom = f"headroom {difference}" if budget.card else f"{difference} of the budget are left"
    sentences = [f"needs {show_bytes(forecast.needs)}, {limit}: {headroom if plan.fits else f'{difference} too much'}."]
    room = budget.usable - budget.outside - forecast.needs
    if takes_all and plan.fits:
        sentences.append(f"It fits while everything else on the GPU stays under {show_bytes(room)}.")
    elif takes_all and room > 0:
        sentences.append(f"It would fit if everything else on the GPU stayed under {show_bytes(room)}.")
    if neighbours:
        sentences.append(neighbours)
    low, high = (show_bytes(nbytes) for nbytes in forecast.reserved_range)
    if low != high:
        sentences.append(f"Reserved will be {low} to {high}, depending on the addresses the CUDA driver returns.")
    return " ".join(sentences)


def suggestion_text(suggestions: Sequence[Change], trainer: str, width: int, *, priced: bool = False) -> str:
    """The single changes that make a run fit, or where to look if there is none."""
    if not suggestions:
        without = " and ".join(flag for flag, given in (("--trainer", trainer != "fitgpt"), ("--options", priced))
                               if given)
        options = "" if priced else " What each would save: --options."
        return paragraph(f"No single change makes it fit.{options} Several together: fitgpt fit, with the same "
                         f"arguments{f' but without {without}' if without else ''}.", width)
    lines = ["Any one of these makes it fit:"]
    for change in suggestions:
        lines += wrap(" ".join(change.flags), width, "  ", indent=4)
        lines += wrap(f"{RESULTS[change.kind]}; saves {change.what}; cost: {change.slower}", width, " " * 6)
    return "\n".join(lines)


def run_text(outlook: Duration) -> str:
    """Tokens, epochs, disk space, CPU RAM and time of the whole run."""
    if not outlook.steps:
        return "evaluates once, and does not train"
    parts = [f"{outlook.tokens_per_step:,} tokens per step × {show_steps(outlook.steps)} = "
             f"{show_count(outlook.tokens)} tokens, {_few_digits(outlook.tokens / outlook.params)} per parameter"]
    if outlook.epochs is not None:
        parts.append(f"{_few_digits(outlook.epochs)} epochs of the data")
    parts.append(f"a checkpoint takes {show_bytes(outlook.checkpoint_bytes)} on disk")
    if outlook.host_bytes:
        parts.append(f"{show_bytes(outlook.host_bytes)} of CPU RAM")
    if outlook.hours is not None:
        low, high = (show_seconds(3600 * hours) for hours in outlook.hours)
        parts.append(low if low == high else f"{low} to {high}")
    return ", ".join(parts)


def assumptions_text(plan: MemoryPlan) -> str:
    assumes = plan.forecast.assumes
    return (f"torch {assumes['torch']}, {assumes['attention']} attention, {assumes['compile']}, "
            f"allocator: {assumes['allocator']}")


def accuracy_text(plan: MemoryPlan, basis: TrackRecord) -> str:
    """How far forecasts were off in recorded runs of the same trainer."""
    if not basis.in_all or basis.worst_percent is None:
        return (f"no recorded runs of {TRAINERS[plan.forecast.trainer]}: this forecast has not been compared with a "
                "measurement")
    worst = basis.worst_percent
    error = "below 0.01 %" if abs(worst) < 0.01 else f"{'+' if worst > 0 else '−'}{abs(worst):.2f} %"
    here = f" ({basis.on_card or 'none'} on this GPU)" if plan.budget.card else ""
    return f"worst error {error} over {basis.in_all} recorded run{'s' if basis.in_all > 1 else ''}{here}"


# ---- tables


def option_table(priced: Sequence[PricedChange], needs_now: int, reserve_limit: int, width: int = 80) -> str:
    """Every single change: what it saves in training and in evaluation, what the run then needs, what it costs."""
    def saved(nbytes: int) -> str:
        size = abs(nbytes)
        shown = f"{size / MiB:.0f} MiB" if 10 * MiB <= size < 1000 * MiB else show_bytes(size)
        return "0" if size < MiB else f"{'−' if nbytes > 0 else '+'}{shown}"

    has_speeds = any(each.speed is not None for each in priced)
    rows = [("", "training", "eval", "needs", "speed" if has_speeds else "", "", "")]
    rows += [(each.change.flags[0], saved(each.saved_in_training), saved(each.saved_in_evaluation),
              show_bytes(each.needs), "" if each.speed is None else f"{each.speed:.2f}", each.change.kind,
              "✓" if each.fits else "") for each in priced]
    changes = table(rows, left=(0, 5, 6), width=width, optional=(2, 1, 4, 5))
    lines = [paragraph(f"Single changes. The run needs {show_bytes(needs_now)} now, and {show_bytes(reserve_limit)} "
                       "may be reserved. First what is exact and free, then exact and slower, then what changes "
                       "what is trained:", width), changes, ""]
    shows_speeds = "speed" in changes.splitlines()[0]  # a narrow table leaves them out
    speeds = "; speed: relative to the run as given, by a roofline estimate (docs/fit.md)" if shows_speeds else ""
    lines.append(paragraph(f"✓: fits{speeds}.", width))
    if any(each.change.kind == "batch" for each in priced):
        lines.append(paragraph("batch: another effective batch size, which changes what is trained.", width))
    if any(not each.change.comparable for each in priced):
        lines.append(paragraph("other: losses at another block size do not compare with this run's.", width))
    by_effect: dict[str, list[Change]] = {}
    for each in priced:
        by_effect.setdefault(f"saves {each.change.what}; cost: {each.change.slower}.", []).append(each.change)
    for effect, same in by_effect.items():
        flags = same[0].flags if len(same) == 1 else [f"{flag.partition('=')[0]}=…" for flag in same[0].flags]
        lines += wrap(f"{' '.join(flags)}: {effect}", width, indent=2)
    return "\n".join(lines) + "\n"


def all_cards_table(verdicts: Sequence[GpuVerdict], speeds: Mapping[str, tuple[float, float]],
                    width: int = 80) -> str:
    """One line per GPU; `speeds`: tokens per second (low, high), of those that have an estimate."""
    rows = [("GPU", "usable", "needs", "headroom", "      tok/s" if speeds else "")]
    for each in verdicts:
        usable = show_bytes(each.usable) if each.usable is not None else "not known"
        if each.problem:
            rows.append((each.name, usable, "", "", each.problem))
            continue
        speed = ""
        if each.name in speeds:
            low, high = (_few_digits(tokens / 1000) for tokens in speeds[each.name])
            speed = f"{low}–{high}k"
        fits = f"fits  {speed}".rstrip() if each.fits else "does not fit"
        rows.append((each.name, usable, show_bytes(each.needs), signed_bytes(each.headroom), fits))
    text = table(rows, left=(0, 4), width=width, optional=(1, 2, 3)) + "\n"
    # Without speeds there may be room for the headroom, which says more.
    return text if "headroom" in text or not speeds else all_cards_table(verdicts, {}, width)


def card_table(rows: Iterable[tuple[str, ...]], width: int = 80) -> str:
    head = ("GPU", "memory", "usable", "bf16", "TFLOP/s", "known")
    return f"{table([head, *rows], left=(0, 5), width=width, optional=(5, 3, 4, 1))}\n\n{paragraph(GPUS_NOTE, width)}\n"


def _few_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def signed_bytes(nbytes: int) -> str:
    return f"{'−' if nbytes < 0 else ''}{show_bytes(abs(nbytes))}"


# ---- the page of --timeline


def timeline_page(plan: MemoryPlan, timeline: OwnerTimeline) -> str:
    """One step's memory by owner, zoomable, with the peak and the limit, as a page in one file."""
    from .charts import escaped, html_page, stacked_chart  # 20 ms that a plan without a page does not need

    forecast, budget = plan.forecast, plan.budget
    title = f"{TRAINERS[forecast.trainer]}, {show_count(forecast.params)} parameters: one step"
    chart = stacked_chart(timeline, title="Allocated, by owner", limit=budget.reserve_limit,
                          limit_name="may be reserved",
                          note="A few micro-batches, then the optimizer step; further micro-batches repeat the last.")
    summary = escaped(f"{VERDICTS[plan.fits]}: {verdict(plan)}")
    owners = "".join(
        f'<tr><th scope="row">{escaped(share.owner)}</th><td class="figure">{show_bytes(share.nbytes)}</td>'
        f"<td>{escaped(share.formula)}</td></tr>" for share in forecast.owners_at_peak)
    return html_page(title, f"<h1>{escaped(title)}</h1>\n<p>{summary}</p>\n{chart}\n<h2>At the peak</h2>\n"
                     f'<div class="card"><table class="whole">{owners}</table></div>')
