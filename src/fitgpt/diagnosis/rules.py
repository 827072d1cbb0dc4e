"""Case → the causes of an out-of-memory failure: one Rule per cause, with its test, its text and its advice.

A new cause is a section in this file and an entry in RULES, whose order decides which cause is named first.
docs/explain.md has a section for each rule, generated from its fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.units import GiB, show_bytes, show_count
from .case import Case
from .gpu_usage import MAX_OUTSIDE

Advice = tuple[tuple[str, str], ...]  # (what to type or do, its effect)


@dataclass(frozen=True)
class Rule:
    """A cause: how it is recognised, what is said about it, and what to do."""

    code: str
    title: str
    pattern: str                       # how it is recognised, for the docs
    applies: Callable[[Case], bool]
    text: Callable[[Case], str] | str  # a sentence or two, with the figures of the case
    background: str                    # more about it, for the docs
    advice: Callable[[Case], Advice] | Advice = ()               # independent of the run
    advice_without_plan: Callable[[Case], Advice] | Advice = ()  # changes of the run, if they cannot be forecast
    decides: Callable[[Case], bool] = lambda case: True          # whether the run would fit without this cause
    only_cause: bool = False                                     # nothing more can be known from such a message

    def text_for(self, case: Case) -> str:
        return self.text if isinstance(self.text, str) else self.text(case)

    def advice_for(self, case: Case) -> Advice:
        parts = (self.advice,) if case.plan is not None else (self.advice, self.advice_without_plan)
        return tuple(each for part in parts for each in (part(case) if callable(part) else part))


def matching_rules(case: Case) -> tuple[Rule, ...]:
    """The rules that apply, those that decide first. OOM-FULL applies only if no other rule does."""
    found = [rule for rule in RULES if rule.applies(case)]
    if found[0].only_cause:
        return (found[0],)
    return tuple(sorted(found[:-1] or found, key=lambda rule: not rule.decides(case)))


# ---- advice and tests that several rules use

SMALLER_BATCH: Advice = (("half the --batch_size, twice the --gradient_accumulation_steps",
                          "the same training, with half of the activations and logits at a time"),)
SMALLER_STATE: Advice = (
    ("fitgpt train … --weights=bfloat16 --optimizer=adam8bit", "6 bytes per parameter instead of 16; lossy"),
    ("fitgpt train … --offload=optimizer", "keeps AdamW's moments in CPU RAM; exact, slower"))
LIST_PROCESSES = {"nvidia": "nvidia-smi", "amd": "rocm-smi --showpids", "intel": "xpu-smi ps"}
WATCH_PROCESSES = {"nvidia": "nvidia-smi -l 1", "amd": "watch -n 1 rocm-smi --showpids",
                   "intel": "watch -n 1 xpu-smi ps"}
SELECT_GPU = {"nvidia": "CUDA_VISIBLE_DEVICES=0", "amd": "HIP_VISIBLE_DEVICES=0", "intel": "ZE_AFFINITY_MASK=0"}
SYNCHRONOUS = {"nvidia": "CUDA_LAUNCH_BLOCKING=1", "amd": "AMD_SERIALIZE_KERNEL=3", "intel": "CUDA_LAUNCH_BLOCKING=1"}


def list_processes(case: Case) -> Advice:
    return ((LIST_PROCESSES[case.vendor], "lists the processes on the GPU; ending one frees its memory"),)


def is_kind(kind: str) -> Callable[[Case], bool]:
    return lambda case: case.message.kind == kind


def has_figures(case: Case) -> bool:
    return case.usage is not None and case.message.requested is not None and not case.usage.spilled


# ---- OOM-KILLED


def _killed_text(case: Case) -> str:
    offloaded = case.run.forecast.host_bytes if case.run else 0
    offload = f" This config keeps {show_bytes(offloaded)} there (offload)." if offloaded else ""
    return f"The system killed the process (signal 9). Nearly always CPU RAM ran out, not GPU memory.{offload}"


KILLED = Rule(
    "OOM-KILLED", "The system killed the process",
    pattern="`Killed`, `died with <Signals.SIGKILL: 9>`, exit code 137 or -9, the kernel's `Out of memory: Killed "
            "process`, `oom_kill`",
    applies=is_kind("killed"), text=_killed_text, only_cause=True,
    background="Once RAM and swap are used up, Linux kills the process that holds most; containers and job schedulers "
               "do it at their limit. Nothing is printed but `Killed`, or nothing at all.",
    advice=(("dmesg | tail", "shows whether it was memory: `Out of memory: Killed process`"),
            ("close other programs, or give the machine or the container more RAM", "the GPU is not involved"),
            ("fewer data loader workers", "each holds a copy; `fitgpt train` has none")))


# ---- OOM-CPU


def _ram_text(case: Case) -> str:
    if case.message.source == "Windows":
        return ("Windows could not commit the RAM that a program requested while loading: the paging file is too "
                "small. GPU memory is not involved.")
    size = f" of {show_bytes(case.requested)}" if case.requested else ""
    return f"An allocation{size} in CPU RAM failed. GPU memory is not involved."


def _ram_advice(case: Case) -> Advice:
    if case.message.source == "Windows":
        return (("let Windows manage the paging file's size, on a disk with free space",
                 "System > Advanced > Performance > Virtual memory"),)
    return (("close other programs, or load the data in chunks",
             "`fitgpt prepare` and `fitgpt train` read it chunk by chunk"),
            ("--offload=none", "if the optimizer was offloaded: that takes 16 bytes per parameter of CPU RAM"))


CPU = Rule(
    "OOM-CPU", "CPU RAM ran out",
    pattern="`DefaultCPUAllocator`, `Unable to allocate … for an array`, `MemoryError`, `std::bad_alloc`, `The paging "
            "file is too small`",
    applies=is_kind("ram"), text=_ram_text, only_cause=True,
    background="The CPU allocator failed. On Windows every process that loads PyTorch's libraries reserves gigabytes "
               "of paging file, whether it uses them or not.",
    advice=_ram_advice)


# ---- OOM-MPS


def _mps_text(case: Case) -> str:
    message = case.message
    if message.allowed is None or message.allocated is None:
        return "PyTorch on Apple's GPU reached its limit, a share of the machine's memory."
    others = sum(size for _, size in message.others)
    return (f"PyTorch on Apple's GPU is limited to {show_bytes(message.allowed)} of the machine's memory; "
            f"{show_bytes(message.allocated)} are in tensors and {show_bytes(others)} in other allocations, so "
            f"{show_bytes(case.requested)} more do not fit.")


MPS = Rule(
    "OOM-MPS", "Apple's GPU reached its limit",
    pattern="`MPS backend out of memory`",
    applies=is_kind("mps"), text=_mps_text, only_cause=True,
    background="The GPU shares the machine's memory, and PyTorch stops at a share of it. fitgpt forecasts CUDA GPUs "
               "only.",
    advice=(("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", "removes the limit; then the whole machine may run out"),),
    advice_without_plan=SMALLER_BATCH)


# ---- OOM-CUBLAS


def _library_text(case: Case) -> str:
    library = case.message.source
    if "NOT_INITIALIZED" in case.message.text:
        return (f"{library} could not be initialized. Most often it found no free memory: it asks the driver, not "
                "PyTorch's allocator, so there are no figures. Otherwise it does not match the driver, or an earlier "
                "kernel failed.")
    return (f"{library} found no memory for itself. It asks the driver, not PyTorch's allocator, so there are no "
            "figures: the GPU was full, or nearly full, at its first use.")


def _library_advice(case: Case) -> Advice:
    return (*list_processes(case), (SYNCHRONOUS[case.vendor], "if the GPU has free memory: shows the kernel that "
                                    "failed"))


CUBLAS = Rule(
    "OOM-CUBLAS", "A CUDA library found the GPU full",
    pattern="`CUBLAS_STATUS_ALLOC_FAILED`, `CUDNN_STATUS_ALLOC_FAILED`, or `…_NOT_INITIALIZED` when a handle is "
            "created",
    applies=is_kind("library"), text=_library_text, only_cause=True,
    background="cuBLAS and cuDNN take some MiB from the driver at their first use. If PyTorch's allocator or another "
               "process holds the rest of the GPU, they fail with a code and no figures. An index out of range in an "
               "earlier kernel can end in the same code.",
    advice=_library_advice, advice_without_plan=SMALLER_BATCH)


# ---- OOM-DRIVER


def _driver_advice(case: Case) -> Advice:
    return (*list_processes(case),
            ("memory=24GB in .wslconfig, then wsl --shutdown", "on WSL, which limits pinned memory"))


DRIVER = Rule(
    "OOM-DRIVER", "The driver is out of memory, without figures",
    pattern="`CUDA error: out of memory`, `cuda runtime error (2)`, `CUDA_ERROR_OUT_OF_MEMORY`, `Triton Error [CUDA]: "
            "out of memory`, NCCL's `Cuda failure 'out of memory'`",
    applies=is_kind("driver"), only_cause=True,
    text="The driver found no memory for an allocation outside PyTorch's allocator: a context, a kernel or pinned "
         "memory. So there are no figures, and the traceback may not show the line that requested it.",
    background="Not PyTorch's allocator but the driver itself: when a context is created on a GPU that other processes "
               "have filled; for kernels; or for pinned memory, which WSL limits to a share of its RAM.",
    advice=_driver_advice, advice_without_plan=SMALLER_BATCH)


# ---- OOM-LARGER-THAN-CARD


def _larger_text(case: Case) -> str:
    return (f"One tensor of {show_bytes(case.requested)} is larger than the whole GPU, {show_bytes(case.total)}: "
            "freeing other memory cannot help.")


LARGER_THAN_CARD = Rule(
    "OOM-LARGER-THAN-CARD", "One tensor larger than the GPU",
    pattern="the requested size is larger than the GPU's total capacity",
    applies=lambda case: has_figures(case) and case.requested > case.total,
    text=_larger_text,
    background="Usually the logits of a very large batch, or attention scores (batch × heads × block × block) without "
               "fused attention. Where a GPU shares the machine's RAM, the total is a setting of the BIOS or the "
               "driver.",
    advice_without_plan=SMALLER_BATCH)


# ---- OOM-SPILL


def _spill_text(case: Case) -> str:
    return (f"PyTorch has reserved {show_bytes(case.reserved)} on a GPU of {show_bytes(case.total)}: the Windows "
            "driver (in WSL too) moved the rest into CPU RAM, over the bus. A run that continues like this is many "
            "times slower.")


SPILL = Rule(
    "OOM-SPILL", "More reserved than the GPU has",
    pattern="PyTorch reserved more than the GPU's total capacity",
    applies=lambda case: case.usage is not None and case.usage.spilled, text=_spill_text,
    background="Windows drivers move what does not fit into CPU RAM instead of failing. Steps become slow first; the "
               "message appears when RAM is full too.",
    advice=(("NVIDIA Control Panel > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback",
             "fails at once instead of becoming slow"),),
    advice_without_plan=SMALLER_BATCH)


# ---- OOM-CAP


def _cap_text(case: Case) -> str:
    return (f"The process is limited to {show_bytes(case.message.allowed or 0)} (set_per_process_memory_fraction, or "
            f"the allocator's environment) and has reserved {show_bytes(case.reserved)} of it. The GPU itself has free "
            "memory.")


CAP = Rule(
    "OOM-CAP", "A memory limit that the process has set",
    pattern="`… allowed;` in the message",
    applies=lambda case: case.message.allowed is not None, text=_cap_text,
    background="The allocator fails at the limit although the GPU has free memory. The limit counts segments, not the "
               "context.",
    advice=(("torch.cuda.set_per_process_memory_fraction(1.0)", "removes the limit; or omit the call"),),
    advice_without_plan=SMALLER_BATCH)


# ---- OOM-FRAGMENTED

FRAGMENTED_SHARE = 0.1  # of the reserved memory; less is unallocated in every run


def _is_fragmented(case: Case) -> bool:
    return has_figures(case) and (0 < case.missing <= case.unallocated
                                  and case.unallocated >= FRAGMENTED_SHARE * case.reserved)


def _expandable_segments_decide(case: Case) -> bool:
    return case.plan is None or case.run is None or case.run.fits_with_expandable_segments(
        case.plan.budget.reserve_limit)


def _fragmented_text(case: Case) -> str:
    text = (f"Fragmentation: {show_bytes(case.unallocated)} are reserved by PyTorch but unallocated, and "
            f"{show_bytes(case.free)} were free. Together they are more than the {show_bytes(case.requested)} "
            "requested, but not contiguous.")
    if case.plan is None or case.run is None or case.run.expandable:
        return text
    fits = "fit" if _expandable_segments_decide(case) else "still not fit"
    return f"{text} With expandable_segments the run would {fits}."


def _fragmented_advice(case: Case) -> Advice:
    if case.message.source in ("PyTorch 1.0 to 1.3", "PyTorch 1.4 to 1.9"):
        return (("PyTorch 2.2 or later", "has expandable_segments, which avoid this fragmentation"), *SMALLER_BATCH)
    name = "PYTORCH_HIP_ALLOC_CONF" if case.message.kind == "hip" else "PYTORCH_CUDA_ALLOC_CONF"
    return ((f"{name}=expandable_segments:True",
             "avoids fragmentation: segments grow as needed; not on Windows. `fitgpt train` sets it"), *SMALLER_BATCH)


FRAGMENTED = Rule(
    "OOM-FRAGMENTED", "Fragmentation",
    pattern="`reserved but unallocated` (or `cached`) is at least the missing amount, and a tenth of the reserved "
            "memory",
    applies=_is_fragmented, text=_fragmented_text, decides=_expandable_segments_decide,
    background="PyTorch keeps freed memory in segments, split as earlier tensors needed it; a segment with one live "
               "tensor in it cannot be released. Varying sizes, and evaluation between training steps, cause most "
               "fragmentation.",
    advice_without_plan=_fragmented_advice)


# ---- OOM-NEIGHBOUR

NEIGHBOUR_SHARE = 0.1  # of the GPU; a desktop takes less


def _has_neighbours(case: Case) -> bool:
    usage = case.usage
    return usage is not None and has_figures(case) and (
        case.missing > 0 and usage.others_at_least >= max(case.missing, NEIGHBOUR_SHARE * usage.total))


def _neighbours_decide(case: Case) -> bool:
    return case.plan is None or case.usage is None or case.plan.headroom + case.usage.others_at_least >= 0


def _neighbour_text(case: Case) -> str:
    usage = case.usage
    assert usage is not None
    if usage.others is None:
        who = (f"{show_bytes(usage.not_pytorch)} of the GPU are neither free nor reserved by PyTorch. This process's "
               f"own context takes at most about {show_bytes(MAX_OUTSIDE)} of that; other processes hold the rest.")
    else:
        who = f"Other processes hold {show_bytes(usage.others)} of the GPU."
    if case.plan is None:
        return f"{who} Without them the {show_bytes(case.requested)} would have been free."
    return f"{who} Without them the run would {'fit' if _neighbours_decide(case) else 'still not fit'}."


def _neighbour_advice(case: Case) -> Advice:
    pids = sorted(case.usage.pids if case.usage else (), key=lambda each: -each[1])
    return (*list_processes(case), *((f"kill {pid}", f"frees {show_bytes(size)}, if it is yours and not needed")
                                     for pid, size in pids[:1]))


NEIGHBOUR = Rule(
    "OOM-NEIGHBOUR", "Other processes hold the GPU's memory",
    pattern="other processes hold at least the missing amount, and a tenth of the GPU",
    applies=_has_neighbours, text=_neighbour_text, decides=_neighbours_decide,
    background="Another training run, a notebook that was never closed, a desktop with its browser. nvidia-smi counts "
               "a process's context with it. Messages before PyTorch 2.1 do not list processes: memory that is neither "
               "free nor reserved by PyTorch belongs to them, except for this process's context.",
    advice=_neighbour_advice, advice_without_plan=SMALLER_BATCH)


# ---- OOM-ROOM


def had_free_memory(case: Case) -> bool:
    return has_figures(case) and case.message.allowed is None and case.requested <= case.free


def _room_text(case: Case) -> str:
    return (f"{show_bytes(case.free)} were free when the message was written, more than the "
            f"{show_bytes(case.requested)} requested. A moment before, they were not free or not available: another "
            "process (a second rank on the same GPU, for example) took memory and freed it again, or the driver could "
            "not map the allocation.")


def _room_advice(case: Case) -> Advice:
    return ((WATCH_PROCESSES[case.vendor], "while it starts, shows whether another process uses this GPU for a moment"),
            (SELECT_GPU[case.vendor], "and another number for each further process: every rank needs its own GPU"))


ROOM = Rule(
    "OOM-ROOM", "Failed although enough memory was free",
    pattern="more memory free than requested, and no limit",
    applies=had_free_memory, text=_room_text,
    background="`free` is read after the failure. Several ranks on one GPU, a program that starts at the same time, a "
               "driver that cannot map a large allocation (WSL), or a limit outside PyTorch cause this.",
    advice=_room_advice)


# ---- OOM-STATES


def _state_is_too_large(case: Case) -> bool:
    if case.run is None or case.plan is None or case.plan.fits:
        return False
    config = case.run.config
    default = case.is_nanogpt or (config.optimizer, config.offload, config.weights) == ("adamw", "none", "float32")
    return default and case.run.state_bytes > case.plan.budget.reserve_limit


def _states_text(case: Case) -> str:
    assert case.run is not None
    assert case.plan is not None
    return (f"Weights, gradients and AdamW's moments take 16 bytes per parameter: {show_bytes(case.run.state_bytes)} "
            f"for {show_count(case.run.forecast.params)} parameters, and PyTorch could reserve "
            f"{show_bytes(case.plan.budget.reserve_limit)}. No smaller batch makes the run fit.")


STATES = Rule(
    "OOM-STATES", "Weights, gradients and optimizer state alone are too large",
    pattern="with the config: 16 bytes per parameter are more than PyTorch could reserve",
    applies=_state_is_too_large, text=_states_text,
    background="float32 weights, gradients and AdamW's two moments: 4 + 4 + 8 bytes per parameter, for any batch size.",
    advice_without_plan=SMALLER_STATE)


# ---- OOM-AT-LOAD


AT_LOAD = Rule(
    "OOM-AT-LOAD", "While the model was loaded",
    pattern="the traceback ends in `.to(device)`, `.cuda()` or in loading weights; or the tape's phase is load",
    applies=lambda case: case.tape_phase == "load",
    text="Memory ran out while the model was loaded to the GPU, before any batch: only weights are allocated then, "
         "and the batch size does not change them.",
    background="A float32 model takes 4 bytes per parameter; a checkpoint loaded directly to the GPU takes as much "
               "again.",
    advice=list_processes,
    advice_without_plan=(("fitgpt train … --weights=bfloat16", "2 bytes per weight instead of 4; lossy"),))


# ---- OOM-OPTIMIZER-FIRST-STEP


def _in_optimizer_step(case: Case) -> bool:
    return case.phase == "step" or (case.owner == "optimizer" and case.tape_phase != "load")


def _optimizer_text(case: Case) -> str:
    here = f" ({show_bytes(8 * case.run.forecast.params)} here)" if case.run else ""
    return (f"The optimizer step requested it. AdamW creates its two moments, 8 bytes per parameter{here}, in the "
            "first step; and its foreach implementation, the default, copies them again during each step. Forward and "
            "backward passes before the step do not show that.")


OPTIMIZER_FIRST_STEP = Rule(
    "OOM-OPTIMIZER-FIRST-STEP", "In the optimizer step",
    pattern="the traceback is in torch/optim; or the allocation on the tape belongs to the optimizer",
    applies=_in_optimizer_step, text=_optimizer_text,
    background="Forward and backward can succeed and the first step still fail: the moments are created there and "
               "stay allocated.",
    advice_without_plan=(("torch.optim.AdamW(…, fused=True)", "steps in place, without copies; nanoGPT and fitgpt do"),
                         *SMALLER_STATE))


# ---- OOM-EVAL


def _eval_text(case: Case) -> str:
    later = ", while the last `logits` of training are still allocated" if case.tape_phase == "eval" else ""
    nanogpt = f" nanoGPT evaluates with the batch and block size of training{later}." if case.is_nanogpt else ""
    return ("Memory ran out in evaluation. It keeps no graph and no gradients: besides the model it allocates the "
            f"logits of its batch and what the loss computes from them.{nanogpt}")


EVAL = Rule(
    "OOM-EVAL", "In evaluation",
    pattern="the traceback passes through `estimate_loss` or `evaluate`; or the tape's phase is an evaluation",
    applies=lambda case: case.tape_phase.endswith("eval"), text=_eval_text,
    background="Evaluation allocates less than training with the same batch. It fails if it runs first, before any "
               "step, or after training has fragmented the allocator's memory.",
    advice_without_plan=(("fitgpt train … --eval_batch_size=4", "evaluates 4 sequences at once, with the same loss; "
                          "nanoGPT's train.py has no such option"),))


# ---- OOM-LOGITS


def _logits_text(case: Case) -> str:
    share = ""
    if case.run is not None:
        forecast = case.run.forecast
        nbytes = next((each.nbytes for each in forecast.owners_at_peak if each.owner == "logits"), 0)
        if nbytes:
            share = (f" At the run's peak they are {show_bytes(nbytes)} of the {show_bytes(forecast.allocated)} "
                     "allocated.")
    return ("It is the logits, one number per token and entry of the vocabulary, of which the loss keeps several "
            f"copies.{share}")


LOGITS = Rule(
    "OOM-LOGITS", "The logits",
    pattern="with the config: the size is that of a tensor of the loss, batch × block × vocabulary × 2 or 4 bytes",
    applies=lambda case: case.owner == "logits", text=_logits_text,
    background="GPT-2's vocabulary has 50,257 entries, 50,304 with padding. In float32, for 16 × 1024 tokens, logits "
               "take 3.07 GiB, and PyTorch's loss allocates 12 bytes per logit at its peak. fitgpt computes the loss "
               "in chunks of a few thousand tokens.",
    advice_without_plan=SMALLER_BATCH)


# ---- OOM-BACKWARD


def _in_backward(case: Case) -> bool:
    return case.owner != "logits" and (case.phase == "backward" or (case.match is not None and case.match.backward))


BACKWARD = Rule(
    "OOM-BACKWARD", "In the backward pass",
    pattern="the traceback passes through `.backward()`",
    applies=_in_backward,
    text="Memory ran out in the backward pass. It starts with all activations that the forward pass kept, and adds "
         "the gradients: here a training step allocates most.",
    background="Gradient checkpointing (`--recompute`, `--grad_checkpoint`) reduces the activations that this pass "
               "starts with.",
    advice_without_plan=SMALLER_BATCH)


# ---- OOM-ACTIVATIONS


ACTIVATIONS = Rule(
    "OOM-ACTIVATIONS", "Activations",
    pattern="with the config: the size is that of a layer's output",
    applies=lambda case: case.owner == "activations" and not _in_backward(case),
    text="It is an activation: the output of a layer, kept until the backward pass. Activations grow with batch × "
         "block × width × layers.",
    background="Eager PyTorch keeps about 36 bytes × tokens × width in each layer of nanoGPT's model.",
    advice_without_plan=SMALLER_BATCH)


# ---- OOM-CONTEXT

LARGE_CONTEXT = GiB


def _context_text(case: Case) -> str:
    outside = (case.usage.outside if case.usage else None) or 0
    return (f"This process holds {show_bytes(outside)} of non-PyTorch memory, where context and kernels usually take "
            "100 to 800 MiB: other libraries in the same process, NCCL's buffers, or the driver of a virtual machine.")


CONTEXT = Rule(
    "OOM-CONTEXT", "Much non-PyTorch memory",
    pattern="`this process has …` is more than 1 GiB above the memory that PyTorch reserved",
    applies=lambda case: case.usage is not None and (case.usage.outside or 0) > LARGE_CONTEXT, text=_context_text,
    background="PyTorch's allocator does not manage this memory, and no option of the run changes it.",
    advice_without_plan=SMALLER_BATCH)


# ---- OOM-CUT


def _is_truncated(case: Case) -> bool:
    return case.message.requested is None if case.usage is None else case.usage.truncated


def _truncated_text(case: Case) -> str:
    if case.usage is None:
        return "The message is truncated: GPU memory ran out, but all figures are missing."
    return (f"{show_bytes(case.usage.used)} of the GPU's {show_bytes(case.usage.total)} are in use, and the message "
            "does not say by which process: the figures of this process and of PyTorch would follow the free memory.")


def _truncated_advice(case: Case) -> Advice:
    if case.usage is None:
        return (("the message to its end", "contains the requested size, and who held the GPU's memory"),)
    return (("the message to its end", "contains the memory of this process, and PyTorch's part of it"),
            *list_processes(case))


CUT = Rule(
    "OOM-CUT", "A truncated message",
    pattern="`CUDA out of memory.` and nothing after it, or nothing after the free memory",
    applies=_is_truncated, text=_truncated_text,
    background="The figures are on the same line as the words; some logs truncate long lines.",
    advice=_truncated_advice, advice_without_plan=SMALLER_BATCH)


# ---- OOM-FULL


def _full_text(case: Case) -> str:
    usage, message = case.usage, case.message
    if usage is None and message.total is not None and message.reserved is not None:
        others = (": the run's own tensors do not fill the GPU" if message.total - message.reserved >= case.requested
                  else "")
        return (f"PyTorch had reserved {show_bytes(message.reserved)} of the GPU's {show_bytes(message.total)}, and "
                f"the message does not say how much was free{others}.")
    if usage is None:
        return "GPU memory ran out, and the message does not say who held it."
    if usage.reserved is not None and usage.not_pytorch > usage.reserved:
        return (f"{show_bytes(usage.not_pytorch)} of {show_bytes(usage.total)} are neither free nor reserved by "
                f"PyTorch: this process's context and other processes leave too little for a run that has "
                f"{show_bytes(usage.reserved)} and requested {show_bytes(case.requested)} more.")
    nbytes, what = (usage.process or 0, "holds") if usage.allocated is None else (usage.allocated, "has allocated")
    return (f"The run itself fills the GPU: this process {what} {show_bytes(nbytes)} of {show_bytes(usage.total)}, and "
            f"requested {show_bytes(case.requested)} more.")


FULL = Rule(
    "OOM-FULL", "The run fills the GPU",
    pattern="no other rule applies: the process's own tensors take the memory",
    applies=lambda case: True, text=_full_text,
    background="The run is larger than the GPU. With its config, `explain` shows what it allocates and what each "
               "change saves.",
    advice_without_plan=SMALLER_BATCH)


RULES = (KILLED, CPU, MPS, CUBLAS, DRIVER, LARGER_THAN_CARD, SPILL, CAP, FRAGMENTED, NEIGHBOUR, ROOM, STATES, AT_LOAD,
         OPTIMIZER_FIRST_STEP, EVAL, LOGITS, BACKWARD, ACTIVATIONS, CONTEXT, CUT, FULL)
