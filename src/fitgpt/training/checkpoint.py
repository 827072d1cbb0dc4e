"""A checkpoint is a folder that is whole or absent, and is verified before it is used.

    OUT/checkpoints/
        step-00000500/
            model.safetensors       nanoGPT's parameter names; the head is tied to wte, so it is not stored
            optimizer.safetensors   flat: <param>.exp_avg, <param>.exp_avg_sq, <param>.step …
            state.json              step, best, status, the caller's state, size and sha256 of the other two; sealed
        step-00000060-2/            branch 2: the run was resumed from an earlier step and trained on from there
        set-aside-by-step-00000060-2/   checkpoints of branch 1 from that step on
        set-aside-diverged-1/       checkpoints of a diverged run after its last good one
        .tmp-…                      being written or removed; leftovers of dead processes are removed at the next start

The branch is in the name, so that a single rename makes a new checkpoint the last one.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import __version__
from ..config.architectures import GPTConfig
from ..core.errors import CheckpointError
from ..core.files import (
    MAX_JSON_BYTES,
    disk_faults,
    folder_atomically,
    open_regular,
    read_limited,
    rename_with_retry,
    seal_json,
    sync_folder,
    unseal_json,
)
from ..engine.optim.grad_scaler import SCALER_STATE
from ..engine.weights import MAX_STEP, FileSeal, nonfinite, write_safetensors
from ..runs.folder import STATE, StepFolder, step_folder_name, step_folders
from ..runs.metrics import SplitLoss

SCHEMA = 1
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
# The status of a checkpoint: see divergence.py.
GOOD = "good"          # evaluated, with a plausible loss
UNKNOWN = "unknown"    # not evaluated
DIVERGED = "diverged"  # saved while steps were skipped, or after an evaluation that was not good
_LARGEST_FLOAT = torch.finfo(torch.float32).max  # of the loss scale and its counters, on the device
_STATE_KINDS = {"step": int, "best": bool, "files": dict, "state": dict}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any, least: int = 0, most: int = MAX_STEP) -> bool:
    return type(value) is int and least <= value <= most


def _is_loss(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and value.keys() == SplitLoss.__dataclass_fields__.keys()
        and isinstance(value["split"], str) and _is_number(value["mean"]) and math.isfinite(value["mean"])
        and _is_number(value["stderr"]) and _is_count(value["windows"]) and _is_count(value["block"], 1))


def _is_scaler(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == set(SCALER_STATE) and all(
        _is_number(each) and 0 <= each <= _LARGEST_FLOAT for each in value.values()) and value["scale"] > 0


def _is_shape(value: Any) -> bool:
    sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    return (isinstance(value, dict) and value.keys() <= GPTConfig.__dataclass_fields__.keys()
            and all(_is_count(value.get(size), 1, 2**31) for size in sizes) and not value["n_embd"] % value["n_head"]
            and all(type(value.get(switch, False)) is bool for switch in ("bias", "grad_checkpoint"))
            and _is_number(dropout := value.get("dropout", 0.0)) and 0 <= dropout < 1)


# What training.reporter saves as `state`, each value with its rule: the file may be edited and sealed again.
_STATE_RULES: dict[str, Callable[[Any], bool]] = {
    "step": _is_count, "evaluated_at": partial(_is_count, least=-1), "scaler": _is_scaler, "gpt": _is_shape,
    "evaluation_status": lambda value: value in (GOOD, UNKNOWN, DIVERGED), "best": _is_loss, "last_good": _is_loss,
    **{name: lambda value: isinstance(value, str) for name in ("data", "tokenizer", "characters")},
    "config": lambda value: isinstance(value, dict)}


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    best: bool
    status: str
    state: dict[str, Any]                                       # the caller's
    notes: tuple[str, ...] = ()                                 # sentences about damaged or unknown files
    model: dict[str, Tensor] = field(default_factory=dict)      # without the tied head; of `load` only
    optimizer: dict[str, Tensor] = field(default_factory=dict)  # empty if only the weights were requested


class SetAside(NamedTuple):
    """What set_aside_diverged did."""

    good: Checkpoint | None  # the last good one, now the last; None: all were set aside
    steps: list[int]         # those that were set aside
    folder: Path             # where they are


class _Damaged(Exception):
    """A file of a checkpoint is damaged: which one, and how."""


# ---- saving

def save(folder: Path, step: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor],
         state: Mapping[str, Any], *, best: bool, keep_last: int, status: str = UNKNOWN) -> Checkpoint:
    """Writes a checkpoint, and removes older ones only when it is on the disk: see _prune.

    Checkpoints at this step or later (the run was resumed from an earlier one) are set aside, not removed. `load`
    returns `state` as JSON would.
    """
    there = step_folders(folder)
    overtaken = [slot for slot in there if slot.step >= step]
    branch = (there[-1].branch if there else 1) + bool(overtaken)
    target = folder / step_folder_name(step, branch)

    with disk_faults("save the checkpoint", target):
        if not folder.exists():
            folder.mkdir()  # not its parent: a run's folder that is gone must not come back without its lock
            sync_folder(folder.parent)
        with folder_atomically(target, folder / f".tmp-{step}-{os.getpid()}") as temporary:
            files = {MODEL: write_safetensors(temporary / MODEL, model),
                     OPTIMIZER: write_safetensors(temporary / OPTIMIZER, optimizer)}
            document = {"schema": SCHEMA, "fitgpt": __version__, "step": step, "best": best, "status": status,
                        "files": {name: seal._asdict() for name, seal in files.items()}, "state": dict(state)}
            (temporary / STATE).write_text(seal_json(document), encoding="utf-8")

    notes = []
    try:
        if overtaken:
            aside = folder / f"set-aside-by-{target.name}"
            _move(overtaken, aside)
            steps = ", ".join(str(slot.step) for slot in overtaken)
            notes = [f"The run was resumed from an earlier step: its checkpoints at step {steps} are now in {aside}."]
        _prune(folder, keep_last)
    except OSError as error:  # the new one is saved: failing to tidy up is only a note
        notes = [f"Older checkpoints in {folder} could not be tidied up: {error.strerror or error}."]
    return Checkpoint(target, step, best, status, dict(state), tuple(notes))


# ---- removing and setting aside

def _move(slots: Iterable[StepFolder], aside: Path) -> None:
    aside.mkdir(exist_ok=True)
    for slot in slots:
        rename_with_retry(slot.path, aside / slot.path.name)


def _prune(folder: Path, keep_last: int) -> None:
    """Keeps the last `keep_last` whole checkpoints, the latest best one, and the latest good one.

    Damaged ones do not count, and diverged ones are counted separately: neither pushes a good one out.
    """
    whole, sound, seen_best, seen_good = 0, 0, False, False
    for slot in reversed(step_folders(folder)):
        found = _inspect(slot.path)
        if found is None:
            if sound >= keep_last:
                _remove(slot.path)
            continue
        is_best, is_good = found.best and not seen_best, found.status == GOOD and not seen_good
        if (whole if found.status == DIVERGED else sound) >= keep_last and not is_best and not is_good:
            _remove(slot.path)
        whole += 1
        sound += found.status != DIVERGED
        seen_best |= is_best
        seen_good |= is_good


def set_aside_diverged(folder: Path) -> SetAside:
    """Sets aside the checkpoints after the last good one, so that a resume takes that one. Weights may explode some
    steps before a gradient overflows, so a checkpoint that was not evaluated does not count as good."""
    slots = step_folders(folder)
    good, later = None, list[StepFolder]()
    while slots and good is None:
        found = _inspect(slots[-1].path)
        if found is not None and found.status == GOOD:
            good = found
        else:
            later.append(slots.pop())
    aside = next(path for number in count(1) if not (path := folder / f"set-aside-diverged-{number}").exists())
    if later:
        _move(later, aside)
    return SetAside(good, sorted(slot.step for slot in later), aside)


def _inspect(path: Path) -> Checkpoint | None:
    """The checkpoint if its state.json is valid and the other files have the right sizes; it does not read these."""
    try:
        found, seals = _read_state(path)
        for name, seal in seals.items():
            _check_size(path / name, seal.size)
    except (_Damaged, CheckpointError):
        return None
    return found


def _remove(path: Path) -> None:
    """Renames first: a kill in between leaves a leftover, not a checkpoint with files missing."""
    removed = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    rename_with_retry(path, removed)
    shutil.rmtree(removed, ignore_errors=True)


def clean_leftovers(folder: Path) -> list[str]:
    """Removes the incomplete folders of killed processes; a sentence per folder. Call before the first save, with the
    run's lock: then no other process is saving here."""
    notes = []
    for path in sorted(folder.glob(".tmp-*")):
        shutil.rmtree(path, ignore_errors=True)
        notes.append(f"Removed {path}, left by a process that was stopped in the middle of a save.")
    return notes


