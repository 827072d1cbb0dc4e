"""Sampling with kept keys and values draws what sampling without them would."""

from __future__ import annotations

import torch

from fitgpt import GPT, GPTConfig
from fitgpt.engine.sample import SamplingOptions, draw, generate


def model() -> GPT:
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=67, block_size=32))
    with torch.no_grad():
        gpt.lm_head.weight *= 20  # sharp enough that greedy choices are not ties
    return gpt.eval()


def test_the_cache_changes_nothing_within_a_block() -> None:
    gpt, prompt = model(), [1, 2, 3]
    sampled = list(generate(gpt, prompt, 29, SamplingOptions(temperature=0), seed=0))
    seen = list(prompt)
    for token in sampled:
        assert int(gpt.next_logits(torch.tensor([seen]))[0].argmax()) == token
        seen.append(token)


def test_it_generates_past_the_block_size() -> None:
    tokens = list(generate(model(), list(range(40)), 100, SamplingOptions(), seed=0))
    assert len(tokens) == 100


def test_tokens_of_the_padding_are_never_drawn() -> None:
    assert max(generate(model(), [1], 200, SamplingOptions(temperature=5.0, top_k=0), seed=0, vocab_size=9)) == 8


def test_the_same_seed_draws_the_same_text_and_another_does_not() -> None:
    gpt = model()
    first, again, other = (list(generate(gpt, [5], 30, SamplingOptions(temperature=1.5), seed=s)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_top_k_and_top_p_never_draw_outside_their_sets() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(-1)  # probabilities .64 .24 .09 .03
    generator = torch.Generator().manual_seed(0)
    assert {draw(logits, SamplingOptions(1.0, top_k=2), generator) for _ in range(200)} == {0, 1}
    assert {draw(logits, SamplingOptions(1.0, top_k=0, top_p=0.6), generator) for _ in range(200)} == {0}
    assert {draw(logits, SamplingOptions(1.0, top_k=0, top_p=0.8), generator) for _ in range(200)} == {0, 1}
    assert {draw(logits, SamplingOptions(1.0, top_k=0), generator) for _ in range(500)} == {0, 1, 2, 3}
    assert {draw(logits, SamplingOptions(0.0), generator) for _ in range(5)} == {0}
