"""Memory runs out, anywhere: the run goes on, every step is taken once, and the weights are those of a run where it
did not. Refused is every single allocation of a small run on the CPU, one a run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from refusing import RUNGS, SMALL, WORDS, Ended, Parts, Refusing

import fitgpt.training.run as run_module
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import CheckpointError, DeviceError
from fitgpt.core.units import GiB
from fitgpt.engine.optim.muon import Muon
from fitgpt.engine.optim.offload import HostAdamW
from fitgpt.nouns import Rung
from fitgpt.runs.metrics import read_metrics
from fitgpt.training import oom_recovery as guard_module
from fitgpt.training.device_plan import Onboard
from fitgpt.training.loop import Training, train_step
from helpers import skip_without_library, tiny_config


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
    dict(adam8bit="bitsandbytes", optimizer="adam8bit"),
    dict(offload="optimizer"), dict(offload="gradients"), dict(dtype="float16"), dict(dropout=0.2),
    dict(step_in_backward=True, batch_size=4, gradient_accumulation_steps=1, grad_clip=0.0),
], ids=lambda changes: next(iter(changes)) + str(next(iter(changes.values()))))
def test_so_with_every_optimizer_even_where_its_step_was_left_half_done(trained: Callable[..., Ended],
                                                                         changes: dict[str, Any]) -> None:
    """The last allocations of each step are the optimizer's, where it makes any: before and after a checkpoint."""
    skip_without_library(changes)
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
