"""A rehearsal measures memory and leaves no trace; a plan is printed at the start and compared at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fitgpt.training.run as run_module
from fitgpt.commands import rehearse
from fitgpt.config.fields import Assignment
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import DeviceError, DoesNotFit, Interrupted, SystemFault, UsageError
from fitgpt.core.units import GiB, MiB
from fitgpt.engine.model import GPT
from fitgpt.engine.optim.adamw import AdamW
from fitgpt.memory.platform import Platform
from fitgpt.planning.budget import Budget, Target
from fitgpt.planning.plan import plan_for
from fitgpt.runs.folder import RunFolder
from fitgpt.runs.metrics import MemoryReading, PhaseMemory, last_row, measured_peaks, phases_from, read_metrics
from fitgpt.show.progress import plan_vs_measured
from fitgpt.training import rehearsal
from fitgpt.training.device_memory import DeviceMemoryPlan, Peaks, phases_of
from fitgpt.training.loop import Training
from fitgpt.training.run import rehearse_only
from fitgpt.training.supervisor import WorkerConfig
from tests.helpers import skip_without_library, tiny_config

SAVERS: dict[str, dict[str, Any]] = {
    "dropout": dict(dropout=0.2), "float16": dict(dtype="float16", dropout=0.1),
    "muon": dict(optimizer="muon"), "adam8bit": dict(optimizer="adam8bit"),
    "bitsandbytes": dict(optimizer="adam8bit", adam8bit="bitsandbytes", dtype="float16"),
    "bfloat16 weights": dict(weights="bfloat16", residual="bfloat16", dtype="bfloat16"),
    "late": dict(states="late", gradients="kept"), "kept casts": dict(casts="kept", dtype="bfloat16"),
    "offload": dict(offload="optimizer"), "offloaded gradients": dict(offload="gradients"),
    "at once, rounded": dict(step_in_backward=True, gradient_accumulation_steps=1, batch_size=8, grad_clip=0.0,
                             optimizer="adam8bit", weights="bfloat16", dtype="bfloat16", dropout=0.1),
}


def bits(config: RunConfig) -> list[bytes]:
    last = sorted((Path(config.out_dir) / "checkpoints").glob("step-*"))[-1]
    return [(last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def losses(config: RunConfig) -> list[float]:
    rows = read_metrics(Path(config.out_dir) / "metrics.jsonl")
    return [row["loss"] for row in rows if row["kind"] == "step"]


def train(config: RunConfig) -> None:
    run_module.run(config.to_dict(), [], lambda: False)


# ---- no trace


@pytest.mark.parametrize("name", SAVERS)
def test_a_rehearsal_does_not_change_the_run_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Weights, moments, the count that seeds rounding, the loss scale, the data. Of resumed runs: test_run.py."""
    skip_without_library(SAVERS[name])
    plain, rehearsed = (tiny_config(tmp_path / part, max_iters=3, eval_interval=2, **SAVERS[name])
                        for part in ("plain", "rehearsed"))
    train(plain)
    train(replace(rehearsed, rehearse=True))
    assert losses(rehearsed) == losses(plain)
    assert bits(rehearsed) == bits(plain)
    assert any(row["kind"] == "rehearsal" for row in read_metrics(Path(rehearsed.out_dir) / "metrics.jsonl"))


def built(config: RunConfig) -> Training:
    return run_module.build_training(config, run_module.resolve_device("cpu", "float32", False))


def rehearse_it(training: Training, config: RunConfig) -> None:
    dataset = run_module.open_dataset(config.dataset)
    rehearsal.rehearse(training, config, lambda short: run_module.training_batches(
        short, dataset, training.device), lambda: None, Peaks(training.device))


@pytest.mark.parametrize("optimizer", ["adamw", "adam8bit", "muon"])
def test_late_optimizer_state_does_not_exist_before_or_after_a_rehearsal(tmp_path: Path, optimizer: str) -> None:
    config = tiny_config(tmp_path, states="late", optimizer=optimizer, dtype="float32")
    training = built(config)
    assert training.optimizer.held() == {}
    rehearse_it(training, config)
    assert training.optimizer.held() == {}
    assert training.optimizer.tensors().keys() == built(replace(config, states="early")).optimizer.held().keys()


