"""How fast does a config really train here? A child process builds it, runs it for a few seconds on random tokens, and
says tokens a second. The parent loads no torch.

    python -m fitgpt.planning.timing   JSON lines in: config, cap, seconds; one line out for each: tokens_per_s or error
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import IO, Any

from ..config.run_config import RunConfig
from ..hardware.nvidia import child_environment

STARTS_WITHIN_S = 300  # compiling a large model takes a minute or two
WARM_UP = 2            # steps before the clock runs: the first compiles, the second is recorded
# The least that a micro-step is of a step: on a card the optimizer moves 28 bytes a parameter, as long as some hundred
# tokens take; on the host it is some twenty times slower.
LEAST_SHARE, LEAST_BESIDE_THE_HOST = 0.1, 0.01


class Clock:
    """Times one config after another in one process: torch is loaded once, and what two of them share is compiled once.
    Where one fails, the next has a new process."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._child: subprocess.Popen[str] | None = None
        self._words: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, below

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stop()
        self._words.close()

    def time(self, config: RunConfig, cap: int) -> float | str:
        """Tokens a second under an allocator's cap; or, in words, why there are none."""
        child = self._child = self._child or self._start()
        patience = threading.Timer(STARTS_WITHIN_S + 10 * self._seconds, child.kill)
        began = time.monotonic()
        patience.start()
        try:
            said = self._asked(child, {"config": config.to_dict(), "cap": cap, "seconds": self._seconds})
        finally:
            patience.cancel()
        if child.poll() is not None and time.monotonic() - began >= patience.interval:
            said = f"it had not finished after {patience.interval:.0f} s."
        if isinstance(said, str):
            self._stop()
        return said

    def _asked(self, child: subprocess.Popen[str], order: dict[str, Any]) -> float | str:
        assert child.stdin
        assert child.stdout
        try:
            child.stdin.write(json.dumps(order) + "\n")
            child.stdin.flush()
        except OSError:
            pass  # it is gone: its last words say why
        for line in child.stdout:
            told = answer(line)
            if told is not None:
                return told
        code = child.wait()
        self._words.seek(0)
        complained = self._words.read().strip().splitlines()
        return complained[-1] if complained else f"the process ended with exit code {code}."

    def _start(self) -> subprocess.Popen[str]:
        self._words.seek(0)
        self._words.truncate()
        return subprocess.Popen([sys.executable, "-P", "-m", "fitgpt.planning.timing"], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=self._words, text=True,
                                env=child_environment(os.environ))

    def _stop(self) -> None:
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None


def answer(line: str) -> float | str | None:
    """What a line of the child's says; None where it is something else's."""
    try:
        told = json.loads(line)
        return float(told["tokens_per_s"]) if "tokens_per_s" in told else str(told["error"])
    except (ValueError, KeyError, TypeError):
        return None


def main() -> int:
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(timed(RunConfig.from_dict(order["config"]), order["cap"], order["seconds"])), flush=True)
        let_go()
    return 0


def let_go() -> None:
    """Of all that one config held, so that the next begins as in a process of its own."""
    import torch

    from ..engine.oom import release

    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        release(torch.device("cuda"))


def timed(config: RunConfig, cap: int, seconds: float) -> dict[str, Any]:
    """In a run's own order: evaluation first, whose recording stays; then steps of one micro-step and steps of two.
    Their difference is what a micro-step takes, and the rest what the optimizer takes."""
    import torch

    from ..engine.device import resolve_device, synchronize
    from ..engine.oom import cap_memory, is_nvidia, is_out_of_memory
    from ..engine.prefetch import Feed
    from ..training.loop import train_step
    from ..training.run import build_training

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
