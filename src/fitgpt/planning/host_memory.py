"""RunConfig → the CPU RAM that a run certainly needs, by purpose; and whether there is so much.

What is counted is a lower bound: batches read ahead, offloaded state, a checkpoint being read or copied, and, on a CPU,
weights, gradients and the optimizer's state. Python, torch and activations on a CPU come on top.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ..config.architectures import BYTES, parameter_shapes
from ..config.optimizers import checkpoint_bytes, host_bytes, state_bytes
from ..config.run_config import RunConfig
from ..core.errors import SystemFault, UsageError
from ..core.units import show_bytes
from .changes import repeatedly_divided

TOKEN = 8      # bytes: int64
IN_FLIGHT = 4  # batches in CPU RAM: engine/batches.DEPTH read ahead, and one that is being copied


def needs(config: RunConfig, *, on_cpu: bool) -> dict[str, int]:
    """Bytes by purpose."""
    config = replace(config, vocab_size=config.vocab_size or 1)  # of the data, which is not read here
    shapes = list(parameter_shapes(config.gpt_config()).values())
    tokens = max(config.batch_size * (config.block_size + 1), config.eval_batch * (config.eval_block + 1))
    batch = TOKEN * tokens
    found = {"batches read ahead": IN_FLIGHT * (batch if on_cpu else pinned(batch)),
             "offloaded optimizer state": host_bytes(config)}
    if config.offload != "none" and not on_cpu:  # master weights are pinned, and a buffer for the largest gradient
        sizes = [4 * prod(shape) for shape in shapes]
        found["offloaded optimizer state"] += sum(pinned(size) - size for size in sizes) + pinned(max(sizes))
    if on_cpu:
        weights = sum(prod(shape) * BYTES[config.weights] for shape in shapes)
        training = 0 if config.eval_only else weights + state_bytes(config)
        found["weights, gradients and optimizer state"] = weights + training
    if config.init_from == "resume":  # read before there are batches
        found["the checkpoint that is read"] = max(checkpoint_bytes(config) - found["batches read ahead"], 0)
    elif not on_cpu:
        found["the copy of a tensor that is saved"] = max(4 * prod(shape) for shape in shapes)
    return {purpose: nbytes for purpose, nbytes in found.items() if nbytes}


def pinned(nbytes: int) -> int:
    """torch rounds a block of pinned memory up to a power of two: CachingHostAllocator."""
    return 1 << (nbytes - 1).bit_length()


def check(config: RunConfig, available: int | None, *, on_cpu: bool) -> None:
    """SystemFault if the run needs more than `available` bytes; None: that is not known."""
    found = needs(config, on_cpu=on_cpu)
    total = sum(found.values())
    if available is None or total <= available:
        return
    parts = ", ".join(f"{show_bytes(nbytes)} for {purpose}" for purpose, nbytes in
                      sorted(found.items(), key=lambda part: -part[1]))
    raise SystemFault(f"The run needs at least {show_bytes(total)} of CPU RAM ({parts}), and {show_bytes(available)} "
                      "is available.", fix(config, available, on_cpu=on_cpu))


def fix(config: RunConfig, available: int, *, on_cpu: bool) -> str:
    """Flags with which it fits: the same step in smaller micro-batches, or nothing offloaded."""
    for offload in dict.fromkeys((config.offload, "none")):
        for batch in (config.batch_size, *repeatedly_divided(config.batch_size), 1):
            steps = config.batch_size * config.gradient_accumulation_steps // batch
            try:
                changed = replace(config, offload=offload, batch_size=batch, gradient_accumulation_steps=steps,
                                  eval_batch_size=min(config.eval_batch, batch))
            except UsageError:  # step_in_backward has no accumulation
                continue
            if sum(needs(changed, on_cpu=on_cpu).values()) <= available:
                flags = [f"--batch_size={batch}", f"--gradient_accumulation_steps={steps}",
                         f"--eval_batch_size={changed.eval_batch_size}"] if batch != config.batch_size else []
                return "Add " + " ".join([*flags, *([f"--offload={offload}"] if offload != config.offload else [])])
    return "Close other programs, or train a smaller model: --n_layer, --n_embd."
