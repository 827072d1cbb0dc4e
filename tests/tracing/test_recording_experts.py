"""Mixtures of experts of transformers: those that run by `grouped_mm` are traced, those with a loop are rejected."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fitgpt.core.errors import CannotTrace
from fitgpt.tracing.script import run
from fitgpt.tracing.trace_file import Trace
from tests.tracing import experts_script


@pytest.fixture(autouse=True)
def transformers() -> Any:
    return pytest.importorskip("transformers", minversion="5")


def traced(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Trace:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    return run([experts_script.__file__, *arguments], "h200", "", "", 4, "2.11")


@pytest.mark.reproduction
@pytest.mark.parametrize("arguments", [[], ["grouped_mm"], ["grouped_mm", "float32"]])
def test_experts_by_grouped_mm_are_traced_to_the_end(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    trace = traced(monkeypatch, *arguments)
    assert len(trace.steps) == 2
    of_experts = [kind for kind in trace.tensors if kind.module.endswith("experts.gate_up_proj")]
    assert {kind.owner for kind in of_experts} == {"weights", "gradients", "optimizer"}
    assert {kind.shape for kind in of_experts} == {(8, 64, 64)}


def test_eager_experts_are_rejected_with_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Path(experts_script.__file__).read_text(encoding="utf-8").splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "loss = model(" in line)
    with pytest.raises(CannotTrace, match=rf"experts_script\.py, line {number}: aten\.nonzero"):
        traced(monkeypatch, "eager")


class Shapes(TorchDispatchMode):
    """Each operation, with the shapes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.seen.append((str(func), [tuple(each.shape) for each in tree_leaves(result)
                                      if isinstance(each, torch.Tensor)]))
        return result


@pytest.mark.parametrize(("experts", "independent"), [("grouped_mm", True), ("eager", False)])
def test_only_eager_experts_have_shapes_that_depend_on_the_routing(experts: str, independent: bool) -> None:
    """Real training on the CPU: all tokens to the same experts, and then to experts drawn at random."""
    seen = []
    for same in (True, False):
        torch.manual_seed(0)
        model = experts_script.build(experts)
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight.data
            gate.zero_() if same else gate.normal_(std=10)  # equal scores: top-k takes the same experts for all
        with Shapes() as shapes:
            experts_script.train(model, "cpu")
        seen.append(shapes.seen)
    assert (seen[0] == seen[1]) == independent


@pytest.mark.reproduction
def test_bitsandbytes_leaves_experts_in_16_bits(transformers: Any) -> None:
    """They are parameters of three dimensions, and it replaces nn.Linear."""
    bnb = pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = replace_with_bnb_linear(experts_script.build(None), quantization_config=quantization)
    assert isinstance(model.model.layers[0].self_attn.q_proj, bnb.nn.Linear4bit)
    experts = model.model.layers[0].mlp.experts
    assert (experts.gate_up_proj.dtype, experts.gate_up_proj.dim()) == (torch.bfloat16, 3)
    replace_parameter_4bit(experts, "gate_up_proj")  # what `explain` advises
    assert experts.parametrizations.gate_up_proj.original.dtype == torch.uint8
