"""A file of `torch.cuda.memory._dump_snapshot()` → who held the GPU's memory at the peak, as a Diagnosis.

The format is that of torch/cuda/memory.py (`_snapshot`): `segments` with their blocks, as they are now, and
`device_traces`, the history that `_record_memory_history()` recorded. The file is parsed without unpickling it
(core/safe_pickle.py).
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from ..core import safe_pickle
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes
from ..hardware.allocator_env import USE_EXPANDABLE_SEGMENTS
from ..memory.allocator import LARGE_BUFFER, SMALL_SIZE
from ..memory.tape import round_size
from .diagnose import Diagnosis, MemoryShare, Remedy
from .rules import FRAGMENTED_SHARE

MAX_FILE = 256 * MiB      # parsing takes about 5 s per 10 MiB
MAX_ENTRIES = 4_000_000   # blocks or events; a small file can claim many by repeating one list
MAX_FRAMES = 500          # of a stack
_DEPTH = 12               # segments, blocks, frames and their annotations nest 8 deep
MAX_HOLDERS, MAX_BLOCKS, MAX_SEGMENT_GROUPS = 12, 5, 6
_TORCH = re.compile(r"[/\\]torch[/\\]")

NO_STACK = "no Python stack, as in the backward pass"
NOT_RECORDED = "no recorded stack, as before the history begins"


# ---- the file


@dataclass(frozen=True)
class SnapshotBlock:
    """A part of a segment, as it is now."""

    address: int
    nbytes: int
    state: str               # active_allocated, active_awaiting_free, inactive
    line: str = ""           # of Python that allocated it; empty: not recorded, or none


@dataclass(frozen=True)
class Segment:
    """Memory that the caching allocator got from the driver in one call."""

    device: int
    address: int
    nbytes: int
    stream: int
    pool: str                # of a private pool, as CUDA graphs have: its number
    expandable: bool
    blocks: tuple[SnapshotBlock, ...]


@dataclass(frozen=True)
class TraceEntry:
    """An entry of the history."""

    action: str              # alloc, free_requested, free_completed, segment_alloc, segment_free, oom …
    address: int
    nbytes: int              # as requested, before rounding
    line: str = ""           # of Python that allocated it; empty: none
    device_free: int = 0     # of an oom: bytes that CUDA still had


@dataclass(frozen=True)
class MemorySnapshot:
    """The segments of all GPUs, and the history of each GPU, empty if none was recorded."""

    segments: tuple[Segment, ...]
    histories: tuple[tuple[TraceEntry, ...], ...]


def is_pickle(file: BinaryIO) -> bool:
    """Whether the file begins as a pickle of protocol 2 or later does, which no text does."""
    start = file.peek(2)[:2] if hasattr(file, "peek") else b""
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def read_snapshot(file: BinaryIO, name: str) -> MemorySnapshot:
    """Raises UsageError if the file is too large, damaged, or holds anything but a memory snapshot."""
    def rejected(why: str) -> UsageError:
        return UsageError(f"{name} is no memory snapshot: {why}. fitgpt never unpickles: it accepts only what torch "
                          "writes there.", "Write it again: torch.cuda.memory._dump_snapshot('snapshot.pickle')")

    data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise UsageError(f"{name} is larger than {show_bytes(MAX_FILE)}, the limit for a memory snapshot.",
                         "torch.cuda.memory._record_memory_history(max_entries=100000) records fewer events.")
    try:
        return _snapshot_from(safe_pickle.parse(data, max_depth=_DEPTH, more_types=True))
    except (safe_pickle.UnsafePickleError, _NoSnapshot) as error:
        raise rejected(str(error)) from None


class _NoSnapshot(Exception):
    pass


def _snapshot_from(value: Any) -> MemorySnapshot:
    segments = _list(value, "segments")
    blocks = [_list(segment, "blocks") for segment in segments]
    histories = _list(value, "device_traces") if "device_traces" in value else []
    if any(not isinstance(history, list) for history in histories):
        raise _NoSnapshot("its 'device_traces' are no lists")
    if sum(map(len, blocks)) + sum(map(len, histories)) > MAX_ENTRIES:
        raise _NoSnapshot(f"it has more than {MAX_ENTRIES:,} blocks and events")
    return MemorySnapshot(
        tuple(map(_segment, segments, blocks)),
        tuple(tuple(map(_event, history)) for history in histories))


def _segment(segment: dict[str, Any], blocks: list[Any]) -> Segment:
    address, parts = _int(segment, "address"), []
    following = address
    for block in blocks:  # torch before 2.1 writes no addresses of blocks: they are adjacent
        nbytes = _int(block, "size")
        parts.append(SnapshotBlock(_int(block, "address", following), nbytes, _str(block, "state"), _line(block)))
        following = parts[-1].address + nbytes
    pool = segment.get("segment_pool_id", ())
    private = isinstance(pool, tuple) and len(pool) == 2 and all(type(each) is int for each in pool) and any(pool)
    return Segment(_int(segment, "device", 0), address, _int(segment, "total_size"), _int(segment, "stream", 0),
                   f"{pool[0] % 2**63}, {pool[1] % 2**63}" if private else "", segment.get("is_expandable") is True,
                   tuple(parts))


def _event(entry: Any) -> TraceEntry:
    return TraceEntry(_str(entry, "action"), _int(entry, "addr", 0), _int(entry, "size", 0), _line(entry),
                      _int(entry, "device_free", 0))


def _list(value: Any, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise _NoSnapshot(f"it has no list {key!r}")
    return found


def _int(value: Any, key: str, default: int | None = None) -> int:
    found = value.get(key, default) if isinstance(value, dict) else None
    if type(found) is not int or not 0 <= found < 2**64:
        raise _NoSnapshot(f"it has no whole number {key!r} where one belongs")
    return found


def _str(value: Any, key: str) -> str:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, str):
        raise _NoSnapshot(f"it has no text {key!r} where one belongs")
    return found


def _line(value: Any) -> str:
    """The innermost line of Python outside PyTorch's own files on a stack: "model.py:41 forward"; empty if none."""
    frames = value.get("frames") if isinstance(value, dict) else None
    for frame in frames[:MAX_FRAMES] if isinstance(frames, list) else ():  # innermost first
        file = frame.get("filename") if isinstance(frame, dict) else None
        if isinstance(file, str) and file.endswith((".py", ">")) and not _TORCH.search(file[-1000:]):
            line = frame.get("line")
            number = line if type(line) is int and 0 <= line < 2**31 else 0
            return f"{_printable(file)}:{number} {_printable(frame.get('name'))}"
    return ""


