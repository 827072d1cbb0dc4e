"""Out of memory at any point: the run continues, every step is applied once, and the weights are those of a run with
enough memory. Allocations of a small CPU run fail, one per run; all of them in tests/campaign/allocations.py."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fitgpt.training.run as run_module
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import CheckpointError, DeviceError
from fitgpt.core.units import GiB
from fitgpt.engine.optim.muon import Muon
from fitgpt.engine.optim.offload import OffloadedAdamW
from fitgpt.planning.plan_file import FallbackPlan
from fitgpt.runs.metrics import read_metrics
from fitgpt.training import oom_recovery as guard_module
from fitgpt.training.device_memory import DeviceMemoryPlan
from fitgpt.training.loop import Training, train_step
from tests.failing_allocations import FALLBACKS, MESSAGE, SMALL, Ended, FailingAllocations, Parts
from tests.helpers import skip_without_library, tiny_config


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
            capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ended]]:
    """Trains for real, in a folder, with failing allocations in one part of the loop: `part=2, failing=[7]`."""
    real, number = run_module.train, iter(range(10**6))
    monkeypatch.setattr(os, "fsync", lambda file: None)  # hundreds of runs are written, and none must survive a crash

    def train(failing: Iterable[int] = (), part: int | None = None, fallbacks: tuple[FallbackPlan, ...] = FALLBACKS,
              folder: str = "", **changes: Any) -> Ended:
        parts = Parts(part, failing)

        def in_parts(training: Training, config: RunConfig, facts: Any, steps: Any, callbacks: Any, stop: Any) -> None:
            steps.take = parts.of("step", steps.take)
            callbacks.evaluate, callbacks.save = parts.of("eval", callbacks.evaluate), parts.of("save", callbacks.save)
            real(training, config, facts, steps, callbacks, stop)

        gc.freeze()  # the guard collects garbage; this makes that fast
        config = tiny_config(tmp_path / (folder or str(next(number))), **{**SMALL, **changes})
        with monkeypatch.context() as patch:
            patch.setattr(run_module, "train", in_parts)
            run_module.run(config.to_dict(), [], lambda: False, fallbacks=fallbacks)
        capsys.readouterr()
        return Ended(config, parts.counts)

    yield train
    gc.unfreeze()


# ---- one failed allocation


def test_any_single_allocation_may_fail_and_the_weights_are_the_same_bit_for_bit(
        trained: Callable[..., Ended]) -> None:
    """Two steps of two micro-batches, two evaluations, two saves. A save makes no allocation that could fail. Every
    eighth allocation of the first evaluation and step fails once, and some of the second ones, which repeat them; the
    campaign `allocations` takes every one."""
    whole = trained()
    assert [kind for kind, _ in whole.parts] == ["eval", "step", "save", "step", "eval", "save"]
    assert sum(count for kind, count in whole.parts if kind != "save") > 300
    assert [count for kind, count in whole.parts if kind == "save"] == [0, 0]
    bits = whole.bits()
    assert [(part, number) for part, (_, count) in enumerate(whole.parts)
            for number in range(1, count + 1, 8 if part < 2 else 32)
            if trained([number], part).bits() != bits] == []


def test_between_its_parts_the_loop_allocates_nothing(trained: Callable[..., Ended], tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """So the allocations counted above are all there are."""
    everything, real = FailingAllocations(), run_module.train

    def counted(*loop: Any) -> None:
        with everything:
            real(*loop)

    monkeypatch.setattr(run_module, "train", counted)
    run_module.run(tiny_config(tmp_path / "all", **SMALL).to_dict(), [], lambda: False)
    monkeypatch.setattr(run_module, "train", real)
    assert everything.count == sum(count for _, count in trained().parts)


@pytest.mark.parametrize("changes", [
    dict(optimizer="muon"), dict(optimizer="adam8bit"), dict(weights="bfloat16", dtype="bfloat16"),
    dict(adam8bit="bitsandbytes", optimizer="adam8bit"),
    dict(offload="optimizer"), dict(offload="gradients"), dict(dtype="float16"), dict(dropout=0.2),
    dict(step_in_backward=True, batch_size=4, gradient_accumulation_steps=1, grad_clip=0.0),
], ids=lambda changes: next(iter(changes)) + str(next(iter(changes.values()))))
def test_with_every_optimizer_a_failed_allocation_does_not_change_the_weights(trained: Callable[..., Ended],
                                                                              changes: dict[str, Any]) -> None:
    """The last allocations of each step are the optimizer's, where it makes any: before and after a checkpoint."""
    skip_without_library(changes)
    whole = trained(**changes)
    for part, count in whole.steps():
        for number in (1, count // 2, count - 30, count - 8, count - 1, count):
            assert trained([number], part, **changes).bits() == whole.bits(), (part, number)


def test_a_half_done_optimizer_step_rolls_back_to_the_last_checkpoint(trained: Callable[..., Ended]) -> None:
    whole = trained(optimizer="muon")
    part, count = whole.steps()[1]
    half_done = trained([count - 5], part, optimizer="muon")
    assert half_done.rows("oom")[0]["phase"] == "step"
    assert half_done.rows("oom")[0]["text"].startswith("Out of memory in step 1: ")
    back, = half_done.rows("went_back")
    assert (back["start_step"], back["text"]) == (
        1, "The optimizer step was incomplete: rolled back to step 1.")
    assert half_done.bits() == whole.bits()


@pytest.mark.parametrize(("save_interval", "failures", "downs"), [(0, 2, 1), (0, 3, 2), (15, 2, 0)])
def test_rolling_back_twice_to_one_checkpoint_takes_a_smaller_plan(
        trained: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, save_interval: int, failures: int,
        downs: int) -> None:
    """However many steps are between them: the same plan would roll back forever. A new checkpoint is progress."""
    calls = (4, 5 + 16, 5 + 17 + 5)  # steps 4, 16 and 5, from the beginning each
    monkeypatch.setattr(Muon, "step", failing_at(calls[:failures], Muon.step))
    fallbacks = (FALLBACKS[0], FallbackPlan({**FALLBACKS[0].changes, "loss_chunk": 3}, 2 * GiB, "smaller still"))
    ended = trained(optimizer="muon", max_iters=20, eval_interval=100, save_interval=save_interval,
                    fallbacks=fallbacks)
    assert len(ended.rows("went_back")) == failures
    assert len(ended.rows("step_down")) == downs
    assert ended.steps_applied() == {20.0}


def test_the_metrics_of_a_run_that_rolled_back_have_each_step_once(trained: Callable[..., Ended],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Muon, "step", failing_at([3], Muon.step))
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


def failing_at(numbers: Sequence[int], real: Callable[..., None]) -> Callable[..., None]:
    """An optimizer's step that does all its work and then, at the calls with these numbers, is out of memory."""
    calls = iter(range(1000))

    def step(self: Any, *figures: Any) -> None:
        real(self, *figures)
        if next(calls) in numbers:
            raise torch.OutOfMemoryError(MESSAGE)

    return step


def test_rolling_back_to_the_start_restores_master_weights(
        trained: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = dict(weights="bfloat16", dtype="bfloat16", offload="optimizer", save_interval=0)
    whole = trained(**changes)
    monkeypatch.setattr(OffloadedAdamW, "step", failing_at([1], OffloadedAdamW.step))
    assert trained(**changes).bits() == whole.bits()


def test_a_fallback_plan_whose_optimizer_cannot_load_the_state_is_an_error(trained: Callable[..., Ended]) -> None:
    fallbacks = (FallbackPlan({"offload": "optimizer"}, GiB, "optimizer in CPU RAM"),)
    with pytest.raises(CheckpointError, match="cannot be moved to offload=optimizer"):
        trained([40, 41], part=1, fallbacks=fallbacks, weights="bfloat16", dtype="bfloat16")


@pytest.mark.parametrize(("dropout", "ending"), [(0.0, "batch 1 × 4: same steps, same data."),
                                                 (0.2, "batch 1 × 4: same data, other dropout masks.")])
def test_the_message_promises_same_steps_only_without_dropout(
        trained: Callable[..., Ended], dropout: float, ending: str) -> None:
    assert trained([40, 41], part=1, dropout=dropout).rows("step_down")[0]["text"].endswith(ending)


def test_adamws_step_allocates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it cannot be left half done: its state exists before, and its counters change in place."""
    begun: list[int] = []

    def train(training: Training, config: RunConfig, facts: Any, steps: Any, *callbacks: Any) -> None:
        mode, applying = FailingAllocations(), training.optimizer.step

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


# ---- repeated failures


def test_after_a_second_failure_a_smaller_plan_changes_weights_by_rounding_only(
        trained: Callable[..., Ended]) -> None:
    """Two allocations fail: one of a step, and the first of the retry. Every fifth pair is tried."""
    whole = trained(fallbacks=())
    for part, number in ((part, number) for part, count in whole.steps() for number in range(1, count + 1, 5)):
        ended = trained([number, number + 1], part)
        assert [row["changes"] for row in ended.rows("step_down")] == [FALLBACKS[0].changes], (part, number)
        assert ended.farthest(whole) < 1e-5, (part, number)
        assert ended.steps_applied() == {2.0}, (part, number)


def test_after_a_third_failure_the_optimizer_moves_to_cpu_ram(trained: Callable[..., Ended]) -> None:
    whole = trained()
    ended = trained([40, 41, 42], part=3)
    assert [row["changes"] for row in ended.rows("step_down")] == [FALLBACKS[0].changes, FALLBACKS[1].changes]
    assert ended.farthest(whole) < 1e-5
    assert ended.steps_applied() == {2.0}
    assert next(row["text"] for row in ended.rows("step_down")) == (
        "Out of memory again: CUDA out of memory. Tried to allocate 2.00 GiB. Continuing with batch 1 × 4: same steps, "
        "same data.")


def test_without_a_smaller_plan_the_run_is_saved_and_a_resume_gives_the_same_weights(
        trained: Callable[..., Ended]) -> None:
    whole = trained()
    with pytest.raises(DeviceError, match=r"in step 1, and there is no smaller fallback plan.*The run is saved"):
        trained([40, 41], part=3, fallbacks=(), folder="stopped")
    rest = trained(folder="stopped", init_from="resume")
    assert rest.bits() == whole.bits()


# ---- free memory decides


def test_it_takes_the_first_fallback_plan_that_fits_what_is_free(trained: Callable[..., Ended],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemoryPlan, "room", lambda self: int(2.5 * GiB))
    ended = trained([40, 41], part=1)
    assert [row["needs_bytes"] for row in ended.rows("step_down")] == [2 * GiB]
    assert "(needs 2.00 GiB)" in ended.rows("step_down")[0]["text"]


def test_a_plan_is_searched_for_what_is_free_before_one_of_the_ladder_is_taken(
        trained: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def fastest_within(self: DeviceMemoryPlan, room: int) -> FallbackPlan | None:
        searched.append(room)
        return FallbackPlan({"loss_chunk": 3}, 3 * GiB, "loss in chunks of 3 tokens") if len(searched) == 1 else None

    monkeypatch.setattr(DeviceMemoryPlan, "fastest_within", fastest_within)
    monkeypatch.setattr(DeviceMemoryPlan, "room", lambda self: 4 * GiB)
    monkeypatch.setattr(DeviceMemoryPlan, "needs", 4 * GiB)  # as if the run had a plan, on a CPU
    ended = trained([40, 41, 60], part=1)  # the third fails in the plan that was found
    assert [row["changes"] for row in ended.rows("step_down")] == [{"loss_chunk": 3}, FALLBACKS[1].changes]
    assert searched == [int(0.98 * 4 * GiB), int(0.98 * 3 * GiB)]


def test_a_run_starts_with_a_smaller_plan_if_less_is_free_than_was_planned_with(
        trained: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemoryPlan, "room", lambda self: int(2.5 * GiB))
    monkeypatch.setattr(DeviceMemoryPlan, "needs", 4 * GiB)
    ended = trained()
    assert [row["step"] for row in ended.rows("step_down")] == [0]
    assert ended.rows("step_down")[0]["text"].startswith("Only 2.50 GiB is free for the run. Continuing with batch 1")
    assert ended.rows("oom") == []


@pytest.mark.parametrize("allowed", [True, False])
def test_it_steps_up_again_when_there_is_room_and_only_if_allowed(
        trained: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    monkeypatch.setattr(guard_module, "CHECK_EVERY", 2)
    monkeypatch.setattr(DeviceMemoryPlan, "room", lambda self: 8 * GiB)
    monkeypatch.setattr(DeviceMemoryPlan, "needs", 4 * GiB)  # as if the run had a plan, on a CPU
    whole = trained(max_iters=6)
    ended = trained([40, 41], part=3, max_iters=6, step_up=allowed)
    kinds = [(row["kind"], row["step"], row["changes"]) for row in ended.rows("step_down", "step_up")]
    assert kinds == [("step_down", 1, FALLBACKS[0].changes), ("step_up", 3, {})][:1 + allowed]
    assert ended.farthest(whole) < 1e-4  # six steps of rounding
    assert ended.steps_applied() == {6.0}


# ---- evaluation


def test_an_evaluation_out_of_memory_continues_with_fewer_windows_and_the_same_loss(
        trained: Callable[..., Ended]) -> None:
    whole, ended = trained(eval_iters=4), trained([5], part=0, eval_iters=4)
    oom, = ended.rows("oom")
    assert oom["phase"] == "eval"
    assert "It continues with 1 window at once, which changes no loss." in oom["text"]
    losses = [[[loss["mean"] for loss in row["losses"]] for row in each.rows("eval")] for each in (ended, whole)]
    assert losses[0] == [pytest.approx(row, rel=1e-6) for row in losses[1]]
    assert ended.bits() == whole.bits()


def test_an_evaluation_that_does_not_fit_is_skipped_and_training_is_unchanged(trained: Callable[..., Ended]) -> None:
    whole, ended = trained(), trained([5, 6], part=0)
    assert [row["step"] for row in ended.rows("eval")] == [2]
    assert "The evaluation of step 0 is skipped; training continues." in ended.rows("warning")[0]["text"]
    assert ended.bits() == whole.bits()
