"""`fitgpt train` in real processes: stop signals, crashes, and errors before the start."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fitgpt.config.fields import Assignment
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import DataError, DeviceError, FitError, Interrupted, SystemFault
from fitgpt.hardware.allocator_env import child_environment
from fitgpt.runs.folder import step_folders
from fitgpt.runs.metrics import read_metrics
from fitgpt.training import checkpoint, supervisor
from fitgpt.training.run import run
from fitgpt.training.supervisor import conclude, error_for_exit, read_report
from fitgpt.training.worker import as_fit_error
from tests.helpers import TINY, write_dataset

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")

PATIENCE_S = 240.0  # a busy machine can take minutes to import torch
ENDLESS = pytest.mark.xdist_group("endless")  # one process starts the run that these tests share
FOREVER = dict(max_iters=10_000_000, lr_decay_iters=10_000_000, eval_interval=10_000_000)


# Becomes `fitgpt …` with the signal named first ignored, as under nohup, and the others not: a shell's background
# job would come with SIGINT ignored.
LAUNCHER = """
import os, signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN if name == sys.argv[1] else signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "fitgpt", *sys.argv[2:]])
"""


class Run:
    """A `fitgpt train` in the background; its output goes to one file."""

    def __init__(self, folder: Path, *flags: str, ignoring: str = "none", **options: Any) -> None:
        self.out = folder / "a run"  # the space must survive into the command that resumes
        settings = {**TINY, "dataset": write_dataset(folder / "data"), "out_dir": self.out, **options}
        self._start(folder, ["train", *(f"--{key}={value}" for key, value in settings.items()), *flags], ignoring)

    def _start(self, folder: Path, argv: list[str], ignoring: str = "none") -> None:
        self._folder = folder
        self._log = folder / f"log-{len(list(folder.glob('log-*')))}"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", LAUNCHER, ignoring, *argv], stdout=log,
                                            stderr=subprocess.STDOUT)

    @property
    def printed_command(self) -> list[str]:
        """The command that resumes, as the last process printed it."""
        printed = re.search(r"fitgpt (train .*)", self.said)
        assert printed, self.said
        return shlex.split(printed[1])

    def resume_by_printed_command(self) -> None:
        self._start(self._folder, self.printed_command)

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def child(self) -> int:
        pid: int = json.loads((self.out / "lock").read_text())["pid"]
        return pid

    @property
    def last_step(self) -> int:
        rows = read_metrics(self.out / "metrics.jsonl")
        return max((row["step"] for row in rows if row["kind"] == "step"), default=-1)

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def wait_for_steps(self, count: int = 3) -> None:
        before = self.last_step
        self.wait_for(lambda: self.last_step >= before + count)

    def send(self, *signals: signal.Signals) -> None:
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.02)  # two of a kind at the same moment are one

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        if self.process.poll() is None:
            with suppress(OSError):  # it has no worker yet, or none any more
                os.kill(self.child, signal.SIGKILL)
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*flags: str, **more: Any) -> Run:
        runs.append(Run(tmp_path, *flags, **more))
        return runs[-1]

    yield begin
    for each in runs:
        each.end()


def state_of(pid: int) -> str:
    """'T' stopped, 'R' or 'S' alive, 'Z' ended, '' gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def short_command(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A `fitgpt train` that fails before it starts anything."""
    return subprocess.run([sys.executable, "-X", "importtime", "-m", "fitgpt", "train", *flags], text=True,
                          capture_output=True, timeout=PATIENCE_S, env={**os.environ, **environment})


def assert_torch_was_not_loaded(ended: subprocess.CompletedProcess[str]) -> None:
    assert "fitgpt.runs.folder" in ended.stderr  # the list of imports is there
    assert not re.search(r"\|\s+(torch|numpy)$", ended.stderr, re.MULTILINE)


# ---- stop requests


def test_every_stop_signal_saves_and_the_printed_command_resumes_bit_for_bit_even_if_its_output_is_closed(
        tmp_path: Path, start: Callable[..., Run]) -> None:
    length = dict(max_iters=150, lr_decay_iters=150, eval_interval=1000, dropout=0.1)
    stopped = start(**length)
    # a closing terminal sends SIGHUP twice, and a job system SIGTERM: neither is a second Ctrl-C
    for requests in ([signal.SIGINT], [signal.SIGTERM, signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]):
        if stopped.process.poll() is not None:
            stopped.resume_by_printed_command()
        stopped.wait_for_steps()
        stopped.send(*requests)
        assert stopped.exit_code() == 75, stopped.said
        saved = step_folders(stopped.out / "checkpoints")[-1].step
        assert f"Stopped at step {saved}, as requested" in stopped.said
        assert saved == stopped.last_step + 1  # every whole step, and no part of another
        assert stopped.said.count("Stopping: ") == 1
    # its output is closed after one line, which does not stop it
    command = shlex.join([sys.executable, "-m", "fitgpt", *stopped.printed_command])
    ended = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | head -1"], capture_output=True, text=True,
                           timeout=PATIENCE_S)
    assert ended.stdout.count("\n") == 1
    assert ended.stderr == ""
    assert ended.returncode == 0

    whole = RunConfig(**{**TINY, **length, "dataset": str(tmp_path / "data"), "out_dir": str(tmp_path / "whole")})
    run(whole.to_dict(), [], lambda: False)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (out / "checkpoints" / "step-00000150" / name for out in (stopped.out, tmp_path / "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_second_ctrl_c_stops_at_once_and_leaves_whole_checkpoints(start: Callable[..., Run]) -> None:
    slow = start(save_interval=1, **FOREVER)
    slow.wait_for(lambda: bool(step_folders(slow.out / "checkpoints")))
    os.kill(slow.child, signal.SIGSTOP)  # it cannot obey the first
    slow.send(signal.SIGINT)
    slow.wait_for(lambda: "Ctrl-C once more stops at once" in slow.said)
    slow.send(signal.SIGINT)
    assert slow.exit_code() == 130, slow.said
    assert state_of(slow.child) == ""
    assert "Traceback" not in slow.said
    assert checkpoint.load(slow.out / "checkpoints", "last").state["step"] >= 1


def test_a_stop_request_before_the_worker_has_handlers_is_not_lost(start: Callable[..., Run]) -> None:
    early = start(**FOREVER)
    children = Path(f"/proc/{early.process.pid}/task/{early.process.pid}/children")
    early.wait_for(lambda: bool(children.read_text().strip()))
    early.send(signal.SIGINT)
    assert early.exit_code() == 75, early.said
    assert "Stopped before training began, as requested." in early.said
    assert "Traceback" not in early.said
    assert "resume" not in early.said  # there is nothing to resume


@ENDLESS
def test_ctrl_z_stops_both_processes_and_fg_wakes_both(endless: Run) -> None:
    pids = endless.process.pid, endless.child
    endless.send(signal.SIGTSTP)
    endless.wait_for(lambda: [state_of(pid) for pid in pids] == ["T", "T"])
    endless.send(signal.SIGCONT)
    endless.wait_for(lambda: all(state_of(pid) in "RS" for pid in pids))
    endless.wait_for_steps()


@ENDLESS
def test_signals_ignored_by_nohup_stay_ignored(endless: Run) -> None:
    endless.send(signal.SIGHUP)
    endless.wait_for_steps()
    assert "Stopping" not in endless.said


@ENDLESS
def test_a_second_trainer_in_the_same_folder_gets_the_pid_of_the_first(endless: Run) -> None:
    second = short_command("--device=cpu", f"--out_dir={endless.out}", f"--dataset={endless.out.parent / 'data'}")
    assert second.returncode == 7
    assert f"is being trained in by process {endless.child} on " in second.stderr
    endless.wait_for_steps()


# ---- crashes


@ENDLESS
def test_a_killed_worker_is_reported_as_out_of_ram_with_the_resume_command(endless: Run) -> None:
    endless.wait_for(lambda: bool(step_folders(endless.out / "checkpoints")))
    os.kill(endless.child, signal.SIGKILL)
    assert endless.exit_code() == 7
    assert "the computer ran out of CPU RAM, not of GPU memory" in endless.said
    assert f"fitgpt train --resume '--out_dir={endless.out}'" in endless.said


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run under `nohup` for all tests that leave it running; the last of them ends it."""
    running = Run(tmp_path_factory.mktemp("endless"), ignoring="SIGHUP", save_interval=500, **FOREVER)
    running.wait_for_steps()
    yield running
    running.end()


def test_a_worker_whose_supervisor_dies_saves_and_ends(start: Callable[..., Run]) -> None:
    orphan = start(**FOREVER)
    orphan.wait_for_steps()
    orphan.process.kill()
    orphan.process.wait()
    deadline = time.monotonic() + 30
    while state_of(orphan.child) not in ("", "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert checkpoint.load(orphan.out / "checkpoints", "last").state["step"] == orphan.last_step + 1


@pytest.mark.parametrize(("number", "kind", "message"), [
    (signal.SIGKILL, SystemFault, "RAM"),
    (signal.SIGBUS, DataError, "a data file was truncated or its disk was removed"),
    (signal.SIGSEGV, FitError, "died of SIGSEGV inside a native library"),
    (signal.SIGUSR1, SystemFault, "SIGUSR1 ended the training process: another program sent it"),
    (50, FitError, "died of signal 50"),
])
def test_each_fatal_signal_has_its_error(number: int, kind: type[FitError], message: str) -> None:
    error = error_for_exit(-number, "the fix")
    assert type(error) is kind
    assert message in error.what
    assert error.fix == "the fix"


def test_an_error_report_counts_even_if_the_worker_then_crashes() -> None:
    with pytest.raises(DataError, match="The shard is gone") as raised:
        conclude(-signal.SIGSEGV, {"code": 3, "what": "The shard is gone.", "fix": "Copy it again."},
                 RunConfig(out_dir="nowhere"))
    assert raised.value.fix == "Copy it again."


@pytest.mark.parametrize("written", [None, "", '{"code": 3, "wh', "3"], ids=["none", "empty", "cut short", "no words"])
def test_an_incomplete_error_report_is_ignored(tmp_path: Path, written: str | None) -> None:
    if written is not None:
        (tmp_path / "report.json").write_text(written)
    assert read_report(tmp_path / "report.json") == {}


def test_an_exit_without_a_report_names_the_exit_code() -> None:
    with pytest.raises(FitError, match="exit code 9 and without an error report"):
        conclude(9, {}, RunConfig(out_dir="nowhere"))


@pytest.mark.parametrize(("error", "kind", "again"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), DeviceError, None),
    (torch.AcceleratorError("CUDA error: out of memory"), DeviceError, None),
    (torch.AcceleratorError("CUDA error: device-side assert triggered"), DeviceError, {}),
    (subprocess.CalledProcessError(1, ["/bin/false"]), DeviceError, {"compile": False}),
    (ImportError("cannot import name 'SafetensorError'", name="safetensors"), DeviceError, None),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), SystemFault, None),
    (MemoryError(), SystemFault, None),
    (PermissionError(13, "Permission denied", "x"), SystemFault, None),
    (KeyError("x"), FitError, None),
])
def test_only_errors_that_a_new_process_clears_are_retried(error: Exception, kind: type,
                                                           again: dict[str, Any] | None) -> None:
    shown, restart_with = as_fit_error(error)
    assert type(shown) is kind
    assert restart_with == again


