"""Builds .venv and installs fitgpt into it: `python tools/make_venv.py train` or `… train,dev`.

Versions come from constraints.txt. Where the Python that runs this already has a torch we support, that torch is
kept: .venv then looks into that Python's packages too, and only what is missing is installed.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = (2, 11)


def kept_packages() -> dict[str, str]:
    """The packages of this Python, if a torch we support is among them; else none."""
    installed = {_canonical(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()
                 if d.metadata["Name"]}
    numbers = re.match(r"(\d+)\.(\d+)", installed.get("torch", ""))
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        return {}
    return installed


def main(extras: str) -> None:
    home = ROOT / ".venv"
    kept = kept_packages()
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines()
            if _canonical(line.split("==")[0]) not in kept]
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    borrowed = Path(site.strip()) / "borrowed_packages.pth"
    if kept:
        print(f"Keeping torch {kept['torch']} of {sys.executable}.")
        torch_home = Path(str(importlib.metadata.distribution("torch").locate_file(""))).resolve()
        borrowed.write_text(f"{torch_home}\n")
    else:
        borrowed.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                        "-c", constraints.name, "-e", f"{ROOT}[{extras}]"], check=True)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


if __name__ == "__main__":
    main(sys.argv[1])
