"""RunConfig → the tape of our own engine: load, evaluation, iterations, a later evaluation, a checkpoint.

The run is here, as engine/loop.py and run.py have it; what the passes do is in passes.py, what an optimizer holds in
optimizers.py. With recorded GPU work, the first call of a kind runs as it is; the second is recorded, in a pool of its
own, after unused memory was given back; later ones allocate nothing. The evaluation before the first step is recorded
and, when that step comes, forgotten: a later one is recorded again, and a last iteration shows what is then held.
"""

from __future__ import annotations

from functools import partial

from ..config.memory_savers import loss_piece_tokens
from ..config.run_config import RunConfig
from . import optimizers
from .parts import SCALAR, Sizes
from .passes import Passes
from .setting import Setting
from .tape import ORDINARY, RECORDED, SIDE, Tape, Writer

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NORM_CHUNK = 65536  # numbers that one block of a foreach norm sums
EVAL_BATCHES, ITERATIONS, MICRO_STEPS = 2, 2, 2  # written of each: more change nothing
DICE = "dice of recorded work"
WORKSPACES = ("cublas", "cublaslt", "cublas of recorded work", "cublaslt of recorded work")


def write(config: RunConfig, setting: Setting) -> Tape:
    """Wants a config whose dtype, compile and vocabulary are settled: see forecast.settled."""
    return Run(config, setting).write()


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


def records(config: RunConfig) -> bool:
    """Whether GPU work is recorded: run.records_gpu_work's rule."""
    return bool(config.compile) and not config.not_recorded if config.cuda_graphs == "auto" else config.cuda_graphs


def sizes(config: RunConfig, setting: Setting, batch: int, block: int, *, training: bool) -> Sizes:
    return Sizes(
        b=batch, t=block, c=config.n_embd, heads=config.n_head, vocab=config.vocab_size, layers=config.n_layer,
        product=BYTES[config.dtype], residual=BYTES[config.residual], matrix=BYTES[config.weights],
        casts=config.weights != config.dtype, copies=config.casts == "kept", rounds=config.residual != config.dtype,
        widens=config.weights != config.residual, bias=config.bias,
        dropout=training and config.dropout > 0, compiled=bool(config.compile), kernel=setting.attention(config),
        triton=setting.compiles, workspace=setting.workspace, sms=setting.sms,
        piece=loss_piece_tokens(batch * block, config.vocab_size, config.loss_chunk))


