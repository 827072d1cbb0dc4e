"""SIGKILL at random moments, again and again, until a run or a `prepare` gets to its end.

A case is one run with its own seed, killed some ten times: as it starts, or some time after a new checkpoint or shard.
The moments and the options of a run are seeded; what the process does then is up to the machine. In `command-…` the
installed command is killed, else a fork that has torch loaded already.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from fitgpt.runs.folder import can_resume, step_folders
from fitgpt.runs.metrics import read_metrics

from .drawn import drawn_settings
from .faults import DATASET, PREPARE, RESUME, checkpoints_intact, must, with_data, with_texts
from .outcome import Campaign, Outcome, failed
from .processes import TRAIN, Ended, children_of, contents, fresh, output_of, start, wait, wait_until_gone

REQUIRED = "500 kills, 0 lost, byte-identical"
RUNS = {"train": 40, "prepare": 10, "command": 3}
STEPS, SAVE_INTERVAL = 200, 4
MOST_NEW = 8    # checkpoints or shards before the kill
LONG = ["train", *TRAIN, f"--max_iters={STEPS}", f"--lr_decay_iters={STEPS}", "--eval_interval=50",
        f"--save_interval={SAVE_INTERVAL}", "--n_embd=32"]  # wide enough for some 8-bit state
VICTIMS = ("worker", "supervisor", "both")
MOST_KILLS = 40  # then it may finish


def campaign(folder: Path) -> Campaign:
    templates = {"train": folder / "data", "prepare": folder / "texts", "command": folder / "data"}
    templates["train"].mkdir()
    with_data(templates["train"])
    templates["prepare"].mkdir()
    with_texts(templates["prepare"], files=120)
    results = {"train": (f"out/checkpoints/step-{STEPS:08d}/*.safetensors",), "prepare": DATASET}
    results["command"] = results["train"]
    whole = fresh(templates["prepare"], folder / "whole")
    must(PREPARE, whole)
    prepared = contents(whole, *DATASET)

    def run(case: str) -> Outcome:
        kind = case.split("-")[0]
        moments, kills, first, expected = random.Random(case), 0, PREPARE, prepared
        if kind != "prepare":
            first = [*LONG, *(f"--{name}={value}" for name, value in drawn_settings(moments).items())]
            whole = fresh(templates[kind], folder / "whole")
            must(first, whole)
            expected = contents(whole, *results[kind])
        there = fresh(templates[kind], folder / "case")
        while True:
            argv = RESUME if can_resume(there / "out") else first
            pid = _start_command(argv, there) if kind == "command" else start(argv, there)
            ended, killed = _one_life(pid, there, moments if kills < MOST_KILLS else None)
            kills += killed
            if ended.problem:
                return failed("crashed", f"after {kills} kills: {ended.problem}\n{ended.output}")._replace(count=kills)
            if not killed and ended.code == 0:
                break
            if not killed and ended.code != 75:  # 75: the kill of an earlier life came as it ended
                return failed("stuck", f"after {kills} kills: exit code {ended.code}\n{ended.output}")
            if kind != "prepare" and (lost := checkpoints_intact(there)):
                return failed("lost", f"after {kills} kills: {lost}\n{ended.output}")._replace(count=kills)
        if contents(there, *results[kind]) != expected:
            return failed("different", f"after {kills} kills of {first}\n{ended.output}")._replace(count=kills)
        if problem := _record_problem(there) if kind != "prepare" else "":
            return failed("record", problem)._replace(count=kills)
        left = [path for path in there.rglob(".tmp-*") if path.relative_to(there).parts[0] not in ("tmp", "home")]
        if left:
            return failed("leftovers", f"{list(map(str, left))}")._replace(count=kills)
        return Outcome("byte-identical", count=kills)

    return Campaign([f"{kind}-{number:03d}" for kind, count in RUNS.items() for number in range(count)], run)


def _start_command(argv: list[str], folder: Path) -> int:
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with open(output_of(folder), "w") as output:
        return subprocess.Popen([sys.executable, "-m", "fitgpt", *argv], cwd=folder, env=env, stdout=output,
                                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True).pid


def _one_life(pid: int, folder: Path, moments: random.Random | None) -> tuple[Ended, bool]:
    """The command's end, and whether it was killed before; without `moments` it is not killed."""
    if moments is None:
        return wait(pid, folder), False
    starting, new, victim = moments.random() < 0.25, moments.randint(1, MOST_NEW), moments.choice(VICTIMS)
    deadline = time.monotonic() + moments.uniform(0, 0.2) if starting else float("inf")
    enough, delay = _progress(folder) + new, moments.uniform(0, 0.03)
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return wait(pid, folder), False
        if deadline == float("inf") and _progress(folder) >= enough:
            deadline = time.monotonic() + delay
        time.sleep(0.001)
    os.kill(pid, signal.SIGSTOP)  # from here on it starts no worker that would be missing from this list
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    workers = children_of(pid)
    killed = workers if victim == "worker" and workers else [pid, *(workers if victim == "both" else [])]
    for each in killed:
        _kill(each)
    os.kill(pid, signal.SIGCONT)
    ended = wait(pid, folder)
    if orphans := wait_until_gone(workers):
        for each in orphans:
            _kill(each)
        return Ended(1, f"processes {orphans} outlived the command by 30 s\n{ended.output}"), True
    return ended, True


def _progress(folder: Path) -> int:
    """Checkpoints saved, or shards written, so far."""
    steps = [slot.step // SAVE_INTERVAL for slot in step_folders(folder / "out" / "checkpoints")]
    return max(steps, default=0) + len(list(folder.glob("data/train-*.shard")))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _record_problem(folder: Path) -> str:
    steps = [row["step"] for row in read_metrics(folder / "out" / "metrics.jsonl") if row["kind"] == "step"]
    return "" if steps == list(range(STEPS)) else f"metrics.jsonl has the steps {steps}"
