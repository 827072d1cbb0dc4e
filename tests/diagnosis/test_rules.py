"""Every rule: a unique code, a message that triggers it, a text and an advice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fitgpt.config.run_config import RunConfig
from fitgpt.diagnosis.case import Case, ExplainedRun, build_case
from fitgpt.diagnosis.diagnose import Diagnosis, diagnose
from fitgpt.diagnosis.oom_message import OomMessage
from fitgpt.diagnosis.rules import RULES, Rule
from tests.diagnosis.test_diagnose import ALMOST_FULL, CARD, SETTING, codes, message, run_out
from tests.diagnosis.test_oom_message import INDEX, WITH_CONFIG, read, with_its_config

AT_LOAD = f'''Traceback (most recent call last):
  File "train.py", line 190, in <module>
    model.to(device)
  File "/x/torch/nn/modules/module.py", line 1343, in to
    return self._apply(convert)
torch.OutOfMemoryError: {ALMOST_FULL.format(size="148.00 MiB")}'''
IN_EVALUATION = f'''Traceback (most recent call last):
  File "train.py", line 264, in <module>
    losses = estimate_loss()
torch.OutOfMemoryError: {ALMOST_FULL.format(size="148.00 MiB")}'''

AT_SAVE = f'''Traceback (most recent call last):
  File "train.py", line 310, in train
    self._maybe_log_save_evaluate(loss)
  File "/x/torch/distributed/fsdp/fully_sharded_data_parallel.py", line 2395, in state_dict
    return super().state_dict(*args, **kwargs)
torch.OutOfMemoryError: {ALMOST_FULL.format(size="148.00 MiB")}'''
BESIDE_RANKS = (
    "CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has a total capacity of 23.70 GiB of which 118.62 MiB is "
    "free. Process 11 has 530.00 MiB memory in use. Process 12 has 530.00 MiB memory in use. Process 13 has 528.00 MiB "
    "memory in use. Including non-PyTorch memory, this process has 21.70 GiB memory in use. Of the allocated memory "
    "21.00 GiB is allocated by PyTorch, and 100.10 MiB is reserved by PyTorch but unallocated.")


# By transformers 5.17 with load_in_4bit: the model of axolotl#3374, whose thread does not show its message to the end.
IN_EXPERTS = f'''load_in_4bit: true
Traceback (most recent call last):
  File "train.py", line 12, in <module>
    model = AutoModelForCausalLM.from_pretrained("zai-org/GLM-4.5-Air", quantization_config=config)
  File "/x/transformers/core_model_loading.py", line 254, in convert
    merged[target_pattern] = torch.stack(tensors, dim=self.dim)
torch.OutOfMemoryError: {ALMOST_FULL.format(size="2.75 GiB")}'''


def activation_out_of_memory() -> Diagnosis:
    run = ExplainedRun(RunConfig(n_layer=24, n_head=16, n_embd=1024, batch_size=32, compile=True, dtype="float16"),
                       "fitgpt", SETTING)
    return diagnose(message(run_out(run)[0].text), run, CARD)


# Rules that no recorded message shows.
MADE: dict[str, Callable[[], Diagnosis]] = {
    "OOM-CUT": lambda: diagnose(message("RuntimeError: CUDA out of memory.")),
    "OOM-AT-LOAD": lambda: diagnose(message(AT_LOAD)),
    "OOM-EVAL": lambda: diagnose(message(IN_EVALUATION)),
    "OOM-ACTIVATIONS": activation_out_of_memory,
    "OOM-SAVE": lambda: diagnose(message(AT_SAVE)),
    "OOM-RANKS": lambda: diagnose(message(BESIDE_RANKS)),
    "OOM-EXPERTS-16-BITS": lambda: diagnose(message(IN_EXPERTS)),
    **{code: lambda text=text: diagnose(message(text)) for code, text in {
        "OOM-NCCL": "alloc.h:178 NCCL WARN Cuda failure 'out of memory'\nNCCL WARN Failed to CUDA calloc 6291456 bytes",
        "OOM-ONE-RANK": f"[rank1]: torch.OutOfMemoryError: {ALMOST_FULL.format(size='148.00 MiB')}\n"
                        "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE)",
        "RANKS-ONE-GPU": "init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60\n"
                         "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        "RANKS-PORT": "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
                      "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in "
                      "use",
        "RANKS-TIMEOUT": "[rank0]:[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
                         "WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600029 "
                         "milliseconds before timing out.",
        "RANKS-LOST": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
                      "[127.0.0.1]:41231",
        "RANKS-NCCL": "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error "
                      "(run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclSystemError: System call (e.g. "
                      "socket, malloc) or external library call failed or device error.",
        "OOM-EVAL-LOGITS": "    preds = logits if preds is None else torch.cat((preds, logits), dim=0)\nRuntimeError: "
                           "CUDA out of memory. Tried to allocate 8.68 GiB",
        "OOM-UNSLOTH": "RuntimeError: Unsloth: No or negligible GPU memory available for fused cross entropy.",
        "OOM-SHM": "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that "
                   "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        "OOM-COMPILER": "c++: fatal error: Killed signal terminated program cc1plus",
        "OOM-TRITON": "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, "
                      "Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
        "OOM-JAX": "bfc_allocator.cc:497] Allocator (GPU_0_bfc) ran out of memory trying to allocate 6.00MiB\n"
                   "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
                   "6291456 bytes.",
        "OOM-TENSORFLOW": "failed to allocate 2.2G from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory\n"
                          "ResourceExhaustedError: OOM when allocating tensor with shape[64,512,768] by allocator "
                          "GPU_0_bfc",
        "OOM-METAL": "[METAL] Command buffer execution failed: Insufficient Memory (00000008:"
                     "kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "OOM-DEVICE-MAP": "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough "
                          "GPU RAM to fit the quantized model.",
        "OOM-VLLM": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` "
                    "when initializing the engine.",
    }.items()},
}


def triggered(rule: Rule) -> Diagnosis:
    """The diagnosis of a message that triggers the rule."""
    if rule.code in MADE:
        return MADE[rule.code]()
    name = next((name for name, expected in INDEX.items() if rule.code in expected["without"]), None)
    if name is not None:
        return diagnose(read(name))
    return with_its_config(next(name for name in WITH_CONFIG if rule.code in INDEX[name]["with"]))


def test_codes_are_unique() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)


def test_recorded_messages_name_known_codes_only() -> None:
    named = {code for expected in INDEX.values() for code in (*expected["without"], *expected.get("with", ()))}
    assert named | MADE.keys() == {rule.code for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_each_rule_has_a_message_that_triggers_it_and_a_text(rule: Rule) -> None:
    causes = {cause.code: cause.what for cause in triggered(rule).causes}
    assert causes[rule.code].endswith(".")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_each_rule_has_documentation_and_advice(rule: Rule) -> None:
    assert rule.title
    assert rule.pattern
    assert rule.background.endswith(".")
    assert rule.advice_for(Case(OomMessage("cuda", "", "")))


@pytest.mark.parametrize(("was", "now"), [
    ("load_in_4bit: true", "load_in_4bit: false"), ("load_in_4bit: true", "optim: adamw_bnb_8bit"),
    ("load_in_4bit: true", "load_in_4bit: true\nquantize_moe_experts: true"),
    ("torch.stack(tensors, dim=self.dim)", "value.to(device)")])
def test_experts_are_not_the_cause_in_16_bits_throughout_or_if_they_are_quantized(was: str, now: str) -> None:
    assert codes(diagnose(message(IN_EXPERTS))) == ["OOM-EXPERTS-16-BITS", "OOM-AT-LOAD"]
    assert "OOM-EXPERTS-16-BITS" not in codes(diagnose(message(IN_EXPERTS.replace(was, now))))


def test_experts_in_16_bits_are_not_the_cause_of_any_recorded_message() -> None:
    assert not [name for name in INDEX if read(name).unquantized_experts]


def test_the_last_rule_applies_to_every_case() -> None:
    assert RULES[-1].text(build_case(message("RuntimeError: CUDA out of memory.")))


@pytest.mark.parametrize(("code", "phase"), [("OOM-CUT", ""), ("OOM-AT-LOAD", "load"), ("OOM-EVAL", "eval"),
                                             ("OOM-SAVE", "save")])
def test_a_traceback_alone_shows_the_phase(code: str, phase: str) -> None:
    diagnosis = MADE[code]()
    assert (codes(diagnosis), diagnosis.phase) == ([code], phase)


def test_an_activation_is_named_with_its_layer() -> None:
    diagnosis = activation_out_of_memory()
    assert codes(diagnosis) == ["OOM-ACTIVATIONS"]
    assert "layer" in diagnosis.what
    assert "32 × 1,024 × 1,024 × " in diagnosis.what


def advice(text: str) -> list[str]:
    return [remedy.todo for remedy in diagnose(message(text)).remedies]


PINNED = '  File "pin_memory.py", line 58, in pin_memory\n    return data.pin_memory(device)\n'
DESIRED = ("ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory utilization "
           "(0.95, 45.01 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.")


@pytest.mark.parametrize(("text", "first"), [
    ("RuntimeError: DataLoader worker (pid 19597) is killed by signal: Killed.", "DataLoader(…, num_workers=0)"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.", "dmesg | tail"),
    ("RuntimeError: unable to mmap 72 bytes from file </torch_25_30_6>: Cannot allocate memory (12)",
     "DataLoader(…, num_workers=0)"),
    (f"{PINNED}RuntimeError: CUDA error: out of memory", "DataLoader(…, pin_memory=False)"),
    (DESIRED, "nvidia-smi"),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "--mem-fraction-static 0.9"),
    ("NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity; 49.47 GiB already allocated; "
     "1.32 GiB free; 57.55 GiB reserved in total by PyTorch)", "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"),
])
def test_the_first_advice_is_of_the_cause_that_the_words_show(text: str, first: str) -> None:
    assert advice(text)[0] == first


def test_a_smaller_batch_is_not_advised_while_a_model_is_loaded() -> None:
    beside = allocator_message("20.00 MiB", "17.19 MiB", "0.94 GiB", "0.94 GiB")
    loading = f'  File "a.py", line 1, in load\n    state = torch.load(path)\nRuntimeError: {beside}'
    assert codes(diagnose(message(loading))) == ["OOM-NEIGHBOUR", "OOM-AT-LOAD"]
    assert any("batch" in todo for todo in advice(beside))
    assert not any("batch" in todo for todo in advice(loading))


def test_one_tensor_of_most_of_the_gpu_is_called_so() -> None:
    text = allocator_message("9.00 GiB", "8.00 GiB", "2.00 GiB", "2.10 GiB")
    assert diagnose(message(text)).causes[0].what.startswith("One tensor of 9.00 GiB is most of the GPU's 11.73 GiB")


def allocator_message(size: str, free: str, allocated: str, reserved: str, total: str = "11.73 GiB") -> str:
    return (f"CUDA out of memory. Tried to allocate {size} (GPU 0; {total} total capacity; {allocated} already "
            f"allocated; {free} free; {reserved} reserved in total by PyTorch) If reserved memory is >> allocated "
            "memory try setting max_split_size_mb")


@pytest.mark.parametrize(("text", "expected"), [
    # 1,055 MiB are unallocated, 9.7 % of the reserved memory and 25 times what is missing.
    (allocator_message("86.00 MiB", "43.31 MiB", "9.55 GiB", "10.58 GiB"), ["OOM-FRAGMENTED"]),
    (allocator_message("1.00 GiB", "43.31 MiB", "9.20 GiB", "10.58 GiB"), ["OOM-FRAGMENTED"]),  # 13 % of the reserved
    (allocator_message("500.00 MiB", "10.00 MiB", "9.95 GiB", "10.58 GiB"), ["OOM-FULL", "OOM-FRAGMENTED"]),  # 6 %
    (allocator_message("20.00 MiB", "0 bytes", "10.48 GiB", "10.58 GiB"), ["OOM-FULL", "OOM-FRAGMENTED"]),    # 102 MiB
    (allocator_message("500.00 MiB", "10.00 MiB", "10.38 GiB", "10.58 GiB"), ["OOM-FULL"]),  # not covered
])
def test_fragmentation_is_judged_by_what_is_missing(text: str, expected: list[str]) -> None:
    diagnosis = diagnose(message(text))
    assert codes(diagnosis) == expected
    assert ("expandable_segments" in diagnosis.remedies[0].todo) == ("OOM-FRAGMENTED" in expected)


def test_expandable_segments_are_advised_with_an_update_if_the_message_is_from_a_pytorch_without_them() -> None:
    old = allocator_message("86.00 MiB", "43.31 MiB", "9.55 GiB", "10.58 GiB")
    new = ("CUDA out of memory. Tried to allocate 86.00 MiB. GPU 0 has a total capacity of 11.73 GiB of which 43.31 "
           "MiB is free. Of the allocated memory 9.55 GiB is allocated by PyTorch, and 1.03 GiB is reserved by PyTorch "
           "but unallocated.")
    assert advice(old)[0].startswith("PyTorch 2.2, then PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert advice(new)[0] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_a_few_free_mib_are_a_full_gpu() -> None:
    text = allocator_message("2.00 MiB", "3.00 MiB", "8.00 GiB", "8.10 GiB")
    assert "OOM-ROOM" not in codes(diagnose(message(text)))


def test_cpu_ram_on_windows_is_answered_with_the_paging_file() -> None:
    text = "DefaultCPUAllocator: not enough memory: you tried to allocate 26214400 bytes."
    assert "paging file" in advice(text)[0]


CAPPED = ("CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 11.93 GiB of which 515.00 MiB "
          "is free. {allowed} allowed; Of the allocated memory {allocated} is allocated by PyTorch, and 60.00 MiB is "
          "reserved by PyTorch but unallocated.")


@pytest.mark.parametrize(("size", "allowed", "allocated", "expected"), [
    ("4.00 GiB", "11.93 GiB", "10.90 GiB", "OOM-FULL"), ("64.00 MiB", "11.93 GiB", "10.90 GiB", "OOM-ROOM"),
    ("64.00 MiB", "10.00 GiB", "9.90 GiB", "OOM-CAP"), ("4.00 GiB", "10.00 GiB", "9.90 GiB", "OOM-FULL")])
def test_a_limit_is_the_cause_only_if_the_gpu_has_free_memory(size: str, allowed: str, allocated: str,
                                                              expected: str) -> None:
    found = message(CAPPED.format(size=size, allowed=allowed, allocated=allocated))
    assert codes(diagnose(found))[0] == expected


def test_a_save_is_never_answered_with_a_smaller_batch() -> None:
    in_fsdp = f"Please check clone implementation of lm_head.weight. Error: {ALMOST_FULL.format(size='148.00 MiB')}"
    for text in (AT_SAVE, in_fsdp):
        assert codes(diagnose(message(text))) == ["OOM-SAVE"]
        assert not any("batch" in todo for todo in advice(text))
    run = ExplainedRun(RunConfig(n_layer=2, n_head=2, n_embd=128), "nanogpt", SETTING)
    assert not any("batch" in remedy.todo for remedy in diagnose(message(AT_SAVE), run, CARD).remedies)


def test_a_quoted_line_of_adam_shows_the_optimizer_step() -> None:
    quoted = f"    denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)\nRuntimeError: {ALMOST_FULL}"
    assert codes(diagnose(message(quoted.format(size="148.00 MiB"))))[0] == "OOM-OPTIMIZER-FIRST-STEP"


def test_a_request_of_nearly_the_whole_gpu_is_about_the_request() -> None:
    text = allocator_message("23.11 GiB", "20.89 GiB", "1.54 GiB", "1.70 GiB", total="23.70 GiB")
    assert codes(diagnose(message(text))) == ["OOM-LARGER-THAN-CARD"]


def test_other_ranks_and_nccl_are_answered_with_set_device() -> None:
    much_outside = BESIDE_RANKS.replace("21.00 GiB", "19.00 GiB")
    assert codes(diagnose(message(much_outside))) == ["OOM-RANKS", "OOM-CONTEXT"]
    for text in (BESIDE_RANKS, much_outside, "NCCL WARN Cuda failure 2 'out of memory'"):
        assert "torch.cuda.set_device(local_rank)" in advice(text)
    assert "NCCL_MAX_NCHANNELS=4" in advice(much_outside)


@pytest.mark.parametrize("code", ["OOM-SHM", "OOM-TRITON", "OOM-JAX", "OOM-TENSORFLOW", "OOM-METAL", "OOM-VLLM",
                                  "OOM-COMPILER"])
def test_other_memory_gets_one_cause_and_no_forecast(code: str) -> None:
    diagnosis = MADE[code]()
    assert codes(diagnosis) == [code]
    assert not diagnosis.needed
    assert not diagnosis.shares
