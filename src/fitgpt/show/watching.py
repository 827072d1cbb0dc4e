"""What `fitgpt watch` shows, as lines that fit any width; and a screen that redraws them."""

from __future__ import annotations

import math
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..core.units import show_bytes, show_seconds
from ..sights import CardState, Program, RunState, Spike, Track, WatchFrame
from .terminal import can_redraw, has_signs
from .text import show_mfu, sparkline

NOT_TOLD, NO_PLAN = "N/A", "—"
LABEL = 10           # columns of the labels
NARROWEST = 20       # below this, lines are as long as they must be
NEARLY_FULL = 0.95
SPIKES_SHOWN = 3
PROGRAMS_SHOWN = 6
_PLAIN = str.maketrans({"—": "-", "°": " ", "×": "x", "…": "~", "█": "#", "░": "."})


class Line(NamedTuple):
    words: str
    style: str = ""  # one of rich's


def frame_lines(frame: WatchFrame, width: int, *, unicode: bool = True) -> list[Line]:
    """The card first, then the run."""
    lines: list[Line] = []
    for card in frame.cards:
        lines += card_lines(card, width)
    if not frame.cards:
        lines += flowed("card", [f"none: {frame.no_card}"], width)
    if frame.run is None:
        lines += track_lines(frame.track, width, unicode)
    else:
        lines += [Line(""), *run_lines(frame.run, frame.track, width, unicode)]
    return lines if unicode else [Line(ascii_only(line.words), line.style) for line in lines]


def card_lines(card: CardState, width: int) -> list[Line]:
    share = card.used_bytes / card.total_bytes if card.used_bytes is not None and card.total_bytes else None
    full = share is not None and share >= NEARLY_FULL
    used = f"{_bytes(card.used_bytes)} of {_bytes(card.total_bytes)}" + (f", {share:.0%}" if share is not None else "")
    room = min(width - LABEL - len(used) - 2, 30)
    memory = [used, _bar(share, room)] if share is not None and room >= 8 else [used]
    held_down = card.throttled
    others = [one for one in card.programs if one.kind != "run"]
    return [
        *flowed(f"GPU {card.index}", [card.name], width, "bold"),
        *flowed("memory", memory, width, "bold red" if full else ""),
        *flowed("load", [f"utilisation {_figure(card.utilisation, '%')}",
                         f"power {_pair(card.watts, card.watt_limit, ' W')}", _figure(card.celsius, " °C"),
                         f"clock {_pair(card.clock_mhz, card.top_clock_mhz, ' MHz')}"], width),
        *flowed("throttled", [NOT_TOLD if held_down is None else ", ".join(held_down) or "no"], width,
                "yellow" if held_down else ""),
        *flowed("others", _named(others) or ["no other program"], width),
    ]


def run_lines(run: RunState, track: Track, width: int, unicode: bool) -> list[Line]:
    total = f" of {run.max_iters:,}" if run.max_iters is not None else ""
    share = f"{100 * run.step // run.max_iters}%" if run.max_iters else ""  # 100% is the end, and not before
    left = run.seconds_left
    mfu = NOT_TOLD if run.mfu is None else show_mfu(run.mfu)
    return [
        *flowed("run", [run.folder, _status(run)], width, "bold"),
        *flowed("", [run.hint], width),
        *flowed("step", [f"{run.step:,}{total}", share, run.phase or "",
                         f"{show_seconds(left)} left" if left is not None and math.isfinite(left) else ""], width),
        *flowed("speed", [_figure(run.tokens_per_s, " tokens/s"), f"MFU {mfu}"], width),
        *flowed("loss", [_loss(run.loss), f"validation {_loss(run.val_loss)}"], width),
        *(flowed("", [sparkline(run.losses, min(width - LABEL, 60))], width, "cyan") if unicode else []),
        *flowed("held", _held(run), width),
        *track_lines(track, width, unicode),
        *flowed("spikes", [_spike(each) for each in run.spikes[-SPIKES_SHOWN:]], width, "yellow"),
        *flowed("warning", [run.warning], width, "yellow"),
    ]


def _held(run: RunState) -> list[str]:
    memory = run.memory
    if memory is None and run.planned_bytes is None and run.headroom_bytes is None:
        return [NOT_TOLD]
    return [f"allocated {_bytes(memory.allocated if memory else None)}",
            f"reserved {_bytes(memory.reserved if memory else None)}",
            f"highest {_bytes(memory.peak_reserved if memory else None)}",
            f"planned peak {_bytes(run.planned_bytes, NO_PLAN)}", f"headroom {_bytes(run.headroom_bytes)}"]


