"""What a tape depends on besides the program: GPU architecture, kind of allocator, and the rules of each torch version
(`--torch`, TORCH_VERSIONS)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..core.units import KiB, MiB

EXPANDABLE, NATIVE = "expandable segments", "native"

# ---- rules per version of torch

MEASURED, ASSUMED = "measured on an H200", "assumed as in 2.11"
READ, READ_IN_HEADERS, READ_IN_BINARIES = "read in its source", "read in its headers", "read in its binaries"
# What a forecast takes from torch, in the order in which `describe` names it.
ALLOCATOR, WORKSPACE, ATTENTION, COMPILER = "allocator", "cuBLAS workspace", "attention kernels", "compiler"


@dataclass(frozen=True)
class TorchRules:
    """What differs between versions of torch, and how each rule is known."""

    evidence: Mapping[str, str]
    large_workspace: frozenset[int]   # major compute capabilities with a cuBLAS workspace of 32 MiB
    keeps_workspaces: bool = True     # from the first matmul of a thread on; else each matmul allocates and frees one
    shares_workspaces: bool = False   # whether cuBLASLt uses cuBLAS's

    @property
    def measured(self) -> bool:
        return MEASURED in self.evidence.values()

    def describe(self) -> str:
        """"measured on an H200"; or "not measured; allocator read in its headers; compiler assumed as in 2.11"."""
        rules: dict[str, list[str]] = {}
        for rule, evidence in self.evidence.items():
            rules.setdefault(evidence, []).append(rule)
        if list(rules) == [MEASURED]:
            return MEASURED
        parts = [f"{_join(names)} {evidence}" for evidence, names in rules.items()]
        return "; ".join(parts if self.measured else ["not measured", *parts])


def _join(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# - Allocator: c10/core/AllocatorConfig.h has the same constants from 2.11 to 2.15. CUDACachingAllocator.cpp of 2.14 and
#   2.15 was not read.
# - cuBLAS workspace: aten/src/ATen/cuda/CublasHandlePool.cpp, compiled in libtorch_cuda.so of the wheels for CUDA. Its
#   size is parseChosenWorkspaceSize(), for 2.11 also called on an H200 whose capability was overwritten: 32 MiB for
#   9.0, 8,519,680 bytes for 8.x, 10.0, 10.3 and 12.0. Since 2.12 cuBLASLt uses it, too (pytorch/pytorch#168175, the
#   default of unified_cublas_and_lt_workspaces()). Since 2.15 none is kept (#194311; TORCH_CUBLAS_WORKSPACE_CACHE=1
#   turns isCUDABlasWorkspaceCachingEnabled() on), and cuBLASLt has its own again (getCUDABlasLtWorkspaceSize()).
# - Attention kernels: check_prefer_cudnn_attention() and check_cudnn_tensor_shapes() of
#   aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, compiled in the same library, with the cuDNN that its wheel
#   requires. Seen with heads of 256 on an H200 (Gemma 3, torch 2.11). Left out, since flash attention and cuDNN's
#   allocate nearly the same: since 2.12 cuDNN's is only for a dropout that is a multiple of 1/16 (#174245), and since
#   2.14 it is also for heads of 256 in training on 10.0 and 10.3.
# - Compiler: the tape of compiled nanoGPT follows Inductor of 2.11. In 2.13 torch/_inductor/memory.py no longer counts
#   a graph's outputs as freed at its start when it estimates the peak, so 2.13 may reuse more buffers; 2.14 and 2.15
#   estimate as 2.13 does. By default 2.15 fuses more reductions (triton.nested_reduction).
_READ = {ALLOCATOR: READ_IN_HEADERS, WORKSPACE: READ_IN_BINARIES, ATTENTION: READ_IN_BINARIES, COMPILER: ASSUMED}
TORCH_VERSIONS = {
    "2.11": TorchRules(dict.fromkeys(_READ, MEASURED), frozenset({9})),
    "2.12": TorchRules(_READ, frozenset({9, 10, 12}), shares_workspaces=True),
    "2.13": TorchRules(_READ | {ALLOCATOR: READ}, frozenset({9, 10, 12}), shares_workspaces=True),
    "2.14": TorchRules(_READ, frozenset({9, 10, 11, 12}), shares_workspaces=True),
    "2.15": TorchRules(_READ, frozenset({9, 10, 11, 12}), keeps_workspaces=False),
}
OLDEST_TORCH, *_, DEFAULT_TORCH = TORCH_VERSIONS  # oldest first


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version such as "2.13.0+cu130"."""
    major, minor = re.split(r"\D+", version, maxsplit=2)[:2]
    return int(major), int(minor)


def nearest_version(version: str) -> str:
    """A version such as "2.9" or "3.0" → the nearest one in TORCH_VERSIONS."""
    def number(text: str) -> int:
        major, minor = release(text)
        return 1000 * major + minor

    return min(TORCH_VERSIONS, key=lambda known: abs(number(known) - number(version)))


