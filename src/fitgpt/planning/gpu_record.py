"""The record of a GPU, a JSON file that `fitgpt record` writes: what short runs used of its memory, and its speed.

It has figures and versions only: no path, no user or host name, no serial number. The record of the GPU in this machine
is kept in FITGPT_HOME, in the folder `gpus`, and its figures replace those of the GPU's row in hardware/gpus.csv.
planning/record_check.py says whether a record is explained by the planner.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.errors import DataError, SystemFault
from ..core.files import data_home, write_atomically
from ..core.units import KiB, MiB
from ..hardware import gpus
from ..hardware.gpus import GpuModel

SCHEMA = 1
MOST_BYTES = 50_000
SUM_ROWS, SUM_COLUMNS = 2**20, 32  # float32
OWN = "measured on this machine"
_TEXT = re.compile(r"[\w .,+:()=-]{0,120}")  # names, versions and dates; no path, no address


@dataclass(frozen=True)
class RecordedGpu:
    """The GPU as its driver and torch describe it."""

    name: str
    cc: str              # "8.9"
    sms: int
    threads: int         # resident threads per multiprocessor
    l2_bytes: int
    driver_mib: int      # total memory as nvidia-smi shows it
    usable_bytes: int    # total memory as CUDA reports it
    boost_mhz: int = 0   # highest clock; 0: not reported
    workspace_bytes: int = 0   # of cuBLAS
    sum_bytes: int = 0         # peak of a sum over SUM_ROWS rows: its scratch grows with the number of multiprocessors
    matmul_tflops: float = 0.0 # half precision
    copy_gbs: float = 0.0      # bytes read and written


@dataclass(frozen=True)
class GpuRun:
    """One run of record_check.CASES. A run without phases was skipped or failed: `why` says so."""

    name: str
    config: dict[str, Any]
    native: bool = False       # PyTorch's default allocator; else expandable segments
    kernel: str = ""           # of attention, if one was forced
    attention: str = ""        # the kernel that ran
    phases: dict[str, dict[str, int]] = field(default_factory=dict)  # allocated and reserved peak bytes
    outside_bytes: int | None = None  # outside the allocator at the end; None: other processes changed meanwhile
    tokens_per_s: float | None = None # of a timed run, which has no phases
    why: str = ""

    @property
    def done(self) -> bool:
        return bool(self.phases) or self.tokens_per_s is not None


@dataclass(frozen=True)
class GpuRecord:
    date: str
    versions: dict[str, str]   # fitgpt, torch, cuda, driver, python
    gpu: RecordedGpu
    runs: tuple[GpuRun, ...] = ()

    @property
    def torch(self) -> str:
        """Major and minor version."""
        return ".".join(re.findall(r"\d+", self.versions["torch"])[:2])

    @property
    def outside_mib(self) -> int | None:
        """The most that a run used outside the allocator, rounded up."""
        known = [run.outside_bytes for run in self.runs if run.outside_bytes is not None]
        return -(-max(known) // MiB) if known else None

    @property
    def attention(self) -> str:
        """torch's choice in half precision."""
        return next((run.attention for run in self.runs
                     if run.attention and not run.kernel and run.config.get("dtype") != "float32"), "")

    @property
    def model(self) -> GpuModel | None:
        """Its row in the table of GPUs, as it is there; None: not in the table."""
        return gpus.match_device(self.gpu.name, self.gpu.driver_mib)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, "what": "a record of a GPU by fitgpt record", **asdict(self)},
                          separators=(",", ":"), default=str) + "\n"

    def apply(self, model: GpuModel | None, source: str) -> GpuModel:
        """The row with the figures of this record. `source`: of memory sizes. Without a row, one of this record."""
        gpu = self.gpu
        if model is None:
            name = re.sub(r"^NVIDIA (GeForce )?", "", gpu.name)
            capability = float(gpu.cc)
            model = GpuModel(name, "nvidia", gpu.cc, round(gpu.driver_mib / 1024), gpu.driver_mib, source, None, "",
                             None, "", gpu.sms, gpu.boost_mhz or None, gpu.copy_gbs or None,
                             gpu.matmul_tflops or None, source, capability >= 8.0, "rates as measured, not by a spec "
                             "sheet")
        outside = self.outside_mib
        return replace(model, usable_mib=gpu.usable_bytes // MiB, usable_src=source,
                       outside_mib=outside or model.outside_mib, outside_src=source if outside else model.outside_src,
                       sms=gpu.sms, recorded=f"{self.date}, torch {self.torch}",
                       workspace_kib=gpu.workspace_bytes // KiB or None, attention=self.attention,
                       l2_mib=round(gpu.l2_bytes / MiB) or None, matmul_tflops=gpu.matmul_tflops or None,
                       copy_gbs=gpu.copy_gbs or None)


