"""SIGKILL at, and an error injected into, every call of a command that changes a file.

A first run of each command counts the calls (faults.c sees them all, whichever library makes them). Then the command is
run once per call and fault. Whatever happens, running it again must give the files of a run without a fault.
"""

from __future__ import annotations

import errno
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fitgpt.runs.folder import can_resume
from fitgpt.runs.metrics import read_metrics
from fitgpt.training import checkpoint

from .outcome import Campaign, Outcome, failed
from .processes import TRAIN, Ended, contents, fitgpt, fresh
from .shim import COUNT, FAIL, FAIL_AFTERWARDS, FAIL_FROM_HERE, KILL, TORN, arm

REQUIRED = "every point resumed byte-identical, or refused with a clear error"
FAULTS = {
    "kill": (KILL, 0), "torn": (TORN, 0),  # torn: a write is killed when half of it is written
    "EIO": (FAIL, errno.EIO), "ENOSPC": (FAIL, errno.ENOSPC), "EXDEV": (FAIL, errno.EXDEV),
    "ESTALE": (FAIL, errno.ESTALE),
    "full": (FAIL_FROM_HERE, errno.ENOSPC),   # the disk stays full
    "late": (FAIL_AFTERWARDS, errno.EIO),     # the call took effect, and reported an error all the same
}
TEXT = "".join(f"Line {number} of the text: {number * number % 9973}.\n" for number in range(400))
PREPARE = ["prepare", "texts", "--out=data", "--tokenizer=bytes", "--processes=1", "--shard_tokens=4000"]
RESUME = ["train", "--resume", "--out_dir=out"]
EXPORT = ["export", "out", "--out=exported"]


class Scenario(NamedTuple):
    """A command, run in a folder that `prepare` made."""

    prepare: Callable[[Path], object]
    argv: list[str]
    result: tuple[str, ...]                   # patterns of the files that must come out the same
    again: Callable[[Path], list[str]]        # the command that continues
    intact: Callable[[Path], str] = lambda folder: ""  # what was lost before that, or nothing


# ---- the folders that the commands start from

def with_texts(folder: Path, files: int = 3) -> None:
    (folder / "texts").mkdir()
    for number in range(files):
        (folder / "texts" / f"{number:03d}.txt").write_text(TEXT[number * 97:])


def with_data(folder: Path) -> None:
    with_texts(folder)
    must(PREPARE, folder)


def with_other_data(folder: Path) -> None:
    with_texts(folder)
    must([*PREPARE, "--seed=7"], folder)


def with_run(folder: Path) -> None:
    """A run of which two steps of three are done."""
    with_data(folder)
    must(["train", *TRAIN, "--max_iters=2"], folder)