def test_a_rehearsal_restores_the_rng_state_and_leaves_no_gradient(tmp_path: Path) -> None:
    config = replace(tiny_config(tmp_path, dropout=0.3), dtype="float32")
    training = built(config)
    torch.manual_seed(7)
    before, scaler = torch.get_rng_state(), training.scaler.to_dict()
    rehearse_it(training, config)
    assert torch.equal(torch.get_rng_state(), before)
    assert training.scaler.to_dict() == scaler
    assert training.step == 0
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_a_rehearsal_evaluates_and_takes_two_iterations_at_full_size(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two iterations of two micro-steps at full size, both with the optimizer's step, and evaluation around them."""
    done: list[str] = []
    steps = AdamW.step
    monkeypatch.setattr(AdamW, "step", lambda self, *given: (done.append("step"), steps(self, *given))[1])
    shapes = GPT.accumulate
    monkeypatch.setattr(GPT, "accumulate", lambda self, idx, *rest: (
        done.append(f"micro-step {tuple(idx.shape)}"), shapes(self, idx, *rest))[1])
    looks = GPT.token_losses
    monkeypatch.setattr(GPT, "token_losses", lambda self, idx, *rest: (
        done.append(f"look {tuple(idx.shape)}"), looks(self, idx, *rest))[1])
    monkeypatch.setattr(run_module, "train", lambda *loop: None)
    train(tiny_config(tmp_path, rehearse=True, gradient_accumulation_steps=5))
    iteration, looking = ["micro-step (4, 16)"] * 2 + ["step"], ["look (4, 16)"] * 4
    assert done == [*looking, *iteration, *iteration, *looking]


def test_out_of_memory_in_a_rehearsal_does_not_change_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, caught = tiny_config(tmp_path / "a", max_iters=3), tiny_config(tmp_path / "b", max_iters=3, rehearse=True)
    train(plain)
    real, calls = GPT.accumulate, iter(range(1000))

    def fails_once(self: Any, *batch: Any) -> Any:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, *batch)

    monkeypatch.setattr(GPT, "accumulate", fails_once)
    train(caught)
    assert bits(caught) == bits(plain)
    kinds = [row["kind"] for row in read_metrics(Path(caught.out_dir) / "metrics.jsonl")]
    assert kinds[:3] == ["run", "oom", "rehearsal"]


def test_a_rehearsal_skips_an_evaluation_that_does_not_fit(tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*look: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "train", lambda *loop: None)
        patch.setattr(GPT, "token_losses", no_room)
        train(tiny_config(tmp_path, rehearse=True))
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert rows[-1]["kind"] == "rehearsal"
    assert "Out of memory even with a single window" in next(row["text"] for row in rows if row["kind"] == "warning")


def test_a_rehearsal_that_does_not_fit_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*batch: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(GPT, "accumulate", no_room)
    with pytest.raises(DeviceError, match="no smaller fallback plan") as raised:
        run_module.run(tiny_config(tmp_path, rehearse=True).to_dict(), [], lambda: False, fallbacks=())
    assert "saved" not in raised.value.what
    assert not (tmp_path / "out" / "checkpoints").exists()


# ---- the command, on a CPU


