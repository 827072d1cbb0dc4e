"""What `fitgpt watch` shows: a WatchFrame as lines that fit any width, and a screen that redraws them."""

from __future__ import annotations

import math
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..core.units import show_bytes, show_seconds
from ..hardware.nvidia import GpuProcess, GpuState
from ..runs.metrics import PHASES, MemoryReading
from ..runs.watch import MemoryHistory, PhaseRow, RunState, WatchFrame, has_ended
from .progress import difference, show_mfu
from .terminal import LABEL_WIDTH, MIN_TEXT_WIDTH, Line, bar, can_redraw, has_unicode, printable, sparkline, table

UNKNOWN, NO_PLAN = "n/a", "—"
NEARLY_FULL = 0.95
SPIKES_SHOWN = 3
PROGRAMS_SHOWN = 6
GRAPH_WIDTH = 60
_ASCII = str.maketrans({"—": "-", "°": " ", "×": "x", "█": "#", "░": "."})  # 1:1, so that lines keep their width


def frame_lines(frame: WatchFrame, width: int, *, unicode: bool = True) -> list[Line]:
    """The GPUs first, then the run."""
    lines: list[Line] = []
    for card in frame.cards:
        lines += gpu_lines(card, width)
    if not frame.cards:
        lines += flowed("GPU", [f"none: {frame.no_card}"], width)
    if frame.run is None:
        lines += history_lines(frame.history, width, unicode)
    else:
        lines += [Line(""), *run_lines(frame.run, frame.history, width, unicode)]
    return lines if unicode else [
        Line(line.text.translate(_ASCII).encode("ascii", "replace").decode(), line.style) for line in lines]


def gpu_lines(card: GpuState, width: int) -> list[Line]:
    share = card.used_bytes / card.total_bytes if card.used_bytes is not None and card.total_bytes else None
    full = share is not None and share >= NEARLY_FULL
    used = f"{_bytes(card.used_bytes)} of {_bytes(card.total_bytes)}" + (f", {share:.0%}" if share is not None else "")
    memory, room = [used], min(width - LABEL_WIDTH - len(used) - 2, 30)
    if share is not None and room >= 8:
        memory.append(bar(share, room))
    others = [one for one in card.programs if one.kind != "run"]
    return [
        *flowed(f"GPU {card.index}", [card.name], width, "bold"),
        *flowed("memory", memory, width, "bold red" if full else ""),
        *flowed("load", [f"utilisation {_figure(card.utilisation, '%')}",
                         f"power {_pair(card.watts, card.watt_limit, ' W')}", _figure(card.celsius, " °C"),
                         f"clock {_pair(card.clock_mhz, card.top_clock_mhz, ' MHz')}"], width),
        *flowed("throttled", [UNKNOWN if card.throttled is None else ", ".join(card.throttled) or "no"], width,
                "yellow" if card.throttled else ""),
        *flowed("others", _program_list(others) or ["no other program"], width),
    ]


def run_lines(run: RunState, history: MemoryHistory, width: int, unicode: bool) -> list[Line]:
    total = f" of {run.max_iters:,}" if run.max_iters is not None else ""
    share = f"{100 * run.step // run.max_iters}%" if run.max_iters else ""  # rounded down: 100% only at the end
    left, held, losses = run.seconds_left, run.memory, [loss for _, loss in run.losses]
    silent = f", last record {show_seconds(run.silent_s)} ago" if run.silent_s is not None else ""
    status = {"elsewhere": f"{run.whereabouts}, which cannot be checked from here",
              "starting": f"starting: {run.whereabouts}", "running": f"running: {run.whereabouts}"}
    memory = [f"allocated {_bytes(held.allocated if held else None)}",
              f"reserved {_bytes(held.reserved if held else None)}", f"highest {_bytes(run.highest_bytes)}",
              f"planned peak {_bytes(run.planned_bytes, NO_PLAN)}", f"headroom {_bytes(run.headroom_bytes)}"]
    if held is None and run.planned_bytes is None and run.headroom_bytes is None:
        memory = [UNKNOWN]
    spikes = [f"+{show_bytes(spike.rise)} to {show_bytes(spike.reached)} "
              f"{f'in {spike.phase} ' if spike.phase else ''}at step {spike.step:,}"
              f"{f' ({spike.program})' if spike.program else ''}" for spike in run.spikes[-SPIKES_SHOWN:]]
    return [
        *flowed("run", [run.folder, status.get(run.status, run.status) + silent], width, "bold"),
        *flowed("", [run.hint], width),
        *flowed("step", [f"{run.step:,}{total}", share, run.phase or "",
                         f"{show_seconds(left)} left" if left is not None and math.isfinite(left) else ""], width),
        *flowed("speed", [_figure(run.tokens_per_s, " tokens/s"), f"mfu {show_mfu(run.mfu)}"], width),
        *flowed("loss", [_figure(run.loss, digits=4), f"validation {_figure(run.val_loss, digits=4)}"], width),
        *(flowed("", [sparkline(losses, min(width - LABEL_WIDTH, GRAPH_WIDTH))], width, "cyan") if unicode else []),
        *flowed("memory", memory, width),
        *flowed("ranks", [f"{number} {rank.device} (process {rank.pid} on {rank.host})"
                          + (f" reserved {show_bytes(rank.memory.reserved)}" if rank.memory else "")
                          for number, rank in enumerate(run.ranks)], width),
        *history_lines(history, width, unicode),
        *peak_lines(run.peaks, None if has_ended(run) else held, width),
        *flowed("spikes", spikes, width, "yellow"),
        *flowed("warning", [run.warning], width, "yellow"),
    ]


