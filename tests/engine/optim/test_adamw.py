"""The fused step does what AdamW, clipping and GradScaler do, and skips what is not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fitgpt.engine.optim.adamw import AdamW, AdamWSettings
from fitgpt.engine.optim.grad_scaler import FIRST_SCALE, GROWTH_INTERVAL, Scaler, apply_gradients

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, weight_decay=0.1)
CPU = torch.device("cpu")


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def set_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> list[Tensor]:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * scale
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_clipping_unscaling_and_updating_equal_the_three_separate_passes() -> None:
    ours, plain = module(), module()
    optimizer, scaler = AdamW(dict(ours.named_parameters()), SETTINGS), Scaler(CPU, scaling=True)
    reference = torch.optim.AdamW(
        [{"params": [p for p in plain.parameters() if p.dim() >= 2], "weight_decay": 0.1},
         {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95))
    for step in range(5):
        set_gradients(ours, step, FIRST_SCALE)
        norm = apply_gradients(ours, optimizer, scaler, 1e-2, grad_clip=1.0)
        set_gradients(plain, step)
        plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step()
        assert torch.allclose(norm, plain_norm, rtol=1e-5)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_with_a_nan_or_infinite_gradient_changes_nothing_and_is_counted() -> None:
    for poison in (math.nan, math.inf):
        model = module()
        optimizer, scaler = AdamW(dict(model.named_parameters()), SETTINGS), Scaler(CPU, scaling=False)
        set_gradients(model, 0)
        apply_gradients(model, optimizer, scaler, 1e-2, 1.0)
        before = {k: v.clone() for k, v in optimizer.tensors().items()}
        weights = [p.detach().clone() for p in model.parameters()]
        gradients = set_gradients(model, 1)
        gradients[0][0, 0] = poison
        apply_gradients(model, optimizer, scaler, 1e-2, 1.0)
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert all(torch.equal(before[k], v) for k, v in optimizer.tensors().items())
        assert scaler.to_dict()["skipped"] == 1


def test_a_good_step_resets_the_count_of_skipped_steps_in_a_row() -> None:
    scaler = Scaler(CPU, scaling=False)
    for found in (1.0, 1.0, 0.0, 1.0):
        scaler.update(torch.tensor(found))
    assert scaler.to_dict() == {"scale": 1.0, "good_steps": 0.0, "skipped": 3.0, "skipped_in_a_row": 1.0}


def test_the_loss_scale_follows_torchs_gradscaler() -> None:
    ours = Scaler(CPU, scaling=True)
    scale, tracker = torch.tensor(FIRST_SCALE), torch.zeros((), dtype=torch.int32)
    for step in range(3 * GROWTH_INTERVAL):
        found = torch.tensor(1.0 if step in (3, 4, 2500) else 0.0)
        ours.update(found)
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, GROWTH_INTERVAL)
        assert ours.scale == scale, step


def test_the_loss_scale_never_falls_to_zero() -> None:
    scaler = Scaler(CPU, scaling=True)
    for _ in range(200):
        scaler.update(torch.tensor(1.0))
    assert scaler.scale.item() == 1.0


def test_state_exists_before_the_first_step_and_survives_a_round_trip() -> None:
    model = module()
    optimizer = AdamW(dict(model.named_parameters()), SETTINGS)
    assert len(optimizer.tensors()) == 3 * 4
    set_gradients(model, 0)
    apply_gradients(model, optimizer, Scaler(CPU, scaling=False), 1e-2, 0.0)
    stored = {k: v.clone() for k, v in optimizer.tensors().items()}
    fresh = AdamW(dict(model.named_parameters()), SETTINGS)
    assert fresh.load_tensors(stored) == []
    assert all(torch.equal(stored[k], v) for k, v in fresh.tensors().items())
    stored.pop("0.weight.exp_avg")
    assert fresh.load_tensors(stored) == ["0.weight.exp_avg"]
