"""A query string becomes a run on a GPU, and that becomes a command, a config file and settings."""

from __future__ import annotations

import shlex
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fitgpt.config.argv import walk
from fitgpt.config.command_options import PlanArguments, PlanOptions
from fitgpt.config.fields import option_specs
from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.core.errors import UsageError
from fitgpt.memory.platform import Platform
from fitgpt.planning import forecast
from fitgpt.web import answers
from fitgpt.web.form import QUESTIONS, RUN_OPTIONS, command, config_file, plan_command, settings_in, without_dashes
from tests.web_server import SMALL, page_query


def other_values(option: str) -> list[Any]:
    one = option_specs(RunConfig)[option]
    if one.kind == "bool":
        return [not one.default]
    if one.kind == "auto":
        return [True, False]
    if one.choices:
        return [each for each in one.choices if each != one.default]
    special: dict[str, list[Any]] = {
        "saved_activations": ["input"], "n_embd": [128], "n_head": [4], "dropout": [0.1], "grad_clip": [0.0],
        "init_from": ["gpt2"], "device": ["cpu"], "loss_chunk": [64], "eval_block_size": [32], "keep_last": [7],
        "out_dir": ["x"], "dataset": ["x"], "gradient_accumulation_steps": [1]}
    return special.get(option, [one.default * 3 if one.default else 3] if one.kind in ("int", "float") else ["x"])


@cache
def tapes(config: RunConfig) -> list[Any]:
    platform = Platform((8, 9))
    return [forecast.write_tape(resolve_run(config, platform), platform, trainer) for trainer in ("fitgpt", "nanogpt")]


@pytest.mark.parametrize("option", [field.name for field in fields(RunConfig)])
def test_the_page_has_exactly_the_options_that_affect_memory(option: str) -> None:
    base = RunConfig(**SMALL)
    affects = False
    for before in (base, replace(base, gradient_accumulation_steps=1, grad_clip=0.0, compile=False, vocab_size=50_000),
                   replace(base, optimizer="adam8bit")):
        for value in other_values(option):
            try:
                affects = affects or tapes(before) != tapes(replace(before, **{option: value}))
            except UsageError:
                continue
    assert affects == (option in (*RUN_OPTIONS, "eval_only"))  # the page plans runs that train


@pytest.mark.parametrize(("settings", "message"), [
    (dict(n_layer=0), "at least 1"), (dict(n_embd=500), "not a multiple"), (dict(batch_size="many"), "whole number"),
    (dict(gpu="<script>"), "not a GPU"), (dict(dropout="nan"), "finite"), (dict(n_layer=300), "at most 200 layers"),
    (dict(n_layer=5000), "at most 512"), (dict(batch_size=2**30, block_size=2**20), "tokens per micro-batch"),
    (dict(others="12GiB"), "leaves nothing"), (dict(budget="1TiB"), "more than"), (dict(trainer="x"), "one of fitgpt"),
    (dict(dtype="x" * 300), "characters long"), ({f"k{n}": n for n in range(100)}, "more than 60"),
    (dict(gpu="RTX 2060", dtype="bfloat16"), "compute capability")])
def test_invalid_settings_raise_a_usage_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        page_query(**settings)


def test_settings_that_name_a_file_are_ignored() -> None:
    query = page_query(dataset="/etc", init_from="/etc", out_dir="/etc", **SMALL)
    assert (query.config.dataset, query.config.init_from) == (RunConfig.dataset, RunConfig.init_from)
    assert len(query.ignored) == 3
    assert "'dataset' is not a setting of this page" in answers.plan(query)["notes"][0]


@pytest.mark.parametrize(("fix", "settings"), [
    ("--dtype=float16, or nothing", [{"dtype": "float16"}]),
    ("--n_head=7 or --n_head=14", [{"n_head": "7"}, {"n_head": "14"}]),
    ("--saved_activations='4*no_mlp_up,8*matmuls' …", [{"saved_activations": "4*no_mlp_up,8*matmuls"}]),
    ("Give what it may use: --gpu 'RX 7900 XTX' --budget 22GiB.", [{"gpu": "RX 7900 XTX", "budget": "22GiB"}]),
    ("Did you mean --dtype=float16?", [{"dtype": "float16"}]),
    ("--others=… --gpu NAME, or --out_dir=/x", [])])
def test_the_flags_of_a_fix_become_settings(fix: str, settings: list[dict[str, str]]) -> None:
    assert settings_in(fix) == settings


def test_sentences_name_settings_without_dashes() -> None:
    assert without_dashes("--batch_size=12 is the default, --others 2GiB --options.") == (
        "batch_size=12 is the default, others=2GiB --options.")


@pytest.mark.parametrize("settings", [
    {}, dict(max_iters=5000),
    dict(saved_activations="4*no_mlp_up,8*matmuls", bias=True, dropout=0.1, others="2118MiB", budget="8GiB",
         torch="2.11")])
def test_command_and_config_file_reproduce_the_config(settings: dict[str, Any], tmp_path: Path) -> None:
    query = page_query(**settings)
    found = {each.key: each.value for each in walk(shlex.split(plan_command(query))[2:], PlanArguments)}
    questions = {key: getattr(query.questions, key) for key in QUESTIONS}
    defaults = RunConfig().to_dict() | asdict(PlanOptions())
    assert defaults | found == defaults | query.config.to_dict() | questions
    file = tmp_path / "x.py"
    file.write_text(config_file(query, "a comment"), encoding="utf-8")
    for argv in (shlex.split(command(query))[2:], [str(file)]):
        steps = query.config.max_iters  # the learning rate decays, and warms up in at most a tenth of the run
        expected = replace(query.config, budget=query.questions.budget, lr_decay_iters=steps,
                           warmup_iters={5000: 250, 600000: 2000}[steps])
        assert replace(RunConfig(), **{each.key: each.value for each in walk(argv, RunConfig)}) == expected


def test_nanogpt_gets_only_options_that_its_command_line_has() -> None:
    query = page_query(trainer="nanogpt", eval_batch_size=2, vocab_size=65, cuda_graphs=False,
                       saved_activations="input", n_layer=6)
    assert command(query) == "python train.py --n_layer=6"
    assert "--vocab_size=65" in plan_command(query)
    assert "meta.pkl: 65 in this plan" in config_file(query, "")
    assert "vocab_size =" not in config_file(query, "")
