"""«Fit it for me»: the fastest settings that fit, and why each thing is done otherwise."""

from __future__ import annotations

from dataclasses import replace

from ..commands.fit import crowded, here_for
from ..config.run_config import DEFAULT_VOCAB
from ..core.errors import DoesNotFit
from ..core.units import show_bytes
from ..planning.choose import fit, too_small, ways_out_in_words
from .answers import Answer
from .settings import Asked, as_settings


def fitted(asked: Asked) -> Answer:
    """As `fitgpt fit` does it, with nothing lossy. Raises DoesNotFit where no settings do."""
    config = replace(asked.config, vocab_size=asked.config.vocab_size or DEFAULT_VOCAB, budget=asked.questions.budget)
    here = here_for(asked.place, config, is_here=not asked.questions.gpu)
    found = fit(config, here)
    if found.chosen is None:
        raise DoesNotFit(too_small(found), " ".join([ways_out_in_words(found), *found.notes]))
    settings = as_settings(config, found.chosen.config)
    if asked.trainer != "fitgpt":
        settings["trainer"] = "fitgpt"
    why = [f"{', '.join(f'{knob} {was} → {now}' for knob, (was, now) in each.knobs.items())}: {each.why}."
           for each in found.decisions]
    margin = [f"{show_bytes(here.budget.margin)} of the card are left free besides: what a process holds outside "
              "PyTorch's allocator is known by a rule here, not to the MiB."] if here.budget.margin else []
    return {"settings": settings, "considered": found.considered, "why": [*crowded(here), *why, *margin]}
