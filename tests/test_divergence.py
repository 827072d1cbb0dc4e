"""A run that diverges keeps its good checkpoint, ends with exit code 6, and prints a command that resumes from it."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from checkpoints import save_step, steps
from fitgpt import GPT
from fitgpt.config import RunConfig
from fitgpt.engine.checkpoint import DIVERGED, GOOD, UNKNOWN, list_checkpoints, load, set_aside_diverged
from fitgpt.engine.divergence import evaluation_status, smaller_steps
from fitgpt.metrics import read_metrics
from fitgpt.nouns import Evaluation, MemoryReading, SplitLoss
from fitgpt.run import run
from helpers import tiny_config

EXPLODES = {"learning_rate": 1e4, "min_lr": 1e4, "decay_lr": False, "grad_clip": 0.0}


def fitgpt(command: str | list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    argv = shlex.split(command)[1:] if isinstance(command, str) else command
    return subprocess.run([sys.executable, "-m", "fitgpt", *argv], cwd=folder, capture_output=True, text=True,
                          timeout=120, env={**os.environ, "COLUMNS": "200"})


def flags_of(config: RunConfig, **changes: Any) -> list[str]:
    told = {**config.to_dict(), **changes}
    return [f"--{name}={value}" for name, value in told.items() if value != RunConfig().to_dict()[name]]


def checkpoints(config: RunConfig) -> list[int]:
    return steps(Path(config.out_dir) / "checkpoints")


# ---- whole runs, as a user starts them

def test_the_command_that_is_printed_resumes_from_the_good_checkpoint_and_trains_on(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, save_interval=3)
    assert fitgpt(["train", *flags_of(config)], tmp_path).returncode == 0
    exploding = fitgpt(["train", "--resume", f"--out_dir={config.out_dir}", "--max_iters=400",
                        *(f"--{name}={value}" for name, value in EXPLODES.items())], tmp_path)
    assert exploding.returncode == 6
    assert "Its last good checkpoint is of step 20:" in exploding.stderr
    assert "warning: Gradients are not finite" in exploding.stdout + exploding.stderr
    assert checkpoints(config)[-1] == 20
    aside = Path(config.out_dir) / "checkpoints" / "set-aside-diverged-1"
    assert str(aside) in exploding.stderr
    assert min(steps(aside)) > 20

    remedy = exploding.stderr.strip().splitlines()[-1].strip()
    assert remedy.startswith("fitgpt train --init_from=resume")
    resumed = fitgpt(f"{remedy} --max_iters=30", tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert checkpoints(config)[-1] == 30
    last = [row for row in read_metrics(Path(config.out_dir) / "metrics.jsonl") if row["kind"] == "eval"][-1]
    assert last["losses"][1]["mean"] < 3


@pytest.mark.parametrize("cause", [EXPLODES, {"weight_decay": 1e30}], ids=["learning rate", "weight decay"])
def test_a_run_too_short_for_max_skipped_steps_ends_with_exit_code_6_and_can_be_started_again(
        tmp_path: Path, cause: dict[str, Any]) -> None:
    config = tiny_config(tmp_path)
    ended = fitgpt(["train", *flags_of(config, **cause)], tmp_path)
    assert ended.returncode == 6
    assert "there is no good checkpoint" in ended.stderr
    assert "best val loss" not in ended.stdout
    assert checkpoints(config) == []
    remedy = ended.stderr.strip().splitlines()[-1].strip().removeprefix("Start again with ")
    again = fitgpt(["train", *flags_of(config, **cause), *remedy.split()], tmp_path)  # in the same folder
    assert again.returncode == 0, again.stderr


def test_a_run_whose_last_step_was_skipped_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 a loss scale that has grown too large is found by skipping a step; the weights are sound."""
    calls, accumulate = count(1), GPT.accumulate

    def overflow_in_the_last_step(self: GPT, inputs: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        return accumulate(self, inputs, targets, scale * (math.inf if next(calls) > 4 else 1))

    monkeypatch.setattr(GPT, "accumulate", overflow_in_the_last_step)
    config = tiny_config(tmp_path, max_iters=3, dtype="float16")
    run(config.to_dict(), [], lambda: False)
    assert [each.status for each in list_checkpoints(Path(config.out_dir) / "checkpoints")] == [DIVERGED]
    reports = [row for row in read_metrics(Path(config.out_dir) / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["skipped"] for row in reports] == [0, 0, 1]


# ---- which checkpoints are kept

def test_checkpoints_of_skipped_steps_never_push_a_good_one_out(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path, step, keep_last=2, status=GOOD)
    for step in range(31, 60):
        save_step(tmp_path, step, keep_last=2, status=DIVERGED)
    assert steps(tmp_path) == [20, 30, 58, 59]


def test_the_latest_good_one_outlives_later_ones_that_were_not_evaluated(tmp_path: Path) -> None:
    """Weights may explode for some steps before a gradient overflows."""
    save_step(tmp_path, 5, best=True, keep_last=2, status=GOOD)
    save_step(tmp_path, 10, keep_last=2, status=GOOD)
    for step in (11, 12, 13, 14):
        save_step(tmp_path, step, keep_last=2, status=UNKNOWN)
    assert steps(tmp_path) == [5, 10, 13, 14]


def test_a_run_that_recovers_prunes_as_ever(tmp_path: Path) -> None:
    for step, status in ((1, GOOD), (2, DIVERGED), (3, DIVERGED), (4, GOOD), (5, GOOD)):
        save_step(tmp_path, step, keep_last=2, status=status)
    assert steps(tmp_path) == [4, 5]


# ---- what is set aside

def test_what_is_later_than_the_last_good_one_is_set_aside(tmp_path: Path) -> None:
    for step, status in ((1, GOOD), (2, GOOD), (3, UNKNOWN), (4, DIVERGED)):
        save_step(tmp_path, step, keep_last=9, status=status)
    good, moved, folder = set_aside_diverged(tmp_path)
    assert good is not None
    assert (good.step, moved) == (2, [3, 4])
    assert load(tmp_path).step == 2
    assert load(folder).step == 4  # nothing is lost
    save_step(tmp_path, 3, keep_last=9, status=DIVERGED)
    assert set_aside_diverged(tmp_path).folder != folder
    assert steps(folder) == [3, 4]


def test_without_an_evaluation_the_earliest_that_skipped_nothing_counts_as_good(tmp_path: Path) -> None:
    for step, status in ((1, UNKNOWN), (2, UNKNOWN), (3, DIVERGED)):
        save_step(tmp_path, step, keep_last=9, status=status)
    good, moved, _ = set_aside_diverged(tmp_path)
    assert good is not None
    assert (good.step, moved) == (1, [2, 3])


@pytest.mark.parametrize(("val", "train", "status"), [
    (3.1, 3.0, GOOD), (3.9, 3.0, GOOD), (4.1, 3.0, UNKNOWN), (1e8, 1e8, UNKNOWN), (math.nan, 3.0, DIVERGED),
    (3.0, math.inf, DIVERGED)])
def test_an_evaluation_vouches_for_weights_if_it_is_finite_and_near_the_best(val: float, train: float,
                                                                            status: str) -> None:
    losses = tuple(SplitLoss(split, mean, 0.0, 8, 16) for split, mean in (("train", train), ("val", val)))
    evaluation = Evaluation(step=1, losses=losses, tokens_per_s=1.0, memory=MemoryReading())
    assert evaluation_status(evaluation, SplitLoss("val", 3.0, 0.0, 8, 16)) == status


def test_what_to_start_again_with_removes_each_likely_cause() -> None:
    config = RunConfig(learning_rate=6e-4, min_lr=6e-5)
    assert smaller_steps(config) == ["--learning_rate=0.0002", "--min_lr=2e-05"]
    assert smaller_steps(replace(config, **EXPLODES)) == ["--learning_rate=0.0006", "--min_lr=6e-05", "--grad_clip=1.0",
                                                          "--weight_decay=0.1"]
