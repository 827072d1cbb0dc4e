"""Traced programs against what is known of them: the written tape of nanoGPT, torch's own behaviour."""

from __future__ import annotations

import copy
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fitgpt
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import CannotTrace, FitError, ScriptFailed
from fitgpt.core.units import MiB
from fitgpt.memory.tape import Tape
from fitgpt.memory.timeline import replay
from fitgpt.planning.budget import Target, target_for
from fitgpt.tapes import nanogpt
from fitgpt.tracing.compiler import CUDA_GRAPHS
from fitgpt.tracing.device import NO_LARGER_NUMBERS, SKIPPED_STEPS
from fitgpt.tracing.errors import Untraceable
from fitgpt.tracing.modules import NO_OPTIMIZER, StepsDone
from fitgpt.tracing.patches import COMPILED_BEFORE, NO_FAST_PATH
from fitgpt.tracing.recorder import Recorder
from fitgpt.tracing.saving import saving_nothing
from fitgpt.tracing.script import run
from fitgpt.tracing.trace import recording
from fitgpt.tracing.values import Values
from tests.tracing import gpt_script

H200 = target_for("h200", "cuda", torch="2.11")
RTX = target_for("4070", "cuda", torch="2.13")
SMALL = dict(n_layer=2, n_head=4, n_embd=128, batch_size=4, block_size=128, vocab_size=512, compile=False)


def sizes(tape: Tape, up_to: int) -> list[tuple[bool, int]]:
    """Allocations and frees in order; neighbouring frees by size, since their order changes nothing."""
    found: list[tuple[bool, int]] = []
    for alloc, events in groupby(tape.events[:up_to], key=lambda event: event.alloc):
        group = [(alloc, event.nbytes) for event in events]
        found += group if alloc else sorted(group)
    return found


@pytest.mark.parametrize(("target", "settings"), [
    (H200, dict(dtype="float32", bias=True, gradient_accumulation_steps=2)),
    (H200, dict(dtype="bfloat16", bias=False, gradient_accumulation_steps=2)),
    (H200, dict(dtype="float16", bias=True, dropout=0.1, gradient_accumulation_steps=1)),
    (H200, dict(dtype="bfloat16", bias=False, n_embd=168, gradient_accumulation_steps=1)),  # heads padded from 42 to 48
    (RTX, dict(dtype="bfloat16", bias=True, gradient_accumulation_steps=1)),                # flash attention
])
def test_nanogpt_allocates_as_its_written_tape_says(target: Target, settings: dict[str, object]) -> None:
    config = RunConfig(**{**SMALL, **settings})  # type: ignore[arg-type]
    recorder = Recorder()
    with recording(recorder, target):
        gpt_script.train(config, iterations=3, eval_iters=1)
    written = nanogpt.write(config, target.platform, eval_batches=(2, 2),
                            history=(config.gradient_accumulation_steps,) * 3)
    traced = recorder.tape()
    # The written tape ends with its last evaluation, whose tensors it frees; the program then frees everything.
    end = max(number for number, event in enumerate(written.events) if event.alloc) + 1
    assert sizes(traced, end) == sizes(written, end)
    assert replay(traced).reserved == replay(written).reserved
    assert len(recorder.steps) == 3


def test_gradients_between_two_nodes_are_added_in_place() -> None:
    """As on a GPU, where no dispatch mode is active: the sum of two gradients takes no memory of its own."""
    recorder = Recorder()
    with recording(recorder, RTX):
        x = torch.ones(1000, device="cuda", requires_grad=True)
        y = x * 2
        (y * 3 + y * 4).sum().backward()
    assert not [tensor for tensor in recorder.tensors if tensor.op == "aten.add.Tensor" and tensor.phase == "backward"]


