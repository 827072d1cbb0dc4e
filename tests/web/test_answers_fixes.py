"""Each fix button does what its label and figures say."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import urlencode

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.planning.changes import single_changes
from fitgpt.web import answers
from fitgpt.web.form import CARRIED, RUN_OPTIONS, read
from tests.web_server import NOTES


@pytest.mark.parametrize("query", [NOTES, NOTES.replace("nanogpt", "fitgpt").replace("=16&", "=64&"), "gpu=RTX+4070"])
def test_each_fix_has_the_effect_it_states(query: str) -> None:
    before = answers.plan(read(query))
    buttons = [found for family in answers.families(read(query))["families"]
               if (found := answers.fix(read(query), family)["fix"])]
    assert len(buttons) >= 3
    for button in buttons:
        settings = dict(pair.split("=", 1) for pair in query.replace("+", " ").split("&"))
        after = answers.plan(read(urlencode(settings | button["settings"])))
        assert (after["verdict"] != "does_not_fit", after["peak"]) == (button["fits"], button["peak"]), button["label"]
        assert before["peak"] - after["peak"] == button["saved"]
        assert set(button["settings"]) <= {*RUN_OPTIONS, *CARRIED, "trainer"}


def test_gradient_checkpointing_uses_as_few_layers_as_make_it_fit() -> None:
    query = "gpu=RTX+4070&batch_size=48&budget=9GiB"
    button = answers.fix(read(query), "saved_activations")["fix"]
    count = int(re.fullmatch(r"gradient checkpointing: (\d+) layers?", button["label"])[1])  # type: ignore[index]
    policy = re.search(r"\*(\w+),", button["settings"]["saved_activations"])[1]  # type: ignore[index]
    assert answers.plan(read(query))["verdict"] == "does_not_fit"
    for layers, enough in ((count, True), (count - 1, False)):
        fewer = f"{layers}*{policy},{12 - layers}*matmuls" if layers else "matmuls"
        verdict = answers.plan(read(f"{query}&saved_activations={fewer}"))["verdict"]
        assert verdict == ("fits" if enough else "does_not_fit")


def test_the_first_fix_for_nanogpt_is_fitgpt() -> None:
    query = read(NOTES)
    assert answers.families(query)["families"][0] == "trainer"
    assert answers.fix(query, "trainer")["fix"]["label"] == "train with fitgpt"


def test_every_family_of_changes_has_a_label() -> None:
    found = {option.change.family for trainer in ("fitgpt", "nanogpt") for compiled in (True, False)
             for option in single_changes(replace(RunConfig(), compile=compiled, gradient_accumulation_steps=1,
                                                  grad_clip=0.0, vocab_size=50304, casts="kept", gradients="kept",
                                                  states="late"), trainer)}
    assert found | {"accumulation"} == set(answers.LABELS)
