"""argv → command → exit code; the only place that prints an error.

    0 ok · 1 does not fit · 2 usage or config · 3 data · 4 checkpoint · 5 device · 6 numerics · 7 disk or system
    8 a script cannot be traced · 9 a traced script failed · 70 a bug in fitgpt · 75 stopped on request, resumable
    130 stopped at once · 141 the reader closed our output
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from .. import __version__
from ..config.argv import help_text, script_start, walk
from ..config.command_options import COMMANDS
from ..config.fields import Assignment, Options, build, nearest, option_specs
from ..config.run_config import RunConfig
from ..config.training_script import is_training_script, trace_command
from ..core.errors import STOPPED_AT_ONCE, DeviceError, FitError, SystemFault, UsageError
from ..core.extras import install_command
from ..core.units import NEAREST_SIGNS
from ..hardware.torch_install import failed_import
from ..show.terminal import columns, wrap

OUTPUT_CLOSED = 141  # what a shell reports for a program ended by SIGPIPE
BUG = 70

# Names that other programs have for a command.
SYNONYMS = {"resume": "train --resume --out_dir=RUN", "finetune": "train --init_from=gpt2", "generate": "sample",
            "memory": "plan", "estimate": "plan", "oom": "explain", "gpus": "cards"}

# Optional packages, each with the extra of pyproject.toml that installs it.
EXTRAS = {"torch": "train", "numpy": "train", "safetensors": "train", "tiktoken": "train", "pyarrow": "parquet",
          "huggingface_hub": "hub", "datasets": "datasets", "wandb": "wandb", "tensorboard": "tensorboard",
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
            import traceback

            _to_stderr("".join(traceback.format_exception(error)))
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
        print(help_text(find_command(named[0])) if named else overview(), end="")
        return 0
    if first in ("version", "--version", "-V"):
        print(f"fitgpt {__version__}")
        return 0
    cls = find_command(first)
    script: list[str] = []
    if cls.takes_script:
        start = script_start(rest, cls)
        rest, script = rest[:start], rest[start:]
    flags = rest[:rest.index("--")] if "--" in rest else rest
    everything = "--help-all" in flags or "--help_all" in flags
    if everything or "--help" in flags or "-h" in flags:
        print(help_text(cls, everything=everything), end="")
        return 0

    # A command that takes the options of a run gets the assignments in order; the others get their options. Their
    # config file may be one of `train`, with options that they do not have.
    takes_run = issubclass(cls, RunConfig)
    others = [other for other in COMMANDS.values() if other is not cls]
    borrowed = () if takes_run else {name for other in others for name in option_specs(other)}
    assignments = walk(rest, cls, config_files=cls.takes_config_files, borrowed=borrowed, other_commands=others)
    if script:
        assignments.append(Assignment("script", tuple(script), script[0]))
    return int(load(cls.command)(assignments if takes_run else build(cls, assignments)) or 0)


def find_command(name: str) -> type[Options]:
    if name in COMMANDS:
        return COMMANDS[name]
    script = os.path.basename(name).removesuffix(".py")
    if name.endswith(".py") and script in COMMANDS:
        raise UsageError(f"{name!r} is nanoGPT's script; here it is a command with the same options.",
                         f"fitgpt {script}")
    if name.endswith(".py") or name.startswith("-"):
        raise UsageError(f"{name!r} is not a command of fitgpt: the command comes first.",
                         trace_command(name) if is_training_script(name) else f"fitgpt train {name}")
    near = [SYNONYMS[name]] if name in SYNONYMS else nearest(name, COMMANDS)
    raise UsageError(f"{name!r} is not a command of fitgpt. The commands: {', '.join(COMMANDS)}.",
                     f"fitgpt {near[0]}" if near else "fitgpt --help")


def load(command: str) -> Any:
    """The function of a command, in commands/NAME.py. It is imported here, so that `--help` never loads torch."""
    name = "evaluate" if command == "eval" else command
    return getattr(import_module(f"fitgpt.commands.{name}"), name)


def overview() -> str:
    commands = "\n".join(line for name, cls in COMMANDS.items()
                         for line in wrap(cls.summary, columns(), f"  {name:<12}"))
    return (f"fitgpt {__version__} trains small GPTs on the GPU you have.\n\nusage: fitgpt COMMAND ...\n\n"
            f"{commands}\n\n"
            "  fitgpt COMMAND --help       options and examples of a command\n"
            "  fitgpt COMMAND --help-all   every option, those of a run included\n"
            "  fitgpt --version\n\nTo see it work: fitgpt demo\n")


# ---- errors


def as_user_error(error: Exception) -> FitError | None:
    """The error as one that tells the user what to do; None if it is a bug in fitgpt."""
    if isinstance(error, FitError):
        return error
    if not isinstance(error, ModuleNotFoundError) and (broken := failed_import(error)):
        return broken
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in EXTRAS:
            return UsageError(f"This needs the package {package}, which is not installed for {sys.executable}.",
                              install_command(EXTRAS[package]))
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
    """Prints an error to stderr: one paragraph, the fix below it.

    The paragraph is wrapped for a terminal, or if COLUMNS is set; a log file gets it in one line. The fix is never
    wrapped: a command or flag in it is to be copied.
    """
    lines = [f"fitgpt: {what}"]
    if os.environ.get("COLUMNS") or sys.stderr.isatty():
        lines = wrap(what, columns(), "fitgpt: ")
    _to_stderr("\n".join([*lines, *(f"  {line}" for line in fix.splitlines())]) + "\n")


def _to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.write(text)
        sys.stderr.flush()


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
