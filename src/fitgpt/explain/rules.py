"""Why memory runs out: one entry a cause, with its code, what shows it, what to say of it and what to do about it.

docs/explain.md has a section for each, written from these entries. Their order decides which cause is named first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.units import GiB, show_bytes
from ..sights import Remedy
from . import causes
from .facts import Facts

Advice = tuple[tuple[str, str], ...]  # (what to type or do, what that does)

BROKEN_UP = 0.1       # of what PyTorch reserved: so much in no tensor is not only what lies between blocks
A_NEIGHBOUR = 0.1     # of the card: a desktop's share is less
LARGE_CONTEXT = GiB


@dataclass(frozen=True)
class Rule:
    """A cause: how it is recognised, and what to do about it."""

    code: str
    title: str
    shown_by: str                     # the pattern, in words
    applies: Callable[[Facts], bool]  # the pattern
    cause: Callable[[Facts], str]
    about: str                        # more of it, for the page
    advice: Callable[[Facts], Advice] | Advice = ()   # what stands whatever the run is
    unpriced: Callable[[Facts], Advice] | Advice = () # changes of the run, where its config is not known
    decides: Callable[[Facts], bool] = lambda facts: True  # whether the run would fit if it were not for this

    def remedies(self, facts: Facts) -> tuple[Remedy, ...]:
        parts = (self.advice,) if facts.plan is not None else (self.advice, self.unpriced)
        advice = [each for part in parts for each in (part(facts) if callable(part) else part)]
        return tuple(Remedy(todo, effect) for todo, effect in advice)


SMALLER: Advice = (("half the --batch_size, twice the --gradient_accumulation_steps",
                    "the same steps, with half of the activations and logits at a time"),)
STATE_SAVERS: Advice = (
    ("fitgpt train … --weights=bfloat16 --optimizer=adam8bit", "6 bytes a parameter instead of 16; lossy"),
    ("fitgpt train … --offload=optimizer", "AdamW's moments in the machine's RAM; exact, slower"))
EVALUATION: Advice = (("fitgpt train … --eval_batch_size=4",
                       "evaluates 4 windows at once, with the same loss; nanoGPT's train.py knows no such flag"),)
WATCHERS = {"nvidia": "nvidia-smi", "amd": "rocm-smi --showpids", "intel": "xpu-smi ps"}
REPEATED = {"nvidia": "nvidia-smi -l 1", "amd": "watch -n 1 rocm-smi --showpids", "intel": "watch -n 1 xpu-smi ps"}
WHICH_CARD = {"nvidia": "CUDA_VISIBLE_DEVICES=0", "amd": "HIP_VISIBLE_DEVICES=0", "intel": "ZE_AFFINITY_MASK=0"}
ONE_BY_ONE = {"nvidia": "CUDA_LAUNCH_BLOCKING=1", "amd": "AMD_SERIALIZE_KERNEL=3", "intel": "CUDA_LAUNCH_BLOCKING=1"}


def of_kind(*kinds: str) -> Callable[[Facts], bool]:
    return lambda facts: facts.message.kind in kinds


def has_figures(facts: Facts) -> bool:
    return facts.fill is not None and facts.message.asked is not None and not facts.fill.spilled


def is_broken_up(facts: Facts) -> bool:
    return has_figures(facts) and (0 < facts.missing <= facts.unallocated
                                   and facts.unallocated >= BROKEN_UP * facts.reserved)


def has_neighbours(facts: Facts) -> bool:
    fill = facts.fill
    return fill is not None and has_figures(facts) and (
        facts.missing > 0 and fill.others_at_least >= max(facts.missing, A_NEIGHBOUR * fill.total))


def is_cut(facts: Facts) -> bool:
    return facts.message.asked is None if facts.fill is None else facts.fill.unsaid


def pieces_decide(facts: Facts) -> bool:
    return facts.plan is None or facts.run is None or facts.run.fits_without_pieces(facts.plan.budget.reserve_limit)


def neighbours_decide(facts: Facts) -> bool:
    return facts.plan is None or facts.fill is None or facts.plan.headroom + facts.fill.others_at_least >= 0


def had_room(facts: Facts) -> bool:
    fill = facts.fill
    return fill is not None and has_figures(facts) and facts.message.allowed is None and facts.asked <= fill.free


def state_is_too_much(facts: Facts) -> bool:
    if facts.run is None or facts.plan is None or facts.plan.fits:
        return False
    usual = facts.of_nanogpt or (facts.run.config.optimizer, facts.run.config.offload, facts.run.config.weights) == (
        "adamw", "none", "float32")
    return usual and facts.run.state_bytes > facts.plan.budget.reserve_limit


def in_the_optimizer(facts: Facts) -> bool:
    return facts.phase == "step" or (facts.owner == "optimizer" and facts.in_phase != "load")


def in_backward(facts: Facts) -> bool:
    return facts.owner != "logits" and (facts.phase == "backward" or (facts.match is not None and facts.match.backward))


# ---- advice that depends on the case


def who_is_there(facts: Facts) -> Advice:
    return ((WATCHERS[facts.vendor], "shows who holds the card; ending a process frees what it holds"),)


def where_a_library_failed(facts: Facts) -> Advice:
    return (*who_is_there(facts),
            (ONE_BY_ONE[facts.vendor], "if the card has room: shows the kernel that failed"))


def where_the_driver_refused(facts: Facts) -> Advice:
    wsl = ("memory=24GB in .wslconfig, then wsl --shutdown", "on WSL, where pinned memory is limited")
    return (*who_is_there(facts), wsl)


def who_comes_and_goes(facts: Facts) -> Advice:
    return ((REPEATED[facts.vendor], "while it starts, shows whether another process comes and goes on this card"),
            (WHICH_CARD[facts.vendor], "and another number for each further process: every rank needs its own card"))


def to_its_end(facts: Facts) -> Advice:
    if facts.fill is None:
        return (("the message to its end", "tells what was asked for, and how the card was filled"),)
    return (("the message to its end", "tells what this process holds, and PyTorch of that"), *who_is_there(facts))


def for_ram(facts: Facts) -> Advice:
    if facts.message.wording == "Windows":
        return (("let Windows manage the paging file's size, on a disk that has room",
                 "System > Advanced > Performance > Virtual memory"),)
    return (("close other programs, or load the data in pieces",
             "`fitgpt prepare` and `fitgpt train` read it piece by piece"),
            ("--offload=none", "if the optimizer was offloaded: 16 bytes a parameter live in RAM then"))


def against_pieces(facts: Facts) -> Advice:
    if facts.message.wording in ("PyTorch 1.0 to 1.3", "PyTorch 1.4 to 1.9"):
        return (("PyTorch 2.2 or later", "has expandable segments, which do not break up like this"), *SMALLER)
    name = "PYTORCH_HIP_ALLOC_CONF" if facts.message.kind == "hip" else "PYTORCH_CUDA_ALLOC_CONF"
    return ((f"{name}=expandable_segments:True",
             "ranges that grow, instead of segments; not on Windows. `fitgpt train` sets it"), *SMALLER)


def against_neighbours(facts: Facts) -> Advice:
    pids = sorted(facts.fill.pids if facts.fill else (), key=lambda each: -each[1])
    return (*who_is_there(facts), *((f"kill {pid}", f"frees {show_bytes(size)}, if it is yours and not needed")
                                    for pid, size in pids[:1]))


RULES = (
    Rule("OOM-KILLED", "The system ended the process",
         "`Killed`, `died with <Signals.SIGKILL: 9>`, exit code 137 or -9, the kernel's `Out of memory: Killed "
         "process`, `oom_kill`",
         of_kind("killed"), causes.killed,
         "Linux ends the process that holds most once RAM and swap are used up; containers and job schedulers do it at "
         "the limit they were given. Nothing is printed but `Killed`, or nothing at all.",
         (("dmesg | tail", "says whether it was memory: `Out of memory: Killed process`"),
          ("close other programs, or give the machine or the container more RAM", "the card is not involved"),
          ("fewer data loader workers", "each holds a copy; `fitgpt train` has none"))),
    Rule("OOM-CPU", "The machine's RAM ran out",
         "`DefaultCPUAllocator`, `Unable to allocate … for an array`, `MemoryError`, `std::bad_alloc`, `The paging "
         "file is too small`",
         of_kind("host"), causes.host,
         "The allocator that failed is the CPU's. On Windows every process that loads PyTorch's libraries reserves "
         "gigabytes of paging file, whether it uses them or not.", for_ram),
    Rule("OOM-MPS", "Apple's GPU reached its limit", "`MPS backend out of memory`", of_kind("mps"), causes.mps,
         "The GPU shares the machine's memory, and PyTorch stops at a share of it. fitgpt's forecasts are of CUDA "
         "cards: for this one it has no tape.",
         (("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", "removes the limit; then the whole machine may run out"),), SMALLER),
    Rule("OOM-CUBLAS", "A library found the card full",
         "`CUBLAS_STATUS_ALLOC_FAILED`, `CUDNN_STATUS_ALLOC_FAILED`, or `…_NOT_INITIALIZED` where a handle is made",
         of_kind("library"), causes.library,
         "cuBLAS and cuDNN take some MiB for themselves at their first use, from the driver. Where PyTorch's "
         "allocator, or another process, has taken the rest of the card, they fail with a code and no figures. An "
         "index out of range in an earlier kernel can end in the same code.",
         where_a_library_failed, SMALLER),
    Rule("OOM-DRIVER", "The driver refused, without figures",
         "`CUDA error: out of memory`, `cuda runtime error (2)`, `CUDA_ERROR_OUT_OF_MEMORY`, `Triton Error [CUDA]: out "
         "of memory`, NCCL's `Cuda failure 'out of memory'`",
         of_kind("driver"), causes.driver,
         "Not PyTorch's allocator but the driver itself: at start, when a context is made on a card that others have "
         "filled; for kernels; or for pinned host memory, which WSL limits to a share of its RAM.",
         where_the_driver_refused, SMALLER),
    Rule("OOM-LARGER-THAN-CARD", "One tensor larger than the card", "more asked for than the card's total",
         lambda facts: has_figures(facts) and facts.fill is not None and facts.asked > facts.fill.total, causes.larger,
         "Usually the logits of a very large batch, or attention scores (batch × heads × block × block) where no fused "
         "attention is used. Where a GPU shares the machine's RAM, the total is a setting of the BIOS or the driver.",
         unpriced=SMALLER),
    Rule("OOM-SPILL", "More held than the card has", "PyTorch reserved more than the card's total",
         lambda facts: facts.fill is not None and facts.fill.spilled, causes.spilled,
         "Drivers for Windows put what does not fit into system RAM instead of refusing it. The first sign is the time "
         "a step takes, not a message; the message comes when that is full too.",
         (("NVIDIA Control Panel > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback",
           "fails at once instead of crawling"),), SMALLER),
    Rule("OOM-CAP", "A cap that the process set itself", "`… allowed;` in the message",
         lambda facts: facts.message.allowed is not None, causes.capped,
         "The allocator refuses at the cap although the card has room. The cap counts segments, not the context.",
         (("torch.cuda.set_per_process_memory_fraction(1.0)", "lifts it; or leave the call out"),), SMALLER),
    Rule("OOM-FRAGMENTED", "Room enough, but in pieces",
         "`reserved but unallocated` (or `cached`) covers what was missing, and is a tenth of what is reserved",
         is_broken_up, causes.fragmented,
         "PyTorch keeps freed memory in segments, cut as earlier tensors needed it; a segment with one live tensor in "
         "it cannot be given back. Sizes that vary, and evaluation between training steps, break it up most.",
         unpriced=against_pieces, decides=pieces_decide),
    Rule("OOM-NEIGHBOUR", "Other processes hold the card",
         "other processes hold what was missing, and a tenth of the card or more", has_neighbours, causes.neighbour,
         "Another training run, a notebook that was never closed, a desktop with its browser. A process's figure in "
         "nvidia-smi includes its context. Messages before PyTorch 2.1 do not list processes: there, what is neither "
         "free nor PyTorch's is theirs, but for this process's context.",
         against_neighbours, SMALLER, neighbours_decide),
    Rule("OOM-ROOM", "Refused although there was room", "more free than was asked for, and no cap",
         had_room, causes.had_room,
         "`free` is read after the failure. Several ranks on one card, a program that starts at the same time, a "
         "driver that cannot map a large piece (WSL), or a limit outside PyTorch show like this.",
         who_comes_and_goes),
    Rule("OOM-STATES", "The model's state alone is too much",
         "with the config: 16 bytes a parameter are more than PyTorch could reserve", state_is_too_much, causes.states,
         "float32 weights, gradients and AdamW's two moments: 4 + 4 + 8 bytes for each parameter, whatever the batch.",
         unpriced=STATE_SAVERS),
    Rule("OOM-AT-LOAD", "Before the first batch",
         "the traceback ends in `.to(device)`, `.cuda()` or in loading weights; or the tape's phase is load",
         lambda facts: facts.in_phase == "load", causes.loading,
         "A model in float32 takes 4 bytes a parameter; a checkpoint loaded straight to the card, as much again.",
         who_is_there, (("fitgpt train … --weights=bfloat16", "2 bytes a weight instead of 4; lossy"),)),
    Rule("OOM-OPTIMIZER-FIRST-STEP", "In the optimizer's step",
         "the traceback is in torch/optim; or the tape's event is the optimizer's", in_the_optimizer,
         causes.optimizer_step,
         "Everything before it can pass and the first step still fail: the moments are made there, and stay.",
         unpriced=(("torch.optim.AdamW(…, fused=True)", "steps in place, without copies; nanoGPT and fitgpt do"),
                   *STATE_SAVERS)),
    Rule("OOM-EVAL", "In evaluation",
         "the traceback passes through `estimate_loss` or `evaluate`; or the tape's phase is an evaluation",
         lambda facts: facts.in_phase.endswith("eval"), causes.evaluating,
         "Evaluation holds less than training at the same batch. It fails first where it comes first, before any step, "
         "or where training has left the allocator's memory in pieces.", unpriced=EVALUATION),
    Rule("OOM-LOGITS", "The logits",
         "with the config: the size is one of the loss's arrays, batch × block × vocabulary × 2 or 4 bytes",
         lambda facts: facts.owner == "logits", causes.logits,
         "GPT-2's vocabulary has 50,257 words, 50,304 with padding. A float32 number for each of them, for each of "
         "16 × 1024 tokens, is 3.07 GiB, and PyTorch's loss holds 12 bytes for each at its peak. fitgpt makes the loss "
         "in pieces of a few thousand tokens."),
    Rule("OOM-BACKWARD", "In the backward pass", "the traceback passes through `.backward()`", in_backward,
         causes.backward, "Recomputing what a layer would keep (`--recompute`, `--grad_checkpoint`) shrinks what this "
         "pass begins with.", unpriced=SMALLER),
    Rule("OOM-ACTIVATIONS", "What the layers keep", "with the config: the size is a layer's output",
         lambda facts: facts.owner == "activations" and not in_backward(facts), causes.activations,
         "Eager PyTorch keeps about 36 bytes × tokens × width in each layer of nanoGPT's model."),
    Rule("OOM-CONTEXT", "Much outside PyTorch", "`this process has …` is more than 1 GiB above what PyTorch reserved",
         lambda facts: facts.fill is not None and (facts.fill.outside or 0) > LARGE_CONTEXT, causes.context,
         "PyTorch's allocator does not know of it, and no flag of the run changes it."),
    Rule("OOM-CUT", "A message without its figures",
         "`CUDA out of memory.` and nothing after it, or nothing after how much is free", is_cut, causes.cut,
         "The figures stand in the same line as the words; logs that cut long lines cut them off.", to_its_end,
         SMALLER),
    Rule("OOM-FULL", "The run fills the card", "none of the others: the process's own tensors take what there is",
         lambda facts: True, causes.full,
         "The plain case: the run is larger than the card. The config tells what it holds, and what each change saves.",
         unpriced=SMALLER),
)
ALONE = {"OOM-KILLED", "OOM-CPU", "OOM-MPS", "OOM-CUBLAS", "OOM-DRIVER"}  # nothing more can be known


def applying(facts: Facts) -> tuple[Rule, ...]:
    """The rules that apply, those that decide first. OOM-FULL is what is left where no other does."""
    found = [rule for rule in RULES if rule.applies(facts)]
    if found[0].code in ALONE:
        return (found[0],)
    return tuple(sorted(found[:-1] or found, key=lambda rule: not rule.decides(facts)))
