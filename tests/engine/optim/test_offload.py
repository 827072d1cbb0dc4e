"""An optimizer with its state in CPU RAM updates like the one on the device."""

from __future__ import annotations

import pytest
import torch

from fitgpt.engine.optim.adamw import AdamW
from fitgpt.engine.optim.grad_scaler import Scaler, apply_gradients
from fitgpt.engine.optim.muon import Muon
from fitgpt.engine.optim.offload import OffloadedAdamW
from tests.engine.optim.tiny_gpt import ONE, SETTINGS, batch, model


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
