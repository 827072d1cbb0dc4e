"""The tape of compiled runs against what torch's compiler generates: a compiled function allocates its results.

What is generated is for the CPU, with no compiler of C++ needed: the kernels are left out. There a norm also writes its
mean and rstd, one number per row each, which a kernel on a GPU keeps in registers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fitgpt.engine import ops

pytestmark = pytest.mark.xdist_group("compiler")  # one process loads it
ROWS, WIDTH = 24, 40
ALLOCATION = re.compile(r"= empty_strided_cpu\(\(([^)]*)\), \([^)]*\), torch\.(\w+)\)")

Held = tuple[tuple[int, ...], str]  # a shape and a type


def generated(function: Callable[..., Any], arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    """What the compiled function allocates, as its code says."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    torch._dynamo.reset()
    with config.patch({"cpp.simdlen": 1, "fx_graph_cache": False, "autotune_local_cache": False}):
        _, code = run_and_get_code(torch.compile(function, fullgraph=True, dynamic=False), *arguments)
    assert len(code) == 1  # one graph
    return [(tuple(int(size) for size in shape.split(",") if size.strip()), dtype)
            for shape, dtype in ALLOCATION.findall(code[0])]


def results(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Held]:
    """What the function hands out that it was not handed."""
    arguments = tuple(each.clone() if isinstance(each, Tensor) else each for each in arguments)
    found = function(*arguments)
    handed = {each.data_ptr() for each in arguments if isinstance(each, Tensor)}
    return [(tuple(each.shape), str(each.dtype).removeprefix("torch."))
            for each in (found if isinstance(found, tuple) else (found,))
            if each is not None and each.data_ptr() not in handed]


def rows(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, WIDTH).to(dtype)


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ops.Pointwise._fields)
def test_a_compiled_function_allocates_nothing_wide_but_its_results(
        name: str, residual: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    half, weight, bias = torch.bfloat16, torch.ones(WIDTH), torch.zeros(WIDTH)
    arguments = {
        "norm": (rows(residual), weight, bias, half), "norm_of_sum": (rows(residual), rows(half), weight, bias, half),
        "add_both": (rows(residual), rows(half), rows(half)), "gelu": (rows(half),),
        "gelu_backward_": (rows(half), rows(half)),
        "norm_backward_": (rows(residual), rows(half), rows(residual), rows(half), weight, bias, half, True)}[name]
    function = getattr(ops.EAGER, name)
    besides = Counter(generated(function, arguments, monkeypatch)) - Counter(results(function, arguments))
    assert set(besides) <= {((ROWS, 1), "float32")}


def test_a_wide_temporary_between_two_kernels_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(x: Tensor, y: Tensor) -> Tensor:
        return x @ y @ x

    arguments = (rows(torch.float32), rows(torch.float32).T.contiguous())
    assert ((ROWS, ROWS), "float32") in generated(twice, arguments, monkeypatch)
