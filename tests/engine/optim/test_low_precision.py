"""Rounded states and weights train like exact ones, within stated distances."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fitgpt.engine.optim.adamw import AdamW, AdamWSettings
from fitgpt.engine.optim.low_precision import (
    GROUP,
    AdamWInBackward,
    LowPrecisionAdamW,
    read_first,
    read_second,
    stochastic_round,
    write_first,
    write_second,
)
from tests.engine.optim import tiny_gpt

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, weight_decay=0.1)
ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 130), nn.Linear(130, 50)).to(dtype)


def set_gradients(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for p in module.parameters():
        p.grad = (torch.randn(p.shape) * torch.rand(p.shape[:1] + (1,) * (p.dim() - 1))).to(p.dtype)


def test_an_8bit_first_moment_is_within_a_percent_of_its_groups_largest() -> None:
    values = torch.randn(1000) * torch.logspace(-6, 0, 1000)
    back = read_first(write_first(values))
    scale = values.abs().max()
    assert (back - values).abs().max() < 0.01 * scale
    big = values.abs() > 0.01 * scale  # a share s of the largest is read back within 1 / (127 √s)
    assert ((back - values).abs() / values.abs())[big].max() < 1 / (127 * 0.01**0.5)


def test_an_8bit_second_moment_rounds_to_nearest_but_not_to_zero() -> None:
    values = torch.rand(3 * GROUP + 17).pow(8)
    values[5:9], values[9] = 1e-15, 0.0
    back = read_second(write_second(values))
    assert (back - values).abs().max() < 0.01
    assert (back - values)[values > 1e-3].mean().abs() < 2e-4  # neither up nor down
    assert torch.equal(back > 0, values > 0)


def test_stochastic_rounding_is_unbiased_and_keeps_representable_values() -> None:
    torch.manual_seed(0)
    x = torch.full((200_000,), 1.0 + 2**-9)  # a quarter of the way between two bfloat16 numbers
    rounded = stochastic_round(x).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean().item() == pytest.approx(1.0 + 2**-9, abs=1e-4)
    exact = torch.tensor([1.0, -2.5, 0.0, 1e-30]).bfloat16()
    assert torch.equal(stochastic_round(exact.float()), exact)


def test_with_float32_state_and_weights_it_equals_adamw() -> None:
    ours, theirs = model(), model()
    a = LowPrecisionAdamW(dict(ours.named_parameters()), SETTINGS, eight_bit=False, fused=False, seed=0)
    b = AdamW(dict(theirs.named_parameters()), SETTINGS)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        a.step(1e-2, ONE * 2, ZERO)
        b.step(1e-2, ONE * 2, ZERO)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8bit_state_moves_weights_nearly_like_float32_state(dtype: torch.dtype) -> None:
    ours, theirs, start = model(dtype), model(), model()
    a = LowPrecisionAdamW(dict(ours.named_parameters()), SETTINGS, eight_bit=True, fused=False, seed=0)
    b = AdamW(dict(theirs.named_parameters()), SETTINGS)
    for step in range(20):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        a.step(1e-2, ONE, ZERO)
        b.step(1e-2, ONE, ZERO)
    for p, q, s in zip(ours.parameters(), theirs.parameters(), start.parameters(), strict=True):
        if p.numel() >= 4096:
            assert ((p.float() - q).norm() / (q - s).norm()).item() < 0.1


def test_the_state_takes_one_byte_per_element() -> None:
    optimizer = LowPrecisionAdamW(dict(model().named_parameters()), SETTINGS, eight_bit=True, fused=False, seed=0)
    assert sum(t.nbytes for name, t in optimizer.tensors().items() if name.startswith("0.weight")) == \
        2 * 13000 + 2 * 4 * -(-13000 // GROUP)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    module = model(torch.bfloat16)
    optimizer = LowPrecisionAdamW(dict(module.named_parameters()), SETTINGS, eight_bit=True, fused=False, seed=0)
    set_gradients(module, 0)
    optimizer.step(1e-2, ONE, ZERO)
    before = {k: v.clone() for k, v in optimizer.tensors().items() if k != "calls"}
    weights = [p.clone() for p in module.parameters()]
    set_gradients(module, 1)
    next(module.parameters()).grad[0, 0] = float("nan")
    optimizer.step(1e-2, ONE, ONE)
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))
    assert all(torch.equal(v, optimizer.tensors()[k]) for k, v in before.items())


@pytest.mark.parametrize("eight_bit", [False, True])
def test_an_update_in_the_backward_pass_equals_one_after_it(eight_bit: bool) -> None:
    ours, theirs = tiny_gpt.model(), tiny_gpt.model()
    at_once = AdamWInBackward(dict(ours.named_parameters()), SETTINGS, eight_bit=eight_bit, fused=False, seed=0)
    later = LowPrecisionAdamW(dict(theirs.named_parameters()), SETTINGS, eight_bit=eight_bit, fused=False, seed=0)
    for step in range(3):
        at_once.begin(1e-3)
        ours.accumulate(*tiny_gpt.batch(step), ONE, at_once)
        assert all(p.grad is None for p in ours.parameters())
        theirs.accumulate(*tiny_gpt.batch(step), ONE)
        later.step(1e-3, ONE, ZERO)
        theirs.zero_grad()
    for p, q, s in zip(ours.parameters(), theirs.parameters(), tiny_gpt.model().parameters(), strict=True):
        assert (p - q).norm() < 1e-3 * (q - s).norm()
