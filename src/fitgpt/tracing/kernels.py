"""What CUDA's kernels allocate besides their results: one table, by operation (`KERNELS`).

torch's `meta` device gives the shapes of results. A function of the table adds what differs on CUDA: scratch memory,
cuBLAS workspaces, and the order in which results are allocated where it is not the order of return. Sizes of scratch
memory are those of tapes/aten.py, which were recorded on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.units import MiB
from ..memory.platform import Platform
from ..tapes import aten as scratch
from .recorder import Recorder, TracedTensor
from .trace_file import WORKSPACE

ops = torch.ops.aten
FEW_CHANNELS, SMALL_KERNEL = 4, 27  # of a convolution: that of images, for which cuDNN has other kernels
TILE, LARGEST_PARTS = 128, 8 * MiB  # of a convolution's weight gradient: a matmul that is summed in parts
FEW_ROWS = 32  # of an embedding whose gradients are not summed in parts: recorded with 2 and 32 rows, not with 514
NOT_REDUCED, MEAN = 0, 1  # at::Reduction
MANY_ROWS = 64 * 1024  # of a layer norm, from which on its backward pass sums in two steps


class Call:
    """One call of an operation on the GPU, while its memory is recorded."""

    def __init__(self, op: Any, args: Any, kwargs: Any, results: list[Any], platform: Platform, recorder: Recorder,
                 workspaces: set[tuple[str, str]], thread: str, owner: str, keep: Callable[[Tensor, str], None],
                 host: Callable[[Tensor], None]) -> None:
        self.op, self.args, self.kwargs, self.results = op, args, kwargs, results
        self.platform, self._recorder, self._workspaces, self._thread = platform, recorder, workspaces, thread
        self._owner, self._keep, self._host, self._scratch = owner, keep, host, list[TracedTensor]()

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def output(self, *places: int) -> None:
        """Allocates these results now, those that there are; the others follow at the end."""
        for place in places:
            if self.results[place] is not None:  # the gradient of a norm without weights
                self._keep(self.results[place], self._owner)

    def host(self, *places: int) -> None:
        """These results are on the host."""
        for place in places:
            self._host(self.results[place])

    def scratch(self, nbytes: int) -> TracedTensor:
        """Memory that is freed at the end of the operation, unless `free` comes first."""
        owner = self._owner if self._owner == "attention" else "workspace"
        self._scratch.append(self._recorder.alloc(nbytes, str(self.op), owner))
        return self._scratch[-1]

    def free(self, *tensors: TracedTensor) -> None:
        for each in tensors:
            self._scratch.remove(each)
            self._recorder.free(each)

    def workspaces(self, *, bias: bool) -> None:
        """Those of cuBLAS: kept from the first use on a thread on (forward and backward have a thread each), or freed
        at the end of the operation. `bias`: whether cuBLASLt adds one in the same kernel."""
        for nbytes in scratch.workspaces(self.platform, bias=bias).values():
            name = WORKSPACE if nbytes == self.platform.workspace else "cublaslt workspace"
            if not self.platform.rules.keeps_workspaces:
                self._scratch.append(self._recorder.alloc(nbytes, name, "workspace"))
            elif (key := (name, self._thread)) not in self._workspaces:
                self._workspaces.add(key)
                self._recorder.alloc(nbytes, name, "workspace")

    def finish(self) -> None:
        for result in self.results:
            if isinstance(result, Tensor):
                self._keep(result, self._owner)
        self.free(*reversed(self._scratch))


# ---- matrix products


def matmul(call: Call, *, bias: bool = False) -> None:
    *_, first, second = (each.dtype for each in call.args if isinstance(each, Tensor))
    if first != second:  # CUDA refuses, `meta` does not: a batch that was not converted to the model's dtype
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {first} and {second}")
    if call.results:  # none, where it writes into a tensor that is there: compiled code does
        call.output(0)
    call.workspaces(bias=bias)


def matmul_with_bias(call: Call) -> None:
    """cuBLASLt adds the bias in the product's kernel: isInputCompliesAddmmCudaLt() in Blas.cpp."""
    bias, _, mat2 = call.args[:3]
    matmul(call, bias=bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == mat2.shape[1]
           and min(mat2.shape) > 1 and call.kwargs.get("beta", 1) == 1)


