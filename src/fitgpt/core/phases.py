"""The phases of a training run: their names on tapes, in plans and in metrics.jsonl, and their labels for people."""

from __future__ import annotations

from typing import NamedTuple

# In the order in which a run reaches them. The first evaluation and the first step are phases of their own, because
# they hold other tensors than later ones.
PHASES = {
    "load": "load",
    "first_eval": "first evaluation",
    "first_train": "first step",
    "train": "training",
    "step": "optimizer step",
    "eval": "evaluation",
    "save": "checkpoint",
    "resume": "resume",
    "sample": "sampling",
}


class PhaseMemory(NamedTuple):
    """Peak bytes of a phase: in tensors, and in segments since the run began."""

    allocated: int
    reserved: int
