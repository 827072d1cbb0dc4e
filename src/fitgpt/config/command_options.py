"""The options of every command but `train`, whose options are RunConfig."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from re import fullmatch
from typing import ClassVar, Literal

from ..core.errors import UsageError
from ..core.units import parse_count
from .fields import Options, between, non_negative, option, path_like, plain_name
from .memory_savers import LOSSY_SAVERS, OTHER_RULES
from .run_config import LARGEST_COUNT, RunConfig, device_name, size_like

_count = between(1, LARGEST_COUNT)
_count_or_0 = between(0, LARGEST_COUNT)
_source = partial(option, group="where the text comes from")
_result = partial(option, group="the dataset to write")
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


def _optional_which(text: str) -> str | None:
    return None if fullmatch(r"(best|last|[0-9]{1,12})?", text) else "must be best, last, or the number of a step"


def _path_or_message(text: str) -> str | None:
    """A pasted error message is longer than a path may be, and has several lines."""
    return None if "memory" in text.lower() else _optional_path(text)


def _optional_path(text: str) -> str | None:
    return path_like(text) if text else None


def _top_p(value: float) -> str | None:
    return None if 0 < value <= 1 else "must be above 0 and at most 1"


@dataclass(frozen=True)
class PrepareOptions(Options):
    """Text in, shards out. Exactly one source: files and folders, a hub dataset, or the embedded corpus."""

    command: ClassVar[str] = "prepare"

    input: tuple[str, ...] = _source((), "text or parquet files, or folders of them", positional=True)
    embedded: bool = _source(False, "the source text of Python's own standard library: nothing to download")
    hub: str = _source("", "a dataset of the Hugging Face hub, such as HuggingFaceFW/fineweb, streamed")
    hub_config: str = _source("", "its configuration, such as sample-10BT")
    text_column: str = _source("text", "the column of parquet files and hub datasets that holds the text")

    out: str = _result("", "the folder to write; by default data/NAME", short="o", rule=_optional_path)
    name: str = _result("", "the dataset's name under data/; by default that of the source",
                        rule=lambda text: plain_name(text) if text else None)
    tokenizer: str = _result("gpt2", "how text becomes tokens", choices=("gpt2", "bytes"))
    max_tokens: str = _result("", "stop after this many tokens, such as 1B or 500M; 0 = all", rule=token_count)
    val_fraction: float = _result(0.005, "share of the documents held out for validation", rule=_share)
    shard_tokens: str = _result("100M", "tokens in a file", rule=some_tokens)
    seed: int = _result(1337, "seed of the choice of validation documents", rule=non_negative)
    overwrite: bool = _result(False, "replace a dataset that is already there")

    processes: int = option(0, "processes that tokenize; 0 = one per core that this process may use",
                            rule=between(0, 1024))
    yes: bool = option(False, "do not ask before a large download", short="y")

    def __post_init__(self) -> None:
        super().__post_init__()
        sources = [name for name, given in (("files or folders", self.input), ("--hub", self.hub),
                                            ("--embedded", self.embedded)) if given]
        if len(sources) != 1:
            got = " and ".join(sources) or "none"
            raise UsageError(f"`fitgpt prepare` takes one source of text, but got {got}.",
                             "fitgpt prepare texts/, or fitgpt prepare --hub HuggingFaceFW/fineweb "
                             "--hub_config sample-10BT, or fitgpt prepare --embedded")
        if self.hub_config and not self.hub:
            raise UsageError(f"--hub_config={self.hub_config} without --hub: of which dataset?",
                             f"--hub HuggingFaceFW/fineweb --hub_config {self.hub_config}")
        if self.out and self.name:
            raise UsageError(f"--out={self.out} and --name={self.name} both say where the result goes.",
                             "Give one: --out is a folder, --name a folder under data/.")


# Options that commands with a trained model share.
_which = partial(option, "", "its checkpoint: best, last, or the number of a step; by default the last, or the best "
                 "if the run saved only improvements", rule=_optional_which)
_device = partial(option, "auto", "auto, cpu, cuda, cuda:N or mps", rule=device_name)
_dtype = partial(option, "auto", "data type of matmuls: bfloat16 and float16 mean mixed precision",
                 choices=_DTYPES)


@dataclass(frozen=True)
class SampleOptions(Options):
    """nanoGPT's sample.py, and top_p."""

    command: ClassVar[str] = "sample"

    out_dir: str = option("out", "a run folder or a checkpoint; may stand alone, without --out_dir=", positional=True,
                          rule=path_like)
    which: str = _which()
    init_from: str = option("resume", "resume: the run in out_dir; or gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a "
                            "folder in Hugging Face format", rule=path_like)
    start: str = option("\n", "the prompt, or FILE:prompt.txt", synonyms=("prompt",))
    num_samples: int = option(10, "samples to draw", rule=_count)
    max_new_tokens: int = option(500, "tokens of each", rule=_count, synonyms=("max_tokens", "length"))
    temperature: float = option(0.8, "below 1 is less random, above 1 more; 0 = always the likeliest token",
                                rule=non_negative, synonyms=("temp",))
    top_k: int = option(200, "choose among the k likeliest tokens; 0 = among all", rule=_count_or_0)
    top_p: float = option(1.0, "choose among the likeliest tokens that together have this probability", rule=_top_p)
    seed: int = option(1337, "seed: the same seed gives the same text", rule=non_negative)
    device: str = _device()
    dtype: str = _dtype()
    compile: bool | Literal["auto"] = option(False, "torch.compile the model: slower to start, faster to write")


