"""Weights & Biases and TensorBoard: a row per evaluation out. A tracker can neither end a run nor make it wait.

Each runs in a thread of its own, and may fail or hang there: no network, no account, a full disk. metrics.jsonl has
every row anyway.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..config.run_config import RunConfig
from ..core.extras import install_command

Log = Callable[[dict[str, Any]], None]
Close = Callable[[], None]

MOST_WAITING = 1000     # rows of a tracker that is slow or hangs; later ones are dropped
CLOSES_WITHIN_S = 20.0  # at the end of a run, for rows that are still on their way

stuck: list[str] = []   # trackers that did not close: their exit handlers would hang, too


class Tracker:
    """One tracker in a daemon thread. `connect` starts it, and returns the functions that log a row and close it."""

    def __init__(self, name: str, connect: Callable[[], tuple[Log, Close]]) -> None:
        self.name = name
        self._connect = connect
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def log(self, row: dict[str, Any]) -> None:
        with suppress(queue.Full):
            self._rows.put_nowait(row)

    def problem(self) -> str:
        """What went wrong since the last call, in a sentence; or an empty text."""
        error, self._problem = self._problem, None
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        return f"{self.name} has stopped ({reason}); training continues, metrics.jsonl has every row." if error else ""

    def close(self) -> None:
        """Waits for the rows on their way, but not long."""
        with suppress(queue.Full):
            self._rows.put_nowait(None)
        self._thread.join(CLOSES_WITHIN_S)
        if self._thread.is_alive():
            stuck.append(self.name)

    def _run(self) -> None:
        try:
            log, close = self._connect()
            while (row := self._rows.get()) is not None:
                log(row)
            close()
        except (Exception, SystemExit) as error:  # wandb exits where it is not logged in
            self._problem = error if isinstance(error, Exception) else RuntimeError(f"it exited: {error}")


def open_trackers(config: RunConfig, folder: Path) -> tuple[list[Tracker], list[str]]:
    """The trackers that the config asks for; and a sentence for each that is not installed."""
    wanted = {"wandb": (config.wandb_log, "wandb", lambda: wandb(config)),
              "TensorBoard": (config.tensorboard, "tensorboard", lambda: tensorboard(folder / "tensorboard"))}
    found, notes = list[Tracker](), list[str]()
    for name, (requested, package, connect) in wanted.items():
        if requested and find_spec(package) is None:
            notes.append(f"{name}: the package {package} is not installed ({install_command(package)}). The metrics "
                         f"are in {folder / 'metrics.jsonl'}.")
        elif requested:
            found.append(Tracker(name, connect))
    return found, notes


def wandb(config: RunConfig) -> tuple[Log, Close]:
    """nanoGPT's five keys, as its train.py logs them."""
    module: Any = importlib.import_module("wandb")
    module.init(project=config.wandb_project, name=config.wandb_run_name, config=config.to_dict())
    return module.log, module.finish


def tensorboard(folder: Path) -> tuple[Log, Close]:
    """The same as scalars, in event files: tensorboard --logdir FOLDER."""
    module: Any = importlib.import_module("torch.utils.tensorboard")
    writer = module.SummaryWriter(str(folder))

    def log(row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "iter":
                writer.add_scalar(name, value, row["iter"])
        writer.flush()

    return log, writer.close
