"""How large is the static site, and how fast does it answer in Chromium?

    make site && python bench/site.py -o bench/results/site.json

The site is served by a plain HTTP server on this machine that compresses nothing and counts the bytes it sends. Cold: a
new browser profile. Warm: a later visit in the same profile, from the service worker's cache. The verdict is that of a
link whose settings are not the first page's, so that Python has to compute it. CPU seconds are those of all processes
of Chromium.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from playwright.sync_api import sync_playwright  # noqa: E402
from prepare_speed import available_cores, cpu  # noqa: E402

from fitgpt import __version__  # noqa: E402
from static_site.build import SITE, VERSION  # noqa: E402

LINK = "#gpu=RTX+4070&others=2118MiB&trainer=nanogpt&n_layer=12&n_head=12&n_embd=576&batch_size=16&dtype=float16"
COMPRESSED = (".html", ".css", ".js", ".mjs", ".json", ".svg")  # by GitHub Pages and most other hosts
MOVES = 40
# Time from each move of a slider to the next change of the bars.
WATCH_SLIDER = """() => {
    window.delays = [];
    const slider = document.getElementById("s-batch_size");
    slider.addEventListener("input", () => { window.moved = performance.now(); }, { capture: true });
    new MutationObserver(() => {
        if (window.moved) delays.push(performance.now() - window.moved);
        window.moved = 0;
    }).observe(document.getElementById("title"), { childList: true, characterData: true, subtree: true });
}"""


class CountingHandler(SimpleHTTPRequestHandler):
    sent = 0  # bytes of bodies

    def log_message(self, *args: Any) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        body = source.read()
        CountingHandler.sent += len(body)
        outputfile.write(body)


@contextmanager
def serving() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(CountingHandler, directory=str(SITE)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def cpu_seconds() -> float:
    """Of all processes that this one started, and theirs."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])

    def ours(process: int) -> bool:
        parent = parents.get(process)
        return parent == os.getpid() or (parent is not None and ours(parent))

    return sum(count for process, count in ticks.items() if ours(process)) / os.sysconf("SC_CLK_TCK")


def visit(page: Any, address: str) -> dict[str, float]:
    """Seconds from the navigation to each part of the page."""
    page.goto("about:blank")
    start, cpu = time.perf_counter(), cpu_seconds()
    page.goto(address, wait_until="commit")
    page.wait_for_selector('#verdict:is([data-state="fits"], [data-state="tight"], [data-state="does_not_fit"])')
    verdict, used = time.perf_counter() - start, cpu_seconds() - cpu
    page.wait_for_selector("#headroom:not(:empty)")
    exact = time.perf_counter() - start
    page.wait_for_selector("#fix-buttons:not(.stale):not(:has(.stale)) button")
    return {"verdict": round(verdict, 2), "verdict_cpu": round(used, 2), "exact": round(exact, 2),
            "fixes": round(time.perf_counter() - start, 2)}


def slider_delays(page: Any) -> list[float]:
    """Milliseconds, one per move. Each waits for the bars of the one before it."""
    page.evaluate(WATCH_SLIDER)
    page.focus("#s-batch_size")
    for number in range(MOVES):
        page.keyboard.press("ArrowLeft" if number % 10 < 5 else "ArrowRight")
        page.wait_for_function("(number) => delays.length > number", arg=number)
    return [round(delay) for delay in page.evaluate("delays")]


def sizes() -> dict[str, int]:
    """Bytes of what a first visit loads, as shipped, and with compression by the host."""
    text = (SITE / "service_worker.js").read_text(encoding="utf-8")
    names = [name for name in json.loads(text.partition("FILES = ")[2].partition(";")[0]) if name != "./"]
    raw = {name: (SITE / name).read_bytes() for name in [*names, "service_worker.js"]}
    return {"files": len(raw), "as_shipped": sum(map(len, raw.values())),
            "compressed_by_host": sum(len(gzip.compress(content)) if Path(name).suffix in COMPRESSED else len(content)
                                      for name, content in raw.items()),
            "largest": {name: len(raw[name]) for name in sorted(raw, key=lambda name: -len(raw[name]))[:6]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--out", required=True)
    options = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    first, cold, warm, delays, sent = [], [], [], [], 0
    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(options.repeats):
            context = browser.new_context()
            page = context.new_page()
            page.set_default_timeout(120_000)
            CountingHandler.sent = 0
            cold.append(visit(page, f"{address}{LINK}"))
            page.evaluate("navigator.serviceWorker.ready.then(() => null)")
            page.wait_for_timeout(2000)  # until all is stored
            sent = CountingHandler.sent
            warm.append(visit(page, f"{address}{LINK}"))
            delays += slider_delays(page)
            context.close()
            context = browser.new_context()
            page = context.new_page()
            first.append(visit(page, address)["verdict"])
            context.close()
        version = browser.version
        browser.close()

    def median(rows: list[dict[str, float]]) -> dict[str, float]:
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]}

    found = {
        "what": "the static site in Chromium: bytes of a first visit, seconds from navigation (medians), slider delays",
        "command": "make site && python bench/site.py -o bench/results/site.json", "date": time.strftime("%Y-%m-%d"),
        "fitgpt": __version__, "pyodide": VERSION, "chromium": version, "cpu": cpu(), "cores": available_cores(),
        "load": round(os.getloadavg()[0] / available_cores(), 1), "repeats": options.repeats,
        "bytes": sizes() | {"sent_on_first_visit": sent},
        "seconds": {"precomputed_verdict_cold": statistics.median(first), "cold": median(cold), "warm": median(warm),
                    "all_cold": cold, "all_warm": warm},
        "slider_ms": {"median": statistics.median(delays), "p95": sorted(delays)[int(0.95 * len(delays))],
                      "most": max(delays), "moves": len(delays)}}
    Path(options.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: found[name] for name in ("load", "bytes", "seconds", "slider_ms")}, indent=1))


if __name__ == "__main__":
    main()
