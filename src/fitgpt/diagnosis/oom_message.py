"""Text → OomMessage: an out-of-memory message of PyTorch 1.0 to 2.15, CUDA's libraries, the driver or the system."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..core.units import GiB, KiB, MiB, TiB
from .input import MessageContext, clean, unwrap
from .stack_frames import StackFrame, dtype_and_shape, parse_frames


@dataclass(frozen=True)
class OomMessage:
    """The figures of an out-of-memory message, in bytes. None: the message does not contain the figure."""

    kind: str                    # cuda, hip, xpu, mps: PyTorch's allocators; driver, library; ram: CPU RAM; killed
    text: str                    # the message, on one line
    source: str                  # who prints such a message: "PyTorch 2.2 to 2.9", "cuBLAS", "Windows"
    requested: int | None = None
    tolerance: int = 0           # half of the last printed digit of `requested`
    gpu: int | None = None
    total: int | None = None
    free: int | None = None
    process: int | None = None   # of this process, non-PyTorch memory included
    others: tuple[tuple[int, int], ...] = ()  # other processes as listed: (pid, bytes)
    allocated: int | None = None
    unallocated: int | None = None    # reserved by PyTorch but unallocated
    allowed: int | None = None        # the limit set for this process
    private_pools: int | None = None  # allocated in private pools, for CUDA graphs
    shape: tuple[int, ...] = ()       # of the tensor, if the failing line of compiled code contains it
    dtype: str = ""
    frames: tuple[StackFrame, ...] = ()  # of the traceback before it, innermost last
    repeated: int = 0                 # further messages of this kind after it

    @property
    def reserved(self) -> int | None:
        return None if self.allocated is None or self.unallocated is None else self.allocated + self.unallocated


_UNITS = {"bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB,
          "B": 1, "KB": KiB, "MB": MiB, "GB": GiB, "TB": TiB}  # MPS prints GB and means GiB
_SIZE = r"(?<!\d)(?<!\d[.,])(\d+(?:[.,]\d+)?)(bytes|[KMGT]i?B|B)"  # 7,79: the decimal comma of some locales
_IMPOSSIBLE = 2**50  # torch 2.1 prints -1 as 17179869184.00 GiB where the driver reports no figure
_MAX_LENGTH = 2000   # characters of a message, without white space

# All patterns match text without white space: a line wrap may split any word.
_ALLOCATOR = re.compile(rf"(?:(CUDA|HIP|XPU)outofmemory\.?)(?:Triedtoallocate{_SIZE})?"
                        rf"|Triedtoallocate{_SIZE}|\(?GPU\d*;{_SIZE}totalcapacity")
_WARNING = re.compile(r"memoryallocationfailedwithOOMondevice(\d+)whiletryingtoallocate(\d+)bytes"
                      r"\(free:(\d+),total:(\d+)\)")
_MPS = re.compile(rf"MPSbackendoutofmemory(?:\(MPSallocated:{_SIZE},otherallocations:{_SIZE},maxallowed:{_SIZE}\)"
                  rf"\.?Triedtoallocate{_SIZE})?")
_LIBRARY = re.compile(r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|HIPBLAS|ROCBLAS)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)")
_DRIVER = re.compile(r"(?:CUDA|HIP)(?:driver)?error:outofmemory|cudaruntimeerr(?:or)?\(2\):outofmemory"
                     r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
                     r"|TritonError\[\w+\]:outofmemory|Cudafailure(?:2|\(2\))?'outofmemory'", re.IGNORECASE)
_RAM = re.compile(r"DefaultCPUAllocator:[\w']{1,40}memory:youtriedtoallocate(\d+)bytes"
                  r"|notenoughmemory:youtriedtoallocate(\d+(?:\.\d+)?)([KMGT]?B)"
                  rf"|Unabletoallocate{_SIZE}foranarray"
                  r"|posix_memalign\(&data,gAlignment,nbytes\)==0\.12vs0"
                  r"|WinError1455|pagingfileistoosmall|std::bad_alloc|Cannotallocatememory|(?<!OutOf)MemoryError"
                  r"|RAMranout,not(?:the)?(?:card|GPU)", re.IGNORECASE)
_KILLED = re.compile(r"Outofmemory:Kill(?:ed)?process|oom[-_]kill|OOMKilled|exit(?:ed)?(?:with)?(?:code|status):?=?137"
                     r"|exitcode:-9|returncode=-9|killedthetrainingprocess\(signal9\)|signal9\(SIGKILL\)"
                     r"|Signals\.SIGKILL:9|killedbysignal:Killed",
                     re.IGNORECASE)
_KINDS = (("cuda", _ALLOCATOR), ("warning", _WARNING), ("mps", _MPS), ("library", _LIBRARY), ("driver", _DRIVER),
          ("ram", _RAM), ("killed", _KILLED))
_KILLED_LINE = re.compile(r"(?m)^(?:.*[\s\]])?\**Killed\**[ \t]*$")  # printed by the shell; needs the lines
_LIBRARIES = {"CUBLAS": "cuBLAS", "CUDNN": "cuDNN", "CUSOLVER": "cuSOLVER", "CUSPARSE": "cuSPARSE", "CUFFT": "cuFFT",
              "HIPBLAS": "hipBLAS", "ROCBLAS": "rocBLAS"}

_FIELDS: dict[str, tuple[re.Pattern[str], ...]] = {
    name: tuple(map(re.compile, patterns)) for name, patterns in {
        "total": (rf"{_SIZE}totalcapacity", rf"totalcapaci?tyof{_SIZE}", rf"{_SIZE}total,"),
        "free": (rf"ofwhich{_SIZE}isfree", rf"[;,]{_SIZE}free"),
        "process": (rf"thisprocesshas{_SIZE}memoryinuse", rf"{_SIZE}inusebythisprocess"),
        "allocated": (rf"{_SIZE}alreadyallocated", rf"Oftheallocatedmemory{_SIZE}isallocatedbyPyTorch"),
        "unallocated": (rf"{_SIZE}isreservedbyPyTorchbutunallocated", rf"{_SIZE}cached"),
        "reserved": (rf"{_SIZE}reservedintotalbyPyTorch",),
        "allowed": (rf"{_SIZE}allowed;",),
        "private_pools": (rf"with{_SIZE}allocatedinprivatepools",),
    }.items()}
_OTHERS = re.compile(rf"Process(\d+)has{_SIZE}memoryinuse")
_GPU = re.compile(r"GPU(\d+)")

# A word that each message of a kind contains once: the count of the word is the number of messages.
COUNTED = {"cuda": b"tried to allocate", "hip": b"tried to allocate", "xpu": b"tried to allocate",
           "mps": b"mps backend out of memory", "library": b"_alloc_failed", "driver": b"out of memory",
           "ram": b"you tried to allocate", "killed": b"oom-kill"}


class KindMatch(NamedTuple):
    start: int
    kind: str
    match: re.Match[str]


def is_oom_message(text: str) -> bool:
    return parse_oom_message(text) is not None


def message_in(context: MessageContext) -> OomMessage | None:
    """The first message of an input, with the number of further ones; None if there is no known message."""
    found = parse_oom_message(context.text)
    return found and replace(found, repeated=max(context.counts.get(COUNTED[found.kind], 1) - 1, 0))


def parse_oom_message(text: str) -> OomMessage | None:
    """The first message in a text."""
    text = clean(text)
    unwrapped, positions = unwrap(text)
    found = _first_match(unwrapped)
    if found is None:
        return OomMessage("killed", "Killed", "the shell") if _KILLED_LINE.search(text) else None
    message, length = _PARSERS[found.kind](found, _body(unwrapped, found))
    start, end = positions[found.start], positions[found.start + length - 1] + 1
    frames = parse_frames(text[:start])
    dtype, shape = dtype_and_shape(frames)
    return replace(message, text=" ".join(text[start:end].split()), frames=frames, dtype=dtype, shape=shape)


def _first_match(unwrapped: str) -> KindMatch | None:
    found = sorted(KindMatch(match.start(), kind, match)
                   for kind, pattern in _KINDS if (match := pattern.search(unwrapped)))
    if found and found[0].kind == "warning":  # PyTorch prints it before it raises: the message follows
        return next((each for each in found if each.kind == "cuda"), found[0])
    return found[0] if found else None


def _body(unwrapped: str, found: KindMatch) -> str:
    """The text from the message's first word to the next message, the next traceback or the greatest length."""
    end = min(found.start + _MAX_LENGTH, len(unwrapped))
    for stop in ("outofmemory", "Triedtoallocate", "Traceback(mostrecent", 'File"'):
        position = unwrapped.find(stop, found.match.end(), end)
        end = position if position >= 0 else end
    return unwrapped[found.start:end]


