"""Inputs for parsers: mostly valid, sometimes odd, made from a seeded generator."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from fitgpt.config.command_options import COMMANDS
from fitgpt.config.fields import OptionSpec, option_specs
from fitgpt.config.run_config import RunConfig
from fitgpt.core.files import seal_json

TESTS = Path(__file__).resolve().parents[1]
ODD_NUMBERS = ("0", "-1", "1e400", "nan", "inf", "-inf", "0x10", "1_000", "٣", "9" * 400, str(2**31), str(2**63),
               str(2**64), "1e-400", "0.1.2", "1e5", "+5", " 7 ", "1,5", "½")
ODD_TEXTS = ("", " ", "\0", "\ud800", "∞", "🦊", "\x1b[31m", "a" * 5000, "../../x", "%s%n", "{}", "'", '"', "\\",
             "None", "True", "<b>", "\r\n", "\u202e", "\ufeff", "-", "--", "=")
ODD_VALUES = (None, True, False, 0, -1, 2**31, 2**63, 2**70, 1.5, float("nan"), float("inf"), -0.0, 1e308, "", "x",
              "a" * 3000, "\ud800", [], {}, [[]], {"": {}}, [None], "12", "1e999", [1, [2, [3, [4]]]])


# ---- mutations

def mutated_text(text: str, chance: random.Random, odds: float = 0.5) -> str:
    """The text, or with these odds the text after one to three small changes."""
    for _ in range(chance.randint(1, 3) if chance.random() < odds else 0):
        at = chance.randint(0, len(text))
        to = min(len(text), at + int(chance.expovariate(0.1)))
        change = chance.choice(("cut", "drop", "twice", "odd", "number", "swap", "line"))
        if change == "cut":
            text = text[:at]
        elif change == "drop":
            text = text[:at] + text[to:]
        elif change == "twice":
            text = text[:to] + text[at:]
        elif change == "odd":
            text = text[:at] + chance.choice(ODD_TEXTS) + text[to:]
        elif change == "number":
            text = text[:at] + chance.choice(ODD_NUMBERS) + text[at:]
        elif change == "swap":
            text = text[:at] + text[at:to][::-1] + text[to:]
        else:
            lines = text.splitlines(keepends=True)
            chance.shuffle(lines)
            text = "".join(lines)
    return text


def mutated_bytes(data: bytes, chance: random.Random, odds: float = 0.5) -> bytes:
    for _ in range(chance.randint(1, 3) if chance.random() < odds else 0):
        at = chance.randint(0, len(data))
        to = min(len(data), at + int(chance.expovariate(0.1)))
        data = data[:at] + chance.choice((b"", data[at:to] * 2, chance.randbytes(to - at), b"\0\xff")) + data[to:]
    return data


def mutated_value(value: Any, chance: random.Random, odds: float = 0.6) -> Any:
    """JSON, or with these odds JSON with one to three odd values, missing or additional keys."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.randint(1, 3) if chance.random() < odds else 0):
        holder = value
        while isinstance(holder, dict | list) and holder:
            key = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            if not isinstance(holder[key], dict | list) or not holder[key] or chance.random() < 0.3:
                change = chance.random()
                if change < 0.2:
                    del holder[key]
                elif change < 0.3 and isinstance(holder, list):
                    holder.extend(deepcopy(holder[:5]))
                elif change < 0.5 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
                    holder[key] = chance.choice((holder[key] + 1, -holder[key], holder[key] * 1000, holder[key] / 3))
                else:
                    holder[key] = deepcopy(chance.choice(ODD_VALUES))
                break
            holder = holder[key]
    return value


# ---- texts by a grammar

def option_value(spec: OptionSpec, chance: random.Random) -> str:
    """A value for an option: nearly always one of its type."""
    if chance.random() < 0.04:
        return chance.choice(ODD_NUMBERS + ODD_TEXTS)
    choices = [str(each) for each in (spec.choices or ())]
    if choices and chance.random() < 0.9:
        return chance.choice(choices)
    default = spec.default
    if isinstance(default, bool):
        return chance.choice(("True", "False", "true", "1", "0"))
    if isinstance(default, int):
        return str(chance.choice((default, 1, 2, 8, 12, 64, 768, 1024, 3, 100, 0)))
    if isinstance(default, float):
        return chance.choice((str(default), "0.1", "1e-3", "6e-4", "0.0", "1", ".5"))
    return chance.choice((str(default), "auto", "x", "data", "4070", "12GiB", "500M", "last", "2118MiB", "train.py"))


