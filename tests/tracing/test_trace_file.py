"""A trace as a file, and the plan of a trace: without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands.main import main
from fitgpt.core.errors import STOPPED_AT_ONCE, UsageError
from fitgpt.core.units import MiB
from fitgpt.memory.platform import Platform
from fitgpt.memory.tape import Event
from fitgpt.planning.budget import target_for
from fitgpt.tracing import trace_file
from fitgpt.tracing.plan import PLANNED, plan_trace, possible_changes
from fitgpt.tracing.trace_file import EMPTIED, WORKSPACE, Kind, Trace, from_json, read, to_json, to_save

WEIGHT = Kind(400 * MiB, "weights", "aten.empty", "model", "train.py:3", "float32", (100, 1024, 1024))
STATE = Kind(800 * MiB, "optimizer", "aten.zeros_like", "", "train.py:9", "float32", (200, 1024, 1024))
SAVED_TENSORS = [Kind(300 * MiB, "activations", "aten.mm", f"model.layers.{layer}.mlp", "model.py:7", "float32",
              (75, 1024, 1024)) for layer in (0, 0, 1, 1)]
CUBLAS = Kind(32 * MiB, "workspace", WORKSPACE, "model", "model.py:7")


def small_trace() -> Trace:
    """Weights, a workspace, and two steps: two layers save two tensors each, the first step makes optimizer state."""
    tensors = (WEIGHT, CUBLAS, *SAVED_TENSORS, STATE, *SAVED_TENSORS)
    events = (0, 0, 0, 0, 0, 0, 6, 5, 4, 3, 0, EMPTIED, 0, 0, 0, 0, 11, 10, 9, 8)
    phases = (("load", 0), ("forward", 1), ("backward", 6), ("optimizer", 10), ("forward", 11), ("backward", 16))
    return Trace(("train.py", "--lr", "1"), tensors, events, phases, (12, 20), 104_857_600, (9, 0), 132, "2.11.0+cu130",
                 expandable=False, notes=("Stopped after 2 optimizer steps.",))


def test_a_trace_survives_the_file() -> None:
    assert from_json(to_json(small_trace())) == small_trace()


def test_a_changed_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "my.trace.json"
    path.write_text(to_json(small_trace()).replace("1.0", "2.0").replace('"params":104857600', '"params":1'))
    with pytest.raises(UsageError, match=r"is not a saved trace: its content does not match its own checksum"):
        read(str(path))


def test_a_trace_larger_than_the_limit_is_an_error_that_names_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 5 * MiB >= trace_file.LARGEST
    monkeypatch.setattr(trace_file, "LARGEST", 500)
    with pytest.raises(UsageError, match="a saved trace at most") as error:
        to_save(small_trace())
    assert error.value.fix.startswith("--steps 1")
    assert from_json(to_json(small_trace())) == small_trace()  # as the traced process hands it over


def test_its_tape_has_every_event() -> None:
    tape = small_trace().tape
    assert len(tape.events) == len(small_trace().events)
    assert tape.events[:2] == (Event(True, "1 model", "weights", 400 * MiB),
                               Event(True, "2 model", "workspace", 32 * MiB))
    assert tape.peak == (400 + 32 + 800 + 1200) * MiB


def test_another_gpu_has_its_own_workspace() -> None:
    ada = Platform((8, 9), "2.11")
    assert [kind.nbytes for kind in small_trace().on(ada).tensors if kind.op == WORKSPACE] == [ada.workspace]


def test_the_plan_has_phases_steps_owners_and_the_largest_tensors() -> None:
    plan = plan_trace(small_trace(), target_for("h200", "auto"))
    assert list(plan.forecast.phases) == ["load", "first_train", "train"]
    assert [step.allocated_bytes for step in plan.steps] == [1232 * MiB, 1232 * MiB]
    assert plan.peak.allocated_bytes == 2432 * MiB
    owners = [share.owner for share in plan.forecast.owners_at_peak]
    assert owners == ["activations", "optimizer", "weights", "workspace"]
    assert plan.tensors[0].what == "200 × 1,024 × 1,024 × float32"
    assert plan.tensors[0].source == "train.py:9"


def test_the_chart_shows_the_forward_pass_of_the_step_with_the_highest_peak() -> None:
    chart = plan_trace(small_trace(), target_for("h200", "auto")).one_step()
    assert chart.marks == ((4, "backward"),)
    assert [sum(point) // MiB for point in chart.points] == [1532, 1832, 2132, 2432, 2132, 1832, 1532, 1232]


def test_the_allocator_can_be_chosen() -> None:
    target = target_for("h200", "auto")
    for allocator, name in (("", "native"), ("expandable", "expandable segments")):
        assert plan_trace(small_trace(), target, allocator).forecast.assumes["allocator"] == name


def test_a_compiled_script_gets_a_range_and_not_the_eager_figure() -> None:
    plan = plan_trace(replace(small_trace(), compiled=True), target_for("h200", "auto"))
    low, high = plan.forecast.reserved_range
    assert low < plan.peak.reserved_bytes
    assert plan.forecast.needs == high
    assert plan.forecast.assumes["compile"] == "a range from the eager trace"


def test_batches_of_different_sizes_are_named() -> None:
    def notes(*tokens: int) -> tuple[str, ...]:
        batches = [Kind(8 * 4 * each, "data", "aten._to_copy", "", "train.py:5", "int64", (4, each)) for each in tokens]
        trace = replace(small_trace(), tensors=(*batches, STATE), events=(0, 0, 1, 0, 2), phases=(("forward", 0),),
                        steps=(1, 5))
        return plan_trace(trace, target_for("4070", "cuda", torch="2.11")).notes

    assert any(note.startswith("Batches differ in size: 4 × 512 to 4 × 1,024 were traced.")
               for note in notes(1024, 512))
    assert not any("Batches" in note for note in notes(512, 512))


def test_the_same_tensors_in_another_order_are_no_other_batch() -> None:
    shapes = (4, 8), (16,), (16,), (4, 8)
    kinds = [Kind(8, "data", "aten._to_copy", "", "train.py:5", "int64", shape) for shape in shapes]
    trace = replace(small_trace(), tensors=(*kinds, STATE), events=(0, 0, 2, 1, 0, 0, 4, 3, 0),
                    phases=(("forward", 0),), steps=(4, 9))
    assert not any("Batches" in note for note in plan_trace(trace, target_for("4070", "cuda", torch="2.11")).notes)


def test_changes_are_arithmetic_on_the_trace() -> None:
    trace = small_trace()
    peaks = {change: trace.resized(size).peak // MiB for change, _, size in possible_changes(trace)}
    assert peaks == {"half the batch size": 32 + 400 + 800 + 600,
                     "gradient checkpointing": 32 + 400 + 800 + 900,
                     "an 8-bit optimizer": 32 + 400 + 203 + 1200}


def fragmented() -> Trace:
    """The second tensor takes 60 of the 100 MiB that the first one leaves; the third one has no use for the rest."""
    tensors = tuple(SAVED_TENSORS[0]._replace(nbytes=size * MiB) for size in (100, 60, 150))
    return replace(small_trace(), tensors=tensors, events=(0, 1, 0, 0), phases=(("forward", 0),), steps=(4,))


def test_expandable_segments_are_a_change_where_the_memory_is_fragmented() -> None:
    found = {each.change: each.needs // MiB for each in plan_trace(fragmented(), target_for("4070", "auto")).changes}
    assert found["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"] == 210
    expandable = plan_trace(fragmented(), target_for("4070", "auto"), "expandable")
    assert not any("expandable" in each.change for each in expandable.changes)


def test_changes_of_a_compiled_script_are_stated_for_the_upper_end_of_the_range() -> None:
    eager, compiled = (plan_trace(replace(small_trace(), compiled=compiled, planned=compiled),
                                  target_for("h200", "auto")) for compiled in (False, True))
    needs = [{each.change: each.needs for each in plan.changes} for plan in (eager, compiled)]
    assert needs[1] == {change: int(PLANNED[1] * nbytes) for change, nbytes in needs[0].items()}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "my.trace.json"
    path.write_text(to_json(small_trace()), encoding="utf-8")
    return str(path)


def test_a_saved_trace_is_planned_for_another_gpu_and_other_processes(
        saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--gpu", "4070", "--json", saved]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["command"] == ["train.py", "--lr", "1"]
    assert set(plan) >= {"phases", "peak", "steps", "needs_bytes", "owners", "verdict", "tensors", "changes",
                         "not_seen"}
    assert main(["trace", "--gpu", "4070", "--others", "10GiB", saved]) == 1
    out = capsys.readouterr().out
    assert "Does not fit: needs 2.3" in out
    assert "half the batch size: needs" in out
    assert main(["trace", "--all-cards", saved]) == 0
    assert "RTX 4070" in capsys.readouterr().out
    page = Path(saved).with_name("step.html")
    assert main(["trace", saved, "--gpu", "3060", "--timeline", str(page)]) == 0  # no script: the options are ours
    assert "RTX 3060" in capsys.readouterr().out
    assert "<h1>train.py --lr 1, 104.86M parameters: one step</h1>" in page.read_text(encoding="utf-8")
    assert main(["trace", "--gpu", "3060", saved, "--lr", "1"]) == 2
    assert "--lr is not an option of `fitgpt trace`" in capsys.readouterr().err


def test_explain_names_the_tensor_of_a_message(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = ("CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0 has a total capacity of 2.00 GiB of which "
               "200.00 MiB is free. Including non-PyTorch memory, this process has 1.80 GiB memory in use. Of the "
               "allocated memory 1.63 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.")
    assert main(["explain", message, "--trace", saved]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "75 × 1,024 × 1,024 × float32, 300.0 MiB: activations of model.layers" in out
    assert "allocated at model.py:7" in out
    assert main(["explain", saved, "--gpu", "4070"]) == 0
    assert "The run fits" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("given", [["--gpu", "4070"], ["--gpu=4070"]])
def test_our_options_after_the_script_are_named_where_they_are_missing(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("", encoding="utf-8")
    assert main(["trace", str(script), *given, "--lr", "1"]) == 2
    err = capsys.readouterr().err
    assert f"--gpu stands after {script}" in err
    assert f"fitgpt trace {' '.join(given)} {script} --lr 1" in err


@pytest.mark.slow
def test_options_of_the_script_are_left_to_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])\nraise SystemExit(3)\n", encoding="utf-8")
    save = f"--save={tmp_path / 'my.trace.json'}"
    assert main(["trace", "--gpu", "4070", save, str(script), "--json", "--help"]) == 9
    captured = capfd.readouterr()
    assert "['--json', '--help']" in captured.err
    assert f"{script} ended with exit code 3." in captured.err
    assert captured.out == ""



@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals and process groups")
def test_ctrl_c_ends_a_script_that_is_traced_without_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import signal\nprint('ready', flush=True)\nsignal.pause()\n", encoding="utf-8")
    command = [sys.executable, "-m", "fitgpt", "trace", "--gpu", "4070", str(script)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to both processes
        printed, _ = process.communicate(timeout=60)
    assert printed == "fitgpt: stopped.\n"
    assert process.returncode == STOPPED_AT_ONCE
