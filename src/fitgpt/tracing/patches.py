"""Functions of torch that would need a driver or a device, replaced while a trace runs.

They are attributes of Python modules and classes, so the replacement holds in every thread and for code that was
imported earlier.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.parameter import is_lazy

from ..planning.budget import Target
from . import bitsandbytes, flex_attention, processes, triton_kernels
from .device import CARD, HOST, META, TracedGpu, _inside, device_of, first_gpu, made_up
from .errors import PROCESSES, Untraceable
from .monkeypatch import Patches
from .recorder import Recorder, source_line
from .values import is_stand_in

real_device = torch.device
real_data: Any = torch._C.TensorBase.data
COMPILED_BEFORE = "torch.compile, called before the trace. The compiler plans what is compiled inside the trace."
NO_FAST_PATH = "nn.TransformerEncoder is evaluated in the kernels of training: on a GPU it may need less memory."


class TorchDevice(type):
    """torch.device while a trace runs. torch.device(0) is cuda:0, which torch does not know without a GPU."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        return real_device("cuda", *args) if args and isinstance(args[0], int) else real_device(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, real_device)


class CudaType(type):
    """torch.cuda.FloatTensor and its relatives: sizes, or data, → a tensor; and what `Tensor.type` takes."""

    dtype: torch.dtype

    def __call__(cls, *given: Any) -> Tensor:
        if len(given) == 1 and not isinstance(given[0], int | torch.Size):
            return torch.as_tensor(given[0], dtype=cls.dtype, device=CARD)
        return torch.empty(*given, dtype=cls.dtype, device=CARD)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def cuda_type(given: Any) -> Any:
    """"torch.cuda.FloatTensor" → torch.cuda.FloatTensor; anything else as it is."""
    is_name = isinstance(given, str) and given.startswith("torch.cuda.")
    return getattr(torch.cuda, given.rpartition(".")[2]) if is_name else given


CUDA_TYPES = {"Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Double": torch.float64,
              "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
              "Bool": torch.bool}


def install(patches: Patches, device: TracedGpu, target: Target) -> None:
    _tensors(patches, device)
    _texts(patches, device)
    _types(patches)
    _constructors(patches)
    _files(patches)
    _ctc_loss(patches, device)
    _comparisons(patches)
    _autocast(patches, device)
    _compilers(patches, device)
    _modules(patches)
    _threads_and_processes(patches, device)
    processes.install(patches)
    _profiler(patches)
    _cuda(patches, device, target)
    bitsandbytes.install(patches, device)
    triton_kernels.install(patches, device)


