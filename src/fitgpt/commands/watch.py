"""`fitgpt watch`: what a card and the run on it are doing, from the driver and the run's folder."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..config.command_options import WatchOptions
from ..core.errors import DeviceError, UsageError
from ..hardware.gpu_stats import read_cards
from ..runs.lock import Owner, is_running, lock_owner
from ..runs.metrics import speak_nonfinite
from ..runs.record import SPIKES_KEPT, FollowedRun, is_run, is_spike, runs_here
from ..show.watching import open_screen
from ..sights import CardState, Program, RunState, Spike, Track, WatchFrame

SCHEMA = 1
SAMPLES = 600  # of the card's memory: ten minutes at one a second


def watch(options: WatchOptions) -> int:
    """Ctrl-C is how one stops watching, so it ends well; so does the end of the run."""
    watcher = Watcher(options.target)
    try:
        with _json_lines() if options.json else open_screen(moving=not options.once) as show:
            while True:
                frame = watcher.look()
                show(frame)
                if options.once or is_over(frame.run):
                    return 0
                time.sleep(options.interval)
    except KeyboardInterrupt:
        return 0


def is_over(run: RunState | None) -> bool:
    return run is not None and run.status in ("finished", "stopped")


@contextmanager
def _json_lines() -> Iterator[Callable[[WatchFrame], None]]:
    yield lambda frame: print(json.dumps(as_document(frame), allow_nan=False), flush=True)


def as_document(frame: WatchFrame) -> dict[str, Any]:
    """The frame for scripts, without its curves. NaN and infinity are words, as in metrics.jsonl: JSON has neither."""
    document = {"schema": SCHEMA, **asdict(frame)}
    del document["track"]
    if document["run"] is not None:
        del document["run"]["losses"]
        document["run"] = speak_nonfinite(document["run"])
    return document


class Watcher:
    """Looks at one run, or at the cards, and remembers what it saw. Without a target: at the newest run that is
    running, as soon as there is one."""

    def __init__(self, target: str) -> None:
        self._gpu = gpu_number(target)
        self._run = FollowedRun(named_run(target)) if target and self._gpu is None else None
        self._seeks_run = not target
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)

    def look(self) -> WatchFrame:
        cards, reason = read_cards()
        if self._seeks_run and self._run is None:
            self._run = self._seek(cards, reason)
        if self._run is not None:
            return self._look_at_run(self._run, cards, reason)
        if self._gpu is not None:
            cards = (numbered(cards, self._gpu, reason),)
        self._remember(cards, None, None)
        return WatchFrame(time.time(), cards, reason, None, self._track())

    def _look_at_run(self, run: FollowedRun, cards: tuple[CardState, ...], reason: str) -> WatchFrame:
        now, owner = time.time(), lock_owner(run.folder)
        state = run.look(owner, now)
        card, no_card = card_of(run.record.facts, owner, cards, reason)
        if card is not None and is_running(owner):
            card = _marked(card, owner)
        shown = (card,) if card else ()
        self._remember(shown, state, owner)
        state = replace(state, headroom_bytes=None if is_over(state) else headroom(card, run),
                        spikes=(*state.spikes, *spikes_of_others(self._samples))[-SPIKES_KEPT:])
        return WatchFrame(now, shown, no_card, state, self._track())

    def _seek(self, cards: tuple[CardState, ...], reason: str) -> FollowedRun | None:
        """The newest that is running; where there is no card to look at either, the newest at all."""
        folders = runs_here(Path())
        running = [folder for folder in folders if is_running(lock_owner(folder))]
        if not (running or cards or folders):
            raise UsageError(f"There is nothing to watch: no run is in this folder or in runs/, and {reason}.",
                             "Name the run's folder: fitgpt watch RUN")
        found = running or ([] if cards else folders)
        return FollowedRun(found[0]) if found else None

    def _remember(self, cards: tuple[CardState, ...], state: RunState | None, owner: Owner | None) -> None:
        if cards and cards[0].used_bytes is not None:
            self._samples.append(Sample(cards[0].used_bytes, (state and state.phase) or "", state.step if state else 0,
                                        owner.pid if owner else 0, cards[0].programs))

    def _track(self) -> Track:
        """The card's memory since watching began; at the first look, what the run has reserved so far."""
        if len(self._samples) < 2 and self._run is not None:
            return self._run.record.track()
        used = [sample.used for sample in self._samples]
        marks = tuple((place, sample.phase) for place, sample in enumerate(self._samples)
                      if place and is_spike(used[place - 1], used[place]))
        return Track(tuple(used), marks)