# ---- the platform

# Bytes of cuBLAS's workspace: 32 MiB, or two chunks of 4 MiB and eight of 16 KiB.
LARGE_WORKSPACE, SMALL_WORKSPACE = 32 * MiB, 2 * 4 * MiB + 8 * 16 * KiB
# Capabilities on which torch prefers cuDNN's attention, and the largest head there.
CUDNN_ATTENTION = {(9, 0): 256, (10, 0): 128, (10, 3): 128}
MAX_RECORDED_HEAD, MAX_FLASH_HEAD = 128, 256


@dataclass(frozen=True)
class Platform:
    """What a tape depends on besides the program."""

    capability: tuple[int, int] = (9, 0)  # compute capability
    torch: str = DEFAULT_TORCH            # major and minor version
    expandable: bool = True               # whether fitgpt's runs get expandable segments: Windows builds have none
    expandable_requested: bool = False    # whether the environment asks for them, as nanoGPT's runs need
    compiles: bool = True                 # whether torch.compile works: it needs Triton
    sms: int = 132                        # streaming multiprocessors
    kernel: str = ""                      # of attention; "": torch's choice
    deterministic: bool = False           # whether torch.use_deterministic_algorithms is on
    # Recorded on this GPU model with this torch version (`fitgpt record`); 0 or "": by the rules below.
    recorded_workspace: int = 0           # bytes of a cuBLAS workspace
    recorded_cache: int = 0               # bytes of the L2 cache
    recorded_attention: str = ""          # torch's choice in half precision for heads of at most 128 elements

    @property
    def rules(self) -> TorchRules:
        """Those of the torch version; of an unknown version, those of the nearest known one."""
        return TORCH_VERSIONS[nearest_version(self.torch)]

    def describe_torch(self) -> str:
        """"2.11 (measured on an H200)": the version, and how its rules are known."""
        nearest = nearest_version(self.torch)
        if nearest != self.torch:
            return f"{self.torch} (not known; the rules of {nearest} are used, the nearest known version)"
        return f"{self.torch} ({self.rules.describe()})"

    @property
    def has_bf16(self) -> bool:
        return self.capability >= (8, 0)

    @property
    def workspace(self) -> int:
        """Bytes of a cuBLAS workspace. Deterministic algorithms need CUBLAS_WORKSPACE_CONFIG=:4096:8, 8 of 4 MiB."""
        if self.deterministic:
            return LARGE_WORKSPACE
        if self.recorded_workspace:
            return self.recorded_workspace
        return LARGE_WORKSPACE if self.capability[0] in self.rules.large_workspace else SMALL_WORKSPACE

    @property
    def threads(self) -> int:
        """Resident threads per multiprocessor: the table of compute capabilities in the CUDA programming guide."""
        if self.capability == (7, 5):
            return 1024
        return 2048 if self.capability in ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (10, 3)) else 1536

    @property
    def cache(self) -> int:
        """Bytes of the L2 cache, or more: the largest among GPUs of that kind, so that no forecast is too low.

        Spec sheets, MiB: RTX 3060 3, 3090 6; 4060 24, 4070 36, 4070 Ti 48, 4090 72, L40 96; 5070 48, 5090 96; A100 40,
        B200 126. The H200's was measured.
        """
        if self.recorded_cache:
            return self.recorded_cache
        known = {(8, 0): 40, (9, 0): 60, (10, 0): 126, (10, 3): 126}.get(self.capability)
        return (known or (6 if self.capability < (8, 9) else 48 if self.sms <= 60 else 96)) * MiB

    def attention(self, head_size: int, dtype: str) -> str:
        """The kernel of scaled_dot_product_attention: cudnn, flash, efficient or math."""
        if self.kernel:
            return self.kernel
        if self.recorded_attention and dtype != "float32" and head_size <= MAX_RECORDED_HEAD and head_size % 8 == 0:
            return self.recorded_attention
        if dtype == "float32" or self.capability < (8, 0):
            return "efficient"  # flash attention needs Ampere and half precision
        if head_size <= CUDNN_ATTENTION.get(self.capability, 0) and head_size % 8 == 0 and not self.deterministic:
            return "cudnn"  # its backward pass is not deterministic
        return "flash" if head_size <= MAX_FLASH_HEAD else "efficient"

    def flash_splits(self, batch: int, heads: int) -> int:
        """Copies of the queries' gradient in flash attention's backward pass. A deterministic one gives each group of
        thread blocks a copy of its own, where others add up atomically: mha_bwd in flash_api.cpp."""
        return -(-self.sms // (batch * heads)) if self.deterministic else 1

    def uses_expandable_segments(self, trainer: str) -> bool:
        """Whether segments are expandable: fitgpt asks for them itself, nanoGPT leaves it to the environment."""
        return self.expandable and (trainer == "fitgpt" or self.expandable_requested)
