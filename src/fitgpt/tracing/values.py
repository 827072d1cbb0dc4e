"""Small tensors whose values are known although they have no storage: batches of tokens, masks, counters.

A program asks its tensors for values now and then: a step counter, whether a mask is all ones, how many labels are
not padding. Tensors that come from the host, and small results computed from such tensors alone, keep a copy on the
host, by storage. All other values are unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isinf
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 4 * 1024 * 1024  # of integers and flags
MOST_FLOAT_BYTES = 64 * 1024  # of floating-point numbers: weights are not worth it
NESTED = (tuple, list)  # a union made at each call would be slower
UNDEFINED = ("empty", "rand", "normal", "bernoulli", "dropout", "multinomial", "uniform", "exponential")
ORDERED = ("aten::gt", "aten::ge", "aten::lt", "aten::le")
NOT_FINITE = ("aten::isnan", "aten::isinf", "aten::isposinf", "aten::isneginf")
# Of flags: operations element by element, and over all of them.
OF_FLAGS = ("aten::mul", "aten::logical_not", "aten::logical_and", "aten::logical_or", "aten::bitwise_not",
            "aten::bitwise_and", "aten::bitwise_or", "aten::all", "aten::any", "aten::cat", "aten::stack",
            "aten::clone", "aten::_to_copy")
# GradScaler's check for overflow: its flag stays 0.0, since gradients are taken to be finite.
UNCHANGED = ("aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_")


def is_stand_in(tensor: Tensor) -> bool:
    """Whether a tensor is really on torch's `meta` device, whatever `tensor.device` says."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Meta)


