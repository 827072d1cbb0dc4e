"""PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF: what torch accepts is accepted, the rest is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fitgpt.core.errors import DeviceError
from fitgpt.hardware.allocator_env import check_allocator_env


@pytest.mark.parametrize("value", [
    "", "expandable_segments:True", "expandable_segments:True,", " max_split_size_mb : 128 ", "some_new_option:7",
    "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:False", "backend:cudaMallocAsync",
    "garbage_collection_threshold:0.8", "pinned_num_register_threads:8",
])
def test_allocator_settings_that_torch_accepts_are_accepted(value: str) -> None:
    check_allocator_env({"PYTORCH_CUDA_ALLOC_CONF": value})


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(("value", "error"), [
    ("expandable_segments", "has no value"), ("expandable_segments:", "has no value"), (":True", "has no name"),
    ("expandable_segments=True", "has no value"), ("expandable_segments:true", "True or False, not 'true'"),
    ("expandable_segments:True;max_split_size_mb:64", "True or False"), ("max_split_size_mb:abc", "is an integer"),
    ("max_split_size_mb,backend:native", "'max_split_size_mb' has no value"),
    ("roundup_power2_divisions:[256:1", "not closed"), ("garbage_collection_threshold:1.5", "between 0 and 1"),
    ("expandable_segment:True", "'expandable_segments' is"),
])
def test_malformed_allocator_settings_are_an_error_with_the_value(variable: str, value: str, error: str) -> None:
    with pytest.raises(DeviceError) as raised:
        check_allocator_env({variable: value})
    assert f"{variable}={value!r}" in raised.value.what
    assert error in raised.value.what
    assert variable in raised.value.fix


@pytest.mark.parametrize("value", [
    "expandable_segments:True", " expandable_segments : True ,", "roundup_power2_divisions:[256:1,>:4]",
    "expandable_segments", "expandable_segments:", "expandable_segments:true", "max_split_size_mb:abc",
    "expandable_segments=True", "roundup_power2_divisions:[256:1", "garbage_collection_threshold:1.5",
])
def test_torch_accepts_the_same_allocator_settings(value: str) -> None:
    apply = getattr(pytest.importorskip("torch")._C, "_accelerator_setAllocatorSettings", None)
    if apply is None:
        pytest.skip("this torch has no function for it")
    try:
        theirs = raises_nothing(lambda: apply(value))
    finally:
        apply("")
    assert raises_nothing(lambda: check_allocator_env({"PYTORCH_ALLOC_CONF": value})) is theirs


def raises_nothing(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (RuntimeError, ValueError, DeviceError):
        return False
    return True
