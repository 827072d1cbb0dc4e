"""Real messages, from public threads, and what is said of each: the parser's figures, the causes, the tensor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import GiB, MiB
from fitgpt.diagnosis.case import ExplainedRun
from fitgpt.diagnosis.diagnose import Diagnosis, diagnose
from fitgpt.diagnosis.input import message_in, read_input
from fitgpt.diagnosis.oom_message import BEFORE_EXPANDABLE, OLD_PYTORCH, OomMessage, parse_oom_message
from fitgpt.hardware import gpus
from fitgpt.planning.budget import platform_for

FOLDER = Path(__file__).parent / "messages"
INDEX: dict[str, dict[str, Any]] = {
    name: entry for name, entry in json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))["messages"].items()
    if "without" in entry}
WITH_CONFIG = [name for name, entry in INDEX.items() if "with" in entry]


def read(name: str) -> OomMessage:
    with open(FOLDER / f"{name}.txt", "rb") as file:
        found = message_in(read_input(file))
    assert found is not None
    return found


def with_its_config(name: str) -> Diagnosis:
    expected = INDEX[name]
    card = gpus.find(expected["card"])
    run = ExplainedRun(RunConfig(**expected["config"]), expected["trainer"], platform_for(card), "x.py")
    return diagnose(read(name), run, card)


@pytest.mark.parametrize("name", INDEX)
def test_each_recorded_message_has_its_causes(name: str) -> None:
    assert [cause.code for cause in diagnose(read(name)).causes] == INDEX[name]["without"]


@pytest.mark.parametrize("name", WITH_CONFIG)
def test_with_the_config_of_the_thread_the_tensor_is_named(name: str) -> None:
    diagnosis = with_its_config(name)
    assert [cause.code for cause in diagnosis.causes] == INDEX[name]["with"]
    assert diagnosis.what.startswith(INDEX[name]["asked"])
    assert diagnosis.remedies
    assert all("fitgpt train …" not in remedy.todo for remedy in diagnosis.remedies)  # the exact command, not a pattern


@pytest.mark.parametrize(("name", "sizes"), [
    ("pytorch-16417", {"requested": 12.5 * MiB, "total": 10.92 * GiB, "allocated": 8.57 * MiB, "free": 9.28 * GiB,
                       "unallocated": 4.68 * MiB}),
    ("residualmasking-15", {"requested": 36 * MiB, "total": 10.76 * GiB, "allocated": 996.23 * MiB, "free": 8.81 * MiB,
                            "unallocated": (1010 - 996.23) * MiB}),
    ("minimind-48", {"requested": 88 * MiB, "total": 7.75 * GiB, "free": 49.56 * MiB, "process": 7.43 * GiB,
                     "allocated": 7.16 * GiB, "unallocated": 4.62 * MiB}),
    ("therock-2118", {"requested": 2 * MiB, "allowed": 1.05 * GiB, "private_pools": 17 * MiB,
                      "allocated": 1017.01 * MiB}),
    ("nanochat-443", {"requested": 8 * GiB, "total": 79.19 * GiB, "free": 6.68 * GiB, "process": 72.48 * GiB,
                      "allocated": None}),
    ("efficient-cross-entropy-9", {"requested": 17.37 * GiB, "process": None}),   # "0 bytes": not known
    ("wsl-11050", {"total": 15.99 * GiB, "free": 0, "process": None, "allocated": 30 * GiB}),  # "17179869184.00 GiB"
    ("audioldm2-20", {"requested": 4.5 * MiB, "allocated": 18.02 * GiB, "allowed": 18.13 * GiB}),
    ("vrt-49", {"requested": 116813856768}),
])
def test_every_figure_is_parsed(name: str, sizes: dict[str, float | None]) -> None:
    found = read(name)
    assert {size: getattr(found, size) for size in sizes} == {
        size: None if value is None else round(value) for size, value in sizes.items()}


@pytest.mark.parametrize(("name", "wording"), [
    ("transformers-1819", OLD_PYTORCH), ("transformers-3360", OLD_PYTORCH), ("nanogpt-88", BEFORE_EXPANDABLE),
    ("minimind-48", "PyTorch"), ("trl-5207", "PyTorch"), ("qwen3-873", "cuBLAS"), ("aitextgen-188", "Windows")])
def test_the_source_of_a_message_is_recognised(name: str, wording: str) -> None:
    assert read(name).source == wording


def test_traceback_and_shape_are_parsed() -> None:
    frames = read("transformers-1819").frames
    assert [(frame.function, frame.line) for frame in frames][:3] == [("<module>", 551), ("main", 503), ("train", 240)]
    assert frames[2].code == "loss.backward()"
    compiled = read("nanochat-443")
    assert (compiled.shape, compiled.dtype) == ((65536, 65536), "bfloat16")
    assert "65,536 × 65,536" in diagnose(compiled).what
    assert read("attentionlens-25").frames[-1].function == "_multi_tensor_adam"


def test_further_messages_are_counted() -> None:
    assert read("sd-scripts-2029").repeated == 1
    assert any("Further messages of this kind: 1." in note for note in diagnose(read("sd-scripts-2029")).notes)


def test_the_own_process_is_found_among_those_a_container_lists() -> None:
    diagnosis = diagnose(read("trl-5207"))
    shares = {share.what: share.nbytes for share in diagnosis.shares}
    assert shares["other processes"] == pytest.approx((284 + 258 + 3.4 * 1024) * MiB, abs=20 * MiB)
    assert 100 * MiB < shares["this process outside PyTorch"] < 200 * MiB
    assert "kill 21222" in [remedy.todo for remedy in diagnosis.remedies]


@pytest.mark.parametrize("name", INDEX)
def test_the_shares_add_up_to_the_gpu(name: str) -> None:
    message = read(name)
    diagnosis = diagnose(message)
    if message.total is None or message.free is None or diagnosis.causes[0].code == "OOM-SPILL":
        return
    assert sum(share.nbytes for share in diagnosis.shares) == pytest.approx(message.total, abs=0.02 * GiB)


# ---- wordings that no thread above has


@pytest.mark.parametrize(("text", "kind"), [
    ("RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCStorage.cu:58", "driver"),
    ("torch.AcceleratorError: CUDA error: out of memory", "driver"),
    ("RuntimeError: HIP error: out of memory", "driver"),
    ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "library"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "library"),
    ("torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.00 GiB",
     "xpu"),
    ("[ 8242.1] Out of memory: Killed process 4711 (python) total-vm:41234568kB, anon-rss:30123456kB", "killed"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=42.batch.", "killed"),
    ("the container ended with exit code 137", "killed"),
    ("numpy.core._exceptions.MemoryError: Unable to allocate 74.5 GiB for an array with shape (10000000000,)", "ram"),
    ("RuntimeError: $ Torch: not enough memory: you tried to allocate 2GB. Buy new RAM!", "ram"),
    ("MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB). Tried "
     "to allocate 292.50 MiB on private pool.", "mps"),
    ("fitgpt: The machine's RAM ran out, not the card's memory.", "ram"),
    ("RuntimeError: CUDA driver error: out of memory", "driver"),
    ("RuntimeError: Triton Error [CUDA]: out of memory", "driver"),
    ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'", "nccl"),
    ("THCudaCheck FAIL file=/pytorch/aten/src/THC/generic/THCStorage.cu line=58 error=2 : out of memory", "driver"),
    ("pycuda._driver.MemoryError: cuMemAlloc failed: out of memory", "driver"),
    ("[CUDA ERROR] at file train_gpt2.cu:693: out of memory", "driver"),
    ("torch.OutOfMemoryError: Allocation on device", "cuda"),
    ("RuntimeError: unable to write to file </torch_15537_3162929600>", "shm"),
    ("NCCL WARN Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes", "shm"),
    ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "compiler"),
    ("[metal::malloc] Attempting to allocate 22116270080 bytes which is greater than the maximum", "metal"),
    ("run.sh: line 14: 12345 Killed                  python train.py", "killed"),
    ("  3%|▎      | 12/400 [00:10<05:12,  1.24it/s]run.sh: line 14: 3103923 Killed      python train.py", "killed"),
    ("[1]+  Killed                  python train.py", "killed"),
    ("zsh: killed     python train.py", "killed"),
    ("RuntimeError: [enforce fail at CPUAllocator.cpp:56] posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
     "ram"),
    ("RuntimeError: DataLoader worker (pid 22323) is killed by signal: Killed.", "killed"),
    ("iter 144: loss 0.58\n\n**Killed**\n", "killed"),
    ("fitgpt: The system killed the training process (signal 9).", "killed"),
    ("train.sh: Zeile 3: 12345 Getötet                python3 train.py", "killed"),
    ("systemd-oomd[812]: Killed /user.slice/user-1000.slice due to memory used (15782313984) / total", "killed"),
    ("Status code 137 indicates OOM error in the docker container.", "killed"),
    ("make: *** [Makefile:12: train] Error 137", "killed"),
    ("systemd[1]: train.service: Main process exited, code=killed, status=9/KILL", "killed"),
    ("Error: process didn't exit successfully (signal: 9, SIGKILL: kill)", "killed"),
    ("Job ID: 4711\nState: OUT_OF_MEMORY (exit code 0)", "killed"),
    ("Your notebook tried to allocate more memory than is available. It has restarted.", "ram"),
    ("页面文件太小，无法完成操作。 (os error 1455)", "ram"),
    ("RuntimeError: CUDA error: no kernel image is available\nCuda Error in allocate: 2 (out of memory) "
     "../rtSafe/safeRuntime.cpp (25) - out of memory", "other library"),
    ("ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory", "other library"),
    ("(0) RESOURCE_EXHAUSTED: Failed to allocate request for 6.27GiB", "jax"),
    ("Ran out of memory trying to allocate 128.00MiB", "tensorflow"),
])
def test_other_messages_are_recognised(text: str, kind: str) -> None:
    found = parse_oom_message(text)
    assert found is not None
    assert found.kind == kind
    assert diagnose(found).causes


def test_the_message_of_cudamallocasync_has_its_figures() -> None:
    found = parse_oom_message(
        "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently "
        "allocated     : 11.37 GiB\nRequested               : 50.00 MiB\nDevice limit            : 12.00 GiB\nFree "
        "(according to CUDA): 0 bytes\nPyTorch limit (set by user-supplied memory fraction)\n                        : "
        "17179869184.00 GiB")
    assert found is not None
    assert (found.requested, found.gpu, found.total, found.free) == (50 * MiB, 0, 12 * GiB, 0)
    assert (found.allocated, found.allowed) == (round(11.37 * GiB), None)
    assert [cause.code for cause in diagnose(found).causes] == ["OOM-FULL"]
    pool = replace(found, allocated=8 * GiB)  # 3 GiB more than a context are in no tensor
    assert [cause.code for cause in diagnose(pool).causes] == ["OOM-FRAGMENTED"]
    assert "backend:native" in diagnose(pool).remedies[0].todo


def test_a_message_without_its_beginning_keeps_its_figures() -> None:
    found = parse_oom_message("11.73 GiB total capacity; 9.55 GiB already allocated; 43.31 MiB free; 10.58 GiB "
                              "reserved in total by PyTorch)")
    assert found is not None
    assert (found.requested, found.total, found.free) == (None, round(11.73 * GiB), round(43.31 * MiB))
    assert "the requested size is missing" in diagnose(found).causes[0].what


def test_a_decimal_comma_is_parsed() -> None:
    found = parse_oom_message(
        "CUDA out of memory. Tried to allocate 20,00 MiB (GPU 0; 7,79 GiB total capacity; 6,64 GiB already "
        "allocated; 21,00 MiB free; 6,70 GiB reserved in total by PyTorch)")
    assert found is not None
    assert (found.requested, found.total, found.free) == (20 * MiB, round(7.79 * GiB), 21 * MiB)
    assert found.reserved == pytest.approx(6.70 * GiB, abs=1)


def test_a_gpu_with_free_memory_is_not_called_full() -> None:
    assert "The GPU was full" not in diagnose(read("pytorch-175431")).what
    assert "The GPU was full" in diagnose(read("nanogpt-236")).what
    assert "the run's own tensors do not fill the GPU" in diagnose(read("ipex-846")).causes[0].what
    assert "neither free nor reserved by PyTorch" in diagnose(read("backgroundmatting-142")).causes[0].what


def test_a_killed_process_most_likely_ran_out_of_ram() -> None:
    assert "most likely" in diagnose(read("kohya-1065")).title
    assert "most likely" not in diagnose(read("vrt-49")).title


def test_a_library_that_failed_to_initialize_is_most_likely_out_of_memory() -> None:
    diagnosis = diagnose(read("hcvae-7"))
    assert diagnosis.title.startswith("Most likely")
    assert "Most often" in diagnosis.causes[0].what
    assert not diagnose(read("qwen3-873")).title.startswith("Most likely")


def test_the_warning_of_pytorch_211_contains_exact_bytes() -> None:
    found = parse_oom_message(
        "[W801 09:08:57.499362929 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 0 while "
        "trying to allocate 580911104 bytes (free: 191430656, total: 42405855232).\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 554.00 MiB. GPU 0 has a total capacity of 39.49 "
        "GiB of which 182.56 MiB is free. Including non-PyTorch memory, this process has 39.31 GiB memory in use. Of "
        "the allocated memory 38.33 GiB is allocated by PyTorch, and 499.39 MiB is reserved by PyTorch but unallocated")
    assert found is not None
    assert (found.requested, found.tolerance, found.free, found.total) == (580911104, 0, 191430656, 42405855232)
    assert found.allocated == round(38.33 * GiB)
