"""The process that computes answers: a question a line comes in, an answer a line goes out.

The server stays free meanwhile, and can end this process when an answer takes too long or a question is withdrawn.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, BinaryIO

from ..core.errors import FitError
from .settings import flags_in, read

MOST_MEMORY = 4 * 2**30  # of address space: a question that needs more is refused, not the machine slowed down
GARBAGE_EVERY = 16       # answers: each leaves a few megabytes
ANSWERS_KEPT = 256       # of at most 80 KB

Question = Mapping[str, Any]
Answer = dict[str, Any]
Worked = Callable[[Question], Answer]

# What follows from the settings alone: module and function, imported when first asked for, since no worker answers all.
SETTLED = {"plan": "answers:plan", "whole": "answers:whole", "step": "answers:step", "exact": "answers:exact",
           "cards": "answers:all_cards", "fixes": "fixes:families", "fix": "fixes:fix", "fit": "fitted:fitted"}


def table(run: str = "") -> dict[str, Worked]:
    """Every question there is. `run`: the folder to look at live, or where to seek one."""
    from .live import Live

    live = Live(run)
    return {
        "form": lambda asked: _load("form:form")(),
        "explain": lambda asked: _load("pasted:explain")(asked["text"], asked["query"]),
        "live": lambda asked: live.look(),
        **dict.fromkeys(SETTLED, _settled),
    }


def _load(place: str) -> Callable[..., Answer]:
    module, _, name = place.partition(":")
    found: Callable[..., Answer] = getattr(import_module(f"fitgpt.web.{module}"), name)
    return found


def _settled(asked: Question) -> Answer:
    """Kept, where a card is named: what is free of the one that is here changes."""
    asking = _kept if "gpu=" in asked["query"] else _kept.__wrapped__
    return asking(asked["ask"], asked["query"], asked.get("more", ""))


@lru_cache(maxsize=ANSWERS_KEPT)
def _kept(ask: str, query: str, more: str) -> Answer:
    function = _load(SETTLED[ask])
    return function(read(query), more) if more else function(read(query))


def answered(asked: Question, known: Mapping[str, Worked]) -> Answer:
    """A run that cannot be is said where the verdict stands, with a button for the fix where it is one."""
    try:
        return known[asked["ask"]](asked)
    except FitError as error:
        return {"problem": {"what": error.what, "fix": error.fix, "settings": flags_in(error.fix)}}
    except MemoryError:
        return {"bug": "This question needs more memory than the page may take."}
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {"bug": f"This is a bug of ours: {' '.join(traceback.format_exception_only(error)[-1].split())}"}


def work(questions: BinaryIO, replies: BinaryIO, run: str) -> None:
    """Until there are no more. Collecting garbage takes as long as an answer, so it is done between some of them."""
    known = table(run)
    gc.disable()
    for number, line in enumerate(questions, 1):
        reply = json.dumps(answered(json.loads(line), known), ensure_ascii=True, allow_nan=False)
        replies.write(reply.encode() + b"\n")
        replies.flush()
        if number % GARBAGE_EVERY == 0:
            gc.collect()


def main() -> None:
    run, niceness = sys.argv[1:]
    _limit_memory()
    if hasattr(os, "nice"):
        os.nice(int(niceness))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints does not come between the answers
    work(sys.stdin.buffer, replies, run)


def _limit_memory() -> None:
    if os.name == "posix":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(MOST_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    main()
