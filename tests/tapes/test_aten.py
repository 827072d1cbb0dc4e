"""Scratch memory of ATen's reductions, as recorded."""

from __future__ import annotations

import pytest

from fitgpt.memory.platform import Platform
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
