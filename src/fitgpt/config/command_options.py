"""Every command: its options, usage and examples. The options of `train` are those of run_config.py.

Some commands take the options of a run besides their own: FitOptions has fit's own, FitArguments all that fit takes.
The function of a command is in commands/NAME.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from re import fullmatch
from typing import Literal

from ..core.errors import UsageError
from ..core.units import parse_count
from ..memory.platform import DEFAULT_TORCH
from .fields import (
    Options,
    Problem,
    between,
    count,
    count_or_0,
    must,
    non_negative,
    option,
    optional,
    path_like,
    plain_name,
)
from .memory_savers import LOSSY_SAVERS, OTHER_RULES
from .run_config import DTYPE_NAMES, RunConfig, budget_option, device_name, size_like

_source = partial(option, group="where the text comes from")
_result = partial(option, group="the dataset to write")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_optional_path = optional(path_like)
_mib_like = partial(size_like, unit="MiB")


def token_count(text: str, least: int = 0) -> Problem | None:
    try:
        return None if text and parse_count(text) >= least else Problem("must be above 0", "100M")
    except UsageError:
        return Problem("takes a count such as 10B, 500M or 20000", "100M")


some_tokens = partial(token_count, least=1)


@dataclass(frozen=True)
class PrepareOptions(Options):
    """Text in, shards out. Exactly one source: files and folders, a hub dataset, or the embedded corpus."""

    command = "prepare"
    summary = "Turn text into tokens to train on."
    usage = "fitgpt prepare [FILE or FOLDER ...] [--option=value ...]"
    examples = (
        "fitgpt prepare my_texts/ --name=mine",
        "fitgpt prepare --hub=HuggingFaceFW/fineweb --hub_config=sample-10BT --max_tokens=1B",
        "fitgpt prepare --embedded --tokenizer=bytes")

    input: tuple[str, ...] = _source((), "text or parquet files, or folders of them", positional=True)
    embedded: bool = _source(False, "the source code of Python's standard library: nothing to download")
    hub: str = _source("", "a dataset of the Hugging Face hub, such as HuggingFaceFW/fineweb, streamed")
    hub_config: str = _source("", "configuration of the hub dataset, such as sample-10BT")
    text_column: str = _source("text", "column of parquet files and hub datasets that holds the text")

    out: str = _result("", "folder to write; by default data/NAME", short="o", rule=_optional_path)
    name: str = _result("", "name of the dataset under data/; by default that of the source", rule=optional(plain_name))
    tokenizer: str = _result("gpt2", "tokenizer: GPT-2's, or one token per byte", choices=("gpt2", "bytes"),
                             meant={"char": "bytes", "chars": "bytes", "character": "bytes", "tiktoken": "gpt2"})
    max_tokens: str = _result("", "stop after this many tokens, such as 1B or 500M; 0 = all",
                              rule=optional(token_count))
    val_fraction: float = _result(0.005, "share of the documents held out for validation",
                                  rule=must(lambda share: 0 < share < 1, "must be above 0 and below 1"))
    shard_tokens: str = _result("100M", "tokens per file", rule=some_tokens)
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
                             "fitgpt prepare texts/, or fitgpt prepare --embedded, or\n"
                             "fitgpt prepare --hub=HuggingFaceFW/fineweb --hub_config=sample-10BT")
        if self.hub_config and not self.hub:
            raise UsageError(f"--hub_config={self.hub_config} without --hub: of which dataset?",
                             f"--hub HuggingFaceFW/fineweb --hub_config {self.hub_config}")
        if self.out and self.name:
            raise UsageError(f"--out={self.out} and --name={self.name} both say where the result goes.",
                             "Give one: --out is a folder, --name a folder under data/.")


# Options that commands with a trained model share.
_which = partial(option, "", "checkpoint: best, last, or the number of a step; by default the last, or the best "
                 "if the run saved only improvements",
                 rule=must(partial(fullmatch, "(best|last|[0-9]{1,12})?"),
                           "must be best, last, or the number of a step", "last"))
_device = partial(option, "auto", "device: auto, cpu, cuda, cuda:N or mps", rule=device_name)
_dtype = partial(option, "auto", "data type of matmuls: bfloat16 and float16 mean mixed precision",
                 choices=_DTYPES, also_values=DTYPE_NAMES)


@dataclass(frozen=True)
class SampleOptions(Options):
    """The options of nanoGPT's sample.py, and top_p."""

    command = "sample"
    summary = "Generate text with a trained model."
    usage = "fitgpt sample [RUN] [config.py ...] [--option=value ...]"
    examples = ("fitgpt sample runs/demo --start='def '", "fitgpt sample --init_from=gpt2-xl --num_samples=5")
    takes_config_files = True

    out_dir: str = option("out", "run folder or checkpoint; --out_dir= may be left out", positional=True,
                          rule=path_like)
    which: str = _which()
    init_from: str = option("resume", "weights: resume means the run in out_dir; or gpt2, gpt2-medium, gpt2-large, "
                            "gpt2-xl, or a folder in Hugging Face format", rule=path_like)
    start: str = option("\n", "prompt, or FILE:prompt.txt", synonyms=("prompt",))
    num_samples: int = option(10, "number of samples", rule=count)
    max_new_tokens: int = option(500, "tokens per sample", rule=count, synonyms=("max_tokens", "length"))
    temperature: float = option(0.8, "randomness: below 1 less, above 1 more; 0 = always the likeliest token",
                                rule=non_negative, synonyms=("temp",))
    top_k: int = option(200, "choose among the k likeliest tokens; 0 = among all", rule=count_or_0)
    top_p: float = option(1.0, "choose among the likeliest tokens that together have this probability",
                          rule=must(lambda share: 0 < share <= 1, "must be above 0 and at most 1"))
    seed: int = option(1337, "seed of the random choices: the same seed gives the same text", rule=non_negative)
    device: str = _device()
    dtype: str = _dtype()
    compile: bool | Literal["auto"] = option(False, "torch.compile the model: starts slower, generates faster")


