"""An out-of-memory message, in any wording from PyTorch 1.0 to 2.15 or around it → what it says, as an OutOfMemory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.units import GiB, KiB, MiB, TiB
from ..sights import OutOfMemory
from .frames import dtype_and_shape, frames_before
from .pasted import Excerpt, cleaned, squashed

_UNITS = {"bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB,
          "B": 1, "KB": KiB, "MB": MiB, "GB": GiB, "TB": TiB}  # MPS says GB and means GiB
_SIZE = r"(?<!\d)(?<!\d[.,])(\d+(?:[.,]\d+)?)(bytes|[KMGT]i?B|B)"  # 7,79 where the system writes numbers so
_ABSURD = 2**50     # no card has that: torch 2.1 prints -1 as 17179869184.00 GiB where the driver gives no figure
_LONGEST = 2000     # characters of a message, without white space

# All patterns are of text without white space, so that no wrap can hide a word.
_ALLOCATOR = re.compile(rf"(?:(CUDA|HIP|XPU)outofmemory\.?)(?:Triedtoallocate{_SIZE})?"
                        rf"|Triedtoallocate{_SIZE}|\(?GPU\d*;{_SIZE}totalcapacity")
_WARNED = re.compile(r"memoryallocationfailedwithOOMondevice(\d+)whiletryingtoallocate(\d+)bytes"
                     r"\(free:(\d+),total:(\d+)\)")
_MPS = re.compile(rf"MPSbackendoutofmemory(?:\(MPSallocated:{_SIZE},otherallocations:{_SIZE},maxallowed:{_SIZE}\)"
                  rf"\.?Triedtoallocate{_SIZE})?")
_LIBRARY = re.compile(r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|HIPBLAS|ROCBLAS)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)")
_DRIVER = re.compile(r"(?:CUDA|HIP)(?:driver)?error:outofmemory|cudaruntimeerr(?:or)?\(2\):outofmemory"
                     r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
                     r"|TritonError\[\w+\]:outofmemory|Cudafailure(?:2|\(2\))?'outofmemory'", re.IGNORECASE)
_HOST = re.compile(r"DefaultCPUAllocator:[\w']{1,40}memory:youtriedtoallocate(\d+)bytes"
                   r"|notenoughmemory:youtriedtoallocate(\d+(?:\.\d+)?)([KMGT]?B)"
                   rf"|Unabletoallocate{_SIZE}foranarray"
                   r"|posix_memalign\(&data,gAlignment,nbytes\)==0\.12vs0"
                   r"|WinError1455|pagingfileistoosmall|std::bad_alloc|Cannotallocatememory|(?<!OutOf)MemoryError"
                   r"|RAMranout,notthecard", re.IGNORECASE)
_KILLED = re.compile(r"Outofmemory:Kill(?:ed)?process|oom[-_]kill|OOMKilled|exit(?:ed)?(?:with)?(?:code|status):?=?137"
                     r"|exitcode:-9|returncode=-9|killedthetrainingprocess\(signal9\)|signal9\(SIGKILL\)"
                     r"|Signals\.SIGKILL:9|killedbysignal:Killed",
                     re.IGNORECASE)
_KINDS = (("cuda", _ALLOCATOR), ("warned", _WARNED), ("mps", _MPS), ("library", _LIBRARY), ("driver", _DRIVER),
          ("host", _HOST), ("killed", _KILLED))
_KILLED_LINE = re.compile(r"(?m)^(?:.*[\s\]])?\**Killed\**[ \t]*$")  # the shell's word, where lines still are
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
        "private": (rf"with{_SIZE}allocatedinprivatepools",),
    }.items()}
_OTHERS = re.compile(rf"Process(\d+)has{_SIZE}memoryinuse")
_GPU = re.compile(r"GPU(\d+)")

COUNTED = {"cuda": b"tried to allocate", "hip": b"tried to allocate", "xpu": b"tried to allocate",
           "mps": b"mps backend out of memory", "library": b"_alloc_failed", "driver": b"out of memory",
           "host": b"you tried to allocate", "killed": b"oom-kill"}


class Found(NamedTuple):
    at: int
    kind: str
    match: re.Match[str]


def is_message(text: str) -> bool:
    return parse(text) is not None


def from_excerpt(seen: Excerpt) -> OutOfMemory | None:
    """The first message; None: there is none that is known."""
    found = parse(seen.text)
    return found and replace(found, more=max(seen.counts.get(COUNTED[found.kind], 1) - 1, 0))


def parse(text: str) -> OutOfMemory | None:
    """The first message in a text."""
    text = cleaned(text)
    tight, at = squashed(text)
    found = _first(tight)
    if found is None:
        return OutOfMemory("killed", "Killed", "the shell") if _KILLED_LINE.search(text) else None
    body = _body(tight, found)
    read, length = _READERS[found.kind](found, body)
    begin = at[found.at]
    frames = frames_before(text[:begin])
    dtype, shape = dtype_and_shape(frames)
    return replace(read, words=" ".join(text[begin:at[found.at + length - 1] + 1].split()), frames=frames,
                   dtype=dtype, shape=shape)


def _first(tight: str) -> Found | None:
    places = sorted(Found(match.start(), kind, match) for kind, pattern in _KINDS if (match := pattern.search(tight)))
    if places and places[0].kind == "warned":  # torch says the bytes before it raises: the message follows
        return next((each for each in places if each.kind == "cuda"), places[0])
    return places[0] if places else None


def _body(tight: str, found: Found) -> str:
    """From the message's first word to the next message, the next traceback or as far as any message goes."""
    end = min(found.at + _LONGEST, len(tight))
    for stop in ("outofmemory", "Triedtoallocate", "Traceback(mostrecent", 'File"'):
        place = tight.find(stop, found.match.end(), end)
        end = place if place >= 0 else end
    return tight[found.at:end]


