"""Size of a failed allocation + tape of the run → the tensor that requested it, and what that tensor is called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..config.run_config import DEFAULT_VOCAB, GPT2_VOCAB
from ..core.units import MiB
from ..memory.allocator import LARGE_BUFFER, SMALL_BUFFER, allocation_size
from ..memory.tape import Event, Tape, round_size
from .oom_message import OomMessage

# ---- with the run's tape


class TensorMatch(NamedTuple):
    event: Event
    phase: str        # of the tape: first_eval, train …
    backward: bool
    allocated: int    # on the tape, before this allocation
    fails_here: bool  # replayed under the message's memory limit, the tape runs out of memory at this allocation


def match_tensor(message: OomMessage, phase: str, tape: Tape, allocated: Sequence[int],
                 failed: int | None) -> TensorMatch | None:
    """The allocation of the tape that has the requested size.

    If several have it: the one at which the replay fails, else the one with the most similar amount allocated before
    it, in the phase that the traceback shows. `allocated`: bytes after each event of the tape. `failed`: the event at
    which the tape, replayed under the message's limit, runs out of memory.
    """
    if message.requested is None:
        return None
    found = [TensorMatch(event, tape_phase, is_backward(event), allocated[number - 1] if number else 0,
                         number == failed)
             for tape_phase, start, end in tape.phases
             for number, event in enumerate(tape.events[start:end], start)
             if event.alloc and has_requested_size(event.nbytes, message)]
    failing = next((each for each in found if each.fails_here and _agrees(each, phase)), None)
    if failing is not None or is_segment_size(message):
        return failing
    agreeing = [each for each in found if _agrees(each, phase)] or found
    return min(agreeing, key=lambda each: abs(each.allocated - (message.allocated or 0)), default=None)


def has_requested_size(nbytes: int, message: OomMessage) -> bool:
    """Whether PyTorch requests the message's size for a tensor of `nbytes`: rounded to 512 bytes, or to a segment."""
    assert message.requested is not None
    size = round_size(nbytes)
    return any(abs(each - message.requested) <= message.tolerance for each in (size, allocation_size(size)))


def is_segment_size(message: OomMessage) -> bool:
    """Whether it is the size of a new segment for small tensors, which is the same for every tensor."""
    return message.requested in (SMALL_BUFFER, LARGE_BUFFER)


def _agrees(found: TensorMatch, phase: str) -> bool:
    if phase == "eval":
        return found.phase.endswith("eval")
    if phase in ("forward", "backward"):
        return found.phase.endswith("train") and found.backward == (phase == "backward")
    if phase == "step":
        return found.event.owner == "optimizer" or found.phase == "step"
    return phase in ("", found.phase)


# ---- without a config

# Tokens of a usual batch are a multiple of this. Sizes are printed to 2 MiB, those in GiB to 10 MiB, so one in 30 to 60
# other tensors has such a size by chance: it remains a guess.
TOKENS_MULTIPLE, TOKENS_MULTIPLE_IN_GIB = 1024, 4096


def guess_logits(message: OomMessage) -> str:
    """A sentence if logits with GPT-2's vocabulary have the requested size; otherwise empty."""
    if message.requested is None or is_segment_size(message):
        return ""
    multiple = TOKENS_MULTIPLE if message.tolerance < MiB else TOKENS_MULTIPLE_IN_GIB
    found = []
    for width, precision in ((4, "float32"), (2, "half precision")):
        for vocab in (DEFAULT_VOCAB, GPT2_VOCAB):
            tokens = round(message.requested / (vocab * width * multiple)) * multiple
            if tokens and has_requested_size(tokens * vocab * width, message):
                found.append(f"{tokens:,} tokens in {precision} ({tokens:,} × {vocab:,} × {width} bytes)")
                break
    return f"A guess: this is the size of logits, with GPT-2's vocabulary, of {' or '.join(found)}." if found else ""


# ---- names

# Labels of the phases of a tape, as in the table of `fitgpt plan`.
PHASE_LABELS = {"load": "load", "first_eval": "first evaluation", "first_train": "first step", "train": "training",
                "step": "optimizer step", "eval": "evaluation", "save": "saving", "resume": "resuming",
                "sample": "sampling"}
_OWNERS = {"weights": "weights", "gradients": "a gradient", "optimizer": "optimizer state",
           "casts": "a half-precision copy of weights", "activations": "an activation", "logits": "logits",
           "workspace": "a kernel's workspace", "data": "the batch", "other": "a small tensor"}
_BACKWARD = re.compile(r"(?:\d+\.)?d_.*|.*\.(?:grad|raw|fresh)|.*backward.*")
_TENSORS = tuple((re.compile(pattern), text) for pattern, text in (
    (r"log_softmax\.float", "the float32 copy of the log-probabilities, which the loss keeps for its backward pass"),
    (r"log_softmax", "the log-probabilities of every token"),
    (r"logits of .*", "the logits of every token"),
    (r"logits", "the logits of one chunk of the loss"),
    (r"zeros for logits", "zeros for the gradient of the logits, which forward returns and nothing uses"),
    (r"d_log_softmax", "the float32 gradient of the log-probabilities, the first tensor of the backward pass"),
    (r"d_log_softmax\.half", "the half-precision gradient of the log-probabilities"),
    (r"d_logits", "the gradient of the logits"),
    (r"(\d+)\.fc", "the output of the first MLP matmul of layer {0}"),
    (r"(\d+)\.(?:gelu|g)", "the GELU output of layer {0}"),
    (r"(\d+)\.qkv", "queries, keys and values of layer {0}"),
    (r"(\d+)\.att(?:\.padded)?", "the attention output of layer {0}"),
    (r"wte", "the token embedding, which is also the output head"),
    (r"(.+)\.(?:exp_avg(?:_sq)?|first|second)", "the optimizer's moments of {0}"),
    (r"(.+)\.(?:grad|fresh|raw)", "the gradient of {0}"),
    (r"(.+)\.cast", "the half-precision copy of {0}"),
    (r"(?:\d+\.)?d_(.+)", "a gradient inside the backward pass ({0})"),
))


def describe_tensor(event: Event) -> str:
    """'the GELU output of layer 3' for the event named 3.gelu."""
    for pattern, text in _TENSORS:
        if found := pattern.fullmatch(event.name):
            return text.format(*found.groups())
    return f"{_OWNERS[event.owner]} ({event.name})"


def is_backward(event: Event) -> bool:
    return _BACKWARD.fullmatch(event.name) is not None