@dataclass(frozen=True)
class EvalOptions(Options):
    """The loss of a checkpoint. What is left at 0 or empty is as the run had it."""

    command = "eval"
    summary = "Measure the loss of a checkpoint."
    usage = "fitgpt eval RUN [--option=value ...]"
    examples = ("fitgpt eval runs/demo", "fitgpt eval runs/demo --split=val --eval_iters=500 --json")

    run: str = option("", "run folder, or one of its checkpoints", positional=True, required=True, rule=path_like,
                      example="runs/demo")
    which: str = _which()
    dataset: str = option("", "dataset: a name under data/, or a path; by default the run's", rule=_optional_path)
    split: str = option("both", "part of the data", choices=("both", "train", "val"))
    eval_iters: int = option(0, "batches per split: eval_iters × batch_size windows are read; 0 = the run's",
                             rule=count_or_0)
    batch_size: int = option(0, "windows per batch, for eval_iters; 0 = the run's", rule=count_or_0)
    eval_batch_size: int = option(0, "windows computed at once; does not change the loss; 0 = the run's",
                                  rule=count_or_0)
    block_size: int = option(0, "tokens per window, at most the model's block size; 0 = the run's; also "
                             "--eval_block_size", rule=count_or_0, also=("eval_block_size",))
    device: str = _device()
    dtype: str = _dtype()
    compile: bool | Literal["auto"] = option(False, "torch.compile the model")
    json: bool = option(False, "print JSON")


