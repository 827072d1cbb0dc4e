"""fitgpt commands in forked processes: torch is imported once, and still every command has a process to be killed.

`fitgpt train` starts its worker with subprocess.Popen; here the worker is forked too, and everything else (pipes,
process group, signals, waiting) is that of the real one.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fitgpt.commands.main import main
from fitgpt.config.command_options import COMMANDS  # noqa: F401  imported before the forks, as all below
from fitgpt.data import pipeline
from fitgpt.training import run, supervisor, trained_model, worker  # noqa: F401

from .outcome import Outcome, failed

torch.set_num_threads(1)  # a forked process has no other threads of ours, and sums come out in one order

LIMIT_S = 180.0  # on a machine that does ten other things besides
DOCUMENTED = {0, 1, 2, 3, 4, 5, 6, 7, 75, 130, 141}  # exit codes other than 70, a bug
TRAIN = ["--dataset=data", "--out_dir=out", "--device=cpu", "--compile=False", "--n_layer=1", "--n_head=1",
         "--n_embd=8", "--block_size=8", "--batch_size=2", "--gradient_accumulation_steps=2",
         "--max_iters=3", "--lr_decay_iters=3", "--warmup_iters=1", "--eval_interval=2", "--eval_iters=1",
         "--save_interval=1", "--keep_last=2", "--log_interval=1", "--dropout=0.1"]


class Ended(NamedTuple):
    code: int      # negative: the signal that ended it
    output: str    # stdout and stderr

    @property
    def problem(self) -> str:
        """Why this end would be a bug; empty if it is not."""
        if self.code == -signal.SIGALRM:
            return f"no end after {LIMIT_S:g} s"
        if "Traceback" in self.output or "a bug in fitgpt" in self.output:
            return "a traceback or a bug report"
        return "" if self.code in DOCUMENTED or self.code == -signal.SIGKILL else f"exit code {self.code}"


class ForkedWorker(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen, except that a module that would be started by `python -m` runs in a fork of this process."""

    def _execute_child(self, args: Any, executable: Any, preexec: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
                       c2pread: int, c2pwrite: int, errread: int, errwrite: int, *rest: Any) -> None:
        module = args[args.index("-m") + 1]
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            for mine, theirs in ((p2cwrite, p2cread), (c2pread, c2pwrite), (errread, errwrite)):
                if mine != -1 and theirs != -1:
                    os.close(theirs)
            return
        for theirs, number in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2)):
            if theirs != -1:
                os.dup2(theirs, number)
        for mine in (p2cwrite, c2pread, errread):
            if mine != -1:
                os.close(mine)  # else it would keep its own lifeline open
        os.setpgid(0, 0)
        leave(lambda: as_program(module, args[args.index("-m") + 2:], env))


def as_program(module: str, arguments: Sequence[str], env: dict[str, str] | None) -> int:
    os.environ.update(env or {})
    sys.stdin, sys.argv = open(0, closefd=False), [module, *arguments]  # noqa: SIM115
    sys.modules.pop(module, None)  # runpy warns of a module that is there already
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def leave(work: Callable[[], int]) -> None:
    """Ends this forked process with the exit code that `work` returns, as Python would."""
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def start(argv: Sequence[str], folder: Path, before: Callable[[], None] = lambda: None) -> int:
    """Forks a process that runs `fitgpt ARGV` in the folder, its output in output.txt beside it. → its pid.

    `before`: called in the new process before the command. An alarm ends what hangs.
    """
    sys.stdout.flush()
    output_of(folder).write_text("")  # it may be killed before it opens the file
    pid = os.fork()
    if pid:
        return pid

    def command() -> int:
        os.setpgid(0, 0)
        os.chdir(folder)
        output = os.open(output_of(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        os.environ.update(TMPDIR=str(folder / "tmp"), FITGPT_HOME=str(folder / "home"), COLUMNS="200",
                          XDG_CACHE_HOME=str(folder / "home"))
        tempfile.tempdir = None
        for name in ("tmp", "home"):
            (folder / name).mkdir(exist_ok=True)
        subprocess.Popen = ForkedWorker  # type: ignore[misc]
        pipeline._SAVE_EVERY_S = 0.0  # the state is saved after every shard, so that there is more to stop in
        before()
        return main(list(argv))

    leave(command)
    raise AssertionError


def output_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.output.txt")


def wait(pid: int, folder: Path) -> Ended:
    """The end of a command, and of every process of its groups."""
    _, status = os.waitpid(pid, 0)
    return Ended(os.waitstatus_to_exitcode(status), output_of(folder).read_text(errors="replace"))


def fitgpt(argv: Sequence[str], folder: Path, before: Callable[[], None] = lambda: None) -> Ended:
    return wait(start(argv, folder, before), folder)


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()]
    except OSError:
        return []


def wait_until_gone(pids: Sequence[int], seconds: float = 30.0) -> list[int]:
    """Those that are still alive after so long. They are not children of this process."""
    deadline, left = time.monotonic() + seconds, list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if _alive(pid)]
        time.sleep(0.005)
    return left


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def isolated(work: Callable[[], Outcome], seconds: float = LIMIT_S) -> Outcome:
    """What `work` returns in a forked process; a failed outcome if that process crashes or hangs."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read_end)
        os.setpgid(0, 0)  # Ctrl-C is for the campaign: it must not look like a crash of this process
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        signal.setitimer(signal.ITIMER_REAL, seconds)

        def report() -> int:
            try:
                outcome = work()
            except Exception:
                outcome = failed("crashed", traceback.format_exc())
            with open(write_end, "w") as pipe:
                json.dump(outcome, pipe)
            return 0

        leave(report)
    os.close(write_end)
    with open(read_end) as pipe:
        found = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == -signal.SIGALRM:
        return failed("hangs", f"no end after {seconds:g} s")
    return Outcome(*json.loads(found)) if code == 0 else failed("crashed", f"the process ended with {code}")


# ---- folders

def fresh(template: Path, folder: Path) -> Path:
    """The folder, as a copy of the template."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder, symlinks=True)
    return folder


def contents(folder: Path, *patterns: str) -> dict[str, bytes]:
    """Every file below the folder that matches one of the patterns, by its relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for pattern in patterns
            for path in sorted(folder.glob(pattern)) if path.is_file()}
