"""Traced scripts beside their recorded runs, and beside what other estimators say of the same runs.

    python tools/traces.py     one line per run

The runs and the traces, which were made next to them: tests/recorded/README.md.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from fitgpt.core.units import MiB  # noqa: E402
from fitgpt.memory.timeline import Timeline  # noqa: E402
from fitgpt.planning.budget import target_for  # noqa: E402
from fitgpt.planning.forecast import COLUMNS, record_kind  # noqa: E402
from fitgpt.tracing.device import SKIPPED_STEPS  # noqa: E402
from fitgpt.tracing.plan import PLANNED, SCRIPT, UNPLANNED, PeakMemory, TracedPlan, plan_trace  # noqa: E402
from fitgpt.tracing.trace_file import Trace, from_json, to_json  # noqa: E402
from memory_page import markdown  # noqa: E402

RECORDED = ROOT / "tests" / "recorded" / "traces"
HELD_OUT = ("held_out", "held_out_2", "held_out_3")  # traced before they were measured
FORECAST = ("held_out_experts",)  # traced, and not yet measured
LANGUAGE, CONVOLUTION, COMPILED_GROUP, OTHER = "language", "convolution", "compiled", "other"
H200 = target_for("h200", "cuda", torch="2.11")
BITSANDBYTES, INT8_LAYERS = "bitsandbytes", "int8"  # the latter's memory depends on values, too
Row = dict[str, Any]


def stored(path: Path) -> Trace:
    """A trace that `store` wrote."""
    return from_json(lzma.decompress(path.read_bytes()).decode())


def store(trace: Trace, path: Path) -> None:
    path.write_bytes(lzma.compress(to_json(trace).encode()))


def allocations(trace: Trace) -> tuple[Any, ...]:
    """What must be equal in a stored trace and one made later, also by another version of torch."""
    return trace.events, [kind.nbytes for kind in trace.tensors], trace.steps


class TracedRun:
    """A recorded run of a script, and its trace."""

    def __init__(self, row: Row, folder: Path) -> None:
        self.row, self.folder = row, folder
        self.name, self.group, self.architecture = row["name"], row["group"], row["architecture"]

    @cached_property
    def trace(self) -> Trace | None:
        path = self.folder / "stored" / f"{self.name.replace(' ', '_')}.json.xz"
        return stored(path) if path.is_file() else None

    @cached_property
    def plan(self) -> TracedPlan:
        """With the allocator of the run."""
        assert self.trace is not None
        return plan_trace(self.trace, H200, "expandable" if self.row.get("expandable") else "native")

    @property
    def timeline(self) -> Timeline:
        return self.plan.timeline

    @property
    def skipped(self) -> bool:
        """Whether GradScaler skipped steps, after gradients that overflowed: a trace does not know."""
        first = self.row["steps"][0]["optimizer"]  # several optimizers that step one after the other take one step
        taken = sum(step["optimizer"] == first for step in self.row["steps"])
        return self.trace is not None and SKIPPED_STEPS in self.trace.notes and taken < len(self.trace.steps)

    @property
    def measured(self) -> PeakMemory:
        """Of the whole script."""
        end = self.row["end"]
        return PeakMemory(end["max_memory_allocated"], end["max_memory_reserved"])

    @property
    def forecast(self) -> PeakMemory:
        return self.plan.peak

    def errors(self) -> tuple[int, int]:
        """Of the most reserved and the most allocated: forecast − measured."""
        return (self.forecast.reserved_bytes - self.measured.reserved_bytes,
                self.forecast.allocated_bytes - self.measured.allocated_bytes)

    def percents(self) -> tuple[float, float]:
        reserved, allocated = self.errors()
        return 100 * reserved / self.measured.reserved_bytes, 100 * allocated / self.measured.allocated_bytes


@cache
def runs() -> list[TracedRun]:
    return [TracedRun(row, RECORDED) for row in _rows(RECORDED / "measured.json")]


@cache
def held_out_runs(name: str) -> list[TracedRun]:
    """Scripts that were traced before they were measured; their stored traces are of today."""
    return [TracedRun(row, RECORDED / name) for row in _rows(RECORDED / name / "measured.json")]


def held_out_errors(run: TracedRun) -> tuple[float, float] | None:
    """In percent, of the forecast made before the measurement: reserved, allocated."""
    said = next(row for row in forecasts(run.folder.name) if row["name"] == run.name)
    if "error" in said:
        return None
    peak = said["peak"]
    return (100 * (peak["reserved_bytes"] / run.measured.reserved_bytes - 1),
            100 * (peak["allocated_bytes"] / run.measured.allocated_bytes - 1))


def forecasts(name: str) -> list[Row]:
    """Of a set of scripts, made before they were measured."""
    return _rows(RECORDED / name / "predicted.json")


def _rows(path: Path) -> list[Row]:
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"])


def traced(group: str) -> list[TracedRun]:
    return [run for run in runs() if run.group == group and run.trace is not None]


def basis(gpu: str, torch: str) -> list[Row]:
    """Rows of src/fitgpt/planning/track_record.csv, by its COLUMNS: a script has no shape that fitgpt knows."""
    trainers = {group: record_kind(SCRIPT, expandable=False, odd=False, convolutions=group == CONVOLUTION)
                for group in (LANGUAGE, BITSANDBYTES, OTHER, CONVOLUTION)}
    return [{**dict.fromkeys(COLUMNS, ""), "trainer": trainers[run.group], "gpu": gpu, "torch": torch,
             "name": run.name, "mode": "eager", "options": " ".join(run.row["args"]),
             "allocated_bytes": run.measured.allocated_bytes, "reserved_bytes": run.measured.reserved_bytes,
             "forecast_allocated_bytes": run.forecast.allocated_bytes,
             "forecast_reserved_bytes": run.forecast.reserved_bytes, "figures": 2,
             "worst_percent": round(max(run.percents(), key=abs), 3)}
            for run in [*runs(), *(run for name in HELD_OUT for run in held_out_runs(name))]
            if run.group in trainers and run.trace is not None]


# ---- tables


def table_part(group: str) -> str:
    rows = []
    for run in traced(group):
        (reserved, allocated), percents = run.errors(), run.percents()
        rows.append([run.name, " ".join(run.row["args"]).replace("--", "") or run.row["script"],
                     "expandable" if run.row.get("expandable") else "native",
                     f"{run.measured.reserved_bytes / MiB:,.0f}",
                     *(f"{percent:+.3f} %" if off else "0" for off, percent in zip((reserved, allocated), percents,
                                                                                   strict=True))])
    return markdown(["run", "arguments", "allocator", "reserved, MiB", "reserved, error", "allocated, error"], rows)


def summary_part() -> str:
    rows = []
    for group in (LANGUAGE, BITSANDBYTES, INT8_LAYERS, CONVOLUTION):
        found = traced(group)
        reserved, allocated = ([each.percents()[kind] for each in found] for kind in (0, 1))
        exact = [sum(not each.errors()[kind] for each in found) for kind in (0, 1)]
        rows.append([group, str(len(found)), str(len({run.architecture for run in found})),
                     f"{exact[0]} of {len(found)}", f"{min(reserved):+.2f} to {max(reserved):+.2f} %",
                     f"{exact[1]} of {len(found)}", f"{min(allocated):+.2f} to {max(allocated):+.2f} %"])
    return markdown(["scripts", "runs", "architectures", "reserved at 0 bytes", "reserved, errors",
                     "allocated at 0 bytes", "allocated, errors"], rows)


def held_out_part(name: str, group: str) -> str:
    def cells(percents: tuple[float, float] | None) -> list[str]:
        if percents is None:
            return ["failed"] * 2
        return [f"{percent:+.3f} %" if round(percent, 3) else "0" for percent in percents]

    rows = [[f"[{run.name}](../bench/trace_cases/{run.row['script']})", run.architecture,
             "expandable" if run.row.get("expandable") else "native", f"{run.measured.reserved_bytes / MiB:,.0f}",
             *cells(held_out_errors(run)), *cells(run.percents())] for run in held_out_runs(name) if run.group == group]
    return markdown(["run", "architecture", "allocator", "reserved, MiB", "reserved, held out", "allocated, held out",
                     "reserved, today", "allocated, today"], rows)


def held_out_summary_part() -> str:
    """Of language models."""
    rows = []
    for name in HELD_OUT:
        found = [run for run in held_out_runs(name) if run.group == LANGUAGE]
        before = [errors[0] for run in found if (errors := held_out_errors(run))]
        rows.append([f"[{name}](../bench/trace_cases/{name})", str(len(found)), str(before.count(0)),
                     *(str(sum(-0.5 <= error <= 1 for error in errors))
                       for errors in (before, [run.percents()[0] for run in found]))])
    return markdown(["set", "language models", "reserved to the byte, held out", "within -0.5 and +1 %, held out",
                     "within these bounds today"], rows)


def compiled_part() -> str:
    """What compiled scripts reserved, as a share of their trace."""
    rows = [[run.name, f"{run.measured.reserved_bytes / MiB:,.0f}", "compiled" if run.trace.planned else "eager",
             f"{run.timeline.reserved / MiB:,.0f}", f"{run.measured.reserved_bytes / run.timeline.reserved:.2f}"]
            for run in runs() if run.group == COMPILED_GROUP and run.trace is not None]
    return markdown(["run", "reserved, MiB", "trace", "its reserved, MiB", "share"], rows) + (
        f"\n`fitgpt trace` states {PLANNED[0]:g} to {PLANNED[1]:g} times the trace with the compiler's own plan, and "
        f"{UNPLANNED[0]:g} to {UNPLANNED[1]:g} times an eager trace.\n")


# ---- other estimators, on the same runs


def of_accelerate(run: TracedRun) -> int | None:
    """`accelerate estimate-memory` 1.15: estimate_training_usage() in accelerate/commands/estimate.py, the largest."""
    assert run.trace is not None
    size = 4 * run.trace.params
    if not size:
        return None
    return 4 * size if _precision(run) == "fp32" else 2 * size


def of_deepspeed(run: TracedRun) -> int | None:
    """estimate_zero2_model_states_mem_needs() for one GPU, without offload: (4 + 16) bytes per parameter."""
    assert run.trace is not None
    return 20 * run.trace.params or None


def of_unsloth(run: TracedRun) -> int | None:
    """Full fine-tuning by VRAM_ESTIMATION.md of Unsloth Studio, without its 1.4 GB of CUDA overhead, which is outside
    PyTorch's allocator. Only for decoders of its form: SwiGLU and grouped-query attention."""
    if run.row["script"] != "language_model.py" or run.architecture not in UNSLOTH_SHAPES:
        return None
    assert run.trace is not None
    if not run.trace.params:
        return None
    options = _options(run.row["args"])
    layers, width, hidden, keys = 6, 768, 2048, UNSLOTH_SHAPES[run.architecture]
    if any("num_hidden_layers" in each for each in run.row["args"]):
        return None
    tokens = int(options.get("batch", 8)) * int(options.get("seq", 512))
    per_layer = (tokens * (width + 2 * keys) + 2 * tokens + tokens * 2 * hidden) * 2 * 1.25
    weights, gradients = 2 * run.trace.params, 2 * run.trace.params
    kept = 2.0 if "checkpoint" in options else layers
    state = 4 if "sgd" in options.get("optimizer", "") else 6
    return int(weights + max(gradients, 0.15 * weights) + state * run.trace.params + kept * per_layer)


