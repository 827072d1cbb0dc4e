"""Time configs in a process of their own, for `fit --measure`.

    python -P -m fitgpt.training.timing   JSON lines in: config, cap, seconds; per line one out: tokens_per_s or error
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from ..config.run_config import RunConfig
from ..engine.batches import Prefetcher
from ..engine.device import resolve_device, synchronize
from ..engine.oom import cap_memory, is_nvidia, is_out_of_memory, release
from .build import build_training
from .loop import train_step

WARM_UP = 2            # steps that are not timed: the first compiles, the second is captured into CUDA graphs
# The smallest share of a step that a micro-step takes. On a GPU the optimizer moves 28 bytes per parameter, which takes
# as long as a few hundred tokens; on the CPU it is about twenty times slower.
MIN_SHARE, MIN_SHARE_OFFLOADED = 0.1, 0.01


def main() -> int:
    for line in sys.stdin:
        request = json.loads(line)
        result = time_config(RunConfig.from_dict(request["config"]), request["cap"], request["seconds"])
        print(json.dumps(result), flush=True)
        if torch.cuda.is_available():  # frees all that it allocated: the next config starts as in a new process
            torch._C._cuda_clearCublasWorkspaces()
            release(torch.device("cuda"))
    return 0


def time_config(config: RunConfig, cap: int, seconds: float) -> dict[str, Any]:
    """Times steps in the order of a run: evaluation first, whose CUDA graph stays; then steps of one micro-step and
    steps of two. Their difference is the time of a micro-step, the rest that of the optimizer."""
    choice = resolve_device(config.device, config.dtype, config.compile)
    if is_nvidia(choice.device):
        cap_memory(choice.device, cap)

    tokens = torch.randint(config.vocab_size, (config.batch_size, config.block_size + 1)).numpy()
    feed = Prefetcher(lambda number: tokens, torch.device(choice.device), last=sys.maxsize)
    try:
        training = build_training(config, choice)
        training.model.eval()
        windows = torch.randint(config.vocab_size, (config.eval_batch, config.eval_block + 1), device=choice.device)
        for _ in range(2):
            training.token_losses(windows[:, :-1], windows[:, 1:])
        training.model.train()

        def seconds_per_step(micro_steps: int) -> float:
            """The median of steps that take about `seconds` in total."""
            short = replace(config, gradient_accumulation_steps=micro_steps)

            def timed_step() -> float:
                begun = time.perf_counter()
                train_step(training, short, feed, 1e-4, lambda: False)
                synchronize(choice.device)
                return time.perf_counter() - begun

            for _ in range(WARM_UP):
                timed_step()
            ends = time.perf_counter() + seconds
            durations = [timed_step()]
            while time.perf_counter() < ends:
                durations.append(timed_step())
            return statistics.median(durations)

        one = seconds_per_step(1)
        two = seconds_per_step(2) if config.gradient_accumulation_steps > 1 else one
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"error": f"out of memory: {str(error).splitlines()[0]}"}
    finally:
        feed.close()
    return rate(config, one, two)


def rate(config: RunConfig, one: float, two: float) -> dict[str, Any]:
    """Tokens per second from the seconds of a step with one micro-step and of a step with two. Their difference is
    multiplied by the number of further micro-steps, often hundreds: below a minimum it is noise."""
    more, micro_step = config.gradient_accumulation_steps - 1, two - one
    if more and micro_step < one * (MIN_SHARE if config.offload == "none" else MIN_SHARE_OFFLOADED):
        return {"error": "too noisy to time: a second micro-step made no difference to a step."}
    return {"tokens_per_s": config.tokens_per_step / (one + more * micro_step)}


if __name__ == "__main__":
    sys.exit(main())
