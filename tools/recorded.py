"""src/fitgpt/planning/recorded.json: measured speeds of fitgpt and nanoGPT, for the speed estimates.

    python tools/recorded.py     after new results in bench/results/
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

from engine import OURS  # noqa: E402

from fitgpt.config.argv import walk  # noqa: E402
from fitgpt.config.fields import build  # noqa: E402
from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.hardware.gpus import match_device  # noqa: E402
from fitgpt.planning.gpu_record import parse  # noqa: E402

RESULTS, TARGET = ROOT / "bench" / "results", ROOT / "src" / "fitgpt" / "planning" / "recorded.json"
RECORDS = ROOT / "tests" / "recorded" / "gpus"
SHORT_RUNS = ("capped_xl_on_h200.json",)  # whose last steps are steady enough to count as a measurement


def main() -> None:
    found = document()
    TARGET.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}: {len(found['runs'])} runs, {len(found['nanogpt'])} of nanoGPT")


def document() -> dict[str, Any]:
    return {"schema": 1, "runs": recorded_runs(), "nanogpt": runs_of_nanogpt()}


def recorded_runs() -> list[dict[str, Any]]:
    runs = [run for path in sorted(RESULTS.glob("engine_*.json")) for run in from_engine(path)]
    runs += [run for name in SHORT_RUNS if (RESULTS / name).is_file() for run in from_short_runs(RESULTS / name)]
    benchmarked = {run["card"] for run in runs}  # there a few seconds of a record add nothing
    return runs + [run for path in sorted(RECORDS.glob("*.json")) for run in from_record(path)
                   if run["card"] not in benchmarked]


def from_record(path: Path) -> list[dict[str, Any]]:
    """The timed runs of a record of a GPU."""
    record = parse(path.read_text(encoding="utf-8"), path.name)
    return [row_of(run.config, record.gpu.name, run.tokens_per_s, path, run.name)
            for run in record.runs if run.tokens_per_s]


def runs_of_nanogpt() -> list[dict[str, Any]]:
    return [row_of(row["config"], row["device"], row["tokens_per_s"], path, row["name"])
            for path in sorted(RESULTS.glob("nanospeed_*.json"))
            for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if "error" not in row]


def from_engine(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    case = dict(found["case"])
    case["gradient_accumulation_steps"] = case.pop("accumulation")
    return [row_of({**case, "vocab_size": 50304, **OURS[row["contender"]]}, row["device"], row["tokens_per_s"],
                   path, row["contender"]) for row in found["rows"] if row["contender"] in OURS and "error" not in row]


def from_short_runs(path: Path) -> list[dict[str, Any]]:
    found = []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        config = build(RunConfig, walk([str(ROOT / row["config"]), *row["flags"]], RunConfig))
        settings = {key: value for key, value in config.to_dict().items() if value != getattr(RunConfig, key)}
        for key in ("out_dir", "dataset"):
            settings.pop(key, None)
        found.append(row_of({**settings, "vocab_size": config.vocab_size or 50304}, row["device_name"],
                            row["tokens_per_s"], path, Path(row["config"]).stem))
    return found


def row_of(settings: dict[str, Any], device: str, tokens_per_s: float, path: Path, name: str) -> dict[str, Any]:
    card = match_device(device)
    return {"card": card.name if card else re.sub("^NVIDIA ", "", device), "tokens_per_s": round(tokens_per_s),
            "source": f"{path.relative_to(ROOT)}, {name}", "options": settings}


if __name__ == "__main__":
    main()