def _printable(text: Any) -> str:
    """For the terminal: of limited length, without control characters."""
    return "".join(filter(str.isprintable, text[-150:])) if isinstance(text, str) else ""


# ---- what was held at the peak


@dataclass(frozen=True)
class Held:
    """A live allocation."""

    nbytes: int              # of its block
    line: str                # that allocated it; or why there is none


@dataclass
class MemoryState:
    """The allocations and the reserved memory of one GPU at one moment of its history."""

    reserved: int
    expandable: bool
    begins_late: bool        # memory was allocated before the history begins
    live: dict[int, Held] = field(default_factory=dict)
    allocated: int = 0
    # Where a free block can end: starts of blocks in use and ends of segments, sorted.
    bounds: list[int] = field(default_factory=list)

    def apply(self, event: TraceEntry) -> None:
        end = event.address + event.nbytes
        if event.action == "alloc":
            self.hold(event.address, Held(self._block_size(event), event.line or NO_STACK))
        elif event.action == "free_requested" and event.address in self.live:
            self.allocated -= self.live.pop(event.address).nbytes
        elif event.action == "free_completed":
            self._drop_bound(event.address)
        elif event.action in ("segment_alloc", "segment_map"):
            self.reserved += event.nbytes
            bisect.insort(self.bounds, end)
        elif event.action in ("segment_free", "segment_unmap"):
            self.reserved -= event.nbytes
            self._drop_bound(end)

    def hold(self, address: int, held: Held) -> None:
        self.live[address] = held
        self.allocated += held.nbytes
        bisect.insort(self.bounds, address)

    def _block_size(self, event: TraceEntry) -> int:
        """The history has requested sizes. A block of the large pool is split only if more than 1 MiB remains."""
        nbytes = round_size(event.nbytes)
        if nbytes <= SMALL_SIZE or self.expandable:
            return nbytes
        following = bisect.bisect_right(self.bounds, event.address)
        space = self.bounds[following] - event.address if following < len(self.bounds) else nbytes
        return space if nbytes < space <= nbytes + SMALL_SIZE else nbytes

    def _drop_bound(self, address: int) -> None:
        place = bisect.bisect_left(self.bounds, address)
        if place < len(self.bounds) and self.bounds[place] == address:
            del self.bounds[place]


