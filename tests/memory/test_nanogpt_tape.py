"""The tape of nanoGPT's train.py: what the loop and the graph keep, and every knob to its end."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import pytest

from fitgpt.memory.allocator import needs, replay, reserved_in_other_orders
from fitgpt.memory.aten import H200, Gpu, norm_partials, sum_over_rows
from fitgpt.memory.inductor import Step, plan
from fitgpt.memory.kernels import Graph, Kernel, Made
from fitgpt.memory.nanogpt import history_of, write
from fitgpt.memory.nanorun import NanoGPTRun
from fitgpt.memory.setting import Setting
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
    workspaces = {("cublas", "workspace")} | ({("cublaslt", "workspace")} if bias else set())
    assert kept == workspaces | {("logits", "logits"), ("loss", "other"), ("X", "data")}
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
        return sum(event.nbytes for event in write(run, history=(1,)).events
                   if event.alloc and event.name.endswith(".mask"))

    assert mask_bytes(SMALL) == 0
    assert mask_bytes(replace(SMALL, dropout=0.1)) == (2 * L + 1) * N * C


@pytest.mark.parametrize("compiled", [True, False])
def test_a_12_layer_replay_takes_at_most_20_ms_of_processor_time(compiled: bool) -> None:
    tape = write(NanoGPTRun(compile=compiled))
    best, seconds = math.inf, 0.020
    for _ in range(60):  # the best of many, spread over seconds: a shared machine has slow spells
        start = time.process_time()
        replay(tape)
        best = min(best, time.process_time() - start)
        if best <= seconds:
            break
        time.sleep(0.1)
    assert best <= seconds


def test_a_cap_of_needs_is_enough_and_one_page_less_is_not() -> None:
    tape = write(NanoGPTRun(n_layer=2, compile=False), history=(2, 2))
    least = needs(tape)
    assert replay(tape, least).failed is None
    refused = replay(tape, least - 2 * 2**20).refused
    assert refused is not None
    assert refused.alloc


@pytest.mark.parametrize(("asked", "written"), [(1, 1), (2, 2), (3, 3), (6, 6), (7, 5), (40, 6), (41, 5)])
def test_many_micro_steps_are_written_as_few_of_the_same_parity(asked: int, written: int) -> None:
    """In the recorded 77M run an odd number peaks 3.5 MiB higher than an even one; how many does not matter."""
    tape = write(replace(SMALL, gradient_accumulation_steps=asked))
    last = list(tape.spans())[-3]
    assert last[0] == "train"
    assert sum(event.alloc and event.name == "d log_softmax" for event in tape.events[last[1]:last[2]]) == written


@pytest.mark.parametrize(("asked", "events", "written"), [
    (1, 500, (1,) * 6), (40, 500, (16, 6, 6, 6, 6, 6)), (41, 500, (15, 5, 5, 5, 5, 5)), (12, 2000, (12, 6, 6, 6)),
    (4, 2000, (4, 4, 4, 4)), (40, 5000, (4, 4, 2)), (9, 5000, (3, 3, 3)), (4, 5000, (4, 4, 4)), (1, 5000, (1,) * 4)])
def test_the_history_is_longer_where_a_micro_batch_has_fewer_events(asked: int, events: int,
                                                                    written: tuple[int, ...]) -> None:
    assert history_of(NanoGPTRun(gradient_accumulation_steps=asked), events) == written


def test_what_is_reserved_is_a_range_where_the_order_of_addresses_decides() -> None:
    """The recorded 124M run: 16.0 GB measured, and 18.5 GB had the driver handed out addresses upwards."""
    tape = write(NanoGPTRun(gradient_accumulation_steps=4, compile=False), history=(4, 4, 4))
    found = replay(tape).reserved, *reserved_in_other_orders(tape)
    low, high = min(found), max(found)
    assert low == replay(tape).reserved
    assert high - low > 2 * 10**9


# ---- torch's own kernels

@pytest.mark.parametrize(("rows", "columns", "nbytes"), [
    (8192, 768, 50_331_648), (8192, 3072, 138_412_032), (8192, 2304, 139_198_464), (1024, 576, 4_718_592)])
def test_a_sum_over_rows_has_the_scratch_that_was_recorded(rows: int, columns: int, nbytes: int) -> None:
    assert sum_over_rows(rows, columns, H200)[0] == nbytes


def test_a_sum_over_few_rows_has_no_scratch() -> None:
    assert sum_over_rows(512, 768, H200) == []


def test_a_card_with_fewer_multiprocessors_splits_a_wide_sum_among_fewer_blocks() -> None:
    small = Gpu(sms=46, threads=1536)
    assert sum_over_rows(8192, 3072, small)[0] < sum_over_rows(8192, 3072, H200)[0]


def test_norms_of_all_gradients_have_as_many_partial_sums_each_as_the_largest() -> None:
    assert norm_partials([50304 * 256, *[1] * 20]) == 16_548  # as recorded


@pytest.mark.parametrize(("capability", "sms", "true_mib"), [
    pytest.param((8, 6), 28, 3, id="RTX 3060"), pytest.param((8, 6), 82, 6, id="RTX 3090"),
    pytest.param((8, 9), 24, 24, id="RTX 4060"), pytest.param((8, 9), 46, 36, id="RTX 4070"),
    pytest.param((8, 9), 128, 72, id="RTX 4090"), pytest.param((12, 0), 170, 96, id="RTX 5090"),
    pytest.param((8, 0), 108, 40, id="A100"), pytest.param((9, 0), 132, 60, id="H200")])
def test_a_cards_cache_is_never_taken_for_smaller_than_it_is(capability: tuple[int, int], sms: int,
                                                             true_mib: int) -> None:
    assert Setting(capability, sms=sms).cache >= true_mib * 2**20


def test_the_defaults_are_an_h200s() -> None:
    setting = Setting((9, 0), sms=132)
    assert (setting.workspace, setting.sms, setting.threads, setting.cache) == (
        H200.workspace, H200.sms, H200.threads, H200.cache)


# ---- the compiler's plan

def half(name: str, nbytes: int = 100) -> Made:
    return Made(name, "activations", nbytes, "half")


def chain(*kernels: Kernel, keeps: str = "end") -> list[Step]:
    """A plan of kernels before which, and after which, nothing else is alive."""
    return plan(Graph(kernels, frozenset({keeps}))).steps


def test_an_output_overwrites_an_input_that_nobody_reads_any_more() -> None:
    steps = chain(Kernel((half("up"),)), Kernel((half("gelu"),), ("up",), over={"gelu": ("up",)}),
                  Kernel((half("end", 8),), ("gelu",)))
    assert [(step.do, step.name) for step in steps] == [("alloc", "up"), ("alloc", "end"), ("free", "up")]


def test_an_output_does_not_overwrite_an_input_that_is_read_later() -> None:
    steps = chain(Kernel((half("up"),)), Kernel((half("gelu"),), ("up",), over={"gelu": ("up",)}),
                  Kernel((half("end", 8),), ("gelu", "up")))
    assert [step.name for step in steps if step.do == "alloc"] == ["up", "gelu", "end"]


def waiting(last: int) -> list[Step]:
    """a is spent two kernels before c, its like, is made; `last` bytes are alive at the end beside what is kept."""
    return chain(Kernel((half("a"),)), Kernel((half("b", 8),), ("a",)), Kernel((half("b2", 8),), ("b",)),
                 Kernel((half("c"),), ("b2",)), Kernel((half("d", last),), ("c",)), Kernel((half("end", 8),), ("d",)))


def test_a_spent_buffer_is_taken_by_its_like_where_the_wait_does_not_raise_the_peak() -> None:
    assert [step.name for step in waiting(300) if step.do == "alloc"].count("c") == 0
    assert Step("alloc", "c", "activations", 100) in waiting(4)


def test_a_graph_that_hands_out_much_reuses_little() -> None:
    """What it hands out is taken for freed at the start: beside large logits, nothing before seems to be a peak."""
    def steps(handed_out: int) -> list[Step]:
        return chain(Kernel((half("early", 300),)), Kernel((half("a"),), ("early",)), Kernel((half("b", 8),), ("a",)),
                     Kernel((half("b2", 8),), ("b",)), Kernel((half("c"),), ("b2",)), Kernel((half("d", 8),), ("c",)),
                     Kernel((half("end", handed_out),), ("d",)))

    assert Step("alloc", "c", "activations", 100) not in steps(8)
    assert Step("alloc", "c", "activations", 100) in steps(10**6)


def test_a_block_goes_by_the_name_of_what_is_handed_out_in_it() -> None:
    steps = chain(Kernel((half("x"),)), Kernel((half("end"),), ("x",), over={"end": ("x",)}))
    assert steps == [Step("alloc", "end", "activations", 100)]


def test_a_gradient_may_end_up_in_a_block_that_attention_allocated() -> None:
    """In float32 and with one sequence, the positions' gradient is as large as a value's."""
    run = replace(SMALL, compile=True, dtype="float32", batch_size=1)
    assert replay(write(run)).failed is None


def test_kernels_are_timed_only_when_they_first_run() -> None:
    """The buffer that empties the card's cache passes by at first calls, and never in a later step."""
    tape = write(replace(SMALL, compile=True))
    phases = {phase for phase, start, end in tape.spans()
              if any(event.name == "timing" for event in tape.events[start:end])}
    assert phases == {"first_eval", "first_train"}


