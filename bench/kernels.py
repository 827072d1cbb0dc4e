"""Do the engine's Triton kernels compile for GPUs that are not here? Needs Triton, as every CUDA build of torch has
it, and no GPU: each kernel becomes machine code for each architecture, in the shapes and types that models use.

    python bench/kernels.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fitgpt.config.optimizers import GROUP  # noqa: E402
from fitgpt.core.units import KiB  # noqa: E402

# Shared memory that a block of threads may have, in KiB: the CUDA programming guide's table.
ARCHITECTURES = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
WIDTHS = (384, 768, 1600, 2048, 8192)


class Case(NamedTuple):
    words: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int


def main() -> int:
    import triton

    failed = 0
    for case in cases():
        found = {each: compiled(case, each) for each in ARCHITECTURES}
        failed += sum(not words.endswith("KiB") for words in found.values())
        print(case.words, ", ".join(f"{each // 10}.{each % 10}: {words}" for each, words in found.items()), flush=True)
    print(f"Triton {triton.__version__}: {failed} failed." if failed else f"Triton {triton.__version__}: all compiled.")
    return int(failed > 0)


def compiled(case: Case, architecture: int) -> str:
    """The shared memory that its code takes, or why there is none."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = case.types | dict.fromkeys(case.constants, "constexpr")
    try:
        made = triton.compile(ASTSource(fn=case.kernel, signature=types, constexprs=case.constants),
                              target=GPUTarget("cuda", architecture, 32), options={"num_warps": case.warps})
    except Exception as error:  # whatever the compiler raises is the answer
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    shared = made.metadata.shared
    return "too much shared memory" if shared > ARCHITECTURES[architecture] * KiB else f"{shared / KiB:.1f} KiB"


def cases() -> Iterator[Case]:
    from fitgpt.engine import kernels

    for half in ("*bf16", "*fp16", "*fp32"):
        yield Case(f"cross entropy of {half[1:]}", kernels._cross_entropy,
                   {"logits": half, "logits_stride": "i32", "targets": "*i64", "targets_stride": "i32",
                    "losses": "*fp32", "per_token": "*fp32", "width": "i32"},
                   {"ignored": -1, "with_gradient": True, "columns": kernels._COLUMNS}, kernels._WARPS)
    for width in WIDTHS:
        for stream, half in (("*fp32", "*fp16"), ("*bf16", "*bf16")):
            block = 1 << (width - 1).bit_length()
            yield Case(f"norm of {width} in {stream[1:]}", kernels._norm_backward,
                       {"d_x": stream, "d_norm": half, "x": stream, "added": half, "weight": "*fp32", "bias": "*fp32",
                        "rounded": half, "normed": half, "sums": "*fp32", "rows": "i32", "width": "i32"},
                       {"has_added": True, "has_bias": True, "rounds": stream != half, "again": True, "epsilon": 1e-5,
                        "block": block, "per_turn": max(1, (2048 if stream == "*fp32" else 1024) // block)},
                       max(4, block // 512))
    names = kernels._sum_programs.arg_names
    yield Case("sums of a norm", kernels._sum_programs,
               dict(zip(names[:4], ("*fp32", "*fp32", "i32", "i32"), strict=True)),
               dict(zip(names[4:], (128, 32), strict=True)), 4)
    for weights, states in (("*bf16", ("*i8", "*u8")), ("*fp32", ("*i8", "*u8")), ("*bf16", ("*fp32", "*fp32"))):
        yield Case(f"AdamW of {weights[1:]}, states {states[0][1:]}", kernels._low_precision_adamw,
                   {"parameter": weights, "gradient": weights, "firsts": states[0], "seconds": states[1],
                    "first_scales": "*fp32", "second_scales": "*fp32", "figures": "*fp32", "rng_seed": "*i64",
                    "number": "i32", "count": "i32", **dict.fromkeys(("decay", "beta1", "beta2", "epsilon"), "fp32")},
                   {"eight_bit": states[0] == "*i8", "stochastic": weights == "*bf16", "group": GROUP,
                    "groups": kernels._GROUPS}, 8)


if __name__ == "__main__":
    sys.exit(main())
