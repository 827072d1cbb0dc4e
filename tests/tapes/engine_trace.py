"""The tape that the real engine writes of itself, on a machine without a GPU: what
`tapes/engine.py` is compared with.

The engine runs on torch's `meta` device, where tensors have a size and no numbers. Two modes lie around it: in one the
device calls itself `cuda`, so that the engine takes the branches it takes on a card; the other notes each storage that
comes and goes. Where the host asks for numbers it gets zeros.

Not run for real: Triton's kernels, compiled functions and captured work. The Python around a kernel's launch does run;
a compiled function is taken to allocate its results and nothing else; a recording runs when it is made.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fitgpt import engine
from fitgpt.config.run_config import RunConfig
from fitgpt.engine.device import set_deterministic
from fitgpt.memory.platform import Platform
from fitgpt.tapes.engine import (
    EVAL_BATCHES,
    ITERATIONS,
    PROMPT,
    attention_kernel,
    masked_attention_kernel,
)
from fitgpt.tapes.shapes import MASK_MULTIPLE

CARD, STAND_IN, HOST = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
PACKAGE = str(Path(engine.__file__).parents[1])
aten = torch.ops.aten


class Seen(NamedTuple):
    """A storage that came, or went."""

    alloc: bool
    nbytes: int
    maker: str  # the operation it came from, and where in fitgpt that was


def trace(config: RunConfig, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Seen]]:
    """The run that gpt.write writes, from build_training to the second evaluation, by phase; `train` has its step."""
    watch = Watch()
    with monkeypatch.context() as patch, torch.random.fork_rng(devices=[]):
        steer(patch, platform, config, watch)
        try:
            with CallsItselfCuda(), watch:
                run(config, watch)
        finally:
            set_deterministic(False)  # a setting of the process
    return watch.phases


def trace_sampling(config: RunConfig, platform: Platform, tokens: int, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """The run that engine.write_sampling writes: a model, a prompt and its first token, and this many more tokens."""
    from fitgpt.engine.model import build_model
    from fitgpt.engine.sample import SamplingOptions, generate

    watch = Watch()
    with monkeypatch.context() as patch, torch.random.fork_rng(devices=[]):
        steer(patch, platform, config, watch)
        steer_sampling(patch, platform, config)
        with CallsItselfCuda(), watch:
            watch.phase("sample")
            model = build_model(config.gpt_config(), CARD, 0)
            model.compute_dtype = getattr(torch, config.dtype)
            for number, _ in enumerate(generate(model, [0] * PROMPT, tokens + 2, SamplingOptions(), 0)):
                if number == tokens:
                    watch.phase("after")
                    break
    return watch.phases["sample"]


def run(config: RunConfig, watch: Watch) -> None:
    """As bench/record.py runs it on a GPU."""
    from fitgpt.engine.batches import Prefetcher
    from fitgpt.engine.device import DeviceChoice
    from fitgpt.engine.evaluate import evaluate
    from fitgpt.training.build import build_training
    from fitgpt.training.loop import learning_rate_at, train_step

    def read(number: int) -> Any:
        return np.zeros((config.batch_size, config.block_size + 1), dtype=np.int64)

    def read_windows(numbers: Any) -> Any:
        return np.zeros((len(numbers), config.eval_block + 1), dtype=np.int64)

    def look() -> None:
        windows = EVAL_BATCHES * config.eval_batch
        evaluate(training.model, {split: (read_windows, windows) for split in ("train", "val")},
                 batch=config.eval_batch, block=config.eval_block, step=0, token_losses=training.token_losses)

    watch.phase("load")
    training = build_training(config, DeviceChoice(device=str(CARD), name="", dtype=config.dtype,
                                                   compile=bool(config.compile), notes=(), card=None, mismatch=None))
    watch.phase("first_eval")
    look()
    if config.eval_only:
        watch.phase("after")
        return
    feed = Prefetcher(read, CARD, last=(ITERATIONS + 1) * config.gradient_accumulation_steps - 1)

    def iterate(phase: str) -> None:
        watch.phase(phase)
        train_step(training, config, feed, learning_rate_at(training.step, config), lambda: False)
        training.step += 1

    for step in range(ITERATIONS):
        iterate("first_train" if step == 0 else "train")
    watch.phase("eval")
    look()
    if config.uses_cuda_graphs:
        iterate("train")
    feed.close()
    watch.phase("after")


# ---- the two modes

class CallsItselfCuda(TorchFunctionMode):
    """Tensors on the stand-in report the GPU as their device, and what is requested on the GPU is created there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: _stand_in(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        result = func(*map(_stand_in, args), **kwargs)
        return CARD if isinstance(result, torch.device) and result == STAND_IN else result


def _stand_in(value: Any) -> Any:
    return STAND_IN if isinstance(value, torch.device) and value.type == CARD.type else value


# The order in which CUDA's kernel makes its results, where it is not the order in which it returns them.
MADE_IN_ORDER: dict[Any, tuple[int, ...]] = {aten.native_dropout.default: (1, 0)}


class Watch(TorchDispatchMode):
    """Notes every storage of the stand-in that comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, list[Seen]] = {}
        self._alive: dict[int, Any] = {}
        self._paused = False

    def phase(self, name: str) -> None:
        self._now = self.phases.setdefault(name, [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.embedding.default:
            with self:
                return _embedding(*args[:2])
        if func is aten.copy_.default and args[0].is_meta != args[1].is_meta:
            self._crosses_the_bus(*args)
        result = computed(func, args, kwargs or {})
        if not self._paused:
            self.note(result, func, MADE_IN_ORDER.get(func))
        return result

    def note(self, result: Any, maker: Any, order: tuple[int, ...] | None = None) -> None:
        results = result if isinstance(result, tuple | list) else (result,)
        for each in results if order is None else [results[place] for place in order]:
            if isinstance(each, Tensor) and each.is_meta:
                storage = each.untyped_storage()
                if storage._cdata not in self._alive:
                    self._comes(storage, f"{maker} {_line()}")

    def _comes(self, storage: torch.UntypedStorage, maker: str) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._now.append(Seen(True, nbytes, maker))

        def goes(_: Any) -> None:
            del self._alive[key]
            self._now.append(Seen(False, nbytes, maker))

        self._alive[key] = weakref.ref(storage, goes)

    def _crosses_the_bus(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> None:
        """A non-blocking copy changes precision on the GPU, in a copy of the CPU's tensor: ATen's Copy.cu."""
        if non_blocking and to.dtype != source.dtype:
            on_host = source if to.is_meta else to
            self.note(torch.empty(on_host.shape, dtype=on_host.dtype, device=STAND_IN), "copy_ in another precision")

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        yield
        self._paused = False


def _embedding(weight: Tensor, indices: Tensor) -> Tensor:
    """On CUDA, rows selected by flat indices: ATen's Embedding.cpp."""
    return weight.index_select(0, indices.reshape(-1)).view(*indices.shape, -1)


def _line() -> str:
    frame: Any = sys._getframe(1)
    while frame and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""


# ---- what an operation gives

def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What is written over has no numbers, so nothing is done; the host gets zeros."""
    overwrites = _overwritten(func)
    written = [args[place] if place < len(args) else kwargs[name] for place, name in overwrites]
    if any(map(_on_card, written)):
        return written[0] if func._schema.returns else None
    if func is aten._to_copy.default and args[0].is_meta and kwargs.get("device") == HOST:
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    if func is aten.copy_.default and args[1].is_meta:
        return args[0]
    if func is aten._local_scalar_dense.default and args[0].is_meta:
        return 0
    return remembered(func, args, kwargs) if any(map(_on_card, args)) else func(*args, **kwargs)


@cache
def _overwritten(func: Any) -> list[tuple[int, str]]:
    return [(place, each.name) for place, each in enumerate(func._schema.arguments) if each.is_write]


def _on_card(given: Any) -> bool:
    return any(map(_on_card, given)) if isinstance(given, tuple | list) else isinstance(given, Tensor) and given.is_meta


class Shape(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_known: dict[Any, Any] = {}


def remembered(func: Any, args: Any, kwargs: Any) -> Any:
    """torch works out a result's shape in Python, which takes long: it is asked once, unless it gives a view."""
    key = func, repr(_shapes((args, tuple(kwargs.items()))))  # 1 and 1.0 are not the same
    if key in _known:
        return _made(_known[key])
    result = func(*args, **kwargs)
    if not func.is_view and func is not aten._unsafe_view.default:
        _known[key] = _shapes(result)
    return result


def _shapes(given: Any) -> Any:
    if isinstance(given, Tensor):
        return Shape(tuple(given.shape), given.stride(), given.dtype)
    return tuple(map(_shapes, given)) if isinstance(given, tuple | list) else given


def _made(shapes: Any) -> Any:
    if isinstance(shapes, Shape):
        return torch.empty_strided(shapes.size, shapes.stride, dtype=shapes.dtype, device=STAND_IN)
    return tuple(map(_made, shapes)) if isinstance(shapes, tuple) else shapes


# ---- what a GPU would decide or do

def steer(patch: pytest.MonkeyPatch, platform: Platform, config: RunConfig, watch: Watch) -> None:
    from fitgpt.engine import attention, ops
    from fitgpt.engine import model as engine_model
    from fitgpt.engine.optim import low_precision

    patch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    patch.setattr(attention, "kernel_for", lambda *_: attention_kernel(config, platform))
    for module in (low_precision, engine_model, ops):
        patch.setattr(module, "triton_works", lambda: platform.compiles)
    patch.setattr(without_launches(patch), "_multiprocessors", lambda _: platform.sms)
    patch.setattr(torch, "compile", lambda function, **_: in_one_kernel(function, watch))
    patch.setattr(torch, "set_float32_matmul_precision", lambda _: None)  # a setting of the whole process
    patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    for name, stands_in in {
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _=None: torch.set_rng_state(state),
        "current_stream": lambda _=None: SimpleNamespace(synchronize=lambda: None),
        "memory_stats": lambda _=None: {},
        "reset_peak_memory_stats": lambda _=None: None,
        "synchronize": lambda _=None: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda *_, **__: nullcontext(),
    }.items():
        patch.setattr(torch.cuda, name, stands_in)
    patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


def steer_sampling(patch: pytest.MonkeyPatch, platform: Platform, config: RunConfig) -> None:
    """Attention with a mask, which would be by hand on the stand-in: as in torch's attention.cpp on a GPU."""
    kernel = masked_attention_kernel(config, platform)

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        mask = torch.empty(attn_mask.shape, dtype=q.dtype, device=STAND_IN)
        if kernel == "math":
            wide_q, wide_k, wide_v = q.float(), k.float(), v.float()
            scaled = wide_q * 1.0
            scores = scaled @ (wide_k.transpose(-2, -1) * 1.0)
            scores = scores.softmax(-1)
            rounded = scores.to(q.dtype)
            return (scores @ wide_v).to(rounded.dtype)
        if kernel == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, False)[0]  # type: ignore[no-any-return]
        if missing := -mask.shape[1] % MASK_MULTIPLE:
            mask = torch.nn.functional.pad(mask, (0, missing))
        return aten._scaled_dot_product_efficient_attention(q, k, v, mask, False)[0]  # type: ignore[no-any-return]

    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    patch.setattr(torch, "Generator", HostsDice)


