"""What is given to `fitgpt explain` → a message, nvidia-smi's output, figures, a plan or a run → its Diagnosis."""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..config.argv import walk
from ..config.command_options import ExplainOptions
from ..config.fields import Assignment
from ..config.run_config import RunConfig
from ..core.errors import UsageError
from ..core.files import open_at_once
from ..core.units import MiB, optional_bytes, show_bytes
from ..hardware.gpus import find
from ..planning import budget
from ..planning.request import run_config_from, with_data
from ..runs.folder import recorded_config
from ..tracing.trace_file import from_json, is_trace, read
from .case import ExplainRequest
from .diagnose import Diagnosis, diagnose
from .memory_snapshot import explain_snapshot, is_pickle, read_snapshot
from .memory_summary import explain_memory_summary
from .nvidia_smi import MAX_FRAGMENT, parse_fragment, parse_nvidia_smi
from .oom_message import COUNTED, OomMessage, is_cut_traceback, parse_oom_message, vague_message
from .plan_or_run import explain_document, explain_run
from .reading import explain_figures, explain_nvidia_smi
from .traced import explain_trace, explain_traced_message

INPUTS = ("the whole message, from `CUDA out of memory` to its last figure, with the traceback above it",
          "or the output of nvidia-smi, a plan in JSON, or a run folder",
          "or two figures: fitgpt explain --reading 6582MiB --process 4464MiB config.py")
EXAMPLE = "fitgpt explain oom.txt config.py, or pipe it: fitgpt explain - < oom.txt"
NO_UNIT = "Numbers without a unit are taken as MiB, as nvidia-smi prints them."
RESUMED = ("init_from", "resume")  # a resumed run has the tape of a run from scratch


def explain(text: str, config: RunConfig | None = None, *, gpu: str = "", trainer: str = "auto",
            others: int | None = None, torch: str = "") -> Diagnosis:
    """An out-of-memory message, output of nvidia-smi or a plan in JSON, and the run's config if known → Diagnosis.

    Its subject is "unknown" if the text is none of these. `others`: bytes that other processes hold of the GPU;
    `torch`: a version, by default the one installed here.
    """
    given = _read_text(text)
    request = ExplainRequest(config, gpu=gpu, trainer=trainer, others=others, torch=torch)
    return _explain_text(given, request) or _unknown("The text", given, INPUTS[:2])


def explain_options(options: ExplainOptions, assignments: Sequence[Assignment],
                    stdin: BinaryIO | None) -> Diagnosis:
    """The options of `fitgpt explain`, the assignments of the run's config, and piped input if any → Diagnosis."""
    target = options.target
    folder = Path(target) if target and os.path.isdir(target) else None
    file = target if folder is None and target != "-" and not _is_text(target) else ""
    config, name, notes = find_config(assignments, options.config, folder, file)
    request = ExplainRequest(config, name, options.gpu, options.trainer, optional_bytes(options.others, "MiB"),
                             optional_bytes(options.process, "MiB"),
                             read(options.trace) if options.trace else None)
    if any(text.strip().isdecimal() for text in (options.reading, options.process, options.others)):
        notes = (*notes, NO_UNIT)
    diagnosis = _explain_target(options, request, folder, stdin)
    return diagnosis if diagnosis.subject == "unknown" else replace(diagnosis, notes=(*diagnosis.notes, *notes))


