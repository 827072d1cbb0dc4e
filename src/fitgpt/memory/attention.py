"""What each of torch's attention kernels allocates and frees, forward and backward, as engine/attention.py calls it.

Read off recorded runs in which the kernels were forced one by one (tests/golden/h200_kernels.json); the scratch of a
backward pass is known from blocks of 500 and 512 tokens and heads of 48, 64 and 80 numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tape import Writer

if TYPE_CHECKING:
    from .parts import Sizes

DICE = 8              # a seed and an offset, 8 bytes each, are kept whether anything is dropped or not
CUDNN_SCRATCH = 256
FLASH_TOKENS, FLASH_HEAD = 128, 32          # multiples to which flash's backward rounds its scratch
EFFICIENT_TOKENS, EFFICIENT_HEADS = 64, (32, 64, 128)
EFFICIENT_COUNTERS = 16                     # bytes for each so many tokens of a head


def attend(w: Writer, s: Sizes, layer: str) -> list[str]:
    """Leaves `{layer}att` and the kernel's small state; returns the state's names."""
    numbers = s.n * (s.padded or s.c)
    padded = [w.alloc(f"{part}.padded", "activations", s.product * numbers) for part in "qkv"] if s.padded else []
    # [B, H, T, D] becomes [B, T, H × D]: a view of what most kernels return, and of anything with one head.
    copied = s.heads > 1 and (bool(s.padded) or s.kernel == "math")
    out = f"{layer}att.heads" if copied else f"{layer}att"
    state = _FORWARD[s.kernel](w, s, layer, out, s.product * numbers)
    if copied:
        w.alloc(f"{layer}att", "activations", s.product * s.n * s.c)
    w.free(*padded, *([out] if copied else []))
    return state


def attend_backward(w: Writer, s: Sizes, out: str) -> None:
    """Three gradients, beside the kernel's scratch, gathered into `out`."""
    nbytes = s.product * s.n * (s.padded or s.c)
    padded = [w.alloc(f"{part}.padded", "activations", nbytes) for part in ("q", "k", "v", "d", "out")
              ] if s.padded else []
    gradients = _BACKWARD[s.kernel](w, s, nbytes)
    w.alloc(out, "activations", 3 * s.product * s.n * s.c)
    w.free(*padded, *reversed(gradients))


def _gradients(w: Writer, nbytes: int) -> list[str]:
    return [w.alloc(f"d_{part}", "activations", nbytes) for part in "qkv"]


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# ---- cuDNN: Hopper, and Blackwell's data-centre cards

def _cudnn(w: Writer, s: Sizes, layer: str, out: str, nbytes: int) -> list[str]:
    dice = [w.alloc(f"{layer}seed", "activations", DICE), w.alloc(f"{layer}offset", "activations", DICE)]
    w.alloc(out, "activations", nbytes)
    lse = w.alloc(f"{layer}lse", "activations", 4 * s.n * s.heads)
    w.free(w.alloc("attention scratch", "workspace", CUDNN_SCRATCH))
    return [lse, *dice]


def _cudnn_backward(w: Writer, s: Sizes, nbytes: int) -> list[str]:
    gradients = _gradients(w, nbytes)
    scratch = 4 * s.n * ((s.padded or s.c) + s.heads) + CUDNN_SCRATCH
    w.free(w.alloc("attention scratch", "workspace", scratch))
    return gradients


# ---- flash: Ampere, Ada, consumer Blackwell

def _flash(w: Writer, s: Sizes, layer: str, out: str, nbytes: int) -> list[str]:
    w.alloc(out, "activations", nbytes)
    lse = w.alloc(f"{layer}lse", "activations", 4 * s.n * s.heads)
    return [lse, w.alloc(f"{layer}seed", "activations", 2 * DICE), w.alloc(f"{layer}offset", "activations", DICE)]


