"""Lists and rules that are copied from torch's source, against that source or against recorded runs."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bench import convolutions
from fitgpt.memory.platform import Platform
from fitgpt.planning.budget import target_for
from fitgpt.tapes import aten
from fitgpt.tracing import autocast
from fitgpt.tracing.composites import AttentionSteering
from fitgpt.tracing.kernels import reduction_scratch
from fitgpt.tracing.recorder import Recorder
from fitgpt.tracing.trace import recording

RECORDED = Path(__file__).parents[1] / "recorded"
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


@pytest.mark.parametrize(("macro", "names"), [
    ("AT_FORALL_LOWER_PRECISION_FP", autocast.LOWER_PRECISION), ("AT_FORALL_FP32", autocast.FP32),
    ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast.FP32_RESULT), ("AT_FORALL_PROMOTE", autocast.PROMOTE),
])
def test_autocast_casts_the_operations_that_torch_lists(macro: str, names: list[str]) -> None:
    text = re.search(rf"#define {macro}\(_\)(.*?)\n\n", HEADER.read_text(encoding="utf-8"), re.S)
    assert text
    listed = [re.sub(r",\s*", ".", each) for each in re.findall(r"_\(([^)]*)\)", text[1])]
    assert listed == names


@pytest.mark.parametrize(("operation", "dtype"), [
    (lambda x, w: F.linear(x, w), torch.bfloat16), (lambda x, w: x @ w, torch.bfloat16),
    (lambda x, w: torch.einsum("ij,jk->ik", x, w), torch.bfloat16), (lambda x, w: x + w, torch.float32),
    (lambda x, w: F.softmax(F.linear(x, w), -1), torch.float32), (lambda x, w: F.linear(x, w).sum(), torch.float32),
    (lambda x, w: F.layer_norm(F.linear(x, w), (64,)), torch.float32),
    (lambda x, w: F.cross_entropy(F.linear(x, w), torch.zeros(64, dtype=torch.int64, device="cuda")), torch.float32),
    (lambda x, w: F.gelu(F.linear(x, w)), torch.bfloat16), (lambda x, w: F.linear(x, w).pow(2), torch.float32),
])
def test_autocast_gives_the_dtypes_of_cuda(operation: object, dtype: torch.dtype) -> None:
    with recording(Recorder(), target_for("4070", "cuda")):
        x, w = torch.empty(64, 64, device="cuda"), torch.nn.Parameter(torch.empty(64, 64, device="cuda"))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert operation(x, w).dtype == dtype  # type: ignore[operator]


def test_autocast_keeps_the_copy_of_a_weight_until_its_block_ends() -> None:
    recorder = Recorder()
    with recording(recorder, target_for("4070", "cuda")):
        weight = torch.nn.Parameter(torch.empty(64, 64, device="cuda"))
        with torch.autocast("cuda", dtype=torch.float16):
            for _ in range(3):
                F.linear(torch.empty(2, 64, device="cuda", dtype=torch.float16), weight)
        with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
            for _ in range(2):
                F.linear(torch.empty(2, 64, device="cuda", dtype=torch.float16), weight)
    assert [tensor.owner for tensor in recorder.tensors if tensor.op == "aten._to_copy.default"] == ["casts"] * 3


def test_sums_over_rows_have_the_scratch_of_the_recorded_runs() -> None:
    """tapes/aten.py's rule is for one shape and was recorded; the general one agrees."""
    platform = Platform()
    for rows in (1, 100, 4096, 8192, 16384, 100_000):
        for columns in (1, 43, 128, 384, 768, 2304, 50_304):
            general = reduction_scratch(torch.empty(rows, columns, device="meta"), [0], platform)
            assert general == aten.sum_over_rows(rows, columns, platform), (rows, columns)


