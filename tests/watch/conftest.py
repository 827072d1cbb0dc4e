"""Fixtures: a driver with two GPUs, or none."""

from __future__ import annotations

import sys

import pytest

from fake_nvml import CountingNvml, FakeNvml


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> CountingNvml:
    fake = CountingNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=9))
