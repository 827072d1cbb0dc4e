"""RunConfig → the tape of our own trainer: load, evaluation, iterations, a later evaluation, a checkpoint; or of
`fitgpt sample`.

The run is written here, in the order of training/run.py and loop.py. What the passes and optimizers allocate comes from
the engine's own files, run on tensors without data (shapes.py). With CUDA graphs, the first call of a kind runs
eagerly, the second is captured into a private pool after empty_cache(), later calls replay and allocate nothing. The
graph of the evaluation before the first step is dropped when that step comes; a later evaluation is captured again, and
a last iteration shows what is then held.
"""

from __future__ import annotations

from dataclasses import replace

from ..config.architectures import BYTES
from ..config.run_config import RunConfig
from ..memory.platform import Platform
from ..memory.tape import DEFAULT_POOL, GRAPH_POOL, SIDE_STREAM, Tape, Writer
from .shapes import Gpu, Shape, Storage, Tensor, engine_module, int64, norms_scratch, parameter_name

EVAL_BATCHES, ITERATIONS, MICRO_STEPS = 2, 2, 2  # written of each: more change nothing
MOST_CHUNKS = 16  # of the loss, that are written one by one
RNG_STATE = "RNG state of CUDA graphs"
WORKSPACES = ("cublas", "cublaslt", "cublas of CUDA graphs", "cublaslt of CUDA graphs")
PROMPT = 16   # tokens: a short one
# Drawn after the first one. The most is allocated from the first on; pages are mapped until the logits of two tokens,
# the last and the next, have found places to change between. test_golden_sampling.py compares with forty.
SAMPLED_TOKENS = 4


def write(config: RunConfig, platform: Platform) -> Tape:
    """The tape of a training run whose dtype, compile and vocab_size are resolved."""
    return Run(config, platform).write()


def write_sampling(config: RunConfig, platform: Platform) -> Tape:
    """The tape of `fitgpt sample`, a process of its own: float32 weights, keys and values of a whole block, one token
    at a time.

    Seven recorded runs make the same blocks of more than 512 bytes. Left out are scalars, and what a draw makes after
    its softmax. Nothing is compiled by default.
    """
    config = replace(config, weights="float32", residual="float32", casts="transient", compile=False, dropout=0.0,
                     deterministic=False)
    writer, sample = Writer(), engine_module("sample")
    gpu = Gpu(writer, platform, attention_kernel(config, platform), masked_attention_kernel(config, platform))
    writer.phase("sample")
    with gpu.section():
        model = engine_module("model").make_model(config, gpu.device, dtype=config.dtype, compiled=False)
        tokens = sample.generate(model, [0] * PROMPT, SAMPLED_TOKENS + 1, sample.SamplingOptions(), 0)
        for _ in range(SAMPLED_TOKENS + 1):
            next(tokens)
    return writer.tape()


def attention_kernel(config: RunConfig, platform: Platform) -> str:
    """torch's choice for heads padded to a multiple of 8, as engine/attention.py pads them."""
    head_size = config.n_embd // config.n_head
    return platform_of(config, platform).attention(head_size + -head_size % 8, config.dtype)


def platform_of(config: RunConfig, platform: Platform) -> Platform:
    """The platform as the run's own settings of torch make it."""
    return replace(platform, deterministic=True) if config.deterministic else platform


