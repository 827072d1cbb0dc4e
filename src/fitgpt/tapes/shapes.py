"""Tensors with a shape and no data, and the torch operations that the engine calls on them.

A memory forecast runs the engine's own files on these tensors: every allocation and every free of a CUDA tensor becomes
an event of a tape. Nothing is computed and torch is not imported. `engine_module("model")` is engine/model.py, loaded a
second time under a private name; in that copy `import torch` (and triton, bitsandbytes) gives the stand-ins of this
file. The real torch, loaded or not, is never touched.

How to add an operation: write a function with the signature of torch's, let it call `new` for each tensor that CUDA
allocates, in that order, and return them. Memory that lives only inside the operation is `scratch`. Then list the
function in TORCH, FUNCTIONAL or ATEN, or in METHODS for a method of Tensor; a pointwise operation or a reduction is one
name in a list. An operation that changes a tensor in place returns that tensor; a view shares its storage.
tests/tapes/test_engine_traced.py compares all of it with a trace of the real engine: run it after any change here.

Whose memory it is (the tape's `owner`) follows from the operation: a parameter is "weights", a cast of one "casts", a
matmul of two activations "gradients", a result with at most one element per row "other", the rest "activations".
Names come from engine/annotate.py (`named`, `span`), from `Parameter.grad = …`, and else from the operation.
"""

from __future__ import annotations

import builtins
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partialmethod
from math import prod
from threading import RLock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..memory.platform import Platform
from ..memory.tape import GRAPH_POOL, Writer
from . import aten

SMALL = 512               # bytes: the allocator gives every smaller tensor as much
MASK_MULTIPLE = 8         # the memory-efficient kernel wants rows of a mask a multiple of this long: attention.cpp
# cuDNN splits many keys into parts: none at 128 and 256 tokens, eight at 1024. Nothing between was recorded.
KEYS_PER_PART, UNDIVIDED = 128, 256
PARAMETER_OWNERS = {"weights", "casts"}
SAVED = {"lse", "rng", "mask", "att.heads"}  # results that a layer saves for its backward pass: named by layer
OWNERS_BY_NAME = {"logits": "logits", "norm sums": "workspace", "norm gradients": "gradients"}


# ---- the GPU, and the storage of tensors

class Device(NamedTuple):
    """torch.device. As a context manager it is where tensors are made if nothing else is given."""

    type: str
    multi_processor_count: int = 0

    def __enter__(self) -> Device:
        _gpu.get().is_default = True
        return self

    def __exit__(self, *_: object) -> None:
        _gpu.get().is_default = False


CPU = Device("cpu")


class Allocation:
    """One CUDA allocation. Its name may change until the tape is written."""

    __slots__ = ("name", "nbytes", "owner", "written")

    def __init__(self, name: str, owner: str, nbytes: int) -> None:
        self.name, self.owner, self.nbytes, self.written = name, owner, nbytes, ""


class Gpu:
    """What the engine's code runs on: answers what it asks of the hardware, and logs allocations for the writer.

    `attention` and `masked_attention` are the kernels that torch chooses: see engine.py.
    """

    def __init__(self, writer: Writer, platform: Platform, attention: str, masked_attention: str = "") -> None:
        self.writer, self.platform = writer, platform
        self.attention, self.masked_attention = attention, masked_attention
        self.device = Device("cuda", platform.sms)
        self.is_default = False
        self.layer = ""            # prefix of names: "3."
        self.backward = self.in_embedding_backward = False
        self.owner = ""            # of all allocations, if not empty
        self.skips_scalars = False  # leaves tensors of at most SMALL bytes and one dimension out of the tape
        self.log: list[Allocation] = []  # each when it is made, and again when it is freed
        self.spans: list[tuple[str, int, int]] = []      # name, number of the first event, and of the first after it
        self._new_spans: list[tuple[str, int, int]] = []  # the same, counted from the start of the log
        self._new_workspaces: set[str] = set()            # in the log

    @contextmanager
    def section(self, owner: str = "", *, skips_scalars: bool = False) -> Iterator[None]:
        """Runs the engine's code inside it on this GPU, then writes what it allocated and freed to the tape."""
        before, token = (self.owner, self.skips_scalars), _gpu.set(self)
        self.owner, self.skips_scalars = owner, skips_scalars
        try:
            yield
        finally:
            _gpu.reset(token)
        self.owner, self.skips_scalars = before
        writer, start = self.writer, self.writer.length
        for allocation in self.log:
            if allocation.written:
                writer.free(allocation.written)
                continue
            name, number = allocation.name, 2
            while writer.alive(name):  # a name that is taken by a living tensor gets a number
                name, number = f"{allocation.name} {number}", number + 1
            allocation.written = writer.alloc(name, allocation.owner, allocation.nbytes)
        self.spans += [(name, start + first, start + end) for name, first, end in self._new_spans]
        for each in (self._new_spans, self.log, self._new_workspaces):
            each.clear()

    @contextmanager
    def span(self, name: str, layer: int | None = None) -> Iterator[None]:
        """engine/annotate.py's `span`. An optimizer's update within the backward pass is a span too."""
        before = self.layer, self.backward, self.owner, self.skips_scalars
        start = len(self.log)
        if name == "update":
            self.owner, self.skips_scalars = "optimizer", True
        else:
            self.layer, self.backward = "" if layer is None else f"{layer}.", name.endswith("backward")
            self.in_embedding_backward = name == "embedding backward"
        yield
        self.in_embedding_backward = False
        self.layer, self.backward, self.owner, self.skips_scalars = before
        self._new_spans.append((name if layer is None else f"{name} {layer}", start, len(self.log)))

    def workspaces(self, *, bias: bool = False) -> None:
        """A matmul's; where they are kept, those of a stream's first one: CUDA graphs are captured on their own."""
        suffix = " of CUDA graphs" if self.writer.pool == GRAPH_POOL else ""
        for name, nbytes in aten.workspaces(self.platform, bias=bias).items():
            if not self.platform.rules.keeps_workspaces:
                scratch(nbytes, name)
            elif name not in self._new_workspaces:
                self._new_workspaces.add(name)
                if not self.writer.alive(name + suffix):
                    self.log.append(Allocation(name + suffix, "workspace", nbytes))


