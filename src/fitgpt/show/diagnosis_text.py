"""A Diagnosis as text, for `fitgpt explain`: what happened, why, where the memory is, what to do."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.units import MiB
from ..diagnosis.diagnose import Diagnosis, Remedy
from .terminal import LABEL_WIDTH, labelled, wrap

_SHARES_LABEL = {"message": "GPU", "reading": "GPU", "plan": "peak", "run": "peak"}
_FITS = {True: ": fits", False: ": not enough alone", None: ""}


def diagnosis_text(diagnosis: Diagnosis, width: int = 80) -> str:
    lines = wrap(diagnosis.title, width)
    if diagnosis.what:
        lines += ["", *labelled("what", diagnosis.what, width)]
    if diagnosis.causes:
        lines += ["", *_labelled_once("why", [f"{cause.code}  {cause.what}" for cause in diagnosis.causes], width)]
    if diagnosis.shares:
        label = _SHARES_LABEL[diagnosis.subject].ljust(LABEL_WIDTH)
        lines += ["", f"{label}{diagnosis.shares_of}, in MiB", *_share_lines(diagnosis, width)]
    if diagnosis.remedies:
        label = "change" if diagnosis.subject in ("plan", "run") else "fix"
        lines += ["", *_remedy_lines(label, diagnosis.remedies, width)]
    if diagnosis.notes:
        lines += ["", *_labelled_once("note", diagnosis.notes, width)]
    if diagnosis.needed:
        lines += ["", f"{'more':<{LABEL_WIDTH}}would be known with"]
        for each in diagnosis.needed:
            lines += wrap(each, width, f"{' ' * LABEL_WIDTH}- ")
    return "\n".join(lines)


def _labelled_once(label: str, texts: list[str] | tuple[str, ...], width: int) -> Iterator[str]:
    for index, text in enumerate(texts):
        yield from labelled("" if index else label, text, width)


def _share_lines(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    """Shares of at least half a MiB, or all of them if there is none."""
    shares = [share for share in diagnosis.shares if share.nbytes >= MiB / 2] or diagnosis.shares
    digits = max(len(f"{share.nbytes / MiB:,.0f}") for share in shares)
    for share in shares:
        text = f"{share.what}: {share.note}" if share.note else share.what
        yield from wrap(text, width, f"{' ' * LABEL_WIDTH}{share.nbytes / MiB:>{digits},.0f}  ")


def _remedy_lines(label: str, remedies: tuple[Remedy, ...], width: int) -> Iterator[str]:
    """Each command on a line of its own, unbroken, so that it can be copied; its effect below."""
    for index, remedy in enumerate(remedies):
        yield f"{'' if index else label:<{LABEL_WIDTH}}{remedy.todo}"
        costs = f". Costs: {remedy.costs}" if remedy.costs else ""
        yield from wrap(f"{remedy.effect}{_FITS[remedy.fits]}{costs}", width, " " * (LABEL_WIDTH + 2))
