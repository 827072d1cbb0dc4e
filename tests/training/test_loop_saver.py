"""Failed saves: a run continues after a few, and stops when they last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fitgpt.core.errors import SystemFault
from fitgpt.engine.ranks import ALONE
from fitgpt.training import loop
from fitgpt.training.loop import CheckpointSaver, Meter


@pytest.mark.parametrize(("seconds_apart", "saves"), [(0.1, 601), (20.0, 4), (1000.0, 3)])
def test_a_run_stops_after_three_failed_saves_and_a_minute(monkeypatch: pytest.MonkeyPatch, seconds_apart: float,
                                                           saves: int) -> None:
    now, warnings = 0.0, list[str]()
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)

    def save(**_: Any) -> None:
        raise SystemFault("No space left on device.")

    training: Any = SimpleNamespace(step=0, saved_at=-1, device=None, ranks=ALONE)
    callbacks: Any = SimpleNamespace(save=save, warn=warnings.append)
    saver = CheckpointSaver(training, callbacks, Meter(1, lambda: None))
    for training.step in range(saves - 1):
        now = training.step * seconds_apart
        saver.save()
    assert len(warnings) == saves - 1
    training.step, now = saves, (saves - 1) * seconds_apart
    with pytest.raises(SystemFault, match="No space left"):
        saver.save()
