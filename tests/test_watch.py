"""`fitgpt watch` shows what the driver and the run's folder say, whatever either leaves out, and changes nothing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fitgpt import counters, runrecord, watch
from fitgpt.cli import main
from fitgpt.config import RunConfig
from fitgpt.driver import GpuProcess
from fitgpt.errors import DeviceError, UsageError
from fitgpt.knobs import build, walk
from fitgpt.nouns import MemoryReading
from fitgpt.runfolder import open_run
from fitgpt.runrecord import FollowedRun, Owner, lock_owner
from fitgpt.show.watching import frame_lines
from fitgpt.sights import CardState, Program, RunState, Spike, Track, WatchFrame
from fitgpt.units import GiB, MiB
from helpers import tiny_config
from test_driver import FakeNvml

FACTS = {"kind": "run", "config": {"eval_interval": 100, "always_save_checkpoint": True}, "device": "cuda:0",
         "device_name": "NVIDIA H200", "start_step": 0, "max_iters": 1000}
CARD = CardState(0, "NVIDIA GeForce RTX 4070", 9 * GiB, 2 * GiB, 12 * GiB, 97, 187.4, 200.0, 71, 2475, 2550,
                 ("power limit",), (Program(7, "python", 8 * GiB, "run"), Program(5, "Xorg", 300 * MiB, "desktop"),
                                    Program(6, "chrome", 200 * MiB, "app"), Program(9, "ollama", None)))
RUN = RunState("runs/a", "running", "process 7", 3.0, "NVIDIA GeForce RTX 4070", "eval", 1240, 9536, 3.8123, 3.9,
               41234.0, 0.412, 18720.0, MemoryReading(7 * GiB, 8 * GiB, 7 * GiB, 8 * GiB), 9 * GiB, 2 * GiB,
               (Spike("eval", 1000, 3 * GiB, 8 * GiB), Spike("train", 1100, GiB, 2 * GiB, "chrome")), "a warning", "",
               tuple(4 - step / 100 for step in range(50)))
FRAME = WatchFrame(0.0, (CARD,), "", RUN, Track(tuple([5 * GiB] * 20 + [8 * GiB] * 20), ((20, "eval"),)))


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": 3.5, "seconds": 0.5, "tokens_per_s": 1000.0, "mfu": 0.4,
            "seconds_left": 60.0, **changes}


def memory(reserved: int) -> dict[str, int]:
    return {"allocated": reserved, "reserved": reserved, "peak_allocated": reserved, "peak_reserved": reserved}


def evaluation(number: int, **changes: Any) -> dict[str, Any]:
    return {"kind": "eval", "step": number, "losses": [{"split": "train", "mean": 3.0}, {"split": "val", "mean": 3.25}],
            **changes}


def write_run(folder: Path, *rows: Any, lock: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    if lock is not None:
        (folder / "lock").write_text(json.dumps(lock), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def state_of(folder: Path) -> RunState:
    return FollowedRun(folder).look(lock_owner(folder), time.time())


def words_of(frame: WatchFrame, width: int = 200) -> str:
    return "\n".join(line.words for line in frame_lines(frame, width))


# ---- the driver's counters


class CountingNvml(FakeNvml):
    """The second card refuses every counter."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self._only_first(handle)
        return SimpleNamespace(gpu=97, memory=50)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._only_first(handle)
        return 187_400

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        self._only_first(handle)
        return 200_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._only_first(handle)
        return 71

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        self._only_first(handle)
        return 2475

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        self._only_first(handle)
        return 2550

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        self._only_first(handle)
        return 0x4 | 0x20 | 0x1


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> CountingNvml:
    fake = CountingNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=9))


def test_every_counter_of_a_card_is_read(nvml: CountingNvml) -> None:
    (card, _), reason = counters.read_cards()
    assert (card.utilisation, card.watts, card.watt_limit, card.celsius) == (97, 187.4, 200.0, 71)
    assert (card.clock_mhz, card.top_clock_mhz, card.throttled) == (2475, 2550, ("power limit", "heat"))
    assert (card.used_bytes, card.free_bytes, card.total_bytes) == (30 * MiB, 60 * MiB, 100 * MiB)
    assert [(one.pid, one.nbytes) for one in card.programs] == [(7, 20 * MiB), (5, 2 * MiB), (8, None)]
    assert reason == ""
    assert not nvml.is_open


