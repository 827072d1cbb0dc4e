"""Case → the causes of an out-of-memory failure: one Rule per cause, with its test, its text and its advice.

A new cause is one function in this file: it returns a sentence or two with the figures of the case, or None if it does
not apply. The order of the functions decides which cause is named first. docs/explain.md has a section for each rule,
generated from its fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.units import GiB, show_bytes, show_count
from ..memory.timeline import replay
from .case import MAX_OUTSIDE, Case, describe_rank_contexts, rank_contexts
from .oom_message import (
    BEFORE_EXPANDABLE,
    CUDA_MALLOC_ASYNC,
    MORE_THAN_1EB,
    OLD_PYTORCH,
    creates_state,
    keeps_all_logits,
    reads_checkpoint,
)

Advice = tuple[tuple[str, str], ...]  # (what to type or do, its effect); names in braces are those of TOOLS

TOOLS = {
    "nvidia": {"list_processes": "nvidia-smi", "watch_processes": "nvidia-smi -l 1",
               "select_gpu": "CUDA_VISIBLE_DEVICES=0", "synchronous": "CUDA_LAUNCH_BLOCKING=1",
               "alloc_conf": "PYTORCH_CUDA_ALLOC_CONF"},
    "amd": {"list_processes": "rocm-smi --showpids", "watch_processes": "watch -n 1 rocm-smi --showpids",
            "select_gpu": "HIP_VISIBLE_DEVICES=0", "synchronous": "AMD_SERIALIZE_KERNEL=3",
            "alloc_conf": "PYTORCH_HIP_ALLOC_CONF"},
    "intel": {"list_processes": "xpu-smi ps", "watch_processes": "watch -n 1 xpu-smi ps",
              "select_gpu": "ZE_AFFINITY_MASK=0", "synchronous": "CUDA_LAUNCH_BLOCKING=1",
              "alloc_conf": "PYTORCH_ALLOC_CONF"},
    "huawei": {"list_processes": "npu-smi info", "watch_processes": "watch -n 1 npu-smi info",
               "select_gpu": "ASCEND_RT_VISIBLE_DEVICES=0", "synchronous": "ASCEND_LAUNCH_BLOCKING=1",
               "alloc_conf": "PYTORCH_NPU_ALLOC_CONF"},
}
LIST_PROCESSES = ("{list_processes}", "lists the processes on the GPU; ending one frees its memory")
SMALLER_BATCH: Advice = (("half the --batch_size, twice the --gradient_accumulation_steps",
                          "the same training, with half of the activations and logits at a time"),)
MAP_LOCATION = ("torch.load(…, map_location=\"cpu\")", "keeps a checkpoint off the GPU while it is loaded")
SMALLER_STATE: Advice = (
    ("fitgpt train … --weights=bfloat16 --optimizer=adam8bit", "6 bytes per parameter instead of 16; lossy"),
    ("fitgpt train … --offload=optimizer", "keeps AdamW's moments in CPU RAM; exact, slower"))


@dataclass(frozen=True)
class Rule:
    """A cause: how it is recognised, what is said about it, and what to do."""

    text: Callable[[Case], str | None]  # None: the cause does not apply
    code: str
    title: str
    pattern: str                        # how it is recognised, for the docs
    background: str                     # more about it, for the docs
    advice: Callable[[Case], Advice] | Advice = ()               # independent of the run
    advice_without_plan: Callable[[Case], Advice] | Advice = ()  # changes of the run, if they cannot be forecast
    decides: Callable[[Case], bool] = lambda case: True          # whether the run would fit without this cause
    only_cause: bool = False                                     # nothing more can be known from such a message

    def advice_for(self, case: Case) -> Advice:
        # A save does not depend on what the changes change, and before the first batch its size does not matter.
        parts = [self.advice] if case.plan or case.phase == "save" else [self.advice, self.advice_without_plan]
        return tuple((todo.format(**TOOLS[case.vendor]), effect)
                     for part in parts for todo, effect in (part(case) if callable(part) else part)
                     if (todo, effect) != SMALLER_BATCH[0] or case.tape_phase != "load")


class MatchingRule(NamedTuple):
    rule: Rule
    text: str
    decides: bool


RULES: list[Rule] = []


def matching_rules(case: Case) -> list[MatchingRule]:
    """The rules that apply, those that decide first. OOM-FULL, the last, applies only if no other rule decides."""
    found = [MatchingRule(rule, text, rule.decides(case)) for rule in RULES if (text := rule.text(case)) is not None]
    if found[0].rule.only_cause:
        return found[:1]
    return sorted(found[:-1] if any(each.decides for each in found[:-1]) else found, key=lambda each: not each.decides)


def _rule(code: str, title: str, **fields: Any) -> Callable[[Callable[[Case], str | None]], None]:
    """Adds a function to RULES, with the fields of its rule."""
    def add(text: Callable[[Case], str | None]) -> None:
        RULES.append(Rule(text, code, title, **fields))

    return add


def _rule_of_kind(kind: str, code: str, title: str, text: str, **fields: Any) -> None:
    """Adds a rule for messages that are recognised by their words alone (FRAMEWORKS of oom_message.py)."""
    _rule(code, title, only_cause=True, **fields)(lambda case: text if case.message.kind == kind else None)


def _has_figures(case: Case) -> bool:
    return case.usage is not None and case.message.requested is not None and not case.usage.spilled


# ---- memory that PyTorch's CUDA allocator does not manage


NO_WORKERS = ("DataLoader(…, num_workers=0)", "or fewer workers: each is a process with its own copy of the dataset's "
              "objects; `fitgpt train` has none")


def _in_worker(case: Case) -> bool:
    """Whether the message is about a process of a DataLoader."""
    return "dataloader" in case.message.text.lower() or any(
        frame.file.endswith(("dataloader.py", "popen_fork.py")) for frame in case.message.frames)


def _killed_advice(case: Case) -> Advice:
    text = case.message.text.lower()
    more = (("sbatch --mem=64G", "Slurm's limit for the job") if re.search("slurm|srun|out_of_memory", text) else
            ("resources.limits.memory", "in the pod's spec: the container's limit") if "oomkilled" in text else
            ("close other programs, or give the machine or the container more RAM", "the GPU is not involved"))
    found = (("dmesg | tail", "shows whether it was memory: `Out of memory: Killed process`"), more)
    return (NO_WORKERS, *found) if _in_worker(case) else (*found, NO_WORKERS)


@_rule("OOM-KILLED", "The system killed the process", only_cause=True,
       pattern="`Killed`, `died with <Signals.SIGKILL: 9>`, exit code 137 or -9, the kernel's `Out of memory: Killed "
               "process`, `oom_kill`, Slurm's `Out Of Memory`, Kubernetes' `OOMKilled`, Ray's `running low on memory`",
       background="Once RAM and swap are used up, Linux kills the process that holds most; containers and job "
                  "schedulers do it at their limit. Nothing is printed but `Killed`, or nothing at all.",
       advice=_killed_advice)
def _killed(case: Case) -> str | None:
    if case.message.kind != "killed":
        return None
    offloaded = case.run.forecast.host_bytes if case.run else 0
    offload = f" This config keeps {show_bytes(offloaded)} there (offload)." if offloaded else ""
    return f"The system killed the process (signal 9). Nearly always CPU RAM ran out, not GPU memory.{offload}"


def _ram_advice(case: Case) -> Advice:
    if case.message.source == "Windows":
        return (("let Windows manage the paging file's size, on a disk with free space",
                 "System > Advanced > Performance > Virtual memory"),)
    return (*((NO_WORKERS,) if _in_worker(case) else ()),
            ("close other programs, or load the data in chunks",
             "`fitgpt prepare` and `fitgpt train` read it chunk by chunk"),
            ("--offload=none", "if the optimizer was offloaded: that takes 16 bytes per parameter of CPU RAM"))


@_rule("OOM-CPU", "CPU RAM ran out", only_cause=True,
       pattern="`DefaultCPUAllocator`, `Unable to allocate … for an array`, `MemoryError`, `std::bad_alloc`, `The "
               "paging file is too small`, Colab's `using all available RAM`, Ollama's `requires more system memory`",
       background="The CPU allocator failed. On Windows every process that loads PyTorch's libraries reserves "
                  "gigabytes of paging file, whether it uses them or not.",
       advice=_ram_advice)
def _ram(case: Case) -> str | None:
    if case.message.kind != "ram":
        return None
    if case.message.source == "Windows":
        size = show_bytes(case.requested) if case.requested else "the RAM that a program requested while loading"
        return f"Windows could not commit {size}: RAM and paging file are too small. GPU memory is not involved."
    size = f" of {show_bytes(case.requested)}" if case.requested else ""
    return f"An allocation{size} in CPU RAM failed. GPU memory is not involved."


@_rule("OOM-MPS", "Apple's GPU reached its limit", only_cause=True,
       pattern="`MPS backend out of memory`, `Invalid buffer size`",
       background="The GPU shares the machine's memory, and PyTorch stops at a share of it. fitgpt forecasts CUDA GPUs "
                  "only.",
       advice=lambda case: () if "buffer size" in case.message.text.lower() else (
           ("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", "removes the limit; then the whole machine may run out"),),
       advice_without_plan=SMALLER_BATCH)
def _mps(case: Case) -> str | None:
    message = case.message
    if message.kind != "mps":
        return None
    if message.requested is not None and message.allocated is None:
        return (f"One tensor of {show_bytes(message.requested)} is larger than Metal allows for a buffer, which is at "
                "most a share of the machine's memory: often attention scores (batch × heads × tokens × tokens).")
    if message.allowed is None or message.allocated is None:
        return "PyTorch on Apple's GPU reached its limit, a share of the machine's memory."
    others = sum(size for _, size in message.others)
    return (f"PyTorch on Apple's GPU is limited to {show_bytes(message.allowed)} of the machine's memory; "
            f"{show_bytes(message.allocated)} are in tensors and {show_bytes(others)} in other allocations, so "
            f"{show_bytes(case.requested)} more do not fit.")


@_rule("OOM-CUBLAS", "A CUDA library found the GPU full", only_cause=True,
       pattern="`CUBLAS_STATUS_ALLOC_FAILED`, `CUDNN_STATUS_ALLOC_FAILED`, or `…_NOT_INITIALIZED` when a handle is "
               "created; `CUDNN_STATUS_INTERNAL_ERROR`, `Unable to find a valid cuDNN algorithm`",
       background="cuBLAS and cuDNN take some MiB from the driver at their first use. If PyTorch's allocator or "
                  "another process holds the rest of the GPU, they fail with a code and no figures. An index out of "
                  "range in an earlier kernel can end in the same code.",
       advice=(LIST_PROCESSES, ("{synchronous}", "if the GPU has free memory: shows the kernel that failed")),
       advice_without_plan=SMALLER_BATCH)
def _library(case: Case) -> str | None:
    if case.message.kind != "library":
        return None
    if "ALLOC_FAILED" not in case.message.text:
        failed = "could not be initialized" if "NOT_INITIALIZED" in case.message.text else "failed"
        return (f"{case.message.source} {failed}. Most often it found no free memory: it asks the driver, not "
                "PyTorch's allocator, so there are no figures. Otherwise it does not match the driver, or an earlier "
                "kernel failed.")
    return (f"{case.message.source} found no memory for itself. It asks the driver, not PyTorch's allocator, so there "
            "are no figures: the GPU was full, or nearly full, at its first use.")


def _driver_advice(case: Case) -> Advice:
    if "THC" in case.message.text:
        return (LIST_PROCESSES,)
    frames = case.message.frames
    if any("vllm" in frame.file for frame in frames):
        return (("--gpu-memory-utilization 0.8", "vLLM: leaves memory outside its share, for CUDA graphs and contexts"),
                ("--enforce-eager", "no CUDA graphs"), LIST_PROCESSES)
    if any("distributed" in frame.file for frame in frames):
        return (SET_DEVICE, LIST_PROCESSES)
    pinned = (("DataLoader(…, pin_memory=False)", "DeepSpeed: \"pin_memory\": false; slower copies to the GPU"),
              ("memory=24GB in .wslconfig, then wsl --shutdown", "on WSL, which limits pinned memory"))
    if any("pin_memory" in f"{frame.function} {frame.code}" for frame in frames):
        return pinned
    return (*((MAP_LOCATION,) if reads_checkpoint(frames) else ()), LIST_PROCESSES, *pinned)


@_rule("OOM-DRIVER", "The driver is out of memory, without figures", only_cause=True,
       pattern="`CUDA error: out of memory`, `cuda runtime error (2)`, `CUDA_ERROR_OUT_OF_MEMORY`, `Triton Error "
               "[CUDA]: out of memory`, `THCudaCheck FAIL … out of memory`",
       background="Not PyTorch's allocator but the driver itself: when a context is created on a GPU that other "
                  "processes have filled; for kernels; or for pinned memory, which WSL limits to a share of its RAM.",
       advice=_driver_advice,
       advice_without_plan=SMALLER_BATCH)
def _driver(case: Case) -> str | None:
    if case.message.kind != "driver":
        return None
    if "THC" in case.message.text:
        return "PyTorch before 1.0 found no GPU memory for a tensor. It prints no figures."
    return ("The driver found no memory for an allocation outside PyTorch's allocator: a context, a kernel or pinned "
            "memory. So there are no figures, and the traceback may not show the line that requested it.")


SET_DEVICE = ("torch.cuda.set_device(local_rank)",
              "before the first CUDA call of each rank: otherwise every rank also creates a context on GPU 0")
FEWER_COMMUNICATORS: Advice = (
    ("NCCL_MAX_NCHANNELS=4", "fewer channels: NCCL's buffers grow with channels and peers; may cost bandwidth"),
    ("fewer process groups", "each NCCL communicator allocates its own buffers"))

_rule_of_kind(
    "nccl", "OOM-NCCL", "NCCL found no GPU memory",
    "NCCL found no memory for its buffers. It asks the driver, not PyTorch's allocator, so there are no figures: "
    "tensors and PyTorch's cached memory had filled the GPU. A communicator takes 0.5 to several GiB, more with more "
    "ranks.",
    pattern="NCCL's `Cuda failure 'out of memory'`, `Failed to CUDA calloc`",
    background="NCCL allocates at the first collective of each process group, after PyTorch's allocator has reserved "
               "most of the GPU. Measured for one communicator: 544 MB with 2 ranks, 688 MB with more "
               "(github.com/NVIDIA/nccl/issues/964). NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ALLOC prints each allocation.",
    advice=(("torch.cuda.set_per_process_memory_fraction(0.9)", "leaves a tenth of the GPU to NCCL and the context"),
            SET_DEVICE, *FEWER_COMMUNICATORS),
    advice_without_plan=SMALLER_BATCH)

_rule_of_kind(
    "two ranks on one gpu", "RANKS-ONE-GPU", "Two ranks on one GPU",
    "NCCL does not allow it: every rank needs a GPU of its own, and two of them use the same one.",
    pattern="NCCL's `Duplicate GPU detected : rank … and rank … both on CUDA device …`",
    background="Ranks that do not call set_device all use GPU 0. More ranks than GPUs, or CUDA_VISIBLE_DEVICES with a "
               "single GPU for all ranks, have the same effect. `fitgpt train` chooses the GPU by LOCAL_RANK.",
    advice=(("torchrun --nproc-per-node=gpu", "as many ranks as there are GPUs; or fitgpt train --gpus=all"),
            SET_DEVICE, ("fitgpt doctor", "shows which rank gets which GPU")))
_rule_of_kind(
    "port", "RANKS-PORT", "The port of rank 0 is in use",
    "Rank 0 cannot listen on MASTER_PORT: another program does, often an earlier run that has not ended.",
    pattern="`EADDRINUSE`, `address already in use`",
    background="torchrun's default is 29500, so two runs on one machine collide. `fitgpt train --gpus` takes a free "
               "port.",
    advice=(("torchrun --standalone …", "takes a free port; on one machine"),
            ("torchrun --master-port=29511 …", "another port, the same on all machines"),
            ("ss -ltnp | grep 29500", "shows which program has it")))
_rule_of_kind(
    "collective timeout", "RANKS-TIMEOUT", "A rank waited too long for the others",
    "A collective did not complete in time: another rank never reached it. It ran out of memory, died, or took another "
    "path, an evaluation for example. The cause is in that rank's own output, usually earlier.",
    pattern="`Watchdog caught collective operation timeout`, gloo's `Timed out waiting … for recv operation`",
    background="Catching an out-of-memory error on one rank and continuing leaves the others in their collective. "
               "`fitgpt train` exchanges a status before each collective, so that all ranks retry together.",
    advice=(("the output of every rank: torchrun --redirects=3 --log-dir=logs …", "one file per rank"),
            ("NCCL_DEBUG=INFO", "shows where a connection is stuck"), LIST_PROCESSES))
_rule_of_kind(
    "lost rank", "RANKS-LOST", "Another rank has ended",
    "The connection to another rank was closed: that rank ended first, and its own output says why.",
    pattern="`ncclRemoteError`, `Connection closed by peer`, `Connection closed by remote peer`",
    background="Most often the system killed that rank for its CPU RAM, or it ran out of GPU memory. All ranks of a "
               "node load torch and read a checkpoint at once.",
    advice=(("dmesg | tail", "shows whether the system killed a process"),
            ("fitgpt train --resume --out_dir=…", "continues from the last checkpoint"),
            ("torchrun --max-restarts=3 …", "restarts all ranks; `fitgpt train` then resumes")))
_rule_of_kind(
    "nccl error", "RANKS-NCCL", "NCCL reported an error",
    "NCCL could not set up or use a connection between GPUs. It is not PyTorch's allocator, and the message does not "
    "say whether memory was the reason.",
    pattern="`ncclSystemError`, `ncclUnhandledCudaError`, `ncclInternalError`, `ncclInvalidUsage`",
    background="System error: network interface or shared memory (/dev/shm). Unhandled CUDA error: often a full GPU, "
               "or a driver that does not match. Invalid usage: usually two ranks on one GPU.",
    advice=(("NCCL_DEBUG=INFO", "prints the reason, a line with WARN before the error"), LIST_PROCESSES,
            ("NCCL_SOCKET_IFNAME=eth0", "the network interface, if there are several"),
            ("docker run --shm-size=1g", "in a container: NCCL uses /dev/shm"),
            ("fitgpt train … --backend=gloo", "without NCCL: slower, and tells whether NCCL is the cause")))

_rule_of_kind(
    "unsloth", "OOM-UNSLOTH", "Unsloth found no free GPU memory",
    "Unsloth's fused cross entropy asks the driver how much GPU memory is free, to choose the size of its chunks, and "
    "found next to none: the model, its optimizer state and PyTorch's cached memory fill the GPU.",
    pattern="`No or negligible GPU memory available for fused cross entropy`",
    background="The memory may be cached by PyTorch and not free for the driver, after an evaluation for example.",
    advice=(("torch.cuda.empty_cache()", "before the step that fails: returns cached memory to the driver"),
            LIST_PROCESSES),
    advice_without_plan=SMALLER_BATCH)

_rule_of_kind(
    "no batch", "OOM-NO-BATCH-SIZE", "Memory ran out with every batch size",
    "accelerate (auto_find_batch_size) reduces the batch after each out-of-memory error, and memory ran out with one "
    "sequence too. Weights, gradients and optimizer state are too large for the GPU, or one sequence is too long.",
    pattern="`No executable batch size found, reached zero`",
    background="The message of each failed attempt has the figures; accelerate does not print it. "
               "`auto_find_batch_size=False` shows the first one.",
    advice=(LIST_PROCESSES, ("truncate long sequences", "activations and logits grow with the longest one"),
            ("gradient_checkpointing=True", "in TrainingArguments: keeps one activation per layer; exact, slower")),
    advice_without_plan=(("optim=\"adamw_bnb_8bit\", or LoRA", "smaller optimizer state; lossy"),))


def _shared_memory_advice(case: Case) -> Advice:
    no_workers = ("DataLoader(…, num_workers=0)", "uses no shared memory, and is slower; `fitgpt train` has no workers")
    if "mmap" in case.message.text:  # more mappings than Linux allows, or no RAM
        return (no_workers, ("sudo sysctl -w vm.max_map_count=262144", "if each tensor is small: more mappings"))
    return (("docker run --shm-size=8g", "or --ipc=host: a larger /dev/shm for the container"), no_workers,
            ("sudo mount -o remount,size=8G /dev/shm", "outside a container"))


# One sentence for memory that fitgpt does not forecast.
_rule_of_kind(
    "shm", "OOM-SHM", "Shared memory of data loader workers ran out (/dev/shm), not GPU memory",
    "DataLoader workers pass batches to the training process through /dev/shm, a part of CPU RAM that containers limit "
    "to 64 MiB by default. GPU memory is not involved.",
    pattern="`DataLoader worker … Bus error`, `insufficient shared memory (shm)`, `unable to write to file "
            "</torch_…>`, `No space left on device` for /dev/shm",
    background="`df -h /dev/shm` shows its size and use. NCCL uses it too. `Too many open files` is another limit: "
               "`ulimit -n`.",
    advice=_shared_memory_advice)
_rule_of_kind(
    "compiler", "OOM-COMPILER", "A compiler was killed: CPU RAM ran out, not GPU memory",
    "A compiler (nvcc, cc1plus) was killed while it built an extension: several of them together need more CPU RAM "
    "than there is. GPU memory is not involved.",
    pattern="`Killed signal terminated program cc1plus`, `'cicc' died due to signal 9`, `internal compiler error: "
            "Killed`",
    background="Builds of flash-attn, xformers or vLLM start one compiler per core, each with several GiB.",
    advice=(("MAX_JOBS=2 pip install …", "compiles two files at a time"),))
_rule_of_kind(
    "triton", "OOM-TRITON", "A Triton kernel needs more shared memory than the GPU has per multiprocessor",
    "A Triton kernel needs more of a multiprocessor's shared memory, about 100 to 228 KiB, than this GPU has. That is "
    "the kernel's block size, not the GPU's memory: batch size and other processes do not matter.",
    pattern="`out of resource: shared memory, Required: …, Hardware limit: …`",
    background="Kernels tuned for an A100 or H100 ask for more than consumer GPUs have.",
    advice=(("smaller block sizes or num_stages in the kernel", "or a version of the library for this GPU"),
            ("torch.compile(…) without mode=\"max-autotune\"", "if torch.compile generated the kernel")))
_rule_of_kind(
    "jax", "OOM-JAX", "JAX ran out of GPU memory",
    "JAX's own allocator (XLA) ran out, not PyTorch's. It takes 75 % of the GPU at its start, and fitgpt does not "
    "forecast JAX programs.",
    pattern="`RESOURCE_EXHAUSTED: Out of memory`",
    background="Beside a PyTorch process on the same GPU, that first allocation is usually the cause.",
    advice=(("XLA_PYTHON_CLIENT_PREALLOCATE=false", "JAX takes memory as it needs it"),
            ("XLA_PYTHON_CLIENT_MEM_FRACTION=.5", "or takes another share at its start"), LIST_PROCESSES))
_rule_of_kind(
    "tensorflow", "OOM-TENSORFLOW", "TensorFlow ran out of GPU memory",
    "TensorFlow's own allocator (BFC) ran out, not PyTorch's. It takes nearly the whole GPU at its start, and fitgpt "
    "does not forecast TensorFlow programs.",
    pattern="`OOM when allocating tensor`, `ResourceExhaustedError`, `bfc_allocator.cc`",
    background="Two TensorFlow processes on one GPU fail this way even if both are small.",
    advice=(("TF_FORCE_GPU_ALLOW_GROWTH=true", "TensorFlow takes memory as it needs it"), LIST_PROCESSES,
            ("a smaller batch", "the usual change, if this process has the GPU alone")))


@_rule("OOM-OTHER-LIBRARY", "Another library ran out of GPU memory", only_cause=True,
       pattern="`cudaMalloc failed: out of memory` of llama.cpp (ggml), `cupy.cuda.memory.OutOfMemoryError`, ONNX "
               "Runtime's `BFCArena`, TensorRT's `OutOfMemory`, Paddle's `Out of memory error on GPU`, Vulkan's "
               "`ErrorOutOfDeviceMemory`",
       background="PyTorch's figures do not contain its memory. `torch.cuda.empty_cache()` returns what PyTorch keeps "
                  "in the same process.",
       advice=(LIST_PROCESSES, ("a smaller model, batch or context", "or fewer layers on the GPU (llama.cpp: -ngl)")))
def _other_library(case: Case) -> str | None:
    if case.message.kind != "other library":
        return None
    return (f"{case.message.source} ran out of GPU memory. It does not use PyTorch's allocator, and fitgpt does not "
            "forecast it.")


_rule_of_kind(
    "metal", "OOM-METAL", "Apple's GPU (Metal, MLX) ran out of memory",
    "Metal found no memory for a command buffer or an array. Apple's GPU shares the machine's RAM and may use about "
    "two thirds to three quarters of it; fitgpt does not forecast MLX programs.",
    pattern="`kIOGPUCommandBufferCallbackErrorOutOfMemory`, `[metal::malloc]`, `[malloc_or_wait] Unable to allocate`",
    background="For PyTorch on Apple's GPU see OOM-MPS.",
    advice=(("close other programs", "they use the same RAM"),
            ("a smaller batch, a shorter context, or gradient checkpointing", "mlx_lm.lora has --grad-checkpoint"),
            ("sudo sysctl iogpu.wired_limit_mb=…", "raises the GPU's share until the next start; leave macOS some "
             "GiB")))


def _server_advice(case: Case) -> Advice:
    text = case.message.text.lower()
    if "desired" in text:  # it wants a share that others hold
        return (LIST_PROCESSES, ("--gpu-memory-utilization 0.6", "a smaller share, below the message's free / total"))
    if "mem-fraction-static" in text:
        return (("--mem-fraction-static 0.9", "a larger share for weights and KV cache"),
                ("--context-length 4096", "a shorter context needs a smaller cache"), LIST_PROCESSES)
    return (("--gpu-memory-utilization 0.95", "a larger share, if other processes leave it"),
            ("--max-model-len 4096", "a shorter context needs a smaller cache"),
            ("--enforce-eager", "no CUDA graphs, which take some GiB"), LIST_PROCESSES)


_rule_of_kind(
    "vllm", "OOM-VLLM", "An inference server found no GPU memory for its KV cache",
    "vLLM and SGLang reserve a share of the GPU (gpu_memory_utilization, mem-fraction-static), load the model into it "
    "and give the rest to the KV cache; nothing was left, or other processes hold part of that share. fitgpt forecasts "
    "training, not inference.",
    pattern="`No available memory for the cache blocks`, `less than desired GPU memory utilization`, `Please try to "
            "increase --mem-fraction-static`",
    background="The model's weights count against the same share: 2 bytes per parameter in half precision.",
    advice=_server_advice)
_rule_of_kind(
    "device map", "OOM-DEVICE-MAP", "The quantized model does not fit in the free GPU memory",
    "transformers (device_map=\"auto\") placed part of the model in CPU RAM or on disk, because the free GPU memory is "
    "too small for all of it, and bitsandbytes does not run there. Nothing was allocated yet.",
    pattern="`Some modules are dispatched on the CPU or the disk`",
    background="accelerate counts the memory that is free when the model is loaded, and keeps a tenth for buffers.",
    advice=(LIST_PROCESSES, ("BitsAndBytesConfig(load_in_4bit=True)", "half of the memory of 8 bits; lossy"),
            ("BitsAndBytesConfig(llm_int8_enable_fp32_cpu_offload=True)", "runs that part on the CPU, slowly")))


# ---- phases in which the batch does not matter: named before the figures, unless other processes decide


def _without_neighbours(case: Case) -> bool:
    return not (_has_neighbours(case) and _neighbours_decide(case))


@_rule("OOM-SAVE", "While a checkpoint was saved",
       pattern="the traceback passes through `state_dict()`, `torch.save`, `save_pretrained` or FSDP's save",
       background="FSDP's full state dict gathers all parameters on one GPU, and their optimizer state too if that is "
                  "saved: 4 to 12 bytes per parameter that training never needs at once.",
       advice=(("FullStateDictConfig(offload_to_cpu=True, rank0_only=True)",
                "FSDP: gathers one layer at a time into CPU RAM; or save a sharded state dict, "
                "StateDictType.SHARDED_STATE_DICT, torch.distributed.checkpoint"),
               ("copy the state dict to the CPU tensor by tensor, then torch.save",
                "on one GPU, if the program copies or converts it before it saves"),
               ("torch.cuda.empty_cache()", "before the save: returns cached memory of training")),
       decides=_without_neighbours)
def _save(case: Case) -> str | None:
    if case.phase != "save":
        return None
    return ("Memory ran out while a checkpoint was saved: the state dict was gathered or copied on the GPU. "
            "Activations are not allocated then, so the batch size does not change it.")


@_rule("OOM-EVAL-LOGITS", "Evaluation keeps the logits of all batches",
       pattern="the traceback is at `torch.cat((preds, logits))`, `nested_concat(preds_host, logits)`",
       background="transformers' Trainer joins the logits of the whole evaluation for compute_metrics, by default on "
                  "the GPU: 4 bytes × sequences × tokens × vocabulary.",
       advice=(("eval_accumulation_steps=1", "in TrainingArguments: moves them to CPU RAM after each batch"),
               ("prediction_loss_only=True", "in TrainingArguments: keeps none, if the loss is enough"),
               ("preprocess_logits_for_metrics=…", "an argument of Trainer, a function that returns logits.argmax(-1): "
                "keeps one number per token")),
       decides=_without_neighbours)
def _eval_logits(case: Case) -> str | None:
    if not keeps_all_logits(case.message.frames):
        return None
    return ("The evaluation keeps the logits of all its batches on the GPU, and joins them into one tensor. They grow "
            "with the number of sequences evaluated; a smaller batch does not change that.")


@_rule("OOM-OPTIMIZER-FIRST-STEP", "In the optimizer step",
       pattern="the traceback is in torch/optim, or quotes `exp_avg`; or the forecast's allocation belongs to the "
               "optimizer",
       background="Forward and backward can succeed and the first step still fail: the moments are created there and "
                  "stay allocated.",
       advice_without_plan=lambda case: SMALLER_STATE if creates_state(case.message.frames) else (
           ("torch.optim.AdamW(…, fused=True)", "steps in place, without copies; nanoGPT and fitgpt do"),
           *SMALLER_STATE), decides=_without_neighbours)
def _optimizer_first_step(case: Case) -> str | None:
    if case.phase != "step" and (case.owner != "optimizer" or case.tape_phase == "load"):
        return None
    here = f" ({show_bytes(8 * case.run.forecast.params)} here)" if case.run else ""
    return (f"The optimizer step requested it. AdamW creates its two moments, 8 bytes per parameter{here}, in the "
            "first step; and its foreach implementation, the default, copies them again during each step. Forward and "
            "backward passes before the step do not show that.")


# ---- the figures of the message


NEARLY_ALL = 0.95  # of a GPU; context and weights take more than the rest
LARGEST_TENSOR = 80 * GiB  # where the message does not contain the GPU's total


@_rule("OOM-LARGER-THAN-CARD", "One tensor larger than the GPU",
       pattern="the requested size is larger than the GPU's total capacity, or nearly as large; without that figure, "
               "larger than 80 GiB; `Tried to allocate more than 1EB memory`",
       background="Usually the logits of a very large batch, or attention scores (batch × heads × block × block) "
                  "without fused attention. Where a GPU shares the machine's RAM, the total is a setting of the BIOS "
                  "or the driver.",
       advice=lambda case: ((("the traceback above the message", "shows the line that computed the size"),)
                            if case.requested == MORE_THAN_1EB else ()),
       advice_without_plan=lambda case: () if case.requested == MORE_THAN_1EB else SMALLER_BATCH)
def _larger_than_card(case: Case) -> str | None:
    if case.requested == MORE_THAN_1EB:
        return ("No tensor has this size: it was computed wrongly, from a negative or undefined number of elements for "
                "example. Freeing memory cannot help.")
    if case.message.total is None and case.requested > LARGEST_TENSOR:
        return (f"One tensor of {show_bytes(case.requested)} is larger than most GPUs: the request itself is too "
                "large, whatever else the GPU holds.")
    total, size = case.message.total, f"One tensor of {show_bytes(case.requested)} is"
    if total is None or (case.usage is not None and case.usage.spilled):
        return None
    if case.requested > total:
        return f"{size} larger than the whole GPU, {show_bytes(total)}: freeing other memory cannot help."
    if case.usage is None or case.requested <= max(NEARLY_ALL * total, case.usage.free):
        return None
    return (f"{size} nearly the whole GPU, {show_bytes(total)}. No run can have that much beside its context and its "
            "weights: the request itself is too large, whatever else the GPU holds.")


SPILL_ADVICE: Advice = (("NVIDIA Control Panel > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback",
                         "fails at once instead of becoming slow"),)


@_rule("OOM-SPILL", "More reserved than the GPU has",
       pattern="PyTorch reserved more than the GPU's total capacity; or Task Manager shows 1 GB or more of shared GPU "
               "memory",
       background="Windows drivers move what does not fit into CPU RAM instead of failing. Steps become slow first; "
                  "the message appears when RAM is full too.",
       advice=SPILL_ADVICE,
       advice_without_plan=SMALLER_BATCH)
def _spill(case: Case) -> str | None:
    reserved, total = case.message.reserved, case.message.total
    if reserved is None or total is None or reserved <= total:
        return None
    return (f"PyTorch has reserved {show_bytes(reserved)} on a GPU of {show_bytes(total)}: the Windows "
            "driver (in WSL too) moved the rest into CPU RAM, over the bus. A run that continues like this is many "
            "times slower.")


def _is_limited(case: Case) -> bool:
    """Whether the limit of the process, not the GPU, made the allocation fail."""
    allowed, total, free = case.message.allowed, case.message.total, case.message.free
    return allowed is not None and (total is None or allowed < total) and (free is None or case.requested <= free)


@_rule("OOM-CAP", "A memory limit that the process has set",
       pattern="`… allowed;` in the message, less than the GPU's total, and more memory free than requested",
       background="The allocator fails at the limit although the GPU has free memory. The limit counts segments, not "
                  "the context.",
       advice=(("torch.cuda.set_per_process_memory_fraction(1.0)", "removes the limit; or omit the call"),),
       advice_without_plan=SMALLER_BATCH)
def _process_limit(case: Case) -> str | None:
    if not _is_limited(case):
        return None
    reserved = (case.usage.reserved if case.usage else None) or 0
    free = f" The GPU itself has {show_bytes(case.usage.free)} free." if case.usage else ""
    return (f"The process is limited to {show_bytes(case.message.allowed or 0)} (set_per_process_memory_fraction, or "
            f"the allocator's environment) and has reserved {show_bytes(reserved)} of it.{free}")


RANKS_ADVICE: Advice = (SET_DEVICE, MAP_LOCATION)


@_rule("OOM-RANKS", "Contexts of other ranks on this GPU",
       pattern="two or more other processes hold nearly the same, 150 to 800 MiB each, as nvidia-smi or the message "
               "lists them",
       background="A CUDA context takes a few hundred MiB on each GPU that a process touches. Without set_device every "
                  "rank touches GPU 0, when it loads a checkpoint without map_location for example.",
       advice=RANKS_ADVICE,
       decides=lambda case: case.usage is not None and sum(
           size for _, size in rank_contexts(case.usage.pids)) >= case.missing)
def _ranks(case: Case) -> str | None:
    contexts = rank_contexts(case.usage.pids) if case.usage is not None else []
    return describe_rank_contexts(contexts) if contexts and case.missing else None


# Unallocated memory that covers what is missing is the cause if it is this share of the reserved memory; or this many
# times what is missing, and not just what a full GPU always has between its blocks. Otherwise it is a second cause.
FRAGMENTED_SHARE, FRAGMENTED_TIMES, LEAST_FRAGMENTED = 0.1, 4, GiB // 2


def _fragmentation_decides(case: Case) -> bool:
    """By a replay with expandable segments if there is a plan, else by the figures."""
    if case.plan is not None and case.run is not None:
        limit = case.plan.budget.reserve_limit
        return not case.run.expandable and replay(case.run.tape, limit, expandable=True).failed is None
    unallocated, reserved = (case.usage.unallocated or 0, case.usage.reserved or 0) if case.usage else (0, 0)
    return unallocated >= min(FRAGMENTED_SHARE * reserved, max(FRAGMENTED_TIMES * case.missing, LEAST_FRAGMENTED))


EXPANDABLE_SEGMENTS = ("{alloc_conf}=expandable_segments:True",
                       "avoids fragmentation: segments grow as needed; not on Windows. `fitgpt train` sets it")


def _fragmented_advice(case: Case) -> Advice:
    if case.plan is not None:
        return ()  # the forecast with expandable segments is among the changes of the run
    if case.message.source == OLD_PYTORCH and case.vendor == "nvidia":
        return (("PyTorch 2.2 or later", "has expandable_segments, which avoid this fragmentation"),)
    if case.message.source == BEFORE_EXPANDABLE and case.vendor == "nvidia":
        return (("PyTorch 2.2, then PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                 "avoids fragmentation; not on Windows. The message is from an earlier PyTorch, which does not know "
                 "this setting"),
                ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128", "without an update: large segments are not split for "
                 "smaller tensors; this does not always help"))
    if case.message.source == CUDA_MALLOC_ASYNC:
        return (("PYTORCH_CUDA_ALLOC_CONF=backend:native,expandable_segments:True",
                 "PyTorch's own allocator, which says in its message who holds the memory"), LIST_PROCESSES)
    return (EXPANDABLE_SEGMENTS,)


@_rule("OOM-FRAGMENTED", "Fragmentation",
       pattern="`reserved but unallocated` (or `cached`) is at least the missing amount. It is named first if it is a "
               "tenth of the reserved memory, or four times the missing amount and 512 MiB",
       background="PyTorch keeps freed memory in segments, split as earlier tensors needed it; a segment with one live "
                  "tensor in it cannot be released. Varying sizes, and evaluation between training steps, cause most "
                  "fragmentation.",
       advice=_fragmented_advice, advice_without_plan=SMALLER_BATCH, decides=_fragmentation_decides)
def _fragmented(case: Case) -> str | None:
    usage = case.usage
    if usage is None or usage.unallocated is None or not _has_figures(case):
        return None
    if not 0 < case.missing <= usage.unallocated:
        return None
    if case.message.source == CUDA_MALLOC_ASYNC:
        return (f"Fragmentation, or other processes: about {show_bytes(usage.unallocated)} are neither free nor in "
                "tensors of this process. cudaMallocAsync keeps freed memory, and its message does not say how much.")
    text = (f"Fragmentation: {show_bytes(usage.unallocated)} are reserved by PyTorch but unallocated, and "
            f"{show_bytes(usage.free)} were free. Together they are more than the {show_bytes(case.requested)} "
            "requested, but not contiguous.")
    if case.plan is None or case.run is None:
        return text if _fragmentation_decides(case) else f"{text} A full GPU always has some of it."
    if case.run.expandable:
        return text
    fits = "fit" if _fragmentation_decides(case) else "still not fit"
    return f"{text} With expandable_segments the run would {fits}."


NEIGHBOUR_SHARE = 0.1  # of the GPU; a desktop takes less
NEIGHBOUR_SHARE_ALONE = 0.45  # if the requested size is not known


def _has_neighbours(case: Case) -> bool:
    """Whether other processes hold at least what is missing; nearly half of the GPU if the message does not say how
    much that is."""
    usage = case.usage
    if usage is None or usage.spilled or (case.message.requested is not None and case.missing == 0):
        return False
    share = NEIGHBOUR_SHARE if case.message.requested is not None else NEIGHBOUR_SHARE_ALONE
    return usage.others_at_least >= max(case.missing, share * usage.total)


def _neighbours_decide(case: Case) -> bool:
    return case.plan is None or case.usage is None or case.plan.headroom + case.usage.others_at_least >= 0


def _neighbour_advice(case: Case) -> Advice:
    largest = sorted(case.usage.pids if case.usage else (), key=lambda each: -each[1])[:1]
    return (LIST_PROCESSES,
            *((f"kill {pid}", f"frees {show_bytes(size)}, if it is yours and not needed") for pid, size in largest))


@_rule("OOM-NEIGHBOUR", "Other processes hold the GPU's memory",
       pattern="other processes hold at least the missing amount, and a tenth of the GPU",
       background="Another training run, a notebook that was never closed, a desktop with its browser. nvidia-smi "
                  "counts a process's context with it. Messages before PyTorch 2.1 do not list processes: memory that "
                  "is neither free nor reserved by PyTorch belongs to them, except for this process's context.",
       advice=_neighbour_advice, advice_without_plan=SMALLER_BATCH, decides=_neighbours_decide)
def _neighbour(case: Case) -> str | None:
    usage = case.usage
    if usage is None or not _has_neighbours(case):
        return None
    if usage.others is None:
        who = (f"{show_bytes(usage.not_pytorch)} of the GPU are neither free nor reserved by PyTorch. This process's "
               f"own context takes at most about {show_bytes(MAX_OUTSIDE)} of that; other processes hold the rest.")
    else:
        who = f"Other processes hold {show_bytes(usage.others)} of the GPU."
    if case.message.requested is None:
        return f"{who} The message does not say how much was requested."
    if case.plan is None:
        return f"{who} Without them the {show_bytes(case.requested)} would have been free."
    return f"{who} Without them the run would {'fit' if _neighbours_decide(case) else 'still not fit'}."


@_rule("OOM-ONE-RANK", "One rank of several",
       pattern="the line with `out of memory` names a rank: `[rank1]:`, `rank 1: …`",
       background="Ranks hold the same tensors, but their GPUs need not have the same memory free: a desktop, another "
                  "program, or contexts of other ranks on GPU 0. With an uneven share of data, one rank has longer "
                  "sequences.",
       advice=(LIST_PROCESSES,), decides=lambda case: False)
def _one_rank(case: Case) -> str | None:
    rank = case.message.rank
    if rank is None:
        return None
    return (f"Rank {rank} ran out of memory. All ranks hold the same tensors, so either its GPU had less free than the "
            "others', or they are as nearly full. What other ranks report after it (timeouts, closed connections) "
            "follows from it.")


def had_free_memory(case: Case) -> bool:
    return _has_figures(case) and not _is_limited(case) and case.missing == 0


@_rule("OOM-ROOM", "Failed although enough memory was free",
       pattern="more memory free than requested, and no limit",
       background="`free` is read after the failure. Several ranks on one GPU, a program that starts at the same time, "
                  "a driver that cannot map a large allocation (WSL), or a limit outside PyTorch cause this. Windows "
                  "backs each allocation of a GPU with RAM or paging file, and fails when these are used up.",
       advice=(("{watch_processes}", "while it starts, shows whether another process uses this GPU for a moment"),
               ("{select_gpu}", "and another number for each further process: every rank needs its own GPU"),
               ("a larger paging file", "on Windows, where CPU RAM may have run out")))
def _room(case: Case) -> str | None:
    if case.usage is None or not had_free_memory(case):
        return None
    return (f"{show_bytes(case.usage.free)} were free when the message was written, more than the "
            f"{show_bytes(case.requested)} requested. A moment before, they were not free or not available: another "
            "process (a second rank on the same GPU, for example) took memory and freed it again, or the driver could "
            "not map the allocation.")


# ---- what the run was doing, by its traceback or by the forecast of its config


@_rule("OOM-STATES", "Weights, gradients and optimizer state alone are too large",
       pattern="with the config: 16 bytes per parameter are more than PyTorch could reserve",
       background="float32 weights, gradients and AdamW's two moments: 4 + 4 + 8 bytes per parameter, for any batch "
                  "size.",
       advice_without_plan=SMALLER_STATE)
def _states(case: Case) -> str | None:
    if case.run is None or case.plan is None or case.plan.headroom >= 0:
        return None
    config, params, limit = case.run.config, case.run.forecast.params, case.plan.budget.reserve_limit
    default = case.is_nanogpt or (config.optimizer, config.offload, config.weights) == ("adamw", "none", "float32")
    if not default or 16 * params <= limit:
        return None
    return (f"Weights, gradients and AdamW's moments take 16 bytes per parameter: {show_bytes(16 * params)} for "
            f"{show_count(params)} parameters, and PyTorch could reserve {show_bytes(limit)}. No smaller batch makes "
            "the run fit.")


@_rule("OOM-EXPERTS-16-BITS", "Experts that bitsandbytes leaves in 16 bits",
       pattern="the text shows weights in 4 or 8 bits (`load_in_4bit=True`, `qlora`, `Linear4bit`), and experts of "
               "transformers 5 (`integrations/moe.py`, `grouped_mm`, `experts.gate_up_proj`)",
       background="transformers 5 keeps the experts of a layer in one parameter of three dimensions, and bitsandbytes "
                  "replaces nn.Linear only, without a warning: of Gemma 4 26B-A4B, 46 GB instead of 14 GB are loaded "
                  "([unsloth#5344](https://github.com/unslothai/unsloth/issues/5344), "
                  "[bitsandbytes#1849](https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849)). "
                  "`fitgpt trace` of the script shows how much of the weights the experts are.",
       advice=(("from bitsandbytes.nn.parametrize import replace_parameter_4bit",
                "replace_parameter_4bit(experts, \"gate_up_proj\"), and \"down_proj\", for the experts of one layer "
                "after the other, as each comes to the GPU; lossy"),
               ("quantize_moe_experts: true", "in a config of axolotl: quantizes the experts while they are loaded"),
               ("pip install -U unsloth unsloth_zoo", "if Unsloth loads the model: later versions quantize experts")),
       decides=_without_neighbours)
def _experts_in_16_bits(case: Case) -> str | None:
    if not case.message.unquantized_experts:
        return None
    return ("The model is loaded in 4 or 8 bits, and its experts are not: bitsandbytes quantizes nn.Linear, and these "
            "experts are parameters of three dimensions. They are nearly all weights of such a model, and take 2 bytes "
            "per parameter instead of about half a byte in 4 bits.")


@_rule("OOM-AT-LOAD", "While the model was loaded",
       pattern="the traceback ends in `.to(device)`, `.cuda()` or in loading weights; or the forecast's phase is load",
       background="A float32 model takes 4 bytes per parameter; a checkpoint loaded directly to the GPU takes as much "
                  "again.",
       advice=lambda case: ((MAP_LOCATION,) if reads_checkpoint(case.message.frames) else ()) + (LIST_PROCESSES,),
       advice_without_plan=(("fitgpt train … --weights=bfloat16", "2 bytes per weight instead of 4; lossy"),))
def _at_load(case: Case) -> str | None:
    if case.tape_phase != "load":
        return None
    if reads_checkpoint(case.message.frames):
        return ("Memory ran out while a checkpoint was read to the GPU, beside the model and the optimizer that are to "
                "take its values: without map_location its tensors go where they were when it was saved.")
    return ("Memory ran out while the model was loaded to the GPU, before any batch: only weights are allocated then, "
            "and the batch size does not change them.")


@_rule("OOM-EVAL", "In evaluation",
       pattern="the traceback passes through `estimate_loss` or `evaluate`; or the forecast's phase is an evaluation",
       background="Evaluation allocates less than training with the same batch. It fails if it runs first, before any "
                  "step, or after training has fragmented the allocator's memory.",
       advice_without_plan=(("fitgpt train … --eval_batch_size=4", "evaluates 4 sequences at once, with the same loss; "
                             "nanoGPT's train.py has no such option"),))
def _eval(case: Case) -> str | None:
    if not case.tape_phase.endswith("eval"):
        return None
    later = ", while the last `logits` of training are still allocated" if case.tape_phase == "eval" else ""
    nanogpt = f" nanoGPT evaluates with the batch and block size of training{later}." if case.is_nanogpt else ""
    return ("Memory ran out in evaluation. It keeps no graph and no gradients: besides the model it allocates the "
            f"logits of its batch and what the loss computes from them.{nanogpt}")


@_rule("OOM-LOGITS", "The logits",
       pattern="with the config: the size is that of a tensor of the loss, batch × block × vocabulary × 2 or 4 bytes",
       background="GPT-2's vocabulary has 50,257 entries, 50,304 with padding. In float32, for 16 × 1024 tokens, "
                  "logits take 3.07 GiB, and PyTorch's loss allocates 12 bytes per logit at its peak. fitgpt computes "
                  "the loss in chunks of a few thousand tokens.",
       advice_without_plan=SMALLER_BATCH)
def _logits(case: Case) -> str | None:
    if case.owner != "logits" or case.run is None:
        return None
    forecast = case.run.forecast
    nbytes = sum(share.nbytes for share in forecast.owners_at_peak if share.owner == "logits")
    share = (f" At the run's peak they are {show_bytes(nbytes)} of the {show_bytes(forecast.allocated)} allocated."
             if nbytes else "")
    return ("It is the logits, one number per token and entry of the vocabulary, of which the loss keeps several "
            f"copies.{share}")


def _in_backward(case: Case) -> bool:
    return case.owner != "logits" and (case.phase == "backward" or (case.match is not None and case.match.backward))


@_rule("OOM-BACKWARD", "In the backward pass",
       pattern="the traceback passes through `.backward()`",
       background="Gradient checkpointing (`--saved_activations`, `--grad_checkpoint`) reduces the activations that "
                  "this pass starts with.",
       advice_without_plan=SMALLER_BATCH)
def _backward(case: Case) -> str | None:
    if not _in_backward(case):
        return None
    return ("Memory ran out in the backward pass. It starts with all activations that the forward pass kept, and adds "
            "the gradients: here a training step allocates most.")


@_rule("OOM-ACTIVATIONS", "Activations",
       pattern="with the config: the size is that of a layer's output",
       background="Eager PyTorch keeps about 36 bytes × tokens × width in each layer of nanoGPT's model.",
       advice_without_plan=SMALLER_BATCH)
def _activations(case: Case) -> str | None:
    if case.owner != "activations" or _in_backward(case):
        return None
    return ("It is an activation: the output of a layer, kept until the backward pass. Activations grow with batch × "
            "block × width × layers.")


# ---- what remains


def _context_decides(case: Case) -> bool:
    return case.usage is not None and (case.usage.outside or 0) >= case.missing


@_rule("OOM-CONTEXT", "Much non-PyTorch memory",
       pattern="`this process has …` is more than 1 GiB above the memory that PyTorch reserved",
       background="PyTorch's allocator does not manage this memory, and no option of the run changes it.",
       advice=lambda case: (SET_DEVICE, *FEWER_COMMUNICATORS) if case.usage is None or _context_decides(case) else (),
       advice_without_plan=SMALLER_BATCH, decides=_context_decides)
def _context(case: Case) -> str | None:
    outside = (case.usage.outside if case.usage else None) or 0
    if outside <= GiB:
        return None
    return (f"This process holds {show_bytes(outside)} of non-PyTorch memory, where context and kernels usually take "
            "100 to 800 MiB: other libraries in the same process, NCCL's buffers, or the driver of a virtual machine.")


def _truncated_advice(case: Case) -> Advice:
    if case.message.kind == "vague":
        return (("the whole message, with the traceback above it", "contains the figures, and which memory it was"),
                LIST_PROCESSES, ("dmesg | tail", "shows whether the system ran out of CPU RAM"))
    if case.message.source == CUDA_MALLOC_ASYNC:
        return (("PYTORCH_CUDA_ALLOC_CONF=backend:native", "PyTorch's own allocator, whose message has figures; "
                 "ComfyUI: --disable-cuda-malloc"),)
    if case.usage is None:
        return (("the message to its end", "contains the requested size, and who held the GPU's memory"),)
    return (("the message to its end", "contains the memory of this process, and PyTorch's part of it"), LIST_PROCESSES)


@_rule("OOM-CUT", "A truncated message",
       pattern="`CUDA out of memory.` and nothing after it, or some of its figures are missing; or `out of memory` "
               "without a known message",
       background="The figures are on the same line as the words; some logs truncate long lines.",
       advice=_truncated_advice, advice_without_plan=SMALLER_BATCH)
def _truncated(case: Case) -> str | None:
    message, usage = case.message, case.usage
    if message.kind == "vague":
        return "The text says that memory ran out, and not which: GPU memory or CPU RAM."
    if message.requested is None:
        figures = (message.total, message.free, message.process, message.allocated)
        missing = "the requested size is" if any(each is not None for each in figures) else "all figures are"
        return f"The message is truncated: GPU memory ran out, but {missing} missing."
    if usage is None and message.total is None and case.requested <= LARGEST_TENSOR:
        return "The message is truncated: it does not say who held the GPU's memory."
    if usage is None or not usage.truncated:
        return None
    return (f"{show_bytes(usage.used)} of the GPU's {show_bytes(usage.total)} are in use, and the message "
            "does not say by which process: the figures of this process and of PyTorch would follow the free memory.")


def _much_outside(case: Case) -> bool:
    """Whether memory that is neither free nor PyTorch's, of processes that are not listed, is as much as is missing."""
    usage = case.usage
    return (usage is not None and usage.others is None and not usage.truncated
            and usage.not_pytorch >= max(case.missing, NEIGHBOUR_SHARE * usage.total))


