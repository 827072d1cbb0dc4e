"""Every rule: a unique code, a message that triggers it, a text and an advice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.diagnosis.case import Case, ExplainedRun, build_case
from fitgpt.diagnosis.diagnose import Diagnosis, diagnose
from fitgpt.diagnosis.oom_message import OomMessage
from fitgpt.diagnosis.rules import RULES, Rule
from tests.diagnosis.test_diagnose import ALMOST_FULL, CARD, SETTING, codes, message, run_out
from tests.diagnosis.test_oom_message import INDEX, WITH_CONFIG, read, with_its_config

AT_LOAD = f'''Traceback (most recent call last):
  File "train.py", line 190, in <module>
    model.to(device)
  File "/x/torch/nn/modules/module.py", line 1343, in to
    return self._apply(convert)
torch.OutOfMemoryError: {ALMOST_FULL.format(size="148.00 MiB")}'''
IN_EVALUATION = f'''Traceback (most recent call last):
  File "train.py", line 264, in <module>
    losses = estimate_loss()
torch.OutOfMemoryError: {ALMOST_FULL.format(size="148.00 MiB")}'''


def activation_out_of_memory() -> Diagnosis:
    run = ExplainedRun(RunConfig(n_layer=24, n_head=16, n_embd=1024, batch_size=32, compile=True, dtype="float16"),
                       "fitgpt", SETTING)
    return diagnose(message(run_out(run)[0].text), run, CARD)


# Rules that no recorded message shows.
MADE: dict[str, Callable[[], Diagnosis]] = {
    "OOM-CUT": lambda: diagnose(message("RuntimeError: CUDA out of memory.")),
    "OOM-AT-LOAD": lambda: diagnose(message(AT_LOAD)),
    "OOM-EVAL": lambda: diagnose(message(IN_EVALUATION)),
    "OOM-ACTIVATIONS": activation_out_of_memory,
}


def triggered(rule: Rule) -> Diagnosis:
    """The diagnosis of a message that triggers the rule."""
    if rule.code in MADE:
        return MADE[rule.code]()
    name = next((name for name, expected in INDEX.items() if rule.code in expected["without"]), None)
    if name is not None:
        return diagnose(read(name))
    return with_its_config(next(name for name in WITH_CONFIG if rule.code in INDEX[name]["with"]))


def test_codes_are_unique() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)


def test_recorded_messages_name_known_codes_only() -> None:
    named = {code for expected in INDEX.values() for code in (*expected["without"], *expected.get("with", ()))}
    assert named | MADE.keys() == {rule.code for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_each_rule_has_a_message_that_triggers_it_and_a_text(rule: Rule) -> None:
    causes = {cause.code: cause.what for cause in triggered(rule).causes}
    assert causes[rule.code].endswith(".")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_each_rule_has_documentation_and_advice(rule: Rule) -> None:
    assert rule.title
    assert rule.pattern
    assert rule.background.endswith(".")
    assert rule.advice_for(Case(OomMessage("cuda", "", "")))


def test_the_last_rule_applies_to_every_case() -> None:
    assert RULES[-1].text(build_case(message("RuntimeError: CUDA out of memory.")))


@pytest.mark.parametrize(("code", "phase"), [("OOM-CUT", ""), ("OOM-AT-LOAD", "load"), ("OOM-EVAL", "eval")])
def test_a_traceback_alone_shows_the_phase(code: str, phase: str) -> None:
    diagnosis = MADE[code]()
    assert (codes(diagnosis), diagnosis.phase) == ([code], phase)


def test_an_activation_is_named_with_its_layer() -> None:
    diagnosis = activation_out_of_memory()
    assert codes(diagnosis) == ["OOM-ACTIVATIONS"]
    assert "layer" in diagnosis.what
    assert "32 × 1,024 × 1,024 × " in diagnosis.what
