"""The tape of nanoGPT's train.py: what the loop, the autograd graph and compiled code hold, with every option."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.memory.platform import Platform
from fitgpt.memory.tape import Tape
from fitgpt.memory.timeline import replay, reserved_in_other_orders
from fitgpt.tapes import nanogpt as nanogpt_tape
from fitgpt.tapes.nanogpt import history_of, parameters

H200 = Platform((9, 0), "2.11", sms=132)
GPT2 = RunConfig(dtype="bfloat16", compile=True, vocab_size=50304)  # train.py's defaults
SMALL = RunConfig(n_layer=2, n_head=4, n_embd=64, batch_size=4, block_size=32, vocab_size=512,
                  gradient_accumulation_steps=4, dtype="float16", compile=False)
N, C, V, L = SMALL.batch_size * SMALL.block_size, SMALL.n_embd, SMALL.vocab_size, SMALL.n_layer


def write(run: RunConfig, history: tuple[int, ...] = ()) -> Tape:
    return nanogpt_tape.write(run, H200, history=history)


def bytes_by_owner(run: RunConfig, event: int) -> dict[str, int]:
    """Requested bytes after that many events, before the allocator rounds."""
    owners: dict[str, int] = {}
    for each in write(run).events[:event]:
        owners[each.owner] = owners.get(each.owner, 0) + (each.nbytes if each.alloc else -each.nbytes)
    return owners


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_add_up_to_the_models(bias: bool) -> None:
    run = replace(SMALL, bias=bias)
    assert sum(elements for _, elements, _ in parameters(run)) == run.gpt_config().count_params()


@pytest.mark.parametrize(("dtype", "bias", "dropout", "compiled", "accumulation", "width"), list(itertools.product(
    ("float32", "bfloat16", "float16"), (False, True), (0.0, 0.1), (False, True), (1, 5), (64, 36))))
def test_run_ends_with_weights_states_and_the_last_batch(dtype: str, bias: bool, dropout: float, compiled: bool,
                                                         accumulation: int, width: int) -> None:
    run = replace(SMALL, dtype=dtype, bias=bias, dropout=dropout, compile=compiled, n_embd=width,
                  gradient_accumulation_steps=accumulation)
    tape = write(run)
    last = {event.name: event for event in tape.events}  # what was allocated last is alive at the end
    kept = {(event.name.split(" ")[0].rstrip("'0123456789"), event.owner) for event in last.values()
            if event.alloc and event.owner not in ("weights", "optimizer")}
    workspaces = {("cublas", "workspace")} | ({("cublaslt", "workspace")} if bias else set())
    assert kept == workspaces | {("logits", "logits"), ("loss", "other"), ("X", "data")}
    weights = sum(elements for _, elements, _ in parameters(run))
    end = bytes_by_owner(run, len(tape.events))
    assert end["weights"] == 4 * weights
    state = 8 * weights + 4 * len(parameters(run))
    assert end["optimizer"] == state + (8 if dtype == "float16" else 0)  # the scale and its tracker
    assert end["logits"] == (4 if dtype == "float32" else 2) * N * V
    assert all(end[owner] == 0 for owner in ("activations", "casts", "gradients") if owner in end)
    assert replay(tape).failed is None


def test_eager_block_saves_36_bytes_per_token_and_channel() -> None:
    """And 16 bytes per token for its norms, 4 per token and head, and two scalars: as in a recorded graph."""
    def at_loss(layers: int) -> int:
        run = replace(SMALL, n_layer=layers)
        events = write(run).events
        start = next(i for i, event in enumerate(events) if event.name == "d_log_softmax")
        return bytes_by_owner(run, start)["activations"]

    assert at_loss(5) - at_loss(4) == 36 * N * C + 16 * N + 4 * N * SMALL.n_head + 16


def test_eager_logit_costs_12_bytes_in_the_backward_of_the_loss() -> None:
    events = write(SMALL).events
    at = next(i for i, event in enumerate(events) if event.name == "d_log_softmax")
    assert bytes_by_owner(SMALL, at + 1)["logits"] == 12 * N * V


def test_compiled_backward_holds_three_half_precision_arrays_of_logits() -> None:
    run = replace(SMALL, compile=True)
    at = next(i for i, event in enumerate(write(run).events) if event.name == "d_logits")
    assert bytes_by_owner(run, at + 1)["logits"] == 6 * N * V


def test_evaluation_holds_the_logits_of_training_and_of_the_previous_batch() -> None:
    run = replace(SMALL, vocab_size=50304)  # large enough for the loss to be the peak
    timeline = replay(write(run))
    peaks = timeline.peaks()
    first, later = (timeline.owners_at(peaks[phase].event)["logits"] for phase in ("first_eval", "eval"))
    assert first // (N * run.vocab_size) == 10
    assert later // (N * run.vocab_size) == 12


def test_casts_live_as_long_as_autocast_and_do_not_exist_in_float32() -> None:
    tape = write(SMALL)
    start = next(phase.start for phase in tape.phases if phase.name == "first_train")
    assert bytes_by_owner(SMALL, start)["casts"] == 0
    loss = next(i for i, event in enumerate(tape.events) if event.name == "d_log_softmax")
    assert bytes_by_owner(SMALL, loss)["casts"] == 2 * (12 * L * C * C + V * C)
    assert "casts" not in bytes_by_owner(replace(SMALL, dtype="float32"), len(tape.events))


def test_dropout_saves_a_mask_of_one_byte_per_element() -> None:
    def mask_bytes(run: RunConfig) -> int:
        return sum(event.nbytes for event in write(run, history=(1,)).events
                   if event.alloc and event.name.endswith(".mask"))

    assert mask_bytes(SMALL) == 0
    assert mask_bytes(replace(SMALL, dropout=0.1)) == (2 * L + 1) * N * C


def test_run_completes_under_the_limit_it_needs_and_not_2_mib_below() -> None:
    tape = write(replace(GPT2, n_layer=2, compile=False), history=(2, 2))
    least = replay(tape).needs
    assert replay(tape, least).failed is None
    failed = replay(tape, least - 2 * 2**20).failed_allocation
    assert failed is not None
    assert failed.alloc


@pytest.mark.parametrize(("micro_steps", "written"), [(1, 1), (2, 2), (3, 3), (6, 6), (7, 5), (40, 6), (41, 5)])
def test_many_micro_batches_are_written_as_few_of_the_same_parity(micro_steps: int, written: int) -> None:
    """In the recorded 77M run an odd number peaks 3.5 MiB higher than an even one; how many does not matter."""
    tape = write(replace(SMALL, gradient_accumulation_steps=micro_steps))
    last = tape.phases[-3]
    assert last[0] == "train"
    assert sum(event.alloc and event.name == "d_log_softmax" for event in tape.events[last[1]:last[2]]) == written


@pytest.mark.parametrize(("micro_steps", "events", "written"), [
    (1, 500, (1,) * 6), (40, 500, (16, 6, 6, 6, 6, 6)), (41, 500, (15, 5, 5, 5, 5, 5)), (12, 2000, (12, 6, 6, 6)),
    (4, 2000, (4, 4, 4, 4)), (40, 5000, (4, 4, 2)), (9, 5000, (3, 3, 3)), (4, 5000, (4, 4, 4)), (1, 5000, (1,) * 4)])
def test_more_iterations_are_written_of_shorter_micro_batches(micro_steps: int, events: int,
                                                              written: tuple[int, ...]) -> None:
    assert history_of(replace(GPT2, gradient_accumulation_steps=micro_steps), events) == written


def test_reserved_memory_is_a_range_where_addresses_decide() -> None:
    """The recorded 124M run: 16.0 GB measured; 18.5 GB if the driver returned ascending addresses."""
    tape = write(replace(GPT2, gradient_accumulation_steps=4, compile=False), history=(4, 4, 4))
    found = replay(tape).reserved, *reserved_in_other_orders(tape)
    low, high = min(found), max(found)
    assert low == replay(tape).reserved
    assert high - low > 2 * 10**9


def test_gradient_may_reuse_a_block_that_attention_allocated() -> None:
    """In float32 and with one sequence, wpe's gradient is as large as that of the values."""
    run = replace(SMALL, compile=True, dtype="float32", batch_size=1)
    assert replay(write(run)).failed is None


