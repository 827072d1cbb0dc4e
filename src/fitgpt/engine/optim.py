"""The optimizer step: clipping, unscaling, skipping and updating in one fused pass, with no word from the host.

The fused AdamW kernel divides gradients by `grad_scale` and does nothing where `found_inf` is set, both read on
the device. Clipping is a division too, so it rides along: after the norm, one pass over the gradients does it all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# float16's loss scale moves as torch.amp.GradScaler's does: its published defaults.
FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000


@dataclass(frozen=True)
class AdamWSettings:
    learning_rate: float
    beta1: float
    beta2: float
    weight_decay: float


def make_optimizer(model: nn.Module, settings: AdamWSettings) -> torch.optim.AdamW:
    """AdamW with its state allocated at once, so that the first step asks for nothing new.

    Matrices decay and vectors do not, in nanoGPT's order, so that its optimizer state maps onto ours.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2),
                                  fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as flat tensors, `<parameter>.<state>`: what a checkpoint stores."""
    return {f"{name}.{key}": value for name, parameter in model.named_parameters()
            for key, value in optimizer.state[parameter].items()}


@torch.no_grad()
def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer,
                           tensors: Mapping[str, Tensor]) -> list[str]:
    """Copies a checkpoint's optimizer state in place; returns the names that were missing or of another shape."""
    wrong = []
    for name, held in optimizer_tensors(model, optimizer).items():
        stored = tensors.get(name)
        if stored is None or stored.shape != held.shape:
            wrong.append(name)
        else:
            held.copy_(stored)
    return wrong


class Scaler:
    """The loss scale and the count of skipped steps, on the device. Where not `scaling`, the scale stays 1."""

    def __init__(self, device: torch.device, *, scaling: bool) -> None:
        self.scaling = scaling
        self.scale = torch.tensor(FIRST_SCALE if scaling else 1.0, device=device)
        self.good_steps = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        self.skipped_in_a_row = torch.zeros((), device=device)

    def update(self, found_inf: Tensor) -> None:
        self.skipped += found_inf
        self.skipped_in_a_row += 1
        self.skipped_in_a_row *= found_inf
        if self.scaling:
            self.good_steps += 1
            self.good_steps *= 1 - found_inf
            grown = self.good_steps >= GROWTH_INTERVAL
            factor = torch.where(grown, GROWTH, torch.where(found_inf > 0, BACKOFF, 1.0))
            # Never below 1: a scale that fell to zero would turn every later gradient into zero, unnoticed.
            self.scale.mul_(factor).clamp_(min=1.0)
            self.good_steps *= ~grown

    def to_dict(self) -> dict[str, float]:
        return {"scale": self.scale.item(), "good_steps": self.good_steps.item(),
                "skipped": self.skipped.item(), "skipped_in_a_row": self.skipped_in_a_row.item()}

    def load_dict(self, state: Mapping[str, float]) -> None:
        if self.scaling:
            self.scale.fill_(state["scale"])
            self.good_steps.fill_(state["good_steps"])
        self.skipped.fill_(state["skipped"])
        self.skipped_in_a_row.fill_(state["skipped_in_a_row"])


@torch.no_grad()
def optimizer_step(optimizer: torch.optim.Optimizer, gradients: Iterable[Tensor], scaler: Scaler,
                   learning_rate: float, grad_clip: float) -> Tensor:
    """Applies the accumulated (scaled) gradients, or skips them where they are not finite. Returns their norm."""
    norm = torch.nn.utils.get_total_norm(list(gradients)) / scaler.scale
    found_inf = (~torch.isfinite(norm)).float()
    too_long = (norm / grad_clip).clamp_(min=1.0) if grad_clip else torch.ones_like(norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # The two attributes through which torch.amp.GradScaler hands a fused optimizer its figures.
    optimizer.grad_scale = scaler.scale * too_long  # type: ignore[attr-defined]
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    optimizer.step()
    scaler.update(found_inf)
    return norm
