"""Several ranks train as one process does: the same steps, decisions and files, whatever happens to one of them."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import Interrupted, SystemFault, UsageError
from fitgpt.runs.folder import step_folders
from fitgpt.training import loop, oom_recovery
from tests.failing_allocations import FALLBACKS, FailingAllocations
from tests.helpers import tiny_config
from tests.rank_processes import LOST, killed_at_random, logs, trained

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"), pytest.mark.slow, pytest.mark.ci]

# Without clipping: its factor is float32, whatever the weights are.
SETTINGS: dict[str, Any] = dict(gradient_accumulation_steps=6, n_embd=16, n_layer=1, batch_size=2, grad_clip=0.0)


def config_in(folder: Path, **changes: Any) -> RunConfig:
    return tiny_config(folder, **{**SETTINGS, **changes})


def weights(config: RunConfig) -> dict[str, Any]:
    return load_file(step_folders(Path(config.out_dir) / "checkpoints")[-1].path / "model.safetensors")


def farthest(one: RunConfig, other: RunConfig) -> float:
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    ours, theirs = weights(one), weights(other)
    return max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)


def rows(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    lines = (Path(config.out_dir) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


# ---- the same training

@pytest.mark.parametrize(("bias", "tolerance"), [(False, 1e-12), (True, 1e-9)])
def test_two_and_three_ranks_train_as_one_in_float64(tmp_path: Path, bias: bool, tolerance: float) -> None:
    runs = []
    for world in (1, 2, 3):
        config = config_in(tmp_path / str(world), bias=bias, max_iters=50, lr_decay_iters=50, eval_interval=25)
        assert trained(config, world, float64=True) == [0] * world, logs(config)
        runs.append(config)
    assert len(rows(runs[0], "step")) == 50
    assert max(farthest(run, runs[0]) for run in runs[1:]) <= tolerance
    first, *others = (rows(run, "eval")[0]["losses"] for run in runs)
    assert all(losses == first for losses in others)  # of the same weights: every digit
    for run in runs[1:]:
        ours, theirs = ([row["loss"] for row in rows(each, "step")] for each in (run, runs[0]))
        assert ours == pytest.approx(theirs)


def test_a_run_resumes_on_another_number_of_ranks_at_the_same_step_with_the_same_state(tmp_path: Path) -> None:
    whole = config_in(tmp_path / "whole", dropout=0.1)
    assert trained(whole, 1, float64=True) == [0]
    config = config_in(tmp_path / "parts", dropout=0.1)
    for until, world in ((7, 2), (13, 3), (20, 1)):
        part = replace(config, max_iters=until, save_interval=1, init_from="resume" if until > 7 else "scratch")
        assert trained(part, world, float64=True) == [0] * world, logs(config)
    assert farthest(config, whole) <= 1e-12  # dropout's masks, too, do not depend on the number of ranks


def test_only_rank_0_writes_and_its_checkpoint_and_record_name_all_ranks(tmp_path: Path) -> None:
    config = config_in(tmp_path, max_iters=2)
    assert trained(config, 2) == [0, 0], logs(config)
    [started] = rows(config, "run")
    assert [each["device"] for each in started["ranks"]] == ["cpu", "cpu"]
    assert json.loads((Path(config.out_dir) / "lock").read_text())["pid"] == started["ranks"][0]["pid"]
    assert [row["step"] for row in rows(config, "step")] == [0, 1]
    assert len(rows(config, "step")[0]["rank_memory"]) == 2
    assert (tmp_path / "rank-0.log").read_text().count("iter 1:") == 1
    assert (tmp_path / "rank-1.log").read_text() == ""


def test_a_stop_request_on_one_rank_stops_all_at_the_same_step_and_saves(tmp_path: Path) -> None:
    config = config_in(tmp_path, max_iters=10_000)
    asked = iter([False] * 40)
    codes = trained(config, 3, stop=lambda rank: lambda: rank == 1 and next(asked, True))
    assert codes == [Interrupted.exit_code] * 3, logs(config)
    assert step_folders(Path(config.out_dir) / "checkpoints")


# ---- out of memory on one rank

def failing_on_rank(rank: int, step: int, *, times: int, after_optimizer: bool = False) -> Any:
    """On one rank, the first allocation of a step fails, or the first in the optimizer's step."""
    target, name = (loop, "apply_gradients") if after_optimizer else (oom_recovery, "train_step")

    @contextmanager
    def failing() -> Iterator[None]:
        work, left = getattr(target, name), times

        def fails(*given: Any, **named: Any) -> Any:
            nonlocal left
            training = given[0] if not after_optimizer else None
            due = training.step == step if training else True
            if not left or not due:
                return work(*given, **named)
            left -= 1
            with FailingAllocations([30] if after_optimizer else [3]):
                return work(*given, **named)

        setattr(target, name, fails)
        yield

    return lambda on: failing() if on == rank else nullcontext()


def test_all_ranks_retry_when_one_is_out_of_memory_and_the_weights_are_the_same(tmp_path: Path) -> None:
    plain, config = config_in(tmp_path / "plain", max_iters=4), config_in(tmp_path / "failing", max_iters=4)
    assert trained(plain, 2) == [0, 0]
    assert trained(config, 2, around=failing_on_rank(1, 2, times=1)) == [0, 0], logs(config)
    [row] = rows(config, "oom")
    assert row["step"] == 2
    assert "rank 1: CUDA out of memory" in row["text"]
    assert farthest(config, plain) == 0