# ---- which run, which card

def gpu_number(target: str) -> int | None:
    """'0' or 'cuda:0', unless a folder has that name."""
    found = re.fullmatch(r"(?:cuda:)?([0-9]{1,4})", target)
    return int(found[1]) if found and not Path(target).is_dir() else None


def numbered(cards: tuple[CardState, ...], number: int, reason: str) -> CardState:
    for card in cards:
        if card.index == number:
            return card
    there = ", ".join(f"{card.index} ({card.name})" for card in cards) or f"none, because {reason}"
    raise DeviceError(f"GPU {number} is not here. GPUs the driver shows: {there}.",
                      "fitgpt watch RUN looks at a run's folder, and needs no GPU.")


def named_run(target: str) -> Path:
    folder = Path(target)
    if is_run(folder):
        return folder
    here = ", ".join(str(found) for found in runs_here(Path())[:5])
    what = "holds no run of fitgpt" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
    raise UsageError(f"{target} {what}." + (f" Runs near here: {here}." if here else ""),
                     "fitgpt watch RUN, where RUN is what train had as --out_dir; or fitgpt watch 0, for GPU 0")


def card_of(facts: Mapping[str, Any], owner: Owner | None, cards: tuple[CardState, ...],
            reason: str) -> tuple[CardState | None, str]:
    """The card the run is on: by its process, else by the name and number it recorded; or why there is none."""
    if owner is not None and not owner.here:
        return None, f"the run is on {owner.host}, not on this machine"
    device, name = str(facts.get("device", "")), facts.get("device_name")
    if device in ("cpu", "mps"):
        return None, f"the run trains on {'the CPU' if device == 'cpu' else 'the GPU of a Mac'}"
    if not cards:
        return None, reason
    number = int(device[5:]) if re.fullmatch(r"cuda:[0-9]{1,4}", device) else 0
    by_process = [card for card in cards if owner and any(one.pid == owner.pid for one in card.programs)]
    by_name = [card for card in cards if name in (card.name, None)]
    found = by_process or sorted(by_name, key=lambda card: card.index != number)
    return (found[0], "") if found else (None, f"the run was on {name}, which is not here")


def _marked(card: CardState, owner: Owner | None) -> CardState:
    """Among the card's programs, the run is called the run."""
    return replace(card, programs=tuple(
        replace(one, kind="run") if owner and one.pid == owner.pid else one for one in card.programs))


def headroom(card: CardState | None, run: FollowedRun) -> int | None:
    """What the run can still take: what is free on its card, else what the plan leaves above its highest so far."""
    if card is not None and card.free_bytes is not None:
        return card.free_bytes
    limit, highest = run.record.reserve_limit, run.record.highest
    return None if limit is None or highest is None else limit - highest


# ---- other programs' spikes

@dataclass(frozen=True)
class Sample:
    """The card's memory at one look, and what the run was at."""

    used: int
    phase: str
    step: int
    run_pid: int
    programs: tuple[Program, ...]


def spikes_of_others(samples: Iterable[Sample]) -> tuple[Spike, ...]:
    """Rises that the driver puts down to programs other than the run; the run's own stand in its record."""
    found: list[Spike] = []
    before: dict[int, int] | None = None
    for sample in samples:
        held = {program.pid: program.nbytes or 0 for program in sample.programs}
        for program in sample.programs if before is not None else ():
            earlier = before.get(program.pid, 0) if before else 0
            if program.pid != sample.run_pid and is_spike(earlier, held[program.pid]):
                found.append(Spike(sample.phase, sample.step, held[program.pid] - earlier, held[program.pid],
                                   program.name))
        before = held
    return tuple(found[-SPIKES_KEPT:])
