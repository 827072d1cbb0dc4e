"""`fitgpt record`: short runs on the GPU of this machine that determine what the planner needs to know of it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.command_options import RecordOptions
from ..config.run_config import RunConfig, resolve_run
from ..core.errors import DataError, DeviceError, Interrupted, SystemFault, UsageError
from ..core.files import check_overwrite, disk_faults, is_own_json, write_atomically
from ..core.units import MiB, parse_bytes, show_bytes, show_seconds
from ..hardware import nvidia
from ..hardware.allocator_env import ALLOCATOR_VARIABLES, child_environment
from ..hardware.nvidia import GpuReading
from ..planning import gpu_record, measured_speeds, record_check
from ..planning.budget import select_gpu
from ..planning.gpu_record import GpuRecord, GpuRun, RecordedGpu
from ..planning.measure import TimingProcess
from ..show.progress import say
from ..training.supervisor import require_packages

SECONDS_PER_RUN = 300  # after which a run is given up: compiling takes a minute on a slow CPU
SECONDS_TIMED = 5.0
STEADY = 16 * MiB      # other processes' memory may change by this while a run's own is read


def record(options: RecordOptions) -> int:
    if sys.platform == "win32":
        raise UsageError("`fitgpt record` compares PyTorch's two allocators, and Windows has no expandable segments.",
                         "Run it on Linux; fitgpt rehearse compares one run with its forecast.")
    require_packages()
    out = Path(options.out)
    check_overwrite(out, lambda text: is_own_json(text, "schema", "gpu", "runs"), "record", "-o")
    seen = nvidia.survey()
    if not seen.gpus:
        raise DeviceError(f"There is no NVIDIA GPU here to record: {seen.reason or 'all of them are hidden'}.",
                          "fitgpt cards lists the GPUs that are known already")
    reading = select_gpu(seen, options.device)
    device = f"cuda:{seen.gpus.index(reading)}"
    with disk_faults("make the folder of", out):
        out.parent.mkdir(parents=True, exist_ok=True)
    kept = begin(out, reading, device)
    try:
        done = run_all(kept, out, reading, device, parse_bytes(options.leave))
    except KeyboardInterrupt:
        raise Interrupted(f"Stopped. What was recorded is in {out}.", f"fitgpt record -o {out} continues") from None
    return conclude(done, out)


def begin(out: Path, reading: GpuReading, device: str) -> GpuRecord:
    """A new record with the figures of the GPU; or the one in the file, to be continued."""
    say(f"{reading.name}: reading its figures …")
    figures = ask_child({"device": device}, native=False)
    if "error" in figures:
        raise DeviceError(f"The figures of {reading.name} could not be read: {figures['error']}", "fitgpt doctor")
    versions = {"fitgpt": __version__, "torch": figures.pop("torch"), "cuda": figures.pop("cuda"),
                "driver": reading.driver_version or "", "python": platform.python_version()}
    clock = next((gpu.top_clock_mhz for gpu in nvidia.read_gpus()[0] if gpu.index == reading.index), None)
    driver_mib = (reading.total_bytes or figures["usable_bytes"]) // MiB
    fresh = GpuRecord(date.today().isoformat(), versions,
                      RecordedGpu(driver_mib=driver_mib, boost_mhz=clock or 0, **figures))
    if not out.exists():
        return fresh
    earlier = gpu_record.parse(out.read_text(encoding="utf-8", errors="replace"), str(out))
    if (earlier.gpu.name, earlier.versions) != (fresh.gpu.name, fresh.versions):
        raise DataError(f"{out} is a record of {earlier.gpu.name} with other versions "
                        f"({', '.join(f'{name} {each}' for name, each in earlier.versions.items())}).",
                        "Give another file: -o my-gpu.json")
    return earlier


def run_all(record: GpuRecord, out: Path, reading: GpuReading, device: str, leave: int) -> GpuRecord:
    """Runs what the record does not have yet. The file is written after each run."""
    on = record_check.platform_of(record)
    wanted = record_check.cases(on)
    done = {run.name: run for run in record.runs if run.done}
    say(f"{len(wanted)} runs, about ten minutes; {len(done)} are recorded already. {show_bytes(leave)} of the GPU's "
        "memory are left free. Ctrl-C stops; the same command continues.")
    for number, case in enumerate(wanted, 1):
        if case.name in done:
            continue
        begun, before = time.monotonic(), used_now(reading)
        room = record.gpu.usable_bytes - before - leave - 1024 * MiB  # the last for what is outside the allocator
        found = measure(case, device, room, reading, before, on)
        record = replace(record, runs=tuple({run.name: run for run in (*record.runs, found)}.values()))
        write_atomically(out, record.to_json())
        say(f"{number:>2} of {len(wanted)}  {case.name:<28} {describe(found, record)} "
            f"({show_seconds(time.monotonic() - begun)})")
    return record


def measure(case: GpuRun, device: str, room: int, reading: GpuReading, before: int, on: Any) -> GpuRun:
    needed = record_check.needed(case, on)
    if needed > room:
        return replace(case, why=f"skipped: needs {show_bytes(needed)}, {show_bytes(max(room, 0))} are free")
    if case.name in record_check.TIMED:
        with TimingProcess(SECONDS_TIMED) as timing:
            speed = timing.time(RunConfig(**case.config, device=device), room)
        if isinstance(speed, str):
            return replace(case, why="could not be timed")
        return replace(case, tokens_per_s=round(speed, 1))
    result = ask_child({"device": device, "cap": room, "run": asdict(case)}, native=case.native)
    if "error" in result:
        return replace(case, why="out of memory" if "out of memory" in result["error"] else "failed")
    if case.kernel and result["attention"] != case.kernel:
        return replace(case, why="torch has no such kernel for this GPU")
    outside = result["used_outside"] - before
    steady = abs(used_now(reading) - before) <= STEADY
    return replace(case, phases=result["phases"], attention=result["attention"],
                   outside_bytes=outside if steady and outside > 0 else None)


def used_now(reading: GpuReading) -> int:
    """Bytes that processes use of the GPU."""
    return next((gpu.used_bytes or 0 for gpu in nvidia.survey().gpus if gpu.index == reading.index), 0)


def ask_child(request: dict[str, Any], *, native: bool) -> dict[str, Any]:
    """The answer of training/recording.py, or {"error": …}."""
    clean = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    environment = clean if native else child_environment(clean)
    try:
        done = subprocess.run([sys.executable, "-P", "-m", "fitgpt.training.recording"], env=environment,
                              input=json.dumps(request) + "\n", capture_output=True, text=True,
                              timeout=SECONDS_PER_RUN)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {SECONDS_PER_RUN} s."}
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return answer if isinstance(answer, dict) else {"error": "no answer"}


def describe(run: GpuRun, record: GpuRecord) -> str:
    if run.tokens_per_s is not None:
        return f"{run.tokens_per_s:,.0f} tokens/s"
    if not run.phases:
        return run.why
    reserved = max(phase["reserved"] for phase in run.phases.values())
    differing = record_check.differences(run, record)
    return f"{show_bytes(reserved)} reserved, " + (f"not as replayed: {differing[0]}" if differing else "as replayed")


def conclude(record: GpuRecord, out: Path) -> int:
    """Keeps the record for this machine's plans if it is explained; says what was found."""
    runs = [run for run in record.runs if run.phases]
    explained = record_check.explain(record)
    gpu = record.gpu
    say(f"\n{gpu.name}, torch {record.versions['torch']}: CUDA offers {gpu.usable_bytes // MiB} MiB; a process uses up "
        f"to {record.outside_mib or '?'} MiB outside PyTorch's allocator; cuBLAS workspace "
        f"{show_bytes(gpu.workspace_bytes)}; attention {record.attention or '?'}; {gpu.matmul_tflops:g} TFLOP/s in "
        f"matmuls; {gpu.copy_gbs:g} GB/s.")
    if explained.mismatches:
        say(f"{len(explained.mismatches)} figures are not explained by the planner:\n  "
            + "\n  ".join(explained.mismatches[:8]))
        raise DataError(f"The record in {out} is not used for plans.", "Please report it, with the file.")
    say(f"{len(runs)} runs replayed: {explained.exact} of {len(explained.figures)} figures to the byte, all reserved "
        "bytes among them.")
    model = record.model
    for run in record.runs:
        if run.tokens_per_s:
            resolved = resolve_run(RunConfig(**run.config), explained.platform)
            name = model.name if model else record.apply(None, gpu_record.OWN).name
            measured_speeds.add(name, resolved, run.tokens_per_s, record.versions["torch"], "record")
    if gpu_record.keep(record) is None:
        raise SystemFault("The record could not be kept for the plans of this machine.",
                          "Set FITGPT_HOME to a folder that you can write.")
    say(f"Plans for this GPU now use it: {gpu_record.OWN}. To share it: {out} ({out.stat().st_size:,} bytes; no paths, "
        "no names, no serial numbers), docs/record.md.")
    return 0
