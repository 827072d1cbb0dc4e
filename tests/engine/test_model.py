"""The model is nanoGPT's: names, counts, arithmetic; and recomputing changes nothing."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fitgpt import GPT, GPTConfig

TINY = GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=67, block_size=16, bias=True)


def build(config: GPTConfig = TINY, dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(1)
    model = GPT(config)
    model.compute_dtype = dtype
    return model


def batch(config: GPTConfig = TINY) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    tokens = torch.randint(config.vocab_size, (4, config.block_size + 1))
    return tokens[:, :-1], tokens[:, 1:]


def reference_loss(model: GPT, idx: Tensor, targets: Tensor) -> Tensor:
    """GPT-2 written out a second time, with attention by hand, from the parameters' names alone."""
    w = dict(model.named_parameters())
    C, H = model.config.n_embd, model.config.n_head

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        out = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    def linear(x: Tensor, name: str) -> Tensor:
        out = x @ w[f"{name}.weight"].t()
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    B, T = idx.shape
    x = w["transformer.wte.weight"][idx] + w["transformer.wpe.weight"][:T]
    for i in range(model.config.n_layer):
        h = f"transformer.h.{i}"
        q, k, v = (part.view(B, T, H, C // H).transpose(1, 2)
                   for part in linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(C, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(C // H)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C), f"{h}.attn.c_proj")
        up = linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        x = x + linear(up * 0.5 * (1 + torch.erf(up / math.sqrt(2))), f"{h}.mlp.c_proj")
    logits = norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].t()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(("shape", "printed"), [((6, 6, 384, 512), 29.94), ((12, 12, 576, 1024), 76.77),
                                                ((12, 12, 768, 1024), 123.59), ((12, 8, 512, 1024), 63.52)])
def test_parameter_counts_are_those_nanogpt_prints(shape: tuple[int, int, int, int], printed: float) -> None:
    layers, heads, width, block = shape
    config = GPTConfig(n_layer=layers, n_head=heads, n_embd=width, block_size=block, bias=False)
    with torch.device("meta"):
        model = GPT(config)
    assert round(model.get_num_params() / 1e6, 2) == printed
    assert sum(p.numel() for p in model.parameters()) == config.count_params()


@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_gpt2s_in_float64(bias: bool) -> None:
    config = GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=67, block_size=16, bias=bias)
    model = build(config, torch.float64).double()
    model.loss_chunk = 10
    idx, targets = batch(config)
    loss = model(idx, targets)[1]
    ours = torch.autograd.grad(loss, list(model.parameters()))
    reference = reference_loss(model, idx, targets)
    theirs = torch.autograd.grad(reference, list(model.parameters()))
    assert abs(loss.item() - reference.item()) < 1e-12
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-10


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_blocks_gives_bit_identical_gradients_and_can_be_switched_mid_run(dropout: float) -> None:
    model = build(GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=67, block_size=16, dropout=dropout))
    idx, targets = batch()

    def gradients() -> list[Tensor]:
        torch.manual_seed(3)
        return list(torch.autograd.grad(model(idx, targets)[1], list(model.parameters())))

    kept = gradients()
    model.gradient_checkpointing_enable()
    recomputed = gradients()
    model.gradient_checkpointing_disable()
    for a, b, c in zip(kept, recomputed, gradients(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_recomputing_keeps_less_for_backward() -> None:
    idx, targets = batch()

    def saved_bytes(config: GPTConfig) -> int:
        held: dict[int, int] = {}
        model = build(config)
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t: (held.__setitem__(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()), t)[1],
                lambda t: t):
            model(idx, targets)
        return sum(held.values())

    plain = saved_bytes(TINY)
    checkpointed = saved_bytes(GPTConfig(**{**TINY.__dict__, "grad_checkpoint": True}))
    assert checkpointed < plain / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_stay_float32_and_half_precision_only_rounds(dtype: torch.dtype) -> None:
    idx, targets = batch()
    exact = build()(idx, targets)[1]
    model = build(dtype=dtype)
    loss = model(idx, targets)[1]
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) < 0.02
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())


def test_called_without_targets_it_returns_only_the_last_positions_logits() -> None:
    model = build().eval()
    logits, loss = model(batch()[0])
    assert loss is None
    assert logits.shape == (4, 1, TINY.vocab_size)


def test_a_sequence_longer_than_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens do not fit a block_size of 16"):
        build()(torch.zeros(1, 17, dtype=torch.long))


def test_compiled_blocks_share_one_graph_and_give_the_same_loss() -> None:
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    import fitgpt.engine.model as model_file

    counter = CompileCounterWithBackend("aot_eager")
    model = build()
    expected = model(*batch())[1]
    torch._dynamo.reset()
    model._block = torch.compile(model_file.block_forward, fullgraph=True, dynamic=False, backend=counter)
    loss = model(*batch())[1]
    loss.backward()
    assert torch.allclose(loss, expected)
    assert counter.frame_count == 1  # three layers, one graph


def test_the_names_import_without_torch_until_the_model_is_asked_for() -> None:
    code = ("import sys, fitgpt; fitgpt.GPTConfig(); assert 'torch' not in sys.modules; "
            "fitgpt.GPT; assert 'torch' in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
