"""core.units: sizes and counts as users type them."""

from __future__ import annotations

import pytest

from fitgpt.core.errors import UsageError
from fitgpt.core.units import GiB, MiB, parse_bytes, parse_count


@pytest.mark.parametrize(("text", "nbytes"), [("11.5GiB", 11.5 * GiB), ("2,118 MiB", 2118 * MiB), ("12GB", 12e9),
                                              ("1_024MiB", GiB), (".5G", GiB / 2)])
def test_sizes_are_parsed(text: str, nbytes: float) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["11,5GiB", "1,02,400MiB", "1,0000MiB", "GiB", "-1GiB", "5 GiB 3"])
def test_a_comma_that_separates_no_thousands_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


def test_counts_are_parsed() -> None:
    assert parse_count("1,000,000") == 10**6
    assert parse_count("10B") == 10**10
