"""The command that installs an optional part of fitgpt, such as `train` or `web`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[3]  # of the repository, if this is one


def install_command(extra: str) -> str:
    """For the Python that runs: `pip` alone where that is its own."""
    own = os.path.dirname(shutil.which("pip") or "") == os.path.dirname(sys.executable)
    pip = "pip" if own else f"{shlex.quote(sys.executable)} -m pip"
    return f"{pip} install {packages(extra)}"


def packages(extra: str) -> str:
    """What `pip install` takes. From the repository, the extra, with the path where another folder is the current one;
    from a wheel, which no index may have, the packages that the extra names."""
    if (ROOT / "pyproject.toml").is_file():
        is_current = os.path.isfile("pyproject.toml") and os.path.samefile("pyproject.toml", ROOT / "pyproject.toml")
        return shlex.join(["-e", f"{'.' if is_current else ROOT}[{extra}]"])
    try:
        required = metadata.requires("fitgpt") or []
    except metadata.PackageNotFoundError:
        required = []
    wanted = [name.strip() for name, _, condition in (each.partition(";") for each in required)
              if re.search(rf"extra == .{extra}.", condition)]
    return shlex.join(wanted or [f"fitgpt[{extra}]"])
