"""Is what `fit` chooses really the fastest? Beside it, other micro-batches and recompute policies that fit, timed.

    python bench/sweep.py bench/triples.json --draw bench/sweeps.json       no GPU: which cells
    python bench/sweep.py bench/sweeps.json -o bench/results/sweeps_h200.json

For the first of the accepted triples that leave a choice: the same sequences in a step, in other micro-batches, with
other policies. Cells are made ready side by side and timed alone: who builds and compiles holds a lock that others may
share, who times holds it alone. Each cell has a process of its own, the chosen one two, the first and the last.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

from fitgpt import __version__  # noqa: E402
from fitgpt.config.memory_savers import POLICIES  # noqa: E402
from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.core.units import GiB  # noqa: E402
from fitgpt.hardware.allocator_env import child_environment  # noqa: E402
from fitgpt.hardware.gpus import find  # noqa: E402
from fitgpt.planning.budget import on_card  # noqa: E402
from fitgpt.planning.fit import with_margin  # noqa: E402
from fitgpt.planning.fit_goals import find_fastest  # noqa: E402
from fitgpt.planning.fit_search import FitTarget, parse_allow  # noqa: E402
from fitgpt.planning.forecast import forecast  # noqa: E402

SWEEPS, CELLS = 10, 12     # and the chosen one
OF_A_BATCH = 4             # policies tried with a micro-batch before the next smaller one has its turn
WARM_UP, SECONDS, LEAST_STEPS = 3, 0.7, 3
SETTINGS = ("batch_size", "gradient_accumulation_steps", "saved_activations", "loss_chunk", "eval_batch_size",
            "optimizer", "weights", "residual", "offload", "compile", "cuda_graphs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--draw", default="", help="the file to write, of triples")
    parser.add_argument("--limit_s", type=float, default=3600, help="after which what was timed must do")
    parser.add_argument("-o", "--out", default="")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        time_cells(json.loads(sys.stdin.read()), Path(options.child))
        return
    drawn = json.loads(Path(options.file).read_text(encoding="utf-8"))
    if options.draw:
        Path(options.draw).write_text(json.dumps({"sweeps": list(planned(drawn["triples"]))}, indent=1) + "\n")
        return
    sweeps = drawn["sweeps"]
    started = time.time()
    with tempfile.NamedTemporaryFile() as lock:
        running = [start(sweep, lock.name) for sweep in sweeps]
        rows = [summary(sweep, said_by(process, words, started + options.limit_s))
                for sweep, (process, words) in zip(sweeps, running, strict=True)]
    for row in rows:
        print(row["name"], f"{row['share_of_best']:.3f} of the best of {row['timed']}" if "share_of_best" in row else
              json.dumps(row["cells"])[:800])
    print(f"{time.time() - started:.0f} s")
    if options.out:
        about: dict[str, str] = next((row["about"] for row in rows if "about" in row), {})
        Path(options.out).write_text(json.dumps(
            {"what": "tokens a second of the chosen plan and of others that fit, each timed alone",
             "date": time.strftime("%Y-%m-%d"), **about, "fitgpt": __version__,
             "command": "python bench/sweep.py bench/sweeps.json", "rows": rows}, indent=1) + "\n", encoding="utf-8")


# ---- what is timed


def planned(triples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    wanted = SWEEPS
    for triple in triples:
        if not triple["accepted"] or wanted == 0:
            continue
        place = on_card(find("H200"), budget=triple["budget"], torch="2.11")
        target = FitTarget(place.platform, with_margin(place), place.card, host_bytes=64 * GiB)
        found = find_fastest(RunConfig(**triple["config"], vocab_size=50304), target, parse_allow(triple["allow"]))
        if found.chosen is None or found.chosen.config.offload != "none":
            continue  # an optimizer on the host is timed by the host
        chosen = found.chosen.config

        def as_it_fits(config: RunConfig, place: Any = place, limit: int = target.budget.reserve_limit
                       ) -> RunConfig | None:
            """Recorded, where there is room for that: an unrecorded one is no match for it."""
            for each in (replace(config, cuda_graphs="auto"), replace(config, cuda_graphs=False)):
                if forecast(each, place.platform).needs <= limit:
                    return each
            return None

        fitting = [each for each in spread(others(chosen), as_it_fits) if each != chosen][:CELLS]
        if len(fitting) >= CELLS:
            wanted -= 1
            cells = [{key: getattr(each, key) for key in SETTINGS} for each in (chosen, *fitting, chosen)]
            yield {"name": triple["name"], "config": triple["config"], "allow": triple["allow"],
                   "budget": triple["budget"], "cells": cells}


def others(chosen: RunConfig) -> Iterator[RunConfig]:
    """Micro-batches from large to small, each with policies, the one that saves most first."""
    sequences = chosen.batch_size * chosen.gradient_accumulation_steps
    for batch in range(sequences, 0, -1):
        if sequences % batch == 0:
            for policy in POLICIES:
                yield replace(chosen, batch_size=batch, gradient_accumulation_steps=sequences // batch,
                              saved_activations=policy, eval_batch_size=min(chosen.eval_batch, batch))


def spread(cells: Iterator[RunConfig], as_it_fits: Callable[[RunConfig], RunConfig | None]) -> list[RunConfig]:
    """The first that fit, a few of each micro-batch, then more of each."""
    fitting: dict[int, list[RunConfig]] = {}
    for cell in cells:
        enough = sum(min(len(each), OF_A_BATCH) for each in fitting.values()) >= CELLS + OF_A_BATCH
        if not enough and (fits := as_it_fits(cell)):
            fitting.setdefault(cell.batch_size, []).append(fits)
    return [cell for each in fitting.values() for cell in each[:OF_A_BATCH]] + \
           [cell for each in fitting.values() for cell in each[OF_A_BATCH:]]


# ---- timing


def start(sweep: dict[str, Any], lock: str) -> tuple[subprocess.Popen[str], IO[str]]:
    """A process of the sweep's own, and the file it writes to."""
    words = tempfile.TemporaryFile("w+")  # noqa: SIM115 (gone with the process)
    process = subprocess.Popen([sys.executable, __file__, "", "--child", lock], stdin=subprocess.PIPE, text=True,
                               stdout=words, start_new_session=True, env=child_environment({
                                   **os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}))
    assert process.stdin
    process.stdin.write(json.dumps([{**sweep["config"], "vocab_size": 50304, **cell} for cell in sweep["cells"]]))
    process.stdin.close()
    return process, words


