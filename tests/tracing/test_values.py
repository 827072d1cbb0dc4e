"""Truth values of GPU tensors: numbers are finite; other answers are made up, and a model that asks is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fitgpt.planning.budget import target_for
from fitgpt.tracing.errors import Untraceable
from fitgpt.tracing.recorder import Recorder
from fitgpt.tracing.trace import recording

RTX = target_for("4070", "cuda", torch="2.13")
SMALL, LARGE = (8,), (64, 1024, 1024)  # the flags of the latter are more than a trace keeps


class Asks(nn.Module):
    """A model that asks a question in its forward pass."""

    def __init__(self, question: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        self.question(x)
        return x


FINITE = {
    "isfinite().all()": lambda x: torch.isfinite(x).all(),
    "not isnan().any()": lambda x: not torch.isnan(x).any(),
    "not isinf().any()": lambda x: not x.isinf().any(),
    "isposinf, isneginf": lambda x: not (torch.isposinf(x) | torch.isneginf(x)).any(),
    "nan or inf": lambda x: not torch.logical_or(x.isnan(), x.isinf()).any(),
    "~isfinite": lambda x: not (~torch.isfinite(x)).any(),
    "of each row": lambda x: torch.isfinite(x).all(dim=-1).all(),
    "of several": lambda x: torch.stack([x.isfinite().all(), x.isfinite().all()]).all(),
    "item()": lambda x: torch.isfinite(x).all().item(),
    "count": lambda x: torch.isfinite(x).all().sum().item() == 1,
    "below infinity": lambda x: (x.abs() < float("inf")).all(),
    "after an update": lambda x: torch.isfinite(x).all().logical_and_(torch.isfinite(x).any()),
}


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("question", FINITE.values(), ids=FINITE)
def test_numbers_are_finite_in_every_spelling_and_size(question: Callable[[Tensor], object],
                                                       shape: tuple[int, ...]) -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        x = torch.randn(shape, device="cuda")
        assert question(x)
        Asks(question)(x)
    assert not recorder.not_seen


def test_values_of_the_host_that_are_not_finite_are_known() -> None:
    with recording(Recorder(), RTX):
        x = torch.tensor([1.0, float("nan"), float("inf")]).to("cuda")
        assert torch.isnan(x).tolist() == [False, True, False]
        assert not torch.isfinite(x).all()
        assert torch.isinf(x).any()


BRANCHES = {
    "any()": lambda x: bool((x > 0).any()),
    "item()": lambda x: (x == 3).all().item(),
    "a number": lambda x: bool(x.sum()),
    "equal()": lambda x: torch.equal(x, x + 1),
    "allclose()": lambda x: torch.allclose(x, x + 1),
    "a flag that was finite before": lambda x: bool(torch.isfinite(x).logical_and_(x > 0).all()),
}


@pytest.mark.parametrize("question", BRANCHES.values(), ids=BRANCHES)
def test_a_branch_in_a_model_is_named_with_its_line_and_elsewhere_is_not(question: Callable[[Tensor], object]) -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        x = torch.randn(8, device="cuda")
        question(x)
        assert not recorder.not_seen
        Asks(question)(x)
    assert len(recorder.not_seen) == 1
    assert "test_values.py, line" in next(iter(recorder.not_seen))
    assert "branches on a value" in next(iter(recorder.not_seen))


def test_what_the_host_knows_is_no_made_up_branch() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        mask = torch.tensor([True, True]).to("cuda")
        Asks(lambda x: x.all() or x.any())(mask)
        distribution = torch.distributions.Normal(torch.zeros(2, device="cuda"), torch.randn(2, device="cuda").exp())
        Asks(lambda x: torch.distributions.Normal(x, x))(distribution.rsample())
    assert not recorder.not_seen


def test_an_error_of_the_trace_that_the_program_catches_is_in_the_verdict() -> None:
    recorder = Recorder()
    with recording(recorder, RTX), pytest.raises(Untraceable):
        torch.randn(8, device="cuda").nonzero()
    assert [each for each in recorder.not_seen if "aten.nonzero" in each]
