"""PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF: fitgpt's default, and a check of what the user has set.

torch reads them when it is imported, and reports a mistake as an internal assertion.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping

from ..core.errors import DeviceError
from .host import or_none

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch 2.9 reads only the second
ALLOCATOR_DEFAULT = "expandable_segments:True"  # one growing segment per pool: far less fragmentation
USE_EXPANDABLE_SEGMENTS = f"{ALLOCATOR_VARIABLES[1]}={ALLOCATOR_DEFAULT}"  # as typed before a command
_BOOLEAN = ("expandable_segments", "pinned_use_background_threads", "pinned_use_cuda_host_register",
            "pinned_use_hip_host_register", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
            "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom")
_INTEGER = ("max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb", "pinned_num_register_threads",
            "pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")
_OTHER = ("roundup_power2_divisions", "garbage_collection_threshold", "per_process_memory_fraction", "backend",
          "pinned_free_catch_all")
# Options whose value is checked, what it is, and whether torch accepts it.
_VALUES: tuple[tuple[tuple[str, ...], str, Callable[[str], bool]], ...] = (
    (_BOOLEAN, "True or False", lambda value: value in ("True", "False")),
    (_INTEGER, "an integer", str.isdecimal),
    (("garbage_collection_threshold",), "a number between 0 and 1", lambda value: 0 < (or_none(float, value) or 0) < 1))


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that imports torch, with fitgpt's defaults where the user has set nothing."""
    # By default OpenMP's waiting threads keep their cores, and on a busy CPU the thread that they wait for then gets
    # none: a step took up to 20 times as long. Passive ones sleep (OpenMP 5.0, section 6.7).
    result = {"OMP_WAIT_POLICY": "passive", **environment}
    if not any(result.get(name) for name in ALLOCATOR_VARIABLES):
        result.update({name: ALLOCATOR_DEFAULT for name in ALLOCATOR_VARIABLES})
    return result


def wants_expandable_segments() -> bool:
    """Whether torch, imported with this process's environment, takes expandable segments."""
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in ALLOCATOR_VARIABLES)


def check_allocator_env(env: Mapping[str, str]) -> None:
    """DeviceError for a value that torch 2.11 to 2.13 cannot parse. Options that are unknown here are accepted."""
    for variable in (*ALLOCATOR_VARIABLES, "PYTORCH_HIP_ALLOC_CONF"):
        value = env.get(variable, "")
        if error := _error_in(value):
            raise DeviceError(f"{variable}={value!r}: {error}. It holds option:value pairs, separated by commas.",
                              f"unset {variable}, or set it to expandable_segments:True")


def _error_in(text: str) -> str:
    """What is wrong with the first option:value pair that torch cannot parse, a [list] being one value; or empty."""
    rest = "".join(text.split())
    while rest := rest.lstrip(","):
        option, colon, after = rest.partition(":")
        if not colon or "," in option:
            return f"{option.split(',')[0]!r} has no value"
        value, bracket, rest = after.partition("]") if after.startswith("[") else after.partition(",")
        if after.startswith("[") and not bracket:
            return f"the list of {option!r} is not closed"
        if not option or not value:
            return f"{option or ':' + value!r} has no {'value' if option else 'name'}"
        for options, wanted, accepted in _VALUES:
            if option in options and not accepted(value):
                return f"{option} is {wanted}, not {value!r}"
        known = (*_BOOLEAN, *_INTEGER, *_OTHER)
        meant = difflib.get_close_matches(option, known, n=1, cutoff=0.85)
        if meant and option not in known:
            return f"{option!r} is not an option of torch; {meant[0]!r} is"
    return ""