def test_the_command_passes_the_config_and_the_file_to_the_worker(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[WorkerConfig] = []
    monkeypatch.setattr(rehearse, "run_worker", lambda worker: (given.append(worker), (0, {}))[1])
    config = tiny_config(tmp_path)
    said = {"dataset": config.dataset, "device": "cpu", "batch_size": 8, "out": str(tmp_path / "r.json")}
    assert rehearse.rehearse([Assignment(key, value, "") for key, value in said.items()]) == 0
    order, = given
    assert (order.config["batch_size"], order.rehearsal) == (8, str(tmp_path / "r.json"))
    assert not Path("out").exists()


def test_an_unwritable_file_is_reported_before_the_rehearsal(tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[WorkerConfig] = []
    monkeypatch.setattr(rehearse, "run_worker", lambda worker: (started.append(worker), (0, {}))[1])
    config = tiny_config(tmp_path)

    def said(out: Path) -> list[Assignment]:
        return [Assignment(key, value, "") for key, value in (("dataset", config.dataset), ("device", "cpu"),
                                                              ("out", str(out)))]

    with pytest.raises(UsageError, match="is a folder") as caught:
        rehearse.rehearse(said(tmp_path))
    assert caught.value.fix == f"-o {tmp_path / 'rehearse.json'}"
    assert not started
    assert rehearse.rehearse(said(tmp_path / "new" / "r.json")) == 0
    assert (tmp_path / "new").is_dir()


def test_only_an_earlier_rehearsal_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               card: Callable[[float], None],
                                               capsys: pytest.CaptureFixture[str]) -> None:
    card(1.0)
    monkeypatch.setattr(rehearse, "run_worker", lambda worker: (0, {}))
    config, out = tiny_config(tmp_path), tmp_path / "r.json"
    said = [Assignment(key, value, "") for key, value in (("dataset", config.dataset), ("device", "cpu"),
                                                          ("out", str(out)))]
    out.write_text('{"mine": 1}')
    with pytest.raises(UsageError, match="did not write it") as caught:
        rehearse.rehearse(said)
    assert "-o " in caught.value.fix
    assert out.read_text() == '{"mine": 1}'
    out.unlink()
    rehearse_only(config.to_dict(), [], {}, str(out))
    assert "replaced" not in capsys.readouterr().out
    assert rehearse.rehearse(said) == 0
    rehearse_only(config.to_dict(), [], {}, str(out))
    assert "(it replaced the one that was there)" in capsys.readouterr().out


def test_on_a_cpu_nothing_is_measured_and_no_file_is_written(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tiny_config(tmp_path), tmp_path / "rehearsal.json"
    rehearse_only(config.to_dict(), ["a note"], {}, str(out))
    said = capsys.readouterr().out
    assert "note      a note" in said
    assert "There is no plan to compare with" in said
    assert "no file was written" in said
    assert not out.exists()
    assert not (tmp_path / "out").exists()


# ---- on a fake GPU with fake counters


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A CPU that passes for an RTX 4070 whose counters show the forecast times a factor."""
    def pretend(factor: float) -> None:
        held: list[PhaseMemory] = []

        def plan_on_device(config: RunConfig, choice: Any, others: Any = None,
                           fallbacks: Any = None) -> DeviceMemoryPlan:
            budget = Budget("RTX 4070", 12 * GiB, GiB, 11 * GiB, 300 * MiB)
            plan = plan_for(replace(config, dtype="float32", compile=False), Target(Platform((8, 9)), budget, None))
            phases = phases_of(plan.forecast)
            held[:] = [phases[phase] for phase in ("load", "first_eval", "first_train", "train", "eval", "save")]
            return DeviceMemoryPlan(config, "cpu", plan, fallbacks=())

        def read(device: str) -> MemoryReading:
            now = held.pop(0) if len(held) > 1 else held[0]
            return MemoryReading(now.allocated, now.reserved, int(now.allocated * factor), int(now.reserved * factor))

        for module in ("training.run", "training.reporter", "training.device_memory", "training.loop",
                       "engine.evaluate", "engine.device"):
            monkeypatch.setattr(f"fitgpt.{module}.read_memory", read)
        monkeypatch.setattr("fitgpt.training.run.plan_on_device", plan_on_device)

    return pretend


def test_train_prints_its_plan_rehearses_and_ends_with_the_measurements(
        tmp_path: Path, card: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    card(1.0)
    train(tiny_config(tmp_path, max_iters=2))
    said = capsys.readouterr().out
    assert "memory    needs" in said
    assert "used by others" in said
    assert "rehearsed in" in said
    assert said.count("memory, measured against forecast") == 2  # after the rehearsal, and at the end
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    plan = next(row for row in rows if row["kind"] == "plan")
    assert plan["phases"]["train"]["allocated_bytes"] > 0
    assert plan["owners_at_peak"][0]["nbytes"] > 0
    measured = rows[-1]
    assert measured["kind"] == "plan_measured"
    assert measured["phases"]["first_eval"] == plan["phases"]["first_eval"]
    assert rows[1]["kind"] == "plan"


def test_a_resumed_run_allocates_in_the_forecast_order(tmp_path: Path, card: Callable[[float], None],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is of an evaluation first: a run that goes straight on to train may not find room where one that has
    evaluated does."""
    card(1.0)
    config = tiny_config(tmp_path, max_iters=2, eval_interval=2, rehearse=False)
    train(config)
    first, losses_before = bits(config), losses(config)
    done: list[str] = []
    for name in ("token_losses", "accumulate"):
        real = getattr(GPT, name)
        monkeypatch.setattr(GPT, name, lambda self, *given, _name=name, _real=real: (
            done.append(_name), _real(self, *given))[1])
    card(1.0)
    train(replace(config, init_from="resume", max_iters=4))
    assert done[0] == "token_losses"
    assert "accumulate" in done
    rows = read_metrics(Path(config.out_dir) / "metrics.jsonl")
    assert rows[-1]["kind"] == "plan_measured"
    assert {"first_eval", "first_train", "eval"} <= set(rows[-1]["phases"])
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 2, 4]  # a look is no evaluation
    whole = tiny_config(tmp_path / "whole", max_iters=4, eval_interval=2, rehearse=False)
    train(whole)
    assert bits(whole) == bits(config) != first
    assert losses(whole) == losses(config) != losses_before


def test_a_stopped_run_still_compares_plan_and_measurement(tmp_path: Path, card: Callable[[float], None]) -> None:
    card(1.0)
    config, stop_checks = tiny_config(tmp_path), iter(range(100))
    with pytest.raises(Interrupted):
        run_module.run(config.to_dict(), [], lambda: next(stop_checks) > 8)
    assert read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["kind"] == "plan_measured"


def test_the_peak_of_every_phase_is_recorded_while_the_run_goes_on(tmp_path: Path,
                                                                   card: Callable[[float], None]) -> None:
    """For `fitgpt watch`; without a rehearsal, which measures all phases by itself."""
    card(1.0)
    train(tiny_config(tmp_path, max_iters=4, eval_interval=2, rehearse=False))
    rows = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if row["kind"] != "plan_measured"]
    planned = phases_from(last_row(rows, "plan"))
    measured = measured_peaks(rows)
    assert list(measured) == ["load", "first_eval", "first_train", "train", "eval", "save"]
    assert measured["load"] == planned["load"]
    assert all(0 < peak.allocated <= peak.reserved for peak in measured.values())