class Run:
    def __init__(self, config: RunConfig, setting: Setting) -> None:
        self.config, self.w = config, Writer()
        self.records = records(config)
        self.gradients_stay = self.records or config.gradients == "kept"
        self.has_states = config.eval_only  # whether the optimizer's are there, as far as they are wanted
        self.parameters = parameters(config)
        self.levels = config.levels
        self.training = Passes(self.w, sizes(config, setting, config.batch_size, config.block_size, training=True))
        self.looking = Passes(self.w, sizes(config, setting, config.eval_batch, config.eval_block, training=False))
        self.training.positions = config.block_size
        self.training.sink = {"gradients": "host"}.get(config.offload, "step" if config.step_in_backward else "grad")
        self.optimizer = optimizers.of(config, self.parameters, self.w, fused=setting.compiles)
        self.training.optimizer = self.optimizer
        self.fetched = 0
        self.met: set[str] = set()          # kinds of work that have run as they are
        self.recorded: dict[str, str] = {}  # kinds that are recorded, and where the result appears

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
        if self.records:
            self.iterate("train", "step")
        w.phase("save")  # tensor by tensor, through the host
        return w.tape()

    def iterate(self, *phases: str) -> None:
        micro_steps, step = phases
        self.w.phase(micro_steps)
        self.micro_steps()
        self.w.phase(step)
        self.w.part(("step", self.has_states), (self.batch,), self.step)

    def load(self) -> None:
        w, config = self.w, self.config
        rounds = config.weights != "float32"
        for name, numbers, is_matrix in self.parameters:
            w.alloc(f"{name}.float32" if rounds and is_matrix else name, "weights", 4 * numbers)
        for name, numbers, is_matrix in self.parameters:
            if rounds and is_matrix:
                w.alloc(name, "weights", BYTES[config.weights] * numbers)
                w.free(f"{name}.float32")
        if config.casts == "kept" and config.weights != config.dtype:
            for name, numbers, is_matrix in self.parameters:
                if is_matrix and name != "wpe":
                    w.alloc(f"{name}.copy", "casts", BYTES[config.dtype] * numbers)
        if config.states == "early" or config.init_from == "resume":  # a checkpoint's are read into their places
            self.make_states()
        for name in ("scale", "good steps", "skipped", "skipped in a row"):
            w.alloc(name, "other", SCALAR)
        if self.gradients_stay and not config.eval_only:
            for name, numbers, is_matrix in self.parameters:
                w.alloc(f"{name}.grad", "gradients", (BYTES[config.weights] if is_matrix else 4) * numbers)

    def make_states(self) -> None:
        if not self.has_states:
            self.has_states = True
            self.optimizer.load()

    # ---- work that may be recorded

    def called(self, kind: str, passes: Passes, result: str, batch: str) -> None:
        """One micro-step or evaluation batch: as it is, being recorded, or replayed. See engine/graphs.py."""
        if not self.records:
            self.work(kind, passes, result, batch)
        elif kind not in self.met:
            self.met.add(kind)
            self.forget()
            self.work(kind, passes, result, batch)
        elif kind not in self.recorded:
            self.recorded[kind] = f"recorded {result}"
            self.record(kind, passes)

    def record(self, kind: str, passes: Passes) -> None:
        w = self.w
        for place in ("inputs", "targets"):
            w.alloc(f"{kind} {place}.place", "data", 8 * passes.s.n)
        w.release()
        w.pool = SIDE
        if not w.alive(DICE):
            w.alloc(DICE, "other", 2 * 8)
        w.pool = RECORDED
        self.work(kind, passes, self.recorded[kind], f"{kind}.place")
        w.pool = ORDINARY

    def forget(self) -> None:
        """What is recorded, its pool, and the products' workspaces with it."""
        w = self.w
        if self.recorded:
            for kind, result in self.recorded.items():
                w.free(f"{kind} inputs.place", f"{kind} targets.place", result)
            w.free(DICE)
            w.free_if_alive(*WORKSPACES)
            w.release()
            self.recorded.clear()

    def work(self, kind: str, passes: Passes, result: str, batch: str) -> None:
        w = self.w
        there = tuple(w.alive(name) for name in (*WORKSPACES, "wte.grad"))
        write = (partial(passes.hidden_losses, batch, result) if kind == "eval" else
                 partial(passes.accumulate, batch, self.levels, result))
        w.part((kind, w.pool, there), (), write)

    def evaluate(self) -> None:
        w, s = self.w, self.looking.s
        for _ in ("train", "val"):
            w.alloc("means", "other", 4 * s.b * EVAL_BATCHES)
            batch = ""
            for _ in range(EVAL_BATCHES):
                before, batch = batch, self.fetch(s)
                if before:
                    w.free(before)
                self.called("eval", self.looking, "token losses", batch)
                w.free_if_alive("token losses")
            w.free("means", batch)

    def fetch(self, s: Sizes) -> str:
        """Inputs and targets are windows of one tensor of B × (T + 1) tokens."""
        self.fetched += 1
        return self.w.alloc(f"batch {self.fetched}", "data", 8 * s.b * (s.t + 1))

    def micro_steps(self) -> None:
        w, s = self.w, self.training.s
        w.alloc("micro scale", "other", SCALAR)
        w.alloc("loss sum", "other", SCALAR)
        self.batch = ""
        for _ in range(min(self.config.gradient_accumulation_steps, MICRO_STEPS)):
            before, self.batch = self.batch, self.fetch(s)
            if before:
                w.free(before)
            self.called("train", self.training, "loss", self.batch)
            w.free_if_alive("loss")

    def step(self) -> None:
        w = self.w
        gradients = [name for name, _, _ in self.parameters if w.alive(f"{name}.grad")]
        if gradients:
            longest = max(numbers for name, numbers, _ in self.parameters if w.alive(f"{name}.grad"))
            w.alloc("norms.partial", "workspace", SCALAR * len(gradients) * -(-longest // NORM_CHUNK))
            norms = [w.alloc(f"{name}.norm", "other", SCALAR) for name in gradients]
            w.free("norms.partial", *norms)
        self.make_states()
        self.optimizer.step()
        if not self.gradients_stay:
            w.free(*(f"{name}.grad" for name in reversed(gradients)))  # as a list lets go of them
        w.free("micro scale", "loss sum", self.batch)


def held_at_a_step(config: RunConfig) -> int:
    """What is on the card when the optimizer takes its step: weights, gradients where they wait for it, its state."""
    found = parameters(config)
    weights = sum(numbers * (BYTES[config.weights] if is_matrix else 4) for _, numbers, is_matrix in found)
    waiting = 0 if config.step_in_backward or config.offload == "gradients" else weights
    return weights + waiting + (optimizers.of(config, found, Writer()).nbytes() if config.offload == "none" else 0)


def host_bytes(config: RunConfig) -> int:
    """AdamW's moments, the weights it works on and the gradients it is given, where they live in the host's memory."""
    return 0 if config.offload == "none" else 16 * config.gpt_config().count_params()


def checkpoint_bytes(config: RunConfig) -> int:
    """Weights and the optimizer's state, as they are held; in the host's memory that has masters of rounded weights."""
    matrix = BYTES[config.weights] + (4 if config.offload != "none" and config.weights != "float32" else 0)
    weights = sum(numbers * (matrix if is_matrix else 4) for _, numbers, is_matrix in parameters(config))
    return weights + optimizers.of(config, parameters(config), Writer()).nbytes()
