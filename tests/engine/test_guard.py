"""Memory runs out, anywhere: the run goes on, every step is taken once, and the weights are those of a run where it
did not. Refused is every single allocation of a small run on the CPU, one a run."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import fitgpt.run as run_module
from fitgpt.config import RunConfig
from fitgpt.desk import Signs
from fitgpt.engine import guard as guard_module
from fitgpt.engine.loop import Training, train_step
from fitgpt.engine.muon import Muon
from fitgpt.engine.offload import HostAdamW
from fitgpt.engine.oom import Dice, Refusal, attempt, is_out_of_memory
from fitgpt.engine.signs import fragmentation, in_pieces, spill
from fitgpt.errors import CheckpointError, DeviceError
from fitgpt.nouns import MemoryReading, Rung, StepReport
from fitgpt.onboard import Onboard
from fitgpt.runfolder import read_metrics
from fitgpt.units import GiB
from helpers import tiny_config

WORDS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.50 GiB of which …"
SMALL: dict[str, Any] = dict(n_layer=1, n_embd=8, n_head=1, block_size=4, batch_size=2, gradient_accumulation_steps=2,
                             max_iters=2, eval_interval=2, eval_iters=1, save_interval=1)
# One window at a time; then also less kept, and the optimizer elsewhere.
RUNGS = (Rung({"batch_size": 1, "gradient_accumulation_steps": 4}, 3 * GiB, "batch 1 × 4"),
         Rung({"batch_size": 1, "gradient_accumulation_steps": 4, "recompute": "input", "loss_chunk": 3,
               "offload": "optimizer"}, 2 * GiB, "batch 1 × 4, recompute input, optimizer in the host's memory"))


class Refusing(TorchDispatchMode):
    """Counts operations that return new memory, and refuses some of them, by number, before anything is computed."""

    def __init__(self, refused: Iterable[int] = ()) -> None:
        super().__init__()
        self.count = 0
        self._refused = set(refused)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper would take a third of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if allocates(func):
            self.count += 1
            if self.count in self._refused:
                raise torch.OutOfMemoryError(WORDS)
        return func(*args, **(kwargs or {}))


class Parts:
    """The loop's evaluations, steps and saves, numbered as they come. In one of them some allocations are refused;
    only that one is watched, since watching is slow. Without one, all are watched and counted."""

    def __init__(self, watched: int | None, refused: Iterable[int]) -> None:
        self.counts: list[tuple[str, int]] = []
        self._watched, self._refused = watched, tuple(refused)
        self._begun = 0

    def of(self, kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def part(*given: Any, **named: Any) -> Any:
            number, self._begun = self._begun, self._begun + 1
            if self._watched not in (None, number):
                return work(*given, **named)
            with Refusing(self._refused) as mode:
                done = work(*given, **named)
            self.counts.append((kind, mode.count))
            return done

        return part


_known: dict[Any, bool] = {torch.ops.aten._unsafe_view.default: False}  # a view, though its schema does not say so


def allocates(func: Any) -> bool:
    """By its schema: a tensor is returned that is none of the arguments."""
    if func not in _known:
        _known[func] = any(each.alias_info is None and "Tensor" in str(each.type) for each in func._schema.returns)
    return _known[func]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
            capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ended]]:
    """Trains for real, in a folder, with allocations of one part of the loop refused: `part=2, refused=[7]`."""
    real, number = run_module.train, iter(range(10**6))
    monkeypatch.setattr(os, "fsync", lambda file: None)  # hundreds of runs are written, and none must outlive a crash

    def train(refused: Iterable[int] = (), part: int | None = None, rungs: tuple[Rung, ...] = RUNGS, folder: str = "",
              **changes: Any) -> Ended:
        parts = Parts(part, refused)

        def in_parts(training: Training, config: RunConfig, facts: Any, steps: Any, rim: Any, stop: Any) -> None:
            steps.take = parts.of("step", steps.take)
            rim.evaluate, rim.save = parts.of("eval", rim.evaluate), parts.of("save", rim.save)
            real(training, config, facts, steps, rim, stop)

        gc.freeze()  # the guard collects garbage, and need not look through all that is here already
        config = tiny_config(tmp_path / (folder or str(next(number))), **{**SMALL, **changes})
        with monkeypatch.context() as patch:
            patch.setattr(run_module, "train", in_parts)
            run_module.run(config.to_dict(), [], lambda: False, rungs=rungs)
        capsys.readouterr()
        return Ended(config, parts.counts)

    yield train
    gc.unfreeze()


class Ended:
    """`parts`: what the loop did, and how many allocations each took."""

    def __init__(self, config: RunConfig, parts: list[tuple[str, int]]) -> None:
        self.config, self.parts = config, parts
        self.out = Path(config.out_dir)

    def steps(self) -> list[tuple[int, int]]:
        """(the number of the part, its allocations)."""
        return [(number, count) for number, (kind, count) in enumerate(self.parts) if kind == "step"]

    @property
    def last(self) -> Path:
        return sorted((self.out / "checkpoints").glob("step-*"))[-1]

    def bits(self) -> tuple[bytes, bytes]:
        """Weights, moments and the optimizer's count of its steps."""
        return (self.last / "model.safetensors").read_bytes(), (self.last / "optimizer.safetensors").read_bytes()

    def rows(self, *kinds: str) -> list[dict[str, Any]]:
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] in kinds]

    def steps_applied(self) -> set[float]:
        found = load_file(self.last / "optimizer.safetensors")
        return {each.item() for name, each in found.items() if name.endswith((".step", "steps"))}

    def farthest(self, other: Ended) -> float:
        """The largest difference of a weight, relative to the largest weight of its tensor."""
        ours, theirs = (load_file(each.last / "model.safetensors") for each in (self, other))
        return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)


