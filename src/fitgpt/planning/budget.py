"""Where a run will take place: which card, how much of it this process may hold, and which torch.

A card is named with --gpu, or it is the one that is here; then its memory and its neighbours are asked of the driver.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import MiB, parse_bytes, show_bytes
from ..hardware import gpus
from ..hardware.gpus import Card
from ..memory.setting import DEFAULT_TORCH, Setting, setting_for
from ..nouns import Budget
from .forecast import budget_for

if TYPE_CHECKING:
    from ..hardware.nvidia import GpuReading, Survey

WITHOUT_A_GPU = "--gpu 4070 names a card that is not here; `fitgpt cards` lists them."
NEIGHBOURS_NAMED = 3


class Place(NamedTuple):
    setting: Setting
    budget: Budget
    card: Card | None         # None: not in the table
    neighbours: str = ""      # who holds memory of the card now, in words
    notes: tuple[str, ...] = ()


def named(gpu: str, *, others: int | None, budget: int | None, torch: str = "") -> Place:
    """A card that is not here, by any name people give it."""
    card = gpus.find(gpu)
    if card.vendor != "nvidia":
        return _of_another_vendor(card, others=others, budget=budget, torch=torch)
    found, twins = on_card(card, others=others or 0, budget=budget, torch=torch), gpus.twins(gpu)
    note = f"{gpu!r} is also said of the {' and the '.join(twins)}: the smallest is taken, unless the name says which."
    return found._replace(notes=(note,)) if twins else found


def on_card(card: Card, *, others: int = 0, budget: int | None = None, torch: str = "") -> Place:
    found = budget_for(card, others=others, budget=budget)
    _check_sizes(found, others if others else None, budget)
    windows = sys.platform == "win32"
    setting = setting_for(card, torch=torch_version(torch), windows=windows)
    return Place(_with_allocator(setting, windows), found, card)


def unnamed(*, others: int | None, budget: int, torch: str = "") -> Place:
    """Only a budget is known: a card that has just that, of the newest kind that most people have."""
    usable = budget + (others or 0)
    outside = _outside_of_any(usable)
    sources = (f"No card is named: a process is taken to hold {show_bytes(outside)} outside PyTorch's allocator, as "
               "much as on any card of that size, and the run to be on compute capability 8.9.",)
    windows = sys.platform == "win32"
    setting = Setting((8, 9), torch_version(torch), compiles=not windows)
    found = Budget("", usable, others or 0, budget, outside, sources)
    return Place(_with_allocator(setting, windows), found, None)


def here(device: str, *, others: int | None, budget: int | None, torch: str = "") -> Place:
    """The GPU that `train` would take, as the driver sees it now."""
    from ..hardware.nvidia import survey

    if device in ("cpu", "mps"):
        raise UsageError(f"device={device}: what is planned is the memory of an NVIDIA GPU.", WITHOUT_A_GPU)
    seen = survey()
    if seen.gpus:
        return on_device(chosen(seen, device), others=others, budget=budget, torch=torch)
    if budget is not None:
        return unnamed(others=others, budget=budget, torch=torch)
    why = f"CUDA_VISIBLE_DEVICES={seen.chosen!r} hides all of them" if seen.hidden else seen.reason
    raise UsageError(f"There is no GPU here to plan for: {why}.",
                     f"{WITHOUT_A_GPU}\nOr say only what the run may hold: --budget 11.5GiB")


def on_device(reading: GpuReading, *, others: int | None = None, budget: int | None = None, torch: str = "") -> Place:
    """A GPU that is here. What the driver does not say is taken from the table of cards."""
    card = gpus.match_device(reading.name, reading.total_bytes // MiB if reading.total_bytes else None)
    usable = reading.usable_bytes or (card.usable_mib * MiB if card and card.usable_mib else None)
    if usable is None and reading.total_bytes is not None:
        usable = gpus.usable_by_rule(reading.total_bytes // MiB) * MiB
    if usable is None:
        raise UsageError(f"The driver does not say how much memory {reading.name} has.",
                         "Say what the run may hold: --gpu NAME, or --budget 11.5GiB")
    held = others if others is not None else reading.used_bytes or 0
    known = card is not None and card.outside_mib is not None
    outside = card.outside_mib * MiB if card and card.outside_mib else _outside_of_any(usable)
    sources = [f"The driver gives {show_bytes(usable)} of GPU {reading.index}, {reading.name}."]
    if not known:
        sources.append(f"{reading.name} is not in the table of cards: a process is taken to hold "
                       f"{show_bytes(outside)} outside PyTorch's allocator, as much as on any card of that size.")
    found = Budget(card.name if card else reading.name, usable, held, usable - held if budget is None else budget,
                   outside, tuple(sources))
    _check_sizes(found, others, budget)
    major, _, minor = (reading.cc or "8.9").partition(".")
    windows = sys.platform == "win32"
    setting = Setting((int(major), int(minor or 0)), torch_version(torch),
                      compiles=(int(major), int(minor or 0)) >= (7, 0) and not windows,
                      sms=card.sms if card and card.sms else Setting.sms)
    said = _neighbours(reading) if others is None else ""
    return Place(_with_allocator(setting, windows), found, card, said)


def beside(config: RunConfig, budget: Budget) -> Budget:
    """The budget that others leave, that --leave keeps free, and that --budget allows."""
    if config.budget and parse_bytes(config.budget) > budget.usable:
        raise UsageError(f"--budget {config.budget} is more than the {show_bytes(budget.usable)} that CUDA gives of "
                         f"{budget.card or 'the card'}.", "Leave it out, or say less.")
    kept_free = parse_bytes(config.leave) if config.leave else 0
    if kept_free >= budget.usable:
        raise UsageError(f"--leave {config.leave} leaves the run nothing: CUDA gives {show_bytes(budget.usable)} of "
                         f"{budget.card or 'the card'} in all.", "--leave 1GiB, or leave it out.")
    left = budget.usable - budget.others - kept_free
    said = parse_bytes(config.budget) if config.budget else left
    return budget._replace(budget=max(min(said, left), 0))


def check_runs(config: RunConfig, place: Place, trainer: str) -> None:
    """What `train` would refuse on that card is refused here."""
    name, (major, minor) = place.budget.card or "the card", place.setting.capability
    if trainer == "fitgpt" and config.dtype == "bfloat16" and not place.setting.has_bf16:
        raise UsageError(f"dtype=bfloat16 needs compute capability 8.0 or higher; {name} has {major}.{minor}.",
                         "--dtype=float16")
    if trainer == "fitgpt" and config.step_in_backward and config.dtype == "auto" and not place.setting.has_bf16:
        raise UsageError(f"step_in_backward cannot skip a step, which float16 must be able to, and {name} has no "
                         "bfloat16.", "--dtype=float32")
    if config.compile is True and (major, minor) < (7, 0):
        raise UsageError(f"compile=True needs compute capability 7.0 or higher; {name} has {major}.{minor}.",
                         "--compile=False")


# ---- torch


def torch_version(asked: str = "") -> str:
    """As asked; else the installed one, found without loading it; else the one we test with. Major and minor."""
    found = re.match(r"\d+\.\d+", asked or _installed_torch() or DEFAULT_TORCH)
    return found[0] if found else DEFAULT_TORCH


def _installed_torch() -> str:
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
        folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            found = re.search(r"__version__ *= *['\"]([0-9.]+)", file.read(10_000))
        return found[1] if found else ""
    except (OSError, ValueError, ImportError):
        return ""


def _with_allocator(setting: Setting, windows: bool) -> Setting:
    """`train` asks for expandable segments, unless the user's environment says something else; nanoGPT goes by that
    alone. torch has none on Windows."""
    if windows or not any("ALLOC_CONF" in name for name in os.environ):
        return replace(setting, expandable=not windows)
    from ..hardware.nvidia import ALLOCATOR_VARIABLES  # asked for late: it loads what plans for other cards never need

    told = [value.replace(" ", "").lower() for name in ALLOCATOR_VARIABLES if (value := os.environ.get(name))]
    expands = all("expandable_segments:true" in value for value in told)
    return replace(setting, expandable=expands, asked_to_expand=expands and bool(told))


def left_out_of_the_forecast() -> list[str]:
    """What the environment tells the allocator, and a forecast does not follow."""
    values = [value.lower() for name, value in os.environ.items() if re.fullmatch(r"PYTORCH_\w*ALLOC_CONF", name)]
    told = {option for value in values for option in re.findall(r"(?:^|,) *([a-z]\w*) *:", value)}
    told.discard("expandable_segments")
    return [f"The environment sets {', '.join(sorted(told))} for PyTorch's allocator: the forecast is without, and "
            "what is reserved may differ."] if told else []


# ---- the GPUs here


def chosen(seen: Survey, device: str) -> GpuReading:
    """cuda:N is the Nth that CUDA_VISIBLE_DEVICES leaves; auto the one with the most free memory, as in `train`."""
    if device == "auto":
        return max(seen.gpus, key=lambda gpu: gpu.free_bytes or 0)
    number = int(device.partition(":")[2] or 0)
    if number >= len(seen.gpus):
        there = ", ".join(f"cuda:{place} ({gpu.name})" for place, gpu in enumerate(seen.gpus))
        raise UsageError(f"device={device} is not here. The driver shows {there}.", "--device=auto")
    return seen.gpus[number]


def _neighbours(reading: GpuReading) -> str:
    if not reading.used_bytes:
        return "Nothing else is on the card now."
    from ..hardware.gpu_stats import programs

    named = [f"{each.name} {show_bytes(each.nbytes)}" for each in programs(reading.processes, reading.total_bytes)
             if each.nbytes]
    who = f": {', '.join(named[:NEIGHBOURS_NAMED])}{' …' if len(named) > NEIGHBOURS_NAMED else ''}" if named else ""
    return f"Others hold {show_bytes(reading.used_bytes)} of it now{who}."


# ---- what is not known


def _of_another_vendor(card: Card, *, others: int | None, budget: int | None, torch: str) -> Place:
    memory = f" of its {card.memory_gb} GB" if card.memory_gb else ""
    if card.vendor == "apple":
        raise UsageError(f"{card.name}: PyTorch's allocator for Apple GPUs is another one, which fitgpt has no model "
                         "of, and their memory is the system's.", "fitgpt cards lists the cards that can be planned.")
    if budget is None:
        raise UsageError(f"{card.name}: what ROCm gives{memory} and what a process holds outside PyTorch's allocator "
                         "there has not been measured.", f"Say what the run may hold: --gpu {shlex.quote(card.name)} "
                         f"--budget {max((card.memory_gb or 12) - 2, 1)}GiB")
    place = unnamed(others=others, budget=budget, torch=torch)
    note = (f"{card.name}: workspaces and kernels of ROCm have not been measured; the plan is that of an NVIDIA card "
            "with the same budget.")
    return place._replace(budget=place.budget._replace(card=card.name), card=card, notes=(note,))


def _outside_of_any(usable: int) -> int:
    """The most that a process holds outside the allocator on any card that is no larger."""
    known = [(card.usable_mib, card.outside_mib) for card in gpus.load() if card.usable_mib and card.outside_mib]
    smaller = [outside for size, outside in known if size * MiB <= 1.1 * usable]
    return (max(smaller) if smaller else min(outside for _, outside in known)) * MiB


def _check_sizes(found: Budget, others: int | None, budget: int | None) -> None:
    card = found.card or "the card"
    if others is not None and others >= found.usable:
        raise UsageError(f"--others {show_bytes(others)} leaves nothing: CUDA gives {show_bytes(found.usable)} of "
                         f"{card} in all.", "--others 2GiB, or leave it out.")
    if budget is not None and budget > found.usable:
        raise UsageError(f"--budget {show_bytes(budget)} is more than the {show_bytes(found.usable)} that CUDA gives "
                         f"of {card}.", f"--budget {found.usable // MiB}MiB, or leave it out.")
    if budget is not None and others is not None and budget + others > found.usable:
        raise UsageError(f"--budget {show_bytes(budget)} and --others {show_bytes(others)} are together more than the "
                         f"{show_bytes(found.usable)} that CUDA gives of {card}.", "Leave one of them out.")