def _flash_backward(w: Writer, s: Sizes, nbytes: int) -> list[str]:
    """The queries' gradient is summed in float32. Padded heads have another layout: two arguments are copied."""
    copies = [w.alloc(f"{part}.relaid", "activations", nbytes) for part in ("d", "out")] if s.padded else []
    gradients = _gradients(w, nbytes)
    rows = 4 * s.b * s.heads * _up_to(s.t, FLASH_TOKENS)
    w.alloc("attention delta", "workspace", rows)
    w.alloc("attention sums", "workspace", rows * _up_to((s.padded or s.c) // s.heads, FLASH_HEAD))
    w.free("attention sums", "attention delta", *copies)
    return gradients


# ---- memory-efficient: Turing and older, and float32

def _efficient(w: Writer, s: Sizes, layer: str, out: str, nbytes: int) -> list[str]:
    w.alloc(out, "activations", nbytes)
    return [w.alloc(f"{layer}lse", "activations", 4 * s.b * s.heads * _up_to(s.t, 32))]


def _efficient_backward(w: Writer, s: Sizes, nbytes: int) -> list[str]:
    copies = [w.alloc("d.relaid", "activations", nbytes)] if s.padded else []
    gradients, rows = _gradients(w, nbytes), 4 * s.n * s.heads
    if s.product == 4:  # in half precision the kernel computes this sum itself
        w.alloc("d × out", "workspace", nbytes)
        w.alloc("delta.sum", "workspace", rows)
    w.alloc("attention delta", "workspace", rows)
    if s.product == 4:
        w.free("delta.sum", "d × out")
    head = (s.padded or s.c) // s.heads
    width = next((each for each in EFFICIENT_HEADS if head <= each), head)
    tiles = s.b * s.heads * -(-s.t // EFFICIENT_TOKENS)
    w.alloc("attention sums", "workspace", tiles * (4 * EFFICIENT_TOKENS * width + EFFICIENT_COUNTERS))
    w.free("attention delta", "attention sums", *copies)
    return gradients


# ---- by hand, where no kernel fits: scores of T² a head

def _by_hand(w: Writer, s: Sizes, layer: str, out: str, nbytes: int) -> list[str]:
    scores, spent, kept = s.b * s.heads * s.t * s.t, ["probabilities"], []
    _probabilities(w, s, nbytes)
    if s.dropout:
        kept = [w.alloc(f"{layer}att.mask", "activations", scores)]
        spent.append(w.alloc("probabilities.dropped", "activations", 4 * scores))
    if s.product < 4:
        spent.append(w.alloc("probabilities.rounded", "activations", s.product * scores))
    _product(w, s, out, nbytes, nbytes, "v.copy")
    w.free(*reversed(spent))
    return kept


def _by_hand_backward(w: Writer, s: Sizes, nbytes: int) -> list[str]:
    scores, rows = s.b * s.heads * s.t * s.t, 4 * s.n * s.heads
    _probabilities(w, s, nbytes)

    def replaced(old: str, new: str, width: int) -> str:
        w.alloc(new, "activations", width * scores)
        w.free(old)
        return new

    spent = [w.alloc("mask.scaled", "activations", 4 * scores)] if s.dropout else []
    kept = w.alloc("probabilities.kept", "activations", 4 * scores)
    if s.product < 4:
        kept = replaced(kept, "probabilities.rounded", s.product)
    _product(w, s, "d_v", nbytes, nbytes, "d.copy")
    w.free(kept)
    d_probabilities = _product(w, s, "d_probabilities", s.product * scores, nbytes, "d.copy", "v.copy")
    if s.product < 4:
        d_probabilities = replaced(d_probabilities, "d_probabilities.wide", 4)
    d_probabilities = replaced(d_probabilities, "d_probabilities.kept", 4)
    w.alloc("weighted", "activations", 4 * scores)
    w.alloc("weighted.sum", "activations", rows)
    w.free("weighted")
    w.alloc("centred", "activations", 4 * scores)
    w.free("weighted.sum")
    d_scores = replaced("centred", "d_scores.wide", 4)
    scaled = w.alloc("d_scores.scaled", "activations", 4 * scores)
    if s.product < 4:
        scaled = replaced(scaled, "d_scores", s.product)
    w.free(d_scores)
    _product(w, s, "d_q", nbytes, nbytes, "k.copy")
    _product(w, s, "d_k", nbytes, nbytes, "q.copy")
    w.free("probabilities", *spent, d_probabilities, scaled)
    return ["d_q", "d_k", "d_v"]


def _probabilities(w: Writer, s: Sizes, nbytes: int) -> None:
    scores = s.b * s.heads * s.t * s.t
    w.alloc("ones", "activations", s.t * s.t)
    w.alloc("future", "activations", s.t * s.t)
    w.free("ones")
    _product(w, s, "scores", s.product * scores, nbytes, "q.copy", "k.copy")
    w.alloc("scores.scaled", "activations", s.product * scores)
    w.free("scores")
    if s.product < 4:
        w.alloc("scores.wide", "activations", 4 * scores)
    w.alloc("scores.masked", "activations", 4 * scores)
    w.alloc("probabilities", "activations", 4 * scores)
    w.free("scores.masked", "future", "scores.scaled", *(["scores.wide"] if s.product < 4 else []))


def _product(w: Writer, s: Sizes, out: str, size: int, nbytes: int, *copies: str) -> str:
    """Head by head: parts of qkv [B, H, T, D] are copied for it, of `nbytes` each, unless padding has done so or B × H
    is a view."""
    copied = not s.padded and s.b > 1 and s.heads > 1
    made = [w.alloc(copy, "activations", nbytes) for copy in copies] if copied else []
    w.alloc(out, "activations", size)
    w.free(*made)
    return out


_FORWARD = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _by_hand}
_BACKWARD = {"cudnn": _cudnn_backward, "flash": _flash_backward, "efficient": _efficient_backward,
             "math": _by_hand_backward}
