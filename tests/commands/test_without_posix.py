"""`plan`, `fit`, `explain`, `cards` without the modules and calls that only POSIX has. Not run on Windows itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Modules that Python has on POSIX only (docs.python.org, "Availability"), and functions of os and signal among them.
BLOCK = """
import os, signal, sys
for name in ("fcntl", "grp", "posix_ipc", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for module, names in ((os, ("fork", "forkpty", "getuid", "geteuid", "getgid", "getpgid", "killpg", "setsid", "statvfs",
                            "sched_getaffinity", "sysconf", "uname", "nice", "getloadavg", "mkfifo", "openpty")),
                      (signal, ("SIGHUP", "SIGTSTP", "SIGCONT", "SIGSTOP", "SIGUSR1", "SIGTTOU", "pthread_sigmask",
                                "alarm", "setitimer"))):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
from fitgpt.__main__ import main
sys.argv = ["fitgpt", *sys.argv[1:]]
sys.exit(main())
"""


@pytest.mark.parametrize(("argv", "expected"), [
    (["plan", "config/gpt2_124m.py", "--gpu", "4070"], "Fits: needs"),
    (["fit", "config/notes_30m.py", "--gpu", "4070"], "tokens/s"),
    (["explain", "docs/examples/oom_77m.txt", "config/notes_77m.py", "--trainer=nanogpt"], "Out of memory"),
    (["cards", "4070"], "RTX 4070 Ti SUPER"),
], ids=lambda each: each[0] if isinstance(each, list) else "")
def test_the_planner_needs_nothing_that_only_posix_has(argv: list[str], expected: str) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCK, *argv], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    assert expected in done.stdout
    assert "Traceback" not in done.stderr
