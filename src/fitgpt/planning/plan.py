"""What `plan` answers: a forecast against a budget, in words as the command prints them, and under the names of --json.

Python gets it whole from `fitgpt.plan`; what only some answers need is worked out when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from ..config.run_config import RunConfig
from ..nouns import Basis, Budget, Change, Forecast, MemoryPlan, Outlook, PricedChange
from ..show import planning as show
from ..show.terminal import columns
from . import forecast
from .budget import Place
from .changes import Option, holdings, priced, single_changes, smallest_that_fit
from .duration import likely_speed, outlook
from .plan_file import document
from .resolve import Question
from .track_record import basis_of

Fields = tuple[tuple[Any, ...], ...]  # of some changes: what one process can tell another


class Plan:
    """`print` it for the table; `to_dict()` has the names of --json; `memory` is what it is all made of."""

    def __init__(self, question: Question, found: Place, memory: MemoryPlan,
                 find_changes: Callable[[], Fields] | None = None) -> None:
        self.memory = memory
        self._question, self._found = question, found
        self._find_changes = find_changes or partial(changes_of, question.config, found, question.asked.trainer)

    # ---- of the memory

    @property
    def forecast(self) -> Forecast:
        return self.memory.forecast

    @property
    def budget(self) -> Budget:
        return self.memory.budget

    @property
    def headroom(self) -> int:
        return self.memory.headroom

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def process_bytes(self) -> int:
        return self.memory.process_bytes

    # ---- of the run

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The smallest that would make it fit, where it does not."""
        return () if self.fits else tuple(Change(*fields) for fields in self._find_changes())

    @cached_property
    def run(self) -> Outlook:
        return outlook(self._question.config, self.forecast, self._question.data, self._found.card)

    @cached_property
    def basis(self) -> Basis:
        return basis_of(self.memory)

    @cached_property
    def _options(self) -> list[PricedChange] | None:
        asked = self._question.asked
        return _priced(self._question.config, self._found, asked.trainer) if asked.options else None

    # ---- told

    def to_dict(self) -> dict[str, Any]:
        """What --json prints."""
        return {**document(self.memory, self._found.setting.torch, self.basis),
                "run": {**self.run._asdict(), "tokens_per_param": self.run.tokens / self.run.params},
                "formulas": {share.owner: share.formula for share in self.forecast.owners_at_peak},
                "changes": [change._asdict() for change in self.changes],
                "options": self._options and [{**each._asdict(), "change": each.change._asdict()}
                                              for each in self._options],
                "notes": list(self._question.notes), "sources": list(self.budget.sources)}

    def text(self, width: int, colour: bool = False) -> str:
        model = _in_words(forecast.settled(self._question.config, self._found.setting, self._question.asked.trainer))
        told = show.plan_text(self.memory, self.run, self.basis, model=model, suggestions=self.changes,
                              neighbours=self._found.neighbours, notes=self._question.notes, width=width,
                              colour=colour, priced=self._options is not None)
        if self._options is None:
            return told
        return told + "\n" + show.option_table(self._options, self.forecast.needs, self.budget.reserve_limit, width)

    def __str__(self) -> str:
        return self.text(columns()).rstrip("\n")

    def __repr__(self) -> str:
        return f"<fitgpt.plan: {'fits' if self.fits else 'does not fit'}: {show.verdict(self.memory)}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def changes_of(config: RunConfig, found: Place, trainer: str) -> Fields:
    """That make it fit. Most are settled without a tape: by what a run must map at least, or by what none exceeds."""
    from .closed import mix_of
    from .folded import Folded

    folded, limit = Folded(found.setting), found.budget.reserve_limit

    def known(option: Option) -> bool | None:
        if option.change.trainer != "fitgpt" or option.config.eval_only:
            return None
        shape, mix = folded.shape(option.config), mix_of(option.config.levels)
        return shape.could_fit(mix, limit) and (shape.needs(mix) <= limit or None)

    changes = smallest_that_fit(forecast.settled(config, found.setting, trainer), found.setting, found.budget,
                                trainer, known=known)
    return tuple(tuple(change) for change in changes)


def _priced(config: RunConfig, found: Place, trainer: str) -> list[PricedChange]:
    config = forecast.settled(config, found.setting, trainer)
    before = holdings(config, found.setting, trainer)
    now = likely_speed(config, found.card, trainer)

    def speed(option: Option) -> float | None:
        after = likely_speed(option.config, found.card, option.change.trainer)
        return after / now if after and now else None

    return [priced(option, before, found.setting, found.budget)._replace(speed=speed(option))
            for option in single_changes(config, trainer, compiles=found.setting.compiles)]


def _in_words(config: RunConfig) -> str:
    layers = f"{config.n_layer} layer{'s' if config.n_layer > 1 else ''}"
    return (f"{layers} of width {config.n_embd:,}, batch {config.batch_size:,} × {config.block_size:,}, "
            f"{config.dtype}, {'compiled' if config.compile else 'eager'}")
