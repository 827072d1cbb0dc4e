"""Other processes than the traced one: which command lines start them, which of a script's children may run, and
torch.distributed.

A trace is of one process. A child that trains would do so on this machine, for real, and write its checkpoints.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..config.training_script import imports_torch, is_training_script
from ..core.errors import CannotTrace, UsageError
from .errors import ONE_PROCESS, Untraceable
from .monkeypatch import Patches

LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec", "srun", "composer", "torchx"}
LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch",
                    "accelerate.commands.accelerate_cli", "deepspeed", "deepspeed.launcher.runner"}
PYTHON = re.compile(r"(python|pypy)[\d.]*w?(\.exe)?")
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python that take the next argument


# ---- the command line of `fitgpt trace`


def script_in(argv: Sequence[str]) -> list[str]:
    """What a program's command line runs: a script or -m MODULE, with its arguments; empty if neither is there."""
    for number, (each, following) in enumerate(pairwise([*argv, ""])):
        if number and (each.endswith(".py") or (each == "-m" and following not in LAUNCHER_MODULES)):
            return list(argv[number:])
    return []


def check_command(command: Sequence[str], options: Sequence[str]) -> None:
    """CannotTrace for a launcher of several processes, UsageError for another program; the fix is the command that
    traces the script itself. `options`: of fitgpt."""
    first = command[0]
    if first == "-m" and len(command) < 2:
        raise UsageError("-m needs the name of a module.", "fitgpt trace -m my_package.train")
    is_launcher = launches(command[1:] if first == "-m" else command, is_module=first == "-m")
    if not is_launcher and (first == "-m" or Path(first).is_file()):
        return
    script = script_in(command)
    fix = shlex.join(["fitgpt", "trace", *options, *(script or ["train.py"])])
    if is_launcher:
        name = command[1] if first == "-m" else os.path.basename(first)
        raise CannotTrace(f"{name} starts processes that train, and a trace is of one process.", fix)
    if script:
        raise UsageError(f"{first} is a program, and `fitgpt trace` takes the script itself.", fix)
    raise UsageError(f"There is no file {first!r}.", fix)


def launches(argv: Sequence[str], *, is_module: bool = False) -> bool:
    """Whether a command line, or a module with its arguments, is that of a launcher of several processes."""
    name = argv[0] if is_module else Path(argv[0]).name.removesuffix(".exe")
    if name == "accelerate":  # it has other commands, too
        return "launch" in argv
    return name in (LAUNCHER_MODULES if is_module else LAUNCHERS)


# ---- processes that the script starts


# Audit events of starting a program, and which of their arguments is its command line.
STARTS = {"subprocess.Popen": 1, "os.exec": 1, "os.posix_spawn": 1, "os.spawn": 2, "os.system": 0}


@contextmanager
def refusing_children_that_train(gpu: str) -> Iterator[list[Untraceable]]:
    """Inside, a child process that is a launcher, or Python with code that imports torch, is not started: the list gets
    why, since the script may catch the exception. DataLoader workers, multiprocessing's helpers, the compiler's
    workers and other programs are started. `gpu`: for the command that is suggested."""
    refused, process, active = list[Untraceable](), os.getpid(), [True]

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event not in STARTS or not active or os.getpid() != process:  # another one: a worker that was forked
            return
        folder = args[2] if event == "subprocess.Popen" else None
        if child := training_child(args[STARTS[event]], os.fsdecode(folder) if folder else ""):
            traced = shlex.join(["fitgpt", "trace", "--gpu", gpu or "4070", *(script_in(child) or ["train.py"])])
            refused.append(Untraceable("the script starts a process that trains and would not be traced: "
                                       f"{shlex.join(child)[:200]}.", f"Trace that one: {traced}"))
            raise refused[-1]

    sys.addaudithook(hear)  # for ever: Python cannot remove one
    try:
        yield refused
    finally:
        active.clear()


def training_child(command: Any, folder: str = "") -> list[str]:
    """The command line of a child process that would train, without a shell's around it; empty for another program."""
    if isinstance(command, str | bytes):
        return _in_shell(os.fsdecode(command), folder)
    argv = [os.fsdecode(each) for each in command]
    if len(argv) > 2 and argv[1] == "-c" and Path(argv[0]).name in ("sh", "bash", "zsh", "dash"):
        return _in_shell(argv[2], folder)
    if argv and launches(argv):
        return argv
    return argv if argv and PYTHON.fullmatch(Path(argv[0]).name) and _trains(argv[1:], folder) else []


def _trains(arguments: Sequence[str], folder: str) -> bool:
    """Whether Python with these arguments is a launcher, or runs code that imports torch."""
    rest = iter(arguments)
    for each in rest:
        if each in WITH_VALUE:
            next(rest, None)
        elif each == "-m":
            module = next(rest, "")
            return launches([module, *rest], is_module=True) or is_training_script(_file_of(module, folder))
        elif each == "-c":
            return imports_torch(next(rest, "").replace(";", "\n"))
        elif not each.startswith("-"):
            path = os.path.join(folder, each)
            return "/torch/_inductor/" not in Path(path).as_posix() and is_training_script(path)  # compile workers
    return False


def _in_shell(line: str, folder: str) -> list[str]:
    """The first program of a shell's line that would train."""
    try:
        words = shlex.split(line.replace(";", " ; "))
    except ValueError:  # a quote that is not closed
        words = line.split()
    return next(filter(None, (training_child(words[number:], folder) for number in range(len(words)))), [])


def _file_of(module: str, folder: str) -> str:
    """The file of a module in the folder of the child, or on the script's path."""
    for place in (folder or ".", *sys.path):
        for end in (".py", "/__main__.py"):
            if os.path.isfile(path := os.path.join(place, *module.split(".")) + end):
                return path
    return ""


# ---- torch.distributed


def install(patches: Patches) -> None:
    """A process group of one process stays as it is; of several, or of NCCL, which needs a driver, ends the trace."""
    import torch

    if not torch.distributed.is_available():
        return
    from torch.distributed import device_mesh, distributed_c10d
    from torch.distributed.rendezvous import rendezvous

    new_group = distributed_c10d._new_process_group_helper

    def check(processes: int) -> None:
        if processes != 1:
            number = f"{processes} processes" if processes > 0 else "processes that torchrun starts"
            raise Untraceable(f"the script is one of {number} (torch.distributed), and a trace is of one.", ONE_PROCESS)

    def meet(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Any:
        stated = parse_qs(urlsplit(url).query).get("world_size") or [os.environ.get("WORLD_SIZE", "0")]
        check(world_size if world_size > 0 else int(stated[0]))
        return rendezvous(url, rank, world_size, **options)

    def create(processes: int, rank: int, ranks: Any, backend: Any, *args: Any, **options: Any) -> Any:
        check(processes)
        if "nccl" in str(backend) or (str(backend) == "undefined" and torch.distributed.is_nccl_available()):
            raise Untraceable("the script initializes NCCL, which needs a GPU.", ONE_PROCESS)
        return new_group(processes, rank, ranks, backend, *args, **options)

    def refused(name: str) -> Callable[..., None]:
        def refuse(*_: Any, **__: Any) -> None:
            raise Untraceable(f"the script uses {name}, whose memory is not traced.", ONE_PROCESS)

        return refuse

    patches.set(distributed_c10d, "rendezvous", meet)
    patches.set(distributed_c10d, "_new_process_group_helper", create)
    patches.set(torch.nn.parallel.DistributedDataParallel, "__init__", refused("DistributedDataParallel"))
    patches.set(device_mesh.DeviceMesh, "__init__", refused("a DeviceMesh (FSDP2, tensor parallel)"))
