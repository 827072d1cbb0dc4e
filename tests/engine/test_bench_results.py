"""Gradients, losses, speed and memory of the engine, as recorded in bench/results: the figures of the docs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fitgpt.config.memory_savers import POLICIES
from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import GiB, MiB
from fitgpt.memory.platform import Platform
from fitgpt.planning.forecast import forecast

ROOT = Path(__file__).resolve().parents[2]


def recorded(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / "results" / name).read_text())  # type: ignore[no-any-return]


def test_gradients_are_as_near_to_float64_as_plain_ones_in_every_dtype_and_recompute_level() -> None:
    rows = recorded("gradients_h200.json")["rows"]
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16", "float32"}
    for row in rows:
        assert set(row["ours"]) == {*POLICIES, *(f"{policy}, compiled" for policy in POLICIES)}
        for policy, error in row["ours"].items():
            assert error <= 1.5 * row["plain"], (row["shape"], row["dtype"], policy)


def test_triton_kernels_agree_with_plain_torch() -> None:
    found = recorded("gradients_h200.json")
    assert {row["kernel"].split()[0] for row in found["others"]} == {"norm_backward_", "rounded_adamw_"}
    assert max(row["difference"] for row in found["others"]) < 1e-4
    assert all(row["loss"] < 1e-5 and row["gradient"] < 1e-4 for row in found["kernel"])


def mean_of_last(losses: list[float], steps: int = 50) -> float:
    return sum(losses[-steps:]) / steps


def test_after_500_steps_exact_savers_have_the_plain_loss_and_lossy_ones_are_near() -> None:
    curves = recorded("curves_h200.json")["curves"]
    assert {len(curve["losses"]) for curve in curves.values()} == {500}
    plain = curves["plain"]
    assert plain["losses"][0] > mean_of_last(plain["losses"]) + 5
    # The stated distances, in nats a token.
    for name, train, val in (("exact", 0.02, 0.01), ("lossy", 0.06, 0.03)):
        assert abs(mean_of_last(curves[name]["losses"]) - mean_of_last(plain["losses"])) < train
        assert abs(curves[name]["val_loss"] - plain["val_loss"]) < val


def test_the_picture_of_the_curves_shows_the_recorded_results() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "curves.py", "--check"], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("case", "contender", "reserved", "ratio"), [
    ("124m", "exact", 5.0, 1.00), ("124m", "lossy", 3.6, 1.05), ("124m", "lossy small", 2.6, 1.00),
    ("77m", "exact", 4.5, 1.00), ("30m", "exact", 1.5, 1.00)])
def test_the_engine_uses_less_memory_and_is_no_slower_than_plain_torch(case: str, contender: str, reserved: float,
                                                                       ratio: float) -> None:
    row = next(row for row in recorded(f"engine_{case}_h200.json")["rows"] if row["contender"] == contender)
    assert row["reserved_with_eval"] <= reserved * GiB
    assert row["ratio_to_plain"] >= ratio
    assert row["first_step_s"] < 20


@pytest.mark.parametrize("case", ["124m", "77m", "30m"])
def test_with_full_recomputation_a_run_needs_little_more_than_its_weights_and_states(case: str) -> None:
    """16 bytes per parameter, the head's copy in half precision, each layer's input, the largest transient tensors,
    and the products' workspaces; forecast for an H200, and measured where it was."""
    results = recorded(f"engine_{case}_h200.json")
    shape = {key: value for key, value in results["case"].items() if key != "accumulation"}
    config = RunConfig(**shape, gradient_accumulation_steps=results["case"]["accumulation"], vocab_size=50304,
                       saved_activations="input", compile=True)
    rows, width, vocab = config.batch_size * config.block_size, config.n_embd, config.vocab_size
    piece = 2 * 2048 * vocab + 2 * rows * width + 4 * vocab * width
    least = (16 * config.gpt_config().count_params() + 2 * vocab * width + 4 * config.n_layer * rows * width
             + max(38 * rows * width, piece) + 2 * 32 * MiB)
    found = forecast(config, Platform((9, 0), "2.11")).phases["train"].reserved
    measured = [row["reserved"] for row in results["rows"] if row["contender"] == "exact smallest"]
    assert max(found, *measured, 0) <= 1.10 * least


def test_evaluation_is_no_slower_than_plain_and_needs_little_memory() -> None:
    rows = {row["contender"]: row for row in recorded("engine_124m_h200.json")["rows"]}
    assert rows["exact"]["eval_tokens_per_s"] >= rows["plain"]["eval_tokens_per_s"]
    alone = rows["exact"]["evaluation_alone"]
    assert alone["reserved_with_eval"] - alone["resident"] <= 1.5 * GiB
