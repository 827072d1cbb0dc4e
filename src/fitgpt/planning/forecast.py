"""RunConfig and card → Forecast: what each phase holds, who owns the bytes at the peak, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

from ..config.run_config import DEFAULT_VOCAB, RunConfig
from ..core.units import MiB
from ..hardware.gpus import Card
from ..memory import gpt, nanogpt, sampling
from ..memory.allocator import PhasePeak, Timeline, needs, needs_under, replay, reserved_in_other_orders
from ..memory.aten import Gpu
from ..memory.drafted import Highest, drafted
from ..memory.nanorun import NanoGPTRun
from ..memory.setting import Setting
from ..memory.tape import Tape
from ..nouns import Budget, Forecast, MemoryPlan, PhaseForecast
from . import formulas

TRAINERS = ("fitgpt", "nanogpt")
# Knobs that nanoGPT's train.py does not have: a config file that sets them is read there, and nothing happens.
NOT_NANOGPTS = ("eval_batch_size", "eval_block_size", "grad_checkpoint", "recompute", "weights", "residual",
                "optimizer", "adam8bit", "offload", "step_in_backward", "casts", "gradients", "states", "loss_chunk")

Work = Callable[[], tuple[int, ...]]


def in_turn(work: Work) -> Work:
    """To be done when its result is asked for."""
    return work


def tape_of(config: RunConfig, setting: Setting, trainer: str = "fitgpt") -> Tape:
    """All that the run allocates and frees. `config.vocab_size` 0 means GPT-2's, padded."""
    if trainer == "nanogpt":
        return nanogpt.write(nanogpt_run(config), gpu=_gpu(config, setting))
    return gpt.write(config, setting)


def draft(config: RunConfig, setting: Setting, trainer: str = "fitgpt") -> dict[str, Highest]:
    """About what a run with layers all alike holds at its highest, by phase. Of nanoGPT's two batches of evaluation and
    two iterations of two or three micro-batches are looked at: every phase is there, and not what it comes to in time.
    """
    def write(layers: int) -> Tape:
        shallow = replace(config, n_layer=layers, recompute=config.levels[0], grad_checkpoint=False)
        if trainer == "nanogpt":
            asked = config.gradient_accumulation_steps
            return nanogpt.write(nanogpt_run(shallow), gpu=_gpu(config, setting), eval_batches=(2, 2),
                                 history=(min(asked, 2 + asked % 2),) * 2)
        return gpt.write(shallow, setting)

    return drafted(config.n_layer, write, reuses=trainer == "nanogpt" and bool(config.compile))


def held_at_least(config: RunConfig, setting: Setting, trainer: str = "fitgpt") -> int:
    """No more than the tape of a settled config holds at its highest, in much less time than to write it takes."""
    if config.eval_only:
        return 0
    if trainer == "nanogpt":
        return nanogpt.held_at_least(nanogpt_run(config), _gpu(config, setting))
    return gpt.held_at_a_step(config)


def _gpu(config: RunConfig, setting: Setting) -> Gpu:
    return Gpu(setting.workspace, setting.sms, setting.threads, setting.cache, setting.attention(config, "nanogpt"))


def forecast(config: RunConfig, setting: Setting, trainer: str = "fitgpt", limit: int | None = None,
             aside: Callable[[Work], Work] = in_turn) -> Forecast:
    """`limit`: what the allocator may reserve, if that is known: then what is needed is true of it, and a run that
    would like to reserve more and gets by with less is told as it gets by. `aside`: who does a part of the work."""
    config = settled(config, setting, trainer)
    expandable = setting.expands(trainer)
    tape = tape_of(config, setting, trainer)
    tape.steps  # worked out before another process is to have them  # noqa: B018
    others = in_turn(tuple) if expandable else aside(partial(reserved_in_other_orders, tape))
    free_run = timeline = replay(tape, expandable=expandable)
    needed = needs(tape, expandable=expandable, free_run=free_run)
    if limit is not None:
        needed = needs_under(limit, tape, needed, free_run=free_run, expandable=expandable)
        if needed <= limit < free_run.reserved:
            timeline = replay(tape, limit, expandable=expandable)
    peaks = timeline.peaks()
    highest = max(peaks.values(), key=lambda peak: peak.allocated)
    phases = _by_phase(peaks)
    reserved = free_run.reserved, *others()
    most = max(reserved) if timeline is free_run else timeline.reserved
    if config.eval_only:
        pass  # that is all
    elif trainer == "nanogpt":
        phases |= _apart_of_nanogpt(config, timeline, phases)
    else:  # sampling is another process, and so is a resume, whose checkpoint is read on the host
        sampled = replay(sampling.write(config, setting), expandable=expandable)
        sample = sampled.peaks()["sample"]
        phases |= {"resume": phases["load"] if config.states == "early" else _resumed(config, setting),
                   "sample": PhaseForecast(sample.allocated, sample.reserved)}
        if sample.allocated > highest.allocated:
            highest, timeline = sample, sampled
    heard = config if trainer == "fitgpt" else replace(config, **{name: getattr(RunConfig, name)
                                                                  for name in NOT_NANOGPTS})
    return Forecast(
        trainer=trainer, params=config.gpt_config().count_params(), phases=phases,
        peak_phase=highest.phase, owners_at_peak=formulas.owners(config, trainer, timeline, highest.event),
        needs=needed, reserved_range=(min(*reserved, most), most),
        assumes=setting.in_words(config, trainer), host_bytes=gpt.host_bytes(heard),
        checkpoint_bytes=gpt.checkpoint_bytes(heard))


