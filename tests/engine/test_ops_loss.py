"""The chunked loss equals the plain loss: value and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fitgpt.config.memory_savers import LOSS_CHUNK_BYTES, loss_chunk_tokens
from fitgpt.engine.ops import IGNORE_INDEX, AccumulateIntoGrad, loss_and_gradient_, token_losses

N, C, V = 48, 24, 101


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(N, C, dtype=torch.float64)
    weight = torch.randn(V, C, dtype=torch.float64)
    targets = torch.randint(V, (N,))
    targets[5] = targets[40] = IGNORE_INDEX
    return hidden.to(dtype).requires_grad_(), weight.float().to(_weights_of(dtype)).requires_grad_(), targets


def _weights_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of hidden, gradient of the head), leaving the arguments as they were."""
    hidden, weight = hidden.detach().clone(), weight.detach().clone().requires_grad_()
    loss = loss_and_gradient_(hidden, weight, targets, torch.tensor(scale), chunk, AccumulateIntoGrad())
    return loss, hidden, weight.grad


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What nanoGPT computes under CUDA autocast: half logits, then a float32 cross-entropy."""
    logits = hidden @ weight.to(hidden.dtype).t()
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX)


@pytest.mark.parametrize("chunk", [1, 7, 16, N, 1000])
def test_gradients_equal_the_plain_ones_in_float64_for_any_chunk(chunk: int) -> None:
    hidden, weight, targets = inputs(torch.float64)
    loss, *gradients = ours(hidden, weight, targets, 1.0, chunk)
    plain = plain_loss(hidden, weight, targets)
    theirs = torch.autograd.grad(plain, (hidden, weight))
    assert torch.allclose(loss, plain, rtol=1e-12)
    for a, b in zip(gradients, theirs, strict=True):
        assert (a - b).abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_error_stays_within_that_of_the_plain_computation(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(dtype)
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight.to(dtype)))
    exact = torch.autograd.grad(plain_loss(exact_hidden, exact_weight, targets), (exact_hidden, exact_weight))
    scale = 1024.0 if dtype == torch.float16 else 1.0
    _, *gradients = ours(hidden, weight, targets, scale, 13)
    theirs = torch.autograd.grad(plain_loss(hidden, weight, targets) * scale, (hidden, weight))
    for a, b, truth in zip(gradients, theirs, exact, strict=True):
        our_error = (a.double() / scale - truth).norm() / truth.norm()
        their_error = (b.double() / scale - truth).norm() / truth.norm()
        assert our_error <= 1.5 * their_error


def test_the_scale_reaches_float16_gradients_before_they_are_rounded() -> None:
    """At 1/N alone, with N × accumulation = 65,536, every gradient entry would underflow to zero."""
    hidden, weight, targets = inputs(torch.float16)
    tiny = 1.0 / 65536 / 1024
    _, unscaled, _ = ours(hidden, weight, targets, tiny, 16)
    _, scaled, _ = ours(hidden, weight, targets, tiny * 2.0**26, 16)
    assert (unscaled == 0).float().mean() > 0.9
    assert (scaled == 0).float().mean() < 0.1


def test_the_scale_scales_loss_and_gradients_alike() -> None:
    given = inputs(torch.float64)
    for once, thrice in zip(ours(*given, 1.0, 16), ours(*given, 3.0, 16), strict=True):
        assert torch.allclose(3 * once, thrice)


def test_token_losses_average_to_the_loss() -> None:
    hidden, weight, targets = inputs(torch.float32)
    per_token = token_losses(hidden.detach(), weight, targets, 11)
    assert per_token.shape == (N,)
    assert per_token[5] == 0
    assert torch.allclose(per_token.sum() / (N - 2), plain_loss(hidden, weight, targets), rtol=1e-6)


def test_the_whole_logits_tensor_never_exists() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    hidden, weight, targets = inputs(torch.float32)
    with Largest() as largest:
        ours(hidden, weight, targets, 1.0, 8)
    assert largest.numel == V * C  # the head's gradient, not N × V
    assert N * V > V * C


@pytest.mark.parametrize(("tokens", "vocab", "requested", "expected"),
                         [(16384, 50304, 0, 2048), (1024, 50304, 0, 1024), (4096, 257, 0, 4096),
                          (16384, 50304, 512, 512), (100, 50304, 512, 100), (4096, 10**9, 0, 128)])
def test_a_chunk_fits_its_budget_or_has_the_requested_size(tokens: int, vocab: int, requested: int,
                                                           expected: int) -> None:
    chunk = loss_chunk_tokens(tokens, vocab, requested)
    assert chunk == expected
    assert requested or chunk * vocab * 2 <= LOSS_CHUNK_BYTES or chunk == 128