class HostsDice(torch.Generator):
    """In place of the GPU's."""

    def __new__(cls, device: torch.device) -> HostsDice:
        return super().__new__(cls)


def in_one_kernel(function: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    def compiled(*args: Any) -> Any:
        with watch.paused():
            result = function(*args)
        watch.note(result, f"compiled {function.__name__}")
        return result

    return compiled


class Kernel:
    """Of Triton's: to launch it does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


def without_launches(patch: pytest.MonkeyPatch) -> Any:
    """engine/kernels.py, imported beside a Triton that compiles and launches nothing."""
    triton: Any = ModuleType("triton")
    triton.language = ModuleType("triton.language")
    triton.jit = lambda function=None, **_: Kernel() if function else lambda _: Kernel()
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    spec = importlib.util.find_spec("fitgpt.engine.kernels")
    assert spec
    assert spec.loader
    kernels = importlib.util.module_from_spec(spec)
    with patch.context() as meanwhile:  # torch looks for Triton too, and would take this one
        meanwhile.setitem(sys.modules, "triton", triton)
        meanwhile.setitem(sys.modules, "triton.language", triton.language)
        spec.loader.exec_module(kernels)
    patch.setitem(sys.modules, spec.name, kernels)
    patch.setattr(engine, "kernels", kernels, raising=False)
    return kernels
