"""FitResult → the text of a config file that `train` takes, with the reasons beside the changed options."""

from __future__ import annotations

import textwrap

from ..config.fields import option_specs
from ..config.run_config import RunConfig
from ..core.units import show_bytes, show_count
from .goals import FitResult
from .search import ScoredConfig

MARK = "# Fitted by `fitgpt fit`"  # the beginning of a file that was written here, and may be replaced
WIDTH = 110
NOT_WRITTEN = ("plan",)            # an option of one command, not of the run
ALWAYS = ("out_dir", "dataset", "n_layer", "n_head", "n_embd", "block_size", "batch_size",
          "gradient_accumulation_steps", "max_iters")  # written even at their defaults


def config_text(fitted: FitResult, run: str) -> str:
    """`run`: a description of the given run."""
    chosen, budget = fitted.chosen, fitted.budget
    assert chosen is not None  # only settings that fit are written
    options = {name: getattr(chosen.config, name) for name, option in option_specs(RunConfig).items()
               if name not in NOT_WRITTEN and (name in ALWAYS or getattr(chosen.config, name) != option.default)}
    card = f" for {_one_line(budget.card)}" if budget.card else ""
    lines = [f"{MARK}{card}, from {_one_line(run)}.",
             f"# Needs {show_bytes(chosen.needs)} of the {show_bytes(budget.reserve_limit)} that PyTorch may reserve"
             f"{_speed_text(chosen)}.", ""]
    changed = {option for decision in fitted.decisions for option in decision.changes}
    lines += [f"{name} = {value!r}" for name, value in options.items() if name not in changed]
    for decision in fitted.decisions:
        lines += ["", *_comment(decision.why)]
        lines += [f"{option} = {now!r}  # was {before!r}" for option, (before, now) in decision.changes.items()]
    return "\n".join(lines) + "\n"


def is_own_config(text: str) -> bool:
    return text.startswith(MARK)


def _speed_text(chosen: ScoredConfig) -> str:
    if chosen.measured is not None:
        return f"; {show_count(round(chosen.measured))} tokens/s measured"
    if chosen.speed is None:
        return ""
    low, high = round(chosen.speed.low), round(chosen.speed.high)
    return f"; {show_count(low)} to {show_count(high)} tokens/s by estimate"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(_one_line(text), WIDTH, initial_indent="# ", subsequent_indent="# ")


def _one_line(text: str) -> str:
    """Text of the user must not end a comment."""
    return " ".join(text.split())
