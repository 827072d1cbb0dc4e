"""Reliability on a GPU: determinism, kills, a neighbour that leaves little memory, failing allocations.

    python bench/reliability.py deterministic kill_resume alloc_fail warm --out DIR    memory and bits; beside others
    python bench/reliability.py speed beside --out DIR                                 timed; alone on the GPU

| campaign | question |
|---|---|
| deterministic | do two runs with --deterministic end with the same bits; is their memory as forecast |
| speed | what --deterministic costs, in tokens per second |
| kill_resume | is a run that was killed and resumed bit-identical to one that was not |
| alloc_fail | does a failed allocation, in any phase, change the weights |
| beside | does `train --fit` next to a process that leaves 3 to 12 GiB train, and as fast as alone |

`warm` compiles what the runs of `beside` will need. Each case is written to DIR/CAMPAIGN.json when it ends; runs are in
a temporary folder. `--seconds` ends a campaign early: no new case is begun after
it. `--device cpu` tries the campaigns that need no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from fitgpt.core.units import GiB, MiB  # noqa: E402

Row = dict[str, Any]
SMALL = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8, gradient_accumulation_steps=2,
             vocab_size=50304, eval_iters=2, eval_interval=20, warmup_iters=5, lr_decay_iters=100, log_interval=1)
GPT2 = dict(SMALL, n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=12)
TINY = dict(SMALL, n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=512)  # with --device cpu
DTYPES = ("float32", "bfloat16", "float16")


class Campaign:
    """Where results go, and how runs are started."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.out, self.device = name, Path(options.out), options.device
        self.ends, self.at_once, self.only = time.monotonic() + options.seconds, options.at_once, options.only
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.gettempdir()) / "fitgpt-reliability" / name
        shutil.rmtree(self.work, ignore_errors=True)  # of an earlier time
        self.work.mkdir(parents=True)
        self.rows: list[Row] = []
        self._lock = Lock()
        self.dataset = write_tokens(self.work / "tokens", TINY["vocab_size"] if self.is_cpu else 50304)

    @property
    def is_cpu(self) -> bool:
        return bool(self.device == "cpu")

    @property
    def in_time(self) -> bool:
        return time.monotonic() < self.ends

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            (self.out / f"{self.name}.json").write_text(json.dumps(self.rows, indent=1) + "\n")
        print(self.name, json.dumps(row), flush=True)

    def each(self, case: Callable[[Any], Row], cases: Iterable[Any], at_once: int = 1) -> None:
        """Runs the cases; an exception in one is its result."""
        def safely(given: Any) -> None:
            if not self.in_time:
                return
            started = time.monotonic()
            try:
                row = case(given)
            except Exception as error:
                row = {"case": str(given), "passed": False, "error": f"{type(error).__name__}: {error}"[-2000:]}
            self.add({**row, "seconds": round(time.monotonic() - started, 1)})

        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(safely, cases))

    def command(self, out: Path, options: Row) -> list[str]:
        given = {"dataset": self.dataset, "out_dir": out, "device": self.device, **options}
        return [sys.executable, "-m", "fitgpt", "train", *(f"--{key}={value}" for key, value in given.items())]

    def train(self, out: Path, options: Row, timeout: float = 150) -> tuple[int, str]:
        done = subprocess.run(self.command(out, options), env=environment(), capture_output=True, text=True,
                              errors="replace", timeout=timeout)
        return done.returncode, done.stdout + done.stderr


def environment(threads: int = 2) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}


def write_tokens(folder: Path, vocab: int) -> Path:
    """Tokens distributed as in text: few are frequent, so that an embedding's gradient adds many rows of one token."""
    import numpy as np

    if not (folder / "val.bin").exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokens = np.random.default_rng(0).zipf(1.2, 3_000_000) % min(vocab, 50257)
        tokens[:-200_000].astype(np.uint16).tofile(folder / "train.bin")
        tokens[-200_000:].astype(np.uint16).tofile(folder / "val.bin")
    return folder


def metrics(out: Path, *kinds: str) -> list[Row]:
    try:
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return [row for row in rows if row["kind"] in kinds]


