"""Which GPU, how much of it → Target: the platform a run is on, and the memory it may use there.

That memory is what the GPU offers, less other processes and what this process uses outside PyTorch's allocator (CUDA
context, kernels, NCCL). A GPU is named with --gpu, or it is the one installed here; then the driver says who uses its
memory now.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import KiB, MiB, optional_bytes, parse_bytes, show_bytes
from ..hardware import gpus
from ..hardware.allocator_env import ALLOCATOR_VARIABLES
from ..hardware.gpus import GpuModel
from ..memory.platform import DEFAULT_TORCH, Platform
from . import gpu_record

if TYPE_CHECKING:
    from ..hardware.nvidia import GpuReading, Survey

NAME_ONE = "Name one (`fitgpt cards` lists them)"
PROCESSES_NAMED = 3


class Budget(NamedTuple):
    """What a run may use of a GPU. Bytes as nvidia-smi counts a process: the CUDA context included."""

    card: str              # "RTX 4070"
    usable: int            # what CUDA offers of the GPU's memory
    others: int            # used by other processes
    budget: int            # usable − others, or what the user allows
    outside: int           # of this process, outside PyTorch's allocator: CUDA context and kernels
    sources: tuple[str, ...] = ()  # where the figures come from, one sentence each
    margin: int = 0        # kept free where `outside` is a formula's figure
    nccl: int = 0          # of `outside`: NCCL's buffers, if there are several ranks
    desktop: bool = False  # whether a desktop may run on the GPU, and `others` leaves it out

    @property
    def reserve_limit(self) -> int:
        """The most that the allocator can reserve; negative where not even `outside` has room."""
        return self.budget - self.outside - self.margin


# What NCCL uses outside PyTorch's allocator (docs/many_gpus.md): kernels and their local memory, as measured with one
# rank on an H200, in proportion to the multiprocessors; and buffers per channel, from NVIDIA's own figures.
NCCL_KERNELS_MIB, H200_SMS = 558, 132
NCCL_MIB_PER_CHANNEL, NVLINK_CHANNELS, PCIE_CHANNELS = 24, 24, 4
WITH_NVLINK = re.compile(r"\b(V100|A100|A800|H100|H200|H800|GH200|B200|B300|GB200)\b")


class Target(NamedTuple):
    """Where a run is planned for."""

    platform: Platform
    budget: Budget
    card: GpuModel | None     # None: not in the table
    neighbours: str = ""      # which processes use the GPU now, one sentence
    notes: tuple[str, ...] = ()


# ---- a GPU by name


def target_for(gpu: str, device: str, *, others: str = "", budget: str = "", torch: str = "") -> Target:
    """The GPU of that name, or the one installed here if it is empty. Sizes are as typed: "11.5GiB"; `others`
    without a unit is in MiB, as nvidia-smi prints it."""
    if several := several_gpus(gpu):
        raise UsageError(f"--gpu {gpu} names several GPUs, and --gpu plans for one.",
                         f"--gpus {len(several)}x{shlex.quote(several[0])}")
    other_bytes, budget_bytes = optional_bytes(others, "MiB"), optional_bytes(budget)
    if gpu:
        return named(gpu, others=other_bytes, budget=budget_bytes, torch=torch)
    return installed(device, others=other_bytes, budget=budget_bytes, torch=torch)


def several_gpus(gpu: str) -> list[str]:
    """"2x4070" or "4070,4070" → a name per GPU; empty where one is named."""
    if times := re.fullmatch(r"(\d+)x(\S.*)", gpu):
        return [times[2]] * int(times[1])
    return [each.strip() for each in gpu.split(",")] if "," in gpu.strip(",") else []


def named(gpu: str, *, others: int | None, budget: int | None, torch: str = "") -> Target:
    """A GPU that need not be here, by any name people use for it."""
    card, twins = gpus.find(gpu), gpus.other_matches(gpu)
    if card.vendor == "apple":
        raise UsageError(f"{card.name}: PyTorch has a different allocator for Apple GPUs, which fitgpt does not model, "
                         "and their memory is shared with the system.", "fitgpt cards")
    if card.vendor == "nvidia":
        note = f"{gpu!r} also means the {' and the '.join(twins)}: the smallest is taken unless the name says which."
        target = on_card(card, others=others, budget=budget, torch=torch)
        return target._replace(notes=(note, *target.notes)) if twins else target
    if budget is None:
        memory = f" of its {card.memory_gb} GB" if card.memory_gb else ""
        raise UsageError(f"{card.name}: how much{memory} ROCm offers, and what a process uses there outside PyTorch's "
                         "allocator, has not been measured: give what the run may use.", "--gpu "
                         f"{shlex.quote(card.name)} --budget {max((card.memory_gb or 12) - 2, 1)}GiB")
    target = unnamed(others=others, budget=budget, torch=torch)
    note = (f"{card.name}: workspaces and kernels of ROCm have not been measured; the plan is that of an NVIDIA GPU "
            "with the same budget.")
    return target._replace(budget=target.budget._replace(card=card.name), card=card, notes=(note,))


def on_card(card: GpuModel, *, others: int | None = None, budget: int | None = None, torch: str = "") -> Target:
    """A row of the table of GPUs, with what was recorded on this machine's GPU of that model."""
    card = gpu_record.with_own_record(card)
    allowed = budget_for(card, others=others or 0, budget=budget)
    allowed = allowed._replace(desktop=card.is_geforce and others is None and budget is None)
    _check_sizes(allowed, others or None, budget)
    platform = _platform_here(card.capability or (9, 0), torch, card)
    return Target(platform, allowed, card, notes=_shared_memory_note(card))


