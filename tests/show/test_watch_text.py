"""The text of a frame of `fitgpt watch`."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fitgpt.core.units import GiB
from fitgpt.hardware.nvidia import GpuProcess
from fitgpt.runs.watch import Spike, WatchFrame
from fitgpt.show.watch_text import frame_lines
from tests.watch_frames import CARD, FRAME, RUN, text_of


def test_a_run_is_at_100_percent_only_at_its_end() -> None:
    assert FRAME.run is not None
    assert " 99%" in text_of(replace(FRAME, run=replace(FRAME.run, step=9_535, max_iters=9_536)))


def test_every_figure_of_gpu_and_run_is_shown() -> None:
    text = text_of(FRAME)
    for figure in ("GPU 0", "RTX 4070", "9.00 GiB of 12.00 GiB, 75%", "utilisation 97%", "power 187 of 200 W", "71 °C",
                   "2,475 of 2,550 MHz", "power limit", "Xorg 300.0 MiB (desktop)", "chrome 200.0 MiB (desktop)",
                   "ollama n/a", "runs/a", "running: process 7", "1,240 of 9,536", "13%", "eval", "5 h 12 min left",
                   "3.8123", "validation 3.9000", "41,234 tokens/s", "mfu 41.20%", "allocated 7.00 GiB",
                   "reserved 8.00 GiB", "planned peak 9.00 GiB", "headroom 2.00 GiB", "a warning",
                   "+3.00 GiB to 8.00 GiB in eval at step 1,000", "in train at step 1,100 (chrome)", "5.00 GiB to"):
        assert figure in text, figure
    assert "python" not in text  # the run itself is no other program
    assert text.index("GPU 0") < text.index("runs/a")


def test_the_peaks_of_the_phases_are_shown_beside_their_plan_and_the_current_value() -> None:
    lines = [" ".join(line.split()) for line in text_of(FRAME, 80).splitlines()]
    start = next(place for place, line in enumerate(lines) if line.startswith("peaks "))
    assert lines[start:start + 5] == [
        "peaks highest reserved planned allocated planned", "load 1.00 GiB 1.00 GiB = 1.00 GiB 1.00 GiB",
        "training 8.00 GiB 9.00 GiB -11.11 % 7.00 GiB 7.00 GiB", "evaluation — 9.00 GiB — 6.00 GiB",
        "now 8.00 GiB 7.00 GiB"]


@pytest.mark.parametrize("width", [40, 80])
def test_the_graph_has_the_phase_under_its_spike(width: int) -> None:
    lines = text_of(FRAME, width).splitlines()
    graph = next(place for place, line in enumerate(lines) if "▁█" in line)
    assert lines[graph + 1].index("↑eval") == lines[graph].index("▁█") + 1


@pytest.mark.parametrize("width", [0, 7, 20, 40, 41, 80, 300])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    longest = max(len(line.text) for line in frame_lines(FRAME, width))
    assert longest <= max(width, 20)
    if width >= 40:
        squeezed = re.sub(r"\s+", " ", text_of(FRAME, width))
        for figure in ("headroom 2.00 GiB", "2,475 of 2,550 MHz", "5 h 12 min left", "ollama n/a"):
            assert figure in squeezed


def test_a_run_without_a_plan_shows_a_dash_for_it() -> None:
    assert "planned peak —" in text_of(replace(FRAME, run=replace(RUN, planned_bytes=None)))


def test_control_characters_do_not_reach_the_terminal() -> None:
    evil = "a\x1b[2Jb\x07\n\x9b31mc"
    run = replace(RUN, folder=evil, warning=evil, spikes=(Spike(evil, 1, GiB, GiB, evil),))
    card = replace(CARD, name=evil, programs=(GpuProcess(1, evil, 5),))
    for line in frame_lines(WatchFrame(0.0, (card,), evil, run, FRAME.history), 80):
        assert line.text.isprintable()


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert all(line.text.isascii() for line in frame_lines(FRAME, 80, unicode=False))