UNSLOTH_SHAPES = {"llama": 256, "mistral": 256, "qwen2": 256, "qwen3": 256, "gemma2": 256, "gemma3_text": 256,
                  "granite": 256, "olmo2": 256, "phi3": 256, "smollm3": 256}  # K: width of keys, by its formula


def of_memtracker(run: TracedRun) -> int | None:
    """torch.distributed._tools.mem_tracker.MemTracker around the script on the GPU: what it says of the real run."""
    return _recorded_estimate("memtracker.json", run)


def of_kitsune(run: TracedRun) -> int | None:
    """As bench/other_estimators.py asks it."""
    return _recorded_estimate("kitsune.json", run)


def _recorded_estimate(file: str, run: TracedRun) -> int | None:
    rows = json.loads((RECORDED / file).read_text(encoding="utf-8"))["rows"]
    return next((row.get("peak_bytes") for row in rows if row["name"] == run.name), None)


def _precision(run: TracedRun) -> str:
    options = _options(run.row["args"])
    return options.get("precision") or options.get("dtype") or "bf16"


def _options(args: Iterable[str]) -> dict[str, str]:
    words = list(args)
    return {word[2:].partition("=")[0]: word.partition("=")[2] or (following if not following.startswith("--") else "")
            for word, following in zip(words, [*words[1:], "--"], strict=False) if word.startswith("--")}


