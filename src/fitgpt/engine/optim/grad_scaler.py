"""One step of any optimizer: float16's loss scaling as torch's GradScaler does it, gradient clipping, skipped steps.

The CPU waits for nothing. Clipping is a division like unscaling, so both are one factor, `grad_scale`: after the norm,
one pass over the gradients, in the optimizer's kernel, does all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .adamw import Optimizer

# The defaults of torch.amp.GradScaler.
FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
SCALER_STATE = ("scale", "good_steps", "skipped", "skipped_in_a_row")  # of Scaler, in a checkpoint


class Scaler:
    """Loss scale and counts of skipped steps, on the device, as in GradScaler. Without `scaling` the scale is 1."""

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
        return {name: getattr(self, name).item() for name in SCALER_STATE}

    def load_dict(self, state: Mapping[str, float]) -> None:
        if self.scaling:
            self.scale.fill_(state["scale"])
            self.good_steps.fill_(state["good_steps"])
        self.skipped.fill_(state["skipped"])
        self.skipped_in_a_row.fill_(state["skipped_in_a_row"])


@torch.no_grad()
def apply_gradients(model: nn.Module, optimizer: Optimizer, scaler: Scaler, learning_rate: float, grad_clip: float,
                    *, stay: bool = False, begins: Callable[[], None] = lambda: None) -> Tensor:
    """Applies the accumulated (scaled) gradients, or skips them if they are not finite; returns their norm.

    Then it frees them, or zeroes them if they `stay` (CUDA graphs need fixed addresses). `begins` is called before
    anything is changed.
    """
    sink = optimizer.sink
    gradients = sink.gradients() if sink else [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).to(scaler.scale) / scaler.scale  # float32, as the kernel needs it
    found_inf = (~torch.isfinite(norm)).float()
    grad_scale = (norm / grad_clip).clamp_(min=1.0) if grad_clip else torch.ones_like(norm)
    grad_scale *= scaler.scale
    begins()
    optimizer.step(learning_rate, grad_scale, found_inf)
    scaler.update(found_inf)
    model.zero_grad(set_to_none=not stay)
    if sink:
        sink.clear()
    return norm
