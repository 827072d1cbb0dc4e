"""Memory of real training scripts on a GPU, and what `fitgpt trace` forecasts for each.

    python bench/trace.py measure --out FOLDER --nanogpt ../nanoGPT      on a GPU: run every case, and trace it there
    python bench/trace.py trace --out FOLDER --nanogpt ../nanoGPT        without a GPU: trace only
    python bench/trace.py memtracker --out FOLDER --nanogpt ../nanoGPT   on a GPU: what torch's MemTracker reports
    python bench/trace.py table FOLDER                                    forecast beside measurement

The cases (bench/trace_cases/cases.json) are scripts with arguments; `--set held_out` takes those that were traced
before they were measured. Each runs in a process of its own as `python script.py` would; after every optimizer step the
allocator's four figures are read. Nothing is timed, so the processes run side by side. `--nanogpt` is a checkout of
nanoGPT, for the cases that run its train.py.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fitgpt.tracing.trace_file import from_json, to_json  # noqa: E402

CASES = ROOT / "bench" / "trace_cases"
TOKENS = 200_000       # of nanoGPT's data
GPU = "h200"
LARGEST_ARCHIVE = 15 * 2**20
MOST_STEPS = 1000      # more than any case has: every step is traced, unless the case says how many can be
FIGURES = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
Row = dict[str, Any]


def main() -> int:
    sets = json.loads((CASES / "cases.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "trace", "memtracker", "table", "one"])
    parser.add_argument("folder", nargs="?", default="")
    parser.add_argument("--out", default="", help="a folder for measured.json, traced.json and archives")
    parser.add_argument("--nanogpt", default="", help="the folder with nanoGPT's train.py")
    parser.add_argument("--set", default="cases", choices=list(sets), help="which list of cases.json")
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument("--at_once", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=150, help="after which a case is given up")
    parser.add_argument("--no_trace", action="store_true", help="measure only")
    parser.add_argument("--history", action="store_true", help="keep every allocation and free, too")
    parser.add_argument("--torch", default="", help="version of torch whose rules traces follow")
    parser.add_argument("--extra", default="", help="arguments after those of each case")
    options = parser.parse_args()
    if options.what == "one":
        print(json.dumps(one(json.loads(options.folder), options.out)))
        return 0
    if options.what == "table":
        print(table(Path(options.folder)))
        return 0
    cases = [case for case in sets[options.set] if re.search(options.only, case["name"])]
    for case in cases:
        case["args"] = [*case["args"], *options.extra.split()]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.what == "measure":
        every_case(cases, out / "measured.json", options, lambda case: measured(case, options, out))
    if options.what == "memtracker":
        every_case(cases, out / "memtracker.json", options, lambda case: measured(case, options, out))
    elif not options.no_trace:
        every_case(cases, out / "traced.json", options, lambda case: traced(case, options, out))
    for folder in ("history", "traces"):
        pack(out / folder)
    print(table(out))
    return 0


def every_case(cases: list[Row], path: Path, options: argparse.Namespace, run: Callable[[Row], Row]) -> None:
    """Rows are written after each case, so that what is there counts if time runs out. The slowest start first."""
    rows, writing, started = dict[str, Row](), threading.Lock(), time.time()

    def record(case: Row) -> None:
        began = time.time()
        try:
            row = run(case)
        except Exception as error:  # one case must not stop the others
            row = {"error": repr(error)}
        row["seconds"] = round(time.time() - began, 1)
        with writing:
            rows[case["name"]] = {**case, **row}
            path.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "rows": [
                rows[each["name"]] for each in cases if each["name"] in rows]}, indent=1) + "\n", encoding="utf-8")

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(record, sorted(cases, key=lambda case: case["group"] != "compiled")))
    failed = [row for row in rows.values() if "error" in row]
    print(f"{path.name}: {len(rows)} cases in {time.time() - started:.0f} s, {len(failed)} failed", flush=True)
    for row in failed:
        print(f"  {row['name']}: {row['error'][-300:]}", flush=True)


def pack(folder: Path) -> None:
    """The files of a folder as tar archives of at most 15 MiB beside it: NAME_0.tar, NAME_1.tar …"""
    archives, size = list[list[Path]](), 0
    for path in sorted(folder.glob("*.xz")):
        if not archives or size + path.stat().st_size > LARGEST_ARCHIVE:
            archives.append([])
            size = 0
        archives[-1].append(path)
        size += path.stat().st_size
    for number, paths in enumerate(archives):
        with tarfile.open(folder.with_name(f"{folder.name}_{number}.tar"), "w") as archive:
            for path in paths:
                archive.add(path, path.name)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def script_of(case: Row, nanogpt: str) -> Iterator[tuple[Path, Path]]:
    """The script, and the folder to run it in: an empty one, or for nanoGPT one with its files and random tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case["script"] != "nanogpt":
            yield CASES / case["script"], folder
            return
        import numpy as np

        for file in ("train.py", "model.py", "configurator.py"):
            shutil.copy(Path(nanogpt) / file, folder / file)
        data = folder / "data" / "openwebtext"
        data.mkdir(parents=True)
        for split in ("train", "val"):
            np.random.default_rng(0).integers(0, 50257, TOKENS).astype(np.uint16).tofile(data / f"{split}.bin")
        yield folder / "train.py", folder


