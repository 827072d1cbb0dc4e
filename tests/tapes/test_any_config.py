"""Any config has a tape: of either trainer, on every kind of GPU, with sizes that are odd or that coincide."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.hardware.gpus import GpuModel, load
from fitgpt.memory.platform import TORCH_VERSIONS, Platform
from fitgpt.memory.tape import EMPTY_CACHE, Event, Tape
from fitgpt.memory.timeline import replay
from fitgpt.planning.budget import platform_for
from fitgpt.planning.forecast import forecast, write_tape

CONFIGS = 100
ONE_OF_EACH_KIND = list({card.cc: card for card in load() if card.vendor == "nvidia"}.values())


def sizes(rng: Random) -> dict[str, int]:
    """Half of them are odd; of the others, a batch's rows are a few times as many as a row's numbers, so that
    activations are as large as weights and one may take another's memory."""
    if rng.random() < 0.5:
        heads = rng.choice((1, 2, 3, 5, 12))
        return {"n_head": heads, "n_embd": heads * rng.choice((1, 3, 8, 33, 64, 136, 264)),
                "batch_size": rng.randint(1, 5), "block_size": rng.choice((1, 2, 7, 33, 128, 1000, 4096)),
                "vocab_size": rng.choice((65, 72, 257, 50257, 50304, 100277))}
    width, batch, times = rng.choice((16, 32, 192, 768)), rng.choice((1, 4, 8, 16)), rng.choice((1, 3, 4))
    return {"n_head": rng.choice((1, 2, 4)), "n_embd": width, "batch_size": batch,
            "block_size": max(width * times // batch, 1), "vocab_size": rng.choice((65, 4 * width))}


def config_of(rng: Random, card: GpuModel) -> RunConfig:
    """One that the GPU can run."""
    platform = platform_for(card)
    return RunConfig(
        **sizes(rng), n_layer=rng.randint(1, 4), dropout=rng.choice((0.0, 0.1)), bias=rng.random() < 0.5,
        gradient_accumulation_steps=rng.randint(1, 5), grad_clip=rng.choice((0.0, 1.0)),
        dtype=rng.choice(("auto", "float32", "float16", *(("bfloat16",) if platform.has_bf16 else ()))),
        compile=platform.compiles and rng.random() < 0.75)


def check(tape: Tape) -> dict[str, Event]:
    """What is alive at the end. Copied parts of a tape are not looked at by the writer."""
    alive: dict[str, Event] = {}
    for event in tape.events:
        if event.alloc:
            assert event.name not in alive
            assert event.nbytes >= 0
            alive[event.name] = event
        elif event.name != EMPTY_CACHE:
            assert alive.pop(event.name)[1:] == event[1:]
    return alive


@pytest.mark.parametrize("number", range(CONFIGS))
def test_every_config_has_a_tape_that_frees_only_live_tensors(number: int) -> None:
    rng = Random(number)
    card, trainer = rng.choice(ONE_OF_EACH_KIND), "fitgpt" if number % 4 == 0 else "nanogpt"
    platform = platform_for(card, torch=rng.choice(list(TORCH_VERSIONS)))
    if rng.random() < 0.1:  # Windows
        platform = replace(platform, expandable=False, compiles=False)
    config = resolve_run(config_of(rng, card), platform)
    tape = write_tape(config, platform, trainer)
    alive = check(tape)
    timeline = replay(tape, expandable=platform.uses_expandable_segments(trainer))
    assert timeline.failed is None
    assert min(timeline.allocated) >= 0
    if trainer == "nanogpt":
        assert not {"activations", "casts", "gradients"} & {event.owner for event in alive.values()}
    if number % 4 < 2:
        found = forecast(config, platform, trainer)
        assert sum(share.nbytes for share in found.owners_at_peak) == found.phases[found.peak_phase].allocated


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("batch", "block", "gradient"), [
    (64, 1, "1.c_fc.weight.grad"), (16, 3, "0.c_attn.weight.grad")])
def test_a_gradient_may_reuse_memory_kept_by_the_forward_pass(batch: int, block: int, gradient: str,
                                                              accumulation: int) -> None:
    """With dropout the first norm's input is computed again over the kept rows of the tokens' table; where those are as
    large as a weight, its gradient takes the place next, and outlives the step."""
    config = RunConfig(n_layer=2, n_head=2, n_embd=16, batch_size=batch, block_size=block, vocab_size=1001, bias=True,
                       dtype="float16", dropout=0.1, compile=True, gradient_accumulation_steps=accumulation)
    tape = write_tape(config, Platform(), "nanogpt")
    check(tape)
    assert "tok_emb" not in {event.name for event in tape.events}  # the block goes by what it holds in the end
    gradients = 0
    for phase, start, end in tape.phases:
        if phase == "step":
            break
        gradients += sum((event.nbytes if event.alloc else -event.nbytes) for event in tape.events[start:end]
                         if event.owner == "gradients")
    assert gradients == 4 * config.gpt_config().count_params()
    made = next(at for at, event in enumerate(tape.events) if event.name == gradient)
    backward = next(at for at, event in enumerate(tape.events) if event.name == "zeros for logits")
    assert made < backward