@_rule("OOM-FULL", "The run fills the GPU",
       pattern="no other rule applies: the process's own tensors take the memory",
       background="The run is larger than the GPU. With its config, `explain` shows what it allocates and what each "
                  "change saves.",
       advice=lambda case: (LIST_PROCESSES,) if _much_outside(case) else (), advice_without_plan=SMALLER_BATCH)
def _full(case: Case) -> str | None:
    usage, message = case.usage, case.message
    if usage is None and message.total is not None and message.reserved is not None:
        left = message.total - message.reserved - MAX_OUTSIDE
        others = ": the run's own tensors do not fill the GPU" if left >= case.requested else ""
        return (f"PyTorch had reserved {show_bytes(message.reserved)} of the GPU's {show_bytes(message.total)}, and "
                f"the message does not say how much was free{others}.")
    if usage is None:
        return "GPU memory ran out, and the message does not say who held it."
    if usage.reserved is not None and usage.not_pytorch > usage.reserved:
        return (f"{show_bytes(usage.not_pytorch)} of {show_bytes(usage.total)} are neither free nor reserved by "
                f"PyTorch: this process's context and other processes leave too little for a run that has "
                f"{show_bytes(usage.reserved)} and requested {show_bytes(case.requested)} more.")
    nbytes, what = (usage.process or 0, "holds") if usage.allocated is None else (usage.allocated, "has allocated")
    if case.requested > max(nbytes, usage.total // 2):
        return (f"One tensor of {show_bytes(case.requested)} is most of the GPU's {show_bytes(usage.total)}, of which "
                f"{show_bytes(usage.free)} were free; all else that this process {what} is {show_bytes(nbytes)}. Often "
                "such a tensor is attention scores (batch × heads × tokens × tokens), or the logits of a large batch.")
    outside = (f" {show_bytes(usage.not_pytorch)} are neither free nor reserved by PyTorch: this process's context, "
               "and perhaps a desktop or other processes." if _much_outside(case) else "")
    return (f"The run itself fills the GPU: this process {what} {show_bytes(nbytes)} of {show_bytes(usage.total)}, and "
            f"requested {show_bytes(case.requested)} more.{outside}")
