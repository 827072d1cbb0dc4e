"""The page's answers equal what `fitgpt plan`, `fit` and `explain` compute."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitgpt.core.errors import DoesNotFit
from fitgpt.core.units import GiB, MiB
from fitgpt.hardware import host
from fitgpt.planning import fit as fit_planning
from fitgpt.planning.fit_goals import OUTSIDE_ERROR, find_fastest
from fitgpt.planning.plan import plan_for, verdicts
from fitgpt.web import answers
from fitgpt.web.form import read
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
        assert answers.plan(near)["fits"] == answers.exact(near)["fits"] == (mib >= 0), mib


@pytest.mark.parametrize("options", [
    dict(), dict(n_layer=24), dict(compile=False), dict(recompute="input"),
    dict(trainer="nanogpt", n_layer=24, n_head=16, n_embd=1024, batch_size=2),
    dict(trainer="nanogpt", n_layer=48, n_head=25, n_embd=1600, batch_size=1)], ids=str)
def test_a_deep_run_gets_its_final_verdict_and_bars_in_the_first_answer(options: dict[str, Any]) -> None:
    plan, exact = answers.plan(page_query(**options)), answers.exact(page_query(**options))
    assert (plan["fits"], plan["verdict"]) == (exact["fits"], exact["verdict"])
    phases = {each["name"]: each["allocated"] for each in exact["phases"]}
    assert all(row["allocated"] == phases[row["name"]] for row in plan["bars"]["rows"])


def test_the_summary_says_what_is_reserved_or_what_does_not_fit() -> None:
    assert re.fullmatch(r"reserves \S+ GiB of \S+ GiB\.", answers.plan(page_query())["summary"])
    assert "tensors alone take" in answers.plan(page_query(budget="2GiB"))["summary"]


def test_a_limit_just_below_needs_fails_by_fragmentation() -> None:
    query = page_query(trainer="nanogpt", compile=False, **SMALL)
    needs, outside = answers.exact(query)["needs"], query.target.budget.outside
    budget = f"{(needs + outside) // MiB - 2}MiB"
    plan = answers.plan(page_query(trainer="nanogpt", compile=False, budget=budget, **SMALL))
    assert not plan["fits"]
    assert plan["peak"] < needs - 2 * MiB
    assert "fragmentation" in plan["summary"]


def test_the_notes_run_fits_without_other_programs_or_with_fitgpt() -> None:
    assert answers.plan(read(NOTES))["fits"] is False
    assert answers.plan(read(NOTES.replace("others=2118MiB", "others=0MiB")))["fits"]
    assert answers.plan(read(NOTES.replace("nanogpt", "fitgpt")))["fits"]


def test_every_gpu_has_the_verdict_of_a_plan_for_it() -> None:
    query = page_query(others="1GiB", batch_size=24)
    rows = {row["name"]: row for row in answers.all_gpus(query)["gpus"]}
    expected = verdicts(query.config, "fitgpt", 1024 * MiB)
    assert {name: row["fits"] for name, row in rows.items()} == {
        each.name: each.fits for each in expected if each.name in rows}
    assert len({row["fits"] for row in rows.values()}) == 2
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


# ---- fit


def test_fit_returns_settings_that_fit_with_reasons() -> None:
    query = page_query(batch_size=24, budget="2GiB", n_layer=2)
    assert not answers.plan(query)["fits"]
    found = answers.fitted(query)
    after = page_query(**({"batch_size": 24, "budget": "2GiB", "n_layer": 2} | found["settings"]))
    assert answers.exact(after)["fits"]
    assert after.config.tokens_per_step == query.config.tokens_per_step
    assert any("batch_size 24 →" in reason for reason in found["reasons"])
    assert not any("stay free" in reason for reason in found["reasons"])  # a given budget gets no margin
    assert "128.0 MiB stay free as a margin" in answers.fitted(page_query(n_layer=2))["reasons"][-1]
    with pytest.raises(DoesNotFit, match="smallest memory"):
        answers.fitted(page_query(budget="600MiB", n_layer=2))


def test_fit_uses_the_limits_of_the_fit_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin of an estimated GPU, the limit on CPU RAM, and a small batch on a GPU that others use."""
    targets: list[Any] = []
    monkeypatch.setattr(answers, "find_fastest",
                        lambda config, target, **more: (targets.append(target), find_fastest(config, target))[1])
    query = page_query(**SMALL)
    answers.fitted(query)
    assert targets[0].budget.reserve_limit == query.target.budget.reserve_limit - OUTSIDE_ERROR
    assert targets[0].host_bytes == int(host.SHARE * fit_planning.ASSUMED_HOST)
    assert targets[0].most_batch is None
    answers.fitted(page_query(**SMALL, budget="2GiB"))
    assert targets[1].budget.reserve_limit == page_query(**SMALL, budget="2GiB").target.budget.reserve_limit

    monkeypatch.setattr(fit_planning, "other_users_on_gpu", lambda device: True)
    monkeypatch.setattr(host, "available_memory", lambda: 10 * GiB)
    on_this_machine = query._replace(questions=replace(query.questions, gpu=""))
    found = answers.fitted(on_this_machine)
    assert (targets[2].most_batch, targets[2].host_bytes) == (4, 8 * GiB)
    assert "Another user computes" in found["reasons"][0]


# ---- explain


def test_a_pasted_message_is_explained_with_and_without_the_plan() -> None:
    text = (ROOT / "tests" / "diagnosis" / "messages" / "nanogpt-88.txt").read_text(encoding="utf-8")
    assert "394.0 MiB" in answers.explain(text, None)["title"]
    found = answers.explain("CUDA out of memory. Tried to allocate 3.07 GiB (GPU 0; 11.65 GiB total capacity; 7.10 GiB "
                            "already allocated; 1.10 GiB free; 7.30 GiB reserved in total by PyTorch)",
                            NOTES + "&compile=False")
    assert "16 × 1,024 × 50,304 × 4" in found["what"]
    assert any(remedy["settings"] for remedy in found["remedies"])
    assert "no message about memory" in answers.explain("", None)["title"]
    assert "no message about memory" in answers.explain("<script>alert(1)</script>", None)["title"]
