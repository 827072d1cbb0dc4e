"""Work that a copy of the process does: what comes back, and what happens where there can be none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fitgpt.aside import aside

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def said_by(script: str) -> list[str]:
    """Of a process of its own: this one may have threads."""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert not told.stderr
    return told.stdout.split()


@forks
def test_a_copy_of_the_process_does_the_work_while_this_one_goes_on() -> None:
    script = ("import os; os.cpu_count = lambda: 2\n"
              "from fitgpt.aside import aside\n"
              "print('once'); waits = aside(lambda: (os.getpid(), ('x', 2**70)))\n"
              "print(os.getpid(), *waits())")
    once, here, there, *found = said_by(script)
    assert once == "once"
    assert here != there
    assert found == ["('x',", f"{2**70})"]


@forks
def test_more_than_a_pipe_holds_comes_back_whole_and_half_of_it_is_done_again() -> None:
    script = ("import os, marshal; os.cpu_count = lambda: 2\n"
              "from fitgpt.aside import aside\n"
              "here, long = os.getpid(), tuple(range(300_000))\n"
              "print(aside(lambda: long)() == long)\n"
              "marshal.dump = lambda told, pipe: pipe.write(marshal.dumps(told)[:100_000])\n"
              "print(aside(lambda: (os.getpid(), long))() == (here, long))")
    assert said_by(script) == ["True", "True"]


@forks
def test_what_comes_to_nothing_there_is_done_here() -> None:
    script = ("import os; os.cpu_count = lambda: 2\n"
              "from fitgpt.aside import aside\n"
              "here = os.getpid()\n"
              "def work(): return 'done' if os.getpid() == here else os.abort() if fatal else 1 / 0\n"
              "for fatal in (False, True): print(aside(work)())")
    assert said_by(script) == ["done", "done"]


@pytest.mark.parametrize("obstacle", ["os.cpu_count = lambda: 1", "vars(os).pop('fork', None)",
                                      "sys.modules['torch'] = os", "os.fork = lambda: os.listdir('/nowhere')"])
def test_where_no_copy_can_be_the_work_is_done_in_turn(obstacle: str) -> None:
    script = (f"import os, sys; os.cpu_count = lambda: 2\n{obstacle}\n"
              "from fitgpt.aside import aside\n"
              "print(aside(os.getpid)() == os.getpid())")
    assert said_by(script) == ["True"]


def test_an_error_of_the_work_is_raised_where_it_is_asked_for() -> None:
    waits = aside(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        waits()
