"""torch.compile on tensors without storage: the compiler's own memory plan, made from shapes alone.

AOTAutograd turns a model into a graph of its forward pass and one of its backward pass, and Inductor writes the Python
code that allocates buffers, calls ATen operations and launches generated kernels. That code runs in the trace, with
kernels that compute nothing: what Inductor fuses, reuses or recomputes is recorded as on a GPU. Neither a driver nor
triton is needed.

What differs from a GPU: Dynamo does not run, so a model is one graph even where Dynamo would break it, and nothing is
timed there, so matrix products are not padded.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.utils._pytree import tree_flatten, tree_unflatten

from .device import CARD, META, TracedGpu, _inside
from .errors import Untraceable
from .flex_attention import copy_mask
from .monkeypatch import Patches
from .recorder import is_users

CHECKPOINT_OPTIONS = {"use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop"}
CONSTANTS = (bool, int, float, complex, str, NoneType, FunctionType, BuiltinFunctionType, torch.dtype, torch.device,
             nn.Module)
WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile
CUDA_GRAPHS = ("torch.compile in this mode uses CUDA graphs, which keep memory of their own: more may be reserved than "
               "stated. mode=\"max-autotune-no-cudagraphs\" uses none.")
# Options of Inductor that let it time kernels on the GPU while it compiles.
TIMING_OPTIONS = ("coordinate_descent_tuning", "max_autotune", "max_autotune_gemm", "max_autotune_pointwise",
                  "benchmark_fusion", "benchmark_combo_kernel", "benchmark_epilogue_fusion",
                  "triton.mix_order_reduction_autotune_split_size")
TIMED_VARIANTS = 2  # of a generated kernel, at its first run


class Compiler:
    """What torch.compile does while a trace runs."""

    def __init__(self, device: TracedGpu) -> None:
        self.device = device
        self.is_compiling, self._checkpoints = False, 0
        self._timed: set[str] = set()  # kernels that ran before

    def compile(self, function: Any, mode: str | None = None) -> Callable[..., Any]:
        """The compiled function or module. It is compiled again for other shapes, and inside no_grad()."""
        known: dict[Any, Callable[..., Any] | None] = {}  # None: the compiler failed
        eager = function._call_impl if isinstance(function, nn.Module) else function

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_compiling:  # part of something that is compiled as a whole
                return eager(*args, **kwargs)
            recorder = self.device.recorder
            recorder.compiled = True
            if mode in WITH_CUDA_GRAPHS:
                recorder.bounded[CUDA_GRAPHS] = None
            leaves, structure = tree_flatten((args, kwargs))
            modules = _modules_of(function, leaves)
            inputs = [_held(module) for module in modules], *(leaf for leaf in leaves if isinstance(leaf, Tensor))
            key = _key((args, kwargs)), torch.is_grad_enabled(), tuple(module.training for module in modules)
            if key not in known:
                from torch._guards import TracingContext, tracing
                from torch._subclasses.fake_tensor import FakeTensorMode

                _register_caches()
                try:
                    # The context tells Inductor which saved tensors the backward pass may overwrite.
                    with self._compilation(), tracing(TracingContext(FakeTensorMode())):
                        compiled = known[key] = self._aot(function, modules, leaves, structure)
                        return compiled(*inputs)
                except Untraceable:
                    raise
                except Exception as error:
                    self._failed(error)
                    known[key] = None
            found = known[key]
            return eager(*args, **kwargs) if found is None else found(*inputs)

        return call

    def checkpoint(self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """torch.utils.checkpoint.checkpoint: in compiled code a mark on what the backward pass computes again, as
        TagActivationCheckpoint in torch/_higher_order_ops/wrap.py makes it."""
        if not self.is_compiling:
            return original(function, *args, **kwargs)
        from torch.fx import traceback
        from torch.utils.checkpoint import CheckpointPolicy

        before, self._checkpoints = dict(traceback.current_meta), self._checkpoints + 1
        traceback.current_meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": self._checkpoints}
        try:
            return function(*args, **{name: value for name, value in kwargs.items() if name not in CHECKPOINT_OPTIONS})
        finally:
            traceback.current_meta.clear()
            traceback.current_meta |= before

    def _failed(self, error: Exception) -> None:
        """The compiler was not made for this and fails on some programs: they run eager, and the trace says so."""
        recorder = self.device.recorder
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        lines = [f" at {frame.filename}, line {frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
                 if is_users(frame.filename)]
        recorder.unplanned = recorder.unplanned or (
            f"torch.compile, whose compiler ended{''.join(lines[-1:])} with {reason}")

    def _aot(self, function: Any, modules: list[nn.Module], leaves: list[Any], structure: Any) -> Callable[..., Any]:
        """A function of what these modules hold, and of the tensors among the arguments, which `leaves` and `structure`
        are. Other arguments are constants of the compiled code."""
        from torch._functorch.aot_autograd import aot_function
        from torch._inductor import lowering  # noqa: F401 - decompositions look for it there
        from torch._inductor.decomposition import select_decomp_table
        from torch.nn.utils.stateless import _reparametrize_module

        count, number = len(leaves), sum(len(_held(module)) for module in modules)
        constants = {place: _constant(leaf) for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}

        def call(held: list[dict[str, Tensor]], *tensors: Tensor) -> Any:
            rest = iter(tensors)
            args, kwargs = tree_unflatten([constants[place] if place in constants else next(rest)
                                           for place in range(count)], structure)
            with ExitStack() as replaced:
                for module, values in zip(modules, held, strict=True):
                    replaced.enter_context(_reparametrize_module(module, values, tie_weights=True))
                return function(*args, **kwargs)

        return aot_function(
            call, fw_compiler=functools.partial(self._compiled, "forward"),
            bw_compiler=functools.partial(self._compiled, "backward"),
            inference_compiler=functools.partial(self._compiled, "inference"),
            partition_fn=functools.partial(_partition, number), decompositions=select_decomp_table(),
            num_params_buffers=number, keep_inference_input_mutations=True)

    def _compiled(self, kind: str, graph: Any, inputs: Any) -> Callable[[list[Any]], Any]:
        """The code of one of the two graphs, or of the only one without gradients."""
        with self._compilation():  # AOTAutograd comes here for the backward pass when it first runs
            try:
                code = self._code(graph, kind)
            except Exception as error:
                if kind != "backward":
                    raise
                self._failed(error)
                code = functools.partial(_run_graph, graph)

        def run(args: list[Any]) -> Any:
            with self.device.program():
                return code(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @contextmanager
    def _compilation(self) -> Iterator[None]:
        """Inside, tensors are plain tensors on `meta`, and nothing is recorded."""
        from torch._subclasses import fake_tensor
        from torch.utils._python_dispatch import _disable_current_modes

        was, self.is_compiling = self.is_compiling, True
        flag = torch.compiler._is_compiling_flag  # programs ask torch.compiler.is_compiling()
        torch.compiler._is_compiling_flag = True
        _inside.depth = getattr(_inside, "depth", 0) + 1
        patches = Patches()
        patches.set(fake_tensor, "init_gpu_context", lambda *_: None)  # needs a driver
        _take_factors_that_are_tensors(patches)
        from torch._inductor import config

        untimed = {name: False for name in TIMING_OPTIONS if name in config._config}  # type: ignore[attr-defined]
        try:
            with _disable_current_modes(), _real_composites(), config.patch(untimed):
                yield
        finally:
            patches.undo()
            _inside.depth -= 1
            self.is_compiling, torch.compiler._is_compiling_flag = was, flag

    def _code(self, graph: Any, kind: str) -> Callable[[list[Any]], Any]:
        """Inductor's code for a graph on `meta`, compiled for the GPU."""
        from torch._inductor import async_compile
        from torch._inductor.compile_fx import _recursive_post_grad_passes
        from torch._inductor.debug import DebugContext
        from torch._inductor.graph import GraphLowering
        from torch._inductor.virtualized import V

        mode, patches = _move_to_gpu(graph), Patches()
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        _patch_inductor(patches, self.device.platform.capability)
        try:
            with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), torch._C._AutoDispatchBelowAutograd():
                _recursive_post_grad_passes(graph, is_inference=kind == "inference")
                lowered = GraphLowering(graph, example_inputs=inputs, is_backward=kind == "backward",
                                        is_inference=kind == "inference")
                with V.set_graph_handler(lowered):
                    lowered.run(*inputs)
                    written = lowered.codegen()[0]
            text = str(getattr(written, "value", written)).replace("import triton\nimport triton.language as tl\n", "")
            patches.set(async_compile, "AsyncCompile", functools.partial(_Kernels, self))
            module: dict[str, Any] = {"__name__": "compiled"}
            exec(compile(text, "<compiled>", "exec"), module)
        finally:
            patches.undo()
        module["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype,
                                                                                      device=CARD)
        module["assert_size_stride"] = lambda *_, **__: None  # Inductor pads strides; operations without storage do not
        return module["call"]  # type: ignore[no-any-return]

    def time(self, kernel: str) -> None:
        """At its first run a kernel's variants are timed, with a buffer that flushes the L2 cache."""
        if kernel not in self._timed:
            self._timed.add(kernel)
            for _ in range(TIMED_VARIANTS):
                self.device.recorder.scratch([self.device.platform.cache], "timing of a compiled kernel")


