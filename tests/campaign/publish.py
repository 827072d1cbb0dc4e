"""Results of the campaigns → bench/results/reliability.json, from which docs/reliability.md is generated."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "bench" / "results" / "reliability.json"

Results = tuple[dict[str, Any], list[dict[str, Any]], int]  # the summary, the outcomes, how many cases there are


def write(results: dict[str, Results]) -> None:
    rows = []
    for name, (summary, outcomes, total) in results.items():
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")  # importing it would load torch
        required = re.search('^REQUIRED = "(.+)"$', source, re.MULTILINE)
        row = {**summary, "required": required[1] if required else "", "cases_in_all": total}
        if name == "fuzz":
            row["parsers"] = parsers(outcomes)
        rows.append(row)
    commit = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=10"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout.strip()
    document = {"command": "make campaign", "date": time.strftime("%Y-%m-%d"), "commit": commit,
                "versions": {"python": platform.python_version(), "torch": version("torch")},
                "machine": f"{os.cpu_count()} cores, {platform.system()}", "rows": rows}
    TARGET.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}; then: python tools/docs.py --write")


def parsers(outcomes: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Of each parser: how many inputs, how many were accepted, and the branches that they reached."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"inputs": 0, "accepted": 0})
    for row in outcomes:
        name = row["case"].rsplit("/", 1)[0]
        if row["kind"] == "coverage":
            found[name] |= json.loads(row["note"])
        else:
            found[name]["inputs"] += row["count"]
            found[name]["accepted"] += int(row["note"]) if row["ok"] else 0
    return dict(sorted(found.items()))
