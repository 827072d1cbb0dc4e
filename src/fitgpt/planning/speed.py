"""ResolvedRun + GPU → tokens per second of our engine: a roofline of matmul rate and memory bandwidth.

A micro-step is matmuls, attention, kernels that only move bytes, and gaps between kernels; a step adds the bytes of the
optimizer. The share of the GPU's figures that each kind reaches was read from profiles and runs of our engine on an
H200 (docs/log.md, bench/results). recorded.json has those runs, and tests compare the estimate with them. On other GPUs
the shares are assumed, so an estimate there is a range; it is good enough to rank settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from ..config.architectures import BYTES
from ..config.memory_savers import POLICIES, SAVED_TENSORS, loss_chunk_tokens
from ..config.optimizers import optimizer_of
from ..config.run_config import SPEED_OPTIONS, ResolvedRun, RunConfig, resolve_run
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from .budget import has_nvlink, platform_for
from .measured_speeds import MeasuredSpeed, measured_on

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
# Speed with --deterministic relative to without, compiled and eager: GPT-2 124M on an H200
# (bench/results/deterministic_speed_h200.json). Assumed for other shapes and GPUs.
DETERMINISTIC = {"bfloat16": (0.889, 0.900), "float16": (0.895, 0.871), "float32": (0.642, 0.725)}


class StepCost(NamedTuple):
    """Seconds. A step takes `micro_steps` × (`fixed` + all layers) + `step`."""

    fixed: float                 # per micro-step, without the layers
    layers: tuple[float, ...]    # per layer, forward and backward, in the order of POLICIES
    host: float                  # the least a micro-step takes on the CPU, where it is not a CUDA graph
    step: float                  # the optimizer

    def seconds(self, micro_steps: int, in_layers: float) -> float:
        return micro_steps * max(self.fixed + in_layers, self.host) + self.step


# Between two GPUs, per direction. PCIe 4.0 x16 has 31.5 GB/s; without peer access, as between GeForce GPUs, the data
# crosses it twice, through CPU RAM. NVLink of an A100 has 300 GB/s, and collectives reach about half of it.
PCIE_BYTES_PER_S, NVLINK_BYTES_PER_S = 10e9, 150e9


def has_figures(card: GpuModel | None) -> bool:
    return card is not None and bool(card.tflops and card.bandwidth_gbs)


def step_cost(config: RunConfig, card: GpuModel, platform: Platform, efficiency: Efficiency) -> StepCost:
    """Takes a resolved config, and a GPU whose figures are known. `config.saved_activations` does not matter."""
    rate, bandwidth = matmul_peak(card, config.dtype), 1e9 * (card.bandwidth_gbs or 0) * efficiency.bytes
    n, c, t, v = config.batch_size * config.block_size, config.n_embd, config.block_size, config.vocab_size
    p, r, m = BYTES[config.dtype], BYTES[config.residual], BYTES[config.weights]

    sms = card.sms or platform.sms
    matmul_flops = matmul_rate(rate, efficiency, n * c, sms)
    attention = rate * efficiency.attention / head_cost(c // config.n_head)

    cuda_graphs = config.uses_cuda_graphs
    gap = KERNEL_GAP_S if cuda_graphs else LAUNCH_GAP_S
    # Bytes read and written per element to cast a weight for one matmul.
    cast = 0 if config.weights == config.dtype or config.casts == "kept" else m + p

    def matmul(outputs: int, inputs: int) -> float:
        """One of the three matmuls of a weight matrix, with the cast of the weight."""
        return 2 * n * outputs * inputs / matmul_flops + cast * outputs * inputs / bandwidth

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
                + 12 * c * c * (2 * m - cast) / bandwidth)
    dropout = 3 * moved(2.5, 0) if config.dropout else 0.0
    if config.bias:
        backward += moved(9, 0)  # its gradient: a sum over what the weight's matmul reads
    kept = {"h1": moved(-1, 0), "h2": moved(-1, 0), "g": 0.0}  # if kept, one element less to write in backward
    recomputed = {"fc": biased * matmul(*up) + moved(1, 1), "proj": biased * matmul(*proj),
                  "qkv": biased * matmul(*qkv) + moved(1, 1), "att": 2 * n * t * c / attention}
    layers = []
    for policy in POLICIES:
        extra = (sum(kept.get(name, 0.0) for name in SAVED_TENSORS[policy])
                 + sum(recomputed[name] for name in recomputed if name not in SAVED_TENSORS[policy]))
        layers.append(forward + backward + dropout + extra + gap * KERNELS_PER_LAYER)

    chunk = loss_chunk_tokens(n, v, config.loss_chunk)
    chunks = -(-n // chunk)
    head = 6 * n * v * c / matmul_rate(rate, efficiency, chunk * v, sms)
    loss = (3 if platform.compiles else 12) * p * n * v / bandwidth
    fixed = (head + loss + (chunks * 2 * m + cast) * v * c / bandwidth + moved(3, 12)
             + chunks * KERNELS_PER_CHUNK * gap)
    host = 0.0 if cuda_graphs else config.n_layer * CPU_PER_LAYER_S + chunks * CPU_PER_CHUNK_S

    # The optimizer: the update of a step, and what each micro-step sends to the CPU.
    params, optimizer, sent = config.gpt_config().count_params(), optimizer_of(config), 0.0
    step = (params * optimizer.bytes_moved(m) / bandwidth
            + optimizer.matmul_flops(c) * config.n_layer / (rate * efficiency.matmuls))
    if config.offload != "none":
        step = 28 * params / HOST_ADAMW_BYTES_S + 4 * params / PCIE_BYTES_S
        if config.offload == "gradients":
            sent = 4 * params / PCIE_BYTES_S + 12 * params / HOST_ADAMW_BYTES_S
        else:
            step += 4 * params / PCIE_BYTES_S
    if config.casts == "kept" and config.weights != config.dtype:
        step += (m + p) * (v * c + 12 * c * c * config.n_layer) / bandwidth
    slower = 1 / DETERMINISTIC[config.dtype][0 if config.compile else 1] if config.deterministic else 1.0
    return StepCost(slower * fixed + sent, tuple(slower * layer for layer in layers), slower * host, step)


def matmul_rate(rate: float, efficiency: Efficiency, results: int, sms: int) -> float:
    """FLOP/s of a matmul with that many result elements: its last wave of tiles does not fill the GPU."""
    filled = results / TILE**2 / sms
    return rate * efficiency.matmuls * filled / (filled + LAST_WAVE)


def head_cost(width: int) -> float:
    """Time of attention with heads of this width, relative to heads of 64: kernels compute multiples of 64 columns, and
    a score costs as much as SCORE columns, whatever the width."""
    return (-(-width // 64) * 64 + SCORE) / width * 64 / (64 + SCORE)


def matmul_peak(card: GpuModel, dtype: str) -> float:
    """FLOP/s by the spec sheet. float32 matmuls run as TF32, at half the rate, from Ampere on; before it on the FP32
    units."""
    if dtype == "float32" and card.has_matrix_units:
        if card.capability and card.capability < (8, 0) and card.sms and card.boost_mhz:
            return 1e6 * FLOAT32_PER_CLOCK * card.sms * card.boost_mhz
        return 0.5e12 * (card.tflops or 0)
    return 1e12 * (card.tflops or 0)


# ---- the share of its spec-sheet figures that a GPU reaches
#
# Measured on an H200; assumed for other classes. Where nothing was recorded there are three shares: the least to
# expect, the likely, the most. Public figures that the assumed shares were compared with, all for GPT-2 124M unless
# stated otherwise:
#
# - RTX 4090: 106k tokens/s compiled (29 % of an A100's rate: nanoGPT's issue 182), 110k (half of what two such GPUs did
#   with llm.c's train_gpt2.py: tylerromero.com's worklog).
# - A100: 110k tokens/s with an early torch 2.0 (nanoGPT's issue 110).
# - V100: 62.4 TFLOP/s, 48 % of the most, for a GPT-2 of 1.2B (Megatron-LM 1.0's notes).
# - T4: 24 of its 65 TFLOP/s in cuBLAS's matmuls, because it may draw only 70 W (NVIDIA's developer forum, 264462).


class Efficiency(NamedTuple):
    """The share of a GPU's spec-sheet figures that our kernels reach."""

    matmuls: float    # of its matmul rate, where a matmul fills the GPU
    attention: float  # of its matmul rate
    bytes: float      # of its memory bandwidth


