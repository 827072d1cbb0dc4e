"""Formulas of an owner's bytes: they add up to the bytes, and name sizes that a user can change."""

from __future__ import annotations

import re

import pytest

from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.core.units import parse_bytes, parse_count
from fitgpt.memory.platform import Platform
from fitgpt.planning.forecast import Alive, FormulaSizes, OwnerShare, formula, owners, replay_run

SMALL = dict(n_layer=3, n_head=4, n_embd=128, batch_size=4, block_size=128, vocab_size=1024)
SIZES = FormulaSizes(batch=16, block=1024, width=576, layers=12, vocab=50304, params=77_355_072, matmul=2, weight=4)


def at_the_peak(trainer: str, **options: object) -> tuple[int, dict[str, OwnerShare]]:
    platform = Platform((8, 9))
    run = resolve_run(RunConfig(**{**SMALL, **options}), platform, trainer)  # type: ignore[arg-type]
    timeline = replay_run(run, platform, trainer)
    peak = max(timeline.peaks().values(), key=lambda each: each.allocated)
    found = owners(run, trainer, timeline, peak.event)
    return peak.allocated, {share.owner: share for share in found}


def worth(formula_text: str) -> float:
    """The bytes of a formula."""
    products, _, rest = formula_text.partition(", and ")
    if "of small things" in products:
        products, rest = "", products
    left = parse_bytes(re.match(r"[\d.]+ \w+", rest)[0]) if rest else 0  # type: ignore[index]
    sums = re.sub(r" (layers?|tokens|bytes)\b", "", products).replace("×", "*").replace(",", "")
    sums = re.sub(r"[\d.]+ (?:KiB|MiB|GiB)", lambda found: str(parse_bytes(found[0])), sums)
    sums = re.sub(r"[\d.]+[kMB]\b", lambda found: str(parse_count(found[0])), sums)
    assert re.fullmatch(r"[\d.*+() ]*", sums), formula_text
    return left + (eval(sums) if sums else 0)


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
@pytest.mark.parametrize("options", [
    dict(compile=False), dict(compile=True), dict(compile=False, dropout=0.1, bias=True), dict(dtype="float32"),
    dict(n_embd=120, n_head=5), dict(saved_activations="1*input,2*matmuls"),
    dict(weights="bfloat16", optimizer="adam8bit"),
    dict(optimizer="adam8bit", adam8bit="bitsandbytes"), dict(optimizer="muon", block_size=64),
    dict(batch_size=1, eval_batch_size=64), dict(offload="optimizer"),
], ids=str)
def test_every_formula_adds_up_to_its_owners_bytes(trainer: str, options: dict[str, object]) -> None:
    allocated, shares = at_the_peak(trainer, **options)
    assert sum(share.nbytes for share in shares.values()) == allocated
    for share in shares.values():
        assert worth(share.formula) == pytest.approx(share.nbytes, rel=0.01, abs=100), share


def test_logits_are_batch_times_block_times_vocabulary() -> None:
    _, shares = at_the_peak("nanogpt", compile=False, vocab_size=50304)
    assert shares["logits"].formula == "4 × 128 × 50,304 × 12 bytes"


def test_logits_padded_by_the_compiler_show_the_padded_size() -> None:
    _, shares = at_the_peak("nanogpt", compile=True, vocab_size=50257, batch_size=8)
    assert shares["logits"].formula == ("8 × 128 × 50,304 × 4 bytes + 8 × 128 × 50,264 × 2 bytes + "
                                        "8 × 128 × 50,257 × 2 bytes")  # its gradient twice, returned, its zeros


def test_logits_of_a_chunk_show_its_tokens() -> None:
    _, shares = at_the_peak("fitgpt", loss_chunk=256, vocab_size=50304)
    assert shares["logits"].formula == "256 × 50,304 × 2 bytes"


def test_activations_are_grouped_by_layers_with_the_same_recompute_level() -> None:
    _, shares = at_the_peak("fitgpt", saved_activations="1*input,2*matmuls", vocab_size=50304)
    assert shares["activations"].formula.startswith("2 layers × 512 tokens × (128 × 22 + ")
    assert "+ 1 layer × 512 tokens × 128 × 4 bytes" in shares["activations"].formula


def test_an_evaluation_is_counted_with_its_own_batch() -> None:
    """eval_batch_size may be larger than batch_size; nanoGPT does not have it."""
    options = dict(eval_batch_size=64, batch_size=1, compile=False, vocab_size=64)
    assert "8,192 tokens" in at_the_peak("fitgpt", **options)[1]["activations"].formula
    assert "128 tokens" in at_the_peak("nanogpt", **options)[1]["activations"].formula


def test_weights_and_optimizer_state_are_bytes_per_parameter() -> None:
    _, shares = at_the_peak("fitgpt", n_embd=256)
    params = RunConfig(**{**SMALL, "n_embd": 256}).gpt_config().count_params()  # type: ignore[arg-type]
    assert shares["weights"].formula.startswith(f"{params / 1e6:.2f}M × 4 bytes")
    assert shares["optimizer"].formula.startswith(f"{params / 1e6:.2f}M × 8 bytes")


def test_a_formula_names_the_remaining_bytes() -> None:
    weights = [Alive("wte", 4 * 50304 * 576, 4 * 50304 * 576)]
    assert formula("weights", weights, SIZES) == "28.98M × 4 bytes"
    rounded = [each._replace(taken=each.taken + 2**20) for each in weights]
    assert formula("weights", rounded, SIZES).endswith(", and 1.0 MiB of rounding")
    odd = [Alive("odd", 3_000_001, 3_000_320), Alive("3.qkv", 2 * 16384 * 3 * 576, 2 * 16384 * 3 * 576)]
    assert formula("activations", odd, SIZES) == "1 layer × 16,384 tokens × 576 × 6 bytes, and 2.9 MiB more"
    assert formula("other", [Alive("loss", 4, 512)], SIZES) == "512 B of small things"
