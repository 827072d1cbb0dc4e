"""argv → command → exit code: the table of commands, and the only place that prints an error.

    0 ok · 1 does not fit · 2 usage or config · 3 data · 4 checkpoint · 5 device · 6 numerics · 7 disk or system
    70 a bug in fitgpt · 75 stopped on request, resumable · 130 stopped at once · 141 the reader closed our output
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from .. import __version__
from ..config.argv import walk
from ..config.command_options import (
    CardsOptions,
    CompletionOptions,
    DemoOptions,
    DoctorOptions,
    EvalOptions,
    ExplainOptions,
    ExportOptions,
    FitOptions,
    PlanOptions,
    PrepareOptions,
    RehearseOptions,
    ReportOptions,
    SampleOptions,
    ServeOptions,
    WatchOptions,
)
from ..config.fields import Options, build, nearest, option_specs
from ..config.help import help_text
from ..config.run_config import RunConfig
from ..core.errors import STOPPED_AT_ONCE, DeviceError, FitError, SystemFault, UsageError
from ..core.units import NEAREST_SIGNS

OUTPUT_CLOSED = 141  # what a shell reports for a program ended by SIGPIPE
BUG = 70


class Command(NamedTuple):
    """One command. Its function is imported when the command is called, so that `--help` never loads torch."""

    name: str
    summary: str
    usage: str
    examples: tuple[str, ...]
    options: type[Options]
    function: str              # "module:function"
    config_files: bool = False  # a .py argument is a config file
    ordered: bool = False       # the function takes the assignments in order, not the options built from them


# Every command, in the order of `fitgpt --help`.
COMMANDS = {command.name: command for command in (
    Command(
        "prepare", "Turn text into tokens to train on.",
        "fitgpt prepare [FILE or FOLDER ...] [--option=value ...]",
        ("fitgpt prepare my_texts/ --name=mine",
         "fitgpt prepare --hub=HuggingFaceFW/fineweb --hub_config=sample-10BT --max_tokens=1B",
         "fitgpt prepare --embedded --tokenizer=bytes"),
        PrepareOptions, "commands.prepare:prepare"),
    Command(
        "plan", "Forecast the GPU memory of a run, and whether it fits.",
        "fitgpt plan [config.py ...] [--gpu NAME] [--option=value ...]",
        ("fitgpt plan config/train_fineweb.py --gpu 4070",
         "fitgpt plan config/train_fineweb.py --gpu 4070 --others 2.1GiB --batch_size=32",
         "fitgpt plan config/notes_77m.py --gpu 4070 --trainer nanogpt --options",
         "fitgpt plan config/gpt2_124m.py --all-cards --tokens 10B"),
        PlanOptions, "commands.plan:plan", config_files=True, ordered=True),
    Command(
        "fit", "Find the fastest settings that fit a GPU, and say why.",
        "fitgpt fit [config.py ...] [--gpu NAME] [--allow WHAT] [-o FILE] [--option=value ...]",
        ("fitgpt fit config/train_fineweb.py --gpu 4070",
         "fitgpt fit config/gpt2_350m.py --gpu 4070 --allow lossy -o config/my_4070.py",
         "fitgpt fit config/gpt2_124m.py --gpu 3060 --goal largest-model",
         "fitgpt fit config/train_fineweb.py --measure"),
        FitOptions, "commands.fit:fit", config_files=True, ordered=True),
    Command(
        "cards", "List the GPUs that fitgpt can plan for.", "fitgpt cards [NAME] [--json]",
        ("fitgpt cards", "fitgpt cards 4070"),
        CardsOptions, "commands.cards:cards"),
    Command(
        "train", "Train a GPT, or resume a run.", "fitgpt train [config.py ...] [--option=value ...]",
        ("fitgpt train config/train_fineweb.py",
         "fitgpt train config/train_fineweb.py --batch_size=8 --no-compile",
         "fitgpt train config/train_fineweb.py --fit", "fitgpt train config/train_fineweb.py --resume"),
        RunConfig, "commands.train:train", config_files=True, ordered=True),
    Command(
        "rehearse", "Run everything that allocates memory once, and compare it with the plan.",
        "fitgpt rehearse [config.py ...] [--option=value ...] [-o FILE]",
        ("fitgpt rehearse config/train_fineweb.py",
         "fitgpt rehearse config/train_fineweb.py --batch_size=32 -o rehearsal.json"),
        RehearseOptions, "commands.rehearse:rehearse", config_files=True, ordered=True),
    Command(
        "sample", "Generate text with a trained model.", "fitgpt sample [RUN] [config.py ...] [--option=value ...]",
        ("fitgpt sample runs/demo --start='def '", "fitgpt sample --init_from=gpt2-xl --num_samples=5"),
        SampleOptions, "commands.sample:sample", config_files=True),
    Command(
        "eval", "Measure the loss of a checkpoint.", "fitgpt eval RUN [--option=value ...]",
        ("fitgpt eval runs/demo", "fitgpt eval runs/demo --split=val --eval_iters=500 --json"),
        EvalOptions, "commands.evaluate:evaluate"),
    Command(
        "export", "Write a checkpoint as a folder that transformers opens.",
        "fitgpt export RUN -o FOLDER [--option=value ...]",
        ("fitgpt export runs/fineweb -o my-gpt", "fitgpt export runs/fineweb -o my-gpt --which=last"),
        ExportOptions, "commands.export:export"),
    Command(
        "demo", "Prepare, train and sample a small GPT in minutes, without a download.",
        "fitgpt demo [--option=value ...]", ("fitgpt demo", "fitgpt demo --steps=100 --device=cpu"),
        DemoOptions, "commands.demo:demo"),
    Command(
        "explain", "Say why a run was out of memory, or what uses the memory, and what would change it.",
        "fitgpt explain [FILE or RUN or -] [config.py ...] [--option=value ...]",
        ("fitgpt explain oom.txt config/train_fineweb.py",
         "fitgpt explain - config/notes_77m.py --trainer=nanogpt",
         "fitgpt explain --reading 6582MiB --process 4464MiB --gpu 4070 config/notes_30m.py",
         "fitgpt explain runs/fineweb"),
        ExplainOptions, "commands.explain:explain", config_files=True, ordered=True),
    Command(
        "watch", "Show what a GPU and the run on it are doing.", "fitgpt watch [RUN or GPU] [--option=value ...]",
        ("fitgpt watch", "fitgpt watch runs/fineweb --interval=5", "fitgpt watch 0 --once --json"),
        WatchOptions, "commands.watch:watch"),
    Command(
        "doctor", "Check the installation and the GPU, and name the command that fixes each problem.",
        "fitgpt doctor [--json]", ("fitgpt doctor",),
        DoctorOptions, "commands.doctor:doctor"),
    Command(
        "report", "Make one page of a run, or of several side by side.", "fitgpt report RUN [RUN ...] [-o FILE]",
        ("fitgpt report runs/demo -o report.html", "fitgpt report runs/a runs/b -o both.html"),
        ReportOptions, "commands.report:report"),
    Command(
        "serve", "Plan in a web page on this machine, and see a run live.", "fitgpt serve [RUN] [--option=value ...]",
        ("fitgpt serve", "fitgpt serve --no-browser --port=9000"),
        ServeOptions, "commands.serve:serve"),
    Command(
        "completion", "Print a script that lets the shell complete commands and options.",
        "fitgpt completion [bash|zsh|fish]", ("fitgpt completion bash", "fitgpt completion fish"),
        CompletionOptions, "commands.completion:completion"),
)}

# Names that other programs have for a command.
SYNONYMS = {"resume": "train --resume --out_dir=RUN", "finetune": "train --init_from=gpt2", "generate": "sample",
         "memory": "plan", "estimate": "plan", "oom": "explain", "gpus": "cards"}

# Optional packages, each with the extra of pyproject.toml that installs it.
EXTRAS = {"torch": "train", "numpy": "train", "safetensors": "train", "tiktoken": "train", "pyarrow": "parquet",
          "huggingface_hub": "hub", "datasets": "datasets", "wandb": "wandb",
          "starlette": "web", "uvicorn": "web"}
FIXES = {errno.ENOSPC: "Free some space, or write to another disk.", errno.EDQUOT: "Your quota there is used up.",
         errno.EACCES: "Give yourself the right to it, or choose another place.",
         errno.EROFS: "That disk is mounted read-only: choose another place.",
         errno.EMFILE: "Raise the limit of open files: ulimit -n 4096"}


def main(argv: Sequence[str] | None = None, *, warning: tuple[str, str] = ("", "")) -> int:
    """Runs a command and returns its exit code. `warning`: a sentence for stderr, and its fix."""
    make_streams_safe()
    if warning[0]:
        _complain(*warning)
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_stdout()
        return OUTPUT_CLOSED
    except KeyboardInterrupt:
        _complain("stopped.")
        return STOPPED_AT_ONCE
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python wraps one that arrives while it creates a class
            _complain("stopped.")
            return STOPPED_AT_ONCE
        shown = as_user_error(error)
        if shown is None:
            return _report_bug(error, argv)
        if isinstance(error, OSError):
            _drop_stdout()  # it may be stdout that cannot be written
        _complain(shown.what, shown.fix)
        if os.environ.get("FITGPT_DEBUG"):
            _show_traceback(error)
        return shown.exit_code


def make_streams_safe() -> None:
    """Replaces closed streams by /dev/null, and lets others write the nearest character they can encode."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # a replaced stream that is not a text file
            stream.reconfigure(errors=NEAREST_SIGNS)  # type: ignore[union-attr]


