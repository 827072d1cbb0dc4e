"""Every parser of what a user, a file or a request can hold, with inputs that are mostly valid.

A case is a block of 100 inputs. An input must be accepted, or rejected with one of fitgpt's own errors; anything else
is a failure, and so is an input that takes more than 5 seconds of CPU time.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fitgpt
from fitgpt.commands.main import main
from fitgpt.config.argv import walk
from fitgpt.config.command_options import COMMANDS
from fitgpt.config.config_file import parse_config
from fitgpt.config.fields import build, option_specs
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import FitError
from fitgpt.core.files import unseal_json
from fitgpt.core.units import parse_bytes, parse_count
from fitgpt.data.shards import list_shards, read_meta
from fitgpt.data.sources import open_source
from fitgpt.diagnosis.input import explain
from fitgpt.diagnosis.memory_snapshot import explain_snapshot, read_snapshot
from fitgpt.engine import huggingface
from fitgpt.engine.nanogpt_checkpoint import read_nanogpt
from fitgpt.hardware.allocator_env import check_allocator_env
from fitgpt.planning import measured_speeds, plan_file
from fitgpt.planning.request import run_config_from, training_config
from fitgpt.runs.metrics import read_metrics
from fitgpt.training.run import run as train
from fitgpt.web import form, paste

from . import fuzz_inputs as inputs
from .damage import TEMPLATES
from .fuzz_inputs import mutated_bytes, mutated_value
from .outcome import Campaign, Outcome
from .processes import fresh, isolated

REQUIRED = "0 tracebacks or hangs of 100,000"
BLOCK = 100
SLOW_S = 5.0               # of CPU time per input
MEMORY = 4 * 2**30         # more than what is in use at the start
COVERED = 300              # inputs for the measurement of branch coverage
TEMPLATE_NAMES = ("run", "nanogpt", "others")
PACKAGE = Path(fitgpt.__file__).parent


class Hangs(BaseException):
    """Not an Exception, so that no parser takes it for an error of its own."""


class Parser(NamedTuple):
    make: Callable[[random.Random], Any]
    parse: Callable[[Any], object]     # in a folder with the files of all templates
    blocks: int
    modules: tuple[str, ...]           # whose branches are counted


# ---- parsers

def written(file: str, read: Callable[[], object]) -> Callable[[Any], object]:
    """Writes the input to a file, then reads it as fitgpt would."""
    def parse(content: str | bytes) -> object:
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        Path(file).write_bytes(data)
        return read()
    return parse


def parse_argv(given: tuple[str, list[str]]) -> None:
    name, words = given
    cls = COMMANDS[name]
    takes_run = issubclass(cls, RunConfig)
    borrowed = () if takes_run else {each for other in COMMANDS.values() for each in option_specs(other)}
    assignments = walk(words, cls, config_files=cls.takes_config_files, borrowed=borrowed,
                       other_commands=[other for other in COMMANDS.values() if other is not cls])
    if name == "train":
        run_config_from(assignments)
    elif not takes_run:
        build(cls, assignments)


def parse_config_file(text: str) -> None:
    assignments, _ = parse_config(text, "config.py", RunConfig().to_dict())
    known = [each for each in assignments if each.key in option_specs(RunConfig)]
    run_config_from(known)


def quietly(*argv: str) -> None:
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = main(list(argv))
    if code == 70:
        raise RuntimeError(output.getvalue())


def show_run() -> None:
    read_metrics("run/metrics.jsonl")
    quietly("watch", "run", "--once", "--json")


def resume() -> None:
    """What a resumed run reads of its folder, up to the first step."""
    config, _ = training_config(walk(["--resume", "--out_dir=out", "--eval_only", "--device=cpu"], RunConfig))
    with redirect_stdout(io.StringIO()):
        train(config.to_dict(), [], lambda: False)


def parse_ckpt(document: Any) -> object:
    torch.save(document, "ckpt.pt")
    return read_nanogpt(Path("ckpt.pt"))


def parse_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except FitError:
        return parse_count(text)


def parse_jsonl() -> None:
    cls = COMMANDS["prepare"]
    source = open_source(build(cls, walk(["texts.jsonl", "--tokenizer=bytes"], cls, config_files=False)))
    for _ in source.chunks(0):
        pass


# ---- documents that inputs are made from

@cache
def document(path: str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


@cache
def rows(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@cache
def unpickled(path: str) -> Any:
    return pickle.loads(Path(path).read_bytes())  # of this repository


def snapshot(chance: random.Random) -> bytes:
    whole = unpickled("memory_snapshot.pickle")
    part = {**whole, "segments": whole["segments"][:chance.randint(0, 5)],
            "device_traces": [each[:chance.randint(0, 30)] for each in whole["device_traces"]]}
    return mutated_bytes(pickle.dumps(mutated_value(part, chance)), chance, 0.2)


def ckpt(chance: random.Random) -> Any:
    """nanoGPT's checkpoint with odd values in it, tensors of other shapes and kinds included."""
    found = dict(torch.load("original.pt", weights_only=True))
    odd: tuple[Any, ...] = (
        *inputs.ODD_VALUES, torch.zeros(0), torch.tensor(float("nan")), torch.ones(3, dtype=torch.int64),
        torch.zeros(2, 2).to_sparse(), torch.empty(4, device="meta"), torch.zeros(1).expand(2**28))
    for _ in range(chance.randint(0, 2)):
        holder: Any = found
        while isinstance(holder, dict) and holder:
            key = chance.choice(list(holder))
            if not isinstance(holder[key], dict) or chance.random() < 0.3:
                holder[key] = chance.choice(odd)
                break
            holder[key] = holder = dict(holder[key])
    return found