def test_a_counter_the_driver_does_not_know_shows_as_na(nvml: CountingNvml) -> None:
    _, silent = counters.read_cards()[0]
    assert silent == CardState(1, "NVIDIA GeForce RTX 4070")
    words = words_of(WatchFrame(0.0, (silent,), "", None, Track()))
    assert "utilisation N/A  power N/A  N/A  clock N/A" in words
    assert re.search(r"throttled +N/A", words)
    assert "N/A of N/A" in words


def test_a_library_without_the_function_costs_only_that_counter(nvml: CountingNvml,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CountingNvml, "nvmlDeviceGetPowerUsage")
    card = counters.read_cards()[0][0]
    assert (card.watts, card.celsius) == (None, 71)


def test_before_driver_535_throttling_has_another_name(nvml: CountingNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CountingNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setattr(CountingNvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda self, handle: 0x40,
                        raising=False)
    assert counters.read_cards()[0][0].throttled == ("heat (hardware)",)


@pytest.mark.parametrize(("bits", "words"), [(0, ()), (0x1, ()), (0x5, ("power limit",)), (None, None),
                                             (0x1000, ("reason 0x1000",)), ("odd", None)])
def test_an_idle_card_is_not_throttled_and_a_new_reason_is_still_one(bits: Any, words: Any) -> None:
    assert counters.throttling(bits) == words


def test_hidden_cards_are_watched_too(nvml: CountingNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert [card.index for card in counters.read_cards()[0]] == [0, 1]


def test_without_the_library_nvidia_smi_counts_even_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def smi(command: list[str], **_: Any) -> SimpleNamespace:
        asked = command[1]
        if "event_reasons" in asked:
            return SimpleNamespace(returncode=2, stdout="Field is not a valid field to query")
        if "compute-apps" in asked:
            return SimpleNamespace(returncode=0, stdout="GPU-1, 42, 4464, /usr/bin/python3\nGPU-1, 43, [N/A], odd\n")
        if "throttle" in asked:
            return SimpleNamespace(returncode=0, stdout="0, 57, 88.20, [N/A], 64, 1800, 2100, 0x0000000000000004\n")
        return SimpleNamespace(returncode=0, stdout="0, T4, GPU-1, 470.57, 15109, 15000, 109, 7.5\n")

    counters._reason_field.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi-old")
    monkeypatch.setattr("subprocess.run", smi)
    (card,), _ = counters.read_cards()
    counters._reason_field.cache_clear()
    assert (card.utilisation, card.watts, card.watt_limit, card.celsius) == (57, 88.2, None, 64)
    assert card.throttled == ("power limit",)
    assert card.programs == (Program(42, "python3", 4464 * MiB), Program(43, "odd", None))


@pytest.mark.parametrize(("told", "name", "kind"), [
    ("/usr/lib/xorg/Xorg", "Xorg", "desktop"), ("/usr/bin/gnome-shell", "gnome-shell", "desktop"),
    ("/opt/google/chrome/chrome --type=gpu-process --no-sandbox", "chrome", "app"),
    (r"C:\Windows\System32\dwm.exe", "dwm.exe", "desktop"),
    (r"C:\Program Files\Mozilla\firefox.exe", "firefox.exe", "app"),
    ("python train.py", "python train.py", "other"), ("/usr/bin/python3.11", "python3.11", "other"),
    (None, "", "other"),
])
def test_programs_are_named_plainly_and_the_desktops_told_apart(told: str | None, name: str, kind: str) -> None:
    assert counters.program_name(told) == name
    assert counters.kind_of(name) == kind


def test_more_bytes_than_the_card_has_are_not_believed() -> None:
    found = counters.programs([GpuProcess(1, "a", 2**64 - 1), GpuProcess(2, "b", 5)], 100)
    assert found == (Program(2, "b", 5), Program(1, "a", None))


def test_a_process_nobody_names_is_called_by_its_number() -> None:
    assert counters.programs([GpuProcess(2**30, None, 5)], None)[0].name == f"process {2**30}"
    assert counters.programs([GpuProcess(os.getpid(), None, 5)], None)[0].name != ""


# ---- who trains there


def test_a_run_is_running_while_its_process_holds_the_folder(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}, resume=False):
        owner = lock_owner(tmp_path / "run")
        assert owner is not None
        assert (owner.pid, owner.alive) == (os.getpid(), True)
    closed = lock_owner(tmp_path / "run")  # this process lives on, and holds the folder no more
    assert closed is not None
    assert closed.alive is False


def test_looking_at_a_run_never_turns_its_trainer_away(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, lock={"pid": os.getpid(), "host": socket.gethostname()})
    enough = threading.Event()

    def look() -> None:
        while not enough.is_set():
            state_of(tmp_path)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(30):
            open_run(tmp_path, {}, resume=True).close()  # SystemFault, if the lock were tried meanwhile
    finally:
        enough.set()
        looker.join()


@pytest.mark.parametrize("lock", ["", "{}", "[1]", '{"pid": "7", "host": "h"}', '{"pid": -1, "host": "h"}', "\xff"])
def test_a_lock_file_of_nonsense_is_nobodys(tmp_path: Path, lock: str) -> None:
    write_run(tmp_path, FACTS, step(3))
    (tmp_path / "lock").write_text(lock, encoding="utf-8")
    assert lock_owner(tmp_path) is None
    assert state_of(tmp_path).status == "stopped"


def test_a_process_number_that_went_to_another_process_is_not_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, step(3), lock={"pid": os.getppid(), "host": socket.gethostname()})
    assert state_of(tmp_path).status == "stopped"


