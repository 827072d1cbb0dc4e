"""What people paste comes with colours, prompts, prefixes, wraps, odd encodings and hundreds of megabytes around it."""

from __future__ import annotations

import os
import random
import re
import textwrap
import threading
import tracemalloc
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest

from fitgpt.config.command_options import ExplainOptions
from fitgpt.core.units import GiB, MiB
from fitgpt.diagnosis import explain
from fitgpt.diagnosis import input as module
from fitgpt.diagnosis.input import AFTER, CHUNK, explain_options, message_in, read_input
from fitgpt.diagnosis.nvidia_smi import parse_nvidia_smi
from fitgpt.diagnosis.oom_message import clean, parse_oom_message

QUOTED = (Path(__file__).parent / "messages" / "minimind-48.txt").read_text(encoding="utf-8").splitlines()
MESSAGE = QUOTED[2].removeprefix("> > ")
PLAIN = parse_oom_message(MESSAGE)


def same(text: str) -> bool:
    found = parse_oom_message(text)
    return found is not None and PLAIN is not None and (
        found.requested, found.total, found.free, found.process, found.allocated, found.unallocated) == (
        PLAIN.requested, PLAIN.total, PLAIN.free, PLAIN.process, PLAIN.allocated, PLAIN.unallocated)


def prefixed(prefix: str, width: int = 70) -> str:
    return "\n".join(prefix + line for line in textwrap.wrap(MESSAGE, width))


def test_the_plain_message_is_parsed() -> None:
    assert PLAIN is not None
    assert (PLAIN.requested, PLAIN.total) == (88 * MiB, round(7.75 * GiB))


@pytest.mark.parametrize("width", range(17, 90))
def test_a_line_wrap_may_split_any_word(width: int) -> None:
    assert same("\n".join(MESSAGE[start:start + width] for start in range(0, len(MESSAGE), width)))


@pytest.mark.parametrize("prefix", [
    "> ", "> > ", "[rank0]: ", "[rank3]:   ", "2025-11-12T11:25:13.4961658Z ", "[2024-09-28 16:57:33,448] [ERROR] ",
    "ERROR 04-15 12:03:00 [core.py:387] ",
    "(VllmWorker rank=3 pid=1090) ERROR 06-05 06:18:13 [executor.py:470] ", "│ ", "E   ", "0: ",
    "(RayTrainWorker pid=2163, ip=10.0.0.1) ", "INFO: ",
])
def test_prefixes_of_lines_are_removed(prefix: str) -> None:
    assert same(prefixed(prefix))


@pytest.mark.parametrize("text", [
    MESSAGE.replace("\n", "\r\n") + "\r\n",
    "\x1b[31m" + MESSAGE.replace("GPU", "\x1b[1mGPU\x1b[0m") + "\x1b[0m",
    "\x1b]0;title\x07" + MESSAGE,
    "$ python train.py\n" + MESSAGE + "\n$ ",
    ">>> model(x)\n" + MESSAGE,
    "`" + MESSAGE + "`",
    "  3%|██▊   | 12/400 [00:10<05:12, 1.24it/s]\r" + MESSAGE,
    "\ufeff" + MESSAGE,
    MESSAGE.replace(" ", "\u00a0"),
    f"<pre>{MESSAGE.replace(' ', '&nbsp;')}</pre>",
    MESSAGE.replace("GiB of", "GiB<br>of"),
    "[31m" + MESSAGE.replace("GPU", "[1mGPU\\u001b[0m") + "[0m",
    MESSAGE.lower(),
    "\x00\x01\x02\ufffd" * 100 + MESSAGE + "\x00\xff" * 100,
])
def test_colours_prompts_and_garbage_are_ignored(text: str) -> None:
    assert same(text)


def test_utf16_from_powershell_is_read() -> None:
    found = message_in(read_input(BytesIO(MESSAGE.encode("utf-16"))))
    assert found is not None
    assert found.requested == 88 * MiB


