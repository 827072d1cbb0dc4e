"""argv → verb → exit code. The only place that prints an error.

    0 ok · 1 does not fit · 2 usage or config · 3 data · 4 checkpoint · 5 device · 6 numerics · 7 disk or system
    70 a bug of ours · 75 stopped on request, resumable · 130 stopped at once · 141 nobody reads our output
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
from ..config.fields import Options, build, knobs_of, nearest, walk
from ..core.errors import STOPPED_AT_ONCE, DeviceError, FitError, SystemFault, UsageError
from ..core.units import NEAREST_SIGNS

OUTPUT_CLOSED = 141  # what a shell reports for a program ended by SIGPIPE
OUR_BUG = 70


class Verb(NamedTuple):
    name: str
    summary: str
    options: str               # "module:Class", imported when the verb is called
    target: str                # "module:function"
    usage: str
    examples: tuple[str, ...]
    config_files: bool = False  # a .py argument is a config file
    raw: bool = False           # the target takes the assignments in order, not the options they amount to


VERBS = {verb.name: verb for verb in (
    Verb("prepare", "Turn text into tokens to train on.", "config.command_options:PrepareOptions",
         "data.prepare:prepare",
         "fitgpt prepare [FILE or FOLDER ...] [--knob=value ...]",
         ("fitgpt prepare my_texts/ --name=mine",
          "fitgpt prepare --hub=HuggingFaceFW/fineweb --hub_config=sample-10BT --max_tokens=1B",
          "fitgpt prepare --embedded --tokenizer=bytes")),
    Verb("plan", "Say what a run will hold in GPU memory, and whether it fits.", "config.command_options:PlanOptions",
         "commands.plan:verb", "fitgpt plan [config.py ...] [--gpu NAME] [--knob=value ...]",
         ("fitgpt plan config/train_fineweb.py --gpu 4070",
          "fitgpt plan config/train_fineweb.py --gpu 4070 --others 2.1GiB --batch_size=32",
          "fitgpt plan config/notes_77m.py --gpu 4070 --trainer nanogpt --options",
          "fitgpt plan config/gpt2_124m.py --all-cards --tokens 10B"), config_files=True, raw=True),
    Verb("fit", "Find the fastest settings that fit a card, and say why.", "config.command_options:FitOptions",
         "commands.fit:fit",
         "fitgpt fit [config.py ...] [--gpu NAME] [--allow WHAT] [-o FILE] [--knob=value ...]",
         ("fitgpt fit config/train_fineweb.py --gpu 4070",
          "fitgpt fit config/gpt2_350m.py --gpu 4070 --allow lossy -o config/my_4070.py",
          "fitgpt fit config/gpt2_124m.py --gpu 3060 --goal largest-model",
          "fitgpt fit config/train_fineweb.py --measure"), config_files=True, raw=True),
    Verb("cards", "List the cards that can be planned for.", "config.command_options:CardsOptions",
         "commands.plan:list_cards",
         "fitgpt cards [NAME] [--json]", ("fitgpt cards", "fitgpt cards 4070")),
    Verb("train", "Train a GPT, or go on with one.", "config.run_config:RunConfig", "training.supervisor:train",
         "fitgpt train [config.py ...] [--knob=value ...]",
         ("fitgpt train config/train_fineweb.py",
          "fitgpt train config/train_fineweb.py --batch_size=8 --no-compile",
          "fitgpt train config/train_fineweb.py --fit", "fitgpt train config/train_fineweb.py --resume"),
         config_files=True, raw=True),
    Verb("rehearse", "Do once what a run will do with memory, and say what it held.",
         "commands.rehearse:RehearseOptions",
         "commands.rehearse:rehearse", "fitgpt rehearse [config.py ...] [--knob=value ...] [-o FILE]",
         ("fitgpt rehearse config/train_fineweb.py",
          "fitgpt rehearse config/train_fineweb.py --batch_size=32 -o rehearsal.json"), config_files=True, raw=True),
    Verb("sample", "Let a trained model write.", "config.command_options:SampleOptions", "commands.verbs:sample",
         "fitgpt sample [RUN] [config.py ...] [--knob=value ...]",
         ("fitgpt sample runs/demo --start='def '", "fitgpt sample --init_from=gpt2-xl --num_samples=5"),
         config_files=True),
    Verb("eval", "Measure the loss of a checkpoint.", "config.command_options:EvalOptions", "commands.verbs:evaluate",
         "fitgpt eval RUN [--knob=value ...]",
         ("fitgpt eval runs/demo", "fitgpt eval runs/demo --split=val --eval_iters=500 --json")),
    Verb("export", "Write a checkpoint as a folder that transformers opens.", "config.command_options:ExportOptions",
         "commands.verbs:export", "fitgpt export RUN -o FOLDER [--knob=value ...]",
         ("fitgpt export runs/fineweb -o my-gpt", "fitgpt export runs/fineweb -o my-gpt --which=last")),
    Verb("demo", "From nothing to a small trained GPT, in minutes and without a download.",
         "config.command_options:DemoOptions",
         "commands.demo:demo", "fitgpt demo [--knob=value ...]", ("fitgpt demo",
         "fitgpt demo --steps=100 --device=cpu")),
    Verb("explain", "Say why memory ran out, or where it is, and what would change it.",
         "config.command_options:ExplainOptions",
         "commands.explain:explain", "fitgpt explain [FILE or RUN or -] [config.py ...] [--knob=value ...]",
         ("fitgpt explain oom.txt config/train_fineweb.py",
          "fitgpt explain - config/notes_77m.py --trainer=nanogpt",
          "fitgpt explain --reading 6582MiB --process 4464MiB --gpu 4070 config/notes_30m.py",
          "fitgpt explain runs/fineweb"), config_files=True, raw=True),
    Verb("watch", "See what a card and the run on it are doing.", "config.command_options:WatchOptions",
         "commands.watch:watch",
         "fitgpt watch [RUN or GPU] [--knob=value ...]",
         ("fitgpt watch", "fitgpt watch runs/fineweb --interval=5", "fitgpt watch 0 --once --json")),
    Verb("doctor", "Say what is here, what is wrong, and the command that mends it.",
         "config.command_options:DoctorOptions",
         "commands.doctor:doctor", "fitgpt doctor [--json]", ("fitgpt doctor",)),
    Verb("report", "Make one page of a run, or of several side by side.", "config.command_options:ReportOptions",
         "commands.report:report",
         "fitgpt report RUN [RUN ...] [-o FILE]",
         ("fitgpt report runs/demo -o report.html", "fitgpt report runs/a runs/b -o both.html")),
    Verb("serve", "Plan in a web page on this machine, and see a run live.", "config.command_options:ServeOptions",
         "commands.serve:serve",
         "fitgpt serve [RUN] [--knob=value ...]", ("fitgpt serve", "fitgpt serve --no-browser --port=9000")),
    Verb("completion", "Print what lets a shell complete verbs and flags.", "config.command_options:CompletionOptions",
         "commands.completion:completion", "fitgpt completion [bash|zsh|fish]",
         ("fitgpt completion bash", "fitgpt completion fish")),
)}

# Words that other programs have for it.
MEANT = {"resume": "train --resume --out_dir=RUN", "finetune": "train --init_from=gpt2", "generate": "sample",
         "memory": "plan", "estimate": "plan", "oom": "explain", "gpus": "cards"}

# What a missing package means to the user: the extra that brings it.
EXTRAS = {"torch": "train", "numpy": "train", "safetensors": "train", "tiktoken": "train", "pyarrow": "parquet",
          "huggingface_hub": "hub", "datasets": "datasets", "wandb": "wandb",
          "starlette": "web", "uvicorn": "web"}
FIXES = {errno.ENOSPC: "Free some space, or write to another disk.", errno.EDQUOT: "Your quota there is used up.",
         errno.EACCES: "Give yourself the right to it, or choose another place.",
         errno.EROFS: "That disk is mounted read-only: choose another place.",
         errno.EMFILE: "Raise the limit of open files: ulimit -n 4096"}


def main(argv: Sequence[str] | None = None, *, warning: tuple[str, str] = ("", "")) -> int:
    """`warning`: a sentence for stderr, and its fix."""
    mend_streams()
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
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python wraps one that comes while a class is being made
            _complain("stopped.")
            return STOPPED_AT_ONCE
        told = told_to_the_user(error)
        if told is None:
            return _report_bug(error, argv)
        if isinstance(error, OSError):
            _drop_stdout()  # it may be stdout that cannot be written
        _complain(told.what, told.fix)
        if os.environ.get("FITGPT_DEBUG"):
            _show_traceback(error)
        return told.exit_code


def mend_streams() -> None:
    """Streams that were closed lead nowhere; those that cannot write a sign of ours write the nearest they can."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # no stream, or one that is no text file
            stream.reconfigure(errors=NEAREST_SIGNS)  # type: ignore[union-attr]


