"""What people paste comes with colours, prompts, prefixes, wraps, odd encodings and hundreds of megabytes around it."""

from __future__ import annotations

import random
import textwrap
import time
import tracemalloc
from io import BytesIO
from pathlib import Path

import pytest

from fitgpt.commands.explain import skim
from fitgpt.core.units import GiB, MiB
from fitgpt.explain.frames import compiled_of, frames_before, phase_of, trainer_of, users_line
from fitgpt.explain.message import from_excerpt, is_message, parse
from fitgpt.explain.pasted import AFTER, CHUNK, WHOLE, cleaned, excerpt
from fitgpt.explain.screen import parse_screen
from fitgpt.sights import CodeLine

QUOTED = (Path(__file__).parent / "messages" / "minimind-48.txt").read_text(encoding="utf-8").splitlines()
MESSAGE = QUOTED[2].removeprefix("> > ")
PLAIN = parse(MESSAGE)


def same(text: str) -> bool:
    found = parse(text)
    return found is not None and PLAIN is not None and (
        found.asked, found.total, found.free, found.process, found.allocated, found.unallocated) == (
        PLAIN.asked, PLAIN.total, PLAIN.free, PLAIN.process, PLAIN.allocated, PLAIN.unallocated)


def prefixed(prefix: str, width: int = 70) -> str:
    return "\n".join(prefix + line for line in textwrap.wrap(MESSAGE, width))


def test_the_plain_message_is_whole() -> None:
    assert PLAIN is not None
    assert (PLAIN.asked, PLAIN.total) == (88 * MiB, round(7.75 * GiB))


@pytest.mark.parametrize("width", range(17, 90))
def test_a_terminal_may_have_broken_it_anywhere_even_inside_a_word(width: int) -> None:
    assert same("\n".join(MESSAGE[start:start + width] for start in range(0, len(MESSAGE), width)))


@pytest.mark.parametrize("prefix", [
    "> ", "> > ", "[rank0]: ", "[rank3]:   ", "2025-11-12T11:25:13.4961658Z ", "[2024-09-28 16:57:33,448] [ERROR] ",
    "ERROR 04-15 12:03:00 [core.py:387] ", "│ ", "E   ", "0: ", "(RayTrainWorker pid=2163, ip=10.0.0.1) ", "INFO: ",
])
def test_every_line_may_have_a_prefix(prefix: str) -> None:
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
    "\x00\x01\x02\ufffd" * 100 + MESSAGE + "\x00\xff" * 100,
])
def test_colours_prompts_and_garbage_around_it_do_not_matter(text: str) -> None:
    assert same(text)


def test_what_powershell_redirects_is_read_too() -> None:
    found = from_excerpt(skim(BytesIO(MESSAGE.encode("utf-16"))))
    assert found is not None
    assert found.asked == 88 * MiB


