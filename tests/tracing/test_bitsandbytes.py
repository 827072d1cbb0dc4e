"""bitsandbytes in a trace: what its Python code allocates for CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fitgpt.planning.budget import target_for
from fitgpt.tracing.bitsandbytes import OUTLIERS, PAGED
from fitgpt.tracing.recorder import Recorder
from fitgpt.tracing.script import trace_script
from fitgpt.tracing.trace import recording

bnb = pytest.importorskip("bitsandbytes")
RTX = target_for("4070", "cuda", torch="2.13")
WIDE, NARROW = 4096, 1024  # features of the 4-bit layer: 4,096 × 1,024 weights


def allocated(recorder: Recorder, since: int) -> list[tuple[tuple[int, ...], str]]:
    return [(each.shape, each.dtype) for each in recorder.tensors[since:] if each.owner != "workspace"]


def quantized_layer(**options: object) -> nn.Module:
    return bnb.nn.Linear4bit(NARROW, WIDE, bias=False, quant_type="nf4", **options).cuda()  # type: ignore[no-any-return]


def test_the_state_of_an_8_bit_optimizer_has_2_bytes_per_parameter_and_two_scales_per_256() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        model = nn.Linear(NARROW, WIDE, bias=False, device="cuda")
        optimizer = bnb.optim.AdamW8bit(model.parameters())
        made = []
        for _ in range(2):
            model(torch.ones(2, NARROW, device="cuda")).sum().backward()
            since = len(recorder.tensors)
            optimizer.step()
            made.append(allocated(recorder, since))
            optimizer.zero_grad()
    maps = [((256,), "float32")] * 2
    state = [((WIDE, NARROW), "uint8")] * 2 + [((WIDE * NARROW // 256,), "float32")] * 2
    assert made == [maps + state, []]


def test_a_paged_optimizer_has_its_state_outside_of_pytorchs_memory() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        model = nn.Linear(NARROW, WIDE, bias=False, device="cuda")
        optimizer = bnb.optim.PagedAdamW32bit(model.parameters())
        model(torch.ones(2, NARROW, device="cuda")).sum().backward()
        since = len(recorder.tensors)
        optimizer.step()
    assert allocated(recorder, since) == []
    assert PAGED.format("32.0 MiB") in recorder.notes


def test_a_4_bit_layer_keeps_half_a_byte_per_weight_and_unpacks_it_in_the_precision_of_the_computation() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        layer = quantized_layer(compute_dtype=torch.bfloat16, compress_statistics=True)
        kept = {tuple(each.shape): each.owner for each in recorder.tensors}
        batch = torch.ones(2048, NARROW, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        since = len(recorder.tensors)
        result = layer(batch)
        scales = ((WIDE * NARROW // 64,), "float32")
        unpacked = ((WIDE, NARROW), "bfloat16")
        assert allocated(recorder, since) == [scales, scales, unpacked, ((2048, WIDE), "bfloat16")]
        since = len(recorder.tensors)
        result.sum().backward()
        assert unpacked in allocated(recorder, since)
    assert (WIDE * NARROW // 2, 1) in kept
    assert recorder.params == WIDE * NARROW
    freed = [tensor.shape for alloc, tensor in recorder.events if not alloc and tensor]
    assert freed.count((WIDE, NARROW)) == [each.shape for each in recorder.tensors].count((WIDE, NARROW))


def test_autocast_casts_what_a_4_bit_layer_of_float32_multiplies() -> None:
    """bnb_4bit_compute_dtype is float32 where nobody sets it: the unpacked weight is there in both precisions."""
    recorder = Recorder()
    with recording(recorder, RTX):
        layer = quantized_layer(compute_dtype=torch.float32, compress_statistics=False)
        batch = torch.ones(2048, NARROW, device="cuda", requires_grad=True)
        since = len(recorder.tensors)
        with torch.autocast("cuda", torch.bfloat16):
            layer(batch)
        made = allocated(recorder, since)
    assert made[:4] == [((WIDE, NARROW), "float32"), ((WIDE, NARROW), "bfloat16"), ((2048, NARROW), "bfloat16"),
                        ((2048, WIDE), "bfloat16")]


def test_few_tokens_use_the_kernel_that_unpacks_nothing() -> None:
    recorder = Recorder()
    with recording(recorder, RTX), torch.no_grad():
        layer = quantized_layer(compute_dtype=torch.bfloat16, compress_statistics=False)
        batch = torch.ones(1, NARROW, dtype=torch.bfloat16, device="cuda")
        since = len(recorder.tensors)
        layer(batch)
    assert allocated(recorder, since) == [((1, WIDE), "bfloat16")]


def test_an_8_bit_layer_quantizes_its_input_and_multiplies_into_32_bits() -> None:
    recorder = Recorder()
    with recording(recorder, RTX):
        layer = bnb.nn.Linear8bitLt(NARROW, WIDE, bias=False, has_fp16_weights=False, threshold=6.0).cuda()
        batch = torch.ones(512, NARROW, dtype=torch.float16, device="cuda", requires_grad=True)
        since = len(recorder.tensors)
        layer(batch).sum().backward()
        made = allocated(recorder, since)
    assert ((512, NARROW), "int8") in made
    assert ((512, WIDE), "int32") in made
    assert ((WIDE, NARROW), "float16") in made  # unpacked for the gradient of the input
    assert OUTLIERS in recorder.notes


def test_after_a_trace_the_library_is_as_before() -> None:
    before = bnb.functional.lib
    with recording(Recorder(), RTX):
        assert bnb.functional.lib is not before
    assert bnb.functional.lib is before


@pytest.mark.slow
def test_a_script_that_imports_bitsandbytes_is_traced_without_its_cuda_library(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import bitsandbytes as bnb, torch\n"
                      "model = torch.nn.Linear(1024, 1024).cuda()\n"
                      "optimizer = bnb.optim.PagedAdamW8bit(model.parameters())\n"
                      "for _ in range(4):\n"
                      "    model(torch.ones(1, 1024, device='cuda')).sum().backward()\n"
                      "    optimizer.step()\n", encoding="utf-8")
    trace = trace_script([str(script)], gpu="4070")
    assert any("Paged" in note for note in trace.notes)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_bitsandbytes_imported_inside_a_trace_says_afterwards_why_it_computes_nothing() -> None:
    code = ("import fitgpt, torch\n"
            "with fitgpt.trace(gpu='4070'):\n"
            "    import bitsandbytes as bnb\n"
            "    model = torch.nn.Linear(8, 8).cuda()\n"
            "bnb.functional.lib.cadam_8bit_blockwise_grad_fp32()\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "Import bitsandbytes before the trace" in done.stderr
