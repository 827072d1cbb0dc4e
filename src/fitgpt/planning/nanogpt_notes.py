"""Notes of a plan for nanoGPT's train.py: options it lacks, and what torch.compile decides on the GPU."""

from __future__ import annotations

from ..config.fields import option_specs
from ..config.resolve import resolve_run
from ..config.run_config import DEFAULT_VOCAB, GPT2_VOCAB, NOT_NANOGPTS, RunConfig
from ..data.shards import DataSummary
from ..memory.platform import Platform
from ..tapes.aten import round_up
from ..tapes.nanogpt_compiled import MULTIPLE, has_odd_sizes


def run_notes(config: RunConfig, given_vocab: int, data: DataSummary | None) -> list[str]:
    """Where train.py differs from the options given. `given_vocab`: 0 if none was given."""
    options = option_specs(RunConfig)
    ignored = ", ".join(f"{name}={getattr(config, name)}" for name in NOT_NANOGPTS
                        if getattr(config, name) != options[name].default)
    notes = [f"nanoGPT's train.py ignores {ignored}: it has no such option."] if ignored else []
    used = data.vocab_size if data and data.vocab_size and data.vocab_size != GPT2_VOCAB else DEFAULT_VOCAB
    if given_vocab and given_vocab != used and config.init_from == "scratch":
        here = f", here {used}" if data else ""
        notes.append("nanoGPT's train.py has no vocab_size: it uses the one in the data's meta.pkl, or "
                     f"{DEFAULT_VOCAB}{here}. This plan is for {given_vocab}.")
    return notes


def gpu_notes(config: RunConfig, platform: Platform) -> list[str]:
    """What depends on the GPU: its data types, and how torch.compile pads matmuls there."""
    run, notes = resolve_run(config, platform, "nanogpt"), list[str]()
    if not platform.has_bf16 and config.dtype == "auto":
        eager = ", and does not compile it here" if platform.compiles else ""
        notes.append("This plan is for float16. By default nanoGPT's train.py uses bfloat16, which torch reports as "
                     f"supported on this GPU{eager}: --dtype=bfloat16 plans that.")
    elif run.dtype == "bfloat16" and config.compile and not run.compile:
        other = " --dtype=float16 is compiled." if platform.compiles else ""
        notes.append("torch.compile does not support bfloat16 on this GPU and runs it eager, so this plan is for an "
                     f"eager run.{other}")
    tokens, vocab = run.batch_size * run.block_size, run.vocab_size
    if run.compile and has_odd_sizes(run.dtype, tokens, 0):
        notes.append(f"{tokens:,} tokens per micro-batch are not a multiple of {MULTIPLE}: how torch.compile pads that "
                     "is not modelled, and the run may use far more memory.")
    elif run.compile and has_odd_sizes(run.dtype, tokens, vocab):
        notes.append(f"A vocabulary of {vocab:,} is not a multiple of {MULTIPLE}: torch.compile times on the GPU which "
                     "matmuls to pad, so the run may use more or less memory than forecast, usually by one array of "
                     "logits."
                     + (f" {round_up(vocab, MULTIPLE):,} in the data's meta.pkl is more predictable and faster."
                        if config.init_from == "scratch" else ""))
    return notes
