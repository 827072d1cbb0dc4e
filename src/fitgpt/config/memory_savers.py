"""The registry of memory savers: for each setting what it saves, what it costs, and what it does not work with.

From SAVERS come the docs' table, the error messages for settings that exclude each other, the changes that `plan
--options` and the page suggest, and what `fit` may use. A new saver is an option in run_config.py, an entry here, and
its code in engine/. tests/config/test_memory_savers.py checks every entry: a formula of its saving against two
forecasts, every exclusion against RunConfig.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.units import MiB
from .fields import Requires, shown

if TYPE_CHECKING:
    from .run_config import RunConfig


class Saver(NamedTuple):
    """One setting that saves memory. P: number of parameters; C: width of the model.

    Permission, for `fit`: "free" (the same result), "places" (the same result, computed in CPU RAM), "lossy" (rounds),
    "rules" (trains by another rule), "never" (another way to what a saver in this list does already).
    """

    option: str
    value: Any
    exact: bool             # the same result up to rounding order
    permission: str
    saves: str
    costs: str
    label: str              # the page's button; {names} of options are replaced by their values
    requires: tuple[Requires, ...] = ()

    @property
    def setting(self) -> str:
        return self.option if self.value is True else f"{self.option}={shown(self.value)}"

    @property
    def family(self) -> str:
        """Savers of one family are steps of one scale, each saving more than the one before."""
        return {"optimizer": str(self.value), "loss_chunk": "loss"}.get(self.option, self.option)

    @property
    def settings(self) -> dict[str, Any]:
        """The options to set: the saver's own, and those that it requires and that may be set along with it."""
        return {self.option: self.value, **{each.option: each.values[0] for each in self.requires if each.adjusted}}

    def is_on(self, config: RunConfig) -> bool:
        return bool(getattr(config, self.option) == self.value)


# ---- the registry

_CHECKPOINTING = "gradient checkpointing: {layers}"
_NOT_LATE = Requires("states", ("early",), adjusted=True)
_NO_CUDA_GRAPHS = Requires("cuda_graphs", ("auto", False))

SAVERS = (
    Saver("loss_chunk", 1024, True, "free",
          "all logits but those of 1024 tokens; the default, 0, chooses the chunk",
          "smaller matmuls: not measured", "chunked loss: {loss_chunk} tokens"),
    Saver("saved_activations", "matmuls", True, "free",
          "12 bytes × tokens × C in each layer against --saved_activations=all: the results of the norms and GELU; the "
          "default",
          "norms and GELU again: not measured alone", _CHECKPOINTING),
    Saver("saved_activations", "no_mlp_up", True, "free",
          "8 bytes × tokens × C in each layer: the result of the MLP's first matmul",
          "one of a block's four matmuls again: 5 % of the speed (GPT-2 124M on an H200)", _CHECKPOINTING),
    Saver("saved_activations", "attention_proj", True, "free",
          "14 bytes × tokens × C in each layer: also q, k and v", "two of the four matmuls again", _CHECKPOINTING),
    Saver("saved_activations", "attention", True, "free",
          "16 bytes × tokens × C in each layer: also the attention's output projection",
          "three of the four matmuls again", _CHECKPOINTING),
    Saver("saved_activations", "input", True, "free",
          "18 bytes × tokens × C in each layer: everything but the block's input (gradient checkpointing; the same as "
          "--grad_checkpoint)", "the whole forward pass again: a third more arithmetic", _CHECKPOINTING),
    Saver("offload", "optimizer", True, "places",
          "8P: AdamW's state lives in CPU RAM (16P there)",
          "gradients and weights cross the PCIe bus at every step, and AdamW runs on the CPU",
          "offload {offload} to CPU RAM", (_NOT_LATE,)),
    Saver("offload", "gradients", True, "places",
          "12P: gradients too, each leaves the GPU when it is computed",
          "gradients cross the PCIe bus at every micro-step, weights at every step, AdamW runs on the CPU; no CUDA "
          "graphs", "offload {offload} to CPU RAM",
          (Requires("gradients", ("freed",), "offload=gradients leaves no gradients on the GPU, so it needs "
                    "gradients=freed", adjusted=True), _NOT_LATE, _NO_CUDA_GRAPHS)),
    Saver("casts", "transient", True, "free",
          "2 bytes per element of the weight matrices against --casts=kept: half-precision copies live as long as the "
          "matmul that needs them; the default",
          "each is made twice per micro-step instead of once per step: 0.6 % slower (124M on an H200)",
          "free half-precision weight copies"),
    Saver("gradients", "freed", True, "free",
          "4P during an evaluation, against --gradients=kept: gradients are freed once they are applied, except with "
          "CUDA graphs, which need them at fixed addresses; the default", "nothing: not timed",
          "free gradients after each step"),
    Saver("states", "early", True, "free",
          "nothing in the end, but against --states=late no later step allocates more than the first: the optimizer "
          "state exists before it; the default", "nothing", "create optimizer state early"),
    Saver("residual", "bfloat16", False, "lossy",
          "2 bytes × tokens × C in each layer: the residual stream between blocks",
          "nothing: 3 % faster (124M on an H200), 5 % with weights=bfloat16 and adam8bit", "bfloat16 residual stream"),
    Saver("weights", "bfloat16", False, "lossy",
          "4P: weight matrices and their gradients in 2 bytes, with stochastic rounding at every step",
          "nothing: 2 % faster (124M on an H200), 5 % with residual=bfloat16 and adam8bit", "bfloat16 weights"),
    Saver("optimizer", "adam8bit", False, "lossy", "6P: AdamW's state in one byte per moment",
          "nothing in speed alone; with bfloat16 weights and residual 5 % faster", "8-bit Adam"),
    Saver("adam8bit", "bitsandbytes", False, "never",
          "6P, as --optimizer=adam8bit alone: the optimizer of bitsandbytes, which many know, and which has a kernel "
          "for CUDA without Triton, as on Windows",
          "the CPU waits for the GPU once per step: 3 % slower (124M on an H200)", "8-bit Adam of bitsandbytes",
          (Requires("optimizer", ("adam8bit",), "adam8bit=bitsandbytes is a variant of optimizer=adam8bit"),
           Requires("weights", ("float32",), "adam8bit=bitsandbytes rounds weights to nearest, so that "
                    "weights=bfloat16 would lose most of every update", "--adam8bit=own"),
           Requires("offload", ("none",)), Requires("step_in_backward", (False,)))),
    Saver("optimizer", "muon", False, "rules",
          "4 bytes per parameter of the blocks' weight matrices: one momentum instead of two moments",
          "fifteen small matmuls for each matrix at every step", "Muon"),
    Saver("step_in_backward", True, False, "rules",
          "4P: each gradient is applied when it is computed; only the token embedding's waits for its second part",
          "no clipping, no accumulation, no skipping of a step that is not finite", "optimizer step in backward",
          (Requires("gradient_accumulation_steps", (1,), "step_in_backward needs gradient_accumulation_steps=1",
                    adjusted=True),
           Requires("grad_clip", (0.0,), "step_in_backward never has all gradients at once, so it needs grad_clip=0",
                    "--grad_clip=0", adjusted=True),
           Requires("gradients", ("freed",), "step_in_backward leaves no gradients to keep, so it needs "
                    "gradients=freed", adjusted=True), _NOT_LATE,
           Requires("dtype", ("bfloat16", "float32", "auto"), "step_in_backward cannot skip a step, which "
                    "dtype=float16 with its GradScaler needs"),
           Requires("offload", ("none",)), _NO_CUDA_GRAPHS,
           Requires("gpus", ("",), "step_in_backward applies gradients before ranks could add them up, so it does not "
                    "work with gpus", "--gpus="))),
)