# ---- loading

def load(folder: Path, which: str | int = "last", *, weights_only: bool = False) -> Checkpoint:
    """The 'last' or 'best' whole checkpoint, or the one of a step, after verifying every byte.

    A damaged one is named in `notes` and the next older one used; but a damaged checkpoint requested by its step is an
    error. With `weights_only` the optimizer's file is not opened.
    """
    slots = list(reversed(step_folders(folder)))
    if not slots:
        raise CheckpointError(f"There is no checkpoint in {folder}.",
                              "Name the run's own --out_dir, or start one with --init_from=scratch.")
    candidates, notes = slots, list[str]()
    if which == "best":
        marked = [slot for slot in slots if (found := _inspect(slot.path)) is not None and found.best]
        candidates = marked + [slot for slot in slots if slot not in marked]
        notes = [] if marked else ["No checkpoint here is marked best: the last one is used."]
    elif which != "last":
        candidates = [slot for slot in slots if slot.step == which][:1]
        if not candidates:
            steps = ", ".join(str(slot.step) for slot in reversed(slots))
            raise CheckpointError(f"There is no checkpoint {which!r}: there are 'last', 'best' and step {steps}.")
    for slot in candidates:
        try:
            return _load_one(slot.path, weights_only, notes)
        except _Damaged as damage:
            if not slot.path.exists():  # a running trainer removed it in the meantime
                return load(folder, which, weights_only=weights_only)
            notes.append(f"{damage}: the checkpoint of step {slot.step} is not used.")
    others = ", ".join(str(slot.step) for slot in slots if slot not in candidates)
    raise CheckpointError(
        " ".join(notes),
        f"Take another: there are step {others}." if others else "Restore it from a copy, or start anew.",
    )


