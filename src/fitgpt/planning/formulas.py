"""Where the bytes at a peak come from, in words: the products that size what an owner holds then.

Nothing here is known beforehand. Every figure is added up from the tensors that are alive at that moment, so a formula
cannot say anything but what the tape says; what it leaves out stands at its end, in bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

from ..config.run_config import DEFAULT_VOCAB, RunConfig
from ..core.units import MiB, show_bytes, show_count
from ..memory.allocator import Timeline
from ..memory.aten import up_to
from ..memory.forwardgraph import LINE
from ..memory.padding import MULTIPLE, MULTIPLE_FLOAT32
from ..memory.tape import RELEASE, Event
from ..nouns import OwnerShare

MOST_TERMS = 3
SMALL = 0.01       # of an owner's bytes: what is below it is a small thing
PIECE = MiB        # what is sized by no formula is named from there on
UNSAID = 0.002     # of an owner's bytes: what is below it is not worth words
_LAYER = re.compile(r"x?(\d+)(?:\.|$)")  # "3.qkv", "x3": of layer 3
_POSITIONS = re.compile(r"pos(?:itions|_emb)")  # a tensor of one sequence, whatever the batch
_PARAMETER = re.compile(r"(?:\d+\.)?(wte|wpe|c_attn|qkv|attn_proj|proj|c_fc|up|mlp_proj|down)(?!\w|\.bias)")
_OF_PARAMETERS = ("weights", "gradients", "optimizer", "casts")
_HALVES = (".half", ".raw")              # what half precision's products make of weights and gradients
_WHOLE = ".float32"                      # a weight before it is rounded


class Alive(NamedTuple):
    name: str
    nbytes: int    # as asked for
    taken: int     # of the block it lies in


class Term(NamedTuple):
    nbytes: int
    words: str


class Sizes(NamedTuple):
    """What tensors are multiples of."""

    batch: int
    block: int
    width: int
    layers: int
    vocab: int
    params: int
    product: int   # bytes of a number in the matrix products
    weight: int    # bytes of a matrix's number as it is kept

    @property
    def tokens(self) -> int:
        return self.batch * self.block


def owners(config: RunConfig, trainer: str, timeline: Timeline, event: int) -> tuple[OwnerShare, ...]:
    """Every owner at that moment, the largest first; their bytes are what is allocated then."""
    sizes = _sizes(config, trainer, _phase(timeline, event))
    shares = [OwnerShare(owner, sum(each.taken for each in tensors), formula(owner, tensors, sizes))
              for owner, tensors in _held(timeline, event).items()]
    return tuple(sorted(shares, key=lambda share: -share.nbytes))


def formula(owner: str, tensors: Sequence[Alive], sizes: Sizes) -> str:
    """'12 layers × 16,384 tokens × (576 × 36 + 64) bytes, and 3.1 MiB of small things'."""
    total = sum(each.taken for each in tensors)
    terms = sorted(_TERMS.get(owner, _pieces)(tensors, sizes), reverse=True)
    named = [term for term in terms if term.nbytes >= SMALL * total][:MOST_TERMS]
    rest = total - sum(term.nbytes for term in named)
    if not named:
        return f"{show_bytes(rest)} of small things"
    words = " + ".join(term.words for term in named)
    if rest < UNSAID * total:
        return words
    slack = total - sum(each.nbytes for each in tensors)
    what = "of rounding" if slack > rest / 2 else "of small things" if rest < 3 * SMALL * total else "more"
    return f"{words}, and {show_bytes(rest)} {what}"


def tensor_formula(event: Event, config: RunConfig, trainer: str, phase: str) -> str:
    """'2,048 × 50,304 × 2 bytes': one tensor, by the sides that what it is has; in bytes where it has none of them."""
    sizes = _sizes(config, trainer, phase)
    if event.owner == "logits":
        terms = _of_logits([Alive(event.name, event.nbytes, event.nbytes)], sizes)
        return terms[0].words if terms else show_bytes(event.nbytes)
    sides = next((sides for sides in _sides(event, sizes) if event.nbytes % prod(sides) == 0), None)
    if sides is None:
        return show_bytes(event.nbytes)
    each = event.nbytes // prod(sides)
    return " × ".join(f"{side:,}" for side in (*sides, each)) + (" bytes" if each > 1 else " byte")


def _sides(event: Event, sizes: Sizes) -> list[tuple[int, ...]]:
    """What a tensor of that name may have as its sides, the most of them first."""
    if event.owner in ("activations", "data") and _POSITIONS.search(event.name):
        return [(sizes.block, sizes.width), (sizes.block,)]
    if event.owner in ("activations", "data"):
        return [(sizes.batch, sizes.block, sizes.width), (sizes.batch, sizes.block)]
    found = _PARAMETER.match(event.name) if event.owner in _OF_PARAMETERS else None
    if found is None:
        return []
    width = sizes.width
    return [{"wte": (sizes.vocab, width), "wpe": (sizes.block, width), "c_attn": (width, 3 * width),
             "qkv": (width, 3 * width), "attn_proj": (width, width), "proj": (width, width),
             "c_fc": (width, 4 * width), "up": (width, 4 * width), "mlp_proj": (4 * width, width),
             "down": (4 * width, width)}[found[1]]]


# ---- an owner's tensors as a sum of products


def _of_layers(tensors: Sequence[Alive], sizes: Sizes) -> list[Term]:
    """So many bytes a token in each layer; what is of no layer, together."""
    of_layer: dict[int, list[int]] = {}
    for each in tensors:
        found = _LAYER.match(each.name)
        layer = int(found[1]) if found and int(found[1]) < sizes.layers else -1
        of_layer.setdefault(layer, []).append(each.nbytes)
    outside = _a_token(of_layer.pop(-1, []), sizes)
    alike = Counter(_a_token(found, sizes) for found in of_layer.values())
    terms = [_tokens_term(f"{count} layer{'s' if count > 1 else ''} × ", count, each, sizes)
             for each, count in alike.items()]
    return [term for term in (*terms, _tokens_term("", 1, outside, sizes)) if term.nbytes]


def _a_token(found: Iterable[int], sizes: Sizes) -> tuple[int, int]:
    """Bytes for each of a token's C numbers, and bytes besides; what is no multiple of the tokens is left out."""
    wide = beside = 0
    for nbytes in found:
        if nbytes % (sizes.tokens * sizes.width) == 0:
            wide += nbytes // (sizes.tokens * sizes.width)
        elif nbytes % sizes.tokens == 0:
            beside += nbytes // sizes.tokens
    return wide, beside


