"""The text of the findings of `fitgpt doctor`."""

from __future__ import annotations

import pytest

from fitgpt.hardware.diagnostics import Finding
from fitgpt.show.diagnosis_text import finding_lines


@pytest.mark.parametrize("width", [0, 40, 80, 300])
def test_findings_fit_the_width_and_commands_stay_whole(width: int) -> None:
    command = "pip install --force-reinstall torch==2.13.0 and-then-some-words-that-go-beyond-forty-columns"
    finding = Finding("wrong", "allocator", "word " * 60 + "\x1b[2J", command)
    lines = [line.text for line in finding_lines(finding, width)]
    assert max(len(line) for line in lines[:-1]) <= max(width, 40)
    assert lines[-1].strip() == f"→ {command}"
    assert all(line.isprintable() for line in lines)