def is_cuda(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        device = real_device(device)
    return isinstance(device, real_device) and device.type == "cuda" and first_gpu(device)


@contextmanager
def wanting_meta(device: Any) -> Iterator[None]:
    """What is made inside is on `meta`, not on the GPU, if that is the device that the program asked for."""
    wanted = isinstance(device, str | torch.device) and torch.device(device).type == "meta"
    _inside.wants_meta = getattr(_inside, "wants_meta", 0) + wanted
    try:
        yield
    finally:
        _inside.wants_meta -= wanted


def default_device() -> torch.device:
    """Of `with torch.device(...)` or set_default_device. torch.get_default_device() would call torch.tensor."""
    from torch.utils._device import DeviceContext

    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return HOST


def _tensors(patches: Patches, device: TracedGpu) -> None:
    patches.set(Tensor, "device", property(device_of))
    patches.set(Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "cuda"))
    patches.set(Tensor, "is_meta", property(lambda tensor: tensor.device.type == "meta"))
    patches.set(Tensor, "is_cpu", property(lambda tensor: tensor.device.type == "cpu"))
    patches.set(Tensor, "get_device", lambda tensor: 0 if device_of(tensor).type == "cuda" else -1)
    patches.set(Tensor, "data", property(real_data.__get__, set_data))
    patches.set(Tensor, "pin_memory", lambda tensor, device=None: tensor)
    patches.set(Tensor, "is_pinned", lambda tensor, device=None: device_of(tensor).type == "cpu")
    patches.set(Tensor, "record_stream", lambda tensor, stream: None)
    patches.set(Tensor, "share_memory_", lambda tensor: tensor)
    # Programs compare addresses to find shared weights: save_pretrained of transformers does. `meta` has none.
    real_ptr = torch.UntypedStorage.data_ptr
    patches.set(torch.UntypedStorage, "data_ptr",
                lambda storage: storage._cdata if storage.device.type == "meta" else real_ptr(storage))
    patches.set(Tensor, "data_ptr", lambda tensor: tensor.untyped_storage().data_ptr()
                + tensor.storage_offset() * tensor.element_size())
    # Values of a large tensor of the host, which has no storage: an image, predictions.
    real_numpy, real_list = Tensor.numpy, Tensor.tolist

    def numpy(tensor: Tensor, *, force: bool = False) -> Any:
        if not is_stand_in(tensor):
            return real_numpy(tensor, force=force)
        if not force and tensor.is_cuda:
            raise TypeError(f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the "
                            "tensor to host memory first.")
        return real_numpy(made_up(tensor.shape, tensor.dtype).requires_grad_(tensor.requires_grad), force=force)

    def tolist(tensor: Tensor) -> Any:
        tensor = tensor.detach().cpu()
        return real_list(made_up(tensor.shape, tensor.dtype) if is_stand_in(tensor) else tensor)

    real_bool = Tensor.__bool__

    def truth(tensor: Tensor) -> bool:
        if is_stand_in(tensor) and device.values.is_guess(tensor):
            device.recorder.makes_up_a_branch()
        return real_bool(tensor)

    patches.set(Tensor, "__bool__", truth)
    real_set = torch._C.TensorBase.__setitem__

    def set_item(tensor: Tensor, index: Any, value: Any) -> None:
        """A number is a tensor of the host for a GPU: THPVariable_setitem() in python_variable_indexing.cpp."""
        if isinstance(value, bool | int | float) and device_of(tensor).type == "cuda":
            value = torch.full((), value, dtype=tensor.dtype, device=HOST)
        real_set(tensor, index, value)

    patches.set(Tensor, "__setitem__", set_item)
    patches.set(Tensor, "numpy", numpy)
    patches.set(Tensor, "tolist", tolist)
    real_to = torch._C.TensorBase.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A device that is CUDA becomes the stand-in: C++ would look for a driver."""
        if getattr(_inside, "moving", False):  # called again: a function mode looks methods up by name
            return real_to(tensor, *args, **kwargs)
        wanted = kwargs.get("device", args[0] if args else None)
        if isinstance(wanted, Tensor):
            kwargs = {**kwargs, **dict(zip(("non_blocking", "copy"), args[1:], strict=False)), "dtype": wanted.dtype}
            args, wanted = (), device_of(wanted)
            kwargs["device"] = wanted
        if is_lazy(tensor) and is_cuda(wanted):  # of a lazy module: it has no shape yet
            return torch.empty(0, dtype=tensor.dtype, device=CARD)
        on_stand_in = is_stand_in(tensor)
        if is_cuda(wanted) or (on_stand_in and isinstance(wanted, str | torch.device) and \
                torch.device(wanted) == device_of(tensor)):
            if is_cuda(wanted) and on_stand_in and device_of(tensor).type == "cpu":  # a large tensor of the host
                return _upload(tensor, args, kwargs)
            if "device" in kwargs:
                kwargs["device"] = META
            else:
                args = (META, *args[1:])
            _inside.moving = True
            try:
                return real_to(tensor, *args, **kwargs)
            finally:
                _inside.moving = False
        if isinstance(wanted, str | torch.device) and torch.device(wanted).type == "meta":
            with wanting_meta(wanted):
                return real_to(tensor, *args, **kwargs) if not on_stand_in else torch.empty_like(tensor, device="meta")
        return real_to(tensor, *args, **kwargs)

    def upload(tensor: Tensor, args: Any, kwargs: Any) -> Tensor:
        dtypes = [each for each in (*args, kwargs.get("dtype")) if isinstance(each, torch.dtype)]
        return _Upload.apply(tensor, dtypes[0] if dtypes else tensor.dtype)  # type: ignore[no-any-return]

    global _upload
    _upload = upload
    patches.set(Tensor, "to", to)
    patches.set(Tensor, "cuda", lambda tensor, device=None, non_blocking=False, memory_format=torch.preserve_format:
                to(tensor, CARD, non_blocking=non_blocking))
    patches.set(Tensor, "cpu", lambda tensor, memory_format=torch.preserve_format: to(tensor, HOST))


def set_data(tensor: Tensor, data: Tensor) -> None:
    """tensor.data = data: torch refuses if only one of them has storage."""
    if is_stand_in(tensor) == is_stand_in(data):
        real_data.__set__(tensor, data)
    else:
        made = data.detach()
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, tensor.requires_grad)
        swap_tensors(tensor, made)


def swap_tensors(tensor: Tensor, other: Tensor) -> None:
    """torch.utils.swap_tensors, also for a parameter that a graph or a weak reference still refers to: that of a model
    which was called on the host before it moved."""
    if not is_lazy(tensor):  # it becomes a parameter later
        tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, other)


def _texts(patches: Patches, device: TracedGpu) -> None:
    """Printing a tensor: torch turns dispatch modes off for that, and then finds no values."""
    real_repr, real_type = Tensor.__repr__, Tensor.type

    def text(tensor: Tensor, **kwargs: Any) -> str:
        if not is_stand_in(tensor):
            return str(real_repr(tensor, **kwargs))
        known = device.values.of(tensor)
        if known is not None:
            return f"{real_repr(known)[:-1]}, device='{device_of(tensor)}')"
        return f"tensor(..., device='{device_of(tensor)}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    def kind(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        wanted = cuda_type(kwargs.get("dtype", args[0] if args else None))
        if isinstance(wanted, CudaType):
            return tensor.to(CARD, wanted.dtype)
        found = real_type(tensor, *args, **kwargs)
        return found.replace("torch.meta.", "torch.cuda.") if isinstance(found, str) else found

    patches.set(Tensor, "__repr__", text)
    patches.set(Tensor, "type", kind)


def _types(patches: Patches) -> None:
    for name, dtype in CUDA_TYPES.items():
        patches.set(torch.cuda, f"{name}Tensor", CudaType(f"{name}Tensor", (), {"dtype": dtype}))
    real_default = torch.set_default_tensor_type

    def set_default(wanted: Any) -> None:
        wanted = cuda_type(wanted)
        if isinstance(wanted, CudaType):
            torch.set_default_device(CARD)
            torch.set_default_dtype(wanted.dtype)
        else:
            real_default(wanted)

    patches.set(torch, "set_default_tensor_type", set_default)


def _files(patches: Patches) -> None:
    """torch.load: what belongs on the GPU is read on the host and moved."""
    real_load = torch.load

    def load(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
        if map_location is not None and not is_cuda(map_location):
            return real_load(file, map_location=map_location, **kwargs)
        saved_on: dict[int, str] = {}

        def on_host(storage: Any, location: str) -> Any:
            saved_on[storage._cdata] = location
            return storage

        moved: dict[int, Tensor] = {}

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                location = saved_on.get(value.untyped_storage()._cdata, "")
                if map_location is None and not is_cuda(location):
                    return value
                if id(value) not in moved:
                    moved[id(value)] = value.to(CARD)
                return moved[id(value)]
            if isinstance(value, dict):
                for name, each in value.items():
                    value[name] = move(each)
                return value
            if type(value) in (list, tuple):
                return type(value)(map(move, value))
            return value

        return move(real_load(file, map_location=on_host, **kwargs))

    patches.set(torch, "load", load)


def _ctc_loss(patches: Patches, device: TracedGpu) -> None:
    """Lengths that are tensors are read on the host, as without a dispatch mode: ctc_loss() in LossCTC.cpp."""
    original = torch.ctc_loss

    def read(lengths: Any, longest: int | None) -> Any:
        if not isinstance(lengths, Tensor):
            return lengths
        known = device.values.of(lengths) if is_stand_in(lengths) else lengths
        if known is None and longest is None:
            raise Untraceable("the lengths of CTC's targets are not known, which a trace does not compute.",
                              "Trace the script with padded targets, or with lengths that are made on the CPU.")
        return [longest] * lengths.numel() if known is None else known.reshape(-1).tolist()

    def loss(scores: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *args: Any,
             **kwargs: Any) -> Tensor:
        return original(scores, targets, read(input_lengths, scores.shape[0]),
                        read(target_lengths, targets.shape[1] if targets.dim() > 1 else None), *args, **kwargs)

    patches.set(torch, "ctc_loss", loss)


def _comparisons(patches: Patches) -> None:
    """torch.allclose asks for a value below the dispatch mode."""
    def close(first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> bool:
        return bool(torch.isclose(first, second, *args, **kwargs).all())

    for home in (torch, Tensor):
        patches.set(home, "allclose", close)


class _Upload(torch.autograd.Function):
    """A large tensor of the host, which has no storage, moves to the GPU."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=CARD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.to(HOST), None