def test_owners_modules_phases_and_lines_of_tensors() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        model = nn.Sequential(nn.Embedding(5000, 64), nn.Linear(64, 5000)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            tokens = torch.zeros(8, 16, dtype=torch.int64).to("cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(tokens)
            logits.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    by_owner = {owner: [tensor for tensor in recorder.tensors if tensor.owner == owner]
                for owner in ("weights", "gradients", "optimizer", "casts", "data", "logits", "workspace")}
    assert [tensor.shape for tensor in by_owner["weights"]] == [(5000, 64), (5000, 64), (5000,)]
    assert len(by_owner["gradients"]) == 2 * 3
    assert sum(tensor.nbytes for tensor in by_owner["optimizer"]) == 8 * 645_000 + 3 * 4
    assert {tensor.shape for tensor in by_owner["casts"]} == {(5000, 64), (5000,)}
    assert [tensor.nbytes for tensor in by_owner["data"]] == [1024, 1024]
    assert by_owner["logits"][0].module == "1"
    assert by_owner["logits"][0].shape == (128, 5000)
    assert by_owner["logits"][0].source.startswith(__file__)
    for owner in ("weights", "gradients", "optimizer"):
        assert {tensor.module for tensor in by_owner[owner]} == {"0.weight", "1.weight", "1.bias"}
    assert [name for name, _ in recorder.phases] == ["load", *2 * ["forward", "backward", "optimizer"]]
    assert len(recorder.steps) == 2
    assert recorder.params == 645_000


class SelfAttention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.fused = nn.Linear(64, 3 * 64), fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.view(2, 32, 4, 16).transpose(1, 2) for each in self.qkv(x).split(64, dim=-1))
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (q @ k.transpose(-2, -1) / 4).softmax(-1) @ v  # type: ignore[no-any-return]


@pytest.mark.parametrize(("fused", "shapes"), [
    (True, {(2, 4, 32, 16), (2, 4, 32), (2,), ()}),  # output and gradients, log-sum-exp, random state, scratch
    (False, {(8, 32, 32), (2, 4, 32, 32)}),          # scores
])
def test_scores_and_what_fused_kernels_allocate_belong_to_attention(fused: bool, shapes: set[tuple[int, ...]]) -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        model = SelfAttention(fused).to("cuda", torch.bfloat16)
        model(torch.ones(2, 32, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    found = [tensor for tensor in recorder.tensors if tensor.owner == "attention"]
    assert {tensor.shape for tensor in found} == shapes
    assert {tensor.phase for tensor in found} == {"forward", "backward"}


@pytest.mark.parametrize("fill", [
    lambda: nn.Linear(600, 500), lambda: nn.Embedding(9001, 77), lambda: nn.Conv2d(300, 300, 3),
    lambda: torch.empty(700, 600).normal_(), lambda: torch.empty(700, 600).t().uniform_(),
    lambda: torch.empty(700, 600).bernoulli_(0.3), lambda: torch.empty(700, 600, dtype=torch.bfloat16).normal_(),
    lambda: nn.init.orthogonal_(torch.empty(600, 500)),
])
def test_weights_of_the_host_draw_as_many_random_numbers_as_without_a_trace(fill: Callable[[], object]) -> None:
    """A script with a seed then shuffles its data alike."""
    def next_number() -> float:
        torch.manual_seed(1)
        fill()
        return torch.rand(1).item()

    real = next_number()
    with recording(Recorder(), RTX):
        assert next_number() == real


def test_lazy_modules_get_their_weights_on_the_gpu() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        model = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(8)).to("cuda")
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(4, 16, device="cuda")).sum().backward()
        optimizer.step()
    assert [tensor.shape for tensor in recorder.tensors if tensor.owner == "weights"] == [
        (32, 16), (32,), (8, 32), (8,)]


def test_values_that_are_known_can_be_compared() -> None:
    with recording(Recorder(), RTX):
        x = torch.arange(4, device="cuda")
        assert torch.allclose(x, x.clone())
        assert torch.unique(x // 2, sorted=True).tolist() == [0, 1]


def test_stops_at_the_forward_pass_after_the_last_step() -> None:
    def train() -> None:
        model = nn.Linear(8, 8).to("cuda")
        optimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
        for _ in range(10):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            for optimizer in optimizers:  # several optimizers make one step
                optimizer.step()

    recorder = Recorder()
    with recording(recorder, RTX, 2), pytest.raises(StepsDone):
        train()
    assert len(recorder.steps) == 2


def test_a_size_that_depends_on_unknown_values_is_rejected() -> None:
    with recording(Recorder(), RTX):
        scores = torch.empty(100, device="cuda").softmax(0)
        with pytest.raises(Untraceable, match="nonzero"):
            scores[scores > 0.5]


def test_a_single_number_of_the_host_fills_a_tensor_of_the_gpu() -> None:
    with recording(Recorder(), RTX):
        scores, mask = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, dtype=torch.bool, device="cuda")
        assert scores.masked_fill(mask, torch.tensor(-1.0)).is_cuda


def test_counts_of_unknown_numbers_are_as_many_as_asked_for() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        chosen = torch.empty(100, 8, device="cuda").softmax(-1).argmax(-1)
        assert chosen.bincount(minlength=8).shape == (8,)
        assert torch.bincount(chosen, torch.ones(100, device="cuda"), 8).dtype == torch.float32
        with pytest.raises(Untraceable, match="bincount"):
            chosen.bincount()
    assert NO_LARGER_NUMBERS in recorder.notes


@pytest.mark.parametrize("size", [lambda x: (x > 3).sum(1).max().item(), lambda x: int(x.max()),
                                  lambda x: x.argmax(1).tolist()[0]], ids=["item", "int", "tolist"])
def test_a_whole_number_that_a_model_reads_from_the_gpu_is_stated(size: Callable[[torch.Tensor], int]) -> None:
    class Truncated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :size(x)]

    recorder = Recorder()
    with recording(recorder, RTX):
        model, numbers = Truncated(), torch.randint(10, (4, 8), device="cuda")
        numbers.sum().item()  # a count, outside of a model
        model(torch.arange(8).repeat(4, 1).to("cuda"))  # known
        assert not recorder.not_seen
        model(numbers)
    assert [each for each in recorder.not_seen if "test_recording.py, line" in each and "whole number" in each]


def test_a_mask_that_came_from_the_host_is_known() -> None:
    with recording(Recorder(), RTX):
        mask = torch.tensor([True, False, True]).to("cuda")
        assert torch.empty(3, 5, device="cuda")[mask].shape == (2, 5)
        assert mask.sum().item() == 2


def test_values_that_were_never_computed_have_a_harmless_answer() -> None:
    with recording(Recorder(), RTX):
        loss = torch.empty(10, device="cuda").mean()
        assert loss.item() == 1.0
        assert torch.isfinite(loss)
        assert not torch.isnan(loss).any()
        assert loss.cpu().item() == 1.0