# ---- reductions: setReduceConfig() in ATen/native/cuda/Reduce.cuh


def reduction(call: Call) -> None:
    source = call.args[0]
    names = [each.name for each in call.op._schema.arguments]
    dims = call.argument(names.index("dim"), "dim") if "dim" in names else None
    dims = [dims] if isinstance(dims, int) else dims or list(range(source.dim()))
    call.output(0)
    result = call.results[0]
    if source.dtype != result.dtype and not (source.element_size() == 2 and result.dtype == torch.float32):
        # Converted first, unless the kernel can: make_reduction_from_ty() in ReduceOpsUtils.h.
        call.scratch(source.numel() * result.element_size())
    for nbytes in reduction_scratch(source, dims, call.platform):
        call.scratch(nbytes)


def last_power(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def reduction_scratch(source: Tensor, dims: list[int], platform: Platform, accumulator: int = 4,
                      vt0: int = 4) -> list[int]:
    """Bytes of partial results and counters, where several blocks of threads share an output."""
    reduced = {dim % source.dim() for dim in dims} if source.dim() else set()
    groups = []  # dimensions as the tensor iterator has them: reduced ones first, by stride, neighbours merged
    for chosen in (True, False):
        merged = list[list[int]]()
        for size, stride in sorted(((source.shape[d], source.stride(d)) for d in range(source.dim())
                                    if (d in reduced) == chosen and source.shape[d] > 1), key=lambda each: each[1]):
            if merged and merged[-1][0] * merged[-1][1] == stride:
                merged[-1][0] *= size
            else:
                merged.append([size, stride])
        groups.append(merged)
    inner, outer = groups
    outputs, inputs = prod(size for size, _ in outer), prod(size for size, _ in inner)
    if not inner or not outputs or not inputs:
        return []
    on_fastest = not outer or inner[0][1] < outer[0][1]
    width, height = (inputs, outputs) if on_fastest else (outputs, inputs)
    vector = 1
    if (inner if on_fastest else outer)[0][1] == 1:
        if on_fastest and width > 128 and len(inner) + len(outer) == 1:
            width //= vt0
        elif not on_fastest:
            vector = 4
            for number in (outer[0][0], source.storage_offset(), *(s for _, s in inner), *(s for _, s in outer[1:])):
                while number % vector:
                    vector //= 2
            width //= vector
    most = scratch.THREADS // vector
    width_power, height_power = min(last_power(width), most), min(last_power(height), most)
    block_width = min(width_power, scratch.WARP)
    block_height = min(height_power, most // block_width)
    block_width = min(width_power, most // block_height)
    step_input, step_output = (block_width, 1) if on_fastest else (1, block_width)
    per_thread = -(-inputs // step_input)
    splits_rows = per_thread >= block_height * 16 or per_thread >= scratch.MAX_PER_THREAD
    if not splits_rows:
        return []
    per_thread = -(-inputs // (step_input * block_height))
    grid = -(-(outputs // vector) // step_output)
    busy = platform.sms * (platform.threads // (block_width * block_height))
    if per_thread < scratch.MAX_PER_THREAD or grid > busy:
        return []
    split = max(min(-(-busy // grid), -(-per_thread // scratch.MIN_PER_THREAD)),
                -(-per_thread // scratch.MAX_PER_THREAD))
    if split <= 1:
        return []
    return [accumulator * outputs * split * (1 if on_fastest else block_width * vector), 4 * grid]


def logsumexp(call: Call) -> None:
    """exp(x − max) is as large as x: logsumexp_out_impl() in ReduceOps.cpp."""
    source, rows = call.args[0], call.results[0].nbytes
    call.scratch(rows)
    call.free(call.scratch(call.results[0].numel()), call.scratch(rows))  # abs() == inf
    call.scratch(source.nbytes)
    reduction(call)


def mean_of(call: Call, losses: Tensor) -> None:
    """Of all losses, or their sum: the result, and the scratch memory of its reduction."""
    call.output(0)
    for nbytes in reduction_scratch(losses, list(range(losses.dim())), call.platform):
        call.scratch(nbytes)


def mse_loss(call: Call) -> None:
    """The result, then a loss per element: TORCH_IMPL_FUNC(mse_loss_out) in BinaryOps.cpp, also smooth_l1_loss_out."""
    if call.argument(2, "reduction", MEAN) != NOT_REDUCED:
        call.output(0)
        call.scratch(call.args[0].nbytes)
        mean_of(call, call.args[0])


def huber_loss(call: Call) -> None:
    """A loss per element, then the result: huber_loss() in Loss.cpp."""
    if call.argument(2, "reduction", MEAN) != NOT_REDUCED:
        call.scratch(call.args[0].nbytes)
        mean_of(call, call.args[0])


def binary_cross_entropy(call: Call) -> None:
    """The mean is written into the memory of the losses, which stays: binary_cross_entropy_out_cuda() in Loss.cu."""
    if call.argument(3, "reduction", MEAN) != NOT_REDUCED:
        call.results[0].untyped_storage().resize_(call.args[0].nbytes)
        mean_of(call, call.args[0])


def binary_cross_entropy_with_logits(call: Call) -> None:
    """log_sigmoid(x), and a loss per element: binary_cross_entropy_with_logits() in Loss.cpp."""
    call.scratch(call.args[0].nbytes)
    if call.argument(4, "reduction", MEAN) != NOT_REDUCED:
        call.scratch(call.args[0].nbytes)
        mean_of(call, call.args[0])


def multinomial(call: Call) -> None:
    """Divides by as many exponential random numbers: multinomial() in Distributions.cpp."""
    call.scratch(call.args[0].nbytes)


def cumulative(call: Call) -> None:
    """Works in the dtype of its result: ScanKernels.cpp."""
    call.output(0)
    source, result = call.args[0], call.results[0]
    if source.dtype != result.dtype:
        call.scratch(result.numel() * result.element_size())
    if source.dim() and source.numel() == source.shape[call.args[1]]:
        call.scratch(scratch.SCAN)


def safe_softmax(call: Call) -> None:
    """Looks for rows that are masked everywhere: _safe_softmax() in attention.cpp."""
    source = call.args[0]
    call.output(0)
    for nbytes in (source.numel(), source.numel() // source.shape[call.args[1]], source.element_size()):
        call.scratch(nbytes)


def softmax(call: Call) -> None:
    """Works on a contiguous tensor: host_softmax() in SoftMax.cu. Its backward pass too, for logarithms."""
    source = call.args[0]
    call.output(0)
    if not source.is_contiguous():
        call.scratch(source.numel() * source.element_size())


def softmax_backward(call: Call) -> None:
    """The product of gradient and output, and contiguous copies: softmax_backward_cuda_out() in SoftMax.cu."""
    product, output = call.args[0] * call.args[1], call.args[1]
    call.output(0)
    call.scratch(product.nbytes)
    for each in (product, output):
        if not each.is_contiguous():
            call.scratch(each.nbytes)


def foreach_norm(call: Call) -> None:
    sizes = [each.numel() for each in call.args[0]]
    call.scratch(scratch.norm_partials(sizes))


# ---- embedding


def embedding_backward(call: Call) -> None:
    """Sorts many indices and sums rows of equal ones: EmbeddingBackwardKernel.cu."""
    gradient, indices, rows = call.args[:3]
    if not gradient.is_contiguous():
        call.scratch(gradient.numel() * gradient.element_size())
    if not indices.is_contiguous():
        call.scratch(indices.nbytes)
    count, width, size = indices.numel(), gradient.shape[-1], indices.element_size()
    if count <= scratch.SIMPLE_EMBEDDING:
        return
    segments = min(count, rows)
    partial = count // 10 + segments
    call.scratch(size * count)
    call.scratch(size * count)
    ordinals = call.scratch(size * count)
    call.free(call.scratch(sort_scratch(count, size)), ordinals)
    call.output(0)
    call.scratch(size * count)
    call.scratch(8)
    keys = call.scratch(size * count)
    call.free(call.scratch(scratch.SCAN), keys)
    call.scratch(size * segments)
    call.scratch(size * segments)
    call.free(call.scratch(scratch.SCAN if size == 8 else scratch.SCAN_32_BITS))
    sums = [4 * partial * width]
    if rows <= FEW_ROWS:
        sums = [size * partial, *([4 * rows * width] if gradient.element_size() == 2 else [])]
    for nbytes in (8, size * partial, *sums):
        call.scratch(nbytes)


def sort_scratch(count: int, size: int) -> int:
    """Of CUB's radix sort of pairs of integers of this size."""
    if count <= scratch.SORT_AT_ONCE[size]:
        return 1
    return 2 * size * count + 1024 * -(-count // scratch.SORT_TILE) + scratch.SORT_DIGITS + 255


def index_put(call: Call) -> None:
    """Adds values in the order of their sorted indices: index_put_with_sort_kernel() in Indexing.cu."""
    if not call.argument(3, "accumulate", False):
        return
    indices = torch.broadcast_tensors(*(each for each in call.args[1] if isinstance(each, Tensor)))
    count = indices[0].numel()
    for number in range(len(indices)):  # one number per value: the sum of each index times its stride
        index, summand = call.scratch(8 * count), call.scratch(8 * count)
        call.free(index, *([summand] if number else []))
    for _ in range(3):
        call.scratch(8 * count)
    call.scratch(sort_scratch(count, 8))


def index(call: Call) -> None:
    """Several index tensors of different strides are made contiguous: AdvancedIndex in TensorAdvancedIndexing.cpp."""
    indices = [each for each in call.args[1] if isinstance(each, Tensor)]
    if len(indices) < 2:
        return
    expanded = torch.broadcast_tensors(*indices)
    if len({each.stride() for each in expanded}) > 1:
        for each in expanded:
            if not each.is_contiguous():
                call.scratch(each.numel() * each.element_size())


# ---- convolutions
# cuDNN chooses among many kernels. These are the workspaces of most of them, by bench/convolutions.py on an H200.


def convolution(call: Call) -> None:
    source, weight, result = call.args[0], call.args[1], call.results[0]
    if source.dtype != weight.dtype:
        raise RuntimeError(f"Input type ({source.dtype}) and weight type ({weight.dtype}) should be the same")
    last = in_channels_last(source, weight)
    contiguous(call, last, source)
    call.output(0)
    if is_depthwise(source, call.args[8]):
        return
    contiguous(call, last, weight)
    few = source.shape[1] < FEW_CHANNELS
    half = source.element_size() == 2
    if last:
        if few:
            call.scratch(padded(source) + padded(weight))
    elif few and (not half or source.dim() > 3) and prod(weight.shape[2:]) <= SMALL_KERNEL:
        return
    elif is_matmul(weight, call.args[3]):
        if not is_aligned(source):
            call.scratch(source.nbytes + result.nbytes)
    else:
        copied = [source] if prod(weight.shape[2:]) == 1 else [source, weight]
        call.scratch(sum(padded(each) if half else each.nbytes for each in copied) + padded(result))


def convolution_backward(call: Call) -> None:
    gradient, source, weight = call.args[:3]
    last = in_channels_last(source, weight)
    is_slice = gradient.dim() == 4 and not gradient.is_contiguous() and not in_channels_last(gradient)
    contiguous(call, last, source, *([] if is_slice else [gradient]))  # ConvShared.cpp copies slices twice
    kernel = [] if prod(weight.shape[2:]) == 1 else [weight]
    direct = is_matmul(weight, call.args[4]) and is_aligned(source) and gradient.shape[1] >= FEW_CHANNELS
    depthwise = is_depthwise(source, call.args[9])
    few = source.shape[1] < FEW_CHANNELS
    no_workspace = (few and not last and source.element_size() == 4 and source.dim() < 5
                    and prod(weight.shape[2:]) <= SMALL_KERNEL)
    if isinstance(call.results[0], Tensor) and not depthwise:
        call.output(0)
        copy = [call.scratch(gradient.nbytes)] if is_slice else []
        if not last and not direct and not no_workspace:
            call.free(call.scratch(source.nbytes + padded(gradient) + sum(each.nbytes for each in kernel)))
        call.free(*copy)
    if isinstance(call.results[1], Tensor) and not depthwise:
        copy = [call.scratch(gradient.nbytes)] if is_slice else []
        call.output(1)
        copied = 0
        if not last or few:
            copied = padded(source) + padded(gradient) + sum(map(padded, kernel))
        in_float32 = 4 * weight.numel()
        nbytes = copied + min(parts_of_sum(weight, call.platform) * in_float32, LARGEST_PARTS)
        if direct and not last:  # a part per sample
            nbytes = min(nbytes, source.shape[0] * in_float32)
        call.free(*([] if no_workspace else [call.scratch(nbytes)]), *copy)
    if isinstance(call.results[2], Tensor):
        call.output(2)
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        for nbytes in reduction_scratch(gradient, dims, call.platform):
            call.scratch(nbytes)


def parts_of_sum(weight: Tensor, platform: Platform) -> int:
    """Of a weight's gradient: as many as keep all multiprocessors busy. With one, its memory is not needed."""
    tiles = -(-weight.shape[0] // TILE) * -(-weight.numel() // weight.shape[0] // TILE)
    parts = platform.sms // tiles
    return parts if parts > 1 else 0


def is_depthwise(source: Tensor, groups: int) -> bool:
    """Whether torch's own kernel runs, which needs no workspace: use_cudnn_depthwise() in Convolution.cpp."""
    return groups > 1 and groups == source.shape[1]


def is_matmul(weight: Tensor, stride: list[int]) -> bool:
    return prod(weight.shape[2:]) == 1 and max(stride) == 1


def is_aligned(source: Tensor) -> bool:
    """Whether a matmul can read the pixels of a channel where they are."""
    return prod(source.shape[2:]) * source.element_size() % 8 == 0


def in_channels_last(*tensors: Tensor) -> bool:
    """Whether cuDNN computes in this memory format: cudnn_conv_suggest_memory_format() in ConvUtils.h."""
    return any(each.dim() == 4 and not each.is_contiguous() and each.is_contiguous(memory_format=torch.channels_last)
               for each in tensors)


def contiguous(call: Call, last: bool, *tensors: Tensor) -> None:
    """Copies of those that are in another memory format: Convolution.cpp, ConvShared.cpp."""
    for each in tensors:
        if not each.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format):
            call.scratch(each.nbytes)


def padded(tensor: Tensor) -> int:
    """Bytes of a copy in which a pixel's channels take a multiple of 16 bytes."""
    channels, multiple = tensor.shape[1], 16 // tensor.element_size()
    return tensor.nbytes // channels * -(-channels // multiple) * multiple if channels < FEW_CHANNELS else tensor.nbytes


def group_norm(call: Call) -> None:
    """A factor and an offset per channel: group_norm_kernel.cu."""
    samples, channels = call.args[3:5]
    call.output(0, 1, 2)
    for _ in range(2):
        call.scratch(4 * samples * channels)


def group_norm_backward(call: Call) -> None:
    """Sums per channel and per group: group_norm_kernel.cu."""
    samples, channels, groups = call.args[5], call.args[6], call.args[8]
    call.output(0, 1, 2)
    for count in (channels, channels, groups, groups, channels):
        call.scratch(4 * samples * count)


# ---- norms


def layer_norm(call: Call) -> None:
    """Works on contiguous tensors: layer_norm_kernel.cu."""
    if not call.args[0].is_contiguous():
        call.scratch(call.args[0].numel() * call.args[0].element_size())


def layer_norm_backward(call: Call) -> None:
    """With many rows and few columns, the weight's gradients are summed in two steps: 32 rows, then the rest."""
    gradient, source, shape = call.args[:3]
    if not source.is_contiguous():
        call.scratch(source.numel() * source.element_size())
    gradients = [place for place in (1, 2) if isinstance(call.results[place], Tensor)]
    if isinstance(call.results[0], Tensor):
        call.output(0)
    partial = partial_sums(source, prod(shape), call.platform)
    if not partial:
        call.output(*gradients)
    replaced = [call.scratch(call.results[place].nbytes) for place in gradients if partial]
    if not gradient.is_contiguous():
        call.scratch(gradient.numel() * gradient.element_size())
    if not partial:
        return
    sums = [torch.empty(partial, prod(shape), dtype=call.results[place].dtype, device="meta") for place in gradients]
    for each in sums:
        call.scratch(each.nbytes)
    for place, each, first in zip(gradients, sums, replaced, strict=True):
        call.output(place)
        call.free(*reversed([call.scratch(nbytes) for nbytes in reduction_scratch(each, [0], call.platform)]), first)


def partial_sums(source: Tensor, columns: int, platform: Platform) -> int:
    """Rows of partial sums in a norm's backward pass; 0: none. LaunchGammaBetaBackwardCUDAKernel() in
    layer_norm_kernel.cu."""
    rows = source.numel() // columns
    return -(-rows // 32) if rows > MANY_ROWS and columns // 32 < platform.sms // 2 else 0


# ---- attention


def flash(call: Call) -> None:
    call.output(0, 1)


def efficient(call: Call) -> None:
    """(out, lse, seed, offset): the random state stays on the host."""
    call.host(2, 3)


def cudnn(call: Call) -> None:
    """(out, lse, …, seed, offset, …): the random state comes first. Without gradients there is no log-sum-exp; for one
    query there is no scratch memory."""
    if not call.argument(4, "compute_log_sumexp"):
        call.host(1)
    call.output(6, 7, 0, 1)
    if call.args[0].shape[2] > 1:
        call.scratch(scratch.CUDNN_SCRATCH)


def _heads(query: Tensor) -> tuple[int, int, int, int]:
    batch, heads, tokens, head = query.shape
    return batch, heads, tokens, head


def _contiguous(call: Call, *tensors: Tensor) -> None:
    """Copies of heads [B, H, T, D] that are not stored as [B, T, H, D]: .contiguous() in attention_backward.cu."""
    for each in tensors:
        if not each.transpose(1, 2).is_contiguous():
            call.scratch(each.numel() * each.element_size())


def flash_backward(call: Call) -> None:
    gradient, query, key, _, out = call.args[:5]
    _contiguous(call, gradient, out)
    call.output(0, 1, 2)
    for nbytes in scratch.flash_backward(*_heads(query)):
        call.scratch(nbytes)
    if query.shape[1] != key.shape[1]:  # gradients of keys and values per head of the queries, then summed
        for _ in range(2):
            call.scratch(key.numel() // key.shape[1] * query.shape[1] * key.element_size())


def cudnn_backward(call: Call) -> None:
    query, key = call.args[1:3]
    call.output(0, 1, 2)
    # Fewer heads of keys than of queries: their gradients per head of the queries, too, in the same precision.
    expanded = 0 if query.shape[1] == key.shape[1] else 2 * key.numel() // key.shape[1] * query.shape[1]
    call.scratch(scratch.cudnn_backward(*_heads(query)) + expanded * key.element_size())


def efficient_backward(call: Call) -> None:
    gradient, query = call.args[0], call.args[1]
    _contiguous(call, gradient)
    call.output(0, 1, 2)
    shape = _heads(query)
    rows = 4 * prod(shape[:3])
    if gradient.dtype == torch.float32:
        product, summed = call.scratch(4 * prod(shape)), call.scratch(rows)
        delta = call.scratch(rows)
        call.free(summed, product)
    else:
        delta = call.scratch(rows)
    call.scratch(scratch.efficient_backward(*shape))
    call.free(delta)


def isinf(call: Call) -> None:
    """abs() == inf: TensorCompare.cpp."""
    call.scratch(call.args[0].nbytes)


def ctc_backward(call: Call) -> None:
    """Lengths, as in the forward pass, and a table like its own, from the end: LossCTC.cu."""
    table = call.args[6]
    for _ in range(3):
        call.scratch(8 * table.shape[:-2].numel())
    call.scratch(table.nbytes)
    call.output(0)


def log_sigmoid(call: Call) -> None:
    """(out, buffer): only the host's kernel has a buffer. Activation.cpp."""
    call.host(1)


def dropout(call: Call) -> None:
    call.output(1, 0)


KERNELS: dict[Any, Callable[[Call], None]] = {
    ops.mm.default: matmul,
    ops.bmm.default: matmul,
    ops.baddbmm.default: matmul,
    ops.addmm.default: matmul_with_bias,
    ops.addmv.default: matmul,
    ops.mv.default: matmul,
    ops.mm.out: matmul,
    ops.bmm.out: matmul,
    ops.baddbmm.out: matmul,
    ops.addmm.out: matmul_with_bias,
    ops.dot.default: matmul,
    ops.sum.default: reduction,
    ops.sum.dim_IntList: reduction,
    ops.mean.default: reduction,
    ops.mean.dim: reduction,
    ops.linalg_vector_norm.default: reduction,
    ops.norm.Scalar: reduction,
    ops.norm.ScalarOpt_dim: reduction,
    ops.norm.ScalarOpt_dtype: reduction,
    ops.norm.ScalarOpt_dim_dtype: reduction,
    ops.logsumexp.default: logsumexp,
    ops.mse_loss.default: mse_loss,
    ops.smooth_l1_loss.default: mse_loss,
    ops.huber_loss.default: huber_loss,
    ops.binary_cross_entropy.default: binary_cross_entropy,
    ops.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
    ops.multinomial.default: multinomial,
    ops.cumsum.default: cumulative,
    ops.cumprod.default: cumulative,
    ops._safe_softmax.default: safe_softmax,
    ops._softmax.default: softmax,
    ops._log_softmax.default: softmax,
    ops._log_softmax_backward_data.default: softmax,
    ops._softmax_backward_data.default: softmax_backward,
    ops._ctc_loss_backward.default: ctc_backward,
    ops.log_sigmoid_forward.default: log_sigmoid,
    ops.isinf.default: isinf,
    ops._foreach_norm.Scalar: foreach_norm,
    ops.embedding_dense_backward.default: embedding_backward,
    ops.convolution.default: convolution,
    ops.convolution_backward.default: convolution_backward,
    ops.native_group_norm.default: group_norm,
    ops.native_group_norm_backward.default: group_norm_backward,
    ops.index.Tensor: index,
    ops.index_put.default: index_put,
    ops.index_put_.default: index_put,
    ops._index_put_impl_.default: index_put,
    ops.native_layer_norm.default: layer_norm,
    ops.native_layer_norm_backward.default: layer_norm_backward,
    ops.native_dropout.default: dropout,
    ops._scaled_dot_product_flash_attention.default: flash,
    ops._scaled_dot_product_efficient_attention.default: efficient,
    ops._scaled_dot_product_cudnn_attention.default: cudnn,
    ops._scaled_dot_product_flash_attention_backward.default: flash_backward,
    ops._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
    ops._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
