"""The form offers every option of the page, and presets that are the config files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fitgpt.config.argv import walk
from fitgpt.config.run_config import NOT_NANOGPTS, RunConfig
from fitgpt.web.form import CARRIED, RUN_OPTIONS, form, presets
from tests.web_server import page_query

CONFIGS = sorted((Path(__file__).parent.parent.parent / "config").glob("*.py"))


def test_every_option_has_a_control_with_help() -> None:
    controls = {one["name"]: one for group in form()["groups"].values() for one in group}
    assert set(controls) == {*RUN_OPTIONS, "max_iters"}
    assert {name for name, one in controls.items() if one["fitgpt_only"]} == {*NOT_NANOGPTS} & {*RUN_OPTIONS}
    assert all(one["help"] and one["kind"] for one in controls.values())
    assert json.dumps(form(), allow_nan=False)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_config_file_is_a_preset(file: Path) -> None:
    expected = {each.key: each.value for each in walk([str(file)], RunConfig) if each.key in (*RUN_OPTIONS, *CARRIED)}
    settings = next(each["settings"] for each in presets() if each["name"].startswith(f"{file.stem}: "))
    assert page_query(**settings).config == replace(RunConfig(), **expected)


def test_presets_are_sorted_by_size_and_can_be_planned() -> None:
    configs = [page_query(**each["settings"]).config for each in presets()]
    assert len(configs) == len(CONFIGS) + 6  # and nanoGPT's two, and GPT-2's four
    params = [config.gpt_config().count_params() for config in configs[:len(CONFIGS)]]
    assert params == sorted(params)
