"""Muon is torch's own; an optimizer in the host's memory is the one on the device."""

from __future__ import annotations

import pytest
import torch

from fitgpt import GPT, GPTConfig
from fitgpt.engine.optim.adamw import AdamW, AdamWSettings, Scaler, apply_gradients
from fitgpt.engine.optim.muon import Muon
from fitgpt.engine.optim.offload import OffloadedAdamW

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, weight_decay=0.1)
CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=67, block_size=16)
ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    tokens = torch.randint(67, (4, 17))
    return tokens[:, :-1], tokens[:, 1:]


def test_muon_updates_matrices_like_torchs_muon_and_the_rest_like_adamw() -> None:
    ours, theirs, start = model(), model(), model()
    named = dict(theirs.named_parameters())
    rest = {n: p for n, p in named.items() if not (".h." in n and p.dim() == 2)}
    muon = torch.optim.Muon([p for n, p in named.items() if n not in rest], lr=1e-2, weight_decay=0.1, momentum=0.95,
                            adjust_lr_fn="match_rms_adamw")
    a, b = Muon(dict(ours.named_parameters()), SETTINGS), AdamW(rest, SETTINGS)
    for step in range(4):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.manual_seed(step)
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step(1e-2, ONE, ZERO)
        muon.step()
        b.step(1e-2, ONE, ZERO)
    for p, q, s in zip(ours.parameters(), theirs.parameters(), start.parameters(), strict=True):
        assert (p - q).norm() < 0.01 * (q - s).norm()  # both orthogonalise in bfloat16, in another order


@pytest.mark.parametrize("stream", [False, True])
def test_offloaded_adamw_gives_the_same_weights(stream: bool) -> None:
    ours, theirs = model(), model()
    host = OffloadedAdamW(dict(ours.named_parameters()), SETTINGS, stream=stream)
    plain = AdamW(dict(theirs.named_parameters()), SETTINGS)
    scaler = Scaler(torch.device("cpu"), scaling=False)
    for step in range(4):
        for micro in range(2):
            ours.accumulate(*batch(2 * step + micro), ONE / 2, host.sink)
            theirs.accumulate(*batch(2 * step + micro), ONE / 2)
        assert (ours.lm_head.weight.grad is None) == stream
        norms = [apply_gradients(m, o, scaler, 1e-2, 1.0) for m, o in ((ours, host), (theirs, plain))]
        assert torch.allclose(*norms, rtol=1e-5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


def test_a_skipped_step_changes_nothing_in_either() -> None:
    for make in (lambda p: Muon(p, SETTINGS), lambda p: OffloadedAdamW(p, SETTINGS, stream=True)):
        gpt = model()
        optimizer = make(dict(gpt.named_parameters()))
        scaler = Scaler(torch.device("cpu"), scaling=False)
        before = [p.clone() for p in gpt.parameters()]
        gpt.accumulate(*batch(0), ONE * float("nan"), optimizer.sink)
        apply_gradients(gpt, optimizer, scaler, 1e-2, 1.0)
        assert all(torch.equal(a, p) for a, p in zip(before, gpt.parameters(), strict=True))
        assert scaler.skipped == 1


@pytest.mark.parametrize("eight_bit", [False, True])
def test_applied_in_the_backward_pass_it_is_the_same_update(eight_bit: bool) -> None:
    from fitgpt.engine.optim.low_precision import AdamWInBackward, LowPrecisionAdamW

    ours, theirs = model(), model()
    at_once = AdamWInBackward(dict(ours.named_parameters()), SETTINGS, eight_bit=eight_bit, fused=False, seed=0)
    later = LowPrecisionAdamW(dict(theirs.named_parameters()), SETTINGS, eight_bit=eight_bit, fused=False, seed=0)
    for step in range(3):
        at_once.begin(1e-3)
        ours.accumulate(*batch(step), ONE, at_once)
        assert all(p.grad is None for p in ours.parameters())
        theirs.accumulate(*batch(step), ONE)
        later.step(1e-3, ONE, ZERO)
        theirs.zero_grad()
    for p, q, s in zip(ours.parameters(), theirs.parameters(), model().parameters(), strict=True):
        assert (p - q).norm() < 1e-3 * (q - s).norm()
