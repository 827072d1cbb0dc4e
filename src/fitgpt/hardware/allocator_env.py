"""PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF: fitgpt's default, and a check of what the user has set.

torch reads them when it is imported, and reports a mistake as an internal assertion.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ..core.errors import DeviceError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch 2.9 reads only the second
ALLOCATOR_DEFAULT = "expandable_segments:True"  # one growing segment per pool: far less fragmentation
_BOOLEAN = ("expandable_segments", "pinned_use_background_threads", "pinned_use_cuda_host_register",
            "pinned_use_hip_host_register", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
            "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom")
_INTEGER = ("max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb", "pinned_num_register_threads",
          "pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb")
_OTHER = ("roundup_power2_divisions", "garbage_collection_threshold", "per_process_memory_fraction", "backend",
          "pinned_free_catch_all")


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that imports torch, with fitgpt's default unless the user has set a variable."""
    result = dict(environment)
    if not any(result.get(name) for name in ALLOCATOR_VARIABLES):
        result.update({name: ALLOCATOR_DEFAULT for name in ALLOCATOR_VARIABLES})
    return result


def check_allocator_env(env: Mapping[str, str]) -> None:
    """DeviceError for a value that torch 2.11 to 2.13 cannot parse. Options that are unknown here are accepted."""
    for variable in (*ALLOCATOR_VARIABLES, "PYTORCH_HIP_ALLOC_CONF"):
        if value := env.get(variable, ""):
            error = _error_in(value)
            if error:
                raise DeviceError(f"{variable}={value!r}: {error}. It holds option:value pairs, separated by commas.",
                                  f"unset {variable}, or set it to expandable_segments:True")


def _error_in(text: str) -> str:
    pairs = _parse_pairs(text)
    if isinstance(pairs, str):
        return pairs
    return next((error for option, value in pairs if (error := _error_in_option(option, value))), "")


def _parse_pairs(text: str) -> list[tuple[str, str]] | str:
    """The option:value pairs, a [list] being one value; or the error."""
    pairs, rest = [], "".join(text.split())
    while rest := rest.lstrip(","):
        option, colon, after = rest.partition(":")
        if not colon or "," in option:
            return f"{option.split(',')[0]!r} has no value"
        value, bracket, rest = after.partition("]") if after.startswith("[") else after.partition(",")
        if after.startswith("[") and not bracket:
            return f"the list of {option!r} is not closed"
        if not option or not value:
            return f"{option or ':' + value!r} has no {'value' if option else 'name'}"
        pairs.append((option, value))
    return pairs


def _error_in_option(option: str, value: str) -> str:
    if option in _BOOLEAN:
        return "" if value in ("True", "False") else f"{option} is True or False, not {value!r}"
    if option in _INTEGER:
        return "" if value.isdecimal() else f"{option} is an integer, not {value!r}"
    if option == "garbage_collection_threshold":
        return "" if _between_0_and_1(value) else f"{option} is a number between 0 and 1, not {value!r}"
    if option in _OTHER:
        return ""
    meant = difflib.get_close_matches(option, (*_BOOLEAN, *_INTEGER, *_OTHER), n=1, cutoff=0.85)
    return f"{option!r} is not an option of torch; {meant[0]!r} is" if meant else ""


def _between_0_and_1(value: str) -> bool:
    try:
        return 0 < float(value) < 1
    except ValueError:
        return False
