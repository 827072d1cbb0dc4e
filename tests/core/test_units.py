"""core.units: sizes and counts as users type them."""

from __future__ import annotations

import pytest

from fitgpt.core.errors import UsageError
from fitgpt.core.units import GiB, MiB, parse_bytes, parse_count


@pytest.mark.parametrize(("text", "nbytes"), [("11.5GiB", 11.5 * GiB), ("2,118 MiB", 2118 * MiB), ("12GB", 12e9),
                                              ("1_024MiB", GiB), (".5G", GiB / 2), ("6,5GB", 6.5e9),
                                              ("11,50 GiB", 11.5 * GiB), ("12 GB", 12e9),
                                              ("６５８２ＭｉＢ", 6582 * MiB), ("٦٥٨٢MiB", 6582 * MiB),
                                              ("٦٫٥ GiB", 6.5 * GiB), ("१२GB", 12e9)])
def test_sizes_are_parsed(text: str, nbytes: float) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["1,02,400MiB", "1,0000MiB", "GiB", "-1GiB", "5 GiB 3", "9" * 400])
def test_an_ambiguous_comma_or_another_text_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


def test_a_number_without_a_unit_has_the_given_unit() -> None:
    assert parse_bytes("6582", "MiB") == parse_bytes("6582MiB", "MiB") == 6582 * MiB
    assert parse_bytes(str(6582 * MiB), "MiB") == 6582 * MiB  # too large to be MiB
    with pytest.raises(UsageError, match="without a unit"):
        parse_bytes("6582")


def test_counts_are_parsed() -> None:
    assert parse_count("1,000,000") == 10**6
    assert parse_count("10B") == 10**10
