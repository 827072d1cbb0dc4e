"""`fitgpt watch`: the run and its GPU in one frame, the text and JSON of a frame, and wrong targets."""

from __future__ import annotations

import json
import re
import shlex
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fitgpt.commands.main import main
from fitgpt.config.argv import walk
from fitgpt.config.fields import build
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import DeviceError, UsageError
from fitgpt.core.units import GiB, MiB
from fitgpt.hardware.gpu_stats import GpuState
from fitgpt.hardware.nvidia import GpuProcess
from fitgpt.runs import watch
from fitgpt.runs.folder import open_run
from fitgpt.runs.lock import LockOwner
from fitgpt.runs.metrics import facts_from
from fitgpt.runs.record import MemoryHistory, Spike
from fitgpt.runs.watch import WatchFrame
from fitgpt.show.watch_text import frame_lines
from tests.fake_nvml import CountingNvml
from tests.helpers import tiny_config
from tests.watch_frames import CARD, FACTS, FRAME, RUN, state_of, step, text_of, write_run

# ---- the run and its GPU


def test_the_gpu_is_the_one_with_the_runs_process(nvml: CountingNvml, tmp_path: Path) -> None:
    cards = (GpuState(0, "A"), GpuState(1, "A", programs=(GpuProcess(7, "python", GiB),)), GpuState(2, "B"))
    here = socket.gethostname()

    def chosen(facts: dict[str, Any], pid: int) -> int | None:
        card, _ = watch.gpu_of_run(facts_from(facts), LockOwner(pid, here, 0.0, True), cards, "")
        return card.index if card else None

    assert chosen({"device": "cuda:0", "device_name": "A"}, 7) == 1   # CUDA_VISIBLE_DEVICES renumbers
    assert chosen({"device": "cuda:1", "device_name": "A"}, 99) == 1  # the driver shows no processes
    assert chosen({"device": "cuda:0", "device_name": "B"}, 99) == 2
    assert chosen({"device": "cuda:0", "device_name": "C"}, 99) is None
    assert chosen({"device": "cpu"}, 7) is None


def test_headroom_is_the_free_memory_of_the_gpu(nvml: CountingNvml, tmp_path: Path) -> None:
    with open_run(tmp_path, {}, resume=False) as run:
        run.append_metrics(FACTS)
        frame = watch.Watcher(str(tmp_path)).read()
        assert frame.cards[0].index == 0
        assert frame.run is not None
        assert frame.run.headroom_bytes == 60 * MiB


def test_a_spike_of_another_program_has_its_name_and_the_runs_phase() -> None:
    def sample(phase: str, mine: int, theirs: int) -> watch.GpuSample:
        programs = (GpuProcess(7, "python", mine, "run"), GpuProcess(6, "chrome", theirs, "app"))
        return watch.GpuSample(mine + theirs, phase, 50, 7, programs)

    samples = [sample("train", GiB, GiB), sample("train", 4 * GiB, GiB), sample("eval", 4 * GiB, 2 * GiB)]
    assert watch.spikes_of_others(samples) == (Spike("eval", 50, GiB, 2 * GiB, "chrome"),)


