"""PageQuery → the answers that the page draws: plan, timeline of a step, exact needs, all GPUs, fit, explain.

Every answer is a dict that becomes JSON. Bytes are plain numbers; sentences are written here, not in JavaScript.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from .. import diagnosis
from ..config.resolve import ResolvedRun, resolve_run
from ..config.run_config import DEFAULT_VOCAB, RunConfig
from ..core.errors import DoesNotFit, UsageError
from ..core.phases import PHASES
from ..core.units import MiB, optional_bytes, show_bytes, show_count
from ..hardware import gpus
from ..memory.platform import Platform
from ..memory.timeline import PhasePeak, Timeline, owners_after, replay
from ..planning import budget as place
from ..planning import forecast
from ..planning.budget import Budget
from ..planning.fit_settings import fit_target, shared_gpu_note
from ..planning.forecast import one_step
from ..planning.goals import describe_suggestions, describe_too_small, find_fastest
from ..planning.plan import expected_speed, nanogpt_notes, plan_for, same_tape
from ..planning.speed import SpeedEstimate
from ..show import plan_text as show
from ..show.charts import stacked_chart
from .query import PageQuery, as_settings, command, config_file, flags_in, plan_command, read

Answer = dict[str, Any]

BARS = ("load", "first_eval", "first_train", "train", "step", "eval")  # the phases that get a bar, in order of time
HEADS, WIDTHS = range(1, 129), range(8, 8193)
NARROWEST_HEAD, WIDEST_HEAD = 8, 256
VERDICTS = {True: "Fits", False: "Does not fit"}


# ---- one replay, shared by the answers about the same run


@lru_cache(maxsize=8)
def replayed(config: ResolvedRun, platform: Platform, trainer: str) -> Timeline:
    """The whole run, replayed without a memory limit."""
    return replay(forecast.write_tape(config, platform, trainer), expandable=platform.expands(trainer))


@lru_cache(maxsize=256)
def fits(config: ResolvedRun, platform: Platform, trainer: str, limit: int) -> bool:
    """Whether the run completes within `limit` reserved bytes. Replays with the limit only if the free run is unclear.

    An expandable segment maps whole pages beyond what a tensor needs, so the free run's reserved bytes are enough only
    with room for one more segment.
    """
    timeline, expandable = replayed(config, platform, trainer), platform.expands(trainer)
    if timeline.peak > limit:
        return False
    one_segment = max(event.nbytes for event in timeline.tape.events) + 20 * MiB if expandable else 0
    if timeline.reserved + one_segment <= limit:
        return True
    return replay(timeline.tape, limit, expandable=expandable).failed is None


def _resolved(query: PageQuery) -> tuple[RunConfig, Timeline]:
    config = resolve_run(query.config, query.target.platform, query.trainer)
    return config, replayed(config, query.target.platform, query.trainer)


# ---- the plan


def plan(query: PageQuery) -> Answer:
    """Verdict and bars from one replay. `exact` adds the headroom, which takes several more."""
    config, timeline = _resolved(query)
    budget, title = query.target.budget, _title(query, config)
    fitting = fits(config, query.target.platform, query.trainer, budget.reserve_limit)
    verdict, summary = VERDICTS[fitting], _summary(timeline, budget.reserve_limit, fitting)
    notes = nanogpt_notes(query.config, query.target.platform) if query.trainer == "nanogpt" else []
    return {
        "fits": fitting, "verdict": verdict, "summary": summary, "title": title,
        "trainer": query.trainer, "peak": timeline.peak, "bars": _bars(timeline, budget),
        "command": command(query), "plan_command": plan_command(query),
        "config_file": config_file(query, f"{title}. {verdict}: {summary}"),
        "resolved": {"dtype": config.dtype, "compile": str(config.compile), "torch": query.target.platform.torch,
                     "others": budget.others, "budget": budget.budget},
        "slider_values": {"n_head": _head_counts(config.n_embd), "n_embd": _widths(config.n_head)},
        "notes": [*query.ignored, *query.target.notes, *notes],
    }


def _title(query: PageQuery, config: RunConfig) -> str:
    budget, layers = query.target.budget, f"{config.n_layer} layer{'s' if config.n_layer > 1 else ''}"
    where = f" on the {budget.card}" if budget.card else ""
    return (f"{show.TRAINERS[query.trainer]}{where}: {show_count(config.gpt_config().count_params())} parameters, "
            f"{layers} of width {config.n_embd:,}, batch {config.batch_size:,} × {config.block_size:,}, "
            f"{config.dtype}, {'compiled' if config.compile else 'eager'}")


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


def _bars(timeline: Timeline, budget: Budget) -> Answer:
    """Per phase: its peak, and which owners hold the bytes at that moment."""
    peaks = {phase: peak for phase, peak in timeline.peaks().items() if phase in BARS}
    owners = owners_after(timeline.tape, timeline.changes, {peak.event for peak in peaks.values()})
    highest = max(peaks.values(), key=lambda peak: peak.allocated)

    def row(peak: PhasePeak) -> Answer:
        return {"phase": peak.phase, "name": PHASES[peak.phase], "owners": owners[peak.event],
                "allocated": peak.allocated, "reserved": peak.reserved, "peak": peak is highest}

    whole_card = budget.budget == budget.usable - budget.others
    name = f"{budget.card or 'the GPU'}: {show_bytes(budget.usable)} usable" if whole_card else (
        f"a budget of {show_bytes(budget.budget)}")
    return {"limit": budget.budget + budget.others, "limit_name": name, "others": budget.others,
            "outside": budget.outside, "rows": [row(peaks[phase]) for phase in BARS if phase in peaks]}


def _head_counts(width: int) -> list[int]:
    """Head counts that divide the width into heads of a common size; any divisor if there is none."""
    divisors = [heads for heads in HEADS if width % heads == 0]
    common = [heads for heads in divisors
              if NARROWEST_HEAD <= width // heads <= WIDEST_HEAD and width // heads % 8 == 0]
    return common or divisors


def _widths(heads: int) -> list[int]:
    """Widths for this head count: the width per head is a multiple of 8, at most WIDEST_HEAD."""
    step = 8 * heads
    widths = list(range(step, heads * WIDEST_HEAD + 1, step))
    return [width for width in widths if width in WIDTHS] or [heads]


# ---- after the plan


def step(query: PageQuery) -> Answer:
    """A chart of memory over one training step, by owner."""
    timeline, budget = _resolved(query)[1], query.target.budget
    note = "A few micro-batches, then the optimizer step. Further micro-batches repeat the last one."
    return {"html": stacked_chart(one_step(timeline), title="One training step, by owner", limit=budget.reserve_limit,
                            limit_name="may be reserved", note=note)}


def exact(query: PageQuery) -> Answer:
    """The plan as `fitgpt plan` prints it, with the smallest limit that is enough: some ten more replays."""
    config, target = query.config, query.target
    memory = plan_for(config, target, query.trainer)
    run, speed = memory.duration, _speed(query, config, target)
    cpu_ram = f"; {show_bytes(run.host_bytes)} of CPU RAM" if run.host_bytes else ""
    facts = [("assumes", show.assumptions_text(memory)), ("basis", show.accuracy_text(memory, memory.track_record)),
             ("GPU", " ".join(target.budget.sources)),
             ("step", f"{run.tokens_per_step:,} tokens per step; a checkpoint takes {show_bytes(run.checkpoint_bytes)} "
                      f"on disk{cpu_ram}"),
             *([("speed", f"{_tokens(speed)} tokens/s, by {speed.basis}")] if speed else [])]
    verdict = VERDICTS[memory.fits]
    headroom = f"{show_bytes(abs(memory.headroom))} {'to spare' if memory.fits else 'too much'}"
    title = _title(query, memory.run)
    return {
        "fits": memory.fits, "verdict": verdict,
        "summary": show.verdict(memory, target.neighbours), "needs": memory.forecast.needs,
        "headroom": memory.headroom, "headroom_text": headroom,
        "config_file": config_file(query, f"{title}. {verdict}: {headroom}."),
        "speed": _tokens(speed),
        "phases": [{"name": PHASES[phase], "allocated": held.allocated, "reserved": held.reserved,
                    "process": held.reserved + target.budget.outside, "peak": phase == memory.forecast.peak_phase}
                   for phase in PHASES if (held := memory.forecast.phases.get(phase))],
        "owners": [{"owner": share.owner, "nbytes": share.nbytes, "formula": share.formula}
                   for share in memory.forecast.owners_at_peak],
        "facts": facts,
    }


def _speed(query: PageQuery, config: RunConfig, target: place.Target) -> SpeedEstimate | None:
    """None for GPUs whose bandwidth or TFLOP/s are not known."""
    return expected_speed(config, target.card, query.trainer, target.platform)


def _tokens(speed: SpeedEstimate | None) -> str:
    """'37k–52k', or one figure where the estimate is a measurement of this very run."""
    if speed is None:
        return ""
    low, high = _short(speed.low), _short(speed.high)
    return low if low == high else f"{low}–{high}"


def _short(number: float) -> str:
    """Two or three digits: 560, 5.6k, 56k, 1.3M."""
    for unit, letter in ((10**6, "M"), (1000, "k")):
        if number >= unit:
            return f"{number / unit:.{int(number < 10 * unit)}f}{letter}"
    return f"{number:.0f}"


def all_gpus(query: PageQuery) -> Answer:
    """The verdict on every NVIDIA GPU of the table. GPUs with the same tape share one replay, that of the largest."""
    others = query.target.budget.others if query.questions.others else 0
    rows = [_on_gpu(card, query, others) for card in gpus.load() if card.vendor == "nvidia" and card.usable_mib]
    largest: dict[Any, Platform] = {}
    for _, target in rows:
        if target is not None:
            key = same_tape(resolve_run(query.config, target.platform, query.trainer), target.platform)
            largest[key] = max(largest.get(key, target.platform), target.platform, key=lambda platform: platform.sms)
    return {"gpus": [row if target is None else row | _verdict_on(query, target, largest) for row, target in rows]}


def _on_gpu(card: gpus.GpuModel, query: PageQuery, others: int) -> tuple[Answer, place.Target | None]:
    """A GPU's row, and the target to plan for; None if the run cannot start there."""
    usable = (card.usable_mib or 0) * MiB
    row: Answer = {"name": card.name, "memory": f"{card.memory_gb} GB", "usable": usable, "others": others,
                   "outside": 0, "peak": 0, "fits": False, "problem": "", "speed": ""}
    try:
        target = place.on_card(card, others=others, torch=query.questions.torch)
        place.check_supported(query.config, target, query.trainer)
    except UsageError as error:
        return row | {"problem": f"needs {error.fix}" if others < usable else "other programs fill it"}, None
    return row, target