# ---- refused once


def test_each_single_allocation_may_be_refused_and_the_weights_are_the_same_bit_for_bit(
        trained: Callable[..., Ended]) -> None:
    """Two steps of two micro-batches, two evaluations, two saves. A save makes none that could be refused."""
    whole = trained()
    assert [kind for kind, _ in whole.parts] == ["eval", "step", "save", "step", "eval", "save"]
    assert sum(count for kind, count in whole.parts if kind != "save") > 300
    assert [count for kind, count in whole.parts if kind == "save"] == [0, 0]
    bits = whole.bits()
    assert [(part, number) for part, (_, count) in enumerate(whole.parts) for number in range(1, count + 1)
            if trained([number], part).bits() != bits] == []


def test_between_its_parts_the_loop_allocates_nothing(trained: Callable[..., Ended], tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """So the numbers above are all there are."""
    everything, real = Refusing(), run_module.train

    def counted(*loop: Any) -> None:
        with everything:
            real(*loop)

    monkeypatch.setattr(run_module, "train", counted)
    run_module.run(tiny_config(tmp_path / "all", **SMALL).to_dict(), [], lambda: False)
    monkeypatch.setattr(run_module, "train", real)
    assert everything.count == sum(count for _, count in trained().parts)


@pytest.mark.parametrize("changes", [
    dict(optimizer="muon"), dict(optimizer="adam8bit"), dict(weights="bfloat16", dtype="bfloat16"),
    dict(offload="optimizer"), dict(offload="gradients"), dict(dtype="float16"), dict(dropout=0.2),
    dict(step_in_backward=True, batch_size=4, gradient_accumulation_steps=1, grad_clip=0.0),
], ids=lambda changes: next(iter(changes)) + str(next(iter(changes.values()))))
def test_so_with_every_optimizer_even_where_its_step_was_left_half_done(trained: Callable[..., Ended],
                                                                         changes: dict[str, Any]) -> None:
    """The last allocations of each step are the optimizer's, where it makes any: before and after a checkpoint."""
    whole = trained(**changes)
    for part, count in whole.steps():
        for number in (1, count // 2, count - 30, count - 8, count - 1, count):
            assert trained([number], part, **changes).bits() == whole.bits(), (part, number)


def test_a_step_left_half_done_goes_back_to_where_the_training_was_whole(trained: Callable[..., Ended]) -> None:
    whole = trained(optimizer="muon")
    part, count = whole.steps()[1]
    half_done = trained([count - 5], part, optimizer="muon")
    assert half_done.rows("oom")[0]["phase"] == "step"
    assert half_done.rows("oom")[0]["text"].startswith("Memory ran out in step 1: ")
    back, = half_done.rows("went_back")
    assert (back["start_step"], back["text"]) == (1, "The training goes back to step 1, where it was whole.")
    assert half_done.bits() == whole.bits()


@pytest.mark.parametrize(("save_interval", "refusals", "downs"), [(0, 2, 1), (0, 3, 2), (15, 2, 0)])
def test_going_back_twice_to_one_checkpoint_takes_the_training_down(
        trained: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, save_interval: int, refusals: int,
        downs: int) -> None:
    """However many steps lie between: the same plan would go back for ever. A checkpoint between them is headway."""
    calls = (4, 5 + 16, 5 + 17 + 5)  # steps 4, 16 and 5, from the beginning each
    monkeypatch.setattr(Muon, "step", refused_at(calls[:refusals], Muon.step))
    rungs = (RUNGS[0], Rung({**RUNGS[0].changes, "loss_chunk": 3}, 2 * GiB, "smaller still"))
    ended = trained(optimizer="muon", max_iters=20, eval_interval=100, save_interval=save_interval, rungs=rungs)
    assert len(ended.rows("went_back")) == refusals
    assert len(ended.rows("step_down")) == downs
    assert ended.steps_applied() == {20.0}


def test_the_record_of_a_run_that_went_back_has_each_step_once(trained: Callable[..., Ended],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Muon, "step", refused_at([3], Muon.step))
    ended = trained(optimizer="muon", max_iters=4, eval_interval=4, save_interval=0)
    whole = (ended.out / "metrics.jsonl").read_text()
    just_back = whole[:whole.index("\n", whole.index('"went_back"')) + 1]

    def kept(record: str) -> list[tuple[str, int | None]]:
        (ended.out / "record.jsonl").write_text(record)
        return [(row["kind"], row.get("step")) for row in read_metrics(ended.out / "record.jsonl")]

    assert just_back.count('"kind": "step"') == 3
    assert kept(just_back) == [("run", None), ("eval", 0), ("oom", 3), ("went_back", None)]
    assert kept(whole) == [("run", None), ("oom", 3), ("went_back", None), ("eval", 0),
                           *(("step", number) for number in range(4)), ("eval", 4), ("save", 4)]


def refused_at(numbers: Sequence[int], real: Callable[..., None]) -> Callable[..., None]:
    """An optimizer's step that does all its work, and then, some times by number, runs out of memory."""
    calls = iter(range(1000))

    def step(self: Any, *figures: Any) -> None:
        real(self, *figures)
        if next(calls) in numbers:
            raise torch.OutOfMemoryError(WORDS)

    return step


def test_going_back_to_the_beginning_gives_rounded_weights_their_masters_again(
        trained: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = dict(weights="bfloat16", dtype="bfloat16", offload="optimizer", save_interval=0)
    whole = trained(**changes)
    monkeypatch.setattr(HostAdamW, "step", refused_at([1], HostAdamW.step))
    assert trained(**changes).bits() == whole.bits()


def test_a_rung_whose_optimizer_cannot_take_the_state_over_is_refused_in_words(trained: Callable[..., Ended]) -> None:
    rungs = (Rung({"offload": "optimizer"}, GiB, "optimizer in the host's memory"),)
    with pytest.raises(CheckpointError, match="cannot go on with offload=optimizer"):
        trained([40, 41], part=1, rungs=rungs, weights="bfloat16", dtype="bfloat16")


@pytest.mark.parametrize(("dropout", "words"), [(0.0, "batch 1 × 4: the same steps, on the same data."),
                                                (0.2, "batch 1 × 4: steps of the same data.")])
def test_a_smaller_micro_batch_is_called_the_same_step_only_without_dropout(
        trained: Callable[..., Ended], dropout: float, words: str) -> None:
    assert trained([40, 41], part=1, dropout=dropout).rows("step_down")[0]["text"].endswith(words)


def test_adamws_step_allocates_nothing_once_it_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it cannot be left half done: what it needs is there before, and its counters change in place."""
    begun: list[int] = []

    def train(training: Training, config: RunConfig, facts: Any, steps: Any, *rim: Any) -> None:
        mode, applying = Refusing(), training.optimizer.step

        def step(*figures: Any) -> None:
            begun.append(mode.count)
            applying(*figures)

        monkeypatch.setattr(training.optimizer, "step", step)
        with mode:
            train_step(training, config, steps._feed, 1e-3, lambda: False)
        begun.append(mode.count)

    monkeypatch.setattr(run_module, "train", train)
    run_module.run(tiny_config(tmp_path, **SMALL).to_dict(), [], lambda: False)
    before, after = begun
    assert 0 < before == after


# ---- refused again


def test_refused_again_the_step_is_taken_in_less_and_the_weights_differ_by_rounding_alone(
        trained: Callable[..., Ended]) -> None:
    """Refused are pairs: an allocation of a step, and the first of the attempt that follows. Each fifth pair."""
    whole = trained(rungs=())
    for part, number in ((part, number) for part, count in whole.steps() for number in range(1, count + 1, 5)):
        ended = trained([number, number + 1], part)
        assert [row["changes"] for row in ended.rows("step_down")] == [RUNGS[0].changes], (part, number)
        assert ended.farthest(whole) < 1e-5, (part, number)
        assert ended.steps_applied() == {2.0}, (part, number)


def test_refused_a_third_time_it_goes_further_down_to_the_optimizer_elsewhere(trained: Callable[..., Ended]) -> None:
    whole = trained()
    ended = trained([40, 41, 42], part=3)
    assert [row["changes"] for row in ended.rows("step_down")] == [RUNGS[0].changes, RUNGS[1].changes]
    assert ended.farthest(whole) < 1e-5
    assert ended.steps_applied() == {2.0}
    assert next(row["text"] for row in ended.rows("step_down")) == (
        "Memory ran out again: CUDA out of memory. Tried to allocate 2.00 GiB. Going on with batch 1 × 4: the same "
        "steps, on the same data.")


def test_where_there_is_nothing_smaller_what_is_trained_is_saved_and_a_resume_ends_the_same(
        trained: Callable[..., Ended]) -> None:
    whole = trained()
    with pytest.raises(DeviceError, match=r"in step 1, and there is no smaller plan.*What was trained is saved"):
        trained([40, 41], part=3, rungs=(), folder="stopped")
    rest = trained(folder="stopped", init_from="resume")
    assert rest.bits() == whole.bits()


# ---- what is free decides


def test_it_jumps_to_the_first_rung_that_fits_what_is_free(trained: Callable[..., Ended],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Onboard, "room", lambda self: int(2.5 * GiB))
    ended = trained([40, 41], part=1)
    assert [row["needs_bytes"] for row in ended.rows("step_down")] == [2 * GiB]
    assert "(needs 2.00 GiB)" in ended.rows("step_down")[0]["text"]


@pytest.mark.parametrize("allowed", [True, False])
def test_it_steps_up_again_when_there_is_room_and_only_if_allowed(
        trained: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    monkeypatch.setattr(guard_module, "LOOK_EVERY", 2)
    monkeypatch.setattr(Onboard, "room", lambda self: 8 * GiB)
    monkeypatch.setattr(run_module.RunWays, "__setattr__", lambda self, name, value: object.__setattr__(
        self, name, 4 * GiB if name == "needs" else value))  # as if the run had a plan, on a CPU
    whole = trained(max_iters=6)
    ended = trained([40, 41], part=3, max_iters=6, step_up=allowed)
    kinds = [(row["kind"], row["step"], row["changes"]) for row in ended.rows("step_down", "step_up")]
    assert kinds == [("step_down", 1, RUNGS[0].changes), ("step_up", 3, {})][:1 + allowed]
    assert ended.farthest(whole) < 1e-4  # six steps of rounding
    assert ended.steps_applied() == {6.0}


# ---- evaluation


def test_an_evaluation_goes_on_with_fewer_windows_and_the_same_loss(trained: Callable[..., Ended]) -> None:
    whole, ended = trained(eval_iters=4), trained([5], part=0, eval_iters=4)
    oom, = ended.rows("oom")
    assert oom["phase"] == "eval"
    assert "It goes on with 1 window at once, which changes no loss." in oom["text"]
    losses = [[[loss["mean"] for loss in row["losses"]] for row in each.rows("eval")] for each in (ended, whole)]
    assert losses[0] == [pytest.approx(row, rel=1e-6) for row in losses[1]]
    assert ended.bits() == whole.bits()


def test_an_evaluation_without_any_room_is_left_out_and_costs_training_nothing(trained: Callable[..., Ended]) -> None:
    whole, ended = trained(), trained([5, 6], part=0)
    assert [row["step"] for row in ended.rows("eval")] == [2]
    assert "The evaluation of step 0 is left out; training goes on." in ended.rows("warning")[0]["text"]
    assert ended.bits() == whole.bits()


# ---- letting go


def test_an_attempt_that_is_refused_leaves_no_tensor_behind() -> None:
    kept: list[weakref.ref[Any]] = []

    def inner() -> None:
        tensor = torch.zeros(1000)
        kept.append(weakref.ref(tensor))
        try:
            raise ValueError("first")
        finally:
            raise torch.OutOfMemoryError(WORDS)

    assert attempt(inner) == Refusal(WORDS)
    assert kept[0]() is None
    assert Refusal(WORDS).short == "CUDA out of memory. Tried to allocate 2.00 GiB"


def test_only_a_lack_of_memory_is_forgiven() -> None:
    def broken() -> None:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        attempt(broken)
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_dice_are_put_back() -> None:
    dice = Dice(torch.device("cpu"))
    first = torch.rand(3)
    dice.put_back()
    assert torch.equal(torch.rand(3), first)


def test_recorded_work_is_forgotten_with_its_gradients(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path, **SMALL), dtype="float32", vocab_size=64)
    training = run_module.build_training(config, run_module.resolve_device("cpu", "float32", False))
    training.accumulate, training.gradients_stay = (lambda *batch: torch.zeros(())), True  # as if it were recorded
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training.forget_recorded_work()
    assert training.accumulate == training.model.accumulate
    assert all(parameter.grad is None for parameter in training.model.parameters())


# ---- signs


def test_memory_in_pieces_is_named() -> None:
    message = (f"{WORDS} Of the allocated memory 5.00 GiB is allocated by PyTorch, and 3.10 GiB is reserved by "
               "PyTorch but unallocated.")
    assert in_pieces(message) == " (3.10 GiB were held and lay unused, but in pieces too small.)"
    assert in_pieces(message.replace("3.10 GiB", "1.10 GiB")) == ""
    assert in_pieces("DefaultCPUAllocator: can't allocate memory") == ""
    assert "the rest lies between blocks" in fragmentation(8 * GiB, 4 * GiB)
    assert fragmentation(8 * GiB, 7 * GiB) == ""
    assert fragmentation(GiB, GiB // 4) == ""


def test_each_sign_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitgpt.desk.may_spill", lambda: True)
    signs, memory = Signs(card_bytes=12 * GiB), MemoryReading(0, 13 * GiB, 5 * GiB, 13 * GiB)
    report = StepReport(0, 1.0, 1.0, 1.0, 1.0, 1.0, None, 0, 1.0, memory, 1.0)
    assert [note.split(":")[0] for note in signs.of(report, 5 * GiB)] == ["memory", "memory"]
    assert signs.of(report, 5 * GiB) == []


def test_a_step_that_is_replayed_from_a_recording_is_no_memory_in_pieces() -> None:
    """Its tensors are counted only while it is recorded."""
    replayed = MemoryReading(0, 5 * GiB, 2 * GiB, 5 * GiB)
    report = StepReport(0, 1.0, 1.0, 1.0, 1.0, 1.0, None, 0, 1.0, replayed, 1.0)
    assert Signs(card_bytes=12 * GiB).of(report, most_allocated=int(4.5 * GiB)) == []


def test_a_spill_into_the_hosts_memory_is_named() -> None:
    card = 12 * GiB
    assert "13.00 GiB are held, and the card has 12.00 GiB" in spill(MemoryReading(0, 13 * GiB), card, 1.0, 1.0)
    assert "4.0 times as long" in spill(MemoryReading(0, 11 * GiB), card, 4.0, 1.0)
    assert spill(MemoryReading(0, 11 * GiB), card, 1.1, 1.0) == ""   # full, and as fast as ever
    assert spill(MemoryReading(0, 6 * GiB), card, 9.0, 1.0) == ""    # slow for another reason
