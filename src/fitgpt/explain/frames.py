"""Where in a program memory ran out: the lines of the traceback before a message, and the phase they show."""

from __future__ import annotations

import re

from ..sights import CodeLine

_PYTHON = re.compile(r'^\s*File "([^"\n]+)", line (\d+)(?:, in (\S+))?')
_NOTEBOOK = re.compile(r"^\s*((?:[~\w./\\:+-]+\.py|<ipython-input-[^>]+>)) in (<?\w[\w ]*>?)")
_ARROW = re.compile(r"^\s*-+> (\d+) (.*)")
_PYTEST = re.compile(r"^\s*(\S+\.py):(\d+):? in (\w+)")
_BEGIN = re.compile(r"Traceback \(most recent call last\)")
_SHAPE = re.compile(r"empty_strided(?:_\w+)?\(\(([\d, ]+)\),.*?torch\.(\w+)")
_TORCH = re.compile(r"[/\\]torch[/\\]")
_COMPILED = re.compile(r"torchinductor|[/\\]torch[/\\]_(?:dynamo|inductor|functorch)[/\\]")
_MOST = 100


def frames_before(text: str) -> tuple[CodeLine, ...]:
    """The frames of the last traceback in a text, the innermost last."""
    begins = [found.end() for found in _BEGIN.finditer(text)]
    lines = text[begins[-1] if begins else 0:].split("\n")
    frames: list[CodeLine] = []
    for number, line in enumerate(lines):
        if found := _PYTHON.match(line):
            frames.append(CodeLine(found[1], int(found[2]), found[3] or "", _code_after(lines, number)))
        elif found := _PYTEST.match(line):
            frames.append(CodeLine(found[1], int(found[2]), found[3], _code_after(lines, number)))
        elif found := _NOTEBOOK.match(line):
            arrow = next((arrow for later in lines[number + 1:number + 12] if (arrow := _ARROW.match(later))), None)
            frames.append(CodeLine(found[1], int(arrow[1]) if arrow else None, found[2].partition("(")[0],
                                   arrow[2].strip() if arrow else ""))
    return tuple(frames[-_MOST:])


def _code_after(lines: list[str], number: int) -> str:
    following = lines[number + 1].strip() if number + 1 < len(lines) else ""
    return "" if _PYTHON.match(following) else following


def dtype_and_shape(frames: tuple[CodeLine, ...]) -> tuple[str, tuple[int, ...]]:
    """Compiled code spells out what it allocates: empty_strided_cuda((65536, 50304), …, torch.bfloat16)."""
    for frame in reversed(frames):
        if found := _SHAPE.search(frame.code):
            return found[2], tuple(int(number) for number in found[1].replace(" ", "").split(",") if number)
    return "", ()


_EVALUATES = re.compile(r"estimate_loss|evaluat|prediction_loop|prediction_step|validat|\beval\b", re.IGNORECASE)
_STEPS = re.compile(r"optimi[sz]er\.step\(|scaler\.step\(|_multi_tensor_|_single_tensor_|_foreach_|_init_group")
_CALLS = re.compile(r"\b(?:raw_)?model\(")
_LOADS = re.compile(r"\.to\(|\.cuda\(|load_state_dict|from_pretrained|torch\.load\(|_load_from_")


def phase_of(frames: tuple[CodeLine, ...]) -> str:
    """eval, step, backward, load or forward, as the traceback shows it; empty where it does not."""
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


def users_line(frames: tuple[CodeLine, ...]) -> CodeLine | None:
    """The innermost line that is not PyTorch's own: the one a user knows."""
    own = [frame for frame in frames if not _TORCH.search(frame.file)]
    return own[-1] if own else None


def compiled_of(frames: tuple[CodeLine, ...]) -> bool | None:
    """Whether torch.compile's code was running; None: the traceback does not show it."""
    if any(_COMPILED.search(frame.file) for frame in frames):
        return True
    return False if any(frame.function in ("forward", "_call_impl") for frame in frames) else None


def trainer_of(frames: tuple[CodeLine, ...]) -> str:
    """fitgpt or nanogpt, by the files the traceback passes through; empty: neither."""
    names = [re.split(r"[/\\]", frame.file) for frame in frames]
    if any("fitgpt" in name[:-1] for name in names):
        return "fitgpt"
    theirs = {frame.function for frame, name in zip(frames, names, strict=True) if name[-1] in ("train.py", "model.py")}
    return "nanogpt" if "estimate_loss" in theirs or any("nanogpt" in part.lower() for name in names for part in name
                                                         ) else ""
