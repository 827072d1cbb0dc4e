"""`fitgpt trace`, as typed: what was not seen, or is only bounded, is in the first lines and in the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fitgpt.commands.main import main
from fitgpt.planning.budget import target_for
from fitgpt.planning.verdict import Verdict
from fitgpt.tracing.plan import TracedPlan, plan_trace, verdicts
from fitgpt.tracing.recorder import Recorder
from fitgpt.tracing.script import run
from fitgpt.tracing.trace import recording
from fitgpt.tracing.trace_file import Trace, to_json, trace_of

RTX = target_for("4070", "cuda", torch="2.13")
STEP = """
    loss = model(torch.randn(64, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MAKE = "model = {}.cuda()\noptimizer = torch.optim.AdamW(model.parameters())\n"
EXPERTS = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        y, chosen = x * self.gate(x).sum(), self.gate(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                y[mask] = expert(x[mask])
        return y

""" + MAKE.format("Experts()") + "for _ in range(3):" + STEP
SKIPS = "import torch\nfrom torch import nn\n" + MAKE.format("nn.Linear(64, 64)") + """
for step in range(3):
    model(torch.randn(64, 64, device="cuda")).sum().backward()
    gradients = torch.cat([each.grad.flatten() for each in model.parameters()])
    assert torch.isfinite(gradients).all(), "not finite"
    if not torch.isfinite(gradients).all():
        continue
    optimizer.step()
"""
HUGE = "import torch\nfrom torch import nn\n" + MAKE.format("nn.Linear(64, 64)") + """
big = torch.empty(2**61, dtype=torch.uint8, device="cuda")
for _ in range(3):""" + STEP
NEVER = "import torch\nfrom torch import nn\n" + MAKE.format("nn.Linear(64, 64)") + """
model(torch.randn(64, 64, device="cuda")).sum().backward()
"""


def trace(folder: Path, source: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object], str]:
    """The exit code, the JSON and the text of `fitgpt trace`."""
    script, saved = folder / "train.py", folder / "saved.trace.json"
    script.write_text(source)
    code = main(["trace", "--gpu", "4070", "--save", str(saved), "--json", str(script)])
    document = json.loads(capfd.readouterr().out)
    assert main(["trace", "--gpu", "4070", str(saved)]) == code
    return code, document, " ".join(capfd.readouterr().out.split())


@pytest.mark.reproduction
def test_experts_behind_a_branch_are_not_all_seen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, document, text = trace(tmp_path, EXPERTS, capfd)
    assert code == 10
    assert document["verdict"] == "not_all_seen"
    assert document["fits"] is False
    assert "Not all seen: needs at least" in text
    assert "train.py, line 15 branches on a value from the GPU" in text
    assert main(["trace", "--all-cards", "--json", str(tmp_path / "saved.trace.json")]) == 10
    assert {row["verdict"] for row in json.loads(capfd.readouterr().out)["gpus"]} == {"not_all_seen", None}


def planned(folder: Path, source: str) -> TracedPlan:
    """The plan of a script that this process runs."""
    script = folder / "train.py"
    script.write_text(source)
    try:
        return plan_trace(run([str(script)], "4070", "", "", 4, "2.13"), RTX)
    finally:
        sys.path.remove(str(folder))


@pytest.mark.reproduction
def test_steps_behind_a_check_of_finiteness_are_taken(tmp_path: Path) -> None:
    plan = planned(tmp_path, SKIPS)
    assert plan.verdict is Verdict.FITS
    assert len(plan.steps) == 3


@pytest.mark.reproduction
def test_an_allocation_that_no_gpu_holds_is_named(tmp_path: Path) -> None:
    plan = planned(tmp_path, HUGE)
    assert plan.verdict is Verdict.DOES_NOT_FIT
    assert plan.forecast.needs >= 2**61
    text = f"One allocation alone takes 2.00 EiB: 2,305,843,009,213,693,952 × uint8 at {tmp_path}/train.py:6."
    assert text in " ".join(plan.text(1000).split())


@pytest.mark.reproduction
def test_an_optimizer_that_never_steps_is_in_the_verdict(tmp_path: Path) -> None:
    plan = planned(tmp_path, NEVER)
    assert plan.verdict is Verdict.NOT_ALL_SEEN
    assert plan.caveats == ("The script makes an optimizer, and no optimizer step was traced.",)


def convolutions(steps: int = 2) -> Trace:
    recorder = Recorder()
    with recording(recorder, RTX):
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            model(torch.randn(8, 3, 64, 64, device="cuda")).sum().backward()
            optimizer.step()
    return trace_of(recorder, ("train.py",), RTX.platform, "2.13")


@pytest.mark.reproduction
def test_benchmark_mode_of_cudnn_is_tight_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert plan_trace(convolutions(), RTX).verdict is Verdict.FITS
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    traced = convolutions()
    plan = plan_trace(traced, RTX)
    assert plan.verdict is Verdict.TIGHT
    assert "torch.backends.cudnn.benchmark is True" in str(plan)
    assert {each.verdict for each in verdicts(traced)} == {Verdict.TIGHT, None}
    assert "torch.backends.cudnn.benchmark" in to_json(traced)


def test_recurrent_layers_are_tight() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        nn.LSTM(8, 8).cuda()(torch.randn(4, 2, 8, device="cuda"))
    assert [each for each in recorder.bounded if "LSTM" in each]


@pytest.mark.reproduction
def test_options_that_time_kernels_do_not_cost_the_compilers_plan() -> None:
    from torch._inductor import config

    recorder, options = Recorder(), ("coordinate_descent_tuning", "max_autotune",
                                     "triton.mix_order_reduction_autotune_split_size")
    with config.patch(dict.fromkeys(options, True)), recording(recorder, RTX):
        block = nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 768), nn.GELU(), nn.LayerNorm(768)).cuda()
        torch.compile(block)(torch.randn(16, 1024, 768, device="cuda")).float().square().mean().backward()
    assert recorder.compiled
    assert not recorder.unplanned


@pytest.mark.reproduction
def test_a_branch_that_the_compiler_cannot_take_is_named_with_its_line() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 3 else x

    recorder = Recorder()
    with recording(recorder, RTX):
        torch.compile(Branch())(torch.randn(2, 4, device="cuda", requires_grad=True))
    assert "test_verdict.py, line" in recorder.unplanned
    assert [each for each in recorder.not_seen if "branches on a value" in each]