# ---- one parser per kind: body of a message → its figures, and how many characters of the body it takes


def _parse_allocator(found: KindMatch, body: str) -> tuple[OomMessage, int]:
    match = found.match
    requested, tolerance = _size(match[2] or match[4], match[3] or match[5]) if match[2] or match[4] else (None, 0)
    fields = {name: place for name, patterns in _FIELDS.items()
              if (place := next((place for each in patterns if (place := each.search(body))), None))}
    others = list(_OTHERS.finditer(body))
    sizes: dict[str, Any] = {name: size for name, place in fields.items()
                             if (size := _size(place[1], place[2])[0]) < _IMPOSSIBLE}
    reserved = sizes.pop("reserved", None)
    if reserved is not None and "allocated" in sizes:
        sizes["unallocated"] = max(reserved - sizes["allocated"], 0)
    if sizes.get("process") == 0:  # inside a container the driver does not know the process
        del sizes["process"]
    gpu = _GPU.search(body)
    message = OomMessage((match[1] or "CUDA").lower(), "", pytorch_version(body), requested, tolerance,
                         int(gpu[1]) if gpu else None,
                         others=tuple((int(each[1]), _size(each[2], each[3])[0]) for each in others), **sizes)
    warning = _WARNING.search(match.string, 0, match.start())
    if warning and requested is not None and abs(int(warning[2]) - requested) <= tolerance + 2 * MiB:
        message = replace(message, requested=int(warning[2]), tolerance=0, free=int(warning[3]), total=int(warning[4]))
    return message, max([len(match[0]), *(place.end() for place in (*fields.values(), *others))])