def parse(text: str, name: str = "The record") -> GpuRecord:
    """The text of a file → the record; DataError for anything that `fitgpt record` does not write."""
    if len(text.encode()) > MOST_BYTES:
        raise DataError(f"{name} is larger than the {MOST_BYTES:,} bytes of a record.")
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise DataError(f"{name} has schema {document['schema']!r}; this version of fitgpt reads {SCHEMA}.",
                            "fitgpt record writes a new one")
        _check_plain(document)
        record = GpuRecord(str(document["date"]), dict(document["versions"]), RecordedGpu(**document["gpu"]),
                           tuple(GpuRun(**run) for run in document["runs"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{name} is not a record of a GPU: {type(error).__name__} {error}.",
                        "fitgpt record -o my-gpu.json writes one") from None
    gpu = record.gpu
    numbers = (gpu.sms, gpu.threads, gpu.driver_mib, gpu.usable_bytes)
    if not (gpu.name and re.fullmatch(r"\d{1,2}\.\d", gpu.cc) and "torch" in record.versions
            and all(isinstance(number, int) and number > 0 for number in numbers)):
        raise DataError(f"{name} does not describe a GPU.", "fitgpt record -o my-gpu.json writes one")
    return record


def _check_plain(value: object) -> None:
    """ValueError for text that is no name or version, and for numbers that are not finite."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_plain(name)
            _check_plain(each)
    elif isinstance(value, list):
        for each in value:
            _check_plain(each)
    elif isinstance(value, str) and not _TEXT.fullmatch(value):
        raise ValueError(f"the text {value[:40]!r} is not one that a record has")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")


# ---- the records of this machine's GPUs


def _folder() -> Path:
    return data_home() / "gpus"


def keep(record: GpuRecord) -> Path | None:
    """Keeps a record for the plans of this user; None if the folder cannot be written."""
    path = _folder() / (re.sub(r"\W+", "-", record.gpu.name).strip("-").lower() + ".json")
    with suppress(SystemFault, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, record.to_json())
        return path
    return None


def own_records() -> list[GpuRecord]:
    """Those in the store. A file that cannot be read is skipped: the store is never a reason for a plan to fail."""
    found = []
    with suppress(OSError):
        for path in sorted(_folder().glob("*.json")):
            with suppress(OSError, DataError, UnicodeDecodeError):
                found.append(parse(path.read_text(encoding="utf-8")))
    return found


def with_own_record(model: GpuModel) -> GpuModel:
    """The GPU with the figures of this machine's record of that model, if there is one."""
    for record in own_records():
        if record.model == model:
            return record.apply(model, OWN)
    return model


def find(device_name: str, total_mib: int | None) -> GpuModel | None:
    """The model of a device in this machine, with the figures of its own record; None if nothing is known of it."""
    model = gpus.match_device(device_name, total_mib)
    if model is not None:
        return with_own_record(model)
    return next((record.apply(None, OWN) for record in own_records() if record.gpu.name == device_name), None)