def test_a_run_on_another_machine_is_not_pronounced_dead(tmp_path: Path, no_gpu: None) -> None:
    write_run(tmp_path, FACTS, step(3), lock={"pid": 7, "host": "fast-box"})
    state = state_of(tmp_path)
    assert (state.status, state.whereabouts) == ("elsewhere", "process 7 on fast-box")
    frame = watch.Watcher(str(tmp_path)).look()
    assert frame.no_card == "the run is on fast-box, not on this machine"
    assert not watch.is_over(frame.run)


@pytest.mark.parametrize(("rows", "status"), [
    ([FACTS, step(999), evaluation(1000)], "finished"), ([FACTS, step(998)], "stopped"),
    ([{**FACTS, "config": {"eval_only": True}}, evaluation(0)], "finished"), ([], "stopped"),
])
def test_a_run_that_has_ended_says_how(tmp_path: Path, rows: list[Any], status: str) -> None:
    write_run(tmp_path, *rows)
    assert state_of(tmp_path).status == status


def test_a_run_that_takes_up_its_folder_again_is_starting(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, step(40))
    os.utime(tmp_path / "metrics.jsonl", (time.time() - 60,) * 2)
    with open_run(tmp_path, {}, resume=True) as run:
        assert (state_of(tmp_path).status, state_of(tmp_path).phase) == ("starting", "load")
        time.sleep(0.02)
        run.append_metrics({**FACTS, "start_step": 40})
        assert (state_of(tmp_path).status, state_of(tmp_path).phase) == ("running", "train")


def test_the_newest_run_that_is_running_is_found(tmp_path: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "old", FACTS)
    os.utime(tmp_path / "runs" / "old" / "metrics.jsonl", (1, 1))
    (tmp_path / "empty").mkdir()
    with open_run("out", {}, resume=False) as run:
        run.append_metrics(FACTS)
        time.sleep(0.02)
        write_run(tmp_path / "runs" / "newest", FACTS, step(999), evaluation(1000))
        assert watch.Watcher("").look().run.folder == "out"  # type: ignore[union-attr]
    assert watch.Watcher("").look().run.folder == "runs/newest"  # type: ignore[union-attr]  # no card to look at instead


