"""Plans as plain text: what `fitgpt plan` and `fitgpt cards` print, and the page of --timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..config.run_config import RunConfig, shorter_warmup
from ..core.units import GiB, MiB, show_bytes, show_count, show_seconds, show_steps, with_article
from ..memory.timeline import OwnerTimeline
from ..planning.changes import Change, PricedChange
from ..planning.forecast import MemoryPlan, TrackRecord
from ..planning.verdict import Verdict
from ..runs.metrics import PHASES
from .terminal import MIN_TEXT_WIDTH, labelled_rows, paragraph, table, wrap

if TYPE_CHECKING:  # a plan imports this module to print itself
    from ..planning.plan import Duration, GpuVerdict, Plan
    from ..tracing.plan import TracedPlan
    from ..tracing.trace_file import Trace

TRAINERS = {"fitgpt": "fitgpt", "nanogpt": "nanoGPT's train.py", "script": "traced scripts"}
VERDICTS = {Verdict.FITS: "Fits", Verdict.TIGHT: "Tight", Verdict.NOT_ALL_SEEN: "Not all seen",
            Verdict.DOES_NOT_FIT: "Does not fit"}
COLOURS = {Verdict.FITS: 32, Verdict.DOES_NOT_FIT: 31}  # of a terminal; others are yellow, 33
RESULTS = {"exact": "same result", "lossy": "changes the result", "other": "losses no longer compare",
           "batch": "changes the effective batch size, and so what is trained"}  # by Change.kind
KERNELS = {"flash": "flash attention", "cudnn": "cuDNN's flash attention", "efficient": "memory-efficient attention"}
SMALLEST_SHARE = 0.0005    # of the allocated memory: a smaller one would show as 0.0 %
LONG_RUN_HOURS = 30 * 24
LONG_BY_DEFAULT_HOURS = 48  # of a run whose length nobody chose
TOKENS_PER_PARAMETER = 20  # of a compute-optimal run (Hoffmann and others, 2022)
GPUS_NOTE = ("Usable is the memory that CUDA can allocate; TFLOP/s are dense, half precision. Where each of the two "
             "comes from: seen on such a GPU, printed by the vendor, worked out by a formula, or recalled and to be "
             "checked. --json has every figure.")


# ---- the plan


def plan_text(plan: Plan, width: int = 80, *, colour: bool = False) -> str:
    """The whole plan: what it is for, the verdict, tables, notes; with --options the table of all changes follows."""
    forecast, budget, priced = plan.forecast, plan.budget, plan.options is not None
    gpu = with_article(budget.card) if budget.card else ""
    if plan.ranks:
        names = list(dict.fromkeys(each.budget.card for each in plan.ranks))
        gpu = f"{len(plan.ranks)} × {names[0]}" if len(names) == 1 else f"{len(plan.ranks)} GPUs"
    title = run_title(plan.run, forecast.trainer, forecast.params, gpu, vocab_assumed=plan.vocab_assumed)
    parts = [paragraph(title, width), verdict_text(plan, plan.target.neighbours, width, colour=colour)]
    if plan.ranks:
        parts.append(rank_table(plan.ranks, width))
    if too_long := long_run_text(plan.duration, plan.run.warmup_iters):
        parts.append(paragraph(too_long, width))
    if plan.headroom < 0:
        parts.append(suggestion_text(plan.changes, forecast.trainer, width, priced=priced))
    parts += [phase_table(plan, width), owner_table(plan, width)]
    rows = [("run", run_text(plan.duration)), ("attention", attention_text(plan.run, forecast.assumes["attention"])),
            ("assumes", assumptions_text(plan)), ("accuracy", accuracy_text(plan, plan.track_record)),
            *((("nearest", f"recorded run: {nearest.describe()}"),) if (nearest := plan.nearest_recorded_run) else ()),
            ("GPU", " ".join(budget.sources)),
            *(("note", note) for note in plan.notes)]
    parts.append(labelled_rows(rows, width))
    if plan.options is not None:
        parts.append(option_table(plan.options, forecast.needs, budget.reserve_limit, width).rstrip("\n"))
    return "\n\n".join(parts) + "\n"


def traced_text(plan: TracedPlan, width: int = 80, *, colour: bool = False) -> str:
    """The plan of a traced script: the verdict, tables, its largest tensors, and what was not seen."""
    gpu = with_article(plan.budget.card) if plan.budget.card else ""
    parts = [paragraph(traced_title(plan.trace, gpu), width),
             verdict_text(plan, plan.target.neighbours, width, colour=colour)]
    if plan.headroom < 0:
        parts.append(traced_changes_text(plan, width))
    parts += [phase_table(plan, width), step_table(plan, width), owner_table(plan, width), tensor_table(plan, width),
              labelled_rows([("assumes", assumptions_text(plan)), ("accuracy", accuracy_text(plan, plan.track_record)),
                             ("GPU", " ".join(plan.budget.sources)),
                             *(("note", note) for note in (*plan.trace.notes, *plan.notes))], width)]
    return "\n\n".join(parts) + "\n"


def traced_title(trace: Trace, gpu: str) -> str:
    """A traced script in one line. `gpu`: with its article; empty if it has no name."""
    steps = f"{len(trace.steps)} optimizer step{'' if len(trace.steps) == 1 else 's'} traced"
    return (f"{' '.join(trace.command)}{f' on {gpu}' if gpu else ''}: {show_count(trace.params)} parameters, {steps} "
            f"with torch {trace.torch}{', compiled' if trace.compiled else ''}")


def traced_changes_text(plan: TracedPlan, width: int) -> str:
    """What changes would save, by arithmetic on the trace."""
    if not plan.changes:
        return "No single change that is known here saves memory."
    lines = [paragraph("What changes would save, by arithmetic on the trace; trace again to check:", width)]
    for each in plan.changes:
        fits = "fits" if each.fits else f"{show_bytes(-each.headroom)} too much"
        lines += wrap(f"{each.change}: needs {show_bytes(each.needs)}, {fits}; saves {each.what}", width, "  ",
                      indent=4)
    return "\n".join(lines)


def step_table(plan: TracedPlan, width: int) -> str:
    """Both figures after each optimizer step."""
    unit, size = one_unit([plan.forecast.reserved])
    rows = [(f"after step, {unit}", *(str(number) for number in range(1, len(plan.steps) + 1))),
            ("allocated", *(size(step.allocated_bytes) for step in plan.steps)),
            ("reserved", *(size(step.reserved_bytes) for step in plan.steps))]
    most = max((width - 20) // 9, 1)
    return table([row[:most + 1] for row in rows], left=(0,), width=width)


def tensor_table(plan: TracedPlan, width: int) -> str:
    """The largest tensors at the peak, each with its module and the line of the script that made it."""
    unit, size = one_unit([plan.forecast.allocated])
    lines = [f"Largest tensors at the peak, {unit}:"]
    for each in plan.tensors:
        where = ", ".join(filter(None, (each.module, each.op, each.source)))
        lines += wrap(f"{each.what}  {where}", width, f"{size(each.nbytes):>8}  {each.owner:<12}", indent=10)
    return "\n".join(lines)


def verdict_text(plan: MemoryPlan, neighbours: str, width: int, *, colour: bool) -> str:
    """The verdict as a paragraph, its first word coloured."""
    word = VERDICTS[plan.verdict]
    text = "\n".join([paragraph(f"{word}: {verdict(plan, neighbours)}", width),
                      *("\n".join(wrap(each, width, "  ", indent=2)) for each in plan.caveats)])
    return f"\x1b[1;{COLOURS.get(plan.verdict, 33)}m{word}\x1b[0m{text[len(word):]}" if colour else text


def run_title(run: RunConfig, trainer: str, params: int, gpu: str, *, vocab_assumed: bool = False) -> str:
    """A run in one line. `gpu`: with its article; empty if it has no name."""
    count, nanogpts = show_count(params), show_count(run.gpt_config().count_params(positions=False))
    assumed = f" with a vocabulary of {run.vocab_size:,} (assumed)" if vocab_assumed else ""
    layers = f"{run.n_layer} layer{'s' if run.n_layer > 1 else ''}"
    return (f"{TRAINERS[trainer]}{f' on {gpu}' if gpu else ''}: {count} parameters ({nanogpts} as nanoGPT counts)"
            f"{assumed}, {layers} of width {run.n_embd:,}, batch {run.batch_size:,} × {run.block_size:,}"
            f"{'' if run.dtype == 'auto' else f', {run.dtype}'}"
            f"{ {True: ', compiled', False: ', eager', 'auto': ''}[run.compile]}")


def one_unit(sizes: Iterable[int]) -> tuple[str, Callable[[int], str]]:
    """The unit of a table, and how it shows a size: whole MiB, as nvidia-smi; from 10 GiB on GiB."""
    if max(sizes, default=0) >= 10 * GiB:
        return "GiB", lambda nbytes: f"{nbytes / GiB:.2f}"
    return "MiB", lambda nbytes: f"{nbytes / MiB:,.0f}"


def rank_table(ranks: Sequence[MemoryPlan], width: int) -> str:
    """Each rank with its GPU, what it needs and what is available to it. Ranks that are alike share a row."""
    alike: dict[int, list[int]] = {}  # ranks on GPUs that are alike have one plan
    for number, plan in enumerate(ranks):
        alike.setdefault(id(plan), []).append(number)
    unit, size = one_unit(max(plan.forecast.needs, plan.budget.reserve_limit) for plan in ranks)
    rows = [(f"{len(ranks)} ranks", "GPU", f"needs, {unit}", "available", "process", "")]
    for numbers in alike.values():
        plan = ranks[numbers[0]]
        label = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        if numbers != list(range(numbers[0], numbers[-1] + 1)):
            label = ", ".join(map(str, numbers))
        rows.append((f"rank {label}", plan.budget.card, size(plan.forecast.needs), size(plan.budget.reserve_limit),
                     size(plan.process_bytes), VERDICTS[plan.verdict].lower()))
    return (table(rows, left=(0, 1, 5), width=width, optional=(4,))
            + "\nThe tables below are those of the rank with the least headroom.")


def phase_table(plan: MemoryPlan, width: int = 80) -> str:
    """The memory of each phase, with the peak marked. Reserved is the maximum since the process started."""
    phases, outside = plan.forecast.phases, plan.budget.outside
    unit, size = one_unit(memory.reserved + outside for memory in phases.values())
    rows = [(unit, "allocated", "reserved", "process", "")]
    for phase, label in PHASES.items():
        if phase in phases:
            allocated, reserved = phases[phase]
            rows.append((label, size(allocated), size(reserved), size(reserved + outside),
                         "← peak" if phase == plan.forecast.peak_phase else ""))
    return table(rows, left=(0, 4), width=width, optional=(1, 4, 3))


def owner_table(plan: MemoryPlan, width: int) -> str:
    """What the memory at the peak consists of, each share with its formula; shares that round to 0.0 % are left out."""
    shares = plan.forecast.owners_at_peak
    total = sum(share.nbytes for share in shares)
    unit, size = one_unit([total])
    lines = [f"At the peak, {size(total)} {unit} allocated:"]
    for share in shares:
        if share.nbytes < SMALLEST_SHARE * total:
            continue
        start = f"{share.owner:<12}{size(share.nbytes):>6}{share.nbytes / total:>7.1%}  "
        if len(start) + MIN_TEXT_WIDTH > width:
            lines += [start.rstrip(), *wrap(share.formula, width, "  ")]
        else:
            lines += wrap(share.formula, width, start)
    return "\n".join(lines)


def verdict(plan: MemoryPlan, neighbours: str = "") -> str:
    """What the run needs, what is available to it, the headroom, and how much other processes may use."""
    forecast, budget = plan.forecast, plan.budget
    limit = f"{show_bytes(budget.reserve_limit) if budget.reserve_limit > 0 else 'nothing'} available"
    takes_all = bool(budget.card) and budget.budget == budget.usable - budget.others
    if takes_all:
        limit += f" ({show_bytes(budget.usable)} usable"
        limit += f", {show_bytes(budget.others)} used by others" if budget.others else ""
    else:
        limit += f" (a budget of {show_bytes(budget.budget)}"
    limit += f", {show_bytes(budget.outside)} outside the allocator)"
    difference = show_bytes(abs(plan.headroom))
    headroom = f"headroom {difference}"
    fitting, least = plan.headroom >= 0, "at least " if forecast.not_seen else ""
    sentences = [f"needs {least}{show_bytes(forecast.needs)}, {limit}: "
                 f"{headroom if fitting else f'{difference} too much'}."]
    room = budget.usable - budget.outside - forecast.needs
    if takes_all and fitting:
        sentences.append(f"It fits while everything else on the GPU stays under {show_bytes(room)}.")
    elif takes_all and room > 0:
        sentences.append(f"It would fit if everything else on the GPU stayed under {show_bytes(room)}.")
    name, largest = forecast.largest
    if largest > budget.reserve_limit > 0:
        sentences.append(f"One allocation alone takes {show_bytes(largest)}: {name}.")
    if neighbours:
        sentences.append(neighbours)
    low, high = (show_bytes(nbytes) for nbytes in forecast.reserved_range)
    if low != high:
        why = "the addresses the CUDA driver returns" if "range" not in forecast.assumes["compile"] else "the compiler"
        sentences.append(f"Reserved will be {low} to {high}, depending on {why}.")
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


def long_run_text(outlook: Duration, warmup_iters: int) -> str:
    """A sentence on a run that takes more than a month, or days by default, with a length to type instead; empty for a
    shorter run."""
    by_default = outlook.steps == RunConfig.max_iters
    if outlook.hours is None or outlook.hours[0] < (LONG_BY_DEFAULT_HOURS if by_default else LONG_RUN_HOURS):
        return ""
    usual = " (nanoGPT's default)" if by_default else ""
    steps = max(round(TOKENS_PER_PARAMETER * outlook.params / outlook.tokens_per_step), 1)
    shorter = [hours * steps / outlook.steps for hours in outlook.hours]
    warmup = shorter_warmup(steps, warmup_iters)
    flags = [f"--max_iters={steps}", f"--lr_decay_iters={steps}",
             *([f"--warmup_iters={warmup}"] if warmup != warmup_iters else [])]
    return (f"This run takes {_time_range(outlook.hours)}: max_iters is {outlook.steps:,}{usual}. "
            f"{TOKENS_PER_PARAMETER} tokens per parameter are {show_count(steps * outlook.tokens_per_step)} tokens and "
            f"take {_time_range(shorter)}: {' '.join(flags)}")


def attention_text(run: RunConfig, kernel: str) -> str:
    """What attention holds: fused kernels never store the matrix of scores."""
    matrix = f"{run.batch_size:,} × {run.n_head:,} × {run.block_size:,} × {run.block_size:,}"
    one = show_bytes(run.batch_size * run.n_head * run.block_size**2 * (4 if run.dtype == "float32" else 2))
    if kernel == "math":
        return f"unfused (math): stores the scores, {matrix}, {one} per matrix; in activations"
    return (f"{KERNELS[kernel]}: keeps no score matrix ({matrix} would take {one} per layer); its inputs and output "
            "are in activations")


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
        parts.append(_time_range(outlook.hours))
    return ", ".join(parts)


def _time_range(hours: Sequence[float]) -> str:
    low, high = (show_seconds(3600 * each) for each in hours)
    return low if low == high else f"{low} to {high}"


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
    version = plan.forecast.assumes["torch"].partition(" ")[0]
    other = "" if version in basis.torch else f"no recorded runs of torch {version}; with {', '.join(basis.torch)}: "
    return f"{other}worst error {error} over {basis.in_all} recorded run{'s' if basis.in_all > 1 else ''}{here}"


# ---- tables


def option_table(priced: Sequence[PricedChange], needs_now: int, reserve_limit: int, width: int = 80) -> str:
    """Every single change: what it saves in training and in evaluation, what the run then needs, what it costs."""
    unit, size = one_unit([needs_now, *(each.needs for each in priced)])

    def saved(nbytes: int) -> str:
        shown = size(abs(nbytes))
        return "0" if not float(shown.replace(",", "")) else f"{'−' if nbytes > 0 else '+'}{shown}"

    has_speeds = any(each.speed is not None for each in priced)
    rows = [(unit, "training", "eval", "needs", "speed" if has_speeds else "", "", "")]
    rows += [(each.change.flags[0] + (" …" if len(each.change.flags) > 1 else ""), saved(each.saved_in_training),
              saved(each.saved_in_evaluation), size(each.needs), "" if each.speed is None else f"{each.speed:.2f}",
              each.change.kind, "✓" if each.fits else "") for each in priced]
    changes = table(rows, left=(0, 5, 6), width=width, optional=(2, 1, 4, 5))
    lines = [paragraph(f"Single changes. The run needs {show_bytes(needs_now)} now; {show_bytes(reserve_limit)} are "
                       "available. First what is exact and free, then exact and slower, then what changes what is "
                       "trained:", width), changes, ""]
    shows_speeds = "speed" in changes.splitlines()[0]  # a narrow table leaves them out
    speeds = "; speed: relative to the run as given, by a roofline estimate (docs/fit.md)" if shows_speeds else ""
    lines.append(paragraph(f"✓: fits{speeds}.", width))
    if any(len(each.change.flags) > 1 for each in priced):
        lines.append(paragraph("…: together with other flags, listed below.", width))
    if any(each.change.kind == "batch" for each in priced):
        lines.append(paragraph("batch: another effective batch size, which changes what is trained.", width))
    if any(not each.change.comparable for each in priced):
        lines.append(paragraph("other: losses at another block size do not compare with this run's.", width))
    by_effect: dict[str, list[Change]] = {}
    for each in priced:
        by_effect.setdefault(f"saves {each.change.what}; cost: {each.change.slower}.", []).append(each.change)
    for effect, same in by_effect.items():
        if len(same) == 1 or len(same[0].flags) > 1:  # to be typed together
            for change in same[:-1]:
                lines += wrap(f"{' '.join(change.flags)}, or", width, indent=2)
            flags = " ".join(same[-1].flags)
        else:
            flags = f"{same[0].flags[0].partition('=')[0]}=…"
        lines += wrap(f"{flags}: {effect}", width, indent=2)
    return "\n".join(lines) + "\n"


def all_cards_table(verdicts: Sequence[GpuVerdict], speeds: Mapping[str, tuple[float, float]], tokens: int = 0,
                    width: int = 80) -> str:
    """One line per GPU; `speeds`: tokens per second (low, high), of those that have an estimate; `tokens`: of the run,
    for the hours it takes; 0: not shown."""
    unit, size = one_unit(each.usable or 0 for each in verdicts)

    def estimate(name: str, figure: Callable[[float], float]) -> str:
        """The range of a figure that depends on the tokens per second, the lower end first."""
        return "–".join(f"{each:,.1f}" for each in sorted(map(figure, speeds[name]))) if name in speeds else ""

    rows = [("GPU", "usable", "needs", "headroom", "", "1,000 tokens/s" if speeds else "", "hours" if tokens else "")]
    for each in verdicts:
        usable = size(each.usable) if each.usable is not None else "not known"
        if each.verdict is None:
            rows.append((each.name, usable, "", "", each.problem, "", ""))
        else:
            fits = each.headroom >= 0
            rows.append((each.name, usable, size(each.needs), size(each.headroom).replace("-", "−"),
                         VERDICTS[each.verdict].lower(),
                         estimate(each.name, lambda speed: speed / 1000) if fits else "",
                         estimate(each.name, lambda speed: tokens / speed / 3600) if fits and tokens else ""))
    text = table(rows, left=(0, 4), width=width, optional=(1, 2, 5, 6, 3))
    estimates = "; speed by a roofline estimate (docs/fit.md)" if "tokens/s" in text else ""
    return f"{text}\n\n{paragraph(f'Memory in {unit}{estimates}.', width)}\n"


def card_table(rows: Iterable[tuple[str, ...]], width: int = 80) -> str:
    head = ("GPU", "memory", "usable", "bf16", "TFLOP/s", "known")
    return f"{table([head, *rows], left=(0, 5), width=width, optional=(5, 3, 4, 1))}\n\n{paragraph(GPUS_NOTE, width)}\n"


def _few_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def signed_bytes(nbytes: int) -> str:
    return f"{'−' if nbytes < 0 else ''}{show_bytes(abs(nbytes))}"


# ---- the page of --timeline


def timeline_page(plan: MemoryPlan, timeline: OwnerTimeline, subject: str, note: str) -> str:
    """One step's memory by owner, zoomable, with the peak and the limit, as a page in one file.

    `subject`: whose step; `note`: what the chart shows.
    """
    from .charts import escaped, html_page, stacked_chart  # 20 ms that a plan without a page does not need

    forecast, budget = plan.forecast, plan.budget
    title = f"{subject}, {show_count(forecast.params)} parameters: one step"
    chart = stacked_chart(timeline, title="Allocated, by owner", limit=budget.reserve_limit,
                          limit_name="may be reserved", note=note)
    summary = escaped(" ".join([f"{VERDICTS[plan.verdict]}: {verdict(plan)}", *plan.caveats]))
    owners = "".join(
        f'<tr><th scope="row">{escaped(share.owner)}</th><td class="figure">{show_bytes(share.nbytes)}</td>'
        f"<td>{escaped(share.formula)}</td></tr>" for share in forecast.owners_at_peak)
    return html_page(title, f"<h1>{escaped(title)}</h1>\n<p>{summary}</p>\n{chart}\n<h2>At the peak</h2>\n"
                     f'<div class="card"><table class="whole">{owners}</table></div>')
