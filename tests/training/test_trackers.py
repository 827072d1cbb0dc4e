"""Trackers: what they get, and that one which fails or hangs neither ends nor delays a run."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.training import trackers
from fitgpt.training.trackers import Tracker, open_trackers

ROW = {"iter": 20, "train/loss": 3.5, "val/loss": 3.75, "lr": 1e-3, "mfu": 12.5}


@pytest.fixture(autouse=True)
def no_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSES_WITHIN_S", 5.0)
    monkeypatch.setattr(trackers, "stuck", [])


def nothing() -> None:
    pass


def fail(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("no network\nsecond line")


def test_every_row_arrives_before_the_tracker_is_closed() -> None:
    got: list[Any] = []
    tracker = Tracker("test", lambda: (got.append, lambda: got.append("closed")))
    tracker.log(ROW)
    tracker.log(ROW)
    tracker.close()
    assert got == [ROW, ROW, "closed"]
    assert tracker.problem() == ""


@pytest.mark.parametrize("connect", [fail, lambda: (fail, nothing), lambda: (lambda row: None, fail),
                                     lambda: sys.exit("not logged in")])
def test_a_tracker_that_fails_is_reported_once_and_ignored(connect: Any) -> None:
    tracker = Tracker("wandb", connect)
    tracker.log(ROW)
    tracker.close()
    assert tracker.problem().startswith("wandb has stopped (")
    assert tracker.problem() == ""
    tracker.log(ROW)
    assert trackers.stuck == []


def test_a_tracker_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSES_WITHIN_S", 0.05)
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    release = threading.Event()
    tracker = Tracker("wandb", lambda: (lambda row: release.wait(60), nothing))  # type: ignore[arg-type, return-value]
    for _ in range(10):  # more than may wait: none of the calls blocks
        tracker.log(ROW)
    tracker.close()
    assert trackers.stuck == ["wandb"]
    release.set()


def test_the_trackers_of_a_config_are_opened_and_missing_ones_named(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_trackers(RunConfig(), tmp_path) == ([], [])
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    opened, notes = open_trackers(RunConfig(wandb_log=True, tensorboard=True), tmp_path)
    assert opened == []
    assert [note.partition(":")[0] for note in notes] == ["wandb", "TensorBoard"]
    assert "pip install -e '.[tensorboard]'" in notes[1]


def test_wandb_gets_nanogpts_keys_and_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    logged: list[Any] = []
    module = ModuleType("wandb")
    module.init, module.log, module.finish = started.update, logged.append, nothing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    (tracker,), _ = open_trackers(RunConfig(wandb_log=True, wandb_project="p", wandb_run_name="n"), tmp_path)
    tracker.log(ROW)
    tracker.close()
    assert (started["project"], started["name"], started["config"]["n_layer"]) == ("p", "n", 12)
    assert logged == [ROW]


def test_tensorboard_gets_a_scalar_per_key_at_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, value, step))

        def flush(self) -> None: ...
        def close(self) -> None: ...

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    (tracker,), _ = open_trackers(RunConfig(tensorboard=True), tmp_path)
    tracker.log(ROW)
    tracker.close()
    assert tracker.problem() == ""
    assert scalars == [("train/loss", 3.5, 20), ("val/loss", 3.75, 20), ("lr", 1e-3, 20), ("mfu", 12.5, 20)]
