"""Layout of plain text: wrapping, labels, tables at any width."""

from __future__ import annotations

import pytest

from fitgpt.show.terminal import columns, labelled, labelled_rows, printable, table, wrap

ROWS = [("", "needs", "speed", "kind"), ("--batch_size=1", "2.27 GiB", "0.75", "exact"),
        ("--weights=float32", "2.72 GiB", "0.87", "exact")]


def test_wrapped_lines_are_indented_as_far_as_their_start() -> None:
    assert wrap("one two three four five six", 24, "- ") == ["- one two three four", "  five six"]


def test_wrapped_lines_can_have_another_indent() -> None:
    assert wrap("one two three four five six", 24, "  ", indent=4) == ["  one two three four", "    five six"]


def test_wrap_never_breaks_flags() -> None:
    flag = "--gradient_accumulation_steps=40-of-many"
    assert wrap(f"set {flag} there", 20) == ["set", flag, "there"]


def test_wrap_keeps_a_number_with_its_percent_sign() -> None:
    assert wrap("it was slower by 2.4 %", 20) == ["it was slower by", "2.4 %"]


def test_wrap_leaves_room_for_text_beside_a_long_start() -> None:
    assert wrap("one two three", 10, "a long start of the line ") == ["a long start of the line one two three"]


def test_labelled_rows_are_aligned() -> None:
    assert labelled("note", "text", 80) == ["note      text"]
    assert labelled_rows([("a", "first"), ("b", "second second second second")], 30) == (
        "a         first\nb         second second second\n          second")


def test_table_aligns_columns() -> None:
    assert table(ROWS, left=(0, 3)).splitlines() == [
        "                      needs  speed  kind",
        "--batch_size=1     2.27 GiB   0.75  exact",
        "--weights=float32  2.72 GiB   0.87  exact"]


def test_a_narrow_table_drops_optional_columns_in_order() -> None:
    assert table(ROWS, left=(0, 3), width=40, optional=(2, 3)).splitlines()[1] == "--batch_size=1     2.27 GiB  exact"
    assert table(ROWS, left=(0, 3), width=30, optional=(2, 3)).splitlines()[1] == "--batch_size=1     2.27 GiB"


def test_a_table_too_narrow_for_its_first_column_puts_figures_below_it() -> None:
    assert table(ROWS, left=(0, 3), width=20, optional=(2,)).splitlines() == [
        "     needs  kind", "--batch_size=1", "  2.27 GiB  exact", "--weights=float32", "  2.72 GiB  exact"]


@pytest.mark.parametrize(("terminal", "expected"), [(20, 40), (80, 80), (300, 100)])
def test_columns_are_limited(monkeypatch: pytest.MonkeyPatch, terminal: int, expected: int) -> None:
    monkeypatch.setenv("COLUMNS", str(terminal))
    assert columns() == expected


def test_control_characters_are_replaced() -> None:
    assert printable("a\x1b[2Jb\n") == "a?[2Jb?"
