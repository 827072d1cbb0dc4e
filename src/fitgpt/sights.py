"""What is seen of runs and cards from outside, and what is made of it: frames, records, diagnoses. Frozen, no logic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .nouns import Evaluation, MemoryReading, OwnerTimeline, PhaseForecast, RunFacts, StepReport


@dataclass(frozen=True)
class Program:
    """A process that holds memory of a card, as far as the driver says."""

    pid: int
    name: str            # "python3.11"; "process 812" where nobody names it
    nbytes: int | None
    kind: str = "other"  # "desktop": the graphical session; "app": what runs in it; "run": the run watched; "other"


@dataclass(frozen=True)
class CardState:
    """One GPU at one moment. None: the driver does not say."""

    index: int
    name: str
    used_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    utilisation: int | None = None             # percent of the last moment in which some kernel ran
    watts: float | None = None
    watt_limit: float | None = None
    celsius: int | None = None
    clock_mhz: int | None = None
    top_clock_mhz: int | None = None
    throttled: tuple[str, ...] | None = None   # what holds the clocks down; () = nothing
    programs: tuple[Program, ...] = ()


@dataclass(frozen=True)
class Spike:
    """Memory that rose at once: in which phase, by how much, to what."""

    phase: str
    step: int
    rise: int
    reached: int
    program: str = ""  # whose, where it is not the run's own


@dataclass(frozen=True)
class Track:
    """Bytes over time, and (place, phase) of each spike in them."""

    values: tuple[int, ...] = ()
    marks: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class RunState:
    """A run as its folder tells it. None: not said yet, or never."""

    folder: str
    status: str                      # starting, running, finished, stopped, elsewhere
    whereabouts: str                 # "process 4711", "process 4711 on fast-box"
    silent_s: float | None           # since the last line of its record
    device_name: str | None
    phase: str | None                # of a run that goes on
    step: int                        # steps done
    max_iters: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    seconds_left: float | None
    memory: MemoryReading | None
    planned_bytes: int | None        # the highest reserved of any phase, as planned
    headroom_bytes: int | None       # what it can still take
    spikes: tuple[Spike, ...] = ()
    warning: str = ""                # its last one
    hint: str = ""                   # what to type next
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class WatchFrame:
    """What `fitgpt watch` shows at one moment."""

    at: float                        # seconds since 1970
    cards: tuple[CardState, ...]
    no_card: str                     # why there is none
    run: RunState | None
    track: Track                     # of the card's memory since watching began, or of what the run reserved


@dataclass(frozen=True)
class Finding:
    """One line of `fitgpt doctor`."""

    verdict: str   # "ok"; "note": worth knowing; "wrong": training cannot run until it is mended
    subject: str
    what: str
    fix: str = ""  # something to type or do


@dataclass(frozen=True)
class CodeLine:
    """One line of a traceback."""

    file: str
    line: int | None
    function: str
    code: str = ""


@dataclass(frozen=True)
class OutOfMemory:
    """A message that memory ran out, as far as it says. Bytes; None: it does not say."""

    kind: str                    # cuda, hip, xpu, mps: an allocator of PyTorch's; driver, library; host: RAM; killed
    words: str                   # the message, on one line
    wording: str                 # whose words: "PyTorch 2.2 to 2.9"
    asked: int | None = None
    within: int = 0              # how far `asked` may be off: half of the last digit printed
    gpu: int | None = None
    total: int | None = None
    free: int | None = None
    process: int | None = None   # of this process, its context included
    others: tuple[tuple[int, int], ...] = ()  # (pid, bytes), as listed
    allocated: int | None = None
    unallocated: int | None = None  # reserved by the allocator, in no tensor
    allowed: int | None = None   # the cap, where one was set
    private: int | None = None   # in private pools: recorded CUDA graphs
    shape: tuple[int, ...] = ()  # of the tensor, where the failing line spells it out
    dtype: str = ""
    frames: tuple[CodeLine, ...] = ()  # of the traceback, the innermost last
    more: int = 0                # messages like it that follow

    @property
    def reserved(self) -> int | None:
        return None if self.allocated is None or self.unallocated is None else self.allocated + self.unallocated


@dataclass(frozen=True)
class MemoryShare:
    """So many bytes, and whose they are."""

    what: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class Cause:
    """A rule of `fitgpt explain` that applies: its code, and what it says of this case."""

    code: str
    what: str


@dataclass(frozen=True)
class Remedy:
    """Something to type, and what is known of its effect. None: not known."""

    todo: str
    effect: str                  # "7.31 GiB in tensors at its peak, 3.1 GiB less", or what it does
    fits: bool | None = None
    costs: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What happened to a run's memory, in words, and what would change it."""

    subject: str                 # message, reading, plan, run
    title: str
    what: str = ""               # what was asked for and by what, or what dominates: a paragraph
    phase: str = ""              # where in the run: load, first_eval, train … ; empty: not known
    shares: tuple[MemoryShare, ...] = ()
    shares_of: str = ""          # what the shares add up to
    causes: tuple[Cause, ...] = ()      # the one that decides first
    remedies: tuple[Remedy, ...] = ()   # the one to try first
    needed: tuple[str, ...] = ()        # what would tell more
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run and is worth telling, in a sentence."""

    step: int
    kind: str   # "resumed", "skipped", "warning", "note", or as metrics.jsonl calls it
    text: str


@dataclass(frozen=True)
class RunSample:
    """What the model wrote at a step."""

    step: int
    text: str


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it, finished or not. What the folder does not say is absent, NaN or empty."""

    name: str
    facts: RunFacts | None
    config: dict[str, Any]
    unusual: tuple[str, ...]                   # the knobs that are not at their defaults
    steps: tuple[StepReport, ...]
    evaluations: tuple[Evaluation, ...]
    saves: tuple[int, ...]                     # the steps at which a checkpoint was written
    events: tuple[RunEvent, ...]
    samples: tuple[RunSample, ...]
    planned: dict[str, PhaseForecast]          # what the plan said, by phase; empty: no plan was made
    measured: dict[str, PhaseForecast]         # the same, as it came
    owners_at_peak: dict[str, int]
    reserve_limit: int | None                  # what the allocator may hold at most
    timeline: OwnerTimeline | None             # one step of the plan's tape
    unreadable: tuple[str, ...]                # what of the folder could not be read, each a sentence