def track_lines(track: Track, width: int, unicode: bool) -> list[Line]:
    """A graph of the highest in each stretch, and under each spike the phase it came in."""
    room = min(width - LABEL, 60)
    if not unicode or len(track.values) < 2 or room < 10:
        return []
    cells = min(room, len(track.values))
    cut = [round(cell * len(track.values) / cells) for cell in range(cells + 1)]
    peaks = [max(track.values[cut[cell]:cut[cell + 1]]) for cell in range(cells)]
    span = f"{_bytes(min(track.values))} to {_bytes(max(track.values))}"
    under = ""
    for place, phase in track.marks:
        cell = next(cell for cell in range(cells) if place < cut[cell + 1])
        if cell >= len(under) and phase:
            under = under.ljust(cell) + f"↑{phase} "
    beside = LABEL + cells + 2 + len(span) <= width
    return [Line(" " * LABEL + sparkline(peaks, cells) + (f"  {span}" if beside else ""), "cyan"),
            *([Line((" " * LABEL + under.rstrip())[:width], "yellow")] if under else []),
            *(flowed("", [span], width, "cyan") if not beside else [])]


def _status(run: RunState) -> str:
    silent = f", last word {show_seconds(run.silent_s)} ago" if run.silent_s is not None else ""
    if run.status == "elsewhere":
        return f"{run.whereabouts}, which cannot be asked from here{silent}"
    if run.status in ("starting", "running"):
        return f"{run.status}: {run.whereabouts}{silent}"
    return f"{run.status}{silent}"


def _spike(spike: Spike) -> str:
    where = f"in {spike.phase} at step {spike.step:,}" if spike.phase else f"at step {spike.step:,}"
    who = f" ({spike.program})" if spike.program else ""
    return f"+{show_bytes(spike.rise)} to {show_bytes(spike.reached)} {where}{who}"


def _named(programs: Sequence[Program]) -> list[str]:
    """By name and bytes; a program with several processes once."""
    found: dict[tuple[str, str], list[int | None]] = {}
    for one in programs:
        found.setdefault((one.name, one.kind), []).append(one.nbytes)
    words = []
    for (name, kind), sizes in found.items():
        known = [nbytes for nbytes in sizes if nbytes is not None]
        several = f" ×{len(sizes)}" if len(sizes) > 1 else ""
        desktop = " (desktop)" if kind in ("desktop", "app") else ""
        words.append(f"{name}{several} {_bytes(sum(known)) if known else NOT_TOLD}{desktop}")
    more = len(words) - PROGRAMS_SHOWN
    return [*words[:PROGRAMS_SHOWN], f"and {more} more"] if more > 0 else words


# ---- figures

def _bytes(nbytes: int | None, otherwise: str = NOT_TOLD) -> str:
    return otherwise if nbytes is None else show_bytes(nbytes)


def _figure(value: float | None, unit: str) -> str:
    return NOT_TOLD if value is None else f"{value:,.0f}{unit}"


def _pair(value: float | None, limit: float | None, unit: str) -> str:
    if value is None or limit is None:
        return _figure(value, unit)
    return f"{value:,.0f} of {limit:,.0f}{unit}"


def _loss(value: float | None) -> str:
    return NOT_TOLD if value is None else f"{value:.4f}"


def _bar(share: float, room: int) -> str:
    filled = round(min(max(share, 0.0), 1.0) * room)
    return "█" * filled + "░" * (room - filled)


# ---- layout

def flowed(label: str, parts: Sequence[str], width: int, style: str = "") -> list[Line]:
    """A label and its parts, as many a line as there is room for; a part that is too long is broken at words."""
    width = max(width, NARROWEST)
    lines, line = [], ""
    for part in (printable(part) for part in parts if part):
        if line and len(line) + 2 + len(part) <= width - LABEL:
            line += f"  {part}"
            continue
        if line:
            lines.append(line)
        *whole, line = textwrap.wrap(part, width - LABEL) or [""]
        lines += whole
    if line:
        lines.append(line)
    return [Line((label if not place else "").ljust(LABEL) + words, style) for place, words in enumerate(lines)]


def printable(words: str) -> str:
    """Names and warnings come from elsewhere: no control character of theirs reaches the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def ascii_only(words: str) -> str:
    return words.translate(_PLAIN).encode("ascii", "replace").decode()


# ---- the screen

@contextmanager
def open_screen(*, moving: bool) -> Iterator[Callable[[WatchFrame], None]]:
    """Draws frames: over each other on a terminal, one after the other anywhere else."""
    unicode = has_signs()
    if not (moving and can_redraw()):
        def write(frame: WatchFrame) -> None:
            lines = frame_lines(frame, shutil.get_terminal_size().columns, unicode=unicode)
            print("\n".join(line.words.rstrip() for line in lines), end="\n\n" if moving else "\n", flush=True)

        yield write
        return

    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        console.show_cursor(True)  # rich hides it, and a process that is killed could not bring it back

        def draw(frame: WatchFrame) -> None:
            width, _ = shutil.get_terminal_size()
            console.width = width
            clock = time.strftime("%H:%M:%S", time.localtime(frame.at))
            lines = [*frame_lines(frame, width, unicode=unicode), Line(f"{clock}  Ctrl-C ends it", "dim")]
            live.update(Group(*(Text(line.words, line.style, no_wrap=True) for line in lines)), refresh=True)

        yield draw
