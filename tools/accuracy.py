"""Forecast beside measurement: the written tapes against recorded runs, nanoGPT's and our own.

    python tools/accuracy.py tests/recorded/nanogpt/models_30m_to_124m.json    nanoGPT's train.py, one line per figure
    python tools/accuracy.py tests/recorded/engine/random.json                 our engine, one line per run
    python tools/accuracy.py bench/results/triples_h200.json                   runs of `train`, by the forecast of each
    python tools/accuracy.py --runs FILE                                       either, one line per run
    python tools/accuracy.py --basis > src/fitgpt/planning/track_record.csv    the accuracy that `plan` prints

What each file covers: tests/recorded/README.md.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.memory.platform import Platform
from fitgpt.memory.timeline import replay
from fitgpt.planning.forecast import COLUMNS, SHAPE, record_kind, recorded_options
from fitgpt.planning.record_check import Figure, compare_run
from fitgpt.tapes.nanogpt import write
from fitgpt.tapes.nanogpt_compiled import has_odd_sizes

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "recorded"
NANOGPT_RECORDS = tuple(RECORDED / "nanogpt" / f"{name}.json" for name in (
    "remedies_and_random", "common_shapes_second", "models_30m_to_124m", "many_micro_batches", "dtypes_and_shapes",
    "odd_vocabularies", "common_shapes", "any_shape"))
ENGINE_RECORDS = tuple(RECORDED / "engine" / f"{name}.json" for name in (
    "random", "held_out", "attention_kernels", "savers_off", "memory_page", "bitsandbytes"))
TRACES = RECORDED / "traces" / "measured.json"
TRACK_RECORD = (*NANOGPT_RECORDS, *ENGINE_RECORDS, ROOT / "bench" / "results" / "triples_h200.json",
                TRACES)  # in its order

NANOGPT = "nanogpt"
H200 = Platform((9, 0), "2.11")


# ---- nanoGPT's runs

def predict(config: Mapping[str, Any], *, expandable: bool = False) -> dict[str, int]:
    """Figures of a run on an H200, under the record's own names; training includes the optimizer's step."""
    timeline = replay(write(resolve_run(RunConfig(**config), H200, NANOGPT), H200), expandable=expandable)
    peaks = timeline.peaks()
    return {
        "eval_first_peak": peaks["first_eval"].allocated,
        "eval_first_reserved": peaks["first_eval"].reserved,
        "train_first_peak": peaks["first_train"].allocated,
        "train_peak": max(peaks["train"].allocated, peaks["step"].allocated),
        "train_reserved": peaks["step"].reserved,
        "eval_peak": peaks["eval"].allocated,
        "idle": timeline.allocated[-1],
    }


def compare(rows: Iterable[dict[str, Any]]) -> list[Figure]:
    return [Figure(row["name"], name, predicted, row[name]) for row in rows
            for name, predicted in predict(row["config"], expandable=row.get("expandable", False)).items()
            if name in row]


# ---- our own

def compare_own(rows: Iterable[dict[str, Any]], platform: Platform) -> list[Figure]:
    """Allocated and reserved of every phase; reserved is the most since the run began."""
    return [figure for row in rows if "phases" in row for figure in compare_run(
        row["name"], row["config"], row["phases"], replace(platform, kernel=row.get("kernel", "")))]


def compare_logged(rows: Iterable[dict[str, Any]]) -> list[Figure]:
    """Of runs of `train`, which logs its forecast before it begins, and what it measured then."""
    return [Figure(row["name"], f"{phase} {kind}", row["foreseen"][phase][f"{kind}_bytes"], held[f"{kind}_bytes"])
            for row in rows for phase, held in row["measured"].items() for kind in ("allocated", "reserved")]


# ---- as text

def table(figures: Iterable[Figure]) -> str:
    """Markdown, one line per figure."""
    lines = ["| run | figure | predicted | measured | off | % |", "|---|---|--:|--:|--:|--:|"]
    lines += [f"| {each.run} | {each.name} | {each.predicted:,} | {each.measured:,} | {each.off:+,} | "
              f"{each.percent:+.3f} |" if each.off else
              f"| {each.run} | {each.name} | {each.predicted:,} | {each.measured:,} | 0 | 0 |" for each in figures]
    return "\n".join(lines)


def by_run(figures: Iterable[Figure], configs: dict[str, dict[str, Any]]) -> str:
    """Markdown, one line per run: the figure with the largest error, and how many are exact to the byte."""
    runs: dict[str, list[Figure]] = {}
    for each in figures:
        runs.setdefault(each.run, []).append(each)
    lines = ["| run | settings | reserved | figures | to the byte | farthest off | % |",
             "|---|---|--:|--:|--:|---|--:|"]
    for name, found in runs.items():
        worst = max(found, key=lambda each: abs(each.percent))
        most = max(each.measured for each in found if each.name.endswith("reserved"))
        lines.append(f"| {name} | {_settings_text(configs[name])} | {most:,} | {len(found)} | "
                     f"{sum(not each.off for each in found)} | {worst.name if worst.off else ''} | "
                     f"{f'{worst.percent:+.3f}' if worst.off else 0} |")
    return "\n".join(lines)


def _settings_text(config: dict[str, Any]) -> str:
    c = dict(config)
    shape = f"{c.pop('n_layer')}/{c.pop('n_head')}/{c.pop('n_embd')}"
    batch = f"{c.pop('batch_size')}×{c.pop('block_size')}×{c.pop('gradient_accumulation_steps')}"
    compiled = "compiled" if c.pop("compile") else "eager"
    vocab = [f"V {c['vocab_size']}"] if "vocab_size" in c else []
    rest = [f"{key}={value}" for key, value in c.items() if key not in ("dtype", "vocab_size") and value]
    return ", ".join([shape, batch, *vocab, c["dtype"], compiled, *rest])


def basis(path: Path, gpu: str, torch: str) -> list[dict[str, Any]]:
    """One row per recorded run: its shape and mode, and the largest error of its forecast."""
    if path == TRACES:
        from traces import basis as basis_of_traces  # it imports this module, by the page of memory

        return basis_of_traces(gpu, torch)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    trainer, figures, configs = of_file(path)
    kinds = {row["name"]: record_kind(trainer, expandable=bool(row.get("expandable")),
                                      odd=trainer == NANOGPT and is_odd(row["config"])) for row in rows}
    runs: dict[str, list[Figure]] = {}
    for each in figures:
        runs.setdefault(each.run, []).append(each)
    found = []
    for name, of_run in runs.items():
        config = RunConfig(**configs[name])
        worst = max((abs(each.percent), each.percent) for each in of_run)[1]
        reserved = [each for each in of_run if each.name.endswith("reserved")]
        allocated = [each for each in of_run if each not in reserved]
        found.append({"trainer": kinds[name], "gpu": gpu, "torch": torch, "name": name,
                      "params": config.gpt_config().count_params(),
                      **{option: getattr(config, option) for option in SHAPE},
                      "mode": "compiled" if config.compile else "eager",
                      "options": recorded_options(config, trainer),
                      "allocated_bytes": max(each.measured for each in allocated),
                      "reserved_bytes": max(each.measured for each in reserved),
                      "forecast_allocated_bytes": max(each.predicted for each in allocated),
                      "forecast_reserved_bytes": max(each.predicted for each in reserved),
                      "figures": len(of_run), "worst_percent": round(worst, 3)})
    return found


def is_odd(config: dict[str, Any]) -> bool:
    """Of a run of nanoGPT: whether the compiler times which matmuls to pad."""
    return bool(config["compile"]) and has_odd_sizes(
        config["dtype"], config["batch_size"] * config["block_size"], config.get("vocab_size", 8))


@cache
def of_file(path: Path) -> tuple[str, list[Figure], dict[str, dict[str, Any]]]:
    """The trainer of a recorded file, its figures, and the configs of its runs."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    configs = {row["name"]: row["config"] for row in rows}
    if any("phases" in row for row in rows):
        return "fitgpt", compare_own(rows, H200), configs
    if any("foreseen" in row for row in rows):
        return "fitgpt", compare_logged(rows), {row["name"]: row["config"] | row["chosen"] for row in rows}
    return NANOGPT, compare(rows), configs


def main(arguments: list[str]) -> None:
    if arguments[0] == "--basis":
        table_of_runs = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        table_of_runs.writeheader()
        table_of_runs.writerows(row for path in TRACK_RECORD for row in basis(path, "H200", "2.11"))
        return
    trainer, figures, configs = of_file(Path(arguments[-1]))
    print(table(figures) if trainer == NANOGPT and arguments[0] != "--runs" else by_run(figures, configs))


if __name__ == "__main__":
    main(sys.argv[1:])
