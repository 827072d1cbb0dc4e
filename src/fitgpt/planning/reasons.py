"""Why each option differs from the given run: what would happen if it alone had its given value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..config.fields import shown
from ..config.memory_savers import SAVERS, loss_chunk_tokens
from ..config.resolve import resolve_run
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes
from ..tapes import engine as engine_tape
from .search import Search
from .speed import likely_efficiency, modelled

SHAPE_OPTIONS = ("n_layer", "n_head", "n_embd")
BLOCK_OPTIONS = ("block_size", "eval_block_size")
# Options that change together, and the effect on training; the other memory savers follow by their permission.
GROUPS: dict[tuple[str, ...], str] = {
    SHAPE_OPTIONS: "another model: its loss does not compare with that of the given one",
    BLOCK_OPTIONS: "a shorter context: a loss at another block size does not compare",
    ("batch_size", "gradient_accumulation_steps", "eval_iters"): "the same sequences in every step, in the same order",
    ("recompute", "grad_checkpoint"): "the same arithmetic",
    ("loss_chunk",): "the same loss, in other chunks",
    ("eval_batch_size",): "the same loss, in other batches",
    ("compile",): "the same arithmetic in fewer kernels",
    ("cuda_graphs",): "the same kernels, launched one by one",
}
EFFECTS = {"free": "the same arithmetic", "places": "the same arithmetic, on the CPU", "lossy": "lossy: values are "
           "rounded", "rules": "another training rule"}
MIN_SPEED = 0.001      # relative difference that is mentioned
MIN_MEMORY = 16 * MiB  # difference that is mentioned


class Decision(NamedTuple):
    """Options that changed together, and why."""

    changes: dict[str, tuple[Any, Any]]  # option → (given, chosen)
    why: str


def decisions(search: Search, given: RunConfig, chosen: RunConfig, why_shape: str) -> tuple[Decision, ...]:
    """One decision per group of options that differ. `why_shape`: why the shape changed, if it did."""
    found = []
    for options, effect in _groups(chosen).items():
        changes = {option: (getattr(given, option), getattr(chosen, option)) for option in options
                   if getattr(given, option) != getattr(chosen, option)}
        if changes:
            why = (why_shape if options in (SHAPE_OPTIONS, BLOCK_OPTIONS) else _follows_from_others(
                given, chosen, options) or _counterfactual(search, chosen, {
                    option: before for option, (before, _) in changes.items()}))
            why += _mechanism(given, chosen, options)
            if "recompute" in options and search.is_maximal(chosen):
                why += "; as little recomputation as fits: if any single layer kept more, it would not fit"
            found.append(Decision(changes, f"{why}; {_effect(given, chosen, options, effect)}"))
    return tuple(found)


def _groups(chosen: RunConfig) -> dict[tuple[str, ...], str]:
    """GROUPS, and one group per option of the other memory savers, with the effect of the value that was chosen."""
    grouped = {option for options in GROUPS for option in options}
    of_savers = dict.fromkeys(saver.option for saver in SAVERS if saver.permission in EFFECTS)
    groups = dict(GROUPS)
    for option in of_savers:
        if option in grouped:
            continue
        savers = [saver for saver in SAVERS if saver.option == option]
        required = dict.fromkeys(each for saver in savers for each in saver.settings
                                 if each not in of_savers and each not in grouped)
        effect = next((EFFECTS[saver.permission] for saver in savers if saver.is_on(chosen)), EFFECTS["free"])
        groups[option, *required] = effect
    return groups


def _counterfactual(search: Search, chosen: RunConfig, given: dict[str, Any]) -> str:
    before = _describe(given)
    try:
        other = replace(chosen, **given)
    except UsageError:
        return f"{before} does not work with the other settings"
    needs = search.estimated_needs(other)
    if not search.fits(other):
        return f"with {before} it would need about {show_bytes(needs)}, and {show_bytes(search.limit)} may be reserved"
    faster, less = _speed(search, chosen) / _speed(search, other) - 1, needs - search.estimated_needs(chosen)
    if faster > MIN_SPEED:
        price = f", for {show_bytes(-less)} more" if less < -MIN_MEMORY else ""
        return f"{100 * faster:.1f} % faster than with {before}{price}"
    return f"{show_bytes(less)} less than with {before}" if less > 0 else f"no slower than with {before}"


def _follows_from_others(given: RunConfig, chosen: RunConfig, options: tuple[str, ...]) -> str:
    """The reason, where an option only follows from another that changed."""
    if "eval_batch_size" in options and chosen.eval_batch == given.eval_batch:
        return "the evaluation stays as it was, whatever the micro-batch"
    if "batch_size" in options and chosen.step_in_backward and chosen.gradient_accumulation_steps == 1:
        return "step_in_backward excludes accumulation, so one micro-batch has all sequences of a step"
    return ""


def _mechanism(given: RunConfig, chosen: RunConfig, options: tuple[str, ...]) -> str:
    """What makes the difference, where that is not obvious."""
    larger = "gradients leave the GPU less often" if chosen.offload == "gradients" else (
        "larger matmuls use the GPU better")
    chunk = loss_chunk_tokens(chosen.batch_size * chosen.block_size, chosen.vocab_size, given.loss_chunk)
    mechanisms = {  # (whether it is the first, the first, the second)
        "batch_size": (chosen.batch_size > given.batch_size, larger, "fewer sequences are in memory at once"),
        "loss_chunk": (chosen.loss_chunk > chunk, "the gradient of the head's weights is summed in fewer rounds",
                       "fewer logits exist at once"),
        "cuda_graphs": (chosen.cuda_graphs is not False, "", "CUDA graphs keep a memory pool of their own"),
        "compile": (chosen.compile is True, "fused kernels move fewer bytes", "")}
    first, text, other = mechanisms.get(options[0], (False, "", ""))
    text = text if first else other
    return f": {text}" if text else ""


def _effect(given: RunConfig, chosen: RunConfig, options: tuple[str, ...], text: str) -> str:
    if "block_size" in options and chosen.block_size > given.block_size:
        text = "a longer context: a loss at another block size does not compare"
    if "batch_size" in options and chosen.block_size != given.block_size:
        text = f"{chosen.tokens_per_step:,} tokens per step instead of {given.tokens_per_step:,}"
    if "batch_size" in options and chosen.dropout:
        text += ", with other dropout masks"
    if "eval_iters" in options:
        before, now = (each.eval_iters * each.batch_size for each in (given, chosen))
        text += f"; evaluations cover {now:,} windows instead of {before:,}" if now != before else ""
    if "recompute" in options and set(chosen.levels) == {"all"}:
        text += ", and nothing is recomputed: there is enough memory"
    if "offload" in options and chosen.offload != "none":
        text += f", with {show_bytes(engine_tape.host_bytes(chosen))} of CPU RAM"
    return text


def _speed(search: Search, config: RunConfig) -> float:
    card = search.space.card
    return modelled(resolve_run(config, search.platform), card, search.platform, likely_efficiency(card))


def _describe(options: dict[str, Any]) -> str:
    if options.get("grad_checkpoint"):
        return "grad_checkpoint=True"
    first = next(iter(options))
    return f"{first}={shown(options[first])}"