@pytest.mark.parametrize(("batch", "kept"), [(2, {"0.ln_1.normed"}), (3, {"tok_emb", "pos_emb", "0.ln_1.mean"})])
def test_what_the_first_norm_keeps_depends_on_how_many_sequences_share_positions(batch: int, kept: set[str]) -> None:
    names = {event.name for event in write(replace(SMALL, compile=True, batch_size=batch)).events}
    assert names & {"0.ln_1.normed", "tok_emb", "pos_emb", "0.ln_1.mean"} == kept


def test_a_compiled_float32_run_keeps_the_logits_gradient_through_the_whole_backward_pass() -> None:
    """Their product with the head's input is added to the embedding's gradient, which comes last."""
    def position(dtype: str) -> tuple[int, int]:
        events = write(replace(SMALL, compile=True, dtype=dtype), history=(1,)).events
        freed = next(i for i, event in enumerate(events) if event.name == "d logits" and not event.alloc)
        return freed, next(i for i, event in enumerate(events) if event.name == "0.qkv.weight.grad" and event.alloc)

    freed, first_layer = position("float32")
    assert freed > first_layer
    freed, first_layer = position("bfloat16")
    assert freed < first_layer


def logits_of(vocab: int, **knobs: Any) -> dict[str, int]:
    """Arrays of logits by what they are, of a compiled run of 4096 tokens."""
    run = replace(SMALL, compile=True, batch_size=16, block_size=256, vocab_size=vocab,
                  **{"n_embd": 384, "n_head": 6, **knobs})
    events = write(run).events
    return {event.name.split(" of X")[0]: event.nbytes for event in events if event.owner == "logits" and event.alloc}


