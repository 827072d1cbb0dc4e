"""A run killed with SIGKILL at any moment, and resumed, ends with the weights of one that was never killed."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fitgpt.config.run_config import RunConfig
from fitgpt.runs.folder import step_folders
from fitgpt.training.run import run
from tests.helpers import tiny_config

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run_in_a_process(config: RunConfig) -> int:
    """Trains in a forked process of its own, so that it can be killed without loading torch again."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        run(config.to_dict(), [], lambda: False)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def resumable(config: RunConfig) -> RunConfig:
    started = step_folders(Path(config.out_dir) / "checkpoints")
    return replace(config, init_from="resume" if started else "scratch")


def last_step(folder: Path) -> int:
    return max((slot.step for slot in step_folders(folder)), default=0)


def killed_soon_after_progress(config: RunConfig, moments: random.Random) -> bool:
    """One life of the run: it is killed at a random moment after its first new checkpoint. True if it got through."""
    folder = Path(config.out_dir) / "checkpoints"
    before = last_step(folder)
    pid = run_in_a_process(resumable(config))
    while last_step(folder) <= before:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert status == 0
            return True
        time.sleep(0.002)
    time.sleep(moments.uniform(0, 0.12))
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        assert status == 0
        return True
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def test_a_run_killed_many_times_ends_with_the_same_weights(tmp_path: Path) -> None:
    """In float16, with its loss scale, and with dropout. Hundreds of kills, of whole commands: tests/campaign."""
    torch.set_num_threads(1)  # a forked process has no other threads of ours
    settings = dict(max_iters=60, lr_decay_iters=60, eval_interval=7, save_interval=3, log_interval=5, dropout=0.1,
                    dtype="float16")
    whole = tiny_config(tmp_path / "whole", **settings)
    assert os.waitpid(run_in_a_process(whole), 0)[1] == 0

    config = tiny_config(tmp_path / "killed", **settings)
    moments, kills = random.Random(0), 0
    while not killed_soon_after_progress(config, moments):
        kills += 1
    assert kills >= 8

    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (Path(c.out_dir) / "checkpoints" / "step-00000060" / name for c in (config, whole))
        assert ours.read_bytes() == theirs.read_bytes()
