"""Memory snapshots of torch: the peak and who held it, found in the file alone; anything else in it is rejected."""

from __future__ import annotations

import json
import os
import pickle
import random
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands.main import main
from fitgpt.core.errors import UsageError
from fitgpt.core.units import KiB, MiB
from fitgpt.diagnosis.memory_snapshot import (
    NO_STACK,
    explain_snapshot,
    is_pickle,
    read_snapshot,
    split_bytes,
    state_at_peak,
)
from fitgpt.memory.allocator import CachingAllocator, MemoryBlock
from fitgpt.memory.driver_addresses import DriverAddresses
from fitgpt.memory.tape import round_size


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


LINEAR = frame("/venv/torch/nn/modules/linear.py", 125, "forward")
STACKS = [[LINEAR, frame("/home/me/model.py", 40 + number, "forward")] for number in range(3)]


class Ascending(DriverAddresses):
    """Each segment above the last, with a gap."""

    def __init__(self) -> None:
        self.following = 2**40

    def place(self, nbytes: int, *, loading: bool) -> int:
        address = self.following
        self.following += nbytes + 2 * MiB
        return address


def recorded_run(seed: int, steps: int = 400) -> tuple[dict[str, Any], int, int]:
    """A snapshot of random allocations, in the documented format, with the peak of the allocator that placed them."""
    rng, allocator = random.Random(seed), CachingAllocator(addresses=Ascending())
    live, events = dict[MemoryBlock, int](), list[dict[str, Any]]()
    peak = reserved_at_peak = 0
    segments = dict[int, int]()  # address → size
    for step in range(steps):
        if live and (step > 0.8 * steps or rng.random() < 0.45):
            block = rng.choice(list(live))
            for action in ("free_requested", "free_completed"):
                events.append({"action": action, "addr": block.address, "size": live[block], "stream": 0})
            del live[block]
            allocator.free(block)
            continue
        size, before = rng.choice([rng.randint(1, 900 * KiB), rng.randint(1, 60 * MiB)]), allocator.reserved
        placed = allocator.malloc(round_size(size), 0)
        assert placed is not None
        if allocator.reserved > before:
            segments[placed.address] = allocator.reserved - before
            events.append({"action": "segment_alloc", "addr": placed.address, "size": allocator.reserved - before,
                           "stream": 0, "frames": []})
        events.append({"action": "alloc", "addr": placed.address, "size": size, "stream": 0,
                       "frames": STACKS[step % 3]})
        live[placed] = size
        allocated = sum(each.size for each in live)
        if allocated > peak:
            peak, reserved_at_peak = allocated, allocator.reserved

    held = {block.address: block.size for block in live}
    found = []
    for address, size in segments.items():
        blocks, at, end = [], address, address + size
        while at < end:
            following = min([start for start in held if at < start < end], default=end)
            used = held.get(at)
            blocks.append({"address": at, "size": used or following - at, "requested_size": used or 0, "frames": [],
                           "state": "active_allocated" if used else "inactive"})
            at += blocks[-1]["size"]
        found.append({"device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": "large",
                      "segment_pool_id": (0, 0), "is_expandable": False, "blocks": blocks})
    return {"segments": found, "device_traces": [events],
            "allocator_settings": {"garbage_collection_threshold": 0.5}}, peak, reserved_at_peak


RECORDED = Path(__file__).parents[1] / "recorded" / "memory_snapshot.pickle"


def test_the_figures_of_a_recorded_snapshot_are_torchs_own_to_the_byte() -> None:
    figures = json.loads(RECORDED.with_suffix(".json").read_text(encoding="utf-8"))
    with open(RECORDED, "rb") as file:
        assert is_pickle(file)
        snapshot = read_snapshot(file, RECORDED.name)
    peak = state_at_peak(snapshot.segments, snapshot.histories[0])
    assert peak.allocated == figures["max_allocated"]
    assert split_bytes(snapshot.segments) == figures["inactive_split"]
    assert sum(segment.nbytes for segment in snapshot.segments) == figures["reserved"]
    assert sum(block.nbytes for segment in snapshot.segments for block in segment.blocks
               if block.state == "active_allocated") == figures["allocated"]
    places = [share.what for share in explain_snapshot(snapshot).shares]
    assert places[:3] == [NO_STACK, "/mnt/train/bench/memory_snapshot.py:32 forward",
                          "/mnt/train/bench/memory_snapshot.py:59 train_step"]  # backward, forward, optimizer.step


