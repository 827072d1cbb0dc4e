"""What the tensors and phases of a tape are called when people are told of them."""

from __future__ import annotations

import re

from ..memory.tape import Event

PHASES = {"load": "while the model was put on the card", "first_eval": "in the evaluation before the first step",
          "first_train": "in the first iteration", "train": "in training", "step": "in the optimizer's step",
          "eval": "in an evaluation", "save": "while a checkpoint was written", "resume": "while the run was resumed",
          "sample": "while a sample was drawn"}
_OWNERS = {"weights": "weights", "gradients": "a gradient", "optimizer": "the optimizer's state",
           "casts": "a half-precision copy of weights", "activations": "an activation", "logits": "logits",
           "workspace": "a kernel's scratch memory", "data": "the batch", "other": "a small thing"}
_BACKWARD = re.compile(r"(?:\d+\.)?d[ _].*|.*\.(?:grad|raw|fresh)|.*backward.*")
# nanoGPT's tape (memory/eager.py, compiled.py) and ours (memory/passes.py) name some things alike, some not.
_NAMES = tuple((re.compile(pattern), words) for pattern, words in (
    (r"log_softmax\.float", "the float32 copy of the log-probabilities, which the loss keeps for its backward pass"),
    (r"log_softmax", "the log-probabilities of every token"),
    (r"logits of .*", "the logits of every token"),
    (r"logits", "the logits of one piece of the loss"),
    (r"zeros for logits", "zeros for the gradient of the logits, which forward returns and nobody uses"),
    (r"d log_softmax", "the float32 gradient of the log-probabilities, the first thing the backward pass makes"),
    (r"d log_softmax\.half", "the half-precision gradient of the log-probabilities"),
    (r"d logits", "the gradient of the logits"),
    (r"(\d+)\.(?:up|fc)", "the wide product of layer {0}'s MLP"),
    (r"(\d+)\.(?:gelu|g)", "the GELU of layer {0}"),
    (r"(\d+)\.qkv", "queries, keys and values of layer {0}"),
    (r"(\d+)\.att(?:ention)?(?:\.wide)?", "the attention of layer {0}"),
    (r"wte", "the token embedding, which is the head too"),
    (r"(.+)\.(?:exp_avg(?:_sq)?|first|second)", "the optimizer's moments of {0}"),
    (r"(.+)\.(?:grad|fresh|raw)", "the gradient of {0}"),
    (r"(.+)\.(?:half|cast)", "the half-precision copy of {0}"),
    (r"(?:\d+\.)?d[ _](.+)", "a gradient that the backward pass hands on ({0})"),
))


def name_in_words(event: Event) -> str:
    for pattern, words in _NAMES:
        if found := pattern.fullmatch(event.name):
            return words.format(*found.groups())
    return f"{_OWNERS[event.owner]} ({event.name})"


def is_backward(event: Event) -> bool:
    return _BACKWARD.fullmatch(event.name) is not None
