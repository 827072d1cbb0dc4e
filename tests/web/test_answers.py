"""The page's answers equal what `fitgpt plan` and `fit` compute."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitgpt.core.errors import UsageError
from fitgpt.core.units import GiB, MiB
from fitgpt.hardware import host
from fitgpt.planning import fit as fit_planning
from fitgpt.planning import forecast
from fitgpt.planning.fit_goals import GOALS, OUTSIDE_ERROR, find_fastest
from fitgpt.planning.plan import plan_for, verdicts
from fitgpt.web import answers
from fitgpt.web.form import read
from tests.planning.test_verdict import OTHER_ORDERS_FAIL
from tests.web_server import NOTES, SMALL, page_query

ROOT = Path(__file__).parent.parent.parent


# ---- the plan


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_bars_equal_the_forecast(trainer: str) -> None:
    query = page_query(trainer=trainer, **SMALL)
    expected = plan_for(query.config, query.target, trainer).forecast
    rows = {row["phase"]: row for row in answers.plan(query)["bars"]["rows"]}
    assert {"load", "first_eval", "first_train", "train", "step", "eval"} <= rows.keys()
    for phase, row in rows.items():
        held = expected.phases[phase]
        assert (row["allocated"], row["reserved"]) == (held.allocated, held.reserved)
        assert sum(row["owners"].values()) == row["allocated"]
    peak = next(row for row in rows.values() if row["peak"])
    assert peak["owners"] == {share.owner: share.nbytes for share in expected.owners_at_peak}


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
@pytest.mark.parametrize("compiled", [True, False])
def test_plan_and_exact_agree_around_the_limit(trainer: str, compiled: bool) -> None:
    query = page_query(trainer=trainer, compile=compiled, **SMALL)
    needs, outside = answers.exact(query)["needs"], query.target.budget.outside
    for mib in (-200, -40, -20, -2, 0, 2, 20, 40, 200):
        near = page_query(trainer=trainer, compile=compiled, budget=f"{(needs + outside) // MiB + mib}MiB", **SMALL)
        quick, exact = answers.plan(near)["verdict"], answers.exact(near)["verdict"]
        assert quick == exact, mib
        assert (quick != "does_not_fit") == (mib >= 0), mib
        assert mib < 200 or quick == "fits"


WIDE = dict(n_layer=16, n_head=4, n_embd=1024, batch_size=32, block_size=256)  # 12 GB with nanoGPT


@pytest.mark.parametrize(("options", "verdict"), [
    (dict(n_layer=4, compile=False, batch_size=100), "fits"),
    (dict(n_layer=4, compile=False, batch_size=118), "tight"),          # headroom 0.46 GiB, and perhaps a desktop
    (dict(n_layer=4, compile=False, batch_size=118, others="0"), "fits"),
    (dict(n_layer=4, compile=False, batch_size=140), "does_not_fit"),
    (dict(trainer="nanogpt", gpu="RTX A2000 12GB", **WIDE), "tight")])  # headroom 36 MiB; once 0.5 % too low
def test_plan_and_exact_agree_on_what_is_tight(options: dict[str, Any], verdict: str) -> None:
    query = page_query(**options)
    assert answers.plan(query)["verdict"] == answers.exact(query)["verdict"] == verdict


def test_plan_and_exact_agree_on_other_orders_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (answers, forecast):
        monkeypatch.setattr(module, "lowest_error", lambda trainer, assumes: 0.0)
    for mib, verdict in ((0, "tight"), (20, "fits")):
        query = page_query(trainer="nanogpt", **OTHER_ORDERS_FAIL)
        needs, outside = answers.exact(query)["needs"], query.target.budget.outside
        near = page_query(trainer="nanogpt", budget=f"{(needs + outside) // MiB + mib}MiB", **OTHER_ORDERS_FAIL)
        assert answers.plan(near)["verdict"] == answers.exact(near)["verdict"] == verdict


@pytest.mark.parametrize("options", [
    dict(), dict(n_layer=24), dict(compile=False), dict(saved_activations="input"),
    dict(trainer="nanogpt", n_layer=48, n_head=25, n_embd=1600, batch_size=1)], ids=str)
def test_a_deep_run_gets_its_final_verdict_and_bars_in_the_first_answer(options: dict[str, Any]) -> None:
    plan, exact = answers.plan(page_query(**options)), answers.exact(page_query(**options))
    assert plan["verdict"] == exact["verdict"]
    phases = {each["phase"]: each["allocated"] for each in exact["phases"]}
    assert all(row["allocated"] == phases[row["phase"]] for row in plan["bars"]["rows"])


def test_the_summary_says_what_is_reserved_or_what_does_not_fit() -> None:
    assert re.fullmatch(r"reserves \S+ GiB of \S+ GiB\.", answers.plan(page_query())["summary"])
    assert "tensors alone take" in answers.plan(page_query(budget="2GiB"))["summary"]


def test_a_limit_just_below_needs_fails_by_fragmentation() -> None:
    query = page_query(trainer="nanogpt", compile=False, **SMALL)
    needs, outside = answers.exact(query)["needs"], query.target.budget.outside
    budget = f"{(needs + outside) // MiB - 2}MiB"
    plan = answers.plan(page_query(trainer="nanogpt", compile=False, budget=budget, **SMALL))
    assert plan["verdict"] == "does_not_fit"
    assert plan["peak"] < needs - 2 * MiB
    assert "fragmentation" in plan["summary"]


def test_the_notes_run_fits_without_other_programs_or_with_fitgpt() -> None:
    assert answers.plan(read(NOTES))["verdict"] == "does_not_fit"
    assert answers.plan(read(NOTES.replace("others=2118MiB", "others=0MiB")))["verdict"] == "fits"
    assert answers.plan(read(NOTES.replace("nanogpt", "fitgpt")))["verdict"] == "fits"


@pytest.mark.parametrize(("others", "found"), [("1GiB", {"fits", "does_not_fit"}),
                                               ("", {"fits", "tight", "does_not_fit"})])
def test_every_gpu_has_the_verdict_of_a_plan_for_it(others: str, found: set[str]) -> None:
    query = page_query(others=others, n_layer=2, batch_size=96)
    rows = {row["name"]: row for row in answers.all_gpus(query)["gpus"]}
    expected = verdicts(query.config, "fitgpt", 1024 * MiB if others else None)
    assert {name: row["verdict"] for name, row in rows.items()} == {
        each.name: each.verdict for each in expected if each.name in rows}
    assert {row["verdict"] for row in rows.values()} == found
    assert answers.all_gpus(page_query(dtype="bfloat16"))["gpus"][0]["problem"] == "needs --dtype=float16"


def test_the_step_chart_has_the_limit() -> None:
    html = answers.step(page_query(**SMALL))["html"]
    assert 'data-chart="stacked"' in html
    assert "may be reserved" in html


def test_a_vocabulary_that_is_no_multiple_of_8_is_noted_for_nanogpt() -> None:
    notes = [answers.plan(page_query(trainer="nanogpt", vocab_size=size, n_layer=2))["notes"]
             for size in (50304, 50257)]
    assert [any("not a multiple of 8" in note for note in each) for each in notes] == [False, True]


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_a_speed_is_given_for_known_gpus(trainer: str) -> None:
    exact = answers.exact(page_query(trainer=trainer, **SMALL))
    assert re.fullmatch(r"[\d.]+[kM]–[\d.]+[kM]", exact["speed"])
    assert any(name == "speed" and exact["speed"] in text for name, text in exact["facts"])
    assert all(row["speed"] for row in answers.all_gpus(page_query(trainer=trainer, **SMALL))["gpus"]
               if row["name"].startswith("RTX 40"))


def test_a_run_that_does_not_fit_has_no_speed_and_no_hours() -> None:
    fitting, full = (answers.exact(page_query(budget=budget, max_iters=1000, **SMALL)) for budget in ("", "210MiB"))
    assert (fitting["verdict"], full["verdict"]) == ("fits", "does_not_fit")
    assert fitting["speed"]
    assert fitting["length"]["hours"]
    assert (full["speed"], full["length"]["hours"]) == ("", "")
    assert not any(name == "speed" for name, _ in full["facts"])
    assert full["length"]["tokens"] == fitting["length"]["tokens"] == "10.24M"


def test_the_length_that_is_suggested_has_20_tokens_per_parameter() -> None:
    length = answers.exact(page_query(**SMALL))["length"]
    assert length["default"]
    suggested = answers.exact(page_query(max_iters=length["suggested"], **SMALL))["length"]
    assert (suggested["per_parameter"], suggested["default"]) == ("20", False)


# ---- fit

FEW = SMALL | {"gradient_accumulation_steps": 2}  # few candidates


def test_fit_returns_settings_that_fit_with_reasons_runners_up_and_a_curve() -> None:
    given = {"batch_size": 24, "gradient_accumulation_steps": 2, "budget": "2GiB", "n_layer": 2}
    query = page_query(**given)
    assert answers.plan(query)["verdict"] == "does_not_fit"
    found = answers.fitted(query)
    for each in (found["chosen"], *found["runners_up"]):
        after = page_query(**(given | each["settings"]))
        assert answers.plan(after)["verdict"] == "fits"
        assert after.config.tokens_per_step == query.config.tokens_per_step
    assert len(found["runners_up"]) > 1
    assert any("batch_size 24 →" in reason for reason in found["reasons"])
    assert not any("stay free" in reason for reason in found["reasons"])  # a given budget gets no margin
    needs, speeds = zip(*found["points"], strict=True)
    assert list(needs) == sorted(needs)
    assert list(speeds) == sorted(speeds)
    assert len(needs) <= answers.MAX_POINTS
    assert needs[-1] <= found["limit"]

    within = answers.fitted(query, within=str(needs[1]))  # what a click on the second point asks for
    assert 0 < within["chosen"]["needs"] <= needs[1]


def test_fit_names_the_change_of_trainer_first() -> None:
    found = answers.fitted(page_query(trainer="nanogpt", **FEW))
    assert found["chosen"]["settings"]["trainer"] == "fitgpt"
    assert found["reasons"][0].startswith("trainer nano")
    assert found["given"] is None  # the curve is of fitgpt's runs


def test_another_goal_is_found_the_same_way() -> None:
    found = answers.fitted(page_query(**FEW), "smallest-memory")
    assert found["chosen"]["needs"] < found["given"]["needs"]
    with pytest.raises(UsageError, match="none of fastest"):
        answers.fitted(page_query(**FEW), "cheapest")


def test_where_nothing_fits_there_are_suggestions_with_settings() -> None:
    small = dict(n_layer=2, batch_size=2, gradient_accumulation_steps=1)
    found = answers.fitted(page_query(budget="600MiB", **small))
    assert found["chosen"] is None
    assert "smallest memory" in found["too_small"]
    assert any(each["allow"] == "lossy" for each in found["suggestions"]) or found["suggestions"][0]["settings"]
    budget = next(each["settings"] for each in found["suggestions"] if "budget" in each["settings"])
    assert answers.fitted(page_query(**small, **budget))["chosen"]


def test_fit_uses_the_limits_of_the_fit_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin of an estimated GPU, the limit on CPU RAM, and a small batch on a GPU that others use."""
    targets: list[Any] = []
    monkeypatch.setitem(GOALS, "fastest", lambda config, target, allow: (
        targets.append(target), find_fastest(config, target, allow))[1])
    query = page_query(**FEW)
    assert "128.0 MiB stay free as a margin" in answers.fitted(query)["reasons"][-1]
    assert targets[0].budget.reserve_limit == query.target.budget.reserve_limit - OUTSIDE_ERROR
    assert targets[0].host_bytes == int(host.SHARE * fit_planning.ASSUMED_HOST)
    assert targets[0].most_batch is None
    answers.fitted(page_query(**FEW, budget="2GiB"))
    assert targets[1].budget.reserve_limit == page_query(**FEW, budget="2GiB").target.budget.reserve_limit

    monkeypatch.setattr(fit_planning, "other_users_on_gpu", lambda device: True)
    monkeypatch.setattr(host, "available_memory", lambda: 10 * GiB)
    on_this_machine = query._replace(questions=replace(query.questions, gpu=""))
    found = answers.fitted(on_this_machine)
    assert (targets[2].most_batch, targets[2].host_bytes) == (4, 8 * GiB)
    assert "Another user computes" in found["reasons"][0]