# `fit --allow`: savers that round, all of them by "lossy"; and savers that train by another rule, each by its name.
LOSSY_SAVERS: dict[str, dict[str, Any]] = {
    saver.family: saver.settings for saver in SAVERS if saver.permission == "lossy"}
OTHER_RULES: dict[str, dict[str, Any]] = {
    saver.family: saver.settings for saver in SAVERS if saver.permission == "rules"}
SAVER_LABELS: dict[str, str] = {saver.family: saver.label for saver in SAVERS if saver.permission != "never"}


# ---- saved activations

# The tensors that a block saves between the forward and the backward pass, besides its input. Nested: each recompute
# policy saves less than the one before and recomputes more. The names are those of engine/block.py.
SAVED_TENSORS: dict[str, frozenset[str]] = {
    "all": frozenset({"h1", "qkv", "att", "proj", "h2", "fc", "g"}),
    "matmuls": frozenset({"qkv", "att", "proj", "fc"}),    # results of matmuls and attention
    "no_mlp_up": frozenset({"qkv", "att", "proj"}),        # the same without the MLP's hidden layer, of width 4C
    "attention_proj": frozenset({"att", "proj"}),
    "attention": frozenset({"att"}),
    "input": frozenset(),
}
POLICIES = tuple(SAVED_TENSORS)


def parse_policies(text: str, layers: int) -> list[str] | str:
    """'matmuls', or '7*no_mlp_up, 5*matmuls' from the first layer to the last → one policy per layer, or what is wrong
    with the text."""
    parts = [part.strip().rpartition("*")[::2] for part in text.split(",")]
    unknown = [name for _, name in parts if name.strip() not in SAVED_TENSORS]
    if unknown or not all(re.fullmatch("[0-9]{1,9}", count.strip()) for count, _ in parts
                          if count.strip() or len(parts) > 1):
        return f"must be one of {', '.join(POLICIES)}, or counts of them such as 7*no_mlp_up,5*matmuls"
    if len(parts) == 1 and not parts[0][0].strip():
        return [parts[0][1].strip()] * layers
    named = sum(int(count) for count, _ in parts)
    if named != layers:
        return f"names {named} layers, and there are {layers}"
    return [name.strip() for count, name in parts for _ in range(int(count))]


# ---- chunks of the loss

# Bytes of logits per chunk of the loss. At GPT-2's vocabulary and in half precision that is 2048 tokens: less than the
# activations of any run in config/. Other sizes have not been timed.
LOSS_CHUNK_BYTES = 208 * MiB


def loss_chunk_tokens(tokens: int, vocab_size: int, asked: int = 0) -> int:
    """Tokens per chunk of the loss: `asked` if it is not 0, else the power of two whose logits fit the limit."""
    if asked:
        return min(asked, tokens)
    chunk = 1 << max(0, (LOSS_CHUNK_BYTES // (2 * vocab_size)).bit_length() - 1)
    return min(max(chunk, 128), tokens)