_gpu: ContextVar[Gpu] = ContextVar("gpu")


def named(name: str, x: Tensor) -> Tensor:
    """engine/annotate.py's function."""
    if x.device is not CPU:
        x.storage.rename(_gpu.get().layer + name, OWNERS_BY_NAME.get(name, ""))
    return x


class Storage:
    """Memory of one or more tensors. On the CPU (`gpu` is None) nothing is logged."""

    __slots__ = ("allocation", "gpu")

    def __init__(self, nbytes: int, name: str, owner: str, gpu: Gpu | None) -> None:
        self.allocation, self.gpu = Allocation(name, owner, nbytes), gpu
        if gpu is not None:
            gpu.log.append(self.allocation)

    def __del__(self) -> None:
        if self.gpu is not None:
            self.gpu.log.append(self.allocation)

    def hand_over(self, name: str) -> None:
        """From now on it is freed on the tape, by this name, and not when its tensors go."""
        self.allocation.name, self.gpu = name, None

    def rename(self, name: str, owner: str = "") -> None:
        self.allocation.name = name
        self.allocation.owner = owner or self.allocation.owner


def scratch(nbytes: int, name: str, owner: str = "workspace") -> Storage:
    """Memory that an operation frees when it returns (when its variable goes)."""
    return Storage(nbytes, name, owner, _gpu.get())


# ---- tensors

class Dtype(NamedTuple):
    name: str
    itemsize: int
    rank: int  # of two operands' dtypes, the result has the one of higher rank


float64, float32 = Dtype("float64", 8, 4), Dtype("float32", 4, 3)
bfloat16, float16 = Dtype("bfloat16", 2, 2), Dtype("float16", 2, 2)
int64, int32 = Dtype("int64", 8, 1), Dtype("int32", 4, 1)
int8, uint8, bool_ = Dtype("int8", 1, 1), Dtype("uint8", 1, 1), Dtype("bool", 1, 0)
DTYPES = (float64, float32, bfloat16, float16, int64, int32, int8, uint8, bool_)
Shape = tuple[int, ...]


def new(shape: Shape, dtype: Dtype, name: str, owner: str = "", *, stride: Shape | None = None,
        on_cpu: bool = False) -> Tensor:
    """A fresh tensor on the GPU."""
    gpu = _gpu.get()
    if on_cpu or (gpu.skips_scalars and len(shape) < 2 and prod(shape) * dtype.itemsize <= SMALL):
        return Tensor(shape, dtype, Storage(0, name, owner or "other", None), stride, CPU if on_cpu else gpu.device)
    if gpu.owner:
        owner = gpu.owner
    elif not owner:
        owner = "other" if len(shape) < 2 or (len(shape) == 2 and shape[1] == 1) else "activations"
    if gpu.backward:
        name = f"d_{name}"
    elif name in SAVED:
        name = gpu.layer + name
    return Tensor(shape, dtype, Storage(prod(shape) * dtype.itemsize, name, owner, gpu), stride, gpu.device)