def state_at_peak(segments: Iterable[Segment], history: Sequence[TraceEntry]) -> MemoryState:
    """The state in which most was allocated; without a history, the state now."""
    segments = tuple(segments)
    start = _start(segments, history)
    state, peak, when = replace(start, live=dict(start.live), bounds=list(start.bounds)), start.allocated, 0
    for number, event in enumerate(history, 1):
        state.apply(event)
        if state.allocated > peak:
            peak, when = state.allocated, number
    for event in history[:when]:
        start.apply(event)
    return start


def _start(segments: tuple[Segment, ...], history: Sequence[TraceEntry]) -> MemoryState:
    """The state before the first event: what is freed or still held without having been allocated in the history."""
    before: dict[int, Held] = {}
    before_segments: list[int] = []  # their ends
    live, ends, reserved = set[int](), Counter[int](), sum(segment.nbytes for segment in segments)
    for event in history:
        end = event.address + event.nbytes
        if event.action == "alloc":
            live.add(event.address)
        elif event.action == "free_requested" and event.address in live:
            live.discard(event.address)
        elif event.action == "free_requested":
            before.setdefault(event.address, Held(round_size(event.nbytes), NOT_RECORDED))
        elif event.action in ("segment_alloc", "segment_map"):
            ends[end] += 1
            reserved -= event.nbytes
        elif event.action in ("segment_free", "segment_unmap"):
            reserved += event.nbytes
            if ends[end]:
                ends[end] -= 1
            else:
                before_segments.append(end)
    for segment in segments:
        end = segment.address + segment.nbytes
        if ends[end]:
            ends[end] -= 1
        else:
            before_segments.append(end)
        for block in segment.blocks:
            if block.state == "active_allocated" and block.address not in live:
                before.setdefault(block.address, Held(block.nbytes, block.line or NOT_RECORDED))
    expandable = any(segment.expandable for segment in segments) or any(
        event.action == "segment_map" for event in history)
    state = MemoryState(max(reserved, 0), expandable, bool(before), bounds=sorted(before_segments))
    for address, held in before.items():
        state.hold(address, held)
    return state


# ---- as text


def explain_snapshot(snapshot: MemorySnapshot) -> Diagnosis:
    """Of several GPUs, the one on which most was reserved."""
    device = _busiest(snapshot)
    segments = tuple(segment for segment in snapshot.segments if segment.device == device)
    history = snapshot.histories[device] if device < len(snapshot.histories) else ()
    peak = state_at_peak(segments, history)

    groups: dict[str, list[int]] = defaultdict(list)
    for held in peak.live.values():
        groups[held.line].append(held.nbytes)
    holders = sorted(groups.items(), key=lambda each: -sum(each[1]))
    shares = [MemoryShare(where, sum(sizes), _blocks(len(sizes))) for where, sizes in holders[:MAX_HOLDERS]]
    rest = [nbytes for _, sizes in holders[MAX_HOLDERS:] for nbytes in sizes]
    if rest:
        shares.append(MemoryShare(f"{len(holders) - MAX_HOLDERS} other places", sum(rest), _blocks(len(rest))))
    shares.append(MemoryShare("reserved by PyTorch but unallocated", max(peak.reserved - peak.allocated, 0)))

    allocated = sum(block.nbytes for segment in segments for block in segment.blocks
                    if block.state == "active_allocated")
    now = f"{show_bytes(allocated)} are allocated now, {show_bytes(sum(each.nbytes for each in segments))} reserved"
    failed = next((event for event in history if event.action == "oom"), None)
    return Diagnosis(
        subject="snapshot",
        title=f"{now}; at the peak {show_bytes(peak.allocated)} and {show_bytes(peak.reserved)}." if history
        else f"{now}.",
        what="" if failed is None else
        f"An allocation of {show_bytes(failed.nbytes)} failed ({failed.line or NO_STACK}); CUDA had "
        f"{show_bytes(failed.device_free)} free.",
        shares=tuple(shares), shares_of=f"{show_bytes(peak.reserved)} reserved {'at the peak' if history else 'now'}",
        remedies=_remedies(holders, peak), notes=_notes(snapshot, device, segments, history, peak))