def safetensors(chance: random.Random) -> bytes:
    return mutated_bytes(Path("original.safetensors").read_bytes(), chance, 0.8)


def state(chance: random.Random) -> str:
    return inputs.json_of(lambda: unseal_json(Path("original_state.json").read_bytes()), sealed=True)(chance)


def recorded(chance: random.Random) -> str:
    return inputs.json_of(lambda: unseal_json(Path("original_run.json").read_bytes()), sealed=True)(chance)


def shard(chance: random.Random) -> bytes:
    content = Path("original.shard").read_bytes()
    return mutated_bytes(content[:256], chance, 0.4) + content[256:]


STATE = "out/checkpoints/step-00000003/state.json"
PARSERS = {
    "config file": Parser(inputs.config_file, parse_config_file, 120, ("config/config_file.py",)),
    "command line": Parser(inputs.argv, parse_argv, 120, ("config/argv.py", "config/fields.py")),
    "out-of-memory message": Parser(inputs.oom_message, lambda text: explain(text), 60,
                                    ("diagnosis/oom_message.py",)),
    "nvidia-smi": Parser(inputs.nvidia_smi, lambda text: explain(text), 100, ("diagnosis/nvidia_smi.py",)),
    "pasted text": Parser(inputs.pasted, lambda text: paste.paste(text, None), 60, ("web/paste.py",)),
    "query string": Parser(inputs.query_string, form.read, 100, ("web/form.py",)),
    "sizes": Parser(inputs.size_text, parse_size, 100, ("core/units.py",)),
    "allocator settings": Parser(inputs.allocator_env,
                                 lambda text: check_allocator_env({"PYTORCH_CUDA_ALLOC_CONF": text}), 100,
                                 ("hardware/allocator_env.py",)),
    "plan.json": Parser(inputs.json_of(lambda: document("original_plan.json"), sealed=True),
                        written("plan.json", lambda: plan_file.read("plan.json")), 40, ("planning/plan_file.py",)),
    "plan.json in explain": Parser(inputs.json_of(lambda: document("original_plan.json")), lambda text: explain(text),
                                   20, ("planning/plan_file.py", "diagnosis/plan_or_run.py")),
    "meta.pkl": Parser(inputs.meta_pickle, written("meta.pkl", lambda: read_meta(Path("meta.pkl"))), 100,
                       ("core/safe_pickle.py",)),
    "memory snapshot": Parser(snapshot, lambda data: explain_snapshot(read_snapshot(io.BytesIO(data), "x.pickle")), 20,
                              ("diagnosis/memory_snapshot.py",)),
    "metrics.jsonl": Parser(inputs.rows_of(lambda: rows("original_metrics.jsonl")),
                            written("run/metrics.jsonl", show_run), 30, ("runs/metrics.py", "runs/watch.py")),
    "manifest.json": Parser(inputs.json_of(lambda: document("original_manifest.json")),
                            written("data/manifest.json", lambda: list_shards("data")), 40, ("data/shards.py",)),
    "shard header": Parser(shard, written("data/train-00000.shard", lambda: list_shards("data")), 40,
                           ("data/shards.py",)),
    "run.json": Parser(recorded, written("out/run.json", lambda: training_config(
        walk(["--resume", "--out_dir=out"], RunConfig))), 40, ("runs/folder.py",)),
    "state.json": Parser(state, written(STATE, resume), 12, ("training/checkpoint.py", "training/build.py")),
    "ckpt.pt": Parser(ckpt, parse_ckpt, 30, ("engine/weights.py", "engine/nanogpt_checkpoint.py")),
    "config.json": Parser(inputs.json_of(lambda: document("original_config.json")),
                          written("hf/config.json", lambda: huggingface.read_folder(Path("hf"))), 40,
                          ("runs/model_shape.py", "engine/huggingface.py")),
    "safetensors": Parser(safetensors, written("hf/model.safetensors", lambda: huggingface.read_folder(Path("hf"))),
                          40, ("engine/huggingface.py",)),
    "speeds.jsonl": Parser(inputs.rows_of(lambda: rows("original_speeds.jsonl")),
                           written("speeds.jsonl", lambda: measured_speeds.load("NVIDIA H200")), 20,
                           ("planning/measured_speeds.py",)),
    "texts.jsonl": Parser(inputs.rows_of(lambda: [{"text": f"A text {number}.", "id": number} for number in range(60)]),
                          written("texts.jsonl", parse_jsonl), 20, ("data/sources.py", "data/text.py")),
}
ORIGINALS = {"original_plan.json": "plan.json", "original.pt": "ckpt.pt", "original_metrics.jsonl": "run/metrics.jsonl",
             "original.safetensors": "hf/model.safetensors", "original_state.json": STATE,
             "original_run.json": "out/run.json", "original_manifest.json": "data/manifest.json",
             "original.shard": "data/train-00000.shard", "original_config.json": "hf/config.json",
             "original_speeds.jsonl": "speeds.jsonl"}