def _explain_target(options: ExplainOptions, request: ExplainRequest, folder: Path | None,
                    stdin: BinaryIO | None) -> Diagnosis:
    target = options.target
    if options.reading or (options.process and not target):
        return explain_figures(optional_bytes(options.reading, "MiB"), request)

    # The text of a file, of the target itself or of standard input.
    source, given = target, None
    if folder is not None or target in ("", "-"):
        source = target if folder is not None else "The piped input"
        if stdin is not None:
            given = read_input(stdin, limit_of(stdin, source))
    elif _is_text(target):
        source, given = "The text", _read_text(target)
    else:
        try:
            with open_at_once(target) as file:
                limit = limit_of(file, target)
                if is_pickle(file):
                    return explain_snapshot(read_snapshot(file, target))
                given = read_input(file, limit)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                raise
            raise UsageError(f"There is no file or folder {target!r:.200}.",
                             "fitgpt explain - < oom.txt reads piped input.") from None
    if given is not None and given.text.strip():
        diagnosis = _explain_text(given, request)
        if diagnosis is not None or folder is None:
            diagnosis = diagnosis or _unknown(source, given, INPUTS)
            return replace(diagnosis, notes=(*diagnosis.notes, NOT_READ)) if given.is_cut else diagnosis

    # There is no text: the trace, the config, or the run of a folder.
    if request.trace is not None:
        return explain_trace(request.trace, request.gpu, request.others)
    if request.config is None:
        what = (f"{source} is empty." if target and given is not None else
                "`fitgpt explain` needs something to explain: a file, a run folder, a config or piped text.")
        raise UsageError(what, EXAMPLE)
    diagnosis = explain_run(request, folder)
    if target and folder is None:
        return replace(diagnosis, notes=(*diagnosis.notes, f"{source} is empty: only the config is explained."))
    return diagnosis


def limit_of(stream: BinaryIO, name: str) -> int | None:
    """How many bytes to read of a pipe, which may never end; None for a file. UsageError for a device such as
    /dev/zero, which never ends. Terminals and /dev/null do."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except OSError:  # no file: io.BytesIO
        return None
    endless = stat.S_ISCHR(mode) and not stream.isatty() and not os.path.samestat(
        os.fstat(stream.fileno()), os.stat(os.devnull))
    if endless or stat.S_ISBLK(mode):
        raise UsageError(f"{name} is a device, not a file with a message.", EXAMPLE)
    return None if stat.S_ISREG(mode) else MAX_PIPED


def _is_text(target: str) -> bool:
    """Whether the target is the text itself, not the path of a file: there is no such file, and it has several words or
    is understood."""
    if os.path.exists(target) or Path(target).suffix in (".txt", ".log", ".json"):
        return False
    return len(target.split()) > 1 or _explain_text(_read_text(target), ExplainRequest()) is not None


def _read_text(text: str) -> InputText:
    return read_input(BytesIO(text.encode("utf-8", "replace")))


def _explain_text(given: InputText, request: ExplainRequest) -> Diagnosis | None:
    """None if the text is neither a message nor nvidia-smi's output nor a plan."""
    if message := message_in(given):
        return _explain_message(message, request)
    if gpus := parse_nvidia_smi(given.text):
        return explain_nvidia_smi(gpus, request)
    if summary := explain_memory_summary(given.text):
        return summary
    try:
        document = json.loads(given.text)
    except (ValueError, RecursionError):
        document = None
    if is_trace(given.text):
        return explain_trace(from_json(given.text), request.gpu, request.others)
    if isinstance(document, dict) and (diagnosis := explain_document(document, request)):
        return diagnosis
    ran_out = any(given.counts[word] for word in RAN_OUT) or (
        len(given.text) <= MAX_FRAGMENT and _OOM.search(given.text))
    bare = not re.search(r"\d\s*[MG]i?B?\b", given.text, re.IGNORECASE)
    if (gpu := parse_fragment(given.text)) and not (bare and ran_out):
        diagnosis = explain_nvidia_smi([gpu], request)
        return replace(diagnosis, notes=(*diagnosis.notes, NO_UNIT)) if bare else diagnosis
    return _explain_message(vague_message(given.text), request) if ran_out else None


