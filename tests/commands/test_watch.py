"""`fitgpt watch`: JSON, finished and stopped runs, wrong targets."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands.main import main
from fitgpt.config.argv import walk
from fitgpt.config.fields import build
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import DeviceError, UsageError
from fitgpt.core.units import MiB
from fitgpt.runs import watch
from tests.fake_nvml import CountingNvml
from tests.helpers import tiny_config
from tests.watch_frames import FACTS, FRAME, state_of, step, write_run


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
    output = capsys.readouterr().out
    assert re.search(r"run +\S.*? finished.*\nstep", output, re.DOTALL)
    assert re.search(r"step +4 of 4 +100%", output)
    assert re.search(r"loss +\d\.\d{4} +validation \d\.\d{4}", output)
    assert "none: the run trains on the CPU" in output


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
