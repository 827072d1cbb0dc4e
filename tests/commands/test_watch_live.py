"""`fitgpt watch` in a process of its own, while another one writes the run."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.watch_frames import FACTS, state_of, step, write_run

# ---- processes

WRITER = """
import json, sys, time
from fitgpt.runs.folder import open_run
with open_run(sys.argv[1], {}, resume=False) as run:
    run.append_metrics(json.loads(sys.argv[2]))
    print("writing", flush=True)
    for step in range(10**9):
        line = json.dumps({"kind": "step", "step": step, "loss": 2.0, "seconds": 1.0, "pad": "x" * 2000}) + chr(10)
        with open(sys.argv[1] + "/metrics.jsonl", "a") as file:
            file.write(line[:700]); file.flush(); time.sleep(0.002); file.write(line[700:])
"""


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run"),
                                json.dumps({**FACTS, "max_iters": 10**9})],
                               stdout=subprocess.PIPE, text=True)
    with killed_after(60, process):
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        yield process
    process.kill()
    process.communicate(timeout=10)


@contextmanager
def killed_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """Reading from the process cannot block for longer."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def test_a_run_is_read_while_another_process_writes_partial_lines(writer: Any, tmp_path: Path) -> None:
    steps = []
    for _ in range(4):
        seen = subprocess.run([sys.executable, "-m", "fitgpt", "watch", str(tmp_path / "run"), "--once", "--json"],
                              capture_output=True, text=True, timeout=30)
        assert (seen.returncode, seen.stderr) == (0, "")
        run = json.loads(seen.stdout)["run"]
        assert (run["status"], run["whereabouts"]) == ("running", f"process {writer.pid}")
        steps.append(run["step"])
    assert steps == sorted(set(steps))
    writer.kill()
    writer.wait(timeout=10)
    assert state_of(tmp_path / "run").status == "stopped"


def watch_in_terminal(argv: list[str], columns: int, until: Callable[[str], bool]) -> tuple[int, str]:
    """Runs it in a terminal of that width and sends Ctrl-C once `until` is true. → exit code, output."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen([sys.executable, "-m", "fitgpt", "watch", *argv], stdin=child, stdout=child,
                               stderr=child, env=environment)
    os.close(child)
    written, deadline = b"", time.monotonic() + 20
    while not until(written.decode(errors="replace")) and time.monotonic() < deadline:
        if select.select([parent], [], [], 1)[0]:
            written += os.read(parent, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while select.select([parent], [], [], 10)[0] and (chunk := os.read(parent, 65536)):
            written += chunk
    except OSError:  # the other end is closed
        pass
    os.close(parent)
    return process.wait(10), written.decode()


def test_ctrl_c_stops_watching_without_an_error(writer: Any, tmp_path: Path) -> None:
    code, written = watch_in_terminal([str(tmp_path / "run"), "--interval=0.1"], 40,
                                      lambda seen: seen.count("Ctrl-C to stop") >= 3)
    assert code == 0
    assert "Traceback" not in written
    assert "stopped." not in written
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert max(len(line) for line in re.split(r"[\r\n]", plain)) <= 40
    assert len(set(re.findall(r"step +([\d,]+) of", plain))) >= 2  # it moves
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is back


def test_watching_ends_with_the_run(writer: Any, tmp_path: Path) -> None:
    watching = subprocess.Popen([sys.executable, "-m", "fitgpt", "watch", str(tmp_path / "run"), "--interval=0.1"],
                                stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    with killed_after(60, watching):
        assert any("running" in line for line in watching.stdout)
        writer.kill()
        writer.wait(timeout=10)
        rest, _ = watching.communicate(timeout=20)
    assert watching.returncode == 0
    assert "stopped" in rest


def test_watching_loads_no_torch_no_numpy_and_without_a_terminal_no_rich(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, step(5))
    script = ("import sys\nfrom fitgpt.commands.main import main\nassert main(['watch', sys.argv[1], '--once']) == 0\n"
              "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
