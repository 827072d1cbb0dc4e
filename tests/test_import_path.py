"""No command imports a Python file from the current directory, nor from a relative entry of PYTHONPATH.

Each command runs in a directory that has a file for every module of the standard library and of the packages that
fitgpt uses. A file that is imported says so in IMPORTED and ends its process.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import fitgpt
from fitgpt.commands.main import main
from fitgpt.config import command_options
from fitgpt.config.argv import walk
from fitgpt.config.fields import build
from fitgpt.config.run_config import RunConfig
from fitgpt.training.run import run
from tests.web_server import serving

pytestmark = pytest.mark.xdist_group("import path")  # one process makes the folder that these tests share

PACKAGES = ("torch", "numpy", "safetensors", "tiktoken", "regex", "requests", "rich", "pynvml", "starlette", "uvicorn",
            "anyio", "h11", "pyarrow", "wandb", "bitsandbytes", "triton", "sympy", "yaml", "transformers")
SHADOW = 'open("IMPORTED", "a").write(__name__ + "\\n")\nraise SystemExit(99)\n'
TINY = ("--dataset=mine", "--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=2",
        "--gradient_accumulation_steps=1", "--max_iters=2", "--eval_interval=2", "--eval_iters=1", "--device=cpu")
EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "train_gpt.py"
COMMANDS = {
    "prepare": ("texts.txt", "--name=prepared", "--tokenizer=gpt2", "--val_fraction=0.1", "--processes=2"),
    "plan": ("--gpu=4070", "--options", *TINY),
    "trace": ("--gpu=4070", "--steps=1", str(EXAMPLE), "--batch_size=2"),  # in another folder
    "fit": ("--gpu=4070", *TINY),
    "cards": (),
    "train": (*TINY, "--out_dir=new"),
    "rehearse": TINY,
    "record": (),
    "sample": ("run", "--num_samples=1", "--max_new_tokens=2"),
    "eval": ("run",),
    "export": ("run", "-o", "exported"),
    "demo": ("--steps=1", "--device=cpu"),
    "explain": ("--reading=6582MiB", "--process=4464MiB", "--gpu=4070"),
    "watch": ("run", "--once"),
    "doctor": (),
    "report": ("run", "-o", "report.html"),
    "serve": (),
    "completion": ("bash",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a dataset and a run. Every module is shadowed but those that Python itself loads before fitgpt."""
    folder = tmp_path_factory.mktemp("cloned")
    (folder / "texts.txt").write_text("Each word follows from the last one. " * 3000)
    with contextlib.chdir(folder):
        assert main(["prepare", "texts.txt", "--name=mine", "--tokenizer=bytes", "--val_fraction=0.1",
                     "--processes=1"]) == 0
        config = build(RunConfig, walk([*TINY, "--compile=False", "--out_dir=run"], RunConfig))
        run(config.to_dict(), [], lambda: False)
    loaded = subprocess.check_output([sys.executable, "-P", "-c", "import re, runpy, sys; print(*sys.modules)"],
                                     text=True).split()
    for name in {*sys.stdlib_module_names, *PACKAGES} - {*loaded, "sitecustomize", "usercustomize"}:
        (folder / f"{name}.py").write_text(SHADOW)
    return folder


