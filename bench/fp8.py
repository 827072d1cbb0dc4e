"""Would 8-bit floating-point matrix products make a step faster? The products of GPT-2 124M alone, by the clock.

    python bench/fp8.py -o bench/results/fp8_h200.json

For each matrix of the model, its three products (forward, the input's gradient, the weight's gradient) in bfloat16 and
in float8, and what the operands' rounding to float8 costs where nothing else does it: a pass for the largest value, a
pass that scales and rounds, and for the weight's gradient one that also turns the operand round, because the card
multiplies float8 in one layout only. Needs compute capability 8.9 or more.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

N = 12 * 1024
SHAPES = {"qkv": (768, 2304), "projection": (768, 768), "up": (768, 3072), "down": (3072, 768), "head": (768, 50304)}
LAYERS = 12
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of E4M3
ROWS_OF_THE_HEAD = 4096  # the loss goes through the head in chunks of this many tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", default="")
    options = parser.parse_args()
    rows = [measured(name, k, n) for name, (k, n) in SHAPES.items()]
    total = {key: sum(row["times"] * row[key] for row in rows)
             for key in ("bfloat16_us", "float8_us", "float8_and_rounding_us")}
    print(*(json.dumps(row) for row in rows), json.dumps(total), sep="\n")
    if options.out:
        Path(options.out).write_text(json.dumps(
            {"what": "microseconds of a micro-step's matrix products, 12 x 1024 tokens", "card":
             torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
             "command": "python bench/fp8.py", "rows": rows, "micro_step": total}, indent=1) + "\n")


def measured(name: str, k: int, n: int) -> dict[str, Any]:
    rows, times = (ROWS_OF_THE_HEAD, N // ROWS_OF_THE_HEAD) if name == "head" else (N, LAYERS)
    x, w, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((rows, k), (n, k), (rows, n)))
    plain = {"forward": lambda: x @ w.t(), "dx": lambda: dy @ w, "dw": lambda: dy.t() @ x}
    x8, w8, dy8 = rounded(x), rounded(w), rounded(dy)
    x8t, w8t, dy8t = turned(x), turned(w), turned(dy)
    eight = {"forward": lambda: product(x8, w8), "dx": lambda: product(dy8, w8t), "dw": lambda: product(dy8t, x8t)}
    exact = x.double() @ w.double().t()
    error = (product(x8, w8).double() - exact).norm() / exact.norm()
    rounding = us(lambda: (rounded(x), rounded(dy), turned(x), turned(dy)))
    found = {"matrix": name, "times": times, "bfloat16": {key: us(each) for key, each in plain.items()},
             "float8": {key: us(each) for key, each in eight.items()}, "rounding_us": rounding,
             "relative_error_of_forward": float(error)}
    found["bfloat16_us"], found["float8_us"] = sum(found["bfloat16"].values()), sum(found["float8"].values())
    found["float8_and_rounding_us"] = found["float8_us"] + rounding
    return found


@torch.compile
def rounded(a: Tensor) -> tuple[Tensor, Tensor]:
    scale = a.abs().amax().float() / LARGEST
    return (a.float() / scale).to(E4M3), scale


@torch.compile
def turned(a: Tensor) -> tuple[Tensor, Tensor]:
    scale = a.abs().amax().float() / LARGEST
    return (a.t().float() / scale).to(E4M3).contiguous(), scale


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """a [M, K] times the transpose of b [N, K]."""
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16, use_fast_accum=True)


def us(work: Callable[[], Any]) -> float:
    return 1000 * float(do_bench(work, warmup=20, rep=60, return_mode="median"))


if __name__ == "__main__":
    main()