@pytest.mark.parametrize(("capability", "shape", "keys", "dtype", "settings", "kernel"), [
    ((8, 9), (2, 8, 64, 64), 8, torch.bfloat16, {}, "flash"),
    ((8, 9), (2, 8, 64, 64), 2, torch.bfloat16, {"enable_gqa": True}, "flash"),
    ((8, 9), (2, 8, 64, 64), 8, torch.bfloat16, {"mask": True}, "efficient"),
    ((8, 9), (2, 8, 64, 64), 2, torch.bfloat16, {"mask": True, "enable_gqa": True}, "math"),
    ((9, 0), (2, 8, 64, 64), 8, torch.bfloat16, {"mask": True, "learned": True}, "math"),  # T5's position bias
    ((8, 9), (2, 8, 64, 64), 8, torch.float32, {}, "efficient"),
    ((8, 9), (2, 8, 64, 64), 2, torch.float32, {"enable_gqa": True}, "math"),
    ((8, 9), (2, 8, 64, 42), 8, torch.float16, {}, "flash"),
    ((8, 9), (2, 8, 64, 42), 8, torch.float32, {}, "math"),
    ((7, 5), (2, 8, 64, 64), 8, torch.float16, {}, "efficient"),
    ((7, 5), (2, 8, 64, 64), 8, torch.bfloat16, {}, "math"),
    ((9, 0), (2, 8, 64, 64), 8, torch.bfloat16, {"mask": True}, "cudnn"),
    ((9, 0), (2, 8, 64, 64), 2, torch.bfloat16, {"enable_gqa": True}, "cudnn"),
    ((9, 0), (2, 8, 64, 42), 8, torch.bfloat16, {}, "flash"),
])
def test_the_attention_kernel_is_the_one_that_sdp_utils_chooses(
        capability: tuple[int, int], shape: tuple[int, int, int, int], keys: int, dtype: torch.dtype,
        settings: dict[str, bool], kernel: str) -> None:
    query = torch.empty(shape, dtype=dtype, device="meta")
    key = torch.empty((shape[0], keys, *shape[2:]), dtype=dtype, device="meta")
    mask = None
    if settings.get("mask"):
        mask = torch.empty(shape[2], shape[2], device="meta", requires_grad=settings.get("learned", False))
    chosen = AttentionSteering(Platform(capability)).choose(query, key, key, mask, 0.0, False,
                                                            settings.get("enable_gqa", False))
    assert chosen == kernel


@pytest.mark.parametrize(("operation", "sizes"), [
    # Twice: an index, and what it adds to the number of a value. Then these numbers, sorted ones, their order, a sort.
    (lambda x, i: x.index_put_((i, i), x[0, :8], accumulate=True), [64] * 7 + [1]),
    (lambda x, i: x.index_put_((i, i), x[0, :8]), []),
])
def test_indexed_kernels_allocate_as_on_cuda(operation: Callable[..., Any], sizes: list[int]) -> None:
    recorder = Recorder()
    with recording(recorder, target_for("h200", "cuda")):
        x, indices = torch.empty(100, 100, device="cuda"), torch.arange(8, device="cuda")
        before = len(recorder.tensors)
        operation(x, indices)
    assert [tensor.nbytes for tensor in recorder.tensors[before:]] == sizes


@pytest.mark.parametrize(("dtype", "sort", "scan"), [(torch.int64, 81_919, 1279), (torch.int32, 1, 1023)])
def test_the_backward_pass_of_an_embedding_sorts_indices_in_their_own_dtype(dtype: torch.dtype, sort: int,
                                                                           scan: int) -> None:
    recorder = Recorder()
    with recording(recorder, target_for("h200", "cuda")):
        weight = torch.nn.Parameter(torch.empty(5000, 8, device="cuda"))
        F.embedding(torch.zeros(4000, dtype=dtype, device="cuda"), weight).sum().backward()
    size = dtype.itemsize * 4000
    found = [tensor.nbytes for tensor in recorder.tensors if tensor.op == "aten.embedding_dense_backward.default"]
    assert found == [128_000, size, size, size, sort, 160_000, size, 8, size, 1279, size, size, scan, 8,
                     dtype.itemsize * 4400, 140_800]  # a contiguous gradient comes first


