"""A run that diverges keeps its good checkpoint, ends with exit code 6, and prints a command that resumes from it."""

from __future__ import annotations

import errno
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

from fitgpt import GPT
from fitgpt.config.argv import walk
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import NumericsError
from fitgpt.runs.metrics import Evaluation, MemoryReading, SplitLoss, read_metrics
from fitgpt.training.checkpoint import DIVERGED, GOOD, UNKNOWN, load, set_aside_diverged
from fitgpt.training.divergence import judge, suggest_lower_lr
from fitgpt.training.run import run
from tests.checkpoints import list_checkpoints, save_step, steps
from tests.helpers import tiny_config

EXPLODES = {"learning_rate": 1e4, "min_lr": 1e4, "decay_lr": False, "grad_clip": 0.0}


def fitgpt(command: str | list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    argv = shlex.split(command)[1:] if isinstance(command, str) else command
    return subprocess.run([sys.executable, "-m", "fitgpt", *argv], cwd=folder, capture_output=True, text=True,
                          timeout=120, env={**os.environ, "COLUMNS": "200"})


def flags_of(config: RunConfig, **changes: Any) -> list[str]:
    settings = {**config.to_dict(), **changes}
    return [f"--{name}={value}" for name, value in settings.items() if value != RunConfig().to_dict()[name]]


def checkpoints(config: RunConfig) -> list[int]:
    return steps(Path(config.out_dir) / "checkpoints")


# ---- whole runs, as a user starts them

def test_the_printed_command_resumes_from_the_good_checkpoint_and_trains_on(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, save_interval=3)
    assert fitgpt(["train", *flags_of(config)], tmp_path).returncode == 0
    exploding = fitgpt(["train", "--resume", f"--out_dir={config.out_dir}", "--max_iters=400",
                        *(f"--{name}={value}" for name, value in EXPLODES.items())], tmp_path)
    assert exploding.returncode == 6
    assert "Its last good checkpoint is of step 20:" in exploding.stderr
    assert "warning: Gradients are not finite" in exploding.stdout + exploding.stderr
    assert checkpoints(config)[-1] == 20
    moved_to = Path(config.out_dir) / "checkpoints" / "set-aside-diverged-1"
    assert str(moved_to) in exploding.stderr
    assert min(steps(moved_to)) > 20

    remedy = exploding.stderr.strip().splitlines()[-1].strip()
    assert remedy.startswith("fitgpt train --resume")
    resumed = fitgpt(f"{remedy} --max_iters=30", tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert checkpoints(config)[-1] == 30
    last = [row for row in read_metrics(Path(config.out_dir) / "metrics.jsonl") if row["kind"] == "eval"][-1]
    assert last["losses"][1]["mean"] < 3


@pytest.mark.parametrize("cause", [
    {**EXPLODES, "save_interval": 1}, {"weight_decay": 1e30, "save_interval": 1},
    {**EXPLODES, "step_in_backward": True, "gradient_accumulation_steps": 1, "save_interval": 1},
    {**EXPLODES, "max_iters": 5, "lr_decay_iters": 5}],
                         ids=["learning rate", "weight decay", "step in backward", "five steps"])
def test_a_run_that_diverges_before_a_good_evaluation_can_be_restarted_in_its_folder(
        tmp_path: Path, cause: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoints were never evaluated as good, so none of them is offered."""
    config = tiny_config(tmp_path, **cause)
    with pytest.raises(NumericsError, match="no checkpoint is known to be good") as ended:
        run(config.to_dict(), [], lambda: False)
    assert "best val loss" not in capsys.readouterr().out
    assert checkpoints(config) == []
    remedy = walk(ended.value.fix.removeprefix("Start again with ").split(), RunConfig)
    again = replace(config, **{each.key: each.value for each in remedy})
    run(again.to_dict(), [], lambda: False)
    assert checkpoints(config)[-1] == again.max_iters


def test_a_loss_that_is_finite_but_far_above_the_last_good_one_has_diverged(tmp_path: Path) -> None:
    """Also where evaluations cover other windows than before, so that the first of them was the best."""
    config = tiny_config(tmp_path)
    run(config.to_dict(), [], lambda: False)
    worse = replace(config, init_from="resume", max_iters=30, eval_iters=3, eval_interval=1, learning_rate=3.0,
                    min_lr=3.0, decay_lr=False)
    with pytest.raises(NumericsError, match=r"far above the last good one.*good checkpoint is of step 20") as ended:
        run(worse.to_dict(), [], lambda: False)
    assert "--learning_rate=0.01 --min_lr=0.001 --decay_lr=True" in ended.value.fix
    rows = read_metrics(Path(config.out_dir) / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "eval" and row["best"]][-1] == 20


def test_a_run_that_cannot_skip_steps_stops_at_the_first_loss_that_is_not_finite(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **{**EXPLODES, "max_iters": 1000, "step_in_backward": True,
                                      "gradient_accumulation_steps": 1, "log_interval": 5, "eval_interval": 1000})
    with pytest.raises(NumericsError, match="The loss of step 5 is not finite"):
        run(config.to_dict(), [], lambda: False)


def test_a_disk_that_cannot_be_written_does_not_hide_the_divergence(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fitgpt.training.checkpoint.set_aside_diverged", full)
    with pytest.raises(NumericsError, match=r"The run has diverged.*No space left"):
        run(tiny_config(tmp_path, **EXPLODES).to_dict(), [], lambda: False)


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

def test_checkpoints_of_skipped_steps_never_replace_a_good_one(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path, step, keep_last=2, status=GOOD)
    for step in range(31, 60):
        save_step(tmp_path, step, keep_last=2, status=DIVERGED)
    assert steps(tmp_path) == [20, 30, 58, 59]


def test_the_latest_good_checkpoint_is_kept_beside_later_ones_without_evaluation(tmp_path: Path) -> None:
    """Weights may explode for some steps before a gradient overflows."""
    save_step(tmp_path, 5, best=True, keep_last=2, status=GOOD)
    save_step(tmp_path, 10, keep_last=2, status=GOOD)
    for step in (11, 12, 13, 14):
        save_step(tmp_path, step, keep_last=2, status=UNKNOWN)
    assert steps(tmp_path) == [5, 10, 13, 14]


def test_a_run_that_recovers_prunes_as_usual(tmp_path: Path) -> None:
    for step, status in ((1, GOOD), (2, DIVERGED), (3, DIVERGED), (4, GOOD), (5, GOOD)):
        save_step(tmp_path, step, keep_last=2, status=status)
    assert steps(tmp_path) == [4, 5]


# ---- what is set aside

def test_checkpoints_after_the_last_good_one_are_moved_away(tmp_path: Path) -> None:
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


def test_a_checkpoint_that_was_not_evaluated_does_not_count_as_good(tmp_path: Path) -> None:
    for step, status in ((1, UNKNOWN), (2, UNKNOWN), (3, DIVERGED)):
        save_step(tmp_path, step, keep_last=9, status=status)
    good, moved, folder = set_aside_diverged(tmp_path)
    assert (good, moved) == (None, [1, 2, 3])
    assert steps(folder) == [1, 2, 3]


def loss(split: str, mean: float, windows: int = 8) -> SplitLoss:
    return SplitLoss(split, mean, 0.0, windows, 16)


@pytest.mark.parametrize(("train", "val", "windows", "status"), [
    (3.1, 3.0, 8, GOOD), (3.9, 3.0, 8, GOOD), (4.1, 3.0, 8, DIVERGED), (3.0, 9.0, 8, GOOD),  # it overfits
    (4.1, 3.0, 4, GOOD), (6.1, 3.0, 4, DIVERGED),  # other windows: beside chance, which is log 148 = 5.0
    (math.nan, 3.0, 8, DIVERGED), (3.0, math.inf, 8, DIVERGED)])
def test_an_evaluation_is_good_if_it_is_finite_and_near_the_last_good_one(train: float, val: float, windows: int,
                                                                          status: str) -> None:
    evaluation = Evaluation(step=1, losses=(loss("train", train, windows), loss("val", val, windows)),
                            tokens_per_s=1.0, memory=MemoryReading())
    assert judge(evaluation, loss("train", 3.0), 148) == status


def test_advice_first_undoes_changes_and_then_lowers_the_learning_rate() -> None:
    usual = RunConfig(learning_rate=6e-4, min_lr=6e-5, decay_lr=True, grad_clip=1.0, weight_decay=0.1)
    assert suggest_lower_lr(replace(usual, **EXPLODES), usual) == [
        "--learning_rate=0.0006", "--min_lr=6e-05", "--decay_lr=True", "--grad_clip=1.0"]
    assert suggest_lower_lr(replace(usual, weight_decay=1e30), usual) == ["--weight_decay=0.1"]
    assert suggest_lower_lr(usual, usual) == ["--learning_rate=0.0002", "--min_lr=2e-05"]
    assert suggest_lower_lr(replace(usual, learning_rate=2e-4, min_lr=2e-5), usual) == [
        "--learning_rate=6.7e-05", "--min_lr=6.7e-06"]
