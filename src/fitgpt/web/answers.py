"""PageQuery → the answers that the page draws: plan, timeline of a step, exact needs, all GPUs, fixes, fit.

Every answer is a dict that becomes JSON. Bytes are plain numbers. Sentences that the command line prints too are
written here, in English; the page's own words are in static/strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from ..config.memory_savers import SAVER_LABELS
from ..config.run_config import DEFAULT_VOCAB, ResolvedRun, RunConfig, resolve_run
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes, show_count, show_seconds
from ..hardware import gpus
from ..memory.platform import Platform
from ..memory.timeline import Timeline, owners_after
from ..planning.budget import Budget, Target, check_supported, on_card
from ..planning.changes import FAMILIES, ChangedRun, single_changes, smallest
from ..planning.fit import fit_target, shared_gpu_note
from ..planning.fit_goals import (
    GOALS,
    TOKENS_PER_PARAMETER,
    Decision,
    FitResult,
    Suggestion,
    describe_too_small,
    fit_to_goal,
)
from ..planning.fit_search import ScoredConfig, parse_allow
from ..planning.forecast import assumptions, lowest_error, one_step, replay_run
from ..planning.plan import expected_speed, nanogpt_notes, plan_for, same_tape
from ..planning.speed import SpeedEstimate
from ..planning.verdict import Verdict, safe_limit
from ..runs.metrics import PHASES
from ..show import plan_text as show
from ..show.charts import stacked_chart
from ..show.fit_text import step_up_text
from .form import PageQuery, as_settings, command, config_file, plan_command, settings_in, without_dashes

Answer = dict[str, Any]

BARS = ("load", "first_eval", "first_train", "train", "step", "eval")  # the phases that get a bar, in order of time
MAX_HEADS, MAX_WIDTH = 128, 8192
MIN_HEAD_WIDTH, MAX_HEAD_WIDTH = 8, 256

# The label of the button of every family of planning/changes.py.
LABELS = {
    **SAVER_LABELS, "trainer": "train with fitgpt", "compile": "compile the model",
    "evaluation": "evaluation batch {eval_batch_size}", "batch": "batch {batch_size} × {gradient_accumulation_steps}",
    "accumulation": "no gradient accumulation", "block": "block_size {block_size}",
}


# ---- one replay, shared by the answers about the same run


@lru_cache(maxsize=8)
def replayed(config: ResolvedRun, platform: Platform, trainer: str) -> Timeline:
    """The whole run, replayed without a memory limit."""
    return replay_run(config, platform, trainer)


def _resolved(query: PageQuery) -> tuple[ResolvedRun, Timeline]:
    config = resolve_run(query.config, query.target.platform, query.trainer)
    return config, replayed(config, query.target.platform, query.trainer)


# ---- the plan


def plan(query: PageQuery) -> Answer:
    """Verdict and bars from one replay. `exact` adds the headroom, which takes several more."""
    config, timeline = _resolved(query)
    budget, title = query.target.budget, _title(query, config)
    verdict = _verdict(config, query.target, query.trainer, timeline)
    summary = _summary(timeline, budget.reserve_limit, verdict is not Verdict.DOES_NOT_FIT)
    notes = nanogpt_notes(query.config, query.target.platform) if query.trainer == "nanogpt" else []
    return {
        "verdict": verdict, "summary": summary, "title": title,
        "trainer": query.trainer, "peak": timeline.peak, "bars": _bars(timeline, budget),
        "command": command(query), "plan_command": plan_command(query),
        "config_file": config_file(query, f"{title}. {show.VERDICTS[verdict]}: {summary}"),
        "resolved": {"gpu": query.target.card.name if query.target.card else "", "dtype": config.dtype,
                     "compile": str(config.compile), "others": budget.others, "budget": budget.budget},
        "slider_values": {"n_head": _head_counts(config.n_embd), "n_embd": _widths(config.n_head)},
        "notes": [*query.ignored, *query.target.notes, *notes],
    }


def _title(query: PageQuery, config: RunConfig) -> str:
    card = query.target.budget.card
    return show.run_title(config, query.trainer, config.gpt_config().count_params(), f"the {card}" if card else "")


def _summary(timeline: Timeline, limit: int, fitting: bool) -> str:
    """One sentence: what is reserved of the limit, or why that is not enough."""
    reserved, peak = timeline.reserved, timeline.peak
    if fitting and reserved <= limit:
        return f"reserves {show_bytes(reserved)} of {show_bytes(limit)}."
    if fitting:
        return (f"tight. Without a limit it would reserve {show_bytes(reserved)}; it completes within "
                f"{show_bytes(limit)} because the allocator frees unused segments.")
    if peak > limit:
        return f"tensors alone take {show_bytes(peak)}, and {show_bytes(limit)} can be reserved."
    return (f"tensors take {show_bytes(peak)} of the {show_bytes(limit)} that can be reserved, but fragmentation "
            "needs more than the rest.")


def _verdict(config: ResolvedRun, target: Target, trainer: str, timeline: Timeline) -> Verdict:
    """The verdict of a plan, by fewer replays."""
    limit = target.budget.reserve_limit
    if not timeline.fits(limit):
        return Verdict.DOES_NOT_FIT
    safe = safe_limit(target.budget, lowest_error(trainer, assumptions(config, target.platform, trainer)))
    return Verdict.FITS if timeline.fits(safe) and timeline.fits_in_any_order(limit) else Verdict.TIGHT


def _bars(timeline: Timeline, budget: Budget) -> Answer:
    """Per phase: its peak, and which owners hold the bytes at that moment."""
    peaks = timeline.peaks()
    shown = [peaks[phase] for phase in BARS if phase in peaks]
    owners = owners_after(timeline.tape, timeline.changes, {peak.event for peak in shown})
    highest = max(shown, key=lambda peak: peak.allocated)
    rows = [{"phase": peak.phase, "owners": owners[peak.event],
             "allocated": peak.allocated, "reserved": peak.reserved, "peak": peak is highest} for peak in shown]
    return {"limit": budget.budget + budget.others, "budget": budget.budget, "others": budget.others,
            "outside": budget.outside, "card": budget.card, "rows": rows,
            "whole_gpu": budget.budget == budget.usable - budget.others}


def _head_counts(width: int) -> list[int]:
    """Head counts that divide the width into heads of a common size; any divisor if there is none."""
    divisors = [heads for heads in range(1, MAX_HEADS + 1) if width % heads == 0]
    common = [heads for heads in divisors
              if MIN_HEAD_WIDTH <= width // heads <= MAX_HEAD_WIDTH and width // heads % 8 == 0]
    return common or divisors


def _widths(heads: int) -> list[int]:
    """Widths for this head count: the width per head is a multiple of 8, at most MAX_HEAD_WIDTH."""
    step = 8 * heads
    return list(range(step, min(heads * MAX_HEAD_WIDTH, MAX_WIDTH) + 1, step)) or [heads]


# ---- after the plan


def step(query: PageQuery) -> Answer:
    """A chart of memory over one training step, by owner."""
    timeline, budget = _resolved(query)[1], query.target.budget
    note = "A few micro-batches, then the optimizer step. Further micro-batches repeat the last one."
    return {"html": stacked_chart(one_step(timeline), title="One training step, by owner", limit=budget.reserve_limit,
                                  limit_name="may be reserved", note=note)}


def exact(query: PageQuery) -> Answer:
    """The plan as `fitgpt plan` prints it, with the smallest limit that is enough: some ten more replays."""
    target = query.target
    memory = plan_for(query.config, target, query.trainer)
    run = memory.duration
    speed = expected_speed(query.config, target.card, query.trainer, target.platform)
    cpu_ram = f"; {show_bytes(run.host_bytes)} of CPU RAM" if run.host_bytes else ""
    facts = [("assumes", show.assumptions_text(memory)), ("accuracy", show.accuracy_text(memory, memory.track_record)),
             ("GPU", " ".join(target.budget.sources)),
             ("step", f"{run.tokens_per_step:,} tokens per step; a checkpoint takes {show_bytes(run.checkpoint_bytes)} "
                      f"on disk{cpu_ram}")]
    fitting = memory.headroom >= 0
    if speed and fitting:
        facts.append(("speed", f"{_tokens(speed)} tokens/s, by {speed.basis}"))
    headroom = f"{show_bytes(abs(memory.headroom))} {'to spare' if fitting else 'too much'}"
    hours = [show_seconds(3600 * each) for each in run.hours] if run.hours and fitting else []
    return {
        "verdict": memory.verdict, "needs": memory.forecast.needs, "headroom": memory.headroom,
        "summary": without_dashes(" ".join([show.verdict(memory, target.neighbours), *memory.caveats])),
        "config_file": config_file(query, f"{_title(query, memory.run)}. {show.VERDICTS[memory.verdict]}: {headroom}."),
        "speed": _tokens(speed) if fitting else "",  # a run that cannot be has no speed
        "length": {"steps": run.steps, "tokens": show_count(run.tokens), "hours": " – ".join(dict.fromkeys(hours)),
                   "per_parameter": _few_digits(run.tokens / run.params),
                   "default": query.config.max_iters == RunConfig.max_iters, "suggested_per": TOKENS_PER_PARAMETER,
                   "suggested": max(round(TOKENS_PER_PARAMETER * run.params / run.tokens_per_step), 1)},
        "phases": [{"phase": phase, "allocated": held.allocated, "reserved": held.reserved,
                    "process": held.reserved + target.budget.outside, "peak": phase == memory.forecast.peak_phase}
                   for phase in PHASES if (held := memory.forecast.phases.get(phase))],
        "owners": [{"owner": share.owner, "nbytes": share.nbytes, "formula": share.formula}
                   for share in memory.forecast.owners_at_peak],
        "facts": facts,
    }


def _few_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _tokens(speed: SpeedEstimate | None) -> str:
    """'37k–52k'; one figure where the estimate is a measurement of this very run; empty where the GPU's bandwidth or
    TFLOP/s are not known."""
    if speed is None:
        return ""

    def short(number: float) -> str:
        """Two or three digits: 560, 5.6k, 56k, 1.3M."""
        for unit, letter in ((10**6, "M"), (1000, "k")):
            if number >= unit:
                return f"{number / unit:.{int(number < 10 * unit)}f}{letter}"
        return f"{number:.0f}"

    low, high = short(speed.low), short(speed.high)
    return low if low == high else f"{low}–{high}"


def all_gpus(query: PageQuery) -> Answer:
    """The verdict on every NVIDIA GPU of the table. GPUs with the same tape share one replay, that of the largest."""
    others = query.target.budget.others if query.questions.others else None
    rows: list[Answer] = []
    same: dict[tuple[Any, ...], list[tuple[Answer, Target]]] = {}
    for card in gpus.load():
        if card.vendor != "nvidia" or not card.usable_mib:
            continue
        usable = card.usable_mib * MiB
        row: Answer = {"name": card.name, "memory": f"{card.memory_gb} GB", "usable": usable, "others": others or 0,
                       "outside": 0, "peak": 0, "verdict": "", "problem": "", "speed": ""}
        rows.append(row)
        try:
            target = on_card(card, others=others, torch=query.questions.torch)
            check_supported(query.config, target, query.trainer)
        except UsageError as error:
            row["problem"] = f"needs {error.fix}" if (others or 0) < usable else "other programs fill it"
            continue
        config = resolve_run(query.config, target.platform, query.trainer)
        same.setdefault(same_tape(config, target.platform), []).append((row, target))
    for group in same.values():
        platform = max((target.platform for _, target in group), key=lambda platform: platform.sms)
        config = resolve_run(query.config, platform, query.trainer)
        timeline = replayed(config, platform, query.trainer)
        for row, target in group:
            row["outside"], row["peak"] = target.budget.outside, timeline.peak
            row["speed"] = _tokens(expected_speed(config, target.card, query.trainer, target.platform))
            row["verdict"] = _verdict(config, target, query.trainer, timeline)
    return {"gpus": rows}


# ---- fixes: per family of planning/changes.py the smallest change that makes the run fit


def families(query: PageQuery) -> Answer:
    """The families that apply to this run, in the order of their buttons."""
    found = {option.change.family for option in _options(query)}
    return {"families": [family for family in FAMILIES if family in found]}


def _options(query: PageQuery) -> list[ChangedRun]:
    config = resolve_run(query.config, query.target.platform, query.trainer)
    return list(single_changes(config, query.trainer, compiles=query.target.platform.compiles))


def fix(query: PageQuery, family: str) -> Answer:
    """The family's smallest change that makes the run fit, else its largest; None if it saves nothing."""
    platform, limit = query.target.platform, query.target.budget.reserve_limit
    config, timeline = _resolved(query)
    before, fitting = timeline.peak, timeline.fits(limit)
    options = [option for option in _options(query) if option.change.family == family]
    if not options:
        return {"fix": None}

    def fits_with(option: ChangedRun) -> bool:
        return replayed(option.resolved(platform), platform, option.change.trainer).fits(limit)

    chosen = options[0] if fitting else smallest(options, fits_with) or options[-1]
    if family == "saved_activations":
        chosen = _of_some_layers(config, chosen, fitting, fits_with)
    change, enough = chosen.change, fits_with(chosen)
    after = replayed(chosen.resolved(platform), platform, change.trainer).peak
    if before - after < MiB and (fitting or not enough):
        return {"fix": None}
    settings = as_settings(config, chosen.config)
    if change.trainer != query.trainer:
        settings["trainer"] = change.trainer
    return {"fix": {
        "family": family, "label": _label(chosen), "settings": settings, "flags": " ".join(change.flags),
        "saves": change.what, "costs": change.slower, "peak": after, "saved": before - after, "fits": enough,
        "kind": change.kind, "rank": change.rank, "helps": enough and not fitting}}


