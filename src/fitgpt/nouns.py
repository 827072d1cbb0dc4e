"""The things fitgpt speaks of: frozen, no logic beyond arithmetic on themselves. Read this first.

What every plan loads is a NamedTuple, for a dataclass takes a millisecond to define; what is written to a log is a
dataclass, which `asdict` takes apart whole.

Shape letters are the same everywhere: B batch, T block, C width, H heads, L layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .config.run_config import RunConfig

# Of a run. The first evaluation and the first step are phases of their own: they hold other things than later ones.
PHASES = ("load", "first_eval", "first_train", "train", "step", "eval", "save", "resume", "sample")


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT, under nanoGPT's names and with nanoGPT's defaults."""

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    grad_checkpoint: bool = False

    def count_params(self, *, positions: bool = True) -> int:
        """Parameters, the tied head counted once; nanoGPT prints the count without positions."""
        c, layers = self.n_embd, self.n_layer
        matrices = layers * 12 * c * c + self.vocab_size * c
        norms = (2 * layers + 1) * c
        biases = layers * (9 * c) + norms if self.bias else 0  # qkv 3C, proj C, up 4C, down C
        return matrices + norms + biases + (self.block_size * c if positions else 0)


@dataclass(frozen=True)
class DataSummary:
    """What is known of a dataset from its headers alone, without reading a token."""

    path: str
    tokenizer: str          # "gpt2", "bytes", "chars" (nanoGPT's meta.pkl), "unknown"
    vocab_size: int | None  # None: a headerless .bin does not say
    train_tokens: int
    val_tokens: int
    fingerprint: str        # changes when the data does
    characters: str = ""    # those of the tokenizer "chars", in the order of their tokens


@dataclass(frozen=True)
class SplitLoss:
    """A loss over fixed windows of one split. Losses at different blocks are not comparable."""

    split: str
    mean: float
    stderr: float
    windows: int
    block: int


@dataclass(frozen=True)
class MemoryReading:
    """Bytes as the allocator counts them; zeros where the device has no such counters."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0


@dataclass(frozen=True)
class Evaluation:
    """The loss over fixed windows of each split, at one step, and what it took."""

    step: int
    losses: tuple[SplitLoss, ...]
    tokens_per_s: float
    memory: MemoryReading  # its peaks are those of this evaluation

    def of(self, split: str) -> SplitLoss:
        return next(loss for loss in self.losses if loss.split == split)


@dataclass(frozen=True)
class StepReport:
    """One logged training step, as shown to people and written to metrics.jsonl."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float         # of one step, averaged since the last report
    tokens_per_s: float
    mfu: float | None      # of `RunFacts.peak_flops`; None where the card's peak is unknown
    skipped: int           # non-finite steps skipped since the start
    loss_scale: float      # 1.0 except in float16
    memory: MemoryReading  # its peaks are those of training since the last evaluation
    seconds_left: float


@dataclass(frozen=True)
class RunFacts:
    """What is settled before step 0 and written as the first line of metrics.jsonl."""

    config: dict[str, Any]
    params: int
    device: str            # "cuda:0", "cpu"
    device_name: str       # "NVIDIA GeForce RTX 4070"
    dtype: str             # "bfloat16"
    compiled: bool
    peak_flops: float | None
    peak_source: str       # whose peak MFU is measured against
    tokens_per_step: int
    train_tokens: int
    val_tokens: int
    start_step: int
    max_iters: int
    versions: dict[str, str]
    notes: tuple[str, ...]  # what was decided for the user, each a sentence


class PhaseForecast(NamedTuple):
    """The most a phase holds: in tensors, and from the driver since the run began."""

    allocated: int
    reserved: int


class OwnerShare(NamedTuple):
    """Whose bytes lie there at the peak, and where they come from: "16 × 1,024 × 50,304 × 2 bytes"."""

    owner: str
    nbytes: int
    formula: str


class Forecast(NamedTuple):
    """What a run will hold in GPU memory, before it runs. Bytes."""

    trainer: str                           # "fitgpt", "nanogpt"
    params: int                            # all of them, the tied head once
    phases: dict[str, PhaseForecast]       # of PHASES, those that it has
    peak_phase: str                        # the one that allocates most
    owners_at_peak: tuple[OwnerShare, ...] # sum: what is allocated then
    needs: int                             # the smallest cap under which the run gets through
    reserved_range: tuple[int, int]
    assumes: dict[str, str]                # torch, attention, compile, allocator: each in words
    host_bytes: int                        # of the host's memory, for what is kept there
    checkpoint_bytes: int                  # of one checkpoint on disk

    @property
    def allocated(self) -> int:
        return max(phase.allocated for phase in self.phases.values())

    @property
    def reserved(self) -> int:
        return max(phase.reserved for phase in self.phases.values())


class Budget(NamedTuple):
    """What a run may hold of a card. Bytes, as nvidia-smi counts a process: the context included."""

    card: str              # "RTX 4070"
    usable: int            # what CUDA gives of the card
    others: int            # of other processes on it
    budget: int            # usable − others, or what the user says
    outside: int           # of this process, outside the allocator: context and kernels
    sources: tuple[str, ...] = ()  # where the figures come from, each a sentence
    margin: int = 0        # left free, where `outside` is known by a rule only

    @property
    def reserve_limit(self) -> int:
        """The allocator's cap; below 0 where not even what is outside it has room."""
        return self.budget - self.outside - self.margin