def _explain_message(message: OomMessage, request: ExplainRequest) -> Diagnosis:
    card, others = find(request.gpu) if request.gpu else None, request.others
    if card is not None and card.vendor == "nvidia":
        budget.on_card(card, others=others or 0)  # raises an error if the GPU has less than `others`
    unknown = message.process is None and not message.others
    if others is not None and unknown and message.total is not None and message.free is not None:
        message = replace(message, process=max(message.total - message.free - others, 0))
    if request.trace is not None:
        return explain_traced_message(message, request.trace, card, others or 0)
    return diagnose(message, request.run_on(card), card, request.trainer, others or 0)


def _unknown(source: str, given: InputText, inputs: tuple[str, ...]) -> Diagnosis:
    cut = " It is a traceback without its last line, the error message." if is_cut_traceback(given.text) else ""
    return Diagnosis("unknown", f"{source} contains no out-of-memory message, no output of nvidia-smi and no plan in a "
                     f"form that fitgpt knows.{cut} It does not guess.", needed=inputs)


# ---- the config of the run


def find_config(assignments: Sequence[Assignment], config: str = "", folder: Path | None = None,
                file: str = "") -> tuple[RunConfig | None, str, tuple[str, ...]]:
    """The run's config, the arguments that start it, and notes. Flags override config files, which override the config
    recorded in a run folder.

    `config`: a config file or a run folder. `file`: a log to explain, which may lie in the folder of its run.
    """
    assignments, recorded, name = list(assignments), None, ""
    if config and Path(config).is_dir():
        folder = Path(config)
    elif config:
        assignments = [*walk([config], RunConfig, config_files=True), *assignments]
    if folder is None and file and not assignments and (Path(file).parent / "run.json").is_file():
        folder = Path(file).parent
    if folder is not None:
        recorded, name = recorded_config(folder), f"--out_dir={folder} --resume"
        if recorded is None and not assignments:
            raise UsageError(f"{folder} holds no run of fitgpt: no run.json, which contains its config.",
                             f"fitgpt explain {folder} --config=config.py")
    if not assignments and recorded is None:
        return None, "", ()
    arguments = dict.fromkeys(each.source if each.source.startswith("-") else each.source.rpartition(":")[0]
                              for each in assignments)
    known = RunConfig.from_dict(recorded).to_dict() if recorded else {}
    assignments = [*(Assignment(key, value, str(folder)) for key, value in known.items()), *assignments]
    found, _ = run_config_from([each for each in assignments if (each.key, each.value) != RESUMED])
    found, _, _, notes = with_data(found)
    return found, name if recorded else " ".join(arguments), tuple(notes)


# ---- inputs of any size

CHUNK = 256 * 1024  # bytes; an input up to this size is parsed as a whole
MAX_PIPED = 256 * MiB  # bytes read of a pipe, in about 5 s
NOT_READ = (f"Only the first {show_bytes(MAX_PIPED)} of the pipe were read. A file is read to its end: "
            "fitgpt explain oom.txt")
BEFORE, AFTER = 64 * 1024, 16 * 1024  # bytes kept around a chunk: traceback before its message, figures after

# Lower-case parts of every message in oom_message.py. Chunks of a large input that contain none of them are not parsed.
HINTS = (b"out of memory", b"outofmemory", b"tried to allocate", b"total capac", b"reserved in total", b"_alloc_failed",
         b"_not_initialized", b"cpuallocator", b"not enough memory", b"unable to allocate", b"paging file",
         b"error 1455", b"memoryerror", b"bad_alloc", b"killed", b"oom-kill", b"oom_kill", b"oomkill", b"code 137",
         b"status 137", b"error 137", b"code: 137", b"exitcode: -9", b"exitcode : -9", b"code = -9", b"code -9",
         b"signal 9", b"signal: 9", b"status=9", b"sigkill", b"out_of_memory", b"posix_memalign", b"ram ran out",
         b"available ram", b"low on memory", b"memory pressure", b"more system memory", b"cannot allocate memory",
         b"error_out_of_memory", b"errormemoryallocation", b"would exceed allowed memory", b"allocation on device",
         b"already allocated", b"by pytorch", b"memory in use", b"invalid buffer size", b"failed to cuda",
         b"failed to allocate", b"outofdevicememory", b"out_of_device_memory", b"shared memory", b"bus error",
         b"/dev/shm", b"</torch", b"unable to mmap", b"out of resource", b"resource_exhausted", b"resource exhausted",
         b"oom debugging", b"oom when allocating", b"resourceexhausted", b"bfc_allocator", b"ran out of memory",
         b"insufficient memory", b"[metal::malloc]", b"[malloc_or_wait]", b"for the cache blocks",
         b"gpu memory utilization", b"kv cache", b"mem-fraction-static", b"dispatched on the cpu",
         b"negligible gpu memory", b"memory exhausted", b"_internal_error", b"cudnn algorithm", b"bfcarena",
         b"create cublas", b"create cudnn", b"executable batch size")
