"""A training run, put together: data, device, folder, weights, display; then the loop. Runs in the child process."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..config.run_config import RunConfig, gpt2_shapes
from ..core.errors import CheckpointError, DataError, DeviceError, Interrupted, SystemFault
from ..core.units import show_seconds
from ..data.header import check_vocab, padded_vocab
from ..data.order import positions_for
from ..data.shards import Dataset, check_tokens, open_dataset
from ..engine import huggingface, weights
from ..engine.chunked_loss import triton_works
from ..engine.device import DeviceChoice, read_memory, resolve_device
from ..engine.evaluate import ReadWindows
from ..engine.model import GPT, build_model
from ..engine.oom import release
from ..engine.optim.adamw import FIRST_SCALE, AdamW, AdamWSettings, Late, NoOptimizer, Optimizer, Scaler
from ..engine.optim.bitsandbytes import BitsandbytesAdamW
from ..engine.optim.low_precision import AdamWInBackward, RoundedAdamW
from ..engine.optim.muon import Muon
from ..engine.optim.offload import HostAdamW
from ..engine.prefetch import Feed
from ..hardware.gpus import peak_flops
from ..memory.gpt import checkpoint_bytes
from ..nouns import RunFacts, Rung, SplitLoss
from ..planning.plan_file import in_bytes
from ..runs.folder import RunFolder, holds_run, need_disk, open_run
from ..runs.plan_vs_measured import phases_of, plan_row, since_the_start
from ..show.live import Display, open_display, say
from ..show.text import closing, memory_plan, plan_beside_measured
from . import checkpoint
from .device_plan import NOT_PLANNED, Onboard, board
from .dry_run import Peaks, rehearse
from .loop import Training, is_evaluation_due, train
from .oom_recovery import Guard
from .ranks import Ranks
from .reporter import Desk
from .wandb_tracker import Log, open_wandb

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(config_dict: Mapping[str, Any], notes: Sequence[str], stop_asked: Callable[[], bool], *,
        others: Mapping[str, int] | None = None, rungs: Sequence[Rung] | None = None) -> None:
    """`others`: what others held of each card before this process came; `rungs`: smaller plans, made before."""
    config = RunConfig.from_dict(config_dict)
    dataset = open_dataset(config.dataset)
    choice = resolve_device(config.device, config.dtype, config.compile)
    resuming = config.init_from == "resume"
    with open_run(config.out_dir, config.to_dict(), resume=resuming) as folder:
        leftovers = checkpoint.clean_leftovers(folder.checkpoints)
        source = find_source(config, folder)
        config, shape_notes = take_shape(config, source, dataset)
        config = replace(config, dtype=choice.dtype)
        check_data(config, dataset, source)
        need_disk(config.out_dir, checkpoint_bytes(config) * 2)
        onboard = board(config, choice, others, rungs)
        if not (resuming and config.eval_only):  # else whoever goes on with the run would only evaluate
            folder.record(config.to_dict())

        training = build_training(config, choice)
        if source is not None:
            restore(training, source, everything=resuming)
        wandb, wandb_note = open_wandb(config, folder.path)
        facts = gather_facts(config, choice, dataset, training.step, [
            *notes, *choice.notes, *([] if onboard.plan else [NOT_PLANNED]), *wandb_note, *shape_notes, *leftovers,
            *folder.notes, *dataset.notes, *(source.notes if source else ())])
        if resuming and training.step >= config.max_iters:
            facts = replace(facts, notes=(*facts.notes, f"The run is at step {training.step} already, and max_iters is "
                                          f"{config.max_iters}: a higher --max_iters trains it further."))
        source = None  # its copies of the weights and optimizer states are no longer needed
        started = time.perf_counter()
        run_loop(config, facts, choice, dataset, folder, training, onboard, wandb, stop_asked)
        say(closing(config.out_dir, training.step - facts.start_step, time.perf_counter() - started, training.best,
                    last_words(config, training)))
    if choice.mismatch:
        warn(f"{choice.mismatch.why} {choice.mismatch.fix}")


def warn(sentence: str) -> None:
    say(f"fitgpt: {sentence}", warning=True)


def last_words(config: RunConfig, training: Training) -> list[str]:
    """What is worth saying at the end: what was not kept, and what can be done with what was."""
    saved = holds_run(Path(config.out_dir))
    unsaved = training.saved_at != training.step and not config.eval_only and training.step > 0
    words = {"Its last steps are not saved: always_save_checkpoint=False keeps improvements only.": unsaved,
             f"Let it write: fitgpt sample {shlex.quote(config.out_dir)}": saved}
    return [sentence for sentence, applies in words.items() if applies]


def run_loop(config: RunConfig, facts: RunFacts, choice: DeviceChoice, dataset: Dataset, folder: RunFolder,
             training: Training, onboard: Onboard, wandb: Log | None, stop_asked: Callable[[], bool]) -> None:
    if stop_asked():  # while torch was loading
        raise Interrupted("Stopped before training began, as asked.")
    peaks = Peaks(training.device)
    peaks.seen("load", read_memory(facts.device))
    splits = evaluation_splits(dataset, ("train", "val"), windows=config.eval_iters * config.batch_size,
                               block=config.eval_block, seed=config.seed)
    display = open_display(facts, terminal=sys.stdout.isatty())
    desk = Desk(config, facts, splits, dataset.summary, folder, training, display, wandb, stop_asked, peaks=peaks,
                card_bytes=onboard.card_bytes)
    ways = RunWays(config, choice, dataset, folder, training, desk, onboard)
    guard = Guard(training, config, ways, desk, step_up=config.step_up)
    try:
        folder.append_metrics({"kind": "run", **asdict(facts)})
        if onboard.plan:
            folder.append_metrics(plan_row(onboard.plan, onboard.ladder()))
            display.note(memory_plan(onboard.plan))
        if wants_rehearsal(config, training, onboard):
            go_through(guard, ways, desk, training, display, onboard)
            if stop_asked():
                raise Interrupted("Stopped before training began, as asked.")
        if onboard.plan and goes_straight_to_training(config, training):
            look_first(desk)
        train(training, config, facts, guard, desk, stop_asked)
    finally:
        guard.close()
        display.close()
        if onboard.plan and "train" in peaks.of:
            say(plan_beside_measured(phases_of(onboard.plan.forecast), since_the_start(peaks.of)))
            with suppress(SystemFault):  # a full disk, say: that must not hide why the run ended
                folder.append_metrics({"kind": "plan_measured", "phases": in_bytes(since_the_start(peaks.of))})


def wants_rehearsal(config: RunConfig, training: Training, onboard: Onboard) -> bool:
    something_to_do = training.step < config.max_iters or config.eval_only
    return something_to_do and (config.rehearse is True or (config.rehearse == "auto" and onboard.plan is not None))


def goes_straight_to_training(config: RunConfig, training: Training) -> bool:
    return training.step < config.max_iters and not is_evaluation_due(training, config)


def look_first(desk: Desk) -> None:
    """A resumed run looks at a few windows where a new one has its first evaluation. What comes first decides where the
    rest finds room: the plan is of that order, and in another a run that just fits may want some megabytes more."""
    if seen := desk.glance():
        desk.peaks.seen("first_eval", seen.memory)


def go_through(guard: Guard, ways: RunWays, desk: Desk, training: Training, display: Display,
               onboard: Onboard) -> None:
    """The rehearsal: all of it before the first step, so that what would run out of memory in hours does so now."""
    started, asked = time.perf_counter(), guard.config
    done = guard.protected(lambda: rehearse(training, guard.config, ways.feed, desk.glance, desk.peaks))
    if isinstance(done, DeviceError):
        raise done
    seconds, measured = show_seconds(time.perf_counter() - started), since_the_start(desk.peaks.of)
    desk.tell({"kind": "rehearsal", "step": training.step, "phases": in_bytes(measured), "text":
               f"rehearsed in {seconds}: evaluation, two iterations and a checkpoint's copy, at full size."})
    if onboard.plan and guard.config == asked:
        display.note(plan_beside_measured(phases_of(onboard.plan.forecast), measured))


# ---- where it starts

def find_source(config: RunConfig, folder: RunFolder) -> weights.Source | None:
    """What the run starts from; None: fresh weights."""
    if config.init_from == "scratch":
        return None
    if config.init_from == "resume":
        if holds_run(folder.path):
            return weights.from_run(folder.path)
        source = weights.from_nanogpt(folder.path / "ckpt.pt")
        note = (f"Going on from nanoGPT's {source.place} at step {source.state['step']}. It keeps no float16 loss "
                "scale, so that starts afresh; data comes in fitgpt's own order.")
        return replace(source, notes=(note,))
    if config.init_from in gpt2_shapes:
        source = weights.from_hugging_face(huggingface.find_gpt2(config.init_from))
    else:
        source = weights.open_any(config.init_from, "last")
    return weights.cropped(source, config.block_size)


def take_shape(config: RunConfig, source: weights.Source | None, dataset: Dataset) -> tuple[RunConfig, list[str]]:
    """The config with the shape that the weights have, or with the data's vocabulary where they are fresh."""
    if source is None:
        vocab = config.vocab_size or padded_vocab(dataset.summary.tokenizer, dataset.summary.vocab_size)
        return replace(config, vocab_size=vocab), []
    shape = {key: getattr(source.gpt, key)
             for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")}
    forced = [f"{key} is {value}, as in {source.place}." for key, value in shape.items()
              if getattr(config, key) not in (value, 0)]
    return replace(config, **shape), forced


def check_data(config: RunConfig, dataset: Dataset, source: weights.Source | None) -> None:
    """Before any work on the device: tokens the model does not know would break it beyond repair."""
    recorded = source.state.get("data") if source else None
    if config.init_from == "resume" and recorded and recorded != dataset.summary.fingerprint:
        raise DataError(
            f"{dataset.summary.path} is not the data this run was trained on: its fingerprint is "
            f"{dataset.summary.fingerprint[:12]}, the checkpoint's is {recorded[:12]}.",
            "Bring the data back as it was, or start a new run from these weights with another --out_dir.")
    if dataset.summary.vocab_size is not None:
        check_vocab(None, config.vocab_size, dataset.summary.vocab_size)
    for name in ("train", "val"):
        check_tokens(dataset.split(name), config.vocab_size)
        dataset.split(name).windows(config.block_size if name == "train" else config.eval_block)


def build_training(config: RunConfig, choice: DeviceChoice) -> Training:
    device = torch.device(choice.device)
    torch.set_float32_matmul_precision("high")  # TF32 where float32 is asked for, as nanoGPT has it
    model = build_model(config.gpt_config(), device, config.seed)
    model.compute_dtype = DTYPES[choice.dtype]
    model.loss_chunk, model.levels = config.loss_chunk, list(config.levels)
    if choice.compile:
        model.compile()
    model.residual_dtype = DTYPES[config.residual]
    model.round_matrices(DTYPES[config.weights])
    if config.casts == "kept":
        model.keep_copies()
    optimizer = NoOptimizer() if config.eval_only else make_optimizer(config, model)
    training = Training(model, optimizer, Scaler(device, scaling=choice.dtype == "float16"))
    settle_gradients(training, config, choice)
    return training


def settle_gradients(training: Training, config: RunConfig, choice: DeviceChoice) -> None:
    """Whether GPU work is recorded, and whether gradients stay where they are."""
    if records_gpu_work(config, choice):
        training.record_gpu_work(warn, trains=not config.eval_only)
    elif config.gradients == "kept" and not config.eval_only:
        training.keep_gradients()


def make_optimizer(config: RunConfig, model: GPT) -> Optimizer:
    if config.states == "late":
        return Late(lambda: make_optimizer(replace(config, states="early"), model))
    settings = AdamWSettings(config.beta1, config.beta2, config.weight_decay)
    parameters = dict(model.named_parameters())
    if config.optimizer == "muon":
        return Muon(parameters, settings)
    if config.offload != "none":
        return HostAdamW(parameters, settings, stream=config.offload == "gradients")
    if config.adam8bit == "bitsandbytes":
        return BitsandbytesAdamW(parameters, settings)
    if config.step_in_backward or config.optimizer == "adam8bit" or config.weights == "bfloat16":
        kind = AdamWInBackward if config.step_in_backward else RoundedAdamW
        on_card = next(iter(parameters.values())).device.type == "cuda"
        return kind(parameters, settings, eight_bit=config.optimizer == "adam8bit", fused=on_card and triton_works(),
                    seed=config.seed)
    return AdamW(parameters, settings)


def records_gpu_work(config: RunConfig, choice: DeviceChoice) -> bool:
    on_cuda = choice.device.startswith("cuda")
    if config.cuda_graphs == "auto":
        return choice.compile and on_cuda and not config.not_recorded
    if config.cuda_graphs and not on_cuda:
        raise DeviceError(f"cuda_graphs=True does not work with device={choice.device}.", "--cuda_graphs=auto")
    return config.cuda_graphs


def restore(training: Training, source: weights.Source, *, everything: bool) -> None:
    """Weights, and on a resume all the rest of the training's state."""
    weights.fill(training.model, source.weights, source.place)
    if not everything:
        return
    wrong = training.optimizer.load_tensors(source.optimizer)
    if wrong:
        raise CheckpointError(f"{source.place} has no optimizer state that fits: {', '.join(wrong[:5])} "
                              f"{'and others ' if len(wrong) > 5 else ''}missing or of another shape.",
                              "To start a new run from its weights alone, export them and name that folder: "
                              f"fitgpt export {source.place} -o FOLDER, then --init_from=FOLDER.")
    state = source.state
    training.step = state["step"]
    training.saved_at = state["step"] if "data" in state else -1  # nanoGPT's checkpoint is not one of ours
    training.evaluated_at = state.get("evaluated_at", -1)
    training.evaluation_status = state.get("evaluation_status", checkpoint.UNKNOWN)
    training.best, training.last_good = (SplitLoss(**state[name]) if state.get(name) else None
                                         for name in ("best", "last_good"))
    if state.get("scaler"):
        training.scaler.load_dict(state["scaler"])


def gather_facts(config: RunConfig, choice: DeviceChoice, dataset: Dataset, start_step: int,
                 notes: Sequence[str]) -> RunFacts:
    flops, source = peak_flops(choice.card, choice.dtype)
    return RunFacts(
        config=config.to_dict(), params=config.gpt_config().count_params(), device=choice.device,
        device_name=choice.name, dtype=choice.dtype, compiled=choice.compile, peak_flops=flops, peak_source=source,
        tokens_per_step=config.tokens_per_step, train_tokens=dataset.summary.train_tokens,
        val_tokens=dataset.summary.val_tokens, start_step=start_step, max_iters=config.max_iters,
        versions=versions(), notes=tuple(notes))


def versions() -> dict[str, str]:
    return {"fitgpt": __version__, "torch": torch.__version__, "python": platform.python_version(),
            "cuda": torch.version.cuda or "none"}


# ---- data for the loop

def training_feed(config: RunConfig, dataset: Dataset, device: torch.device, ranks: Ranks) -> Feed:
    split, pieces = dataset.split("train"), config.gradient_accumulation_steps
    windows, a_step = split.windows(config.block_size), config.batch_size * pieces

    def read(number: int) -> Any:
        step, micro = divmod(number, pieces)
        if micro == 0 and step * a_step % windows < a_step:
            split.recheck()  # an epoch begins
        samples = positions_for(step, micro, batch_size=config.batch_size, accumulation=pieces, rank=ranks.rank,
                                world=ranks.world)
        return split.read(samples, config.block_size, config.seed)

    return Feed(read, device, last=config.max_iters * pieces - 1)


def evaluation_splits(dataset: Dataset, names: Sequence[str], *, windows: int, block: int,
                      seed: int) -> dict[str, tuple[ReadWindows, int]]:
    """For each split its reader and its number of windows: as many as asked for, or all there are."""
    def reader(name: str) -> ReadWindows:
        return lambda numbers: dataset.split(name).read_fixed(np.asarray(numbers), block, seed)

    return {name: (reader(name), min(windows, dataset.split(name).windows(block))) for name in names}


# ---- how it may compute otherwise, should memory run out

class RunWays:
    """What guard.py asks for: see its Ways."""

    def __init__(self, config: RunConfig, choice: DeviceChoice, dataset: Dataset, folder: RunFolder,
                 training: Training, desk: Desk, onboard: Onboard) -> None:
        self._config, self._choice, self._dataset, self._folder = config, choice, dataset, folder
        self._training, self._desk, self._onboard = training, desk, onboard
        self._now = config
        self.needs = onboard.plan.forecast.needs if onboard.plan else None

    def ladder(self) -> Sequence[Rung]:
        return self._onboard.ladder()

    def room(self) -> int | None:
        return self._onboard.room()

    def feed(self, config: RunConfig) -> Feed:
        return training_feed(config, self._dataset, self._training.device, Ranks())

    def adopt(self, config: RunConfig) -> None:
        training = self._training
        training.forget_recorded_work()
        training.model.levels, training.model.loss_chunk = list(config.levels), config.loss_chunk
        if config.offload != self._now.offload:
            moved = make_optimizer(config, training.model)
            wrong = moved.load_tensors(training.optimizer.tensors())
            if wrong:
                raise CheckpointError(f"The optimizer's state cannot go on with offload={config.offload}: "
                                      f"{', '.join(wrong[:5])} {'and others ' if len(wrong) > 5 else ''}do not fit.",
                                      "Resume without a --plan that says so.")
            training.optimizer = moved
            release(training.device)
        self._now = config
        self._desk.eval_batch = min(self._desk.eval_batch, config.eval_batch)
        settle_gradients(training, config, self._choice)

    def go_back(self) -> None:
        """To the last checkpoint, or to where the run began."""
        training, saved = self._training, holds_run(self._folder.path)
        has_state = saved or self._config.init_from == "resume"
        source = weights.from_run(self._folder.path) if saved else find_source(self._config, self._folder)
        if self._now.offload != "none":  # it may be in the middle of taking gradients over
            training.optimizer = make_optimizer(self._now, training.model)
        if source is None:
            begin_again(training, self._config)
        else:
            restore(training, source, everything=has_state)
        if not has_state:
            nothing = {name: torch.zeros_like(each, device="cpu")  # but for masters, which are weights
                       for name, each in training.optimizer.tensors().items() if not name.endswith(".master")}
            training.optimizer.load_tensors(nothing)
            training.scaler.load_dict(dict(scale=FIRST_SCALE, good_steps=0.0, skipped=0.0, skipped_in_a_row=0.0))
            training.step, training.evaluated_at, training.saved_at, training.best = 0, -1, -1, None
            training.evaluation_status, training.last_good = checkpoint.UNKNOWN, None


def begin_again(training: Training, config: RunConfig) -> None:
    """Fresh weights, the same as build_training made, in their place."""
    for parameter in training.model.parameters():
        parameter.data = parameter.data.float()
    torch.manual_seed(config.seed)
    training.model.reset_parameters()
    training.model.round_matrices(DTYPES[config.weights])