def environment_of(case: Row) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false",
                    "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(
                        [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)}
    if case.get("expandable"):
        environment["PYTORCH_CUDA_ALLOC_CONF"] = environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return environment


# ---- measured on a GPU


def measured(case: Row, options: argparse.Namespace, out: Path) -> Row:
    history = out / "history" / f"{case['name'].replace(' ', '_')}.json.xz" if options.history else None
    if history:
        history.parent.mkdir(exist_ok=True)
    with script_of(case, options.nanogpt) as (script, folder), tempfile.TemporaryDirectory() as caches:
        task = json.dumps({"script": str(script), "args": case["args"], "tracked": options.what == "memtracker"})
        environment = {**environment_of(case), "TORCHINDUCTOR_CACHE_DIR": caches}
        command = [sys.executable, __file__, "one", task, "--out", str(history.resolve() if history else "")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder,
                                  timeout=options.seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {options.seconds} s"}
    if done.returncode or not done.stdout.strip():
        return {"error": done.stderr[-1500:] or f"exit code {done.returncode}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def one(task: Row, history: str) -> Row:
    """In the child: the script from its first line to its last, with readings after every optimizer step."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    optimizers, steps, cuda = list[int](), list[Row](), torch.cuda.is_available()

    def read() -> Row:
        return {name: getattr(torch.cuda, name)() if cuda else 0 for name in FIGURES}

    def after_step(optimizer: Any, *_: Any) -> None:
        if id(optimizer) not in optimizers:
            optimizers.append(id(optimizer))
        steps.append({"optimizer": optimizers.index(id(optimizer)), **read()})

    register_optimizer_step_post_hook(after_step)
    if history:
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=1_000_000)
    sys.argv, sys.path[0] = [task["script"], *task["args"]], str(Path(task["script"]).parent)
    with redirect_stdout(sys.stderr):
        if task["tracked"]:
            return memtracker(task["script"])
        kept = runpy.run_path(task["script"], run_name="__main__")
    row = {"steps": steps, "end": read(), "torch": torch.__version__,
           "gpu": torch.cuda.get_device_name() if cuda else None, "versions": versions()}
    if history:
        write_history(Path(history))
    del kept
    return row


def memtracker(script: str) -> Row:
    """The peak that torch's MemTracker reports of the script, which runs for real: its best case."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    original, depth = torch.nn.Module.__call__, [0]

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        """It tracks one call of a module: before the next it must forget the last."""
        if not depth[0]:
            tracker.reset_mod_stats()
        depth[0] += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            depth[0] -= 1

    with MemTracker() as tracker:
        torch.nn.Module.__call__ = call
        kept = runpy.run_path(script, run_name="__main__")
    peaks = [sum(held.values()) if "Total" not in held else held["Total"]
             for device, held in tracker.get_tracker_snapshot("peak").items() if device.type == "cuda"]
    del kept
    return {"peak_bytes": max(peaks, default=0), "torch": torch.__version__}


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("transformers", "accelerate", "peft", "timm", "bitsandbytes")
            if name in sys.modules}


def write_history(path: Path) -> None:
    """Every allocation, free and segment, in order: [action, bytes, number of the address, number of the place]."""
    import torch

    actions, places, addresses = dict[str, int](), dict[str, int](), dict[int, int]()
    events, segments = [], []
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        frames = [f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
                  for frame in entry.get("frames", [])[:5]]
        if entry["action"] == "segment_alloc":
            segments.append([len(events), entry["addr"]])
        events.append([actions.setdefault(entry["action"], len(actions)), entry["size"],
                       addresses.setdefault(entry["addr"], len(addresses)),
                       places.setdefault(" < ".join(frames), len(places)), entry["stream"] != 0])
    with lzma.open(path, "wt", preset=2) as file:
        json.dump({"actions": list(actions), "places": list(places), "events": events,
                   "segments": segments}, file, separators=(",", ":"))


# ---- traced


def traced(case: Row, options: argparse.Namespace, out: Path) -> Row:
    saved = (out / "traces" / f"{case['name'].replace(' ', '_')}.json").resolve()
    saved.parent.mkdir(parents=True, exist_ok=True)
    with script_of(case, options.nanogpt) as (script, folder):
        command = [sys.executable, "-P", "-m", "fitgpt", "trace", "--gpu", GPU, "--steps",
                   str(case.get("steps", MOST_STEPS)), "--json",
                   "--save", str(saved), *(["--torch", options.torch] if options.torch else []), str(script),
                   *case["args"]]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment_of(case), cwd=folder,
                                  timeout=options.seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {options.seconds} s"}
    if done.returncode not in (0, 1) or not done.stdout.strip():
        return {"error": done.stderr[-1500:] or f"exit code {done.returncode}"}
    with lzma.open(f"{saved}.xz", "wt", encoding="utf-8") as file:
        file.write(without_folders(saved.read_text(encoding="utf-8"), [CASES, folder]))
    plan = json.loads(done.stdout[done.stdout.index("{"):])
    return {"steps": plan["steps"], "peak": plan["peak"], "not_seen": plan.get("not_seen"), "torch": plan["torch"]}


def without_folders(saved: str, folders: list[Path]) -> str:
    """A saved trace whose files have names relative to these folders, or to one that modules come from."""
    trace = from_json(saved)
    prefixes = [f"{each}{os.sep}" for each in (*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep)) if each]

    def relative(name: str) -> str:
        return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)

    return to_json(replace(trace, command=tuple(map(relative, trace.command)),
                           tensors=tuple(kind._replace(source=relative(kind.source)) for kind in trace.tensors)))


# ---- compared


def table(folder: Path) -> str:
    """One line per case: the most reserved and allocated, forecast against measured."""
    if (folder / "memtracker.json").is_file() and not (folder / "measured.json").is_file():
        return ""
    found = {name: {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
             for name in ("measured", "traced") if (path := folder / f"{name}.json").is_file()}
    lines = []
    for name, row in found.get("measured", found.get("traced", {})).items():
        forecast = found.get("traced", {}).get(name, {})
        if "error" in row or "error" in forecast:
            lines.append(f"{name:40} {'run' if 'error' in row else 'trace'} failed")
            continue
        figures = []
        for kind in ("reserved", "allocated"):
            real = row["steps"][-1][f"max_memory_{kind}"] if "end" in row else None
            said = forecast["peak"][f"{kind}_bytes"] if "peak" in forecast else None
            error = f"{100 * (said - real) / real:+9.4f} %" if real and said else ""
            figures.append(f"{kind} {real or said or 0:>15,} {error:>11}")
        lines.append(f"{name:40} {len(row['steps']):2} steps  {'  '.join(figures)}  {row.get('seconds', 0):.0f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
