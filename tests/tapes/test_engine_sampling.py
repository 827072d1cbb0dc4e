"""The tape of `fitgpt sample` against recorded runs on an H200."""

from __future__ import annotations

from typing import Any

import pytest

from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.memory.platform import Platform
from fitgpt.memory.timeline import replay
from fitgpt.planning.forecast import forecast
from fitgpt.tapes import aten
from fitgpt.tapes import engine as engine_tape
from tests.tapes.test_engine_recorded import H200, recorded_runs

ROWS = [row for name in ("random", "sampling_large_vocabulary") for row in recorded_runs(name)
        if "sample" in row.get("phases", {})]
RESERVES_UNTIL_THE_THIRD_TOKEN = RunConfig(n_layer=8, n_head=8, n_embd=336, block_size=512, vocab_size=65,
                                           dtype="float16")


def peaks(config: RunConfig) -> dict[str, int]:
    tape = engine_tape.write_sampling(resolve_run(config, H200), H200)
    found = replay(tape, expandable=H200.expandable).peaks()["sample"]
    return {"allocated": found.allocated, "reserved": found.reserved}


def test_each_kind_of_attention_and_of_topk_was_recorded() -> None:
    configs = [resolve_run(RunConfig(**row["config"]), H200) for row in ROWS]
    assert {engine_tape.masked_attention_kernel(config, H200) for config in configs} == {"cudnn", "efficient", "math"}
    assert {config.vocab_size >= aten.TOPK_MANY for config in configs} == {True, False}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_sampling_is_forecast_to_the_byte(row: dict[str, Any]) -> None:
    assert peaks(RunConfig(**row["config"])) == row["phases"]["sample"]


def test_the_forecast_of_plan_equals_a_recorded_run() -> None:
    row = ROWS[0]
    planned = forecast(resolve_run(RunConfig(**row["config"]), H200), H200).phases["sample"]
    assert {"allocated": planned.allocated, "reserved": planned.reserved} == row["phases"]["sample"]


def test_a_tape_of_few_tokens_has_the_peaks_of_forty(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [RESERVES_UNTIL_THE_THIRD_TOKEN, *(RunConfig(**row["config"]) for row in ROWS)]
    written = [peaks(config) for config in configs]
    monkeypatch.setattr(engine_tape, "SAMPLED_TOKENS", 40)
    assert [peaks(config) for config in configs] == written


@pytest.mark.parametrize(("vocab", "sms", "blocks"), [
    (8192, 132, 0), (50257, 132, 50), (50304, 132, 50), (100277, 132, 98),  # as recorded: four numbers a thread
    (200_000, 20, 112)])                                                    # seven, where there are fewer threads
def test_topk_scratch_depends_on_the_vocabulary_and_the_multiprocessors(vocab: int, sms: int, blocks: int) -> None:
    tape = engine_tape.write_sampling(resolve_run(RunConfig(vocab_size=vocab), H200), Platform(sms=sms))
    counts = {event.nbytes for event in tape.events if event.name == "top k.counts"}
    assert counts == ({2 * 256 * blocks} if blocks else set())
