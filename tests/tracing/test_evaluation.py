"""Evaluation that a script contains and its trace did not reach is in the verdict, with file and line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fitgpt.tracing.script import run
from fitgpt.tracing.trace_file import Trace

LIBRARY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)

    @classmethod
    def from_pretrained(cls, other):
        net = cls()
        with torch.no_grad():
            net.layer.weight.copy_(other.layer.weight)
        return net

    @torch.no_grad()
    def generate(self, x):
        return self(x)

def debug(model):
    model.eval()

if __name__ == "__main__":
    Net().eval()
"""
SCRIPT = """
import sys, torch
from net import Net

@torch.no_grad()
def update(average, model):
    for a, b in zip(average.parameters(), model.parameters()):
        a.lerp_(b, 0.1)

{functions}

def main():
    model, average = Net().cuda(), Net().cuda().eval()
    if len(sys.argv) > 1:
        model = Net.from_pretrained(average)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range({steps}):
{before}
        x = torch.randn(4, 8, device="cuda")
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        update(average, model)
{inside}
{after}

main()
"""
EVALUATE = """
def evaluate(model):
    model.eval()
    with torch.no_grad():
        model(torch.randn(64, 8, device="cuda"))
    model.train()
"""
INNER = """
def report(model):
    score(model)

def score(model):
    with torch.inference_mode():
        return model(torch.randn(64, 8, device="cuda"))
"""


def traced(folder: Path, *, functions: str = "", before: str = "", inside: str = "", after: str = "",
           steps: int = 1000) -> Trace:
    (folder / "net.py").write_text(LIBRARY)
    script = folder / "train.py"
    script.write_text(SCRIPT.format(functions=functions, before=before, inside=inside, after=after, steps=steps))
    sys.modules.pop("net", None)
    try:
        return run([str(script)], "4070", "", "", 4, "2.13")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("net", None)


@pytest.mark.reproduction
@pytest.mark.parametrize(("code", "named"), [
    (dict(functions=EVALUATE, inside="        if step % 500 == 499: evaluate(model)"), "(evaluate)"),
    (dict(functions=EVALUATE, after="    evaluate(model)"), "(evaluate)"),
    (dict(after="    model.generate(x)"), "(generate)"),
    (dict(inside="        if step == 500:\n            with torch.no_grad(): model(x)"), "(main)"),
    (dict(inside="        if step == 500: model.eval()"), "(main)"),
    (dict(functions=INNER, after="    report(model)"), "(score)"),
], ids=["every 500 steps", "after training", "generate", "no_grad", "eval", "called by a function that did not run"])
def test_what_was_not_reached_is_named(tmp_path: Path, code: dict[str, str], named: str) -> None:
    text, = traced(tmp_path, **code).not_seen
    assert "Evaluation was not reached" in text
    assert "train.py, line" in text or "net.py, line" in text
    assert named in text


@pytest.mark.parametrize("code", [
    dict(),
    dict(functions=EVALUATE, inside="        evaluate(model)"),
    dict(functions=EVALUATE),
    dict(functions=EVALUATE, inside="        if step == 500: evaluate(model)", steps=3),
    dict(inside="        model.generate(x)"),
], ids=["weights averaged and copied without gradients", "reached", "never called", "the script ran to its end",
        "generated"])
def test_other_code_without_gradients_is_not(tmp_path: Path, code: dict[str, Any]) -> None:
    assert not traced(tmp_path, **code).not_seen


@pytest.mark.reproduction
@pytest.mark.parametrize(("rows", "later"), [(1, False), (100_000, True)])
def test_an_evaluation_before_the_first_step_counts_with_the_state_that_comes_later(tmp_path: Path, rows: int,
                                                                                  later: bool) -> None:
    first = f"""        if step == 0:
            with torch.no_grad(): model(torch.randn({rows}, 8, device="cuda"))
            optimizer = torch.optim.AdamW(model.parameters())"""
    found = traced(tmp_path, inside="", functions="", before=first).not_seen
    assert ["before the first optimizer step only" in each for each in found] == [True] * later


TRAINER = """
import sys, torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=2, head_dim=16)
rows = [{{"input_ids": torch.arange(16), "labels": torch.arange(16)}}] * 64
args = TrainingArguments({folder!r}, per_device_train_batch_size=1, max_steps=100, eval_strategy={strategy!r},
                         eval_steps={every}, save_strategy="no", report_to="none")
trainer = Trainer(Qwen3ForCausalLM(config), args, train_dataset=rows, eval_dataset=rows[:16])
trainer.train()
{after}
"""


@pytest.mark.reproduction
@pytest.mark.parametrize(("strategy", "every", "after", "named"), [
    ("steps", 50, "", "line 11: Trainer evaluates (eval_strategy='steps', batches of 8)"),
    ("steps", 2, "trainer.evaluate()", ""), ("no", 50, "", ""), ("no", 50, "trainer.evaluate()", "line 12 (evaluate)"),
], ids=["every 50 steps", "reached", "never", "after training"])
def test_a_trainer_of_transformers_that_is_to_evaluate_and_did_not_is_named(
        tmp_path: Path, strategy: str, every: int, after: str, named: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER.format(folder=str(tmp_path / "out"), strategy=strategy, every=every, after=after))
    try:
        found = run([str(script)], "4070", "", "", 4, "2.13").not_seen
    finally:
        sys.path.remove(str(tmp_path))
    assert [named in each for each in found] == [True] * bool(named)
