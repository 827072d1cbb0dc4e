"""Ways to hold less, declared once: the engine obeys these figures and the planner reads the same ones."""

from __future__ import annotations

from .units import MiB

# The loss is computed in pieces of this many bytes, counting the piece's logits in the compute dtype
# (2 bytes) and their float32 copy (4). At GPT-2's vocabulary that is 2048 tokens: enough for the matrix
# product to run at full rate on every card of cards.csv, little enough to stay under a block's activations.
LOSS_PIECE_BYTES = 640 * MiB
_BYTES_A_LOGIT = 6


def loss_piece_tokens(tokens: int, vocab_size: int, asked: int = 0) -> int:
    """How many of a micro-batch's tokens the loss handles at once: as asked, else the power of two that fits."""
    if asked:
        return min(asked, tokens)
    piece = 1 << max(0, (LOSS_PIECE_BYTES // (_BYTES_A_LOGIT * vocab_size)).bit_length() - 1)
    return min(max(piece, 128), tokens)
