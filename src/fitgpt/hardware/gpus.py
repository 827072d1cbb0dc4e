"""GPU models: the figures of each, and which one a name means. Figures and sources: gpus.csv."""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..core.errors import UsageError


@dataclass(frozen=True)
class GpuModel:
    """A GPU model. None: not known. `_src` is the source of a figure: seen, vendor, formula, recalled."""

    name: str
    vendor: str
    cc: str                      # compute capability "8.9"; AMD's "gfx1100", Apple's "mps"
    memory_gb: int | None        # as advertised
    driver_mib: int | None       # as nvidia-smi shows it
    driver_src: str
    usable_mib: int | None       # total as CUDA reports it on Linux
    usable_src: str
    outside_mib: int | None      # of a training process outside PyTorch's allocator
    outside_src: str
    sms: int | None              # multiprocessors
    boost_mhz: int | None
    bandwidth_gbs: float | None
    tflops: float | None         # dense, half precision, float32 accumulation
    tflops_src: str
    bf16: bool | None
    note: str
    # Of a record (`fitgpt record`), and only of one.
    recorded: str = ""                 # its date and torch version: "2026-11-18, torch 2.11"
    workspace_kib: int | None = None   # of cuBLAS
    attention: str = ""                # torch's choice in half precision for heads of at most 128 elements
    l2_mib: int | None = None          # L2 cache
    matmul_tflops: float | None = None # half precision, measured
    copy_gbs: float | None = None      # bytes read and written by a copy, measured

    @property
    def recorded_torch(self) -> str:
        """"2.11": the version that the recorded workspace and attention kernel hold for."""
        return self.recorded.rpartition("torch ")[2]

    @property
    def capability(self) -> tuple[int, int] | None:
        major, point, minor = self.cc.partition(".")
        return (int(major), int(minor)) if point else None

    @property
    def is_geforce(self) -> bool:
        """Whether a desktop usually runs on it."""
        return re.match(r"GTX|TITAN|RTX [2-5]0[5-9]0\b", self.name) is not None

    @property
    def has_matrix_units(self) -> bool:
        """Whether it has tensor cores; without, `tflops` is the float32 rate."""
        if self.name.startswith("GTX"):  # those of Turing have none, either
            return False
        return self.vendor == "amd" or (self.capability is not None and self.capability >= (7, 0))

    @property
    def shares_memory(self) -> bool:
        """Whether its memory is the system's: Jetson Orin and Thor, GB10, Apple."""
        return self.vendor == "apple" or self.capability in ((8, 7), (11, 0), (12, 1))


def usable_by_rule(driver_mib: int) -> int:
    """CUDA's total from nvidia-smi's: a line through pairs seen on Linux, from 6 to 80 GB, within 120 MiB of each.
    For a GPU that is not installed; of an installed one the driver gives the difference (GpuReading.reserved_bytes)."""
    return driver_mib - 260 - round(0.0075 * driver_mib)


def outside_by_rule(sms: int) -> int:
    """Memory outside the allocator: a line through out-of-memory messages from 24 to 170 multiprocessors, within about
    110 MiB of each. The CUDA context and kernels need more with every multiprocessor."""
    return 40 + round(3.4 * sms)


@cache
def load() -> tuple[GpuModel, ...]:
    """Every model, in the order of the table."""
    text = Path(__file__).with_name("gpus.csv").read_text(encoding="utf-8")
    rows = (line for line in text.splitlines() if not line.startswith("#"))
    return tuple(map(_model, csv.DictReader(rows, restval="")))


def _model(row: dict[str, str]) -> GpuModel:
    def whole(column: str) -> int | None:
        return int(row[column]) if row[column] else None

    def number(column: str) -> float | None:
        return float(row[column]) if row[column] else None

    driver_mib, sms = whole("driver_mib"), whole("sms")
    usable_mib, usable_src = whole("usable_mib"), row["usable_src"]
    if usable_mib is None and driver_mib is not None:
        usable_mib, usable_src = usable_by_rule(driver_mib), "formula"
    outside_mib, outside_src = whole("outside_mib"), row["outside_src"]
    if outside_mib is None and sms is not None:
        outside_mib, outside_src = outside_by_rule(sms), "formula"
    return GpuModel(
        name=row["name"], vendor=row["vendor"], cc=row["cc"], memory_gb=whole("memory_gb"),
        driver_mib=driver_mib, driver_src=row["driver_src"], usable_mib=usable_mib, usable_src=usable_src,
        outside_mib=outside_mib, outside_src=outside_src, sms=sms, boost_mhz=whole("boost_mhz"),
        bandwidth_gbs=number("bandwidth_gbs"), tflops=number("tflops"), tflops_src=row["tflops_src"],
        bf16={"yes": True, "no": False, "": None}[row["bf16"]], note=row["note"], recorded=row["recorded"],
        workspace_kib=whole("workspace_kib"), attention=row["attention"], l2_mib=whole("l2_mib"),
        matmul_tflops=number("matmul_tflops"), copy_gbs=number("copy_gbs"))


def find(name: str) -> GpuModel:
    """The model meant by "4070", "rtx-4070-ti-super", "A100-SXM4-80GB", "a100 40". Of several memory sizes the
    smallest, unless the name says which."""
    found = _models_named(name)
    if not found:
        raise _unknown(name)
    return min(found, key=lambda model: model.memory_gb or 0)


def other_matches(name: str) -> list[str]:
    """The other models that a name may mean, which `find` does not choose."""
    chosen = find(name)
    return [model.name for model in _models_named(name) if model != chosen]


