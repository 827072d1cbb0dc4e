"""Checks of this machine for `fitgpt doctor`: read it (`read_machine`, `ask_torch`), then one function per subject.

Each check yields findings: ok, a note, or what is wrong, with the command that fixes it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from .. import __version__
from ..core.errors import DeviceError
from ..core.extras import packages
from ..core.files import temporary_folder
from ..core.units import GiB, MiB, show_bytes
from .allocator_env import ALLOCATOR_DEFAULT, ALLOCATOR_VARIABLES, check_allocator_env, child_environment
from .host import available_memory, or_none
from .nvidia import GpuProcess, GpuReading, GpuState, Survey, read_gpus, survey

OLDEST_PYTHON = (3, 11)
UNLISTED_BYTES = 256 * MiB   # memory of no listed program: below this it is the driver's own
DOCKER_SHM = 64 * MiB        # Docker's default for a container
FEW_FILES = 1024
LITTLE_RAM = 4 * GiB
PYTHON = shlex.quote(sys.executable)
TORCH_TIMEOUT_S = 180        # a first import from a slow disk takes minutes
COMPILER_TIMEOUT_S = 60
NOT_INSTALLED = "is not installed"
TRAINING = "training"        # the subject of the one note where torch is not installed

# Environment variables that change what torch does, and how.
SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "every kernel launch is synchronous: training is slow",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "the allocator caches nothing: training is slow, and memory plans do not apply",
    "TORCH_COMPILE_DISABLE": "nothing is compiled", "TORCHDYNAMO_DISABLE": "nothing is compiled",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "everything is compiled again at every start",
}


@dataclass(frozen=True)
class Finding:
    """One line of `fitgpt doctor`."""

    verdict: str   # "ok"; "note": worth knowing; "wrong": training cannot run until it is fixed
    subject: str
    what: str
    fix: str = ""  # something to type or do


def examine(checkpoint_bytes: int, checkpoints: int) -> Iterator[Finding]:
    """Every check, the fast ones first: torch takes seconds to load. Arguments: see `check_room`."""
    machine = read_machine()
    yield from check_system(machine)
    yield from check_gpus(machine)
    yield from check_environment(machine)
    yield from check_room(machine, checkpoint_bytes, checkpoints)
    torch = ask_torch(machine.environment)
    yield from check_torch(torch, machine)
    yield from check_packages(torch)
    yield from check_compiling(torch, machine)
    yield from check_ranks(torch)


# ---- reading the machine

@dataclass(frozen=True)
class Machine:
    """What the checks read."""

    environment: Mapping[str, str]
    survey: Survey
    visible_error: DeviceError | None   # CUDA_VISIBLE_DEVICES names a GPU that does not exist
    states: tuple[GpuState, ...]
    platform: str = "linux"
    wsl: bool = False
    python: tuple[int, int] = OLDEST_PYTHON
    disk_free: int | None = None        # where runs are written
    can_write: bool = True
    shm: int | None = None
    open_files: int | None = None       # limit
    address_space: int | None = None    # limit
    ram: int | None = None              # available to this process

    @property
    def is_windows(self) -> bool:
        """Whether the driver is Windows', also under WSL."""
        return self.wsl or self.platform == "win32"


def read_machine() -> Machine:
    visible_error = None
    try:
        found = survey()
    except DeviceError as error:
        found, visible_error = survey({}), error
    return Machine(
        environment=dict(os.environ), survey=found, visible_error=visible_error, states=read_gpus()[0],
        platform=sys.platform, wsl=is_wsl(platform.uname().release, os.environ), python=sys.version_info[:2],
        disk_free=or_none(lambda: shutil.disk_usage(".").free), can_write=os.access(".", os.W_OK),
        shm=or_none(lambda: shutil.disk_usage("/dev/shm").total), open_files=_limit("RLIMIT_NOFILE"),
        address_space=_limit("RLIMIT_AS"), ram=available_memory())


def is_wsl(kernel: str, environment: Mapping[str, str]) -> bool:
    return "microsoft" in kernel.lower() or "WSL_DISTRO_NAME" in environment


