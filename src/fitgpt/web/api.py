"""API requests → answers, as dicts: the same for the page of `fitgpt serve` and for the static site."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl

from ..core.errors import FitError
from . import answers
from .answers import Answer
from .form import PageQuery, form, read, settings_in, without_dashes

if TYPE_CHECKING:
    from .live_run import LiveRun

QUICK = ("form", "plan", "step", "live")
FROM_SETTINGS: dict[str, Callable[[PageQuery], Answer]] = {
    "plan": answers.plan, "step": answers.step, "exact": answers.exact, "gpus": answers.all_gpus,
    "fixes": answers.families}
NAMES = ("form", "live", "fix", "fit", "paste", *FROM_SETTINGS)


class ApiRequest(NamedTuple):
    """What the page asks for: one of NAMES, and what that answer depends on."""

    name: str
    query: str | None = ""  # the settings, and arguments of fix and fit; None: paste without a plan
    text: str = ""          # of paste
    run: str = ""           # of live: a run folder, or empty to look for one


def answer_json(request: ApiRequest) -> str:
    return json.dumps(answer(request), allow_nan=False)


def answer(request: ApiRequest) -> Answer:
    """An invalid setting becomes a `problem` with its fix, a bug a `bug`."""
    try:
        match request.name:
            case "form":
                return form()
            case "live":
                return _live_run(request.run).look()
            case "paste":
                from .paste import paste  # a fifth of all imports, which the first verdict need not wait for

                return paste(request.text, request.query)
            case "fix":
                return answers.fix(read(request.query or ""), **arguments(request.query, "family"))
            case "fit":
                return answers.fitted(read(request.query or ""), **arguments(request.query, "goal", "allow", "within"))
            case name:
                return FROM_SETTINGS[name](read(request.query or ""))
    except FitError as error:
        return {"problem": {"what": without_dashes(error.what), "fix": without_dashes(error.fix),
                            "settings": settings_in(error.fix)}}
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {"bug": f"This is a bug in fitgpt: {' '.join(traceback.format_exception_only(error)[-1].split())}"}


def arguments(query: str | None, *names: str) -> dict[str, str]:
    """The arguments of a request, without its settings."""
    return {name: text for name, text in parse_qsl(query or "") if name in names}


@cache  # by run folder: it keeps the history of what it has seen
def _live_run(folder: str) -> LiveRun:
    from .live_run import LiveRun

    return LiveRun(folder)
