"""The model is nanoGPT's: names, counts, arithmetic; and recomputing changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fitgpt import GPT, GPTConfig
from fitgpt.config.memory_savers import POLICIES
from fitgpt.engine import block, ops
from tests.helpers import reference_loss

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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bias", [True, False])
def test_every_recompute_policy_gives_gpt2s_gradients_in_float64(policy: str, bias: bool) -> None:
    model = build(replace(TINY, bias=bias), torch.float64).double()
    model.recompute_policies = [policy] * 3
    idx, targets = batch()
    ours = torch.autograd.grad(model(idx, targets)[1], list(model.parameters()))
    theirs = torch.autograd.grad(reference_loss(model, idx, targets), list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", POLICIES)
def test_in_half_precision_the_gradients_error_stays_within_that_of_autocast(policy: str, dtype: torch.dtype) -> None:
    """Against a float64 reference, beside the error of the plain computation: autocast over the written-out GPT-2."""
    model = build(replace(TINY, n_embd=64))
    idx, targets = batch()
    parameters = list(model.parameters())
    with torch.autocast("cpu", dtype):
        plain = torch.autograd.grad(reference_loss(model, idx, targets) * 64, parameters)
    exact = build(replace(TINY, n_embd=64)).double()
    truth = torch.autograd.grad(reference_loss(exact, idx, targets) * 64, list(exact.parameters()))
    model.compute_dtype, model.recompute_policies = dtype, [policy] * 3
    model.accumulate(idx, targets, torch.tensor(64.0))

    def error(gradients: list[Tensor]) -> float:
        return sum((g.double() - t).square().sum().item() for g, t in zip(gradients, truth, strict=True)) ** 0.5

    assert error([p.grad for p in parameters]) <= 1.5 * error(list(plain))


def test_each_recompute_policy_saves_fewer_bytes_than_the_one_before() -> None:
    def kept_bytes(policy: str) -> int:
        model = build(dtype=torch.bfloat16)
        x = torch.randn(4, 16, 32)
        _, kept = block.forward(x, next(model.blocks()).weights(), model._block_options(), policy)
        return sum(t.nbytes for t in kept.tensors.values()) + (kept.attended.out.nbytes if kept.attended else 0)

    rows = 4 * 16 * 32
    sizes = {policy: kept_bytes(policy) // rows for policy in POLICIES}
    assert sizes == {"all": 30, "matmuls": 18, "no_mlp_up": 10, "attention_proj": 4, "attention": 2, "input": 0}


def test_accumulating_twice_adds_up() -> None:
    model, (idx, targets) = build(), batch()
    model.accumulate(idx, targets, torch.tensor(1.0))
    once = [p.grad.clone() for p in model.parameters()]
    model.accumulate(idx, targets, torch.tensor(2.0))
    for first, p in zip(once, model.parameters(), strict=True):
        assert torch.allclose(p.grad, 3 * first, rtol=1e-4, atol=1e-6)


def test_layers_may_have_different_recompute_policies() -> None:
    model, (idx, targets) = build(), batch()
    model.accumulate(idx, targets, torch.tensor(1.0))
    same = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.recompute_policies = ["input", "no_mlp_up", "all"]
    model.accumulate(idx, targets, torch.tensor(1.0))
    assert all(torch.allclose(a, p.grad, rtol=1e-5, atol=1e-7) for a, p in zip(same, model.parameters(), strict=True))


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


def test_a_sequence_longer_than_the_block_is_rejected() -> None:
    with pytest.raises(ValueError, match="17 tokens do not fit a block_size of 16"):
        build()(torch.zeros(1, 17, dtype=torch.long))


def test_compiled_functions_have_one_graph_per_shape_for_any_number_of_layers() -> None:
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    model, plain, (idx, targets) = build(), build(), batch()
    torch._dynamo.reset()
    model.ops = ops.Pointwise(*(torch.compile(f, fullgraph=True, dynamic=False, backend=counter)
                                      for f in ops.EAGER))
    for _ in range(3):
        loss = model.accumulate(idx, targets, torch.tensor(1.0))
        expected = plain.accumulate(idx, targets, torch.tensor(1.0))
    assert torch.allclose(loss, expected)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    # norm, norm_of_sum, add_both, gelu, gelu_backward_; norm_backward_ with and without a sum, and for the last norm
    assert counter.frame_count == 8
    model.eval().token_losses(idx[:2], targets[:2])
    model.token_losses(idx[:2], targets[:2])
    assert counter.frame_count == 8 + 4  # another shape: the four forward functions once more


def test_beyond_our_recompile_limit_is_an_error_and_not_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that takes fallback plans after running out of memory needs more shapes than torch's own limit, 8."""
    import torch._dynamo
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch._dynamo.testing import CompileCounterWithBackend

    from fitgpt.training.worker import as_fit_error

    assert ops.RECOMPILE_LIMIT > 8
    monkeypatch.setattr(ops, "RECOMPILE_LIMIT", 10)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    ops.compiled(fused=False)  # sets the limit
    gelu = torch.compile(ops.gelu, fullgraph=True, dynamic=False, backend=counter)
    for rows in range(1, 11):
        gelu(torch.zeros(rows, 4))
    assert counter.frame_count == 10
    with pytest.raises(FailOnRecompileLimitHit) as limit:
        gelu(torch.zeros(11, 4))
    shown, _ = as_fit_error(limit.value)
    assert shown.exit_code == 5
    assert "--compile=False" in shown.fix