def run(argv: list[str]) -> int:
    """Help, version or a command → exit code. Errors are left to `main`."""
    first, rest = (argv[0], argv[1:]) if argv else ("help", [])
    if first in ("help", "--help", "-h"):
        named = [word for word in rest if not word.startswith("-")]
        print(command_help(find_command(named[0])) if named else overview(), end="")
        return 0
    if first in ("--version", "-V"):
        print(f"fitgpt {__version__}")
        return 0
    command = find_command(first)
    flags = rest[:rest.index("--")] if "--" in rest else rest
    if "--help" in flags or "-h" in flags:
        print(command_help(command), end="")
        return 0
    return int(call(command, rest) or 0)


def call(command: Command, argv: list[str]) -> Any:
    """Parses the arguments and calls the command's function."""
    others = [other.options for other in COMMANDS.values() if other is not command]
    borrowed = () if command.ordered else {name for other in others for name in option_specs(other)}
    assignments = walk(argv, command.options, config_files=command.config_files, borrowed=borrowed,
                       other_commands=others)
    return load(command.function)(assignments if command.ordered else build(command.options, assignments))


def find_command(name: str) -> Command:
    if name in COMMANDS:
        return COMMANDS[name]
    script = os.path.basename(name).removesuffix(".py")
    if name.endswith(".py") and script in COMMANDS:
        raise UsageError(f"{name!r} is nanoGPT's script; here it is a command.",
                         f"fitgpt {script} and the same options")
    if name.endswith(".py") or name.startswith("-"):
        fix = f"fitgpt train {name}" if name.endswith(".py") else f"Options follow the command: fitgpt train {name}"
        raise UsageError(f"{name!r} is not a command of fitgpt.", fix)
    near = [SYNONYMS[name]] if name in SYNONYMS else nearest(name, COMMANDS)
    raise UsageError(f"{name!r} is not a command of fitgpt. The commands: {', '.join(COMMANDS)}.",
                     f"Did you mean fitgpt {near[0]}?" if near else "fitgpt --help")


