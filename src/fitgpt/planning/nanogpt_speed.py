"""RunConfig + GPU → tokens per second of nanoGPT's train.py: a roofline like that of speed.py, for what it does
differently.

Its weights are float32 and are cast for every micro-batch, all logits exist at once, and it uses no CUDA graphs: the
CPU launches every kernel and fetches every batch, so an iteration takes as long as the slower of GPU and CPU. Constants
that are "fitted" are fitted to the 19 runs of bench/results/nanospeed_h200.json, on an H200 with torch 2.11; those that
are "counted" follow from what its kernels read and write. Efficiencies are those of our engine.
"""

from __future__ import annotations

from ..config.architectures import BYTES
from ..config.run_config import ResolvedRun, RunConfig, resolve_run
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from . import speed
from .budget import platform_for
from .speed import Efficiency, SpeedEstimate, estimate_by

# ---- on the GPU

RESIDUAL = 4              # bytes: autocast keeps the residual stream in float32
EAGER = 1.5               # times a fused kernel's bytes: counted, and fitted to "77M, eager" and "124M, eager"
LOSS_COMPILED = 6         # elements per logit, counted: read twice, zeros for its gradient, read, read and written
LOSS_EAGER = 28, 6        # bytes per logit, counted: in float32, and to cast it and its gradient
DIAGONAL = 256            # extra tokens that attention's diagonal costs: fitted to "block 256" and "block 4096", …
USUAL_BLOCK = 1024        # … relative to this block, for which speed.py's share holds
FLOAT32_ATTENTION = 5.0   # times as long as half precision at half the rate: fitted to one run, "124M, float32"
DROPPED_SCORES = 1.5      # times as long, attention with a dropout mask: fitted to the two "biases and dropout"
MASKED = 10               # bytes per token and channel of a layer's two other masks: counted
OF_BIASES = 9             # elements per token and channel, read for the gradients of biases
CASTS = 12                # bytes per parameter: to half precision, and its gradient back
ADDED = 12                # bytes per parameter: to add a micro-batch's gradient to the sum
UPDATED, UNSCALED = 40, 8 # bytes per parameter: norm, clipping and AdamW; float16 gradients are unscaled

# ---- on the CPU

KERNELS = {True: 40, False: 52}  # per layer, forward and backward, compiled and eager: counted
KERNELS_BESIDE = 20              # the layers
KERNELS_OF_BIASES, KERNELS_OF_MASKS = 16, 4  # more in a layer; compiled, a mask is part of another kernel
COMPILED_CALL_S = 3e-3    # checks of the compiled code, two calls of it: fitted, as COMPILED_KERNEL_S and STEP_S, to …
COMPILED_KERNEL_S = 18e-6 # … "124M, batch 1", "40 micro-batches of 4", "30M" and "characters"
EAGER_KERNEL_S = 26e-6    # fitted to "350M, eager" and "30M, eager"
STEP_S = 450e-6           # per layer: clipping and the optimizer's lists of tensors
SEQUENCE_S = 45e-6        # get_batch, per sequence: timed alone, on a CPU (docs/log.md)


def estimate(config: RunConfig, card: GpuModel | None, platform: Platform | None = None) -> SpeedEstimate | None:
    """The speed to expect of a run, and what that is based on; None where it is not known: see `_known`."""
    if card is None:
        return None
    on = platform or platform_for(card)
    run = _known(config, card, on)
    if run is None:
        return None
    return estimate_by(lambda run, efficiency, host: modelled(run, card, on, efficiency, host), _speed_key, run, card,
                       on, "nanogpt")


def likely(config: RunConfig, card: GpuModel, platform: Platform) -> float | None:
    """By the roofline alone; None as above."""
    run = _known(config, card, platform)
    return None if run is None else modelled(run, card, platform, speed.likely_efficiency(card))


def _known(config: RunConfig, card: GpuModel, platform: Platform) -> ResolvedRun | None:
    """The resolved run; None where the GPU's figures are not known, and for bfloat16 on a GPU without it: there it is
    emulated, and the figures do not apply."""
    run = resolve_run(config, platform, "nanogpt")
    return run if speed.has_figures(card) and (run.dtype != "bfloat16" or platform.has_bf16) else None


