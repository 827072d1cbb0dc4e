"""runs.watch and runs.folder: the state of a run from its folder, as `fitgpt watch` reads it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitgpt.core.units import GiB, MiB
from fitgpt.runs import metrics, watch
from fitgpt.runs.folder import lock_owner, open_run
from fitgpt.runs.watch import FollowedRun, Spike
from tests.fake_nvml import CountingNvml
from tests.watch_frames import FACTS, evaluation, memory, progress_after, state_of, step, text_of, write_run

# ---- the lock, and the status


def test_a_run_is_running_while_its_process_holds_the_lock(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}, resume=False):
        owner = lock_owner(tmp_path / "run")
        assert owner is not None
        assert (owner.pid, owner.alive) == (os.getpid(), True)
    closed = lock_owner(tmp_path / "run")  # this process lives on, and holds the folder no more
    assert closed is not None
    assert closed.alive is False


def test_reading_the_lock_never_stops_a_trainer_that_starts(tmp_path: Path) -> None:
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
        looker.join(timeout=30)


@pytest.mark.parametrize("lock", ["", "{}", "[1]", '{"pid": "7", "host": "h"}', '{"pid": -1, "host": "h"}', "\xff"])
def test_a_malformed_lock_file_has_no_owner(tmp_path: Path, lock: str) -> None:
    write_run(tmp_path, FACTS, step(3))
    (tmp_path / "lock").write_text(lock, encoding="utf-8")
    assert lock_owner(tmp_path) is None
    assert state_of(tmp_path).status == "stopped"


def test_a_pid_reused_by_another_process_is_not_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, step(3), lock={"pid": os.getppid(), "host": socket.gethostname()})
    assert state_of(tmp_path).status == "stopped"


def test_a_run_on_another_machine_is_not_called_stopped(tmp_path: Path, no_gpu: None) -> None:
    write_run(tmp_path, FACTS, step(3), lock={"pid": 7, "host": "fast-box"})
    state = state_of(tmp_path)
    assert (state.status, state.whereabouts) == ("elsewhere", "process 7 on fast-box")
    frame = watch.Watcher(str(tmp_path)).read()
    assert frame.no_card == "the run is on fast-box, not on this machine"
    assert not watch.has_ended(frame.run)


@pytest.mark.parametrize(("rows", "status"), [
    ([FACTS, step(999), evaluation(1000)], "finished"), ([FACTS, step(998)], "stopped"),
    ([{**FACTS, "config": {"eval_only": True}}, evaluation(0)], "finished"), ([], "stopped"),
])
def test_a_run_that_has_ended_is_finished_or_stopped(tmp_path: Path, rows: list[Any], status: str) -> None:
    write_run(tmp_path, *rows)
    assert state_of(tmp_path).status == status


def test_a_checkpoint_between_two_step_reports_counts_as_steps_done(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, step(40), {"kind": "save", "step": 44})
    assert state_of(tmp_path).step == 44
    write_run(tmp_path, FACTS, step(40), {"kind": "save", "step": 44}, {"kind": "resume", "start_step": 42})
    assert state_of(tmp_path).step == 42


def test_a_run_that_resumes_is_starting_until_its_first_row(tmp_path: Path) -> None:
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
        assert watch.Watcher("").read().run.folder == "out"  # type: ignore[union-attr]
    assert watch.Watcher("").read().run.folder == "runs/newest"  # type: ignore[union-attr]  # no GPU to look at instead


def test_without_a_running_run_gpus_are_watched_until_one_starts(tmp_path: Path, nvml: CountingNvml,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "out", FACTS, step(999), evaluation(1000))
    watcher = watch.Watcher("")
    first = watcher.read()
    assert (first.run, [card.index for card in first.cards]) == (None, [0, 1])
    with open_run("out", {}, resume=True):
        assert watcher.read().run is not None


# ---- metrics.jsonl


def test_a_partial_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, step(10, loss=3.0))
    followed = FollowedRun(tmp_path)
    line = json.dumps(step(20, loss=2.0)) + "\n"
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(line[:25])
        file.flush()
        assert followed.state(None, 0.0).step == 11
        file.write(line[25:])
    state = followed.state(None, 0.0)
    assert (state.step, state.loss, state.losses) == (21, 2.0, ((10, 3.0), (20, 2.0)))
    assert followed.state(None, 0.0) == state


def test_reading_a_file_as_it_grows_equals_reading_it_at_once(tmp_path: Path) -> None:
    rows = [FACTS, evaluation(0), *(step(number, memory=memory((number + 1) * 50 * MiB)) for number in range(3000)),
            {**FACTS, "start_step": 2000}, evaluation(2000), step(2001), {"kind": "warning", "text": "hot"}]
    path = tmp_path / "metrics.jsonl"
    followed = FollowedRun(tmp_path)
    with open(path, "a", encoding="utf-8") as file:
        for place, row in enumerate(rows):
            file.write(json.dumps(row) + "\n")
            if place % 500 == 0:
                file.flush()
                followed.state(None, 0.0)
    at_once, grown = FollowedRun(tmp_path), followed.state(None, 0.0)
    assert replace(at_once.state(None, 0.0), silent_s=0.0) == replace(grown, silent_s=0.0)
    assert at_once.progress.memory_history() == followed.progress.memory_history()
    assert len(grown.losses) == 2001


def test_of_a_very_long_file_only_the_end_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LONG_FILE", 2**16)
    monkeypatch.setattr(metrics, "END_BYTES", 2**10)
    write_run(tmp_path, FACTS, *(step(number) for number in range(5000)), evaluation(5000), {"kind": "save", "step": 1})
    read: list[Any] = []
    monkeypatch.setattr(watch.RunProgress, "add", lambda progress, row: read.append(row))
    state_of(tmp_path)
    assert len(read) < 1000
    assert [row.get("step") for row in read[-3:]] == [4999, 5000, 1]
    assert read[0]["kind"] == "run"


def test_a_resume_undoes_what_is_beyond_its_start(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, *(step(number, loss=float(number)) for number in range(10)), evaluation(10),
              {**FACTS, "start_step": 5})
    state = state_of(tmp_path)
    assert (state.step, state.losses) == (5, ((0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)))
    assert (state.loss, state.val_loss) == (None, None)


def test_a_rollback_undoes_steps_and_keeps_the_facts_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, evaluation(0), *(step(number, loss=float(number)) for number in range(10)),
              {"kind": "went_back", "start_step": 5, "text": "The training goes back to step 5."},
              lock={"pid": 7, "host": "fast-box"})
    state = state_of(tmp_path)
    assert (state.step, state.losses, state.max_iters) == (5, ((0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)), 1000)
    assert (state.phase, state.device_name) == ("train", "NVIDIA H200")


def test_out_of_memory_is_the_warning_until_there_is_another(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, {"kind": "oom", "step": 3, "text": "Memory ran out."}, {"kind": "oom", "step": 3})
    assert state_of(tmp_path).warning == "Memory ran out."
    write_run(tmp_path, FACTS, {"kind": "oom", "step": 3}, {"kind": "step_down", "step": 3, "text": "Going on."})
    assert state_of(tmp_path).warning == "Going on."


def test_a_replaced_or_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    write_run(tmp_path, FACTS, *(step(number) for number in range(50)))
    followed = FollowedRun(tmp_path)
    assert followed.state(None, 0.0).step == 50
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics-1.jsonl")
    assert followed.state(None, 0.0).step == 50  # what was known, until there is more
    write_run(tmp_path, {**FACTS, "max_iters": 70}, step(0), *[{"kind": "warning", "text": "x" * 100}] * 100)
    longer = followed.state(None, 0.0)
    assert (longer.step, longer.max_iters, longer.losses) == (1, 70, ((0, 3.5),))
    write_run(tmp_path, {**FACTS, "max_iters": 7})  # cut back in place
    shorter = followed.state(None, 0.0)
    assert (shorter.step, shorter.max_iters, shorter.losses) == (0, 7, ())


@pytest.mark.parametrize("row", [
    "", "{", "null", "7", '"x"', "[" * 5000, "9" * 6000, '{"kind": "step"}', '{"kind": "step", "step": "five"}',
    '{"kind": "step", "step": 1e400, "loss": {}}', '{"kind": ["run"]}', '{"kind": "run", "config": 7, "max_iters": ""}',
    '{"kind": "eval", "step": 5, "losses": [7, {"split": "val"}], "memory": [1]}', '{"kind": "plan", "phases": [1, 2]}',
    '{"kind": "plan", "forecast": {"phases": {"train": 7}}, "budget": []}', '{"kind": "warning"}', "x" * (2**20 + 5),
    '{"kind": "step", "step": 6, "loss": "worse", "memory": {"reserved": "much"}, "seconds": 0, "seconds_left": "NaN"}',
])
def test_a_malformed_row_is_skipped(tmp_path: Path, row: str, no_gpu: None) -> None:
    write_run(tmp_path, FACTS, row, step(7, loss=1.5))
    frame = watch.Watcher(str(tmp_path)).read()
    assert frame.run is not None
    assert (frame.run.step, frame.run.loss) == (8, 1.5)
    assert "1.5000" in text_of(frame)
    json.dumps(frame.to_json(), allow_nan=False)


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
def test_the_phase_is_what_follows_the_last_row(rows: list[dict[str, Any]], silent: float, phase: str) -> None:
    assert watch.current_phase(progress_after(*rows), silent) == phase


def test_without_always_save_checkpoint_only_improvements_are_saved() -> None:
    progress = progress_after({**FACTS, "config": {"eval_interval": 100, "always_save_checkpoint": False}}, step(99))
    progress.add(evaluation(100, best=False))
    assert watch.current_phase(progress, 0.0) == "train"
    progress.add(evaluation(100, best=True))
    assert watch.current_phase(progress, 0.0) == "save"


def test_a_spike_is_marked_with_its_phase() -> None:
    progress = progress_after(evaluation(0, memory=memory(GiB)), step(0, memory=memory(3 * GiB)),
                              step(1, memory=memory(3 * GiB + 10 * MiB)), evaluation(100, memory=memory(4 * GiB)))
    assert progress.spikes == [Spike("train", 1, 2 * GiB, 3 * GiB),
                               Spike("eval", 100, GiB - 10 * MiB, 4 * GiB)]
    assert progress.memory_history().marks == ((1, "train"), (3, "eval"))


def test_the_first_memory_of_a_new_process_is_no_spike() -> None:
    progress = progress_after(step(0, memory=memory(GiB)), {**FACTS, "start_step": 1}, step(1, memory=memory(3 * GiB)))
    assert progress.spikes == []


def test_the_planned_peak_is_the_highest_phase_of_the_plan(tmp_path: Path, no_gpu: None) -> None:
    phases = {"train": {"allocated_bytes": 2 * GiB, "reserved_bytes": 3 * GiB},
              "eval": {"allocated_bytes": GiB, "reserved_bytes": GiB}}
    write_run(tmp_path, FACTS, {"kind": "plan", "phases": phases, "reserve_limit_bytes": 5 * GiB},
              step(0, memory=memory(2 * GiB)), lock={"pid": 1, "host": "fast-box"})
    run = watch.Watcher(str(tmp_path)).read().run
    assert run is not None
    assert (run.planned_bytes, run.headroom_bytes) == (3 * GiB, 3 * GiB)  # a cap of 5 GiB, of which 2 are reserved


def test_the_last_plan_counts() -> None:
    first = {"kind": "plan", "phases": {"train": {"reserved_bytes": 50}}}
    last = {"kind": "plan", "phases": {"train": {"reserved_bytes": 5}, "eval": {"reserved_bytes": 7}},
            "reserve_limit_bytes": 9}
    progress = progress_after(first, last)
    assert (progress.planned_reserved, progress.reserve_limit) == (7, 9)


def test_a_recorded_run_on_a_gpu_reserved_what_was_forecast_in_every_phase() -> None:
    recorded = Path(__file__).parents[1] / "recorded" / "runs" / "h200" / "metrics.jsonl"
    peaks = progress_after(*metrics.read_metrics(recorded)).phase_peaks()
    assert [peak.phase for peak in peaks] == ["load", "first_eval", "first_train", "train", "eval", "save"]
    assert all(peak.reserved == peak.planned_reserved for peak in peaks)
