"""How many tokens a second will a run train? A roofline from the card's matrix rate and bandwidth.

A micro-step is matrix products, attention, kernels that only move bytes, and gaps between kernels; a step adds the
optimizer's bytes. What share of the card's figures each kind reaches (reach.py) was read off profiles and runs of our
engine on an H200 (docs/log.md, bench/results); recorded.json has those runs, and tests hold the estimate against them.
Good enough to rank settings; on other cards the shares are assumed, so an estimate there is a range.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..config.memory_savers import KEEPS, LEVELS, loss_piece_tokens
from ..config.run_config import RunConfig
from ..hardware.gpus import Card
from ..memory import gpt
from ..memory.setting import Setting, setting_for
from ..nouns import SpeedEstimate
from .efficiency import Reach, kind_of
from .forecast import settled

BYTES = gpt.BYTES

TILE = 128                # rows and columns of a product that one multiprocessor works on at once …
WITH_BIAS = 1.3           # times as long: such products run in cuBLASLt, which is slower on an H200
SCORE = 128               # columns of a head that a score's softmax costs as much as
LAST_WAVE = 0.25          # … and the share of a round of them that is lost at a product's end
KERNEL_GAP_S = 1.5e-6     # between two recorded kernels …
LAUNCH_GAP_S = 3e-6       # … and between two that are launched one by one: assumed
KERNELS_A_LAYER = 45      # forward and backward
KERNELS_A_PIECE = 6       # of the loss
HOST_A_LAYER_S = 2.8e-3   # to launch those one by one: 124M unrecorded at 327k tokens/s, 77M and 30M eager alike
HOST_A_PIECE_S = 0.2e-3
MOVED_FORWARD = 13, 4     # numbers a token and C that a layer's fused kernels move, in the products' precision and in …
MOVED_BACKWARD = 29, 6    # … the stream's
EAGER = 2.5               # how many times a fused kernel's bytes its eager parts move
PCIE_BYTES_S = 12e9       # assumed: a consumer board's 4.0 × 16 at half its figure, as copies of many tensors see it
FLOAT32_A_CLOCK = 128     # FLOP of Volta's and Turing's ordinary units, for each multiprocessor
HOST_ADAMW_BYTES_S = 15e9 # assumed: two channels of memory, a few cores


class Cost(NamedTuple):
    """Seconds. A step is `micro_steps` × (`fixed` + each layer's) + `step`."""

    fixed: float                 # of a micro-step, without the layers
    layers: tuple[float, ...]    # one layer, forward and backward, in the order of LEVELS
    host: float                  # the least a micro-step takes on the host, where its work is not recorded
    step: float                  # the optimizer's part

    def seconds(self, micro_steps: int, in_layers: float) -> float:
        return micro_steps * max(self.fixed + in_layers, self.host) + self.step


def has_figures(card: Card | None) -> bool:
    return card is not None and bool(card.tflops and card.bandwidth_gbs)


def cost(config: RunConfig, card: Card, setting: Setting, reach: Reach) -> Cost:
    """Wants a settled config, and a card whose figures are known. The config's levels do not matter."""
    rate, bandwidth = matrix_rate(card, config.dtype), 1e9 * (card.bandwidth_gbs or 0) * reach.bytes
    n, c, t, v = config.batch_size * config.block_size, config.n_embd, config.block_size, config.vocab_size
    p, r, m = BYTES[config.dtype], BYTES[config.residual], BYTES[config.weights]

    sms = card.sms or setting.sms
    products = product_rate(rate, reach, n * c, sms)
    attention = rate * reach.attention / head_cost(c // config.n_head)

    gap = KERNEL_GAP_S if gpt.records(config) else LAUNCH_GAP_S

    def product(outputs: int, inputs: int) -> float:
        """One of the three products of a matrix, with its weight's cast."""
        return 2 * n * outputs * inputs / products + (_cast(config) * outputs * inputs) / bandwidth

    def moved(in_products: float, in_stream: float) -> float:
        """Pointwise: so many numbers a token and C in the products' precision, so many in the stream's."""
        return (EAGER if not config.compile else 1.0) * n * c * (in_products * p + in_stream * r) / bandwidth

    qkv, proj, up, down = ((3 * c, c), (c, c), (4 * c, c), (c, 4 * c))
    biased = WITH_BIAS if config.bias else 1.0
    forward = (biased * sum(product(*each) for each in (qkv, proj, up, down)) + 2 * n * t * c / attention
               + moved(*MOVED_FORWARD))
    # Two products for each matrix; the weight's gradient is added to what is there: read and written once.
    backward = (sum(2 * product(*each) for each in (qkv, proj, up, down)) + 5 * n * t * c / attention
                + moved(*MOVED_BACKWARD) - (moved(2, 0) if p == r else 0.0)
                + 12 * c * c * (2 * m - _cast(config)) / bandwidth)
    dropout = 3 * moved(2.5, 0) if config.dropout else 0.0
    if config.bias:
        backward += moved(9, 0)  # its gradient: a sum over what the weight's product reads
    again = {"h1": moved(-1, 0), "h2": moved(-1, 0), "g": 0.0}  # kept: one number less to write on the way back
    lost = {"fc": biased * product(*up) + moved(1, 1), "proj": biased * product(*proj),
            "qkv": biased * product(*qkv) + moved(1, 1),
            "att": 2 * n * t * c / attention}
    layers = []
    for level in LEVELS:
        keeps = KEEPS[level]
        extra = sum(again.get(name, 0.0) for name in keeps) + sum(lost[name] for name in lost if name not in keeps)
        layers.append(forward + backward + dropout + extra + gap * KERNELS_A_LAYER)

    piece = loss_piece_tokens(n, v, config.loss_chunk)
    pieces = -(-n // piece)
    head = 6 * n * v * c / product_rate(rate, reach, piece * v, sms)
    loss = (3 if setting.compiles else 12) * p * n * v / bandwidth
    fixed = (head + loss + (pieces * 2 * m + _cast(config)) * v * c / bandwidth + moved(3, 12)
             + pieces * KERNELS_A_PIECE * gap)
    host = 0.0 if gpt.records(config) else config.n_layer * HOST_A_LAYER_S + pieces * HOST_A_PIECE_S
    sent, step = _optimizer_seconds(config, bandwidth, rate * reach.products)
    if config.casts == "kept" and config.weights != config.dtype:
        step += (m + p) * (v * c + 12 * c * c * config.n_layer) / bandwidth
    return Cost(fixed + sent, tuple(layers), host, step)


def product_rate(rate: float, reach: Reach, results: int, sms: int) -> float:
    """FLOP/s of a product of so many results: its last round does not fill the card."""
    filled = results / TILE**2 / sms
    return rate * reach.products * filled / (filled + LAST_WAVE)


def head_cost(width: int) -> float:
    """What attention takes with heads of this width, where 1 is with heads of 64: kernels work on whole 64 columns, and
    a score costs as much as SCORE of them, whatever the width."""
    return (-(-width // 64) * 64 + SCORE) / width * 64 / (64 + SCORE)


def _cast(config: RunConfig) -> int:
    """Bytes read and written to round a matrix's number for one product."""
    if config.weights == config.dtype or config.casts == "kept":
        return 0
    return BYTES[config.weights] + BYTES[config.dtype]


def matrix_rate(card: Card, dtype: str) -> float:
    """FLOP/s. float32 products run as TF32, at half the rate, from Ampere on; before it on the ordinary units."""
    if dtype == "float32" and card.has_matrix_units:
        if card.capability and card.capability < (8, 0) and card.sms and card.boost_mhz:
            return 1e6 * FLOAT32_A_CLOCK * card.sms * card.boost_mhz
        return 0.5e12 * (card.tflops or 0)
    return 1e12 * (card.tflops or 0)


def _optimizer_seconds(config: RunConfig, bandwidth: float, products: float) -> tuple[float, float]:
    """(of a micro-step, of a step): gradients that leave the card, and the update itself."""
    numbers, w = config.gpt_config().count_params(), BYTES[config.weights]
    if config.offload != "none":
        update = 28 * numbers / HOST_ADAMW_BYTES_S + 4 * numbers / PCIE_BYTES_S
        sent = 4 * numbers / PCIE_BYTES_S + 12 * numbers / HOST_ADAMW_BYTES_S
        return (sent, update) if config.offload == "gradients" else (0.0, update + 4 * numbers / PCIE_BYTES_S)
    state = 2.0 if config.optimizer == "adam8bit" else 8.0
    seconds = numbers * (3 * w + 2 * state + 2 * w) / bandwidth  # read and write both; the norm and zeroing after it
    if config.optimizer == "muon":  # five rounds of three products for each matrix of a block
        seconds += 5 * 56 * config.n_embd**3 * config.n_layer / products
    return 0.0, seconds


# ---- estimates


class Recorded(NamedTuple):
    card: str
    config: RunConfig
    tokens_per_s: float
    source: str


@cache
def recorded() -> tuple[Recorded, ...]:
    """Runs of our engine whose speed was measured: fit/recorded.json, which tools/recorded.py writes."""
    return tuple(Recorded(row["card"], RunConfig(**row["knobs"]), row["tokens_per_s"], row["source"])
                 for row in recorded_rows("runs"))


def recorded_rows(of: str) -> list[dict[str, Any]]:
    """Of the "runs" of our engine, or of those of "nanogpt"."""
    told = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = told[of]
    return found


def reach_of(card: Card) -> Reach:
    return kind_of(card).likely


def modelled(config: RunConfig, card: Card, setting: Setting, reach: Reach) -> float:
    """Tokens a second by the roofline alone."""
    told = cost(config, card, setting, reach)
    in_layers = sum(told.layers[LEVELS.index(level)] for level in config.levels)
    return config.tokens_per_step / told.seconds(config.gradient_accumulation_steps, in_layers)


def estimate(config: RunConfig, card: Card | None, setting: Setting | None = None) -> SpeedEstimate | None:
    """What to expect of a run, and what that is based on; None where the card's figures are not known."""
    if card is None or not has_figures(card):
        return None
    setting = setting or setting_for(card)
    config = settled(config, setting)
    here = [run for run in recorded() if run.card == card.name]
    same = next((run for run in here if speed_key(settled(run.config, setting)) == speed_key(config)), None)
    if same is not None:
        return measured(same.tokens_per_s, same.source)
    likely = modelled(config, card, setting, reach_of(card))
    if here:
        return near_recorded(likely, worst_error(card), len(here))
    kind = kind_of(card)
    low, high = (modelled(config, card, setting, reach) for reach in (kind.least, kind.most))
    return assumed(low, likely, high, card)


def measured(tokens_per_s: float, source: str) -> SpeedEstimate:
    return SpeedEstimate(tokens_per_s, tokens_per_s, tokens_per_s, f"measured: {source}")


def near_recorded(likely: float, off: float, runs: int) -> SpeedEstimate:
    return SpeedEstimate((1 - off) * likely, (1 + off) * likely, likely,
                         f"a roofline that is within {100 * off:.0f} % of {runs} runs recorded on this card")


def assumed(low: float, likely: float, high: float, card: Card) -> SpeedEstimate:
    return SpeedEstimate(low, high, likely, f"a roofline of {card.tflops:g} TFLOP/s and {card.bandwidth_gbs:g} GB/s, "
                         f"calibrated on runs of an H200, at shares assumed for {kind_of(card).words}; nothing was "
                         "recorded on this card")


@cache
def worst_error(card: Card) -> float:
    """How far the roofline is off at most, of the runs recorded on a card; at least 5 %."""
    setting, errors = setting_for(card), [0.05]
    for run in recorded():
        if run.card == card.name:
            told = modelled(settled(run.config, setting), card, setting, reach_of(card))
            errors.append(abs(told / run.tokens_per_s - 1))
    return max(errors)


def speed_key(config: RunConfig) -> tuple[Any, ...]:
    """What a run's speed depends on: where two configs agree in it, one measurement is the other's."""
    piece = loss_piece_tokens(config.batch_size * config.block_size, config.vocab_size, config.loss_chunk)
    return (config.n_layer, config.n_head, config.n_embd, config.vocab_size, config.block_size, config.batch_size,
            config.gradient_accumulation_steps, config.bias, config.dropout, config.dtype, bool(config.compile),
            gpt.records(config), config.levels, config.weights, config.residual, config.optimizer,
            config.adam8bit, config.offload, config.step_in_backward, config.casts, piece, config.grad_clip > 0)