def platform_for(card: GpuModel, *, torch: str = DEFAULT_TORCH) -> Platform:
    """The platform that a GPU of the table gives a run on Linux."""
    capability = card.capability or (9, 0)
    return with_record(Platform(capability, torch, compiles=capability >= (7, 0), sms=card.sms or Platform.sms), card)


def with_record(platform: Platform, card: GpuModel | None) -> Platform:
    """With what was recorded on the GPU; the workspace and the attention kernel hold for one version of torch."""
    if card is None:
        return platform
    same_torch = card.recorded_torch == platform.torch
    return replace(platform, recorded_cache=(card.l2_mib or 0) * MiB,
                   recorded_workspace=(card.workspace_kib or 0) * KiB if same_torch else 0,
                   recorded_attention=card.attention if same_torch else "")


def budget_for(card: GpuModel, *, others: int = 0, budget: int | None = None) -> Budget:
    """What a process may use of a GPU, from the table's figures."""
    assert card.usable_mib is not None  # every NVIDIA row has both
    assert card.outside_mib is not None
    usable, outside = card.usable_mib * MiB, card.outside_mib * MiB
    sources = (f"CUDA offers {card.usable_mib} MiB of the {card.name} ({card.usable_src}).",
               f"A training process uses {card.outside_mib} MiB outside PyTorch's allocator ({card.outside_src}).")
    return Budget(card.name, usable, others, usable - others if budget is None else budget, outside, sources)


def unnamed(*, others: int | None, budget: int, torch: str = "") -> Target:
    """Only a budget is known: a GPU with just that much, of the most common recent architecture."""
    usable = budget + (others or 0)
    outside = _largest_outside(usable)
    sources = (f"No GPU is named: a process is assumed to use {show_bytes(outside)} outside PyTorch's allocator, the "
               "most of any GPU of that size, on compute capability 8.9.",)
    return Target(_platform_here((8, 9), torch, None), Budget("", usable, others or 0, budget, outside, sources), None)