def masked_attention_kernel(config: RunConfig, platform: Platform) -> str:
    """torch's choice (sdp_utils.cpp) for one query and a mask: flash takes none, and heads are not padded here."""
    kernel, head, itemsize = attention_kernel(config, platform), config.n_embd // config.n_head, BYTES[config.dtype]
    if kernel == "cudnn" and head % 8 == 0:
        return "cudnn"
    by_tensor_cores = platform.capability >= ((8, 0) if itemsize == 4 else (7, 0))
    fits = head % (16 // itemsize) == 0 or not by_tensor_cores
    return "efficient" if kernel != "math" and fits else "math"


def few_chunks(tokens: int, chunk: int) -> list[slice]:
    """Replaces ops.chunk_slices: the first chunks and the last. From the second on, once a gradient exists, every
    whole chunk repeats the one before."""
    starts = range(0, tokens, chunk)
    return [slice(start, min(start + chunk, tokens))
            for start in ([*starts[:MOST_CHUNKS], starts[-1]] if len(starts) > MOST_CHUNKS else starts)]


class Run:
    """Writes the tape section by section. A section that repeats an earlier one is copied, not run again."""

    def __init__(self, config: RunConfig, platform: Platform) -> None:
        self.config, self.w = config, Writer()
        self.gpu = Gpu(self.w, platform_of(config, platform), attention_kernel(config, platform))
        self.cuda_graphs = config.uses_cuda_graphs
        self.gradients_stay = self.cuda_graphs or config.gradients == "kept"
        self.has_states = config.eval_only  # whether the optimizer's are there, as far as they are needed
        self.eager: set[str] = set()        # kinds of work that have run eagerly
        self.captured: dict[str, str] = {}  # kinds that are captured, and the name of the result
        self.fetched = 0                    # batches so far

    def write(self) -> Tape:
        w = self.w
        w.phase("load")
        self.load()
        w.phase("first_eval")
        self.evaluate()
        if self.config.eval_only:
            return w.tape()
        self.iterate("first_train", "first_train")
        for _ in range(ITERATIONS - 1):
            self.iterate("train", "step")
        w.phase("eval")
        self.evaluate()
        if self.cuda_graphs:
            self.iterate("train", "step")
        w.phase("save")  # tensor by tensor, through CPU RAM
        return w.tape()

    def iterate(self, passes_phase: str, step_phase: str) -> None:
        self.w.phase(passes_phase)
        self.micro_steps()
        self.w.phase(step_phase)
        self.step()

    # ---- load: training/build.build_training

    def load(self) -> None:
        config, model = self.config, engine_module("model")
        engine_module("ops").chunk_slices = few_chunks
        with self.gpu.section():
            self.model = model.make_model(config, self.gpu.device, dtype=config.dtype, compiled=bool(config.compile))
        if config.states == "early" or config.init_from == "resume":  # a checkpoint is read into existing tensors
            self.make_states()
        with self.gpu.section():
            self.scaler = engine_module("optim.grad_scaler").Scaler(self.gpu.device, scaling=config.dtype == "float16")
            if self.gradients_stay and not config.eval_only:
                self.make_gradients()

    def make_gradients(self) -> None:
        zeros_like = engine_module("optim.adamw").torch.zeros_like
        for parameter in self.model.parameters():
            parameter.grad = zeros_like(parameter)

    def make_states(self) -> None:
        if self.has_states:
            return
        self.has_states = True
        with self.gpu.section("optimizer"):
            early = replace(self.config, states="early")
            self.optimizer = engine_module("optim.adamw").make_optimizer(early, self.model)
            for name, tensor in self.optimizer.tensors().items():
                tensor.storage.rename(parameter_name(name))

    # ---- evaluation and micro-steps

    def evaluate(self) -> None:
        w, rows = self.w, self.config.eval_batch
        for _ in ("train", "val"):
            w.alloc("means", "other", 4 * rows * EVAL_BATCHES)
            batch = ""
            for _ in range(EVAL_BATCHES):
                before, batch = batch, self.fetch(rows, self.config.eval_block)
                if before:
                    w.free(before)
                self.call("eval", "token losses")
                w.free_if_alive("token losses")
            w.free("means", batch)

    def micro_steps(self) -> None:
        w, config = self.w, self.config
        w.alloc("micro scale", "other", 4)
        w.alloc("loss sum", "other", 4)
        if self.has_states:
            with self.gpu.section("optimizer", skips_scalars=True):
                self.optimizer.begin(0.0)
        self.batch_name = ""
        for _ in range(min(config.micro_batches, MICRO_STEPS)):
            before, self.batch_name = self.batch_name, self.fetch(config.batch_size, config.block_size)
            if before:
                w.free(before)
            self.call("train", "loss")
            w.free_if_alive("loss")

    def fetch(self, rows: int, block: int) -> str:
        """A batch's name. Inputs and targets are windows of one tensor of B × (T + 1) tokens."""
        self.fetched += 1
        self.batch = self.on_tape((rows, block + 1))
        return self.w.alloc(f"batch {self.fetched}", "data", 8 * rows * (block + 1))

    def on_tape(self, shape: Shape) -> Tensor:
        """Token ids whose allocation is written here, not logged by the GPU."""
        return Tensor(shape, int64, Storage(0, "tokens", "data", None), None, self.gpu.device)

    def call(self, kind: str, result: str) -> None:
        """One micro-step or evaluation batch: eager, captured or replayed. See engine/cuda_graphs.py."""
        w, (rows, columns) = self.w, self.batch.shape
        if not self.cuda_graphs:
            self.work(kind, result, self.batch)
        elif kind not in self.eager:
            self.eager.add(kind)
            if self.captured:  # drops the graphs, their pool, and the workspaces of matmuls with it
                for graph, its_result in self.captured.items():
                    w.free(f"{graph} inputs of CUDA graph", f"{graph} targets of CUDA graph", its_result)
                w.free(RNG_STATE)
                w.free_if_alive(*WORKSPACES)
                w.empty_cache()
                self.captured.clear()
            self.work(kind, result, self.batch)
        elif kind not in self.captured:
            self.captured[kind] = f"captured {result}"
            for tokens in ("inputs", "targets"):
                w.alloc(f"{kind} {tokens} of CUDA graph", "data", 8 * rows * (columns - 1))
            w.empty_cache()
            w.pool = SIDE_STREAM
            if not w.alive(RNG_STATE):
                w.alloc(RNG_STATE, "other", 2 * 8)
            w.pool = GRAPH_POOL
            self.work(kind, self.captured[kind], self.batch)
            w.pool = DEFAULT_POOL

    def work(self, kind: str, result: str, batch: Tensor) -> None:
        """Leaves the result alive on the tape, under its name."""
        w, model = self.w, self.model

        def write() -> None:
            with self.gpu.section():
                inputs, targets = batch[:, :-1], batch[:, 1:]
                if w.pool == GRAPH_POOL:  # a CUDA graph reads copies, which are contiguous
                    inputs, targets = self.on_tape(inputs.shape), self.on_tape(targets.shape)
                model.train(kind != "eval")
                if kind == "eval":
                    losses = model.token_losses(inputs, targets)
                else:
                    sink = [self.optimizer.sink] if self.has_states and self.optimizer.sink else []
                    losses = model.accumulate(inputs, targets, self.scaler.scale, *sink)
                losses.storage.hand_over(result)

        # All that the events depend on.
        alive = tuple(w.alive(name) for name in (*WORKSPACES, "wte.grad"))
        w.section((kind, w.pool, alive, self.has_states), (), write)

    # ---- the optimizer's step

    def step(self) -> None:
        def write() -> None:
            self.apply_gradients()
            self.w.free("micro scale", "loss sum")

        self.w.section(("step", self.has_states), (), write)
        self.w.free(self.batch_name)

    def apply_gradients(self) -> None:
        """As in engine/optim/grad_scaler.py; the scalars of clipping and of the loss scale are left out."""
        gradients = {p.grad.storage: p.grad for p in self.model.parameters() if p.grad is not None}
        if gradients:
            with self.gpu.section():
                norms_scratch(list(gradients.values()))
        del gradients
        self.make_states()
        with self.gpu.section("optimizer", skips_scalars=True):
            self.optimizer.step(0.0, self.scaler.scale, self.scaler.scale)
        if not self.gradients_stay:
            with self.gpu.section():
                self.model.zero_grad()