def _limit(name: str) -> int | None:
    """A limit of this process; None: unlimited."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


# ---- the system and its GPUs

def check_system(machine: Machine) -> Iterator[Finding]:
    version, needed = platform.python_version(), "{}.{}".format(*OLDEST_PYTHON)
    if machine.python < OLDEST_PYTHON:
        yield Finding("wrong", "python", f"{version} at {sys.executable}: fitgpt needs {needed} or newer.",
                      f"python{needed} -m venv .venv && .venv/bin/pip install -e '.[train]'")
    else:
        yield Finding("ok", "python", f"{version} at {sys.executable}, fitgpt {__version__}")
    if machine.survey.gpus and machine.is_windows:
        where = "WSL" if machine.wsl else "Windows"
        yield Finding("note", "spill", f"On {where} the driver moves what does not fit on the GPU into CPU RAM, "
                      "by default: a run that is too large does not fail, it becomes many times slower.",
                      "NVIDIA Control Panel, Manage 3D settings, CUDA - Sysmem Fallback Policy: "
                      "Prefer No Sysmem Fallback")


def check_gpus(machine: Machine) -> Iterator[Finding]:
    found = machine.survey
    if found.faulty:
        yield Finding("wrong", "driver", f"An NVIDIA driver is installed, but does not work: {found.reason}.",
                      "sudo reboot  (in a container: start it again, until nvidia-smi shows the GPU)")
    elif not found.gpus and not found.hidden:
        yield Finding("note", "GPU", f"none: {found.reason}.")
    states = {state.index: state for state in machine.states}
    for gpu in found.gpus:
        yield from check_gpu(gpu, states.get(gpu.index), machine)
    if machine.visible_error is not None:
        yield Finding("wrong", "GPU", machine.visible_error.what, machine.visible_error.fix)
    elif found.hidden:
        hidden = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in found.hidden)
        yield Finding("note", "GPU", f"CUDA_VISIBLE_DEVICES={found.chosen!r} hides {hidden}.",
                      "unset CUDA_VISIBLE_DEVICES")


def check_gpu(gpu: GpuReading, state: GpuState | None, machine: Machine) -> Iterator[Finding]:
    yield Finding("ok", "GPU", f"{gpu.index}: {gpu.name}, compute capability {gpu.cc or 'unknown'}, driver "
                  f"{gpu.driver_version or 'unknown'}")
    used, total = gpu.used_bytes, gpu.total_bytes
    if used is None or total is None:
        yield Finding("note", "memory", f"The driver does not report how much memory of GPU {gpu.index} is used.")
        return
    usable = f", {show_bytes(gpu.usable_bytes)} of it for CUDA" if gpu.usable_bytes is not None else ""
    free = f"{show_bytes(gpu.free_bytes)} are free" if gpu.free_bytes is not None else "free memory is unknown"
    yield Finding("ok", "memory", f"{show_bytes(used)} of {show_bytes(total)} are used{usable}; {free}")
    yield from check_desktop([each for each in gpu.processes if each.kind in ("desktop", "app")], machine)
    for process in (each for each in gpu.processes if each.kind == "other"):
        yield Finding("note", "program", f"{process.name} (process {process.pid}) uses {_size(process)} of GPU "
                      f"{gpu.index}.", f"ps -fp {process.pid}  shows what it is; kill {process.pid}  ends it")
    unlisted = used - sum(process.nbytes or 0 for process in gpu.processes)
    if unlisted >= UNLISTED_BYTES:
        yield Finding("note", "program", f"{show_bytes(unlisted)} of GPU {gpu.index} are used by programs that the "
                      "driver does not list here: another user's, a container's or, on Windows, all.",
                      "Task Manager, Details, the column Dedicated GPU memory" if machine.is_windows
                      else "sudo fuser -v /dev/nvidia*")
    if state is not None and any("heat" in reason for reason in state.throttled or ()):
        yield Finding("note", "heat", f"GPU {gpu.index} is at {state.celsius} °C and throttles.",
                      "Clean its fans, or lower its power limit: sudo nvidia-smi -pl WATTS")


def check_desktop(processes: Sequence[GpuProcess], machine: Machine) -> Iterator[Finding]:
    """The graphical session and the programs in it: what they use, and how to free it."""
    if not processes:
        return
    total = sum(process.nbytes or 0 for process in processes)
    named = ", ".join(f"{process.name} {_size(process)}" for process in processes)
    apps = dict.fromkeys(process.name for process in processes if process.kind == "app")
    fixes = [f"Close {', '.join(apps)}"] if apps else []
    if machine.is_windows:
        fixes.append("Browsers: switch hardware acceleration off in their settings")
    elif any(process.kind == "desktop" for process in processes):
        fixes.append("sudo systemctl isolate multi-user.target  ends the session; graphical.target restarts it")
    yield Finding("note", "desktop", f"The desktop uses {show_bytes(total)}: {named}.", "\n".join(fixes))


def _size(process: GpuProcess) -> str:
    return "an unknown amount" if process.nbytes is None else show_bytes(process.nbytes)


# ---- the environment, and room

def check_environment(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    chosen = {name: environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name)}
    shown = " ".join(f"{name}={value}" for name, value in chosen.items())
    try:
        check_allocator_env(environment)
    except DeviceError as error:
        yield Finding("wrong", "allocator", error.what, error.fix)
    else:
        if len(set(chosen.values())) > 1:
            yield Finding("note", "allocator", f"{shown}: they differ, and torch's version decides which is used.",
                          f"unset {' '.join(chosen)}")
        elif chosen and "expandable_segments:True" not in shown.replace(" ", ""):
            yield Finding("note", "allocator", f"{shown}: fitgpt does not change it; its default is "
                          f"{ALLOCATOR_DEFAULT}, which fragments less.", f"unset {' '.join(chosen)}")
        else:
            yield Finding("ok", "allocator", shown or f"its variables are not set; fitgpt sets {ALLOCATOR_DEFAULT}")
    for name, effect in SLOW_VARIABLES.items():
        if environment.get(name, "0") not in ("", "0"):
            yield Finding("note", "setting", f"{name}={environment[name]}: {effect}.", f"unset {name}")


def check_room(machine: Machine, checkpoint_bytes: int, checkpoints: int) -> Iterator[Finding]:
    """`checkpoint_bytes`: of one checkpoint of GPT-2 124M. `checkpoints`: how many a run keeps at most."""
    if not machine.can_write:
        yield Finding("note", "disk", "This folder cannot be written to, and runs are written here.",
                      "fitgpt train … --out_dir=FOLDER")
    elif machine.disk_free is not None:
        enough = machine.disk_free >= checkpoints * checkpoint_bytes
        text = (f"{show_bytes(machine.disk_free)} are free on this folder's disk; a checkpoint of GPT-2 124M takes "
                f"{show_bytes(checkpoint_bytes)}, and a run keeps up to {checkpoints}")
        yield Finding("ok" if enough else "note", "disk", text + ("" if enough else ": too little for that."),
                      "" if enough else "fitgpt train … --out_dir=FOLDER  on a larger disk")
    if machine.ram is not None:
        little = machine.ram < LITTLE_RAM
        yield Finding("note" if little else "ok", "RAM", f"{show_bytes(machine.ram)} are available",
                      "Close other programs: loading torch and a checkpoint takes several GiB." if little else "")
    low = False
    if machine.shm is not None and machine.shm <= DOCKER_SHM:
        low = True
        yield Finding("note", "limits", f"/dev/shm has {show_bytes(machine.shm)}. fitgpt does not need it; other "
                      "trainers may.", "docker run --shm-size=1g …")
    if machine.open_files is not None and machine.open_files < FEW_FILES:
        low = True
        yield Finding("note", "limits", f"A process may open {machine.open_files} files: few, for data of many shards.",
                      "ulimit -n 4096")
    if machine.address_space is not None:
        low = True
        yield Finding("note", "limits", f"A process may address {show_bytes(machine.address_space)}. CUDA reserves far "
                      "more addresses than it uses memory, and may not start.", "ulimit -v unlimited")
    if not low:
        files = "any number of" if machine.open_files is None else f"{machine.open_files:,}"
        shm = f", /dev/shm has {show_bytes(machine.shm)}" if machine.shm is not None else ""
        yield Finding("ok", "limits", f"a process may open {files} files{shm}")


# ---- torch, its packages and its compiler

def ask_torch(environment: Mapping[str, str]) -> dict[str, Any]:
    """The result of engine.self_test, in a process started like that of `train`; or {"crash": how it ended}.

    In a process of its own: a torch that hangs or crashes is a finding, not an end.
    """
    variables = child_environment(environment)
    try:
        check_allocator_env(variables)
    except DeviceError:  # a finding of its own: torch need not fail on it too
        variables = {name: value for name, value in variables.items() if name not in ALLOCATOR_VARIABLES}
    command = [sys.executable, "-P", "-m", "fitgpt.engine.self_test"]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace",
                              timeout=TORCH_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"crash": f"did not finish within {TORCH_TIMEOUT_S} s"}
    last_line = done.stdout.strip().splitlines()[-1:]
    with suppress(ValueError):
        answer = json.loads(last_line[0]) if last_line else None
        if isinstance(answer, dict):
            return answer
    last_error = (done.stderr.strip().splitlines() or ["without a message"])[-1]
    if done.returncode < 0:
        name = next((each.name for each in signal.Signals if each == -done.returncode), f"signal {-done.returncode}")
        return {"crash": f"crashed ({name}): {last_error}"}
    return {"crash": f"ended with exit code {done.returncode}: {last_error}"}


def check_torch(torch: Mapping[str, Any], machine: Machine) -> Iterator[Finding]:
    if "crash" in torch:
        yield Finding("wrong", "torch", f"The process that loads torch {torch['crash']}.",
                      f"{PYTHON} -X faulthandler -c 'import torch'  shows the error\n{install('torch', again=True)}")
        return
    if torch["import_error"] == NOT_INSTALLED:
        yield Finding("note", TRAINING, "not installed; plan, fit, explain, cards, watch, report work",
                      install(packages("train")))
        return
    if torch["import_error"]:
        yield Finding("wrong", "torch", f"torch does not load: {torch['import_error']}.", install("torch", again=True))
        return
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPUs only"
    yield Finding("ok", "torch", f"{torch['version']}, built for {build}")
    for note in torch.get("notes", ()):
        if note.startswith("torch:"):
            yield Finding("note", "torch", note.removeprefix("torch:").strip(),
                          install("'torch>=2.11'") if "not supported" in note else "")
    if "device_error" in torch:
        if machine.visible_error is None:  # reported already
            yield Finding("wrong", "device", *torch["device_error"])
    elif torch["compute_error"]:
        yield Finding("wrong", "device", f"torch opens {torch['device']} ({torch['name']}), but cannot compute there: "
                      f"{torch['compute_error']}",
                      "nvidia-smi  should list the GPU, with free memory; if so: sudo reboot")
    elif torch["device"] == "cpu":
        yield Finding("note", "device", f"training runs on the CPU ({torch['name']}): good for a first test, far "
                      "too slow for a GPT of 100M parameters.")
    else:
        yield Finding("ok", "device", f"training runs on {torch['device']} ({torch['name']}), in {torch['dtype']}")


def check_packages(torch: Mapping[str, Any]) -> Iterator[Finding]:
    """The packages that training needs besides torch; those that are missing with torch need no line of their own."""
    problems: Mapping[str, str] = torch.get("packages", {})
    for name, problem in problems.items():
        if problem == NOT_INSTALLED and torch.get("import_error") != NOT_INSTALLED:
            yield Finding("wrong", "package", f"{name} {NOT_INSTALLED} for {sys.executable}.",
                          install(packages("train")))
        elif problem and problem != NOT_INSTALLED:
            yield Finding("wrong", "package", f"{name} does not load: {problem}.", install(name, again=True))
    if working := [f"{name} {or_none(metadata.version, name) or 'of unknown version'}"
                   for name, problem in problems.items() if not problem]:
        yield Finding("ok", "packages", ", ".join(working))


def check_compiling(torch: Mapping[str, Any], machine: Machine) -> Iterator[Finding]:
    """What torch.compile needs on a GPU: triton, and a C compiler with this Python's headers."""
    note = next((note for note in torch.get("notes", ()) if note.startswith("compile:")), "")
    why = note.removeprefix("compile:").strip()
    if "device" not in torch or torch["compute_error"]:
        return
    if not torch["device"].startswith("cuda"):
        yield Finding("ok", "compile", why)
    elif not torch["compile"]:
        has = torch["tools"]
        missing = [name for name, tool in (("compiler", "c_compiler"), ("headers", "python_headers")) if not has[tool]]
        if not has["triton"]:
            fix = install("triton-windows" if machine.platform == "win32" else "triton")
        else:
            fix = system_install(*missing) if missing else ""
        yield Finding("note", "compile", f"{why} Training works, but slower.", fix)
    elif problem := try_compiler(machine.environment):
        yield Finding("note", "compile", f"torch.compile would fail: {problem}",
                      f"{system_install('compiler', 'headers')}\nOr train with --compile=False, which is slower")
    else:
        yield Finding("ok", "compile", "triton is installed, and the C compiler works with this Python")