def targets_for(gpu: str, config: RunConfig, *, others: str = "", budget: str = "",
                torch: str = "") -> tuple[RunConfig, list[Target]]:
    """(the config with the number of its ranks, the GPU of each rank). `gpu`: --gpu; without --gpus there is one."""
    gpus_given = config.gpus
    if not gpus_given:
        return config, [target_for(gpu, config.device, others=others, budget=budget, torch=torch)]
    if gpu:
        raise UsageError(f"--gpu {gpu} plans for one GPU, and --gpus {gpus_given} for several.",
                         f"--gpus {config.ranks if config.ranks > 1 else 2}x{shlex.quote(gpu)}")
    count, times, name = gpus_given.partition("x")
    if times and name == "cpu":
        raise UsageError(f"--gpus {gpus_given}: plans are for the memory of NVIDIA GPUs. {NAME_ONE}.", "--gpus 2x4070")
    if times:
        return config, [target_for(name, config.device, others=others, budget=budget, torch=torch)] * int(count)

    from ..hardware.nvidia import survey

    seen = survey()
    numbers = [str(index) for index in range(len(seen.gpus))] if gpus_given == "all" else gpus_given.split(",")
    if not seen.gpus:
        raise UsageError(f"--gpus {gpus_given}: there is no GPU here to plan for: {seen.reason}. {NAME_ONE}.",
                         "--gpus 2x4070")
    config = replace(config, gpus=",".join(numbers) if len(numbers) > 1 else "")
    return config, [target_for("", f"cuda:{number}", others=others, budget=budget, torch=torch) for number in numbers]


# ---- a GPU that is installed here


def installed(device: str, *, others: int | None, budget: int | None, torch: str = "") -> Target:
    """The GPU that `train` would use, with the memory that is free now."""
    from ..hardware.nvidia import survey

    if device in ("cpu", "mps"):
        raise UsageError(f"device={device}: plans are for the memory of NVIDIA GPUs. {NAME_ONE}.", "--gpu 4070")
    seen = survey()
    if seen.gpus:
        return on_device(select_gpu(seen, device), others=others, budget=budget, torch=torch)
    if budget is not None:
        return unnamed(others=others, budget=budget, torch=torch)
    why = f"CUDA_VISIBLE_DEVICES={seen.chosen!r} hides all of them" if seen.hidden else seen.reason
    raise UsageError(f"There is no GPU here to plan for: {why}. {NAME_ONE}, or give only what the run may use.",
                     "--gpu 4070, or --budget 11.5GiB")


def select_gpu(seen: Survey, device: str) -> GpuReading:
    """cuda:N is the Nth that CUDA_VISIBLE_DEVICES leaves; auto the one with the most free memory, as in `train`."""
    if device == "auto":
        return max(seen.gpus, key=lambda gpu: gpu.free_bytes or 0)
    number = int(device.partition(":")[2] or 0)
    if number >= len(seen.gpus):
        there = ", ".join(f"cuda:{index} ({gpu.name})" for index, gpu in enumerate(seen.gpus))
        raise UsageError(f"device={device} is not here. The driver shows {there}.", "--device=auto")
    return seen.gpus[number]


