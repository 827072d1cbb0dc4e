"""RunConfig: every option of a training run, once, with its help and its attributes, and the rules between options;
ResolvedRun: the same with no `auto` left.

Names and defaults are nanoGPT's, so that its config files and flags mean the same here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from os.path import isdir, isfile
from re import fullmatch
from typing import Any, ClassVar, Literal

from ..core.errors import CheckpointError, UsageError
from ..core.units import parse_bytes
from ..memory.platform import Platform
from .architectures import GPTConfig
from .fields import (
    Assignment,
    Options,
    Problem,
    between,
    count,
    count_or_0,
    fraction,
    must,
    nearest,
    non_negative,
    option,
    optional,
    options_with,
    path_like,
    positive,
    shown,
)
from .memory_savers import POLICIES, SAVERS, parse_policies
from .optimizers import OPTIMIZERS

GPT2_VOCAB = 50257
DEFAULT_VOCAB = 50304  # the same, rounded up to a multiple of 64, as in nanoGPT

gpt2_shapes: dict[str, dict[str, Any]] = {
    name: dict(n_layer=layers, n_head=heads, n_embd=width, bias=True, vocab_size=GPT2_VOCAB)
    for name, layers, heads, width in (("gpt2", 12, 12, 768), ("gpt2-medium", 24, 16, 1024),
                                       ("gpt2-large", 36, 20, 1280), ("gpt2-xl", 48, 25, 1600))
}
GPT2_BLOCK = 1024  # positions that those models have learned
MOST_LAYERS = 512  # the time of a forecast grows with them: two seconds
MOST_TOKENS = 2**32  # of a micro-batch: their ids and targets alone take 64 GiB


device_name = must(partial(fullmatch, r"auto|cpu|mps|cuda(:[0-9]{1,3})?"),
                   "must be auto, cpu, cuda, cuda:N (the Nth GPU, from 0) or mps")


def gpu_list(text: str) -> Problem | str | None:
    """GPUs that train together: 'all', numbers such as '0,1', or a count and a name such as '2x4070'."""
    if text in ("", "all") or fullmatch(r"[1-9][0-9]{0,3}x\S.*", text):
        return None
    numbers = text.split(",")
    if not all(fullmatch("[0-9]{1,3}", number) for number in numbers):
        return Problem("must be all, numbers of GPUs such as 0,1, or for `plan` and `fit` a count and a name such as "
                       "2x4070", "all")
    if len(set(map(int, numbers))) < len(numbers):
        return Problem("names one GPU twice: every rank needs a GPU of its own",
                       ",".join(dict.fromkeys(str(int(number)) for number in numbers)))
    return None


DTYPE_NAMES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def size_like(text: str, least: int = 1, unit: str = "") -> Problem | str | None:
    """`unit`: that of a bare number."""
    try:
        return None if not text or parse_bytes(text, unit) >= least else "must be above 0"
    except UsageError:
        number = fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text.strip())  # the unit is missing
        likely = "GiB" if number and float(number[0]) < 512 else "MiB"
        return Problem("takes a size such as 11.5GiB or 2118MiB", f"{number[0]}{likely}" if number else None)


_io = partial(option, group="run")
_eval = partial(option, group="evaluation")
_data = partial(option, group="data and batch")
_model = partial(option, group="model")
_optim = partial(option, group="optimizer")
_system = partial(option, group="device and memory")
_sharing = partial(option, group="sharing a GPU", nanogpt=False)
_tracker = partial(option, group="trackers")
budget_option = partial(option, "", "GPU memory the process may use in total, as nvidia-smi shows it, CUDA context "
                        "included: 11.5GiB; by default what other processes leave of it", rule=size_like,
                        synonyms=("memory", "limit", "vram"), example="11.5GiB", planned=True)


@dataclass(frozen=True)
class RunConfig(Options):
    """A training run. An instance that exists is valid, except for what only the disk or the device can tell."""

    command = "train"
    summary = "Train a GPT, or resume a run."
    usage = "fitgpt train [config.py ...] [--option=value ...]"
    examples: ClassVar[tuple[str, ...]] = (
        "fitgpt train config/train_fineweb.py",
        "fitgpt train config/train_fineweb.py --batch_size=8 --no-compile",
        "fitgpt train config/train_fineweb.py --fit", "fitgpt train config/train_fineweb.py --resume")
    takes_config_files = True

    out_dir: str = _io("out", "folder of the run", rule=path_like, synonyms=("output_dir", "out", "output"), main=True,
                       planned=True)
    init_from: str = _io(
        "scratch", "initial weights: scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl, a folder (a "
        "run's, or one in Hugging Face format), or a ckpt.pt", rule=path_like, switches={"resume": "resume"},
        synonyms=("model", "pretrained", "init"), main=True, planned=True)
    seed: int = _io(1337, "seed of the initial weights, the data order and dropout", rule=non_negative, nanogpt=False,
                    frozen_on_resume=True)
    max_iters: int = _io(600_000, "steps to train", rule=count_or_0,
                         synonyms=("steps", "max_steps", "iters", "epochs", "num_steps"), main=True, planned=True)
    log_interval: int = _io(1, "steps between two log lines", rule=count)
    always_save_checkpoint: bool = _io(True, "save after every evaluation; if False, only after one that improves")
    save_interval: int = _io(0, "steps between checkpoints, besides those at evaluations; 0 = only there",
                             rule=count_or_0, nanogpt=False, synonyms=("save_steps", "checkpoint_interval"))
    keep_last: int = _io(2, "checkpoints kept besides the best and the last good one", nanogpt=False,
                         rule=must(lambda value: 2 <= value <= 10_000, "must be at least 2 (and at most 10,000): while "
                                   "one checkpoint is being written, one must survive"), synonyms=("save_total_limit",))
    max_skipped_steps: int = _io(100, "non-finite steps in a row before the run stops", rule=count, nanogpt=False)

    eval_interval: int = _eval(2000, "steps between two evaluations", rule=count, synonyms=("eval_steps",))
    eval_iters: int = _eval(200, "batches per evaluation and split: eval_iters × batch_size windows", rule=count)
    eval_only: bool = _eval(False, "evaluate once and stop", affects_memory=True, fixed_by_plan=False)
    eval_batch_size: int = _eval(
        0, "windows evaluated at once; does not change the loss; 0 = batch_size", rule=count_or_0,
        affects_memory=True, fallback=True, nanogpt=False, page="less")
    eval_block_size: int = _eval(0, "tokens per evaluation window; 0 = block_size", rule=count_or_0,
                                 affects_memory=True, nanogpt=False, page="less")

    dataset: str = _data("openwebtext", "dataset: a name under data/, or a path", rule=path_like,
                         synonyms=("data", "data_dir"), main=True, planned=True)
    gradient_accumulation_steps: int = _data(
        5 * 8, "micro-batches per step (gradient accumulation)", rule=count, affects_memory=True, affects_speed=True,
        fallback=True, page="size", main=True, synonyms=("grad_accum", "accumulation", "grad_accum_steps", "accum"))
    batch_size: int = _data(
        12, "sequences per micro-batch", rule=count, affects_memory=True, affects_speed=True, fallback=True,
        page="size", main=True, synonyms=("bs", "micro_batch_size", "device_batch_size"))
    block_size: int = _data(
        1024, "tokens per sequence (context length)", rule=count, affects_memory=True, affects_speed=True,
        frozen_on_resume=True, page="size", main=True,
        synonyms=("seq_len", "context_length", "sequence_length", "max_seq_len", "n_ctx", "n_positions", "context"))

    n_layer: int = _model(
        12, "number of blocks", rule=between(1, MOST_LAYERS), affects_memory=True, affects_speed=True,
        frozen_on_resume=True, page="size", synonyms=("layers", "num_layers", "depth"), main=True)
    n_head: int = _model(
        12, "attention heads per block", rule=between(1, 2**20), affects_memory=True, affects_speed=True,
        frozen_on_resume=True, page="size", synonyms=("heads", "num_heads"), main=True)
    n_embd: int = _model(
        768, "width; a multiple of n_head", rule=between(1, 2**20), affects_memory=True, affects_speed=True,
        frozen_on_resume=True, page="size", main=True,
        synonyms=("hidden_size", "d_model", "width", "dim", "embed_dim"))
    dropout: float = _model(0.0, "share of activations dropped in training", rule=fraction, affects_memory=True,
                            affects_speed=True, page="more")
    bias: bool = _model(False, "biases in the linear layers and norms, as in GPT-2", affects_memory=True,
                        affects_speed=True, frozen_on_resume=True, page="more")
    vocab_size: int = _model(  # nanoGPT reads it from the dataset's meta.pkl
        0, "rows of the embedding; 0 = the dataset's, or 50304 if the dataset does not say", rule=count_or_0,
        affects_memory=True, affects_speed=True, frozen_on_resume=True, page="more")

    learning_rate: float = _optim(6e-4, "highest learning rate", rule=positive, synonyms=("lr", "max_lr"), main=True)
    weight_decay: float = _optim(1e-1, "weight decay of the matrices; vectors have none", rule=non_negative,
                                 synonyms=("wd",))
    beta1: float = _optim(0.9, "AdamW's beta1", rule=fraction, frozen_on_resume=True)
    beta2: float = _optim(0.95, "AdamW's beta2", rule=fraction, frozen_on_resume=True)
    grad_clip: float = _optim(
        1.0, "largest norm of the gradient (gradient clipping); 0 = no clipping", rule=non_negative,
        affects_memory=True, affects_speed=True, fixed_by_plan=False, page="more", synonyms=("max_grad_norm", "clip"))
    decay_lr: bool = _optim(True, "warm up, then fall to min_lr along a cosine; if False, learning_rate throughout")
    warmup_iters: int = _optim(2000, "steps in which the learning rate rises", rule=count_or_0,
                               synonyms=("warmup", "warmup_steps"))
    lr_decay_iters: int = _optim(600_000, "step that reaches min_lr; usually max_iters", rule=count)
    min_lr: float = _optim(6e-5, "learning rate at the end; usually a tenth of the highest", rule=non_negative)

    device: str = _system("auto", "device: auto, cpu, cuda, cuda:N or mps", rule=device_name, planned=True)
    gpus: str = _system("", "GPUs to train on together, with one process (rank) each: all, or numbers such as 0,1; for "
                        "`plan` and `fit` also a count and a name: 2x4070. Each step's micro-batches are divided over "
                        "the ranks", rule=gpu_list, example="all", planned=True, nanogpt=False, main=True,
                        synonyms=("num_gpus", "n_gpus", "nproc_per_node", "ngpu", "devices", "world_size"))
    dtype: str = _system(
        "auto", "data type of matmuls and attention: bfloat16 and float16 mean mixed precision, "
        "float16 with a GradScaler; auto is bfloat16 if the device supports it",
        choices=("auto", "float32", "bfloat16", "float16"), affects_memory=True, affects_speed=True,
        frozen_on_resume=True, page="more", synonyms=("precision",), also_values=DTYPE_NAMES, main=True)
    compile: bool | Literal["auto"] = _system("auto", "torch.compile the model; auto: if that works here",
                                              affects_memory=True, affects_speed=True, page="more", main=True)
    deterministic: bool = _system(
        False, "the same run again, or resumed, gives bit-identical weights on the same GPU and versions: only "
        "deterministic kernels, without cuDNN's attention", affects_memory=True, affects_speed=True, nanogpt=False,
        page="more", synonyms=("reproducible", "use_deterministic_algorithms"))
    cuda_graphs: bool | Literal["auto"] = _system(
        "auto", "capture the GPU work of a step in CUDA graphs and replay them, so that the CPU does not slow the GPU "
        "down; auto: with compile, if dropout is 0", affects_memory=True, affects_speed=True, fallback=True,
        nanogpt=False, page="more")
    saved_activations: str = _system(
        "matmuls", "what each layer saves for the backward pass, which recomputes the rest (selective gradient "
        f"checkpointing, or activation recomputation): {', '.join(POLICIES)}; or by layer, from the first: "
        "7*no_mlp_up,5*matmuls", affects_memory=True, affects_speed=True, fallback=True, nanogpt=False, page="less",
        synonyms=("recompute", "activation_checkpoint", "selective_checkpointing", "recompute_granularity"))
    grad_checkpoint: bool = _system(
        False, "gradient checkpointing (gradient_checkpointing_enable in transformers): keep only the inputs of the "
        "blocks for the backward pass and recompute the rest: less memory, a third more arithmetic",
        affects_memory=True, affects_speed=True, fallback=True, nanogpt=False, page="less", main=True,
        synonyms=("gradient_checkpointing", "gradient_checkpointing_enable", "activation_checkpointing",
                  "checkpointing"))
    weights: str = _system(
        "float32", "data type of the weight matrices; bfloat16 is lossy: stochastic rounding at every step, gradients "
        "in bfloat16 too", choices=("float32", "bfloat16"), affects_memory=True, affects_speed=True,
        frozen_on_resume=True, nanogpt=False, page="less")
    residual: str = _system(
        "float32", "data type of the residual stream between blocks; bfloat16 is lossy",
        choices=("float32", "bfloat16"), affects_memory=True, affects_speed=True, frozen_on_resume=True, nanogpt=False,
        page="less")
    optimizer: str = _optim(
        "adamw", "; ".join(f"{name}: {spec.summary}" for name, spec in OPTIMIZERS.items()), choices=tuple(OPTIMIZERS),
        affects_memory=True, affects_speed=True, frozen_on_resume=True, nanogpt=False, page="less")
    adam8bit: str = _optim(
        "own", "implementation of optimizer=adam8bit: fitgpt's own, or that of bitsandbytes, if it is installed",
        choices=("own", "bitsandbytes"), affects_memory=True, affects_speed=True, frozen_on_resume=True, nanogpt=False,
        page="less", synonyms=("bnb", "bitsandbytes"))
    offload: str = _optim(
        "none", "state kept in CPU RAM: optimizer (AdamW's state), or gradients too (CPU offload)",
        choices=("none", "optimizer", "gradients"), affects_memory=True, affects_speed=True, fallback=True,
        nanogpt=False, page="less")
    step_in_backward: bool = _optim(
        False, "apply each gradient when it is computed, so that they never all exist at once; needs "
        "gradient_accumulation_steps=1 and grad_clip=0", affects_memory=True, affects_speed=True,
        frozen_on_resume=True, nanogpt=False, page="less")
    casts: str = _system(
        "transient", "half-precision copies of the weight matrices (mixed precision): each made for a matmul and then "
        "freed, or kept from step to step, for 2 bytes per element", choices=("transient", "kept"),
        affects_memory=True, affects_speed=True, nanogpt=False, page="less")
    gradients: str = _system(
        "freed", "gradients after a step: freed (zero_grad(set_to_none=True)), or zeroed and kept; with CUDA graphs "
        "they are kept in any case", choices=("freed", "kept"), affects_memory=True, nanogpt=False, page="less")
    states: str = _system(
        "early", "optimizer state: allocated before the first step, or late, in the first step, as torch.optim does",
        choices=("early", "late"), affects_memory=True, nanogpt=False, page="less")
    loss_chunk: int = _system(0, "tokens per chunk of the loss, whose logits exist at once; 0 = chosen for the model",
                              rule=count_or_0, affects_memory=True, affects_speed=True, fallback=True, nanogpt=False,
                              page="less")
    backend: str = _system("nccl", "backend of torch.distributed for gradients on GPUs; a single process uses none",
                           choices=("nccl", "gloo"))

    budget: str = budget_option(group="sharing a GPU", nanogpt=False, main=True)
    leave: str = _sharing("", "GPU memory to leave free for other processes: 6GiB", rule=size_like, example="1GiB",
                          planned=True)
    wait: bool = _sharing(False, "wait until there is memory for the run beside what other processes use")
    step_up: bool = _sharing(False, "return to the faster plan after an out-of-memory error and a fallback plan, when "
                             "there is memory for it")
    rehearse: bool | Literal["auto"] = _sharing("auto", "run everything once at full size before the first step, and "
                                                "undo it; auto: on a CUDA GPU")
    fit: bool = _sharing(False, "choose the fastest settings that fit the GPU first, as `fitgpt fit` does; the model "
                         "and its training stay the same", main=True)
    plan: str = _sharing("", "plan that `fitgpt fit` wrote: run exactly that, or stop with what differs",
                         rule=optional(path_like), example="my_run.plan.json")

    wandb_log: bool = _tracker(False, "log evaluations also to Weights & Biases, if it is installed")
    wandb_project: str = _tracker("owt", "project of the run in Weights & Biases")
    wandb_run_name: str = _tracker("gpt2", "name of the run in Weights & Biases")
    tensorboard: bool = _tracker(False, "log evaluations also for TensorBoard, if it is installed, in the run's folder",
                                 synonyms=("tensorboard_log",), nanogpt=False)

    # ---- rules between options

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_embd % self.n_head:
            raise _width_error(self.n_embd, self.n_head)
        if (tokens := self.batch_size * self.block_size) > MOST_TOKENS:
            raise UsageError(f"batch_size={self.batch_size} × block_size={self.block_size} is {tokens:,} tokens per "
                             f"micro-batch; it must be at most {MOST_TOKENS:,}.",
                             f"--batch_size={MOST_TOKENS // self.block_size}")
        policies = parse_policies(self.saved_activations, self.n_layer)
        if isinstance(policies, str):
            near = nearest(self.saved_activations, POLICIES) or [RunConfig.saved_activations]
            raise UsageError(f"saved_activations={self.saved_activations!r} {policies}.",
                             f"--saved_activations={near[0]}")
        if self.eval_block_size > self.block_size:
            raise UsageError(f"eval_block_size={self.eval_block_size} is larger than block_size={self.block_size}: "
                             "the model has learned no positions beyond its block.",
                             f"--eval_block_size={self.block_size}")

        # Requirements of the optimizer and of memory savers: every one that is not met, with its fix.
        required = [(f"optimizer={self.optimizer}", each) for each in OPTIMIZERS[self.optimizer].requires]
        required += [(saver.setting, each) for saver in SAVERS if saver.is_on(self) for each in saver.requires]
        problems = [(each.why or f"{setting} works only with {each}",
                     each.fix or f"--{each.option}={shown(each.values[0])}")
                    for setting, each in required if getattr(self, each.option) not in each.values]
        if self.grad_checkpoint and self.saved_activations not in (RunConfig.saved_activations, "input"):
            problems.append((f"grad_checkpoint saves only the inputs, but saved_activations="
                             f"{self.saved_activations} saves something else", "--grad_checkpoint=False"))
        if self.cuda_graphs is True and self.dropout:
            problems.append((f"cuda_graphs=True does not work with dropout={self.dropout:g}", "--cuda_graphs=auto"))
        if not problems and (problem := self._indivisible()):
            problems.append(problem)
        if problems:
            fixes = dict.fromkeys(fix for _, fix in problems)
            raise UsageError("; ".join(what for what, _ in problems) + ".", " ".join(fixes))

    def _indivisible(self) -> tuple[str, str] | None:
        """What is wrong if the micro-batches of a step cannot be divided over the ranks, and the nearest that can."""
        steps, ranks = self.gradient_accumulation_steps, self.ranks
        if steps % ranks == 0:
            return None
        nearest = max(round(steps / ranks), 1) * ranks
        fix = f"--gradient_accumulation_steps={nearest}"
        if self.init_from == "resume":  # the sequences of a step stay: split them into other micro-batches
            sequences = self.batch_size * steps
            batch = next((size for size in range(self.batch_size, 0, -1) if sequences % (size * ranks) == 0), 0)
            fix = (f"--batch_size={batch} --gradient_accumulation_steps={sequences // batch}" if batch else
                   f"Resume on a number of GPUs that divides the {sequences} sequences of a step.")
        return (f"gradient_accumulation_steps={steps} cannot be divided over {ranks} ranks: it counts the "
                "micro-batches of all of them, as in nanoGPT", fix)

    # ---- derived values

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether a GPU runs CUDA graphs, if `compile` is definite. By default not where a setting excludes them: a
        graph cannot restore the RNG state for recomputed dropout, nor talk to the CPU while it runs."""
        if self.cuda_graphs != "auto":
            return self.cuda_graphs
        excluded = self.dropout > 0 or any(
            each.option == "cuda_graphs" and True not in each.values
            for saver in SAVERS if saver.is_on(self) for each in saver.requires)
        return bool(self.compile) and not excluded

    @property
    def policies(self) -> tuple[str, ...]:
        """What each layer keeps for the backward pass: see memory_savers.SAVED_TENSORS."""
        return tuple(parse_policies("input" if self.grad_checkpoint else self.saved_activations, self.n_layer))

    @property
    def ranks(self) -> int:
        """Processes that train together. `all` counts as one until it is known how many GPUs there are."""
        count, times, _ = self.gpus.partition("x")
        return int(count) if times else len(self.gpus.split(","))

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each rank."""
        return self.gradient_accumulation_steps // self.ranks

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
        return GPTConfig(block_size=self.block_size, vocab_size=self.vocab_size or DEFAULT_VOCAB,
                         n_layer=self.n_layer, n_head=self.n_head, n_embd=self.n_embd, dropout=self.dropout,
                         bias=self.bias, grad_checkpoint=self.grad_checkpoint)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, recorded: Mapping[str, Any]) -> RunConfig:
        """A config written by to_dict, or by nanoGPT; keys that are missing have their defaults."""
        unknown = sorted(set(recorded) - {f.name for f in fields(cls)})
        if unknown:
            raise CheckpointError(f"The recorded config has {', '.join(unknown)}, which this version of fitgpt "
                                  "does not know: a newer version wrote it.", "pip install --upgrade fitgpt")
        try:
            return cls(**recorded)
        except UsageError as error:
            raise CheckpointError(f"The recorded config is not valid: {error.what}") from None


def _width_error(width: int, heads: int) -> UsageError:
    """An error that suggests the nearest shapes that work, and the nearest widths with heads of a multiple of 8."""
    def multiples_near(divisor: int) -> list[int]:
        below = width - width % divisor
        return [multiple for multiple in (below, below + divisor) if multiple > 0]

    def either(numbers: list[int]) -> str:
        return " or ".join(map(str, numbers))

    widths = multiples_near(heads)
    aligned = [each for each in multiples_near(8 * heads) if abs(each - width) <= 64 and each not in widths]
    unpadded = f" (with {either(aligned)} attention needs no padding)" if aligned else ""
    # The head counts next below and next above, those with heads of a multiple of 8 first.
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    divisors = [n for n in divisors if width // n % 8 == 0] or divisors
    counts = [n for n in divisors if n < heads][-1:] + [n for n in divisors if n > heads][:1]
    return UsageError(f"n_embd={width} is not a multiple of n_head={heads}: every head has the same width. Nearest "
                      f"head counts for width {width}: {either(counts)}. Nearest widths for {heads} heads: "
                      f"{either(widths)}{unpadded}.",
                      " or ".join([f"--n_head={n}" for n in counts] + [f"--n_embd={w}" for w in aligned or widths]))


# ---- assignments → RunConfig


AS_RECORDED = {"dtype": "auto", "vocab_size": 0}  # values that leave the choice to a run: a resumed run has made it


def config_from(assignments: Iterable[Assignment],
                base: Mapping[str, Any] | None = None) -> tuple[RunConfig, list[str]]:
    """Assignments → (config, notes). `base`: the recorded config of a resumed run, which the assignments change.

    init_from=gpt2 and the like set the model's shape. A note is a sentence on a setting that was given and is not used,
    or on learning rates that nanoGPT accepts silently and that are rarely meant.
    """
    assignments = list(assignments)
    values = RunConfig.from_dict(base).to_dict() if base else {}
    before = values.pop("gpus", "")  # each start decides anew on how many GPUs it trains
    for key, value, _ in assignments:
        if not (base and value == AS_RECORDED.get(key)):
            values[key] = value
    init_from = str(values.get("init_from", RunConfig.init_from))
    _check_init_from(init_from, assignments)
    shape = gpt2_shapes.get(init_from, {})
    if shape and values.get("block_size", GPT2_BLOCK) > GPT2_BLOCK:
        raise UsageError(f"block_size={values['block_size']} with init_from={init_from}: that model has learned "
                         f"{GPT2_BLOCK} positions.", f"--block_size={GPT2_BLOCK}")
    config = RunConfig(**(values | shape))

    given = {each.key: each for each in assignments}
    notes = list[str]()
    if before not in ("", config.gpus):
        notes = [f"The run was trained with gpus={before} before; each start decides anew on which GPUs."]
    notes += [f"{given[key].source}: {key} is {value} here, not {given[key].value}, because init_from={init_from}."
              for key, value in shape.items() if key in given and given[key].value != value]
    if config.decay_lr and config.min_lr > config.learning_rate:
        notes.append(f"min_lr={config.min_lr:g} is above learning_rate={config.learning_rate:g}: the learning rate "
                     f"will rise where it should decay. Meant: --min_lr={config.learning_rate / 10:g}?")
    return config, [*notes, *warmup_notes(config)]


def warmup_notes(config: RunConfig) -> list[str]:
    """A sentence on a learning rate that never decays."""
    if not config.decay_lr or config.warmup_iters <= config.lr_decay_iters:
        return []
    return [f"warmup_iters={config.warmup_iters} is above lr_decay_iters={config.lr_decay_iters}: the learning rate "
            f"only warms up. Meant: --warmup_iters={shorter_warmup(config.lr_decay_iters, config.warmup_iters)}?"]


def shorter_warmup(steps: int, warmup_iters: int) -> int:
    """The warm-up for a run of that many steps: the given one, or a twentieth of a run of which it is over a tenth."""
    return warmup_iters if 10 * warmup_iters <= steps else steps // 20


def _check_init_from(init_from: str, assignments: list[Assignment]) -> None:
    if any(each.source == "--resume" for each in assignments) and init_from != "resume":
        later = next(each for each in reversed(assignments) if each.key == "init_from")
        file = later.source.rpartition(":")[0]
        raise UsageError(f"--resume, and after it {later.source} says init_from={init_from}: they contradict each "
                         "other.", f"Leave out --resume or {later.source}" if later.source.startswith("-")
                         else f"Put --resume after the file: {file} --resume")
    names = ["scratch", "resume", *gpt2_shapes]
    if init_from not in names and not isdir(init_from) and not (init_from.endswith(".pt") and isfile(init_from)):
        near = nearest(init_from, names)
        raise UsageError(f"init_from={init_from!r} is none of {', '.join(names)}, and there is no such folder or "
                         "ckpt.pt of nanoGPT.", f"--init_from={near[0] if near else 'scratch'}")


# ---- RunConfig + Platform → ResolvedRun. Tapes, forecasts and speed estimates take one, so that none of them has to
# resolve anything itself.


@dataclass(frozen=True)
class ResolvedRun(RunConfig):
    """A run whose dtype, compile and vocab_size are definite. `dataclasses.replace` gives another ResolvedRun."""


def resolve_run(config: RunConfig, platform: Platform, trainer: str = "fitgpt") -> ResolvedRun:
    """What `auto` means on that platform, and GPT-2's padded vocabulary where none is given.

    A GPU without bfloat16: torch does not compile it, warns and runs eagerly (compile_fx.py,
    _check_triton_bf16_support). nanoGPT's runs do so; fitgpt rejects them.
    """
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if platform.has_bf16 else "float16"
    compiled = config.compile if config.compile != "auto" else platform.compiles
    if trainer == "nanogpt" and dtype == "bfloat16" and not platform.has_bf16:
        compiled = False
    given = {field.name: getattr(config, field.name) for field in fields(RunConfig)}
    return ResolvedRun(**{**given, "dtype": dtype, "compile": compiled,
                          "vocab_size": config.vocab_size or DEFAULT_VOCAB})


# ---- two configs compared


def diff(a: RunConfig, b: RunConfig) -> list[tuple[str, Any, Any]]:
    """(option, value in a, value in b) for each option that differs."""
    ours, theirs = a.to_dict(), b.to_dict()
    return [(key, ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]]


# ---- lists of options, from their attributes

# Options that change how much GPU memory a run allocates, and that `train --plan` therefore keeps as planned.
FIXED_BY_PLAN = options_with(RunConfig, fixed_by_plan=True)
# Options that a fallback plan may change after an out-of-memory error: the run computes the same with other values.
FALLBACK_OPTIONS = options_with(RunConfig, fallback=True)
# Options that nanoGPT's train.py does not have, as far as they affect memory.
NOT_NANOGPTS = options_with(RunConfig, nanogpt=False, affects_memory=True)
# Options that training speed depends on.
SPEED_OPTIONS = options_with(RunConfig, affects_speed=True)
# Options on the web page, by group.
PAGE_OPTIONS = {group: options_with(RunConfig, page=group) for group in ("size", "less", "more")}
# Options that a resumed run cannot change. `dataset` is not one of them: its fingerprint tells whether the data is the
# same under another name.
FROZEN_ON_RESUME = frozenset(options_with(RunConfig, frozen_on_resume=True))
TOGETHER_ON_RESUME = ("batch_size", "gradient_accumulation_steps")  # may change if their product does not


def check_resume(recorded: Mapping[str, Any], wanted: Mapping[str, Any],
                 explicit_keys: Collection[str] | None = None) -> None:
    """CheckpointError if the wanted config would make the rest of the run another run.

    `explicit_keys`: compare only these options, by default all.
    """
    before = RunConfig.from_dict(recorded)
    changes = {key: (was, now) for key, was, now in diff(before, RunConfig.from_dict(wanted))
               if explicit_keys is None or key in explicit_keys}
    frozen = {key: change for key, change in changes.items()
              if key in FROZEN_ON_RESUME and change[1] != AS_RECORDED.get(key)}
    if frozen:
        differences = "; ".join(f"{key}={shown(now)} (it was {shown(was)})" for key, (was, now) in frozen.items())
        back = " ".join(f"--{key}={shown(was)}" for key, (was, _) in frozen.items())
        raise CheckpointError(f"The run in {before.out_dir} cannot be resumed with {differences}: it would be another "
                              "run.", f"{back} resumes it; another --out_dir without --resume starts a new run.")
    batch, steps = (changes[key][1] if key in changes else getattr(before, key) for key in TOGETHER_ON_RESUME)
    sequences = before.batch_size * before.gradient_accumulation_steps
    if batch * steps != sequences:
        works = batch if sequences % batch == 0 else before.batch_size
        raise CheckpointError(
            f"batch_size={batch} × gradient_accumulation_steps={steps} is {batch * steps} sequences per step, and "
            f"the run in {before.out_dir} has {sequences}. A resumed run may split its steps differently, but not "
            "change their size.", f"--batch_size={works} --gradient_accumulation_steps={sequences // works}")
