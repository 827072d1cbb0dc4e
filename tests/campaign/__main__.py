"""Runs campaigns: python -m tests.campaign [--quick] [--jobs N] [--only NAME …] [CAMPAIGN …]

    make campaign                        all of them, in about half an hour on two idle cores; interrupted, it resumes
    make campaign-quick                  a part of each, in about 90 seconds, and at least one case
    python -m tests.campaign damage      one of them
    python -m tests.campaign --only faults/train/045-rename/EIO     one case, with what it found
    python -m tests.campaign --list faults
    python -m tests.campaign --publish   writes the results so far to bench/results/reliability.json

Results are kept in build/campaign/, one line per case; they add up while src/ and the campaigns are unchanged. The exit
code is 1 if a case failed, or if a campaign that is not complete ran none.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .outcome import Campaign, shuffled

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "campaign"
CAMPAIGNS = ("faults", "kills", "ranks", "damage", "allocations", "fuzz", "http")
QUICK_S = 75.0      # all campaigns together
ROOM = 2 * 2**30    # bytes
GRACE_S = 8.0       # for the cases that are running then
LONGEST_S = 600.0   # and for a campaign that has run none by then, because its set-up is slow on a busy machine
SHOW_EVERY_S = 10.0
STOPPED = 130       # a worker that was interrupted
ENDS = (0, STOPPED, -signal.SIGTERM, -signal.SIGKILL)  # Python's own shutdown ignores our handler of SIGTERM
SHOWN = 25          # failed cases
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}


def main() -> int:
    given = arguments()
    os.environ.setdefault("CAMPAIGN_RESULTS", str(given.out.resolve()))  # for workers too
    if given.worker:
        try:
            return work(given.worker, given.share, given.until)
        except KeyboardInterrupt:
            return STOPPED
    if given.only or given.list:
        if given.in_environment:
            return run_one(given.only) if given.only else list_cases(given.list)
        with worker_environment() as env:
            return subprocess.call([sys.executable, "-m", "tests.campaign", *sys.argv[1:], "--in_environment"],
                                   cwd=ROOT, env=env)
    if given.publish:
        from .publish import write

        write({name: (summary(name), list(results(name).values()), total(name)) for name in CAMPAIGNS})
        return 0
    chosen = list(given.campaign or CAMPAIGNS)
    if "faults" in chosen and shutil.which("cc") is None:
        print("There is no C compiler (cc): the campaign faults is left out.")
        chosen.remove("faults")
    if given.quick:
        return 1 if run_campaigns(chosen, 1, QUICK_S) else 0
    if given.at_once:
        return 1 if run_campaigns(chosen, given.jobs, given.seconds) else 0
    return 1 if sum(run_campaigns([name], given.jobs, given.seconds) for name in chosen) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", nargs="*", choices=[[], *CAMPAIGNS], help="all, unless some are named")
    parser.add_argument("--quick", action="store_true", help="a part of each campaign, about 90 s in all")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes per campaign")
    parser.add_argument("--at_once", action="store_true", help="all campaigns at the same time, not one after another")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are kept; default build/campaign")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop each campaign after so long; 0: at its end")
    parser.add_argument("--only", metavar="CAMPAIGN/CASE", help="runs one case and prints its outcome")
    parser.add_argument("--list", choices=CAMPAIGNS, help="prints the names of the cases")
    parser.add_argument("--publish", action="store_true", help="writes bench/results/reliability.json")
    parser.add_argument("--in_environment", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=CAMPAIGNS, help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- results

def results_folder(name: str) -> Path:
    """Named by a hash of the package and of what the campaigns do: results of other code do not count."""
    here, digest = Path(__file__).parent, hashlib.sha256()
    drivers = {Path(__file__), here / "publish.py"}
    for path in sorted([*(ROOT / "src" / "fitgpt").rglob("*"), *here.iterdir()]):
        if path.is_file() and "__pycache__" not in path.parts and path not in drivers:
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    folder = Path(os.environ.get("CAMPAIGN_RESULTS", RESULTS)) / f"{name}-{digest.hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def results(name: str) -> dict[str, dict[str, Any]]:
    """case → its outcome. A line that was cut off by an interruption is left out."""
    found = {}
    for file in sorted(results_folder(name).glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            found[row["case"]] = row
    return found


def total(name: str) -> int:
    """How many cases the campaign has; 0: not known yet."""
    file = results_folder(name) / "total"
    return int(file.read_text()) if file.exists() else 0


def summary(name: str) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    rows = results(name).values()
    for row in rows:
        kinds[row["kind"]] = kinds.get(row["kind"], 0) + row["count"]
    bad = [row for row in rows if not row["ok"]]
    return {"campaign": name, "cases": len(rows), "trials": sum(kinds.values()), "failed": len(bad),
            "kinds": dict(sorted(kinds.items())), "failures": sorted(row["case"] for row in bad)}


# ---- running

def run_campaigns(names: Sequence[str], jobs: int, seconds: float) -> int:
    """Runs what is not done yet of these campaigns, at once, and shows progress. → how many cases failed."""
    started, before = time.time(), {name: len(results(name)) for name in names}
    until = started + seconds if seconds else float("inf")
    with worker_environment() as env:
        workers = {(name, number): subprocess.Popen(
            [sys.executable, "-m", "tests.campaign", "--worker", name, f"--share={number}/{jobs}", f"--until={until}"],
            cwd=ROOT, env=env) for name in names for number in range(jobs)}
        shown = time.time()
        try:
            while running := {name for (name, _), worker in workers.items() if worker.poll() is None}:
                late = time.time() - until
                if late > LONGEST_S or (late > GRACE_S and all(len(results(each)) > before[each] for each in running)):
                    break
                time.sleep(0.2)
                if time.time() - shown > SHOW_EVERY_S:
                    shown = time.time()
                    for name in names:
                        print(describe(name, before[name], started), flush=True)
        finally:
            for worker in workers.values():
                worker.terminate()
            for worker in workers.values():
                try:
                    worker.wait(timeout=GRACE_S)
                except subprocess.TimeoutExpired:
                    worker.kill()
                    worker.wait()
    failures = 0
    for name in names:
        print(describe(name, before[name], started), *kinds_of(name), sep="\n", flush=True)
        bad = [row for row in results(name).values() if not row["ok"]]
        for row in bad[:SHOWN]:
            print(f"  FAILED {name}/{row['case']}: {row['kind']}: {row['note'].splitlines()[:1]}"[:160])
        if len(bad) > SHOWN:
            print(f"  and {len(bad) - SHOWN} more, in {results_folder(name)}")
        failures += len(bad)
        if len(results(name)) == before[name] != (total(name) or None):
            print(f"  FAILED {name}: no case was run in {time.time() - started:.0f} s. Its set-up takes longer, or "
                  f"failed: python -m tests.campaign --list {name}")
            failures += 1
    for (name, _), worker in workers.items():
        if worker.returncode not in ENDS:
            print(f"  {name}: a worker ended with {worker.returncode}")
            failures += 1
    return failures


def describe(name: str, before: int, started: float) -> str:
    found, of = summary(name), f" of {total(name):,}" if total(name) else ""
    seconds = time.time() - started
    return (f"{name:<12}{found['cases']:,}{of} cases, {found['failed']} failed, "
            f"{(found['cases'] - before) / seconds:.1f} per s, {seconds:.0f} s")


def kinds_of(name: str) -> list[str]:
    return [f"  {count:>8,} {kind}" for kind, count in summary(name)["kinds"].items()]


class worker_environment:
    """The environment of workers, with the library that injects faults loaded into them."""

    def __enter__(self) -> dict[str, str]:
        from .shim import library

        self._folder = tempfile.TemporaryDirectory(prefix="fitgpt-campaign-")
        path = os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "tools")))
        env = {**os.environ, **ONE_THREAD, "PYTHONPATH": path}
        if shutil.which("cc"):
            env["LD_PRELOAD"] = str(library(Path(self._folder.name)))
        return env

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def opened(name: str, folder: Path) -> Campaign:
    found: Campaign = importlib.import_module(f"tests.campaign.{name}").campaign(folder)
    return found


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """In memory where that is possible: hundreds of thousands of small files are written."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOM
    return tempfile.TemporaryDirectory(prefix="fitgpt-campaign-", dir=memory if roomy else None)


def work(name: str, share: str, until: float) -> int:
    """A worker: runs its share of the cases, at least one, and writes a line per case."""
    number, of = map(int, share.split("/"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that folders are removed
    kept = results_folder(name)
    with scratch_folder() as folder, open(kept / f"{number}.jsonl", "a", encoding="utf-8") as out:
        campaign = opened(name, Path(folder))
        (kept / "total").write_text(str(len(campaign.cases)))
        done = results(name)
        for case in [each for each in shuffled(campaign.cases)[number::of] if each not in done]:
            out.write(json.dumps({"case": case, **campaign.run(case)._asdict()}) + "\n")
            out.flush()
            if time.time() > until:
                break
    return 0


def run_one(named: str) -> int:
    name, _, case = named.partition("/")
    with scratch_folder() as folder:
        outcome = opened(name, Path(folder)).run(case)
    print(f"{outcome.kind}{'' if outcome.ok else ' (failed)'}\n{outcome.note}")
    return 0 if outcome.ok else 1


def list_cases(name: str) -> int:
    with scratch_folder() as folder:
        print("\n".join(opened(name, Path(folder)).cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
