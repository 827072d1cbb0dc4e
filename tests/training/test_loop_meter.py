"""Step times on a device that computes asynchronously, with a clock of their own."""

from __future__ import annotations

import pytest

from fitgpt.training import loop
from fitgpt.training.loop import Meter

LAUNCH, STEP, EVALUATION, SAVE = 0.001, 0.030, 0.5, 0.2


class Device:
    """The host launches a step in a millisecond; the device takes 30 of them for it, one after another."""

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.now, self.busy_until) + seconds
        self.now += LAUNCH

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(loop.time, "perf_counter", lambda: device.now)
    return device


@pytest.mark.parametrize("steps_before", [0, 1, 5, 9])
def test_an_evaluation_and_a_save_do_not_change_the_time_of_the_steps_around_them(device: Device,
                                                                                  steps_before: int) -> None:
    """Ten steps per report. Of those before the evaluation, nothing has been waited for when it begins."""
    metered = Meter(1000, device.synchronize)
    for step in range(10):
        if step == steps_before:
            with metered.paused():
                device.launch(EVALUATION)  # its result may not be waited for either
            with metered.paused():
                device.launch(SAVE)
        device.launch(STEP)
        metered.stepped()
    device.synchronize()  # the report reads the loss
    seconds, tokens_per_s = metered.lap()
    assert seconds == pytest.approx(STEP)
    assert tokens_per_s == pytest.approx(1000 / STEP)
    assert metered.time_left(4) == pytest.approx(4 * STEP)
