"""Training scripts are told from config files by what they import; commands that take a config name `fitgpt trace`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fitgpt.commands.main import main
from fitgpt.config.config_file import EXAMPLES, MAX_FILE_BYTES
from fitgpt.config.training_script import imports_torch, is_training_script

SCRIPT = "batch_size = 8\nimport torch\nopen('executed', 'w')\n"


@pytest.mark.parametrize("text", [
    "import torch", "import torch.nn as nn", "from torch import nn", "import json, torch", "import torchvision",
    "def main():\n    import torch", "\tfrom transformers.models.gpt2 import GPT2Model", "import timm",
    "from lightning import Trainer", "%pip install trl\nx = = 1\nfrom trl import SFTTrainer", "x = 1\r\nimport peft"])
def test_a_text_that_imports_torch_or_a_package_that_needs_it_is_a_script(text: str) -> None:
    assert imports_torch(text)


@pytest.mark.parametrize("text", [
    "", "import time", "batch_size = 8  # import torch", "'''as in\nfrom transformers of 2023\n'''", "import mytorch",
    "import os\nx = torch", "from mine.torch import x", "import transformers_of_mine", "torch = 1"])
def test_any_other_text_is_none(text: str) -> None:
    assert not imports_torch(text)


def test_no_shipped_config_is_a_script() -> None:
    assert not [file.name for file in EXAMPLES.glob("*.py") if is_training_script(str(file))]


@pytest.mark.reproduction
@pytest.mark.parametrize("text", [SCRIPT, f"{SCRIPT}{'#' * MAX_FILE_BYTES}", f"{SCRIPT}x = = 1"],
                         ids=["short", "longer than a config may be", "not valid Python"])
@pytest.mark.parametrize(("argv", "fix"), [
    ("plan my_vit.py", "--gpu 4070 my_vit.py"), ("plan my_vit.py --gpu=3060", "--gpu 3060 my_vit.py"),
    ("plan --gpu 'RTX 3090' my_vit.py", "--gpu 'RTX 3090' my_vit.py"),
    ("fit my_vit.py --lr 3e-4 --gpu 4090", "--gpu 4090 my_vit.py"), ("train my_vit.py", "--gpu 4070 my_vit.py"),
    ("explain my_vit.py", "--gpu 4070 my_vit.py"), ("rehearse my_vit.py", "--gpu 4070 my_vit.py"),
    ("my_vit.py", "--gpu 4070 my_vit.py")])
def test_a_script_given_as_a_config_is_not_run_and_gets_the_command_of_trace(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: str, fix: str,
        text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_vit.py").write_text(text)
    assert main(shlex.split(argv)) == 2
    assert capsys.readouterr().err.splitlines()[-1].strip() == f"fitgpt trace {fix}"
    assert not Path("executed").exists()


def test_a_mistake_in_a_config_keeps_its_own_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("import os\n")
    assert main(["plan", str(tmp_path / "mine.py")]) == 2
    assert "`import os` is not allowed in a config file" in capsys.readouterr().err
