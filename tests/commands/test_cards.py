"""`fitgpt cards`: the table of GPU models."""

from __future__ import annotations

from typing import Any

from fitgpt.hardware import gpus


def test_cards_are_listed_and_filtered(run_plan: Any) -> None:
    everything = run_plan(command="cards").out
    assert all(card.name in everything for card in gpus.load())
    assert "the vendor" in everything
    some = run_plan("4070", command="cards").out
    assert "RTX 4070 Ti SUPER" in some
    assert "4090" not in some
    assert [row["name"] for row in run_plan("rtx4070ti", "--json", command="cards").json["cards"]] == [
        "RTX 4070 Ti", "RTX 4070 Ti SUPER"]
    nothing = run_plan("geforce 9999", command="cards")
    assert nothing.code == 2
    assert "`fitgpt cards` lists" in nothing.err
    assert nothing.err.endswith("\n  fitgpt cards 'RTX 4070'\n")