@pytest.fixture
def environment(gpt2_files: Path, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TIKTOKEN_CACHE_DIR": str(gpt2_files), "XDG_CACHE_HOME": str(tmp_path)}


def imported(folder: Path) -> str:
    record = folder / "IMPORTED"
    names = record.read_text() if record.exists() else ""
    record.unlink(missing_ok=True)
    return names


LONG = ("demo", "trace", "rehearse", "sample", "export", "eval")  # they import torch, as train does


def test_every_command_is_tried() -> None:
    assert COMMANDS.keys() == command_options.COMMANDS.keys()


@pytest.mark.parametrize("command", [pytest.param(each, marks=[pytest.mark.ci] if each in LONG else [])
                                     for each in COMMANDS])
def test_a_command_imports_nothing_from_the_current_directory(command: str, folder: Path,
                                                              environment: dict[str, str]) -> None:
    """Started with `python -m`, which puts that directory first."""
    if command == "serve":
        with serving(folder) as (address, _):
            for question in ("form", "plan?gpu=4070", "exact?gpu=4070", "gpus?gpu=4070", "fixes?gpu=4070", "live"):
                urllib.request.urlopen(f"{address}api/{question}", timeout=60).read()
        assert imported(folder) == ""
        return
    ended = subprocess.run([sys.executable, "-m", "fitgpt", command, *COMMANDS[command]], cwd=folder, env=environment,
                           capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert imported(folder) == ""
    assert ended.returncode == 0 or (command == "record" and ended.returncode == 5), ended.stderr  # 5: no GPU


# Those that start other processes. A trailing colon leaves an empty entry: a common mistake.
@pytest.mark.parametrize(("command", "entries"), [("prepare", "."), ("train", os.pathsep), ("doctor", ".")])
def test_a_command_imports_nothing_from_relative_entries_of_pythonpath(
        command: str, entries: str, folder: Path, environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "fitgpt"  # as pip writes it
    script.write_text("import re, sys\nfrom fitgpt.__main__ import main\n"
                      "if __name__ == '__main__':\n    sys.exit(main())\n")
    elsewhere = {"--name=prepared": f"--out={tmp_path}/prepared", "--out_dir=new": f"--out_dir={tmp_path}/new"}
    flags = [elsewhere.get(flag, flag) for flag in COMMANDS[command]]
    ended = subprocess.run([sys.executable, str(script), command, *flags], cwd=folder,
                           env={**environment, "PYTHONPATH": entries}, capture_output=True, text=True, timeout=120)
    assert imported(folder) == ""
    assert ended.returncode == 0, ended.stderr
    assert f"PYTHONPATH={entries!r} has relative entries" in ended.stderr


def test_without_protection_the_shadowing_modules_are_imported(folder: Path) -> None:
    """So that the tests above can fail."""
    for module in ("json", "torch", "random"):
        assert subprocess.run([sys.executable, "-c", f"import {module}"], cwd=folder).returncode == 99
        assert imported(folder) == f"{module}\n"


def test_an_absolute_entry_of_pythonpath_stays_and_the_fix_can_be_typed(tmp_path: Path) -> None:
    for name in ("absolute", "a library"):
        (tmp_path / name).mkdir()
    (tmp_path / "absolute" / "torch.py").write_text("raise ImportError('torch of PYTHONPATH')")
    entries = os.pathsep.join(["a library", str(tmp_path / "absolute"), ".", "~/missing", ""])
    ended = subprocess.run([sys.executable, "-m", "fitgpt", "doctor"], cwd=tmp_path, capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": entries})
    assert "torch of PYTHONPATH" in ended.stdout
    fix = next(line.strip() for line in ended.stderr.splitlines() if line.strip().startswith("export"))
    assert shlex.split(fix)[1] == f"PYTHONPATH={tmp_path / 'a library'}{os.pathsep}{tmp_path / 'absolute'}"


def test_without_an_installation_child_processes_find_fitgpt_where_the_command_did(tmp_path: Path) -> None:
    """With the Python that the virtual environment was made from, which has no fitgpt."""
    (tmp_path / "fitgpt").symlink_to(Path(fitgpt.__file__).parent)
    ended = subprocess.run([sys._base_executable, "-m", "fitgpt", "doctor"], cwd=tmp_path,  # type: ignore[attr-defined]
                           capture_output=True, text=True)
    assert "No module named" not in ended.stdout + ended.stderr
    assert "ok     torch" in ended.stdout or "note   training" in ended.stdout


def test_every_child_process_is_started_with_a_safe_path() -> None:
    """-P stands right after the interpreter, wherever one is started."""
    commands = []
    for file in Path(fitgpt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            parts = node.elts if isinstance(node, ast.List) else node.args if isinstance(node, ast.Call) else []
            if len(parts) > 1 and ast.unparse(parts[0]) == "sys.executable":
                commands.append((file.name, ast.unparse(parts[1])))
    assert len(commands) >= 3
    assert {flag for _, flag in commands} == {"'-P'"}