def test_all_ranks_step_down_together_when_one_is_out_of_memory_again(tmp_path: Path) -> None:
    settings = dict(batch_size=2, gradient_accumulation_steps=2, max_iters=4)
    plain, config = config_in(tmp_path / "plain", **settings), config_in(tmp_path / "failing", **settings)
    assert trained(plain, 2, float64=True) == [0, 0]
    assert trained(config, 2, float64=True, around=failing_on_rank(0, 1, times=2), fallbacks=FALLBACKS) == [0, 0], \
        logs(config)
    assert [row["changes"] for row in rows(config, "step_down")] == [FALLBACKS[0].changes]
    assert farthest(config, plain) <= 1e-12


def test_all_ranks_roll_back_when_one_is_out_of_memory_in_the_optimizer(tmp_path: Path) -> None:
    settings = dict(optimizer="muon", max_iters=4, save_interval=1)
    plain, config = config_in(tmp_path / "plain", **settings), config_in(tmp_path / "failing", **settings)
    assert trained(plain, 2) == [0, 0]
    assert trained(config, 2, around=failing_on_rank(1, 0, times=1, after_optimizer=True)) == [0, 0], logs(config)
    assert rows(config, "went_back")
    assert farthest(config, plain) == 0


# ---- ranks that differ, and ranks that die

@pytest.mark.parametrize(("change", "what"), [
    (dict(learning_rate=2e-2), "learning_rate=0.01 on rank 0 and 0.02 on rank 1"),
    (dict(dataset="other"), "The ranks differ in data")])
def test_ranks_with_different_configs_or_data_do_not_start(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    from tests.helpers import write_dataset

    config = config_in(tmp_path)
    if "dataset" in change:
        change = dict(dataset=write_dataset(tmp_path / "other", tokens=5000))
    codes = trained(config, 2, other=lambda rank, config: replace(config, **change) if rank else config)
    assert codes == [UsageError.exit_code] * 2
    assert what in logs(config)


def test_a_run_whose_ranks_are_killed_at_random_ends_with_the_same_weights(tmp_path: Path) -> None:
    settings = dict(max_iters=40, lr_decay_iters=40, eval_interval=11, save_interval=2, log_interval=5, dropout=0.1)
    whole, config = config_in(tmp_path / "whole", **settings), config_in(tmp_path / "killed", **settings)
    assert trained(whole, 2) == [0, 0]
    moments, kills = random.Random(0), 0
    while (codes := killed_at_random(config, 2, victim=kills % 2, delay=moments.uniform(0, 0.1))) != [0, 0]:
        assert set(codes) <= {-9, LOST, 0}, (codes, logs(config))
        kills += 1
    assert kills >= 8
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (Path(each.out_dir) / "checkpoints" / "step-00000040" / name for each in (config, whole))
        assert ours.read_bytes() == theirs.read_bytes()


# ---- as commands

def arguments(config: RunConfig) -> list[str]:
    defaults = RunConfig().to_dict()
    return [f"--{key}={value}" for key, value in config.to_dict().items() if value != defaults[key]]


def killed_after_a_checkpoint(process: subprocess.Popen[str], config: RunConfig, rank: int) -> str:
    """Kills the worker of a rank; what the process printed in all."""
    try:
        while not step_folders(Path(config.out_dir) / "checkpoints"):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.kill(rows(config, "run")[-1]["ranks"][rank]["pid"], signal.SIGKILL)
        return process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.communicate()


def test_when_a_rank_dies_the_command_names_it_and_the_printed_command_resumes(tmp_path: Path) -> None:
    config = config_in(tmp_path, max_iters=100_000, save_interval=2, gpus="2xcpu")
    process = subprocess.Popen([sys.executable, "-P", "-m", "fitgpt", "train", *arguments(config)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed = killed_after_a_checkpoint(process, config, rank=1)
    assert process.returncode == SystemFault.exit_code
    assert "fitgpt: Rank 1 of 2 (cpu): The system killed the training process (signal 9)" in printed
    saved = step_folders(Path(config.out_dir) / "checkpoints")[-1].step
    command = next(line for line in printed.splitlines() if "--resume" in line).partition(": fitgpt ")[2]
    resumed = subprocess.run([sys.executable, "-P", "-m", "fitgpt", *shlex.split(command), f"--max_iters={saved + 1}"],
                             capture_output=True, text=True, timeout=120)
    assert resumed.returncode == 0, resumed
    assert rows(config, "step")[-1]["step"] == saved


def test_torchrun_restarts_a_run_whose_rank_died_from_its_last_checkpoint(tmp_path: Path) -> None:
    config = config_in(tmp_path, max_iters=120, lr_decay_iters=120, save_interval=2, log_interval=50)
    process = subprocess.Popen([sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node=2",
                                "--max-restarts=1", "--monitor-interval=0.1", "--standalone", "-m", "fitgpt", "train",
                                *arguments(config)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed = killed_after_a_checkpoint(process, config, rank=0)
    assert process.returncode == 0, printed
    assert [bool(row["start_step"]) for row in rows(config, "run")] == [False, True]
    assert step_folders(Path(config.out_dir) / "checkpoints")[-1].step == 120
