"""How many tokens a second will nanoGPT's own train.py train? A roofline as speed.py's, of what it does otherwise.

Its weights are float32 and cast for every micro-batch, all logits are there at once, and no GPU work is recorded: the
host launches every kernel and fetches every batch, so an iteration takes as long as the slower of the two does.
What is said to be fitted is fitted to the 19 runs of bench/results/nanospeed_h200.json, an H200 with torch 2.11; what
is counted, to what its kernels read and write. The shares of the card's figures are those of our engine (reach.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ..config.run_config import RunConfig
from ..hardware.gpus import Card
from ..memory.gpt import BYTES
from ..memory.nanorun import NanoGPTRun
from ..memory.setting import Setting, setting_for
from ..nouns import GPTConfig, SpeedEstimate
from . import speed
from .efficiency import Reach, kind_of
from .forecast import nanogpt_run, settled

# ---- on the card

STREAM = 4                # bytes: autocast keeps the stream in float32
EAGER = 1.5               # times a fused kernel's bytes: counted, and fitted to "77M, eager" and "124M, eager"
LOSS_COMPILED = 6         # numbers for each logit, counted: read twice, zeros for its gradient, read, read and written
LOSS_EAGER = 28, 6        # bytes, counted: in float32, and to cast it there and its gradient back
DIAGONAL = 256            # tokens more that attention is as slow as: fitted to "block 256" and "block 4096" …
USUAL_BLOCK = 1024        # … beside blocks of this, of which reach.py's share is
FLOAT32_ATTENTION = 5.0   # times as long as half precision's at half the rate: fitted to the one run, "124M, float32"
DROPPED_SCORES = 1.5      # times as long, attention that draws a mask: fitted to the two "biases and dropout"
MASKED = 10               # bytes a token and C of a layer's two other masks, drawn, kept and applied: counted
OF_BIASES = 9             # numbers a token and C: read for the biases' gradients
CASTS = 12                # bytes a weight: to half precision, and its gradient back
ADDED = 12                # bytes a weight: to add a micro-batch's gradient to the others'
UPDATED, UNSCALED = 40, 8 # bytes a weight: norm, clipping and AdamW; float16's gradients are unscaled

# ---- on the host

KERNELS = {True: 40, False: 52}  # a layer, forward and backward, compiled and eager: counted
KERNELS_BESIDE = 20              # the layers
KERNELS_OF_BIASES, KERNELS_OF_MASKS = 16, 4  # more in a layer; compiled, a mask is part of another kernel
COMPILED_CALL_S = 3e-3    # checks of the compiled code, two calls of it: fitted, as COMPILED_KERNEL_S and STEP_S, to …
COMPILED_KERNEL_S = 18e-6 # … "124M, batch 1", "40 micro-batches of 4", "30M" and "characters"
EAGER_KERNEL_S = 26e-6    # fitted to "350M, eager" and "30M, eager"
STEP_S = 450e-6           # a layer: clipping and the optimizer's lists of tensors
SEQUENCE_S = 45e-6        # get_batch, for each sequence: timed alone, on a CPU (docs/log.md)
OTHER_HOSTS = 1.5, 0.6    # times as long, at most and at least, where nothing was recorded: assumed


class Recorded(NamedTuple):
    card: str
    run: NanoGPTRun
    tokens_per_s: float
    source: str


@cache
def recorded() -> tuple[Recorded, ...]:
    return tuple(Recorded(row["card"], NanoGPTRun(**row["knobs"]), row["tokens_per_s"], row["source"])
                 for row in speed.recorded_rows("nanogpt"))


def estimate(config: RunConfig, card: Card | None, setting: Setting | None = None) -> SpeedEstimate | None:
    """What to expect of a run, and what that is based on; None where it is not known: see `_known`."""
    if card is None:
        return None
    setting = setting or setting_for(card)
    run = _known(config, card, setting)
    if run is None:
        return None
    expected = modelled(run, card, setting, speed.reach_of(card))
    here = [each for each in recorded() if each.card == card.name]
    same = next((each for each in here if _as_fast(each.run) == _as_fast(run)), None)
    if same is not None:
        return speed.measured(same.tokens_per_s, same.source)
    if here:
        return speed.near_recorded(expected, worst_error(card), len(here))
    kind = kind_of(card)
    low, high = (modelled(run, card, setting, reach, host)
                 for reach, host in zip((kind.least, kind.most), OTHER_HOSTS, strict=True))
    return speed.assumed(low, expected, high, card)


def likely(config: RunConfig, card: Card, setting: Setting) -> float | None:
    """By the roofline alone; None as above."""
    run = _known(config, card, setting)
    return None if run is None else modelled(run, card, setting, speed.reach_of(card))


def _known(config: RunConfig, card: Card, setting: Setting) -> NanoGPTRun | None:
    """None where the card's figures are not known, and for bfloat16 on a card that has none: it works there, in other
    units than the figures are of."""
    run = nanogpt_run(settled(config, setting, "nanogpt"))
    return run if speed.has_figures(card) and (run.dtype != "bfloat16" or setting.has_bf16) else None


@cache
def worst_error(card: Card) -> float:
    """How far the roofline is off at most, of the runs recorded on a card; at least 5 %."""
    setting, reach = setting_for(card), speed.reach_of(card)
    return max(0.05, *(abs(modelled(each.run, card, setting, reach) / each.tokens_per_s - 1)
                       for each in recorded() if each.card == card.name))


def _as_fast(run: NanoGPTRun) -> NanoGPTRun:
    """Runs that come to the same are as fast: how much is dropped or clipped does not matter."""
    return replace(run, dropout=float(run.dropout > 0), grad_clip=float(run.grad_clip > 0))


# ---- the roofline


def modelled(run: NanoGPTRun, card: Card, setting: Setting, reach: Reach, host: float = 1.0) -> float:
    """Tokens a second; `host`: how many times as long as the recorded one the host takes."""
    steps = run.gradient_accumulation_steps
    on_card = _micro_batch_on_card(run, card, card.sms or setting.sms, reach)
    return steps * run.tokens / max(steps * on_card + _step_on_card(run, card, reach), host * _on_host(run))


def _micro_batch_on_card(run: NanoGPTRun, card: Card, sms: int, reach: Reach) -> float:
    rate, bandwidth = speed.matrix_rate(card, run.dtype), _bandwidth(card, reach)
    n, c, v, p = run.tokens, run.n_embd, run.vocab_size, BYTES[run.dtype]
    biased = speed.WITH_BIAS if run.bias else 1.0
    products = (biased + 2) * 24 * n * c * c / speed.product_rate(rate, reach, n * c, sms)
    head = 6 * n * v * c / speed.product_rate(rate, reach, n * v, sms)
    numbers, of_stream = map(sum, zip(speed.MOVED_FORWARD, speed.MOVED_BACKWARD, strict=True))
    numbers += OF_BIASES if run.bias else 0
    pointwise = n * c * (numbers * p + of_stream * STREAM + (MASKED if run.dropout else 0))
    embeddings = n * c * (3 * p + 12 * STREAM)
    to_float32, to_half = LOSS_EAGER
    loss = n * v * (LOSS_COMPILED * p if run.compile else to_float32 + to_half * (p < STREAM) * p)
    casts = CASTS if p < STREAM else 0
    added = ADDED * (1 - 1 / run.gradient_accumulation_steps)  # a step's first gradients are kept as they are
    moved = ((1.0 if run.compile else EAGER) * (run.n_layer * pointwise + embeddings) + loss
             + (casts + added) * _weights(run))
    return (run.n_layer * (products + _attention(run, rate * reach.attention)) + head + moved / bandwidth
            + speed.KERNEL_GAP_S * _kernels(run))


def _attention(run: NanoGPTRun, rate: float) -> float:
    """Of one layer. Work on the diagonal is half for nothing, which short blocks feel."""
    seconds = 7 * run.tokens * run.n_embd * (run.block_size + DIAGONAL) * USUAL_BLOCK / (USUAL_BLOCK + DIAGONAL) / rate
    return (seconds * speed.head_cost(run.n_embd // run.n_head) * (DROPPED_SCORES if run.dropout else 1.0)
            * (FLOAT32_ATTENTION if run.dtype == "float32" else 1.0))


def _step_on_card(run: NanoGPTRun, card: Card, reach: Reach) -> float:
    return _weights(run) * (UPDATED + (UNSCALED if run.dtype == "float16" else 0)) / _bandwidth(card, reach)


def _bandwidth(card: Card, reach: Reach) -> float:
    return 1e9 * (card.bandwidth_gbs or 0) * reach.bytes


def _on_host(run: NanoGPTRun) -> float:
    """An iteration: its kernels launched, its batches fetched."""
    launched = _kernels(run) * (COMPILED_KERNEL_S if run.compile else EAGER_KERNEL_S)
    called = COMPILED_CALL_S if run.compile else 0.0
    return (run.gradient_accumulation_steps * (called + launched + SEQUENCE_S * run.batch_size)
            + STEP_S * run.n_layer)


def _kernels(run: NanoGPTRun) -> int:
    """Of a micro-batch."""
    of_masks = KERNELS_OF_MASKS if run.dropout and not run.compile else 0
    return run.n_layer * (KERNELS[run.compile] + (KERNELS_OF_BIASES if run.bias else 0) + of_masks) + KERNELS_BESIDE


def _weights(run: NanoGPTRun) -> int:
    return GPTConfig(run.block_size, run.vocab_size, run.n_layer, run.n_head, run.n_embd, bias=run.bias).count_params()
