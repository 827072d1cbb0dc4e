"""`fitgpt train`: trains a GPT or resumes a run, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

from ..config.fields import Assignment
from ..training.supervisor import supervise


def train(assignments: Sequence[Assignment]) -> int:
    return supervise(assignments)