def test_a_full_disk_at_the_end_does_not_hide_why_the_run_ended(tmp_path: Path, card: Callable[[float], None],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    card(1.0)
    real, stop_checks = RunFolder.append_metrics, iter(range(100))

    def full(self: RunFolder, row: Any) -> None:
        if row["kind"] == "plan_measured":
            raise SystemFault("No space left on device.")
        real(self, row)

    monkeypatch.setattr(RunFolder, "append_metrics", full)
    with pytest.raises(Interrupted):
        run_module.run(tiny_config(tmp_path).to_dict(), [], lambda: next(stop_checks) > 8)


def test_a_phase_that_exceeds_its_forecast_fails_the_rehearsal(tmp_path: Path, card: Callable[[float], None],
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tiny_config(tmp_path), tmp_path / "rehearsal.json"
    card(1.005)
    rehearse_only(config.to_dict(), [], {}, str(out))
    card(1.02)
    with pytest.raises(DoesNotFit, match=r"More memory was used than forecast. load: .* 2.0% more.") as raised:
        rehearse_only(config.to_dict(), [], {}, str(out))
    assert raised.value.exit_code == 1
    assert "+2.00 %" in capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["over_forecast"]
    assert (document["schema"], document["config"]["batch_size"]) == (1, 4)


def test_out_of_memory_fails_the_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*batch: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")

    monkeypatch.setattr(GPT, "accumulate", fails)
    with pytest.raises(DoesNotFit, match=r"Tried to allocate 2.00 GiB") as raised:
        rehearse_only(tiny_config(tmp_path).to_dict(), [], {}, str(tmp_path / "r.json"))
    assert "--options" in raised.value.fix


def test_the_table_marks_phases_that_agree_to_the_byte() -> None:
    planned = {"load": PhaseMemory(GiB, GiB), "train": PhaseMemory(2 * GiB, 3 * GiB)}
    lines = plan_vs_measured(planned, {"load": PhaseMemory(GiB, GiB), "train": PhaseMemory(
        int(1.98 * GiB), 3 * GiB)}).splitlines()
    assert lines[2].split() == ["load", "1.00", "GiB", "1.00", "GiB", "=", "1.00", "GiB", "1.00", "GiB", "="]
    assert "-1.00 %" in lines[3]
