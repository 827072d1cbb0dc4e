"""The parent process of `fitgpt train`, which never imports torch: checks the memory, sets the allocator's environment,
starts the worker, forwards signals to it, and turns its end into an error message and an exit code.

The worker's config is one line of JSON on its standard input, which then stays open: if this process dies, the worker
reads end-of-file, saves and stops. The worker's error report comes back in a file.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..config.fields import Assignment
from ..config.run_config import RunConfig
from ..core.errors import (
    STOPPED_AT_ONCE,
    CheckpointError,
    DataError,
    DeviceError,
    DoesNotFit,
    FitError,
    Interrupted,
    NumericsError,
    SystemFault,
    UsageError,
)
from ..core.files import temporary_folder
from ..core.units import show_seconds
from ..hardware.allocator_env import check_allocator_env, child_environment
from ..planning import plan_file
from ..planning.request import NO_OPTIONS, assignments_from, training_config
from ..runs.folder import can_resume
from ..show.progress import say
from ..show.terminal import can_redraw
from . import launch, memory_check
from .liveness import LEAST_S, Watch, dump_stacks
from .worker import HEARTBEAT, REPORT, STACKS, blocked_stop_signals, stop_signals

# The live bar draws over the blank line at the end.
STOPPING = b"\nStopping: finishing the current step, then saving. Ctrl-C once more stops at once.\n\n"
KILL_S = 10.0  # to wait for a process that was killed
RESTARTS = 3  # after a GPU error that only a new process can clear
# Signals that another process sends; no process gets them through an error of its own.
_SENT = ("SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU", "SIGTERM", "SIGHUP", "SIGINT")
_ERRORS = {kind.exit_code: kind for kind in
           (DoesNotFit, UsageError, DataError, CheckpointError, DeviceError, NumericsError, SystemFault, Interrupted)}


@dataclass(frozen=True)
class WorkerConfig:
    """What the worker gets on its standard input."""

    config: dict[str, Any]
    notes: list[str]
    report: str = ""  # the file for its error report
    others: dict[str, int] = field(default_factory=dict)  # bytes that other processes use of each GPU, by uuid
    fallbacks: list[dict[str, Any]] | None = None         # smaller plans, if a plan.json has them
    rehearsal: str = ""                                   # only rehearse, and write the result to this file
    stuck_s: float = LEAST_S                              # seconds of silence that are never too long; tests give less


def train(config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig = NO_OPTIONS, **options: Any) -> Path:
    """Trains as `fitgpt train` does, in a process of its own, and returns the run's folder; FitError if it fails.

    `config`: a config file, a dict of options, a RunConfig, or nothing. `options` such as batch_size=8 override it.
    """
    given = assignments_from(config, options, RunConfig)
    if supervise(given) == STOPPED_AT_ONCE:
        raise Interrupted("Stopped at once by a second Ctrl-C.")
    return Path(str({each.key: each.value for each in given}.get("out_dir", RunConfig.out_dir)))


def supervise(assignments: Sequence[Assignment]) -> int:
    """Runs the training that the assignments describe; returns its exit code. Starts it again after GPU errors."""
    launched = launch.launched_ranks(os.environ) > 1  # by torchrun, which also restarts them
    require_packages()
    check_allocator_env(os.environ)
    given, notes = training_config(assignments)
    given = launch.with_ranks(given, os.environ)
    config, why = with_fit(given)
    planned = plan_file.read(config.plan) if config.plan else None
    given, config = replace(given, plan=""), replace(config, plan="")  # its options are in the config now
    fallbacks = None
    if planned and planned.fallback_plans is not None:
        fallbacks = [each._asdict() for each in planned.fallback_plans_of(config)]
    for attempt in range(RESTARTS + 1):
        others: dict[str, int] = {}
        for device in launch.devices(config, os.environ):  # each time: other processes may use more or less by now
            others |= memory_check.check(replace(config, device=device), planned)
        code, report = run_worker(WorkerConfig(config.to_dict(), [*notes, *why], others=others, fallbacks=fallbacks))
        changes, saved = report.get("restart_with"), can_resume(config.out_dir)
        if changes is None or launched or attempt == RESTARTS or not (changes or saved):
            break
        setting = "".join(f" with {option}={value}" for option, value in changes.items())
        say(f"fitgpt: {report['what']} {'Resuming from the last checkpoint' if saved else 'Starting again'}{setting} "
            f"(restart {attempt + 1} of at most {RESTARTS}).", warning=True)
        if changes:  # planned anew, and recorded so
            notes = [*notes, *(f"{option}: {value}, because {report['what']}" for option, value in changes.items())]
            given = replace(given, **changes)
            config, why = with_fit(given)
        config = replace(config, init_from="resume") if saved else config
    return conclude(code, report, config)


def with_fit(given: RunConfig) -> tuple[RunConfig, list[str]]:
    """The run with the settings that --fit chooses, and why; unchanged without it."""
    if not given.fit:
        return given, []
    from ..planning.fit import for_train  # only here: it imports the whole search

    return for_train(given)


def require_packages() -> None:
    """ModuleNotFoundError if a package of the worker is not installed. Before anything else: preparing data, for
    example, needs the same packages. Imports none of them."""
    for package in ("torch", "numpy", "safetensors"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"Training needs {package}.", name=package)


def run_worker(given: WorkerConfig) -> tuple[int, dict[str, Any]]:
    """Starts the worker, or one per rank, and waits for their end → (exit code, error report). Of several ranks, those
    of the one that failed first for a reason of its own."""
    with temporary_folder() as folder:
        environments = launch.rank_environments(given.config, os.environ)
        folders = [folder / str(rank) for rank in range(len(environments))]
        for own in folders:
            own.mkdir()
        poll_s = min(1.0, given.stuck_s / 4)
        with blocked_stop_signals():  # until both processes have handlers; the worker inherits the mask and unblocks
            # A process group of its own: Ctrl-C reaches the worker once, from here, and not twice.
            group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
            workers = [subprocess.Popen([sys.executable, "-P", "-m", "fitgpt.training.worker"], stdin=subprocess.PIPE,
                                        env=child_environment({**os.environ, **own}), **group) for own in environments]
            forwarder = SignalForwarder(workers)
        with forwarder:
            for worker, own in zip(workers, folders, strict=True):
                assert worker.stdin is not None
                with suppress(BrokenPipeError):  # it died before it could read: its exit code says how
                    line = json.dumps(asdict(replace(given, report=str(own / REPORT))))
                    worker.stdin.write(line.encode() + b"\n")
                    worker.stdin.flush()
            watches = [Watch(own / HEARTBEAT, poll_s) for own in folders]
            ended = launch.wait_for(workers, poll_s, lambda: any([watch.is_stuck() for watch in watches]))
            stuck = "" if len(ended) == len(workers) else end_stuck(workers, folders, watches)
            for worker in workers:
                assert worker.stdin is not None
                with suppress(BrokenPipeError):
                    worker.stdin.close()
        # A worker that could not even be killed has no exit code.
        codes = [-signal.SIGKILL if worker.returncode is None else worker.returncode for worker in workers]
        if min(codes) < 0 and can_redraw():  # a live display that was killed leaves the terminal's cursor hidden
            print("\x1b[?25h", end="", flush=True)
        if forwarder.killed and min(codes) < 0:
            return STOPPED_AT_ONCE, {}
        if stuck:
            return Interrupted.exit_code, {"code": Interrupted.exit_code, "what": stuck, "fix": ""}
        reports = [read_report(own / REPORT) for own in folders]
        rank = launch.culprit(ended, codes, reports)
        return codes[rank], launch.named(reports[rank], rank, given.config, os.environ)


def end_stuck(workers: Sequence[subprocess.Popen[bytes]], folders: Sequence[Path], watches: Sequence[Watch]) -> str:
    """Ends workers of which one makes no progress → a sentence on it. The others of several ranks wait for that one."""
    alive = [rank for rank, worker in enumerate(workers) if worker.poll() is None]
    found = {rank: dump_stacks(workers[rank].pid, folders[rank] / STACKS) for rank in alive}
    for rank in alive:
        kill_group(workers[rank])
    for rank in alive:
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a dead disk cannot even be killed
            workers[rank].wait(KILL_S)
    stacks = "\n".join(f"Rank {rank}:\n{text}" if len(workers) > 1 else text for rank, text in found.items() if text)
    where = "Its stacks could not be read."
    if stacks:
        with tempfile.NamedTemporaryFile("w", prefix="fitgpt-stacks-", suffix=".txt", delete=False) as file:
            file.write(stacks)
        where = f"The stacks of its threads are in {file.name}."
    slowest = max(watches, key=lambda watch: watch.quiet)
    step = f"after step {slowest.entry.step}" if slowest.entry.step >= 0 else "before its first step"
    return (f"The training process was stuck and was ended: no progress for {show_seconds(slowest.quiet)} in "
            f"{slowest.entry.doing}, {step}. {where}")


def kill_group(worker: subprocess.Popen[bytes]) -> None:
    """Kills the worker and the processes it has started."""
    with suppress(ProcessLookupError):
        if os.name == "posix":
            os.killpg(worker.pid, signal.SIGKILL)
        else:
            worker.kill()


def read_report(path: Path) -> dict[str, Any]:
    """The worker's error report; empty if it wrote none, or could not write it."""
    try:
        report = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


