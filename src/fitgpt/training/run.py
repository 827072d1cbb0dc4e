"""One training run, in the worker, in order: data, device, folder, weights, memory plan, rehearsal, loop, closing."""

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
from ..data.dataset import Dataset, open_dataset
from ..data.sample_order import positions_for
from ..data.shard_header import check_vocab, padded_vocab
from ..engine import huggingface
from ..engine.build import DTYPES, make_model, make_optimizer
from ..engine.device import DeviceChoice, read_memory, resolve_device
from ..engine.evaluate import ReadWindows
from ..engine.oom import release
from ..engine.optim.adamw import FIRST_SCALE, NoOptimizer, Scaler
from ..engine.prefetch import Prefetcher
from ..engine.weights import fill
from ..hardware.gpus import peak_flops
from ..planning.plan_file import FallbackPlan, phases_to_json
from ..runs.folder import RunFolder, holds_run, need_disk, open_run
from ..runs.metrics import RunFacts, SplitLoss
from ..show.progress import Display, closing, memory_plan, open_display, plan_vs_measured, say
from ..tapes.engine.run import checkpoint_bytes
from . import checkpoint
from .device_memory import NOT_PLANNED, DeviceMemoryPlan, plan_on_device
from .dry_run import Peaks, rehearse
from .loop import Training, is_evaluation_due, train
from .oom_recovery import Guard
from .plan_vs_measured import cumulative_reserved, phases_of, plan_row
from .reporter import TrainingReporter
from .wandb_tracker import Log, open_wandb
from .weight_sources import WeightSource, cropped, from_hugging_face, from_nanogpt, from_run, open_weights


def run(config_dict: Mapping[str, Any], notes: Sequence[str], stop_requested: Callable[[], bool], *,
        others: Mapping[str, int] | None = None, fallbacks: Sequence[FallbackPlan] | None = None) -> None:
    """Trains one run. `others`: bytes that others used of each GPU, by uuid, before this process started; `fallbacks`:
    smaller plans from a plan.json."""
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
        device_memory = plan_on_device(config, choice, others, fallbacks)
        if not (resuming and config.eval_only):  # else a later resume would only evaluate
            folder.record(config.to_dict())

        training = build_training(config, choice)
        if source is not None:
            restore(training, source, everything=resuming)
        wandb, wandb_note = open_wandb(config, folder.path)
        facts = gather_facts(config, choice, dataset, training.step, [
            *notes, *choice.notes, *([] if device_memory.plan else [NOT_PLANNED]), *wandb_note, *shape_notes,
            *leftovers, *folder.notes, *dataset.notes, *(source.notes if source else ())])
        if resuming and training.step >= config.max_iters:
            facts = replace(facts, notes=(*facts.notes, f"The run is at step {training.step} already, and max_iters is "
                                          f"{config.max_iters}: a higher --max_iters trains it further."))
        source = None  # frees its copies of the weights and optimizer state
        started = time.perf_counter()
        run_loop(config, facts, choice, dataset, folder, training, device_memory, wandb, stop_requested)
        say(closing(config.out_dir, training.step - facts.start_step, time.perf_counter() - started, training.best,
                    closing_hints(config, training)))
    if choice.mismatch:
        warn(f"{choice.mismatch.why} {choice.mismatch.fix}")


def warn(sentence: str) -> None:
    say(f"fitgpt: {sentence}", warning=True)


def closing_hints(config: RunConfig, training: Training) -> list[str]:
    """Sentences for the end of a run: what is not saved, and what to do next."""
    hints = []
    if training.saved_at != training.step and not config.eval_only and training.step > 0:
        hints.append("The last steps are not saved: always_save_checkpoint=False saves improvements only.")
    if holds_run(Path(config.out_dir)):
        hints.append(f"Generate text: fitgpt sample {shlex.quote(config.out_dir)}")
    return hints


