"""How fast does a config really train here? A child process builds it, runs it for a few seconds on random tokens, and
says tokens a second. The parent loads no torch.

    python -m fitgpt.timing     one line of JSON in: config, cap, seconds; one line out: tokens_per_s, or error
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .config import RunConfig
from .driver import child_environment

STARTS_WITHIN_S = 300  # compiling a large model takes a minute or two
WARM_UP = 2            # steps before the clock runs: the first compiles, the second is recorded
# The least that a micro-step is of a step: on a card the optimizer moves 28 bytes a parameter, as long as some hundred
# tokens take; on the host it is some twenty times slower.
LEAST_SHARE, LEAST_BESIDE_THE_HOST = 0.1, 0.01


def in_child(config: RunConfig, cap: int, seconds: float) -> float | str:
    """Tokens a second under an allocator's cap; or, in words, why there are none."""
    order = {"config": config.to_dict(), "cap": cap, "seconds": seconds}
    try:
        ended = subprocess.run([sys.executable, "-m", "fitgpt.timing"], input=json.dumps(order), text=True,
                               capture_output=True, env=child_environment(os.environ),
                               timeout=STARTS_WITHIN_S + 10 * seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"it had not finished after {STARTS_WITHIN_S + 10 * seconds:.0f} s."
    return answer(ended.stdout, ended.stderr, ended.returncode)


def answer(said: str, complained: str, code: int) -> float | str:
    """The child's last line, or its last words."""
    try:
        told = json.loads(said.strip().splitlines()[-1])
        return float(told["tokens_per_s"]) if "tokens_per_s" in told else str(told["error"])
    except (IndexError, ValueError, KeyError, TypeError):
        words = complained.strip().splitlines()
        return words[-1] if words else f"the process ended with exit code {code}."


def main() -> int:
    order = json.loads(sys.stdin.readline())
    print(json.dumps(timed(RunConfig.from_dict(order["config"]), order["cap"], order["seconds"])), flush=True)
    return 0


def timed(config: RunConfig, cap: int, seconds: float) -> dict[str, Any]:
    """In a run's own order: evaluation first, whose recording stays; then steps of one micro-step and steps of two.
    Their difference is what a micro-step takes, and the rest what the optimizer takes."""
    import torch

    from .engine.device import resolve_device, synchronize
    from .engine.feed import Feed
    from .engine.loop import train_step
    from .engine.oom import cap_memory, is_nvidia, is_out_of_memory
    from .run import build_training

    choice = resolve_device(config.device, config.dtype, config.compile)
    if is_nvidia(choice.device):
        cap_memory(choice.device, cap)

    drawn = torch.randint(config.vocab_size, (config.batch_size, config.block_size + 1)).numpy()
    feed = Feed(lambda number: drawn, torch.device(choice.device), last=sys.maxsize)
    try:
        training = build_training(config, choice)
        training.model.eval()
        windows = torch.randint(config.vocab_size, (config.eval_batch, config.eval_block + 1), device=choice.device)
        for _ in range(2):
            training.token_losses(windows[:, :-1], windows[:, 1:])
        training.model.train()

        def seconds_of(micro_steps: int) -> float:
            short = replace(config, gradient_accumulation_steps=micro_steps)

            def step() -> None:
                train_step(training, short, feed, 1e-4, lambda: False)
                synchronize(choice.device)

            for _ in range(WARM_UP):
                step()
            return _seconds_each(step, seconds)

        one = seconds_of(1)
        two = seconds_of(2) if config.gradient_accumulation_steps > 1 else one
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"error": f"memory ran out: {str(error).splitlines()[0]}"}
    finally:
        feed.close()
    return rate(config, one, two)


def rate(config: RunConfig, one: float, two: float) -> dict[str, Any]:
    """From the seconds of a step with one micro-step and of one with two. Their difference counts once for each further
    micro-step, often hundreds of times: where it is hardly more than noise, it tells nothing."""
    more, micro_step = config.gradient_accumulation_steps - 1, two - one
    if more and micro_step < one * (LEAST_SHARE if config.offload == "none" else LEAST_BESIDE_THE_HOST):
        return {"error": "too noisy to time: a second micro-step made no difference to a step."}
    return {"tokens_per_s": config.tokens_per_step / (one + more * micro_step)}


def _seconds_each(work: Callable[[], None], seconds: float) -> float:
    """The middle one of the calls that about so many seconds have room for."""
    took, ends = list[float](), time.perf_counter() + seconds
    while not took or time.perf_counter() < ends:
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


if __name__ == "__main__":
    sys.exit(main())
