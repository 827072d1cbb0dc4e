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
import tempfile
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

ITERATIONS = 3
EVAL_BATCHES = 2  # of each split


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
    """The phases of one run, with the engine's own parts in `fitgpt train`'s own order."""
    import numpy as np
    import torch

    from fitgpt.engine.batches import Prefetcher
    from fitgpt.engine.device import resolve_device
    from fitgpt.engine.evaluate import evaluate
    from fitgpt.training import checkpoint
    from fitgpt.training.build import build_training
    from fitgpt.training.loop import learning_rate_at, train_step

    config = RunConfig(**case["config"])
    choice = resolve_device("cuda", config.dtype, config.compile)
    if "kernel" in case:
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_flash_sdp(case["kernel"] == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(case["kernel"] == "efficient")
    if case.get("only") == "sample":
        return sampling(config, choice.dtype, case["name"], events)
    if "cap" in case:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case["cap"] / total)
    watch = Watch(bool(events))
    rng = np.random.default_rng(0)

    def read(number: int) -> Any:
        return rng.integers(0, config.vocab_size, (config.batch_size, config.block_size + 1))

    def read_windows(numbers: Any) -> Any:
        return rng.integers(0, config.vocab_size, (len(numbers), config.eval_block + 1))

    result: dict[str, Any] = {}
    try:
        with watch.phase("load"):
            training = build_training(config, choice, fake_ranks(config, case.get("rank", 0)))
        splits = {split: (read_windows, EVAL_BATCHES * config.eval_batch * config.ranks) for split in ("train", "val")}
        last = (ITERATIONS + 1) * config.micro_batches - 1
        feed = Prefetcher(read, torch.device(choice.device), last=last)

        def look(step: int) -> None:
            """An evaluation starts its peaks afresh when it is done, and says what they were."""
            evaluation = evaluate(training.model, splits, batch=config.eval_batch, block=config.eval_block, step=step,
                                  token_losses=training.token_losses, ranks=training.ranks)
            assert evaluation is not None
            watch.seen(evaluation.memory.peak_allocated, evaluation.memory.peak_reserved)

        with watch.phase("first_eval"):
            look(0)
        def iterate(phase: str) -> None:
            with watch.phase(phase):
                train_step(training, config, feed, learning_rate_at(training.step, config), lambda: False)
                training.step += 1

        for step in range(ITERATIONS):
            iterate("first_train" if step == 0 else "train")
        with watch.phase("eval"):
            look(ITERATIONS)
        iterate("train")
        with watch.phase("save"), tempfile.TemporaryDirectory() as folder:
            if case.get("save", True):
                checkpoint.save(Path(folder), 1, training.model.weight_tensors(), training.optimizer.tensors(), {},
                                best=True, keep_last=2)
        feed.close()
    except torch.OutOfMemoryError as error:
        result["out_of_memory"] = {"phase": watch.now, "message": str(error).splitlines()[0]}
    result["phases"] = watch.peaks
    watch.keep_events(events, case["name"])
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


def sampling(config: RunConfig, dtype: str, name: str, events: str) -> dict[str, Any]:
    """As `fitgpt sample` does it: 40 tokens after a short prompt."""
    import torch

    from fitgpt.engine.model import build_model
    from fitgpt.engine.sample import SamplingOptions, generate

    watch = Watch(bool(events))
    with watch.phase("sample"):
        model = build_model(config.gpt_config(), torch.device("cuda"), 0)
        model.compute_dtype = getattr(torch, dtype)
        list(generate(model, [1] * 16, 40, SamplingOptions(), 0))
    watch.keep_events(events, f"{name} sample")
    return {"phases": watch.peaks}


class Watch:
    """Peaks of each phase, and with `keeps_events` what was allocated and freed in it."""

    def __init__(self, keeps_events: bool) -> None:
        self.keeps_events = keeps_events
        self.now = ""
        self.peaks: dict[str, dict[str, int]] = {}
        self.events: list[dict[str, Any]] = []

    def seen(self, allocated: int, reserved: int) -> None:
        """Peaks that the phase reached before something reset the counters."""
        before = self.peaks.get(self.now, {})
        self.peaks[self.now] = {"allocated": max(allocated, before.get("allocated", 0)),
                                "reserved": max(reserved, before.get("reserved", 0))}

    def keep_events(self, folder: str, name: str) -> None:
        if folder:
            with gzip.open(Path(folder) / f"{name.replace(' ', '_')}.json.gz", "wt") as file:
                json.dump(self.events, file)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        import torch

        self.now = name
        torch.cuda.reset_peak_memory_stats()
        if self.keeps_events:
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=2_000_000)
        try:
            yield
        finally:
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            self.seen(stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"])
            if self.keeps_events:
                trace = torch.cuda.memory._snapshot()["device_traces"][0]
                torch.cuda.memory._record_memory_history(None)
                self.events.append({"phase": name, "events": [
                    [each["action"], each["addr"], each["size"], each["stream"], where(each)] for each in trace]})


def where(entry: dict[str, Any]) -> str:
    """The innermost lines of ours behind an event."""
    ours = [f"{Path(frame['filename']).name}:{frame['line']}" for frame in entry.get("frames", [])
            if "fitgpt" in frame["filename"] or "torchinductor" in frame["filename"]]
    return " < ".join(ours[:3])


if __name__ == "__main__":
    main()