def run_loop(config: RunConfig, facts: RunFacts, choice: DeviceChoice, dataset: Dataset, folder: RunFolder,
             training: Training, device_memory: DeviceMemoryPlan, wandb: Log | None,
             stop_requested: Callable[[], bool]) -> None:
    """Rehearses if that is due, then trains; reports forecast against measured memory however it ends."""
    if stop_requested():  # while torch was loading
        raise Interrupted("Stopped before training began, as requested.")
    peaks = Peaks(training.device)
    peaks.seen("load", read_memory(facts.device))
    splits = evaluation_splits(dataset, ("train", "val"), windows=config.eval_iters * config.batch_size,
                               block=config.eval_block, seed=config.seed)
    display = open_display(facts, terminal=sys.stdout.isatty())
    reporter = TrainingReporter(config, facts, splits, dataset.summary, folder, training, display, wandb,
                                stop_requested, peaks=peaks, card_bytes=device_memory.card_bytes)
    reconfigurer = RunReconfigurer(config, choice, dataset, folder, training, reporter, device_memory)
    guard = Guard(training, config, reconfigurer, reporter, step_up=config.step_up)
    try:
        folder.append_metrics({"kind": "run", **asdict(facts)})
        if device_memory.plan:
            folder.append_metrics(plan_row(device_memory.plan, device_memory.ladder()))
            display.note(memory_plan(device_memory.plan))
        if wants_rehearsal(config, training, device_memory):
            rehearse_under_guard(guard, reconfigurer, reporter, training, display, device_memory)
            if stop_requested():
                raise Interrupted("Stopped before training began, as requested.")
        if device_memory.plan and starts_without_evaluation(config, training):
            warm_up_eval(reporter)
        train(training, config, facts, guard, reporter, stop_requested)
    finally:
        guard.close()
        display.close()
        if device_memory.plan and "train" in peaks.of:
            measured = cumulative_reserved(peaks.of)
            say(plan_vs_measured(phases_of(device_memory.plan.forecast), measured))
            with suppress(SystemFault):  # such as a full disk: it must not hide why the run ended
                folder.append_metrics({"kind": "plan_measured", "phases": phases_to_json(measured)})


def wants_rehearsal(config: RunConfig, training: Training, device_memory: DeviceMemoryPlan) -> bool:
    something_to_do = training.step < config.max_iters or config.eval_only
    is_planned = device_memory.plan is not None
    return something_to_do and (config.rehearse is True or (config.rehearse == "auto" and is_planned))


def starts_without_evaluation(config: RunConfig, training: Training) -> bool:
    return training.step < config.max_iters and not is_evaluation_due(training, config)


def warm_up_eval(reporter: TrainingReporter) -> None:
    """A short evaluation on resume. The forecast assumes that an evaluation runs first: in another order of allocations
    a run that just fits may need some MiB more."""
    if evaluation := reporter.short_eval():
        reporter.peaks.seen("first_eval", evaluation.memory)


def rehearse_under_guard(guard: Guard, reconfigurer: RunReconfigurer, reporter: TrainingReporter, training: Training,
                         display: Display, device_memory: DeviceMemoryPlan) -> None:
    """Rehearses before the first step: what would be out of memory hours later is out of memory now."""
    started, requested = time.perf_counter(), guard.config
    done = guard.protected(
        lambda: rehearse(training, guard.config, reconfigurer.feed, reporter.short_eval, reporter.peaks))
    if isinstance(done, DeviceError):
        raise done
    seconds, measured = show_seconds(time.perf_counter() - started), cumulative_reserved(reporter.peaks.of)
    reporter.tell({"kind": "rehearsal", "step": training.step, "phases": phases_to_json(measured), "text":
                   f"rehearsed in {seconds}: evaluation, two iterations and a checkpoint's copies, at full size."})
    if device_memory.plan and guard.config == requested:
        display.note(plan_vs_measured(phases_of(device_memory.plan.forecast), measured))


# ---- the start: weights, shape, data

def find_source(config: RunConfig, folder: RunFolder) -> WeightSource | None:
    """The weights that the run starts from; None: it initialises its own."""
    if config.init_from == "scratch":
        return None
    if config.init_from == "resume":
        if holds_run(folder.path):
            return from_run(folder.path)
        source = from_nanogpt(folder.path / "ckpt.pt")
        note = (f"Resuming nanoGPT's {source.place} at step {source.state['step']}. It stores no float16 loss scale, "
                "so that starts anew; the data order is fitgpt's own.")
        return replace(source, notes=(note,))
    if config.init_from in gpt2_shapes:
        source = from_hugging_face(huggingface.find_gpt2(config.init_from))
    else:
        source = open_weights(config.init_from, "last")
    return cropped(source, config.block_size)


