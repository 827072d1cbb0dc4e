"""The parts of a run's tape, read off the tape's own writer: it writes a few layers with a pen that only weighs.

One layer of each level is enough, and parts that two runs share are read once: see closed.py for what is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from ..config.memory_savers import LEVELS
from ..config.run_config import RunConfig
from ..memory import gpt
from ..memory.blocks import rounded
from ..memory.passes import Passes
from ..memory.setting import Setting
from ..memory.tape import ORDINARY, RECORDED, Writer
from .closed import Home, Looking, MicroStep, Part, Shape, mix_of

ONE_OF_EACH = ",".join(f"1*{level}" for level in LEVELS)


class Weigher(Writer):
    """Keeps only how many bytes lie in recorded work's pool and elsewhere: now, and at most since a part began."""

    def __init__(self) -> None:
        self.pool = ORDINARY
        self.sizes: dict[str, tuple[bool, int]] = {}
        self.now, self.most = [0, 0], [0, 0]

    def phase(self, name: str) -> None:
        pass

    def release(self) -> None:
        pass

    def alloc(self, name: str, owner: str, nbytes: int) -> str:
        place, size = self.pool == RECORDED, rounded(nbytes)
        self.sizes[name] = place, size
        now = self.now[place] = self.now[place] + size
        if now > self.most[place]:
            self.most[place] = now
        return name

    def free(self, *names: str) -> None:
        for name in names:
            place, size = self.sizes.pop(name)
            self.now[place] -= size

    def free_if_alive(self, *names: str) -> None:
        self.free(*(name for name in names if name in self.sizes))

    def alive(self, name: str) -> bool:
        return name in self.sizes

    def part(self, kind: Hashable, names: tuple[str, ...], write: Callable[[], object]) -> None:
        write()

    def begin(self, place: int) -> Callable[[], Part]:
        """Begins a part; what it returns ends it."""
        before = self.most[place] = self.now[place]
        return lambda: Part(self.now[place] - before, self.most[place] - before)

    def gradients(self, prefix: str = "") -> int:
        return sum(size for name, (_, size) in self.sizes.items() if name.endswith(".grad") and name.startswith(prefix))


def _weighing(config: RunConfig, setting: Setting) -> tuple[gpt.Run, Weigher]:
    """The tape's writer with that pen. States that come late are taken to be there: from the first step on they are."""
    run, pen = gpt.Run(draft(config, states="early"), setting), Weigher()
    run.w = run.training.w = run.looking.w = run.optimizer.w = pen
    for passes in (run.training, run.looking):
        passes.pieces = partial(_unlike, passes.pieces())  # type: ignore[method-assign]
    return run, pen


def _unlike(pieces: list[int]) -> list[int]:
    """Of the loss's pieces the first two and the last: from the second on, where a gradient is there, all are alike."""
    return pieces if len(pieces) < 4 else [*pieces[:2], pieces[-1]]


# ---- read off the tape's writer

_passes = attrgetter("block_size", "n_head", "n_embd", "vocab_size", "bias", "dropout", "dtype", "compile", "weights",
                     "residual", "casts", "gradients")
Found = TypeVar("Found")


def _key(config: RunConfig) -> tuple[Any, ...]:
    """What the passes depend on. Of the optimizer they know where gradients go, and what takes them at once."""
    taken = config.optimizer if config.step_in_backward else None
    return *_passes(config), gpt.records(config), config.offload == "gradients", taken


class Folded:
    """Shapes of runs in one setting. Parts that do not depend on what differs between two runs are read once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._known: dict[tuple[Any, ...], Any] = {}

    def shape(self, config: RunConfig) -> Shape:
        """Wants a settled config: see memory.forecast. Its levels do not matter."""
        key, accumulates = _key(config), config.gradient_accumulation_steps > 1
        home = self._once(_home, config, key, config.n_layer, config.optimizer, config.adam8bit, config.offload)
        looking = self._once(_looking, config, key, config.eval_batch, config.eval_block, config.loss_chunk)
        steps, a_layer, others = self._once(_micro_steps, config, key, config.batch_size, accumulates)
        turns = self._once(_turns, config, key, config.batch_size, accumulates, config.loss_chunk)
        return Shape(home, looking, tuple(step._replace(turn=turn) for step, turn in zip(steps, turns, strict=True)),
                     config.n_layer * a_layer + others, _places(config, config.batch_size * config.block_size),
                     gpt.BYTES[config.dtype] * config.batch_size * config.block_size * config.n_embd,
                     self.setting.expandable)

    def _once(self, read: Callable[[RunConfig, Setting], Found], config: RunConfig, *key: Any) -> Found:
        found: Found | None = self._known.get((read, *key))
        if found is None:
            found = self._known[(read, *key)] = read(config, self.setting)
        return found


def needs(config: RunConfig, setting: Setting) -> int:
    """At least what memory.allocator.needs says of the config's tape, without writing it."""
    return Folded(setting).shape(config).needs(mix_of(config.levels))