def _by_phase(peaks: dict[str, PhasePeak]) -> dict[str, PhaseForecast]:
    """Reserved as it is at most since the start: a phase that comes again comes after all the others."""
    reserved = accumulate((peak.reserved for peak in peaks.values()), max)
    return {phase: PhaseForecast(peak.allocated, most)
            for (phase, peak), most in zip(peaks.items(), reserved, strict=True)}


def _resumed(config: RunConfig, setting: Setting) -> PhaseForecast:
    """What is there once a checkpoint was read: states that a new run makes later, too."""
    resumed = replay(gpt.write(replace(config, init_from="resume"), setting), expandable=setting.expandable)
    peak = resumed.peaks()["load"]
    return PhaseForecast(peak.allocated, peak.reserved)


def _apart_of_nanogpt(config: RunConfig, timeline: Timeline,
                      phases: dict[str, PhaseForecast]) -> dict[str, PhaseForecast]:
    """Phases that are not on the tape: a resume reads the checkpoint onto the card, weights and moments, beside the
    model it has made."""
    held = phases["load"].allocated + 12 * config.gpt_config().count_params()
    return {"save": PhaseForecast(timeline.allocated[-1], timeline.reserved),
            "resume": PhaseForecast(held, max(held, phases["load"].reserved))}


def plan(config: RunConfig, setting: Setting, budget: Budget, trainer: str = "fitgpt",
         aside: Callable[[Work], Work] = in_turn) -> MemoryPlan:
    return MemoryPlan(forecast(config, setting, trainer, budget.reserve_limit, aside), budget)


def needs_by_limit(config: RunConfig, setting: Setting, trainer: str = "fitgpt") -> Callable[[int], int]:
    """What a run needs, as true of each limit that is then asked about; the tape is written and searched once."""
    tape, expandable = tape_of(settled(config, setting, trainer), setting, trainer), setting.expands(trainer)
    free_run = replay(tape, expandable=expandable)
    usual = needs(tape, expandable=expandable, free_run=free_run)
    return lambda limit: needs_under(limit, tape, usual, free_run=free_run, expandable=expandable)


def timeline_of(config: RunConfig, setting: Setting, trainer: str = "fitgpt") -> Timeline:
    """The run replayed: what draws the tape over time."""
    config = settled(config, setting, trainer)
    return replay(tape_of(config, setting, trainer), expandable=setting.expands(trainer))


def settled(config: RunConfig, setting: Setting, trainer: str = "fitgpt") -> RunConfig:
    """The config with what `auto` will mean on that card, and with a vocabulary. Where a card has no bfloat16, torch
    does not compile it, says so and goes on (compile_fx.py, _check_triton_bf16_support); fitgpt refuses it."""
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if setting.has_bf16 else "float16"
    compiled = config.compile if config.compile != "auto" else setting.compiles
    if trainer == "nanogpt" and dtype == "bfloat16" and not setting.has_bf16:
        compiled = False
    return replace(config, dtype=dtype, compile=compiled, vocab_size=config.vocab_size or DEFAULT_VOCAB)


def budget_for(card: Card, *, others: int = 0, budget: int | None = None) -> Budget:
    """What a process may hold of a card that is not here: the table's figures, and the user's."""
    assert card.usable_mib is not None  # every NVIDIA row has them
    assert card.outside_mib is not None
    usable, outside = card.usable_mib * MiB, card.outside_mib * MiB
    sources = (f"CUDA gives {card.usable_mib} MiB of this card, the {card.name} ({card.usable_src}).",
               f"A training process holds {card.outside_mib} MiB outside PyTorch's allocator ({card.outside_src}).")
    return Budget(card.name, usable, others, usable - others if budget is None else budget, outside, sources)


def nanogpt_run(config: RunConfig) -> NanoGPTRun:
    return NanoGPTRun(
        n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, batch_size=config.batch_size,
        block_size=config.block_size, vocab_size=config.vocab_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps, dtype=config.dtype, dropout=config.dropout,
        bias=config.bias, compile=bool(config.compile), grad_clip=config.grad_clip, eval_only=config.eval_only)