def bits(out: Path) -> dict[str, str]:
    """SHA-256 of weights and optimizer state of the last checkpoint."""
    last = max((out / "checkpoints").glob("step-*"))
    return {name: hashlib.sha256((last / f"{name}.safetensors").read_bytes()).hexdigest()
            for name in ("model", "optimizer")} | {"step": last.name}


def forecast_errors(out: Path) -> Row:
    """Measured − forecast, in bytes, by phase."""
    plans, measured = metrics(out, "plan"), metrics(out, "plan_measured")
    if not plans or not measured:
        return {}
    forecast = plans[-1]["phases"]
    return {phase: {key.removesuffix("_bytes"): seen[key] - forecast[phase][key] for key in seen}
            for phase, seen in measured[-1]["phases"].items() if phase in forecast}


# ---- deterministic

def variants(device: str) -> Iterator[tuple[str, Row]]:
    """Eager and compiled, in three dtypes; with and without dropout, a small batch, and other ways to compute."""
    if device == "cpu":
        yield "eager float32", {**TINY, "compile": False, "dtype": "float32"}
        return
    for compiled in (False, True):
        for dtype in DTYPES:
            yield f"{'compiled' if compiled else 'eager'} {dtype}", {**SMALL, "compile": compiled, "dtype": dtype}
    half = {**SMALL, "compile": True, "dtype": "bfloat16"}
    yield "compiled float16 dropout", {**half, "dtype": "float16", "dropout": 0.1}
    yield "compiled bfloat16 batch 1", {**half, "batch_size": 1, "block_size": 1024}
    yield "eager bfloat16 recompute input, no accumulation", {
        **half, "compile": False, "saved_activations": "input", "gradient_accumulation_steps": 1}
    yield "compiled bfloat16 padded heads, bias", {**half, "n_head": 9, "n_embd": 324, "bias": True}
    yield "compiled bfloat16 muon", {**half, "optimizer": "muon"}
    yield "compiled bfloat16 adam8bit, bfloat16 weights", {**half, "optimizer": "adam8bit", "weights": "bfloat16"}
    yield "compiled bfloat16 124M", {**GPT2, "compile": True, "dtype": "bfloat16"}


def deterministic(campaign: Campaign) -> None:
    def case(given: tuple[str, Row]) -> Row:
        name, options = given
        ends, outs = [], [campaign.work / f"{name} {number}" for number in "ab"]
        for out in outs:
            code, said = campaign.train(out, {**options, "max_iters": 30, "deterministic": True})
            ends.append(code)
            if code:
                return {"case": name, "passed": False, "exit": code, "said": said[-1500:]}
        first, second = map(bits, outs)
        errors = forecast_errors(outs[0])
        plain = campaign.work / f"{name} plain"
        if name in ("eager bfloat16", "compiled bfloat16", "eager bfloat16 recompute input, no accumulation"):
            campaign.train(plain, {**options, "max_iters": 30})
        off = max((abs(error["reserved"]) for error in errors.values()), default=None)
        return {"case": name, "passed": first == second and off in (0, None), "same_bits": first == second,
                "most_reserved_off": off, "errors": errors, "bits": first,
                "errors_without": forecast_errors(plain)}

    chosen = [(name, options) for name, options in variants(campaign.device) if re.search(campaign.only, name)]
    campaign.each(case, chosen, campaign.at_once)


def speed(campaign: Campaign) -> None:
    """Timed by the process that `fit --measure` uses: tokens per second with and without, in one process."""
    with Timing() as timing:
        def case(given: tuple[bool, str]) -> Row:
            compiled, dtype = given
            config = {**GPT2, "compile": compiled, "dtype": dtype, "batch_size": 4 if dtype == "float32" else 12}
            rates = [[timing.time({**config, "deterministic": on})["tokens_per_s"] for on in (False, True)]
                     for _ in range(2)]
            without, with_it = (max(rate) for rate in zip(*rates, strict=True))
            return {"case": f"124M {'compiled' if compiled else 'eager'} {dtype}", "passed": True,
                    "tokens_per_s": without, "deterministic": with_it, "ratio": round(with_it / without, 4)}

        campaign.each(case, [(compiled, dtype) for compiled in (True, False) for dtype in DTYPES])