def _verdict_on(query: PageQuery, target: place.Target, largest: dict[Any, Platform]) -> Answer:
    platform = largest[same_tape(resolve_run(query.config, target.platform, query.trainer), target.platform)]
    config, limit = resolve_run(query.config, platform, query.trainer), target.budget.reserve_limit
    return {"outside": target.budget.outside, "peak": replayed(config, platform, query.trainer).peak,
            "speed": _tokens(_speed(query, config, target)), "fits": fits(config, platform, query.trainer, limit)}


# ---- fit and explain


def fitted(query: PageQuery) -> Answer:
    """The settings that `fitgpt fit` chooses, nothing lossy, with a reason per change. Raises DoesNotFit."""
    config = replace(query.config, vocab_size=query.config.vocab_size or DEFAULT_VOCAB, budget=query.questions.budget)
    target = fit_target(query.target, config, is_here=not query.questions.gpu)
    found = find_fastest(config, target)
    if found.chosen is None:
        raise DoesNotFit(describe_too_small(found), " ".join([describe_suggestions(found), *found.notes]))
    settings = as_settings(config, found.chosen.config)
    if query.trainer != "fitgpt":
        settings["trainer"] = "fitgpt"
    reasons = [f"{', '.join(f'{option} {was} → {now}' for option, (was, now) in each.changes.items())}: {each.why}."
               for each in found.decisions]
    margin = [f"{show_bytes(target.budget.margin)} stay free as a margin: the memory outside PyTorch's allocator is "
              "estimated for this GPU, not measured."] if target.budget.margin else []
    return {"settings": settings, "considered": found.considered,
            "reasons": [*shared_gpu_note(target), *reasons, *margin]}


def explain(text: str, query: str | None) -> Answer:
    """A pasted OOM message, nvidia-smi screen or plan → its diagnosis. `query`: the plan of the run that failed."""
    planned = read(query) if query is not None else None
    found = diagnosis.explain(text, planned.config if planned else None, trainer=planned.trainer if planned else "auto",
                              others=optional_bytes(planned.questions.others) if planned else None)
    document = asdict(found)
    for remedy in document["remedies"]:
        remedy["settings"] = flags_in(remedy["todo"])
        if not remedy["settings"] and planned and planned.trainer == "nanogpt" and (
                remedy["todo"].startswith("fitgpt train")):
            remedy["settings"] = {"trainer": "fitgpt"}
    return document
