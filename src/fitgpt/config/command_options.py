"""What every verb but `train` can be told. (`train` has RunConfig.)"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from re import fullmatch
from typing import ClassVar, Literal

from ..core.errors import UsageError
from ..core.units import parse_count
from .fields import Options, between, knob, non_negative, path_like, plain_name
from .run_config import LARGEST_COUNT, RunConfig, device_name, size_like

_count = between(1, LARGEST_COUNT)
_count_or_0 = between(0, LARGEST_COUNT)
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


def _optional_which(text: str) -> str | None:
    return None if fullmatch(r"(best|last|[0-9]{1,12})?", text) else "must be best, last, or the number of a step"


def _path_or_message(text: str) -> str | None:
    """A message about memory is longer than a path may be, and has lines."""
    return None if "memory" in text.lower() else _optional_path(text)


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


# What verbs that use a trained model ask alike.
_which = partial(knob, "", "its checkpoint: best, last, or the number of a step; by default the last, or the best "
                 "where the run kept only improvements", rule=_optional_which)
_device = partial(knob, "auto", "auto, cpu, cuda, cuda:N or mps", rule=device_name)
_dtype = partial(knob, "auto", "of the arithmetic", choices=_DTYPES)


@dataclass(frozen=True)
class SampleOptions(Options):
    """nanoGPT's sample.py, and top_p."""

    verb: ClassVar[str] = "sample"

    out_dir: str = knob("out", "a run folder or a checkpoint; may stand alone, without --out_dir=", positional=True,
                        rule=path_like)
    which: str = _which()
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
    device: str = _device()
    dtype: str = _dtype()
    compile: bool | Literal["auto"] = knob(False, "torch.compile the model: slower to start, faster to write")


@dataclass(frozen=True)
class EvalOptions(Options):
    """The loss of a checkpoint. What is left at 0 or empty is as the run had it."""

    verb: ClassVar[str] = "eval"

    run: str = knob("", "a run folder, or one of its checkpoints", positional=True, required=True, rule=path_like)
    which: str = _which()
    dataset: str = knob("", "a name under data/, or a path; by default the run's", rule=_optional_path)
    split: str = knob("both", "which part of the data", choices=("both", "train", "val"))
    eval_iters: int = knob(0, "eval_iters × batch_size windows of each split; 0 = the run's", rule=_count_or_0)
    batch_size: int = knob(0, "see eval_iters; 0 = the run's", rule=_count_or_0)
    eval_batch_size: int = knob(0, "windows at once, which changes no loss; 0 = the run's", rule=_count_or_0)
    block_size: int = knob(0, "tokens of a window, at most the model's; 0 = the run's", rule=_count_or_0)
    device: str = _device()
    dtype: str = _dtype()
    compile: bool | Literal["auto"] = knob(False, "torch.compile the model")
    json: bool = knob(False, "print JSON")


@dataclass(frozen=True)
class ExportOptions(Options):
    """A checkpoint as a folder that transformers opens."""

    verb: ClassVar[str] = "export"

    run: str = knob("", "a run folder, or one of its checkpoints", positional=True, required=True, rule=path_like)
    out: str = knob("", "the folder to write", short="o", required=True, rule=path_like)
    which: str = _which()
    dtype: str = knob("float32", "of the weights written", choices=_DTYPES[1:])


@dataclass(frozen=True)
class DemoOptions(Options):
    """config/demo.py, from nothing to a sample."""

    verb: ClassVar[str] = "demo"

    out_dir: str = knob("runs/demo", "the run's folder", rule=path_like)
    device: str = _device()
    steps: int = knob(0, "steps to train; 0 = as many as the demo's config says", rule=_count_or_0,
                      also=("max_iters",))


@dataclass(frozen=True)
class WatchOptions(Options):
    """A run or a card, looked at again and again."""

    verb: ClassVar[str] = "watch"

    target: str = knob("", "a run folder, or the number of a GPU; may stand alone, without --target=; by default the "
                       "newest run that is running in this folder or in runs/, else the GPUs", positional=True,
                       rule=_optional_path)
    interval: float = knob(1.0, "seconds between two looks", rule=between(0.1, 3600))
    once: bool = knob(False, "look once")
    json: bool = knob(False, "print JSON, one object a look")