class SignalForwarder:
    """Forwards signals to the worker until it is closed.

    The worker obeys the first stop request. A second Ctrl-C kills it, even if it cannot respond: checkpoints are
    renamed into place, so none can be left incomplete. A second SIGTERM or SIGHUP does not kill it: when a terminal
    closes, both the shell and the kernel send one.
    """

    def __init__(self, workers: Sequence[subprocess.Popen[bytes]]) -> None:
        self.killed = False
        self._workers = workers
        self._requested = False
        if os.name == "posix":
            handlers = {**dict.fromkeys(stop_signals(), self._stop), signal.SIGTSTP: self._suspend}
            self._previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        else:  # the console sends Ctrl-C to both processes: this one only has to survive it
            self._previous = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}

    def __enter__(self) -> SignalForwarder:
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._requested else handler)  # this process is about to end anyway

    def _stop(self, number: int, frame: object) -> None:
        if self._requested and number == signal.SIGINT:
            self.killed = True
            for worker in self._workers:
                kill_group(worker)
            return
        if not self._requested:
            self._requested = True
            with suppress(OSError):  # the terminal may be closed
                os.write(2, STOPPING)  # not through Python's buffers, which the interrupted code may be using
        self._send(number)

    def _suspend(self, number: int, frame: object) -> None:
        """Ctrl-Z stops both processes; `fg` or `bg` continues both."""
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        for worker in self._workers:
            worker.send_signal(number)


