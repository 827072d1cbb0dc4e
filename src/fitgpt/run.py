"""A training run, put together: data, device, folder, weights, display; then the loop. Runs in the child process."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import __version__, weights
from .cards import peak_flops
from .config import RunConfig, gpt2_shapes
from .data.header import padded_vocab
from .data.order import positions_for
from .data.shards import Dataset, check_tokens, check_vocab, open_dataset
from .engine import checkpoint
from .engine.device import DeviceChoice, resolve_device
from .engine.evaluate import ReadWindows, evaluate
from .engine.feed import Feed
from .engine.loop import Training, train
from .engine.model import GPT, build_model
from .engine.muon import Muon
from .engine.offload import HostAdamW
from .engine.optim import AdamW, AdamWSettings, Optimizer, Scaler
from .engine.parallel import Ranks
from .engine.rounded import AdamWInBackward, RoundedAdamW
from .errors import CheckpointError, DataError, DeviceError, Interrupted
from .interop import hf
from .nouns import Evaluation, GPTConfig, RunFacts, SplitLoss, StepReport
from .runfolder import RunFolder, need_disk, open_run
from .show.live import Display, open_display
from .show.text import closing
from .wandb import Log, open_wandb

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(config_dict: Mapping[str, Any], notes: Sequence[str], stop_asked: Callable[[], bool]) -> None:
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
        need_disk(config.out_dir, checkpoint_bytes(config.gpt_config()) * 2)
        folder.record(config.to_dict())

        training = build_training(config, choice)
        if source is not None:
            restore(training, source, everything=resuming)
        wandb, wandb_note = open_wandb(config, folder.path)
        facts = gather_facts(config, choice, dataset, training.step, [
            *notes, *choice.notes, *wandb_note, *shape_notes, *leftovers, *folder.notes, *dataset.notes,
            *(source.notes if source else ())])
        if resuming and training.step >= config.max_iters:
            facts = replace(facts, notes=(*facts.notes, f"The run is at step {training.step} already, and max_iters is "
                                          f"{config.max_iters}: a higher --max_iters trains it further."))
        source = None  # its copies of the weights and optimizer states are no longer needed
        started = time.perf_counter()
        run_loop(config, facts, dataset, folder, training, wandb, stop_asked)
        print(closing(config.out_dir, training.step - facts.start_step, time.perf_counter() - started, training.best,
                      last_words(config, training)), flush=True)
    if choice.mismatch:
        print(f"fitgpt: {choice.mismatch.why} {choice.mismatch.fix}", file=sys.stderr)


def last_words(config: RunConfig, training: Training) -> list[str]:
    """What is worth saying at the end: what was not kept, and what can be done with what was."""
    saved = weights.holds_run(Path(config.out_dir))
    unsaved = training.saved_at != training.step and not config.eval_only and training.step > 0
    words = {"Its last steps are not saved: always_save_checkpoint=False keeps improvements only.": unsaved,
             f"Let it write: fitgpt sample {shlex.quote(config.out_dir)}": saved}
    return [sentence for sentence, applies in words.items() if applies]


def run_loop(config: RunConfig, facts: RunFacts, dataset: Dataset, folder: RunFolder, training: Training,
             wandb: Log | None, stop_asked: Callable[[], bool]) -> None:
    if stop_asked():  # while torch was loading
        raise Interrupted("Stopped before training began, as asked.")
    display = open_display(facts, terminal=sys.stdout.isatty())
    desk = Desk(config, facts, dataset, folder, training, display, wandb, stop_asked)
    feed = training_feed(config, dataset, torch.device(facts.device), Ranks())
    try:
        folder.append_metrics({"kind": "run", **asdict(facts)})
        train(training, config, facts, feed, desk, stop_asked)
    finally:
        feed.close()
        display.close()


# ---- where it starts

def find_source(config: RunConfig, folder: RunFolder) -> weights.Source | None:
    """What the run starts from; None: fresh weights."""
    if config.init_from == "scratch":
        return None
    if config.init_from == "resume":
        if weights.holds_run(folder.path):
            return weights.from_run(folder.path)
        source = weights.from_nanogpt(folder.path / "ckpt.pt")
        note = (f"Going on from nanoGPT's {source.place} at step {source.state['step']}. It keeps no float16 loss "
                "scale, so that starts afresh; data comes in fitgpt's own order.")
        return replace(source, notes=(note,))
    place = hf.find_gpt2(config.init_from) if config.init_from in gpt2_shapes else Path(config.init_from)
    return weights.cropped(weights.from_hugging_face(place), config.block_size)


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
    optimizer = make_optimizer(config, model, compiled=choice.compile)
    training = Training(model, optimizer, Scaler(device, scaling=choice.dtype == "float16"))
    if records_gpu_work(config, choice):
        training.record_gpu_work(lambda sentence: print(f"fitgpt: {sentence}", file=sys.stderr))
    return training


def make_optimizer(config: RunConfig, model: GPT, *, compiled: bool) -> Optimizer:
    settings = AdamWSettings(config.beta1, config.beta2, config.weight_decay)
    parameters = dict(model.named_parameters())
    if config.optimizer == "muon":
        return Muon(parameters, settings)
    if config.offload != "none":
        return HostAdamW(parameters, settings, stream=config.offload == "gradients")
    if config.step_in_backward or config.optimizer == "adam8bit" or config.weights == "bfloat16":
        kind = AdamWInBackward if config.step_in_backward else RoundedAdamW
        return kind(parameters, settings, eight_bit=config.optimizer == "adam8bit", compiled=compiled,
                    seed=config.seed)
    return AdamW(parameters, settings)


def records_gpu_work(config: RunConfig, choice: DeviceChoice) -> bool:
    """Recorded work cannot roll dice again when a block is computed again, nor talk to the host in its middle."""
    hindrances = {f"dropout={config.dropout}": config.dropout, f"device={choice.device}": choice.device[:4] != "cuda",
                  "step_in_backward": config.step_in_backward, "offload=gradients": config.offload == "gradients"}
    why = ", ".join(words for words, hinders in hindrances.items() if hinders)
    if config.cuda_graphs == "auto":
        return choice.compile and not why
    if config.cuda_graphs and why:
        raise DeviceError(f"cuda_graphs=True does not work with {why}.", "--cuda_graphs=False")
    return bool(config.cuda_graphs)


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
    training.best = SplitLoss(**state["best"]) if state.get("best") else None
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
        versions={"fitgpt": __version__, "torch": torch.__version__, "python": platform.python_version(),
                  "cuda": torch.version.cuda or "none"},
        notes=tuple(notes))


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


# ---- what the loop asks of the world

class Desk:
    """Evaluates, saves and tells: the loop's rim."""

    def __init__(self, config: RunConfig, facts: RunFacts, dataset: Dataset, folder: RunFolder, training: Training,
                 display: Display, wandb: Log | None, stop_asked: Callable[[], bool]) -> None:
        self._config, self._facts, self._folder, self._training = config, facts, folder, training
        self._display, self._stop_asked = display, stop_asked
        self._fingerprint, self._tokenizer = dataset.summary.fingerprint, dataset.summary.tokenizer
        self._splits = evaluation_splits(dataset, ("train", "val"), windows=config.eval_iters * config.batch_size,
                                         block=config.eval_block, seed=config.seed)
        self._wandb = wandb
        self._last_report: StepReport | None = None

    def evaluate(self, step: int) -> Evaluation | None:
        return evaluate(self._training.model, self._splits, batch=self._config.eval_batch,
                        block=self._config.eval_block, step=step, token_losses=self._training.token_losses,
                        progress=self._display.eval_progress, stop_asked=self._stop_asked)

    def save(self, training: Training, *, is_best: bool) -> None:
        started = time.perf_counter()
        state = {"step": training.step, "evaluated_at": training.evaluated_at,
                 "best": asdict(training.best) if training.best else None, "scaler": training.scaler.to_dict(),
                 "config": self._config.to_dict(), "gpt": asdict(training.model.config), "data": self._fingerprint,
                 "tokenizer": self._tokenizer}
        saved = checkpoint.save(
            self._folder.checkpoints, training.step, training.model.weight_tensors(),
            training.optimizer.tensors(), state, best=is_best,
            keep_last=self._config.keep_last)
        for note in saved.notes:
            self._display.note(note)
        seconds, nbytes = time.perf_counter() - started, checkpoint_bytes(training.model.config)
        self._folder.append_metrics({"kind": "save", "step": training.step, "best": is_best, "seconds": seconds})
        self._display.saved(str(saved.path), seconds, nbytes)

    def advanced(self, step: int) -> None:
        self._display.advance(step)

    def reported(self, report: StepReport) -> None:
        self._last_report = report
        self._folder.append_metrics({"kind": "step", **asdict(report)})
        self._display.step(report)

    def evaluated(self, evaluation: Evaluation, *, is_best: bool) -> None:
        self._folder.append_metrics({"kind": "eval", "best": is_best, **asdict(evaluation)})
        self._display.evaluated(evaluation, is_best)
        if self._wandb:
            last = self._last_report
            self._wandb({"iter": evaluation.step, "train/loss": evaluation.of("train").mean,
                         "val/loss": evaluation.of("val").mean, "lr": last.lr if last else 0.0,
                         "mfu": 100 * (last.mfu or 0.0) if last else 0.0})

    def warn(self, sentence: str) -> None:
        self._folder.append_metrics({"kind": "warning", "text": sentence})
        self._display.warn(sentence)


def checkpoint_bytes(config: GPTConfig) -> int:
    """float32 weights and AdamW's two moments; step counters and headers are noise."""
    return 12 * config.count_params()