def test_kernels_are_timed_only_at_their_first_run() -> None:
    """The buffer that flushes the L2 cache exists in first calls only."""
    tape = write(replace(SMALL, compile=True))
    phases = {phase for phase, start, end in tape.phases
              if any(event.name == "timing" for event in tape.events[start:end])}
    assert phases == {"first_eval", "first_train"}


@pytest.mark.parametrize(("batch", "saved"), [(2, {"0.ln_1.normed"}), (3, {"tok_emb", "pos_emb", "0.ln_1.mean"})])
def test_first_norm_saves_embeddings_when_enough_sequences_share_them(batch: int, saved: set[str]) -> None:
    names = {event.name for event in write(replace(SMALL, compile=True, batch_size=batch)).events}
    assert names & {"0.ln_1.normed", "tok_emb", "pos_emb", "0.ln_1.mean"} == saved


def test_compiled_float32_backward_holds_the_gradient_of_the_logits_to_its_end() -> None:
    """Its matmul with the head's input is added to the embedding's gradient, which comes last."""
    def position(dtype: str) -> tuple[int, int]:
        events = write(replace(SMALL, compile=True, dtype=dtype), history=(1,)).events
        freed = next(i for i, event in enumerate(events) if event.name == "d_logits" and not event.alloc)
        return freed, next(i for i, event in enumerate(events) if event.name == "0.c_attn.weight.grad" and event.alloc)

    freed, first_layer = position("float32")
    assert freed > first_layer
    freed, first_layer = position("bfloat16")
    assert freed < first_layer


