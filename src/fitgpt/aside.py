"""How does a command use a second core? A part of its work goes to a copy of its process, while it goes on itself."""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")  # numbers, texts, and tuples of them
WITH_THREADS = ("torch", "numpy")  # packages with threads of their own, none of which a copy of the process has


def aside(work: Callable[[], Result]) -> Callable[[], Result]:
    """Starts the work, and gives what waits for its result; where no copy can do it, that one does the work itself."""
    if not _can_be_copied():
        return work
    try:
        ours, theirs = os.pipe()
        child = os.fork()
    except OSError:
        return work
    if child == 0:
        _work_and_end(work, theirs)
    os.close(theirs)

    def result() -> Result:
        with open(ours, "rb") as pipe:
            written = pipe.read()
        os.waitpid(child, 0)
        try:
            found: Result = marshal.loads(written)
        except (EOFError, TypeError, ValueError):  # it came to nothing, or ended in the middle of a word
            return work()  # if it must fail, it fails here
        return found

    return result


def _work_and_end(work: Callable[[], Any], pipe: int) -> NoReturn:
    """Nothing of what the process would do at its end is done twice."""
    with suppress(BaseException), open(pipe, "wb") as to_the_other:
        marshal.dump(work(), to_the_other)
    os._exit(0)


def _can_be_copied() -> bool:
    threading = sys.modules.get("threading")
    is_alone = threading is None or threading.active_count() == 1
    return (hasattr(os, "fork") and (os.cpu_count() or 1) > 1 and is_alone
            and not any(package in sys.modules for package in WITH_THREADS))
