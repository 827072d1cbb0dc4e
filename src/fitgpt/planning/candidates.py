"""Every setting that could be chosen, each with what it would hold and how long a step would take: by closed forms.

What differs between candidates: the savers, whether GPU work is recorded, the micro-batch, the piece of the loss, the
evaluation's batch, and how many layers keep how much. The tokens of a step and their order are always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..config.memory_savers import LEVELS, loss_piece_tokens
from ..config.run_config import RunConfig
from ..core.units import MiB
from ..hardware import gpus
from ..hardware.gpus import Card
from ..memory import gpt
from ..memory.setting import Setting
from .closed import Mix, Shape
from .folded import Folded, draft
from .permission import Way
from .speed import Cost, cost, has_figures, reach_of

PIECES = (256, 512, 1024, 2048, 4096, 8192)  # tokens whose logits exist at once …
MOST_PIECES = 64                             # … and into how many a micro-batch is cut at most
EVALUATED = 4096                             # tokens that keep a card busy in evaluation
MOST_MIXES = 24                              # of two levels that are tried
MOST_SEQUENCES = 4096                        # of a micro-batch: larger ones are no faster
BIN = 32 * MiB                               # of the frontier
PAIRS = tuple((few, many) for few in range(len(LEVELS)) for many in range(few))
LEAST_FIRST = tuple(reversed(range(len(LEVELS))))
STAND_IN = "RTX 4070"                        # where a card's figures are not known, its proportions rank candidates
# Whether to look at a candidate: given the way, how many things it changes, and the seconds of a step if every layer
# keeps all.
Worth = Callable[[Way, int, float], bool]


class Stem(NamedTuple):
    """A candidate but for its levels."""

    config: RunConfig   # a draft: not checked, its levels mean nothing
    way: Way
    changes: int        # how many things it changes of what was asked for
    shape: Shape
    cost: Cost

    def seconds(self, mix: Mix) -> float:
        """Of a step."""
        return self.cost.seconds(self.config.gradient_accumulation_steps,
                                 sum(layers * self.cost.layers[level] for level, layers in mix))


class Candidate(NamedTuple):
    seconds: float      # of a step
    mapped: int         # bytes: what it cannot do without
    mix: Mix
    config: RunConfig   # these as in its stem
    way: Way
    changes: int


Found = tuple[float, int, Mix]  # the seconds, the bytes and the mix of a candidate
Branch = tuple[Way, dict[str, Any]]  # savers, and how the work is recorded
# What was found of a branch, in what one process can tell another: how many candidates, bins, and of the fastest their
# seconds, bytes, mix, changes, micro-batch, piece and evaluation.
Told = tuple[int, tuple[tuple[int, float], ...], tuple[tuple[float, int, Mix, int, int, int, int], ...]]


@dataclass
class Scanned:
    """The fastest of each stem within the limit, and what is fastest in each bin of memory."""

    limit: int
    considered: int = 0
    fastest: list[Candidate] = field(default_factory=list)
    bins: dict[int, float] = field(default_factory=dict)
    _last: tuple[Stem, Found | None] | None = None  # and the fastest of it

    def scan(self, stem: Stem) -> None:
        """All mixes of at most two levels, the layers that keep less first: their transients meet fewer kept ones."""
        best = self._as_before(stem) or self._fastest(stem)
        self.considered += len(LEVELS) + len(PAIRS) * len(_numbers(stem.config.n_layer))
        if best is not None:
            seconds, held, mix = best
            self.fastest.append(Candidate(seconds, held, mix, stem.config, stem.way, stem.changes))

    def _as_before(self, stem: Stem) -> Found | None:
        """Of a stem that only evaluates in larger batches than the one before: the same mix, if it still fits."""
        if self._last is None:
            return None
        before, best = self._last
        if best is None or stem.cost is not before.cost or not stem.shape.holds_no_less_than(before.shape):
            return None
        seconds, _, mix = best
        held = stem.shape.mapped(mix)
        return (seconds, held, mix) if held <= self.limit else None

    def _fastest(self, stem: Stem) -> Found | None:
        layers, shape, told = stem.config.n_layer, stem.shape, stem.cost
        micro_steps, bins, limit = stem.config.gradient_accumulation_steps, self.bins, self.limit
        best: Found | None = None
        for level in range(len(LEVELS)):
            mix: Mix = ((level, layers),)
            held, seconds = shape.mapped(mix), stem.seconds(mix)
            if held <= limit and (best is None or seconds < best[0]):
                best = seconds, held, mix
            if seconds < bins.get(held // BIN, 1e30):
                bins[held // BIN] = seconds
        numbers = _numbers(layers)
        for few, many in PAIRS:
            first, more = told.fixed + layers * told.layers[many], told.layers[few] - told.layers[many]
            row = shape.mapped_along(few, many, layers, numbers.step)
            takes = [micro_steps * max(first + k * more, told.host) + told.step for k in numbers]
            if best is None or min(takes, default=best[0]) < best[0]:
                for k, held, seconds in zip(numbers, row, takes, strict=True):
                    if held <= limit and (best is None or seconds < best[0]):
                        best = seconds, held, ((few, k), (many, layers - k))
            for held, seconds in zip(row, takes, strict=True):
                place = held // BIN
                if place not in bins or seconds < bins[place]:
                    bins[place] = seconds
        self._last = stem, best
        return best

    def told(self) -> Told:
        return self.considered, tuple(self.bins.items()), tuple(
            (seconds, mapped, mix, changes, config.batch_size, config.loss_chunk, config.eval_batch_size)
            for seconds, mapped, mix, config, _, changes in self.fastest)

    def take(self, told: Told, branch: Branch, field: Field) -> None:
        """What was told of a branch, as if it had been scanned here."""
        considered, bins, fastest = told
        self.considered += considered
        for place, seconds in bins:
            self.bins[place] = min(seconds, self.bins.get(place, seconds))
        self.fastest += (Candidate(seconds, mapped, mix, field.draft(branch, *sizes), branch[0], changes)
                         for seconds, mapped, mix, changes, *sizes in fastest)

    def frontier(self) -> list[tuple[int, float]]:
        """(bytes, seconds): more memory only where it is faster."""
        found: list[tuple[int, float]] = []
        for place, seconds in sorted(self.bins.items()):
            if not found or seconds < found[-1][1] * 0.999:
                found.append(((place + 1) * BIN, seconds))
        return found


def _numbers(layers: int) -> range:
    """Of layers at one of two levels. Of a deep model not every number: what is chosen is settled layer by layer."""
    return range(1, layers, -(-layers // MOST_MIXES))


class Field:
    """All candidates for one config in one setting."""

    def __init__(self, config: RunConfig, setting: Setting, card: Card | None, most_batch: int | None = None) -> None:
        self.config, self.setting = config, setting
        self.card = card if card is not None and has_figures(card) else gpus.find(STAND_IN)
        self.folded = Folded(setting)
        self.most_batch = most_batch or config.batch_size * config.gradient_accumulation_steps
        self.too_large = 0  # candidates of which that was clear at once

    def scanned(self, branch: Branch, limit: int, worth: Worth | None = None) -> Told:
        """All candidates of a branch, each looked at."""
        scanned, before = Scanned(limit), self.too_large
        for stem in self.stems(branch, limit, worth=worth):
            scanned.scan(stem)
        scanned.considered += self.too_large - before
        return scanned.told()

    def stems(self, branch: Branch, limit: int | None = None, *, batches: Sequence[int] | None = None,
              worth: Worth | None = None) -> Iterator[Stem]:
        """Those that could fit `limit`, smaller micro-batches first, and that are `worth` it."""
        way, _ = branch
        for batch in batches or self.batches(way):
            fits = False
            for config, told in self._of_batch(branch, batch):
                changes = self.changes(config, way)
                fastest = told.seconds(config.gradient_accumulation_steps, config.n_layer * min(told.layers))
                if worth is not None and not worth(way, changes, fastest):
                    fits = True  # for all that is known
                    continue
                shape = self.folded.shape(config)
                if limit is None or any(shape.mapped(((level, config.n_layer),)) <= limit for level in LEAST_FIRST):
                    fits = True
                    yield Stem(config, way, changes, shape, told)
                else:
                    self.too_large += len(LEVELS)
            if not fits:
                break  # larger ones hold more

    def stem(self, of: Candidate) -> Stem:
        return Stem(of.config, of.way, of.changes, self.folded.shape(of.config), self.cost(of.config))

    def cost(self, config: RunConfig) -> Cost:
        return cost(config, self.card, self.setting, reach_of(self.card))

    def _of_batch(self, branch: Branch, batch: int) -> Iterator[tuple[RunConfig, Cost]]:
        for piece in self.pieces(batch):
            first, *others = (self.draft(branch, batch, piece, windows) for windows in self.evaluations(batch))
            told = self.cost(first)
            yield from ((config, told) for config in (first, *others))

    def draft(self, branch: Branch, batch: int, piece: int, windows: int) -> RunConfig:
        way, recording = branch
        sequences = self.config.batch_size * self.config.gradient_accumulation_steps
        return draft(self.config, **{**way.knobs, **recording, "batch_size": batch, "loss_chunk": piece,
                                     "gradient_accumulation_steps": sequences // batch, "eval_batch_size": windows})

    def branches(self, way: Way) -> list[Branch]:
        """As asked, and without recording where that makes a difference; compiled where that works."""
        asked = self.config
        compiled = [asked.compile] if asked.compile or not self.setting.compiles else [False, True]
        found: list[Branch] = []
        for each in compiled:
            knobs = {"compile": each, "cuda_graphs": asked.cuda_graphs}
            found.append((way, knobs))
            if gpt.records(draft(asked, **way.knobs, **knobs)):
                found.append((way, {**knobs, "cuda_graphs": False}))
        return found

    def batches(self, way: Way) -> list[int]:
        """The micro-batches that divide a step's sequences."""
        asked = self.config.batch_size
        sequences = asked * self.config.gradient_accumulation_steps
        if way.knobs.get("step_in_backward", self.config.step_in_backward):  # it cannot accumulate: all at once
            return [sequences] if sequences <= max(self.most_batch, asked) else []
        sizes = range(1, min(self.most_batch, MOST_SEQUENCES) + 1)
        return [size for size in sizes if sequences % size == 0] + [asked] * (asked > MOST_SEQUENCES)

    def pieces(self, batch: int) -> list[int]:
        """As `loss_chunk` has them: 0 is the engine's own choice."""
        tokens = batch * self.config.block_size
        usual = loss_piece_tokens(tokens, self.config.vocab_size)
        sizes = {size for size in PIECES if size < tokens and tokens <= MOST_PIECES * size and size != usual}
        asked = self.config.loss_chunk
        return sorted({0, *sizes, *({asked} if asked < tokens else ())}, key=lambda size: size or usual)

    def evaluations(self, batch: int) -> list[int]:
        """As `eval_batch_size` has them: as asked, as many windows as keep the card busy, and one."""
        asked = self.config.eval_batch
        busy = max(EVALUATED // self.config.eval_block, 1)
        sizes = {asked, *(size for size in (busy, 1) if size < asked)}
        return sorted(0 if size == batch and not self.config.eval_batch_size else size for size in sizes)

    def changes(self, config: RunConfig, way: Way) -> int:
        """How many things are not as they were asked for."""
        asked = self.config
        same = ("batch_size", "eval_batch", "loss_chunk", "cuda_graphs", "compile", *way.knobs)
        return sum(getattr(config, name) != getattr(asked, name) for name in same)