# Not messages alone. The last two are the end of PyTorch's message.
RAN_OUT = (b"out of memory", b"outofmemory", b"reserved memory is >>", b"avoid fragmentation")
# The same in a short text, in other words and languages. ASCII: 报OOM is two words.
_OOM = re.compile(
    r"(?a:\bOOM(?:s|ed)?\b)|(?i:out of v?ram\b"
    r"|(?:not enough|insufficient|lack of|too little) (?:gpu |video )?(?:v?ram|memory)"
    r"|(?:nicht genügend|nicht genug|zu wenig)[ \w-]{0,20}speicher|memoria insuficiente|mémoire insuffisante"
    r"|(?:не хватает|недостаточно|нехватка) \w{0,20} ?памяти|[内显]存不[足够]|爆显存|記憶體不足"
    r"|メモリ(?:が)?不足|메모리 ?부족)")
SMI_HINTS = (b"nvidia-smi", b"memory.used")  # the same for nvidia-smi's output


class InputText(NamedTuple):
    """A small input as a whole; of a large one, the text around its first message or nvidia-smi output."""

    text: str
    counts: dict[bytes, int]  # occurrences in the whole input of the words that count messages
    is_cut: bool              # whether there was more


def read_input(stream: BinaryIO, limit: int | None = None) -> InputText:
    """Reads the stream to its end, or up to the limit, and keeps little of it."""
    read = iter(partial(stream.read, CHUNK), b"")
    chunks = _utf8(islice(read, None if limit is None else limit // CHUNK))
    counts = dict.fromkeys((*COUNTED.values(), *RAN_OUT), 0)
    before, chunk, text = b"", next(chunks, b""), ""
    first = chunk
    while chunk:
        following, overlap = next(chunks, b""), before[-AFTER:]
        searched = overlap + chunk
        lower = searched.lower()
        for word in counts:  # a chunk may end inside a word
            counts[word] += lower.count(word, max(len(overlap) - len(word) + 1, 0))
        for hints, parse in ((HINTS, parse_oom_message), (SMI_HINTS, parse_nvidia_smi)):
            places = [place for hint in hints if not text and (found := lower.find(hint)) >= 0
                      for place in (found, lower.rfind(hint))]
            if places and parse(_decode(searched[max(min(places) - AFTER, 0):max(places) + AFTER])):
                text = _decode(before + chunk + following[:AFTER])
        before, chunk = (before + chunk)[-BEFORE:], following
    return InputText(text or _decode(first), counts, next(read, b"") != b"")


def message_in(given: InputText) -> OomMessage | None:
    """The first message of an input, with the number of further ones; None if there is no known message."""
    found = parse_oom_message(given.text)
    return found and replace(found, repeated=max(given.counts.get(COUNTED.get(found.kind, b""), 0) - 1, 0))


def _utf8(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """UTF-16, which PowerShell writes when it redirects, is converted to UTF-8."""
    decoder, utf16 = codecs.getincrementaldecoder("utf-16")(errors="replace"), None
    for chunk in chunks:
        if utf16 is None:
            utf16 = chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        yield decoder.decode(chunk).encode("utf-8", errors="replace") if utf16 else chunk


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
