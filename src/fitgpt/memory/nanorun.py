"""The knobs of nanoGPT's train.py that move memory, and what follows from them: its parameters, in its order."""

from __future__ import annotations

from dataclasses import dataclass

SCALAR = 4  # bytes of a loss, a step count, a scale


@dataclass(frozen=True)
class NanoGPTRun:
    """The knobs of train.py that move memory, under its own names and with its own defaults."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    batch_size: int = 12
    block_size: int = 1024
    vocab_size: int = 50304
    gradient_accumulation_steps: int = 40
    dtype: str = "bfloat16"
    dropout: float = 0.0
    bias: bool = False
    compile: bool = True
    grad_clip: float = 1.0
    eval_only: bool = False

    @property
    def tokens(self) -> int:
        """N: the tokens of one micro-batch."""
        return self.batch_size * self.block_size

    def parameters(self) -> list[tuple[str, int, bool]]:
        """(name, numbers, is a matrix), in the order the model has them; the tied head is the token embedding."""
        c = self.n_embd
        found = [("wte", self.vocab_size * c, True), ("wpe", self.block_size * c, True)]

        def part(name: str, inputs: int | None, outputs: int) -> None:
            found.append((f"{name}.weight", outputs * (inputs or 1), inputs is not None))
            if self.bias:
                found.append((f"{name}.bias", outputs, False))

        for layer in range(self.n_layer):
            part(f"{layer}.ln_1", None, c)
            part(f"{layer}.qkv", c, 3 * c)
            part(f"{layer}.proj", c, c)
            part(f"{layer}.ln_2", None, c)
            part(f"{layer}.up", c, 4 * c)
            part(f"{layer}.down", 4 * c, c)
        part("ln_f", None, c)
        return found


def padded_width(run: NanoGPTRun) -> int:
    """C once every head is padded to a multiple of 8, as flash attention wants it; 0 where there is nothing to pad."""
    head = run.n_embd // run.n_head
    return 0 if head % 8 == 0 else -(-head // 8) * 8 * run.n_head
