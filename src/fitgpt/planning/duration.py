"""How long a run takes: steps, tokens, epochs, hours."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..config.command_options import PlanOptions
from ..config.fields import LARGEST_COUNT
from ..config.resolve import resolve_run
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import parse_count, show_count, show_steps
from ..data.shards import DataSummary
from ..hardware.gpus import GpuModel
from ..memory.platform import Platform
from .budget import platform_for
from .efficiency import SpeedEstimate
from .forecast import Forecast


class Duration(NamedTuple):
    tokens_per_step: int
    steps: int
    tokens: int
    params: int
    epochs: float | None               # None: there is no data
    checkpoint_bytes: int
    host_bytes: int
    hours: tuple[float, float] | None  # None: the GPU's speed is not known


def expected_speed(config: RunConfig, card: GpuModel | None, trainer: str = "fitgpt",
                   platform: Platform | None = None) -> SpeedEstimate | None:
    """None where the GPU's figures are not known."""
    if trainer == "nanogpt":
        from . import nanogpt_speed

        return nanogpt_speed.estimate(config, card, platform)
    from . import speed

    return speed.estimate(config, card, platform)


def tokens_per_s(config: RunConfig, card: GpuModel | None, trainer: str = "fitgpt") -> tuple[float, float] | None:
    """The lowest and the highest speed to expect."""
    speed = expected_speed(config, card, trainer)
    return (speed.low, speed.high) if speed else None


def relative_speed(changed: RunConfig, its_trainer: str, config: RunConfig, trainer: str,
                   card: GpuModel | None) -> float | None:
    """The speed of a changed run relative to the run without the change; None where there is no estimate."""
    after, now = _modelled_speed(changed, card, its_trainer), _modelled_speed(config, card, trainer)
    return after / now if after and now else None


def _modelled_speed(config: RunConfig, card: GpuModel | None, trainer: str) -> float | None:
    """Tokens per second by the roofline model alone: a measured figure of one config says nothing about another."""
    if card is None or config.eval_only:
        return None
    platform = platform_for(card)
    if trainer == "nanogpt":
        from . import nanogpt_speed

        return nanogpt_speed.likely(config, card, platform)
    from .speed import has_figures, likely_efficiency, modelled

    if not has_figures(card):
        return None
    return modelled(resolve_run(config, platform), card, platform, likely_efficiency(card))


def with_training_length(config: RunConfig, options: PlanOptions, data: DataSummary | None, missing: str,
                         card: GpuModel | None) -> tuple[RunConfig, list[str]]:
    """The config with as many steps as --tokens, --epochs or --hours require, and a note on it. `missing`: why there
    is no data to count epochs of."""
    given = [flag for flag, value in (("--tokens", options.tokens), ("--epochs", options.epochs),
                                      ("--hours", options.hours)) if value]
    if not given:
        return config, []
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} {'both' if len(given) == 2 else 'all'} set the length of the run.",
                         "Give one of them.")
    if options.tokens:
        tokens, text = float(parse_count(options.tokens)), f"{show_count(parse_count(options.tokens))} tokens"
    elif options.epochs:
        if data is None:
            raise UsageError(f"--epochs={options.epochs:g}: of which data? {missing}", "--tokens 10B needs no data.")
        tokens = options.epochs * data.train_tokens
        text = f"{options.epochs:g} × {show_count(data.train_tokens)} tokens"
    else:
        speed = tokens_per_s(config, card, options.trainer)
        if speed is None:
            raise UsageError(f"--hours={options.hours:g}: there is no speed estimate for this GPU, so hours cannot be "
                             "turned into steps.", "--tokens 10B, or --max_iters=10000")
        tokens = 3600 * options.hours * speed[0]
        text = f"{options.hours:g} hours at {show_count(speed[0])} tokens per second"
    whole, rest = divmod(round(tokens), config.tokens_per_step)
    steps = max(whole if options.hours or not rest else whole + 1, 1)  # no more steps than the hours allow
    if steps > LARGEST_COUNT:
        raise UsageError(f"{text} are {steps:,} steps, and a run has at most {LARGEST_COUNT:,}.", "--tokens 10B")
    longer = replace(config, max_iters=steps, lr_decay_iters=steps)
    late = " One step takes longer." if options.hours and not whole else ""
    return longer, [f"{text} are {show_steps(steps)}: max_iters={steps} lr_decay_iters={steps}.{late}"]


def duration_of(config: RunConfig, forecast: Forecast, data: DataSummary | None, card: GpuModel | None) -> Duration:
    steps = 0 if config.eval_only else config.max_iters
    tokens = steps * config.tokens_per_step
    speed = tokens_per_s(config, card, forecast.trainer)
    return Duration(tokens_per_step=config.tokens_per_step, steps=steps, tokens=tokens,
                    params=forecast.params, epochs=tokens / data.train_tokens if data else None,
                    checkpoint_bytes=forecast.checkpoint_bytes, host_bytes=forecast.host_bytes,
                    hours=(tokens / speed[1] / 3600, tokens / speed[0] / 3600) if speed else None)