class GpuClass(NamedTuple):
    """GPUs with similar efficiency."""

    text: str
    least: Efficiency
    likely: Efficiency
    most: Efficiency


# GPT-2 124M, 4 × 12 × 1024: matmuls 54.5 ms, attention 13.8 ms, pointwise, loss, casts and AdamW 24 ms (docs/log.md).
HOPPER = GpuClass("Hopper, as an H200 reaches them", Efficiency(0.60, 0.18, 0.58),
                  Efficiency(0.715, 0.24, 0.70), Efficiency(0.80, 0.35, 0.82))
# GeForce since Ampere: matmul rates are half those of workstation GPUs, which is easier to reach, and flash attention
# was made for them.
GEFORCE = GpuClass("GeForce GPUs since Ampere", Efficiency(0.70, 0.30, 0.65),
                   Efficiency(0.80, 0.45, 0.80), Efficiency(0.92, 0.60, 0.92))
# The full matmul rate at boost clock, which their power limit does not allow for long.
FULL_RATE = GpuClass("workstation and data-centre GPUs since Ampere", Efficiency(0.50, 0.20, 0.60),
                     Efficiency(0.65, 0.30, 0.75), Efficiency(0.85, 0.50, 0.90))
LOW_POWER = GpuClass("GPUs limited to 70 W", Efficiency(0.25, 0.08, 0.60),
                     Efficiency(0.34, 0.14, 0.70), Efficiency(0.45, 0.25, 0.85))
