"""What convolutions allocate on a GPU: results, copies and cuDNN's workspaces, in order.

    python bench/convolutions.py -o tests/recorded/convolutions.json

tests/tracing/test_kernels.py compares it with the rules of src/fitgpt/tracing/kernels.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

DTYPES = ("float32", "bfloat16", "float16")
STAGES = ((64, 256), (128, 512), (256, 1024), (512, 2048))  # of ResNet-50: channels inside a block, and after it
Case = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", required=True)
    out = Path(parser.parse_args().out)
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS workspace
    rows = []
    for dtype in DTYPES:
        for case in cases():
            given = arguments(case, dtype, "cuda")
            rows.append({"dtype": dtype, **case, "forward": allocations(forward, *given),
                         "backward": allocations(backward, *given)})
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = {"what": __doc__.splitlines()[0], "command": "python bench/convolutions.py -o FILE",
            "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
            "gpu": torch.cuda.get_device_name()}
    out.write_text(f"{json.dumps(head)[:-1]}, \"rows\": [\n{lines}\n]}}\n", encoding="utf-8")
    print(f"{len(rows)} convolutions in {out}")


def cases() -> Iterator[Case]:
    """Shapes of the input and of the weight, and the arguments that are not the usual ones."""
    for channels_last in (False, True):
        yield from resnet(32, 224, channels_last)
    yield from resnet(16, 160, False)
    for channels, out, size in ((3, 64, 256), (64, 64, 256), (64, 128, 128), (128, 128, 128), (128, 256, 64),
                                (256, 256, 64), (256, 512, 32), (512, 512, 32), (512, 1024, 16), (1024, 512, 32)):
        yield convolution([4, channels, size, size], [out, channels, 3, 3], padding=1)  # U-Net
    for channels, out, size in ((512, 256, 16), (256, 128, 32), (128, 64, 64)):
        yield convolution([4, channels, size, size], [channels, out, 2, 2], stride=2, transposed=True)
    for channels, out, size in ((3, 128, 32), (128, 128, 32), (128, 256, 16), (256, 256, 8), (384, 256, 16)):
        yield convolution([32, channels, size, size], [out, channels, 3, 3], padding=1)  # DDPM
    for channels, out, size in ((128, 256, 16), (256, 768, 16), (256, 256, 4)):
        yield convolution([32, channels, size, size], [out, channels, 1, 1])
    for batch in (8, 32, 64):
        for gradient in ("contiguous", "channels_last"):
            yield convolution([batch, 3, 224, 224], [768, 3, 16, 16], stride=16, gradient=gradient)  # ViT
    yield convolution([16, 3, 336, 336], [1024, 3, 14, 14], stride=14)
    yield convolution([16, 3, 224, 224], [96, 3, 4, 4], stride=4)  # ConvNeXt
    yield convolution([16, 96, 56, 56], [192, 96, 2, 2], stride=2)
    yield convolution([16, 96, 56, 56], [96, 1, 7, 7], padding=3, groups=96)
    yield convolution([16, 256, 28, 28], [256, 8, 3, 3], padding=1, groups=32)  # ResNeXt
    yield convolution([16, 1280, 256], [1280, 1, 4], padding=3, groups=1280, transposed_input=True)  # Mamba
    yield convolution([16, 80, 1500], [512, 80, 3], stride=2, padding=1)  # speech
    yield convolution([16, 512, 750], [512, 512, 3], stride=2, padding=1)
    yield convolution([4, 512, 1155], [512, 512, 2], stride=2, transposed_input=True)
    yield convolution([4, 1, 92489], [512, 1, 10], stride=5)
    yield convolution([4, 768, 512], [768, 768, 1])
    for channels in (128, 512):
        yield convolution([16, channels, 8, 8], [channels, 256, 4, 4], stride=2, padding=1, transposed=True)  # DCGAN
    yield convolution([4, 3, 16, 112, 112], [64, 3, 3, 3, 3], padding=1)  # video
    yield convolution([4, 64, 16, 56, 56], [128, 64, 3, 3, 3], stride=2, padding=1)


def resnet(batch: int, size: int, channels_last: bool) -> Iterator[Case]:
    yield convolution([batch, 3, size, size], [64, 3, 7, 7], stride=2, padding=3, channels_last=channels_last)
    size, channels = size // 4, 64
    for inside, after in STAGES:
        stride = 1 if channels == 64 else 2
        small = size // stride
        for shape, weight, options in (
                ([channels, size], [inside, channels, 1, 1], {}),
                ([inside, size], [inside, inside, 3, 3], {"stride": stride, "padding": 1}),
                ([inside, small], [after, inside, 1, 1], {}),
                ([channels, size], [after, channels, 1, 1], {"stride": stride}),
                ([after, small], [inside, after, 1, 1], {}),
                ([inside, small], [inside, inside, 3, 3], {"padding": 1})):
            yield convolution([batch, *shape, shape[1]], weight, channels_last=channels_last, **options)
        size, channels = small, after


def convolution(shape: list[int], weight: list[int], **options: Any) -> Case:
    return {"shape": shape, "weight": weight, **options}


def arguments(case: Case, dtype: str, device: str) -> tuple[Any, ...]:
    """The input, the weight, the gradient of the result, and the other arguments of aten::convolution."""
    last = torch.channels_last if case.get("channels_last") else torch.contiguous_format

    def tensor(*shape: int, memory_format: torch.memory_format = last) -> torch.Tensor:
        return torch.ones(shape, dtype=getattr(torch, dtype), device=device).contiguous(memory_format=memory_format)

    shape = case["shape"]
    given = tensor(shape[0], *shape[:0:-1]).transpose(1, 2) if case.get("transposed_input") else tensor(*shape)
    weight, dims = tensor(*case["weight"]), len(shape) - 2
    rest = ([case.get("stride", 1)] * dims, [case.get("padding", 0)] * dims, [1] * dims, case.get("transposed", False),
            [0] * dims, case.get("groups", 1))
    with torch.device("meta"):
        result = torch.ops.aten.convolution(torch.empty(given.shape), torch.empty(weight.shape), None, *rest)
    format_of_gradient = torch.channels_last if case.get("gradient") == "channels_last" else last
    return given, weight, tensor(*result.shape, memory_format=format_of_gradient), rest


def forward(given: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, rest: Any) -> Any:
    return torch.ops.aten.convolution(given, weight, None, *rest)


def backward(given: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, rest: Any) -> Any:
    return torch.ops.aten.convolution_backward(gradient, given, weight, [gradient.shape[1]], *rest, [True, True, True])


def allocations(run: Callable[..., Any], *given: Any) -> list[int]:
    """Bytes allocated and, below zero, freed, while it runs."""
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
    kept = run(*given)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    del kept
    return [each["size"] if each["action"] == "alloc" else -each["size"] for each in trace
            if each["action"] in ("alloc", "free_completed")]


if __name__ == "__main__":
    main()