@pytest.mark.parametrize(("operation", "sizes"), [
    (lambda x: F.log_softmax(x, -1), [40_000]),
    (lambda x: F.log_softmax(x.t(), -1), [40_000, 40_000]),                    # a copy that is contiguous
    (lambda x: F.softmax(x.half(), -1, dtype=torch.float32), [20_000, 40_000]),  # by SoftMax.cpp, not recorded
    (lambda x: torch.isinf(x), [40_000, 10_000]),                              # abs()
    (lambda x: F.logsigmoid(x), [40_000]),                                     # no buffer
    (lambda x: F.linear(x.view(4, 25, 100).transpose(0, 1), x, x[0]), [40_000, 33_554_432]),  # bias in place
    (lambda x: F.mse_loss(x, x), [4, 40_000]),                                 # the result, a loss per element
    (lambda x: F.huber_loss(x, x), [40_000, 4]),
    (lambda x: F.binary_cross_entropy(x, x), [40_000]),                        # holds the result, too
    (lambda x: F.binary_cross_entropy(x, x, reduction="none"), [40_000]),
    (lambda x: F.binary_cross_entropy_with_logits(x, x), [40_000, 40_000, 4]),
    (lambda x: F.mse_loss(x.expand(100, 100, 100), x.expand(100, 100, 100)), [4, 4_000_000, 492, 4]),
    (lambda x: x.logsumexp(-1), [400, 100, 400, 40_000, 400]),
    (lambda x: torch.multinomial(x, 1), [40_000, 800]),
    (lambda x: F.one_hot(torch.zeros(5, dtype=torch.int64, device="cuda"), 100), [40, 4000]),
    (lambda x: x.view(-1).cumsum(0), [40_000, 1279]),                          # one row: scanned by CUB
    (lambda x: x.__setitem__(0, 1.0), []),                                     # the number is a tensor of the host
])
def test_kernels_allocate_as_on_cuda(operation: object, sizes: list[int]) -> None:
    recorder = Recorder()
    with recording(recorder, target_for("h200", "cuda")):
        x = torch.empty(100, 100, device="cuda")
        before = len(recorder.tensors)
        operation(x)  # type: ignore[operator]
    assert [tensor.nbytes for tensor in recorder.tensors[before:]] == sizes


def test_convolutions_need_what_they_needed_on_a_gpu_within_7_percent_by_dtype_and_pass() -> None:
    """Of a single one cuDNN chooses the kernel, and so its workspace."""
    needed, forecast = defaultdict[tuple[str, str], int](int), defaultdict[tuple[str, str], int](int)
    rows = json.loads((RECORDED / "convolutions.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        recorder = Recorder()
        with recording(recorder, target_for("h200", "cuda", torch="2.11")):
            given = convolutions.arguments(row, row["dtype"], "cuda")
            for name, run in (("forward", convolutions.forward), ("backward", convolutions.backward)):
                before = len(recorder.tape().events)
                kept = run(*given)
                changes = [event.nbytes if event.alloc else -event.nbytes for event in recorder.tape().events[before:]]
                needed[row["dtype"], name] += max(accumulate(row[name]))
                forecast[row["dtype"], name] += max(accumulate(changes))
                del kept
    assert len(rows) == 351
    assert len(needed) == 6
    errors = {each: forecast[each] / needed[each] - 1 for each in needed}
    assert {each: error for each, error in errors.items() if abs(error) > 0.07} == {}


def test_the_gradient_of_a_concatenated_tensor_is_copied_for_each_gradient_of_a_convolution() -> None:
    recorder = Recorder()
    with recording(recorder, target_for("h200", "cuda")):
        x = torch.ones(2, 8, 16, 16, device="cuda")
        weight = torch.nn.Parameter(torch.ones(8, 8, 1, 1, device="cuda"))
        result = F.conv2d(x.requires_grad_(), weight)
        torch.cat((result, x), 1).sum().backward()
    found = [tensor.nbytes for tensor in recorder.tensors if tensor.op == "aten.convolution_backward.default"]
    assert found == [16_384, 16_384, 16_384, 256, 512]  # the input's, a copy, a copy, the weight's, two samples


def test_the_backward_pass_of_a_group_norm_sums_per_channel_and_per_group() -> None:
    recorder = Recorder()
    with recording(recorder, target_for("h200", "cuda")):
        norm = torch.nn.GroupNorm(4, 8, device="cuda")
        norm(torch.ones(2, 8, 16, 16, device="cuda", requires_grad=True)).sum().backward()
    found = [tensor.nbytes for tensor in recorder.tensors if tensor.op == "aten.native_group_norm_backward.default"]
    assert found[-5:] == [64, 64, 32, 32, 64]


def test_a_group_norm_without_weights_has_a_backward_pass() -> None:
    recorder = Recorder()
    with recording(recorder, target_for("h200", "cuda", torch="2.11")):
        x = torch.randn(2, 8, 4, device="cuda", requires_grad=True)
        F.group_norm(x, 4).sum().backward()
        assert x.grad is not None