class Values:
    """By address of a storage without data: its values, as a storage on the host."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        self._assumed: set[int] = set()  # of these, the values are a guess
        # All numbers are taken to be finite. Flags that say so, of any size: by storage, the one value that all have.
        self._finite: dict[int, bool] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        flag = self._finite.get(tensor.untyped_storage()._cdata)
        if flag is not None and _few(tensor):
            return torch.full((), flag).expand(tensor.shape)
        storage = self._known.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def is_assumed(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._assumed

    def is_guess(self, tensor: Tensor) -> bool:
        """Whether a program that reads these values gets an answer that may be another on a GPU."""
        key = tensor.untyped_storage()._cdata
        return key not in self._finite and (key not in self._known or key in self._assumed)

    def know(self, tensor: Tensor, values: Tensor) -> None:
        """States a tensor's values, if they are few."""
        self._know(tensor, values, False)

    def _know(self, tensor: Tensor, values: Tensor, assumed: bool) -> None:
        if not _few(tensor) or not tensor.untyped_storage().nbytes():  # nothing tells when an empty storage is freed
            return
        if assumed:
            self._assumed.add(tensor.untyped_storage()._cdata)
        storage = torch.UntypedStorage(tensor.untyped_storage().nbytes(), device="cpu")
        self._known[tensor.untyped_storage()._cdata] = storage
        copy = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        copy.copy_(values)

    def forget(self, key: int) -> None:
        self._finite.pop(key, None)
        self._known.pop(key, None)
        self._assumed.discard(key)

    def compute(self, func: Any, args: Any, kwargs: Any, results: list[Any]) -> None:
        """Values of the results of an operation: from known arguments, else assumed ones.

        Assumed: a number is 1.0, a flag is not set. They answer a program's questions; a size
        that depends on them is an error, or noted where the program reads it as a number.
        """
        tensors = [each for each in results if isinstance(each, Tensor)]
        if tensors and tensors[0].dtype == torch.bool and (flag := self._finiteness(func, args)) is not None:
            self._finite[tensors[0].untyped_storage()._cdata] = flag
            return
        if not tensors or not all(map(_few, tensors)):
            return
        if func is torch.ops.aten.where.self:
            args = self._chosen(*args)
        checks_arguments = func is torch.ops.aten._is_all_true.default  # torch.distributions: otherwise an error
        found = self.evaluate(func, args, kwargs, assume=not checks_arguments)
        if found is None and checks_arguments:
            self._finite[tensors[0].untyped_storage()._cdata] = True
            return
        if found is None and func._schema.name in ORDERED:
            ones = [torch.ones(()) if self._is_unknown(each) else each for each in args]
            for tensor in tensors:
                self._know(tensor, func(*self._on_host(ones, True)), True)
            return
        if found is not None:
            assumed = self._any_assumed(args, kwargs)
            for tensor, value in zip(results, found if isinstance(found, tuple | list) else [found], strict=False):
                # A CPU's kernels may give other results besides the first: empty ones, where a GPU's do not.
                if isinstance(tensor, Tensor) and isinstance(value, Tensor) and tensor.shape == value.shape:
                    self._know(tensor, value, assumed)
            return
        for tensor in tensors:
            if tensor.dtype == torch.bool:
                self._know(tensor, torch.tensor(func._schema.name == "aten::all"), True)
            elif tensor.numel() == 1 and tensor.is_floating_point():
                self._know(tensor, torch.ones(()), True)

    def _finiteness(self, func: Any, args: Any) -> bool | None:
        """The flag that an operation gives if numbers are finite; None if it asks something else.

        ATen writes isnan(x) as x != x, isinf(x) as |x| == inf and isfinite(x) as (x == x) * (|x| != inf).
        """
        name, given = func._schema.name, tensors_in(args)
        if all(each.untyped_storage()._cdata in self._finite for each in given if is_stand_in(each)):
            flags = {self._finite[each.untyped_storage()._cdata] for each in given if is_stand_in(each)}
            # Flags that are alike: of one element each, the result is the same.
            if len(flags) == 1 and all(map(is_stand_in, given)) and name in OF_FLAGS:
                one = _map_tensors(args, lambda each: torch.full([1] * each.dim(), next(iter(flags))))
                return bool(func(*one).any())
            return None
        if name in NOT_FINITE:
            return False if self.is_guess(args[0]) else None
        if name not in ("aten::eq", "aten::ne", "aten::lt") or not args[0].is_floating_point() \
                or not self.is_guess(args[0]):
            return None
        first, second = args[:2]
        if isinstance(second, Tensor) and not is_stand_in(second) and not second.dim():
            second = second.item()
        if isinstance(second, Tensor):
            return name == "aten::eq" if name != "aten::lt" and _is_same(first, second) else None
        infinite = isinstance(second, float) and isinf(second) and (second > 0 or name != "aten::lt")
        return name != "aten::eq" if infinite else None

    def evaluate(self, func: Any, args: Any, kwargs: Any, *, assume: bool = True) -> Any:
        """The operation on the host; None if a value is unknown, or without `assume` if it is only assumed."""
        if any(word in func._schema.name for word in UNDEFINED):
            return None
        try:
            args = self._on_host(args, assume)
            kwargs = {name: self._on_host(value, assume) for name, value in kwargs.items()}
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("cpu")
            result = func(*args, **kwargs)
            return () if result is None else result  # of an operation that only writes
        except (_Unknown, RuntimeError, NotImplementedError):
            return None

    def _is_unknown(self, given: Any) -> bool:
        return isinstance(given, Tensor) and is_stand_in(given) and self.of(given) is None

    def _chosen(self, condition: Tensor, yes: Tensor, no: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of torch.where: without the argument that is chosen nowhere, whose values need not be known."""
        known = self.of(condition) if is_stand_in(condition) else condition
        if known is None or (known.any() and not known.all()):
            return condition, yes, no
        only = yes if known.all() else no
        return condition, only, only

    def update(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        """An operation that writes into tensors: their values too, or they become unknown."""
        if func._schema.name in UNCHANGED:
            return
        for each in written:
            flag = self._finite.pop(each.untyped_storage()._cdata, None)
            if flag is not None:
                self.know(each, torch.full((), flag))
        overwritten = func._schema.name in ("aten::copy_", "aten::fill_", "aten::zero_")
        if not any(each.untyped_storage()._cdata in self._known or (overwritten and _few(each) and _is_whole(each))
                   for each in written):
            return
        for each in written:
            if each.untyped_storage()._cdata not in self._known:
                self.know(each, torch.zeros((), dtype=each.dtype))
        assumed = self._any_assumed(args, kwargs)
        known = self.evaluate(func, args, kwargs) is not None
        for each in written:
            key = each.untyped_storage()._cdata
            if not known:
                self.forget(key)
            elif assumed:
                self._assumed.add(key)

    def _any_assumed(self, args: Any, kwargs: Any) -> bool:
        return any(map(self.is_assumed, tensors_in((args, [*kwargs.values()]))))

    def _on_host(self, given: Any, assume: bool) -> Any:
        if isinstance(given, Tensor):
            if not is_stand_in(given):
                return given
            known = self.of(given)
            if known is None or (self.is_assumed(given) and not assume):
                raise _Unknown
            return known
        if isinstance(given, tuple | list):
            return type(given)(self._on_host(each, assume) for each in given)
        return given


def tensors_in(given: Any) -> list[Tensor]:
    """The tensors of nested lists and tuples, in order."""
    found = list[Tensor]()
    for each in given:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, NESTED):
            found += tensors_in(each)
    return found


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _is_same(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata and first.shape == second.shape \
        and first.stride() == second.stride() and first.storage_offset() == second.storage_offset()


def _map_tensors(given: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(given, Tensor):
        return change(given)
    return type(given)(_map_tensors(each, change) for each in given) if isinstance(given, NESTED) else given


class _Unknown(Exception):
    pass


def _few(tensor: Tensor) -> bool:
    nbytes = tensor.untyped_storage().nbytes()
    return nbytes <= (MOST_FLOAT_BYTES if tensor.is_floating_point() else MOST_BYTES)
