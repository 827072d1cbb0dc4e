"""What a fit leaves on the disk: a config that `train` takes, with the reasons beside its knobs."""

from __future__ import annotations

import textwrap

from ..config.fields import knobs_of
from ..config.run_config import RunConfig
from ..core.units import show_bytes, show_count
from ..nouns import Fitted, Standing

MARK = "# Fitted by `fitgpt fit`"  # how a file that was written here begins: it may be replaced
WIDTH = 110
NOT_OF_A_RUN = ("plan",)           # said anew each time
ALWAYS = ("out_dir", "dataset", "n_layer", "n_head", "n_embd", "block_size", "batch_size",
          "gradient_accumulation_steps", "max_iters")  # written even where they are as by default


def config_text(fitted: Fitted, run: str) -> str:
    """`run`: what was asked for, in words."""
    chosen, budget = fitted.chosen, fitted.budget
    assert chosen is not None  # only a plan that exists is written
    knobs = {name: getattr(chosen.config, name) for name, knob in knobs_of(RunConfig).items()
             if name not in NOT_OF_A_RUN and (name in ALWAYS or getattr(chosen.config, name) != knob.default)}
    card = f" for {_one_line(budget.card)}" if budget.card else ""
    lines = [f"{MARK}{card}, from {_one_line(run)}.",
             f"# Needs {show_bytes(chosen.needs)} of the {show_bytes(budget.reserve_limit)} that PyTorch may reserve"
             f"{_speed_words(chosen)}.", ""]
    changed = {knob for decision in fitted.decisions for knob in decision.knobs}
    lines += [f"{name} = {value!r}" for name, value in knobs.items() if name not in changed]
    for decision in fitted.decisions:
        lines += ["", *_comment(decision.why)]
        lines += [f"{knob} = {now!r}  # was {was!r}" for knob, (was, now) in decision.knobs.items()]
    return "\n".join(lines) + "\n"


def is_ours(text: str) -> bool:
    return text.startswith(MARK)


def _speed_words(chosen: Standing) -> str:
    if chosen.measured is not None:
        return f"; {show_count(round(chosen.measured))} tokens/s measured"
    if chosen.speed is None:
        return ""
    low, high = round(chosen.speed.low), round(chosen.speed.high)
    return f"; {show_count(low)} to {show_count(high)} tokens/s by estimate"


def _comment(words: str) -> list[str]:
    return textwrap.wrap(_one_line(words), WIDTH, initial_indent="# ", subsequent_indent="# ")


def _one_line(words: str) -> str:
    """What a user brings must not end a comment."""
    return " ".join(words.split())
