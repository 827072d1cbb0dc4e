"""How long a run will be: in steps, tokens, rounds through the data and hours."""

from __future__ import annotations

from dataclasses import replace

from ..config.command_options import PlanQuestions
from ..config.run_config import LARGEST_COUNT, RunConfig
from ..core.errors import UsageError
from ..core.units import parse_count, show_count, show_steps
from ..hardware.gpus import Card
from ..memory.setting import Setting, setting_for
from ..nouns import DataSummary, Forecast, Outlook, SpeedEstimate
from .forecast import settled


def expected_speed(config: RunConfig, card: Card | None, trainer: str = "fitgpt",
                   setting: Setting | None = None) -> SpeedEstimate | None:
    """None where there is no estimate: of cards whose figures are not known."""
    if trainer == "nanogpt":
        from . import nanogpt_speed

        return nanogpt_speed.estimate(config, card, setting)
    from . import speed

    return speed.estimate(config, card, setting)


def tokens_per_s(config: RunConfig, card: Card | None, trainer: str = "fitgpt") -> tuple[float, float] | None:
    """The lowest and the highest speed to expect."""
    speed = expected_speed(config, card, trainer)
    return (speed.low, speed.high) if speed else None


def likely_speed(config: RunConfig, card: Card | None, trainer: str = "fitgpt") -> float | None:
    """By the roofline alone, to compare two configs: a measured figure of one says nothing of the other."""
    if card is None or config.eval_only:
        return None
    setting = setting_for(card)
    if trainer == "nanogpt":
        from . import nanogpt_speed

        return nanogpt_speed.likely(config, card, setting)
    from .speed import has_figures, modelled, reach_of

    return modelled(settled(config, setting), card, setting, reach_of(card)) if has_figures(card) else None


def of_length(config: RunConfig, asked: PlanQuestions, data: DataSummary | None, missing: str,
              card: Card | None) -> tuple[RunConfig, list[str]]:
    """The config with as many steps as --tokens, --epochs or --hours ask for, and a sentence that says so.

    `missing`: why there is no data to count epochs of.
    """
    given = [flag for flag, said in (("--tokens", asked.tokens), ("--epochs", asked.epochs), ("--hours", asked.hours))
             if said]
    if not given:
        return config, []
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} {'both' if len(given) == 2 else 'all'} say how long the run is.",
                         "Give one of them.")
    if asked.tokens:
        tokens, words = float(parse_count(asked.tokens)), f"{show_count(parse_count(asked.tokens))} tokens"
    elif asked.epochs:
        if data is None:
            raise UsageError(f"--epochs={asked.epochs:g}: of what? {missing}", "--tokens 10B needs no data.")
        tokens, words = asked.epochs * data.train_tokens, f"{asked.epochs:g} × {show_count(data.train_tokens)} tokens"
    else:
        speed = tokens_per_s(config, card, asked.trainer)
        if speed is None:
            raise UsageError(f"--hours={asked.hours:g}: there is no estimate of the speed here, so hours cannot be "
                             "turned into steps.", "--tokens 10B, or --max_iters=10000")
        tokens = 3600 * asked.hours * speed[0]
        words = f"{asked.hours:g} hours at {show_count(speed[0])} tokens a second"
    whole, more = divmod(round(tokens), config.tokens_per_step)
    steps = max(whole if asked.hours or not more else whole + 1, 1)  # not a step more than there are hours for
    if steps > LARGEST_COUNT:
        raise UsageError(f"{words} are {steps:,} steps, and a run has at most {LARGEST_COUNT:,}.", "--tokens 10B")
    longer = replace(config, max_iters=steps, lr_decay_iters=steps)
    late = " One step takes longer." if asked.hours and not whole else ""
    return longer, [f"{words} are {show_steps(steps)}: max_iters={steps} lr_decay_iters={steps}.{late}"]


def outlook(config: RunConfig, forecast: Forecast, data: DataSummary | None, card: Card | None) -> Outlook:
    steps = 0 if config.eval_only else config.max_iters
    tokens = steps * config.tokens_per_step
    speed = tokens_per_s(config, card, forecast.trainer)
    return Outlook(tokens_per_step=config.tokens_per_step, steps=steps, tokens=tokens,
                   params=forecast.params, epochs=tokens / data.train_tokens if data else None,
                   checkpoint_bytes=forecast.checkpoint_bytes, host_bytes=forecast.host_bytes,
                   hours=(tokens / speed[1] / 3600, tokens / speed[0] / 3600) if speed else None)
