"""A traceback → its stack frames, and what they show: phase, trainer, compiled or eager, the user's own line."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PYTHON = re.compile(r'^\s*File "([^"\n]+)", line (\d+)(?:, in (\S+))?')
_NOTEBOOK = re.compile(r"^\s*((?:[~\w./\\:+-]+\.py|<ipython-input-[^>]+>)) in (<?\w[\w ]*>?)")
_ARROW = re.compile(r"^\s*-+> (\d+) (.*)")
_PYTEST = re.compile(r"^\s*(\S+\.py):(\d+):? in (\w+)")
_BEGIN = re.compile(r"Traceback \(most recent call last\)")
_SHAPE = re.compile(r"empty_strided(?:_\w+)?\(\(([\d, ]+)\),.*?torch\.(\w+)")
_TORCH = re.compile(r"[/\\]torch[/\\]")
_COMPILED = re.compile(r"torchinductor|[/\\]torch[/\\]_(?:dynamo|inductor|functorch)[/\\]")
_MAX_FRAMES = 100


@dataclass(frozen=True)
class StackFrame:
    """One line of a traceback."""

    file: str
    line: int | None
    function: str
    code: str = ""


def parse_frames(text: str) -> tuple[StackFrame, ...]:
    """The frames of the last traceback in the text, innermost last."""
    begins = [found.end() for found in _BEGIN.finditer(text)]
    lines = text[begins[-1] if begins else 0:].split("\n")
    frames: list[StackFrame] = []
    for number, line in enumerate(lines):
        if found := _PYTHON.match(line):
            frames.append(StackFrame(found[1], int(found[2]), found[3] or "", _next_code_line(lines, number)))
        elif found := _PYTEST.match(line):
            frames.append(StackFrame(found[1], int(found[2]), found[3], _next_code_line(lines, number)))
        elif found := _NOTEBOOK.match(line):
            arrow = next((arrow for later in lines[number + 1:number + 12] if (arrow := _ARROW.match(later))), None)
            frames.append(StackFrame(found[1], int(arrow[1]) if arrow else None, found[2].partition("(")[0],
                                   arrow[2].strip() if arrow else ""))
    return tuple(frames[-_MAX_FRAMES:])


def _next_code_line(lines: list[str], number: int) -> str:
    following = lines[number + 1].strip() if number + 1 < len(lines) else ""
    return "" if _PYTHON.match(following) else following


def dtype_and_shape(frames: tuple[StackFrame, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape that compiled code allocates: empty_strided_cuda((65536, 50304), …, torch.bfloat16)."""
    for frame in reversed(frames):
        if found := _SHAPE.search(frame.code):
            return found[2], tuple(int(number) for number in found[1].replace(" ", "").split(",") if number)
    return "", ()


_EVALUATES = re.compile(r"estimate_loss|evaluat|prediction_loop|prediction_step|validat|\beval\b", re.IGNORECASE)
_STEPS = re.compile(r"optimi[sz]er\.step\(|scaler\.step\(|_multi_tensor_|_single_tensor_|_foreach_|_init_group")
_CALLS = re.compile(r"\b(?:raw_)?model\(")
_LOADS = re.compile(r"\.to\(|\.cuda\(|load_state_dict|from_pretrained|torch\.load\(|_load_from_")


def phase_of(frames: tuple[StackFrame, ...]) -> str:
    """eval, step, backward, load or forward; empty if the traceback does not show it."""
    def any_is(pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(frame.code) or pattern.fullmatch(frame.function) for frame in frames)

    if not frames:
        return ""
    if any(_EVALUATES.search(frame.function) or _EVALUATES.search(frame.code) for frame in frames):
        return "eval"
    if any_is(_STEPS) or any(re.search(r"[/\\]optim[/\\]", frame.file) for frame in frames):
        return "step"
    if any(".backward(" in frame.code or frame.function == "backward" for frame in frames):
        return "backward"
    if any(frame.function in ("forward", "_call_impl", "__call__") or _CALLS.search(frame.code) for frame in frames):
        return "forward"
    return "load" if any_is(_LOADS) or any(frame.function in ("to", "cuda", "_apply") for frame in frames) else ""


def user_frame(frames: tuple[StackFrame, ...]) -> StackFrame | None:
    """The innermost frame outside PyTorch's own files."""
    own = [frame for frame in frames if not _TORCH.search(frame.file)]
    return own[-1] if own else None


def is_compiled(frames: tuple[StackFrame, ...]) -> bool | None:
    """Whether code of torch.compile was running; None if the traceback does not show it."""
    if any(_COMPILED.search(frame.file) for frame in frames):
        return True
    return False if any(frame.function in ("forward", "_call_impl") for frame in frames) else None


def trainer_of(frames: tuple[StackFrame, ...]) -> str:
    """fitgpt or nanogpt, judged by the files in the traceback; empty if neither."""
    paths = [re.split(r"[/\\]", frame.file) for frame in frames]
    if any("fitgpt" in path[:-1] for path in paths):
        return "fitgpt"
    if any("nanogpt" in part.lower() for path in paths for part in path):
        return "nanogpt"
    evaluates = any(frame.function == "estimate_loss" and path[-1] in ("train.py", "model.py")
                    for frame, path in zip(frames, paths, strict=True))
    return "nanogpt" if evaluates else ""
