"""The tables of docs/reliability.md, from the results of the campaigns."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from memory_page import RESULTS, markdown

QUESTIONS = {
    "faults": "SIGKILL at, and EIO, ENOSPC, EXDEV, ESTALE, a disk that stays full and an error after the call took "
              "effect in, every call that changes a file: train, resume, prepare, overwrite, export",
    "kills": "SIGKILL at random moments, resumed to the end",
    "ranks": "SIGKILL of one of 2 or 3 gloo ranks at random moments, resumed to the end",
    "damage": "a bit, a byte, a digit, a page, a cut, growth in every kind of file that is read",
    "allocations": "every allocation of a run on the CPU fails once",
    "fuzz": "generated inputs, mostly valid, to every parser",
    "http": "hostile requests to the page's server",
}


def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "reliability.json").read_text(encoding="utf-8"))
    return found


def campaigns_part() -> str:
    found = document()
    rows = []
    for row in found["rows"]:
        cases = f"{row['cases']:,}" + (f" of {row['cases_in_all']:,}" if row["cases"] < row["cases_in_all"] else "")
        failures = f"**{row['failed']}**" if row["failed"] else "0"
        rows.append([f"`{row['campaign']}`", QUESTIONS[row["campaign"]], row["required"], cases, f"{row['trials']:,}",
                     failures])
    head = ["campaign", "what is done", "required", "cases run", "trials", "failed"]
    return (markdown(head, rows) + f"\n`{found['command']}` on {found['date']}, commit {found['commit']}, torch "
            f"{found['versions']['torch']}, Python {found['versions']['python']}, {found['machine']}. In `kills` "
            "and `ranks` a trial is one kill, in `fuzz` one input.\n")


def outcomes_part(*campaigns: str) -> str:
    rows = [[f"`{row['campaign']}`", kind, f"{count:,}"] for row in document()["rows"] if row["campaign"] in campaigns
            for kind, count in row["kinds"].items()]
    return markdown(["campaign", "outcome", "trials"], rows)


def damage_part() -> str:
    """One row per kind of file."""
    files: dict[str, dict[str, int]] = {}
    for row in document()["rows"]:
        if row["campaign"] == "damage":
            for kind, count in row["kinds"].items():
                file, _, outcome = kind.rpartition(": ")
                files.setdefault(file, {})[outcome] = count
    outcomes = ("noticed", "harmless", "silent")
    rows = [[f"`{file}`", *(f"{counts.get(each, 0):,}" for each in outcomes),
             f"{sum(counts.values()) - sum(counts.get(each, 0) for each in outcomes):,}"]
            for file, counts in sorted(files.items())]
    return markdown(["file", "noticed", "harmless", "silent", "crash or hang"], rows)


def parsers_part() -> str:
    parsers = next(row["parsers"] for row in document()["rows"] if row["campaign"] == "fuzz")
    rows = [[name, f"{each['inputs']:,}", f"{each['accepted'] / max(1, each['inputs']):.0%}",
             f"{each['reached']} of {each['branches']}" if "branches" in each else "–"]
            for name, each in parsers.items()]
    return markdown(["parser", "inputs", "accepted", "branches reached"], rows)


def gpu_part() -> str:
    """One row per campaign of bench/reliability.py whose results are kept; its output, a list, is under "rows". A run
    of kill_resume has several kills, one of alloc_fail several failed allocations."""
    rows = []
    for path in sorted(RESULTS.glob("reliability_*_h200.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        passed = [row for row in found["rows"] if row.get("passed")]
        trials, fine = (sum(row.get("kills", row.get("failed", 1)) for row in each) for each in (found["rows"], passed))
        rows.append([f"`{path.stem.removeprefix('reliability_').removesuffix('_h200')}`", f"{trials}", f"{fine}",
                     f"{found['date']}, commit {found['commit']}"])
    return markdown(["campaign", "trials on an H200", "passed", "date and commit"], rows) if rows else ""


PARTS: dict[str, Callable[..., str]] = {"campaigns": campaigns_part, "outcomes": outcomes_part, "damage": damage_part,
                                        "parsers": parsers_part, "gpu_campaigns": gpu_part}