@pytest.mark.parametrize("text", [
    "", "\n\n", "hello", "All is well: step 100, loss 3.2", "the memory of the GPU is out of scope", "b'\\x00'" * 50,
    "Killing time before the run", "exit code 1", "I tried to allocate my time better", "GPU 0 has a total of 3 fans",
    "import torch\nraise torch.cuda.OutOfMemoryErr",
])
def test_other_text_is_not_a_message(text: str) -> None:
    assert parse_oom_message(text) is None


@pytest.mark.parametrize("cut", range(20, len(MESSAGE), 23))
def test_a_truncated_message_keeps_its_figures(cut: int) -> None:
    found = parse_oom_message(MESSAGE[:cut])
    assert found is None or found.kind in ("cuda", "driver")
    if cut > MESSAGE.index("MiB.") + 4:
        assert found is not None
        assert found.requested == 88 * MiB


def test_interleaved_ranks_are_separated() -> None:
    lines = ["[rank1]: Traceback (most recent call last):", "[rank0]: Traceback (most recent call last):",
             '[rank1]:   File "a.py", line 1, in other', '[rank0]:   File "train.py", line 9, in estimate_loss',
             "[rank1]:     pass", "[rank0]:     logits, loss = model(X, Y)", f"[rank0]: {MESSAGE}"]
    found = parse_oom_message("\n".join(lines))
    assert found is not None
    assert [frame.function for frame in found.frames] == ["estimate_loss"]


@pytest.mark.parametrize("text", [
    "| 0  a" + " " * 99_000 + "|", "1" * 99_000, "Tried to allocate " + "9" * 99_000, "DefaultCPUAllocator:" * 5000,
    "GPU " * 25_000, "(" * 99_000, '  File "' * 12_000, "out of memory " * 7000, "\x1b[" * 50_000, "a.py:1: in " * 9000,
    "CUDA out of memory. Tried to allocate 1 GiB (GPU 0; " + "1" * 50_000, "\n" * 99_000, "{" * 99_000,
])
def test_long_repetitive_text_is_parsed_without_an_error(text: str) -> None:
    parse_oom_message(text)
    assert not parse_nvidia_smi(text)


def test_random_bytes_are_not_a_message() -> None:
    rng = random.Random(7)
    for _ in range(200):
        text = rng.randbytes(rng.randrange(2000)).decode("utf-8", "replace")
        cut = rng.randrange(len(MESSAGE))
        assert parse_oom_message(text) is None
        assert not parse_nvidia_smi(text)
        parse_oom_message(text[:200] + MESSAGE[:cut] + text[200:])  # whatever it says: no error
        parse_oom_message(MESSAGE[:cut] + MESSAGE[cut + rng.randrange(40):])