@dataclass(frozen=True)
class ExportOptions(Options):
    command = "export"
    summary = "Write a checkpoint as a folder that transformers opens."
    usage = "fitgpt export RUN -o FOLDER [--option=value ...]"
    examples = ("fitgpt export runs/fineweb -o my-gpt", "fitgpt export runs/fineweb -o my-gpt --which=last")

    run: str = option("", "run folder, or one of its checkpoints", positional=True, required=True, rule=path_like,
                      example="runs/demo")
    out: str = option("", "folder to write", short="o", required=True, rule=path_like, example="my-gpt")
    which: str = _which()
    dtype: str = option("float32", "data type of the written weights", choices=_DTYPES[1:],
                       also_values=DTYPE_NAMES)


@dataclass(frozen=True)
class DemoOptions(Options):
    command = "demo"
    summary = "Prepare, train and sample a small GPT in minutes, without a download."
    usage = "fitgpt demo [--option=value ...]"
    examples = ("fitgpt demo", "fitgpt demo --steps=100 --device=cpu")

    out_dir: str = option("runs/demo", "folder of the run", rule=path_like)
    device: str = _device()
    steps: int = option(0, "steps to train; 0 = as many as config/demo.py has", rule=count_or_0,
                        synonyms=("max_iters",))


@dataclass(frozen=True)
class WatchOptions(Options):
    command = "watch"
    summary = "Show what a GPU and the run on it are doing."
    usage = "fitgpt watch [RUN or GPU] [--option=value ...]"
    examples = ("fitgpt watch", "fitgpt watch runs/fineweb --interval=5", "fitgpt watch 0 --once --json")

    target: str = option("", "run folder, or number of a GPU; --target= may be left out; by default the newest run "
                         "that is running in this folder or in runs/; if none is, the GPUs; without a GPU, the "
                         "newest run",
                         positional=True, rule=_optional_path)
    interval: float = option(1.0, "seconds between two updates", rule=between(0.1, 3600))
    once: bool = option(False, "print one update and stop")
    json: bool = option(False, "print JSON, one object per update")


@dataclass(frozen=True)
class DoctorOptions(Options):
    command = "doctor"
    summary = "Check the installation and the GPU, and name the command that fixes each problem; or verify a dataset."
    usage = "fitgpt doctor [DATASET] [--json]"
    examples = ("fitgpt doctor", "fitgpt doctor fineweb")

    dataset: str = option("", "dataset whose shards are compared with their checksums, all of them", positional=True,
                          rule=_optional_path)
    json: bool = option(False, "print JSON")


@dataclass(frozen=True)
class ReportOptions(Options):
    command = "report"
    summary = "Make one page of a run, or of several side by side."
    usage = "fitgpt report RUN [RUN ...] [-o FILE]"
    examples = ("fitgpt report runs/demo -o report.html", "fitgpt report runs/a runs/b -o both.html")

    runs: tuple[str, ...] = option((), "run folder, or several to compare", positional=True, required=True,
                                   rule=lambda paths: next(filter(None, map(path_like, paths)), None))
    out: str = option("report.html", "file to write", short="o", rule=path_like)


# A version as torch itself writes it, too: 2.13.0+cu130, 2.12.0a0+git1234abc.
_TORCH_VERSION = r"([0-9]{1,3}(\.[0-9]{1,4}){1,2}([a-z]+[0-9]*|\.dev[0-9]*)?(\+[\w.]*)?)?"

# Options that `plan`, `fit` and `trace` share.
_gpu = partial(option, "", "GPU to plan for: 4070, \"RTX 3060 12GB\", h200 (`fitgpt cards` lists them); by default the "
               "one in this machine, with the memory that is free now", synonyms=("card", "device_name"),
               example="4070")
_others = partial(option, "", "GPU memory of other processes: 2118MiB; without a unit, MiB; by default what they use "
                  "now, or nothing if the GPU is not in this machine", rule=partial(_mib_like, least=0),
                  example="2118MiB")
_torch = partial(option, "", f"version of torch; by default the one installed here, else {DEFAULT_TORCH}",
                 example="2.11", rule=must(partial(fullmatch, _TORCH_VERSION), "takes a version such as 2.11"))
