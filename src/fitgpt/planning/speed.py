"""ResolvedRun + GPU → tokens per second of our engine: a roofline of matmul rate and memory bandwidth.

A micro-step is matmuls, attention, kernels that only move bytes, and gaps between kernels; a step adds the bytes of the
optimizer. The share of the GPU's figures that each kind reaches (efficiency.py) was read from profiles and runs of our
engine on an H200 (docs/log.md, bench/results). recorded.json has those runs, and tests compare the estimate with them.
On other GPUs the shares are assumed, so an estimate there is a range; it is good enough to rank settings.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..config.memory_savers import KEEPS, LEVELS, loss_chunk_tokens
from ..config.optimizers import optimizer_of
from ..config.resolve import resolve_run
from ..config.run_config import SPEED_OPTIONS, RunConfig
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from ..tapes import engine as engine_tape
from .budget import platform_for
from .efficiency import Efficiency, SpeedEstimate, gpu_class

BYTES = engine_tape.BYTES

TILE = 128                # rows and columns of a matmul's result that one multiprocessor computes at once …
LAST_WAVE = 0.25          # … and the share of a wave of tiles that is lost at the end of a matmul
WITH_BIAS = 1.3           # times as long: matmuls with a bias run in cuBLASLt, which is slower on an H200
SCORE = 128               # columns of a head that cost as much as the softmax of a score
KERNEL_GAP_S = 1.5e-6     # between two kernels of a CUDA graph …
LAUNCH_GAP_S = 3e-6       # … and between two that are launched one by one: assumed
KERNELS_PER_LAYER = 45    # forward and backward
KERNELS_PER_CHUNK = 6     # of the loss
CPU_PER_LAYER_S = 2.8e-3  # to launch those one by one: 124M without CUDA graphs at 327k tokens/s; 77M, 30M eager agree
CPU_PER_CHUNK_S = 0.2e-3
MOVED_FORWARD = 13, 4     # elements per token and channel that a layer's fused kernels move: in the dtype of matmuls …
MOVED_BACKWARD = 29, 6    # … and in that of the residual stream
EAGER = 2.5               # times the bytes of a fused kernel that its eager parts move
PCIE_BYTES_S = 12e9       # assumed: PCIe 4.0 × 16 of a consumer board at half its figure, as copies of many tensors see
FLOAT32_PER_CLOCK = 128   # FLOP per multiprocessor of Volta's and Turing's FP32 units
HOST_ADAMW_BYTES_S = 15e9 # assumed: two memory channels, a few cores


class StepCost(NamedTuple):
    """Seconds. A step takes `micro_steps` × (`fixed` + all layers) + `step`."""

    fixed: float                 # per micro-step, without the layers
    layers: tuple[float, ...]    # per layer, forward and backward, in the order of LEVELS
    host: float                  # the least a micro-step takes on the CPU, where it is not a CUDA graph
    step: float                  # the optimizer

    def seconds(self, micro_steps: int, in_layers: float) -> float:
        return micro_steps * max(self.fixed + in_layers, self.host) + self.step


def has_figures(card: GpuModel | None) -> bool:
    return card is not None and bool(card.tflops and card.bandwidth_gbs)


def step_cost(config: RunConfig, card: GpuModel, platform: Platform, efficiency: Efficiency) -> StepCost:
    """Takes a resolved config, and a GPU whose figures are known. `config.recompute` does not matter."""
    rate, bandwidth = matmul_peak(card, config.dtype), 1e9 * (card.bandwidth_gbs or 0) * efficiency.bytes
    n, c, t, v = config.batch_size * config.block_size, config.n_embd, config.block_size, config.vocab_size
    p, r, m = BYTES[config.dtype], BYTES[config.residual], BYTES[config.weights]

    sms = card.sms or platform.sms
    matmul_flops = matmul_rate(rate, efficiency, n * c, sms)
    attention = rate * efficiency.attention / head_cost(c // config.n_head)

    gap = KERNEL_GAP_S if engine_tape.uses_cuda_graphs(config) else LAUNCH_GAP_S

    def matmul(outputs: int, inputs: int) -> float:
        """One of the three matmuls of a weight matrix, with the cast of the weight."""
        return 2 * n * outputs * inputs / matmul_flops + (_cast(config) * outputs * inputs) / bandwidth

    def moved(in_matmuls: float, in_residual: float) -> float:
        """Pointwise kernels: elements per token and channel, in the dtype of matmuls and in that of the residual
        stream."""
        return (EAGER if not config.compile else 1.0) * n * c * (in_matmuls * p + in_residual * r) / bandwidth

    qkv, proj, up, down = ((3 * c, c), (c, c), (4 * c, c), (c, 4 * c))
    biased = WITH_BIAS if config.bias else 1.0
    forward = (biased * sum(matmul(*each) for each in (qkv, proj, up, down)) + 2 * n * t * c / attention
               + moved(*MOVED_FORWARD))
    # Two matmuls per matrix; the weight's gradient is added to what is there: read and written once.
    backward = (sum(2 * matmul(*each) for each in (qkv, proj, up, down)) + 5 * n * t * c / attention
                + moved(*MOVED_BACKWARD) - (moved(2, 0) if p == r else 0.0)
                + 12 * c * c * (2 * m - _cast(config)) / bandwidth)
    dropout = 3 * moved(2.5, 0) if config.dropout else 0.0
    if config.bias:
        backward += moved(9, 0)  # its gradient: a sum over what the weight's matmul reads
    kept = {"h1": moved(-1, 0), "h2": moved(-1, 0), "g": 0.0}  # if kept, one element less to write in backward
    recomputed = {"fc": biased * matmul(*up) + moved(1, 1), "proj": biased * matmul(*proj),
                  "qkv": biased * matmul(*qkv) + moved(1, 1), "att": 2 * n * t * c / attention}
    layers = []
    for level in LEVELS:
        extra = (sum(kept.get(name, 0.0) for name in KEEPS[level])
                 + sum(recomputed[name] for name in recomputed if name not in KEEPS[level]))
        layers.append(forward + backward + dropout + extra + gap * KERNELS_PER_LAYER)

    chunk = loss_chunk_tokens(n, v, config.loss_chunk)
    chunks = -(-n // chunk)
    head = 6 * n * v * c / matmul_rate(rate, efficiency, chunk * v, sms)
    loss = (3 if platform.compiles else 12) * p * n * v / bandwidth
    fixed = (head + loss + (chunks * 2 * m + _cast(config)) * v * c / bandwidth + moved(3, 12)
             + chunks * KERNELS_PER_CHUNK * gap)
    host = 0.0 if engine_tape.uses_cuda_graphs(config) else config.n_layer * CPU_PER_LAYER_S + chunks * CPU_PER_CHUNK_S
    sent, step = _optimizer_seconds(config, bandwidth, rate * efficiency.matmuls)
    if config.casts == "kept" and config.weights != config.dtype:
        step += (m + p) * (v * c + 12 * c * c * config.n_layer) / bandwidth
    return StepCost(fixed + sent, tuple(layers), host, step)


def matmul_rate(rate: float, efficiency: Efficiency, results: int, sms: int) -> float:
    """FLOP/s of a matmul with that many result elements: its last wave of tiles does not fill the GPU."""
    filled = results / TILE**2 / sms
    return rate * efficiency.matmuls * filled / (filled + LAST_WAVE)


def head_cost(width: int) -> float:
    """Time of attention with heads of this width, relative to heads of 64: kernels compute multiples of 64 columns, and
    a score costs as much as SCORE columns, whatever the width."""
    return (-(-width // 64) * 64 + SCORE) / width * 64 / (64 + SCORE)


def _cast(config: RunConfig) -> int:
    """Bytes read and written per element to cast a weight for one matmul."""
    if config.weights == config.dtype or config.casts == "kept":
        return 0
    return BYTES[config.weights] + BYTES[config.dtype]


def matmul_peak(card: GpuModel, dtype: str) -> float:
    """FLOP/s by the spec sheet. float32 matmuls run as TF32, at half the rate, from Ampere on; before it on the FP32
    units."""
    if dtype == "float32" and card.has_matrix_units:
        if card.capability and card.capability < (8, 0) and card.sms and card.boost_mhz:
            return 1e6 * FLOAT32_PER_CLOCK * card.sms * card.boost_mhz
        return 0.5e12 * (card.tflops or 0)
    return 1e12 * (card.tflops or 0)


def _optimizer_seconds(config: RunConfig, bandwidth: float, matmul_flops: float) -> tuple[float, float]:
    """(per micro-step, per step): gradients that leave the GPU, and the update."""
    params = config.gpt_config().count_params()
    if config.offload != "none":
        update = 28 * params / HOST_ADAMW_BYTES_S + 4 * params / PCIE_BYTES_S
        sent = 4 * params / PCIE_BYTES_S + 12 * params / HOST_ADAMW_BYTES_S
        return (sent, update) if config.offload == "gradients" else (0.0, update + 4 * params / PCIE_BYTES_S)
    optimizer = optimizer_of(config)
    return 0.0, (params * optimizer.bytes_moved(BYTES[config.weights]) / bandwidth
                 + optimizer.matmul_flops(config.n_embd) * config.n_layer / matmul_flops)


# ---- estimates


class RecordedSpeed(NamedTuple):
    """A run whose speed was measured."""

    card: str
    config: RunConfig
    tokens_per_s: float
    source: str


@cache
def recorded(trainer: str = "runs") -> tuple[RecordedSpeed, ...]:
    """From recorded.json, which tools/recorded.py writes: "runs" of our engine, or those of "nanogpt"."""
    document = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
    return tuple(RecordedSpeed(row["card"], RunConfig(**row["knobs"]), row["tokens_per_s"], row["source"])
                 for row in document[trainer])


def likely_efficiency(card: GpuModel) -> Efficiency:
    return gpu_class(card).likely


def modelled(config: RunConfig, card: GpuModel, platform: Platform, efficiency: Efficiency) -> float:
    """Tokens per second by the roofline alone."""
    cost = step_cost(config, card, platform, efficiency)
    in_layers = sum(cost.layers[LEVELS.index(level)] for level in config.levels)
    return config.tokens_per_step / cost.seconds(config.gradient_accumulation_steps, in_layers)


def estimate(config: RunConfig, card: GpuModel | None, platform: Platform | None = None) -> SpeedEstimate | None:
    """The speed to expect of a run, and what that is based on; None where the GPU's figures are not known."""
    if card is None or not has_figures(card):
        return None
    platform = platform or platform_for(card)
    config = resolve_run(config, platform)
    here = [run for run in recorded() if run.card == card.name]
    same = next((run for run in here if speed_key(resolve_run(run.config, platform)) == speed_key(config)), None)
    if same is not None:
        return measured(same.tokens_per_s, same.source)
    likely = modelled(config, card, platform, likely_efficiency(card))
    if here:
        return near_recorded(likely, worst_error(card), len(here))
    kind = gpu_class(card)
    low, high = (modelled(config, card, platform, efficiency) for efficiency in (kind.least, kind.most))
    return assumed(low, likely, high, card)