def test_the_program_sees_a_gpu_and_afterwards_everything_is_as_before() -> None:
    before = torch.cuda.is_available(), torch.Tensor.to, torch.tensor, nn.Module.__call__
    with recording(Recorder(), RTX):
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (8, 9)
        assert torch.cuda.is_bf16_supported()
        for tensor in (torch.zeros(2, device="cuda"), torch.tensor([1.0], device="cuda:0"), torch.ones(2).cuda(),
                       torch.ones(2).to("cuda"), torch.ones(2).to(torch.empty(1, device="cuda"))):
            assert (str(tensor.device), tensor.is_cuda, tensor.is_meta) == ("cuda:0", True, False)
        with torch.device("cuda"):
            assert nn.Linear(2, 2).weight.is_cuda
            assert torch.tensor(1).is_cuda
        with torch.device("meta"):
            assert nn.Linear(2, 2).weight.is_meta
        assert str(torch.ones(2).device) == "cpu"
        assert torch.randn(4, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).is_cuda
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    assert before == (torch.cuda.is_available(), torch.Tensor.to, torch.tensor, nn.Module.__call__)
    assert not torch.nn.functional.dropout(torch.ones(3, device="meta")).is_cuda


def test_large_weights_of_the_host_have_no_storage() -> None:
    """A model of 7 billion parameters can be built: nobody has to have its bytes."""
    with recording(Recorder(), RTX):
        layer = nn.Linear(2**20, 2**20, bias=False)
        assert str(layer.weight.device) == "cpu"
        assert layer.to("cuda").weight.is_cuda


def test_an_optimizer_made_before_the_model_moves_trains_the_moved_parameters() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512))  # a large weight, and small ones
        optimizer = torch.optim.AdamW(model.parameters())
        model.to("cuda")
        for _ in range(2):
            loss = model.to("cuda")(torch.ones(2, 512, device="cuda")).sum()
            loss.backward()
            optimizer.step()
    states = [tensor for tensor in recorder.tensors if tensor.op == "aten.zeros_like.default"]
    assert len(states) == 2 * 4


@pytest.mark.parametrize("map_location", ["cuda", torch.device("cuda:0")])
def test_weights_are_loaded_onto_the_gpu(tmp_path: Path, map_location: object) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(300, 300), "step": 3}, path)
    with recording(Recorder(), RTX):
        loaded = torch.load(path, map_location=map_location)
        assert loaded["weight"].is_cuda
        assert loaded["step"] == 3


class Activations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(self.inside(x).exp().sin().cos().tanh()).sum()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.xdist_group("compiler")
def test_a_compiled_model_is_traced_as_its_compiler_plans_it() -> None:
    """Without a driver and without triton. Of `exp().sin().cos().tanh()`, eager code keeps three results for backward;
    compiled code keeps the product that they are computed from, and the last."""
    saved = {}
    for compiled in (False, True):
        recorder = Recorder()
        with recording(recorder, RTX):
            unused = torch.compile(lambda x: x)
            model = Activations().to("cuda")
            run = torch.compile(model) if compiled else model
            loss = run(torch.ones(1024, 256, device="cuda"))
            saved[compiled] = recorder.allocated
            loss.backward()
            assert model.inside.weight.grad is not None
        assert (recorder.compiled, recorder.unplanned) == (compiled, "")
        del unused
    assert saved[False] - saved[True] == 1024 * 256 * 4


@pytest.mark.slow
@pytest.mark.xdist_group("compiler")
def test_compiled_flex_attention_keeps_its_result_and_a_sum_per_row_and_no_mask() -> None:
    """torch/_inductor/kernel/flex/flex_attention.py: while it runs, the largest scores of the rows, too, and in the
    backward pass a sum per row. Each batch has a mask of its own, of another document's length."""
    recorder, tensor, row = Recorder(), 2 * 4 * 256 * 64 * 2, 2 * 4 * 256 * 4
    with recording(recorder, RTX):
        attention = torch.compile(flex_attention)
        inputs = torch.ones(3, 2, 4, 256, 64, dtype=torch.bfloat16, device="cuda").requires_grad_().unbind()
        before = []
        for _ in range(3):
            document = torch.zeros(256, dtype=torch.int64, device="cuda")
            mask = create_block_mask(lambda b, h, q, k, document=document: document[q] == document[k], None, None, 256,
                                     256, device="cuda")
            torch.cuda.reset_peak_memory_stats()
            before.append(recorder.allocated)
            result = attention(*inputs, block_mask=mask)
            assert (recorder.allocated - before[-1], recorder.peak - before[-1]) == (tensor + row, tensor + 2 * row)
            assert result.stride() == inputs[0].stride()
            gradient = torch.ones_like(result)
            torch.cuda.reset_peak_memory_stats()
            held = recorder.allocated
            gradients = torch.autograd.grad(result, inputs, gradient)
            assert recorder.peak - held == 3 * tensor + row
            del result, gradient, gradients, mask, document
        assert before[1:] == before[:1] * 2
    assert (recorder.compiled, recorder.unplanned) == (True, "")


@pytest.mark.xdist_group("compiler")
def test_compiled_optimizers_take_factors_that_are_tensors_of_the_host() -> None:
    """Not recompiled when they change, as nanochat has them. add_(alpha=...) would read a value."""
    def step(weight: torch.Tensor, gradient: torch.Tensor, rate: torch.Tensor) -> None:
        weight.add_(gradient, alpha=-rate)
        weight.addcmul_(gradient, gradient, value=rate)
        weight.addcdiv_(gradient, gradient, value=rate)
        weight.lerp_(gradient, 1 - rate)

    recorder = Recorder()
    with recording(recorder, RTX):
        weight, gradient = torch.zeros(2, 512, 512, device="cuda").unbind()
        compiled = torch.compile(step)
        for _ in range(2):
            compiled(weight, gradient, torch.tensor(0.1))
        assert recorder.allocated == 2 * 512 * 512 * 4
    assert (recorder.compiled, recorder.unplanned) == (True, "")


