"""fitgpt.plan, for notebooks and other programs."""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fitgpt
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import UsageError
from fitgpt.core.units import GiB, MiB, show_bytes
from tests.plan_command import CONFIG, ROOT, SMALL


def test_the_call_takes_a_file_a_dict_or_a_config(run_plan: Any, tmp_path: Path) -> None:
    shape: dict[str, Any] = dict(n_layer=2, n_head=4, n_embd=256, batch_size=8, block_size=256, max_iters=100)
    (tmp_path / "mine.py").write_text("".join(f"{key} = {value}\n" for key, value in shape.items()))
    needs = run_plan(*SMALL, "--gpu=4070", "--json").json["needs_bytes"]
    for config in ("mine.py", tmp_path / "mine.py", shape, RunConfig(**shape)):
        found = fitgpt.plan(config, gpu="4070")
        assert found.forecast.needs == needs
        assert found.fits
    assert fitgpt.plan(gpu="4070").forecast == fitgpt.plan({}, gpu="4070").forecast
    assert dir(fitgpt) == sorted(fitgpt.__all__)
    assert not fitgpt.plan(shape, gpu="4070", budget="300MiB").fits
    assert not fitgpt.plan({**shape, "budget": "300MiB"}, gpu="4070").fits  # as `train` takes it
    assert fitgpt.plan({**shape, "leave": "11GiB"}, gpu="4070").budget.budget == 11930 * MiB - 11 * GiB
    assert fitgpt.plan(shape, gpu="4070", others=GiB).budget.others == GiB
    with pytest.raises(UsageError, match="batch_sise"):
        fitgpt.plan({"batch_sise": 3}, gpu="4070")


def test_the_call_takes_tokens_as_a_number(run_plan: Any) -> None:
    assert fitgpt.plan(CONFIG / "notes_77m.py", gpu="4070", tokens=10**9).duration.tokens >= 10**9


def test_options_of_the_call_override_the_config(run_plan: Any, tmp_path: Path) -> None:
    shape: dict[str, Any] = dict(n_layer=2, n_head=4, n_embd=256, batch_size=64, block_size=256, max_iters=100)
    (tmp_path / "mine.py").write_text("".join(f"{key} = {value}\n" for key, value in shape.items()))
    needs = run_plan(*SMALL, "--gpu=4070", "--json").json["needs_bytes"]
    for config in ("mine.py", shape, RunConfig(**shape), {**shape, "gpu": "4070"}):
        assert fitgpt.plan(config, gpu="4070", batch_size=8).forecast.needs == needs
        assert fitgpt.plan(config, gpu=4070).forecast.needs > needs
    assert fitgpt.plan({**shape, "gpu": "4090", "trainer": "nanogpt"}).to_dict()["trainer"] == "nanogpt"
    assert fitgpt.plan(shape, gpu="4070", leave=11 * GiB).budget.budget == 11930 * MiB - 11 * GiB
    assert fitgpt.plan(shape, gpu="4070", tokens="1M").duration.steps == run_plan(
        *SMALL[:-1], "--batch_size=64", "--gpu=4070", "--tokens=1M", "--json").json["run"]["steps"]


@pytest.mark.parametrize(("config", "options", "message"), [
    ({}, {"bach_size": 8}, "batch_size"), ({}, {"gpus": "4070"}, "gpu"), ({}, {"json": True}, "'json'"),
    ({}, {"batch_size": "many"}, "batch_size"), ({}, {"trainer": "karpathy"}, "one of fitgpt, nanogpt"),
    (None, {}, "None"), ([], {}, r"\[\]"), (3, {}, "a dict of options"), (b"x.py", {}, "a config file"),
    ({1: 2}, {}, "1 is not an option"),
])
def test_the_call_rejects_what_it_does_not_take(run_plan: Any, config: Any, options: dict[str, Any],
                                                message: str) -> None:
    with pytest.raises(UsageError, match=message) as rejected:
        fitgpt.plan(config, **{"gpu": "4070", **options})
    assert rejected.value.fix
    assert len(str(rejected.value)) < 400


@pytest.mark.parametrize("flags", [{}, {"budget": "700MiB", "batch_size": 64}, {"options": True}])
def test_the_call_returns_what_the_command_prints(run_plan: Any, flags: dict[str, Any]) -> None:
    shape = dict(each.removeprefix("--").split("=") for each in SMALL)
    found = fitgpt.plan({key: int(value) for key, value in shape.items()}, gpu="4070", **flags)
    argv = [*SMALL, "--gpu=4070", *(f"--{key}={value}" for key, value in flags.items())]
    printed = run_plan(*argv).out
    assert f"{found}\n" == printed
    assert html.unescape(found._repr_html_()) == f"<pre>{printed.rstrip()}</pre>"
    assert json.loads(json.dumps(found.to_dict())) == run_plan(*argv, "--json").json
    assert len(repr(found)) < 400
    assert f"needs {show_bytes(found.forecast.needs)}" in repr(found)


def test_neither_torch_nor_numpy_nor_rich_is_loaded(tmp_path: Path) -> None:
    script = ("import sys, fitgpt\nfitgpt.plan(sys.argv[1], gpu='4070')._repr_html_()\n"
              "from fitgpt.commands.main import main\n"
              "main(['plan', sys.argv[1], '--gpu=4070', '--options', '--timeline=x.html'])\n"
              "main(['plan', sys.argv[1], '--budget=100MiB'])\nmain(['cards'])\n"
              "assert callable(fitgpt.plan)\nassert not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script, str(CONFIG / "shakespeare_char.py")], cwd=tmp_path,
                           env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
