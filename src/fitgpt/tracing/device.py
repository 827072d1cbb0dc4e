"""A GPU without memory: inside `TracedGpu`, CUDA tensors have a shape and no storage, and every allocation is recorded.

A CUDA tensor is a tensor on torch's `meta` device that calls itself `cuda:0`. Real autograd runs on it, so what a
backward pass needs lives exactly as long as it does on a GPU. Three layers:

- a TorchDispatchMode sees every operation below autograd: it computes the shapes of results, follows their storages by
  weak references, and answers questions about values (values.py);
- kernels on dispatch keys replace decisions that torch's C++ code takes by `is_cuda()`: autocast (autocast.py),
  attention and dropout (composites.py);
- Python functions that would need a driver are replaced (patches.py).

Why not FakeTensorMode: in a CPU build of torch, autograd aborts the process on fake CUDA tensors (there is no device
guard for CUDA); `meta` tensors run on the thread that calls backward().
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..memory.platform import Platform
from .autocast import Autocast
from .errors import Untraceable
from .kernels import KERNELS, Call, in_channels_last
from .recorder import BACKWARD, EVALUATION, FORWARD, LOAD, OPTIMIZER, Recorder, TracedTensor, model_line
from .values import NESTED, Values, is_stand_in, tensors_in

UNKNOWN_CONVOLUTIONS = ("cuDNN chooses the kernels of convolutions on the GPU: their workspaces, up to a few percent "
                        "of the memory, are estimated.")
BENCHMARK_MODE = ("torch.backends.cudnn.benchmark is True: cuDNN tries the algorithms of each convolution with the "
                  "workspaces that they ask for, and more memory may be reserved, several times as much. Algorithms "
                  "that do not fit are left out.")
SKIPPED_STEPS = ("Gradients are taken to be finite. GradScaler skips steps whose gradients overflow, often the first "
                 "ones: the optimizer's state is then allocated later, and more or less memory may be reserved.")
NO_LARGER_NUMBERS = "torch.bincount is taken to have `minlength` results: no number is as large."
CARD, META, HOST = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
# Random numbers for weights of the host: a core draws 0.4 billion per second.
DRAWN_AT_ONCE, MOST_DRAWN = 64 * 1024, 2**31
LARGE_HOST = 256 * 1024   # bytes: an uninitialised tensor of the host from here on has no storage either
ops = torch.ops.aten
# .depth: how many operations of the mode are running; .wants_meta: the program asked for torch's `meta` device
_inside = threading.local()

VIEWS = {ops._unsafe_view.default, ops.detach.default, ops.alias.default, ops.lift_fresh.default}
# Backward passes write these results into zeros of their own. Under a dispatch mode they make new ones:
# gather_backward() and others in FunctionsManual.cpp and TensorAdvancedIndexing.cpp ask isTensorSubclassLike().
IN_PLACE_IN_BACKWARD = {
    ops.scatter_add.default, ops.index_add.default, ops.index_put.default, ops.scatter.src, ops.scatter.value,
}
SETS_STORAGE = {ops.set_.source_Storage_storage_offset, ops.set_.source_Storage}  # copy.deepcopy() of a buffer
FILLS_IN_ORDER = {ops.normal_.default, ops.uniform_.default}
SOFTMAX = {ops._softmax.default, ops._safe_softmax.default}
GROUPED_MM = getattr(getattr(ops, "_grouped_mm", None), "default", None)
# Operations that take tensors of the host, too, besides those of the GPU.
MIXES_DEVICES = {
    ops.copy_.default, ops.copy.default, ops._to_copy.default, ops.index.Tensor, ops.index_put.default,
    ops.index_put_.default, ops._index_put_impl_.default, ops._pack_padded_sequence.default,
    ops._ctc_loss.default, ops._ctc_loss_backward.default,
    ops._pack_padded_sequence_backward.default, ops._pad_packed_sequence.default,
    ops.log_sigmoid_backward.default,  # its buffer, which CUDA's kernel has not
    *SETS_STORAGE,
}
# Operations without a shape function in torch, and the argument that their result is like.
RESULT_IS_LIKE = {
    ops._sample_dirichlet.default: 0, ops.binomial.default: 0, ops._ctc_loss_backward.default: 1,
    ops.multi_margin_loss_backward.default: 1, ops.multilabel_margin_loss_backward.default: 1,
}
DATA_DEPENDENT = {
    ops.nonzero.default, ops.masked_select.default, ops._unique.default, ops._unique2.default, ops.unique_dim.default,
    ops.unique_consecutive.default, ops.repeat_interleave.Tensor, ops.bincount.default,
}


def first_gpu(device: torch.device) -> bool:
    """True; a GPU that is not the first is an error."""
    if device.type == "cuda" and device.index:
        raise Untraceable(f"the script uses {device}, and a trace is of one GPU, cuda:0.", "Trace it on one GPU.")
    return True


def device_of(tensor: Tensor) -> torch.device:
    """The device as the program sees it."""
    if is_stand_in(tensor) and TracedGpu.active is not None and not getattr(_inside, "depth", False):
        return TracedGpu.active.place_of(tensor)
    return torch._C.TensorBase.device.__get__(tensor)


class TracedGpu(TorchDispatchMode):
    """A GPU of `platform`, with a recorder of its memory."""

    active: TracedGpu | None = None

    def __init__(self, platform: Platform, recorder: Recorder) -> None:
        super().__init__()
        self.platform = platform
        self.values = Values()
        self.autocast = Autocast(platform.torch, self._is_cast)
        self.in_optimizer = False
        # By address of a storage: its block, or where it is if it is not on the GPU. A storage without an entry has no
        # bytes.
        self._places: dict[int, TracedTensor | torch.device] = {}
        self._references: dict[int, Any] = {}
        self.use(recorder)
        self._shapes: dict[Any, Any] = {}
        self._drawn = 0
        self._sole: tuple[int, int] | None = None
        self._keys_off = torch._C._dispatch_tls_local_exclude_set()  # of the program, without autocast
        self._origins: dict[int, str] = {}  # by sequence number of an autograd node: the module that called it

    def use(self, recorder: Recorder) -> None:
        """Records there from now on, as of the beginning of a process."""
        self.recorder = recorder
        self._workspaces: set[tuple[str, str]] = set()
        recorder.enter(LOAD)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler, which takes seconds

    # ---- places

    def place_of(self, tensor: Tensor) -> torch.device:
        found = self._places.get(tensor.untyped_storage()._cdata)
        return found if isinstance(found, torch.device) else CARD

    def block_of(self, tensor: Tensor) -> TracedTensor | None:
        if not tensor.is_sparse and is_stand_in(tensor):
            found = self._places.get(tensor.untyped_storage()._cdata)
            return found if isinstance(found, TracedTensor) else None
        return None

    def on_card(self, given: Any) -> bool:
        return isinstance(given, Tensor) and is_stand_in(given) and self.place_of(given) is CARD

    def keep(self, tensor: Tensor, owner: str = "", op: str = "") -> None:
        """Records the allocation of a result's storage, unless it is known already or on the host."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._places or not storage.nbytes() or not is_stand_in(tensor):
            return
        block = self.recorder.alloc(storage.nbytes(), op, owner, tuple(tensor.shape), str(tensor.dtype)[6:])
        self._follow(storage, block)

    def put(self, tensor: Tensor, place: torch.device) -> None:
        """States that a tensor without storage is not on the GPU: on the host, or on `meta` because the user asked."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._places:
            self._follow(storage, place)

    def _follow(self, storage: Any, place: TracedTensor | torch.device) -> None:
        key = storage._cdata
        places, references, values, recorder = self._places, self._references, self.values, self.recorder

        def freed(_: Any) -> None:
            place = places.pop(key)
            del references[key]
            values.forget(key)
            if isinstance(place, TracedTensor):
                recorder.free(place)

        places[key] = place
        references[key] = weakref.ref(storage, freed)

    def _is_cast(self, tensor: Tensor) -> None:
        if block := self.block_of(tensor):
            block.owner = "casts"

    # ---- operations

    @contextmanager
    def program(self) -> Iterator[None]:
        """Inside, code that an operation calls runs as the program's own: what it allocates is recorded."""
        depth, _inside.depth = getattr(_inside, "depth", 0), 0
        try:
            is_on = self in _get_current_dispatch_mode_stack()
            with nullcontext() if is_on or TracedGpu.active is None else self:
                yield
        finally:
            _inside.depth = depth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _inside.depth = getattr(_inside, "depth", 0) + 1
        try:
            return self._run(func, args, dict(kwargs or {}))
        except Untraceable as error:  # the program may catch it, and goes on otherwise than on a GPU
            self.recorder.not_seen[f"{model_line()}: {error.what}"] = None
            raise
        finally:
            _inside.depth -= 1

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in((args, tuple(kwargs.values())))
        here = [each for each in given if is_stand_in(each)]
        device = kwargs.get("device")
        if not here and (device is None or device.type == "cpu"):
            return self._on_host(func, args, kwargs)
        if not here and device.type not in ("cuda", "meta"):
            return func(*args, **kwargs)
        if device is not None:
            first_gpu(device)
        places = [self.place_of(each) for each in here]
        place = self._place_of_result(places, device)
        if device is None and place is CARD and (HOST in places or len(here) < len(given)):
            self._refuse_mixed_devices(func, given)
        if place is not CARD:
            return self._off_card(func, args, kwargs, place)
        kwargs.pop("pin_memory", None)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        if device is not None and device.type == "cuda":
            kwargs["device"] = META
        self._find_phase(func, given, here)
        return self._on_card(func, args, kwargs, given, here)

    def _place_of_result(self, places: list[torch.device], device: torch.device | None) -> torch.device:
        """`places`: of the arguments without storage."""
        if device is not None and device.type in ("cuda", "cpu"):
            return CARD if device.type == "cuda" or CARD in places else HOST
        if places and not getattr(_inside, "wants_meta", 0):
            return CARD if CARD in places else places[0]
        return META if getattr(_inside, "wants_meta", 0) else CARD

    def _refuse_mixed_devices(self, func: Any, given: list[Tensor]) -> None:
        """As CUDA's kernels do: a model or a batch was not moved to the GPU. Single numbers may be on the host."""
        if func.namespace != "aten" or func in MIXES_DEVICES or func._schema.name.startswith("aten::_foreach"):
            return
        if any(each.dim() and (not is_stand_in(each) or self.place_of(each) == HOST) for each in given):
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
                               "and cpu!")

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Uninitialised tensors of the host that are large have no storage: weights before they move to the GPU."""
        kwargs.pop("pin_memory", None)  # needs a driver
        if func is ops.empty.memory_format:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            numel = 1
            for each in args[0]:
                numel *= each
            if numel * dtype.itemsize >= LARGE_HOST:
                kwargs["device"] = META
                result = func(*args, **kwargs)
                self.put(result, HOST)
                return result
        return func(*args, **kwargs)

    def _off_card(self, func: Any, args: Any, kwargs: Any, place: torch.device) -> Any:
        """An operation on tensors of the host that have no storage, or on the program's own `meta` tensors."""
        if place == HOST:
            if func is ops._local_scalar_dense.default:
                self._read(args[0])
                return _any_value(args[0].dtype)
            if func is ops.copy_.default and not is_stand_in(args[0]):
                return args[0]
            if kwargs.get("device") is not None:
                kwargs["device"] = META
            generator = kwargs.pop("generator", None)
            written = _written(func, args, kwargs)
            if written:
                if torch.Tag.nondeterministic_seeded in func.tags and len(tensors_in(args)) == 1:
                    self._draw(func, args, generator)
                return written[0] if func._schema.returns else None
            if func not in MIXES_DEVICES:
                args = _without_storage(tuple(args))
                kwargs = {name: _without_storage(each) for name, each in kwargs.items()}
        result = func(*args, **kwargs)
        for each in tensors_in((result,)):
            if is_stand_in(each):
                self.put(each, place)
        return result

    def _on_card(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], here: list[Tensor]) -> Any:
        if func.namespace == "bitsandbytes":  # its kernels for CUDA are Python code: see bitsandbytes.py
            return self._run_kernel(func, args, kwargs)
        if func is ops._local_scalar_dense.default:
            known = self._read(args[0])
            return _any_value(args[0].dtype) if known is None else known.item()
        if func is ops.equal.default:
            known = self.values.evaluate(func, args, kwargs, assume=False)
            if known is None:
                self.recorder.makes_up_a_branch()
            return True if known is None else known
        if func is ops._to_copy.default and kwargs.get("device") is not None and kwargs["device"].type == "cpu":
            return self._to_host(args[0], kwargs.get("dtype"))
        if func is ops.copy_.default:
            return self._copy(*args, **kwargs)
        if func is ops.embedding.default:  # on CUDA, rows selected by flat indices: ATen's Embedding.cpp
            return self._embedding(*args[:2])
        if func is ops._ctc_loss.default:
            return self._ctc_loss(args[0], max(args[3]))
        if func in DATA_DEPENDENT:
            return self._data_dependent(func, args, kwargs)
        if func is ops.index.Tensor and any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]):
            args = (args[0], self._mask_to_indices(args[0], args[1]))
        if (func is ops.add.Tensor and self._accumulates(args[0])) or (func in IN_PLACE_IN_BACKWARD and _in_engine()):
            if func in KERNELS:
                self._record(func, args, kwargs, [])
            return args[0]
        if func in SETS_STORAGE:
            result = func(*args, **kwargs)
            self.keep(result, "", str(func))
            return result
        written = _written(func, args, kwargs)
        if written and all(each.alias_info is not None for each in func._schema.returns):
            if _reshapes(func, written):
                self._reshape(func, args, kwargs, written)
            self.values.update(func, args, kwargs, written)
            if func is ops._amp_foreach_non_finite_check_and_unscale_.default:
                self.recorder.notes[SKIPPED_STEPS] = None
            if func in KERNELS:
                self._record(func, args, kwargs, [])
            if len(func._schema.returns) == 0:
                return None
            return written[0] if len(func._schema.returns) == 1 else tuple(written[:len(func._schema.returns)])
        result = self._shape(func, args, kwargs)
        results = list(result) if isinstance(result, tuple | list) else [result]
        if not func.is_view and func not in VIEWS:
            from_host = func is ops._to_copy.default and not here
            owner = "data" if from_host and (self.recorder.phase != LOAD or not args[0].is_floating_point()) else ""
            self._record(func, args, kwargs, results, owner)
            self.values.compute(func, args, kwargs, results)
        return result

    def _draw(self, func: Any, args: Any, generator: torch.Generator | None) -> None:
        """Draws as many random numbers as filling a weight on the host takes, so that a script with a seed shuffles
        its data as it does without a trace. In parts where that is the same: normal_fill() in DistributionTemplates.h
        takes 16 at a time.
        """
        tensor, left = args[0], args[0].numel()
        self._drawn += left
        if self._drawn > MOST_DRAWN:
            return
        if func not in FILLS_IN_ORDER or not tensor.is_contiguous():
            func(_empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype), *args[1:], generator=generator)
            return
        filled = torch.empty(2 * DRAWN_AT_ONCE, dtype=tensor.dtype)
        while left:
            count = left if left < 2 * DRAWN_AT_ONCE else DRAWN_AT_ONCE
            func(filled[:count], *args[1:], generator=generator)
            left -= count

    def _reshape(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        """An operation that gives an existing tensor another shape. A storage that grows is allocated again before it
        is freed: resize_bytes_cuda() in Resize.cpp."""
        func(*args, **kwargs)
        for each in written:
            storage, block = each.untyped_storage(), self.block_of(each)
            if block is not None and storage.nbytes() > block.nbytes:
                del self._places[storage._cdata]
                self.keep(each, block.owner, str(func))
                self.recorder.free(block)
            self.keep(each, "", str(func))

    def _record(self, func: Any, args: Any, kwargs: Any, results: list[Any], owner: str = "") -> None:
        thread = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        name = str(func)
        if func in SOFTMAX and results[0].dim() > 2 and results[0].shape[-1] != self.recorder.vocabulary:
            self.recorder.has_scores(tuple(results[0].shape))
        if func is ops._log_softmax.default:
            self.recorder.has_loss_over(results[0].shape[args[1]] if results[0].dim() else 0)
        if "attention" in name:
            owner = "attention"
        call = Call(func, args, kwargs, results, self.platform, self.recorder, self._workspaces, thread, owner,
                    lambda tensor, owner: self.keep(tensor, owner, name), lambda tensor: self.put(tensor, HOST))
        if kernel := KERNELS.get(func):
            kernel(call)
            if func is ops.convolution.default:
                self.recorder.notes[UNKNOWN_CONVOLUTIONS] = None
                if torch.backends.cudnn.benchmark:
                    self.recorder.bounded[BENCHMARK_MODE] = None
        call.finish()

    def _run_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A kernel for CUDA that is Python code: what it calls is recorded. As on a GPU, autocast casts for what it
        calls, and autograd does not see that. Below a dispatch mode both are off, and so are kernels on their keys.
        """
        keys = torch._C.DispatchKey
        with self.program():
            on, off = torch._C._dispatch_tls_local_include_set(), self._keys_off
            if on.has(keys.AutocastCUDA):
                off = off.remove(keys.AutocastCUDA)
            with torch._C._ForceDispatchKeyGuard(on, off), torch.no_grad():
                return func.redispatch(torch._C.DispatchKeySet(keys.CUDA), *args, **kwargs)

    # ---- particular operations

    def _read(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor for the program; None if they are unknown."""
        if not tensor.is_floating_point() and self.values.is_guess(tensor):
            if tensor.dtype == torch.bool:
                self.recorder.makes_up_a_branch()
            else:
                self.recorder.makes_up_a_number()
        return self.values.of(tensor)

    def _to_host(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        known = self._read(tensor)
        dtype = dtype or tensor.dtype
        if known is not None:
            return known.to(dtype, copy=True)
        if tensor.numel() * dtype.itemsize >= LARGE_HOST:
            result = torch.empty(tensor.shape, dtype=dtype, device=META)
            self.put(result, HOST)
            return result
        return made_up(tensor.shape, dtype)

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not is_stand_in(to):
            known = self.values.of(source)
            if known is not None:
                to.copy_(known.expand(to.shape) if known.shape != to.shape else known)
            return to
        if not self.on_card(to):
            return to
        crosses = not self.on_card(source)
        if crosses and to.dtype != source.dtype:  # converted on the GPU, in a copy of the host's: ATen's Copy.cu
            self.recorder.scratch([source.numel() * source.element_size()], "copy_ in another precision")
        self.values.update(ops.copy_.default, (to, source), {}, [to])
        return to

    def _embedding(self, weight: Tensor, indices: Tensor) -> Tensor:
        known = self.values.of(indices)
        if known is not None and known.numel() and int(known.max()) >= weight.shape[0]:
            raise IndexError(f"index out of range in self: {int(known.max())}, in an embedding of {weight.shape[0]} "
                             "rows")
        result = torch.empty((*indices.shape, weight.shape[1]), dtype=weight.dtype, device=META)
        flat = None
        if not indices.is_contiguous():
            flat = self.recorder.alloc(indices.nbytes, "flat indices", "workspace")
        self.keep(result, "", "aten.embedding.default")
        if flat is not None:
            self.recorder.free(flat)
        return result

    def _ctc_loss(self, scores: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """The loss of each sequence, and a table of every step and target, in which targets alternate with blanks. The
        lengths and the offsets of targets move to the GPU: ctc_loss_gpu_template() in LossCTC.cu."""
        batch = scores.shape[1:-1]
        table = torch.empty((*batch, scores.shape[0], 2 * longest + 1), dtype=scores.dtype, device=META)
        losses = torch.empty(batch, dtype=scores.dtype, device=META)
        name = "aten._ctc_loss.default"
        lengths = [self.recorder.alloc(8 * batch.numel(), name, "workspace") for _ in range(3)]
        for each in (table, losses):
            self.keep(each, "", name)
        for length in reversed(lengths):
            self.recorder.free(length)
        return losses, table

    def _data_dependent(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = self.values.evaluate(func, args, kwargs, assume=False)
        if result is None and func is ops.bincount.default and (length := kwargs.get("minlength", (*args, 0, 0)[2])):
            self.recorder.notes[NO_LARGER_NUMBERS] = None
            weights = kwargs.get("weights", (*args, None)[1])
            result = args[0].new_empty(length, dtype=torch.int64 if weights is None else
                                       torch.float32 if weights.dtype == torch.float32 else torch.float64)
            self.keep(result, "", str(func))
            return result
        if result is None:
            in_experts = "/transformers/" in model_line() and any("expert" in each for each in self.recorder.modules)
            raise Untraceable(f"{func} gives a result whose size depends on values, which a trace does not have.",
                              'Load the model with experts_implementation="grouped_mm".' if in_experts else
                              "Trace the script with a fixed size there, as large as it gets, or with torch.where.")
        made = []
        for each in result if isinstance(result, tuple | list) else (result,):
            tensor = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=META)
            self.keep(tensor, "", str(func))
            self.values.know(tensor, each)
            made.append(tensor)
        return tuple(made) if isinstance(result, tuple | list) else made[0]

    def _mask_to_indices(self, source: Tensor, indices: Any) -> list[Any]:
        """x[mask] is x[mask.nonzero()] on CUDA too: expandTensors() in IndexingUtils.h."""
        found = []
        for each in indices:
            if isinstance(each, Tensor) and each.dtype == torch.bool:
                where = self._data_dependent(ops.nonzero.default, (each,), {})
                found += list(where.unbind(1))
            else:
                found.append(each)
        return found

    def _accumulates(self, gradient: Tensor) -> bool:
        """Whether autograd would add to this gradient in place: can_accumulate_inplace() in input_buffer.cpp.

        It does so between two nodes, if nothing else refers to the gradient or its storage. Under a dispatch mode torch
        adds into a new tensor instead (isTensorSubclassLike() is true then).
        """
        if torch.is_grad_enabled() or not _in_engine():
            return False
        counts = (gradient._use_count(),  # type: ignore[attr-defined]
                  torch._C._storage_Use_Count(gradient.untyped_storage()._cdata))
        if self._sole is None:  # `calibrate` is running
            self._sole = counts
        return counts[0] <= self._sole[0] and counts[1] <= self._sole[1] and _is_dense(gradient)

    def calibrate(self) -> None:
        """Learns the reference counts of a gradient that only autograd refers to; they differ between versions."""
        source = torch.ones(2, device=META, requires_grad=True)
        doubled = source * 2
        (doubled * 3 + doubled * 4).sum().backward()

    # ---- shapes

    def _shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch works out many shapes in Python, which is slow: it is asked once for arguments of equal shapes."""
        if func.is_view or func in VIEWS:
            return func(*args, **kwargs)
        try:
            key = func, _key(args), _key(tuple(kwargs.items()))
        except TypeError:
            return self._ask(func, args, kwargs)
        known = self._shapes.get(key)
        if known is None:
            result = self._ask(func, args, kwargs)
            known = self._shapes[key] = _describe(result)
            # A result on the host has values, and sizes may depend on them: those of pack_padded_sequence do.
            if any(_aliases(each, args) or not is_stand_in(each) for each in tensors_in((result,))):
                self._shapes[key] = Ellipsis
            return result
        if known is Ellipsis:
            return self._ask(func, args, kwargs)
        return _made(known)

    @staticmethod
    def _ask(func: Any, args: Any, kwargs: Any) -> Any:
        if func is GROUPED_MM and args[0].dim() == 2:  # the shape function takes bfloat16 only; CUDA takes others too
            experts = [] if args[1].dim() == 3 else [kwargs["offs"] if "offs" in kwargs else args[2]]
            return args[0].new_empty((*(each.shape[0] for each in experts), args[0].shape[0], args[1].shape[-1]),
                                     dtype=kwargs.get("out_dtype"))
        if func is ops.masked_fill.Tensor:  # its shape function refuses a value of the host, which CUDA takes
            return ops.masked_fill.Scalar(*args[:2], 0)
        if func in RESULT_IS_LIKE:
            return torch.empty_like(args[RESULT_IS_LIKE[func]])
        try:
            result = func(*args, **kwargs)
            # In cuDNN's memory format, which `meta` does not know. 2.11 has another one in the backward pass, 2.13 in
            # the forward pass.
            if func is ops.convolution.default and in_channels_last(*args[:2]):
                return result.contiguous(memory_format=torch.channels_last)
            if func is ops.convolution_backward.default and in_channels_last(*args[1:3]):
                return (*(each if each is None else each.contiguous(memory_format=torch.channels_last)
                          for each in result[:2]), result[2])
            return result
        except NotImplementedError as error:
            if func._can_decompose():
                return func.decompose(*args, **kwargs)
            raise Untraceable(f"{func} has no kernel for tensors without storage.", "Register one with "
                              "torch.library.register_fake, or trace the script without this operation.") from error

    # ---- phases

    def _find_phase(self, func: Any, given: list[Tensor], here: list[Tensor]) -> None:
        recorder, sequence = self.recorder, torch._C._autograd._get_sequence_nr()
        if self.in_optimizer:  # before the next question: an optimizer may step in a hook of the backward pass
            recorder.enter(OPTIMIZER)
        elif torch._C._current_graph_task_id() != -1:
            recorder.enter(BACKWARD)
            node = torch._C._current_autograd_node()
            recorder.origin = self._origins.get(node._sequence_nr(), "") if node is not None else ""
        elif recorder.modules:
            recorder.enter(EVALUATION if recorder.evaluates else FORWARD)
            self._origins[sequence - 1] = recorder.modules[-1]  # of the node that autograd has just made
        elif given and not here and recorder.phase not in (LOAD, EVALUATION):
            recorder.enter(FORWARD)  # the next batch


_empty_strided = torch.empty_strided  # not the replaced one of patches.py


class _Shape:
    __slots__ = ("dtype", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.stride, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype


def _describe(result: Any) -> Any:
    if isinstance(result, Tensor):
        return _Shape(result)
    if isinstance(result, tuple | list):
        return type(result) if not result else [type(result), *map(_describe, result)]
    return (result,)


def _made(known: Any) -> Any:
    if isinstance(known, _Shape):
        return _empty_strided(known.size, known.stride, dtype=known.dtype, device=META)
    if isinstance(known, type):
        return known()
    if isinstance(known, list):
        return tuple(map(_made, known[1:])) if known[0] is tuple else list(map(_made, known[1:]))
    return known[0]


def _key(given: Any) -> Any:
    if isinstance(given, Tensor):
        return (tuple(given.shape), given.stride(), given.dtype, 'meta' if is_stand_in(given) else '',
                given.storage_offset() % 16 == 0)
    if isinstance(given, tuple | list):
        return tuple(map(_key, given))
    return type(given), given  # 1 and 1.0 are not the same


def _in_engine() -> bool:
    """Whether the operation comes from autograd's C++ code, not from Python code inside a backward pass."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
                               if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _without_storage(given: Any) -> Any:
    """With stand-ins for small tensors of the host, which torch does not mix with those that have no storage."""
    if isinstance(given, Tensor):
        real = given.dim() and not is_stand_in(given)
        return _empty_strided(given.shape, given.stride(), dtype=given.dtype, device=META) if real else given
    return list(map(_without_storage, given)) if isinstance(given, NESTED) else given


def _aliases(tensor: Tensor, args: Any) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(each.untyped_storage()._cdata == storage for each in tensors_in(args))


_written_places: dict[Any, list[tuple[int, str]]] = {}


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into: they exist already, so nothing is allocated."""
    if func not in _written_places:
        _written_places[func] = [(place, each.name) for place, each in enumerate(func._schema.arguments)
                                 if each.alias_info is not None and each.alias_info.is_write]
    given = [args[place] if place < len(args) else kwargs.get(name) for place, name in _written_places[func]]
    return tensors_in(given)


def _reshapes(func: Any, written: list[Tensor]) -> bool:
    """Whether an operation changes shapes of the tensors it writes into: transpose_(), or out= with an empty tensor."""
    return torch.Tag.inplace_view in func.tags or (
        any(each.is_out for each in func._schema.arguments) and not all(each.numel() for each in written))


def made_up(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of the host in place of one that was never computed."""
    return torch.full(shape, _any_value(dtype), dtype=dtype)


def _any_value(dtype: torch.dtype) -> Any:
    """The answer where a program asks for a value that was never computed: a loss of 1.0, a flag that is not set."""
    if dtype.is_floating_point:
        return 1.0
    return False if dtype == torch.bool else 1
