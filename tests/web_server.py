"""A `fitgpt serve` of its own for the tests of a file, in a folder where a run goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NOTES = ("gpu=RTX+4070&others=2118MiB&trainer=nanogpt&n_layer=12&n_head=12&n_embd=576&batch_size=16"
         "&gradient_accumulation_steps=32&dtype=float16")  # the 77M run of the notes
RUN = "runs/fineweb"
HOSTILE = "<b>bold</b><img src=x onerror=alert(1)>"


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address, and the process."""
    process = subprocess.Popen([sys.executable, "-m", "fitgpt", "serve", "--no-browser", "--port=0", *flags],
                               cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    try:
        assert process.stdout is not None
        said, found = "", None
        while not found and (line := process.stdout.readline()):
            said += line
            found = re.search(r"http://\S+/", line)
        assert found, said
        yield found[0], process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@contextmanager
def run_going_on(folder: Path) -> Iterator[Path]:
    """A run that this process seems to train: it holds the folder's lock."""
    run = folder / RUN
    run.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        dict(kind="run", config={}, device="cpu", device_name="A computer", max_iters=400, start_step=0, params=10**6),
        *(dict(kind="step", step=step, loss=8 / (1 + step / 40), tokens_per_s=51_200.0, seconds=0.5, seconds_left=94.0)
          for step in range(0, 211, 10))]
    with open(run / "lock", "w", encoding="utf-8") as lock:
        lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": ""}))
        lock.flush()
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        yield run