def argv(chance: random.Random) -> tuple[str, list[str]]:
    name = chance.choice(list(COMMANDS))
    specs = list(option_specs(COMMANDS[name]).values())
    words = []
    for spec in chance.sample(specs, min(len(specs), int(chance.expovariate(0.3)))):
        flag = f"--{spec.name}" if chance.random() < 0.9 else f"-{chance.choice('otqxh')}"
        value = option_value(spec, chance)
        words += [f"{flag}={value}"] if chance.random() < 0.7 else [flag, value] if chance.random() < 0.7 else [flag]
    if chance.random() < 0.1:
        words.insert(chance.randint(0, len(words)), chance.choice(ODD_TEXTS))
    return name, [word for word in words if word not in ("--help", "-h")]


def config_file(chance: random.Random) -> str:
    specs, lines = option_specs(RunConfig), ["# a config"]
    for name in chance.sample(list(specs), chance.randint(0, 12)):
        value = option_value(specs[name], chance)
        if isinstance(specs[name].default, str):
            value = chance.choice((repr(value), f"f'{{out_dir}}-{value[:5]}'", f"'a' + {value!r}"))
        elif chance.random() < 0.3:
            value = chance.choice((f"{value} * 2", f"({value} // 3) ** 2", f"-{value}", f"{value} if True else 1",
                                   f"[{value}]", f"max({value}, 2)", "batch_size * 4", f"{value} + block_size % 7"))
        lines.append(f"{name} = {value}{chance.choice(('', '  # why', ';'))}")
    if chance.random() < 0.1:
        lines.append(chance.choice((
            "import os", "x: int = 3", "a = b = 2", "n_layer += 1", "def f(): pass", "x = lambda: 1", "print(1)",
            "if True:\n    n_layer = 1", "assert n_layer", "x = " + "(" * 200 + ")" * 200, "y = 2 ** 99999",
            "z = 'a' * 10**9", "for i in x: pass")))
    return mutated_text("\n".join(lines) + "\n", chance, 0.3)


def query_string(chance: random.Random) -> str:
    specs = option_specs(RunConfig)
    names = ("block_size", "batch_size", "gradient_accumulation_steps", "dtype", "saved_activations", "optimizer",
             "offload", "compile", "vocab_size", "loss_chunk", "weights")
    pairs = [chance.choice(("n_layer=4&n_head=4&n_embd=256", "n_layer=12&n_head=12&n_embd=768", "n_layer=2"))]
    pairs += [f"{name}={option_value(specs[name], chance)}" for name in chance.sample(names, chance.randint(0, 3))]
    pairs += chance.sample(("gpu=4070", "gpu=RTX+4070", "others=2118MiB", "trainer=nanogpt", "torch=2.11",
                            "family=batch"), chance.randint(1, 3))
    if chance.random() < 0.2:
        pairs.append(chance.choice(("gpu=", "gpu=nothing", "x=y", "&&&", "=%ff%00", "n_embd=7", "budget=8GiB")))
    return mutated_text("&".join(pairs), chance, 0.2)


@cache
def messages() -> Sequence[str]:
    folder = TESTS / "diagnosis" / "messages"
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.txt"))]


def oom_message(chance: random.Random) -> str:
    if chance.random() < 0.5:
        return mutated_text(chance.choice(messages()), chance, 0.7)
    def size() -> str:
        number = chance.choice((f"{chance.uniform(0, 80):.2f}", str(chance.randint(0, 10**10)), *ODD_NUMBERS))
        return f"{number} {chance.choice(('GiB', 'MiB', 'KiB', 'bytes', 'GB', 'byt', '', 'TiB'))}"
    device = chance.choice(("GPU 0", "GPU", "GPU 12", "cuda:0", "GPU ٣"))
    text = chance.choice((
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size()}. {device} has a total capacity of "
        f"{size()} of which {size()} is free. Process {chance.randint(1, 10**6)} has {size()} memory in use. Including "
        f"non-PyTorch memory, this process has {size()} memory in use. Of the allocated memory {size()} is allocated "
        f"by PyTorch, and {size()} is reserved by PyTorch but unallocated.",
        f"RuntimeError: CUDA out of memory. Tried to allocate {size()} ({device}; {size()} total capacity; {size()} "
        f"already allocated; {size()} free; {size()} reserved in total by PyTorch)",
        f"RuntimeError: [enforce fail at alloc_cpu.cpp:83] . DefaultCPUAllocator: can't allocate memory: you tried to "
        f"allocate {size()}s.",
        f"MPS backend out of memory (MPS allocated: {size()}, other allocations: {size()}, max allowed: {size()})."))
    frames = "".join(f'  File "/x/model.py", line {chance.randint(1, 10**5)}, in forward\n    y = self.c_fc(x)\n'
                     for _ in range(chance.randint(0, 4)))
    return mutated_text(frames + text, chance, 0.4)


