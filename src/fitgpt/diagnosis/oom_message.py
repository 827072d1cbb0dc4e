"""Text → OomMessage: an out-of-memory message of PyTorch 0.4 to 2.15, CUDA's libraries, the driver, the system or
another framework, and the stack frames of the traceback before it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from html import unescape
from itertools import islice
from typing import Any

from ..core.units import GiB, KiB, MiB, TiB


@dataclass(frozen=True)
class StackFrame:
    """One line of a traceback."""

    file: str
    line: int | None
    function: str
    code: str = ""


@dataclass(frozen=True)
class OomMessage:
    """The figures of an out-of-memory message, in bytes. None: the message does not contain the figure."""

    kind: str                    # cuda, hip, xpu, npu, mps: PyTorch's allocators; driver, library; ram: CPU RAM;
                                 # killed; one of FRAMEWORKS; vague: not known which memory
    text: str                    # the message, on one line
    source: str                  # who prints such a message: "PyTorch", "cuBLAS", "Windows"
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
    rank: int | None = None           # that failed first, if the text names ranks
    unquantized_experts: bool = False  # the text shows experts that bitsandbytes leaves in 16 bits

    @property
    def reserved(self) -> int | None:
        return None if self.allocated is None or self.unallocated is None else self.allocated + self.unallocated


# ---- clean text

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]"
                   r"|(?:\\u001b|\\x1b|\\033)?\[\d{1,3}(?:;\d{1,3}){0,4}m")  # the escape may be lost, or written out
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]")
_LINE_BREAK = re.compile(r"<br ?/?>")
_LEVEL = r"(?:INFO|WARN(?:ING)?|ERROR|DEBUG|FATAL|CRITICAL)"
_PREFIX = re.compile(
    r"\s*(?:`+|>(?=[\s>])|[|│┃❱](?=\s)|E(?=\s{2,})|\[rank\d+\]:?|\([\w =]{0,60}\bpid=\d+[^)]*\)|\d+:(?=\s)"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]?"
    rf"|\[?{_LEVEL}\b\]?:?\s*(?:\d\d-\d\d )?(?:\d\d:\d\d:\d\d[.,\d]*)?\s*(?:\[[\w.]+:\d+\])?:?)")
_RANK = re.compile(r"\s*\[rank(\d{1,6})\]")  # torch's prefix
_OWN_RANK = re.compile(r"\brank (\d{1,6})(?: of \d{1,6} \([^)]{1,20}\))?: ", re.IGNORECASE)  # fitgpt's words


def failed_rank(text: str) -> int | None:
    """The rank that ran out of memory first, where the text names it."""
    for line in text.split("\n"):
        if "out of memory" in line.lower() and (found := _RANK.match(line) or _OWN_RANK.search(line)):
            return int(found[1])
    return None


def clean(text: str) -> str:
    """The text without colours, control characters, HTML's entities, and the prefixes of loggers, quotes and
    terminals."""
    text = _LINE_BREAK.sub("\n", unescape(_ANSI.sub("", text))).replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROL.sub(" ", text)
    lines = text.split("\n")
    # Where several ranks wrote into one log: only the lines of the rank that ran out of memory first.
    failed = next((rank[1] for line in lines if (rank := _RANK.match(line)) and "out of memory" in line.lower()), None)
    if failed is not None:
        lines = [line for line in lines if (rank := _RANK.match(line)) is None or rank[1] == failed]
    return "\n".join(map(_without_prefixes, lines))


def _without_prefixes(line: str) -> str:
    for _ in range(6):
        found = _PREFIX.match(line)
        if not found or not found[0].strip():
            break
        line = line[found.end():]
    return line.rstrip(" │┃|")


# ---- the message

_UNITS = {"bytes": 1, "b": 1, "k": KiB, "m": MiB, "g": GiB, "t": TiB}  # MPS prints GB and means GiB
_SIZE = r"(?<!\d)(?<!\d[.,])(\d{1,18}(?:[.,]\d{1,9})?)(bytes|[kmgt]i?b|b)"  # 7,79: the decimal comma of some locales
_IMPOSSIBLE = 2**50  # torch 2.1 prints -1 as 17179869184.00 GiB where the driver reports no figure
_MAX_LENGTH = 2000   # characters of a message, without white space
_MAX_LINE = 300      # characters of its line, before and after it
OLD_PYTORCH, BEFORE_EXPANDABLE, CUDA_MALLOC_ASYNC = ("PyTorch before 1.10", "PyTorch 1.10 to 2.0",
                                                     "PyTorch with cudaMallocAsync")
MORE_THAN_1EB = 2**60  # printed as such: the size overflowed

# All patterns match text without white space, since a line wrap may split any word, and in lower case: a pattern that
# ignores the case takes four times as long. A message may begin with any of its figures, if only they were copied.
_ALLOCATOR = re.compile(rf"(cuda|hip|xpu|npu)outofmemory\.?(?:triedtoallocate(?:{_SIZE}|morethan1eb))?"
                        rf"|(?<!you)triedtoallocate{_SIZE}"
                        r"|(?:outofmemoryerror:)?allocationondevice\d*wouldexceedallowedmemory\.?(?:\(outofmemory\))?"
                        r"|outofmemoryerror:allocationondevice|allocationondevice\d*thiserrormeansyouranoutofmemory"
                        rf"|\(?gpu\d*;{_SIZE}totalcapacity|gpu\d+hasatotalcapac|thisprocesshas{_SIZE}memoryinuse"
                        rf"|{_SIZE}(?:totalcapacity;|alreadyallocated;|isallocatedbypytorch|reservedintotalbypytorch"
                        r"|isreservedbypytorchbutunallocated)"
                        rf"|currentlyallocated:{_SIZE}requested:")
_WARNING = re.compile(r"memoryallocationfailedwithoomondevice(\d{1,4})whiletryingtoallocate(\d{1,18})bytes"
                      r"\(free:(\d{1,18}),total:(\d{1,18})\)")
_MPS = re.compile(rf"mpsbackendoutofmemory(?:\(mpsallocated:{_SIZE},otherallocations:{_SIZE},maxallowed:{_SIZE}\)"
                  rf"\.?triedtoallocate{_SIZE})?|invalidbuffersize:{_SIZE}")
_LIBRARY = re.compile(r"(cu|hip|roc)(blas|dnn|solver|sparse|fft)_status_(?:alloc_failed|not_initialized)"
                      r"|(cu)(dnn)_status_internal_error|unabletofindavalid(cu)(dnn)algorithm")
_DRIVER = re.compile(r"(?:cuda|hip)(?:driver)?error:outofmemory|cudaruntimeerr(?:or)?\(2\):outofmemory"
                     r"|cuda_error_out_of_memory|cudaerrormemoryallocation|hiperroroutofmemory"
                     r"|tritonerror\[\w+\]:outofmemory|thcudacheckfail.{0,300}?:outofmemory"
                     r"|erroroutofmemoryatline\d{1,6}infile"  # bitsandbytes
                     r"|cu(?:da)?m(?:em)?alloc\w*failed:outofmemory|cudaerror(?:\]at|in).{0,80}?:outofmemory")
_RAM = re.compile(r"defaultcpuallocator:[\w']{1,40}memory:youtriedtoallocate(\d{1,18})bytes"
                  r"|notenoughmemory:youtriedtoallocate(\d{1,18}(?:\.\d{1,9})?)([kmgt]?b)"
                  rf"|(?:_arraymemoryerror:)?unabletoallocate{_SIZE}foranarray"
                  r"|posix_memalign\(&data,galignment,nbytes\)==0\.12vs0"
                  r"|(?:win|os)error1455|pagingfileistoosmall|页面文件太小|auslagerungsdateiistzuklein|std::bad_alloc"
                  r"|cannotallocatememory|(?<!outof)memoryerror(?!:cumem)|ramranout,not(?:the)?(?:card|gpu)"
                  r"|crashedafterusingallavailableram|notebooktriedtoallocatemorememorythanisavailable"  # Colab, Kaggle
                  r"|requiresmoresystemmemory\(")  # Ollama
_KILLED = re.compile(r"outofmemory:kill(?:ed)?process|oom[-_]?kill"
                     r"|(?:exit(?:ed)?(?:with)?(?:code|status)?|(?:status|return)code|error)[:=]?(?:137|-9)(?![\d.]*\d)"
                     r"|killedthetrainingprocess\(signal9\)|signal:?9[\(,:]sigkill|signals\.sigkill:9|signal:killed"
                     r"|status=9/kill|systemd-oomd(?:\[\d{1,9}\])?:killed|outofmemorykiller|out[-_]of[-_]memory(?:handler|\(exitcode0\))"
                     r"|srun:error:[\w.-]{1,60}:tasks?[\d,-]{1,40}:outofmemory"
                     r"|killedduetothenoderunninglowonmemory|killedduetomemorypressure|rayoutofmemoryerror")
# Memory that PyTorch's CUDA allocator does not manage, or that another library ran out of, by its words.
FRAMEWORKS = {kind: re.compile(pattern) for kind, pattern in {
    "nccl": r"cudafailure(?:2|\(2\))?'outofmemory'|failedtocuda(?:host)?calloc",
    "shm": r"insufficientsharedmemory|outofsharedmemory|killedbysignal:buserror|unabletowritetofile</torch"
           r"|unabletoopensharedmemoryobject|/dev/shm.{0,40}nospaceleft|nospaceleft.{0,40}/dev/shm"
           r"|failedtoextend/dev/shm|sharedmemorysegment/dev/shm|buserror\(coredumped\)"
           r"|unabletommap\d{1,18}bytesfromfile<(?:/torch_|filenamenotspecified)",
    "triton": r"outofresources?:(?:(?:shared|tensor)memory|\w{1,300}required:\d{1,18},?hardwarelimit)",
    "jax": r"resource_?exhausted:(?:outofmemory|failedtoallocate)|bufferassignmentoomdebugging",
    "tensorflow": r"oomwhenallocatingtensor|resourceexhaustederror|bfc_allocator\.cc"
                  r"|failedtoalloc(?:ate)?[\w.]{1,20}(?:\(\d{1,18}bytes\))?fromdevice:"
                  r"|ranoutofmemorytryingtoallocate|(?:failedto|couldnot)createcu(?:blas|dnn)handle",
    "metal": r"kiogpucommandbuffercallbackerroroutofmemory|insufficientmemory\(ioaf"
             r"|commandbufferexecutionfailed:insufficientmemory|\[metal::malloc\]|\[malloc_or_wait\]unable",
    "vllm": r"noavailablememoryforthecacheblocks|lessthandesiredgpumemoryutilization"
            r"|largerthanthe(?:maximumnumberoftokensthatcanbestoredin|available)kvcache"
            r"|notenoughmemory.{0,80}?--mem-fraction-static",
    "device map": r"modulesaredispatchedonthecpuorthedisk",
    "unsloth": r"noornegligiblegpumemory",
    "no batch": r"noexecutablebatchsizefound",
    "other library": r"(?:ggml|cupy|llamarunner|\[trt\]|rtsafe/).{0,150}?outofmemory"
                     r"|bfcarena.{0,150}?failedtoallocate|ggml_\w{1,60}:.{0,150}?(?:failedtoallocate|outofdevicememory)"
                     r"|vk_error_out_of_device_memory|erroroutofdevicememory"
                     r"|outofmemoryallocating[\d,]{1,25}bytes|outofmemoryerrorongpu\d{1,4}\.cannotallocate",
    "compiler": r"killedsignalterminatedprogram|internalcompilererror:killed|diedduetosignal9|virtualmemoryexhausted",
}.items()}
_OTHER_LIBRARIES = {"ggml": "llama.cpp", "llamarunner": "llama.cpp", "cupy": "CuPy", "outofmemoryallocating": "CuPy",
                    "[trt]": "TensorRT", "rtsafe": "TensorRT", "bfcarena": "ONNX Runtime", "vk_error": "Vulkan",
                    "erroroutofdevice": "Vulkan", "outofmemoryerrorongpu": "Paddle"}  # by the words above
# Errors between ranks. Where one of them ran out of memory, the others' errors follow from it.
COMMUNICATION = {kind: re.compile(pattern) for kind, pattern in {
    "two ranks on one gpu": r"duplicategpudetected|tworanksononegpu",
    "port": r"eaddrinuse|addressalreadyinuse",
    "collective timeout": r"caughtcollectiveoperationtimeout|nccltimeout"
                          r"|timedoutwaiting\d{3,}msfor(?:recv|send)operation",
    "lost rank": r"ncclremoteerror|connectionclosedby(?:remote)?peer|connectionresetbypeer|anotherrankhasended",
    "nccl error": r"nccl(?:unhandledcuda|system|internal|invalid\w*)error|ncclinvalidusage",
}.items()}
# JAX has TensorFlow's allocator; the others precede a message, or follow from it
_LESS_SPECIFIC = ("warning", "driver", "tensorflow", *COMMUNICATION)
_KINDS = {"cuda": _ALLOCATOR, "warning": _WARNING, "mps": _MPS, "library": _LIBRARY, "driver": _DRIVER, "ram": _RAM,
          "killed": _KILLED, **FRAMEWORKS, **COMMUNICATION}
# Printed by the shell, by bash and zsh with more on the line; needs the lines.
_WORD = "(?:Killed|Getötet|Убито|已杀死|強制終了)"  # in the shell's language
_KILLED_LINE = re.compile(rf"(?m)(?:^|[\s\]])\**{_WORD}\**[ \t]*$|(?:^|\s)\d+ {_WORD}\s|^\[\d+\][+-]?\s+{_WORD}\s"
                          r"|\bzsh: killed\b")

_FIELDS: dict[str, tuple[re.Pattern[str], ...]] = {
    name: tuple(map(re.compile, patterns)) for name, patterns in {
        "total": (rf"{_SIZE}totalcapacity", rf"totalcapaci?tyof{_SIZE}", rf"{_SIZE}total,",
                  rf"devicelimit:{_SIZE}"),
        "requested": (rf"triedtoallocate{_SIZE}", rf"requested:{_SIZE}"),
        "free": (rf"ofwhich{_SIZE}isfree", rf"[;,]{_SIZE}free", rf"free\(accordingtocuda\):{_SIZE}"),
        "process": (rf"thisprocesshas{_SIZE}memoryinuse", rf"{_SIZE}inusebythisprocess"),
        "allocated": (rf"{_SIZE}alreadyallocated", rf"{_SIZE}isallocatedbypytorch",
                      rf"currentlyallocated:{_SIZE}"),
        "unallocated": (rf"{_SIZE}isreservedbypytorchbutunallocated", rf"{_SIZE}cached"),
        "reserved": (rf"{_SIZE}reservedintotalbypytorch",),
        "allowed": (rf"{_SIZE}allowed;", rf"memoryfraction\):{_SIZE}"),
        "private_pools": (rf"with{_SIZE}allocatedinprivatepools",),
    }.items()}
_NEXT_MESSAGE = re.compile(r'outofmemory|triedtoallocate|traceback\(mostrecent|file"')
_OTHERS = re.compile(rf"process(\d{{1,18}})has{_SIZE}memoryinuse")
_GPU = re.compile(r"(?:[gn]pu|allocationondevice)(\d{1,4})")

# A word that each message of a kind contains once: the count of the word is the number of messages.
COUNTED = {"cuda": b"tried to allocate", "hip": b"tried to allocate", "xpu": b"tried to allocate",
           "mps": b"mps backend out of memory", "library": b"_alloc_failed", "driver": b"out of memory",
           "ram": b"you tried to allocate", "killed": b"oom-kill"}


def parse_oom_message(text: str) -> OomMessage | None:
    """The first message in a text; None if there is no known message."""
    rank = failed_rank(text)
    text = clean(text)
    unwrapped = "".join(text.split()).replace("İ", "i").lower()  # İ is the only character that would become two
    matches = {kind: match for kind, pattern in _KINDS.items() if (match := pattern.search(unwrapped))}
    if not matches:
        return OomMessage("killed", "Killed", "the shell") if _KILLED_LINE.search(text) else None
    kind = min(matches, key=lambda each: matches[each].start())
    if kind in _LESS_SPECIFIC:
        kind = min((each for each in matches if each == "cuda" or each in FRAMEWORKS), default=kind,
                   key=lambda each: (each == "tensorflow", matches[each].start()))
    match, end = matches[kind], matches[kind].end()
    if kind == "cuda":
        message, end = _parse_allocator(match)
    elif kind == "warning":
        gpu, requested, free, total = map(int, match.groups())
        message = OomMessage("cuda", "", "PyTorch", requested, gpu=gpu, total=total, free=free)
    elif kind == "mps":
        message = OomMessage(kind, "", "PyTorch on Apple's GPU")
        if match[9]:
            requested, tolerance = _size(match[9], match[10])
            message = replace(message, requested=requested, tolerance=tolerance)
        elif match[1]:
            (allocated, _), (others, _), (allowed, _), (requested, tolerance) = (
                _size(match[group], match[group + 1]) for group in (1, 3, 5, 7))
            message = replace(message, requested=requested, tolerance=tolerance, allocated=allocated, unallocated=0,
                              allowed=allowed, others=((0, others),))
    elif kind == "ram":
        exact, *sizes = match.groups()
        printed = [_size(number, unit)[0] for number, unit in (sizes[:2], sizes[2:]) if number]
        # PyTorch prints "not enough memory" only on Windows: c10/core/impl/alloc_cpu.cpp.
        windows = match[0].startswith(("winerror", "oserror", "paging", "页面", "auslagerung",
                                       "defaultcpuallocator:notenough"))
        message = OomMessage(kind, "", "Windows" if windows else "the CPU allocator",
                             int(exact) if exact else printed[0] if printed else None)
    else:
        source = {"driver": "the driver", "nccl": "NCCL"}.get(kind, "the system")
        if kind == "library":
            family, name = filter(None, match.groups())
            source = f"{family}{name.upper()}"
        elif kind == "other library":
            source = next(name for start, name in _OTHER_LIBRARIES.items() if match[0].startswith(start))
        message = OomMessage(kind, "", source)

    def position(number: int) -> int:
        """Of a character of the unwrapped text, in the text."""
        return next(islice(re.finditer(r"\S", text), number, None)).start()

    start, after = position(match.start()), position(end - 1) + 1
    frames = parse_frames(text[:start])
    if not frames and (below := _TRACEBACK_BELOW.match(text, after)):  # as `logging.exception` prints it
        frames = parse_frames(below[1])
    if kind == "killed":  # its line names the process and what ended it
        start = max(text.rfind("\n", 0, start) + 1, start - _MAX_LINE)
        after += len(text[after:after + _MAX_LINE].partition("\n")[0])
    compiled = next((found for frame in reversed(frames) if (found := _COMPILED_ALLOCATION.search(frame.code))), None)
    return replace(message, text=" ".join(text[start:after].split()), frames=frames, rank=rank,
                   unquantized_experts=_has_unquantized_experts(text),
                   dtype=compiled[2] if compiled else "",
                   shape=tuple(map(int, re.findall(r"\d{1,18}", compiled[1]))) if compiled else ())


# Weights in 4 or 8 bits: by bitsandbytes, and by what trainers call it.
_QUANTIZED = re.compile(r"load_in_[48]bit[\"']?\s*[=:]\s*true|quantization_bit[\"']?\s*[=:]\s*[48]\b|\bqlora\b|bnb-4bit"
                        r"|linear4bit|linear8bitlt|params4bit|bitsandbytes[\\/]nn|lora[\\/]bnb\.py", re.IGNORECASE)
# Experts as one parameter per layer: files of transformers 5, its merging of experts while it loads, and their names.
_EXPERTS = re.compile(r"integrations[\\/]moe\.py|grouped_mm|MergeModulelist|torch\.stack\(tensors, dim=self\.dim\)"
                      r"|experts\.gate_up_proj")
_EXPERTS_QUANTIZED = re.compile(r"quantize_moe_experts[\"']?\s*[=:]\s*true|experts4bit|replace_parameter_4bit",
                                re.IGNORECASE)


def _has_unquantized_experts(text: str) -> bool:
    """Whether a text names weights in 4 or 8 bits, and experts that bitsandbytes does not quantize."""
    return bool(_EXPERTS.search(text) and _QUANTIZED.search(text) and not _EXPERTS_QUANTIZED.search(text))


def vague_message(text: str) -> OomMessage:
    """The message of a text that says only that memory ran out, with its traceback; of a GPU if the text names one."""
    text = clean(text)
    on_gpu = re.search(r"torch|cuda|gpu", text, re.IGNORECASE)
    return OomMessage("cuda" if on_gpu else "vague", "", "", frames=parse_frames(f"{text}\n"))


def is_cut_traceback(text: str) -> bool:
    """Whether the text ends within a traceback, before the line that names the error."""
    lines = [line for line in clean(text).split("\n") if line.strip()]
    return any(map(_PYTHON.match, lines)) and lines[-1][0].isspace()


def _parse_allocator(match: re.Match[str]) -> tuple[OomMessage, int]:
    """The figures of a message of PyTorch's allocator, and where it ends."""
    # From its first word to the next message or traceback.
    stop = _NEXT_MESSAGE.search(match.string, match.end(), match.start() + _MAX_LENGTH)
    body = match.string[match.start():stop.start() if stop else match.start() + _MAX_LENGTH]
    fields = {name: found for name, patterns in _FIELDS.items()
              if (found := next((found for pattern in patterns if (found := pattern.search(body))), None))}
    others = [(found, size) for found in _OTHERS.finditer(body)
              if (size := _size(found[2], found[3])[0]) < _IMPOSSIBLE]
    sizes: dict[str, Any] = {name: size for name, found in fields.items()
                             if (size := _size(found[1], found[2])[0]) < _IMPOSSIBLE}
    requested, tolerance = sizes.pop("requested", None), _size(*fields["requested"].groups())[1] if (
        "requested" in fields) else 0
    if match[0].endswith("morethan1eb"):
        requested = MORE_THAN_1EB
    # The hint "If reserved memory is >> …" is as old as PyTorch 1.10; 2.1 changed the wording.
    old = "cached" in body or ("reservedintotal" in body and "ifreservedmemory" not in body)
    source = OLD_PYTORCH if old else BEFORE_EXPANDABLE if "totalcapacity;" in body else "PyTorch"
    if "allocationondevice" in body or "currentlyallocated:" in body:
        source = CUDA_MALLOC_ASYNC
        if "allocated" in sizes:
            sizes["unallocated"] = 0  # not printed
    reserved = sizes.pop("reserved", None)
    if reserved is not None and "allocated" in sizes:
        sizes["unallocated"] = max(reserved - sizes["allocated"], 0)
    if sizes.get("free", 0) > sizes.get("total", _IMPOSSIBLE):  # where a GPU shares the machine's RAM
        del sizes["free"]
    if sizes.get("process") == 0:  # inside a container the driver does not know the process
        del sizes["process"]
    gpu = _GPU.search(body)
    message = OomMessage(match[1] or "cuda", "", source, requested, tolerance,
                         int(gpu[1]) if gpu else None,
                         others=tuple((int(found[1]), size) for found, size in others), **sizes)
    warning = _WARNING.search(match.string, 0, match.start())
    if warning and requested is not None and abs(int(warning[2]) - requested) <= tolerance + 2 * MiB:
        message = replace(message, requested=int(warning[2]), tolerance=0, free=int(warning[3]), total=int(warning[4]))
    ends = [len(match[0]), *(found.end() for found in (*fields.values(), *(found for found, _ in others)))]
    return message, match.start() + max(ends)