def search(words: str) -> list[GpuModel]:
    """Every model with these words in its name; where there is none, those with words that begin like them."""
    wanted = _words(words)
    whole = [model for model in load() if all(word in _words(model.name) for word in wanted)]
    return whole or [model for model in load()
                     if all(any(known.startswith(word) for known in _words(model.name)) for word in wanted)]


def match_device(name: str, total_mib: int | None = None) -> GpuModel | None:
    """The model of a driver's device name and memory; None if it is not in the table."""
    found = _candidates(name)
    if total_mib is not None:
        found = [model for model in found
                 if model.driver_mib is None or abs(model.driver_mib - total_mib) <= _SAME_SIZE * model.driver_mib]
    return min(found, key=lambda model: model.memory_gb or 0) if found else None


def peak_flops(model: GpuModel | None, dtype: str) -> tuple[float | None, str]:
    """FLOP/s that MFU is measured against, and its source; None where there is no figure for the dtype."""
    if model is None:
        return None, "no figure for this device"
    if model.tflops is None:
        return None, f"no figure for the {model.name}"
    if dtype == "float32" and model.has_matrix_units:
        return None, f"no float32 figure for the {model.name}"
    rate = "dense half precision" if model.has_matrix_units else "float32"
    return model.tflops * 1e12, f"{model.name}, {model.tflops:g} TFLOP/s {rate} ({model.tflops_src})"


# ---- names. The key must agree; memory and form (SXM, PCIe) choose among models of one key.

_IGNORED = {"nvidia", "geforce", "tesla", "quadro", "amd", "radeon", "apple", "rtx", "gtx", "rx", "gpu", "graphics",
            "jetson", "dgx", "colab", "kaggle", "blackwell", "generation", "edition", "workstation", "server", "hbm2",
            "hbm2e"}
_FORMS = {"sxm": "sxm", "sxm2": "sxm", "sxm4": "sxm", "sxm5": "sxm", "hbm3": "sxm", "pcie": "pcie"}
_JOINED = re.compile(r"\b(rtx|gtx|rx)(?=\d)|(?<=\d{4})(?=ti|super|xt|laptop|mobile|[sm]\b)|(?<=ti)(?=super|s\b)")
_ABBREVIATIONS = {"s": "super", "m": "laptop", "mobile": "laptop",  # 4070S, 3060M, "4070 mobile"
                  "spark": "gb10"}  # "DGX Spark"
_MEMORY = re.compile(r"(\d+)gb\Z")
_BARE_SIZE = re.compile(r".*[ _-]\d{1,3}(?=[gG]?\Z)", re.DOTALL)
MAX_LISTED = 8
_SAME_SIZE = 0.12  # more than ECC (7 %) and CUDA's own share (5 %) take, less than 10 GB from 12 GB


class _Name(NamedTuple):
    key: frozenset[str]
    memory_gb: int | None
    form: str | None


@cache
def _words(name: str) -> tuple[str, ...]:
    words = re.findall(r"[a-z0-9]+", _JOINED.sub(r"\1 ", re.sub(r"(\d) +gb\b", r"\1gb", name.lower())))
    return tuple(_ABBREVIATIONS.get(word, word) for word in words)


@cache
def _parse(name: str) -> _Name:
    words = _words(name)
    sizes = [int(size[1]) for word in words if (size := _MEMORY.match(word))]
    forms = [_FORMS[word] for word in words if word in _FORMS]
    key = frozenset(word for word in words if word not in _IGNORED | _FORMS.keys() and not _MEMORY.match(word))
    return _Name(key, sizes[0] if sizes else None, forms[0] if forms else None)


def _models_named(name: str) -> list[GpuModel]:
    """A number at the end that is not part of a model's name is its memory."""
    return _candidates(name) or (_candidates(f"{size[0]}gb") if (size := _BARE_SIZE.match(name.strip())) else [])


def _candidates(name: str) -> list[GpuModel]:
    wanted = _parse(name)

    def agrees(model: GpuModel) -> bool:
        known = _parse(model.name)
        return (known.key == wanted.key
                and (wanted.memory_gb is None or model.memory_gb is None or wanted.memory_gb == model.memory_gb)
                and (wanted.form is None or known.form is None or wanted.form == known.form))

    return list(filter(agrees, load())) if wanted.key else []


def _unknown(name: str) -> UsageError:
    """Lists the models that the name may mean: those that contain it, or those with a similar spelling."""
    like = [model.name for model in search(name)] if _words(name) else []
    if like:
        left = len(like) - MAX_LISTED
        more = f"; fitgpt cards {' '.join(_words(name))} lists {left} more" if left > 0 else ""
        problem = f"is ambiguous: it may mean {len(like)} GPUs" if len(like) > 1 else "is not the full name of a GPU"
        return UsageError(f"{name!r} {problem}. One of: {', '.join(like[:MAX_LISTED])}{more}.", f"--gpu '{like[0]}'")
    by_words = {" ".join(sorted(_parse(model.name).key)): model.name for model in reversed(load())}
    close = difflib.get_close_matches(" ".join(sorted(_parse(name).key)), by_words, n=3, cutoff=0.6)
    near = [by_words[words] for words in close]
    nearest = f" The nearest: {', '.join(near)}." if near else f" `fitgpt cards` lists the {len(load())} it knows."
    return UsageError(f"{name!r} is not a GPU that fitgpt knows.{nearest}", f"--gpu '{(near or ['RTX 4070'])[0]}'")