class Estimator(NamedTuple):
    name: str
    estimate: Any


ESTIMATORS = (Estimator("MemTracker (runs the script on a GPU)", of_memtracker),
              Estimator("torch-kitsune", of_kitsune), Estimator("accelerate estimate-memory", of_accelerate),
              Estimator("DeepSpeed, ZeRO-2 on one GPU", of_deepspeed), Estimator("Unsloth Studio", of_unsloth))


def estimators_part() -> str:
    """Errors of the bytes reserved, over the recorded language models."""
    rows = []
    for name, estimate in (("**fitgpt trace**", lambda run: run.forecast.reserved_bytes), *ESTIMATORS):
        found = [(100 * (said - run.measured.reserved_bytes) / run.measured.reserved_bytes) for run in traced(LANGUAGE)
                 if (said := estimate(run)) is not None]
        if found:
            rows.append([name, str(len(found)), f"{median(map(abs, found)):.2f} %",
                         f"{min(found):+.1f} to {max(found):+.1f} %", str(sum(each < -0.5 for each in found))])
    return markdown(["estimator", "runs", "median error", "errors", "runs more than 0.5 % low"], rows)


PARTS = {"traces": table_part, "trace_summary": summary_part, "traces_held_out": held_out_part,
         "traces_held_out_summary": held_out_summary_part, "trace_compiled": compiled_part,
         "trace_estimators": estimators_part}

if __name__ == "__main__":
    held_out = [(name, group) for name in HELD_OUT for group in sorted({run.group for run in held_out_runs(name)})]
    for part in (summary_part(), held_out_summary_part(), table_part(LANGUAGE), table_part(CONVOLUTION),
                 *(held_out_part(*each) for each in held_out), compiled_part(), estimators_part()):
        print(part)