def _size(number: str, unit: str) -> tuple[int, int]:
    """Bytes of a printed size, and its rounding error: half of the last digit."""
    number = number.replace(",", ".")
    digits = len(number.partition(".")[2])
    scale = _UNITS[unit if unit == "bytes" else unit[0].lower()]
    return round(float(number) * scale), 0 if scale == 1 else -(-scale // (2 * 10**digits))


# ---- the traceback before it

_PYTHON = re.compile(r'^\s*File "([^"\n]+)", line (\d{1,9})(?:, in (\S+))?')
# pytest and Rich: train.py:290 in step; IPython 8: File ~/train.py:290, in Trainer.step(self); Cell In[3], line 2
_LOCATION = re.compile(r"^\s*(?:File )?([^\s\"]+\.py):(\d{1,9})[:,]? in (?:[\w<>]{1,99}\.)*([\w<>]{1,99})"
                       r"|^\s*(Cell In ?\[\d{1,9}\]), line (\d{1,9})")
_NOTEBOOK = re.compile(r"^\s*((?:[~\w./\\:+-]+\.py|<ipython-input-[^>]+>)) in (<?\w[\w ]*>?)")  # IPython before 8
_NUMBERED = re.compile(r"^\s*(-+> )?(\d{1,9}) [│|\s]*(.*)")  # a line of code below them
_BEGIN = re.compile(r"Traceback \(most recent call last\)")
_TRACEBACK_BELOW = re.compile(r"[^\n]*\n(Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n?)*)")
# Compiled code allocates with empty_strided_cuda((65536, 50304), …, torch.bfloat16).
_COMPILED_ALLOCATION = re.compile(r"empty_strided(?:_\w+)?\(\(([\d, ]+)\),.*?torch\.(\w+)")
_TORCH = re.compile(r"[/\\]torch[/\\]")
_COMPILED = re.compile(r"torchinductor|[/\\]torch[/\\]_(?:dynamo|inductor|functorch)[/\\]")
_CALL = re.compile(r"\s*[\w.\[\]]+(?:\(| = .*\()|.*check clone implementation")
_MAX_FRAMES, _MAX_QUOTED = 100, 8


def parse_frames(text: str) -> tuple[StackFrame, ...]:
    """The frames of the last traceback in the text, innermost last."""
    begins = [found.end() for found in _BEGIN.finditer(text)]
    lines = text[begins[-1] if begins else 0:].split("\n")
    frames: list[StackFrame] = []
    for number, line in enumerate(lines):
        if found := _PYTHON.match(line):
            code = lines[number + 1].strip() if number + 1 < len(lines) else ""
            frames.append(StackFrame(found[1], int(found[2]), found[3] or "", "" if _PYTHON.match(code) else code))
        elif found := _LOCATION.match(line) or _NOTEBOOK.match(line):
            below = lines[number + 1:number + 12]
            numbered = [each for each in map(_NUMBERED.match, below) if each]
            if found.re is _NOTEBOOK:
                at = next((int(each[2]) for each in numbered if each[1]), None)
                file, function = found.groups()
            else:
                at, file, function = int(found[2] or found[5]), found[1] or found[4], found[3] or ""
            plain = "" if numbered or not below else below[0].strip()
            code = next((each[3].strip() for each in numbered if int(each[2]) == at), plain)
            frames.append(StackFrame(file, at, function, code))
    if not frames:  # a line of code, quoted without its file
        calls = [line.strip() for line in reversed(lines[-_MAX_QUOTED:]) if _CALL.match(line)]
        quoted = (StackFrame("", None, "", line) for line in calls)
        return next(((frame,) for frame in quoted if phase_of((frame,))), ())
    return tuple(frames[-_MAX_FRAMES:])


# What a function's name, or a line of code, shows about the phase. The first that matches counts: saving and optimizer
# steps first, because functions that evaluate or train call them.
_MODULE = r"(?:model|net|network|module|encoder|decoder|unet|vae|pipe|pipeline|self|\))"
_PHASES = {phase: re.compile(pattern, re.MULTILINE) for phase, pattern in {
    "save": r"(?i:\b(?!\w*(?:load|set_))\w*state_dict\w*(?:\(|$)|fsdp_save|full_state_dict\b|safe_save_model"
            r"|check clone implementation|torch\.save\(|save_pretrained|\bsave_file\(|save_checkpoint\(|save_model\()",
    "step": r"optimi[sz]er\.step\(|^_?optimi[sz]er_step$|scaler\.step\(|_multi_tensor_|_single_tensor_|_foreach_"
            r"|_init_group|\bexp_avg",
    "eval": r"(?i:estimate_loss|evaluat|prediction_loop|prediction_step|validat|\beval\b)|^val(?:_\w+)?$"
            r"|cat\(\(preds|nested_concat",
    "backward": r"\.backward\(|^backward$",
    "forward": r"^(?:forward|_call_impl|__call__)$|\b(?:raw_)?model\(",
    # A batch and a dtype are given to `.to()` as well, in each step.
    "load": rf"{_MODULE}\.to\(|{_MODULE}\.cuda\(|load_state_dict|from_pretrained|\bmap_location\b|torch\.load\("
            r"|_cuda_deserialize|_load_from_|set_module_tensor_to_device|^(?:to|cuda|_apply|convert|load_(?:model|checkpoint|unet)\w*)$",
}.items()}


def phase_of(frames: tuple[StackFrame, ...]) -> str:
    """save, step, eval, backward, forward or load; empty if the traceback does not show it."""
    lines = "\n".join(f"{frame.function}\n{frame.code}" for frame in frames)
    in_optimizer = "load_state_dict" not in lines and any(re.search(r"[/\\]optim[/\\]", frame.file) for frame in frames)
    return next((phase for phase, pattern in _PHASES.items()
                 if pattern.search(lines) or (phase == "step" and in_optimizer)), "")


def _shows(pattern: str, frames: tuple[StackFrame, ...]) -> bool:
    return any(re.search(pattern, f"{frame.function}\n{frame.code}") for frame in frames)


def keeps_all_logits(frames: tuple[StackFrame, ...]) -> bool:
    """Whether logits of several evaluation batches are joined: transformers' Trainer."""
    return _shows(r"cat\(\(preds|nested_concat|\bpreds_host\b", frames)


def creates_state(frames: tuple[StackFrame, ...]) -> bool:
    """Whether the optimizer creates its state, as in its first step."""
    return _shows(r"_init_group|zeros_like", frames)


def reads_checkpoint(frames: tuple[StackFrame, ...]) -> bool:
    return _shows(r"torch\.load\(|\bmap_location\b|_cuda_deserialize|optimizer\.load_state_dict", frames)


def user_frame(frames: tuple[StackFrame, ...]) -> StackFrame | None:
    """The innermost frame outside PyTorch's own files."""
    own = [frame for frame in frames if frame.file and not _TORCH.search(frame.file)]
    return own[-1] if own else None


def is_compiled(frames: tuple[StackFrame, ...]) -> bool | None:
    """Whether code of torch.compile was running; None if the traceback does not show it."""
    if any(_COMPILED.search(frame.file) for frame in frames):
        return True
    return False if any(frame.function in ("forward", "_call_impl") for frame in frames) else None


def trainer_of(frames: tuple[StackFrame, ...]) -> str:
    """fitgpt or nanogpt, judged by the files in the traceback; empty if neither."""
    paths = [re.split(r"[/\\]", frame.file) for frame in frames]
    if any("fitgpt" in path[:-1] for path in paths):
        return "fitgpt"
    if any("nanogpt" in part.lower() for path in paths for part in path):
        return "nanogpt"
    evaluates = any(frame.function == "estimate_loss" and path[-1] in ("train.py", "model.py")
                    for frame, path in zip(frames, paths, strict=True))
    return "nanogpt" if evaluates else ""