def _home(config: RunConfig, setting: Setting) -> Home:
    run, pen = _weighing(config, setting)
    run.load()
    resident, loading = pen.now[0], pen.most[0]
    if not run.gradients_stay and run.training.sink == "grad":
        for name, numbers, is_matrix in run.parameters:
            pen.alloc(f"{name}.grad", "gradients", (gpt.BYTES[config.weights] if is_matrix else 4) * numbers)
    run.batch = pen.alloc("batch", "data", 0)
    for name in ("micro scale", "loss sum"):
        pen.alloc(name, "other", 0)
    ended = pen.begin(0)
    run.step()
    return Home(resident, loading, ended().peak)


def _looking(config: RunConfig, setting: Setting) -> Looking:
    run, pen = _weighing(_of_layers(config, 1, "input"), setting)
    run.load()
    base, beside, write = pen.now[0], 0, run.work
    ordinary, recorded = pen.begin(0), pen.begin(1)

    def work(kind: str, passes: Passes, result: str, batch: str) -> None:
        nonlocal beside
        if pen.pool == RECORDED:
            beside = pen.now[0] - base
        write(kind, passes, result, batch)

    run.work = work  # type: ignore[method-assign]
    run.evaluate()
    awake = sum(pen.sizes[name][1] for name in gpt.WORKSPACES if name in pen.sizes and pen.sizes[name][0])
    return Looking(ordinary().peak, recorded().peak, beside, 0 if run.records else ordinary().net,
                   recorded().peak - awake, recorded().net - awake,
                   _places(config, config.eval_batch * config.eval_block))


def _places(config: RunConfig, tokens: int) -> int:
    """Of inputs and targets."""
    return 2 * rounded(8 * tokens) if gpt.records(config) else 0


class _Seen(NamedTuple):
    """A micro-step as it was observed: the embedding, each layer, the turn, each layer again, the rest."""

    recorded: bool
    beside: int
    again: bool
    parts: list[Part]


def _micro_steps(config: RunConfig, setting: Setting) -> tuple[tuple[MicroStep, ...], int, int]:
    """The micro-steps that differ, as `_observed` has them; then the bytes of gradients: a layer's, and all others'."""
    seen, a_layer, in_all = _observed(config, setting, ONE_OF_EACH)
    layers, steps = len(LEVELS), []
    for recorded, beside, again, parts in seen:
        embed, *up, turn = parts[:layers + 2]
        *down, rest = parts[layers + 2:]
        steps.append(MicroStep(recorded, beside, again, embed, tuple(up), turn, tuple(reversed(down)), rest))
    return tuple(steps), a_layer, in_all - layers * a_layer


def _turns(config: RunConfig, setting: Setting) -> tuple[Part, ...]:
    """The part between the two passes, of each of those micro-steps."""
    return tuple(each.parts[1] for each in _observed(config, setting, "input")[0])  # of no layers


def _observed(config: RunConfig, setting: Setting, levels: str) -> tuple[list[_Seen], int, int]:
    """The first micro-step, and the next if it is recorded or finds gradients; bytes of gradients that come and go."""
    run, pen = _weighing(_of_layers(config, levels.count("*"), levels), setting)
    comes_and_goes = not run.gradients_stay and run.training.sink == "grad"
    run.load()
    if not run.records:  # else all of it is forgotten before training begins; one batch leaves behind what all do
        batch = run.fetch(run.looking.s)
        run.work("eval", run.looking, "token losses", batch)
        pen.free("token losses", batch)
    base, found, write = pen.now[0], list[_Seen](), run.work
    cut: Callable[[], None]

    def work(kind: str, passes: Passes, result: str, batch: str) -> None:
        nonlocal cut
        place, parts = int(pen.pool == RECORDED), list[Part]()
        grads = pen.gradients() if comes_and_goes else 0
        found.append(_Seen(bool(place), pen.now[0] - base - grads, grads > 0, parts))
        end = pen.begin(place)
        passes.wake_cublas(with_bias=config.bias)  # the first layer does: here it is not one like the others

        def cut() -> None:
            nonlocal end
            parts.append(end())
            end = pen.begin(place)

        write(kind, passes, result, batch)
        cut()

    def then_cut(write: Callable[..., None]) -> Callable[..., None]:
        def written(*told: Any) -> None:
            write(*told)
            cut()

        return written

    def after_a_cut(write: Callable[..., None]) -> Callable[..., None]:
        def written(*told: Any) -> None:
            cut()
            write(*told)

        return written

    run.work, passes = work, run.training  # type: ignore[method-assign]
    for name, cutting in (("embed", then_cut), ("forward", then_cut), ("backward", after_a_cut),
                          ("embed_backward", after_a_cut)):
        setattr(passes, name, cutting(getattr(passes, name)))
    run.micro_steps()
    gradients = (pen.gradients("0."), pen.gradients()) if comes_and_goes else (0, 0)
    if run.records and len(found) == 1:  # the next micro-step is another step's
        run.step()
        run.micro_steps()
    return found, *gradients


def _of_layers(config: RunConfig, layers: int, levels: str) -> RunConfig:
    return draft(config, n_layer=layers, recompute=levels, grad_checkpoint=False)


def draft(config: RunConfig, **knobs: Any) -> RunConfig:
    """A config with other knobs, unchecked: to check sixty knobs takes longer than all else here."""
    made: RunConfig = object.__new__(RunConfig)
    made.__dict__.update(config.__dict__, **knobs)
    return made
