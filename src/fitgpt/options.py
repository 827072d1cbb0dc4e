"""What every verb but `train` can be told. (`train` has RunConfig.)"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from re import fullmatch
from typing import ClassVar, Literal

from .config import device_name
from .errors import UsageError
from .knobs import Options, between, knob, non_negative, path_like, plain_name
from .units import parse_count

_count = between(1, 2**31 - 1)
_count_or_0 = between(0, 2**31 - 1)
_source = partial(knob, group="where the text comes from")
_result = partial(knob, group="what it becomes")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def token_count(text: str) -> str | None:
    if not text:
        return None
    try:
        parse_count(text)
    except UsageError:
        return "takes a count such as 10B, 500M or 20000"
    return None


def some_tokens(text: str) -> str | None:
    return token_count(text) or (None if text and parse_count(text) > 0 else "must be above 0")


def _share(value: float) -> str | None:
    return None if 0 < value < 1 else "must be above 0 and below 1"


def _which(text: str) -> str | None:
    return None if fullmatch(r"best|last|[0-9]{1,12}", text) else "must be best, last, or the number of a step"


def _optional_which(text: str) -> str | None:
    return _which(text) if text else None


def _optional_path(text: str) -> str | None:
    return path_like(text) if text else None


def _top_p(value: float) -> str | None:
    return None if 0 < value <= 1 else "must be above 0 and at most 1"


@dataclass(frozen=True)
class PrepareOptions(Options):
    """Text in, shards out. Exactly one source: files and folders, a hub dataset, or the embedded corpus."""

    verb: ClassVar[str] = "prepare"

    input: tuple[str, ...] = _source((), "text or parquet files, or folders of them", positional=True)
    embedded: bool = _source(False, "the source text of Python's own standard library: nothing to download")
    hub: str = _source("", "a dataset of the Hugging Face hub, such as HuggingFaceFW/fineweb, streamed")
    hub_config: str = _source("", "its configuration, such as sample-10BT")
    text_column: str = _source("text", "the column of parquet files and hub datasets that holds the text")

    out: str = _result("", "the folder to write; by default data/NAME", short="o", rule=_optional_path)
    name: str = _result("", "the dataset's name under data/; by default that of the source",
                        rule=lambda text: plain_name(text) if text else None)
    tokenizer: str = _result("gpt2", "how text becomes tokens", choices=("gpt2", "bytes"))
    max_tokens: str = _result("", "stop after so many, such as 1B or 500M; 0 = all", rule=token_count)
    val_fraction: float = _result(0.005, "share of the documents held out for validation", rule=_share)
    shard_tokens: str = _result("100M", "tokens in a file", rule=some_tokens)
    seed: int = _result(1337, "of the choice of validation documents", rule=non_negative)
    overwrite: bool = _result(False, "replace a dataset that is already there")

    processes: int = knob(0, "processes that tokenize; 0 = as many as this process may use cores",
                          rule=between(0, 1024))
    yes: bool = knob(False, "do not ask before a large download", short="y")

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = [name for name, given in (("files or folders", self.input), ("--hub", self.hub),
                                            ("--embedded", self.embedded)) if given]
        if len(sources) != 1:
            got = " and ".join(sources) or "none"
            raise UsageError(f"`fitgpt prepare` takes one source of text, and got {got}.",
                             "fitgpt prepare texts/, or fitgpt prepare --hub HuggingFaceFW/fineweb "
                             "--hub_config sample-10BT, or fitgpt prepare --embedded")
        if self.hub_config and not self.hub:
            raise UsageError(f"--hub_config={self.hub_config} without --hub: of which dataset?",
                             f"--hub HuggingFaceFW/fineweb --hub_config {self.hub_config}")
        if self.out and self.name:
            raise UsageError(f"--out={self.out} and --name={self.name} both say where the result goes.",
                             "Give one: --out is a folder, --name a folder under data/.")


@dataclass(frozen=True)
class SampleOptions(Options):
    """nanoGPT's sample.py, and top_p."""

    verb: ClassVar[str] = "sample"

    out_dir: str = knob("out", "a run folder or a checkpoint; may stand alone, without --out_dir=", positional=True,
                        rule=path_like)
    which: str = knob("", "its checkpoint: best, last, or the number of a step; by default the last, or the best "
                      "where the run kept only improvements", rule=_optional_which)
    init_from: str = knob("resume", "resume: the run in out_dir; or gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a "
                          "folder in Hugging Face format", rule=path_like)
    start: str = knob("\n", "the prompt, or FILE:prompt.txt", also=("prompt",))
    num_samples: int = knob(10, "samples to draw", rule=_count)
    max_new_tokens: int = knob(500, "tokens of each", rule=_count, also=("max_tokens", "length"))
    temperature: float = knob(0.8, "below 1 is less random, above 1 more; 0 = always the likeliest token",
                              rule=non_negative, also=("temp",))
    top_k: int = knob(200, "choose among the k likeliest tokens; 0 = among all", rule=_count_or_0)
    top_p: float = knob(1.0, "choose among the likeliest tokens that together have this probability", rule=_top_p)
    seed: int = knob(1337, "the same seed, the same text", rule=non_negative)
    device: str = knob("auto", "auto, cpu, cuda, cuda:N or mps", rule=device_name)
    dtype: str = knob("auto", "of the arithmetic", choices=_DTYPES)
    compile: bool | Literal["auto"] = knob(False, "torch.compile the model: slower to start, faster to write")