def on_device(reading: GpuReading, *, others: int | None = None, budget: int | None = None, torch: str = "") -> Target:
    """What the driver reports of a GPU; what it does not report comes from the table of GPUs."""
    card = gpu_record.find(reading.name, reading.total_bytes // MiB if reading.total_bytes else None)
    usable = reading.usable_bytes or (card.usable_mib * MiB if card and card.usable_mib else None)
    if usable is None and reading.total_bytes is not None:
        usable = gpus.usable_by_rule(reading.total_bytes // MiB) * MiB
    if usable is None:
        raise UsageError(f"The driver does not report how much memory {reading.name} has. Give what the run may use.",
                         "--budget 11.5GiB")
    used = others if others is not None else reading.used_bytes or 0
    outside = card.outside_mib * MiB if card and card.outside_mib else _largest_outside(usable)
    sources = [f"The driver offers {show_bytes(usable)} of GPU {reading.index}, {reading.name}."]
    if card and card.outside_src == gpu_record.OWN:
        sources.append(f"A training process uses {card.outside_mib} MiB outside PyTorch's allocator ({gpu_record.OWN}, "
                       f"{card.recorded}).")
    if card is None or card.outside_mib is None:
        sources.append(f"{reading.name} is not in the table of GPUs: a process is assumed to use "
                       f"{show_bytes(outside)} outside PyTorch's allocator, the most of any GPU of that size.")
    allowed = Budget(card.name if card else reading.name, usable, used, usable - used if budget is None else budget,
                     outside, tuple(sources))
    _check_sizes(allowed, others, budget)
    major, _, minor = (reading.cc or "8.9").partition(".")
    neighbours = ""
    if others is None and not reading.used_bytes:
        neighbours = "No other process uses the GPU now."
    elif others is None:
        found = [f"{each.name} {show_bytes(each.nbytes)}" for each in reading.processes if each.nbytes]
        more = " …" if len(found) > PROCESSES_NAMED else ""
        names = f": {', '.join(found[:PROCESSES_NAMED])}{more}" if found else ""
        neighbours = f"Other processes use {show_bytes(reading.used_bytes or 0)} of it now{names}."
    notes = _shared_memory_note(card)
    if notes and reading.used_bytes is None:
        neighbours = ""
    return Target(_platform_here((int(major), int(minor or 0)), torch, card), allowed, card, neighbours, notes)


def _shared_memory_note(card: GpuModel | None) -> tuple[str, ...]:
    if card is None or not card.shares_memory:
        return ()
    return (f"The {card.name} shares its memory with the system, and the driver does not report what is in use: give "
            "what the system, other programs and the page cache use with --others. Nothing was measured on such GPUs.",)


def _largest_outside(usable: int) -> int:
    """The most that a process uses outside the allocator on any GPU that is no larger. Bytes."""
    known = [(card.usable_mib, card.outside_mib) for card in gpus.load() if card.usable_mib and card.outside_mib]
    smaller = [outside for size, outside in known if size * MiB <= 1.1 * usable]
    return (max(smaller) if smaller else min(outside for _, outside in known)) * MiB


# ---- limits


def apply_limits(config: RunConfig, budget: Budget) -> Budget:
    """The budget within what others leave, what --leave keeps free and what --budget allows."""
    if config.budget and parse_bytes(config.budget) > budget.usable:
        raise UsageError(f"--budget {config.budget} is more than the {show_bytes(budget.usable)} that CUDA offers of "
                         f"{budget.card or 'the GPU'}.", f"--budget {budget.usable // MiB}MiB")
    kept_free = parse_bytes(config.leave) if config.leave else 0
    if kept_free >= budget.usable:
        raise UsageError(f"--leave {config.leave} leaves the run nothing: CUDA offers {show_bytes(budget.usable)} of "
                         f"{budget.card or 'the GPU'} in all.", "--leave 1GiB")
    left = budget.usable - budget.others - kept_free
    allowed = parse_bytes(config.budget) if config.budget else left
    return budget._replace(budget=max(min(allowed, left), 0),
                           desktop=budget.desktop and not config.budget and not config.leave)


def has_nvlink(card: str) -> bool:
    """Whether GPUs of that name are usually connected by NVLink."""
    return WITH_NVLINK.search(card) is not None


def for_ranks(config: RunConfig, target: Target) -> Target:
    """The target of one rank of several: NCCL's memory is outside the allocator, too."""
    budget = target.budget
    if config.ranks == 1 or config.backend == "gloo" or config.device == "cpu" or budget.nccl:
        return target
    link, channels = ("NVLink", NVLINK_CHANNELS) if has_nvlink(budget.card) else ("PCIe", PCIE_CHANNELS)
    nccl = (NCCL_KERNELS_MIB * target.platform.sms // H200_SMS + NCCL_MIB_PER_CHANNEL * channels) * MiB
    source = (f"NCCL is estimated to use {show_bytes(nccl)} more per rank: kernels, as measured on an H200 with one "
              f"rank, and {channels} channels ({link}) of {NCCL_MIB_PER_CHANNEL} MiB. Not measured on several GPUs.")
    return target._replace(budget=budget._replace(outside=budget.outside + nccl, nccl=nccl,
                                                  sources=(*budget.sources, source)))


def _check_sizes(allowed: Budget, others: int | None, budget: int | None) -> None:
    gpu = allowed.card or "the GPU"
    if others is not None and others >= allowed.usable:
        raise UsageError(f"--others {show_bytes(others)} leaves nothing: CUDA offers {show_bytes(allowed.usable)} of "
                         f"{gpu} in all.", "--others 2GiB")
    if budget is not None and budget > allowed.usable:
        raise UsageError(f"--budget {show_bytes(budget)} is more than the {show_bytes(allowed.usable)} that CUDA "
                         f"offers of {gpu}.", f"--budget {allowed.usable // MiB}MiB")
    if budget is not None and others is not None and budget + others > allowed.usable:
        raise UsageError(f"--budget {show_bytes(budget)} and --others {show_bytes(others)} are together more than the "
                         f"{show_bytes(allowed.usable)} that CUDA offers of {gpu}.",
                         f"--budget {(allowed.usable - others) // MiB}MiB")


def check_supported(config: RunConfig, target: Target, trainer: str) -> None:
    """UsageError for a run that `train` would reject on that GPU."""
    name, (major, minor) = target.budget.card or "the GPU", target.platform.capability
    if trainer == "fitgpt" and config.dtype == "bfloat16" and not target.platform.has_bf16:
        raise UsageError(f"dtype=bfloat16 needs compute capability 8.0 or higher; {name} has {major}.{minor}.",
                         "--dtype=float16")
    if trainer == "fitgpt" and config.step_in_backward and config.dtype == "auto" and not target.platform.has_bf16:
        raise UsageError(f"step_in_backward cannot skip a step, which float16 must be able to, and {name} has no "
                         "bfloat16.", "--dtype=float32")
    if config.compile is True and (major, minor) < (7, 0):
        raise UsageError(f"compile=True needs compute capability 7.0 or higher; {name} has {major}.{minor}.",
                         "--compile=False")


# ---- torch and its allocator


def _platform_here(capability: tuple[int, int], torch: str, card: GpuModel | None) -> Platform:
    """The platform of a run in this environment. `train` sets expandable_segments unless PYTORCH_CUDA_ALLOC_CONF is
    set; nanoGPT leaves it to that variable. torch has no expandable segments and no Triton on Windows."""
    windows = sys.platform == "win32"
    values = [value.replace(" ", "").lower() for name in ALLOCATOR_VARIABLES if (value := os.environ.get(name))]
    expandable = not windows and all("expandable_segments:true" in value for value in values)
    platform = Platform(capability, torch_version(torch), expandable=expandable,
                        expandable_requested=expandable and bool(values), compiles=capability >= (7, 0) and not windows,
                        sms=card.sms if card and card.sms else Platform.sms)
    return with_record(platform, card)


def torch_version(given: str = "") -> str:
    """The version given; else the installed one, found without importing it; else DEFAULT_TORCH. Major and minor."""
    from importlib.util import find_spec

    found = re.match(r"\d+\.\d+", given)
    if not given:
        try:
            spec = find_spec("torch")
            version_file = Path((spec and spec.origin) or "").with_name("version.py")
            found = re.search(r"__version__ *= *['\"](\d+\.\d+)", version_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, ImportError):
            return DEFAULT_TORCH
    return found[found.lastindex or 0] if found else DEFAULT_TORCH


def unmodelled_allocator_options() -> list[str]:
    """A note on the allocator options in the environment that a forecast does not follow."""
    values = [value.lower() for name, value in os.environ.items() if re.fullmatch(r"PYTORCH_\w*ALLOC_CONF", name)]
    options = {option for value in values for option in re.findall(r"(?:^|,) *([a-z]\w*) *:", value)}
    options.discard("expandable_segments")
    return [f"The environment sets {', '.join(sorted(options))} for PyTorch's allocator. The forecast does not model "
            "that: what is reserved may differ."] if options else []