def _register_caches() -> None:
    """Models of transformers return their key-value cache, also in training. Called before a compilation: what
    transformers imports during one, it does not register as outputs of a model."""
    if "transformers" in sys.modules:
        with suppress(ImportError):
            from transformers.integrations.executorch import register_dynamic_cache_export_support

            register_dynamic_cache_export_support()


class _Kernels:
    """In place of torch._inductor.async_compile.AsyncCompile: kernels that compute nothing."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def triton(self, name: str, source: str, **_: Any) -> _Kernel:
        return _Kernel(self._compiler, source)

    def wait(self, _: Any) -> None:
        return None


class _Kernel:
    def __init__(self, compiler: Compiler, source: str) -> None:
        self._compiler, self._source = compiler, source

    def run(self, *_: Any, **__: Any) -> None:
        self._compiler.time(self._source)


def _run_graph(graph: Any, args: list[Any]) -> Any:
    given = list(args)
    args.clear()
    return torch.fx.Interpreter(graph).run(*given)


def _key(given: Any) -> Any:
    """Equal for arguments of equal shapes and equal other values."""
    if isinstance(given, Tensor):
        return tuple(given.shape), given.stride(), given.dtype, given.requires_grad
    if isinstance(given, dict):
        return tuple((name, _key(value)) for name, value in given.items())
    if isinstance(given, list | tuple):
        return type(given), *map(_key, given)
    if isinstance(given, FunctionType):
        return given.__code__  # another one for each batch may be the same code
    if isinstance(given, BlockMask):
        return _key(given.as_tuple()[:-1])
    return repr(given)


def _modules_of(function: Any, arguments: list[Any]) -> list[nn.Module]:
    """Those that the function or module is, belongs to, gets, or refers to by name."""
    owner, code = getattr(function, "__self__", None), getattr(function, "__func__", function)
    found = [function, owner, *arguments]
    if not isinstance(owner, nn.Module):
        found += getattr(owner, "__dict__", {}).values()
    if isinstance(code, FunctionType):
        with suppress(ValueError):  # of a variable that has no value yet
            names = inspect.getclosurevars(code)
            found += [*names.nonlocals.values(), *names.globals.values(), *(code.__defaults__ or ())]
    modules = list(dict.fromkeys(each for each in found if isinstance(each, nn.Module)))
    parts = {part for each in modules for part in each.modules() if part is not each}
    return [each for each in modules if each not in parts]


def _held(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, which are inputs of the graphs."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _constant(given: Any) -> Any:
    """A mask of flex_attention without its memory, which the compiled code does not own; others as they are."""
    if isinstance(given, BlockMask):
        mask = copy_mask(given)
        mask.mask_mod = noop_mask  # it may refer to tensors, too
        return mask
    if isinstance(given, CONSTANTS):
        return given
    raise TypeError(f"an argument of type {type(given).__name__}")


def _partition(held: int, graph: Any, inputs: Any, **kwargs: Any) -> Any:
    """As torch._inductor.compile_fx does. The first `held` inputs are parameters and buffers: they live anyway."""
    from torch._functorch import partitioners
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.virtualized import V

    kwargs["static_lifetime_input_indices"] = list(range(held))
    patches = Patches()
    patches.set(torch.cuda, "is_available", lambda: False)  # patterns of graphs are traced on the host then
    try:
        # Padding would time matrix products, and folding would compute on the GPU.
        with V.set_fake_mode(_move_to_gpu(graph)), torch._C._AutoDispatchBelowAutograd(), \
                config.patch(shape_padding=False, joint_graph_constant_folding=False):
            changed = _recursive_joint_graph_passes(graph)
        # States of random numbers for what is computed again: they would be read from the GPU.
        patches.set(partitioners, "functionalize_rng_ops", lambda joint, forward, backward, *_: (forward, backward))
        return partitioners.min_cut_rematerialization_partition(changed or graph, inputs, compiler="inductor", **kwargs)
    finally:
        patches.undo()


def _move_to_gpu(graph: Any) -> Any:
    """Turns `meta` into `cuda` in a graph: in the tensors that nodes are known to make, and in their arguments. Returns
    the mode of the graph's fake tensors."""
    mode = next(node.meta["val"].fake_mode for node in graph.graph.nodes if hasattr(node.meta.get("val"), "fake_mode"))

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            with mode:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype,
                                           device="cuda" if value.device == META else value.device)
        if isinstance(value, torch.device):
            return CARD if value == META else value
        if isinstance(value, list | tuple):
            return type(value)(map(moved, value))
        return value

    for node in graph.graph.nodes:
        node.meta["val"] = moved(node.meta.get("val"))
        node.meta.pop("tensor_meta", None)
        node.args = torch.fx.node.map_aggregate(node.args, moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
    graph.recompile()
    return mode


def _patch_inductor(patches: Patches, capability: tuple[int, int]) -> None:
    """Inductor looks for a driver and for triton; neither is used."""
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_utils import FakeTensorUpdater
    from torch._subclasses.fake_tensor import FakeTensor

    # Some operations need a build with CUDA even where tensors are fake: copy_, and those made of it.
    copy, update = Tensor.copy_, FakeTensorUpdater.incremental_update
    patches.set(Tensor, "copy_", lambda tensor, *args, **kwargs: tensor if isinstance(tensor, FakeTensor)
                else copy(tensor, *args, **kwargs))

    def try_update(updater: Any) -> None:
        with suppress(RuntimeError):
            update(updater)

    patches.set(FakeTensorUpdater, "incremental_update", try_update)
    patches.set(scheduler, "has_triton", lambda *_: True)
    patches.set(triton, "triton_hash_with_backend", lambda: "")
    for interface in (CudaInterface, CudaInterface.Worker):
        patches.set(interface, "get_device_properties", staticmethod(torch.cuda.get_device_properties))
    patches.set(CudaInterface, "get_compute_capability", staticmethod(lambda *_: 10 * capability[0] + capability[1]))
    patches.set(CudaInterface, "is_available", staticmethod(lambda: True))


def _take_factors_that_are_tensors(patches: Patches) -> None:
    """add_(x, alpha=tensor) and its relatives, which would read the tensor's value: method_add_() in
    torch/_dynamo/variables/tensor.py."""
    def wrapped(original: Any, product: Any, factor: str) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if isinstance(kwargs.get(factor), Tensor):
                return tensor.add_(product(*args) * kwargs[factor])
            return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]

        return call

    for name, product, factor in (("add_", lambda other: other, "alpha"), ("addcmul_", torch.mul, "value"),
                                  ("addcdiv_", torch.div, "value")):
        patches.set(Tensor, name, wrapped(getattr(Tensor, name), product, factor))


@contextmanager
def _real_composites() -> Iterator[None]:
    """Composite operations that torch also has a Python kernel for on `meta` do not reach autograd's own kernels there
    while the Python dispatcher is on, as in AOTAutograd (resolve_key() in torch/_ops.py). Inside, they do."""
    from torch._decomp import global_decomposition_table

    key, removed = torch._C.DispatchKey.Meta, dict[Any, Any]()
    for table in global_decomposition_table.values():
        for op in table:
            if key in getattr(op, "py_kernels", {}) and isinstance(op, torch._ops.OpOverload) and \
                    torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
                removed[op] = op.py_kernels.pop(key)
                op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernel in removed.items():
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
