"""The traced process: runs a script as `python script.py` would, and writes its Trace. `fitgpt trace` starts it.

    python -P -m fitgpt.tracing.script REQUEST

REQUEST is JSON: the script's command line, the GPU, the number of steps, and the file to write. The file gets the
trace; or, as JSON with the key `error`, why there is none. Only this module of fitgpt executes a user's code.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from ..core import environment
from ..core.errors import STOPPED_AT_ONCE, CannotTrace, ScriptFailed, UsageError
from ..core.extras import install_command
from ..planning.budget import target_for
from . import trackers
from .errors import ONE_PROCESS, PROCESSES, Untraceable
from .processes import check_command, refusing_children_that_train
from .trace_file import Trace, from_json, to_json, trace_of

UNTRACEABLE, FAILED, USAGE = "untraceable", "failed", "usage"  # kinds of error
WORKAROUND = "Trace the script without that part."
TRITON = "pip install triton (on Windows: triton-windows). Its kernels compute nothing in a trace."
# Errors of torch where it looks for CUDA, or finds tensors without storage, and the trace has no answer: by a part of
# their text.
NEEDS_CUDA = ("not compiled with CUDA", "dummy base class", "NCCL built in", "CUDA build", "no NVIDIA driver",
              "CUDA GPUs are available", "accelerator device when none", "has no attribute '_cuda", "CUDA_HOME",
              "must be a CUDA tensor", "CUDA error", "CUDA driver", "No module named 'triton",
              "meta tensors", "tensors on meta", "device meta", "incompatible tensor type")
OURS = str(Path(__file__).resolve().parents[1]) + os.sep
NO_VALUES = "Values are not computed: losses and other numbers that the script printed are made up."
NO_STEP = "The script makes an optimizer, and no optimizer step was traced."
NOTHING = ("{script} allocated no GPU memory: it ran to its end without a tensor on `cuda`.",
           "Trace a script that trains on a GPU, with the arguments that you train with.")


# ---- the parent


def trace_script(command: Sequence[str], *, gpu: str, others: str = "", budget: str = "", steps: int = 4,
                 torch: str = "") -> Trace:
    """Runs the command (a script or -m MODULE, and arguments) in a child process. Its output goes to stderr."""
    check_command(command, ["--gpu", gpu] if gpu else [])
    if find_spec("torch") is None:
        raise UsageError(f"A trace runs the script, and PyTorch is not installed for {sys.executable}.",
                         install_command("train"))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "trace.json"
        request = {"command": list(command), "gpu": gpu, "others": others, "budget": budget, "steps": steps,
                   "torch": torch, "result": str(result), "environment": environment.given}
        child = subprocess.run([sys.executable, "-P", "-m", "fitgpt.tracing.script", json.dumps(request)],
                               stdout=sys.stderr.fileno(), check=False)
        text = result.read_text(encoding="utf-8") if result.is_file() else ""
    if not text:
        raise CannotTrace(f"The traced process ended with exit code {child.returncode} and left no trace.",
                          "Its output is above.")
    report = json.loads(text)
    if "error" in report:
        kind = {UNTRACEABLE: CannotTrace, FAILED: ScriptFailed}.get(report["error"], UsageError)
        raise kind(report["what"], report["fix"])
    return from_json(text)


# ---- the child


def main(request: str) -> None:
    import torch

    wanted = json.loads(request)
    environment.restore(wanted["environment"])
    trackers.turn_off(os.path.dirname(wanted["result"]))
    torch.set_num_threads(1)  # what a trace computes is small: several threads would spend more time on waiting
    try:
        text = to_json(run(wanted["command"], wanted["gpu"], wanted["others"], wanted["budget"], wanted["steps"],
                           wanted["torch"]))
    except (CannotTrace, ScriptFailed, UsageError) as error:
        kind = UNTRACEABLE if isinstance(error, CannotTrace) else FAILED if isinstance(error, ScriptFailed) else USAGE
        text = json.dumps({"error": kind, "what": error.what, "fix": error.fix})
    Path(wanted["result"]).write_text(text, encoding="utf-8")


def run(command: list[str], gpu: str, others: str, budget: str, steps: int, version: str) -> Trace:
    """Runs the script until it has taken `steps` optimizer steps, or to its end. `version`: of torch, for its rules."""
    import torch

    from .evaluation import not_reached
    from .modules import StepsDone
    from .recorder import Recorder, line_of
    from .saving import loads_unwritten, saving_nothing
    from .trace import recording

    target = target_for(gpu, "auto", others=others, budget=budget, torch=version or torch.__version__)
    recorder, module, loaded_before = Recorder(), command[0] == "-m", set(sys.modules)
    script = command[1] if module else command[0]
    sys.argv = [script, *command[2 if module else 1:]]
    sys.path.insert(0, os.getcwd() if module else str(Path(script).resolve().parent))
    try:
        with redirect_stdout(sys.stderr), refusing_children_that_train(gpu) as refused, \
                recording(recorder, target, steps), saving_nothing() as unwritten:
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        recorder.notes["The script ran to its end."] = None
    except StepsDone:
        recorder.notes[f"Stopped after {steps} optimizer steps: what the script does later was not seen."] = None
        recorder.not_seen.update(dict.fromkeys(not_reached(recorder, loaded_before)))
    except SystemExit as ended:
        check_children(refused)
        if isinstance(ended.code, str):
            raise ScriptFailed(f"{script} ended: {ended.code}", "Its output is above.") from None
        if ended.code:
            raise ScriptFailed(f"{script} ended with exit code {ended.code}.", "Its output is above.") from None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        for each in (*refused, *causes(error)):
            if isinstance(each, Untraceable):
                steps_before = sum(end <= recorder.phases[-1][1] for end in recorder.steps)
                fewer = f" --steps={steps_before} stops before this line." if steps_before else ""
                raise CannotTrace(f"{place(each.__traceback__)}: {each.what}", each.fix + fewer) from None
        if missing := [each for each in unwritten if isinstance(error, OSError) and Path(each).name in str(error)]:
            what, fix = loads_unwritten(os.path.relpath(missing[0]))
            raise CannotTrace(f"{place(error.__traceback__)}: {what}", fix) from None
        if is_ours(error):
            raise CannotTrace(f"{place(error.__traceback__)}: a trace cannot do this without a GPU: "
                              f"{type(error).__name__}: {error}",
                              ONE_PROCESS if "NCCL" in str(error) else TRITON if "'triton" in str(error) else
                              WORKAROUND) from None
        if recorder.made_up:
            reason = traceback.format_exception_only(error)[-1].splitlines()[0]
            raise CannotTrace(f"{line_of(recorder.made_up)} reads a whole number from the GPU, "
                              f"which a trace makes up, and then {place(error.__traceback__)} fails: {reason}",
                              "Trace the script with a number from the CPU there.") from None
        raise ScriptFailed(f"{script} failed, as it would without fitgpt.", shown(error, script)) from None
    check_children(refused)
    if recorder.has_optimizer and not recorder.steps:
        recorder.not_seen[NO_STEP] = None
    recorder.notes[NO_VALUES] = None
    if not recorder.tensors and recorder.processes:
        raise CannotTrace(f"{line_of(recorder.processes)}: {PROCESSES[0]}", PROCESSES[1])
    if not recorder.tensors:
        raise CannotTrace(NOTHING[0].format(script=script), NOTHING[1])
    return trace_of(recorder, tuple(command), target.platform, version or torch.__version__)


def check_children(refused: Sequence[Untraceable]) -> None:
    for each in refused:
        raise CannotTrace(f"{place(each.__traceback__)}: {each.what}", each.fix)


def causes(error: BaseException | None) -> list[BaseException]:
    """The error, and those that led to it."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def place(frames: TracebackType | None) -> str:
    """"train.py, line 42": the innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_tb(frames)):
        if "site-packages" not in frame.filename and not frame.filename.startswith((OURS, "<", os.path.dirname(
                os.__file__))):
            return f"{frame.filename}, line {frame.lineno}"
    return "The script"


def is_ours(error: BaseException) -> bool:
    """Whether the script would have gone on with a GPU: torch misses CUDA, or our code does not know what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and frames[-1].filename.startswith(str(Path(__file__).parent))
    return any(part in str(error) for part in NEEDS_CUDA) or (
        inside and isinstance(error, NotImplementedError | AttributeError | KeyError | AssertionError))


def shown(error: BaseException, script: str) -> str:
    """The traceback, as Python would print it: from the script's first line on, and without what stands in for CUDA."""
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error)).rstrip()
    report = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = report
    while each is not None:
        frames = list(each.stack)
        start = next((number for number, frame in enumerate(frames)
                      if frame.filename.endswith(os.path.basename(script))), 0)
        end = next((number for number, frame in enumerate(frames) if frame.name == "__torch_dispatch__"), len(frames))
        each.stack = traceback.StackSummary.from_list([frame for frame in frames[start:end]
                                                       if not frame.filename.startswith(OURS)])
        each = each.__cause__ or each.__context__
    return "".join(report.format()).rstrip()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:  # the parent says that it stopped
        sys.exit(STOPPED_AT_ONCE)
