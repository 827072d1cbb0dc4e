"""What is pasted becomes settings of the page or a diagnosis. Nothing is executed, and no file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from fitgpt.core.errors import UsageError
from fitgpt.web.answers import plan
from fitgpt.web.form import read
from fitgpt.web.paste import paste
from tests.web_server import NOTES

MESSAGES = Path(__file__).parent.parent / "diagnosis" / "messages"
OOM = ("CUDA out of memory. Tried to allocate 3.07 GiB (GPU 0; 11.65 GiB total capacity; 7.10 GiB already allocated; "
       "1.10 GiB free; 7.30 GiB reserved in total by PyTorch)")
SMI = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.14              Driver Version: 550.54.14      CUDA Version: 12.4     |
|   0  NVIDIA GeForce RTX 4070        Off |   00000000:01:00.0  On |                  N/A |
| 30%   45C    P2             60W /  200W |    6582MiB /  12282MiB |     97%      Default |
+-----------------------------------------------------------------------------------------+
|    0   N/A  N/A      1201      G   /usr/lib/xorg/Xorg                             1800MiB |
|    0   N/A  N/A      2211      C   python                                         4464MiB |
+-----------------------------------------------------------------------------------------+
"""


def test_a_config_file_becomes_settings_and_lists_what_it_does_not_use() -> None:
    found = paste("# CUDA out of memory before\nwidth = 64\nn_layer = 6\nn_embd = 6 * width\nbatch_size: int = 16\n"
                  "learning_rate = 1e-3\nmax_iters = 5000\nnum_experts = 8\ndataset = 'shakespeare_char'\n", None)
    assert (found["kind"], found["replaces"]) == ("config", True)
    assert found["settings"] == {"n_layer": "6", "n_embd": "384", "batch_size": "16", "max_iters": "5000",
                                 "vocab_size": "65"}
    assert found["ignored"] == ["learning_rate"]  # the dataset has given the vocabulary
    assert found["unknown"] == ["num_experts"]


def test_options_that_only_fitgpt_has_choose_the_trainer() -> None:
    assert paste("batch_size = 8\nsaved_activations = 'input'\n", None)["settings"]["trainer"] == "fitgpt"
    assert "trainer" not in paste("batch_size = 8\n", None)["settings"]


@pytest.mark.parametrize("line", ["import os", "__import__('os').system('x')", "n_head = open('/etc/passwd').read()",
                                  "n_head = 0", "n_head ="])
def test_a_config_file_with_a_mistake_is_an_error_that_names_the_line(line: str) -> None:
    with pytest.raises(UsageError, match="pasted text:2"):
        paste(f"n_layer = 6\n{line}\n", None)


@pytest.mark.parametrize("text", [
    "import torch\nbatch_size = 8\nmodel = torch.nn.Linear(8, batch_size)\n", "    from transformers import Trainer\n",
    "# python train.py --batch_size=8\n!pip install trl\nimport json, trl\nblock_size = 64\n"])
def test_a_training_script_is_recognised(text: str) -> None:
    assert paste(text, None) == {"kind": "script", "command": ""}


def test_a_command_line_of_trace_is_of_a_script() -> None:
    assert paste("$ fitgpt trace --gpu 4070 'my vit.py' 128", NOTES) == {
        "kind": "script", "command": "fitgpt trace --gpu 4070 'my vit.py' 128"}


@pytest.mark.parametrize(("line", "settings", "replaces"), [
    ("$ python train.py config/x.py --batch_size=8", dict(trainer="nanogpt", batch_size="8"), False),
    ("CUDA_VISIBLE_DEVICES=0 torchrun --standalone --nproc_per_node=1 train.py --n_layer=6 --compile=False",
     dict(trainer="nanogpt", n_layer="6", compile="False"), True),
    ("fitgpt plan --gpu 4070 \\\n  --others 2GiB --no-compile --batch-size 8",
     dict(trainer="fitgpt", gpu="4070", others="2GiB", compile="False", batch_size="8"), True),
    ("fitgpt train --init_from=gpt2 --dataset=x", dict(trainer="fitgpt", n_layer="12", n_head="12", n_embd="768",
                                                        bias="True", vocab_size="50257"), True),
    ("--batch_size=4 --dtype float16", dict(batch_size="4", dtype="float16"), True)])
def test_a_command_line_becomes_settings_and_a_trainer(line: str, settings: dict[str, str], replaces: bool) -> None:
    found = paste(line, None)
    assert (found["kind"], found["settings"], found["replaces"]) == ("command", settings, replaces)
    assert read(urlencode({"gpu": "4070"} | found["settings"]))


def test_a_shipped_config_file_in_a_command_line_is_used_and_another_is_named() -> None:
    found = paste("python train.py config/notes_77m.py --batch_size=8 --foo=3 --wandb_log=True", None)
    assert (found["settings"]["n_embd"], found["settings"]["batch_size"]) == ("576", "8")
    assert (found["unread"], found["unknown"], found["ignored"]) == ([], ["--foo=3"], ["wandb_log"])
    assert paste("python train.py /etc/passwd.py", None)["unread"] == ["/etc/passwd.py"]
    found = paste("torchrun --nproc_per_node=8 train.py config/train_shakespeare_char.py", None)  # nanoGPT's name of it
    assert (found["settings"]["n_embd"], found["settings"]["vocab_size"]) == ("384", "65")
    assert (found["unread"], found["unknown"]) == ([], ["--nproc_per_node=8"])


def test_nvidia_smi_offers_its_gpu_and_what_other_programs_hold() -> None:
    found = paste(SMI, None)
    assert found["kind"] == "reading"
    assert found["offers"] == [{"settings": {"gpu": "RTX 4070", "others": "2118MiB"}, "gpu": "RTX 4070",
                                "others": "2.07 GiB", "own": ["python (2211)"]}]
    assert "6,582 MiB" in found["diagnosis"]["title"]
    assert not any("--" in each for each in found["diagnosis"]["needed"])  # a page has no flags
    assert found["diagnosis"]["wants_plan"]


def test_a_message_is_explained_without_a_plan() -> None:
    text = (MESSAGES / "nanogpt-88.txt").read_text(encoding="utf-8")
    assert "394.0 MiB" in paste(text, None)["diagnosis"]["title"]
    for text in ("", "<script>alert(1)</script>", "hello"):
        assert paste(text, None)["diagnosis"]["subject"] == "unknown"


def test_a_remedy_carries_over_the_compile_mode_that_explains_the_message() -> None:
    """The plan is of the compiled run, the message of the eager one: a remedy's figure is of the eager run."""
    found = paste(OOM, NOTES)["diagnosis"]
    assert "16 × 1,024 × 50,304 × 4" in found["what"]
    assert found["inferred"] == {"compile": "False"}
    assert found["run"].endswith("eager")
    tried = [each for each in found["remedies"] if each["settings"] and "trainer" not in each["settings"]]
    assert tried
    for each in tried:
        before: dict[str, Any] = dict(pair.split("=") for pair in NOTES.replace("+", " ").split("&"))
        after = plan(read(urlencode(before | each["settings"])))
        assert each["effect"].startswith(f"{after['peak'] / 2**30:.2f} GiB")
