"""What depends on the GPU's architecture and on the version of torch."""

from __future__ import annotations

import pytest

from fitgpt.core.units import MiB
from fitgpt.memory.platform import TORCH_VERSIONS, Platform, nearest_version


@pytest.mark.parametrize(("torch", "capability", "nbytes"), [
    ("2.11", (8, 9), 8_519_680), ("2.11", (9, 0), 32 * MiB), ("2.11", (10, 0), 8_519_680),
    ("2.11", (12, 0), 8_519_680), ("2.13", (8, 9), 8_519_680), ("2.13", (9, 0), 32 * MiB),
    ("2.13", (10, 3), 32 * MiB), ("2.13", (12, 0), 32 * MiB), ("2.15", (7, 5), 8_519_680), ("2.15", (12, 0), 32 * MiB)])
def test_blackwell_has_a_large_cublas_workspace_since_2_12(torch: str, capability: tuple[int, int],
                                                           nbytes: int) -> None:
    assert Platform(capability, torch).workspace == nbytes


@pytest.mark.parametrize(("version", "nearest"), [("2.9", "2.11"), ("2.12", "2.12"), ("2.20", "2.15"), ("3.0", "2.15")])
def test_an_unknown_version_has_the_rules_of_the_nearest_known_one(version: str, nearest: str) -> None:
    assert nearest_version(version) == nearest
    assert Platform(torch=version).rules is TORCH_VERSIONS[nearest]


def test_only_2_11_was_measured() -> None:
    assert [version for version, rules in TORCH_VERSIONS.items() if rules.measured] == ["2.11"]


@pytest.mark.parametrize(("capability", "head_size", "dtype", "kernel"), [
    ((9, 0), 64, "bfloat16", "cudnn"), ((9, 0), 65, "bfloat16", "flash"), ((9, 0), 256, "bfloat16", "cudnn"),
    ((9, 0), 264, "bfloat16", "efficient"), ((10, 0), 136, "bfloat16", "flash"), ((8, 9), 256, "bfloat16", "flash"),
    ((8, 9), 264, "bfloat16", "efficient"), ((8, 9), 64, "float32", "efficient"),
    ((7, 5), 64, "float16", "efficient")])
def test_attention_takes_the_kernel_that_torch_takes(capability: tuple[int, int], head_size: int, dtype: str,
                                                     kernel: str) -> None:
    assert Platform(capability).attention(head_size, dtype) == kernel


@pytest.mark.parametrize(("capability", "sms", "true_mib"), [
    pytest.param((8, 6), 28, 3, id="RTX 3060"), pytest.param((8, 6), 82, 6, id="RTX 3090"),
    pytest.param((8, 9), 24, 24, id="RTX 4060"), pytest.param((8, 9), 46, 36, id="RTX 4070"),
    pytest.param((8, 9), 128, 72, id="RTX 4090"), pytest.param((12, 0), 170, 96, id="RTX 5090"),
    pytest.param((8, 0), 108, 40, id="A100"), pytest.param((9, 0), 132, 60, id="H200")])
def test_l2_cache_is_never_underestimated(capability: tuple[int, int], sms: int, true_mib: int) -> None:
    assert Platform(capability, sms=sms).cache >= true_mib * 2**20