@dataclass(frozen=True)
class EvalOptions(Options):
    """The loss of a checkpoint. What is left at 0 or empty is as the run had it."""

    command: ClassVar[str] = "eval"

    run: str = option("", "a run folder, or one of its checkpoints", positional=True, required=True, rule=path_like)
    which: str = _which()
    dataset: str = option("", "a name under data/, or a path; by default the run's", rule=_optional_path)
    split: str = option("both", "which part of the data", choices=("both", "train", "val"))
    eval_iters: int = option(0, "eval_iters × batch_size windows of each split; 0 = the run's", rule=_count_or_0)
    batch_size: int = option(0, "see eval_iters; 0 = the run's", rule=_count_or_0)
    eval_batch_size: int = option(0, "windows at once, which changes no loss; 0 = the run's", rule=_count_or_0)
    block_size: int = option(0, "tokens of a window, at most the model's; 0 = the run's", rule=_count_or_0)
    device: str = _device()
    dtype: str = _dtype()
    compile: bool | Literal["auto"] = option(False, "torch.compile the model")
    json: bool = option(False, "print JSON")


@dataclass(frozen=True)
class ExportOptions(Options):
    """A checkpoint as a folder that transformers opens."""

    command: ClassVar[str] = "export"

    run: str = option("", "a run folder, or one of its checkpoints", positional=True, required=True, rule=path_like)
    out: str = option("", "the folder to write", short="o", required=True, rule=path_like)
    which: str = _which()
    dtype: str = option("float32", "of the weights written", choices=_DTYPES[1:])


@dataclass(frozen=True)
class DemoOptions(Options):
    """config/demo.py: prepare, train and sample."""

    command: ClassVar[str] = "demo"

    out_dir: str = option("runs/demo", "the run's folder", rule=path_like)
    device: str = _device()
    steps: int = option(0, "steps to train; 0 = as many as the demo's config says", rule=_count_or_0,
                        synonyms=("max_iters",))


@dataclass(frozen=True)
class WatchOptions(Options):
    """A run or a GPU, shown again at an interval."""

    command: ClassVar[str] = "watch"

    target: str = option("", "a run folder, or the number of a GPU; may stand alone, without --target=; by default the "
                         "newest run that is running in this folder or in runs/, else the GPUs", positional=True,
                         rule=_optional_path)
    interval: float = option(1.0, "seconds between two updates", rule=between(0.1, 3600))
    once: bool = option(False, "show it once and stop")
    json: bool = option(False, "print JSON, one object per update")


@dataclass(frozen=True)
class DoctorOptions(Options):
    """What is installed, what is wrong, and what fixes it."""

    command: ClassVar[str] = "doctor"

    json: bool = option(False, "print JSON")