class Tensor:
    """torch.Tensor, with its views. `_stride` is None where the tensor is contiguous. METHODS below are added."""

    __slots__ = ("_grad", "_stride", "device", "dtype", "name", "shape", "storage")

    def __init__(self, shape: Shape, dtype: Dtype, storage: Storage, stride: Shape | None, device: Device) -> None:
        self.shape, self.dtype, self.storage, self._stride, self.device = shape, dtype, storage, stride, device
        self.name = ""                    # of a parameter
        self._grad: Tensor | None = None

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any: ...

    @property
    def grad(self) -> Tensor | None:
        return self._grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            gradient.storage.rename(f"{self.name}.grad", "gradients")
        self._grad = gradient

    @property
    def data(self) -> Tensor:
        return self

    @data.setter
    def data(self, other: Tensor) -> None:
        if other.storage is not self.storage:
            self.storage.rename(f"{self.name}.float32")
            other.storage.rename(self.name, "weights")
        self.shape, self.dtype, self.storage, self._stride = other.shape, other.dtype, other.storage, other._stride

    @property
    def owner(self) -> str:
        return self.storage.allocation.owner

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> Shape:
        if self._stride is not None:
            return self._stride
        stride, size = [], 1
        for each in reversed(self.shape):
            stride.append(size)
            size *= each
        return tuple(reversed(stride))

    def __len__(self) -> int:
        return self.shape[0]

    def __int__(self) -> int:
        return 0

    def __hash__(self) -> int:
        return id(self)

    def _view(self, shape: Sequence[int], stride: Sequence[int] | None) -> Tensor:
        return Tensor(tuple(shape), self.dtype, self.storage, None if stride is None else tuple(stride), self.device)

    def view(self, *sizes: Any) -> Tensor:
        """Also `reshape`: a copy where no view has that shape."""
        if isinstance(sizes[0], Dtype):  # the same bytes as another dtype of the same size
            return Tensor(self.shape, sizes[0], self.storage, self._stride, self.device)
        shape = sizes[0] if isinstance(sizes[0], tuple) else sizes
        if -1 in shape:
            missing = prod(self.shape) // prod(size for size in shape if size != -1)
            shape = tuple(missing if size == -1 else size for size in shape)
        if self._stride is None:
            return self._view(shape, None)
        stride = view_stride(self.shape, self._stride, shape)
        return new(shape, self.dtype, "copy", self.owner) if stride is None else self._view(shape, stride)

    reshape = view

    def flatten(self, first: int, last: int) -> Tensor:
        shape = self.shape
        return self.view((*shape[:first], prod(shape[first:last + 1]), *shape[last + 1:]))

    def transpose(self, first: int, second: int) -> Tensor:
        shape, stride = list(self.shape), list(self.strides)
        shape[first], shape[second] = shape[second], shape[first]
        stride[first], stride[second] = stride[second], stride[first]
        return self._view(shape, stride)

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        shape, stride = self.shape, self.strides
        return (self._view(shape[:dim] + shape[dim + 1:], stride[:dim] + stride[dim + 1:]),) * shape[dim]

    def chunk(self, count: int, dim: int) -> tuple[Tensor, ...]:
        shape = list(self.shape)
        shape[dim] //= count
        return (self._view(shape, self.strides),) * count

    def squeeze(self, dim: int) -> Tensor:
        dim %= len(self.shape)
        return self._view(self.shape[:dim] + self.shape[dim + 1:], None)

    def unsqueeze(self, dim: int) -> Tensor:
        dim %= len(self.shape) + 1
        return self._view((*self.shape[:dim], 1, *self.shape[dim:]), None)

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        if keys[0] is Ellipsis:
            keys = (slice(None),) * (len(self.shape) - len(keys) + 1) + keys[1:]
        shape, stride = [], []
        for dim, (size, step) in enumerate(zip(self.shape, self.strides, strict=True)):
            taken = keys[dim] if dim < len(keys) else slice(None)
            if isinstance(taken, Tensor):  # elements chosen by an index on the GPU: a scalar here
                return self._view((), None)
            if isinstance(taken, slice):
                start, stop, _ = taken.indices(size)
                shape.append(stop - start)
                stride.append(step)
        return self._view(shape, stride)

    def __setitem__(self, key: Any, value: Tensor) -> None:
        pass


def view_stride(shape: Shape, stride: Shape, wanted: Shape) -> Shape | None:
    """ATen's computeStride: the strides of a view, None where only a copy can have that shape."""
    found, at = [0] * len(wanted), len(wanted) - 1
    base, numel, viewed = stride[-1], 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        numel *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and stride[dim - 1] != numel * base):
            while at >= 0 and (viewed < numel or wanted[at] == 1):
                found[at] = viewed * base
                viewed *= wanted[at]
                at -= 1
            if viewed != numel:
                return None
            if dim > 0:
                base, numel, viewed = stride[dim - 1], 1, 1
    return tuple(found) if at == -1 else None


