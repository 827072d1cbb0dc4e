"""Allocations and frees as they happen → a Tape with phases, owners, step marks and the origin of each tensor.

Knows nothing of torch's operations: `device.py` reports what comes and goes. Owners are decided late, because a tensor
shows only later that it became a weight or a gradient; so the tape is built at the end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from types import FrameType
from typing import Any

from ..hardware.allocator_env import wants_expandable_segments
from ..memory.tape import EMPTY_CACHE, Event, Span, Tape
from ..memory.timeline import replay

LOAD, FORWARD, BACKWARD, OPTIMIZER, EVALUATION = "load", "forward", "backward", "optimizer", "eval"
PACKAGE = os.path.dirname(os.path.abspath(__file__))
MADE_UP = "{} reads a whole number from the GPU, which a trace makes up. Where a size depends on it, the plan is wrong."
BRANCH = ("{} branches on a value from the GPU, which a trace makes up: one of the two sides was not traced. To trace "
          "it, write True or False there.")
# Owners that a tensor keeps, whatever happens to it later.
SETTLED = {"weights", "workspace", "casts"}


@dataclass(eq=False, slots=True)
class TracedTensor:
    """A block of GPU memory and where it came from."""

    number: int
    nbytes: int
    op: str               # "aten.addmm.default"
    phase: str
    owner: str
    module: str = ""      # "transformer.h.0.attn.c_attn", or the parameter that it is, or belongs to
    source: str = ""      # "train.py:42"
    shape: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def name(self) -> str:
        """Its name on the tape."""
        return f"{self.number} {self.module or self.op}"


@dataclass
class Recorder:
    """What was recorded so far."""

    phase: str = LOAD
    tensors: list[TracedTensor] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)     # paths of the modules whose forward is running
    evaluates: bool = False                              # whether the first of them was called without gradients
    steps: list[int] = field(default_factory=list)       # the number of events after each optimizer step
    notes: dict[str, None] = field(default_factory=dict) # what the trace cannot know, one sentence each, in order
    not_seen: dict[str, None] = field(default_factory=dict)  # of these, what may take memory that was not traced
    bounded: dict[str, None] = field(default_factory=dict)   # and what may take more memory than traced
    allocated: int = 0                                   # bytes alive, as the allocator rounds them
    peak: int = 0                                        # the most of them, since the script last reset it
    peak_from: int = 0                                   # the number of events at that time
    events: list[tuple[bool, TracedTensor | None]] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=lambda: [(LOAD, 0)])  # and the event each begins with
    params: int = 0          # of the model
    vocabulary: int = 0      # tokens that logits are over: rows of an embedding
    embeddings: set[int] = field(default_factory=set)  # rows of each, positions' among them
    scores: set[tuple[int, ...]] = field(default_factory=set)  # shapes of attention's score matrices: see `has_scores`
    processes: str = ""      # the line that started the first process, other than a DataLoader's
    made_up: str = ""        # the line that last read a whole number of the GPU that is not known, in this phase
    has_optimizer: bool = False
    # Lines of the user's files from which models were called or gradients turned off, and the functions on the way.
    lines: set[tuple[str, int]] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    folder: str = field(default_factory=os.getcwd)  # that relative names of files are in
    trainer: Any = None      # whose method `training_step` called a model: of transformers, or a LightningModule
    script_file: str = ""    # the file that runs as __main__
    called_from: str = ""    # the user's line that last called a model: "train.py, line 42"
    origin: str = ""         # the module whose gradients a backward pass computes now
    compiled: bool = False   # whether something ran that torch.compile was given
    unplanned: str = ""      # why some of it ran eager: the compiler's error

    def enter(self, phase: str) -> None:
        """The program enters another phase."""
        if phase != self.phase:
            self.phase, self.made_up = phase, ""
            if self.phases[-1][1] == len(self.events):
                self.phases[-1] = phase, len(self.events)
            else:
                self.phases.append((phase, len(self.events)))

    def alloc(self, nbytes: int, op: str, owner: str = "", shape: tuple[int, ...] = (),
              dtype: str = "") -> TracedTensor:
        tensor = TracedTensor(len(self.tensors), nbytes, op, self.phase, owner or self._owner(shape),
                              self.modules[-1] if self.modules else self.origin, source_line(), shape, dtype)
        self.tensors.append(tensor)
        self.allocated += _rounded(nbytes)
        self.peak = max(self.peak, self.allocated)
        self.events.append((True, tensor))
        return tensor

    def free(self, tensor: TracedTensor) -> None:
        self.allocated -= _rounded(tensor.nbytes)
        self.events.append((False, tensor))

    def scratch(self, sizes: Iterable[int], op: str) -> None:
        """Memory that lives only inside an operation, freed in the order opposite to its allocation."""
        used = [self.alloc(nbytes, op, "workspace") for nbytes in sizes]
        for each in reversed(used):
            self.free(each)

    def makes_up_a_number(self) -> None:
        """The program reads a whole number that is not known. In a model it may be a size; elsewhere it is a count."""
        self.made_up = source_line()
        if self.modules:
            self.not_seen[MADE_UP.format(model_line())] = None

    def makes_up_a_branch(self) -> None:
        """The program reads a truth value that is not known. In a model, what it allocates may depend on it."""
        if self.modules:
            self.not_seen[BRANCH.format(model_line())] = None

    def mark_lines(self) -> None:
        """A model is called, or gradients are turned off: all lines that led there."""
        frame: FrameType | None = sys._getframe(1)
        innermost, trainer = True, None
        while frame is not None:
            code = frame.f_code
            self.functions.add(code.co_name)
            if code.co_name == "training_step" and trainer is None:
                trainer = self.trainer = frame.f_locals.get("self")
            if code.co_name == "decorate_context":  # @torch.no_grad(), in torch/utils/_contextlib.py
                code = getattr(frame.f_locals.get("func"), "__code__", code)
                self.lines.add((code.co_filename, code.co_firstlineno))
            elif is_users(code.co_filename):
                self.lines.add((code.co_filename, frame.f_lineno))
                if innermost:
                    self.called_from, innermost = f"{code.co_filename}, line {frame.f_lineno}", False
                if frame.f_globals.get("__name__") == "__main__":
                    self.script_file = code.co_filename
            frame = frame.f_back

    def empty_cache(self) -> None:
        self.events.append((False, None))

    def reset_peak(self) -> None:
        self.peak, self.peak_from = self.allocated, self.length

    def reserved(self) -> tuple[int, int]:
        """Bytes reserved: now, and the most since the script last reset it."""
        segments = [(-1, 0), *replay(self.tape(), expandable=wants_expandable_segments()).segments]
        before = max(number for number, (event, _) in enumerate(segments) if event < max(self.peak_from, 1))
        return segments[-1][1], max(nbytes for _, nbytes in segments[before:])

    @property
    def length(self) -> int:
        """How many events were recorded so far."""
        return len(self.events)

    def _owner(self, shape: tuple[int, ...]) -> str:
        if self.phase in (LOAD, OPTIMIZER):
            return "optimizer" if self.phase == OPTIMIZER else "other"
        if len(shape) > 1 and shape[-1] == self.vocabulary:
            return "logits"
        return "attention" if as_matrices(shape) in self.scores else "activations"

    def has_embedding(self, rows: int) -> None:
        """The vocabulary is the largest embedding's, until the loss says which."""
        self.embeddings.add(rows)
        self.vocabulary = max(self.vocabulary, rows)

    def has_loss_over(self, classes: int) -> None:
        """A model of characters has more positions than characters: its vocabulary is what the loss is over."""
        if classes in self.embeddings and classes != self.vocabulary:
            self.vocabulary, self.embeddings = classes, {classes}
            for tensor in self.tensors:
                if tensor.owner in ("activations", "logits") and len(tensor.shape) > 1:
                    tensor.owner = "logits" if tensor.shape[-1] == classes else "activations"

    def has_scores(self, shape: tuple[int, ...]) -> None:
        """Attention weights have this shape. So have the scores that they are computed from, their dropout and their
        gradients: all tensors of this shape are attention's, also those allocated before."""
        if (scores := as_matrices(shape)) not in self.scores:
            self.scores.add(scores)
            for tensor in self.tensors:
                if tensor.owner == "activations" and as_matrices(tensor.shape) == scores:
                    tensor.owner = "attention"

    def tape(self) -> Tape:
        events = tuple(Event(False, EMPTY_CACHE, "other", 0) if tensor is None
                       else Event(alloc, tensor.name, tensor.owner, tensor.nbytes) for alloc, tensor in self.events)
        phases = self.phases
        ends = [*(start for _, start in phases[1:]), len(events)]
        return Tape(events, tuple(Span(name, start, end) for (name, start), end in zip(phases, ends, strict=True)))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def as_matrices(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Batch and heads as one dimension, or as two: (8, 12, 512, 512) and (96, 512, 512) → (96, 512, 512)."""
    return prod(shape[:-2]), *shape[-2:]


def source_line() -> str:
    """"train.py:42": the line of the user's code that is running, or of a library if nothing else is on the stack."""
    frame: FrameType | None = sys._getframe(2)
    found = ""
    while frame is not None:
        where = _place(frame.f_code.co_filename)
        if where == "user":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if where == "library" and not found:
            found = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return found


def model_line() -> str:
    """"model.py, line 14": the innermost line of the user's code or of a library other than torch; of a library with
    the user's line that led to it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _place(frame.f_code.co_filename) == "inside":
        frame = frame.f_back
    if frame is None:
        return "The script"
    found = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
    while frame is not None and _place(frame.f_code.co_filename) != "user":
        frame = frame.f_back
    user = f"{frame.f_code.co_filename}, line {frame.f_lineno}" if frame else found
    return found if user == found else f"{found} (called at {user})"


def line_of(source: str) -> str:
    """"train.py:42" → "train.py, line 42"."""
    return ", line ".join(source.rsplit(":", 1))


def is_users(filename: str) -> bool:
    return _place(filename) == "user"


_places: dict[str, str] = {}


def _place(filename: str) -> str:
    """"user", "library", or "inside" for torch, Python's own files and this package."""
    if filename not in _places:
        path = filename.replace(os.sep, "/")
        inside = (path.startswith(PACKAGE.replace(os.sep, "/")) or "/torch/" in path or path.startswith("<")
                  or (path.startswith(os.path.dirname(os.__file__).replace(os.sep, "/") + "/") and
                  "site-packages" not in path))
        _places[filename] = "inside" if inside else "library" if "site-packages" in path else "user"
    return _places[filename]
