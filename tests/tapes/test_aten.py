"""Scratch memory of ATen's reductions, as recorded."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import MiB
from fitgpt.memory.platform import Platform
from fitgpt.memory.tape import Tape
from fitgpt.planning.forecast import write_tape
from fitgpt.tapes.aten import norm_partials, sum_over_rows

H200 = Platform((9, 0), sms=132)


@pytest.mark.parametrize(("rows", "columns", "nbytes"), [
    (8192, 768, 50_331_648), (8192, 3072, 138_412_032), (8192, 2304, 139_198_464), (1024, 576, 4_718_592)])
def test_sum_over_rows_has_the_recorded_scratch(rows: int, columns: int, nbytes: int) -> None:
    assert sum_over_rows(rows, columns, H200)[0] == nbytes


def test_sum_over_few_rows_has_no_scratch() -> None:
    assert sum_over_rows(512, 768, H200) == []


def test_gpu_with_fewer_multiprocessors_splits_a_wide_sum_less() -> None:
    small = Platform((8, 9), sms=46)
    assert sum_over_rows(8192, 3072, small)[0] < sum_over_rows(8192, 3072, H200)[0]


def test_each_gradients_norm_has_as_many_partial_sums_as_the_largest() -> None:
    assert norm_partials([50304 * 256, *[1] * 20]) == 16_548  # as recorded


# ---- workspaces of matmuls

TRAINERS = [(trainer, compiled) for trainer in ("fitgpt", "nanogpt") for compiled in (False, True)]


def tape_with(torch: str, trainer: str, compiled: bool) -> Tape:
    config = RunConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, batch_size=2, vocab_size=512, bias=True,
                       dtype="bfloat16", compile=compiled)
    return write_tape(config, Platform((8, 9), torch), trainer)


@pytest.mark.parametrize(("trainer", "compiled"), TRAINERS)
def test_cublaslt_has_a_workspace_of_its_own_only_in_2_11(trainer: str, compiled: bool) -> None:
    names = {torch: {event.name for event in tape_with(torch, trainer, compiled).events} for torch in ("2.11", "2.12")}
    assert names["2.11"] - names["2.12"] >= {"cublaslt"}
    assert names["2.12"] >= {"cublas"}


@pytest.mark.parametrize(("trainer", "compiled"), TRAINERS)
def test_since_2_15_each_matmul_frees_its_workspace(trainer: str, compiled: bool) -> None:
    events = tape_with("2.15", trainer, compiled).events
    pairs = [(event, after) for event, after in pairwise(events)
             if event.alloc and event.name == "matmul workspace"]
    assert not any(event.name.startswith("cublas") for event in events)
    assert all(after.name == event.name and not after.alloc for event, after in pairs)
    assert {event.nbytes for event, _ in pairs} == {8_519_680, MiB}  # MiB: with a bias
    assert len(pairs) > 20
