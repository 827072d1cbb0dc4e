"""Before a run starts: reads what is free on the GPU and who uses the rest, and checks that the run fits; CPU RAM too.

Runs in the supervisor, which never imports torch: a run that does not fit is reported without that wait.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

from ..config.run_config import RunConfig
from ..core.errors import DeviceError, UsageError
from ..core.extras import install_command
from ..core.units import show_bytes
from ..hardware import nvidia
from ..hardware.host import available_memory, spare_memory
from ..planning import host_memory
from ..planning.budget import Target, apply_limits, on_device, select_gpu
from ..planning.plan import Plan, plan_for
from ..planning.plan_file import PlanFile
from ..planning.request import with_data

LOOK_EVERY_S = 5.0
SAY_EVERY_S = 60.0


def check(config: RunConfig, planned: PlanFile | None = None, *, sleep: Callable[[float], None] = time.sleep,
          say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)) -> dict[str, int]:
    """Returns the bytes that others use of each GPU, by uuid; DeviceError if the run does not fit. With --wait it waits
    until it does. Checks nothing without an NVIDIA GPU, or where only torch can tell which one is meant."""
    if config.adam8bit == "bitsandbytes" and not config.eval_only and find_spec("bitsandbytes") is None:
        raise UsageError(f"adam8bit=bitsandbytes needs the package bitsandbytes, which is not installed for "
                         f"{sys.executable}.", f"{install_command('bitsandbytes')}, or --adam8bit=own")
    last_said, waited = -SAY_EVERY_S, 0.0
    while True:
        seen = nvidia.survey() if config.device not in ("cpu", "mps") else nvidia.Survey()
        on_cpu = config.device == "cpu" or (config.device == "auto" and not seen.gpus and not other_gpu())
        host_memory.check(config, available_memory(), on_cpu=on_cpu)
        found = _target(config, seen)
        if found is None:
            if planned is not None:
                planned.check_nvidia()
            return {}
        others = {gpu.uuid: gpu.used_bytes for gpu in seen.gpus if gpu.uuid and gpu.used_bytes is not None}
        if config.eval_only:
            return others
        plan = plan_for(with_data(config)[0], found)
        if planned is not None:
            planned.compare(plan)
        if plan.headroom >= 0:
            return others
        could_fit = replace(plan, budget=apply_limits(config, plan.budget._replace(others=0))).headroom >= 0
        if not config.wait or not could_fit:
            raise does_not_fit(config, plan, could_wait=could_fit)
        if waited - last_said >= SAY_EVERY_S:
            last_said = waited
            say(f"fitgpt: waiting for memory of {_card(found)}: the run needs {show_bytes(plan.forecast.needs)}, and "
                f"{show_bytes(found.budget.reserve_limit)} is free. {found.neighbours}".rstrip())
        sleep(LOOK_EVERY_S)
        waited += LOOK_EVERY_S


def other_gpu() -> bool:
    """Whether there may be a GPU that is not NVIDIA's: an Apple one, or AMD's with ROCm's driver."""
    return sys.platform == "darwin" or os.path.exists("/dev/kfd")


def _target(config: RunConfig, seen: nvidia.Survey) -> Target | None:
    if not seen.gpus:
        return None
    try:
        found = on_device(select_gpu(seen, config.device))
    except UsageError:  # no such GPU: the worker, which has torch, gives the better message
        return None
    return found._replace(budget=apply_limits(config, found.budget))


def does_not_fit(config: RunConfig, plan: Plan, *, could_wait: bool) -> DeviceError:
    """The error: what the run needs, what is free, who uses the rest, and the changes that make it fit."""
    found, budget = plan.target, plan.budget
    parts = [f"{show_bytes(budget.usable)} usable"]
    parts += [f"{show_bytes(budget.others)} used by others"] if budget.others else []
    parts += [f"{config.leave} to be left free"] if config.leave else []
    parts += [f"a budget of {config.budget}"] if config.budget else []
    parts += [f"{show_bytes(budget.outside)} outside the allocator"]
    changes = plan.changes
    fixes = ["Add " + "; or ".join(" ".join(change.flags) + (
        "" if change.exact else f" ({change.rank})") for change in changes) + "."] if changes else []
    fixes += ["Add --wait to start as soon as others have freed enough."] if could_wait and not config.wait else []
    fixes += [] if changes else [_several_changes(with_data(config)[0], found)]
    return DeviceError(
        f"The run does not fit {_card(found)}: it needs {show_bytes(plan.forecast.needs)}, and "
        f"{show_bytes(budget.reserve_limit)} is available ({', '.join(parts)}). {found.neighbours}".rstrip(),
        "\n".join(fixes))


def _several_changes(config: RunConfig, found: Target) -> str:
    """If no single change is enough: those that `fit` finds, or what would have to be allowed."""
    from ..planning.fit_goals import describe_suggestions, find_fastest
    from ..planning.fit_search import FitTarget

    fitted = find_fastest(config, FitTarget(found.platform, found.budget, found.card, host_bytes=spare_memory()))
    if fitted.chosen is not None:
        return f"Add {' '.join(fitted.chosen.flags)}."
    how = " `fitgpt fit` with the same options, that flag and -o config/my_run.py writes a config that trains so."
    return describe_suggestions(fitted) + (how if fitted.suggestions else "")


def _card(found: Target) -> str:
    return f"the {found.budget.card}" if found.budget.card else "the GPU"
