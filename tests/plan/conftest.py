"""How these tests ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking import Answer

from fitgpt.commands.main import main
from fitgpt.hardware import nvidia
from fitgpt.hardware.nvidia import Survey


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """fitgpt plan, in an empty folder, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey(reason="no NVIDIA driver is installed or loaded"))

    def ask(*argv: str, verb: str = "plan") -> Answer:
        code = main([verb, *argv])
        return Answer(code, *capsys.readouterr())

    return ask