# Before Ampere there is no flash attention: torch uses its memory-efficient kernel, whose backward pass is slow there.
TURING = GpuClass("GeForce GPUs of Turing, without flash attention", Efficiency(0.55, 0.10, 0.55),
                  Efficiency(0.70, 0.18, 0.70), Efficiency(0.88, 0.32, 0.85))
VOLTA = GpuClass("Volta and full-rate Turing, without flash attention", Efficiency(0.38, 0.07, 0.55),
                 Efficiency(0.52, 0.12, 0.70), Efficiency(0.72, 0.24, 0.85))
# No tensor cores, and no torch.compile.
PASCAL = GpuClass("Pascal, which has no tensor cores", Efficiency(0.45, 0.06, 0.55),
                  Efficiency(0.62, 0.14, 0.70), Efficiency(0.85, 0.30, 0.85))

OTHER_VENDOR = GpuClass("GPUs of another vendor", Efficiency(0.35, 0.12, 0.50),
                        Efficiency(0.55, 0.25, 0.65), Efficiency(0.80, 0.50, 0.85))

LOW_POWER_NAMES = ("T4", "L4", "RTX A2000 12GB")  # 70 to 72 W, by their spec sheets
HALF_RATE = 768  # FLOP per clock and multiprocessor: GeForce GPUs have 512, others 1024 or more (gpus.csv)


# What plain matmuls and copies reach of an H200's figures (`fitgpt record`, tests/recorded/gpus/h200.json): HOPPER's
# likely efficiencies are those of our kernels on the same GPU.
PLAIN_MATMULS, PLAIN_COPIES = 667.9 / 989, 4171.2 / 4800