_tokens = partial(option, "", "train on this many tokens, such as 10B: sets max_iters and lr_decay_iters",
                  rule=optional(some_tokens), example="10B")
_epochs = partial(option, 0.0, "train for this many passes through the training data", rule=between(0, 1_000_000))
_all_cards = partial(option, False, "plan for every known GPU, one row each", flag="all-cards")
_timeline = partial(option, "", "write a page with a chart of one step's memory, by owner, to this file",
                    rule=_optional_path, example="step.html")

_plan = partial(option, group="the plan")


@dataclass(frozen=True)
class PlanOptions(Options):
    """The options of `plan` alone."""

    command = "plan"

    gpu: str = _gpu(group="the plan")
    budget: str = budget_option(group="the plan")
    others: str = _others(group="the plan")
    trainer: str = _plan("fitgpt", "trainer: fitgpt, or nanoGPT's own train.py",
                         choices=("fitgpt", "nanogpt"))
    torch: str = _torch(group="the plan")
    all_cards: bool = _all_cards(group="the plan")
    options: bool = _plan(False, "list what every single change would save")
    tokens: str = _tokens(group="the plan")
    epochs: float = _epochs(group="the plan")
    hours: float = _plan(0.0, "train for this many hours, if the speed of the GPU is known", rule=between(0, 1_000_000))
    timeline: str = _timeline(group="the plan")
    json: bool = _plan(False, "print JSON")


@dataclass(frozen=True)
class PlanArguments(RunConfig, PlanOptions):
    """Everything that `plan` takes: its own options, and those of a run."""

    command = "plan"
    own = PlanOptions
    summary = "Forecast the GPU memory of a run, and whether it fits."
    usage = "fitgpt plan [config.py ...] [--gpu NAME] [--option=value ...]"
    examples = (
        "fitgpt plan config/train_fineweb.py --gpu 4070",
        "fitgpt plan config/train_fineweb.py --gpu 4070 --others 2.1GiB --batch_size=32",
        "fitgpt plan config/notes_77m.py --gpu 4070 --trainer nanogpt --options",
        "fitgpt plan config/gpt2_124m.py --all-cards --tokens 10B")


@dataclass(frozen=True)
class CardsOptions(Options):
    command = "cards"
    summary = "List the GPUs that fitgpt can plan for."
    usage = "fitgpt cards [NAME] [--json]"
    examples = ("fitgpt cards", "fitgpt cards 4070")

    filter: str = option("", "list only GPUs with this in their names, such as 4070; --filter= may be left out",
                         positional=True)
    json: bool = option(False, "print JSON")


@dataclass(frozen=True)
class TraceOptions(Options):
    """The options of `trace`; they come before the script."""

    command = "trace"
    summary = "Forecast the GPU memory of any PyTorch training script. Runs the script; needs no GPU."
    usage = "fitgpt trace [--option=value ...] SCRIPT.py [ARGUMENT ...]"
    examples = (
        "fitgpt trace --gpu 4070 train.py --batch_size 8 --lr 3e-4",
        "fitgpt trace --gpu 4070 --steps 6 --save my.trace.json -m my_package.train",
        "fitgpt trace --gpu 3060 --others 1GiB my.trace.json")
    takes_script = True

    script: tuple[str, ...] = option((), "the script and its arguments, -m MODULE and arguments, or a saved trace",
                                     positional=True, required=True)
    gpu: str = _gpu()
    budget: str = budget_option()
    others: str = _others()
    steps: int = option(4, "stop the script after this many optimizer steps", rule=count)
    torch: str = _torch()
    allocator: str = option("auto", "PyTorch's allocator: auto is as the script sets it",
                            choices=("auto", "native", "expandable"))
    save: str = option("", "write the trace to this file, for `fitgpt trace FILE` and `fitgpt explain --trace FILE`",
                       rule=_optional_path, example="my.trace.json")
    all_cards: bool = _all_cards()
    timeline: str = _timeline()
    json: bool = option(False, "print JSON")