_upload: Callable[..., Tensor]


def numbers_on_host(data: Any) -> Any:
    """[a loss on the GPU, …] → numbers of the host. torch.tensor reads lists in C++, where no mode sees it."""
    if isinstance(data, Tensor):
        return data.cpu() if is_stand_in(data) else data
    return list(map(numbers_on_host, data)) if isinstance(data, list | tuple) else data


def _constructors(patches: Patches) -> None:
    """torch.tensor and its relatives build on the host and copy in C++, where a driver would be needed."""
    from torch.utils._device import DeviceContext, _device_constructors

    _device_constructors()  # remembers the functions as they are now
    for name in ("tensor", "as_tensor", "asarray"):
        original = getattr(torch, name)

        def made(data: Any, *args: Any, original: Any = original, **kwargs: Any) -> Tensor:
            device = kwargs.pop("device", None)
            if isinstance(data, Tensor) and device is None:
                return original(data, *args, **kwargs)  # type: ignore[no-any-return]
            if not isinstance(data, Tensor):
                data = numbers_on_host(data)
            if device is None:
                device = default_device()
            if is_cuda(device):
                requires_grad = kwargs.pop("requires_grad", False)
                if not (isinstance(data, Tensor) and is_stand_in(data)):
                    data = original(data, *args, device=HOST, **kwargs)
                result: Tensor = data.to(CARD)
                return result.requires_grad_() if requires_grad else result
            if torch.compiler.is_compiling() and device == META:  # on `meta` the compiler's modes do not see it
                return original(data, *args, device=HOST, **kwargs).to(META)  # type: ignore[no-any-return]
            return original(data, *args, device=device, **kwargs)  # type: ignore[no-any-return]

        patches.set(torch, name, functools.wraps(original)(made))
    # The program's own `meta` tensors: whoever asks for that device by name gets it. A number is a GPU.
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "empty_strided", "empty_like", "zeros_like",
                 "ones_like", "full_like", "rand_like", "randn_like", "arange", "randint", "randperm", "linspace"):
        original = getattr(torch, name)

        def made_on(*args: Any, original: Any = original, **kwargs: Any) -> Tensor:
            if isinstance(kwargs.get("device"), int):
                kwargs["device"] = real_device("cuda", kwargs["device"])
            with wanting_meta(kwargs.get("device")):
                return original(*args, **kwargs)  # type: ignore[no-any-return]

        patches.set(torch, name, functools.wraps(original)(made_on))
    in_context = DeviceContext.__torch_function__

    def torch_function(mode: DeviceContext, *args: Any, **kwargs: Any) -> Any:
        with wanting_meta(mode.device):
            return in_context(mode, *args, **kwargs)

    patches.set(DeviceContext, "__torch_function__", torch_function)
    grouped = torch._C._group_tensors_by_device_and_dtype

    def group(tensors: Any, with_indices: bool = False) -> Any:
        return {(CARD if place is not None and place.type == "meta" else place, dtype): value
                for (place, dtype), value in grouped(tensors, with_indices).items()}

    patches.set(torch._C, "_group_tensors_by_device_and_dtype", group)
    real_generator = torch.Generator

    class HostGenerator(real_generator):  # type: ignore[misc,valid-type]
        """A generator of the GPU is one of the host that says otherwise: nothing is drawn from it."""

        def __new__(cls, device: Any = None) -> Any:
            host = "cpu" if is_cuda(device) else device or "cpu"
            return real_generator.__new__(cls, host)  # type: ignore[call-arg]

    patches.set(torch, "Generator", HostGenerator)