def run(argv: list[str]) -> int:
    """Everything but the errors."""
    first, rest = (argv[0], argv[1:]) if argv else ("help", [])
    if first in ("help", "--help", "-h"):
        named = [word for word in rest if not word.startswith("-")]
        print(verb_help(find_verb(named[0])) if named else overview(), end="")
        return 0
    if first in ("--version", "-V"):
        print(f"fitgpt {__version__}")
        return 0
    verb = find_verb(first)
    flags = rest[:rest.index("--")] if "--" in rest else rest
    if "--help" in flags or "-h" in flags:
        print(verb_help(verb), end="")
        return 0
    return int(call(verb, rest) or 0)


def call(verb: Verb, argv: list[str]) -> Any:
    def others() -> list[type[Options]]:
        return [options_of(other) for other in VERBS.values() if other is not verb]

    options = options_of(verb)
    borrowed = () if verb.raw else {name for other in others() for name in knobs_of(other)}
    assignments = walk(argv, options, config_files=verb.config_files, borrowed=borrowed, elsewhere=others)
    told = assignments if verb.raw else build(options, assignments)
    return _load(verb.target)(told)


def find_verb(name: str) -> Verb:
    if name in VERBS:
        return VERBS[name]
    script = os.path.basename(name).removesuffix(".py")
    if name.endswith(".py") and script in VERBS:
        raise UsageError(f"{name!r} is nanoGPT's script; here it is a verb.", f"fitgpt {script} and the same flags")
    if name.endswith(".py") or name.startswith("-"):
        fix = f"fitgpt train {name}" if name.endswith(".py") else f"Flags follow the verb: fitgpt train {name}"
        raise UsageError(f"{name!r} is not a verb of fitgpt.", fix)
    near = [MEANT[name]] if name in MEANT else nearest(name, VERBS)
    raise UsageError(f"{name!r} is not a verb of fitgpt. The verbs: {', '.join(VERBS)}.",
                     f"Did you mean fitgpt {near[0]}?" if near else "fitgpt --help")


