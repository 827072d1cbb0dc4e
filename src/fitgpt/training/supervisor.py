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

from ..config.argv import walk
from ..config.fields import Assignment, nearest, option_specs
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
from ..planning.request import training_config
from ..runs.folder import can_resume
from ..show.progress import say
from ..show.terminal import can_redraw
from . import memory_check
from .liveness import LEAST_S, Watch, dump_stacks
from .worker import HEARTBEAT, STACKS, blocked_stop_signals, stop_signals

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


def train(config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig = "", **options: Any) -> Path:
    """Trains as `fitgpt train` does, in a process of its own, and returns the run's folder; FitError if it fails.

    `config`: a config file, a dict of options or a RunConfig. `options` such as batch_size=8 override it.
    """
    given = assignments_from(config, options)
    if supervise(given) == STOPPED_AT_ONCE:
        raise Interrupted("Stopped at once by a second Ctrl-C.")
    return Path(str({each.key: each.value for each in given}.get("out_dir", RunConfig.out_dir)))


def assignments_from(config: Any, options: Mapping[str, Any]) -> list[Assignment]:
    """The options that a config of any kind sets, then `options`."""
    known, from_file, values = option_specs(RunConfig), list[Assignment](), dict[str, Any]()
    if isinstance(config, RunConfig):
        values = {key: value for key, value in config.to_dict().items() if value != known[key].default}
    elif isinstance(config, Mapping):
        values = dict(config)
    elif config:
        from_file = walk([os.fspath(config)], RunConfig)
    values |= options
    for key in values:
        if key not in known:
            near = nearest(str(key), known)
            raise UsageError(f"{key!r} is not an option of `fitgpt train`.",
                             f"Did you mean {' or '.join(near)}?" if near else "fitgpt train --help lists them all.")
    return from_file + [Assignment(key, value, f"{key}={value!r}") for key, value in values.items()]


def supervise(assignments: Sequence[Assignment]) -> int:
    """Runs the training that the assignments describe; returns its exit code. Starts it again after GPU errors."""
    world = os.environ.get("WORLD_SIZE", "1").strip() or "1"
    if world != "1":
        raise UsageError(
            f"WORLD_SIZE is {world}: fitgpt trains with one process on one GPU for now.",
            "Start it without torchrun: fitgpt train …  (unset WORLD_SIZE if your shell still has it)")
    require_packages()
    check_allocator_env(os.environ)
    given, notes = training_config(assignments)
    config, why = with_fit(given)
    planned = plan_file.read(config.plan) if config.plan else None
    given, config = replace(given, plan=""), replace(config, plan="")  # its options are in the config now
    fallbacks = None
    if planned and planned.fallback_plans is not None:
        fallbacks = [each._asdict() for each in planned.fallback_plans_of(config)]
    for attempt in range(RESTARTS + 1):
        others = memory_check.check(config, planned)  # each time: other processes may use more or less by now
        code, report = run_worker(WorkerConfig(config.to_dict(), [*notes, *why], others=others, fallbacks=fallbacks))
        changes, saved = report.get("restart_with"), can_resume(config.out_dir)
        if changes is None or attempt == RESTARTS or not (changes or saved):
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
    """Starts the worker and waits for its end → (its exit code, its error report)."""
    with temporary_folder() as folder:
        report = folder / "report.json"
        with blocked_stop_signals():  # until both processes have handlers; the worker inherits the mask and unblocks
            # A process group of its own: Ctrl-C reaches the worker once, from here, and not twice.
            group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
            worker = subprocess.Popen([sys.executable, "-P", "-m", "fitgpt.training.worker"], stdin=subprocess.PIPE,
                                      env=child_environment(os.environ), **group)
            forwarder = SignalForwarder(worker)
        assert worker.stdin is not None
        with forwarder:
            with suppress(BrokenPipeError):  # it died before it could read: its exit code says how
                worker.stdin.write(json.dumps(asdict(replace(given, report=str(report)))).encode() + b"\n")
                worker.stdin.flush()
            stuck = wait_or_end_stuck(worker, Path(folder), given.stuck_s)
            code = worker.returncode
            with suppress(BrokenPipeError):
                worker.stdin.close()
        if code < 0 and can_redraw():  # a live display that was killed leaves the terminal's cursor hidden
            print("\x1b[?25h", end="", flush=True)
        if forwarder.killed and code < 0:
            return STOPPED_AT_ONCE, {}
        if stuck:
            return Interrupted.exit_code, {"code": Interrupted.exit_code, "what": stuck, "fix": ""}
        return code, read_report(report)


def wait_or_end_stuck(worker: subprocess.Popen[bytes], folder: Path, stuck_s: float) -> str:
    """Waits for the worker's end → empty; ends one that makes no progress → a sentence that says so."""
    poll_s = min(1.0, stuck_s / 4)
    watch = Watch(folder / HEARTBEAT, poll_s)
    while True:
        try:
            worker.wait(poll_s)
            return ""
        except subprocess.TimeoutExpired:
            if not watch.is_stuck():
                continue
        stacks = dump_stacks(worker.pid, folder / STACKS)
        kill_group(worker)
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a dead disk cannot even be killed
            worker.wait(KILL_S)
        where = "Its stacks could not be read."
        if stacks:
            with tempfile.NamedTemporaryFile("w", prefix="fitgpt-stacks-", suffix=".txt", delete=False) as file:
                file.write(stacks)
            where = f"The stacks of its threads are in {file.name}."
        step = f"after step {watch.entry.step}" if watch.entry.step >= 0 else "before its first step"
        return (f"The training process was stuck and was ended: no progress for {show_seconds(watch.quiet)} in "
                f"{watch.entry.doing}, {step}. {where}")


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

    def __init__(self, worker: subprocess.Popen[bytes]) -> None:
        self.killed = False
        self._worker = worker
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
            kill_group(self._worker)
            return
        if not self._requested:
            self._requested = True
            with suppress(OSError):  # the terminal may be closed
                os.write(2, STOPPING)  # not through Python's buffers, which the interrupted code may be using
        self._worker.send_signal(number)

    def _suspend(self, number: int, frame: object) -> None:
        """Ctrl-Z stops both processes; `fg` or `bg` continues both."""
        self._worker.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._worker.send_signal(signal.SIGCONT)


def conclude(code: int, report: Mapping[str, Any], config: RunConfig) -> int:
    """The worker's exit code, or the error it reported."""
    if code in (0, STOPPED_AT_ONCE):
        return code
    resume = shlex.join(["fitgpt", "train", "--resume", f"--out_dir={config.out_dir}"])
    fix = f"To resume from the last checkpoint: {resume}" if can_resume(config.out_dir) else ""
    if not report:
        raise error_for_exit(code, fix)
    raise _ERRORS.get(report["code"], FitError)(report["what"], report["fix"] or fix)


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
