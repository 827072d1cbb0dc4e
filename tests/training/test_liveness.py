"""A stuck worker is ended with its stacks written; a worker without a supervisor, or asked to stop, never waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitgpt.training import liveness, supervisor
from fitgpt.training.liveness import Entry, Heartbeat, Watch, read_entry
from fitgpt.training.supervisor import WorkerConfig, run_worker
from tests.helpers import tiny_config

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
PATIENCE_S = 240.0  # a busy machine can take minutes to import torch


# ---- what may be silent, and for how long


def test_a_training_step_may_be_silent_for_a_minute_or_twenty_median_steps(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beat")
    for seconds, limit in ((0.1, 1800), (0.1, 1800), (0.1, 60), (10, 60), (10, 60), (10, 101), (10, 200)):
        heartbeat.reported(seconds)
        heartbeat.advanced(7.5)
        assert read_entry(tmp_path / "beat")[1:] == (limit, 7, "a training step")


def test_steps_that_are_queued_between_two_reports_are_no_silence() -> None:
    heartbeat = Heartbeat(log_interval=1000)
    for _ in range(3):
        heartbeat.reported(0.5)
    assert heartbeat.limit() == 2 * 1000 * 0.5


def test_everything_but_a_step_and_the_steps_after_out_of_memory_may_take_half_an_hour(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "beat")
    for _ in range(3):
        heartbeat.reported(0.1)
    heartbeat.begin("an evaluation")
    heartbeat.beat()
    assert read_entry(tmp_path / "beat") == Entry(2, 1800, -1, "an evaluation")
    heartbeat.forget()
    heartbeat.advanced(1)
    assert read_entry(tmp_path / "beat").limit == 1800


def test_only_time_in_which_the_supervisor_runs_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-Z and `fg` an hour later the worker is not stuck."""
    clock = iter((0.0, 3600.0, 3601.0, 3601.5))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    watch = Watch(tmp_path / "none", poll_s=1.0)
    for quiet in (2.0, 3.0, 3.5):
        assert not watch.is_stuck()
        assert watch.quiet == quiet


# ---- real processes


def test_a_stopped_worker_is_ended_with_its_stacks_and_the_run_can_be_resumed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(supervisor.tempfile, "tempdir", None)
    config = tiny_config(tmp_path, max_iters=3000, eval_interval=3000, save_interval=5, log_interval=1)

    def stop_it() -> None:
        """In a training step after the first checkpoint."""
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            time.sleep(0.02)
            entry = next(map(read_entry, tmp_path.glob("fitgpt-*/*/heartbeat")), Entry())
            if entry.step > 6:
                worker = json.loads((Path(config.out_dir) / "lock").read_text())["pid"]
                os.kill(worker, signal.SIGSTOP)
                if next(map(read_entry, tmp_path.glob("fitgpt-*/*/heartbeat"))).doing == "a training step":
                    return
                os.kill(worker, signal.SIGCONT)

    stopper = threading.Thread(target=stop_it)
    stopper.start()
    code, report = run_worker(WorkerConfig(config.to_dict(), [], stuck_s=5.0))
    stopper.join()
    assert code == report["code"] == 75
    assert "no progress for" in report["what"]
    assert "in a training step, after step" in report["what"]
    stacks = next(tmp_path.glob("fitgpt-stacks-*.txt"))
    assert str(stacks) in report["what"]
    assert "training/loop.py" in stacks.read_text()
    with pytest.raises(supervisor.Interrupted) as raised:
        supervisor.conclude(code, report, config)
    assert f"fitgpt train --resume --out_dir={config.out_dir}" in raised.value.fix


# The worker, whose data is on a disk that does not answer.
NO_ANSWER = """
import sys, time
from fitgpt.data import dataset
from fitgpt.engine import batches
from fitgpt.training import liveness, worker
liveness.GRACE_S, batches.CLOSE_S = 1.0, 0.1
def read(*_):
    print("reading", flush=True)
    time.sleep(1000)
dataset.Split.read = read
sys.exit(worker.main())
"""


@pytest.mark.parametrize("end", [lambda process: process.stdin.close(), lambda process: process.terminate()],
                         ids=["its supervisor dies", "SIGTERM"])
def test_a_worker_that_waits_for_a_batch_ends(tmp_path: Path, end: Callable[[Any], None]) -> None:
    config = tiny_config(tmp_path, eval_interval=100, eval_only=False)
    given = WorkerConfig({**config.to_dict(), "rehearse": False}, [], report=str(tmp_path / "report"))
    process = subprocess.Popen([sys.executable, "-c", NO_ANSWER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps(given.__dict__).encode() + b"\n")
    process.stdin.flush()
    assert any(b"reading" in line for line in process.stdout)
    end(process)
    try:
        assert process.wait(PATIENCE_S) == 75
    finally:
        process.kill()
        process.stdout.close()


def test_a_worker_without_a_supervisor_may_finish_its_step_and_its_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heartbeat = Heartbeat()
    heartbeat.reported(4.0)
    ends = []
    for doing in ("a training step", liveness.SAVING):
        heartbeat.begin(doing)
        ends.append(next(now for now in range(10_000) if heartbeat.grace_is_over(-now)))
    assert ends == [23, 601]