def try_compiler(environment: Mapping[str, str]) -> str:
    """Builds a module as triton does. → the compiler's first error; empty where it works."""
    compiler = environment.get("CC") or next((name for name in ("gcc", "clang") if shutil.which(name)), "")
    if not compiler:
        return "there is no C compiler."
    with temporary_folder() as folder:
        source = folder / "probe.c"
        source.write_text("#include <Python.h>\nint probe(void) { return 0; }\n", encoding="utf-8")
        command = [*shlex.split(compiler), "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", str(source), "-o",
                   str(source.with_suffix(".so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILER_TIMEOUT_S,
                                  check=False, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} does not run: {error}."
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
    return "" if done.returncode == 0 else f"{compiler} says: {errors[0].replace(str(folder), '').strip()}"


def check_ranks(torch: Mapping[str, Any]) -> Iterator[Finding]:
    """Training on several GPUs: which rank gets which, NCCL, and whether they can access each other's memory."""
    ranks = torch.get("ranks") or {}
    gpus: Sequence[str] = ranks.get("gpus", ())
    if len(gpus) < 2:
        return
    listed = ", ".join(f"rank {index} on cuda:{index} ({name})" for index, name in enumerate(gpus))
    yield Finding("ok", "ranks", f"fitgpt train --gpus=all starts {len(gpus)}: {listed}")
    if not ranks["nccl"]:
        yield Finding("note", "NCCL", "This torch has no NCCL: ranks add up gradients with gloo, through CPU RAM, "
                      "which is slow.", "--backend=gloo")
        return
    yield Finding("ok", "NCCL", f"version {ranks['nccl']}")
    if apart := [f"{one} and {other}" for one, other in ranks["no_peer_access"]]:
        yield Finding("note", "peer access", f"GPUs {', '.join(apart)} cannot access each other's memory (P2P): NCCL "
                      "goes through CPU RAM. Usual for GeForce cards.",
                      "nvidia-smi topo -m  shows how they are connected")
    else:
        yield Finding("ok", "peer access", "every GPU can access the memory of the others")


# ---- commands that fix

def install(package: str, *, again: bool = False) -> str:
    return f"{PYTHON} -m pip install {'--force-reinstall ' if again else ''}{package}"


def system_install(*what: str) -> str:
    """The command of this system's package manager."""
    python = "python{}.{}".format(*sys.version_info)
    known = {"apt-get": {"compiler": "build-essential", "headers": f"{python}-dev"},
             "dnf": {"compiler": "gcc", "headers": f"{python}-devel"},
             "zypper": {"compiler": "gcc", "headers": "python3-devel"},
             "pacman": {"compiler": "gcc", "headers": "python"}}
    manager = next((name for name in known if shutil.which(name)), "apt-get")
    verb = "-S" if manager == "pacman" else "install"
    return f"sudo {manager} {verb} {' '.join(known[manager][each] for each in what)}"
