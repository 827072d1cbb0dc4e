"""What nanoGPT's train.py and torch's compiler do on their own, and what that means for a forecast, in sentences."""

from __future__ import annotations

from .config.fields import knobs_of
from .config.run_config import DEFAULT_VOCAB, GPT2_VOCAB, RunConfig
from .memory.aten import up_to
from .memory.padding import MULTIPLE, has_odd_sizes
from .memory.setting import Setting
from .nouns import DataSummary
from .planning.forecast import NOT_NANOGPTS, settled


def of_the_run(config: RunConfig, said_vocab: int, data: DataSummary | None) -> list[str]:
    """What its train.py takes otherwise than it is told here. `said_vocab`: 0 where none was said."""
    knobs = knobs_of(RunConfig)
    unheard = ", ".join(f"{name}={getattr(config, name)}" for name in NOT_NANOGPTS
                        if getattr(config, name) != knobs[name].default)
    notes = [f"nanoGPT's train.py does not know {unheard}: it trains as if that were not there."] if unheard else []
    taken = data.vocab_size if data and data.vocab_size and data.vocab_size != GPT2_VOCAB else DEFAULT_VOCAB
    if said_vocab and said_vocab != taken and config.init_from == "scratch":
        here = f", here {taken}" if data else ""
        notes.append("nanoGPT's train.py has no vocab_size: it takes the one in the data's meta.pkl, or "
                     f"{DEFAULT_VOCAB}{here}. Planned is {said_vocab}.")
    return notes


def on_the_card(config: RunConfig, setting: Setting) -> list[str]:
    """What depends on the card, or on what torch's compiler finds out there."""
    run, notes = settled(config, setting, "nanogpt"), list[str]()
    if not setting.has_bf16 and config.dtype == "auto":
        but = ", and which it does not compile here" if setting.compiles else ""
        notes.append("Planned is float16. Left to itself, nanoGPT's train.py takes bfloat16, which torch says this "
                     f"card can do{but}: --dtype=bfloat16 plans that.")
    elif run.dtype == "bfloat16" and config.compile and not run.compile:
        other = " --dtype=float16 is compiled." if setting.compiles else ""
        notes.append(f"torch compiles no bfloat16 for this card and runs it eager: so it is planned.{other}")
    tokens, vocab = run.batch_size * run.block_size, run.vocab_size
    if run.compile and has_odd_sizes(run.dtype, tokens, 0):
        notes.append(f"{tokens:,} tokens a micro-batch are no multiple of {MULTIPLE}: what torch's compiler makes of "
                     "that is not foreseen, and the run may hold far more.")
    elif run.compile and has_odd_sizes(run.dtype, tokens, vocab):
        notes.append(f"A vocabulary of {vocab:,} is no multiple of {MULTIPLE}: torch's compiler times on the card "
                     "which products to pad, so the run may hold more or less than this, mostly by an array of logits."
                     + (f" {up_to(vocab, MULTIPLE):,} in the data's meta.pkl is surer and quicker."
                        if config.init_from == "scratch" else ""))
    return notes