def test_without_a_running_run_the_cards_are_watched_until_one_starts(tmp_path: Path, nvml: CountingNvml,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "out", FACTS, step(999), evaluation(1000))
    watcher = watch.Watcher("")
    first = watcher.look()
    assert (first.run, [card.index for card in first.cards]) == (None, [0, 1])
    with open_run("out", {}, resume=True):
        assert watcher.look().run is not None


# ---- the record


def test_a_half_written_line_waits_for_its_end_and_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, step(10, loss=3.0))
    followed = FollowedRun(tmp_path)
    line = json.dumps(step(20, loss=2.0)) + "\n"
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(line[:25])
        file.flush()
        assert followed.look(None, 0.0).step == 11
        file.write(line[25:])
    state = followed.look(None, 0.0)
    assert (state.step, state.loss, state.losses) == (21, 2.0, (3.0, 2.0))
    assert followed.look(None, 0.0) == state


def test_a_record_read_as_it_grows_is_the_record_read_at_once(tmp_path: Path) -> None:
    rows = [FACTS, evaluation(0), *(step(number, memory=memory((number + 1) * 50 * MiB)) for number in range(3000)),
            {**FACTS, "start_step": 2000}, evaluation(2000), step(2001), {"kind": "warning", "text": "hot"}]
    path = tmp_path / "metrics.jsonl"
    followed = FollowedRun(tmp_path)
    with open(path, "a", encoding="utf-8") as file:
        for place, row in enumerate(rows):
            file.write(json.dumps(row) + "\n")
            if place % 500 == 0:
                file.flush()
                followed.look(None, 0.0)
    at_once, grown = FollowedRun(tmp_path), followed.look(None, 0.0)
    assert replace(at_once.look(None, 0.0), silent_s=0.0) == replace(grown, silent_s=0.0)
    assert at_once.record.track() == followed.record.track()
    assert 500 < len(grown.losses) <= runrecord.CURVE_POINTS


def test_a_resume_undoes_what_lay_beyond_its_start(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, *(step(number, loss=float(number)) for number in range(10)), evaluation(10),
              {**FACTS, "start_step": 5})
    state = state_of(tmp_path)
    assert (state.step, state.losses) == (5, (0.0, 1.0, 2.0, 3.0, 4.0))
    assert (state.loss, state.val_loss) == (None, None)


def test_going_back_undoes_steps_and_leaves_the_run_what_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, evaluation(0), *(step(number, loss=float(number)) for number in range(10)),
              {"kind": "went_back", "start_step": 5, "text": "The training goes back to step 5."},
              lock={"pid": 7, "host": "fast-box"})
    state = state_of(tmp_path)
    assert (state.step, state.losses, state.max_iters) == (5, (0.0, 1.0, 2.0, 3.0, 4.0), 1000)
    assert (state.phase, state.device_name) == ("train", "NVIDIA H200")


def test_memory_that_ran_out_is_the_warning_until_there_is_another(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, {"kind": "oom", "step": 3, "text": "Memory ran out."}, {"kind": "oom", "step": 3})
    assert state_of(tmp_path).warning == "Memory ran out."
    write_run(tmp_path, FACTS, {"kind": "oom", "step": 3}, {"kind": "step_down", "step": 3, "text": "Going on."})
    assert state_of(tmp_path).warning == "Going on."


def test_another_file_in_its_place_is_read_from_its_start(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, *(step(number) for number in range(50)))
    followed = FollowedRun(tmp_path)
    assert followed.look(None, 0.0).step == 50
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics-1.jsonl")
    assert followed.look(None, 0.0).step == 50  # what was known, until there is more
    write_run(tmp_path, {**FACTS, "max_iters": 70}, step(0), *[{"kind": "warning", "text": "x" * 100}] * 100)
    longer = followed.look(None, 0.0)
    assert (longer.step, longer.max_iters, longer.losses) == (1, 70, (3.5,))
    write_run(tmp_path, {**FACTS, "max_iters": 7})  # cut back in place
    shorter = followed.look(None, 0.0)
    assert (shorter.step, shorter.max_iters, shorter.losses) == (0, 7, ())