@dataclass(frozen=True)
class DoctorOptions(Options):
    """What is here, what is wrong, and what mends it."""

    verb: ClassVar[str] = "doctor"

    json: bool = knob(False, "print JSON")


@dataclass(frozen=True)
class ReportOptions(Options):
    """One run's page, or several runs on one page."""

    verb: ClassVar[str] = "report"

    runs: tuple[str, ...] = knob((), "a run folder, or several to compare", positional=True, required=True,
                                 rule=lambda paths: next(filter(None, map(path_like, paths)), None))
    out: str = knob("report.html", "the file to write", short="o", rule=path_like)


def _torch_version(text: str) -> str | None:
    """As torch itself writes it, too: 2.13.0+cu130, 2.12.0a0+git1234abc."""
    known = fullmatch(r"([0-9]{1,3}(\.[0-9]{1,4}){1,2}([a-z]+[0-9]*|\.dev[0-9]*)?(\+[\w.]*)?)?", text)
    return None if known else "takes a version such as 2.11"


# What `plan` and `fit` ask alike.
_budget = partial(knob, "", "what the process may hold in all, as nvidia-smi shows it, context included: 11.5GiB; by "
                  "default what the card has and others leave", rule=size_like,
                  also=("memory", "limit", "vram"))
_others = partial(knob, "", "what other processes hold of the card: 2118MiB; by default what they hold now, or nothing "
                  "where the card is not here", rule=partial(size_like, least=0))
_torch = partial(knob, "", "the version of torch; by default the one installed here, else 2.13", rule=_torch_version)
_tokens = partial(knob, "", "train on so many, such as 10B: sets max_iters and lr_decay_iters",
                  rule=lambda text: some_tokens(text) if text else None)
_epochs = partial(knob, 0.0, "the same, in rounds through the training data", rule=between(0, 1_000_000))

_plan = partial(knob, group="the plan")


@dataclass(frozen=True)
class PlanQuestions(Options):
    """What `plan` takes besides everything that `train` takes."""

    verb: ClassVar[str] = "plan"

    gpu: str = _plan("", "the card to plan for: 4070, \"RTX 3060 12GB\", h200 (`fitgpt cards` lists them); by default "
                     "the one that is here, with what is free of it now", also=("card", "device_name"))
    budget: str = _budget(group="the plan")
    others: str = _others(group="the plan")
    trainer: str = _plan("fitgpt", "whose training: fitgpt's, or that of nanoGPT's own train.py",
                         choices=("fitgpt", "nanogpt"))
    torch: str = _torch(group="the plan")
    all_cards: bool = _plan(False, "one row for every card that is known")
    options: bool = _plan(False, "what every single change would save")
    tokens: str = _tokens(group="the plan")
    epochs: float = _epochs(group="the plan")
    hours: float = _plan(0.0, "the same, in hours, once the card's speed is known", rule=between(0, 1_000_000))
    timeline: str = _plan("", "write a page that draws one step's memory, by owner, to this file",
                          rule=_optional_path)
    json: bool = _plan(False, "print JSON")


# Classes of a run's knobs and a verb's own are asked for their knobs alone, and never built: to write what an instance
# needs would take every command 15 ms.


@dataclass(frozen=True, init=False, repr=False, eq=False)  # only ever a list of knobs
class PlanOptions(RunConfig, PlanQuestions):
    """Both: the plan's own first."""

    verb: ClassVar[str] = "plan"


@dataclass(frozen=True)
class CardsOptions(Options):
    """The table of cards."""

    verb: ClassVar[str] = "cards"

    filter: str = knob("", "only cards with this in their names, such as 4070; may stand alone, without --filter=",
                       positional=True)
    json: bool = knob(False, "print JSON")


_explain = partial(knob, group="what to explain")