def gpu_class(card: GpuModel) -> GpuClass:
    """The GPU's class; scaled to the rates of plain matmuls and copies, where they were recorded on such a GPU."""
    kind = _class_of(card)
    if not (card.matmul_tflops and card.copy_gbs and card.tflops and card.bandwidth_gbs):
        return kind
    matmuls = card.matmul_tflops / card.tflops / PLAIN_MATMULS * HOPPER.likely.matmuls / kind.likely.matmuls
    copies = card.copy_gbs / card.bandwidth_gbs / PLAIN_COPIES * HOPPER.likely.bytes / kind.likely.bytes

    def scaled(of: Efficiency) -> Efficiency:
        return Efficiency(of.matmuls * matmuls, of.attention * matmuls, of.bytes * copies)

    return GpuClass(f"{kind.text}, scaled to rates recorded on such a GPU", scaled(kind.least), scaled(kind.likely),
                    scaled(kind.most))


def _class_of(card: GpuModel) -> GpuClass:
    clocks = (card.sms or 0) * (card.boost_mhz or 0)
    is_half_rate = clocks > 0 and 1e6 * (card.tflops or 0) / clocks < HALF_RATE
    if card.capability is None:
        return OTHER_VENDOR
    if card.name in LOW_POWER_NAMES:
        return LOW_POWER
    if card.capability < (7, 0):
        return PASCAL
    if card.capability < (8, 0):
        return TURING if is_half_rate else VOLTA
    if card.capability == (9, 0):
        return HOPPER
    return GEFORCE if is_half_rate else FULL_RATE


def likely_efficiency(card: GpuModel) -> Efficiency:
    return gpu_class(card).likely


# ---- estimates

