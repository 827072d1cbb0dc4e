"""A run, a card and what may be changed → the fastest settings that fit; or the least that the run could live in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from ..config.memory_savers import LEVELS
from ..config.run_config import RunConfig
from ..core.units import MiB, show_bytes
from ..hardware import gpus
from ..hardware.gpus import Card
from ..memory.setting import Setting
from ..nouns import Budget, Decision, Fitted, Standing, WayOut
from . import model_sizes
from .changes import holdings
from .forecast import budget_for
from .permission import ROUNDING, in_words, permitted, refused
from .reasons import decisions
from .search import ALIKE, WORTH_A_CHANGE, WORTH_A_LOSS, WORTH_THE_HOST, Aside, Finalist, Search, flags, in_turn

NOTHING_ELSE = "nothing of the shape asked for fits"
UNSURE = 128 * MiB  # what cards.outside_by_rule may be off by: most messages it was drawn through lie within 110 MiB
SMALLEST_TRIED = 8  # of the candidates that hold least, before a shape is given up
EVERYTHING = frozenset({"context", "model", *ROUNDING})
Variant = tuple[str, RunConfig]  # what it takes: "context" or "model"


class Here(NamedTuple):
    """Where a run is to be fitted."""

    setting: Setting
    budget: Budget
    card: Card | None = None
    most_batch: int | None = None   # where others compute on the card: never more than was asked for
    host_bytes: int | None = None   # None: not known
    aside: Aside = in_turn          # who does a part of the work

    def search(self, config: RunConfig, allow: frozenset[str]) -> Search:
        return Search(config, self.setting, self.budget, self.card, allow, self.most_batch, self.host_bytes, self.aside)


def fit_config(config: RunConfig, setting: Setting, budget: Budget, allow: frozenset[str] = frozenset(), *,
               card: Card | None = None, most_batch: int | None = None, host_bytes: int | None = None) -> Fitted:
    """The fastest settings that fit. `config` needs a vocabulary; `allow`: see permission.parse_allow."""
    return fit(config, Here(setting, budget, card, most_batch, host_bytes), allow)


def fit(config: RunConfig, here: Here, allow: frozenset[str] = frozenset()) -> Fitted:
    may = permitted(config, allow)
    search = here.search(config, may)
    finalists = search.finalists()
    if finalists:
        return fitted(config, search, finalists, allow)
    variants = list(_variants(config, may))
    words = {variant: permission for permission, variant in variants}
    for smaller in those_that_could_fit([variant for _, variant in variants], here, may):
        if finalists := smaller.finalists():
            return fitted(config, smaller, finalists, allow, words[smaller.asked])
    return nothing(config, search, here, allow)


def fitted(said: RunConfig, search: Search, finalists: list[Finalist], allow: frozenset[str], permission: str = "",
           why: str = NOTHING_ELSE) -> Fitted:
    """The first of the finalists, with what is known of it; `said`: what was asked for before the shape changed, and
    `why` it was."""
    best, *others = finalists

    def told(standing: Standing) -> Standing:
        changed = flags(said, standing.config)
        return standing._replace(flags=changed, permission=(permission if changed else "") or standing.permission)

    needs = search.aside(lambda: (search.needs(said), search.needs(best.config)))
    reasons, (of_said, of_best) = decisions(search, said, best.config, why), needs()
    return Fitted(search.budget, told(search.standing(said, "free", needs=of_said)),
                  told(search.standing(best.config, best.stem.way.permission, needs=of_best)), reasons,
                  tuple(told(search.runner_up(other)) for other in others), search.frontier(),
                  considered=search.considered, replayed=search.replays,
                  notes=(*_notes(said, allow), *_left_unspent(said, best.config, search), *_not_taken(best, others)))


def _left_unspent(said: RunConfig, chosen: RunConfig, search: Search) -> list[str]:
    """A run that stays as it was asked for may leave memory that its layers could use."""
    if chosen != said or set(said.levels) == {LEVELS[0]} or search.spends_all(said):
        return []
    return ["Its layers could keep more, and it would still fit; by the estimate nothing that spends the spare memory "
            "is enough faster to be worth a change."]


def _not_taken(best: Finalist, others: Sequence[Finalist]) -> list[str]:
    """Why what is faster was not chosen, where the estimate could tell it to be."""
    if not any((1 + ALIKE) * other.seconds < best.seconds for other in others):
        return []
    return [f"A runner-up is faster, but not by enough: lossy savers must gain {WORTH_A_LOSS:.0%}, more in the host's "
            f"memory {WORTH_THE_HOST:.0%} (its speed is assumed), and any change {WORTH_A_CHANGE:.1%}; nearer than "
            f"{ALIKE:.0%}, fewer changes and less memory count.".replace("%", " %")]


def because(said: RunConfig, chosen: RunConfig, here: Here) -> tuple[Decision, ...]:
    """Why each thing is done otherwise, of a config that was chosen by other means: by a clock."""
    return decisions(here.search(chosen, frozenset()), said, chosen, NOTHING_ELSE)


def smallest(config: RunConfig, here: Here, allow: frozenset[str]) -> Fitted:
    """The least memory that the run can live in, whatever its speed."""
    search = here.search(config, permitted(config, allow))
    search.scan()
    least, permission = search.least()
    told = search.standing(least, permission)
    return Fitted(search.budget, search.standing(config, "free"), told if told.fits else None,
                  decisions(search, config, least, "") if told.fits else (), frontier=search.frontier(), least=told,
                  considered=search.considered, replayed=search.replays, notes=_notes(config, allow))


def could_fit(search: Search) -> bool:
    """Whether the smallest candidates do, by replays."""
    return any(search.fits(search.config_of(one, one.mix)) for one in search.small_enough(search.ways)[:SMALLEST_TRIED])


def those_that_could_fit(variants: Sequence[RunConfig], here: Here, may: frozenset[str]) -> Iterator[Search]:
    """In their order, the smallest being the last: where not even that one could, none is looked at."""
    if variants and could_fit(here.search(variants[-1], may)):
        yield from (search for search in (here.search(variant, may) for variant in variants) if could_fit(search))


def nothing(config: RunConfig, search: Search, here: Here, allow: frozenset[str]) -> Fitted:
    """What the run would need at least, and what would help."""
    config_of_least, permission = search.least()
    least = search.standing(config_of_least, permission)
    return Fitted(search.budget, search.standing(config, "free"), None, least=least, frontier=search.frontier(),
                  considered=search.considered, replayed=search.replays,
                  ways_out=tuple(_ways_out(config, least.needs, here, allow)), notes=_notes(config, allow))


def _variants(config: RunConfig, allow: frozenset[str]) -> Iterator[Variant]:
    """A shorter block first, then a smaller model, then both."""
    if "context" in allow:
        yield from (("context", each) for each in model_sizes.shorter(config))
    if "model" in allow:
        yield from (("model", each) for each in model_sizes.narrower(config))
    if {"context", "model"} <= allow:
        yield from (("model", small) for short in model_sizes.shorter(config) for small in model_sizes.narrower(short))


def _ways_out(config: RunConfig, least: int, here: Here, allow: frozenset[str]) -> Iterator[WayOut]:
    """What could be said besides so that something fits, each tried: more of the card, one permission more, or all of
    them, another card."""
    yield from _more_of_the_card(config, least, here.budget)
    permissions = list(_permissions(config, here, allow))
    yield from permissions
    everything = permitted(config, EVERYTHING)
    if not permissions and everything != permitted(config, allow):
        variants = [variant for _, variant in _variants(config, everything)]
        yield from _permission("lossy,context,model", variants, here, everything, "a smaller model")
    if not (config.budget or config.leave):
        yield from _another_card(least)


def _another_card(least: int) -> Iterator[WayOut]:
    room = [card for card in gpus.load() if card.capability and card.capability >= (8, 0) and card.memory_gb
            and "Laptop" not in card.name and budget_for(card).reserve_limit - UNSURE >= least]
    if room:
        smallest_one = min(room, key=lambda card: card.memory_gb or 0)
        yield WayOut((f"--gpu={smallest_one.name}",), least, "as allowed: the smallest card of the table with the room")


def _more_of_the_card(config: RunConfig, least: int, budget: Budget) -> Iterator[WayOut]:
    """Where the user keeps the run from memory that is there."""
    there, needed = budget.usable - budget.others, least + budget.outside
    if budget.budget < there >= needed:
        budgeted = min(needed + UNSURE, there)
        flag = f"--leave={(there - budgeted) // MiB}MiB" if config.leave else f"--budget={-(-budgeted // MiB)}MiB"
        yield WayOut((flag,), least, "as allowed, in more of the card")


def _permissions(config: RunConfig, here: Here, allow: frozenset[str]) -> Iterator[WayOut]:
    tried: dict[str, tuple[Iterable[RunConfig], str]] = {
        "lossy": ([config], "the same model and block, with lossy savers"),
        "context": (model_sizes.shorter(config), "a shorter block"),
        "model": (model_sizes.narrower(config), "a smaller model")}
    for word, (variants, words) in tried.items():
        more = permitted(config, allow | (frozenset(ROUNDING) if word == "lossy" else {word}))
        if more != permitted(config, allow):
            yield from _permission(in_words(allow | {word}), variants, here, more, words)


def _permission(typed: str, variants: Iterable[RunConfig], here: Here, may: frozenset[str], words: str
                ) -> Iterator[WayOut]:
    for search in islice(those_that_could_fit(list(variants), here, may), 1):
        shape = "" if words.startswith("the same") else f": {model_sizes.words(search.asked)}"
        yield WayOut((f"--allow={typed}",), holdings(search.least()[0], here.setting).needs, f"{words}{shape}")


def _notes(config: RunConfig, allow: frozenset[str]) -> tuple[str, ...]:
    told = refused(config, allow)
    return (told,) if told else ()


def ways_out_in_words(fitted_one: Fitted) -> str:
    """What would fit, each as a flag and what it means; a sentence."""
    told = [f"{' '.join(way.flags)} ({way.words})" for way in fitted_one.ways_out]
    return f"Something fits with {'; or with '.join(told)}." if told else "Nothing that may be allowed makes it fit."


def too_small(fitted_one: Fitted) -> str:
    """Why there is no plan, in a sentence."""
    least, budget = fitted_one.least, fitted_one.budget
    assert least is not None  # it is always worked out where nothing fits
    return (f"Nothing fits: the least memory this run can live in is {show_bytes(least.needs)}, and "
            f"{show_bytes(budget.reserve_limit)} may be reserved.")
