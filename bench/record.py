"""What short runs of the engine really hold, phase by phase: the truth that forecasts are compared with.

    python bench/record.py tests/recorded/engine/cases/random.json -o tests/recorded/engine/random.json

Each case (a name, options of RunConfig, perhaps a `cap` in bytes) runs in a process of its own, with the allocator's
environment that `fitgpt train` sets: load, evaluation, three iterations, evaluation, one more iteration, a checkpoint;
then, in another process, sampling. A case with `gpus` is one rank (`rank`) of a fake process group. Nothing is timed,
so the processes run side by side. With `--events FOLDER` every allocation and free is kept too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fitgpt import __version__  # noqa: E402
from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.hardware.allocator_env import child_environment  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases")
    parser.add_argument("-o", "--out", default="")
    parser.add_argument("--events", default="", help="a folder for every allocation and free of each case")
    parser.add_argument("--at_once", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=150, help="after which a case is given up")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(json.loads(options.cases), options.events)))
        return
    cases = json.loads(Path(options.cases).read_text(encoding="utf-8"))["cases"]
    started, rows, writing = time.time(), dict[str, dict[str, Any]](), threading.Lock()

    def record(case: dict[str, Any]) -> None:
        """Written after each case, so that what is there counts if time runs out."""
        row = measured(case, options.events, options.seconds)
        with writing:
            rows[case["name"]] = row
            write(Path(options.out), [rows[each["name"]] for each in cases if each["name"] in rows])

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(record, cases))
    failed = [row for row in rows.values() if "error" in row]
    print(f"{len(rows)} cases in {time.time() - started:.0f} s, {len(failed)} failed")
    for row in failed:
        print(row["name"], row["error"][-700:])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    about = next((row["about"] for row in rows if "about" in row), {})
    path.write_text(json.dumps(
        {"what": "peaks in bytes of each phase of short runs", "date": time.strftime("%Y-%m-%d"), **about,
         "fitgpt": __version__, "rows": [{key: row[key] for key in row if key != "about"} for row in rows]},
        indent=1) + "\n", encoding="utf-8")


def measured(case: dict[str, Any], events: str, seconds: int) -> dict[str, Any]:
    row = in_own_process(case, events, seconds)
    if case.get("sample") and "phases" in row:
        row["phases"] |= in_own_process({**case, "only": "sample"}, events, seconds).get("phases", {})
    return row


def in_own_process(case: dict[str, Any], events: str, seconds: int) -> dict[str, Any]:
    environment = child_environment(os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"})
    if case.get("native"):
        environment = {name: value for name, value in environment.items() if not name.endswith("ALLOC_CONF")}
    command = [sys.executable, __file__, json.dumps(case), "--one", "--events", events]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {**case, "error": f"not done after {seconds} s"}
    if done.returncode:
        return {**case, "error": done.stderr[-1500:]}
    row = {**case, **json.loads(done.stdout.splitlines()[-1])}
    if "could not be recorded" in done.stderr:
        row["recording_failed"] = True
    return row


def one(case: dict[str, Any], events: str) -> dict[str, Any]:
    """The phases of one run, as training/recording.py has them."""
    import torch

    from fitgpt.training.recording import force_kernel, record_phases

    config = RunConfig(**case["config"])
    force_kernel(case.get("kernel", ""))
    if case.get("only") == "sample":
        return sampling(config, case["name"], events)
    if "cap" in case:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case["cap"] / total)
    watch = open_watch(bool(events))
    failed = record_phases(config, "cuda", watch, save=case.get("save", True),
                           ranks=fake_ranks(config, case.get("rank", 0)))
    result: dict[str, Any] = {"out_of_memory": {"phase": watch.now, "message": failed}} if failed else {}
    result["phases"] = watch.peaks
    keep_events(watch, events, case["name"])
    result["about"] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    return result


def fake_ranks(config: RunConfig, rank: int) -> Any:
    """One rank of several, in a process group whose collectives do nothing: every buffer is allocated all the same."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fitgpt.engine.ranks import ALONE, Ranks

    if config.ranks == 1:
        return ALONE
    dist.init_process_group("fake", rank=rank, world_size=config.ranks, store=FakeStore())
    return Ranks(rank, config.ranks, joined=True, gradients=dist.new_group(backend="fake"))


def sampling(config: RunConfig, name: str, events: str) -> dict[str, Any]:
    """As `fitgpt sample` does it: 40 tokens after a short prompt."""
    import torch

    from fitgpt.engine.device import resolve_device
    from fitgpt.engine.model import build_model
    from fitgpt.engine.sample import SamplingOptions, generate

    dtype = resolve_device("cuda", config.dtype, config.compile).dtype
    watch = open_watch(bool(events))
    with watch.phase("sample"):
        model = build_model(config.gpt_config(), torch.device("cuda"), 0)
        model.compute_dtype = getattr(torch, dtype)
        list(generate(model, [1] * 16, 40, SamplingOptions(), 0))
    keep_events(watch, events, f"{name} sample")
    return {"phases": watch.peaks}


def open_watch(with_events: bool) -> Any:
    """training/recording.PhaseWatch; one that also keeps what is allocated and freed in each phase, if asked."""
    import torch

    from fitgpt.training.recording import PhaseWatch

    class EventWatch(PhaseWatch):
        def __init__(self) -> None:
            super().__init__()
            self.events: list[dict[str, Any]] = []

        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=2_000_000)
            try:
                with super().phase(name):
                    yield
            finally:
                trace = torch.cuda.memory._snapshot()["device_traces"][0]
                torch.cuda.memory._record_memory_history(None)
                self.events.append({"phase": name, "events": [
                    [each["action"], each["addr"], each["size"], each["stream"], where(each)] for each in trace]})

    return EventWatch() if with_events else PhaseWatch()


def keep_events(watch: Any, folder: str, name: str) -> None:
    if folder:
        with gzip.open(Path(folder) / f"{name.replace(' ', '_')}.json.gz", "wt") as file:
            json.dump(watch.events, file)


def where(entry: dict[str, Any]) -> str:
    """The innermost lines of ours behind an event."""
    ours = [f"{Path(frame['filename']).name}:{frame['line']}" for frame in entry.get("frames", [])
            if "fitgpt" in frame["filename"] or "torchinductor" in frame["filename"]]
    return " < ".join(ours[:3])


if __name__ == "__main__":
    main()
