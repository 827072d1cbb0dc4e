"""What a run starts from: its weights, shape and data, the model, the optimizer and their state.

On a resume `restore` loads all that makes it exact: weights, optimizer state, loss scale, step. The samples and the
dropout masks follow from the step (data/sample_order.py), so there is no other state.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..config.run_config import RunConfig, check_resume, gpt2_shapes
from ..core.errors import CheckpointError, DataError, DeviceError
from ..data.dataset import Dataset
from ..data.shards import check_vocab, padded_vocab
from ..engine import huggingface
from ..engine.device import DeviceChoice, set_deterministic
from ..engine.model import DTYPES, make_model
from ..engine.nanogpt_checkpoint import read_nanogpt
from ..engine.optim.adamw import NoOptimizer, make_optimizer
from ..engine.optim.grad_scaler import Scaler
from ..engine.ranks import ALONE, Ranks
from ..engine.weights import WeightSource, fill
from ..runs.folder import RunFolder, holds_run
from ..runs.metrics import SplitLoss
from ..runs.model_shape import SHAPE
from ..show.progress import say
from . import checkpoint
from .loop import Training
from .trained_model import cropped, from_run, open_weights


def find_source(config: RunConfig, folder: RunFolder) -> WeightSource | None:
    """The weights that the run starts from; None: it initialises its own."""
    if config.init_from == "scratch":
        return None
    if config.init_from == "resume":
        if holds_run(folder.path):
            source = from_run(folder.path)
            check_same_run(config, source, folder)
            return source
        source = read_nanogpt(folder.path / "ckpt.pt")
        note = (f"Resuming nanoGPT's {source.place} at step {source.state['step']}. It stores no float16 loss scale, "
                "so that starts anew; the data order is fitgpt's own.")
        return replace(source, notes=(note,))
    if config.init_from in gpt2_shapes:
        source = huggingface.read_folder(huggingface.find_gpt2(config.init_from))
    else:
        source = open_weights(config.init_from, "last")
    return cropped(source, config.block_size)


def check_same_run(config: RunConfig, source: WeightSource, folder: RunFolder) -> None:
    """CheckpointError if the checkpoint is not of the run in run.json: folders of two runs were mixed."""
    try:
        check_resume(source.config, config.to_dict())
    except CheckpointError as error:
        record = folder.path / "run.json"
        raise CheckpointError(f"{source.place} is not a checkpoint of the run in {record}. {error.what}",
                              f"rm {shlex.quote(str(record))}   resumes with the checkpoint's own config.") from error


def take_shape(config: RunConfig, source: WeightSource | None, dataset: Dataset) -> tuple[RunConfig, list[str]]:
    """(the config with the shape of the weights, or with the data's vocabulary if there are none; notes)."""
    if source is None:
        vocab = config.vocab_size or padded_vocab(dataset.summary.tokenizer, dataset.summary.vocab_size)
        return replace(config, vocab_size=vocab), []
    shape = {key: getattr(source.gpt, key) for key in SHAPE}
    forced = [f"{key} is {value}, as in {source.place}." for key, value in shape.items()
              if getattr(config, key) not in (value, 0)]
    return replace(config, **shape), forced


def check_data(config: RunConfig, dataset: Dataset, source: WeightSource | None,
               reading: Callable[[], None] = lambda: None) -> None:
    """Checks fingerprint, vocabulary and lengths before any GPU work: a token id out of range is a CUDA error there."""
    recorded = source.state.get("data") if source else None
    if config.init_from == "resume" and recorded and recorded != dataset.summary.fingerprint:
        raise DataError(
            f"{dataset.summary.path} is not the data this run was trained on: its fingerprint is "
            f"{dataset.summary.fingerprint[:12]}, the checkpoint's is {recorded[:12]}.",
            "Restore the data, or start a new run from these weights with another --out_dir.")
    if dataset.summary.vocab_size is not None:
        check_vocab(None, config.vocab_size, dataset.summary.vocab_size)
    dataset.verify(config.vocab_size, say, reading=reading)
    for name in ("train", "val"):
        dataset.split(name).windows(config.block_size if name == "train" else config.eval_block)


def build_training(config: RunConfig, choice: DeviceChoice, ranks: Ranks = ALONE) -> Training:
    """Model, optimizer and loss scaler on the device."""
    device = torch.device(choice.device)
    torch.set_float32_matmul_precision("high")  # TF32 for float32, as in nanoGPT
    set_deterministic(config.deterministic)
    model = make_model(config, device, dtype=choice.dtype, compiled=choice.compile)
    optimizer = NoOptimizer() if config.eval_only else make_optimizer(config, model)
    training = Training(model, optimizer, Scaler(device, scaling=choice.dtype == "float16"))
    training.ranks = ranks
    set_up_gradients(training, config, choice)
    return training


def set_up_gradients(training: Training, config: RunConfig, choice: DeviceChoice) -> None:
    """Turns on CUDA graphs, or keeps gradients between steps, as the config says."""
    on_cuda = choice.device.startswith("cuda")
    if config.cuda_graphs is True and not on_cuda:
        raise DeviceError(f"cuda_graphs=True does not work with device={choice.device}.", "--cuda_graphs=auto")
    if on_cuda and replace(config, compile=choice.compile).uses_cuda_graphs:
        training.use_cuda_graphs(lambda sentence: say(f"fitgpt: {sentence}", warning=True), trains=not config.eval_only)
    elif config.gradients == "kept" and not config.eval_only:
        training.keep_gradients()


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
    restore_state(training, source.state)


def restore_state(training: Training, state: Mapping[str, Any]) -> None:
    """All of a checkpoint but its tensors."""
    training.step = state["step"]
    training.saved_at = state["step"] if "data" in state else -1  # nanoGPT's checkpoint is not in our folder
    training.evaluated_at = state.get("evaluated_at", -1)
    training.evaluation_status = state.get("evaluation_status", checkpoint.UNKNOWN)
    training.best, training.last_good = (SplitLoss(**state[name]) if state.get(name) else None
                                         for name in ("best", "last_good"))
    if "scaler" in state:  # nanoGPT's has none
        training.scaler.load_dict(state["scaler"])


def start_from(training: Training, source: WeightSource | None, *, everything: bool) -> None:
    """`restore` on rank 0, if there is a source; then all ranks get rank 0's weights and, with `everything`, state.
    Only rank 0 needs to see the files."""
    ranks, optimizer = training.ranks, training.optimizer
    if source is not None:
        restore(training, source, everything=everything)
    ranks.broadcast(training.model.parameters())
    if everything and ranks.world > 1:
        tensors = optimizer.tensors()
        ranks.broadcast(tensors.values())
        state = ranks.broadcast_object(source.state if source else None)
        if not ranks.is_first:
            optimizer.load_tensors(tensors)
            restore_state(training, state)


def reinitialise(training: Training, config: RunConfig) -> None:
    """Initialises the weights in place, to the same values as build_training."""
    for parameter in training.model.parameters():
        parameter.data = parameter.data.float()
    torch.manual_seed(config.seed)
    training.model.reset_parameters()
    training.model.round_matrices(DTYPES[config.weights])
