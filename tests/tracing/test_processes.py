"""Several processes: launchers, children that a script starts, torch.distributed; and trackers, which log nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fitgpt.commands.main import main
from fitgpt.core.errors import CannotTrace
from fitgpt.tracing import trackers
from fitgpt.tracing.processes import check_command, training_child
from fitgpt.tracing.script import run
from fitgpt.tracing.trace_file import Trace

TRAIN = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""
GROUP = """
import os
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
"""


def traced(folder: Path, before: str) -> Trace:
    script = folder / "train.py"
    script.write_text(before + TRAIN)
    try:
        return run([str(script)], "4070", "", "", 2, "2.13")
    finally:
        sys.path.remove(str(folder))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


# ---- the command line


@pytest.mark.reproduction
@pytest.mark.parametrize(("line", "code", "fix"), [
    ("torchrun --nproc_per_node=2 train.py --lr 1", 8, "fitgpt trace --gpu 4070 train.py --lr 1"),
    ("accelerate launch --config_file fsdp.yaml train.py", 8, "fitgpt trace --gpu 4070 train.py"),
    ("-m accelerate.commands.launch train.py --lr 1", 8, "fitgpt trace --gpu 4070 train.py --lr 1"),
    ("-m torch.distributed.run --nproc_per_node=1 -m package.train --lr 1", 8,
     "fitgpt trace --gpu 4070 -m package.train --lr 1"),
    ("python train.py --lr 1", 2, "fitgpt trace --gpu 4070 train.py --lr 1"),
    ("trian.py", 2, "fitgpt trace --gpu 4070 train.py"),
])
def test_a_launcher_gets_the_command_that_traces_its_script(line: str, code: int, fix: str,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--gpu", "4070", *line.split()]) == code
    assert capsys.readouterr().err.splitlines()[-1].strip() == fix


@pytest.mark.reproduction
@pytest.mark.parametrize("gpu", ["2x4070", "4070,4070"])
def test_several_gpus_are_not_planned_as_one(gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", gpu]) == 2
    assert "--gpus 2x4070" in capsys.readouterr().err
    assert main(["trace", "--gpu", gpu, "train.py"]) == 2
    assert "a trace is of one" in capsys.readouterr().err


# ---- children


@pytest.mark.reproduction
@pytest.mark.parametrize("start", [
    "subprocess.run([sys.executable, '{child}', '--lr', '1'])",
    "subprocess.run([sys.executable, '-m', 'torch.distributed.run', '{child}', '--lr', '1'])",
    "subprocess.run('cd . && torchrun {child} --lr 1', shell=True)",
    "os.system(sys.executable + ' -W ignore {child} --lr 1')",
    "os.execv(sys.executable, [sys.executable, '{child}', '--lr', '1'])",
    "subprocess.run([sys.executable, '-c', 'import os; import torch'])",
], ids=["script", "launcher module", "launcher in a shell", "os.system", "os.exec", "code"])
@pytest.mark.parametrize("caught", [False, True], ids=["", "caught"])
def test_a_child_that_trains_is_not_started_and_ends_the_trace(tmp_path: Path, start: str, caught: bool) -> None:
    child = tmp_path / "child.py"
    child.write_text("import torch\nopen('started', 'w')\n")
    code = start.format(child=child)
    code = f"import os, subprocess, sys\ntry: {code}\nexcept Exception: pass\n" if caught else \
        f"import os, subprocess, sys\n{code}\n"
    with pytest.raises(CannotTrace, match="starts a process that trains") as raised:
        traced(tmp_path, code)
    assert "'-c'" in start or raised.value.fix.endswith(f"fitgpt trace --gpu 4070 {child} --lr 1")
    assert not Path("started").exists()


def test_a_script_may_be_called_like_a_launcher(tmp_path: Path) -> None:
    script = tmp_path / "composer.py"
    script.write_text("")
    check_command([str(script)], [])


def test_other_children_run(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("import json\nopen('made', 'w')\n")
    assert traced(tmp_path, "import subprocess, sys\nsubprocess.run(['git', '--version'], check=True)\n"
                  f"subprocess.run([sys.executable, 'data.py'], check=True, cwd={str(tmp_path)!r})\n").steps
    assert (tmp_path / "made").exists()


def test_after_a_trace_any_child_runs(tmp_path: Path) -> None:
    traced(tmp_path, "")
    assert subprocess.run([sys.executable, "-c", "raise SystemExit\nimport torch"], check=False).returncode == 0


@pytest.mark.parametrize("command", [
    [sys.executable, "-c", "from multiprocessing.resource_tracker import main;main(5)"],
    [sys.executable, "-s", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=7)"],
    [sys.executable, str(Path(torch.__file__).parent / "_inductor" / "compile_worker" / "__main__.py")],
    [sys.executable, "-m", "pip", "list"], [sys.executable], ["gcc", "torch.c"], "git status; echo 'it", [],
    ["accelerate", "env"], [sys.executable, "-m", "accelerate", "config"],
])
def test_helpers_of_multiprocessing_the_compiler_and_programs_are_no_training(command: list[str]) -> None:
    assert training_child(command) == []


@pytest.mark.reproduction
def test_children_get_the_environment_that_the_user_had(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "child.py").write_text("import beside, os, sys\nassert not sys.flags.safe_path\n"
                                       "assert 'PYTHONSAFEPATH' not in os.environ\n"
                                       "assert os.environ['PYTHONPATH'] == 'relative'\n")
    (tmp_path / "train.py").write_text("import subprocess, sys\n"
                                       "subprocess.run([sys.executable, 'child.py'], check=True)\n" + TRAIN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([Path(sys.executable).with_name("fitgpt"), "trace", "--gpu", "4070", "train.py"],
                          cwd=tmp_path, env={**environment, "PYTHONPATH": "relative"}, check=False,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- torch.distributed


@pytest.mark.reproduction
@pytest.mark.parametrize(("code", "text"), [
    ("dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=4)", "one of 4 processes"),
    ("dist.init_process_group('gloo', init_method='tcp://127.0.0.1:29871', rank=0, world_size=2)",
     "one of 2 processes"),
    ("os.environ.update(RANK='0', WORLD_SIZE='2', MASTER_ADDR='localhost', MASTER_PORT='29871')\n"
     "dist.init_process_group('gloo')", "one of 2 processes"),
    ("dist.init_process_group('gloo')", "processes that torchrun starts"),
    ("dist.init_process_group('nccl', init_method='tcp://127.0.0.1:29871', rank=0, world_size=1)", "NCCL"),
    ("import torch\ntorch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())",
     "DistributedDataParallel"),
    ("from torch.distributed.device_mesh import init_device_mesh\n"
     "dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=1)\ninit_device_mesh('cuda', (1,))",
     "DeviceMesh"),
    ("import torch\nfrom torch.distributed.fsdp import fully_shard\n"
     "dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=1)\n"
     "fully_shard(torch.nn.Linear(8, 8).cuda())", "DeviceMesh"),
], ids=["fake", "tcp", "environment", "torchrun's environment is missing", "NCCL", "DDP", "mesh", "FSDP2"])
def test_torch_distributed_ends_the_trace_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str,
                                                            text: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    with pytest.raises(CannotTrace, match=text):
        traced(tmp_path, GROUP + code + "\n")


def test_a_process_group_of_one_process_is_traced(tmp_path: Path) -> None:
    group = f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
    assert len(traced(tmp_path, GROUP + group + "dist.barrier()\n").steps) == 2


# ---- trackers


def test_trackers_log_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("def init(*args, mode='online', **options): return mode\n")
    events = tmp_path / "tensorboardX"
    events.mkdir()
    (events / "__init__.py").write_text("")
    (events / "event_file_writer.py").write_text(
        "class EventFileWriter:\n    def __init__(self, logdir): open(logdir, 'w')\n"
        "    def get_logdir(self): return self._logdir\n    def add_event(self, event): raise OSError\n")
    for name in trackers.VARIABLES:
        monkeypatch.setenv(name, "as the user has it")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    trackers.turn_off(str(tmp_path))
    import tensorboardX.event_file_writer as board
    import wandb

    assert wandb.init(mode="online") == "disabled"
    assert os.environ["WANDB_MODE"] == "disabled"
    writer = board.EventFileWriter(str(tmp_path / "events"))
    writer.add_event(1)
    assert writer.get_logdir() == str(tmp_path / "events")
    assert not (tmp_path / "events").exists()
    for name in ("wandb", "tensorboardX", "tensorboardX.event_file_writer"):
        sys.modules.pop(name)