def _parse_warning(found: KindMatch, body: str) -> tuple[OomMessage, int]:
    gpu, requested, free, total = (int(group) for group in found.match.groups())
    return OomMessage("cuda", "", "PyTorch 2.11 or later", requested, 0, gpu, total, free), len(found.match[0])


def _parse_mps(found: KindMatch, body: str) -> tuple[OomMessage, int]:
    message = OomMessage("mps", "", "PyTorch on Apple's GPU")
    if found.match[1]:
        (allocated, _), (others, _), (allowed, _), (requested, tolerance) = (
            _size(found.match[group], found.match[group + 1]) for group in (1, 3, 5, 7))
        message = replace(message, requested=requested, tolerance=tolerance, allocated=allocated, unallocated=0,
                          allowed=allowed, others=((0, others),))
    return message, len(found.match[0])


def _parse_ram(found: KindMatch, body: str) -> tuple[OomMessage, int]:
    exact, number, unit, array, array_unit = found.match.groups()
    requested = int(exact) if exact else next(
        (_size(n, u)[0] for n, u in ((number, unit), (array, array_unit)) if n), None)
    windows = re.match(r"WinError|paging", found.match[0], re.IGNORECASE)
    source = "PyTorch's CPU allocator" if exact or number else "Windows" if windows else "Python or the system"
    return OomMessage("ram", "", source, requested), len(found.match[0])


def _parse_without_figures(found: KindMatch, body: str) -> tuple[OomMessage, int]:
    source = {"library": _LIBRARIES.get(found.match[1] if found.kind == "library" else "", ""),
              "driver": "the driver, through PyTorch", "killed": "the system"}[found.kind]
    return OomMessage(found.kind, "", source), len(found.match[0])


_PARSERS = {"cuda": _parse_allocator, "warning": _parse_warning, "mps": _parse_mps, "ram": _parse_ram,
            "library": _parse_without_figures, "driver": _parse_without_figures, "killed": _parse_without_figures}


def _size(number: str, unit: str) -> tuple[int, int]:
    """Bytes of a printed size, and its rounding error: half of the last digit."""
    number = number.replace(",", ".")
    digits = len(number.partition(".")[2])
    scale = _UNITS[unit]
    return round(float(number) * scale), 0 if scale == 1 else -(-scale // (2 * 10**digits))


def pytorch_version(body: str) -> str:
    """The releases of PyTorch that print such a message."""
    if "cached" in body:
        return "PyTorch 1.0 to 1.3"
    if "reservedintotal" in body:
        return "PyTorch 1.10 to 2.0" if "max_split_size_mb" in body else "PyTorch 1.4 to 1.9"
    if "capactyof" in body:
        return "PyTorch 2.1"
    if "capacityof" in body:
        if "PYTORCH_ALLOC_CONF" in body:
            return "PyTorch 2.10 or later"
        return "PyTorch 2.2 to 2.9" if "expandable_segments" in body else "PyTorch 2.2 or later"
    return "PyTorch"