# ---- operations: pointwise, reductions, copies

def pointwise(name: str, dtype: Dtype | None = None) -> Callable[..., Tensor]:
    """An operation whose result has the operands' broadcast shape and, if no other is given, their promoted dtype."""
    def call(x: Tensor, *others: Any, **_: object) -> Tensor:
        shape, found = x.shape, x.dtype
        for other in others:
            if not isinstance(other, Tensor):  # a Python number
                found = float32 if isinstance(other, float) and found.rank < 2 else found
                continue
            # Of floats, those with dimensions decide; else the higher rank.
            if bool(shape) != bool(other.shape) and min(found.rank, other.dtype.rank) > 1:
                found = found if shape else other.dtype
            elif other.dtype.rank > found.rank:
                found = other.dtype
            if shape != other.shape:
                length = max(len(shape), len(other.shape))
                shape = tuple(map(max, *((1,) * (length - len(each)) + each for each in (shape, other.shape))))
        return new(shape, dtype or found, name)

    return call


def in_place(x: Tensor, *_: object, **__: object) -> Tensor:
    return x


def reduction(name: str) -> Callable[..., Tensor]:
    def call(x: Tensor, dim: int | None = None, keepdim: bool = False, dtype: Dtype | None = None) -> Tensor:
        shape: Shape = ()
        if dim is not None:
            dim %= len(x.shape)
            shape = x.shape[:dim] + ((1,) if keepdim else ()) + x.shape[dim + 1:]
        result = new(shape, dtype or (int64 if x.dtype is bool_ else x.dtype), name)
        if x.dtype is bool_:
            scratch(8 * x.numel(), "count scratch")
        return result

    return call


def to(x: Tensor, target: Dtype | Device, **_: object) -> Tensor:
    if isinstance(target, Device):
        same, on_cpu = target.type == x.device.type, target.type == "cpu"
        return x if same else new(x.shape, x.dtype, "copy", on_cpu=on_cpu)
    if target is x.dtype:
        return x
    # The gradient of embedded rows, cast to a table's precision, counts as a cast of parameters.
    owner = "casts" if x.name or _gpu.get().in_embedding_backward else x.owner
    cast = new(x.shape, target, "cast", owner, on_cpu=x.device.type == "cpu")
    if x.name:
        cast.storage.rename(f"{x.name}.cast")
    return cast


def copy_(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between CPU and GPU, a copy that nobody waits for changes precision on the GPU: ATen's Copy.cu."""
    if non_blocking and x.device.type != source.device.type and x.dtype is not source.dtype:
        on_cpu = source if source.device.type == "cpu" else x
        scratch(on_cpu.nbytes, "cast for the bus", "optimizer")
    return x


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    results = new((count,), x.dtype, "values"), new((count,), int64, "tokens")
    parts = aten.topk_scratch(x.numel(), _gpu.get().device.multi_processor_count)
    held = [scratch(nbytes, f"top k.{name}") for name, nbytes in parts.items()]
    del held
    return results


# ---- operations: tensors made from nothing, like another, or from several

def creation(name: str) -> Callable[..., Tensor]:
    def call(*sizes: Any, dtype: Dtype = float32, device: Device | None = None, pin_memory: bool = False) -> Tensor:
        on_cpu = device is CPU or (device is None and not _gpu.get().is_default)
        return new(sizes[0] if sizes and isinstance(sizes[0], tuple) else sizes, dtype, name, on_cpu=on_cpu)

    return call


def like(name: str) -> Callable[..., Tensor]:
    """A gradient where it is like a parameter."""
    def call(x: Tensor, *_: object, dtype: Dtype | None = None) -> Tensor:
        owner = "gradients" if x.owner in PARAMETER_OWNERS else ""
        return new(x.shape, dtype or x.dtype, name, owner, on_cpu=x.device is CPU)

    return call


def tensor(values: Any, device: Device | None = None) -> Tensor:
    """From the CPU: ids of tokens, or a number."""
    shape: Shape = ()
    while isinstance(values, list):
        shape, values = (*shape, len(values)), values[0]
    dtype = int64 if isinstance(values, int) else float32
    return new(shape, dtype, "tensor", "data" if shape else "", on_cpu=device is None)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    return new((*first.shape[:dim], len(tensors), *first.shape[dim:]), first.dtype, "stack")


def pad(x: Tensor, padding: tuple[int, int]) -> Tensor:
    return new((*x.shape[:-1], x.shape[-1] + padding[1]), x.dtype, "padded")


# ---- operations: matmuls

def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None, out_dtype: Dtype | None = None) -> Tensor:
    """A matrix by a matrix or a vector. Of two activations, it is a weight's gradient."""
    if out is None:
        owner = "" if PARAMETER_OWNERS & {a.owner, b.owner} else "gradients"
        out = new(a.shape[:1] + b.shape[1:], out_dtype or a.dtype, "mm", owner)
    _gpu.get().workspaces()
    return out


