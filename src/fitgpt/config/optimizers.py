"""The registry of optimizers: for each the state it keeps per parameter, what it moves, what it does not work with.

A new optimizer is an entry here and its class in engine/optim/, which the entry names: the memory forecast runs that
class on tensors without data. tests/config/test_optimizers.py checks every entry against the real optimizer after one
step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .architectures import BYTES, parameter_shapes
from .fields import Requires

if TYPE_CHECKING:
    from .run_config import RunConfig

ADAMW_EPSILON = 1e-8     # also of nanoGPT, whose AdamW takes torch's default
GROUP = 256              # elements that share a scale, as in the papers on 8-bit optimizers
SMALLEST_ROUNDED = 4096  # tensors with fewer elements (norms, biases) keep float32 state: they hardly count
AT_ONCE = 2**22          # elements updated at once without a fused kernel: bounds the temporary memory
MUON_ROUNDS = 5          # Newton–Schulz iterations


class StateTensor(NamedTuple):
    """A tensor of optimizer state that belongs to one parameter."""

    name: str
    per_element: int = 0  # bytes per element of the parameter
    per_group: int = 0    # bytes per GROUP of elements
    fixed: int = 0        # bytes per tensor

    def nbytes(self, elements: int) -> int:
        return self.per_element * elements + self.per_group * -(-elements // GROUP) + self.fixed


State = tuple[StateTensor, ...]

ADAMW_STATE = (StateTensor("exp_avg", 4), StateTensor("exp_avg_sq", 4), StateTensor("step", fixed=4))
FLOAT32_MOMENTS = ADAMW_STATE[:2]
INT8_MOMENTS = (StateTensor("first", 1), StateTensor("first_scale", per_group=4),
                StateTensor("second", 1), StateTensor("second_scale", per_group=4))
BITSANDBYTES_MOMENTS = (StateTensor("state1", 1), StateTensor("absmax1", per_group=4),
                        StateTensor("state2", 1), StateTensor("absmax2", per_group=4))
MUON_MOMENTUM = (StateTensor("momentum", 4),)


class OptimizerSpec(NamedTuple):
    """Facts about an optimizer. Its state is the same for float32 and bfloat16 weights, unless `low_precision`."""

    summary: str
    engine_class: str                    # "module:Class" in engine/optim/
    state: State                         # of a parameter, unless one of the next two applies
    small_state: State | None = None     # of a parameter with fewer than SMALLEST_ROUNDED elements
    block_matrix_state: State | None = None  # of a weight matrix of a block
    shared_bytes: int = 0                # of state that belongs to no parameter
    state_bytes_moved: float = 16.0      # bytes of state read and written per parameter and step
    matmul_flops: Callable[[int], int] = lambda n_embd: 0  # FLOP per block and step
    requires: tuple[Requires, ...] = ()  # settings of other options that it works with

    def state_of(self, elements: int, *, block_matrix: bool) -> State:
        """The state tensors of one parameter."""
        if block_matrix and self.block_matrix_state is not None:
            return self.block_matrix_state
        if elements < SMALLEST_ROUNDED and self.small_state is not None:
            return self.small_state
        return self.state

    def bytes_moved(self, weight_bytes: int) -> float:
        """Bytes read and written per parameter and step: weights and gradients five times in all (the update reads both
        and writes the weight; the norm reads the gradient and zeroing writes it), and the state."""
        return 5 * weight_bytes + self.state_bytes_moved


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec("AdamW with float32 state, 8 bytes per parameter", engine_class="adamw:AdamW",
                           state=ADAMW_STATE),
    "adam8bit": OptimizerSpec(
        "AdamW with 8-bit state, 2 bytes per parameter (lossy)",
        engine_class="low_precision:LowPrecisionAdamW", state=INT8_MOMENTS, small_state=FLOAT32_MOMENTS,
        shared_bytes=12, state_bytes_moved=4.0, requires=(Requires("offload", ("none",)),)),
    "muon": OptimizerSpec(
        "Muon for the weight matrices of the blocks, 4 bytes per parameter, and AdamW for the rest",
        engine_class="muon:Muon", state=ADAMW_STATE, block_matrix_state=MUON_MOMENTUM,
        matmul_flops=lambda n_embd: MUON_ROUNDS * 56 * n_embd**3,  # three matmuls per iteration for each matrix
        requires=(Requires("weights", ("float32",)), Requires("offload", ("none",)),
                  Requires("step_in_backward", (False,)))),
}

# Variants of an optimizer that another option selects. AdamW in low precision is for bfloat16 weights, or applied
# during backward.
BITSANDBYTES = OPTIMIZERS["adam8bit"]._replace(
    engine_class="bitsandbytes:BitsandbytesAdamW", state=BITSANDBYTES_MOMENTS, small_state=ADAMW_STATE,
    shared_bytes=2 * 4 * 2**8)  # two maps from a byte to a share of the group's largest
LOW_PRECISION_ADAMW = OPTIMIZERS["adamw"]._replace(
    engine_class="low_precision:LowPrecisionAdamW", state=FLOAT32_MOMENTS, shared_bytes=12)
OFFLOADED_ADAMW = OPTIMIZERS["adamw"]._replace(engine_class="offload:OffloadedAdamW")


def optimizer_of(config: RunConfig) -> OptimizerSpec:
    """The optimizer that a config selects."""
    if config.offload != "none":
        return OFFLOADED_ADAMW
    if config.adam8bit == "bitsandbytes" and config.optimizer == "adam8bit":
        return BITSANDBYTES
    if config.optimizer == "adamw" and (config.step_in_backward or config.weights == "bfloat16"):
        return LOW_PRECISION_ADAMW
    return OPTIMIZERS[config.optimizer]


def state_bytes(config: RunConfig) -> int:
    """Bytes of optimizer state, on the GPU or, with offload, in CPU RAM."""
    spec = optimizer_of(config)
    total = spec.shared_bytes
    for name, shape in parameter_shapes(config.gpt_config()).items():
        state = spec.state_of(prod(shape), block_matrix=".h." in name and len(shape) == 2)
        total += sum(tensor.nbytes(prod(shape)) for tensor in state)
    return total


def host_bytes(config: RunConfig) -> int:
    """In CPU RAM, with offload: AdamW's moments, master weights and the gradients it is given."""
    return 0 if config.offload == "none" else 16 * config.gpt_config().count_params()


def checkpoint_bytes(config: RunConfig) -> int:
    """On disk: weights and the optimizer's state, as they are held; with offload also masters of rounded weights."""
    matrix = BYTES[config.weights] + (4 if config.offload != "none" and config.weights != "float32" else 0)
    shapes = parameter_shapes(config.gpt_config()).values()
    weights = sum(prod(shape) * (matrix if len(shape) == 2 else 4) for shape in shapes)
    return weights + state_bytes(config) - optimizer_of(config).shared_bytes