@pytest.mark.xdist_group("compiler")
@pytest.mark.parametrize("how", ["method", "function", "argument", "owner", "part"])
def test_compiled_code_trains_the_modules_that_it_belongs_to_gets_or_names(how: str) -> None:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)  # type: ignore[no-any-return]

    recorder, x = Recorder(), torch.ones(64, 256)
    with recording(recorder, RTX):
        models = [Activations().to("cuda") for _ in range(2)]
        with_argument = torch.compile(lambda model, x: model(x))
        for model in models:
            if how == "method":
                model.forward = torch.compile(model.forward)
            if how == "part":
                model.inside.compile()
            run = {"method": lambda x, model=model: model(x), "part": lambda x, model=model: model(x),
                   "function": torch.compile(lambda x, model=model: model(x)),
                   "argument": lambda x, model=model: with_argument(model, x),
                   "owner": torch.compile(Trainer(model).loss)}[how]
            for _ in range(2):
                run(x.to("cuda")).backward()
        gradients = [each.grad for model in models for each in model.parameters()]
        assert all(each is not None for each in gradients)
    assert (recorder.compiled, recorder.unplanned) == (True, "")


@pytest.mark.xdist_group("compiler")
def test_a_compiled_method_is_compiled_again_for_evaluation() -> None:
    recorder, peaks = Recorder(), []
    with recording(recorder, RTX):
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(256, 256, device="cuda"))
        run, x = torch.compile(model.forward), torch.ones(4096, 256, device="cuda")
        model(x)  # allocates what stays: cuBLAS workspaces
        for mode in (True, False, True, False):
            model.train(mode)
            before = recorder.allocated
            output = run(x)
            peaks.append(recorder.allocated - before)
            del output
    assert recorder.unplanned == ""
    assert peaks[2:] == peaks[:2]
    assert peaks[0] > peaks[1]  # what dropout keeps


@pytest.mark.xdist_group("compiler")
def test_what_was_compiled_before_the_trace_is_no_eager_figure() -> None:
    """`estimate` compiles a model again. Whatever else Dynamo would compile runs eager, and the trace says so."""
    model = nn.Linear(64, 64)
    batch = torch.ones(8, 64)
    plan = fitgpt.estimate(torch.compile(model), batch, gpu="4070", loss=lambda output: output.sum())
    assert (plan.trace.compiled, plan.trace.planned) == (True, True)

    @torch.compile
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with fitgpt.trace(gpu="4070") as memory:
        double(torch.ones(8, device="cuda"))
    assert (memory.trace.compiled, memory.trace.planned) == (True, False)
    assert COMPILED_BEFORE in memory.trace.notes


def test_triton_kernels_compute_nothing_and_an_autotuned_one_is_measured_once_per_key(tmp_path: Path) -> None:
    """Triton reads the source of its kernels from a file. It measures with 256 MiB."""
    pytest.importorskip("triton")
    source = tmp_path / "kernels.py"
    source.write_text("import triton, triton.language as tl\n"
                      "@triton.autotune([triton.Config({'B': 128}), triton.Config({'B': 256})], key=['n'])\n"
                      "@triton.jit\n"
                      "def tuned(x, n, B: tl.constexpr):\n"
                      "    tl.store(x, n)\n"
                      "@triton.jit\n"
                      "def plain(x, n):\n"
                      "    tl.store(x, n)\n", encoding="utf-8")
    names = runpy.run_path(str(source))
    recorder = Recorder()
    with recording(recorder, RTX):
        x = torch.empty(1024, device="cuda")
        assert names["triton"].runtime.driver.active.get_current_target().arch == 89
        for n in (4, 4, 8):
            names["plain"][(1,)](x, n)
            names["tuned"][lambda meta: (1024 // meta["B"],)](x, n)
        assert recorder.allocated == 4096
    assert [each.nbytes for each in recorder.tensors if each.owner == "workspace"] == [256 * MiB] * 2


def test_a_compiled_block_mask_holds_no_mask_of_all_pairs_of_tokens() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        mask = torch.compile(create_block_mask)(lambda b, h, q, k: q >= k, None, None, 1024, 1024, device="cuda")
        assert recorder.allocated == recorder.peak > 0
        del mask
    assert recorder.allocated == 0
    assert recorder.compiled


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"disable": True}])
def test_a_model_that_is_not_compiled_after_all_is_traced_eager(options: dict[str, Any]) -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        for model in (torch.compile(nn.Linear(4, 4), **options), nn.Linear(4, 4)):
            model.compile(**options)
            model.to("cuda")(torch.ones(2, 4, device="cuda"))
    assert not recorder.compiled


def test_cuda_graphs_of_the_compiler_are_said_to_keep_memory() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        torch.compile(nn.Linear(4, 4), mode="reduce-overhead").to("cuda")(torch.ones(2, 4, device="cuda"))
    assert CUDA_GRAPHS in recorder.bounded


def test_a_compiled_model_that_branches_on_values_runs_eager_and_the_trace_says_so() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 3 else x

    recorder = Recorder()
    with recording(recorder, RTX):
        torch.compile(Branch())(torch.ones(2, 4, device="cuda"))
    assert recorder.compiled
    assert "DataDependent" in recorder.unplanned


