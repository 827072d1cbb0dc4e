"""The tape of `fitgpt sample`: float32 weights, keys and values of a whole block, one token at a time.

As engine/sample.py, model.logits_after and block.next_token have it, in their order: seven recorded runs make the same
blocks of more than 512 bytes. Nothing is compiled, unless one asks for it. Left out are scalars, and what a draw makes
after its top k: that fits where the divided logits were, and goes before the next token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..config.run_config import RunConfig
from .attention import CUDNN_SCRATCH, DICE
from .gpt import parameters, sizes
from .parts import Sizes
from .passes import Passes
from .setting import Setting
from .tape import Tape, Writer

PROMPT = 16   # tokens: a short one
# That are drawn after it. The most is allocated from the first on; pages are mapped until the logits of two tokens, the
# last and the next, have found places to change between. test_golden_sampling.py compares with forty.
TOKENS = 4
TOP_K = 200   # of `fitgpt sample`, if not said otherwise

# torch's TensorTopK.cu: from so many numbers on, several blocks of threads count them by their digits. So many blocks
# run at once on a multiprocessor, whose 65,536 registers hold 40 a thread; a thread takes between 4 and 64 numbers.
MANY = 20_000
BLOCKS_AT_ONCE, THREADS, DIGITS = 6, 256, 256
LEAST_A_THREAD, MOST_A_THREAD = 4, 64
SCAN = 1279   # of CUB's prefix sum, recorded over 50 and over 98 blocks

MASK_MULTIPLE = 8  # the memory-efficient kernel wants rows of a mask a multiple of this long: torch's attention.cpp
# cuDNN divides many keys into parts: none at 128 and 256 tokens, eight at 1024. Nothing between was recorded.
KEYS_A_PART, UNDIVIDED = 128, 256


def write(config: RunConfig, setting: Setting) -> Tape:
    """A process of its own: the optimizer and the gradients are not there."""
    config = replace(config, weights="float32", residual="float32", casts="brief", compile=False)
    w = Writer()
    prompt, token = (Passes(w, sizes(config, setting, 1, tokens, training=False)) for tokens in (PROMPT, 1))
    s, block = token.s, config.block_size
    w.phase("sample")
    for name, numbers, _ in parameters(config):
        w.alloc(name, "weights", 4 * numbers)
    for layer in range(s.layers):
        for part in ("keys", "values"):
            w.alloc(f"{layer}.{part}", "activations", s.product * block * s.c)
    w.alloc("prompt.place", "data", 8 * PROMPT)
    prompt.embed("prompt.place")
    for layer in range(s.layers):
        prompt.forward(layer, None)
    prompt.norm("hidden", f"{s.layers}.x")
    w.free(f"{s.layers}.x")
    head(prompt, "logits 0")
    w.free("hidden", "prompt.place")
    draw(w, s)
    kernel = kernel_of_a_step(s, setting)
    for number in range(1, TOKENS + 1):
        names = tuple(f"{what} {each}" for what in ("token", "logits") for each in (number, number - 1))
        w.part(("token", number > 1), names, partial(step, token, kernel, block, number))
        draw(w, s)
    return w.tape()


def head(passes: Passes, logits: str) -> None:
    """The last row's logits, in float32."""
    w, s = passes.w, passes.s
    out = f"{logits}.rounded" if s.product < 4 else logits
    passes.product(out, "wte", s.vocab * s.c, s.product * s.vocab, owner="logits")
    if out != logits:
        w.alloc(logits, "logits", 4 * s.vocab)
        w.free(out)


def step(one: Passes, kernel: str, block: int, number: int) -> None:
    """One more token, through all layers; the logits of the one before go when the new ones are there."""
    w, s = one.w, one.s
    w.alloc(f"token {number}", "data", 8)
    w.free_if_alive(f"token {number - 1}")
    w.alloc("position", "data", 8)
    rows = [w.alloc(each, "activations", 4 * s.c) for each in ("token.row", "position.row")]
    w.alloc("0.x", "activations", 4 * s.c)
    w.free(*rows)
    for layer in range(s.layers):
        next_token(one, layer, kernel, block)
    one.norm("hidden", f"{s.layers}.x")
    head(one, f"logits {number}")
    w.free("hidden", f"{s.layers}.x", "position", f"logits {number - 1}")