def _speed_key(run: RunConfig) -> tuple[object, ...]:
    """Runs with the same key are equally fast: the dropout rate and the clipping norm do not matter."""
    return (run.n_layer, run.n_head, run.n_embd, run.batch_size, run.block_size, run.vocab_size,
            run.gradient_accumulation_steps, run.dtype, run.dropout > 0, run.bias, run.compile, run.grad_clip > 0,
            run.eval_only)


# ---- the roofline


def modelled(run: RunConfig, card: GpuModel, platform: Platform, efficiency: Efficiency, host: float = 1.0) -> float:
    """Tokens per second. `host`: the time of the CPU relative to that of the recorded runs."""
    rate, bandwidth = speed.matmul_peak(card, run.dtype), 1e9 * (card.bandwidth_gbs or 0) * efficiency.bytes
    sms, micro_steps = card.sms or platform.sms, run.gradient_accumulation_steps
    n, c, t, v, p = run.batch_size * run.block_size, run.n_embd, run.block_size, run.vocab_size, BYTES[run.dtype]
    params, kernels = run.gpt_config().count_params(), kernels_per_micro_batch(run)

    # Matmuls, and attention: half of the work on its diagonal is masked out, which matters for short blocks.
    biased = speed.WITH_BIAS if run.bias else 1.0
    matmuls = (biased + 2) * 24 * n * c * c / speed.matmul_rate(rate, efficiency, n * c, sms)
    head = 6 * n * v * c / speed.matmul_rate(rate, efficiency, n * v, sms)
    attention = (7 * n * c * (t + DIAGONAL) * USUAL_BLOCK / (USUAL_BLOCK + DIAGONAL) / (rate * efficiency.attention)
                 * speed.head_cost(c // run.n_head) * (DROPPED_SCORES if run.dropout else 1.0)
                 * (FLOAT32_ATTENTION if run.dtype == "float32" else 1.0))

    # Bytes that kernels move in a micro-batch.
    elements, of_residual = map(sum, zip(speed.MOVED_FORWARD, speed.MOVED_BACKWARD, strict=True))
    elements += OF_BIASES if run.bias else 0
    pointwise = n * c * (elements * p + of_residual * RESIDUAL + (MASKED if run.dropout else 0))
    embeddings = n * c * (3 * p + 12 * RESIDUAL)
    to_float32, to_half = LOSS_EAGER
    loss = n * v * (LOSS_COMPILED * p if run.compile else to_float32 + to_half * (p < RESIDUAL) * p)
    casts = CASTS if p < RESIDUAL else 0
    added = ADDED * (1 - 1 / micro_steps)  # the first gradients of a step are not added
    moved = ((1.0 if run.compile else EAGER) * (run.n_layer * pointwise + embeddings) + loss
             + (casts + added) * params)

    micro_batch = run.n_layer * (matmuls + attention) + head + moved / bandwidth + speed.KERNEL_GAP_S * kernels
    step = params * (UPDATED + (UNSCALED if run.dtype == "float16" else 0)) / bandwidth
    return micro_steps * n / max(micro_steps * micro_batch + step, host * seconds_on_cpu(run))


def seconds_on_cpu(run: RunConfig) -> float:
    """Per iteration, to launch kernels and fetch batches."""
    launched = kernels_per_micro_batch(run) * (COMPILED_KERNEL_S if run.compile else EAGER_KERNEL_S)
    called = COMPILED_CALL_S if run.compile else 0.0
    return (run.gradient_accumulation_steps * (called + launched + SEQUENCE_S * run.batch_size)
            + STEP_S * run.n_layer)


def kernels_per_micro_batch(run: RunConfig) -> int:
    of_masks = KERNELS_OF_MASKS if run.dropout and not run.compile else 0
    of_layer = KERNELS[bool(run.compile)] + (KERNELS_OF_BIASES if run.bias else 0) + of_masks
    return run.n_layer * of_layer + KERNELS_BESIDE