def options_of(verb: Verb) -> type[Options]:
    found: type[Options] = _load(verb.options)
    return found


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"fitgpt.{module}"), name)


def overview() -> str:
    verbs = "\n".join(f"  {verb.name:<12}{verb.summary}" for verb in VERBS.values())
    return (f"fitgpt {__version__} trains small GPTs on the card you have.\n\nusage: fitgpt VERB ...\n\n{verbs}\n\n"
            "  fitgpt VERB --help   what a verb takes\n"
            "  fitgpt --version\n\nTo see it work: fitgpt demo\n")


def verb_help(verb: Verb) -> str:
    from ..config.help import help_text

    return help_text(options_of(verb), verb.usage, verb.summary, verb.examples)


# ---- errors


def told_to_the_user(error: Exception) -> FitError | None:
    """The error as one that says what to do; None if it is a bug of ours."""
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
        return SystemFault("The computer ran out of memory (RAM, not the GPU's).", "Close other programs.")
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not to be loaded for this
        return DeviceError(f"The card ran out of memory: {str(error).partition('. ')[0]}.",
                           "fitgpt explain reads the whole message, and fitgpt doctor says who holds the card.")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return SystemFault(f"{where}{error.strerror or error}.", FIXES.get(error.errno or 0, ""))
    return None


def _complain(what: str, fix: str = "") -> None:
    """One paragraph to stderr, the fix below it."""
    indented = "".join(f"\n  {line}" for line in fix.splitlines())
    _to_stderr(f"fitgpt: {what}{indented}\n")


def _to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # nowhere left to say it
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

    story = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="backslashreplace", prefix="fitgpt-bug-",
                                         suffix=".txt", delete=False) as file:
            file.write(f"fitgpt {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
                       f"argv: {argv!r}\n\n{story}")
        where, show = f"The details are in {file.name}", bool(os.environ.get("FITGPT_DEBUG"))
    except OSError:
        where, show = "The details are below", True
    last_line = " ".join(traceback.format_exception_only(error)[-1].split())
    _complain(f"this is a bug of ours, not a mistake of yours: {last_line}. {where}; please report it with them.")
    if show:
        _to_stderr(story)
    return OUR_BUG


def _drop_stdout() -> None:
    """Point stdout nowhere, so that Python does not fail again when it flushes at exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