def test_a_gpu_error_is_resumed_three_times_and_then_reported(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out" / "checkpoints" / "step-00000005").mkdir(parents=True)
    starts: list[str] = []

    def broken(given: supervisor.WorkerConfig) -> tuple[int, dict[str, Any]]:
        starts.append(given.config["init_from"])
        return 5, {"code": 5, "what": "The GPU fell off the bus.", "fix": "", "restart_with": {}}

    monkeypatch.setattr(supervisor, "run_worker", broken)
    said = {"dataset": write_dataset(tmp_path / "data"), "out_dir": str(tmp_path / "out")}
    with pytest.raises(DeviceError, match="fell off the bus") as raised:
        supervisor.supervise([Assignment(key, value, "") for key, value in said.items()])
    assert starts == ["scratch", "resume", "resume", "resume"]
    assert "fitgpt train --resume" in raised.value.fix
    assert capsys.readouterr().err.count("Resuming from the last checkpoint") == 3


def test_a_failing_compiler_starts_the_run_again_without_it_and_records_that(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: list[supervisor.WorkerConfig] = []

    def worker(config: supervisor.WorkerConfig) -> tuple[int, dict[str, Any]]:
        given.append(config)
        failed = {"code": 5, "what": "torch.compile failed: x.", "fix": "--compile=False",
                  "restart_with": {"compile": False}}
        return (0, {}) if len(given) > 1 else (5, failed)

    monkeypatch.setattr(supervisor, "run_worker", worker)
    said = {"dataset": write_dataset(tmp_path / "data"), "out_dir": str(tmp_path / "out"), "compile": True}
    assert supervisor.supervise([Assignment(key, value, "") for key, value in said.items()]) == 0
    assert [(each.config["compile"], each.config["init_from"]) for each in given] == [
        (True, "scratch"), (False, "scratch")]
    assert given[1].notes[-1] == "compile: False, because torch.compile failed: x."
    assert "Starting again with compile=False" in capsys.readouterr().err


def test_each_restart_reads_again_what_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out" / "checkpoints" / "step-00000005").mkdir(parents=True)
    used, read = iter((1, 2, 3, 4)), list[dict[str, int]]()

    def broken(given: supervisor.WorkerConfig) -> tuple[int, dict[str, Any]]:
        read.append(given.others)
        return 5, {"code": 5, "what": "The GPU fell off the bus.", "fix": "", "restart_with": {}}

    monkeypatch.setattr(supervisor, "run_worker", broken)
    monkeypatch.setattr(supervisor.memory_check, "check", lambda *run: {"GPU-0": next(used)})
    said = {"dataset": write_dataset(tmp_path / "data"), "out_dir": str(tmp_path / "out")}
    with pytest.raises(DeviceError, match="fell off the bus"):
        supervisor.supervise([Assignment(key, value, "") for key, value in said.items()])
    assert read == [{"GPU-0": 1}, {"GPU-0": 2}, {"GPU-0": 3}, {"GPU-0": 4}]


def test_a_stop_without_a_checkpoint_promises_no_resume(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as raised:
        conclude(75, {"code": 75, "what": "Stopped.", "fix": ""}, RunConfig(out_dir=str(tmp_path)))
    assert raised.value.fix == ""


# ---- errors before the start


def test_a_world_size_without_the_other_variables_of_torchrun_is_rejected_before_torch_loads() -> None:
    ended = short_command(WORLD_SIZE="2", RANK="0")
    assert ended.returncode == 2
    assert "WORLD_SIZE is 2, as under torchrun, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set" in ended.stderr
    assert_torch_was_not_loaded(ended)


def test_a_malformed_allocator_setting_is_shown_before_torch_loads() -> None:
    ended = short_command(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb=banana")
    assert ended.returncode == 5
    assert "max_split_size_mb=banana" in ended.stderr
    assert_torch_was_not_loaded(ended)


def test_a_missing_dataset_names_the_prepare_command(tmp_path: Path) -> None:
    ended = short_command("--dataset=nowhere", f"--out_dir={tmp_path / 'out'}")
    assert ended.returncode == 3
    assert "fitgpt prepare FILE_OR_FOLDER --name=nowhere" in ended.stderr
    assert not (tmp_path / "out").exists()
    assert_torch_was_not_loaded(ended)


def test_an_empty_folder_cannot_be_resumed(tmp_path: Path) -> None:
    ended = short_command("--init_from=resume", f"--out_dir={tmp_path}")
    assert ended.returncode == 4
    assert f"There is nothing to resume in {tmp_path}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert_torch_was_not_loaded(ended)


@ENDLESS
def test_another_shape_on_resume_is_rejected_with_the_difference(endless: Run) -> None:
    endless.wait_for(lambda: bool(step_folders(endless.out / "checkpoints")))
    ended = short_command("--init_from=resume", f"--out_dir={endless.out}", "--n_layer=3")
    assert ended.returncode == 4
    assert "n_layer=3 (it was 2)" in ended.stderr
    assert_torch_was_not_loaded(ended)


def test_expandable_segments_are_on_unless_the_user_set_the_allocator() -> None:
    ours = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert child_environment({"HOME": "/"}).items() >= {"HOME": "/", **ours}.items()
    for name in ours:
        theirs = {name: "max_split_size_mb:128"}
        assert {key: value for key, value in child_environment(theirs).items() if key in ours} == theirs


@pytest.mark.reproduction
def test_threads_wait_asleep_unless_the_user_chose_otherwise() -> None:
    assert child_environment({})["OMP_WAIT_POLICY"] == "passive"
    assert child_environment({"OMP_WAIT_POLICY": "active"})["OMP_WAIT_POLICY"] == "active"
