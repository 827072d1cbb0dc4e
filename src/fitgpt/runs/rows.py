"""What rows of a run's record say of memory. Anything in a row may be missing, or of another kind than expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..nouns import MemoryReading, OwnerShare, PhaseForecast

Row = Mapping[str, Any]

LARGEST = 2**63  # bytes and steps beyond it are no measurement


def last_of(rows: Sequence[Row], kind: str) -> Row:
    """The last row of a kind: what a run said when it began last counts. Empty where there is none."""
    return next((row for row in reversed(rows) if row.get("kind") == kind), {})


def memory_in(row: Row) -> MemoryReading:
    told = _mapping(row.get("memory"))
    return MemoryReading(*(whole(told.get(name)) or 0 for name in MemoryReading.__dataclass_fields__))


def phases_in(row: Row) -> dict[str, PhaseForecast]:
    """Of a row that tells of phases, as planfile.in_bytes has them: what was planned, or measured."""
    told = {phase: _mapping(held) for phase, held in _mapping(row.get("phases")).items()}
    return {phase: PhaseForecast(whole(held.get("allocated_bytes")) or 0, whole(held.get("reserved_bytes")) or 0)
            for phase, held in told.items() if held}


def owners_in(row: Row) -> tuple[OwnerShare, ...]:
    """Of a plan's row: whose bytes lie there at the peak."""
    told = row.get("owners_at_peak")
    shares = [_mapping(each) for each in told] if isinstance(told, list) else []
    found = (OwnerShare(str(each.get("owner") or ""), whole(each.get("nbytes")) or 0, str(each.get("formula") or ""))
             for each in shares)
    return tuple(share for share in found if share.owner and share.nbytes)


def peaks_in(rows: Iterable[Row]) -> dict[str, PhaseForecast]:
    """The highest that the reports of steps and evaluations have; none where the device counts no memory."""
    peaks: dict[str, PhaseForecast] = {}
    for row in rows:
        phase, seen = {"step": "train", "eval": "eval"}.get(str(row.get("kind"))), memory_in(row)
        if phase and (seen.peak_allocated or seen.peak_reserved):
            before = peaks.get(phase, PhaseForecast(0, 0))
            peaks[phase] = PhaseForecast(max(before.allocated, seen.peak_allocated),
                                         max(before.reserved, seen.peak_reserved))
    return peaks


def whole(value: Any) -> int | None:
    """A size or a count; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
        return None
    return int(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