@pytest.mark.parametrize(("dtype", "width", "columns"), [("bfloat16", 2, 50264), ("float16", 2, 50264),
                                                         ("float32", 4, 50260)])
def test_compiled_code_pads_a_vocabulary_to_sixteen_bytes(dtype: str, width: int, columns: int) -> None:
    found = logits_of(50257, dtype=dtype)
    assert (found["logits"], found["zeros for logits"]) == (4096 * columns * width, 4096 * 50257 * width)
    assert "d logits.padded for inputs" in found
    assert "d logits.padded for weights" not in found
    assert set(logits_of(50304, dtype=dtype)) == {"logits", "zeros for logits", "d logits"}


def test_wide_models_gradient_of_an_odd_vocabulary_is_copied_twice() -> None:
    for dtype in ("bfloat16", "float32"):
        assert "d logits.padded for weights" in logits_of(50257, dtype=dtype, n_embd=1024, n_head=16)


def test_a_padded_gradient_of_the_logits_is_laid_out_in_whole_lines() -> None:
    found = logits_of(50257, dtype="bfloat16")
    assert found["d logits"] == 2 * (4095 * 50304 + 50257)
    assert found["d logits.padded for inputs"] == 2 * (4095 * 50304 + 50264)


def test_few_characters_of_little_work_are_not_padded() -> None:
    events = write(replace(SMALL, compile=True, dtype="bfloat16", vocab_size=65)).events
    assert next(event.nbytes for event in events if event.name.startswith("logits of ")) == 2 * N * 65
