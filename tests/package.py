"""The built package, installed without the source tree: sdist, wheel, and its commands on every Python it supports.

    python -m pytest tests/package.py     a minute or two; not part of `make test`, but of .ci/run
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest

import fitgpt

ROOT = Path(__file__).parents[1]
SUPPORTED = ("3.11", "3.12", "3.13")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
OOM = ROOT / "docs" / "examples" / "oom_77m.txt"
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked sdist, as `python -m build` does."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    return build("build_wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def build(hook: str, source: Path, target: Path) -> Path:
    done = subprocess.run([sys.executable, "-c", BUILD, hook, str(target)], cwd=source, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return target / done.stdout.splitlines()[-1]


def interpreter(version: str) -> str | None:
    """A Python of that version on this machine, which starts."""
    found = [sys.executable] if version == HERE else []
    found += [path for path in (shutil.which(f"python{version}"),) if path]
    found += map(str, sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")))
    for path in found:
        done = subprocess.run([path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
                              capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return path
    return None


class Installed:
    """An environment with the wheel. Its dependencies are those of the environment that runs the tests: pure Python."""

    def __init__(self, folder: Path, python: str, wheel: Path) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
        self.python = folder / "bin" / "python"
        purelib = self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        Path(purelib, "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
        subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python",
                        str(self.python), "install", "--no-index", "--no-deps", "--ignore-installed", str(wheel)],
                       check=True, timeout=120)
        self.folder = folder / "empty"
        self.folder.mkdir()
        self.command = str(folder / "bin" / "fitgpt")

    def run(self, *argv: str, code: int = 0) -> str:
        program = [self.command] if argv[0] != "-c" else [str(self.python)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([*program, *argv], capture_output=True, text=True, timeout=200, env=environment,
                              cwd=getattr(self, "folder", None), check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), sys.executable, wheel)


# ---- what is inside


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {path.relative_to(source).as_posix() for path in (source / "fitgpt").rglob("*")
                if path.is_file() and "__pycache__" not in path.parts}
    expected |= {f"fitgpt/example_configs/{path.name}" for path in (ROOT / "config").glob("*.py")}
    with zipfile.ZipFile(wheel) as packed:
        inside = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert inside == expected


def test_the_version_has_one_source(wheel: Path, sdist: Path) -> None:
    assert wheel.name == f"fitgpt-{fitgpt.__version__}-py3-none-any.whl"
    assert sdist.name == f"fitgpt-{fitgpt.__version__}.tar.gz"
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_a_package_that_names_no_repository_is_rejected_by_the_index(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        metadata = packed.read(f"fitgpt-{fitgpt.__version__}.dist-info/METADATA").decode()
    assert ("Project-URL: " in metadata) != ("Classifier: Private :: Do Not Upload" in metadata)


# ---- installed


@pytest.mark.parametrize("version", SUPPORTED)
def test_the_commands_without_torch_work_on_each_python(version: str, wheel: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    there = Installed(tmp_path / "venv", python, wheel)
    assert there.run("-c", "import fitgpt; print(fitgpt.__file__)").startswith(str(tmp_path))
    assert there.run("--version") == f"fitgpt {fitgpt.__version__}\n"
    assert json.loads(there.run("plan", "gpt2_124m", "--gpu", "colab t4", "--json"))["fits"]
    assert "RTX 4070 Ti" in there.run("cards", "4070")
    assert "OutOfMemoryError" not in there.run("explain", str(OOM), "config/notes_77m.py", "--trainer=nanogpt")
    assert "--batch_size" in there.run("fit", "config/gpt2_124m.py", "--gpu", "4070")


def test_the_page_is_served(installed: Installed) -> None:
    process = subprocess.Popen([installed.command, "serve", "--no-browser", "--port=0"], cwd=installed.folder,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                               env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    try:
        assert process.stdout is not None
        address = re.search(r"http://\S+/", process.stdout.readline())
        assert address
        with urllib.request.urlopen(address[0], timeout=30) as page:
            text = page.read().decode()
        for name in re.findall(r'(?:src|href)="(/?[\w/.-]+\.(?:js|css|svg))"', text):
            with urllib.request.urlopen(address[0] + name.lstrip("/"), timeout=30) as part:
                assert part.read()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)


def test_the_demo_trains_and_samples(installed: Installed) -> None:
    output = installed.run("demo", "--steps=3", "--device=cpu")
    assert (installed.folder / "runs" / "demo" / "metrics.jsonl").is_file()
    assert "fitgpt sample" in output


def test_a_missing_package_is_named_with_a_command_that_needs_no_source_tree(wheel: Path, tmp_path: Path) -> None:
    there = Installed(tmp_path / "venv", sys.executable, wheel)
    Path(there.run("-c", "import fitgpt, os; print(os.path.dirname(os.path.dirname(fitgpt.__file__)))").strip(),
         "dependencies.pth").unlink()
    output = there.run("train", "gpt2_124m", code=2)
    assert "pip install 'torch>=2.11' 'numpy>=1.26'" in output
    assert "-e '.[" not in output
