"""`fitgpt doctor`: exit codes and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fitgpt.commands.doctor import CHECKPOINT_BYTES, CHECKPOINTS
from fitgpt.commands.main import main
from fitgpt.hardware import diagnostics
from fitgpt.show.diagnosis_text import finding_lines
from tests.fake_nvml import FakeNvml
from tests.hardware.test_diagnostics import FINE
from tests.helpers import without_packages
from tests.watch_frames import FACTS, step, write_run

TRAINING_PACKAGES = ("torch", "numpy", "safetensors", "tiktoken")


def run_fitgpt(*argv: str, cwd: Path | None = None, **environment: str) -> SimpleNamespace:
    ended = subprocess.run([sys.executable, "-m", "fitgpt", *argv], capture_output=True, text=True, timeout=120,
                           cwd=cwd, env={**os.environ, **environment})
    return SimpleNamespace(code=ended.returncode, out=ended.stdout, err=ended.stderr)


def run_doctor(*argv: str, **environment: str) -> SimpleNamespace:
    return run_fitgpt("doctor", *argv, **environment)


def test_without_torch_doctor_has_one_note_and_exits_with_0(tmp_path: Path) -> None:
    environment = without_packages(tmp_path, *TRAINING_PACKAGES)
    seen = run_doctor(**environment)
    assert (seen.code, seen.err) == (0, "")
    lines = seen.out.splitlines()
    assert [line for line in lines if "not installed" in line] == [
        "note   training   not installed; plan, fit, explain, cards, watch, report work"]
    assert lines[-3].endswith("-m pip install -e '.[train]'")
    assert lines[-1] == "Planning works here."
    assert "wrong" not in seen.out
    assert json.loads(run_doctor("--json", **environment).out)["trains"] is False


def test_without_torch_the_commands_that_doctor_names_work_and_train_names_the_install(tmp_path: Path) -> None:
    environment = without_packages(tmp_path, *TRAINING_PACKAGES)
    config = str(Path(__file__).parents[2] / "config" / "gpt2_124m.py")
    write_run(tmp_path / "runs" / "mine", FACTS, step(5))
    for argv in (["plan", config, "--gpu=4070"], ["fit", config, "--gpu=4070"], ["cards"], ["watch", "--once"],
                 ["explain", config, "--gpu=4070"], ["report", "runs/mine"]):
        seen = run_fitgpt(*argv, cwd=tmp_path, **environment)
        assert (seen.code, seen.err) == (0, ""), argv
    seen = run_fitgpt("train", config, cwd=tmp_path, **environment)  # there is no data either
    assert seen.code == 2
    assert "torch, which is not installed" in seen.err
    root = Path(__file__).parents[2]  # not the current folder
    assert f"pip install -e '{root}[train]'" in seen.err


def test_no_subject_is_too_long_for_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = dict.fromkeys(("numpy", "safetensors"), diagnostics.NOT_INSTALLED)
    monkeypatch.setattr(diagnostics, "ask_torch", lambda environment: {**FINE, "packages": problems})
    for finding in diagnostics.examine(CHECKPOINT_BYTES, CHECKPOINTS):
        assert " " in finding_lines(finding, 80)[0].text[7 + len(finding.subject)], finding


def test_the_installed_torch_is_tested_and_sets_the_exit_code() -> None:
    seen = run_doctor("--json")
    document = json.loads(seen.out)
    assert document["schema"] == 1
    assert seen.code == (0 if document["trains"] else 5)
    subjects = {finding["subject"] for finding in document["findings"]}
    assert {"python", "GPU", "allocator", "disk", "torch", "packages"} <= subjects
    assert seen.err == ""


def test_a_torch_that_fails_on_import_exits_with_5_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    seen = run_doctor(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert seen.code == 5
    assert "torch does not load: libcudart.so.12" in " ".join(seen.out.split())
    assert "Fix what is marked wrong first." in seen.out
    assert "Traceback" not in seen.out + seen.err


def test_a_gpu_that_torch_cannot_use_exits_with_5(monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    error = ["The driver lists NVIDIA H200, but torch is for CPUs only.", "Fix"]
    monkeypatch.setattr(diagnostics, "ask_torch", lambda environment: {**FINE, "cuda": None, "device_error": error})
    assert main(["doctor"]) == 5
    output = capsys.readouterr().out
    assert "wrong  device" in output
    assert "NVIDIA H200" in output
    assert "→ Fix" in output


def test_without_a_gpu_training_can_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=9))
    monkeypatch.setattr(diagnostics, "ask_torch", lambda environment: {**FINE, "device": "cpu", "name": "Ryzen"})
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "note   GPU" in output
    assert "Training can run here." in output


def test_a_gpu_that_does_not_exist_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    error = ["CUDA_VISIBLE_DEVICES='7'", ""]
    monkeypatch.setattr(diagnostics, "ask_torch", lambda environment: {**FINE, "device_error": error})
    wrong = [finding for finding in diagnostics.examine(CHECKPOINT_BYTES, CHECKPOINTS) if finding.verdict == "wrong"]
    assert len(wrong) == 1
    assert "CUDA_VISIBLE_DEVICES='7'" in wrong[0].what


def test_doctor_itself_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('x')\n")
    script = ("import sys, fitgpt.commands.main\nfitgpt.commands.main.main(['doctor', '--json'])\n"
              "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, timeout=120)
    assert ended.returncode == 0


def test_a_dataset_is_verified_and_a_damaged_one_exits_with_3(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Path("a.txt").write_text("some text\n" * 1000)
    prepare = ["prepare", "a.txt", "--name=a", "--tokenizer=bytes", "--val_fraction=0.1"]
    assert main(prepare) == main(["doctor", "a"]) == 0
    assert "every checksum matches" in capsys.readouterr().out
    shard = Path("data/a/train-00000.shard")
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    assert main(["doctor", "a"]) == main(prepare) == 3
    assert "train-00000.shard is damaged" in capsys.readouterr().err