@dataclass(frozen=True)
class ReportOptions(Options):
    """One run's page, or several runs on one page."""

    command: ClassVar[str] = "report"

    runs: tuple[str, ...] = option((), "a run folder, or several to compare", positional=True, required=True,
                                   rule=lambda paths: next(filter(None, map(path_like, paths)), None))
    out: str = option("report.html", "the file to write", short="o", rule=path_like)


def _torch_version(text: str) -> str | None:
    """As torch itself writes it, too: 2.13.0+cu130, 2.12.0a0+git1234abc."""
    known = fullmatch(r"([0-9]{1,3}(\.[0-9]{1,4}){1,2}([a-z]+[0-9]*|\.dev[0-9]*)?(\+[\w.]*)?)?", text)
    return None if known else "takes a version such as 2.11"


# Options that `plan` and `fit` share.
_budget = partial(option, "", "GPU memory the process may use in total, as nvidia-smi shows it, CUDA context "
                  "included: 11.5GiB; by default what the GPU has and other processes leave", rule=size_like,
                  synonyms=("memory", "limit", "vram"))
_others = partial(option, "", "GPU memory of other processes: 2118MiB; by default what they use now, or nothing if the "
                  "GPU is not in this machine", rule=partial(size_like, least=0))
_torch = partial(option, "", "the version of torch; by default the one installed here, else 2.13", rule=_torch_version)
_tokens = partial(option, "", "train on this many tokens, such as 10B: sets max_iters and lr_decay_iters",
                  rule=lambda text: some_tokens(text) if text else None)
_epochs = partial(option, 0.0, "the same, in passes through the training data", rule=between(0, 1_000_000))

_plan = partial(option, group="the plan")


@dataclass(frozen=True)
class PlanQuestions(Options):
    """What `plan` takes besides everything that `train` takes."""

    command: ClassVar[str] = "plan"

    gpu: str = _plan("", "the GPU to plan for: 4070, \"RTX 3060 12GB\", h200 (`fitgpt cards` lists them); by default "
                     "the one in this machine, with the memory that is free now", synonyms=("card", "device_name"))
    budget: str = _budget(group="the plan")
    others: str = _others(group="the plan")
    trainer: str = _plan("fitgpt", "which trainer: fitgpt, or nanoGPT's own train.py",
                         choices=("fitgpt", "nanogpt"))
    torch: str = _torch(group="the plan")
    all_cards: bool = _plan(False, "one row for every known GPU")
    options: bool = _plan(False, "what every single change would save")
    tokens: str = _tokens(group="the plan")
    epochs: float = _epochs(group="the plan")
    hours: float = _plan(0.0, "the same, in hours, if the GPU's speed is known", rule=between(0, 1_000_000))
    timeline: str = _plan("", "write a page with a chart of one step's memory, by owner, to this file",
                          rule=_optional_path)
    json: bool = _plan(False, "print JSON")


@dataclass(frozen=True)
class PlanOptions(RunConfig, PlanQuestions):
    """Everything that `train` takes, after the options of the plan."""

    command: ClassVar[str] = "plan"


@dataclass(frozen=True)
class CardsOptions(Options):
    """The table of GPUs."""

    command: ClassVar[str] = "cards"

    filter: str = option("", "only GPUs with this in their names, such as 4070; may stand alone, without --filter=",
                         positional=True)
    json: bool = option(False, "print JSON")


_explain = partial(option, group="what to explain")


@dataclass(frozen=True)
class ExplainQuestions(Options):
    """What `explain` takes besides everything that `train` takes."""

    command: ClassVar[str] = "explain"

    target: str = _explain("", "a file with a message or an nvidia-smi screen, a run folder, a plan, - for standard "
                           "input, or the message itself; may stand alone, without --target=", positional=True,
                           rule=_path_or_message)
    config: str = _explain("", "the run's config file, or its folder; a config file may also stand alone",
                           rule=_optional_path)
    reading: str = _explain("", "memory in use on the GPU, as nvidia-smi shows it: 6582MiB", rule=size_like)
    process: str = _explain("", "memory of the run's own process, as nvidia-smi shows it: 4464MiB", rule=size_like)
    gpu: str = _explain("", "the GPU it happened on: 4070, \"RTX 3060 12GB\" (`fitgpt cards` lists them); by default "
                        "the one that the message names, or the one in this machine", synonyms=("card", "device_name"))
    others: str = _explain("", "GPU memory of other processes: 2118MiB", rule=partial(size_like, least=0))
    trainer: str = _explain("auto", "which trainer it was; auto: as the traceback and the sizes show, else fitgpt",
                            choices=("auto", "fitgpt", "nanogpt"))
    json: bool = _explain(False, "print JSON")