@pytest.mark.parametrize("row", [
    "", "{", "null", "7", '"x"', "[" * 5000, "9" * 6000, '{"kind": "step"}', '{"kind": "step", "step": "five"}',
    '{"kind": "step", "step": 1e400, "loss": {}}', '{"kind": ["run"]}', '{"kind": "run", "config": 7, "max_iters": ""}',
    '{"kind": "eval", "step": 5, "losses": [7, {"split": "val"}], "memory": [1]}', '{"kind": "plan", "phases": [1, 2]}',
    '{"kind": "plan", "forecast": {"phases": {"train": 7}}, "budget": []}', '{"kind": "warning"}', "x" * (2**20 + 5),
    '{"kind": "step", "step": 6, "loss": "worse", "memory": {"reserved": "much"}, "seconds": 0, "seconds_left": "NaN"}',
])
def test_nonsense_in_the_record_costs_nothing_but_itself(tmp_path: Path, row: str, no_gpu: None) -> None:
    write_run(tmp_path, FACTS, row, step(7, loss=1.5))
    frame = watch.Watcher(str(tmp_path)).look()
    assert frame.run is not None
    assert (frame.run.step, frame.run.loss) == (8, 1.5)
    assert "1.5000" in words_of(frame)
    json.dumps(watch.as_document(frame), allow_nan=False)


def rows_then(*rows: dict[str, Any]) -> runrecord.Record:
    record = runrecord.Record()
    for row in (FACTS, *rows):
        record.take(row)
    return record


@pytest.mark.parametrize(("rows", "silent", "phase"), [
    ([], 0.0, "eval"),                                             # a fresh run evaluates first
    ([evaluation(0)], 0.0, "train"),
    ([evaluation(0), step(10)], 0.0, "train"),
    ([step(99)], 0.0, "eval"),                                     # 100 steps are done
    ([step(90)], 1.0, "train"), ([step(90)], 5.0, "eval"),         # nine steps of half a second are left until then
    ([step(99), evaluation(100, best=False)], 0.0, "save"),
    ([step(99), evaluation(100), {"kind": "save", "step": 100}], 0.0, "train"),
    ([step(99), evaluation(100), {"kind": "save", "step": 100}, {"kind": "warning", "text": ""}], 0.0, "train"),
    ([step(999)], 0.0, "eval"),
])
def test_the_phase_is_what_comes_after_the_last_line(rows: list[dict[str, Any]], silent: float, phase: str) -> None:
    assert runrecord.phase_now(rows_then(*rows), silent) == phase


def test_only_improvements_are_saved_where_the_run_says_so() -> None:
    record = rows_then({**FACTS, "config": {"eval_interval": 100, "always_save_checkpoint": False}}, step(99))
    record.take(evaluation(100, best=False))
    assert runrecord.phase_now(record, 0.0) == "train"
    record.take(evaluation(100, best=True))
    assert runrecord.phase_now(record, 0.0) == "save"


def test_a_spike_is_marked_with_the_phase_it_came_in() -> None:
    record = rows_then(evaluation(0, memory=memory(GiB)), step(0, memory=memory(3 * GiB)),
                       step(1, memory=memory(3 * GiB + 10 * MiB)), evaluation(100, memory=memory(4 * GiB)))
    assert record.spikes == [Spike("train", 1, 2 * GiB, 3 * GiB),
                             Spike("eval", 100, GiB - 10 * MiB, 4 * GiB)]
    assert record.track().marks == ((1, "train"), (3, "eval"))


def test_a_new_process_begins_with_nothing_which_is_no_spike() -> None:
    record = rows_then(step(0, memory=memory(GiB)), {**FACTS, "start_step": 1}, step(1, memory=memory(3 * GiB)))
    assert record.spikes == []


