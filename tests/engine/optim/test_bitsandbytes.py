"""AdamW by bitsandbytes, run for real on the CPU: what we ask of it beyond its own, and what is said where it fails."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fitgpt.config.optimizers import GROUP
from fitgpt.core.errors import DeviceError
from fitgpt.engine.optim import bitsandbytes as ours
from fitgpt.engine.optim.adamw import AdamW, AdamWSettings, Optimizer
from fitgpt.engine.optim.bitsandbytes import BitsandbytesAdamW
from fitgpt.engine.optim.grad_scaler import Scaler, apply_gradients

# Not importorskip: importing it takes seconds, since it loads torch's compiler, and collection would wait for that.
pytestmark = [pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
              pytest.mark.xdist_group("compiler")]

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, weight_decay=0.1)
ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)
LARGE = ("0.weight", "0.bias", "1.weight")  # 4096 numbers and more


def model() -> nn.Module:
    """A matrix, a vector that is large, a matrix and a vector that is small."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5000), nn.Linear(5000, 2))


def set_gradients(module: nn.Module, seed: int, times: float = 1.0) -> None:
    torch.manual_seed(seed)
    for p in module.parameters():
        p.grad = times * torch.randn(p.shape) * torch.rand(p.shape[:1] + (1,) * (p.dim() - 1))


def made(module: nn.Module) -> BitsandbytesAdamW:
    return BitsandbytesAdamW(dict(module.named_parameters()), SETTINGS)


def after(steps: int, optimizer: Any, *, grad_scale: float = 1.0, times: float = 1.0) -> dict[str, Tensor]:
    module = model()
    applied: Optimizer = optimizer(module)
    for step in range(steps):
        set_gradients(module, step, times)
        applied.step(1e-2, ONE * grad_scale, ZERO)
    return {name: p.detach() for name, p in module.named_parameters()}


def exact(module: nn.Module) -> AdamW:
    return AdamW(dict(module.named_parameters()), SETTINGS)


def test_8bit_state_moves_weights_nearly_like_float32_state() -> None:
    rounded, whole, start = after(20, made), after(20, exact), dict(model().named_parameters())
    for name in LARGE:
        assert 0 < ((rounded[name] - whole[name]).norm() / (whole[name] - start[name]).norm()).item() < 0.1
    assert torch.equal(rounded["1.bias"], whole["1.bias"])


def test_it_gives_the_same_weights_as_bitsandbytes_own_class() -> None:
    """The same gradients by its class AdamW8bit: the same weights, bit for bit."""
    from bitsandbytes.optim import AdamW8bit

    module = model()
    groups = [{"params": [p for p in module.parameters() if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays}
              for decays in (True, False)]
    theirs = AdamW8bit(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        set_gradients(module, step)
        theirs.step()
    mine = after(5, made)
    assert all(torch.equal(mine[name], p) for name, p in module.named_parameters() if name in LARGE)


def test_matrices_decay_and_vectors_do_not() -> None:
    module = model()
    before = {name: p.clone() for name, p in module.named_parameters()}
    optimizer = made(module)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(1e-2, ONE, ZERO)
    for name, p in module.named_parameters():
        assert torch.allclose(p, before[name] * (1 - 1e-3 if p.dim() > 1 else 1), rtol=1e-6)
        assert torch.equal(p, before[name]) == (p.dim() == 1)


def test_gradients_are_divided_by_the_scale_they_come_with() -> None:
    plain, scaled = after(4, made), after(4, made, grad_scale=2.0**16, times=2.0**16)
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    module = model()
    optimizer, scaler = made(module), Scaler(torch.device("cpu"), scaling=False)
    set_gradients(module, 0)
    apply_gradients(module, optimizer, scaler, 1e-2, 1.0)
    before = {name: each.clone() for name, each in (optimizer.tensors() | dict(module.named_parameters())).items()}
    set_gradients(module, 1)
    next(module.parameters()).grad[0, 0] = float("nan")
    apply_gradients(module, optimizer, scaler, 1e-2, 1.0)
    now = optimizer.tensors() | dict(module.named_parameters())
    assert scaler.skipped == 1
    assert all(torch.equal(each, now[name]) for name, each in before.items())


def test_state_of_another_optimizer_is_not_loaded() -> None:
    stored = exact(model()).tensors()
    assert {name.rpartition(".")[0] for name in made(model()).load_tensors(stored) if "." in name} == set(LARGE)


def test_the_state_takes_one_byte_per_element() -> None:
    taken = sum(each.nbytes for name, each in made(model()).tensors().items() if name.startswith("0.weight"))
    assert taken == 2 * 15000 + 2 * 4 * -(-15000 // GROUP)


def test_a_tensor_too_large_for_one_call_is_updated_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = after(3, made)
    monkeypatch.setattr(ours, "MAX_ELEMENTS", 16 * GROUP)
    in_several = after(3, made)
    assert all(torch.equal(at_once[name], in_several[name]) for name in at_once)


# ---- where it does not work


def test_a_missing_library_is_an_error_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(DeviceError, match="does not work with device=cpu here") as caught:
        made(model())
    assert caught.value.fix.startswith("--adam8bit=own")


def test_a_library_without_a_build_for_the_device_is_noticed_before_the_first_step(
        monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes import functional

    def unbuilt(*_: Any, **__: Any) -> None:
        raise RuntimeError("Method 'cadam_8bit_blockwise_grad_fp32' not available in CPU-only version\nReinstall")

    monkeypatch.setattr(functional, "optimizer_update_8bit_blockwise", unbuilt)
    with pytest.raises(DeviceError) as caught:
        made(model())
    assert caught.value.what.endswith("not available in CPU-only version")


def test_out_of_memory_is_not_reported_as_a_broken_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes import functional

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(functional, "create_dynamic_map", full)
    with pytest.raises(torch.OutOfMemoryError):
        made(model())
