"""`fitgpt doctor`: what is on this machine, what is wrong with it, and the command that mends it.

The machine is read first (`read_machine`, `asktorch`); what follows from it are functions of what was read.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from .. import __version__
from ..config.command_options import DoctorOptions
from ..config.run_config import RunConfig
from ..core.errors import DeviceError
from ..core.units import GiB, MiB, show_bytes
from ..hardware.gpu_stats import read_cards
from ..hardware.host import available_memory, or_none
from ..hardware.nvidia import ALLOCATOR_DEFAULT, ALLOCATOR_VARIABLES, GpuReading, Survey, check_allocator_env, survey
from ..hardware.torch_probe import ABSENT, ask_torch, try_compiler
from ..nouns import GPTConfig
from ..show.findings import say_finding
from ..sights import CardState, Finding, Program

SCHEMA = 1
OLDEST_PYTHON = (3, 11)
HIDDEN_SHARE = 256 * MiB   # memory that no program owns up to: below this it is the driver's own
DOCKER_SHM = 64 * MiB      # what Docker gives a container unless told otherwise
FEW_FILES = 1024
LITTLE_RAM = 4 * GiB

# Variables that change what torch does, and how.
TELLING = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for: training is slow",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "the allocator keeps nothing: training is slow, and no plan of memory holds",
    "TORCH_COMPILE_DISABLE": "nothing is compiled", "TORCHDYNAMO_DISABLE": "nothing is compiled",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "everything is compiled anew at every start",
}


def doctor(options: DoctorOptions) -> int:
    """0 where training can run; 5 where something that is wrong prevents it, be it a GPU that cannot be used."""
    found: list[Finding] = []
    for finding in examine():
        found.append(finding)
        if not options.json:
            say_finding(finding)
    trains = not any(finding.verdict == "wrong" for finding in found)
    if options.json:
        print(json.dumps({"schema": SCHEMA, "fitgpt": __version__, "trains": trains,
                          "findings": [asdict(finding) for finding in found]}))
    else:
        print("\nTraining can run here." if trains else "\nTraining cannot run here until what is wrong is mended.")
    return 0 if trains else DeviceError.exit_code


def examine() -> Iterator[Finding]:
    """What is quickly known first: torch takes seconds to answer."""
    machine = read_machine()
    yield from about_system(machine)
    yield from about_cards(machine)
    yield from about_environment(machine)
    yield from about_room(machine)
    torch = ask_torch(machine.environment)
    yield from about_torch(torch, machine)
    yield from about_packages(torch)
    yield from about_compiling(torch, machine)


# ---- reading the machine

@dataclass(frozen=True)
class Machine:
    """What is looked at before anything is said of it."""

    environment: Mapping[str, str]
    survey: Survey
    misnamed: DeviceError | None        # CUDA_VISIBLE_DEVICES names a GPU that is not there
    cards: tuple[CardState, ...]
    platform: str = "linux"
    wsl: bool = False
    python: tuple[int, int] = OLDEST_PYTHON
    disk_free: int | None = None        # where runs are written
    can_write: bool = True
    shm: int | None = None
    open_files: int | None = None       # the limit of them
    address_space: int | None = None    # the limit of it
    ram: int | None = None              # available to this process

    @property
    def is_windows(self) -> bool:
        """Windows' driver, be it under WSL."""
        return self.wsl or self.platform == "win32"


def read_machine() -> Machine:
    misnamed = None
    try:
        seen = survey()
    except DeviceError as error:
        seen, misnamed = survey({}), error
    return Machine(
        environment=dict(os.environ), survey=seen, misnamed=misnamed, cards=read_cards()[0], platform=sys.platform,
        wsl=is_wsl(platform.uname().release, os.environ), python=sys.version_info[:2],
        disk_free=or_none(lambda: shutil.disk_usage(".").free), can_write=os.access(".", os.W_OK),
        shm=or_none(lambda: shutil.disk_usage("/dev/shm").total), open_files=_limit("RLIMIT_NOFILE"),
        address_space=_limit("RLIMIT_AS"), ram=available_memory())


def is_wsl(kernel: str, environment: Mapping[str, str]) -> bool:
    return "microsoft" in kernel.lower() or "WSL_DISTRO_NAME" in environment