@dataclass(frozen=True)
class EvalOptions(Options):
    """The loss of a checkpoint. What is left at 0 or empty is as the run had it."""

    verb: ClassVar[str] = "eval"

    run: str = knob("", "a run folder, or one of its checkpoints", positional=True, required=True, rule=path_like)
    which: str = knob("", "its checkpoint: best, last, or the number of a step; by default the last, or the best "
                      "where the run kept only improvements", rule=_optional_which)
    dataset: str = knob("", "a name under data/, or a path; by default the run's", rule=_optional_path)
    split: str = knob("both", "which part of the data", choices=("both", "train", "val"))
    eval_iters: int = knob(0, "eval_iters × batch_size windows of each split; 0 = the run's", rule=_count_or_0)
    batch_size: int = knob(0, "see eval_iters; 0 = the run's", rule=_count_or_0)
    eval_batch_size: int = knob(0, "windows at once, which changes no loss; 0 = the run's", rule=_count_or_0)
    block_size: int = knob(0, "tokens of a window, at most the model's; 0 = the run's", rule=_count_or_0)
    device: str = knob("auto", "auto, cpu, cuda, cuda:N or mps", rule=device_name)
    dtype: str = knob("auto", "of the arithmetic", choices=_DTYPES)
    compile: bool | Literal["auto"] = knob(False, "torch.compile the model")
    json: bool = knob(False, "print JSON")


@dataclass(frozen=True)
class ExportOptions(Options):
    """A checkpoint as a folder that transformers opens."""

    verb: ClassVar[str] = "export"

    run: str = knob("", "a run folder, or one of its checkpoints", positional=True, required=True, rule=path_like)
    out: str = knob("", "the folder to write", short="o", required=True, rule=path_like)
    which: str = knob("", "its checkpoint: best, last, or the number of a step; by default the last, or the best "
                      "where the run kept only improvements", rule=_optional_which)
    dtype: str = knob("float32", "of the weights written", choices=_DTYPES[1:])


@dataclass(frozen=True)
class DemoOptions(Options):
    """config/demo.py, from nothing to a sample."""

    verb: ClassVar[str] = "demo"

    out_dir: str = knob("runs/demo", "the run's folder", rule=path_like)
    device: str = knob("auto", "auto, cpu, cuda, cuda:N or mps", rule=device_name)
    steps: int = knob(0, "steps to train; 0 = as many as the demo's config says", rule=_count_or_0,
                      also=("max_iters",))