def test_the_planned_peak_is_the_highest_phase_of_the_plan(tmp_path: Path, no_gpu: None) -> None:
    phases = {"train": {"allocated_bytes": 2 * GiB, "reserved_bytes": 3 * GiB},
              "eval": {"allocated_bytes": GiB, "reserved_bytes": GiB}}
    write_run(tmp_path, FACTS, {"kind": "plan", "phases": phases, "reserve_limit_bytes": 5 * GiB},
              step(0, memory=memory(2 * GiB)), lock={"pid": 1, "host": "fast-box"})
    run = watch.Watcher(str(tmp_path)).look().run
    assert run is not None
    assert (run.planned_bytes, run.headroom_bytes) == (3 * GiB, 3 * GiB)  # a cap of 5 GiB, of which 2 are reserved


def test_the_last_plan_counts() -> None:
    first = {"kind": "plan", "phases": {"train": {"reserved_bytes": 50}}}
    last = {"kind": "plan", "phases": {"train": {"reserved_bytes": 5}, "eval": {"reserved_bytes": 7}},
            "reserve_limit_bytes": 9}
    record = rows_then(first, last)
    assert (record.planned, record.reserve_limit) == (7, 9)


# ---- run and card together


def test_the_card_is_the_one_the_runs_process_is_on(nvml: CountingNvml, tmp_path: Path) -> None:
    cards = (CardState(0, "A"), CardState(1, "A", programs=(Program(7, "python", GiB),)), CardState(2, "B"))
    here = socket.gethostname()

    def chosen(facts: dict[str, Any], pid: int) -> int | None:
        card, _ = watch.card_of(facts, Owner(pid, here, 0.0, True), cards, "")
        return card.index if card else None

    assert chosen({"device": "cuda:0", "device_name": "A"}, 7) == 1   # CUDA_VISIBLE_DEVICES renumbers
    assert chosen({"device": "cuda:1", "device_name": "A"}, 99) == 1  # the driver shows no processes
    assert chosen({"device": "cuda:0", "device_name": "B"}, 99) == 2
    assert chosen({"device": "cuda:0", "device_name": "C"}, 99) is None
    assert chosen({"device": "cpu"}, 7) is None


def test_headroom_is_what_is_free_on_the_card(nvml: CountingNvml, tmp_path: Path) -> None:
    with open_run(tmp_path, {}, resume=False) as run:
        run.append_metrics(FACTS)
        frame = watch.Watcher(str(tmp_path)).look()
        assert frame.cards[0].index == 0
        assert frame.run is not None
        assert frame.run.headroom_bytes == 60 * MiB


def test_another_programs_spike_is_named_and_put_in_the_runs_phase() -> None:
    def sample(phase: str, mine: int, theirs: int) -> watch.Sample:
        programs = (Program(7, "python", mine, "run"), Program(6, "chrome", theirs, "app"))
        return watch.Sample(mine + theirs, phase, 50, 7, programs)

    samples = [sample("train", GiB, GiB), sample("train", 4 * GiB, GiB), sample("eval", 4 * GiB, 2 * GiB)]
    assert watch.spikes_of_others(samples) == (Spike("eval", 50, GiB, 2 * GiB, "chrome"),)


