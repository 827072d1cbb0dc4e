"""RunConfig → the tape of our own trainer: load, evaluation, iterations, a later evaluation, a checkpoint.

The run is written here, as engine/loop.py and run.py have it. What the passes and optimizers allocate comes from the
engine's own files, run on tensors without data (../shapes.py). With CUDA graphs, the first call of a kind runs eagerly,
the second is captured into a private pool after empty_cache(), later calls replay and allocate nothing. The graph of
the evaluation before the first step is dropped when that step comes; a later evaluation is captured again, and a last
iteration shows what is then held.
"""

from __future__ import annotations

from typing import Any

from ...config.optimizers import optimizer_of, state_bytes
from ...config.run_config import RunConfig
from ...memory.platform import Platform
from ...memory.tape import DEFAULT_POOL, GRAPH_POOL, SIDE_STREAM, Tape, Writer
from ..shapes import Gpu, Tensor, engine_module, int64, new, norms_scratch, parameter_name

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
EVAL_BATCHES, ITERATIONS, MICRO_STEPS = 2, 2, 2  # written of each: more change nothing
MOST_CHUNKS = 16  # of the loss, that are written one by one
RNG_STATE = "RNG state of CUDA graphs"
WORKSPACES = ("cublas", "cublaslt", "cublas of CUDA graphs", "cublaslt of CUDA graphs")


def write(config: RunConfig, platform: Platform) -> Tape:
    """Wants a config whose dtype, compile and vocabulary are settled: see forecast.settled."""
    return Run(config, platform).write()


def parameters(config: RunConfig) -> list[tuple[str, int, bool]]:
    """(name, numbers, is a matrix or table), in the model's order; the head is the token table."""
    c, bias = config.n_embd, config.bias
    found = [("wte", config.vocab_size * c, True), ("wpe", config.block_size * c, True)]

    def vector(name: str, numbers: int) -> None:
        found.append((f"{name}.weight", numbers, False))
        if bias:
            found.append((f"{name}.bias", numbers, False))

    def matrix(name: str, inputs: int, outputs: int) -> None:
        found.append((name, inputs * outputs, True))
        if bias:
            found.append((f"{name}.bias", outputs, False))

    for layer in range(config.n_layer):
        vector(f"{layer}.ln_1", c)
        matrix(f"{layer}.c_attn", c, 3 * c)
        matrix(f"{layer}.attn_proj", c, c)
        vector(f"{layer}.ln_2", c)
        matrix(f"{layer}.c_fc", c, 4 * c)
        matrix(f"{layer}.mlp_proj", 4 * c, c)
    vector("ln_f", c)
    return found


def uses_cuda_graphs(config: RunConfig) -> bool:
    """Whether CUDA graphs are used: training/run.uses_cuda_graphs's rule."""
    if config.cuda_graphs != "auto":
        return config.cuda_graphs
    return bool(config.compile) and not config.cuda_graph_blockers


def attention_kernel(config: RunConfig, platform: Platform) -> str:
    """torch's choice for heads padded to a multiple of 8, as engine/attention.py pads them."""
    head_size = config.n_embd // config.n_head
    return platform.attention(head_size + -head_size % 8, config.dtype)


def gpu_of(config: RunConfig, platform: Platform, writer: Writer, **more: str) -> Gpu:
    return Gpu(writer, attention=attention_kernel(config, platform), workspace=platform.workspace, sms=platform.sms,
               triton=platform.compiles, **more)


def few_chunks(tokens: int, chunk: int) -> list[slice]:
    """Replaces chunked_loss._chunks: the first chunks and the last. From the second on, once a gradient exists, every
    whole chunk repeats the one before."""
    starts = range(0, tokens, chunk)
    return [slice(start, min(start + chunk, tokens))
            for start in ([*starts[:MOST_CHUNKS], starts[-1]] if len(starts) > MOST_CHUNKS else starts)]


