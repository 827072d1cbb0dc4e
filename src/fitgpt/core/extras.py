"""The command that installs an optional part of fitgpt, such as `train` or `web`."""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from pathlib import Path


def install_command(extra: str) -> str:
    """From the repository, the extra; from a wheel, which no index may have, the packages that the extra names."""
    if (Path(__file__).parents[3] / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]'"
    try:
        required = metadata.requires("fitgpt") or []
    except metadata.PackageNotFoundError:
        required = []
    wanted = [name.strip() for name, _, condition in (each.partition(";") for each in required)
              if re.search(rf"extra == .{extra}.", condition)]
    return shlex.join(["pip", "install", *(wanted or [f"fitgpt[{extra}]"])])
