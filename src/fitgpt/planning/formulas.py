"""Timeline → formulas: the bytes of each owner at a peak as products of sizes, "12 layers × 16,384 tokens × … bytes".

Every figure is a sum over the tensors that are alive at that moment, so a formula cannot differ from the tape. Bytes
that no formula covers are named at its end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

from ..config.run_config import DEFAULT_VOCAB, RunConfig
from ..core.units import MiB, show_bytes, show_count
from ..memory.tape import EMPTY_CACHE, Event
from ..memory.timeline import Timeline
from ..tapes.aten import round_up
from ..tapes.nanogpt_compiled import LINE, MULTIPLE, MULTIPLE_FLOAT32

MOST_TERMS = 3
SMALL = 0.01       # of an owner's bytes: smaller terms are summed up
LARGE = MiB        # tensors without a formula are listed from this size on
NEGLIGIBLE = 0.002 # of an owner's bytes: a smaller rest is not mentioned
_LAYER = re.compile(r"(\d+)\.")        # "3.qkv": of layer 3
_POSITIONS = re.compile(r"pos(?:itions|_emb)")  # a tensor of one sequence, whatever the batch
_PARAMETER = re.compile(r"(?:\d+\.)?(wte|wpe|c_attn|attn(?:\.c)?_proj|c_fc|mlp(?:\.c)?_proj)(?!\w|\.bias)")
_PARAMETER_OWNERS = ("weights", "gradients", "optimizer", "casts")
_RAW = ".raw"                            # a half-precision gradient, the result of a matmul
_WHOLE = ".float32"                      # a weight before it is rounded


class OwnerShare(NamedTuple):
    """Whose bytes lie there at the peak, and where they come from: "16 × 1,024 × 50,304 × 2 bytes"."""

    owner: str
    nbytes: int
    formula: str


class Alive(NamedTuple):
    """A tensor that is allocated at the peak."""

    name: str
    nbytes: int    # as requested
    taken: int     # of the allocator's block


class Term(NamedTuple):
    """One product of a formula."""

    nbytes: int
    text: str


class FormulaSizes(NamedTuple):
    """The sizes that tensors are multiples of."""

    batch: int
    block: int
    width: int
    layers: int
    vocab: int
    params: int
    matmul: int    # bytes per element in matmuls
    weight: int    # bytes per element of a weight matrix

    @property
    def tokens(self) -> int:
        return self.batch * self.block


def owners(config: RunConfig, trainer: str, timeline: Timeline, event: int) -> tuple[OwnerShare, ...]:
    """Every owner after an event, the largest first; their sum is what is allocated then."""
    sizes = _sizes(config, trainer, _phase(timeline, event))
    shares = [OwnerShare(owner, sum(each.taken for each in tensors), formula(owner, tensors, sizes))
              for owner, tensors in _alive(timeline, event).items()]
    return tuple(sorted(shares, key=lambda share: -share.nbytes))


def formula(owner: str, tensors: Sequence[Alive], sizes: FormulaSizes) -> str:
    """'12 layers × 16,384 tokens × (576 × 36 + 64) bytes, and 3.1 MiB of small things'."""
    total = sum(each.taken for each in tensors)
    terms = sorted(_TERMS.get(owner, _large_tensors)(tensors, sizes), reverse=True)
    named = [term for term in terms if term.nbytes >= SMALL * total][:MOST_TERMS]
    rest = total - sum(term.nbytes for term in named)
    if not named:
        return f"{show_bytes(rest)} of small things"
    text = " + ".join(term.text for term in named)
    if rest < NEGLIGIBLE * total:
        return text
    slack = total - sum(each.nbytes for each in tensors)
    what = "of rounding" if slack > rest / 2 else "of small things" if rest < 3 * SMALL * total else "more"
    return f"{text}, and {show_bytes(rest)} {what}"


def tensor_formula(event: Event, config: RunConfig, trainer: str, phase: str) -> str:
    """'2,048 × 50,304 × 2 bytes': one tensor as a product of its dimensions; in bytes where they are not known."""
    sizes = _sizes(config, trainer, phase)
    if event.owner == "logits":
        terms = _of_logits([Alive(event.name, event.nbytes, event.nbytes)], sizes)
        return terms[0].text if terms else show_bytes(event.nbytes)
    sides = next((sides for sides in _sides(event, sizes) if event.nbytes % prod(sides) == 0), None)
    if sides is None:
        return show_bytes(event.nbytes)
    each = event.nbytes // prod(sides)
    return " × ".join(f"{side:,}" for side in (*sides, each)) + (" bytes" if each > 1 else " byte")


def _sides(event: Event, sizes: FormulaSizes) -> list[tuple[int, ...]]:
    """Possible dimensions of a tensor of that name, the most first."""
    if event.owner in ("activations", "data") and _POSITIONS.search(event.name):
        return [(sizes.block, sizes.width), (sizes.block,)]
    if event.owner in ("activations", "data"):
        return [(sizes.batch, sizes.block, sizes.width), (sizes.batch, sizes.block)]
    found = _PARAMETER.match(event.name) if event.owner in _PARAMETER_OWNERS else None
    if found is None:
        return []
    width = sizes.width
    return [{"wte": (sizes.vocab, width), "wpe": (sizes.block, width), "c_attn": (width, 3 * width),
             "attn_proj": (width, width), "c_fc": (width, 4 * width),
             "mlp_proj": (4 * width, width)}[found[1].replace(".c", "")]]


# ---- the tensors of an owner as a sum of products


def _of_layers(tensors: Sequence[Alive], sizes: FormulaSizes) -> list[Term]:
    """Bytes per token of each layer, and of tensors outside the layers."""
    of_layer: dict[int, list[int]] = {}
    for each in tensors:
        found = _LAYER.match(each.name)
        layer = int(found[1]) if found and int(found[1]) < sizes.layers else -1
        of_layer.setdefault(layer, []).append(each.nbytes)
    outside = _bytes_per_token(of_layer.pop(-1, []), sizes)
    alike = Counter(_bytes_per_token(found, sizes) for found in of_layer.values())
    terms = [_tokens_term(f"{count} layer{'s' if count > 1 else ''} × ", count, each, sizes)
             for each, count in alike.items()]
    return [term for term in (*terms, _tokens_term("", 1, outside, sizes)) if term.nbytes]


def _bytes_per_token(found: Iterable[int], sizes: FormulaSizes) -> tuple[int, int]:
    """(bytes per token and channel, other bytes per token). Sizes that are no multiple of the tokens are left out."""
    wide = beside = 0
    for nbytes in found:
        if nbytes % (sizes.tokens * sizes.width) == 0:
            wide += nbytes // (sizes.tokens * sizes.width)
        elif nbytes % sizes.tokens == 0:
            beside += nbytes // sizes.tokens
    return wide, beside


def _tokens_term(times: str, count: int, each: tuple[int, int], sizes: FormulaSizes) -> Term:
    wide, beside = each
    nbytes = count * sizes.tokens * (wide * sizes.width + beside)
    if wide and beside:
        per_token = f"({sizes.width:,} × {wide:,} + {beside:,})"
    else:
        per_token = f"{sizes.width:,} × {wide:,}" if wide else f"{beside:,}"
    return Term(nbytes, f"{times}{sizes.tokens:,} tokens × {per_token} bytes")


def _of_tokens(tensors: Sequence[Alive], sizes: FormulaSizes) -> list[Term]:
    term = _tokens_term("", 1, (0, sum(each.nbytes for each in tensors) // sizes.tokens), sizes)
    return [term] if term.nbytes else []


def _of_logits(tensors: Sequence[Alive], sizes: FormulaSizes) -> list[Term]:
    """Arrays with the logits of all tokens, and those of chunks. Rows that are padded to whole cache lines lack the
    padding of the last row."""
    element, terms, left = sizes.matmul, list[Term](), list(tensors)
    for multiple in (1, MULTIPLE_FLOAT32, MULTIPLE, LINE // element):
        vocab = round_up(sizes.vocab, multiple)
        whole = sizes.tokens * vocab
        lacks = vocab * element if multiple == LINE // element else 1
        whole_arrays = [each for each in left if -each.nbytes % (whole * element) < lacks]
        left = [each for each in left if each not in whole_arrays]
        if whole_arrays:
            wide = sum(-(-each.nbytes // whole) for each in whole_arrays)
            terms.append(Term(sum(each.nbytes for each in whole_arrays),
                              f"{sizes.batch:,} × {sizes.block:,} × {vocab:,} × {wide} bytes"))
    for nbytes, count in Counter(each.nbytes for each in left).items():
        rows, rest = divmod(nbytes, sizes.vocab * element)
        if not rest:
            times = f"{count} × " if count > 1 else ""
            terms.append(Term(count * nbytes, f"{times}{rows:,} × {sizes.vocab:,} × {element} bytes"))
    return terms


def _of_parameters(tensors: Sequence[Alive], sizes: FormulaSizes) -> list[Term]:
    """Elements × bytes: those of matmuls apart from those that are kept."""
    halves = sum(each.nbytes for each in tensors if each.name.endswith(_RAW))
    whole = sum(each.nbytes for each in tensors if each.name.endswith(_WHOLE))
    kept = sum(each.nbytes for each in tensors) - halves - whole
    return [Term(nbytes, f"{show_count(nbytes // width)} × {width} bytes")
            for nbytes, width in ((kept, sizes.weight), (halves, sizes.matmul), (whole, 4)) if nbytes]


def _of_every_parameter(tensors: Sequence[Alive], sizes: FormulaSizes) -> list[Term]:
    nbytes = sum(each.nbytes for each in tensors)
    return [Term(nbytes, f"{show_count(sizes.params)} × {nbytes / sizes.params:.3g} bytes")]


def _of_copies(tensors: Sequence[Alive], sizes: FormulaSizes) -> list[Term]:
    nbytes = sum(each.nbytes for each in tensors)
    return [Term(nbytes, f"{show_count(nbytes // sizes.matmul)} × {sizes.matmul} bytes")]


def _large_tensors(tensors: Sequence[Alive], sizes: FormulaSizes) -> list[Term]:
    return [Term(count * nbytes, f"{f'{count} × ' if count > 1 else ''}{show_bytes(nbytes)}")
            for nbytes, count in Counter(each.nbytes for each in tensors).items() if nbytes >= LARGE]


_TERMS: dict[str, Callable[[Sequence[Alive], FormulaSizes], list[Term]]] = {
    "weights": _of_parameters, "gradients": _of_parameters, "optimizer": _of_every_parameter, "casts": _of_copies,
    "activations": _of_layers, "logits": _of_logits, "data": _of_tokens,
}


# ---- the tensors at the peak, and the sizes


def _alive(timeline: Timeline, event: int) -> dict[str, list[Alive]]:
    """The tensors that are allocated after an event, by owner."""
    alive: dict[str, tuple[Event, int]] = {}
    for entry, change in zip(timeline.tape.events[:event + 1], timeline.changes, strict=False):
        if entry[0]:
            alive[entry[1]] = entry, change
        elif entry[1] != EMPTY_CACHE:
            del alive[entry[1]]
    held: dict[str, list[Alive]] = {}
    for entry, change in alive.values():
        held.setdefault(entry.owner, []).append(Alive(entry.name, entry.nbytes, change))
    return held


def _phase(timeline: Timeline, event: int) -> str:
    return next((phase for phase, start, end in timeline.tape.phases if start <= event < end), "")


def _sizes(config: RunConfig, trainer: str, phase: str) -> FormulaSizes:
    """nanoGPT's train.py evaluates with the batch and block of training, whatever the config says."""
    evaluating = trainer == "fitgpt" and phase.endswith("eval")
    shape = config.gpt_config()
    batch = config.eval_batch if evaluating else 1 if phase == "sample" else config.batch_size
    return FormulaSizes(batch=batch,
                 block=config.eval_block if evaluating else config.block_size, width=config.n_embd,
                 layers=config.n_layer, vocab=config.vocab_size or DEFAULT_VOCAB, params=shape.count_params(),
                 matmul=4 if config.dtype == "float32" else 2,
                 weight=2 if trainer == "fitgpt" and config.weights == "bfloat16" and phase != "sample" else 4)
