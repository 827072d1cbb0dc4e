"""Muon updates like torch's."""

from __future__ import annotations

import torch

from fitgpt.engine.optim.adamw import AdamW
from fitgpt.engine.optim.muon import Muon
from tests.engine.optim.tiny_gpt import ONE, SETTINGS, ZERO, model


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
