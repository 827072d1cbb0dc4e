"""Whether a run fits a GPU, in one word: of plans, traces, ranks and rows of a list of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from ..core.units import GiB, show_bytes
from .budget import Budget

DESKTOP = GiB  # headroom that a GeForce which is not in this machine should have: a desktop uses 0.3 to 2 GiB


class Verdict(StrEnum):
    FITS = "fits"                  # all that the run will do was seen, and fits
    TIGHT = "tight"                # it fits if nothing else uses the GPU, or if the forecast is not too low
    NOT_ALL_SEEN = "not_all_seen"  # what was seen fits
    DOES_NOT_FIT = "does_not_fit"

    @property
    def exit_code(self) -> int:
        return 0 if self is Verdict.FITS else 1 if self is Verdict.DOES_NOT_FIT else 10


def verdict_of(headroom: int, not_seen: Sequence[str] = (), tight: Sequence[str] = ()) -> Verdict:
    """`not_seen`: what the run does besides; `tight`: why it may run out of memory all the same."""
    if headroom < 0:
        return Verdict.DOES_NOT_FIT
    return Verdict.NOT_ALL_SEEN if not_seen else Verdict.TIGHT if tight else Verdict.FITS


def safe_limit(budget: Budget, lowest_error: float) -> int:
    """The most that a run may need without being tight. `lowest_error`: of earlier forecasts of such runs, at most 0;
    −0.05: one was 5 % too low."""
    limit = budget.reserve_limit
    return min(limit - (DESKTOP if budget.desktop else 0), int(limit * (1 + lowest_error)))


def tight_reasons(needs: int, budget: Budget, lowest_error: float) -> list[str]:
    """Why a run that fits may run out of memory all the same, one sentence each; none if it does not fit, or needs no
    more than `safe_limit`."""
    found, limit = list[str](), budget.reserve_limit
    if not safe_limit(budget, lowest_error) < needs <= limit:
        return found
    if budget.desktop and needs > limit - DESKTOP:
        found.append("A desktop takes 0.3 to 2 GiB, and none is counted: --others 1GiB plans with one.")
    if needs > limit * (1 + lowest_error):
        found.append(f"A forecast of such a run was once {-lowest_error:.1%} too low; this run would then need "
                     f"{show_bytes(round(needs / (1 + lowest_error)))}.")
    return found