def conclude(code: int, report: Mapping[str, Any], config: RunConfig) -> int:
    """The worker's exit code, or the error it reported."""
    if code in (0, STOPPED_AT_ONCE):
        return code
    on_gpus = [f"--gpus={config.gpus}"] if config.ranks > 1 and not config.gpus.endswith("xranks") else []
    resume = shlex.join(["fitgpt", "train", "--resume", f"--out_dir={config.out_dir}", *on_gpus])
    fix = f"To resume from the last checkpoint: {resume}" if can_resume(config.out_dir) else ""
    where = report.get("where", "")  # which of several ranks
    if "what" not in report:
        error = error_for_exit(code, fix)
        raise type(error)(where + error.what, error.fix)
    raise _ERRORS.get(report["code"], FitError)(where + report["what"], report["fix"] or fix)


def error_for_exit(code: int, fix: str) -> FitError:
    """The error of a worker that ended without a report: by its exit code, negative for a signal."""
    if code in _ERRORS:
        return _ERRORS[code]("The training process failed and could not write its error report: see above. Is the disk "
                             f"of {tempfile.gettempdir()} full?", fix)
    if code >= 0:
        return FitError(f"The training process ended with exit code {code} and without an error report.", fix)
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    if name == "SIGKILL":
        return SystemFault(
            "The system killed the training process (signal 9). Nearly always that means the computer ran out of CPU "
            "RAM, not of GPU memory; `dmesg | tail` says so.", fix)
    if name == "SIGBUS":
        return DataError("The training process died of a bus error (signal 7): a data file was truncated or its disk "
                         "was removed while it was being read.", fix)
    if name in _SENT:
        return SystemFault(f"{name} ended the training process: another program sent it, or a limit of the system did "
                           "(`ulimit -a`).", fix)
    return FitError(f"The training process died of {name} inside a native library: torch, the driver or a kernel.", fix)