def test_every_cut_of_a_message_gets_an_answer() -> None:
    rng = random.Random(11)
    for file in sorted((Path(__file__).parent / "messages").glob("*.txt")):
        text = file.read_text(encoding="utf-8")
        cuts = [(0, len(text) * part // 4) for part in range(1, 5)]
        cuts += [(rng.randrange(len(text)), len(text)), sorted(rng.sample(range(len(text)), 2))]
        for start, end in cuts:
            diagnosis = explain(text[start:end])
            assert diagnosis.title
            assert str(diagnosis)
            if "memory" in text[start:end].lower():
                assert "about memory" not in diagnosis.title
        assert explain(re.sub(r"\d+", "9" * 5000, text)).title  # no figure is too long


@pytest.mark.parametrize("text", ["CUDA out of memory. ", "6582MiB / 12282MiB\n"])
def test_five_megabytes_get_an_answer(text: str) -> None:
    assert explain(text * (5_000_000 // len(text))).title


@pytest.mark.parametrize(("text", "subject"), [
    ("the program is out of memory, I think", "message"), ("torch.cuda.OutOfMemoryError", "message"),
    ('  File "train.py", line 3, in <module>\n    loss.backward()\ntorch.cuda.OutOfMemoryErr', "message"),
    ("to avoid fragmentation.  See documentation", "message"), ("CUDA OOM on my 4070", "message"),
    ("out of memory after 1,073,741,824 of 8,000,000,000 bytes", "message"),
    ("my GPU has too little memory", "message"), ("I ran out of VRAM at step 20", "message"),
    ("训练的时候显存不足，怎么办？", "message"), ("Nicht genügend GPU-Speicher", "message"),
    ("не хватает памяти на видеокарте", "message"), ("VRAM is full", "unknown"),
    ("Make sure you have enough GPU RAM", "unknown"), ("hello", "unknown")])
def test_text_that_mentions_memory_is_not_denied(text: str, subject: str) -> None:
    diagnosis = explain(text)
    assert diagnosis.subject == subject
    assert "about memory" not in diagnosis.title  # what it is about is not known


def test_a_traceback_without_its_error_is_named() -> None:
    frames = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    loss.backward()'
    assert "traceback without its last line" in explain(frames).title
    assert "traceback" not in explain(f"{frames}\nValueError: no").title


# ---- size


class Endless:
    """A log of any size that is made as it is read."""

    def __init__(self, nbytes: int, at: int, line: bytes) -> None:
        self.left, self.at, self.line, self.given = nbytes, at, line, 0

    def read(self, count: int) -> bytes:
        if self.left <= 0:
            return b""
        count = min(count, self.left)
        data = (self.line * (count // len(self.line) + 1))[:count]
        if self.given <= self.at < self.given + count:
            place = self.at - self.given
            data = (data[:place] + b"\n" + MESSAGE.encode() + b"\n" + data[place:])
        self.left -= count
        self.given += count
        return data


@pytest.mark.parametrize(("line", "megabytes"), [(b"step 1: loss 3.1, mem 4 GiB\n", 10),
                                                 (b"worker was killed by the night\n", 2)])
def test_the_message_in_a_large_log_is_found(line: bytes, megabytes: int) -> None:
    found = message_in(read_input(Endless(megabytes * 10**6, megabytes * 750_011, line)))  # type: ignore[arg-type]
    assert found is not None
    assert found.requested == 88 * MiB


def test_a_large_log_is_read_with_little_memory() -> None:
    tracemalloc.start()
    found = message_in(read_input(Endless(40 * CHUNK, 36 * CHUNK, b"step 1\n")))  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None
    assert peak < 8 * MiB


@pytest.mark.parametrize("at", [0, CHUNK - 200, CHUNK, CHUNK + 7, 2 * CHUNK - AFTER, 3 * CHUNK - 1])
def test_a_message_across_a_chunk_boundary_is_found(at: int) -> None:
    found = message_in(read_input(Endless(3 * CHUNK + 5, at, b"a line of the log\n")))  # type: ignore[arg-type]
    assert found is not None
    assert found.requested == 88 * MiB
    assert found.repeated == 0


@pytest.mark.ci
def test_every_recorded_message_is_found_in_a_large_log() -> None:
    for file in sorted((Path(__file__).parent / "messages").glob("*.txt")):
        text = file.read_text(encoding="utf-8")
        alone = message_in(read_input(BytesIO(text.encode())))
        found = message_in(read_input(BytesIO(b"step 1: loss 3.1\n" * (CHUNK // 8) + text.encode())))
        assert (found and found.kind) == (alone and alone.kind), file.name


def test_messages_are_counted_across_chunks() -> None:
    log = (f"{MESSAGE}\n" + "x" * 700_001 + "\n") * 5
    found = message_in(read_input(BytesIO(log.encode())))
    assert found is not None
    assert found.repeated == 4


def test_a_large_text_without_a_message_returns_none() -> None:
    assert message_in(read_input(BytesIO(b"killed time, out of cheese\n" * 20_000))) is None


def test_a_pipe_that_never_ends_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PIPED", 2 * CHUNK)
    reading, writing = os.pipe()

    def write() -> None:
        with suppress(BrokenPipeError):
            for _ in range(16):  # far more than the limit, and not endless: the test must end if nothing limits it
                os.write(writing, MESSAGE.encode() + b"\n" * CHUNK)
        os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    with open(reading, "rb") as pipe:
        diagnosis = explain_options(ExplainOptions(target="-"), [], pipe)
    writer.join()
    assert diagnosis.subject == "message"
    assert diagnosis.notes[-1] == module.NOT_READ


def test_cleaning_keeps_the_words() -> None:
    assert clean("\x1b[1mE   out\r\n│ of memory │").split() == ["out", "of", "memory"]
