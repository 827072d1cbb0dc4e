"""ResolvedRun → single changes that make it smaller, what each saves, and which are enough. The one ranking of changes
that `plan`, `explain`, `train` and the web page use.

They rank as an expert would rank them: what is exact and free, what is exact and slower, then whatever changes what is
trained. Changes of one family are in order: each saves more than the one before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import isqrt
from typing import Any, NamedTuple

from ..config.fields import shown
from ..config.memory_savers import POLICIES, SAVERS, loss_chunk_tokens
from ..config.run_config import DEFAULT_VOCAB, ResolvedRun, RunConfig, resolve_run
from ..core.errors import UsageError
from ..memory.platform import Platform
from .budget import Budget
from .forecast import fits, replay_run

TRAINING, EVALUATION = ("first_train", "train", "step"), ("first_eval", "eval")
SMALLEST_CHUNK = 128  # tokens; loss_chunk_tokens goes no lower by itself
RANKS = ("free", "slower", "changes what is trained")
KINDS = ("exact", "lossy", "batch", "other")
FREE = ("trainer", "compile", "gradients", "states")  # families that cost no time
# Families of changes: what costs nothing first, then what costs little time, then what changes what is trained.
# Memory savers are in the order of the registry, except those that a run can use in several sizes.
BY_SIZE = ("loss", "evaluation", "batch", "saved_activations")
OF_SAVERS = {permission: tuple(dict.fromkeys(saver.family for saver in SAVERS if saver.permission == permission))
             for permission in ("free", "places", "lossy", "rules")}
FAMILIES = ("trainer", "compile", *(family for family in reversed(OF_SAVERS["free"]) if family not in BY_SIZE),
            *BY_SIZE, *OF_SAVERS["places"], *OF_SAVERS["lossy"], *OF_SAVERS["rules"], "accumulation", "block")


class Change(NamedTuple):
    """One thing to do differently. Exact: the same arithmetic up to rounding order."""

    flags: tuple[str, ...]   # what to add to the command
    what: str                # what is no longer in memory
    exact: bool
    comparable: bool         # whether losses still compare: windows of the same length
    slower: str              # what it costs
    family: str              # of FAMILIES
    trainer: str             # the trainer of the changed run
    same_batch: bool = True  # whether a step still trains on as many tokens

    @property
    def kind(self) -> str:
        """One of KINDS. "batch": another effective batch size. "other": losses no longer compare."""
        if self.exact:
            return "exact"
        return "other" if not self.comparable else "lossy" if self.same_batch else "batch"

    @property
    def rank(self) -> str:
        """One of RANKS."""
        return RANKS[2] if not self.exact else RANKS[0] if self.family in FREE else RANKS[1]


class ChangedRun(NamedTuple):
    change: Change
    config: RunConfig

    def resolved(self, platform: Platform) -> ResolvedRun:
        return resolve_run(self.config, platform, self.change.trainer)


class PricedChange(NamedTuple):
    """A change with the bytes it saves; negative: it allocates more."""

    change: Change
    saved: dict[str, int]    # by phase
    saved_in_training: int   # at the peak of training, the first step included
    saved_in_evaluation: int
    needs: int               # after the change
    headroom: int
    speed: float | None = None  # relative to the run without the change, where there is an estimate

    @property
    def fits(self) -> bool:
        return self.headroom >= 0


class MemoryUse(NamedTuple):
    """Bytes allocated in each phase, and the smallest memory limit that is enough."""

    phases: dict[str, int]
    needs: int

    def most_in(self, phases: tuple[str, ...]) -> int:
        return max((held for phase, held in self.phases.items() if phase in phases), default=0)


# ---- the changes


def single_changes(config: RunConfig, trainer: str = "fitgpt", *, compiles: bool = True) -> tuple[ChangedRun, ...]:
    """All that apply to this config, by rank, then by family. `compiles`: whether torch.compile works on the GPU."""
    found: list[ChangedRun] = []

    def add(family: str, what: str, slower: str, *, exact: bool = True, comparable: bool = True,
            **options: Any) -> None:
        """Nothing where the options change nothing, or other options exclude the change."""
        try:
            changed = replace(config, **options)
        except UsageError:
            return
        flags = tuple(f"--{key}={shown(getattr(changed, key))}" for key in options
                      if getattr(changed, key) != getattr(config, key))
        if flags:
            same_batch = changed.tokens_per_step == config.tokens_per_step
            found.append(ChangedRun(Change(flags, what, exact and same_batch, comparable, slower, family, trainer,
                                           same_batch), changed))

    # The same tokens per step and the same evaluation, in smaller micro-batches. Dropout masks are drawn per
    # micro-batch, so they change.
    batch, accumulation, half = config.batch_size, config.gradient_accumulation_steps, config.block_size // 2
    for smaller in repeatedly_divided(batch):
        times = batch // smaller
        add("batch", "the activations of the other sequences", "smaller matmuls", exact=not config.dropout,
            batch_size=smaller, gradient_accumulation_steps=accumulation * times, eval_iters=config.eval_iters * times)
    if compiles and not config.compile:
        add("compile", "the temporaries between two matmuls" if trainer == "fitgpt" else
            "float32 copies of logits and norms", "a slower start", compile=True)
    if trainer == "fitgpt":
        _add_savers(config, add)
    else:
        slower = "nothing"
        if set(config.policies) - {"all", "matmuls"}:  # norms and GELU take next to no time
            slower = "the time to recompute, which nanoGPT does not do"
        found.append(ChangedRun(Change(
            ("--trainer=fitgpt",), "all logits but those of a few tokens, and half of what each layer saves for "
            "backward: the same model and precision, the data in another order", True, True, slower, "trainer",
            "fitgpt"), config))
        add("accumulation", "a second set of gradients beside the first", f"steps of {accumulation} times fewer tokens",
            exact=False, gradient_accumulation_steps=1)
    if half:  # another model, and another loss
        add("block", "half of the activations: the context is half as long", "smaller matmuls", exact=False,
            comparable=False, block_size=half, gradient_accumulation_steps=2 * accumulation,
            eval_block_size=min(config.eval_block_size, half))
    return tuple(sorted(found, key=lambda each: (RANKS.index(each.change.rank), FAMILIES.index(each.change.family))))


def _add_savers(config: RunConfig, add: Callable[..., None]) -> None:
    """The changes of memory savers that fitgpt has. Those that a run can use in several sizes come first."""
    most_kept = min(POLICIES.index(policy) for policy in config.policies)
    for saver in SAVERS:
        if saver.option == "saved_activations" and POLICIES.index(saver.value) > most_kept:
            add("saved_activations", saver.saves, saver.costs, saved_activations=saver.value, grad_checkpoint=False)
    for smaller in repeatedly_divided(config.eval_batch):
        add("evaluation", "what the other windows of an evaluation hold", "a slower evaluation",
            eval_batch_size=smaller)
    chunk = loss_chunk_tokens(config.batch_size * config.block_size, config.vocab_size or DEFAULT_VOCAB,
                              config.loss_chunk)
    for smaller in (chunk // 2, chunk // 4):
        if smaller >= SMALLEST_CHUNK:
            add("loss", "the logits of the other tokens", "smaller matmuls", loss_chunk=smaller)
    for saver in SAVERS:
        if saver.permission != "never" and saver.family not in BY_SIZE:
            saves, costs = re.sub(r"\b(\d+)P\b", r"\1 bytes per parameter", saver.saves), saver.costs
            times = config.gradient_accumulation_steps // saver.settings.get("gradient_accumulation_steps",
                                                                             config.gradient_accumulation_steps)
            if times > 1:
                costs += f"; steps of {times} times fewer tokens, unless batch_size grows as much"
            add(saver.family, saves, costs, exact=saver.exact, **saver.settings)


def repeatedly_divided(number: int) -> list[int]:
    """12 → 6, 3, 1: divided by its smallest prime factor, repeatedly."""
    found = []
    while number > 1:
        number //= next((factor for factor in range(2, isqrt(number) + 1) if number % factor == 0), number)
        found.append(number)
    return found


# ---- what they save


def memory_use(run: ResolvedRun, platform: Platform, trainer: str = "fitgpt") -> MemoryUse:
    timeline = replay_run(run, platform, trainer)
    return MemoryUse({phase: peak.allocated for phase, peak in timeline.peaks().items()}, timeline.needs)


def priced(changed: ChangedRun, before: MemoryUse, platform: Platform, budget: Budget) -> PricedChange:
    """What a change saves compared with the run without it."""
    after = memory_use(changed.resolved(platform), platform, changed.change.trainer)
    saved = {phase: held - after.phases[phase] for phase, held in before.phases.items() if phase in after.phases}
    if "train" in saved:  # the optimizer step included, as in a plan
        saved["train"] = before.most_in(("train", "step")) - after.most_in(("train", "step"))
    in_training, in_evaluation = (before.most_in(phases) - after.most_in(phases) for phases in (TRAINING, EVALUATION))
    return PricedChange(changed.change, saved, in_training, in_evaluation, after.needs,
                        budget.reserve_limit - after.needs)


def ranked(changes: Iterable[PricedChange]) -> list[PricedChange]:
    """By rank, then by kind; of one kind those that make the run fit first, then the largest saving."""
    return sorted(changes, key=lambda each: (RANKS.index(each.change.rank), KINDS.index(each.change.kind),
                                             not each.fits, each.needs))


# ---- which are enough


def by_family(changes: tuple[ChangedRun, ...]) -> dict[str, list[ChangedRun]]:
    """In the order of FAMILIES, exact changes first."""
    found: dict[str, list[ChangedRun]] = {}
    for changed in changes:
        found.setdefault(changed.change.family, []).append(changed)
    return found


def smallest(family: list[ChangedRun], enough: Callable[[ChangedRun], bool]) -> ChangedRun | None:
    """The first that is enough. If the last one is not, none is: each saves more than the one before it."""
    if not family:
        return None
    first, *others = family
    if enough(first):
        return first
    if not others or not enough(others[-1]):
        return None
    return next((changed for changed in others[:-1] if enough(changed)), others[-1])


def smallest_that_fit(run: ResolvedRun, platform: Platform, budget: Budget, trainer: str = "fitgpt",
                      most: int = 3) -> tuple[ChangedRun, ...]:
    """Of each family the smallest change that makes the run fit: at most `most`, the cheapest first."""
    def enough(changed: ChangedRun) -> bool:
        return fits(changed.resolved(platform), platform, budget.reserve_limit, changed.change.trainer)

    found: list[ChangedRun] = []
    for family in by_family(single_changes(run, trainer, compiles=platform.compiles)).values():
        if len(found) < most and (changed := smallest(family, enough)):
            found.append(changed)
    return tuple(found)