def peak_lines(peaks: Sequence[PhaseRow], now: MemoryReading | None, width: int) -> list[Line]:
    """The highest memory of each phase since the run started, beside its plan; and what it uses `now`."""
    if not peaks:
        return []
    rows = [("highest", "reserved", "planned", "", "allocated", "planned")]
    rows += [(PHASES[peak.phase], _bytes(peak.reserved, NO_PLAN), _bytes(peak.planned_reserved, NO_PLAN),
              difference(peak.reserved, peak.planned_reserved), _bytes(peak.allocated, NO_PLAN),
              _bytes(peak.planned_allocated, NO_PLAN)) for peak in peaks]
    if now is not None:
        rows.append(("now", show_bytes(now.reserved), "", "", show_bytes(now.allocated), ""))
    lines = table(rows, width=max(width - LABEL_WIDTH, MIN_TEXT_WIDTH), optional=(5, 4, 3)).splitlines()
    return [Line((("" if index else "peaks").ljust(LABEL_WIDTH) + line)[:max(width, MIN_TEXT_WIDTH)])
            for index, line in enumerate(lines)]


def history_lines(history: MemoryHistory, width: int, unicode: bool) -> list[Line]:
    """A graph of the memory, each cell the maximum of its interval, with the phase of each spike below."""
    room = min(width - LABEL_WIDTH, GRAPH_WIDTH)
    if not unicode or len(history.values) < 2 or room < 10:
        return []
    cells = min(room, len(history.values))
    cut = [round(cell * len(history.values) / cells) for cell in range(cells + 1)]
    peaks = [max(history.values[cut[cell]:cut[cell + 1]]) for cell in range(cells)]
    span = f"{_bytes(min(history.values))} to {_bytes(max(history.values))}"
    under = ""
    for index, phase in history.marks:
        cell = next(cell for cell in range(cells) if index < cut[cell + 1])
        if cell >= len(under) and phase:
            under = under.ljust(cell) + f"↑{phase} "
    beside = LABEL_WIDTH + cells + 2 + len(span) <= width
    return [Line(" " * LABEL_WIDTH + sparkline(peaks, cells) + (f"  {span}" if beside else ""), "cyan"),
            *([Line((" " * LABEL_WIDTH + under.rstrip())[:width], "yellow")] if under else []),
            *(flowed("", [span], width, "cyan") if not beside else [])]


def _program_list(programs: Sequence[GpuProcess]) -> list[str]:
    """Names with bytes; the processes of one program are added up."""
    found: dict[tuple[str, str], list[int | None]] = {}
    for one in programs:
        found.setdefault((one.name, one.kind), []).append(one.nbytes)
    texts = []
    for (name, kind), sizes in found.items():
        known = [nbytes for nbytes in sizes if nbytes is not None]
        several = f" ×{len(sizes)}" if len(sizes) > 1 else ""
        desktop = " (desktop)" if kind in ("desktop", "app") else ""
        texts.append(f"{name}{several} {_bytes(sum(known)) if known else UNKNOWN}{desktop}")
    more = len(texts) - PROGRAMS_SHOWN
    return [*texts[:PROGRAMS_SHOWN], f"and {more} more"] if more > 0 else texts


# ---- figures


def _bytes(nbytes: int | None, otherwise: str = UNKNOWN) -> str:
    return otherwise if nbytes is None else show_bytes(nbytes)


def _figure(value: float | None, unit: str = "", digits: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}{unit}"


def _pair(value: float | None, limit: float | None, unit: str) -> str:
    return _figure(value, unit) if value is None or limit is None else f"{_figure(value)} of {_figure(limit, unit)}"


# ---- layout


def flowed(label: str, parts: Sequence[str], width: int, style: str = "") -> list[Line]:
    """A label and its parts, as many per line as there is room for; longer parts are wrapped."""
    room = max(width - LABEL_WIDTH, 10)
    lines: list[str] = []
    for part in (printable(part) for part in parts if part):
        if lines and len(lines[-1]) + 2 + len(part) <= room:
            lines[-1] += f"  {part}"
        else:
            lines += textwrap.wrap(part, room) or [""]
    return [Line(("" if index else label).ljust(LABEL_WIDTH) + text, style) for index, text in enumerate(lines)]


# ---- the screen


@contextmanager
def open_screen(*, moving: bool) -> Iterator[Callable[[WatchFrame], None]]:
    """A function that draws frames: over each other on a terminal, one after the other anywhere else."""
    unicode = has_unicode()
    if not (moving and can_redraw()):
        def write(frame: WatchFrame) -> None:
            lines = frame_lines(frame, shutil.get_terminal_size().columns, unicode=unicode)
            print("\n".join(line.text.rstrip() for line in lines), end="\n\n" if moving else "\n", flush=True)

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
            lines = [*frame_lines(frame, width, unicode=unicode), Line(f"{clock}  Ctrl-C to stop", "dim")]
            live.update(Group(*(Text(line.text, line.style, no_wrap=True) for line in lines)), refresh=True)

        yield draw