def said_by(process: subprocess.Popen[str], words: IO[str], until: float) -> str:
    try:
        process.wait(max(0.0, until - time.time()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    words.seek(0)
    return words.read()


def time_cells(cells: list[dict[str, Any]], lock: Path) -> None:
    """One line of JSON per cell. The parent loads torch and never uses the GPU: its children start at once."""
    import contenders  # noqa: F401

    for cell in cells:
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            try:
                print(json.dumps(timed(cell, lock)), flush=True)
            except BaseException as error:
                print(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


def timed(cell: dict[str, Any], lock: Path) -> dict[str, Any]:
    import torch
    from contenders import OurTrainer

    with lock.open() as file:
        with held(file, fcntl.LOCK_SH):
            torch.manual_seed(0)
            config = RunConfig(**cell)
            trainer = OurTrainer(config)
            tokens = torch.randint(config.vocab_size, (config.gradient_accumulation_steps, config.batch_size,
                                                       config.block_size + 1)).cuda()
            batches = [(each[:, :-1], each[:, 1:]) for each in tokens]
            for _ in range(WARM_UP):
                trainer.step(batches)
            torch.cuda.synchronize()
        with held(file, fcntl.LOCK_EX):
            seconds = [_seconds(trainer, batches)]
            while sum(seconds) < SECONDS or len(seconds) <= LEAST_STEPS:
                seconds.append(_seconds(trainer, batches))
    return {"tokens_per_s": config.tokens_per_step / statistics.median(seconds[1:]), "steps": len(seconds) - 1,
            "reserved": torch.cuda.max_memory_reserved(),
            "about": {"card": torch.cuda.get_device_name(), "torch": torch.__version__}}


def _seconds(trainer: Any, batches: list[Any]) -> float:
    import torch

    begun = time.perf_counter()
    trainer.step(batches)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


@contextmanager
def held(file: IO[str], how: int) -> Iterator[None]:
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def summary(sweep: dict[str, Any], said: str) -> dict[str, Any]:
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    cells = [{**cell, **{key: each[key] for key in each if key != "about"}}
             for cell, each in zip(sweep["cells"], found, strict=False)]
    row = {**{key: sweep[key] for key in ("name", "config", "allow", "budget")}, "cells": cells,
           "about": next((each["about"] for each in found if "about" in each), {})}
    last = len(sweep["cells"]) - 1
    chosen = [each["tokens_per_s"] for at, each in enumerate(cells) if at in (0, last) and "tokens_per_s" in each]
    others_ = [each["tokens_per_s"] for at, each in enumerate(cells) if at not in (0, last) and "tokens_per_s" in each]
    if chosen and len(others_) + 1 >= CELLS:
        rate = statistics.mean(chosen)
        row |= {"timed": len(others_) + 1, "chosen_tokens_per_s": rate, "best_tokens_per_s": max(rate, *others_),
                "share_of_best": rate / max(rate, *others_)}
    return row


if __name__ == "__main__":
    main()