OTHER_HOSTS = 1.5, 0.6   # times as long on the CPU, at most and at least, where nothing was recorded: assumed
SMALLEST_ERROR = 0.05    # that is assumed of a roofline, however close it is to recorded runs
MEASURED_ERROR = 0.02    # between two measured speeds: clocks, temperature, and what else uses the GPU
ENOUGH_SHAPES = 3        # shapes recorded on a GPU from which on they say something about other shapes
SHAPE = attrgetter("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
# A run, the efficiencies, and the time of the CPU relative to that of the recorded runs → tokens per second.
Roofline = Callable[[ResolvedRun, Efficiency, float], float]


class SpeedEstimate(NamedTuple):
    """Tokens per second to expect of a run; low and high are equal where that very run was measured."""

    low: float
    high: float
    likely: float
    basis: str    # what it is based on

    @property
    def error(self) -> float:
        """Relative: half the width of the range. Two speeds that are closer than this may be in the other order."""
        return max((self.high - self.low) / (2 * self.likely), MEASURED_ERROR)


def modelled(config: RunConfig, card: GpuModel, platform: Platform, efficiency: Efficiency) -> float:
    """Tokens per second by the roofline alone."""
    cost = step_cost(config, card, platform, efficiency)
    in_layers = sum(cost.layers[POLICIES.index(policy)] for policy in config.policies)
    return config.tokens_per_step / (cost.seconds(config.micro_batches, in_layers) + communication(config, card))


def communication(config: RunConfig, card: GpuModel) -> float:
    """Seconds per step in which the ranks add up their gradients, computed from the bandwidth of the links. In a ring
    each rank sends and receives 2 (n - 1) / n of the gradients' bytes (NVIDIA's nccl-tests, PERFORMANCE.md)."""
    ranks, gradients = config.ranks, config.gpt_config().count_params() * BYTES[config.weights]
    link = NVLINK_BYTES_PER_S if has_nvlink(card.name) else PCIE_BYTES_PER_S
    return 2 * (ranks - 1) / ranks * gradients / link


def likely(config: RunConfig, card: GpuModel, platform: Platform) -> float | None:
    """The same with the likely efficiencies; None where the GPU's figures are not known."""
    if not has_figures(card):
        return None
    return modelled(resolve_run(config, platform), card, platform, likely_efficiency(card))


def estimate(config: RunConfig, card: GpuModel | None, platform: Platform | None = None, *,
             measured: bool = True) -> SpeedEstimate | None:
    """The speed to expect of a run, and what that is based on; None where the GPU's figures are not known. `measured`:
    whether a measurement of this very run counts."""
    if card is None or not has_figures(card):
        return None
    on = platform or platform_for(card)
    key = speed_key if measured and config.ranks == 1 else None  # speeds were measured on one GPU
    found = estimate_by(lambda run, efficiency, host: modelled(run, card, on, efficiency), key, resolve_run(config, on),
                        card, on, "fitgpt")
    if config.deterministic and found.low < found.high:  # not measured
        found = found._replace(basis=f"{found.basis}; the cost of --deterministic is that of GPT-2 124M on an H200")
    return found


def estimate_by(roofline: Roofline, key: Callable[[ResolvedRun], tuple[Any, ...]] | None, run: ResolvedRun,
                card: GpuModel, platform: Platform, trainer: str) -> SpeedEstimate:
    """A measured speed, if a run with the same key was recorded on this GPU. Else the roofline: scaled to the recorded
    runs of the same shape; or as wrong as it is for recorded runs of several other shapes; or within the assumed
    efficiencies."""
    here = [(resolve_run(each.config, platform, trainer), each) for each in measured_on(card.name, trainer)]
    if key is not None:
        for other, measured in here:
            if key(other) == key(run):
                return SpeedEstimate(*3 * (measured.tokens_per_s,), measured.basis)
    kind = gpu_class(card)
    expected = roofline(run, kind.likely, 1.0)

    def ratios(runs: list[tuple[ResolvedRun, MeasuredSpeed]]) -> list[float]:
        """Measured speeds relative to the roofline's."""
        return [measured.tokens_per_s / roofline(other, kind.likely, 1.0) for other, measured in runs]

    same_shape = [each for each in here if SHAPE(each[0]) == SHAPE(run)]
    if same_shape:
        found = ratios(same_shape)
        scale, error = median(found), max(SMALLEST_ERROR, max(found) / min(found) - 1)
        return SpeedEstimate((1 - error) * scale * expected, (1 + error) * scale * expected, scale * expected,
                             f"a roofline scaled to {_runs(same_shape)} of this shape recorded on this GPU, within "
                             f"{100 * error:.0f} %")
    if len({SHAPE(other) for other, _ in here}) >= ENOUGH_SHAPES:
        error = max(SMALLEST_ERROR, *(abs(1 / ratio - 1) for ratio in ratios(here)))
        return SpeedEstimate((1 - error) * expected, (1 + error) * expected, expected,
                             f"a roofline that is within {100 * error:.0f} % of {_runs(here)} recorded on this GPU")
    low, high = map(roofline, (run, run), (kind.least, kind.most), OTHER_HOSTS)
    missing = "nothing of this shape" if here else "nothing"
    return SpeedEstimate(low, high, expected, f"a roofline of {card.tflops:g} TFLOP/s and {card.bandwidth_gbs:g} GB/s, "
                         f"calibrated on runs of an H200, with efficiencies assumed for {kind.text}; {missing} was "
                         "recorded on this GPU")


def _runs(found: Sequence[object]) -> str:
    return "1 run" if len(found) == 1 else f"{len(found)} runs"


def speed_key(config: RunConfig, policies: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """What the speed of a resolved config depends on: configs with the same key are equally fast. `policies`: what each
    layer recomputes, if not as in the config."""
    effective = {
        "compile": bool(config.compile), "cuda_graphs": config.uses_cuda_graphs,
        "grad_clip": config.grad_clip > 0,
        "saved_activations": policies or config.policies, "grad_checkpoint": None,
        "loss_chunk": loss_chunk_tokens(config.batch_size * config.block_size, config.vocab_size, config.loss_chunk)}
    return tuple(effective.get(name, getattr(config, name)) for name in SPEED_OPTIONS)