def next_token(one: Passes, layer: int, kernel: str, block: int) -> None:
    """A block, from `{layer}.x` to the next one's; most of what it makes goes when it is done."""
    w, s, p = one.w, one.s, f"{layer}."
    matrix, nbytes, bias = s.c * s.c, s.product * s.c, s.c if s.bias else 0
    one.norm("h1", f"{p}x")
    one.product("qkv", f"{p}c_attn", 3 * matrix, 3 * nbytes, bias=3 * bias)
    w.alloc("positions", "data", 8 * block)
    w.alloc("seen", "data", block)
    w.free("positions")
    attend(w, s, kernel, block)
    one.product("proj", f"{p}attn_proj", matrix, nbytes, bias=bias)
    w.alloc("x+proj", "activations", 4 * s.c)
    w.free("proj")
    one.norm("h2", "x+proj")
    one.product("fc", f"{p}c_fc", 4 * matrix, 4 * nbytes, bias=4 * bias)
    w.free("h2")
    w.alloc("g", "activations", 4 * nbytes)
    w.free("fc")
    one.product("down", f"{p}mlp_proj", 4 * matrix, nbytes, bias=bias)
    w.alloc(f"{layer + 1}.x", "activations", 4 * s.c)
    w.free("down", "x+proj", "h1", "qkv", "seen", "att", "g", f"{p}x")


# ---- attention of one query to all keys, under a mask

def kernel_of_a_step(s: Sizes, setting: Setting) -> str:
    """torch's choice (sdp_utils.cpp): flash takes no mask, and heads are not padded here."""
    head = s.c // s.heads
    if s.kernel == "cudnn" and head % 8 == 0:
        return "cudnn"
    by_tensor_cores = setting.capability >= ((8, 0) if s.product == 4 else (7, 0))
    fits = head % (16 // s.product) == 0 or not by_tensor_cores
    return "efficient" if s.kernel != "math" and fits else "math"


def attend(w: Writer, s: Sizes, kernel: str, block: int) -> None:
    """Leaves `att`. The mask becomes numbers to be added first."""
    w.alloc("mask", "activations", s.product * block)
    if kernel == "math":
        _by_hand(w, s, block)
    elif kernel == "cudnn":
        _cudnn(w, s, block)
    else:
        if block % MASK_MULTIPLE:
            w.alloc("mask.padded", "activations", s.product * (block + MASK_MULTIPLE - block % MASK_MULTIPLE))
            w.free("mask")
        w.alloc("att", "activations", s.product * s.c)
    w.free("mask.padded" if w.alive("mask.padded") else "mask")


def _cudnn(w: Writer, s: Sizes, block: int) -> None:
    dice = [w.alloc("seed", "activations", DICE), w.alloc("offset", "activations", DICE)]
    w.alloc("att", "activations", s.product * s.c)
    if block > UNDIVIDED:
        sums = -(-block // KEYS_A_PART) * 4 * (s.c + s.heads)
        w.free(w.alloc("attention scratch", "workspace", sums + CUDNN_SCRATCH))
    w.free(*dice)


def _by_hand(w: Writer, s: Sizes, block: int) -> None:
    """In float32, query and keys each scaled; rows that a mask leaves nothing of are looked for."""
    numbers, scores, rounded = {"q": s.c, "k": block * s.c, "v": block * s.c}, s.heads * block, s.product < 4
    wide = [w.alloc(f"{part}.wide", "activations", 4 * numbers[part]) for part in "qkv"] if rounded else []
    for part in "qk":
        w.alloc(f"{part}.scaled", "activations", 4 * numbers[part])
    w.alloc("scores", "activations", 4 * scores)
    w.free("k.scaled")
    w.alloc("probabilities", "activations", 4 * scores)
    w.free(w.alloc("masked scores", "activations", scores), "scores")
    if rounded:
        wide.append(w.alloc("probabilities.rounded", "activations", s.product * scores))
        w.alloc("att.wide", "activations", 4 * s.c)
    w.alloc("att", "activations", s.product * s.c)
    w.free(*(["att.wide"] if rounded else []), "probabilities", "q.scaled", *wide)


# ---- the draw

def draw(w: Writer, s: Sizes) -> None:
    """sample.draw: the logits at a temperature, the top k of them, and their probabilities."""
    kept = min(TOP_K, s.vocab)
    w.alloc("tempered", "logits", 4 * s.vocab)
    w.alloc("values", "other", 4 * kept)
    w.alloc("tokens", "other", 8 * kept)
    if s.vocab >= MANY:
        _count_by_digits(w, s)
    w.free("tempered")
    w.alloc("drawn from", "other", 4 * kept)
    w.free("values", "tokens", "drawn from")


def _count_by_digits(w: Writer, s: Sizes) -> None:
    a_thread = -(-s.vocab // (s.sms * BLOCKS_AT_ONCE * THREADS))
    blocks = -(-s.vocab // (THREADS * min(max(a_thread, LEAST_A_THREAD), MOST_A_THREAD)))
    parts = {"value": 4, "rank": 8, "digits": 8, "counts": 2 * DIGITS * blocks, "sums": 4 * DIGITS,
             "above": 4 * blocks, "equal": 4 * blocks}
    scratch = [w.alloc(f"top k.{part}", "workspace", nbytes) for part, nbytes in parts.items()]
    w.free(w.alloc("top k.scan", "workspace", SCAN), *reversed(scratch))