@dataclass(frozen=True)
class ExplainOptions(RunConfig, ExplainQuestions):
    """Everything that `train` takes, after the options of `explain`."""

    command: ClassVar[str] = "explain"


@dataclass(frozen=True)
class CompletionOptions(Options):
    """Commands and options, completed by the shell."""

    command: ClassVar[str] = "completion"

    shell: str = option("bash", "the shell; may stand alone, without --shell=", choices=("bash", "zsh", "fish"),
                        positional=True)


def _own_address(text: str) -> str | None:
    import ipaddress

    try:
        ipaddress.ip_address("127.0.0.1" if text == "localhost" else text)
    except ValueError:
        return "must be an address of this machine, such as 127.0.0.1 or 0.0.0.0, or localhost"
    return None


@dataclass(frozen=True)
class ServeOptions(Options):
    """The planner as a page on this machine."""

    command: ClassVar[str] = "serve"

    run: str = option("", "a run folder for the live tab; may stand alone, without --run=; by default the newest that "
                      "is running in this folder or in runs/", positional=True, rule=_optional_path)
    port: int = option(8765, "port to listen on; 0 = any free port. If it is in use, the next free one is taken",
                       rule=between(0, 65535))
    host: str = option("127.0.0.1", "address to listen on. If other machines can reach it, such as 0.0.0.0, the page "
                       "needs the token that is printed", rule=_own_address)
    browser: bool = option(True, "open the page in a browser; --no-browser does not")


_fit = partial(option, group="the fit")


@dataclass(frozen=True)
class FitQuestions(Options):
    """What `fit` takes besides everything that `train` takes."""

    command: ClassVar[str] = "fit"

    gpu: str = _fit("", "the GPU to fit: 4070, \"RTX 3060 12GB\", h200 (`fitgpt cards` lists them); by default the "
                    "one in this machine, with the memory that is free now", synonyms=("card", "device_name"))
    budget: str = _budget(group="the fit")
    others: str = _others(group="the fit")
    torch: str = _torch(group="the fit")
    allow: str = _fit("", "what may change the training's result: lossy (" + ", ".join(LOSSY_SAVERS) + "), any of "
                      "those by name, " + ", ".join(OTHER_RULES) + ", context, model; several with commas")
    goal: str = _fit("fastest", "what to look for: the fastest settings that fit, the largest GPT-2 shape or the "
                     "longest block that can be trained there, or the smallest memory this run can be trained in",
                     choices=("fastest", "largest-model", "longest-context", "smallest-memory"))
    tokens: str = _tokens(group="the fit")
    epochs: float = _epochs(group="the fit")
    hours: float = _fit(0.0, "the same, in hours, at the expected speed of the given run", rule=between(0, 1_000_000))
    measure: bool = _fit(False, "time the best candidates on the GPU in this machine, a few seconds each, and take the "
                         "fastest")
    out: str = _fit("", "write a config that `train` takes to this file, and its plan beside it, as NAME.plan.json; or "
                    "only the plan, if it ends in .json", short="o", rule=_optional_path)
    html: str = _fit("", "write a page with a chart of speed against memory to this file", rule=_optional_path)
    json: bool = _fit(False, "print JSON")


@dataclass(frozen=True)
class FitOptions(RunConfig, FitQuestions):
    """Everything that `train` takes, after the options of the fit."""

    command: ClassVar[str] = "fit"


@dataclass(frozen=True)
class RehearseOptions(RunConfig):
    """Everything that `train` takes, and where the result goes."""

    command: ClassVar[str] = "rehearse"

    out: str = option("rehearsal.json", "the file to write", group="the rehearsal", short="o", rule=path_like)