def take_shape(config: RunConfig, source: WeightSource | None, dataset: Dataset) -> tuple[RunConfig, list[str]]:
    """(the config with the shape of the weights, or with the data's vocabulary if there are none; notes)."""
    if source is None:
        vocab = config.vocab_size or padded_vocab(dataset.summary.tokenizer, dataset.summary.vocab_size)
        return replace(config, vocab_size=vocab), []
    shape = {key: getattr(source.gpt, key)
             for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")}
    forced = [f"{key} is {value}, as in {source.place}." for key, value in shape.items()
              if getattr(config, key) not in (value, 0)]
    return replace(config, **shape), forced


def check_data(config: RunConfig, dataset: Dataset, source: WeightSource | None) -> None:
    """Checks fingerprint, vocabulary and lengths before any GPU work: a token id out of range is a CUDA error there."""
    recorded = source.state.get("data") if source else None
    if config.init_from == "resume" and recorded and recorded != dataset.summary.fingerprint:
        raise DataError(
            f"{dataset.summary.path} is not the data this run was trained on: its fingerprint is "
            f"{dataset.summary.fingerprint[:12]}, the checkpoint's is {recorded[:12]}.",
            "Restore the data, or start a new run from these weights with another --out_dir.")
    if dataset.summary.vocab_size is not None:
        check_vocab(None, config.vocab_size, dataset.summary.vocab_size)
    for name in ("train", "val"):
        dataset.split(name).check_tokens(config.vocab_size)
        dataset.split(name).windows(config.block_size if name == "train" else config.eval_block)


def build_training(config: RunConfig, choice: DeviceChoice) -> Training:
    """Model, optimizer and loss scaler on the device."""
    device = torch.device(choice.device)
    torch.set_float32_matmul_precision("high")  # TF32 for float32, as in nanoGPT
    model = make_model(config, device, dtype=choice.dtype, compiled=choice.compile)
    optimizer = NoOptimizer() if config.eval_only else make_optimizer(config, model)
    training = Training(model, optimizer, Scaler(device, scaling=choice.dtype == "float16"))
    set_up_gradients(training, config, choice)
    return training


def set_up_gradients(training: Training, config: RunConfig, choice: DeviceChoice) -> None:
    """Turns on CUDA graphs, or keeps gradients between steps, as the config says."""
    if uses_cuda_graphs(config, choice):
        training.use_cuda_graphs(warn, trains=not config.eval_only)
    elif config.gradients == "kept" and not config.eval_only:
        training.keep_gradients()


def uses_cuda_graphs(config: RunConfig, choice: DeviceChoice) -> bool:
    on_cuda = choice.device.startswith("cuda")
    if config.cuda_graphs == "auto":
        return choice.compile and on_cuda and not config.cuda_graph_blockers
    if config.cuda_graphs and not on_cuda:
        raise DeviceError(f"cuda_graphs=True does not work with device={choice.device}.", "--cuda_graphs=auto")
    return config.cuda_graphs


def restore(training: Training, source: WeightSource, *, everything: bool) -> None:
    """Loads the weights; with `everything`, on a resume, the rest of the training's state too."""
    fill(training.model, source.weights, source.place)
    if not everything:
        return
    wrong = training.optimizer.load_tensors(source.optimizer)
    if wrong:
        raise CheckpointError(f"{source.place} has no matching optimizer state: {', '.join(wrong[:5])} "
                              f"{'and others ' if len(wrong) > 5 else ''}missing or of another shape.",
                              "To start a new run from its weights alone, export them and name that folder: "
                              f"fitgpt export {source.place} -o FOLDER, then --init_from=FOLDER.")
    state = source.state
    training.step = state["step"]
    training.saved_at = state["step"] if "data" in state else -1  # nanoGPT's checkpoint is not in our folder
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

def training_feed(config: RunConfig, dataset: Dataset, device: torch.device) -> Prefetcher:
    """Micro-batches by their number, from the start of the run."""
    split, accumulation = dataset.split("train"), config.gradient_accumulation_steps
    windows, per_step = split.windows(config.block_size), config.batch_size * accumulation

    def read(number: int) -> Any:
        step, micro = divmod(number, accumulation)
        if micro == 0 and step * per_step % windows < per_step:
            split.recheck()  # at the start of an epoch
        samples = positions_for(step, micro, batch_size=config.batch_size, accumulation=accumulation)
        return split.read(samples, config.block_size, config.seed)

    return Prefetcher(read, device, last=config.max_iters * accumulation - 1)


def evaluation_splits(dataset: Dataset, names: Sequence[str], *, windows: int, block: int,
                      seed: int) -> dict[str, tuple[ReadWindows, int]]:
    """Per split its reader and its number of windows: as many as requested, or all there are."""
    def reader(name: str) -> ReadWindows:
        return lambda numbers: dataset.split(name).read_fixed(np.asarray(numbers), block, seed)

    return {name: (reader(name), min(windows, dataset.split(name).windows(block))) for name in names}


# ---- changes after running out of memory

class RunReconfigurer:
    """Implements oom_recovery.Reconfigurer."""

    def __init__(self, config: RunConfig, choice: DeviceChoice, dataset: Dataset, folder: RunFolder,
                 training: Training, reporter: TrainingReporter, device_memory: DeviceMemoryPlan) -> None:
        self._config, self._choice, self._dataset, self._folder = config, choice, dataset, folder
        self._training, self._reporter, self._device_memory = training, reporter, device_memory
        self._current = config
        self.needs = device_memory.plan.forecast.needs if device_memory.plan else None

    def ladder(self) -> Sequence[FallbackPlan]:
        return self._device_memory.ladder()

    def room(self) -> int | None:
        return self._device_memory.room()

    def feed(self, config: RunConfig) -> Prefetcher:
        return training_feed(config, self._dataset, self._training.device)

    def adopt(self, config: RunConfig) -> None:
        training = self._training
        training.drop_cuda_graphs()
        training.model.levels, training.model.loss_chunk = list(config.levels), config.loss_chunk
        if config.offload != self._current.offload:
            moved = make_optimizer(config, training.model)
            wrong = moved.load_tensors(training.optimizer.tensors())
            if wrong:
                raise CheckpointError(f"The optimizer's state cannot be moved to offload={config.offload}: "
                                      f"{', '.join(wrong[:5])} {'and others ' if len(wrong) > 5 else ''}do not match.",
                                      "Resume without this --plan.")
            training.optimizer = moved
            release(training.device)
        self._current = config
        self._reporter.eval_batch = min(self._reporter.eval_batch, config.eval_batch)
        set_up_gradients(training, config, self._choice)

    def roll_back(self) -> None:
        """Restores the last checkpoint, or the start of the run."""
        training, saved = self._training, holds_run(self._folder.path)
        has_state = saved or self._config.init_from == "resume"
        source = from_run(self._folder.path) if saved else find_source(self._config, self._folder)
        if self._current.offload != "none":  # it may have copied only some of the gradients
            training.optimizer = make_optimizer(self._current, training.model)
        if source is None:
            reinitialise(training, self._config)
        else:
            restore(training, source, everything=has_state)
        if not has_state:
            zeros = {name: torch.zeros_like(each, device="cpu")  # except master weights, which follow the weights
                     for name, each in training.optimizer.tensors().items() if not name.endswith(".master")}
            training.optimizer.load_tensors(zeros)
            training.scaler.load_dict(dict(scale=FIRST_SCALE, good_steps=0.0, skipped=0.0, skipped_in_a_row=0.0))
            training.step, training.evaluated_at, training.saved_at, training.best = 0, -1, -1, None
            training.evaluation_status, training.last_good = checkpoint.UNKNOWN, None


def reinitialise(training: Training, config: RunConfig) -> None:
    """Initialises the weights in place, to the same values as build_training."""
    for parameter in training.model.parameters():
        parameter.data = parameter.data.float()
    torch.manual_seed(config.seed)
    training.model.reset_parameters()
    training.model.round_matrices(DTYPES[config.weights])

