"""Helpers of the web tests: a `fitgpt serve` process, the static site, a folder with a running run, a page query."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode

from fitgpt.web.form import PageQuery, read
from static_site import build
from tests.conftest import missing

SMALL = dict(n_layer=1, n_head=2, n_embd=64, block_size=64, batch_size=4, vocab_size=512)
NOTES = ("gpu=RTX+4070&others=2118MiB&trainer=nanogpt&n_layer=12&n_head=12&n_embd=576&batch_size=16"
         "&gradient_accumulation_steps=32&dtype=float16&max_iters=10000")  # the 77M run of the notes
RUN = "runs/fineweb"
RECORDED = Path(__file__).parent / "recorded" / "runs" / "h200" / "metrics.jsonl"
HOSTILE = "<b>bold</b><img src=x onerror=alert(1)>"


def page_query(**settings: Any) -> PageQuery:
    return read(urlencode({"gpu": "RTX 4070"} | settings))


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and the process. At the end Ctrl-C must stop it."""
    process = subprocess.Popen([sys.executable, "-m", "fitgpt", "serve", "--no-browser", "--port=0", *flags],
                               cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    try:
        assert process.stdout is not None
        printed, found = "", None
        while not found and (line := process.stdout.readline()):
            printed += line
            found = re.search(r"http://\S+/", line)
        assert found, printed
        yield found[0], process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@contextmanager
def serving_files(folder: Path) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """The address and the server of a folder, as `python -m http.server` serves it."""
    class QuietHandler(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", server
    finally:
        server.shutdown()
        server.server_close()


@cache
def built_site() -> Path:
    """The folder of the static site, built from these sources."""
    for program in ("npm", "node"):
        if not shutil.which(program):
            missing(f"{program} is not installed")
    try:
        build.download()
    except subprocess.CalledProcessError:
        missing(f"npm cannot download Pyodide {build.VERSION}")
    build.main()
    return build.SITE


def recorded_rows() -> list[dict[str, Any]]:
    """The first 60 % of a recorded run on an H200; an invented run where none is recorded."""
    if not RECORDED.is_file():
        return [dict(kind="run", config={}, device="cpu", device_name="A computer", max_iters=400, start_step=0,
                     params=10**6),
                *(dict(kind="step", step=step, loss=8 / (1 + step / 40), tokens_per_s=51_200.0, seconds=0.5,
                       seconds_left=94.0) for step in range(0, 211, 10))]
    rows = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
    last = 0.6 * next(row["max_iters"] for row in rows if row["kind"] == "run")
    return list(takewhile(lambda row: (row.get("step") or 0) < last, rows))


@contextmanager
def running_run(folder: Path) -> Iterator[Path]:
    """A run that seems to be trained by this process, which holds the folder's lock."""
    run = folder / RUN
    run.mkdir(parents=True)
    with open(run / "lock", "w", encoding="utf-8") as lock:
        lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": ""}))
        lock.flush()
        lines = [json.dumps(row) + "\n" for row in recorded_rows()]
        (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        yield run