def _tokens_term(times: str, count: int, each: tuple[int, int], sizes: Sizes) -> Term:
    wide, beside = each
    nbytes = count * sizes.tokens * (wide * sizes.width + beside)
    if wide and beside:
        a_token = f"({sizes.width:,} × {wide:,} + {beside:,})"
    else:
        a_token = f"{sizes.width:,} × {wide:,}" if wide else f"{beside:,}"
    return Term(nbytes, f"{times}{sizes.tokens:,} tokens × {a_token} bytes")


def _of_tokens(tensors: Sequence[Alive], sizes: Sizes) -> list[Term]:
    term = _tokens_term("", 1, (0, sum(each.nbytes for each in tensors) // sizes.tokens), sizes)
    return [term] if term.nbytes else []


def _of_logits(tensors: Sequence[Alive], sizes: Sizes) -> list[Term]:
    """All tokens' logits, however many arrays of them there are; a piece's for themselves. Rows that are laid out in
    whole lines lack the end of the last one."""
    number, terms, left = sizes.product, list[Term](), list(tensors)
    for multiple in (1, MULTIPLE_FLOAT32, MULTIPLE, LINE // number):
        vocab = up_to(sizes.vocab, multiple)
        whole = sizes.tokens * vocab
        lacks = vocab * number if multiple == LINE // number else 1
        told = [each for each in left if -each.nbytes % (whole * number) < lacks]
        left = [each for each in left if each not in told]
        if told:
            wide = sum(-(-each.nbytes // whole) for each in told)
            terms.append(Term(sum(each.nbytes for each in told),
                              f"{sizes.batch:,} × {sizes.block:,} × {vocab:,} × {wide} bytes"))
    for nbytes, count in Counter(each.nbytes for each in left).items():
        rows, rest = divmod(nbytes, sizes.vocab * number)
        if not rest:
            times = f"{count} × " if count > 1 else ""
            terms.append(Term(count * nbytes, f"{times}{rows:,} × {sizes.vocab:,} × {number} bytes"))
    return terms


def _of_parameters(tensors: Sequence[Alive], sizes: Sizes) -> list[Term]:
    """So many numbers of so many bytes: those of the products apart from those that are kept."""
    halves = sum(each.nbytes for each in tensors if each.name.endswith(_HALVES))
    whole = sum(each.nbytes for each in tensors if each.name.endswith(_WHOLE))
    kept = sum(each.nbytes for each in tensors) - halves - whole
    return [Term(nbytes, f"{show_count(nbytes // width)} × {width} bytes")
            for nbytes, width in ((kept, sizes.weight), (halves, sizes.product), (whole, 4)) if nbytes]


def _of_every_parameter(tensors: Sequence[Alive], sizes: Sizes) -> list[Term]:
    nbytes = sum(each.nbytes for each in tensors)
    return [Term(nbytes, f"{show_count(sizes.params)} × {nbytes / sizes.params:.3g} bytes")]


def _of_copies(tensors: Sequence[Alive], sizes: Sizes) -> list[Term]:
    nbytes = sum(each.nbytes for each in tensors)
    return [Term(nbytes, f"{show_count(nbytes // sizes.product)} × {sizes.product} bytes")]


def _pieces(tensors: Sequence[Alive], sizes: Sizes) -> list[Term]:
    return [Term(count * nbytes, f"{f'{count} × ' if count > 1 else ''}{show_bytes(nbytes)}")
            for nbytes, count in Counter(each.nbytes for each in tensors).items() if nbytes >= PIECE]


_TERMS: dict[str, Callable[[Sequence[Alive], Sizes], list[Term]]] = {
    "weights": _of_parameters, "gradients": _of_parameters, "optimizer": _of_every_parameter, "casts": _of_copies,
    "activations": _of_layers, "logits": _of_logits, "data": _of_tokens,
}


# ---- what is alive, and what it is measured by


def _held(timeline: Timeline, event: int) -> dict[str, list[Alive]]:
    """The tensors that are alive right after an event, by owner."""
    alive: dict[str, tuple[Event, int]] = {}
    for entry, change in zip(timeline.tape.events[:event + 1], timeline.changes, strict=False):
        if entry[0]:
            alive[entry[1]] = entry, change
        elif entry[1] != RELEASE:
            del alive[entry[1]]
    held: dict[str, list[Alive]] = {}
    for entry, change in alive.values():
        held.setdefault(entry.owner, []).append(Alive(entry.name, entry.nbytes, change))
    return held


def _phase(timeline: Timeline, event: int) -> str:
    return next((phase for phase, start, end in timeline.tape.spans() if start <= event < end), "")


def _sizes(config: RunConfig, trainer: str, phase: str) -> Sizes:
    """nanoGPT's train.py evaluates at the batch and block it trains at, whatever a config says."""
    evaluating = trainer == "fitgpt" and phase.endswith("eval")
    shape = config.gpt_config()
    batch = config.eval_batch if evaluating else 1 if phase == "sample" else config.batch_size
    return Sizes(batch=batch,
                 block=config.eval_block if evaluating else config.block_size, width=config.n_embd,
                 layers=config.n_layer, vocab=config.vocab_size or DEFAULT_VOCAB, params=shape.count_params(),
                 product=4 if config.dtype == "float32" else 2,
                 weight=2 if trainer == "fitgpt" and config.weights == "bfloat16" and phase != "sample" else 4)