# ---- the campaign

def campaign(folder: Path) -> Campaign:
    template = folder / "template"
    template.mkdir()
    for name in TEMPLATE_NAMES:
        made = folder / name
        made.mkdir()
        TEMPLATES[name](made)
        if name == "nanogpt":
            shutil.rmtree(made / "data")  # the other dataset is used
        shutil.copytree(made, template, dirs_exist_ok=True)
    for copy, original in ORIGINALS.items():
        shutil.copy(template / original, template / copy)

    def run(case: str) -> Outcome:
        name, number = case.rsplit("/", 1)
        fresh(template, folder / "case")
        if number == "coverage":
            return isolated(lambda: in_folder(folder / "case", lambda: coverage_of(name)), 300.0)
        return isolated(lambda: in_folder(folder / "case", lambda: block(name, int(number))), 300.0)

    cases = [f"{name}/{number:04d}" for name, parser in PARSERS.items() for number in range(parser.blocks)]
    measured = PARSERS if find_spec("coverage") else ()
    return Campaign([*cases, *(f"{name}/coverage" for name in measured)], run)


def in_folder(folder: Path, work: Callable[[], Outcome]) -> Outcome:
    os.chdir(folder)
    os.environ.update(FITGPT_HOME=str(folder), XDG_CACHE_HOME=str(folder), COLUMNS="100")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.signal(signal.SIGPROF, _hangs)
    return work()


def _hangs(number: int, frame: object) -> None:
    raise Hangs


def block(name: str, number: int) -> Outcome:
    accepted = 0
    for index in range(BLOCK):
        ok, problem = one_input(name, f"{name}/{number:04d}/{index:02d}")
        accepted += ok
        if problem:
            return Outcome(f"{name}: failed", False, f"input {index}: {problem}", index + 1)
    return Outcome(name, note=str(accepted), count=BLOCK)


def one_input(name: str, seed: str) -> tuple[bool, str]:
    """(whether it was accepted, what went wrong)."""
    parser = PARSERS[name]
    given = parser.make(random.Random(seed))
    signal.setitimer(signal.ITIMER_PROF, SLOW_S)
    try:
        parser.parse(given)
    except FitError as error:
        return False, "" if error.exit_code != 70 else f"a bug report: {error.what}\n{_short(given)}"
    except Hangs:
        return False, f"more than {SLOW_S:g} s of CPU time\n{_short(given)}"
    except Exception:
        return False, f"{traceback.format_exc()[-1500:]}\n{_short(given)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return True, ""


def coverage_of(name: str) -> Outcome:
    """Branches of the parser's modules that the first inputs reach. Measured apart, since it is slow."""
    import coverage

    files = [str(PACKAGE / module) for module in PARSERS[name].modules]
    measured = coverage.Coverage(branch=True, include=files, data_file=None, messages=False, config_file=False)
    measured.start()
    try:
        for index in range(COVERED):
            one_input(name, f"{name}/{index // BLOCK:04d}/{index % BLOCK:02d}")
    finally:
        measured.stop()
    figures: Mapping[str, Any] = [measured._analyze(file).numbers for file in files]  # type: ignore[assignment]
    branches, missing = (sum(getattr(each, key) for each in figures) for key in ("n_branches", "n_missing_branches"))
    return Outcome("coverage", note=json.dumps({"branches": branches, "reached": branches - missing}), count=0)


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) < 1500 else f"{text[:700]} … {text[-700:]}"
