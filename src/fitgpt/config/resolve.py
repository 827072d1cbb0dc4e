"""RunConfig + Platform → ResolvedRun: the config with no `auto` left.

Tapes, forecasts and speed estimates take a ResolvedRun, so that none of them has to resolve anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..memory.platform import Platform
from .run_config import DEFAULT_VOCAB, RunConfig


@dataclass(frozen=True)
class ResolvedRun(RunConfig):
    """A run whose dtype, compile and vocab_size are definite. `dataclasses.replace` gives another ResolvedRun."""


def resolve_run(config: RunConfig, setting: Platform, trainer: str = "fitgpt") -> ResolvedRun:
    """What `auto` means on that platform, and GPT-2's padded vocabulary where none is given.

    A GPU without bfloat16: torch does not compile it, warns and runs eagerly (compile_fx.py,
    _check_triton_bf16_support). nanoGPT's runs do so; fitgpt rejects them.
    """
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if setting.has_bf16 else "float16"
    compiled = config.compile if config.compile != "auto" else setting.compiles
    if trainer == "nanogpt" and dtype == "bfloat16" and not setting.has_bf16:
        compiled = False
    given = {field.name: getattr(config, field.name) for field in fields(RunConfig)}
    return ResolvedRun(**{**given, "dtype": dtype, "compile": compiled,
                          "vocab_size": config.vocab_size or DEFAULT_VOCAB})
