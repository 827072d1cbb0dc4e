"""Which allocation of a run asked for the bytes that were refused: the size of a message looked up on the tape."""

from __future__ import annotations

from typing import NamedTuple

from ..config.run_config import DEFAULT_VOCAB, GPT2_VOCAB
from ..core.units import MiB
from ..memory.allocator import replay
from ..memory.blocks import LARGE_SEGMENT, SMALL_SEGMENT, rounded, segment_size
from ..memory.tape import Event
from ..sights import OutOfMemory
from .about import Run
from .names import is_backward

GPT2_VOCABULARIES = (DEFAULT_VOCAB, GPT2_VOCAB)
# A batch of GPT-2's is a multiple of so many tokens. Sizes are printed to 2 MiB, those in GiB to 10 MiB, so other
# tensors have such a size by chance, once in 30 to 60 times: it stays a guess.
ROUND_TOKENS, ROUND_TOKENS_IN_GIB = 1024, 4096


class Match(NamedTuple):
    event: Event
    phase: str       # of the tape: first_eval, train …
    backward: bool
    allocated: int   # on the tape, just before
    refused: bool    # replayed within the message's own limit, the tape ends at this very event


def match(message: OutOfMemory, run: Run, phase: str, limit: int | None) -> Match | None:
    """The event whose size was asked for. Of several: the one the replay is refused at, else the one at which the tape
    has allocated what the message says, in the phase that the traceback shows."""
    if message.asked is None:
        return None
    refused = None if limit is None else replay(run.tape, limit, expandable=run.expandable).failed
    held = run.timeline.allocated
    found = [Match(event, tape_phase, is_backward(event), held[number - 1] if number else 0, number == refused)
             for tape_phase, start, end in run.tape.spans()
             for number, event in enumerate(run.tape.events[start:end], start)
             if event.alloc and asks(event.nbytes, message)]
    exact = next((each for each in found if each.refused and _agrees(each, phase)), None)
    if exact is not None or says_nothing(message):
        return exact
    agreeing = [each for each in found if _agrees(each, phase)] or found
    return min(agreeing, key=lambda each: abs(each.allocated - (message.allocated or 0)), default=None)


def asks(nbytes: int, message: OutOfMemory) -> bool:
    """Whether a tensor of that size is printed as the size asked for: rounded to 512 bytes, or to a segment."""
    assert message.asked is not None
    size = rounded(nbytes)
    return any(abs(each - message.asked) <= message.within for each in (size, segment_size(size)))


def says_nothing(message: OutOfMemory) -> bool:
    """A new segment for small tensors has one size, whatever the tensor's."""
    return message.asked in (SMALL_SEGMENT, LARGE_SEGMENT)


def _agrees(found: Match, phase: str) -> bool:
    if phase == "eval":
        return found.phase.endswith("eval")
    if phase in ("forward", "backward"):
        return found.phase.endswith("train") and found.backward == (phase == "backward")
    if phase == "step":
        return found.event.owner == "optimizer" or found.phase == "step"
    return phase in ("", found.phase)


# ---- without a config


def guess(message: OutOfMemory) -> str:
    """Without a config: the logits of GPT-2's vocabulary that have this size, if any; only ever a guess."""
    if message.asked is None or says_nothing(message):
        return ""
    of = ROUND_TOKENS if message.within < MiB else ROUND_TOKENS_IN_GIB
    found = []
    for width, words in ((4, "float32"), (2, "half precision")):
        for vocab in GPT2_VOCABULARIES:
            tokens = round(message.asked / (vocab * width * of)) * of
            if tokens and asks(tokens * vocab * width, message):
                found.append((tokens, vocab, width, words))
                break
    if not found:
        return ""
    told = " or ".join(f"{tokens:,} tokens in {words} ({tokens:,} × {vocab:,} × {width} bytes)"
                       for tokens, vocab, width, words in found)
    return f"A guess: it is the size of the logits, with GPT-2's vocabulary, of {told}."
