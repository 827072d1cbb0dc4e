"""The run that trains on this machine now, as the page's live tab shows it."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ..core.errors import FitError
from ..core.units import show_bytes, show_seconds
from ..hardware.nvidia import GpuState
from ..runs.watch import MemoryHistory, RunState, Watcher, WatchFrame, has_ended
from ..show.charts import EventMark, Level, Series, line_chart
from ..show.progress import show_mfu

UNKNOWN = "–"


class LiveRun:
    """Follows one run; without a target, looks for another when that one ends. The watcher keeps the history."""

    def __init__(self, target: str = "") -> None:
        self._target = target
        self._watcher: Watcher | None = None

    def look(self) -> dict[str, Any]:
        try:
            watcher = self._watcher or Watcher(self._target)
            frame = watcher.read()
        except FitError as error:
            self._watcher = None
            return {"run": None, "why": error.what}
        self._watcher = None if has_ended(frame.run) and not self._target else watcher
        return live_document(frame)


def live_document(frame: WatchFrame) -> dict[str, Any]:
    """What the live tab draws: tiles, charts, programs on the GPU."""
    run, card = frame.run, frame.cards[0] if frame.cards else None
    if run is None:
        return {"run": None, "why": "There is no run in the folder where fitgpt serve was started, nor in its runs/."}
    return {"run": frame.to_json()["run"], "tiles": tiles(run, card, frame.no_card),
            "charts": charts(run, frame.history),
            "programs": [asdict(each) for each in card.programs] if card else [],
            "progress": run.step / run.max_iters if run.max_iters else None, "running": not has_ended(run)}


def tiles(run: RunState, card: GpuState | None, no_card: str) -> list[tuple[str, str, str]]:
    """(name, figure, detail) per tile, the name as in the page's catalogue or that of the GPU; figures that are not
    known are left out."""
    memory = run.memory
    found = [
        ("steps", f"{run.step:,}", f"of {run.max_iters:,}" if run.max_iters else ""),
        ("loss", _figure(run.loss), f"validation {_figure(run.val_loss)}" if run.val_loss is not None else ""),
        ("speed", f"{run.tokens_per_s:,.0f}" if run.tokens_per_s and math.isfinite(run.tokens_per_s) else UNKNOWN,
         "tokens/s" + (f", mfu {show_mfu(run.mfu)}" if run.mfu is not None else "")),
        ("time_left", show_seconds(run.seconds_left) if run.seconds_left is not None else UNKNOWN, run.phase or ""),
        ("reserved", show_bytes(memory.reserved) if memory else UNKNOWN,
         f"planned {show_bytes(run.planned_bytes)}" if run.planned_bytes else ""),
        ("headroom", show_bytes(run.headroom_bytes) if run.headroom_bytes is not None else UNKNOWN, ""),
    ]
    found = [each for each in found if each[1] != UNKNOWN]
    if card is None:
        return [*found, ("device", run.device_name or UNKNOWN, no_card)]
    percent = "" if card.utilisation is None else f"{card.utilisation} % busy"
    warm = "" if card.celsius is None else f"{card.celsius} °C"
    power = "" if card.watts is None else f"{card.watts:.0f} W"
    held = (f"{show_bytes(card.used_bytes)} of {show_bytes(card.total_bytes)}"
            if card.used_bytes is not None and card.total_bytes is not None else UNKNOWN)
    return [*found, (card.name, held, ", ".join(filter(None, (percent, warm, power))))]


def charts(run: RunState, history: MemoryHistory) -> str:
    """Loss by step; memory, where there is a GPU."""
    losses = [Series("training", run.losses)] if run.losses else []
    losses += [Series("validation", run.val_losses, 1, "dotted")] if run.val_losses else []
    drawn = line_chart("Loss", losses, empty="No step has been reported yet.", wide=not history.values)
    if not history.values:
        return drawn
    planned = [Level("planned", run.planned_bytes, 5)] if run.planned_bytes else []
    return drawn + line_chart("GPU memory", [Series("memory", list(enumerate(history.values)))], unit="bytes",
                              x_name="sample", levels=planned, from_zero=True,
                              marks=[EventMark(at, f"spike in {phase}") for at, phase in history.marks])


def _figure(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}" if math.isfinite(value) else str(value)
