"""The configs of this repository on several GPUs: `plan` agrees with what `fit` chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands import main
from fitgpt.config.argv import walk
from fitgpt.config.fields import build
from fitgpt.config.run_config import RunConfig

CONFIGS = Path(__file__).parents[2] / "config"
# A few of 9 configs × 7 GPUs × with and without lossy savers, roomy and tight.
SAMPLE = [("demo", "1080ti", ""), ("shakespeare_char", "h200", "lossy"), ("notes_30m", "2080ti", ""),
          ("notes_77m", "4090", "lossy"), ("train_fineweb", "3060", ""), ("gpt2_350m", "4060", "")]


@pytest.mark.parametrize(("config", "card", "allow"), SAMPLE)
def test_plan_agrees_that_the_chosen_settings_fit_and_nothing_gains_more_than_the_error(
        config: str, card: str, allow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    source, allowing = str(CONFIGS / f"{config}.py"), ["--allow", allow] if allow else []

    def run_json(*argv: str) -> dict[str, Any]:
        assert main.main([*argv, "--gpu", card, "--json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    fitted = run_json("fit", source, *allowing)
    given, chosen = fitted["asked"], fitted["chosen"]
    assert run_json("plan", source, *chosen["flags"])["fits"]
    before, now = (build(RunConfig, walk([source, *flags], RunConfig)) for flags in ([], chosen["flags"]))
    assert now.tokens_per_step == before.tokens_per_step
    assert chosen["headroom_bytes"] >= 0
    faster = chosen["tokens_per_s"]["likely"] / given["tokens_per_s"]["likely"]
    if given["fits"]:
        assert faster > 1 + fitted["speed_error"] if chosen["flags"] else faster == 1
    for other in fitted["runners_up"]:  # none is faster by more than the error
        assert other["tokens_per_s"]["likely"] <= (1 + fitted["speed_error"]) * chosen["tokens_per_s"]["likely"]