def addmm(added: Tensor, a: Tensor, b: Tensor, *, out: Tensor | None = None, **_: object) -> Tensor:
    return mm(a, b, out=out)


def addmm_(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return mm(a, b, out=x)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Of matrices, or of [B, H, n, m] by one bmm: what cannot be viewed as [B × H, n, m] is copied for it."""
    if len(a.shape) == 2:
        return mm(a, b)
    copies = [new(each.shape, each.dtype, "copy") for each in (a, b)
              if view_stride(each.shape, each.strides, (prod(each.shape[:2]), *each.shape[2:])) is None]
    result = new((*a.shape[:-1], b.shape[-1]), a.dtype, "matmul")
    _gpu.get().workspaces()
    del copies
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = new((*x.shape[:-1], weight.shape[0]), x.dtype, "linear")
    _gpu.get().workspaces(bias=bias is not None)
    return result


# ---- operations: norms, dropout, embeddings

def native_layer_norm(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[:-1]
    return (new(x.shape, x.dtype, "normed"), new(rows, float32, "mean", "activations"),
            new(rows, float32, "rstd", "activations"))


def native_layer_norm_backward(d_out: Tensor, x: Tensor, shape: Shape, mean: Tensor, rstd: Tensor, weight: Tensor,
                               bias: Tensor | None, mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor | None]:
    return (new(x.shape, x.dtype, "norm"), new(weight.shape, weight.dtype, "norm.weight", "gradients"),
            new(weight.shape, weight.dtype, "norm.bias", "gradients") if mask[2] else None)


def native_dropout(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """CUDA's kernel makes the mask first."""
    mask = new(x.shape, bool_, "mask")
    return new(x.shape, x.dtype, "dropped"), mask


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows selected by flat indices: ATen's Embedding.cpp."""
    flat = indices.view(-1)
    rows = new((*indices.shape, weight.shape[1]), weight.dtype, "embedding")
    del flat
    return rows


def embedding_dense_backward(gradient: Tensor, indices: Tensor, rows: int, *_: object) -> Tensor:
    """Many indices are sorted; sums of ten rows of equal ones are kept apart: ATen's EmbeddingBackwardKernel.cu."""
    count, width = gradient.shape
    if count <= aten.SIMPLE_EMBEDDING:
        return new((rows, width), gradient.dtype, "rows.sum", "gradients")
    held = [scratch(8 * count, f"rows.{part}") for part in ("sorted", "order")]
    total = new((rows, width), gradient.dtype, "rows.sum", "gradients")
    held += [scratch(8 * count, f"rows.{part}") for part in ("segments", "partials", "partial offsets")]
    partial = count // 10 + min(count, rows)
    held += [scratch(8 * partial, "rows.offsets"), scratch(4 * partial * width, "rows.sums")]
    return total


def norms_scratch(tensors: Sequence[Tensor]) -> None:
    """torch's foreach norm: a partial sum per chunk of the longest tensor, then a norm per tensor."""
    partial = scratch(aten.norm_partials([each.numel() for each in tensors]), "norms.partial")
    norms = [scratch(4, f"norm {number}", "other") for number, _ in enumerate(tensors)]
    del partial, norms


# ---- operations: attention. Results [B, H, T, D] are in the layout of q, or a transposed [B, T, H, D]

def heads_like(q: Tensor, name: str, *, keeps_layout: bool = True) -> Tensor:
    _, heads, tokens, head = q.shape
    stride = q.strides
    transposed = (tokens * heads * head, head, heads * head, 1)
    return new(q.shape, q.dtype, name, stride=None if keeps_layout and stride[1] > stride[2] else transposed)


def rng_state(*shape: int) -> Tensor:
    return new(shape, int64, "rng", "activations")


def cudnn_attention(q: Tensor, *_: object, **__: object) -> tuple[Any, ...]:
    seed, offset = rng_state(), rng_state()
    out, lse = heads_like(q, "att.heads"), new(q.shape[:3], float32, "lse")
    scratch(aten.CUDNN_SCRATCH, "attention scratch")
    return out, lse, None, None, 0, 0, seed, offset, None


def cudnn_attention_backward(d: Tensor, q: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
    gradients = tuple(heads_like(q, name) for name in "qkv")
    scratch(aten.cudnn_backward(*q.shape), "attention scratch")
    return gradients


def flash_attention(q: Tensor, *_: object, **__: object) -> tuple[Any, ...]:
    out, lse = heads_like(q, "att.heads"), new(q.shape[:3], float32, "lse")
    return out, lse, None, None, 0, 0, rng_state(2), rng_state(), None


def flash_attention_backward(d: Tensor, q: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
    """Padded heads have another layout: two arguments are copied."""
    copies = relaid(d, "d.relaid", "out.relaid")
    gradients = tuple(heads_like(q, name) for name in "qkv")
    rows, sums = aten.flash_backward(*q.shape)
    splits = _gpu.get().platform.flash_splits(*q.shape[:2])
    held = scratch(rows, "attention delta"), scratch(splits * sums, "attention sums")
    del held, copies
    return gradients


def efficient_attention(q: Tensor, *_: object, **__: object) -> tuple[Any, ...]:
    out = heads_like(q, "att.heads", keeps_layout=False)
    return out, new((*q.shape[:2], aten.round_up(q.shape[2], 32)), float32, "lse"), None, None


def efficient_attention_backward(d: Tensor, q: Tensor, *_: object, **__: object) -> tuple[Any, ...]:
    copies = relaid(d, "d.relaid")
    gradients = tuple(heads_like(q, name, keeps_layout=False) for name in "qkv")
    rows = 4 * prod(q.shape[:3])
    # In half precision the kernel computes this sum itself.
    summed = [scratch(q.nbytes, "d × out"), scratch(rows, "delta.sum")] if q.dtype is float32 else []
    delta = scratch(rows, "attention delta")
    del summed
    sums = scratch(aten.efficient_backward(*q.shape), "attention sums")
    del delta, sums, copies
    return *gradients, None


def relaid(d: Tensor, *names: str) -> list[Storage]:
    """Copies of arguments in the kernel's layout, where they are not transposed views of [B, T, H × D]."""
    return [scratch(d.nbytes, name, "activations") for name in names] if d._stride is None else []


def masked_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    """F.scaled_dot_product_attention of one query to all keys. The mask becomes numbers to be added first."""
    kernel, keys = _gpu.get().masked_attention, k.shape[2]
    mask = new((1, keys), q.dtype, "mask")
    if kernel == "math":  # in float32, query and keys each scaled; the softmax looks for rows that are masked wholly
        wide_q, wide_k, wide_v = to(q, float32), to(k, float32), to(v, float32)
        scaled_q, scaled_k = new(q.shape, float32, "q.scaled"), new(k.shape, float32, "k.scaled")
        shape = (*q.shape[:-1], keys)
        scores = new(shape, float32, "scores")
        del scaled_k
        probabilities = new(shape, float32, "probabilities")
        masked = scratch(prod(shape), "masked scores", "activations")
        del masked, scores
        rounded = to(probabilities, q.dtype)
        out = to(new(q.shape, float32, "att"), q.dtype)
        del wide_q, wide_k, wide_v, scaled_q, probabilities, rounded
        return out
    if kernel == "cudnn":
        rng = rng_state(), rng_state()
        out = heads_like(q, "att")
        if keys > UNDIVIDED:
            parts = -(-keys // KEYS_PER_PART)
            scratch(4 * parts * (prod(q.shape[1:]) + q.shape[1]) + aten.CUDNN_SCRATCH, "attention scratch")
        del rng
        return out
    if missing := -keys % MASK_MULTIPLE:
        mask = pad(mask, (0, missing))
    return heads_like(q, "att")


# ---- torch's modules, as the engine's files import them

class Module:
    """nn.Module: its parameters and modules are its attributes."""

    training = True

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each once. The first to ask for them, when the model is made, gives them their names on the tape."""
        seen: set[int] = set()
        for name, parameter in self._all_parameters(""):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                if not parameter.name:
                    parameter.name = parameter_name(name)
                    parameter.storage.rename(parameter.name)
                yield name, parameter

    def _all_parameters(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                yield prefix + name, value
            elif isinstance(value, Module):
                yield from value._all_parameters(f"{prefix}{name}.")

    def parameters(self) -> Iterator[Tensor]:
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def train(self, mode: bool = True) -> None:
        self.training = mode

    eval = partialmethod(train, False)


class ModuleList(Module):
    def __init__(self, modules: Iterator[Module]) -> None:
        vars(self).update((str(number), module) for number, module in enumerate(modules))

    def __iter__(self) -> Iterator[Module]:
        return iter(vars(self).values())


def parameter_name(name: str) -> str:
    """transformer.h.3.attn.c_proj.weight → 3.attn_proj, as the tape's readers know it."""
    name = name.removeprefix("transformer.").removeprefix("h.")
    for long, short in ((".attn.c_proj", ".attn_proj"), (".mlp.c_proj", ".mlp_proj"), (".attn.", "."), (".mlp.", ".")):
        name = name.replace(long, short)
    return name if ".ln_" in f".{name}" else name.replace(".weight", "")


def parameter(x: Tensor) -> Tensor:
    """nn.Parameter: the tensor itself, which is then a weight."""
    x.storage.allocation.owner = "weights"
    return x


def compile_(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
    """torch.compile: one kernel, which allocates its results and nothing else."""
    def call(*args: Any) -> Any:
        gpu = _gpu.get()
        log, gpu.log = gpu.log, []
        result = function(*args)
        gpu.log = log
        given = {each.storage for each in args if isinstance(each, Tensor)}
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, Tensor) and each.storage not in given:
                log.append(each.storage.allocation)
        return result

    return call


def nothing(*_: object, **__: object) -> None:
    """Also a kernel that works in place: it allocates nothing."""


class TritonKernel:
    """To launch it, kernel[grid](...), allocates nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return nothing


def jit(function: Any = None, **_: object) -> Any:
    return TritonKernel() if function else lambda _: TritonKernel()


POINTWISE = ("abs", "clamp", "exp", "log", "masked_fill", "round", "sign", "sqrt", "square", "triu")
METHODS: dict[str, Callable[..., Any]] = {
    **{name: pointwise(name) for name in (*POINTWISE, "softmax")},
    **{f"{name}_": in_place for name in POINTWISE},
    **{f"__{name}__": pointwise(name) for name in ("neg", "invert")},
    **{f"__{side}{name}__": pointwise(name) for name in ("add", "sub", "mul", "truediv", "pow", "and")
       for side in ("", "r")},
    **{f"__{name}__": pointwise(name, bool_) for name in ("eq", "ne", "gt", "ge", "lt", "le")},
    **{f"__i{name}__": in_place for name in ("add", "sub", "mul", "truediv", "pow", "and")},
    **dict.fromkeys(("add_", "mul_", "fill_", "normal_", "zero_", "index_add_", "index_copy_", "scatter_add_",
                     "detach"), in_place),
    **{name: reduction(name) for name in ("sum", "amax", "norm")},
    "to": to, "copy_": copy_, "topk": topk, "mv": mm, "addmm_": addmm_, "__matmul__": matmul,
    "float": lambda x: to(x, float32), "bfloat16": lambda x: to(x, bfloat16), "cpu": lambda x: to(x, CPU),
    "gather": lambda x, _, indices: new(indices.shape, x.dtype, "gather"),
    "new_ones": lambda x, *shape: new(shape, x.dtype, "ones", x.owner),
    "t": lambda x: x.transpose(0, 1), "view_as": lambda x, other: x.view(other.shape),
    "dim": lambda x: len(x.shape), "numel": lambda x: prod(x.shape), "stride": lambda x, dim: x.strides[dim],
    "tolist": lambda x: [0.0] * len(x)}
for _name, _method in METHODS.items():
    setattr(Tensor, _name, _method)

SDP_BACKENDS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}
ATEN = SimpleNamespace(
    native_dropout=native_dropout, native_layer_norm_backward=native_layer_norm_backward,
    embedding_dense_backward=embedding_dense_backward, gelu_=nothing,
    gelu_backward=SimpleNamespace(grad_input=nothing),
    _scaled_dot_product_cudnn_attention=cudnn_attention,
    _scaled_dot_product_cudnn_attention_backward=cudnn_attention_backward,
    _scaled_dot_product_flash_attention=flash_attention,
    _scaled_dot_product_flash_attention_backward=flash_attention_backward,
    _scaled_dot_product_efficient_attention=efficient_attention,
    _scaled_dot_product_efficient_attention_backward=efficient_attention_backward)
FUNCTIONAL = SimpleNamespace(
    linear=linear, layer_norm=lambda *args: native_layer_norm(*args)[0], gelu=pointwise("gelu"), pad=pad,
    embedding=embedding, scaled_dot_product_attention=masked_attention)
TORCH = SimpleNamespace(
    Tensor=Tensor, dtype=Dtype, device=Device, **{dtype.name: dtype for dtype in DTYPES},
    **{name: creation(name) for name in ("empty", "zeros", "ones")},
    **{f"{name}_like": like(name) for name in ("empty", "zeros", "ones", "full")},
    tensor=tensor, arange=lambda count, device: new((count,), int64, "positions", "data"),
    randint=lambda low, high, shape, dtype, device: new(shape, dtype, "randint"),
    multinomial=lambda *_, **__: new((1,), int64, "drawn", on_cpu=True),
    stack=stack, split=lambda x, size: [x[start:start + size] for start in range(0, len(x), size)],
    where=pointwise("where"), lerp=pointwise("lerp"), isfinite=pointwise("isfinite", bool_),
    mm=mm, addmm=addmm, native_layer_norm=native_layer_norm,
    are_deterministic_algorithms_enabled=lambda: _gpu.get().platform.deterministic,
    manual_seed=nothing, Generator=lambda device: SimpleNamespace(manual_seed=nothing),
    no_grad=lambda: lambda function: function, is_grad_enabled=lambda: False,
    _fused_sdp_choice=lambda *_: SDP_BACKENDS[_gpu.get().attention],
    compile=compile_, _dynamo=SimpleNamespace(config=SimpleNamespace()), OutOfMemoryError=MemoryError,
    ops=SimpleNamespace(aten=ATEN), autograd=SimpleNamespace(Function=object),
    optim=SimpleNamespace(adamw=SimpleNamespace(adamw=nothing)),
    cuda=SimpleNamespace(get_rng_state=nothing, set_rng_state=nothing, get_device_properties=lambda device: device,
                         current_stream=lambda _: SimpleNamespace(synchronize=nothing)),
    nn=SimpleNamespace(
        Module=Module, ModuleList=ModuleList, Parameter=parameter, functional=FUNCTIONAL,
        attention=SimpleNamespace(SDPBackend=SimpleNamespace(**{
            f"{name.upper()}_ATTENTION": SimpleNamespace(value=value) for name, value in SDP_BACKENDS.items()}))))
TRITON = SimpleNamespace(jit=jit, cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
                         language=None)
BITSANDBYTES = SimpleNamespace(functional=SimpleNamespace(
    create_dynamic_map=lambda signed: new((2**8,), float32, "map", on_cpu=True),
    optimizer_update_8bit_blockwise=nothing))


# ---- the engine's files, loaded a second time

PACKAGE = f"{__package__.partition('.')[0]}.engine_on_shapes"  # beside engine/: `from ..x import y` means the same
STAND_INS: Mapping[str, Any] = {
    "torch": TORCH, "triton": TRITON, "bitsandbytes": BITSANDBYTES,
    f"{PACKAGE}.annotate": SimpleNamespace(named=named, span=lambda *args: _gpu.get().span(*args)),
    f"{PACKAGE}.device": SimpleNamespace(triton_works=lambda: _gpu.get().platform.compiles)}
_lock = RLock()


def engine_module(name: str) -> Any:
    """engine/{name}.py with stand-ins for what it imports. Its `import` statements, also those inside functions, call
    `_import` below, because Python looks `__import__` up in a module's own `__builtins__`."""
    full = f"{PACKAGE}.{name}"
    with _lock:
        if full in STAND_INS:
            return STAND_INS[full]
        if full not in sys.modules:
            engine = importlib.util.find_spec(f"{__package__.partition('.')[0]}.engine.{name}")
            assert engine is not None
            spec = importlib.util.spec_from_file_location(full, engine.origin)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            module.__dict__["__builtins__"] = vars(builtins) | {"__import__": _import}
            sys.modules[full] = module  # where dataclasses look for the module of a class
            spec.loader.exec_module(module)
        return sys.modules[full]


def _import(name: str, scope: Mapping[str, Any] | None = None, local: Mapping[str, Any] | None = None,
            fromlist: Sequence[str] = (), level: int = 0) -> Any:
    top, *rest = name.split(".")
    if level == 0 and top in STAND_INS:
        found = STAND_INS[top]
        for each in rest if fromlist else ():
            found = getattr(found, each)
        return found
    if level and scope is not None:
        absolute = importlib.util.resolve_name("." * level + name, scope["__package__"])
        if absolute in (PACKAGE, f"{PACKAGE}.optim"):
            prefix = f"{absolute}.".removeprefix(f"{PACKAGE}.")
            return SimpleNamespace(**{each: engine_module(prefix + each) for each in fromlist})
        if absolute.startswith(f"{PACKAGE}."):
            return engine_module(absolute.removeprefix(f"{PACKAGE}."))
        return builtins.__import__(absolute, fromlist=fromlist)
    return builtins.__import__(name, scope, local, fromlist, level)
