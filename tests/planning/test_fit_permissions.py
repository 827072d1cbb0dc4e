"""What `fit` chooses with more permission: never slower by the estimate, and more memory only for a gain beyond the
estimate's error. Over 200 generated runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.hardware import gpus
from fitgpt.planning.budget import Budget, platform_for
from fitgpt.planning.fit_search import Candidate, FitTarget, SaverSet, Search, parse_allow
from fitgpt.planning.layer_costs import CostCache

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("fit permissions")]  # one process makes the cases

GPUS = ("4070", "3060", "h200", "2080ti")
# Of what the given run needs, the share that the GPU offers.
SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0, 1.03, 1.1, 1.2, 1.5, 2.0, 4.0)
CHAINS = (("", "lossy", "lossy,muon"), ("", "residual", "lossy"))
SHAPES = [RunConfig(n_layer=layers, n_head=width // 64, n_embd=width, block_size=block, vocab_size=vocab)
          for layers, width, block, vocab in ((2, 128, 64, 5000), (3, 256, 64, 65), (4, 192, 128, 50304))]
CASES = 15  # × SHARES


class Case:
    """A generated run on a GPU of some size. Memory is that of closed forms, which a search confirms by replays."""

    def __init__(self, config: RunConfig, target: FitTarget, settings: list[tuple[RunConfig, SaverSet]],
                 costs: CostCache) -> None:
        self.config, self.target, self.settings, self.costs = config, target, settings, costs
        self.all_candidates: list[Candidate] = []
        full = self.search("lossy,muon")
        self.all_candidates = [one for each in settings for one in full.with_mixes(*each)]

    def search(self, allow: str) -> Search:
        search = self.target.search(self.config, parse_allow(allow))
        search.costs = self.costs
        search.candidates = [each for each in self.all_candidates if each.savers in search.saver_sets]
        return search

    def choice(self, allow: str) -> tuple[Search, Candidate | None]:
        search = self.search(allow)
        return search, search.choose()


def generated(number: int) -> Iterator[Case]:
    """One run on GPUs of several sizes."""
    rng = Random(number)
    card = gpus.find(GPUS[number % len(GPUS)])
    platform = platform_for(card)
    batch, accumulation = rng.choice(((4, 1), (2, 2), (1, 4), (3, 2)))
    config = replace(rng.choice(SHAPES), batch_size=batch, gradient_accumulation_steps=accumulation,
                     dtype="float16", compile=platform.compiles, eval_batch_size=rng.choice((0, 1)),
                     saved_activations=rng.choice(("matmuls", "matmuls", "all", "input")))
    costs, roomy = CostCache(platform), FitTarget(platform, Budget(card.name, 10**12, 0, 10**12, 0), card)
    search = roomy.search(config, parse_allow("lossy,muon"))
    search.costs = costs
    settings = [(each, savers) for savers in search.saver_sets
                for each in search.configs(savers, search.batches(savers))]
    for share in SHARES:
        limit = int(share * search.estimated_needs(config))
        yield Case(config, FitTarget(platform, Budget(card.name, limit, 0, limit, 0), card), settings, costs)


def violations(cases: list[Case], chains: tuple[tuple[str, ...], ...] = CHAINS) -> Iterator[str]:
    for number, case in enumerate(cases):
        chosen = {allow: case.choice(allow) for allow in {allow for chain in chains for allow in chain}}
        for fewer, more in (pair for chain in chains for pair in pairwise(chain)):
            (_, before), (search, after) = chosen[fewer], chosen[more]
            where = f"run {number}, {fewer!r} → {more!r}"
            if before is None or after is None:
                if after is None and before is not None:
                    yield f"{where}: nothing fits with more permission"
                continue
            if after.seconds > before.seconds:
                yield f"{where}: slower"
            needs_before, needs = (search.needs(search.config_of(each)) for each in (before, after))
            if needs > needs_before and not search.gains(after, before):
                yield f"{where}: {needs - needs_before} bytes more for a gain within the error"
        for allow, (search, candidate) in chosen.items():
            if candidate is not None and (given := search.unchanged()) is not None:
                config = search.config_of(candidate)
                if config != search.given and not search.gains(candidate, given):
                    yield f"run {number}, {allow!r}: changed for a gain within the error"
                if search.needs(config) > search.needs(search.given) and not search.gains(candidate, given):
                    yield f"run {number}, {allow!r}: more than requested for a gain within the error"


@pytest.fixture(autouse=True)
def no_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "needs", Search.estimated_needs)
    monkeypatch.setattr(Search, "fits", lambda search, config: search.estimated_needs(config) <= search.limit)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [case for number in range(CASES) for case in generated(number)]


def test_more_permission_is_never_slower_and_spends_no_memory_on_a_gain_within_the_error(cases: list[Case]) -> None:
    assert len(cases) >= 200
    assert list(violations(cases)) == []


def test_the_generated_runs_are_not_trivial(cases: list[Case]) -> None:
    """Some stay as given, others change without permission, others only with it."""
    def is_changed(case: Case, allow: str) -> bool:
        search, found = case.choice(allow)
        return found is not None and search.config_of(found) != case.config

    changed = [(is_changed(case, ""), case.choice("lossy")[1] != case.choice("")[1]) for case in cases[::5]]
    assert len(set(changed)) == 4


def any_gain(search: Search, candidate: Candidate, other: Candidate) -> bool:
    return candidate.seconds < other.seconds


def less_memory(search: Search, candidate: Candidate, other: Candidate) -> bool:
    return candidate.mapped < other.mapped


@pytest.mark.parametrize("broken", [any_gain, less_memory])
def test_a_rule_without_the_error_is_noticed(cases: list[Case], monkeypatch: pytest.MonkeyPatch,
                                             broken: Callable[..., object]) -> None:
    class BrokenSearch(Search):
        def choose(self) -> Candidate | None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Search, "gains", broken)
                return super().choose()

    monkeypatch.setattr(FitTarget, "search", lambda self, config, allow: BrokenSearch(config, self, allow))
    assert list(violations(cases[::9], (("", "lossy"),)))
