"""The written tape against the real engine's own: every allocation and every free, in order and to the byte."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import pytest
import torch

from fitgpt.config.optimizers import OPTIMIZERS
from fitgpt.config.run_config import RunConfig
from fitgpt.engine import block
from fitgpt.memory.platform import Platform
from fitgpt.memory.tape import EMPTY_CACHE, Event
from fitgpt.tapes import engine as engine_tape
from fitgpt.tapes import shapes
from tests.helpers import skip_without_library
from tests.tapes.engine_trace import trace, trace_sampling

# No two sizes are alike by chance: the width is no power of two, the block no multiple of anything, and the last of the
# loss's chunks is a short one.
SHAPE: dict[str, Any] = {
    "n_layer": 2, "n_head": 5, "n_embd": 320, "vocab_size": 1013, "batch_size": 3, "block_size": 257, "loss_chunk": 300,
    "gradient_accumulation_steps": 2, "bias": True, "dtype": "bfloat16", "compile": False, "eval_batch_size": 2}
PADDED = {"n_head": 7, "n_embd": 294}       # heads of 42 numbers, padded to 48 …
PADDED_LESS = {"n_head": 9, "n_embd": 324}  # … and of 36, padded to 40
IN_BACKWARD = {"step_in_backward": True, "grad_clip": 0.0, "gradient_accumulation_steps": 1}

# cuDNN's attention, flash, memory-efficient. 2.11 keeps the workspaces of matmuls.
H200, ADA, TURING = Platform((9, 0), "2.11"), Platform((8, 9)), Platform((7, 5))
WINDOWS = Platform((8, 9), compiles=False)
BY_HAND = Platform(kernel="math")
KERNELS = {"cudnn": H200, "flash": ADA, "efficient": TURING, "by hand": BY_HAND}
# Where a dimension is 1, a view does what is a copy elsewhere.
SINGLE: dict[str, dict[str, Any]] = {
    "one sequence": {"batch_size": 1}, "one sequence evaluated": {"eval_batch_size": 1},
    "one head": {"n_head": 1, "n_embd": 128}, "one head, padded": {"n_head": 1, "n_embd": 42},
    "one sequence, one head, padded, dropout": {"batch_size": 1, "eval_batch_size": 1, "n_head": 1, "n_embd": 42,
                                                "dropout": 0.1, "saved_activations": "input"}}

CASES: dict[str, tuple[Platform, dict[str, Any]]] = {
    "bfloat16": (H200, {}),
    "float16, no bias, dropout": (H200, {"dtype": "float16", "bias": False, "dropout": 0.1}),
    "float32": (H200, {"dtype": "float32"}),
    "float32, no bias, dropout, padded": (H200, {"dtype": "float32", "dropout": 0.1, "bias": False, **PADDED}),
    "padded, dropout": (H200, {"dropout": 0.1, **PADDED}),
    "flash, padded": (ADA, PADDED_LESS),
    "flash, dropout": (ADA, {"dropout": 0.1}),
    "efficient, float16, padded": (TURING, {"dtype": "float16", **PADDED}),
    "by hand, padded": (BY_HAND, PADDED),
    "by hand, dropout": (BY_HAND, {"dropout": 0.1}),
    "by hand, float32, dropout, inputs saved": (BY_HAND, {"dtype": "float32", "dropout": 0.1,
                                                          "saved_activations": "input"}),
    **{f"recompute {policy}": (H200, {"saved_activations": policy})
       for policy in ("all", "no_mlp_up", "attention_proj", "attention", "input", "1*all,1*attention")},
    "recompute all, float32": (H200, {"saved_activations": "all", "dtype": "float32"}),
    "recompute attention, dropout, padded": (H200, {"saved_activations": "attention", "dropout": 0.1, **PADDED}),
    "grad_checkpoint, dropout": (H200, {"grad_checkpoint": True, "dropout": 0.1}),
    "bfloat16 weights": (H200, {"weights": "bfloat16"}),
    "bfloat16 residual, dropout": (H200, {"residual": "bfloat16", "dropout": 0.1}),
    "bfloat16 weights and residual": (H200, {"weights": "bfloat16", "residual": "bfloat16"}),
    "bfloat16 weights, float16": (H200, {"weights": "bfloat16", "dtype": "float16", "saved_activations": "input"}),
    "bfloat16 weights and residual, float32": (H200, {"weights": "bfloat16", "residual": "bfloat16",
                                                      "dtype": "float32", "dropout": 0.1}),
    "bfloat16 weights, embedding's rows sorted": (H200, {"weights": "bfloat16", "batch_size": 13}),
    "one chunk of loss, no accumulation": (H200, {"loss_chunk": 0, "gradient_accumulation_steps": 1}),
    "a larger evaluation of shorter blocks": (H200, {"eval_batch_size": 7, "eval_block_size": 190}),
    "kept casts": (H200, {"casts": "kept"}),
    "kept casts, captured, float16, bfloat16 weights": (H200, {"casts": "kept", "cuda_graphs": True, "dtype": "float16",
                                                               "weights": "bfloat16"}),
    "kept casts, float32": (H200, {"casts": "kept", "dtype": "float32"}),
    "kept casts, only an evaluation": (H200, {"casts": "kept", "eval_only": True, "gradients": "kept"}),
    "kept gradients": (H200, {"gradients": "kept"}),
    "late states": (H200, {"states": "late"}),
    "late states, captured, adam8bit": (H200, {"states": "late", "cuda_graphs": True, "optimizer": "adam8bit"}),
    "late states of muon, all kept": (H200, {"states": "late", "optimizer": "muon", "casts": "kept",
                                             "gradients": "kept"}),
    **{name: (H200, {"optimizer": name}) for name in OPTIMIZERS if name != "adamw"},  # the other cases have AdamW
    "muon, float32, no bias": (H200, {"optimizer": "muon", "dtype": "float32", "bias": False}),
    "adam8bit by bitsandbytes": (H200, {"optimizer": "adam8bit", "adam8bit": "bitsandbytes"}),
    "adam8bit by bitsandbytes, wide biases, float16, late, captured": (H200, {
        "optimizer": "adam8bit", "adam8bit": "bitsandbytes", "dtype": "float16", "n_head": 4, "n_embd": 1032,
        "states": "late", "cuda_graphs": True}),
    "offload optimizer": (H200, {"offload": "optimizer"}),
    "offload optimizer, bfloat16 weights": (H200, {"offload": "optimizer", "weights": "bfloat16"}),
    "offload gradients": (H200, {"offload": "gradients"}),
    "offload gradients, bfloat16 weights": (H200, {"offload": "gradients", "weights": "bfloat16"}),
    "step in backward": (H200, IN_BACKWARD),
    "step in backward, bfloat16 weights": (H200, {**IN_BACKWARD, "weights": "bfloat16"}),
    "no Triton": (WINDOWS, {}),
    "no Triton, float32": (WINDOWS, {"dtype": "float32", "bias": False}),
    "no Triton, adam8bit by bitsandbytes": (WINDOWS, {"optimizer": "adam8bit", "adam8bit": "bitsandbytes"}),
    "no Triton, bfloat16 weights": (WINDOWS, {"weights": "bfloat16"}),
    "no Triton, step in backward": (WINDOWS, IN_BACKWARD),
    "no Triton, adam8bit": (WINDOWS, {"optimizer": "adam8bit", "weights": "bfloat16"}),
    # Compiled functions allocate their results only; CUDA graphs allocate when they are captured:
    "compiled": (H200, {"compile": True, "cuda_graphs": False}),
    "compiled, dropout, two policies": (H200, {"compile": True, "dropout": 0.1,
                                               "saved_activations": "1*input,1*no_mlp_up"}),
    "compiled, no bias, bfloat16 all through": (H200, {"compile": True, "cuda_graphs": False, "bias": False,
                                                       "weights": "bfloat16", "residual": "bfloat16"}),
    "compiled, captured": (H200, {"compile": True}),
    "captured": (H200, {"cuda_graphs": True}),
    **{f"{name}, {kernel}": (platform, {"dtype": "float16", **options})
       for name, options in SINGLE.items() for kernel, platform in KERNELS.items()},
    "one sequence, float32": (H200, {"batch_size": 1, "eval_batch_size": 1, "dtype": "float32"}),
    "one sequence, captured": (H200, {"batch_size": 1, "eval_batch_size": 1, "cuda_graphs": True}),
    "one sequence, compiled, bfloat16 weights": (H200, {"batch_size": 1, "compile": True, "cuda_graphs": False,
                                                        "weights": "bfloat16", "residual": "bfloat16"}),
    "one sequence, one head, offload gradients": (H200, {"batch_size": 1, "n_head": 1, "n_embd": 42,
                                                         "offload": "gradients"}),
    "one sequence, step in backward": (H200, {"batch_size": 1, **IN_BACKWARD}),
    "deterministic": (H200, {"deterministic": True}),
    "deterministic, float32, rows sorted": (H200, {"deterministic": True, "dtype": "float32", "batch_size": 13}),
    "deterministic, float16, compiled, captured": (H200, {"deterministic": True, "dtype": "float16", "compile": True}),
    "deterministic, bfloat16 residual, dropout": (ADA, {"deterministic": True, "residual": "bfloat16", "dropout": 0.1}),
    "deterministic, step in backward": (H200, {"deterministic": True, **IN_BACKWARD}),
    "deterministic, offload gradients": (H200, {"deterministic": True, "offload": "gradients"}),
    "only an evaluation": (H200, {"eval_only": True}),
    "only an evaluation, captured, bfloat16 weights": (H200, {"eval_only": True, "compile": True,
                                                              "weights": "bfloat16"}),
}

# Keys of a block that is no multiple of anything, and the vocabularies on both sides of topk's two ways.
SAMPLED: dict[str, tuple[Platform, dict[str, Any]]] = {
    "bfloat16": (H200, {}),
    "float16, no bias, many tokens": (H200, {"dtype": "float16", "bias": False, "vocab_size": 20011}),
    "float32": (H200, {"dtype": "float32"}),
    "padded": (H200, PADDED),
    "float32, padded": (H200, {"dtype": "float32", **PADDED}),
    "flash": (ADA, {}),
    "efficient, float32, padded": (TURING, {"dtype": "float32", **PADDED}),
    "trained compiled, in bfloat16": (H200, {"compile": True, "weights": "bfloat16", "residual": "bfloat16"}),
    "fewer tokens than are kept": (H200, {"vocab_size": 150}),
    **{f"one head, {kernel}": (platform, {"dtype": "float16", "n_head": 1, "n_embd": 128})
       for kernel, platform in KERNELS.items()},
    "one head, padded": (H200, {"n_head": 1, "n_embd": 42}),
}

# What no trace of torch's operations can see, because it lives and dies inside one of them.
UNSEEN = {
    # the libraries' workspaces
    "cublas", "cublaslt", "cublas of CUDA graphs", "cublaslt of CUDA graphs", "matmul workspace",
    # the scratch of attention's backward kernels, and copies that some of them make of arguments in another layout
    "attention scratch", "attention delta", "attention sums", "d × out", "delta.sum", "d.relaid", "out.relaid",
    # partial results of a sum, and of a norm over all gradients
    "count scratch", "norms.partial",
    # what embedding_dense_backward sorts and sums by
    "rows.sorted", "rows.order", "rows.segments", "rows.partials", "rows.partial offsets", "rows.offsets", "rows.sums",
    # what a softmax finds wholly masked rows by, and topk its numbers
    "masked scores",
    "top k.value", "top k.rank", "top k.digits", "top k.counts", "top k.sums", "top k.above", "top k.equal",
    "top k.scan",
}
SMALLEST = 513  # up to 512 bytes the allocator gives the same block: the tape leaves out most scalars

Step = tuple[bool, int, str]  # an allocation or a free, its bytes, and whose they are


@pytest.mark.parametrize("case", CASES)
def test_the_engine_allocates_and_frees_what_the_tape_says_in_its_order(case: str,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    platform, options = CASES[case]
    skip_without_library(options)
    config = RunConfig(**SHAPE | options)
    written, seen = written_steps(config, platform), seen_steps(config, platform, monkeypatch)
    assert written.keys() == seen.keys()
    for phase in seen:
        assert not difference(written[phase], seen[phase]), f"{phase}:\n{difference(written[phase], seen[phase])}"


@pytest.mark.parametrize("case", SAMPLED)
def test_sampling_allocates_and_frees_what_the_tape_says_in_its_order(case: str,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    platform, options = SAMPLED[case]
    config = RunConfig(**SHAPE | {"block_size": 701} | options)
    written = [(event.alloc, event.nbytes, event.name) for event in engine_tape.write_sampling(config, platform).events
               if is_seen(event)]
    traced = trace_sampling(config, platform, engine_tape.SAMPLED_TOKENS, monkeypatch)
    seen = [(event.alloc, event.nbytes, event.maker) for event in traced if event.nbytes >= SMALLEST]
    assert not difference(written, seen), difference(written, seen)


def test_a_tensor_that_lives_too_long_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    config, held, linear = RunConfig(**SHAPE), list[torch.Tensor](), block.linear

    def holding(inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
        held[:] = [inputs]
        return linear(inputs, *rest)

    monkeypatch.setattr(block, "linear", holding)
    seen = seen_steps(config, H200, monkeypatch)
    assert "h1" in difference(written_steps(config, H200)["first_eval"], seen["first_eval"])


def test_an_allocation_of_another_size_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(**SHAPE)
    seen = seen_steps(config, H200, monkeypatch)
    monkeypatch.setattr(shapes.FUNCTIONAL, "layer_norm", lambda x, *_: shapes.new(x.shape, shapes.float64, "normed"))
    written = written_steps(config, H200)
    assert {phase for phase in seen if difference(written[phase], seen[phase])} == seen.keys() - {"load"}


def test_every_ignored_event_occurs_on_some_tape() -> None:
    tapes = [engine_tape.write(RunConfig(**SHAPE | options), platform) for platform, options in CASES.values()]
    tapes += [engine_tape.write_sampling(RunConfig(**SHAPE | options), platform)
              for platform, options in SAMPLED.values()]
    assert {unnumbered(event.name) for tape in tapes for event in tape.events} >= UNSEEN


# ---- both sides, as steps that can be compared

def written_steps(config: RunConfig, platform: Platform) -> dict[str, list[Step]]:
    tape, phases = engine_tape.write(config, platform), dict[str, list[Step]]()
    for phase, first, end in tape.phases:
        if phase not in ("save", "resume", "sample"):
            phases.setdefault("train" if phase == "step" else phase, []).extend(
                (event.alloc, event.nbytes, event.name) for event in tape.events[first:end] if is_seen(event))
    return phases


def is_seen(event: Event) -> bool:
    return event.nbytes >= SMALLEST and unnumbered(event.name) not in UNSEEN and event.name != EMPTY_CACHE


def unnumbered(name: str) -> str:
    return name.rstrip("0123456789").rstrip() or name


def seen_steps(config: RunConfig, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Step]]:
    return {phase: [(event.alloc, event.nbytes, event.maker) for event in events if event.nbytes >= SMALLEST]
            for phase, events in trace(config, platform, monkeypatch).items() if phase != "after"}


def difference(written: list[Step], seen: list[Step]) -> str:
    """Where the two first part, side by side; empty: nowhere."""
    pairs = list(zip_longest(in_one_order(written), in_one_order(seen), fillvalue=(False, 0, "nothing")))
    parts = next((place for place, (ours, theirs) in enumerate(pairs) if ours[:2] != theirs[:2]), None)
    if parts is None:
        return ""
    lines = [f"{describe(ours):45} | {describe(theirs)}" for ours, theirs in pairs[max(0, parts - 5):parts + 10]]
    return "\n".join(["written, and seen:", *lines])


def in_one_order(steps: list[Step]) -> list[Step]:
    """Frees with no allocation between them, smallest first: whichever goes first, the same memory is free after."""
    ordered, freed = list[Step](), list[Step]()
    for step in [*steps, (True, 0, "end")]:
        if step[0]:
            ordered += [*sorted(freed, key=lambda each: each[1]), step]
            freed = []
        else:
            freed.append(step)
    return ordered[:-1]


def describe(step: Step) -> str:
    alloc, nbytes, name = step
    return f"{'+' if alloc else '-'} {nbytes:>11,} {name}"
