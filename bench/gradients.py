"""How exact are the engine's gradients? Against float64, beside the error of the plain computation under autocast, at
every recompute policy, eager and compiled; and the fused loss kernel beside plain torch.

    python bench/gradients.py -o bench/results/gradients_h200.json

On a card, or with --device cpu (then without the fused kernel, and nothing compiled).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from fitgpt import __version__  # noqa: E402
from fitgpt.config.architectures import GPTConfig  # noqa: E402
from fitgpt.config.memory_savers import POLICIES  # noqa: E402
from fitgpt.engine.model import GPT, build_model  # noqa: E402
from fitgpt.engine.ops import IGNORE_INDEX, plain_cross_entropy_, triton_works  # noqa: E402
from tests.helpers import reference_loss  # noqa: E402

SHAPES = {"heads of 64": (768, 12), "heads of 42, padded": (504, 12)}
SCALES = {"bfloat16": 1.0, "float16": 2.0**16, "float32": 1.0}
BATCH, BLOCK, LAYERS = 4, 256, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-o", "--out", default="")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = [row for name, shape in SHAPES.items() for row in gradient_errors(name, *shape, device)]
    kernel, others = (kernel_errors(device), other_kernels(device)) if device.type == "cuda" and triton_works() \
        else ([], [])
    for row in [*rows, *kernel, *others]:
        print(row)
    if options.out:
        Path(options.out).write_text(json.dumps(
            {"what": "relative errors of all gradients against float64", "date": time.strftime("%Y-%m-%d"),
             "fitgpt": __version__, "torch": torch.__version__, "rows": rows, "kernel": kernel, "others": others,
             "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
             "command": f"python bench/gradients.py -o bench/results/{Path(options.out).name}"}, indent=1) + "\n")


def gradient_errors(name: str, width: int, heads: int, device: torch.device) -> list[dict[str, Any]]:
    config = GPTConfig(n_layer=LAYERS, n_head=heads, n_embd=width, vocab_size=50304, block_size=BLOCK)
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (BATCH, BLOCK + 1), device=device)
    idx, targets = tokens[:, :-1], tokens[:, 1:]
    exact = build_model(config, device, seed=0).double()
    with device:
        truth = torch.autograd.grad(reference_loss(exact, idx, targets), list(exact.parameters()))
    return [{"shape": name, "dtype": dtype, **errors_in(dtype, config, idx, targets, list(truth))} for dtype in SCALES]


def errors_in(dtype: str, config: GPTConfig, idx: Tensor, targets: Tensor, truth: list[Tensor]) -> dict[str, Any]:
    device, scale, kind = idx.device, SCALES[dtype], getattr(torch, dtype)
    model = build_model(config, device, seed=0)
    with torch.autocast(device.type, kind, enabled=dtype != "float32"), device:
        loss = reference_loss(model, idx, targets) * scale
    plain = torch.autograd.grad(loss, list(model.parameters()))
    ours = {}
    for compiled in (False, True) if device.type == "cuda" else (False,):
        torch._dynamo.reset()
        for policy in POLICIES:
            ours[f"{policy}{', compiled' if compiled else ''}"] = relative_error(
                our_gradients(config, kind, policy, compiled, idx, targets, scale), truth, scale)
    return {"plain": relative_error(list(plain), truth, scale), "ours": ours}


def our_gradients(config: GPTConfig, dtype: torch.dtype, policy: str, compiled: bool, idx: Tensor, targets: Tensor,
                  scale: float) -> list[Tensor]:
    """Accumulated over two halves of the scale, so that adding to a gradient that exists is measured too."""
    model: GPT = build_model(config, idx.device, seed=0)
    model.compute_dtype, model.recompute_policies = dtype, [policy] * config.n_layer
    if compiled:
        model.compile()
    for _ in range(2):
        model.accumulate(idx, targets, torch.tensor(scale / 2, device=idx.device))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def relative_error(gradients: list[Tensor], truth: list[Tensor], scale: float) -> float:
    off = sum((g.double() / scale - t).square().sum().item() for g, t in zip(gradients, truth, strict=True))
    return float((off / sum(t.square().sum().item() for t in truth)) ** 0.5)


def kernel_errors(device: torch.device) -> list[dict[str, Any]]:
    """The fused kernel beside plain torch: largest difference of a loss, relative difference of the gradient."""
    from fitgpt.engine.kernels import fused_cross_entropy_

    rows = []
    for dtype, scale in SCALES.items():
        for width in (50304, 50257, 257, 100):
            torch.manual_seed(0)
            logits = (3 * torch.randn(300, width, device=device)).to(getattr(torch, dtype))
            targets = torch.randint(width, (300,), device=device)
            targets[7] = IGNORE_INDEX
            plain, fused, weight = logits.clone(), logits.clone(), torch.tensor(scale / 300, device=device)
            losses = plain_cross_entropy_(plain, targets, weight), fused_cross_entropy_(fused, targets, weight)
            rows.append({"dtype": dtype, "width": width, "loss": (losses[0] - losses[1]).abs().max().item(),
                         "gradient": ((plain.float() - fused.float()).norm() / plain.float().norm()).item()})
    return rows


def other_kernels(device: torch.device) -> list[dict[str, Any]]:
    """The norm's backward and the rounded AdamW, each beside plain torch: the largest relative difference."""
    from fitgpt.engine import kernels, ops
    from fitgpt.engine.optim import low_precision

    torch.manual_seed(0)
    rows = []
    for stream in (torch.float32, torch.bfloat16):
        for width, bias in ((768, None), (1600, torch.randn(1600, device=device)), (100, None)):
            x, d_x, d_norm, added = (torch.randn(1000, width, device=device).to(dtype) for dtype in
                                     (stream, stream, torch.bfloat16, torch.bfloat16))
            given, copy = (d_norm, x, added, torch.randn(width, device=device), bias, torch.bfloat16, True), d_x.clone()
            plain, ours = ops.norm_backward_(d_x, *given), kernels.norm_backward_(copy, *given)
            rows.append({"kernel": "norm_backward_", "stream": str(stream), "width": width, "difference": max(
                different(a, b) for a, b in zip((d_x, *plain), (copy, *ours), strict=True) if a is not None)})
    for eight_bit in (True, False):
        weights, gradient = torch.randn(100_000, device=device), torch.randn(100_000, device=device)
        figures = torch.tensor([1e-3, 1 / (1 - 0.9), 1 / (1 - 0.95), 0.5, 0.0], device=device)
        states = [low_precision._new_state(weights, eight_bit) for _ in range(2)]
        copy = weights.clone()
        low_precision.update_(weights, gradient, states[0], figures, 0.1, 0.9, 0.95)
        kernels.low_precision_adamw_(copy, gradient, states[1], figures, torch.tensor(7, device=device), 3, 0.1, 0.9,
                                     0.95)
        rows.append({"kernel": "rounded_adamw_", "eight_bit": eight_bit, "difference": max(
            different(a, b) for a, b in zip((weights, *states[0].values()), (copy, *states[1].values()), strict=True))})
    ones = torch.ones(200_000, dtype=torch.bfloat16, device=device)  # to be moved a quarter of a step of bfloat16
    figures = torch.tensor([2**-9, 1.0, 1.0, 1.0, 0.0], device=device)
    kernels.low_precision_adamw_(ones, torch.zeros_like(ones), low_precision._new_state(ones, True), figures,
                                 torch.tensor(7, device=device), 3, -1.0, 0.9, 0.95)
    rows.append({"kernel": "rounded_adamw_ by chance", "difference": abs(ones.double().mean().item() - 1 - 2**-9)})
    return rows


def different(a: Tensor, b: Tensor | None) -> float:
    assert b is not None
    return ((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-30)).item()


if __name__ == "__main__":
    main()