def _busiest(snapshot: MemorySnapshot) -> int:
    reserved = Counter[int]()
    for segment in snapshot.segments:
        reserved[segment.device] += segment.nbytes
    for device, history in enumerate(snapshot.histories):
        reserved[device] += sum(event.nbytes for event in history if event.action in ("segment_alloc", "segment_map"))
    return max(reserved, key=lambda each: reserved[each], default=0)


def _notes(snapshot: MemorySnapshot, device: int, segments: tuple[Segment, ...], history: Sequence[TraceEntry],
           peak: MemoryState) -> tuple[str, ...]:
    notes = []
    largest = sorted(peak.live.values(), key=lambda held: -held.nbytes)[:MAX_BLOCKS]
    if largest:
        notes.append(f"Largest blocks {'at the peak' if history else 'now'}: " + "; ".join(
            f"{show_bytes(held.nbytes)} {held.line}" for held in largest) + ".")
    unused = sum(segment.nbytes for segment in segments if all(block.state == "inactive" for block in segment.blocks))
    notes.append(f"Free now in segments that also hold tensors (inactive split): {show_bytes(split_bytes(segments))}. "
                 f"In segments without tensors, which empty_cache() releases: {show_bytes(unused)}.")
    notes.extend(_segment_notes(segments))
    if not history:
        notes.append("The file has no history, so the peak is not known: call "
                     "torch.cuda.memory._record_memory_history() before the run.")
    elif peak.begins_late:
        notes.append("Memory was allocated before the history begins: an earlier, higher peak would not be in it.")
    others = {segment.device for segment in snapshot.segments} | {
        number for number, events in enumerate(snapshot.histories) if events}
    if len(others) > 1:
        notes.append(f"This is GPU {device}; the file also has GPU {', '.join(map(str, sorted(others - {device})))}, "
                     "on which less was reserved.")
    return tuple(notes)


def split_bytes(segments: Iterable[Segment]) -> int:
    """torch's `inactive_split_bytes`: free blocks of segments that are split."""
    return sum(block.nbytes for segment in segments if len(segment.blocks) > 1
               for block in segment.blocks if block.state == "inactive")


def _segment_notes(segments: Sequence[Segment]) -> list[str]:
    """Reserved memory by stream and memory pool, if there is more than one."""
    groups: dict[tuple[int, str], list[Segment]] = defaultdict(list)
    for segment in segments:
        groups[segment.stream, segment.pool].append(segment)
    if len(groups) < 2:
        return []
    largest = sorted(groups.items(), key=lambda each: -sum(segment.nbytes for segment in each[1]))
    return ["Segments by stream and pool: " + "; ".join(
        f"stream {stream}{pool and f', private pool ({pool})'}: "
        f"{show_bytes(sum(segment.nbytes for segment in found))} in {len(found)}"
        for (stream, pool), found in largest[:MAX_SEGMENT_GROUPS])
        + ("; …" if len(largest) > MAX_SEGMENT_GROUPS else "") + "."]


def _blocks(count: int) -> str:
    return f"{count:,} blocks" if count > 1 else "1 block"


def _remedies(holders: Sequence[tuple[str, list[int]]], peak: MemoryState) -> tuple[Remedy, ...]:
    remedies, unallocated = [], peak.reserved - peak.allocated
    if unallocated > max(FRAGMENTED_SHARE * peak.reserved, LARGE_BUFFER) and not peak.expandable:
        remedies.append(Remedy(USE_EXPANDABLE_SEGMENTS, f"{show_bytes(unallocated)} of {show_bytes(peak.reserved)} are "
                               "reserved but unallocated at the peak; segments that grow as needed usually avoid that",
                               costs="nothing; not on Windows"))
    first = next((each for each in holders if each[0] not in (NO_STACK, NOT_RECORDED)), None)
    if first is not None:
        where, sizes = first
        share = f"{show_bytes(sum(sizes))} of the {show_bytes(peak.allocated)}"
        remedies.append(Remedy(f"look first at {where}", f"it allocated {share} at the peak, more than any other line. "
                               "A smaller micro-batch or recomputation reduces activations; 8-bit or offloaded state, "
                               "the optimizer's"))
    return tuple(remedies)