def _limit(name: str) -> int | None:
    """A limit of this process; None: there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


# ---- the system and its cards

def about_system(machine: Machine) -> Iterator[Finding]:
    version, needed = platform.python_version(), "{}.{}".format(*OLDEST_PYTHON)
    if machine.python < OLDEST_PYTHON:
        yield Finding("wrong", "python", f"{version} at {sys.executable}: fitgpt needs {needed} or newer.",
                      f"python{needed} -m venv .venv && .venv/bin/pip install -e '.[train]'")
    else:
        yield Finding("ok", "python", f"{version} at {sys.executable}, fitgpt {__version__}")
    if machine.survey.gpus and machine.is_windows:
        where = "WSL" if machine.wsl else "Windows"
        yield Finding("note", "spill", f"On {where} the driver moves what does not fit on the card into the computer's "
                      "RAM, unless told not to: a run that is too large does not fail, it becomes many times slower.",
                      "NVIDIA Control Panel, Manage 3D settings, CUDA - Sysmem Fallback Policy: "
                      "Prefer No Sysmem Fallback")


def about_cards(machine: Machine) -> Iterator[Finding]:
    seen = machine.survey
    if seen.faulty:
        yield Finding("wrong", "driver", f"An NVIDIA driver is installed, but does not work: {seen.reason}.",
                      "sudo reboot  (in a container: start it again, until nvidia-smi shows the GPU)")
    elif not seen.gpus and not seen.hidden:
        yield Finding("note", "GPU", f"none: {seen.reason}.")
    states = {card.index: card for card in machine.cards}
    for gpu in seen.gpus:
        yield from about_card(gpu, states.get(gpu.index), machine)
    if machine.misnamed is not None:
        yield Finding("wrong", "GPU", machine.misnamed.what, machine.misnamed.fix)
    elif seen.hidden:
        hidden = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in seen.hidden)
        yield Finding("note", "GPU", f"CUDA_VISIBLE_DEVICES={seen.chosen!r} hides {hidden}.",
                      "unset CUDA_VISIBLE_DEVICES")


def about_card(gpu: GpuReading, state: CardState | None, machine: Machine) -> Iterator[Finding]:
    yield Finding("ok", "GPU", f"{gpu.index}: {gpu.name}, compute capability {gpu.cc or 'not told'}, driver "
                  f"{gpu.driver_version or 'not told'}")
    used, total = gpu.used_bytes, gpu.total_bytes
    if used is None or total is None:
        yield Finding("note", "memory", f"The driver does not say how much of GPU {gpu.index} is taken.")
        return
    usable = f", {show_bytes(gpu.usable_bytes)} of it for CUDA" if gpu.usable_bytes is not None else ""
    free = f"{show_bytes(gpu.free_bytes)} are free" if gpu.free_bytes is not None else "free memory is not told"
    yield Finding("ok", "memory", f"{show_bytes(used)} of {show_bytes(total)} are taken{usable}; {free}")
    programs = state.programs if state else ()
    yield from about_desktop([one for one in programs if one.kind in ("desktop", "app")], machine)
    for one in (one for one in programs if one.kind == "other"):
        yield Finding("note", "program", f"{one.name} (process {one.pid}) holds {_held(one)} of GPU {gpu.index}.",
                      f"ps -fp {one.pid}  says what it is; kill {one.pid}  ends it")
    unnamed = used - sum(one.nbytes or 0 for one in programs)
    if unnamed >= HIDDEN_SHARE:
        yield Finding("note", "program", f"{show_bytes(unnamed)} of GPU {gpu.index} are held by programs that the "
                      "driver does not name here: another user's, a container's or, on Windows, all.",
                      "Task Manager, Details, the column Dedicated GPU memory" if machine.is_windows
                      else "sudo fuser -v /dev/nvidia*")
    if state is not None and any("heat" in reason for reason in state.throttled or ()):
        yield Finding("note", "heat", f"GPU {gpu.index} is at {state.celsius} °C and slows itself down.",
                      "Clean its fans, or let it draw less: sudo nvidia-smi -pl WATTS")


def about_desktop(programs: Sequence[Program], machine: Machine) -> Iterator[Finding]:
    """The graphical session and what runs in it: what they hold, and how to have it back."""
    if not programs:
        return
    known = sum(one.nbytes or 0 for one in programs)
    named = ", ".join(f"{one.name} {_held(one)}" for one in programs)
    apps = dict.fromkeys(one.name for one in programs if one.kind == "app")
    fixes = [f"Close {', '.join(apps)}"] if apps else []
    if machine.is_windows:
        fixes.append("Browsers: switch hardware acceleration off in their settings")
    elif any(one.kind == "desktop" for one in programs):
        fixes.append("sudo systemctl isolate multi-user.target  ends the session; graphical.target brings it back")
    yield Finding("note", "desktop", f"The desktop holds {show_bytes(known)}: {named}.", "\n".join(fixes))


def _held(program: Program) -> str:
    return "an unknown amount" if program.nbytes is None else show_bytes(program.nbytes)


# ---- the environment, and room

def about_environment(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    chosen = {name: environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name)}
    shown = " ".join(f"{name}={value}" for name, value in chosen.items())
    try:
        check_allocator_env(environment)
    except DeviceError as error:
        yield Finding("wrong", "allocator", error.what, error.fix)
    else:
        if len(set(chosen.values())) > 1:
            yield Finding("note", "allocator", f"{shown}: they differ, and torch's version decides which counts.",
                          f"unset {' '.join(chosen)}")
        elif chosen and "expandable_segments:True" not in shown.replace(" ", ""):
            yield Finding("note", "allocator", f"{shown}: fitgpt leaves it so; by itself it sets {ALLOCATOR_DEFAULT}, "
                          "which wastes less.", f"unset {' '.join(chosen)}")
        else:
            yield Finding("ok", "allocator", shown or f"its variables are not set; fitgpt sets {ALLOCATOR_DEFAULT}")
    for name, effect in TELLING.items():
        if environment.get(name, "0") not in ("", "0"):
            yield Finding("note", "setting", f"{name}={environment[name]}: {effect}.", f"unset {name}")


def about_room(machine: Machine) -> Iterator[Finding]:
    checkpoint = 12 * GPTConfig().count_params()  # float32 weights and AdamW's two moments
    kept = RunConfig.keep_last + 2                # those, the best one, and one being written
    if not machine.can_write:
        yield Finding("note", "disk", "This folder cannot be written to, and runs are written here.",
                      "fitgpt train … --out_dir=FOLDER")
    elif machine.disk_free is not None:
        enough = machine.disk_free >= kept * checkpoint
        words = (f"{show_bytes(machine.disk_free)} are free on this folder's disk; a checkpoint of GPT-2 124M takes "
                 f"{show_bytes(checkpoint)}, and a run holds up to {kept}")
        yield Finding("ok" if enough else "note", "disk", words + ("" if enough else ": too little for that."),
                      "" if enough else "fitgpt train … --out_dir=FOLDER  on a larger disk")
    if machine.ram is not None:
        little = machine.ram < LITTLE_RAM
        yield Finding("note" if little else "ok", "RAM", f"{show_bytes(machine.ram)} are available",
                      "Close other programs: loading torch and a checkpoint takes some GiB." if little else "")
    yield from about_limits(machine)


def about_limits(machine: Machine) -> Iterator[Finding]:
    tight = False
    if machine.shm is not None and machine.shm <= DOCKER_SHM:
        tight = True
        yield Finding("note", "limits", f"/dev/shm has {show_bytes(machine.shm)}. fitgpt needs none of it; other "
                      "trainers may.", "docker run --shm-size=1g …")
    if machine.open_files is not None and machine.open_files < FEW_FILES:
        tight = True
        yield Finding("note", "limits", f"A process may open {machine.open_files} files: few, for data of many shards.",
                      "ulimit -n 4096")
    if machine.address_space is not None:
        tight = True
        yield Finding("note", "limits", f"A process may address {show_bytes(machine.address_space)}. CUDA reserves far "
                      "more addresses than it uses memory, and may not start.", "ulimit -v unlimited")
    if not tight:
        files = "any number of" if machine.open_files is None else f"{machine.open_files:,}"
        shm = f", /dev/shm has {show_bytes(machine.shm)}" if machine.shm is not None else ""
        yield Finding("ok", "limits", f"a process may open {files} files{shm}")


# ---- torch and what goes with it

def about_torch(torch: Mapping[str, Any], machine: Machine) -> Iterator[Finding]:
    if "died" in torch:
        yield Finding("wrong", "torch", f"The process that loads torch {torch['died']}.",
                      f"{_python()} -X faulthandler -c 'import torch'  shows it\n{install('torch', again=True)}")
        return
    if torch["broken"]:
        yield does_not_load("torch", torch["broken"])
        return
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPUs only"
    yield Finding("ok", "torch", f"{torch['version']}, built for {build}")
    for note in torch.get("notes", ()):
        if note.startswith("torch:"):
            yield Finding("note", "torch", note.removeprefix("torch:").strip(), install("'torch>=2.11'"))
    if "refused" in torch:
        if machine.misnamed is None:  # which is a finding already
            yield Finding("wrong", "device", *torch["refused"])
    elif torch["computes"]:
        yield Finding("wrong", "device", f"torch opens {torch['device']} ({torch['name']}), but cannot compute there: "
                      f"{torch['computes']}", "nvidia-smi  should show the GPU and room on it; if so: sudo reboot")
    elif torch["device"] == "cpu":
        yield Finding("note", "device", f"training runs on the CPU ({torch['name']}): good for trying things out, far "
                      "too slow for a GPT of 100M.")
    else:
        yield Finding("ok", "device", f"training runs on {torch['device']} ({torch['name']}), in {torch['dtype']}")


def about_packages(torch: Mapping[str, Any]) -> Iterator[Finding]:
    problems: Mapping[str, str] = torch.get("packages", {})
    yield from (does_not_load(name, problem) for name, problem in problems.items() if problem)
    if whole := [f"{name} {_version(name)}" for name, problem in problems.items() if not problem]:
        yield Finding("ok", "packages", ", ".join(whole))


def does_not_load(package: str, problem: str) -> Finding:
    if problem == ABSENT:
        return Finding("wrong", package, f"{package} {ABSENT} for {sys.executable}.", install("-e '.[train]'"))
    return Finding("wrong", package, f"{package} does not load: {problem}.", install(package, again=True))


def about_compiling(torch: Mapping[str, Any], machine: Machine) -> Iterator[Finding]:
    """torch.compile on a GPU: triton, and a C compiler that can build against this Python."""
    note = next((note for note in torch.get("notes", ()) if note.startswith("compile:")), "")
    why = note.removeprefix("compile:").strip()
    if "device" not in torch or torch["computes"]:
        return
    if not torch["device"].startswith("cuda"):
        yield Finding("ok", "compile", why)
    elif not torch["compile"]:
        yield Finding("note", "compile", f"{why} Training works, more slowly.", compile_fix(torch["tools"], machine))
    elif problem := try_compiler(machine.environment):
        yield Finding("note", "compile", f"torch.compile would fail: {problem}",
                      f"{system_install('compiler', 'headers')}\nOr train with --compile=False, more slowly")
    else:
        yield Finding("ok", "compile", "triton is here, and the C compiler builds against this Python")


# ---- commands that mend

def compile_fix(tools: Mapping[str, bool], machine: Machine) -> str:
    if not tools["triton"]:
        return install("triton-windows" if machine.platform == "win32" else "triton")
    lacking = [what for what, tool in (("compiler", "c_compiler"), ("headers", "python_headers")) if not tools[tool]]
    return system_install(*lacking) if lacking else ""


def install(package: str, *, again: bool = False) -> str:
    return f"{_python()} -m pip install {'--force-reinstall ' if again else ''}{package}"


def system_install(*what: str) -> str:
    """By this system's own package manager."""
    python = "python{}.{}".format(*sys.version_info)
    known = {"apt-get": {"compiler": "build-essential", "headers": f"{python}-dev"},
             "dnf": {"compiler": "gcc", "headers": f"{python}-devel"},
             "zypper": {"compiler": "gcc", "headers": "python3-devel"},
             "pacman": {"compiler": "gcc", "headers": "python"}}
    manager = next((name for name in known if shutil.which(name)), "apt-get")
    verb = "-S" if manager == "pacman" else "install"
    return f"sudo {manager} {verb} {' '.join(known[manager][each] for each in what)}"


def _python() -> str:
    return shlex.quote(sys.executable)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"
