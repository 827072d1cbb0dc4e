"""Why a program cannot be traced."""

from __future__ import annotations

PROCESSES = ("the script starts processes, which are not traced.",
             "Trace a script that calls the training function itself, as rank 0 of 1.")
ONE_PROCESS = "Trace the script as one process without torch.distributed: many do that where RANK is not set."


class Untraceable(Exception):
    """A program does something whose memory cannot be known without running it. What, and what to do: a sentence each.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.fix = what, fix
