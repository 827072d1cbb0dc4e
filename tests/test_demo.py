"""`fitgpt demo`: the run it promises, where it puts it, and that the commands it ends with can be typed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fitgpt.commands import demo
from fitgpt.commands.main import VERBS, options_of
from fitgpt.config.command_options import DemoOptions, PrepareOptions
from fitgpt.config.fields import Assignment, build, walk
from fitgpt.config.run_config import RunConfig, resolve
from fitgpt.core.errors import DataError, DeviceError, DoesNotFit
from fitgpt.data.header import find
from fitgpt.runs.folder import step_folders
from fitgpt.runs.metrics import read_metrics

CONFIG_FILE = Path(__file__).parent.parent / "config" / "demo.py"


def test_the_demo_is_the_run_of_its_config_file() -> None:
    """All of it: a clone has config/, an installed package only what is in the code."""
    told, _ = resolve(walk([str(CONFIG_FILE)], RunConfig))
    assert RunConfig(**demo.CONFIG, out_dir=DemoOptions().out_dir) == told


def test_the_data_of_the_demo_can_also_be_made_by_hand() -> None:
    """The recipe in the config file and in the refusal where the data is missing: `prepare` would not mix two."""
    with pytest.raises(DataError) as refused:
        find("nowhere/stdlib")
    for told in (CONFIG_FILE.read_text(encoding="utf-8"), refused.value.fix):
        recipe = re.search(r"fitgpt prepare (.*)", told)
        assert recipe
        assert build(PrepareOptions, walk(recipe[1].split(), PrepareOptions, config_files=False)) == demo.DATA


def test_three_steps_from_nothing_to_a_sample_and_the_next_commands(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-m", "fitgpt", "demo", "--steps=3", "--out_dir=my runs/demo",
                            "--device=cpu"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    run = tmp_path / "my runs" / "demo"
    assert [each.step for each in step_folders(run / "checkpoints")] == [3]
    losses = [row["losses"][1]["mean"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "eval"]
    assert losses[1] < losses[0]
    trained, _, rest = ended.stdout.partition("What it writes now")
    assert f"best val loss {losses[1]:.4f}" in trained
    assert "The run is in my runs/demo." in trained
    written, _, closing = rest.partition("What to type next:")
    assert "\ndef " in written
    assert "fitgpt sample 'my runs/demo'" in closing


def test_what_to_type_next_can_be_typed() -> None:
    lines = demo.next_commands("my runs/demo", 400)
    assert [shlex.split(line)[1] for line in lines] == ["sample", "train", "eval", "export", "prepare", "train"]
    for line in lines:
        command, *argv = shlex.split(line, comments=True)
        assert command == "fitgpt"
        verb = VERBS[argv[0]]
        typed = [str(CONFIG_FILE) if word.endswith(".py") else word for word in argv[1:]]
        told = walk(typed, options_of(verb), config_files=verb.config_files)
        if not verb.raw:
            build(options_of(verb), told)
        if verb.name not in ("prepare", "train"):
            assert "my runs/demo" in [each.value for each in told]


def test_an_earlier_demo_is_never_overwritten(tmp_path: Path) -> None:
    wanted = str(tmp_path / "demo")
    assert demo.free_folder(wanted) == wanted
    Path(wanted).mkdir()
    Path(f"{wanted}-2").touch()
    assert demo.free_folder(wanted) == f"{wanted}-3"


CANNOT_USE = DeviceError("The driver sees a GPU that this torch cannot use.", "pip install another-torch")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """The devices that the demo tries to train on: all but the CPU refuse, with the error that is asked for."""
    devices: list[str] = []

    def train(assignments: list[Assignment]) -> int:
        devices.append(next(each.value for each in assignments if each.key == "device"))
        if devices[-1] != "cpu":
            raise getattr(request, "param", CANNOT_USE)
        return 0

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "prepare", lambda options: 0)
    monkeypatch.setattr(demo, "sample", lambda options: devices.append(f"sample on {options.device}"))
    return devices


def test_a_gpu_that_cannot_be_used_is_named_first_and_last_and_the_demo_goes_on_without(
        tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.demo(DemoOptions(out_dir=str(tmp_path / "demo"))) == 0
    assert trained == ["auto", "cpu", "sample on cpu"]
    assert len(re.findall(r"torch cannot use\.\npip install another-torch\n", capsys.readouterr().err)) == 2


@pytest.mark.parametrize("trained", [DoesNotFit("Nothing fits: the least memory this run can live in is more.",
                                                "fitgpt doctor")], indirect=True)
def test_a_card_that_is_too_full_is_named_and_the_demo_goes_on_without(
        tmp_path: Path, trained: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.demo(DemoOptions(out_dir=str(tmp_path / "demo"))) == 0
    assert trained == ["auto", "cpu", "sample on cpu"]
    assert capsys.readouterr().err.count("Nothing fits") == 2
    with pytest.raises(DoesNotFit):
        demo.demo(DemoOptions(out_dir=str(tmp_path / "demo"), device="cuda"))


def test_a_gpu_that_was_asked_for_by_name_is_not_replaced(tmp_path: Path, trained: list[str]) -> None:
    with pytest.raises(DeviceError):
        demo.demo(DemoOptions(out_dir=str(tmp_path / "demo"), device="cuda"))
    assert trained == ["cuda"]
