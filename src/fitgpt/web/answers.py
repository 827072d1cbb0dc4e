"""What the page is told: the plan at once, from one replay of the tape; then the step, the exact needs and the cards.
Of a deep run, whose replay takes long, at once comes a draft from what its tensors take. Of fitgpt's, closed forms know
whether it fits; of nanoGPT's the tensors may be too much, or fit, and then the whole answer follows.

Every answer is a dict that becomes JSON. Bytes are plain numbers, and whatever is a sentence is made here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from ..commands.plan import same_tape
from ..config.memory_savers import LEVELS
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes, show_count
from ..hardware import gpus
from ..memory.allocator import Timeline, begun_of, owners_after, replay
from ..memory.blocks import LARGE_SEGMENT, rounded, segment_size
from ..memory.setting import Setting
from ..memory.tape import OWNERS
from ..memory.thinned import one_step
from ..nanonotes import on_the_card
from ..nouns import Budget, SpeedEstimate
from ..planning import budget as place
from ..planning import forecast
from ..planning.closed import Shape, mix_of
from ..planning.duration import expected_speed, outlook
from ..planning.folded import Folded
from ..planning.track_record import basis_of
from ..show import planning as show
from ..show.charts import stacked
from .settings import Asked, command, config_file, plan_command

Answer = dict[str, Any]

BARS = ("load", "first_eval", "first_train", "train", "step", "eval")  # phases of the run itself, in their order
HEADS, WIDTHS = range(1, 129), range(8, 8193)
NARROWEST_HEAD, WIDEST_HEAD = 8, 256
# So many layers are deep: a tape may take longer to write and to replay than the 50 ms in which a page answers. That of
# fitgpt's compiled runs is the shortest, that of nanoGPT's the longest.
DEEP, DEEP_IF_SHORT, DEEP_IF_LONG = 9, 13, 5

# How far below and above the truth the highest point of a draft may be: blocks are larger than what is asked for, by up
# to 4 %; above it none was seen (docs/log.md).
TOO_LOW, TOO_HIGH = 0.05, 0.01
VERDICTS = {True: "Fits", False: "Does not fit"}


class Held(NamedTuple):
    allocated: int
    owners: dict[str, int]
    reserved: int = 0  # unknown in a draft


# ---- one replay, kept


@lru_cache(maxsize=8)
def replayed(config: RunConfig, setting: Setting, trainer: str) -> Timeline:
    """The whole run without a cap. `config` is settled."""
    return replay(forecast.tape_of(config, setting, trainer), expandable=_expands(setting, trainer))


@lru_cache(maxsize=256)
def fits(config: RunConfig, setting: Setting, trainer: str, limit: int) -> bool:
    """What `needs` would say of that limit; where one replay without it tells enough, no second is made."""
    timeline, expandable = replayed(config, setting, trainer), _expands(setting, trainer)
    if timeline.peak > limit:
        return False
    if _enough(timeline, setting, trainer) <= limit:
        return True
    return begun_of(timeline, expandable).go_on(limit)


def _enough(timeline: Timeline, setting: Setting, trainer: str) -> int:
    """What will do for certain: with expandable segments, more is asked of the driver at once than is mapped."""
    if not _expands(setting, trainer):
        return timeline.reserved
    largest = max(event.nbytes for event in timeline.tape.events)
    return timeline.reserved + max(segment_size(rounded(largest)), LARGE_SEGMENT)


def _expands(setting: Setting, trainer: str) -> bool:
    return setting.expands(trainer)


def of(asked: Asked) -> tuple[RunConfig, Timeline]:
    config = forecast.settled(asked.config, asked.place.setting, asked.trainer)
    return config, replayed(config, asked.place.setting, asked.trainer)


# ---- at once


def plan(asked: Asked) -> Answer:
    """The whole answer, or a draft of it (see above): then `fits` is None where only a replay can tell."""
    config = forecast.settled(asked.config, asked.place.setting, asked.trainer)
    deep = DEEP_IF_LONG if asked.trainer == "nanogpt" else DEEP_IF_SHORT if config.compile else DEEP
    if config.n_layer < deep or config.eval_only:
        return whole(asked)
    limit, shares = asked.place.budget.reserve_limit, dict[str, float](Counter(config.levels))
    if asked.trainer == "fitgpt":
        shape, mix = Folded(asked.place.setting).shape(config), mix_of(config.levels)
        held, enough = _drafted(asked, config, _of_two(shares, shape, config.n_layer)), shape.needs(mix)
        fitting = None if shape.could_fit(mix, limit) and enough > limit else enough <= limit
    else:
        held = _drafted(asked, config, shares)
        over = max(each.allocated for each in held.values()) - limit
        fitting, enough = False if over > TOO_HIGH * limit else None, 0
    return _told(asked, config, held, fitting, enough, draft=True)


def _of_two(layers_at: dict[str, float], shape: Shape, layers: int) -> dict[str, float]:
    """Layers by what they keep, told by those that keep most and least: one between counts in part as either."""
    if len(layers_at) <= 2:
        return layers_at
    holds = {level: shape.allocated(((LEVELS.index(level), layers),)) for level in layers_at}
    least, most = min(holds, key=holds.__getitem__), max(holds, key=holds.__getitem__)
    if least == most:
        return {most: layers}
    as_most = sum(number * (holds[level] - holds[least]) for level, number in layers_at.items()) / (
        holds[most] - holds[least])
    return {least: layers - as_most, most: as_most}


def _drafted(asked: Asked, config: RunConfig, layers_at: dict[str, float]) -> dict[str, Held]:
    """Where layers keep different things, the mean of runs in which all keep one or the other."""
    alike = [replace(config, recompute=level, grad_checkpoint=False) for level in layers_at]
    drafts = [forecast.draft(each, asked.place.setting, asked.trainer) for each in alike]

    def mean(figures: Iterable[int]) -> int:
        return int(sum(number * figure for number, figure in zip(layers_at.values(), figures, strict=True))
                   / config.n_layer)

    return {phase: Held(mean(draft[phase].allocated for draft in drafts),
                        {owner: nbytes for owner in OWNERS
                         if (nbytes := mean(draft[phase].owners.get(owner, 0) for draft in drafts))})
            for phase in BARS if phase in drafts[0]}


def whole(asked: Asked) -> Answer:
    config, timeline = of(asked)
    fitting = fits(config, asked.place.setting, asked.trainer, asked.place.budget.reserve_limit)
    return _told(asked, config, _highest(timeline), fitting, _enough(timeline, asked.place.setting, asked.trainer),
                 draft=False)


def _highest(timeline: Timeline) -> dict[str, Held]:
    """By phase: what lies on the card at its highest point, and whose it is."""
    peaks = {phase: peak for phase, peak in timeline.peaks().items() if phase in BARS}
    owners = owners_after(timeline.tape, timeline.changes, {peak.event for peak in peaks.values()})
    return {phase: Held(peak.allocated, owners[peak.event], peak.reserved) for phase, peak in peaks.items()}


def _told(asked: Asked, config: RunConfig, held: dict[str, Held], fitting: bool | None, enough: int, *,
          draft: bool) -> Answer:
    """`enough`: what will do for certain."""
    budget, title = asked.place.budget, _title(asked, config)
    peak, reserved = max(each.allocated for each in held.values()), max(each.reserved for each in held.values())
    words = _at_once(peak, reserved, enough, budget, fitting)
    verdict = VERDICTS[fitting] if fitting is not None else (
        "Its tensors fit" if peak <= (1 - TOO_LOW) * budget.reserve_limit else "Close to the limit")
    return {
        "fits": fitting, "verdict": verdict, "words": words, "draft": draft, "title": title,
        "trainer": asked.trainer, "peak": peak, "bars": _bars(held, budget),
        "command": command(asked), "plan_command": plan_command(asked),
        "config_file": config_file(asked, f"{title}. {verdict}: {words}"),
        "means": {"dtype": config.dtype, "compile": str(config.compile), "torch": asked.place.setting.torch,
                  "others": budget.others, "budget": budget.budget},
        "values": {"n_head": _head_counts(config.n_embd), "n_embd": _widths(config.n_head)},
        "notes": [*asked.passed_over, *asked.place.notes, *_of_nanogpt(asked)],
    }


def _of_nanogpt(asked: Asked) -> list[str]:
    return on_the_card(asked.config, asked.place.setting) if asked.trainer == "nanogpt" else []


def _title(asked: Asked, config: RunConfig) -> str:
    budget, layers = asked.place.budget, f"{config.n_layer} layer{'s' if config.n_layer > 1 else ''}"
    where = f" on the {budget.card}" if budget.card else ""
    return (f"{show.TRAINERS[asked.trainer]}{where}: {show_count(config.gpt_config().count_params())} parameters, "
            f"{layers} of width {config.n_embd:,}, batch {config.batch_size:,} × {config.block_size:,}, "
            f"{config.dtype}, {'compiled' if config.compile else 'eager'}")


def _at_once(peak: int, reserved: int, enough: int, budget: Budget, fitting: bool | None) -> str:
    """What one replay tells, or the tensors' sizes: bounds, until the exact figure comes."""
    limit = budget.reserve_limit
    if fitting is None:
        return (f"tensors take about {show_bytes(peak)} of the {show_bytes(limit)} that may be reserved. Whether the "
                "gaps between them fit too is being worked out.")
    if fitting and enough <= limit:
        return f"at least {show_bytes(limit - enough)} to spare."
    if fitting and reserved <= limit:
        return f"closely: of {show_bytes(limit)} it reserves {show_bytes(reserved)}."
    if fitting:
        return f"tightly: of {show_bytes(limit)} it would like {show_bytes(reserved)}, and gets by with less."
    if peak > limit:
        return f"tensors alone take {show_bytes(peak)} or more, and {show_bytes(limit)} may be reserved."
    return (f"tensors take {show_bytes(peak)} of the {show_bytes(limit)} that may be reserved, but there are too many "
            "gaps between them.")