@dataclass(frozen=True)
class ExplainQuestions(Options):
    """What `explain` takes besides everything that `train` takes."""

    verb: ClassVar[str] = "explain"

    target: str = _explain("", "a file with a message or an nvidia-smi screen, a run folder, a plan, - for standard "
                           "input, or the message itself; may stand alone, without --target=", positional=True,
                           rule=_path_or_message)
    config: str = _explain("", "the run's config file, or its folder; a config file may also stand alone",
                           rule=_optional_path)
    reading: str = _explain("", "what nvidia-smi shows as used of the card: 6582MiB", rule=size_like)
    process: str = _explain("", "what it shows for the run's own process: 4464MiB", rule=size_like)
    gpu: str = _explain("", "the card it happened on: 4070, \"RTX 3060 12GB\" (`fitgpt cards` lists them); by default "
                        "the one that the figures name, or the one that is here", also=("card", "device_name"))
    others: str = _explain("", "what other processes hold of the card: 2118MiB", rule=partial(size_like, least=0))
    trainer: str = _explain("auto", "whose training it was; auto: as traceback and sizes show, else fitgpt's",
                            choices=("auto", "fitgpt", "nanogpt"))
    json: bool = _explain(False, "print JSON")


@dataclass(frozen=True, init=False, repr=False, eq=False)  # only ever a list of knobs
class ExplainOptions(RunConfig, ExplainQuestions):
    """Both: the questions first."""

    verb: ClassVar[str] = "explain"


@dataclass(frozen=True)
class CompletionOptions(Options):
    """Flags and verbs, completed by the shell."""

    verb: ClassVar[str] = "completion"

    shell: str = knob("bash", "the shell; may stand alone, without --shell=", choices=("bash", "zsh", "fish"),
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

    verb: ClassVar[str] = "serve"

    run: str = knob("", "a run folder for the live tab; may stand alone, without --run=; by default the newest that is "
                    "running in this folder or in runs/", positional=True, rule=_optional_path)
    port: int = knob(8765, "where it listens; 0 = any port that is free. If it is taken, one of the next is",
                     rule=between(0, 65535))
    host: str = knob("127.0.0.1", "the address it listens on. One that others can reach, such as 0.0.0.0, needs the "
                     "token that is printed", rule=_own_address)
    browser: bool = knob(True, "open the page in a browser; --no-browser does not")


_fit = partial(knob, group="the fit")


@dataclass(frozen=True)
class FitQuestions(Options):
    """What `fit` takes besides everything that `train` takes."""

    verb: ClassVar[str] = "fit"

    gpu: str = _fit("", "the card to fit: 4070, \"RTX 3060 12GB\", h200 (`fitgpt cards` lists them); by default the "
                    "one that is here, with what is free of it now", also=("card", "device_name"))
    budget: str = _budget(group="the fit")
    others: str = _others(group="the fit")
    torch: str = _torch(group="the fit")
    allow: str = _fit("", "what may be changed beyond what leaves the training as it is: lossy (adam8bit, weights, "
                      "residual), any of those by name, muon, step_in_backward, context, model; several with commas")
    goal: str = _fit("fastest", "what to look for: the fastest settings that fit, the largest GPT-2 shape or the "
                     "longest block that trains there at all, or the least memory this run can live in",
                     choices=("fastest", "largest-model", "longest-context", "smallest-memory"))
    tokens: str = _tokens(group="the fit")
    epochs: float = _epochs(group="the fit")
    hours: float = _fit(0.0, "the same, in hours at the speed to expect as asked", rule=between(0, 1_000_000))
    measure: bool = _fit(False, "time the best candidates on the GPU that is here, a few seconds each, and take the "
                         "fastest")
    out: str = _fit("", "write a config that `train` takes to this file, and its plan beside it, as NAME.plan.json; or "
                    "only the plan, if it ends in .json", short="o", rule=_optional_path)
    html: str = _fit("", "write a page with the picture of speed against memory to this file", rule=_optional_path)
    json: bool = _fit(False, "print JSON")


@dataclass(frozen=True, init=False, repr=False, eq=False)  # only ever a list of knobs
class FitOptions(RunConfig, FitQuestions):
    """Both: the fit's own first."""

    verb: ClassVar[str] = "fit"