def test_the_graph_is_of_the_cards_memory_once_it_was_looked_at_twice(nvml: CountingNvml,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = watch.Watcher("0")
    watcher.look()
    used = SimpleNamespace(total=900 * MiB, free=500 * MiB, used=300 * MiB, reserved=10 * MiB)
    monkeypatch.setattr(CountingNvml, "nvmlDeviceGetMemoryInfo", lambda *_, **__: used)
    assert watcher.look().track == Track((30 * MiB, 300 * MiB), ((1, ""),))


# ---- what is shown


def test_everything_the_card_and_the_run_say_is_shown() -> None:
    words = words_of(FRAME)
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
    lines = words_of(FRAME, width).splitlines()
    graph = next(place for place, line in enumerate(lines) if "▁█" in line)
    assert lines[graph + 1].index("↑eval") == lines[graph].index("▁█") + 1


@pytest.mark.parametrize("width", [0, 7, 20, 40, 41, 80, 300])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    longest = max(len(line.words) for line in frame_lines(FRAME, width))
    assert longest <= max(width, 20)
    if width >= 40:
        squeezed = re.sub(r"\s+", " ", words_of(FRAME, width))
        for figure in ("headroom 2.00 GiB", "2,475 of 2,550 MHz", "5 h 12 min left", "ollama N/A"):
            assert figure in squeezed


def test_a_run_without_a_plan_shows_a_dash_for_it() -> None:
    assert "planned peak —" in words_of(replace(FRAME, run=replace(RUN, planned_bytes=None)))


def test_what_others_named_cannot_steer_the_terminal() -> None:
    evil = "a\x1b[2Jb\x07\n\x9b31mc"
    run = replace(RUN, folder=evil, warning=evil, spikes=(Spike(evil, 1, GiB, GiB, evil),))
    card = replace(CARD, name=evil, programs=(Program(1, evil, 5),))
    for line in frame_lines(WatchFrame(0.0, (card,), evil, run, FRAME.track), 80):
        assert line.words.isprintable()


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert all(line.words.isascii() for line in frame_lines(FRAME, 80, unicode=False))


def test_json_is_for_scripts(tmp_path: Path, nvml: CountingNvml, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, FACTS, step(5, loss="NaN", seconds_left="Infinity"))
    assert main(["watch", str(tmp_path), "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["schema"] == 1
    assert (told["run"]["step"], told["run"]["loss"], told["run"]["status"]) == (6, "NaN", "stopped")
    assert told["cards"][0]["throttled"] == ["power limit", "heat"]
    assert told["cards"][0]["programs"][0] == {"pid": 7, "name": "python", "nbytes": 20 * MiB, "kind": "other"}


def test_every_key_of_the_json_is_in_its_page() -> None:
    def keys(value: Any) -> set[str]:
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
        return (set(value) if isinstance(value, dict) else set()).union(*map(keys, inner))

    page = (Path(__file__).parent.parent / "docs" / "watch.md").read_text(encoding="utf-8")
    assert keys(watch.as_document(FRAME)) - set(re.findall(r"`([a-z_]+)`", page.split("## For scripts")[1])) == set()


def test_a_real_run_that_has_finished_is_read_whole(tmp_path: Path, no_gpu: None,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    from fitgpt.run import run

    config = tiny_config(tmp_path, max_iters=4, eval_interval=2)
    run(config.to_dict(), [], lambda: False)
    capsys.readouterr()
    assert main(["watch", config.out_dir]) == 0  # it does not wait for a run that has ended
    words = capsys.readouterr().out
    assert re.search(r"run +\S+ +finished|run +.*\n +finished", words)
    assert re.search(r"step +4 of 4 +100%", words)
    assert re.search(r"loss +\d\.\d{4} +validation \d\.\d{4}", words)
    assert "none: the run trains on the CPU" in words


def test_a_stopped_run_says_the_command_that_goes_on_with_it(tmp_path: Path, no_gpu: None) -> None:
    write_run(tmp_path / "my run", FACTS, step(5))
    assert state_of(tmp_path / "my run").hint == "It left no checkpoint."
    (tmp_path / "my run" / "checkpoints" / "step-00000005").mkdir(parents=True)
    told = shlex.split(state_of(tmp_path / "my run").hint.partition(": ")[2])
    assert told[:2] == ["fitgpt", "train"]
    config = build(RunConfig, walk(told[2:], RunConfig))
    assert (config.init_from, config.out_dir) == ("resume", str(tmp_path / "my run"))


# ---- mistakes


def test_nothing_to_watch_is_said_with_the_reason(tmp_path: Path, no_gpu: None,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no NVIDIA driver"):
        watch.Watcher("").look()


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(nvml: CountingNvml) -> None:
    with pytest.raises(DeviceError, match=r"GPU 7 is not here.*0 \(NVIDIA H200\), 1"):
        watch.Watcher("7").look()
    assert [card.index for card in watch.Watcher("cuda:1").look().cards] == [1]


def test_a_folder_without_a_run_is_refused_with_those_near_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "good", FACTS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for target, why in (("empty", "holds no run"), ("nowhere", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(UsageError, match=f"{target} {why}.*runs/good"):
            watch.Watcher(target)


def test_a_folder_called_like_a_number_is_a_folder(tmp_path: Path, no_gpu: None,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "0", FACTS, step(5))
    assert watch.Watcher("0").look().run is not None


@pytest.mark.parametrize("flag", ["--interval=0", "--interval=nan", "--interval=-1", "--nonce"])
def test_a_wrong_flag_is_a_usage_error(flag: str) -> None:
    assert main(["watch", flag]) == 2


# ---- processes

WRITER = """
import json, sys, time
from fitgpt.runfolder import open_run
with open_run(sys.argv[1], {}, resume=False) as run:
    run.append_metrics(json.loads(sys.argv[2]))
    print("writing", flush=True)
    for step in range(10**9):
        line = json.dumps({"kind": "step", "step": step, "loss": 2.0, "seconds": 1.0, "pad": "x" * 2000}) + chr(10)
        with open(sys.argv[1] + "/metrics.jsonl", "a") as file:
            file.write(line[:700]); file.flush(); time.sleep(0.002); file.write(line[700:])
"""


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run"),
                                json.dumps({**FACTS, "max_iters": 10**9})],
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.communicate()


def test_a_run_is_read_while_another_process_writes_half_lines(writer: Any, tmp_path: Path) -> None:
    steps = []
    for _ in range(4):
        seen = subprocess.run([sys.executable, "-m", "fitgpt", "watch", str(tmp_path / "run"), "--once", "--json"],
                              capture_output=True, text=True, timeout=30)
        assert (seen.returncode, seen.stderr) == (0, "")
        told = json.loads(seen.stdout)["run"]
        assert (told["status"], told["whereabouts"]) == ("running", f"process {writer.pid}")
        steps.append(told["step"])
    assert steps == sorted(set(steps))
    writer.kill()
    writer.wait()
    assert state_of(tmp_path / "run").status == "stopped"


def watch_in_terminal(argv: list[str], columns: int, until: Callable[[str], bool]) -> tuple[int, str]:
    """Runs it in a terminal of that width, presses Ctrl-C when its screen is as wanted: (exit code, what it wrote)."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen([sys.executable, "-m", "fitgpt", "watch", *argv], stdin=child, stdout=child,
                               stderr=child, env=environment)
    os.close(child)
    written, deadline = b"", time.monotonic() + 20
    while not until(written.decode(errors="replace")) and time.monotonic() < deadline:
        written += os.read(parent, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(parent, 65536):
            written += chunk
    except OSError:  # the other end is closed
        pass
    os.close(parent)
    return process.wait(10), written.decode()


def test_ctrl_c_ends_a_live_watch_in_a_narrow_terminal_quietly(writer: Any, tmp_path: Path) -> None:
    code, written = watch_in_terminal([str(tmp_path / "run"), "--interval=0.1"], 40,
                                      lambda seen: seen.count("Ctrl-C ends it") >= 3)
    assert code == 0
    assert "Traceback" not in written
    assert "stopped." not in written
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert max(len(line) for line in re.split(r"[\r\n]", plain)) <= 40
    assert len(set(re.findall(r"step +([\d,]+) of", plain))) >= 2  # it moves
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is back


def test_watching_ends_when_the_run_does(writer: Any, tmp_path: Path) -> None:
    watching = subprocess.Popen([sys.executable, "-m", "fitgpt", "watch", str(tmp_path / "run"), "--interval=0.1"],
                                stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    while "running" not in watching.stdout.readline():
        pass
    writer.kill()
    writer.wait()
    rest, _ = watching.communicate(timeout=20)
    assert watching.returncode == 0
    assert "stopped" in rest


def test_watching_loads_neither_torch_nor_numpy_nor_without_a_terminal_rich(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, step(5))
    script = ("import sys, fitgpt.cli\nassert fitgpt.cli.main(['watch', sys.argv[1], '--once']) == 0\n"
              "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True).returncode == 0