def load(place: str) -> Any:
    """"module:function" → the function."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"fitgpt.{module}"), name)


def overview() -> str:
    commands = "\n".join(f"  {command.name:<12}{command.summary}" for command in COMMANDS.values())
    return (f"fitgpt {__version__} trains small GPTs on the GPU you have.\n\nusage: fitgpt COMMAND ...\n\n"
            f"{commands}\n\n"
            "  fitgpt COMMAND --help   options and examples of a command\n"
            "  fitgpt --version\n\nTo see it work: fitgpt demo\n")


def command_help(command: Command) -> str:
    return help_text(command.options, command.usage, command.summary, command.examples)


# ---- errors


def as_user_error(error: Exception) -> FitError | None:
    """The error as one that tells the user what to do; None if it is a bug in fitgpt."""
    if isinstance(error, FitError):
        return error
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in EXTRAS:
            return UsageError(f"This needs the package {package}, which is not installed for {sys.executable}.",
                              f"pip install -e '.[{EXTRAS[package]}]'")
        if package in EXTRAS:
            return DeviceError(f"The package {package} is installed but does not load: {error}.",
                               f"pip install --force-reinstall {package}")
        return None
    if isinstance(error, MemoryError):
        return SystemFault("The computer is out of memory (CPU RAM, not GPU memory).", "Close other programs.")
    if type(error).__name__ == "OutOfMemoryError":  # of torch, which is not imported here
        return DeviceError(f"CUDA out of memory: {str(error).partition('. ')[0]}.",
                           "fitgpt explain reads the whole message; fitgpt doctor shows which processes use the GPU.")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return SystemFault(f"{where}{error.strerror or error}.", FIXES.get(error.errno or 0, ""))
    return None


def _complain(what: str, fix: str = "") -> None:
    """Prints an error to stderr: one paragraph, the fix below it."""
    indented = "".join(f"\n  {line}" for line in fix.splitlines())
    _to_stderr(f"fitgpt: {what}{indented}\n")


def _to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr is closed
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


def _show_traceback(error: Exception) -> None:
    import traceback

    _to_stderr("".join(traceback.format_exception(error)))


def _report_bug(error: Exception, argv: list[str]) -> int:
    import platform
    import tempfile
    import traceback

    report = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="backslashreplace", prefix="fitgpt-bug-",
                                         suffix=".txt", delete=False) as file:
            file.write(f"fitgpt {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
                       f"argv: {argv!r}\n\n{report}")
        where, show = f"The details are in {file.name}", bool(os.environ.get("FITGPT_DEBUG"))
    except OSError:
        where, show = "The details are below", True
    last_line = " ".join(traceback.format_exception_only(error)[-1].split())
    _complain(f"this is a bug in fitgpt, not your mistake: {last_line}. {where}; please report it with them.")
    if show:
        _to_stderr(report)
    return BUG


def _drop_stdout() -> None:
    """Redirects stdout to /dev/null, so that Python does not fail again when it flushes at exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