def read(value: Any) -> Any:
    return read_snapshot(BytesIO(value if isinstance(value, bytes) else pickle.dumps(value)), "x.pickle")


@pytest.mark.parametrize("seed", range(4))
def test_the_peak_is_that_of_the_allocator_to_the_byte(seed: int) -> None:
    value, peak, reserved = recorded_run(seed)
    snapshot = read(value)
    state = state_at_peak(snapshot.segments, snapshot.histories[0])
    assert (state.allocated, state.reserved) == (peak, reserved)
    assert sum(held.nbytes for held in state.live.values()) == peak


def test_a_history_that_begins_late_has_the_same_peak() -> None:
    value, peak, _ = recorded_run(0)
    value["device_traces"] = [value["device_traces"][0][60:]]  # as with max_entries
    snapshot = read(value)
    assert state_at_peak(snapshot.segments, snapshot.histories[0]).allocated == peak
    assert any("before the history begins" in note for note in explain_snapshot(snapshot).notes)


def small_snapshot() -> dict[str, Any]:
    """A step: 30 MiB of a model's layers, 8 MiB without a stack, then an allocation that failed; 20 MiB are left."""
    def event(action: str, address: int, size: int, *stack: dict[str, Any]) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "stream": 0, "frames": list(stack)}

    events = [event("segment_alloc", 0, 20 * MiB), event("alloc", 0, 20 * MiB, *STACKS[0]),
              event("segment_alloc", 64 * MiB, 20 * MiB), event("alloc", 64 * MiB, 8 * MiB),
              event("alloc", 72 * MiB, 10 * MiB, *STACKS[0]),
              {**event("oom", 0, 500 * MiB, *STACKS[1]), "device_free": 3 * MiB},
              event("free_requested", 64 * MiB, 8 * MiB), event("free_completed", 64 * MiB, 8 * MiB),
              event("free_requested", 72 * MiB, 10 * MiB), event("free_completed", 72 * MiB, 10 * MiB)]
    del events[5]["addr"]
    segments = [
        {"address": 0, "total_size": 20 * MiB, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
         "blocks": [{"size": 20 * MiB, "state": "active_allocated", "frames": STACKS[0]}]},
        {"address": 64 * MiB, "total_size": 20 * MiB, "stream": 7, "segment_type": "large", "segment_pool_id": (1, 0),
         "blocks": [{"size": 20 * MiB, "state": "inactive"}]}]
    return {"segments": segments, "device_traces": [events]}


def test_holders_are_grouped_by_the_line_of_the_users_code() -> None:
    diagnosis = explain_snapshot(read(small_snapshot()))
    assert [(share.what, share.nbytes) for share in diagnosis.shares] == [
        ("/home/me/model.py:40 forward", 30 * MiB), (NO_STACK, 8 * MiB),
        ("reserved by PyTorch but unallocated", 2 * MiB)]
    assert diagnosis.title == "20.0 MiB are allocated now, 40.0 MiB reserved; at the peak 38.0 MiB and 40.0 MiB."
    assert diagnosis.remedies[-1].todo == "look first at /home/me/model.py:40 forward"


def test_a_failed_allocation_streams_pools_and_largest_blocks_are_named() -> None:
    diagnosis = explain_snapshot(read(small_snapshot()))
    assert "500.0 MiB failed (/home/me/model.py:41 forward); CUDA had 3.0 MiB free" in diagnosis.what
    notes = " ".join(diagnosis.notes)
    assert "Largest blocks at the peak: 20.0 MiB /home/me/model.py:40 forward; 10.0 MiB" in notes
    assert "stream 7, private pool (1, 0): 20.0 MiB in 1" in notes
    assert "which empty_cache() releases: 20.0 MiB" in notes


