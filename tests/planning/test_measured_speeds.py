"""The local store of measured speeds: later estimates use it, and it never makes a command fail."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.hardware import gpus
from fitgpt.planning import measured_speeds, speed
from fitgpt.planning.budget import platform_for

CARD = gpus.find("4070")
PLATFORM = platform_for(CARD)
RUN = RunConfig(n_layer=6, n_head=6, n_embd=384, block_size=512, batch_size=16, gradient_accumulation_steps=4,
                vocab_size=50304)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FITGPT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "speeds.jsonl"


def add(config: RunConfig, tokens_per_s: float, torch: str = "2.13.0", gpu: str = CARD.name) -> None:
    measured_speeds.add(gpu, resolve_run(config, PLATFORM), tokens_per_s, torch, "fit --measure")


def estimated(config: RunConfig) -> speed.SpeedEstimate:
    found = speed.estimate(config, CARD, PLATFORM)
    assert found is not None
    return found


def test_a_measured_run_is_estimated_as_measured_with_its_date() -> None:
    add(RUN, 71_234.5)
    found = estimated(RUN)
    assert found.low == found.high == found.likely == 71_234.5
    assert found.basis == (f"measured here on {date.today().isoformat()}: 71.2k tokens/s (fit --measure, torch 2.13.0)")


def test_other_settings_of_a_measured_shape_are_scaled_to_it() -> None:
    other = replace(RUN, batch_size=32, gradient_accumulation_steps=2)
    before = estimated(other)
    add(RUN, 0.8 * estimated(RUN).likely)
    after = estimated(other)
    assert after.likely == pytest.approx(0.8 * before.likely)
    assert after.error == pytest.approx(speed.SMALLEST_ERROR)
    assert before.error > 0.15
    assert "scaled to 1 run of this shape" in after.basis


def test_one_measured_shape_says_nothing_about_another_shape_or_gpu() -> None:
    before = estimated(replace(RUN, n_layer=12))
    add(RUN, 1000.0)
    add(replace(RUN, n_layer=12), 1000.0, gpu="RTX 3060 12GB")
    after = estimated(replace(RUN, n_layer=12))
    assert after[:3] == before[:3]
    assert "nothing of this shape was recorded on this GPU" in after.basis


def test_a_newer_measurement_replaces_an_older_one_of_the_same_run_gpu_and_torch(store: Path) -> None:
    for tokens_per_s, torch in ((1.0, "2.12.0"), (2.0, "2.13.0"), (3.0, "2.13.0")):
        add(RUN, tokens_per_s, torch)
    assert [row.tokens_per_s for row in measured_speeds.load(CARD.name)] == [3.0, 1.0]
    assert len(store.read_text().splitlines()) == 2


@pytest.mark.parametrize("damage", ["", "not JSON", "[1, 2]", '{"gpu": "RTX 4070"}', "[" * 100_000, "\0\xff",
                                    '{"gpu": "RTX 4070", "options": {"bach_size": 1}, "tokens_per_s": 1, "torch": "2", '
                                    '"date": "", "command": ""}'], ids=lambda text: text[:12])
def test_damaged_lines_are_skipped(store: Path, damage: str) -> None:
    add(RUN, 5.0)
    store.write_text(f"{damage}\n{store.read_text()}{damage}", encoding="latin-1")
    assert [row.tokens_per_s for row in measured_speeds.load(CARD.name)] == [5.0]
    assert estimated(RUN).likely == 5.0


@pytest.mark.parametrize("value", [0, -1, "fast", None, float("nan"), float("inf")])
def test_a_speed_that_is_none_is_skipped(store: Path, value: object) -> None:
    add(RUN, 5.0)
    store.write_text(json.dumps({**json.loads(store.read_text()), "tokens_per_s": value}) + "\n")
    assert measured_speeds.load(CARD.name) == []


def test_a_store_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FITGPT_HOME", str(tmp_path / "file" / "home"))
    add(RUN, 5.0)
    assert measured_speeds.load(CARD.name) == []


def test_the_store_is_in_the_data_directory_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FITGPT_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert measured_speeds.store_path() == Path("/data/fitgpt/speeds.jsonl")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert measured_speeds.store_path() == Path("/home/me/.local/share/fitgpt/speeds.jsonl")