# Each reader gives what a message says, and how much of the body the message is.

def _allocator(found: Found, body: str) -> tuple[OutOfMemory, int]:
    match = found.match
    asked, within = _sized(match[2] or match[4], match[3] or match[5]) if match[2] or match[4] else (None, 0)
    fields = {name: place for name, patterns in _FIELDS.items()
              if (place := next((place for each in patterns if (place := each.search(body))), None))}
    others = list(_OTHERS.finditer(body))
    sizes: dict[str, Any] = {name: size for name, place in fields.items()
                             if (size := _sized(place[1], place[2])[0]) < _ABSURD}
    reserved = sizes.pop("reserved", None)
    if reserved is not None and "allocated" in sizes:
        sizes["unallocated"] = max(reserved - sizes["allocated"], 0)
    if sizes.get("process") == 0:  # inside a container the driver does not know the process
        del sizes["process"]
    gpu = _GPU.search(body)
    told = OutOfMemory((match[1] or "CUDA").lower(), "", wording(body), asked, within, int(gpu[1]) if gpu else None,
                       others=tuple((int(each[1]), _sized(each[2], each[3])[0]) for each in others), **sizes)
    warned = _WARNED.search(match.string, 0, match.start())
    if warned and asked is not None and abs(int(warned[2]) - asked) <= within + 2 * MiB:
        told = replace(told, asked=int(warned[2]), within=0, free=int(warned[3]), total=int(warned[4]))
    return told, max([len(match[0]), *(place.end() for place in (*fields.values(), *others))])


def _warned(found: Found, body: str) -> tuple[OutOfMemory, int]:
    gpu, asked, free, total = (int(group) for group in found.match.groups())
    return OutOfMemory("cuda", "", "PyTorch 2.11 or later", asked, 0, gpu, total, free), len(found.match[0])


def _mps(found: Found, body: str) -> tuple[OutOfMemory, int]:
    told = OutOfMemory("mps", "", "PyTorch on Apple's GPU")
    if found.match[1]:
        (allocated, _), (others, _), (allowed, _), (asked, within) = (
            _sized(found.match[group], found.match[group + 1]) for group in (1, 3, 5, 7))
        told = replace(told, asked=asked, within=within, allocated=allocated, unallocated=0, allowed=allowed,
                       others=((0, others),))
    return told, len(found.match[0])


def _host(found: Found, body: str) -> tuple[OutOfMemory, int]:
    exact, number, unit, array, array_unit = found.match.groups()
    asked = int(exact) if exact else next(
        (_sized(n, u)[0] for n, u in ((number, unit), (array, array_unit)) if n), None)
    windows = re.match(r"WinError|paging", found.match[0], re.IGNORECASE)
    whose = "PyTorch's CPU allocator" if exact or number else "Windows" if windows else "Python or the system"
    return OutOfMemory("host", "", whose, asked), len(found.match[0])


def _bare(found: Found, body: str) -> tuple[OutOfMemory, int]:
    whose = {"library": _LIBRARIES.get(found.match[1] if found.kind == "library" else "", ""),
             "driver": "the driver, through PyTorch", "killed": "the system"}[found.kind]
    return OutOfMemory(found.kind, "", whose), len(found.match[0])


_READERS = {"cuda": _allocator, "warned": _warned, "mps": _mps, "host": _host, "library": _bare, "driver": _bare,
            "killed": _bare}


def _sized(number: str, unit: str) -> tuple[int, int]:
    """The bytes of a printed size, and how far they may be off."""
    number = number.replace(",", ".")
    digits = len(number.partition(".")[2])
    of = _UNITS[unit]
    return round(float(number) * of), 0 if of == 1 else -(-of // (2 * 10**digits))  # half of the last digit


def wording(body: str) -> str:
    """Which releases of PyTorch speak so."""
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