def test_text_of_the_file_reaches_the_terminal_without_control_characters() -> None:
    value = small_snapshot()
    value["device_traces"][0][1]["frames"] = [frame("/x\x1b[2J/" + "y" * 10**5 + ".py", 7, "f\n\x07g")]
    shown = str(explain_snapshot(read(value)))
    assert shown.isprintable() or not any(ord(sign) < 32 and sign != "\n" for sign in shown)
    assert "y.py:7 fg" in shown


def test_without_a_history_only_the_present_is_explained() -> None:
    value = small_snapshot()
    value["device_traces"] = [[]]
    diagnosis = explain_snapshot(read(value))
    assert diagnosis.title == "20.0 MiB are allocated now, 40.0 MiB reserved."
    assert "_record_memory_history()" in " ".join(diagnosis.notes)


def test_expandable_segments_are_advised_if_much_is_unallocated_and_they_are_off() -> None:
    value = small_snapshot()
    value["segments"].append({**value["segments"][1], "address": 256 * MiB, "total_size": 64 * MiB, "blocks": [
        {"size": MiB, "state": "active_allocated"}, {"size": 63 * MiB, "state": "inactive"}]})
    advised = [remedy.todo for remedy in explain_snapshot(read(value)).remedies]
    assert advised[0] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert split_bytes(read(value).segments) == 63 * MiB
    for segment in value["segments"]:
        segment["is_expandable"] = True
    assert "PYTORCH" not in explain_snapshot(read(value)).remedies[0].todo


class RunsCommand:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


NESTED: list[Any] = []
for _ in range(40):
    NESTED = [NESTED]


@pytest.mark.parametrize(("content", "why"), [
    (pickle.dumps({"segments": [RunsCommand()]}), "something other than dict"),
    (pickle.dumps(small_snapshot())[:-40], "damaged"),
    (b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b"a.", "damaged"),
    (pickle.dumps({"segments": NESTED}), "nested more than"),
    (pickle.dumps({"vocab_size": 65}), "no list 'segments'"),
    (pickle.dumps({"segments": [{"blocks": [{"size": -1}]}]}), "no whole number"),
    (pickle.dumps({"segments": [{"blocks": [small_snapshot()] * 2100}] * 2100}), "more than 4,000,000 blocks"),
], ids=["reduce", "truncated", "claims 2**60 bytes", "nested", "another pickle", "negative size", "repeated lists"])
def test_hostile_and_other_pickles_are_rejected_with_one_sentence(
        content: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("snapshot.pickle").write_bytes(content)
    assert main(["explain", "snapshot.pickle"]) == 2
    output = capsys.readouterr()
    assert why in output.err
    assert "Traceback" not in output.err + output.out
    assert not Path("was-run").exists()


def test_the_limit_on_the_size_is_checked_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitgpt.diagnosis.memory_snapshot.MAX_FILE", 500)
    with pytest.raises(UsageError, match="larger than"):
        read(small_snapshot())


@pytest.mark.parametrize(("start", "pickled"), [(b"\x80\x04\x95", True), (b"\x80\x02}", True), (b"CUDA", False),
                                               (b"", False), (b"\x80\xff", False)])
def test_a_pickle_is_recognised_by_its_first_bytes(start: bytes, pickled: bool) -> None:
    assert is_pickle(BufferedReader(BytesIO(start))) is pickled  # type: ignore[arg-type]


def test_explain_takes_a_snapshot_file_and_prints_text_or_json(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(small_snapshot()))
    assert main(["explain", str(file)]) == 0
    text = capsys.readouterr().out
    assert "peak      40.0 MiB reserved at the peak, in MiB" in text
    assert "30  /home/me/model.py:40 forward: 2 blocks" in text
    assert main(["explain", str(file), "--json"]) == 0
    assert '"subject": "snapshot"' in capsys.readouterr().out
