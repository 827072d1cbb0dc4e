"""CUDA's autocast for tensors without storage: the casts that torch.autocast("cuda") makes, and its cache of weights.

torch's own autocast kernels are present in every build but cast only tensors whose device is CUDA (is_eligible() in
ATen/autocast_mode.h). So the same operations get kernels in Python here, on the same dispatch key. The lists and
policies are those of autocast_mode.h of 2.11 to 2.13 (AT_FORALL_… in torch/include). The order of the casts is that of
C++ arguments as GCC evaluates them: from last to first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

KEY = "AutocastCUDA"


def _names(text: str) -> list[str]:
    return text.split()


LOWER_PRECISION = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
FP32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""")
FP32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
FP32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
PROMOTE = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")

ADDED = {"rms_norm": "2.12"}  # operations that a version of torch added: 2.11 has it not, 2.13 has


def overload(name: str) -> Any:
    """"pow.Scalar" → torch.ops.aten.pow.Scalar; None where this version of torch has no such operation."""
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), variant or "default", None)


class Autocast:
    """The kernels, while installed, and the cache of half-precision weights.

    `on_cast` is called with every cast of a parameter.
    """

    def __init__(self, version: str, on_cast: Callable[[Tensor], None]) -> None:
        self._version, self._on_cast = version, on_cast
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._library: Any = None

    def install(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden
            for names, policy in ((LOWER_PRECISION, self._lower), (FP32, self._fp32), (FP32_RESULT, self._fp32_result),
                                  (FP32_NORM, self._fp32_norm), (PROMOTE, self._promote)):
                for name in names:
                    if (op := overload(name)) and self._is_listed(name):
                        self._library.impl(name, partial(_without_autocast, policy, op), KEY, allow_override=True)

    def _is_listed(self, name: str) -> bool:
        """Whether this build of torch casts the operation's arguments, and the traced version does too."""
        added = tuple(map(int, ADDED.get(name, "0").split(".")))
        return (torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", KEY)
                and tuple(map(int, self._version.split(".")[:2])) >= added)

    def uninstall(self) -> None:
        self.clear()
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def switch(self, enabled: bool) -> None:
        """Sends operations on every tensor through the key: those without storage have none of their own."""
        torch._C._dispatch_tls_set_dispatch_key_included(torch._C.DispatchKey.AutocastCUDA, enabled)

    def clear(self) -> None:
        self._cache.clear()

    # ---- the policies, with autocast off inside

    def _lower(self, op: Any, args: Any, kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        args, kwargs = self._cast_all(dtype, args, kwargs)
        return op(*args, **kwargs)

    def _fp32(self, op: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._cast_all(torch.float32, args, kwargs)
        return op(*args, **kwargs)

    def _fp32_result(self, op: Any, args: Any, kwargs: Any) -> Any:
        if not eligible(args[0]):
            return op(*args, **kwargs)
        names = [argument.name for argument in op._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("dtype") is None:
            given["dtype"] = torch.float32
        first = given.pop(names[0])
        required = [given.pop(a.name) for a in op._schema.arguments[1:] if not a.kwarg_only and a.name in given]
        return op(first, *required, **given)

    def _fp32_norm(self, op: Any, args: Any, kwargs: Any) -> Any:
        if not eligible(args[0]):
            return op(*args, **kwargs)
        wider = overload(FP32_NORM[f"norm.{op._overloadname}"])
        if op._overloadname == "Scalar":
            return wider(args[0], args[1] if len(args) > 1 else 2, dtype=torch.float32)
        return wider(*args, dtype=torch.float32, **kwargs)

    def _promote(self, op: Any, args: Any, kwargs: Any) -> Any:
        tensors = [each for each in _flat((args, tuple(kwargs.values()))) if eligible(each)]
        widest = torch.float32 if any(each.dtype == torch.float32 for each in tensors) \
            else torch.get_autocast_dtype("cuda")
        args, kwargs = self._cast_all(widest, args, kwargs)
        return op(*args, **kwargs)

    # ---- casts

    def _cast_all(self, dtype: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
        kwargs = {name: self._cast(dtype, value) for name, value in reversed(kwargs.items())}
        return tuple(reversed([self._cast(dtype, each) for each in reversed(args)])), kwargs

    def _cast(self, dtype: torch.dtype, given: Any) -> Any:
        if isinstance(given, list | tuple):
            return [self._cast(dtype, each) for each in given]
        if not eligible(given) or given.dtype == dtype:
            return given
        cacheable = (dtype == torch.get_autocast_dtype("cuda") and given.dtype == torch.float32 and given.requires_grad
                     and given.is_leaf and not given._is_view() and torch.is_autocast_cache_enabled())
        if not cacheable:
            cast = given.to(dtype)
            if isinstance(given, torch.nn.Parameter):  # frozen, or of a module that is evaluated
                self._on_cast(cast)
            return cast
        if given._cdata not in self._cache:
            cast = given.to(dtype)
            self._on_cast(cast)
            self._cache[given._cdata] = given, cast  # the weight too: its address stays its own
        return self._cache[given._cdata][1]


def eligible(given: Any) -> bool:
    """Whether autocast may cast it: a floating-point tensor of the GPU, not float64. While torch.compile traces,
    tensors of the GPU are on `meta`."""
    return (isinstance(given, Tensor) and given.device.type in ("cuda", "meta") and given.is_floating_point()
            and given.dtype != torch.float64)


def _flat(given: Any) -> Any:
    for each in given:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        else:
            yield each


def _without_autocast(policy: Callable[..., Any], op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)):
        return policy(op, args, kwargs)
