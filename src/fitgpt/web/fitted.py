"""«Fit it for me»: the fastest settings that fit, and why each thing is done otherwise."""

from __future__ import annotations

from dataclasses import replace

from ..config import DEFAULT_VOCAB
from ..errors import DoesNotFit
from ..fit.choose import fit_config, too_small
from .answers import Answer
from .settings import Asked, as_settings


def fitted(asked: Asked) -> Answer:
    """With fitgpt, and nothing lossy. Raises DoesNotFit where no settings do."""
    config = replace(asked.config, vocab_size=asked.config.vocab_size or DEFAULT_VOCAB)
    found = fit_config(config, asked.place.setting, asked.place.budget, card=asked.place.card)
    if found.chosen is None:
        raise DoesNotFit(too_small(found), " ".join(found.notes))
    settings = as_settings(config, found.chosen.config)
    if asked.trainer != "fitgpt":
        settings["trainer"] = "fitgpt"
    return {"settings": settings, "considered": found.considered,
            "why": [f"{', '.join(f'{knob} {was} → {now}' for knob, (was, now) in each.knobs.items())}: {each.why}."
                    for each in found.decisions]}
