"""`fitgpt sample`: generates text with a trained model and prints it token by token."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ..config.command_options import SampleOptions
from ..core.errors import UsageError
from ..core.files import read_limited
from ..hardware.allocator_env import child_environment
from ..runs.folder import holds_run
from ..runs.metrics import append_sample

MAX_PROMPT_BYTES = 16 * 2**20  # far longer than any block


def sample(options: SampleOptions) -> int:
    os.environ.update(child_environment(os.environ))  # the allocator's settings, before torch is imported
    from ..engine.device import DeviceChoice
    from ..engine.model import GPT
    from ..engine.sample import SamplingOptions
    from ..training.trained_model import (
        model_on_device,
        open_checkpoint,
        stream_text,
        tokenizer_of,
        with_eager_fallback,
    )

    source = open_checkpoint(options.out_dir if options.init_from == "resume" else options.init_from, options.which)
    warn(*source.notes)
    tokenizer, prompt = tokenizer_of(source, warn), prompt_text(options.start)
    sampling = SamplingOptions(options.temperature, options.top_k, options.top_p)

    def ready(compile: bool | str) -> tuple[GPT, DeviceChoice]:
        """The model, compiled for the prompt and for a single token before any text is printed."""
        model, choice = model_on_device(source, options.device, options.dtype, compile)
        if choice.compile:
            "".join(stream_text(model, tokenizer, prompt, 2, sampling, options.seed))
        return model, choice

    model, choice = with_eager_fallback(ready, options.compile, warn)
    if choice.mismatch:
        warn(f"{choice.mismatch.why} {choice.mismatch.fix}")
    started, tokens = time.perf_counter(), options.num_samples * options.max_new_tokens
    for number in range(options.num_samples):
        text = []
        for part in stream_text(model, tokenizer, prompt, options.max_new_tokens, sampling, options.seed + number):
            text.append(part)
            print(part, end="", flush=True)
        print("\n---------------", flush=True)
        if options.init_from == "resume" and holds_run(options.out_dir):
            append_sample(options.out_dir, int(source.state.get("step", 0)), "".join(text))
    seconds = time.perf_counter() - started
    print(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} per second", file=sys.stderr)
    return 0


def prompt_text(start: str) -> str:
    """--start, or the content of the file it names as FILE:path."""
    if not start.startswith("FILE:"):
        return start
    path = Path(start.removeprefix("FILE:"))
    try:
        return read_limited(path, MAX_PROMPT_BYTES, pipes=True).decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"The prompt file {path} is not UTF-8 text (byte {error.start}).",
                         "--start='some text'") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"The prompt file {path} cannot be read: {why}.", "--start='some text'") from error


def warn(*sentences: str) -> None:
    for sentence in sentences:
        print(f"fitgpt: {sentence}", file=sys.stderr)