def nvidia_smi(chance: random.Random) -> str:
    def mib() -> str:
        return chance.choice((f"{chance.randint(0, 200000)}MiB", f"{chance.choice(ODD_NUMBERS)}MiB", "N/A"))
    rows = "".join(f"|   {number}  NVIDIA GeForce RTX 4070   Off |   00000000:01:00.0 Off |   N/A |\n"
                   f"| 30%   45C    P2    50W / 200W |   {mib()} / {mib()} |   {chance.randint(0, 100)}%   Default |\n"
                   for number in range(chance.randint(0, 3)))
    processes = "".join(f"|    {number}   N/A  N/A   {chance.randint(1, 99999)}   C   python   {mib()} |\n"
                        for number in range(chance.randint(0, 4)))
    head = "| NVIDIA-SMI 550.1   Driver Version: 550.1   CUDA Version: 12.4 |\n"
    text = chance.choice((f"{head}{rows}| Processes: |\n{processes}",
                          f"index, name, memory.used [MiB], memory.total [MiB]\n0, NVIDIA A100, {mib()}, {mib()}\n",
                          f"[0] NVIDIA RTX 4070 | 45'C, 3 % | {chance.randint(0, 99999)} / 12282 MB | me(123M)\n",
                          f"memory used {mib()} of {mib()}"))
    return mutated_text(text, chance, 0.4)


def pasted(chance: random.Random) -> str:
    kinds = (oom_message, nvidia_smi, config_file, lambda chance: f"python train.py {' '.join(argv(chance)[1])}")
    return chance.choice(kinds)(chance)


def allocator_env(chance: random.Random) -> str:
    names = ("expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions",
             "backend", "x")
    values = ("True", "False", "128", "0.8", "[256:1,512:2,>:8]", "native", "", *ODD_NUMBERS)
    pairs = [f"{chance.choice(names)}:{chance.choice(values)}" for _ in range(chance.randint(0, 3))]
    return mutated_text(",".join(pairs), chance, 0.3)


def size_text(chance: random.Random) -> str:
    number = chance.choice((str(chance.randint(0, 10**6)), f"{chance.uniform(0, 100):.3f}", *ODD_NUMBERS))
    unit = chance.choice(("GiB", "MiB", "GB", "M", "B", "K", "T", ""))
    return mutated_text(f"{number}{chance.choice(('', ' '))}{unit}", chance, 0.3)


# ---- files

def meta_pickle(chance: random.Random) -> bytes:
    characters = [chr(97 + number) for number in range(chance.randint(1, 40))]
    itos: Any = dict(enumerate(characters)) if chance.random() < 0.7 else characters
    meta = {"vocab_size": len(characters), "itos": itos, "stoi": {each: at for at, each in enumerate(characters)}}
    if chance.random() < 0.2:
        meta = mutated_value(meta, chance)
    elif chance.random() < 0.3:
        meta[chance.choice(list(meta))] = deepcopy(chance.choice(ODD_VALUES))
    return mutated_bytes(pickle.dumps(meta, protocol=chance.randint(0, 5)), chance, 0.4)


def json_of(make: Callable[[], Any], *, sealed: bool = False) -> Callable[[random.Random], str]:
    """Mutations of a document: of its values, then of its text."""
    def text(chance: random.Random) -> str:
        document = mutated_value(make(), chance)
        if sealed and isinstance(document, dict):
            document.pop("checksum", None)
            try:
                return seal_json(document)
            except ValueError:
                return "{}"
        return mutated_text(json.dumps(document), chance, 0.2)
    return text


def rows_of(make: Callable[[], list[Any]]) -> Callable[[random.Random], str]:
    def text(chance: random.Random) -> str:
        rows = make()
        at = chance.randrange(len(rows))
        rows = rows[at:at + chance.randint(1, 40)]
        lines = [json.dumps(mutated_value(row, chance, 0.2)) for row in rows]
        return mutated_text("\n".join(lines) + "\n", chance, 0.3)
    return text