def test_a_loop_that_ends_at_a_known_length_ends() -> None:
    """As generation does: it stops at an unknown token or at the largest length."""
    with recording(Recorder(), RTX):
        unfinished, length = torch.ones(2, dtype=torch.int64, device="cuda"), 0
        while unfinished.max() != 0:
            length += 1
            token = torch.empty(2, 50, device="cuda").softmax(-1).argmax(-1)
            done = torch.isin(token, torch.tensor([0], device="cuda")) | torch.full((2,), length >= 5, device="cuda")
            unfinished = unfinished & ~done
        assert length == 5
        with pytest.raises(Untraceable):
            done[torch.isin(token, torch.tensor([0], device="cuda"))]


def test_a_copied_model_has_buffers_of_the_same_shape_at_other_addresses() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        model = nn.BatchNorm1d(3000).to("cuda")
        before = recorder.allocated
        copied = copy.deepcopy(model)
        assert copied.state_dict()["running_mean"].shape == (3000,)
        assert recorder.allocated == 2 * before
        tensors = [*model.state_dict().values(), *copied.state_dict().values()]
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def test_a_thread_allocates_on_the_gpu() -> None:
    """transformers loads weights in threads."""
    recorder = Recorder()
    with recording(recorder, RTX), ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(lambda: torch.ones(1000).to(torch.device(0))).result()
        assert loaded.is_cuda
        assert recorder.allocated == 4096


def test_a_second_gpu_is_rejected() -> None:
    with recording(Recorder(), RTX):
        for make in (lambda: torch.ones(1).to("cuda:1"), lambda: torch.ones(1, device=torch.device("cuda", 1))):
            with pytest.raises(Untraceable, match="cuda:1"):
                make()


def test_inference_mode_casts_weights_at_each_use() -> None:
    recorder = Recorder()

    def twice(model: nn.Module) -> bool:
        for _ in range(2):
            model(torch.ones(1, 3000, device="cuda"))
        return torch.is_grad_enabled()

    with recording(recorder, RTX), torch.autocast("cuda", torch.bfloat16):
        model = nn.Linear(3000, 3000, bias=False).to("cuda")
        assert not torch.inference_mode(twice)(model)
        assert torch.is_grad_enabled()
    assert [tensor.dtype for tensor in recorder.tensors if tensor.shape == (3000, 3000)][-2:] == 2 * ["bfloat16"]


@pytest.mark.parametrize(("code", "error", "says"), [
    ("torch.cuda.CUDAGraph()", CannotTrace, "train.py, line 2: a trace cannot do this without a GPU"),
    ("raise SystemExit('no data')", ScriptFailed, "train.py ended: no data"),
    ("raise ModuleNotFoundError(\"No module named 'triton'\")", CannotTrace, "pip install triton"),
    ("from torch.utils import cpp_extension as c\nc.CUDA_HOME = None\nc._join_cuda_home('lib')", CannotTrace,
     "train.py, line 4: a trace cannot do this without a GPU"),
    ("from multiprocessing import Process\np = Process(target=print)\np.start()\np.join()", CannotTrace,
     "train.py, line 4: the script starts processes, which are not traced."),
    ("torch.multiprocessing.spawn(print)", CannotTrace, "line 2: the script starts processes"),
    ("for", ScriptFailed, "SyntaxError"),
    ("torch.save({}, 'model.pt')\nopen('model.pt', 'rb')", CannotTrace,
     "train.py, line 3: the script loads model.pt, which it saved before"),
    ("torch.from_dlpack(torch.ones(3, device='cuda'))", CannotTrace, "train.py, line 2: a trace cannot do this"),
    ("from torch.nn.attention.flex_attention import flex_attention\n"
     "flex_attention(*torch.ones(3, 1, 1, 16, 16, device='cuda'))", CannotTrace,
     "train.py, line 3: flex_attention() is not compiled"),
    ("counts = torch.bincount(torch.rand(8, 4, device='cuda').argmax(1), minlength=4).tolist()\n"
     "torch.ones(8, device='cuda').split(counts)", CannotTrace,
     "train.py, line 2 reads a whole number from the GPU, which a trace makes up, and then"),
    ("torch.rand(8, device='cuda').argmax().item()\nmodel = torch.nn.Linear(1, 1).to('cuda')\n"
     "model(torch.ones(1, device='cuda'))\nraise ValueError('another phase')", ScriptFailed, "another phase"),
])
def test_what_only_a_trace_cannot_do_is_told_from_what_the_script_does_wrong(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: type[FitError], says: str) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{code}\n", encoding="utf-8")
    with pytest.raises(error) as raised:
        run([str(script)], "4070", "", "", 4, "")
    assert says in f"{raised.value.what} {raised.value.fix}"