def _autocast(patches: Patches, device: TracedGpu) -> None:
    enable, clear = torch.set_autocast_enabled, torch.clear_autocast_cache

    def set_enabled(*args: Any) -> None:
        enable(*args)
        if len(args) == 1 or args[0] == "cuda":
            device.autocast.switch(bool(args[-1]))

    def clear_cache() -> None:
        clear()
        device.autocast.clear()

    patches.set(torch, "set_autocast_enabled", set_enabled)
    patches.set(torch, "clear_autocast_cache", clear_cache)


def _compilers(patches: Patches, device: TracedGpu) -> None:
    """What is compiled runs as compiler.py says. Libraries compile functions that nobody calls."""
    from torch.utils import checkpoint

    from .compiler import Compiler

    compiler = Compiler(device)

    def is_eager(backend: Any = "inductor", disable: bool = False, **_: Any) -> bool:
        return disable or getattr(backend, "__name__", backend) == "eager"

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        # What bitsandbytes compiles has kernels of its own on a GPU.
        if is_eager(**options) or getattr(model, "__module__", "").startswith("bitsandbytes."):
            return model
        if model is create_block_mask and not compiler.is_compiling:
            return functools.partial(flex_attention.create_mask_compiled, device)
        if isinstance(model, torch.nn.Module):
            return CompiledModule(model, compiler.compile(model, options.get("mode")))
        return functools.wraps(model)(compiler.compile(model, options.get("mode")))

    def compile_in_place(module: torch.nn.Module, **options: Any) -> None:
        if not is_eager(**options):
            module._compiled_call_impl = compiler.compile(module, options.get("mode"))

    patches.set(torch, "compile", compile)
    patches.set(torch.nn.Module, "compile", compile_in_place)
    patches.set(checkpoint, "checkpoint", functools.partial(compiler.checkpoint, checkpoint.checkpoint))
    # Whether a recomputation gives the same tensors: while the compiler runs, `meta` is not yet cuda:0.
    patches.set(checkpoint, "_allowed_determinism_checks_to_fns", {
        **checkpoint._allowed_determinism_checks_to_fns,
        checkpoint._DEFAULT_DETERMINISM_MODE: lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}})
    patches.set(torch.jit, "script", lambda function=None, *_, **__: function)
    flex_attention.install(patches, device, lambda: compiler.is_compiling)
    if "torch._dynamo.eval_frame" in sys.modules:
        patches.set(sys.modules["torch._dynamo.eval_frame"], "_callback_from_stance",
                    functools.partial(_compiled_before, device))