def test_from_the_second_frame_on_the_history_is_the_gpus_memory(nvml: CountingNvml,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = watch.Watcher("0")
    watcher.read()
    used = SimpleNamespace(total=900 * MiB, free=500 * MiB, used=300 * MiB, reserved=10 * MiB)
    monkeypatch.setattr(CountingNvml, "nvmlDeviceGetMemoryInfo", lambda *_, **__: used)
    assert watcher.read().history == MemoryHistory((30 * MiB, 300 * MiB), ((1, ""),))


# ---- what is shown


def test_a_run_is_at_100_percent_only_at_its_end() -> None:
    assert FRAME.run is not None
    assert " 99%" in text_of(replace(FRAME, run=replace(FRAME.run, step=9_535, max_iters=9_536)))


def test_every_figure_of_gpu_and_run_is_shown() -> None:
    words = text_of(FRAME)
    for figure in ("GPU 0", "RTX 4070", "9.00 GiB of 12.00 GiB, 75%", "utilisation 97%", "power 187 of 200 W", "71 °C",
                   "2,475 of 2,550 MHz", "power limit", "Xorg 300.0 MiB (desktop)", "chrome 200.0 MiB (desktop)",
                   "ollama N/A", "runs/a", "running: process 7", "1,240 of 9,536", "13%", "eval", "5 h 12 min left",
                   "3.8123", "validation 3.9000", "41,234 tokens/s", "MFU 41.20%", "allocated 7.00 GiB",
                   "reserved 8.00 GiB", "planned peak 9.00 GiB", "headroom 2.00 GiB", "a warning",
                   "+3.00 GiB to 8.00 GiB in eval at step 1,000", "in train at step 1,100 (chrome)", "5.00 GiB to"):
        assert figure in words, figure
    assert "python" not in words  # the run itself is no other program
    assert words.index("GPU 0") < words.index("runs/a")


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
        for figure in ("headroom 2.00 GiB", "2,475 of 2,550 MHz", "5 h 12 min left", "ollama N/A"):
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


def test_json_output_is_valid(tmp_path: Path, nvml: CountingNvml, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, FACTS, step(5, loss="NaN", seconds_left="Infinity"))
    assert main(["watch", str(tmp_path), "--once", "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["schema"] == 1
    assert (document["run"]["step"], document["run"]["loss"], document["run"]["status"]) == (6, "NaN", "stopped")
    assert document["cards"][0]["throttled"] == ["power limit", "heat"]
    assert document["cards"][0]["programs"][0] == {"pid": 7, "name": "python", "nbytes": 20 * MiB, "kind": "other"}


def test_every_key_of_the_json_is_documented() -> None:
    def keys(value: Any) -> set[str]:
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
        return (set(value) if isinstance(value, dict) else set()).union(*map(keys, inner))

    page = (Path(__file__).parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")
    assert keys(FRAME.to_json()) - set(re.findall(r"`([a-z_]+)`", page.split("## For scripts")[1])) == set()


def test_a_real_finished_run_is_shown_once(tmp_path: Path, no_gpu: None,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    from fitgpt.training.run import run

    config = tiny_config(tmp_path, max_iters=4, eval_interval=2)
    run(config.to_dict(), [], lambda: False)
    capsys.readouterr()
    assert main(["watch", config.out_dir]) == 0  # it does not wait for a run that has ended
    words = capsys.readouterr().out
    assert re.search(r"run +\S.*? finished.*\nstep", words, re.DOTALL)
    assert re.search(r"step +4 of 4 +100%", words)
    assert re.search(r"loss +\d\.\d{4} +validation \d\.\d{4}", words)
    assert "none: the run trains on the CPU" in words


def test_a_stopped_run_shows_the_command_that_resumes_it(tmp_path: Path, no_gpu: None) -> None:
    write_run(tmp_path / "my run", FACTS, step(5))
    assert state_of(tmp_path / "my run").hint == "It left no checkpoint."
    (tmp_path / "my run" / "checkpoints" / "step-00000005").mkdir(parents=True)
    command = shlex.split(state_of(tmp_path / "my run").hint.partition(": ")[2])
    assert command[:2] == ["fitgpt", "train"]
    config = build(RunConfig, walk(command[2:], RunConfig))
    assert (config.init_from, config.out_dir) == ("resume", str(tmp_path / "my run"))


# ---- mistakes


def test_nothing_to_watch_is_an_error_with_the_reason(tmp_path: Path, no_gpu: None,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no NVIDIA driver"):
        watch.Watcher("").read()


def test_a_gpu_that_does_not_exist_is_an_error_with_the_list(nvml: CountingNvml) -> None:
    with pytest.raises(DeviceError, match=r"GPU 7 does not exist.*0 \(NVIDIA H200\), 1"):
        watch.Watcher("7").read()
    assert [card.index for card in watch.Watcher("cuda:1").read().cards] == [1]


def test_a_folder_without_a_run_is_an_error_with_runs_near_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "good", FACTS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for target, why in (("empty", "contains no run"), ("nowhere", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(UsageError, match=f"{target} {why}.*runs/good"):
            watch.Watcher(target)


def test_a_folder_named_like_a_gpu_number_is_a_folder(tmp_path: Path, no_gpu: None,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "0", FACTS, step(5))
    assert watch.Watcher("0").read().run is not None


@pytest.mark.parametrize("flag", ["--interval=0", "--interval=nan", "--interval=-1", "--nonce"])
def test_a_wrong_flag_is_a_usage_error(flag: str) -> None:
    assert main(["watch", flag]) == 2