@pytest.mark.parametrize("text", [
    "", "\n\n", "hello", "All is well: step 100, loss 3.2", "the memory of the GPU is out of scope", "b'\\x00'" * 50,
    "Killing time before the run", "exit code 1", "I tried to allocate my time better", "GPU 0 has a total of 3 fans",
    "import torch\nraise torch.cuda.OutOfMemoryErr",
])
def test_text_that_is_no_message_is_not_taken_for_one(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize("cut", range(20, len(MESSAGE), 23))
def test_a_message_cut_short_says_what_it_still_says(cut: int) -> None:
    found = parse(MESSAGE[:cut])
    assert found is None or found.kind in ("cuda", "driver")
    if cut > MESSAGE.index("MiB.") + 4:
        assert found is not None
        assert found.asked == 88 * MiB


def test_ranks_that_write_over_each_other_are_kept_apart() -> None:
    lines = ["[rank1]: Traceback (most recent call last):", "[rank0]: Traceback (most recent call last):",
             '[rank1]:   File "a.py", line 1, in other', '[rank0]:   File "train.py", line 9, in estimate_loss',
             "[rank1]:     pass", "[rank0]:     logits, loss = model(X, Y)", f"[rank0]: {MESSAGE}"]
    found = parse("\n".join(lines))
    assert found is not None
    assert [frame.function for frame in found.frames] == ["estimate_loss"]


@pytest.mark.parametrize("text", [
    "| 0  a" + " " * 99_000 + "|", "1" * 99_000, "Tried to allocate " + "9" * 99_000, "DefaultCPUAllocator:" * 5000,
    "GPU " * 25_000, "(" * 99_000, '  File "' * 12_000, "out of memory " * 7000, "\x1b[" * 50_000, "a.py:1: in " * 9000,
    "CUDA out of memory. Tried to allocate 1 GiB (GPU 0; " + "1" * 50_000, "\n" * 99_000, "{" * 99_000,
])
def test_no_text_keeps_it_busy(text: str) -> None:
    started = time.process_time()
    parse(text)
    parse_screen(text)
    assert time.process_time() - started < 3


def test_random_bytes_are_no_message_and_no_error() -> None:
    dice = random.Random(7)
    for _ in range(200):
        text = dice.randbytes(dice.randrange(2000)).decode("utf-8", "replace")
        cut = dice.randrange(len(MESSAGE))
        assert parse(text) is None
        assert not parse_screen(text)
        parse(text[:200] + MESSAGE[:cut] + text[200:])  # whatever it says: no error
        parse(MESSAGE[:cut] + MESSAGE[cut + dice.randrange(40):])


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


@pytest.mark.parametrize(("line", "megabytes"), [(b"step 1: loss 3.1, mem 4 GiB\n", 200),
                                                 (b"worker was killed by the night\n", 40)])
def test_a_log_of_200_mb_is_streamed_and_its_message_found(line: bytes, megabytes: int) -> None:
    found = from_excerpt(skim(Endless(megabytes * 10**6, megabytes * 750_011, line)))  # type: ignore[arg-type]
    assert found is not None
    assert found.asked == 88 * MiB


def test_of_a_large_log_only_a_few_pieces_are_held() -> None:
    tracemalloc.start()
    found = from_excerpt(skim(Endless(15 * CHUNK, 14 * CHUNK, b"step 1\n")))  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None
    assert peak < 10 * CHUNK


@pytest.mark.parametrize("at", [0, WHOLE - 100, CHUNK - 200, CHUNK, CHUNK + 7, 2 * CHUNK - AFTER, 3 * CHUNK - 1])
def test_no_boundary_of_a_piece_hides_a_message(at: int) -> None:
    found = from_excerpt(skim(Endless(3 * CHUNK + 5, at, b"a line of the log\n")))  # type: ignore[arg-type]
    assert found is not None
    assert found.asked == 88 * MiB
    assert found.more == 0


def test_messages_in_a_large_log_are_counted_across_pieces() -> None:
    log = (f"{MESSAGE}\n" + "x" * 700_001 + "\n") * 5
    found = from_excerpt(skim(BytesIO(log.encode())))
    assert found is not None
    assert found.more == 4


def test_a_large_text_without_a_message_gives_none() -> None:
    assert from_excerpt(skim(BytesIO(b"killed time, out of cheese\n" * 20_000))) is None
    assert excerpt(BytesIO(b"x" * (WHOLE + 1)), is_message).whole is False


# ---- tracebacks


NANOGPT = '''Traceback (most recent call last):
  File "/home/me/nanoGPT/train.py", line 264, in <module>
    losses = estimate_loss()
  File "/usr/lib/python3.11/site-packages/torch/utils/_contextlib.py", line 115, in decorate_context
    return func(*args, **kwargs)
  File "/home/me/nanoGPT/train.py", line 224, in estimate_loss
    logits, loss = model(X, Y)
  File "/home/me/nanoGPT/model.py", line 187, in forward
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 3462, in cross_entropy
    return torch._C._nn.cross_entropy_loss(
'''


def test_the_phase_and_the_trainer_are_read_off_a_traceback() -> None:
    frames = frames_before(NANOGPT)
    assert phase_of(frames) == "eval"
    assert trainer_of(frames) == "nanogpt"
    assert compiled_of(frames) is False
    inside = CodeLine("/tmp/torchinductor_me/ab/cab.py", 12, "call")
    assert compiled_of((*frames, inside)) is True
    assert compiled_of(frames[:1]) is None
    line = users_line(frames)
    assert line is not None
    assert (line.file, line.line, line.function) == ("/home/me/nanoGPT/model.py", 187, "forward")


@pytest.mark.parametrize(("code", "file", "function", "phase"), [
    ("loss.backward()", "train.py", "main", "backward"),
    ("optimizer.step()", "train.py", "main", "step"),
    ("func(", "/x/torch/optim/adamw.py", "_multi_tensor_adamw", "step"),
    ("model.to(device)", "train.py", "<module>", "load"),
    ("return t.to(", "/x/torch/nn/modules/module.py", "convert", "load"),
    ("x = self.mlp(x)", "model.py", "forward", "forward"),
    ("logits, loss = model(X, Y)", "train.py", "<module>", "forward"),
    ("logits, loss = model(X, Y)", "train.py", "estimate_loss", "eval"),
    ("metrics = trainer.evaluate()", "run.py", "main", "eval"),
    ("x = 1", "x.py", "<module>", ""),
])
def test_each_phase_has_its_signs(code: str, file: str, function: str, phase: str) -> None:
    assert phase_of(frames_before(f'  File "{file}", line 1, in {function}\n    {code}\n')) == phase


def test_notebook_and_pytest_tracebacks_are_read_too() -> None:
    notebook = ("<ipython-input-116-11ebb3420695> in <module>\n     28 a\n---> 30   predictions = network(images)\n"
                "~/torch/nn/modules/module.py in _call_impl(self, *input)\n--> 722       result = self.forward()\n")
    assert [(frame.function, frame.line) for frame in frames_before(notebook)] == [
        ("<module>", 30), ("_call_impl", 722)]
    assert [frame.line for frame in frames_before("a/trainer.py:1412: in train\n    return inner(\n")] == [1412]


def test_an_old_traceback_above_the_last_one_is_left_out() -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in old\n    x\nError\n' + NANOGPT
    assert "old" not in [frame.function for frame in frames_before(text)]


def test_cleaning_keeps_the_words() -> None:
    assert cleaned("\x1b[1mE   out\r\n│ of memory │").split() == ["out", "of", "memory"]