def with_interrupted_run(folder: Path) -> None:
    """The same, after a kill in the middle of a save and of a row of metrics.jsonl."""
    with_run(folder)
    shutil.copytree(folder / "out/checkpoints/step-00000002", folder / "out/checkpoints/.tmp-3-99999999")
    with open(folder / "out" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "step", "ste')


def with_export(folder: Path) -> None:
    with_run(folder)
    must([*EXPORT, "--which=1"], folder)


def must(argv: list[str], folder: Path) -> Ended:
    ended = fitgpt(argv, folder)
    if ended.code:
        raise RuntimeError(f"{argv} in {folder} ended with {ended.code}:\n{ended.output}")
    return ended


# ---- what must hold after a fault

def checkpoints_intact(folder: Path) -> str:
    """The last checkpoint that the run reported as saved can be loaded, or a later one."""
    saved = [row["step"] for row in read_metrics(folder / "out" / "metrics.jsonl") if row.get("kind") == "save"
             ] if (folder / "out" / "metrics.jsonl").exists() else []
    if not saved:
        return ""
    loaded = checkpoint.load(folder / "out" / "checkpoints")
    if loaded.notes:
        return f"damaged: {loaded.notes}"
    return "" if loaded.step >= max(saved) else f"step {max(saved)} was saved, and {loaded.step} is the last one"


def export_intact(old: dict[str, bytes]) -> Callable[[Path], str]:
    def check(folder: Path) -> str:
        there = contents(folder, "exported/*")
        return "" if there in (old, {}) and bool(there) == bool(old) else "the export is incomplete"
    return check


def go_on(folder: Path) -> list[str]:
    return RESUME if can_resume(folder / "out") else ["train", *TRAIN]


WEIGHTS = ("out/checkpoints/step-00000003*/*.safetensors",)
DATASET = ("data/*.shard", "data/manifest.json")
SCENARIOS = {
    "train": Scenario(with_data, ["train", *TRAIN], WEIGHTS, go_on, checkpoints_intact),
    "resume": Scenario(with_interrupted_run, [*RESUME, "--max_iters=3"], WEIGHTS,
                       lambda folder: [*RESUME, "--max_iters=3"], checkpoints_intact),
    "prepare": Scenario(with_texts, PREPARE, DATASET, lambda folder: PREPARE),
    "overwrite": Scenario(with_other_data, [*PREPARE, "--overwrite"], DATASET,
                          lambda folder: [*PREPARE, "--overwrite"]),
    "export": Scenario(with_run, EXPORT, ("exported/*",), lambda folder: EXPORT),
    "export_over": Scenario(with_export, EXPORT, ("exported/*",), lambda folder: EXPORT),
}


# ---- the campaign

def campaign(folder: Path) -> Campaign:
    cases, expected = list[str](), dict[str, dict[str, bytes]]()
    case, log = folder / "case", folder / "calls.log"
    for name, scenario in SCENARIOS.items():
        template = folder / name
        template.mkdir()
        scenario.prepare(template)
        fresh(template, case)
        ended = fitgpt(scenario.argv, case, lambda: arm(case, 0, COUNT, 0, log))
        if ended.code:
            raise RuntimeError(f"{name} fails without a fault: {ended.output}")
        expected[name] = contents(case, *scenario.result)
        cases += [f"{name}/{point}/{fault}" for point in map(_point, log.read_text().splitlines()) for fault in FAULTS
                  if fault != "torn" or point.endswith("write")]

    def run(named: str) -> Outcome:
        name, point, fault = named.rsplit("/", 2)
        scenario, action = SCENARIOS[name], FAULTS[fault]
        fresh(folder / name, case)
        before = contents(case, "exported/*")
        number = int(point.split("-")[0])
        ended = fitgpt(scenario.argv, case, lambda: arm(case, number, *action, log))
        call = log.read_text().splitlines()[number - 1]
        if problem := ended.problem:
            return failed("crashed", f"{problem} at {call}\n{ended.output}")
        if fault not in ("kill", "torn") and ended.code and "fitgpt: " not in ended.output:
            return failed("no message", f"{call}\n{ended.output}")
        intact = export_intact(before) if name == "export_over" else scenario.intact
        there = contents(case, *scenario.result)
        if there != expected[name] and (lost := intact(case)):
            return failed("lost", f"{lost} at {call}\n{ended.output}")
        if not ended.code and there != expected[name]:
            return failed("incomplete", f"{call}: exit code 0, and the result is {sorted(there)}\n{ended.output}")
        if not ended.code:
            return Outcome("went on, byte-identical")
        rest = fitgpt(scenario.again(case), case)
        if rest.code:
            return failed("stuck", f"{call}: exit code {ended.code}, then:\n{rest.output}")
        there = contents(case, *scenario.result)
        if there != expected[name]:
            wrong = sorted(file for file in {*there, *expected[name]} if there.get(file) != expected[name].get(file))
            return failed("different", f"{wrong} at {call}\n{ended.output}\n--- and then:\n{rest.output}")
        if left := [path for path in case.rglob(".tmp-*") if path.relative_to(case).parts[0] not in ("tmp", "home")]:
            return failed("leftovers", f"{list(map(str, left))} at {call}\n{ended.output}")
        if ended.code in (-signal.SIGKILL, 7) and fault in ("kill", "torn"):
            return Outcome("killed, resumed byte-identical")
        return Outcome(f"refused with exit code {ended.code}, resumed byte-identical")

    return Campaign(cases, run)


def _point(line: str) -> str:
    """'17 rename /out/run.json' → '017-rename'. Paths are left out: they have process ids in them."""
    number, call, _ = line.split(" ", 2)
    return f"{int(number):03d}-{call}"