def measured(tokens_per_s: float, source: str) -> SpeedEstimate:
    return SpeedEstimate(tokens_per_s, tokens_per_s, tokens_per_s, f"measured: {source}")


def near_recorded(likely: float, error: float, runs: int) -> SpeedEstimate:
    return SpeedEstimate((1 - error) * likely, (1 + error) * likely, likely,
                         f"a roofline that is within {100 * error:.0f} % of {runs} runs recorded on this GPU")


def assumed(low: float, likely: float, high: float, card: GpuModel) -> SpeedEstimate:
    return SpeedEstimate(low, high, likely, f"a roofline of {card.tflops:g} TFLOP/s and {card.bandwidth_gbs:g} GB/s, "
                         f"calibrated on runs of an H200, with efficiencies assumed for {gpu_class(card).text}; "
                         "nothing was recorded on this GPU")


@cache
def worst_error(card: GpuModel) -> float:
    """The largest relative error of the roofline over the runs recorded on a GPU; at least 5 %."""
    platform, errors = platform_for(card), [0.05]
    for run in recorded():
        if run.card == card.name:
            likely = modelled(resolve_run(run.config, platform), card, platform, likely_efficiency(card))
            errors.append(abs(likely / run.tokens_per_s - 1))
    return max(errors)


def speed_key(config: RunConfig) -> tuple[Any, ...]:
    """What the speed of a resolved config depends on: configs with the same key are equally fast."""
    effective = {
        "compile": bool(config.compile), "cuda_graphs": engine_tape.uses_cuda_graphs(config),
        "grad_clip": config.grad_clip > 0,
        "recompute": config.levels, "grad_checkpoint": None,
        "loss_chunk": loss_chunk_tokens(config.batch_size * config.block_size, config.vocab_size, config.loss_chunk)}
    return tuple(effective.get(name, getattr(config, name)) for name in SPEED_OPTIONS)