class Run:
    """Writes the tape section by section. A section that repeats an earlier one is copied, not run again."""

    def __init__(self, config: RunConfig, platform: Platform) -> None:
        self.config, self.w = config, Writer()
        self.gpu = gpu_of(config, platform, self.w)
        self.cuda_graphs = uses_cuda_graphs(config)
        self.gradients_stay = self.cuda_graphs or config.gradients == "kept"
        self.has_states = config.eval_only  # whether the optimizer's are there, as far as they are needed
        self.eager: set[str] = set()        # kinds of work that have run eagerly
        self.captured: dict[str, str] = {}  # kinds that are captured, and the name of the result
        self.fetched = 0

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

    def iterate(self, *phases: str) -> None:
        micro_steps, step = phases
        self.w.phase(micro_steps)
        self.micro_steps()
        self.w.phase(step)
        self.step()

    # ---- load

    def load(self) -> None:
        """As run.build_training has it."""
        config, build, optim = self.config, engine_module("build"), engine_module("optim.adamw")
        engine_module("chunked_loss")._chunks = few_chunks
        with self.gpu.section():
            self.model = build.make_model(config, self.gpu.device, dtype=config.dtype, compiled=bool(config.compile))
        if config.states == "early" or config.init_from == "resume":  # a checkpoint is read into existing tensors
            self.make_states()
        with self.gpu.section():
            self.scaler = optim.Scaler(self.gpu.device, scaling=config.dtype == "float16")
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
            build = engine_module("build")
            self.optimizer = build.make_optimizer(draft(self.config, states="early"), self.model)
            for name, tensor in self.optimizer.tensors().items():
                tensor.storage.rename(parameter_name(name))

    # ---- work that may be captured

    def called(self, kind: str, result: str, batch: Tensor) -> None:
        """One micro-step or evaluation batch: eager, captured or replayed. See engine/graphs.py."""
        if not self.cuda_graphs:
            self.work(kind, result, batch)
        elif kind not in self.eager:
            self.eager.add(kind)
            self.forget()
            self.work(kind, result, batch)
        elif kind not in self.captured:
            self.captured[kind] = f"captured {result}"
            self.capture(kind, batch)

    def capture(self, kind: str, batch: Tensor) -> None:
        w, (rows, columns) = self.w, batch.shape
        for place in ("inputs", "targets"):
            w.alloc(f"{kind} {place} of CUDA graph", "data", 8 * rows * (columns - 1))
        w.empty_cache()
        w.pool = SIDE_STREAM
        if not w.alive(RNG_STATE):
            w.alloc(RNG_STATE, "other", 2 * 8)
        w.pool = GRAPH_POOL
        self.work(kind, self.captured[kind], batch)
        w.pool = DEFAULT_POOL

    def forget(self) -> None:
        """Frees captured graphs, their pool, and the workspaces of matmuls with it."""
        w = self.w
        if self.captured:
            for kind, result in self.captured.items():
                w.free(f"{kind} inputs of CUDA graph", f"{kind} targets of CUDA graph", result)
            w.free(RNG_STATE)
            w.free_if_alive(*WORKSPACES)
            w.empty_cache()
            self.captured.clear()

    def work(self, kind: str, result: str, batch: Tensor) -> None:
        """Leaves the result alive on the tape, under its name. The kind of part says all that its events depend on."""
        w = self.w
        alive = tuple(w.alive(name) for name in (*WORKSPACES, "wte.grad"))
        w.section((kind, w.pool, alive, self.has_states), (), lambda: self.run(kind, result, batch))

    def run(self, kind: str, result: str, batch: Tensor) -> None:
        model = self.model
        with self.gpu.section():
            inputs, targets = self.places(batch) if self.w.pool == GRAPH_POOL else (batch[:, :-1], batch[:, 1:])
            if kind == "eval":
                model.train(False)
                losses = model.token_losses(inputs, targets)
            else:
                model.train()
                sink = [self.optimizer.sink] if self.has_states and self.optimizer.sink else []
                losses = model.accumulate(inputs, targets, self.scaler.scale, *sink)
            losses.storage.hand_over(result)

    def places(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """What a CUDA graph reads: contiguous, and on the tape already."""
        shape = batch.shape[0], batch.shape[1] - 1
        inputs, targets = (new(shape, int64, "place", on_cpu=True) for _ in range(2))
        inputs.device = targets.device = self.gpu.device
        return inputs, targets

    def evaluate(self) -> None:
        w, rows = self.w, self.config.eval_batch
        for _ in ("train", "val"):
            w.alloc("means", "other", 4 * rows * EVAL_BATCHES)
            batch = ""
            for _ in range(EVAL_BATCHES):
                before, batch = batch, self.fetch(rows, self.config.eval_block)
                if before:
                    w.free(before)
                self.called("eval", "token losses", self.batch)
                w.free_if_alive("token losses")
            w.free("means", batch)

    def fetch(self, rows: int, block: int) -> str:
        """A batch's name. Inputs and targets are windows of one tensor of B × (T + 1) tokens."""
        self.fetched += 1
        with self.gpu.section():
            self.batch = new((rows, block + 1), int64, "batch", "data", on_cpu=True)
        self.batch.device = self.gpu.device
        return self.w.alloc(f"batch {self.fetched}", "data", 8 * rows * (block + 1))

    def micro_steps(self) -> None:
        w, config = self.w, self.config
        w.alloc("micro scale", "other", 4)
        w.alloc("loss sum", "other", 4)
        if self.has_states:
            with self.gpu.section("optimizer", skips_scalars=True):
                self.optimizer.begin(0.0)
        self.batch_name = ""
        for _ in range(min(config.gradient_accumulation_steps, MICRO_STEPS)):
            before, self.batch_name = self.batch_name, self.fetch(config.batch_size, config.block_size)
            if before:
                w.free(before)
            self.called("train", "loss", self.batch)
            w.free_if_alive("loss")

    # ---- the optimizer's step

    def step(self) -> None:
        def write() -> None:
            self.apply_gradients()
            self.w.free("micro scale", "loss sum")

        self.w.section(("step", self.has_states), (), write)
        self.w.free(self.batch_name)

    def apply_gradients(self) -> None:
        """As engine/optim.py's function of that name; the scalars of clipping and of the loss scale are left out."""
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


def draft(config: RunConfig, **options: Any) -> RunConfig:
    """A config with other options, unchecked: to check sixty options takes longer than to write a layer."""
    made: RunConfig = object.__new__(RunConfig)
    made.__dict__.update(config.__dict__, **options)
    return made


def host_bytes(config: RunConfig) -> int:
    """AdamW's moments, the weights it works on and the gradients it is given, where they live in the host's memory."""
    return 0 if config.offload == "none" else 16 * config.gpt_config().count_params()


def checkpoint_bytes(config: RunConfig) -> int:
    """Weights and the optimizer's state per parameter, as they are held; in CPU RAM that includes float32 copies of
    rounded weights."""
    matrix = BYTES[config.weights] + (4 if config.offload != "none" and config.weights != "float32" else 0)
    weights = sum(numbers * (matrix if is_matrix else 4) for _, numbers, is_matrix in parameters(config))
    return weights + state_bytes(config) - optimizer_of(config).shared_bytes
