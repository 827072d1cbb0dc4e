"""RunConfig: everything a training run can be told, each knob once, and every refusal of a value.

The names and defaults are nanoGPT's, so that its config files and flags mean here what they mean there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from os.path import isdir, isfile
from re import fullmatch
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..core.errors import CheckpointError, UsageError
from ..core.units import parse_bytes
from .fields import (
    Assignment,
    Options,
    between,
    fraction,
    knob,
    nearest,
    non_negative,
    not_empty,
    path_like,
    positive,
    shown,
)
from .memory_savers import parse_levels

if TYPE_CHECKING:
    from ..nouns import GPTConfig

GPT2_VOCAB = 50257
DEFAULT_VOCAB = 50304  # the same, rounded up to a multiple of 64, as nanoGPT has it

gpt2_shapes: dict[str, dict[str, Any]] = {
    name: dict(n_layer=layers, n_head=heads, n_embd=width, bias=True, vocab_size=GPT2_VOCAB)
    for name, layers, heads, width in (("gpt2", 12, 12, 768), ("gpt2-medium", 24, 16, 1024),
                                       ("gpt2-large", 36, 20, 1280), ("gpt2-xl", 48, 25, 1600))
}
GPT2_BLOCK = 1024  # the positions those models have learned


def device_name(value: str) -> str | None:
    return None if fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", value) else (
        "must be auto, cpu, cuda, cuda:N (the Nth GPU, from 0) or mps")


def kept(value: int) -> str | None:
    return None if 2 <= value <= 10_000 else (
        "must be at least 2 (and at most 10,000): while one checkpoint is being written, one must survive")


def size_like(text: str, least: int = 1) -> str | None:
    try:
        return None if not text or parse_bytes(text) >= least else "must be above 0"
    except UsageError:
        return "takes a size such as 11.5GiB or 2118MiB"


_io = partial(knob, group="run")
_eval = partial(knob, group="evaluation")
_data = partial(knob, group="data and batch")
_model = partial(knob, group="model")
_optim = partial(knob, group="optimizer")
_system = partial(knob, group="device and memory")
_neighbour = partial(knob, group="memory of the card, beside others")
_wandb = partial(knob, group="wandb")

LARGEST_COUNT = 2**31 - 1
_count = between(1, LARGEST_COUNT)
_count_or_0 = between(0, LARGEST_COUNT)


@dataclass(frozen=True)
class RunConfig(Options):
    """A training run. An instance that exists is valid, except for what only the disk or the device can say."""

    verb: ClassVar[str] = "train"

    out_dir: str = _io("out", "the run's folder", rule=path_like, also=("output_dir", "out", "output"))
    init_from: str = _io("scratch", "where the weights come from: scratch, resume, gpt2, gpt2-medium, gpt2-large, "
                         "gpt2-xl, a folder (a run's, or one in Hugging Face format), or a ckpt.pt", rule=path_like,
                         switches={"resume": "resume"}, also=("model", "pretrained", "init"))
    seed: int = _io(1337, "of the first weights, the data order and dropout", rule=non_negative)
    max_iters: int = _io(600_000, "steps to train", rule=_count_or_0,
                         also=("steps", "max_steps", "iters", "epochs", "num_steps"))
    log_interval: int = _io(1, "steps between two log lines", rule=_count)
    always_save_checkpoint: bool = _io(True, "save after every evaluation; if False, only after one that improves")
    save_interval: int = _io(0, "steps between checkpoints, besides those at evaluations; 0 = only there",
                             rule=_count_or_0, also=("save_steps", "checkpoint_interval"))
    keep_last: int = _io(2, "checkpoints kept besides the best and the last good one", rule=kept,
                         also=("save_total_limit",))
    max_skipped_steps: int = _io(100, "non-finite steps in a row before the run stops", rule=_count)

    eval_interval: int = _eval(2000, "steps between two evaluations", rule=_count, also=("eval_steps",))
    eval_iters: int = _eval(200, "an evaluation covers eval_iters × batch_size windows of each split", rule=_count)
    eval_only: bool = _eval(False, "evaluate once and stop")
    eval_batch_size: int = _eval(0, "windows evaluated at once; 0 = batch_size; the loss is the same for any",
                                 rule=_count_or_0)
    eval_block_size: int = _eval(0, "tokens of an evaluation window; 0 = block_size", rule=_count_or_0)

    dataset: str = _data("openwebtext", "a name under data/, or a path", rule=path_like, also=("data", "data_dir"))
    gradient_accumulation_steps: int = _data(5 * 8, "micro-batches in a step", rule=_count,
                                             also=("grad_accum", "accumulation", "grad_accum_steps", "accum"))
    batch_size: int = _data(12, "sequences in a micro-batch", rule=_count,
                            also=("bs", "micro_batch_size", "device_batch_size"))
    block_size: int = _data(1024, "tokens in a sequence", rule=_count, also=(
        "seq_len", "context_length", "sequence_length", "max_seq_len", "n_ctx", "n_positions", "context"))

    n_layer: int = _model(12, "blocks", rule=between(1, 10_000), also=("layers", "num_layers", "depth"))
    n_head: int = _model(12, "attention heads of a block", rule=between(1, 2**20), also=("heads", "num_heads"))
    n_embd: int = _model(768, "width; a multiple of n_head", rule=between(1, 2**20), also=(
        "hidden_size", "d_model", "width", "dim", "embed_dim"))
    dropout: float = _model(0.0, "share of activations dropped in training", rule=fraction)
    bias: bool = _model(False, "biases in the linear layers and norms, as GPT-2 has them")
    vocab_size: int = _model(0, "rows of the embedding; 0 = the data's, or 50304 where the data does not say",
                             rule=_count_or_0)

    learning_rate: float = _optim(6e-4, "the highest learning rate", rule=positive, also=("lr", "max_lr"))
    weight_decay: float = _optim(1e-1, "of the matrices; vectors have none", rule=non_negative, also=("wd",))
    beta1: float = _optim(0.9, "AdamW's first decay", rule=fraction)
    beta2: float = _optim(0.95, "AdamW's second decay", rule=fraction)
    grad_clip: float = _optim(1.0, "largest norm of the gradient; 0 = no clipping", rule=non_negative,
                              also=("max_grad_norm", "clip"))
    decay_lr: bool = _optim(True, "warm up, then fall to min_lr along a cosine; if False, learning_rate throughout")
    warmup_iters: int = _optim(2000, "steps of rising learning rate", rule=_count_or_0,
                               also=("warmup", "warmup_steps"))
    lr_decay_iters: int = _optim(600_000, "the step that reaches min_lr; usually max_iters", rule=_count)
    min_lr: float = _optim(6e-5, "the learning rate at the end; usually a tenth of the highest", rule=non_negative)

    device: str = _system("auto", "auto, cpu, cuda, cuda:N or mps", rule=device_name)
    dtype: str = _system("auto", "of the arithmetic; auto is bfloat16 where the device has it", also=("precision",),
                         choices=("auto", "float32", "bfloat16", "float16"))
    compile: bool | Literal["auto"] = _system("auto", "torch.compile the model; auto: where that works")
    cuda_graphs: bool | Literal["auto"] = _system("auto", "record the card's work once and replay it, so that the host "
                                                  "never holds it up; auto: with compile, where dropout is 0")
    recompute: str = _system("products", "what each layer keeps for the backward pass, the rest is computed again: "
                             "all, products, no_wide, attention_projection, attention, input; or by layer, from the "
                             "first: 7*no_wide,5*products", rule=not_empty)
    grad_checkpoint: bool = _system(False, "keep only the blocks' inputs for backward and compute the rest again: "
                                    "less memory, a third more arithmetic",
                                    also=("gradient_checkpointing", "activation_checkpointing", "checkpointing"))
    weights: str = _system("float32", "of the matrices; bfloat16 is lossy: rounded by chance at every step, gradients "
                           "in bfloat16 too", choices=("float32", "bfloat16"))
    residual: str = _system("float32", "of the stream between blocks; bfloat16 is lossy",
                            choices=("float32", "bfloat16"))
    optimizer: str = _optim("adamw", "adam8bit: states of one byte (lossy); muon: Muon for the blocks' matrices",
                            choices=("adamw", "adam8bit", "muon"))
    adam8bit: str = _optim("own", "whose states and update optimizer=adam8bit has: fitgpt's own, or those of "
                           "bitsandbytes, if it is installed", choices=("own", "bitsandbytes"),
                           also=("bnb", "bitsandbytes"))
    offload: str = _optim("none", "what lives in the host's memory: optimizer (AdamW's state), or gradients too",
                          choices=("none", "optimizer", "gradients"))
    step_in_backward: bool = _optim(False, "apply each gradient as it is made, so that they never all exist; needs "
                                    "gradient_accumulation_steps=1 and grad_clip=0")
    casts: str = _system("brief", "half-precision copies of the weight matrices: each made for a product and then "
                         "freed, or kept from step to step, for 2 bytes a number", choices=("brief", "kept"))
    gradients: str = _system("freed", "after a step: freed, or zeroed and kept; where GPU work is recorded they are "
                             "kept in any case", choices=("freed", "kept"))
    states: str = _system("early", "the optimizer's: made before the first step, or late, in it, as torch.optim does",
                          choices=("early", "late"))
    loss_chunk: int = _system(0, "tokens whose logits exist at once; 0 = chosen for the model", rule=_count_or_0)
    backend: str = _system("nccl", "of torch.distributed; one process, as now, uses none", choices=("nccl", "gloo"))

    budget: str = _neighbour("", "what the process may hold of the card in all, as nvidia-smi shows it, context "
                             "included: 11.5GiB; by default what the card has and others leave", rule=size_like,
                             also=("memory", "limit", "vram"))
    leave: str = _neighbour("", "keep so much of the card free for others: 6GiB", rule=size_like)
    wait: bool = _neighbour(False, "if the run does not fit beside what is on the card now, wait until it does")
    step_up: bool = _neighbour(False, "after memory ran out and the run went on in less: take more again when there "
                               "is room")
    rehearse: bool | Literal["auto"] = _neighbour("auto", "before the first step, do everything once at full size, "
                                                  "leaving no trace; auto: on a CUDA card")
    fit: bool = _neighbour(False, "first choose the fastest settings that fit the card, as `fitgpt fit` does; what is "
                           "trained stays as asked")
    plan: str = _neighbour("", "a plan that `fitgpt fit` wrote: run exactly that, or say what differs",
                           rule=lambda text: path_like(text) if text else None)

    wandb_log: bool = _wandb(False, "also log to Weights & Biases, if it is installed")
    wandb_project: str = _wandb("owt", "its project")
    wandb_run_name: str = _wandb("gpt2", "its name for the run")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_embd % self.n_head:
            raise _width_error(self.n_embd, self.n_head)
        levels = parse_levels(self.recompute, self.n_layer)
        if isinstance(levels, str):
            raise UsageError(f"recompute={self.recompute!r} {levels}.", "--recompute=products is the default.")
        self._check_savers()
        if self.eval_block_size > self.block_size:
            raise UsageError(f"eval_block_size={self.eval_block_size} is larger than block_size={self.block_size}: "
                             "the model has learned no positions beyond its block.",
                             f"--eval_block_size={self.block_size} or less, or 0 for the same as block_size.")

    def _check_savers(self) -> None:
        """Each saver excludes some others: said here, with what would make it work."""
        at_once, clip = self.step_in_backward, self.grad_clip != 0
        host = f"offload={self.offload}" if self.offload != "none" else ""
        elsewhere = "step_in_backward" if at_once else host if self.offload == "gradients" else ""
        borrowed, rounds = self.adam8bit == "bitsandbytes", self.weights == "bfloat16"
        beside = [words for words in (host, at_once and "step_in_backward") if words]
        rules = (  # what is wrong, whether it is, and what to type
            ("step_in_backward needs gradient_accumulation_steps=1", at_once and self.gradient_accumulation_steps > 1,
             "--gradient_accumulation_steps=1"),
            ("step_in_backward never sees all gradients together, so it needs grad_clip=0", at_once and clip,
             "--grad_clip=0"),
            ("step_in_backward cannot skip a step, which float16 must be able to", at_once and self.dtype == "float16",
             "--dtype=bfloat16"),
            ("step_in_backward works with optimizer=adamw or adam8bit", at_once and self.optimizer == "muon",
             "--optimizer=adamw"),
            ("step_in_backward works with offload=none", at_once and self.offload != "none", "--offload=none"),
            (f"offload={self.offload} works with optimizer=adamw", self.offload != "none" and self.optimizer != "adamw",
             "--optimizer=adamw"),
            (f"gradients=kept has none to keep with {elsewhere}", self.gradients == "kept" and elsewhere,
             "--gradients=freed"),
            (f"states=late does not work with {host or 'step_in_backward'}",
             self.states == "late" and (host or at_once), "--states=early"),
            ("weights=bfloat16 works with optimizer=adamw or adam8bit",
             rounds and self.optimizer == "muon", "--optimizer=adam8bit"),
            ("adam8bit=bitsandbytes is a way of optimizer=adam8bit",
             borrowed and self.optimizer != "adam8bit" and not beside, "--optimizer=adam8bit"),
            (f"adam8bit=bitsandbytes does not work with {' and '.join(beside)}", borrowed and beside,
             "--adam8bit=own"),
            ("adam8bit=bitsandbytes rounds weights to the nearest, so that weights=bfloat16 would lose most of what it "
             "adds to them", borrowed and rounds, "--adam8bit=own"),
            (f"grad_checkpoint keeps the inputs only, and recompute={self.recompute} asks for something else",
             self.grad_checkpoint and self.recompute not in ("products", "input"), "--grad_checkpoint=False"),
            (f"cuda_graphs=True does not work with {' and '.join(self.not_recorded)}",
             self.cuda_graphs is True and self.not_recorded, "--cuda_graphs=auto"),
        )
        broken = [(what, fix) for what, applies, fix in rules if applies]
        if broken:
            raise UsageError("; ".join(what for what, _ in broken) + ".", " ".join(fix for _, fix in broken))

    @property
    def not_recorded(self) -> tuple[str, ...]:
        """What keeps the card's work from being recorded: a recording can neither roll dice again when a block is
        computed again, nor talk to the host in its middle."""
        hinders = {f"dropout={self.dropout:g}": self.dropout, "step_in_backward": self.step_in_backward,
                   "offload=gradients": self.offload == "gradients"}
        return tuple(words for words, applies in hinders.items() if applies)

    @property
    def levels(self) -> tuple[str, ...]:
        """What each layer keeps: see savers.KEEPS."""
        return tuple(parse_levels("input" if self.grad_checkpoint else self.recompute, self.n_layer))

    @property
    def tokens_per_step(self) -> int:
        return self.gradient_accumulation_steps * self.batch_size * self.block_size

    @property
    def eval_batch(self) -> int:
        return self.eval_batch_size or self.batch_size

    @property
    def eval_block(self) -> int:
        return self.eval_block_size or self.block_size

    def gpt_config(self) -> GPTConfig:
        """The model's shape."""
        from ..nouns import GPTConfig  # only here: reading a config should cost milliseconds

        return GPTConfig(block_size=self.block_size, vocab_size=self.vocab_size or DEFAULT_VOCAB,
                         n_layer=self.n_layer, n_head=self.n_head, n_embd=self.n_embd, dropout=self.dropout,
                         bias=self.bias, grad_checkpoint=self.grad_checkpoint)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, recorded: Mapping[str, Any]) -> RunConfig:
        """A config written by to_dict, or nanoGPT's own; keys it lacks have their defaults."""
        unknown = sorted(set(recorded) - {f.name for f in fields(cls)})
        if unknown:
            raise CheckpointError(f"The recorded config has {', '.join(unknown)}, which this version of fitgpt "
                                  "does not know: a newer one wrote it.", "pip install --upgrade fitgpt")
        try:
            return cls(**recorded)
        except UsageError as error:
            raise CheckpointError(f"The recorded config is not valid: {error.what}") from None