@pytest.mark.parametrize(("values", "steps"), [("model(unknown)", 2), ("unknown", 1)])
def test_a_script_that_cannot_be_traced_to_its_end_is_said_to_be_traceable_up_to_a_step(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: str, steps: int) -> None:
    """The trace ends with the first module that is called after that step."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "train.py"
    script.write_text("import torch\n"
                      "model = torch.nn.Linear(4, 4).to('cuda')\n"
                      "optimizer = torch.optim.AdamW(model.parameters())\n"
                      "for _ in range(2):\n"
                      "    loss = model(torch.ones(2, 4, device='cuda')).sum()\n"
                      "    loss.backward()\n"
                      "    optimizer.step()\n"
                      "unknown = torch.empty(2, 4, device='cuda').softmax(0)\n"
                      f"{values}.nonzero()\n", encoding="utf-8")
    with pytest.raises(CannotTrace, match="line 9: aten") as raised:
        run([str(script)], "4070", "", "", 4, "")
    assert raised.value.fix.endswith(f"--steps={steps} stops before this line.")
    assert len(run([str(script)], "4070", "", "", steps, "").steps) == steps


def test_a_script_that_asks_for_its_peak_gets_the_peak_in_the_allocators_units() -> None:
    with recording(Recorder(), RTX):
        kept = torch.empty(100, device="cuda")  # 400 bytes
        passing = torch.empty(1000, device="cuda")
        del passing
        assert torch.cuda.memory_allocated() == 512
        assert torch.cuda.max_memory_allocated() == 512 + 4096
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 512
        del kept


@pytest.mark.ci
@pytest.mark.xdist_group("compiler")
def test_a_compiled_model_that_returns_its_cache_is_planned_by_the_compiler() -> None:
    """As models of transformers do by default: a key-value cache, made of an empty tensor. Something else is compiled
    first, before transformers has loaded what models return."""
    transformers = pytest.importorskip("transformers")
    recorder = Recorder()
    with recording(recorder, RTX):
        torch.compile(nn.Linear(4, 4).to("cuda"))(torch.ones(2, 4, device="cuda"))
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=512))
        compiled = torch.compile(model.to("cuda"))
        tokens = torch.randint(0, 512, (2, 16), device="cuda")
        compiled(tokens, labels=tokens).loss.backward()
    assert recorder.compiled
    assert recorder.unplanned == ""


def test_checkpoints_are_not_written_and_the_script_goes_on(tmp_path: Path) -> None:
    """It saves to a temporary name and renames, copies the best one, deletes an old one, prints a size."""
    name = str(tmp_path / "model.pt")
    (tmp_path / "kept.txt").write_text("the script's own", encoding="utf-8")
    with saving_nothing():
        torch.save({"weight": torch.ones(3)}, f"{name}.tmp")
        os.replace(f"{name}.tmp", name)
        shutil.copyfile(name, f"{name}.best")
        assert os.path.getsize(f"{name}.best") == 0
        Path(f"{name}.best").unlink()
        os.replace(tmp_path / "kept.txt", tmp_path / "renamed.txt")
        with pytest.raises(Untraceable, match="which it saved before, and a trace saves nothing"):
            torch.load(name)
        with pytest.raises(FileNotFoundError):
            os.remove(f"{name}.best")
    assert [each.name for each in tmp_path.iterdir()] == ["renamed.txt"]
    torch.save({}, name)
    assert torch.load(name) == {}


def test_a_large_tensor_on_the_cpu_has_values_that_are_made_up() -> None:
    """An image grid, a histogram of weights, predictions: code that reads them goes on."""
    recorder = Recorder()
    with recording(recorder, RTX):
        image = torch.rand(3, 400, 400, device="cuda")
        before = recorder.allocated
        on_cpu = image.cpu()
        assert on_cpu.numpy().shape == (3, 400, 400)
        assert len(image.tolist()) == 3
        assert on_cpu.cpu() is on_cpu
        assert recorder.allocated == before
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            image.numpy()


@pytest.mark.parametrize(("use", "says"), [
    (lambda: nn.Linear(4, 4).cuda()(torch.ones(2, 4)), "found at least two devices"),
    (lambda: nn.Linear(1024, 1024)(torch.ones(2, 1024, device="cuda")), "found at least two devices"),
    (lambda: nn.Embedding(9, 4).cuda()(torch.ones(2, dtype=torch.int64)), "found at least two devices"),
    (lambda: nn.Embedding(9, 4).cuda()(torch.tensor([9]).cuda()), "index out of range"),
    (lambda: nn.Linear(4, 4).cuda().half()(torch.ones(2, 4).cuda()), "must have the same dtype"),
    (lambda: nn.Conv2d(3, 4, 3).cuda().half()(torch.ones(1, 3, 8, 8).cuda()), "should be the same"),
])
def test_what_a_gpu_refuses_is_refused(use: Callable[[], object], says: str) -> None:
    with recording(Recorder(), RTX), pytest.raises((RuntimeError, IndexError), match=says):
        use()


def test_cpu_tensors_may_index_and_scale_tensors_of_the_gpu() -> None:
    with recording(Recorder(), RTX):
        x = torch.ones(10, 4, device="cuda") * torch.tensor(2.0)
        assert x[torch.randperm(10)[:3]].shape == (3, 4)
        x[torch.tensor([0, 1])] = 0.0
        assert torch.empty(3, pin_memory=True).to("cuda").is_cuda


def test_packed_sequences_have_the_sizes_of_their_lengths() -> None:
    with recording(Recorder(), RTX):
        rnn = nn.GRU(4, 8, batch_first=True).to("cuda")
        for lengths in ([5, 2], [3, 3]):  # of batches of the same shape
            packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 5, 4, device="cuda"), torch.tensor(lengths),
                                                       batch_first=True)
            out, _ = nn.utils.rnn.pad_packed_sequence(rnn(packed)[0], batch_first=True)
            assert out.shape == (2, max(lengths), 8)


@pytest.mark.parametrize("lengths", [[7, 3, 5, 1], torch.tensor([7, 3, 5, 1]), "gpu"], ids=["list", "cpu", "gpu"])
def test_the_table_of_ctc_loss_is_as_long_as_the_longest_target(lengths: Any) -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        scores = torch.ones(50, 4, 20, device="cuda", requires_grad=True)
        given = torch.tensor([7, 3, 5, 1]).cuda() if lengths == "gpu" else lengths
        loss = nn.functional.ctc_loss(scores.log_softmax(-1), torch.ones(4, 9, dtype=torch.int64, device="cuda"),
                                      [50] * 4 if isinstance(given, list) else torch.full((4,), 50), given)
        loss.backward()
    assert [tensor.shape for tensor in recorder.tensors if tensor.op == "aten._ctc_loss.default" and tensor.shape] == [
        (4, 50, 15), (4,)]
    assert scores.grad is not None
    assert scores.grad.shape == scores.shape


def test_operations_in_place_that_change_a_shape_change_it() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        tensor, out = torch.ones(2, 3, 5, device="cuda"), torch.empty(0, device="cuda")
        assert tensor.transpose_(0, 1).unsqueeze_(0).shape == (1, 3, 2, 5)
        assert torch.mul(tensor, 2, out=out).shape == out.shape == (1, 3, 2, 5)
        spectrum = torch.stft(torch.ones(4, 1600, device="cuda"), 400, 160, return_complex=True,
                              window=torch.hann_window(400, device="cuda"))
        assert spectrum.shape == (4, 201, 11)
        grown, events = torch.empty(1000, device="cuda"), recorder.length
        grown.resize_(2000)
        assert [(alloc, block.nbytes) for alloc, block in recorder.events[events:] if block is not None] == [
            (True, 8000), (False, 4000)]
        before = torch.cuda.memory_allocated()
        del grown
        assert before - torch.cuda.memory_allocated() == 8192


def test_a_model_that_was_called_on_the_host_moves_to_the_gpu() -> None:
    with recording(Recorder(), RTX):
        layers = [nn.Linear(4, 4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
                  nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))]
        model = nn.Sequential(*layers)
        kept = model(torch.ones(2, 4))
        optimizer = torch.optim.SGD(model.to("cuda").parameters(), 0.1)
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
        assert kept.device.type == "cpu"
        assert {each.device.type for each in model.parameters()} == {"cuda"}
        assert all(each.grad is not None and each.grad.is_cuda for each in model.parameters())


def test_a_compiled_block_can_be_checkpointed() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to("cuda")
        block.compile()
        for _ in range(2):
            x = torch.ones(8, 64, device="cuda", requires_grad=True)
            torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert recorder.compiled
    assert not recorder.unplanned


def test_numbers_that_are_compared_are_1_and_where_takes_the_known_side() -> None:
    with recording(Recorder(), RTX):
        scores, finished = torch.randn(2, 4, device="cuda"), torch.zeros(2, 4, dtype=torch.bool, device="cuda")
        worst = torch.where(finished, scores.min(dim=1, keepdim=True)[0], -1e9)
        assert bool((scores[:, :1] > worst).any())        # beam search of transformers goes on
        assert not bool((scores > scores).any())
        assert bool((scores >= 1.0).all())


def test_a_script_without_an_optimizer_stops_after_as_many_backward_passes() -> None:
    def train() -> None:
        model = nn.Linear(8, 8).to("cuda")
        for _ in range(10):
            model(torch.ones(2, 8).to("cuda")).sum().backward()
            for each in model.parameters():
                each.data.add_(each.grad, alpha=-0.1)  # type: ignore[arg-type]

    recorder = Recorder()
    with recording(recorder, RTX, 3), pytest.raises(StepsDone):
        train()
    assert len(recorder.steps) == 3
    assert NO_OPTIMIZER in recorder.notes


@pytest.mark.parametrize("enabled", [True, False])
def test_loss_scaling_is_reported_with_the_steps_that_it_may_skip(enabled: bool) -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        model, scaler = nn.Linear(4, 4).to("cuda"), torch.amp.GradScaler("cuda", enabled=enabled)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler.scale(model(torch.ones(2, 4, device="cuda")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(recorder.steps) == 1
    assert (SKIPPED_STEPS in recorder.notes) == enabled


def test_parameters_of_all_optimizers_are_counted_and_their_states_belong_to_them() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        models = [nn.Linear(300, 300, bias=False).to("cuda") for _ in range(2)]
        optimizers = [torch.optim.Adagrad(each.parameters()) for each in models]  # makes its state at once
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 300, device="cuda")).sum().backward()
            optimizer.step()
    assert recorder.params == 2 * 90_000
    assert [each.owner for each in recorder.tensors if each.op == "aten.full_like.default"] == ["optimizer"] * 2


def test_attention_of_a_model_of_characters_is_not_taken_for_logits() -> None:
    """It has more positions than characters."""
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.characters, self.positions, self.head = nn.Embedding(65, 32), nn.Embedding(128, 32), nn.Linear(32, 65)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.characters(tokens) + self.positions.weight
            return self.head((x @ x.transpose(1, 2)).softmax(-1) @ x)  # type: ignore[no-any-return]

    recorder = Recorder()
    with recording(recorder, RTX):
        model, tokens = Small().to("cuda"), torch.ones(2, 128, dtype=torch.int64).to("cuda")
        for _ in range(2):
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    owners = {tensor.shape: tensor.owner for tensor in recorder.tensors if tensor.phase == "forward"}
    assert owners[2, 128, 128] == "attention"
    assert owners[256, 65] == "logits"


def test_a_part_of_the_forward_pass_without_gradients_is_no_evaluation() -> None:
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return x + 1

    recorder = Recorder()
    with recording(recorder, RTX):
        nn.Sequential(nn.Linear(4, 4), Part()).to("cuda")(torch.ones(2, 4, device="cuda"))
    assert {name for name, _ in recorder.phases} == {"load", "forward"}


def test_names_of_cuda_tensor_types_work() -> None:
    with recording(Recorder(), RTX):
        x = torch.cuda.FloatTensor(2, 3).normal_()
        assert isinstance(x, torch.cuda.FloatTensor)
        assert not isinstance(x.long(), torch.cuda.FloatTensor)
        assert torch.ones(2).type(torch.cuda.HalfTensor).dtype == torch.float16
        assert torch.ones(2).type("torch.cuda.LongTensor").is_cuda
        assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]


def test_optimizers_that_keep_numbers_on_the_gpu_read_them() -> None:
    with recording(Recorder(), RTX), torch.device("cuda"):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.NAdam(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert optimizer.state[model.weight]["mu_product"].item() < 1


def test_distributions_accept_what_they_sample() -> None:
    with recording(Recorder(), RTX):
        choice = torch.distributions.Categorical(logits=torch.randn(4, 10, device="cuda"))
        assert choice.log_prob(choice.sample()).shape == (4,)
        assert torch.distributions.Beta(torch.ones(1, device="cuda"), torch.ones(1, device="cuda")).sample().is_cuda


def test_a_padded_transformer_encoder_can_be_evaluated() -> None:
    recorder = Recorder()
    with recording(recorder, RTX), torch.no_grad():
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1).to("cuda").eval()
        padding = torch.zeros(2, 5, dtype=torch.bool, device="cuda")
        assert encoder(torch.ones(2, 5, 16, device="cuda"), src_key_padding_mask=padding).shape == (2, 5, 16)
    assert NO_FAST_PATH in recorder.notes


def test_the_profiler_asks_no_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with recording(Recorder(), RTX), torch.profiler.profile(activities=activities):
        torch.ones(2, device="cuda").sum()
    assert "CUDA" not in capfd.readouterr().err


def test_memory_statistics_are_those_of_the_trace() -> None:
    with recording(Recorder(), RTX):
        torch.cuda.memory._record_memory_history()
        assert torch.cuda.memory_reserved() == 0
        free, _ = torch.cuda.mem_get_info()
        kept = torch.empty(100, device="cuda")
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 512
        assert torch.cuda.memory_stats()["reserved_bytes.all.peak"] == 2 * MiB
        assert torch.cuda.memory_stats()["num_ooms"] == 0
        torch.empty(50 * MiB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() == free - torch.cuda.mem_get_info()[0] == 52 * MiB
        torch.cuda.empty_cache()
        assert (torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()) == (2 * MiB, 52 * MiB)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_reserved() == 2 * MiB
        del kept


def test_data_of_a_tensor_is_replaced_by_data_on_the_other_device() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        layer = nn.Linear(8, 8)
        weight = layer.weight
        weight.data = weight.data.cuda()
        assert layer.weight is weight
        assert (weight.is_cuda, weight.requires_grad, type(weight)) == (True, True, nn.Parameter)
        assert recorder.allocated == 512
        weight.data = weight.data.cpu()
        assert not weight.is_cuda
        assert recorder.allocated == 0


def test_a_list_of_losses_on_the_gpu_becomes_a_tensor_of_the_host() -> None:
    with recording(Recorder(), RTX):
        losses = [torch.ones(3, device="cuda").mean() for _ in range(2)]
        assert torch.tensor(losses).device.type == "cpu"
        assert torch.tensor([losses], device="cuda").shape == (1, 2)


def test_large_and_small_tensors_of_the_host_work_together() -> None:
    """The large one has no storage."""
    with recording(Recorder(), RTX):
        large = torch.empty(512, 1024)
        assert (large + torch.ones(1024)).shape == (512, 1024)
        assert torch.cat([large, torch.ones(2, 1024)]).device.type == "cpu"


def test_an_optimizer_that_steps_in_a_hook_of_the_backward_pass_has_its_own_phase() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)).to("cuda")
        optimizers = {each: torch.optim.AdamW([each]) for each in model.parameters()}
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
        model(torch.ones(2, 300, device="cuda")).sum().backward()
    states = [tensor for tensor in recorder.tensors if tensor.op == "aten.zeros_like.default"]
    assert {(tensor.phase, tensor.owner) for tensor in states} == {("optimizer", "optimizer")}
    assert len(states) == 2 * 4


def test_the_classes_of_a_loss_over_images_are_in_its_second_dimension() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        classes, image = nn.Embedding(12, 4).to("cuda"), torch.zeros(2, 8, 30, dtype=torch.int64, device="cuda")
        positions = nn.Embedding(30, 4).to("cuda")
        scores = (classes(image) + positions(torch.arange(30, device="cuda"))) @ classes.weight.t()
        nn.functional.cross_entropy(scores.movedim(-1, 1), image)
    assert recorder.vocabulary == 12


def test_values_of_an_empty_tensor_are_not_kept() -> None:
    """Nothing tells when its storage is freed, and the next may have the same address."""
    values, tensor = Values(), torch.empty(0, device="meta")
    values.know(tensor, torch.empty(0))
    assert values.of(tensor) is None


def test_estimate_changes_neither_model_nor_optimizer_and_knows_autocast() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    before, optimizer = copy.deepcopy(model.state_dict()), torch.optim.AdamW(model.parameters())
    plans = [fitgpt.estimate(model, torch.ones(4096, 256), optimizer, gpu="4070", loss=torch.sum, autocast=dtype)
             for dtype in (None, torch.bfloat16)]
    assert not optimizer.state
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [len(plan.steps) for plan in plans] == [4, 4]
    casts = [share.nbytes for plan in plans for share in plan.forecast.owners_at_peak if share.owner == "casts"]
    assert casts == [2 * 256 * 256]  # the second weight, which the backward pass needs, in bfloat16