def logits_of(vocab: int, **options: Any) -> dict[str, int]:
    """Bytes of each array of logits of a compiled run of 4096 tokens."""
    run = replace(SMALL, compile=True, batch_size=16, block_size=256, vocab_size=vocab,
                  **{"n_embd": 384, "n_head": 6, **options})
    events = write(run).events
    return {event.name.split(" of X")[0]: event.nbytes for event in events if event.owner == "logits" and event.alloc}


@pytest.mark.parametrize(("dtype", "width", "columns"), [("bfloat16", 2, 50264), ("float16", 2, 50264),
                                                         ("float32", 4, 50260)])
def test_compiled_code_pads_the_vocabulary_to_16_bytes(dtype: str, width: int, columns: int) -> None:
    found = logits_of(50257, dtype=dtype)
    assert (found["logits"], found["zeros for logits"]) == (4096 * columns * width, 4096 * 50257 * width)
    assert "d_logits.padded for input_grad" in found
    assert "d_logits.padded for weight_grad" not in found
    assert set(logits_of(50304, dtype=dtype)) == {"logits", "zeros for logits", "d_logits"}


def test_wide_model_pads_the_gradient_of_the_logits_twice() -> None:
    for dtype in ("bfloat16", "float32"):
        assert "d_logits.padded for weight_grad" in logits_of(50257, dtype=dtype, n_embd=1024, n_head=16)


def test_rows_of_the_padded_gradient_of_the_logits_are_aligned_to_128_bytes() -> None:
    found = logits_of(50257, dtype="bfloat16")
    assert found["d_logits"] == 2 * (4095 * 50304 + 50257)
    assert found["d_logits.padded for input_grad"] == 2 * (4095 * 50304 + 50264)


def test_small_vocabulary_with_few_tokens_is_not_padded() -> None:
    events = write(replace(SMALL, compile=True, dtype="bfloat16", vocab_size=65)).events
    assert next(event.nbytes for event in events if event.name.startswith("logits of ")) == 2 * N * 65
