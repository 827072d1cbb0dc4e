"""Why is each thing done otherwise than asked for? By what would happen if it alone were left as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config.fields import shown
from ..config.memory_savers import loss_piece_tokens
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes
from ..memory import gpt
from ..nouns import Decision
from .forecast import settled
from .search import Search
from .speed import modelled, reach_of

# What belongs together, and what to say of it besides the figures.
GROUPS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("n_layer", "n_head", "n_embd"), "another model: its loss is not that of the one asked for"),
    (("block_size", "eval_block_size"), "the model sees less far: a loss at another block does not compare"),
    (("batch_size", "gradient_accumulation_steps", "eval_iters"), "the same sequences in every step, in their order"),
    (("recompute", "grad_checkpoint"), "the same arithmetic"),
    (("loss_chunk",), "the same loss, in other pieces"),
    (("eval_batch_size",), "the same loss, in other batches"),
    (("compile",), "the same arithmetic in fewer kernels"),
    (("cuda_graphs",), "the same kernels, launched one by one"),
    (("gradients",), "the same arithmetic"),
    (("states",), "the same arithmetic"),
    (("offload",), "the same arithmetic, on the host"),
    (("optimizer",), "lossy: its states are rounded"),
    (("weights",), "lossy: weights are rounded at every step"),
    (("residual",), "lossy: the stream between blocks is rounded"),
    (("step_in_backward", "grad_clip"), "another rule: gradients are applied as they are made, and not clipped"),
)
OF_THE_SHAPE = (GROUPS[0][0], GROUPS[1][0])
WORTH_SAYING = 0.001      # of speed
WORTH_NAMING = 16 * MiB   # of memory


def decisions(search: Search, said: RunConfig, chosen: RunConfig, shape: str) -> tuple[Decision, ...]:
    """`said`: what the user asked for, before anything was changed; `shape`: why it has another one, if it has."""
    found = []
    for knobs, besides in GROUPS:
        changed = {knob: (getattr(said, knob), getattr(chosen, knob)) for knob in knobs
                   if getattr(said, knob) != getattr(chosen, knob)}
        if changed:
            why = (shape if knobs in OF_THE_SHAPE else _stays(said, chosen, knobs) or
                   _counterfactual(search, chosen, {knob: was for knob, (was, _) in changed.items()}))
            why += _how(said, chosen, knobs)
            if "recompute" in knobs and search.spends_all(chosen):
                why += "; as little as fits: if any one layer kept more, it would not"
            found.append(Decision(changed, f"{why}; {_besides(said, chosen, knobs, besides)}"))
    return tuple(found)


def _counterfactual(search: Search, chosen: RunConfig, was: dict[str, Any]) -> str:
    before = _words(was)
    try:
        other = replace(chosen, **was)
    except UsageError:
        return f"{before} does not go with the rest"
    needs = search.about(other)
    if not search.fits(other):
        return f"with {before} it would need about {show_bytes(needs)}, and {show_bytes(search.limit)} may be reserved"
    faster, less = _speed(search, chosen) / _speed(search, other) - 1, needs - search.about(chosen)
    if faster > WORTH_SAYING:
        price = f", for {show_bytes(-less)} more" if less < -WORTH_NAMING else ""
        return f"{100 * faster:.1f} % faster than with {before}{price}"
    return f"{show_bytes(less)} less than with {before}" if less > 0 else f"no slower than with {before}"


def _stays(said: RunConfig, chosen: RunConfig, knobs: tuple[str, ...]) -> str:
    """Some knobs are said because another one changed what was meant without them."""
    if "eval_batch_size" in knobs and chosen.eval_batch == said.eval_batch:
        return "an evaluation stays as it was, whatever the micro-batch"
    if "batch_size" in knobs and chosen.step_in_backward and chosen.gradient_accumulation_steps == 1:
        return "step_in_backward cannot accumulate, so that a micro-batch takes all of a step's sequences"
    return ""


def _how(said: RunConfig, chosen: RunConfig, knobs: tuple[str, ...]) -> str:
    """What makes the difference, where it may not be plain."""
    larger = "gradients leave the card less often" if chosen.offload == "gradients" else (
        "larger products fill the card better")
    told = {"batch_size": (chosen.batch_size > said.batch_size, larger, "fewer sequences are held at once"),
            "loss_chunk": (chosen.loss_chunk > loss_piece_tokens(
                chosen.batch_size * chosen.block_size, chosen.vocab_size, said.loss_chunk),
                "the gradient of the head's weights is summed in fewer rounds", "fewer logits exist at once"),
            "cuda_graphs": (chosen.cuda_graphs is not False, "", "what is recorded keeps memory of its own"),
            "compile": (chosen.compile is True, "fused kernels move fewer bytes", "")}
    more, when_more, when_less = told.get(knobs[0], (False, "", ""))
    words = when_more if more else when_less
    return f": {words}" if words else ""


def _besides(said: RunConfig, chosen: RunConfig, knobs: tuple[str, ...], words: str) -> str:
    if "block_size" in knobs and chosen.block_size > said.block_size:
        words = "the model sees farther: a loss at another block does not compare"
    if "batch_size" in knobs and chosen.block_size != said.block_size:
        words = f"{chosen.tokens_per_step:,} tokens in a step instead of {said.tokens_per_step:,}"
    if "batch_size" in knobs and chosen.dropout:
        words += ", under other dropout masks"
    if "eval_iters" in knobs:
        before, now = (each.eval_iters * each.batch_size for each in (said, chosen))
        words += f"; evaluations cover {now:,} windows instead of {before:,}" if now != before else ""
    if "recompute" in knobs and set(chosen.levels) == {"all"}:
        words += ", and nothing of it twice: there is room"
    if "offload" in knobs and chosen.offload != "none":
        words += f", in {show_bytes(gpt.host_bytes(chosen))} of its memory"
    return words


def _speed(search: Search, config: RunConfig) -> float:
    card = search.field.card
    return modelled(settled(config, search.setting), card, search.setting, reach_of(card))


def _words(knobs: dict[str, Any]) -> str:
    if knobs.get("grad_checkpoint"):
        return "grad_checkpoint=True"
    first = next(iter(knobs))
    return f"{first}={shown(knobs[first])}"