def _compiled_before(device: TracedGpu, callback: Any) -> None:
    """Dynamo's callback for a function that was compiled before the trace began: none, so it runs eager."""
    if callback:
        recorder = device.recorder
        recorder.compiled, recorder.unplanned = True, recorder.unplanned or COMPILED_BEFORE


class CompiledModule(torch.nn.Module):
    """What torch.compile(module) returns, like torch._dynamo.OptimizedModule: the module's attributes are its own."""

    def __init__(self, module: torch.nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self._orig_mod = module
        self.forward = run

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "_orig_mod" else getattr(self._orig_mod, name)


def _modules(patches: Patches) -> None:
    """Module.to() keeps the identity of parameters, as it does between host and GPU. Where tensors are of different
    kinds, Module._apply makes new parameters, and an optimizer that was made before would train the old ones."""
    apply = torch.nn.Module._apply

    def swapping(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        if not all(is_stand_in(each) for each in module.parameters()):
            torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    patches.set(torch.nn.Module, "_apply", swapping)
    patches.set(torch.utils, "swap_tensors", swap_tensors)


def _threads_and_processes(patches: Patches, device: TracedGpu) -> None:
    """A dispatch mode holds in one thread: each further thread gets it too. transformers loads weights in threads."""
    run = threading.Thread.run

    def traced(thread: threading.Thread) -> None:
        torch._C._push_on_torch_dispatch_stack(device)
        try:
            run(thread)
        finally:
            torch._C._pop_torch_dispatch_stack(None)

    def unsupported(*_: Any, **__: Any) -> None:
        raise Untraceable(*PROCESSES)

    start = multiprocessing.process.BaseProcess.start

    def started(process: Any) -> None:
        if not getattr(process, "_target", start).__module__.startswith("torch.utils.data"):
            device.recorder.processes = device.recorder.processes or source_line()
        start(process)

    patches.set(threading.Thread, "run", traced)
    patches.set(multiprocessing.process.BaseProcess, "start", started)
    patches.set(torch.multiprocessing, "spawn", unsupported)


def _profiler(patches: Patches) -> None:
    """torch.profiler without the GPU's events: each would print an error of CUDA."""
    init = torch.autograd.profiler.profile.__init__

    def on_host(profile: Any, *args: Any, **kwargs: Any) -> None:
        init(profile, *args, **kwargs | {"use_device": None} | dict.fromkeys({"use_cuda"} & kwargs.keys(), False))

    patches.set(torch.autograd.profiler.profile, "__init__", on_host)


class InferenceMode(torch.no_grad):
    """torch.inference_mode as no_grad: an inference tensor has no autograd key, on which composites.py registers. In
    inference mode, autocast casts weights again at each use (recorded with torch 2.11)."""

    def __new__(cls, mode: Any = True) -> Any:
        return torch.no_grad.__new__(cls) if isinstance(mode, bool) else cls()(mode)

    def __init__(self, mode: bool = True) -> None:
        super().__init__()
        self.mode = mode

    def __enter__(self) -> None:
        super().__enter__()
        self.cached = torch.is_autocast_cache_enabled()
        if self.mode:
            torch.set_autocast_cache_enabled(False)
        else:
            torch.set_grad_enabled(self.prev)

    def __exit__(self, *error: Any) -> None:
        torch.set_autocast_cache_enabled(self.cached)
        super().__exit__(*error)

    def clone(self) -> InferenceMode:
        return InferenceMode(self.mode)


class NoStream:
    """A stream or an event that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.device_index, self.cuda_stream, self.stream_id = CARD, 0, 0, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: True if name == "query" else 1.0 if name == "elapsed_time" else None

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _cuda(patches: Patches, device: TracedGpu, target: Target) -> None:
    platform, memory = target.platform, target.budget.usable
    name = f"NVIDIA {target.card.name}" if target.card else "GPU"
    properties = SimpleNamespace(
        name=name, major=platform.capability[0], minor=platform.capability[1], total_memory=memory,
        multi_processor_count=platform.sms, max_threads_per_multi_processor=platform.threads, warp_size=32,
        regs_per_multiprocessor=65536, shared_memory_per_block_optin=101376, shared_memory_per_multiprocessor=102400,
        L2_cache_size=platform.cache, is_integrated=False, is_multi_gpu_board=False, uuid="", gcnArchName="",
        shared_memory_per_block=49152)
    random_state = torch.random.get_rng_state()

    def allocated(*_: Any, **__: Any) -> int:
        return device.recorder.allocated

    def peak(*_: Any, **__: Any) -> int:
        return device.recorder.peak

    def reserved(*_: Any, **__: Any) -> int:
        return device.recorder.reserved()[0]

    def peak_reserved(*_: Any, **__: Any) -> int:
        return device.recorder.reserved()[1]

    def free(*_: Any) -> tuple[int, int]:
        return max(target.budget.reserve_limit - reserved(), 0), memory

    def reset_peak(*_: Any, **__: Any) -> None:
        device.recorder.reset_peak()

    cuda = torch.cuda
    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "is_initialized": lambda: True,
        "current_device": lambda: 0, "set_device": lambda *_: None, "init": lambda: None, "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: None,
        "is_bf16_supported": lambda *_, **__: platform.has_bf16, "is_tf32_supported": lambda: platform.has_bf16,
        "get_device_name": lambda *_: name, "get_device_capability": lambda *_: platform.capability,
        "get_device_properties": lambda *_: properties,
        "get_arch_list": lambda: [f"sm_{properties.major}{properties.minor}"],
        "synchronize": lambda *_: None, "ipc_collect": lambda: None,
        "empty_cache": device.recorder.empty_cache,
        "current_stream": NoStream, "default_stream": NoStream, "stream": NoStream,
        "set_stream": lambda *_: None, "Stream": NoStream, "Event": NoStream, "ExternalStream": NoStream,
        "memory_allocated": allocated, "max_memory_allocated": peak, "memory_reserved": reserved,
        "max_memory_reserved": peak_reserved, "memory_cached": reserved, "max_memory_cached": peak_reserved,
        "mem_get_info": free,
        "reset_peak_memory_stats": reset_peak, "reset_max_memory_allocated": reset_peak,
        "reset_max_memory_cached": reset_peak, "reset_accumulated_memory_stats": lambda *_: None,
        "memory_stats": lambda *_, **__: _Statistics(device.recorder), "memory_summary": lambda *_, **__: "",
        "memory_snapshot": lambda *_, **__: [],
        "set_per_process_memory_fraction": lambda *_: None, "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None, "seed": lambda: None, "seed_all": lambda: None, "initial_seed": lambda: 0,
        "get_rng_state": lambda *_: random_state.clone(), "get_rng_state_all": lambda: [random_state.clone()],
        "set_rng_state": lambda *_: None, "set_rng_state_all": lambda *_: None,
        "is_current_stream_capturing": lambda: False, "utilization": lambda *_: 0,
        "can_device_access_peer": lambda *_: False,
    }
    for attribute, answer in answers.items():
        if hasattr(cuda, attribute):
            patches.set(cuda, attribute, answer)
    for module in (cuda.memory, cuda.random):
        for attribute, answer in answers.items():
            if attribute in vars(module) and callable(vars(module)[attribute]):
                patches.set(module, attribute, answer)
    patches.set(cuda, "device", _CurrentDevice)
    patches.set(cuda, "_DeviceGuard", _CurrentDevice)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        for attribute, answer in {
            "is_available": lambda: True, "device_count": lambda: 1, "current_device_index": lambda: 0,
            "current_accelerator": lambda check_available=False: torch.device("cuda"), "synchronize": lambda *_: None,
            "current_device_idx": lambda: 0, "set_device_index": lambda *_: None, "set_device_idx": lambda *_: None,
            "empty_cache": device.recorder.empty_cache, "memory_allocated": allocated,
            "max_memory_allocated": peak, "memory_reserved": reserved,
            "max_memory_reserved": peak_reserved, "reset_peak_memory_stats": reset_peak,
            "current_stream": lambda *_: NoStream(), "get_memory_info": free,
        }.items():
            if hasattr(accelerator, attribute):
                patches.set(accelerator, attribute, answer)
    for attribute in ("range_push", "range_pop", "mark"):
        patches.set(cuda.nvtx, attribute, lambda *_, **__: 0)
    patches.set(torch, "inference_mode", InferenceMode)
    patches.set(torch, "device", TorchDevice("device", (), {}))
    patches.set(torch._C, "_scatter", lambda tensor, *_: [tensor.to(CARD)])  # nn.DataParallel on one GPU
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0)
    patches.set(cuda.nccl, "version", lambda: (2, 28, 9))
    patches.set(torch.backends.mha, "get_fastpath_enabled", functools.partial(_no_fast_path, device))
    patches.set(torch.backends.cudnn, "is_acceptable", lambda *_: False)  # warns where torch was built without cuDNN
    for attribute in ("_record_memory_history", "_dump_snapshot"):
        patches.set(cuda.memory, attribute, lambda *_, **__: None)
    patches.set(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    if not torch.version.cuda:
        patches.set(torch.version, "cuda", "13.0")


def _no_fast_path(device: TracedGpu) -> bool:
    """nn.TransformerEncoder evaluates in kernels of its own, on nested tensors: their sizes are values."""
    if not torch.is_grad_enabled():
        device.recorder.notes[NO_FAST_PATH] = None
    return False


class _Statistics(dict[str, int]):
    """torch.cuda.memory_stats(): bytes, in the blocks of all sizes; everything else is 0."""

    def __init__(self, recorder: Recorder) -> None:
        allocated = recorder.allocated, recorder.peak
        super().__init__({f"{what}_bytes.all.{when}": nbytes
                          for what, figures in (("allocated", allocated), ("active", allocated),
                                                ("reserved", recorder.reserved()))
                          for when, nbytes in zip(("current", "peak"), figures, strict=True)})

    def __missing__(self, key: str) -> int:
        return 0


class _CurrentDevice:
    """torch.cuda.device: there is one."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None