def _bars(held: dict[str, Held], budget: Budget) -> Answer:
    """Whose bytes lie on the card at the highest point of each phase."""
    highest = max(held, key=lambda phase: held[phase].allocated)
    rows = [{"phase": phase, "name": show.PHASES[phase], "owners": held[phase].owners,
             "allocated": held[phase].allocated, "reserved": held[phase].reserved, "peak": phase == highest}
            for phase in BARS if phase in held]
    whole_card = budget.budget == budget.usable - budget.others
    name = f"{budget.card or 'the card'}: {show_bytes(budget.usable)} usable" if whole_card else (
        f"a budget of {show_bytes(budget.budget)}")
    return {"limit": budget.budget + budget.others, "limit_name": name, "others": budget.others,
            "outside": budget.outside, "rows": rows}


def _head_counts(width: int) -> list[int]:
    """Those that divide a width into heads of a usual size; all that divide it where none does."""
    dividing = [heads for heads in HEADS if width % heads == 0]
    usual = [heads for heads in dividing if NARROWEST_HEAD <= width // heads <= WIDEST_HEAD and width // heads % 8 == 0]
    return usual or dividing


def _widths(heads: int) -> list[int]:
    """Multiples of the head count, with heads a multiple of 8 wide, as wide as heads usually are."""
    step = 8 * heads
    widths = list(range(step, heads * WIDEST_HEAD + 1, step))
    return [width for width in widths if width in WIDTHS] or [heads]


# ---- soon after


def step(asked: Asked) -> Answer:
    """One training step drawn over time."""
    timeline, budget = of(asked)[1], asked.place.budget
    note = "A few micro-batches, one after another, then the optimizer's step; more repeat the last."
    return {"html": stacked(one_step(timeline), title="One training step, by owner", limit=budget.reserve_limit,
                            limit_name="may be reserved", note=note)}


def exact(asked: Asked) -> Answer:
    """As `fitgpt plan` has it: the smallest cap that will do takes some ten replays more."""
    config, found = asked.config, asked.place
    told = forecast.plan(config, found.setting, found.budget, asked.trainer)
    run, speed = outlook(config, told.forecast, None, found.card), _speed(asked, config, found)
    facts = [("assumes", show.assumption_words(told)), ("basis", show.basis_words(told, basis_of(told))),
             ("card", " ".join(found.budget.sources)), ("step", f"{run.tokens_per_step:,} tokens a step; a checkpoint "
              f"takes {show_bytes(run.checkpoint_bytes)} on disk"
              + (f"; {show_bytes(run.host_bytes)} of the host's memory" if run.host_bytes else "")),
             *([("speed", f"{_tokens(speed)} tokens/s, by {speed.basis}")] if speed else [])]
    verdict, short = VERDICTS[told.fits], f"{show_bytes(abs(told.headroom))} {'to spare' if told.fits else 'too much'}"
    title = _title(asked, forecast.settled(config, found.setting, asked.trainer))
    return {
        "fits": told.fits, "verdict": verdict,
        "words": show.verdict(told, found.neighbours), "needs": told.forecast.needs, "headroom": told.headroom,
        "short": short, "config_file": config_file(asked, f"{title}. {verdict}: {short}."),
        "speed": _tokens(speed),
        "phases": [{"name": show.PHASES[phase], "allocated": held.allocated, "reserved": held.reserved,
                    "process": held.reserved + found.budget.outside, "peak": phase == told.forecast.peak_phase}
                   for phase in show.PHASES if (held := told.forecast.phases.get(phase))],
        "owners": [{"owner": share.owner, "nbytes": share.nbytes, "formula": share.formula}
                   for share in told.forecast.owners_at_peak],
        "facts": facts,
    }


def _speed(asked: Asked, config: RunConfig, found: place.Place) -> SpeedEstimate | None:
    """None where there is none: of cards whose figures are not known."""
    return expected_speed(config, found.card, asked.trainer, found.setting)


def _tokens(speed: SpeedEstimate | None) -> str:
    """37k–52k, or one figure where that very run was measured."""
    if speed is None:
        return ""
    low, high = _short(speed.low), _short(speed.high)
    return low if low == high else f"{low}–{high}"


def _short(number: float) -> str:
    """Two digits or three: 560, 5.6k, 56k, 1.3M."""
    for unit, letter in ((10**6, "M"), (1000, "k")):
        if number >= unit:
            return f"{number / unit:.{int(number < 10 * unit)}f}{letter}"
    return f"{number:.0f}"


def all_cards(asked: Asked) -> Answer:
    """Every card side by side. Those on which the tape is the same are replayed once, for the largest of them."""
    others = asked.place.budget.others if asked.questions.others else 0
    rows = [_on(card, asked, others) for card in gpus.load() if card.vendor == "nvidia" and card.usable_mib]
    largest: dict[Any, Setting] = {}
    for _, found in rows:
        if found is not None:
            kind = same_tape(asked.config, found.setting, asked.trainer)
            largest[kind] = max(largest.get(kind, found.setting), found.setting, key=lambda setting: setting.sms)
    return {"cards": [row if found is None else row | _planned(asked, found, largest) for row, found in rows]}


def _on(card: gpus.Card, asked: Asked, others: int) -> tuple[Answer, place.Place | None]:
    """A card's row, and the place to plan for; None where the run cannot be there."""
    usable = (card.usable_mib or 0) * MiB
    row: Answer = {"name": card.name, "memory": f"{card.memory_gb} GB", "usable": usable, "others": others,
                   "outside": 0, "peak": 0, "fits": False, "problem": "", "speed": ""}
    try:
        found = place.on_card(card, others=others, torch=asked.questions.torch)
        place.check_runs(asked.config, found, asked.trainer)
    except UsageError as error:
        return row | {"problem": f"needs {error.fix}" if others < usable else "nothing left by others"}, None
    return row, found


def _planned(asked: Asked, found: place.Place, largest: dict[Any, Setting]) -> Answer:
    setting = largest[same_tape(asked.config, found.setting, asked.trainer)]
    config, limit = forecast.settled(asked.config, setting, asked.trainer), found.budget.reserve_limit
    return {"outside": found.budget.outside, "peak": replayed(config, setting, asked.trainer).peak,
            "speed": _tokens(_speed(asked, config, found)), "fits": fits(config, setting, asked.trainer, limit)}