class Timing:
    """A process of training/timing.py."""

    def __init__(self, threads: int = 16) -> None:
        self._threads = threads

    def __enter__(self) -> Timing:
        self._process = subprocess.Popen([sys.executable, "-P", "-m", "fitgpt.training.timing"], text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         env={**environment(self._threads),
                                              "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def time(self, config: Row, seconds: float = 0.5) -> Row:
        from fitgpt.config.run_config import RunConfig

        assert self._process.stdin
        assert self._process.stdout
        full = RunConfig(**{**config, "device": "cuda"}).to_dict()
        self._process.stdin.write(json.dumps({"config": full, "cap": 130 * GiB, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the timing process ended")
        return dict(json.loads(answer))


# ---- kills

def kill_resume(campaign: Campaign) -> None:
    """Chains of kills of both processes, each at a random moment after a random step; the last resume runs to the
    end. All chains at once."""
    names = ("eager float32", "eager float16", "compiled float32", "compiled bfloat16", "compiled float16 dropout")
    chosen = [(name, options) for name, options in variants(campaign.device) if name in names]
    kills, steps = (3, 40) if campaign.is_cpu else (4, 60)

    def case(given: tuple[str, Row]) -> Row:
        name, options = given
        chance = random.Random(name)
        options = {**options, "max_iters": steps, "deterministic": True, "save_interval": 3, "eval_interval": 15}
        whole, cut = campaign.work / f"{name} whole", campaign.work / f"{name} killed"
        with ThreadPoolExecutor(1) as thread:
            reference = thread.submit(campaign.train, whole, options, 300)
            killed_at = [killed(campaign, cut, options, (number + 1) * steps // (kills + 1), chance)
                         for number in range(kills)]
            code, said = campaign.train(cut, {**options, "init_from": "resume"}, 300)
            whole_code, whole_said = reference.result()
        if code or whole_code:
            return {"case": name, "passed": False, "exit": [code, whole_code], "said": (said + whole_said)[-1500:]}
        return {"case": name, "passed": bits(whole) == bits(cut), "kills": len(killed_at), "killed_at": killed_at,
                "bits": bits(whole)}

    campaign.each(case, chosen, campaign.at_once)


def killed(campaign: Campaign, out: Path, options: Row, after: int, chance: random.Random) -> int:
    """Starts or resumes the run, and kills it a moment after that step → the last step it reported."""
    resume = {"init_from": "resume"} if (out / "checkpoints").exists() else {}
    process = subprocess.Popen(campaign.command(out, {**options, **resume}), env=environment(), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    waited_until = time.monotonic() + 200
    while last_step(out) < after and process.poll() is None and time.monotonic() < waited_until:
        time.sleep(0.02)
    time.sleep(chance.random() * 0.3)
    if process.poll() is not None:
        raise RuntimeError(f"it ended with {process.returncode} before it was killed")
    for pid in [*children(process.pid), process.pid]:  # the worker has a process group of its own
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return last_step(out)


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def last_step(out: Path) -> int:
    rows = metrics(out, "step")
    return int(rows[-1]["step"]) if rows else -1


# ---- failing allocations

FAILURES = 200
PER_PROCESS = 10


def alloc_fail(campaign: Campaign) -> None:
    """Failed allocations of three runs, each after an undisturbed one, in processes of ten. In eager runs operations
    that allocate fail, drawn evenly from all of a run; in compiled runs the allocator itself fails: its limit is
    lowered in the middle of a pass and raised when memory ran out."""
    share = FAILURES // PER_PROCESS // 4
    chunks = [(kind, number) for kind in ("eager float32", "eager float16", "compiled bfloat16", "compiled float16")
              for number in range(1 if campaign.is_cpu else share)]
    chunks = [chunk for chunk in chunks if not campaign.is_cpu or chunk[0] == "eager float32"]

    def case(given: tuple[str, int]) -> Row:
        kind, number = given
        folder = campaign.work / f"{kind} {number}"
        done = subprocess.run([sys.executable, __file__, "_allocations", "--out", str(folder), "--device",
                               campaign.device, "--kind", kind, "--seed", str(number), "--dataset",
                               str(campaign.dataset)], env=environment(), capture_output=True, text=True, timeout=280)
        if done.returncode:
            return {"case": f"{kind} {number}", "passed": False, "said": (done.stdout + done.stderr)[-2000:]}
        found = json.loads(done.stdout.splitlines()[-1])
        return {"case": f"{kind} {number}", "passed": found["failed"] == PER_PROCESS and not found["wrong"], **found}

    campaign.each(case, chunks, campaign.at_once)


def allocations(options: argparse.Namespace) -> None:
    """One process of alloc_fail: prints how many allocations failed, in which phases, and where weights differed."""
    import torch

    from fitgpt.config.run_config import RunConfig
    from fitgpt.training import run as run_module
    from tests.failing_allocations import FailingAllocations

    compiled, dtype = options.kind.split()
    shape = TINY if options.device == "cpu" else {**SMALL, "n_layer": 2, "n_embd": 192, "batch_size": 4}
    chance, out = random.Random(f"{options.kind} {options.seed}"), Path(options.out)

    def run(around: Callable[[Callable[[], None]], None], rehearse: bool = True) -> dict[str, str]:
        shutil.rmtree(out, ignore_errors=True)  # of the run before: 200 runs would fill the disk
        config = RunConfig(**{**shape, "compile": compiled == "compiled", "dtype": dtype, "max_iters": 4,
                              "eval_interval": 2, "save_interval": 1, "deterministic": True,
                              "rehearse": rehearse, "device": options.device, "dataset": options.dataset,
                              "out_dir": str(out)})
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        try:
            around(lambda: run_module.run(config.to_dict(), [], lambda: False, fallbacks=()))
        finally:
            sys.stdout = sys.__stdout__
        return bits(out)

    failed, phases, wrong, met = 0, dict[str, int](), list[str](), list[int]()
    if compiled == "eager":
        counting = FailingAllocations()

        def failing(total: int) -> Callable[[Callable[[], None]], None]:
            """One of all allocations in the loop and the rehearsal; building the model is no part of it. The first
            run of a process allocates more than later ones, so the number drawn may be too large: then another is
            drawn in the next run. 0: none fails."""
            def around(work: Callable[[], None]) -> None:
                chosen = [chance.randrange(1, total + 1)] if total else []
                real, mode = run_module.run_loop, FailingAllocations(chosen)

                def watched(*given: Any) -> None:
                    with mode:
                        real(*given)

                run_module.run_loop = watched
                try:
                    work()
                finally:
                    run_module.run_loop = real
                    counting.count = mode.count
                    met.extend(number for number in chosen if number <= mode.count)

            return around

        expected = run(failing(0))
        cases = [failing(counting.count) for _ in range(PER_PROCESS)]
    else:
        expected = run(lambda work: work())
        cases = [limited(chance, met) for _ in range(PER_PROCESS)]
    for number, case in enumerate(cases):
        met.clear()
        for _ in range(10):  # a number or limit that was never met is drawn again
            found = run(case, rehearse=compiled == "eager" or chance.random() < 0.5)
            if met:
                break
        failed += bool(met)
        ooms, rows = metrics(out, "oom"), metrics(out, "oom", "rehearsal")
        during = "save"  # which tries again and leaves no row
        if ooms:
            later = rows[rows.index(ooms[0]):]
            during = "rehearsal" if any(each["kind"] == "rehearsal" for each in later) else ooms[0]["phase"]
        phases[during] = phases.get(during, 0) + 1
        if found != expected:
            wrong.append(f"{number}: {[row['words'][:80] for row in ooms]} {metrics(out, 'step_down')}")
    print(json.dumps({"failed": failed, "phases": phases, "wrong": wrong, "torch": torch.__version__}))


def limited(chance: random.Random, met: list[int]) -> Callable[[Callable[[], None]], None]:
    """Before an eager pass or a capture, the allocator can reserve only a little more than it has; when it has raised
    OutOfMemoryError, as much as before, and `met` gets an entry."""
    import torch

    from fitgpt.engine.cuda_graphs import GraphCapturer
    from fitgpt.engine.model import GPT
    from fitgpt.engine.oom import cap_memory

    def around(work: Callable[[], None]) -> None:
        at, share, calls = chance.randrange(5), chance.random(), iter(range(10**9))
        places = [(GPT, "accumulate"), (GPT, "token_losses"), (GraphCapturer, "_capture")]
        real = [getattr(*place) for place in places]
        lowered = []

        def lifted(*_: object) -> None:
            if lowered:
                met.extend(lowered)
                lowered.clear()
                torch.cuda.set_per_process_memory_fraction(1.0)

        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                if not torch.cuda.is_current_stream_capturing() and next(calls) == at:
                    torch.cuda.empty_cache()
                    cap_memory("cuda:0", torch.cuda.memory_reserved() + int(share * 100 * MiB))
                    lowered.append(at)
                return function(*given, **named)
            return call

        torch._C._cuda_attach_out_of_memory_observer(lifted)
        for (owner, name), function in zip(places, real, strict=True):
            setattr(owner, name, watched(function))
        try:
            work()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            for (owner, name), function in zip(places, real, strict=True):
                setattr(owner, name, function)

    return around


# ---- beside a process that leaves little memory

# The batch is prime: then `fit` can choose between it and 1, and few kernels have to be compiled.
MODELS: dict[str, Row] = {
    "30M": dict(n_layer=6, n_head=6, n_embd=384, batch_size=31, block_size=1024),
    "124M": dict(n_layer=12, n_head=12, n_embd=768, batch_size=13, block_size=1024),
    "350M": dict(n_layer=24, n_head=16, n_embd=1024, batch_size=7, block_size=1024),
    "774M": dict(n_layer=36, n_head=20, n_embd=1280, batch_size=7, block_size=512)}
FREE_GIB = {"30M": (3, 3.5, 4.2, 5, 6, 7.5, 9, 11), "124M": (3.2, 3.7, 4.3, 5, 5.8, 6.7, 8, 9.5, 12),
            "350M": (5, 6.5, 7, 7.6, 8.4, 9.3, 10.3, 11.2, 12), "774M": (7, 8.5, 10, 12)}
RUN = dict(gradient_accumulation_steps=1, vocab_size=50304, eval_iters=1, eval_interval=100_000, max_iters=90_000,
           log_interval=1, dtype="bfloat16", compile=True)
RATIO = 0.7  # of the speed of the same plan on a free GPU
WARM_UP = 4  # steps


def warm(campaign: Campaign) -> None:
    """Compiles the passes of both batches of each model, in the cache that all runs share."""
    def case(given: tuple[str, int]) -> Row:
        name, batch = given
        with Timing(2) as timing:
            model = {**MODELS[name], **RUN, "batch_size": batch, "gradient_accumulation_steps": 1}
            model |= {"offload": "optimizer"} if name == "774M" else {}
            return {"case": f"{name} {batch}", "passed": "tokens_per_s" in timing.time(model, 0.1)}

    names = [name for name in MODELS if re.search(campaign.only, name)]
    campaign.each(case, [(name, batch) for name in names for batch in (MODELS[name]["batch_size"], 1)], 8)


def beside(campaign: Campaign) -> None:
    """`train --fit` while another process leaves so much. After some steps the other process frees its memory, and the
    next steps tell the speed of the same plan on a free GPU. A run that had to change its plan is compared with the
    plan that was chosen first."""
    with Neighbour() as neighbour:
        def case(given: tuple[str, float]) -> Row:
            name, free = given
            out = campaign.work / f"{name} {free}"
            left = neighbour.leave(int(free * GiB))
            log = campaign.work / f"{name} {free}.log"
            with log.open("w") as file:
                process = subprocess.Popen(campaign.command(out, {**RUN, **MODELS[name], "fit": True}),
                                           env=environment(8), stdout=file, stderr=subprocess.STDOUT)
            try:
                started = time.monotonic()
                rates = rates_after(process, out, WARM_UP, 12)
                ready = time.monotonic() - started
                neighbour.leave(140 * GiB)
                alone = rates_after(process, out, len(metrics(out, "step")) + 1, 6)
                ended = process.poll()
            finally:
                for pid in children(process.pid) if process.poll() is None else []:
                    os.kill(pid, signal.SIGKILL)
                process.wait(20)  # it ends with its worker, whose memory is free then
                neighbour.leave(140 * GiB)
                said = log.read_text(errors="replace")
            downs, config = metrics(out, "step_down"), (metrics(out, "run") or [{}])[-1].get("config", {})
            row = {"case": f"{name} {free} GiB", "ended": ended, "left": left, "ready_s": round(ready, 1),
                   "ooms": [each["words"][:120] for each in metrics(out, "oom")],
                   "downs": [each["text"] for each in downs],
                   "outside": [each.get("outside_bytes") for each in metrics(out, "rehearsal")],
                   "plan": [(each["needs_bytes"], each["reserve_limit_bytes"]) for each in metrics(out, "plan")],
                   "config": {key: config.get(key) for key in ("batch_size", "saved_activations", "offload",
                                                               "loss_chunk", "compile", "cuda_graphs")}}
            if ended is not None or not rates or not alone:
                return {**row, "passed": False, "said": said[-1200:]}
            free_rate = statistics.median(alone)
            if downs:
                with Timing(8) as timing:
                    free_rate = timing.time({**config, "fit": False})["tokens_per_s"]
            ratio = statistics.median(rates) / free_rate
            return {**row, "tokens_per_s": round(statistics.median(rates)), "alone": round(free_rate),
                    "ratio": round(ratio, 3), "passed": ratio >= RATIO}

        campaign.each(case, [(name, free) for name, sizes in FREE_GIB.items() for free in sizes
                             if re.search(campaign.only, name)])


def rates_after(process: subprocess.Popen[bytes], out: Path, first: int, wanted: int) -> list[float]:
    """Tokens per second of the `wanted` steps from the first on; of fewer where they are slow."""
    begun, ends = 0.0, time.monotonic() + 70
    while process.poll() is None and time.monotonic() < ends:
        rates = [row["tokens_per_s"] for row in metrics(out, "step")[first:]]
        begun = begun or (time.monotonic() if rates else 0.0)
        if len(rates) >= wanted or (len(rates) >= 3 and time.monotonic() - begun > 5):
            return rates
        time.sleep(0.05)
    return []


class Neighbour:
    """A process that takes the GPU's memory but for what is asked for."""

    SCRIPT = """
import sys, torch
held, piece = [], 64 * 2**20
torch.cuda.init(); torch.empty(1, device="cuda")
for line in sys.stdin:
    wanted = int(line)
    while held and torch.cuda.mem_get_info()[0] < wanted:
        held.pop(); torch.cuda.empty_cache()
    while torch.cuda.mem_get_info()[0] - (2**30 if torch.cuda.mem_get_info()[0] > wanted + 2**31 else piece) >= wanted:
        big = torch.cuda.mem_get_info()[0] > wanted + 2**31
        held.append(torch.empty(2**30 if big else piece, dtype=torch.uint8, device="cuda"))
    if torch.cuda.mem_get_info()[0] - wanted >= 2**21:
        held.append(torch.empty((torch.cuda.mem_get_info()[0] - wanted) // 2**21 * 2**21, dtype=torch.uint8,
                                device="cuda"))
    print(torch.cuda.mem_get_info()[0], flush=True)
"""

    def __enter__(self) -> Neighbour:
        self._process = subprocess.Popen([sys.executable, "-c", self.SCRIPT], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def leave(self, nbytes: int) -> int:
        """Leaves so much free → what is free then."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{nbytes}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


CAMPAIGNS: dict[str, Callable[..., None]] = {
    "deterministic": deterministic, "speed": speed, "kill_resume": kill_resume, "alloc_fail": alloc_fail,
    "warm": warm, "beside": beside}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="+", choices=[*CAMPAIGNS, "_allocations"])
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=10_000, help="per campaign")
    parser.add_argument("--at_once", type=int, default=7, help="runs side by side, where nothing is timed")
    parser.add_argument("--only", default="",
                        help="a regular expression: cases of `deterministic`, models of `beside` and `warm`")
    for hidden in ("--kind", "--dataset"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.campaigns == ["_allocations"]:
        allocations(options)
        return 0
    failed = 0
    for name in options.campaigns:
        campaign = Campaign(name, options)
        CAMPAIGNS[name](campaign)
        wrong = [row["case"] for row in campaign.rows if not row["passed"]]
        failed += len(wrong)
        print(f"== {name}: {len(campaign.rows) - len(wrong)} of {len(campaign.rows)} passed {wrong or ''}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
