"""The tape of nanoGPT's train.py: what the loop and the graph keep, and every knob to its end."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest

from fitgpt.memory.allocator import needs, replay, reserved_range
from fitgpt.memory.nanogpt import write
from fitgpt.memory.nanorun import NanoGPTRun
from fitgpt.nouns import GPTConfig

SMALL = NanoGPTRun(n_layer=2, n_head=4, n_embd=64, batch_size=4, block_size=32, vocab_size=512,
                   gradient_accumulation_steps=4, dtype="float16", compile=False)
N, C, V, L = SMALL.tokens, SMALL.n_embd, SMALL.vocab_size, SMALL.n_layer


def bytes_by_owner(run: NanoGPTRun, event: int) -> dict[str, int]:
    """What is asked for, before the allocator rounds, after that many events."""
    owners: dict[str, int] = {}
    for each in write(run).events[:event]:
        owners[each.owner] = owners.get(each.owner, 0) + (each.nbytes if each.alloc else -each.nbytes)
    return owners


@pytest.mark.parametrize("bias", [False, True])
def test_the_parameters_are_those_of_the_model(bias: bool) -> None:
    shape = GPTConfig(block_size=32, vocab_size=512, n_layer=2, n_head=4, n_embd=64, bias=bias)
    assert sum(numbers for _, numbers, _ in replace(SMALL, bias=bias).parameters()) == shape.count_params()


@pytest.mark.parametrize(("dtype", "bias", "dropout", "compiled", "accumulation", "width"), list(itertools.product(
    ("float32", "bfloat16", "float16"), (False, True), (0.0, 0.1), (False, True), (1, 5), (64, 36))))
def test_every_run_ends_with_what_train_py_keeps(dtype: str, bias: bool, dropout: float, compiled: bool,
                                                 accumulation: int, width: int) -> None:
    run = replace(SMALL, dtype=dtype, bias=bias, dropout=dropout, compile=compiled, n_embd=width,
                  gradient_accumulation_steps=accumulation)
    tape = write(run)
    kept = {(name.split(" ")[0].rstrip("'0123456789"), event.owner) for name, event in tape.alive_at_end().items()
            if event.owner not in ("weights", "optimizer")}
    assert kept == {("cublas", "workspace"), ("logits", "logits"), ("loss", "other"), ("X", "data")}
    weights = sum(numbers for _, numbers, _ in run.parameters())
    end = bytes_by_owner(run, len(tape.events))
    assert end["weights"] == 4 * weights
    state = 8 * weights + 4 * len(run.parameters())
    assert end["optimizer"] == state + (8 if dtype == "float16" else 0)  # the scale and its tracker
    assert end["logits"] == (4 if dtype == "float32" else 2) * N * V
    assert all(end[owner] == 0 for owner in ("activations", "casts", "gradients") if owner in end)
    assert replay(tape).failed is None


def test_the_eager_graph_keeps_36_bytes_a_token_and_number_of_width_in_each_block() -> None:
    """And 16 bytes a token for its norms, 4 a token and head, and two scalars: FACTS of a recorded graph."""
    def at_loss(layers: int) -> int:
        run = replace(SMALL, n_layer=layers)
        events = write(run).events
        start = next(i for i, event in enumerate(events) if event.name == "d log_softmax")
        return bytes_by_owner(run, start)["activations"]

    assert at_loss(5) - at_loss(4) == 36 * N * C + 16 * N + 4 * N * SMALL.n_head + 16


def test_a_logit_costs_12_bytes_inside_the_losss_backward() -> None:
    events = write(SMALL).events
    at = next(i for i, event in enumerate(events) if event.name == "d log_softmax")
    assert bytes_by_owner(SMALL, at + 1)["logits"] == 12 * N * V


def test_three_half_arrays_of_logits_meet_in_a_compiled_backward() -> None:
    run = replace(SMALL, compile=True)
    at = next(i for i, event in enumerate(write(run).events) if event.name == "d logits")
    assert bytes_by_owner(run, at + 1)["logits"] == 6 * N * V


def test_evaluation_keeps_the_last_logits_of_training_and_of_the_batch_before() -> None:
    run = replace(SMALL, vocab_size=50304)  # large enough for the loss to be the peak
    timeline = replay(write(run))
    peaks = timeline.peaks()
    first, later = (timeline.owners_at(peaks[phase].event)["logits"] for phase in ("first_eval", "eval"))
    assert first // (run.tokens * run.vocab_size) == 10
    assert later // (run.tokens * run.vocab_size) == 12


def test_casts_live_as_long_as_autocast_and_not_in_float32() -> None:
    tape = write(SMALL)
    start = next(mark.start for mark in tape.marks if mark.phase == "first_train")
    assert bytes_by_owner(SMALL, start)["casts"] == 0
    loss = next(i for i, event in enumerate(tape.events) if event.name == "d log_softmax")
    assert bytes_by_owner(SMALL, loss)["casts"] == 2 * (12 * L * C * C + V * C)
    assert "casts" not in bytes_by_owner(replace(SMALL, dtype="float32"), len(tape.events))


def test_dropout_keeps_a_byte_a_number_for_each_mask() -> None:
    def mask_bytes(run: NanoGPTRun) -> int:
        return sum(event.nbytes for event in write(run, iterations=1, micro_steps=1).events
                   if event.alloc and event.name.endswith(".mask"))

    assert mask_bytes(SMALL) == 0
    assert mask_bytes(replace(SMALL, dropout=0.1)) == (2 * L + 1) * N * C


def test_a_12_layer_replay_takes_at_most_20_ms_of_processor_time() -> None:
    tape = write(NanoGPTRun(compile=False), eval_batches=2, iterations=2, micro_steps=2)
    best = math.inf
    for _ in range(60):  # the best of many, spread over seconds: a shared machine has slow spells
        start = time.process_time()
        replay(tape)
        best = min(best, time.process_time() - start)
        if best <= 0.020:
            break
        time.sleep(0.1)
    assert best <= 0.020


def test_a_cap_of_needs_is_enough_and_one_page_less_is_not() -> None:
    tape = write(NanoGPTRun(n_layer=2, compile=False), iterations=2, micro_steps=2)
    least = needs(tape)
    assert replay(tape, least).failed is None
    refused = replay(tape, least - 2 * 2**20).refused
    assert refused is not None
    assert refused.alloc


@pytest.mark.parametrize(("asked", "written"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 3), (40, 4), (41, 3)])
def test_many_micro_steps_are_written_as_few_of_the_same_parity(asked: int, written: int) -> None:
    """In the recorded 77M run an odd number peaks 3.5 MiB higher than an even one; how many does not matter."""
    tape = write(replace(SMALL, gradient_accumulation_steps=asked), iterations=1)
    assert sum(event.alloc and event.name == "d log_softmax" for event in tape.events) == written


def test_what_is_reserved_is_a_range_where_the_order_of_addresses_decides() -> None:
    """The recorded 124M run: 16.0 GB measured, and 18.5 GB had the driver handed out addresses upwards."""
    tape = write(NanoGPTRun(gradient_accumulation_steps=4, compile=False), iterations=3)
    low, high = reserved_range(tape)
    assert low == replay(tape).reserved
    assert high - low > 2 * 10**9