def load_folder(path: Path) -> Checkpoint:
    """The checkpoint in this folder, whatever its name, without the optimizer."""
    try:
        return _load_one(path, True, [])
    except _Damaged as damage:
        raise CheckpointError(f"{damage}.", "Restore it from a copy, or name another.") from damage


def _load_one(path: Path, weights_only: bool, notes: list[str]) -> Checkpoint:
    found, seals = _read_state(path)
    names = (MODEL,) if weights_only else (MODEL, OPTIMIZER)
    for name in names:
        _verify(path / name, seals[name])
    tensors = {name: _read_tensors(path / name) for name in names}
    for name, found_tensors in tensors.items():
        if wrong := nonfinite(found_tensors):
            raise _Damaged(f"{path / name} cannot be used: {wrong}")
    unknown = sorted({each.name for each in path.iterdir()} - {MODEL, OPTIMIZER, STATE})
    notes = notes + [f"{path / name} is not part of a checkpoint and was ignored." for name in unknown]
    return replace(found, model=tensors[MODEL], optimizer=tensors.get(OPTIMIZER, {}), notes=tuple(notes))


def _read_state(path: Path) -> tuple[Checkpoint, dict[str, FileSeal]]:
    """(the checkpoint without its tensors, size and checksum of its other files)."""
    file = path / STATE
    try:
        with _read_faults(file):
            document = unseal_json(read_limited(file, MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"{file} is damaged ({error})") from error
    if not isinstance(document.get("schema"), int) or "fitgpt" not in document:
        raise _Damaged(f"{file} is not the state of a checkpoint")
    if document["schema"] > SCHEMA:
        raise CheckpointError(f"{path} was written by fitgpt v{document['fitgpt']}; this is v{__version__}.",
                              f"It needs fitgpt ≥ v{document['fitgpt']}: pip install --upgrade fitgpt")
    if not all(isinstance(document.get(key), kind) for key, kind in _STATE_KINDS.items()) or not all(
            isinstance(document["files"].get(name), dict) and {"size", "sha256"} == document["files"][name].keys()
            for name in (MODEL, OPTIMIZER)):
        raise _Damaged(f"{file} is not the state of a checkpoint")
    wrong = {"step": document["step"]} if not _is_count(document["step"]) else {
        key: value for key, value in document["state"].items() if key in _STATE_RULES and not _STATE_RULES[key](value)}
    for key, value in wrong.items():
        raise _Damaged(f"{file} has {key} = {value!r:.60}, which no run has")
    status = document.get("status", GOOD if document["best"] else UNKNOWN)  # older checkpoints have none
    return (Checkpoint(path, document["step"], document["best"], status, document["state"]),
            {name: FileSeal(**document["files"][name]) for name in (MODEL, OPTIMIZER)})


@contextmanager
def _read_faults(file: Path) -> Iterator[None]:
    """A file that is missing or cannot be read makes its checkpoint a damaged one."""
    try:
        yield
    except FileNotFoundError:
        raise _Damaged(f"{file} is missing") from None
    except OSError as error:
        raise _Damaged(f"{file} cannot be read ({error.strerror})") from error


def _check_size(file: Path, size: int) -> None:
    with _read_faults(file):
        found = file.stat().st_size
    if found != size:
        raise _Damaged(f"{file} has {found} bytes where {size} were written")


def _verify(file: Path, seal: FileSeal) -> None:
    _check_size(file, seal.size)
    with _read_faults(file), open_regular(file) as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != seal.sha256:
        raise _Damaged(f"{file} is damaged (its content does not match its checksum)")


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            # copies, since the library may return views of the memory-mapped file
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise _Damaged(f"{file} is not a safetensors file ({error})") from error
