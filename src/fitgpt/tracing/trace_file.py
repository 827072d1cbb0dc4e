"""A trace as a file: `fitgpt trace --save`, and what the traced process hands to its parent. Imports no torch.

The schema is in docs/trace.md. Tensors that are alike in everything but their number are one kind; a training script
repeats its steps, so there are few kinds, and a file has a few hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..core.errors import UsageError
from ..core.files import is_own_json, read_limited, seal_json, unseal_json
from ..core.units import MiB
from ..hardware.allocator_env import wants_expandable_segments
from ..memory.platform import Platform
from ..memory.tape import EMPTY_CACHE, Event, Span, Tape
from .recorder import Recorder

SCHEMA = 1
TRACE_AGAIN = "fitgpt trace --save my.trace.json train.py"
LARGEST = 5 * MiB
EMPTIED = -1       # in Trace.events: torch.cuda.empty_cache()
WORKSPACE = "cublas workspace"  # the operation that cuBLAS's workspace is recorded under


class Kind(NamedTuple):
    """What is known of a tensor."""

    nbytes: int
    owner: str        # of memory.tape.OWNERS
    op: str           # "aten.addmm.default"
    module: str       # "model.layers.3.mlp", or a parameter; "" outside a module
    source: str       # "train.py:42"
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def describe(self) -> str:
        """"8 × 1,024 × 50,257 × float32"."""
        return " × ".join([*(f"{side:,}" for side in self.shape), self.dtype]) if self.dtype else self.op


@dataclass(frozen=True)
class Trace:
    """What a script allocated on the GPU, in order, up to its last traced step."""

    command: tuple[str, ...]           # the script and its arguments
    tensors: tuple[Kind, ...]          # in the order of their allocation
    events: tuple[int, ...]            # 0: the next tensor is allocated; n: tensor n, counted from 1, is freed
    phases: tuple[tuple[str, int], ...]  # (load, forward, backward, optimizer or eval; the event it begins with)
    steps: tuple[int, ...]             # how many events there are after each optimizer step
    params: int
    capability: tuple[int, int]        # compute capability that it was traced for
    sms: int
    torch: str                         # version that it was traced with
    expandable: bool                   # whether the script would have run with expandable segments
    compiled: bool = False             # whether the script calls torch.compile
    planned: bool = False              # whether all of that is traced as compiled, not as eager code
    notes: tuple[str, ...] = ()        # what the trace cannot know, one sentence each
    not_seen: tuple[str, ...] = ()     # of these, what may take memory that was not traced
    bounded: tuple[str, ...] = ()      # and what may take more memory than traced

    @property
    def platform(self) -> Platform:
        """What it was traced for."""
        version = ".".join(self.torch.split(".")[:2])
        return Platform(self.capability, version, expandable=self.expandable, expandable_requested=self.expandable,
                        sms=self.sms)

    @property
    def convolutions(self) -> bool:
        return any("convolution" in kind.op for kind in self.tensors)

    @cached_property
    def names(self) -> list[str]:
        """By tensor: its name on the tape."""
        return [f"{number} {kind.module or kind.op}" for number, kind in enumerate(self.tensors, 1)]

    @cached_property
    def tape(self) -> Tape:
        return self.resized(lambda number, kind: kind.nbytes)

    def resized(self, size: Callable[[int, Kind], int]) -> Tape:
        """The tape with other sizes of tensors; a tensor of size 0 is not allocated."""
        sizes = [size(number, kind) for number, kind in enumerate(self.tensors, 1)]
        events, following, kept = list[Event](), 0, list[int]()  # kept: whether each event is on the tape
        for code in self.events:
            before = len(events)
            if code == EMPTIED:
                events.append(Event(False, EMPTY_CACHE, "other", 0))
            else:
                number = code or (following := following + 1)
                if nbytes := sizes[number - 1]:
                    owner = self.tensors[number - 1].owner
                    events.append(Event(not code, self.names[number - 1], owner, nbytes))
            kept.append(len(events) - before)
        position = [0, *accumulate(kept)]  # of each event on the tape
        ends = [*(start for _, start in self.phases[1:]), len(self.events)]
        return Tape(tuple(events), tuple(Span(name, position[start], position[end])
                                         for (name, start), end in zip(self.phases, ends, strict=True)))

    def on(self, platform: Platform) -> Trace:
        """The trace with the cuBLAS workspaces of another GPU. Other kernels stay as traced."""
        if platform.workspace == self.platform.workspace:
            return self
        return replace(self, tensors=tuple(
            kind._replace(nbytes=platform.workspace) if kind.op == WORKSPACE else kind
            for kind in self.tensors))


def trace_of(recorder: Recorder, command: tuple[str, ...], platform: Platform, torch: str) -> Trace:
    """What a recorder has recorded, as a Trace. Tensors without bytes take no memory and are left out."""
    kept = {tensor.number: number for number, tensor in enumerate(
        (tensor for tensor in recorder.tensors if tensor.nbytes), 1)}
    events, position = list[int](), [0]
    for alloc, tensor in recorder.events:
        if tensor is None:
            events.append(EMPTIED)
        elif tensor.nbytes:
            events.append(0 if alloc else kept[tensor.number])
        position.append(len(events))
    if recorder.unplanned:
        recorder.notes[recorder.unplanned] = None
    phases = [(name, position[start]) for name, start in recorder.phases] or [("load", 0)]
    kinds = (Kind(tensor.nbytes, tensor.owner, tensor.op, tensor.module, tensor.source, tensor.dtype,
                  tuple(tensor.shape)) for tensor in recorder.tensors if tensor.nbytes)
    return Trace(command, tuple(kinds), tuple(events), tuple(phases), tuple(position[step] for step in recorder.steps),
                 recorder.params, platform.capability, platform.sms, torch,
                 wants_expandable_segments(), recorder.compiled,
                 recorder.compiled and not recorder.unplanned, tuple(recorder.notes),
                 tuple(recorder.not_seen), tuple(recorder.bounded))


# ---- written


def to_save(trace: Trace) -> str:
    """The text of a file for --save; UsageError where it would be larger than LARGEST."""
    text = to_json(trace)
    if len(text) > LARGEST:
        raise UsageError(f"The trace of {len(trace.steps)} optimizer steps takes {len(text):,} bytes, and a saved "
                         f"trace at most {LARGEST:,}.", f"--steps {max(len(trace.steps) // 2, 1)}, or let the script "
                         "evaluate on fewer batches")
    return text


def to_json(trace: Trace) -> str:
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(trace.tensors))}
    strings = {text: number for number, text in enumerate(dict.fromkeys(
        text for kind in kinds for text in (kind.owner, kind.op, kind.module, kind.source, kind.dtype)))}
    rows = [[kind.nbytes, *(strings[text] for text in (kind.owner, kind.op, kind.module, kind.source, kind.dtype)),
             *kind.shape] for kind in kinds]
    return seal_json({
        "schema": SCHEMA, "command": list(trace.command), "params": trace.params,
        "capability": list(trace.capability), "sms": trace.sms, "torch": trace.torch, "expandable": trace.expandable,
        "compiled": trace.compiled, "planned": trace.planned, "notes": list(trace.notes),
        "not_seen": list(trace.not_seen), "bounded": list(trace.bounded),
        "phases": [list(each) for each in trace.phases],
        "steps": list(trace.steps), "strings": list(strings), "kinds": rows,
        "tensors": [kinds[kind] for kind in trace.tensors], "events": list(_distances(trace.events))}, indent=None)


def _distances(events: Iterable[int]) -> Iterator[int]:
    """Events as small numbers: a free as how many tensors were allocated since its own, that one included."""
    allocated = 0
    for code in events:
        allocated += not code
        yield allocated - code + 1 if code > 0 else code


# ---- read


def is_trace(text: str) -> bool:
    return is_own_json(text, "command", "kinds", "tensors", "events")


def read(path: str) -> Trace:
    """The file of --save; UsageError where it is none, or was changed."""
    try:
        return from_json(read_limited(path, LARGEST, pipes=True).decode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}.", TRACE_AGAIN) from error
    except (KeyError, TypeError, IndexError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a saved trace: {error}.", TRACE_AGAIN) from error


def from_json(text: str) -> Trace:
    """KeyError, TypeError, IndexError or ValueError where the text is not what `to_json` wrote."""
    document = unseal_json(text)
    if document["schema"] != SCHEMA:
        raise ValueError(f"it has schema {document['schema']!r}, and this fitgpt knows {SCHEMA}")
    strings, kinds, events, allocated = document["strings"], [], list[int](), 0
    for nbytes, owner, op, module, source, dtype, *shape in document["kinds"]:
        kinds.append(Kind(nbytes, strings[owner], strings[op], strings[module], strings[source], strings[dtype],
                          tuple(shape)))
    for code in document["events"]:
        allocated += not code
        events.append(allocated - code + 1 if code > 0 else code)
    return Trace(tuple(document["command"]), tuple(kinds[number] for number in document["tensors"]), tuple(events),
                 tuple((name, start) for name, start in document["phases"]), tuple(document["steps"]),
                 document["params"], (document["capability"][0], document["capability"][1]), document["sms"],
                 document["torch"], document["expandable"], document["compiled"],
                 document.get("planned", False), tuple(document["notes"]), tuple(document.get("not_seen", ())),
                 tuple(document.get("bounded", ())))