def _of_some_layers(config: RunConfig, all_layers: ChangedRun, fitting: bool,
                    fits_with: Callable[[ChangedRun], bool]) -> ChangedRun:
    """The same change in as few layers as make the run fit; in a third of them if it fits already."""
    before, after = set(config.policies), set(all_layers.config.policies)
    if len(before) > 1 or len(after) > 1 or not (fitting or fits_with(all_layers)):
        return all_layers

    def of(layers: int) -> ChangedRun:
        policies = f"{layers}*{next(iter(after))},{config.n_layer - layers}*{next(iter(before))}"
        try:
            changed = replace(all_layers.config, saved_activations=policies)
        except UsageError:
            return all_layers
        return ChangedRun(all_layers.change._replace(flags=(f"--saved_activations={policies}",)), changed)

    if fitting:
        return of(-(-config.n_layer // 3)) if config.n_layer > 1 else all_layers
    too_few, enough = 0, config.n_layer
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits_with(of(middle)) else (middle, enough)
    return all_layers if enough == config.n_layer else of(enough)


def _label(option: ChangedRun) -> str:
    changed = option.config
    counted = re.match(r"(\d+)\*", changed.saved_activations)
    number = int(counted[1]) if counted else changed.n_layer
    words = {**changed.to_dict(), "layers": f"{number} layer{'s' if number > 1 else ''}"}
    if changed.offload == "gradients":
        words["offload"] = "optimizer and gradients"
    return LABELS.get(option.change.family, " ".join(option.change.flags)).format(**words)


# ---- fit

MAX_POINTS = 12  # of the curve of speed against memory


def fitted(query: PageQuery, goal: str = "fastest", allow: str = "", within: str = "") -> Answer:
    """What `fitgpt fit` chooses, why, its runners-up, and speed against memory. `within`: bytes that may be reserved,
    where less than the GPU has."""
    config = replace(query.config, vocab_size=query.config.vocab_size or DEFAULT_VOCAB, budget=query.questions.budget)
    target = fit_target(query.target, config, is_here=not query.questions.gpu)
    whole = target.budget
    if within.isdecimal() and len(within) < 20:
        target = target._replace(budget=whole._replace(
            budget=min(int(within) + whole.outside, whole.budget - whole.margin), margin=0))
    if goal not in GOALS:
        raise UsageError(f"goal={goal[:40]!r} is none of {', '.join(GOALS)}.")
    found = (GOALS[goal] if within else partial(fit_to_goal, goal))(config, target, parse_allow(allow))

    def scored(each: ScoredConfig) -> Answer:
        settings = as_settings(config, each.config)
        if query.trainer != "fitgpt":
            settings["trainer"] = "fitgpt"
        likely = each.measured or (each.speed.likely if each.speed else None)
        return {"settings": settings, "flags": " ".join(each.flags), "needs": each.needs,
                "verdict": each.verdict, "speed": _tokens(each.speed), "likely": likely}

    # A point of the curve is chosen for its speed, whatever memory that takes.
    step_up, chosen = found.step_up, found.step_up or found.chosen if within else found.chosen
    others = [*filter(None, [step_up]), *(each for each in found.runners_up if step_up is None
                                          or each.config != step_up.config)]
    given = scored(found.given) | {"settings": {}}
    return {
        "goal": goal, "limit": whole.reserve_limit, "considered": found.considered,
        "given": given if query.trainer == "fitgpt" else None,  # the search is of fitgpt's runs
        "chosen": chosen and scored(chosen), "runners_up": [scored(each) for each in others],
        "points": _thinned([(needs, speed) for needs, speed in found.frontier if needs <= whole.reserve_limit]),
        "reasons": [] if within else [
            *shared_gpu_note(target), *_reasons(query, found), *filter(None, [without_dashes(step_up_text(found))]),
            *found.notes, *_margin_note(target.budget)],
        "too_small": "" if found.chosen else describe_too_small(found),
        "suggestions": [_suggestion(each) for each in found.suggestions]}


def _reasons(query: PageQuery, found: FitResult) -> list[str]:
    """A sentence per decision, the change of the trainer first."""
    decisions = list(found.decisions)
    if query.trainer != "fitgpt":
        decisions.insert(0, Decision({"trainer": ("nanoGPT", "fitgpt")}, "the search is over fitgpt's options, which "
                                     "nanoGPT does not have; fitgpt computes the loss in chunks, so that the logits of "
                                     "a micro-batch never exist all at once"))
    return [f"{', '.join(f'{option} {was} → {now}' for option, (was, now) in each.changes.items())}: {each.why}."
            for each in decisions]


def _margin_note(budget: Budget) -> list[str]:
    return [f"{show_bytes(budget.margin)} stay free as a margin: the memory outside PyTorch's allocator is estimated "
            "for this GPU, not measured."] if budget.margin else []


def _suggestion(each: Suggestion) -> Answer:
    """Where nothing fits: settings that would help, or what to allow."""
    flags = " ".join(each.flags)
    allow = re.fullmatch(r"--allow=(\S+)", flags)
    settings = settings_in(re.sub(r"--(\w+)=(.+)", r"--\1='\2'", flags))  # the name of a GPU has spaces
    return {"label": without_dashes(flags), "text": each.text, "allow": allow[1] if allow else "",
            "settings": settings[0] if settings else {}, "least": each.least}


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MAX_POINTS of a curve, evenly spaced in memory, with its ends."""
    if len(points) <= MAX_POINTS:
        return points
    first, last = points[0][0], points[-1][0]
    places = [first + (last - first) * number / (MAX_POINTS - 1) for number in range(MAX_POINTS)]
    return list(dict.fromkeys(min(points, key=lambda point: abs(point[0] - place)) for place in places))