_explain = partial(option, group="what to explain")


@dataclass(frozen=True)
class ExplainOptions(Options):
    """The options of `explain` alone."""

    command = "explain"

    target: str = _explain("", "a file with a message, an nvidia-smi screen or a memory snapshot, a run folder, a "
                           "plan, - for standard input, or the text itself: a message, or \"6582MiB / 12282MiB\"; "
                           "may stand alone, without --target=", positional=True)
    config: str = _explain("", "the run's config file, or its folder; a config file may also stand alone",
                           rule=_optional_path)
    reading: str = _explain("", "memory in use on the GPU, as nvidia-smi shows it: 6582MiB; without a unit, MiB",
                            rule=_mib_like)
    process: str = _explain("", "memory of the run's own process, as nvidia-smi shows it: 4464MiB; without a unit, MiB",
                            rule=_mib_like)
    gpu: str = _explain("", "the GPU it happened on: 4070, \"RTX 3060 12GB\" (`fitgpt cards` lists them); by default "
                        "the one that the message names, or the one in this machine", synonyms=("card", "device_name"))
    trace: str = _explain("", "a trace of the script, saved by `fitgpt trace --save`: names the tensor",
                          rule=_optional_path, example="my.trace.json")
    others: str = _explain("", "GPU memory of other processes: 2118MiB; without a unit, MiB",
                           rule=partial(_mib_like, least=0))
    trainer: str = _explain("auto", "which trainer it was; auto: as the traceback and the sizes show, else fitgpt",
                            choices=("auto", "fitgpt", "nanogpt"))
    json: bool = _explain(False, "print JSON")


@dataclass(frozen=True)
class ExplainArguments(RunConfig, ExplainOptions):
    """Everything that `explain` takes: its own options, and those of a run."""

    command = "explain"
    own = ExplainOptions
    summary = "Say why a run was out of memory, or what uses the memory, and what would change it."
    usage = "fitgpt explain [FILE or RUN or -] [config.py ...] [--option=value ...]"
    examples = (
        "fitgpt explain oom.txt config/train_fineweb.py",
        "fitgpt explain - config/notes_77m.py --trainer=nanogpt",
        "fitgpt explain --reading 6582MiB --process 4464MiB --gpu 4070 config/notes_30m.py",
        "fitgpt explain runs/fineweb")