def _width_error(width: int, heads: int) -> UsageError:
    """Names the nearest shapes that work, and the nearest widths whose heads are a multiple of 8 wide."""
    plain = _multiples_near(width, heads)
    aligned = [w for w in _multiples_near(width, 8 * heads) if abs(w - width) <= 64 and w not in plain]
    counts = _heads_near(width, heads)
    unpadded = f" (with {_either(aligned)} attention needs no padding)" if aligned else ""
    return UsageError(f"n_embd={width} is not a multiple of n_head={heads}: every head has the same width. Nearest "
                      f"head counts for width {width}: {_either(counts)}. Nearest widths for {heads} heads: "
                      f"{_either(plain)}{unpadded}.",
                      " or ".join([f"--n_head={n}" for n in counts] + [f"--n_embd={w}" for w in aligned or plain]))


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))


def _multiples_near(number: int, of: int) -> list[int]:
    below = number - number % of
    return [n for n in (below, below + of) if n > 0]


def _heads_near(width: int, heads: int) -> list[int]:
    """The divisors of a width next below and next above a head count, those with heads a multiple of 8 first."""
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    aligned = [n for n in divisors if width // n % 8 == 0] or divisors
    return [n for n in aligned if n < heads][-1:] + [n for n in aligned if n > heads][:1]


# ---- from what the user said to a config


def resolve(assignments: Iterable[Assignment],
            base: Mapping[str, Any] | None = None) -> tuple[RunConfig, list[str]]:
    """A resumed run's recorded config, if any, then the assignments in order, then what init_from implies.

    With it come notes, each a sentence: what the user asked for and does not get.
    """
    assignments = list(assignments)
    values = RunConfig.from_dict(base).to_dict() if base else {}
    for key, value, _ in assignments:
        if not (base and value == AS_RECORDED.get(key)):
            values[key] = value
    init_from = str(values.get("init_from", RunConfig.init_from))
    _check_init_from(init_from, assignments)
    shape = gpt2_shapes.get(init_from, {})
    if shape and values.get("block_size", GPT2_BLOCK) > GPT2_BLOCK:
        raise UsageError(f"block_size={values['block_size']} with init_from={init_from}: that model has learned "
                         f"{GPT2_BLOCK} positions.", f"--block_size={GPT2_BLOCK} or less.")
    said = {each.key: each for each in assignments}
    notes = [f"{said[key].source}: {key} is {value} here, not {said[key].value}, because init_from={init_from}."
             for key, value in shape.items() if key in said and said[key].value != value]
    config = RunConfig(**(values | shape))
    return config, notes + _odd_schedule(config)


def _odd_schedule(config: RunConfig) -> list[str]:
    """Learning rates that nanoGPT takes without a word, and that are rarely meant."""
    odd = []
    if config.decay_lr and config.min_lr > config.learning_rate:
        odd.append(f"min_lr={config.min_lr:g} is above learning_rate={config.learning_rate:g}: the learning rate will "
                   f"rise where it should decay. Meant: --min_lr={config.learning_rate / 10:g}?")
    if config.decay_lr and config.warmup_iters > config.lr_decay_iters:
        odd.append(f"warmup_iters={config.warmup_iters} is above lr_decay_iters={config.lr_decay_iters}: the learning "
                   f"rate only warms up. Meant: --warmup_iters={config.lr_decay_iters // 20}?")
    return odd


AS_RECORDED = {"dtype": "auto", "vocab_size": 0}  # values that leave the choice open: a resumed run has made it


def _check_init_from(init_from: str, assignments: list[Assignment]) -> None:
    if any(each.source == "--resume" for each in assignments) and init_from != "resume":
        later = next(each for each in reversed(assignments) if each.key == "init_from")
        raise UsageError(f"--resume, and after it {later.source} says init_from={init_from}: they contradict.",
                         "Put --resume last.")
    names = ["scratch", "resume", *gpt2_shapes]
    if init_from not in names and not isdir(init_from) and not (init_from.endswith(".pt") and isfile(init_from)):
        near = nearest(init_from, names)
        raise UsageError(f"init_from={init_from!r} is none of {', '.join(names)}, and there is no such folder, nor a "
                         "ckpt.pt of nanoGPT's.", f"Did you mean --init_from={near[0]}?" if near else
                         "Name a folder that is here: a run's --out_dir, or one in Hugging Face format.")


# ---- resuming

FROZEN_ON_RESUME = frozenset(
    {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "seed", "dtype", "beta1", "beta2", "weights",
     "residual", "optimizer", "adam8bit", "step_in_backward"})
TOGETHER_ON_RESUME = ("batch_size", "gradient_accumulation_steps")  # if their product stays
# `dataset` may change its name or place: whether it is the same data, its fingerprint says.


def diff(a: RunConfig, b: RunConfig) -> list[tuple[str, Any, Any]]:
    ours, theirs = a.to_dict(), b.to_dict()
    return [(key, ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]]


def check_resume(recorded: Mapping[str, Any], wanted: Mapping[str, Any],
                 explicit_keys: Collection[str] | None = None) -> None:
    """Refuses what would make the rest of the run another run. With explicit_keys, only those count as wanted."""
    before = RunConfig.from_dict(recorded)
    changes = {key: (was, now) for key, was, now in diff(before, RunConfig.from_dict(wanted))
               if explicit_keys is None or key in explicit_keys}
    frozen = {key: change for key, change in changes.items()
              if key in FROZEN_ON_RESUME and change[1] != AS_RECORDED.get(key)}
    if frozen:
        told = "; ".join(f"{key}={shown(now)} (it was {shown(was)})" for key, (was, now) in frozen.items())
        back = " ".join(f"--{key}={shown(was)}" for key, (was, _) in frozen.items())
        raise CheckpointError(f"The run in {before.out_dir} cannot be resumed with {told}: it would be another run.",
                              f"{back} goes on with it; another --out_dir without --resume starts a new one.")
    batch, steps = (changes[key][1] if key in changes else getattr(before, key) for key in TOGETHER_ON_RESUME)
    sequences = before.batch_size * before.gradient_accumulation_steps
    if batch * steps != sequences:
        works = batch if sequences % batch == 0 else before.batch_size
        raise CheckpointError(
            f"batch_size={batch} × gradient_accumulation_steps={steps} is {batch * steps} sequences a step, and the "
            f"run in {before.out_dir} has {sequences}. A resumed run may split its steps otherwise, but not change "
            "their size.", f"--batch_size={works} --gradient_accumulation_steps={sequences // works}")