class MemoryPlan(NamedTuple):
    """A forecast against a budget. `needs` decides: a run that reserves more may still get by with less."""

    forecast: Forecast
    budget: Budget

    @property
    def headroom(self) -> int:
        return self.budget.reserve_limit - self.forecast.needs

    @property
    def fits(self) -> bool:
        return self.headroom >= 0

    @property
    def process_bytes(self) -> int:
        """What nvidia-smi will show for the process."""
        return self.forecast.reserved + self.budget.outside


class Basis(NamedTuple):
    """What was measured of forecasts like this one."""

    on_card: int                  # recorded runs
    in_all: int
    worst_percent: float | None   # of all their figures; None: there are none


class CardVerdict(NamedTuple):
    """Whether a run fits a card; a problem in place of figures where it cannot be planned there."""

    name: str
    usable: int | None
    needs: int = 0
    headroom: int = 0
    problem: str = ""

    @property
    def fits(self) -> bool:
        return not self.problem and self.headroom >= 0


class Outlook(NamedTuple):
    """The run, not only the step."""

    tokens_per_step: int
    steps: int
    tokens: int
    params: int
    epochs: float | None               # None: there is no data to say
    checkpoint_bytes: int
    host_bytes: int
    hours: tuple[float, float] | None  # None: the card's speed is not known


class Change(NamedTuple):
    """One thing to do otherwise. Exact: the same arithmetic up to rounding order."""

    flags: tuple[str, ...]   # what to add to the command
    what: str                # that is no longer held
    exact: bool
    comparable: bool         # whether a loss still means the same: windows of the same length
    slower: str              # what it costs
    family: str              # "batch", "recompute" …
    trainer: str             # the trainer it leaves or leads to

    @property
    def kind(self) -> str:
        """In a word. Other: a loss no longer compares with the run's."""
        return "exact" if self.exact else "lossy" if self.comparable else "other"


class PricedChange(NamedTuple):
    """What is saved is bytes that are not allocated; below 0: more are."""

    change: Change
    saved: dict[str, int]    # by phase
    saved_in_training: int   # at its highest, the first step included
    saved_in_evaluation: int
    needs: int               # after it
    headroom: int
    speed: float | None = None  # times that of the run without it, as far as there is an estimate

    @property
    def fits(self) -> bool:
        return self.headroom >= 0


class Rung(NamedTuple):
    """A smaller plan of the same run: the knobs to set otherwise, the smallest cap of the allocator that it runs under,
    in words."""

    changes: dict[str, Any]
    needs: int
    why: str


class OwnerTimeline(NamedTuple):
    """Bytes by owner along a stretch of a tape, thinned to what a picture can show."""

    owners: tuple[str, ...]
    points: tuple[tuple[int, ...], ...]   # points[i][j]: bytes of owner j after event i
    marks: tuple[tuple[int, str], ...]    # (the point at which a phase begins, its name)
    peak: int                             # the point of the highest total


class SpeedEstimate(NamedTuple):
    """Tokens a second to expect of a run; the two are equal where that very run was measured."""

    low: float
    high: float
    likely: float
    basis: str    # what it is based on


class Standing(NamedTuple):
    """A config that was tried for a card: what it needs there, and how fast it should be."""

    config: RunConfig
    flags: tuple[str, ...]        # what makes it of the config that was asked for
    permission: str               # what it took: free, places, lossy, rules, context, model
    needs: int
    headroom: int                 # what may be reserved, less what it needs
    speed: SpeedEstimate | None   # None: the card's figures are not known
    measured: float | None = None # tokens a second, if it was timed
    exact: bool = True            # whether `needs` is of a replay; else it is at most that

    @property
    def fits(self) -> bool:
        return self.headroom >= 0


class Decision(NamedTuple):
    """One thing that is done otherwise than asked for."""

    knobs: dict[str, tuple[Any, Any]]  # what it was, what it is now
    why: str


class WayOut(NamedTuple):
    """What to say besides, where nothing fits: with it something does."""

    flags: tuple[str, ...]        # "--allow=lossy"
    least: int                    # what the run can live in then
    words: str                    # what that means for it


class Fitted(NamedTuple):
    """The fastest settings that fit, how they differ from what was asked for and why; or that there are none."""

    budget: Budget
    asked: Standing
    chosen: Standing | None                 # None: nothing fits
    decisions: tuple[Decision, ...] = ()
    runners_up: tuple[Standing, ...] = ()   # these fit too
    frontier: tuple[tuple[int, float], ...] = ()  # (bytes, tokens a second): the fastest there is in so much memory
    least: Standing | None = None           # the least memory the run can live in, where that was asked or nothing fits
    ways_out: tuple[WayOut, ...] = ()       # where nothing fits: what would, what changes least first
    considered: int = 0                     # candidates
    replayed: int = 0                       # of them whose tape was replayed
    notes: tuple[str, ...] = ()