@dataclass(frozen=True)
class CompletionOptions(Options):
    command = "completion"
    summary = "Print a script that lets the shell complete commands and options."
    usage = "fitgpt completion [bash|zsh|fish]"
    examples = ("fitgpt completion bash", "fitgpt completion fish")

    shell: str = option("bash", "shell; --shell= may be left out", choices=("bash", "zsh", "fish"),
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
    command = "serve"
    summary = "Plan in a web page on this machine, and see a run live."
    usage = "fitgpt serve [RUN] [--option=value ...]"
    examples = ("fitgpt serve", "fitgpt serve --no-browser --port=9000")

    run: str = option("", "run folder for the live tab; --run= may be left out; by default the newest that "
                      "is running in this folder or in runs/", positional=True, rule=_optional_path)
    port: int = option(8765, "port to listen on; 0 = any free port. If it is in use, the next free one is taken",
                       rule=between(0, 65535))
    host: str = option("127.0.0.1", "address to listen on. If other machines can reach it, such as 0.0.0.0, the page "
                       "needs the token that is printed", rule=_own_address)
    browser: bool = option(True, "open the page in a browser; --no-browser does not")


_fit = partial(option, group="the fit")


@dataclass(frozen=True)
class FitOptions(Options):
    """The options of `fit` alone."""

    command = "fit"

    gpu: str = _gpu(group="the fit")
    budget: str = budget_option(group="the fit")
    others: str = _others(group="the fit")
    torch: str = _torch(group="the fit")
    allow: str = _fit("", "changes of the training result to allow: lossy (" + ", ".join(LOSSY_SAVERS) + "), any of "
                      "those by name, " + ", ".join(OTHER_RULES) + ", context, model; several with commas")
    goal: str = _fit("fastest", "goal: the fastest settings that fit, the largest GPT-2 shape or the "
                     "longest block that can be trained there, or the smallest memory this run can be trained in",
                     choices=("fastest", "largest-model", "longest-context", "smallest-memory"))
    tokens: str = _tokens(group="the fit")
    epochs: float = _epochs(group="the fit")
    hours: float = _fit(0.0, "train for this many hours, at the expected speed of the given run",
                        rule=between(0, 1_000_000))
    measure: bool = _fit(False, "time the best candidates on the GPU in this machine, a few seconds each, and take the "
                         "fastest")
    out: str = _fit("", "write a config that `train` takes to this file, and its plan beside it, as NAME.plan.json; or "
                    "only the plan, if it ends in .json", short="o", rule=_optional_path)
    html: str = _fit("", "write a page with a chart of speed against memory to this file", rule=_optional_path)
    json: bool = _fit(False, "print JSON")


@dataclass(frozen=True)
class FitArguments(RunConfig, FitOptions):
    """Everything that `fit` takes: its own options, and those of a run."""

    command = "fit"
    own = FitOptions
    summary = "Find the fastest settings that fit a GPU, and say why."
    usage = "fitgpt fit [config.py ...] [--gpu NAME] [--allow WHAT] [-o FILE] [--option=value ...]"
    examples = (
        "fitgpt fit config/train_fineweb.py --gpu 4070",
        "fitgpt fit config/gpt2_350m.py --gpu 4070 --allow lossy -o config/my_4070.py",
        "fitgpt fit config/gpt2_124m.py --gpu 3060 --goal largest-model",
        "fitgpt fit config/train_fineweb.py --measure")


@dataclass(frozen=True)
class RehearseOptions(Options):
    """The option of `rehearse` alone."""

    command = "rehearse"

    out: str = option("rehearsal.json", "file to write", group="the rehearsal", short="o", rule=path_like)


@dataclass(frozen=True)
class RehearseArguments(RunConfig, RehearseOptions):
    """Everything that `rehearse` takes: its own option, and those of a run."""

    command = "rehearse"
    own = RehearseOptions
    summary = "Run everything that allocates memory once, and compare it with the plan."
    usage = "fitgpt rehearse [config.py ...] [--option=value ...] [-o FILE]"
    examples = (
        "fitgpt rehearse config/train_fineweb.py",
        "fitgpt rehearse config/train_fineweb.py --batch_size=32 -o rehearsal.json")


@dataclass(frozen=True)
class RecordOptions(Options):
    command = "record"
    summary = "Measure the GPU in this machine for plans and fits, in about ten minutes."
    usage = "fitgpt record -o FILE [--option=value ...]"
    examples = ("fitgpt record -o my-4070.json", "fitgpt record -o my-4070.json --leave=1GiB")

    out: str = option("gpu-record.json", "file to write; a record that is not complete is continued", short="o",
                      rule=path_like)
    device: str = option("auto", "GPU: auto, cuda or cuda:N", rule=device_name)
    leave: str = option("512MiB", "memory of the GPU to leave free for the desktop and other programs",
                        rule=partial(size_like, least=0), example="1GiB")


# Every command, in the order of `fitgpt --help`.
COMMANDS: dict[str, type[Options]] = {cls.command: cls for cls in (
    PrepareOptions, PlanArguments, TraceOptions, FitArguments, CardsOptions, RunConfig, RehearseArguments,
    RecordOptions, SampleOptions, EvalOptions, ExportOptions, DemoOptions, ExplainArguments, WatchOptions,
    DoctorOptions, ReportOptions, ServeOptions, CompletionOptions)}
