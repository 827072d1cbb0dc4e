"""Where gradients go as the backward pass computes them: each is passed on once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Gradients(Protocol):
    def matmul(self, parameter: Tensor, d_out: Tensor, inputs: Tensor) -> None:
        """Takes the gradient of a weight matrix, d_outᵀ @ inputs, as its factors [N, out] and [N, in]."""

    def vector(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Takes the gradient of a norm or a bias; None if there is no such parameter."""

    def embedding(self, parameter: Tensor, indices: Tensor, gradient: Tensor) -> None:
        """Takes the gradient of some rows [n, C] of an embedding; an index may occur several times."""


class AccumulateIntoGrad:
    """Adds to `.grad` in the parameter's own precision: no gradient exists twice."""

    def matmul(self, parameter: Tensor, d_out: Tensor, inputs: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = matmul_grad(d_out, inputs, parameter.dtype)
        else:
            add_matmul_grad_(parameter.grad, d_out, inputs)

    def vector(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype)
        else:
            parameter.grad += gradient

    def embedding(self, parameter: Tensor, indices: Tensor, gradient: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        add_rows_(parameter.grad, indices, gradient)


class GradientDict:
    """Collects gradients in a dict instead of `.grad`."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}  # by id of the parameter

    def matmul(self, parameter: Tensor, d_out: Tensor, inputs: Tensor) -> None:
        self._add(parameter, matmul_grad(d_out, inputs, parameter.dtype))

    def vector(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._add(parameter, gradient.to(parameter.dtype))

    def embedding(self, parameter: Tensor, indices: Tensor, gradient: Tensor) -> None:
        total = torch.zeros_like(parameter)
        add_rows_(total, indices, gradient)
        self._add(parameter, total)

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        known = self.of.get(id(parameter))
        self.of[id(parameter)] = gradient if known is None else known.add_(gradient)


def matmul_grad(d_out: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    if _accumulates_wider(d_out, dtype):
        return torch.mm(d_out.t(), inputs, out_dtype=dtype)
    return (d_out.t() @ inputs).to(dtype)


def add_matmul_grad_(total: Tensor, d_out: Tensor, inputs: Tensor) -> None:
    """total += d_outᵀ @ inputs; on CUDA half-precision matmuls accumulate and add in float32."""
    if d_out.dtype == total.dtype:
        total.addmm_(d_out.t(), inputs)
    elif _accumulates_wider(d_out, total.dtype):
        torch.addmm(total, d_out.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total += d_out.t() @ inputs


def column_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over rows [N, n], a bias's gradient. On CUDA it is a matmul with ones: `sum` would allocate 8 bytes of
    scratch per element, four times the size of the rows."""
    if rows.device.type != "cuda":
        return rows.sum(0, dtype=dtype)
    if _accumulates_wider(rows, dtype):
        return torch.mm(rows.new_ones(1, len(rows)), rows, out_dtype=dtype).view(-1)
    return rows.t().mv(rows.new_ones(len(rows)))  # float32, without TF32


def add_rows_(total: Tensor, indices: Tensor, gradient: Tensor) -> None:
    """Adds row i of `gradient` to row indices[i]. In half precision, rows of one index are summed in float32."""
    if total.dtype in (torch.float32, torch.float64):
        total.index_add_(0, indices, gradient.to(total.dtype))
    else:
        total += torch.ops.aten.embedding_dense_backward(gradient.to(total.dtype), indices, len(total), -1, False)


def _accumulates_wider(factor: Tensor, dtype: torch.dtype) -> bool:
    return factor.device.type == "cuda" and factor.dtype != dtype and dtype == torch.float32
