"""What is known of each GPU model, and which model a name means. The figures and their sources: gpus.csv."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..core.errors import UsageError


@dataclass(frozen=True)
class Card:
    """A model of GPU. None: not known. A `_src` says how a figure is known: seen, vendor, formula, recalled."""

    name: str
    vendor: str
    cc: str                      # compute capability "8.9"; AMD's "gfx1100", Apple's "mps"
    memory_gb: int | None        # as on the box
    driver_mib: int | None       # as nvidia-smi shows it
    driver_src: str
    usable_mib: int | None       # what CUDA gives on Linux
    usable_src: str
    outside_mib: int | None      # held by a training process outside PyTorch's allocator
    outside_src: str
    sms: int | None              # multiprocessors
    boost_mhz: int | None
    bandwidth_gbs: float | None
    tflops: float | None         # dense, half precision, float32 accumulation
    tflops_src: str
    bf16: bool | None
    note: str

    @property
    def capability(self) -> tuple[int, int] | None:
        major, point, minor = self.cc.partition(".")
        return (int(major), int(minor)) if point else None

    @property
    def has_matrix_units(self) -> bool:
        """Whether half precision has a rate of its own; `tflops` is the float32 rate where it has not."""
        return self.vendor == "amd" or (self.capability is not None and self.capability >= (7, 0))


def usable_by_rule(driver_mib: int) -> int:
    """A line through pairs of nvidia-smi total and CUDA total seen on Linux, from 6 to 80 GB, within 120 MiB of
    each. The driver knows the difference (driver.GpuReading.reserved_bytes); this is for a card that is not here."""
    return driver_mib - 260 - round(0.0075 * driver_mib)


def outside_by_rule(sms: int) -> int:
    """A line through out-of-memory messages from 24 to 170 multiprocessors, within about 110 MiB of each:
    what the driver and the kernels hold grows with their number."""
    return 40 + round(3.4 * sms)


@cache
def load() -> tuple[Card, ...]:
    """Every card we know, in the order of the table."""
    text = Path(__file__).with_name("gpus.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return tuple(_card(row) for row in rows)


def find(name: str) -> Card:
    """The card a person means by "4070", "rtx-4070-ti-super", "A100-SXM4-80GB", "a100 40". Of several sizes of one
    card, the smallest, unless the name says which."""
    found = _meant(name)
    if not found:
        raise _unknown(name)
    return min(found, key=lambda card: card.memory_gb or 0)


def twins(name: str) -> list[str]:
    """The other cards that a name may mean, which `find` does not choose."""
    chosen = find(name)
    return [card.name for card in _meant(name) if card != chosen]


def named_like(words: str) -> list[Card]:
    """Every card with these words in its name; where there is none, those with words that begin so."""
    asked = _words(words)
    whole = [card for card in load() if all(word in _words(card.name) for word in asked)]
    return whole or [card for card in load()
                     if all(any(known.startswith(word) for known in _words(card.name)) for word in asked)]


def match_device(name: str, total_mib: int | None = None) -> Card | None:
    """The card behind the name a driver gives, told from its twins by its memory; None if it is not in the table."""
    found = _candidates(name)
    if total_mib is not None:
        found = [card for card in found if card.driver_mib is None or _same_size(card.driver_mib, total_mib)]
    return min(found, key=lambda card: card.memory_gb or 0) if found else None


def peak_flops(card: Card | None, dtype: str) -> tuple[float | None, str]:
    """The FLOP/s that MFU is measured against, and whose figure it is; None where no figure fits the dtype."""
    if card is None:
        return None, "no figure for this device"
    if card.tflops is None:
        return None, f"no figure for the {card.name}"
    if dtype == "float32" and card.has_matrix_units:
        return None, f"no float32 figure for the {card.name}"
    rate = "dense half precision" if card.has_matrix_units else "float32"
    return card.tflops * 1e12, f"{card.name}, {card.tflops:g} TFLOP/s {rate} ({card.tflops_src})"


# Names. A card's key is what must agree; memory and form (SXM, PCIe) only choose among cards of one key.

_NOISE = {"nvidia", "geforce", "tesla", "quadro", "amd", "radeon", "apple", "rtx", "gtx", "rx", "gpu", "graphics",
          "blackwell", "generation", "edition", "workstation", "server", "hbm2", "hbm2e"}
_FORMS = {"sxm": "sxm", "sxm2": "sxm", "sxm4": "sxm", "sxm5": "sxm", "hbm3": "sxm", "pcie": "pcie"}
_GLUED = re.compile(r"\b(rtx|gtx|rx)(?=\d)|(?<=\d{4})(?=ti|super|xt|laptop|mobile|[sm]\b)|(?<=ti)(?=super|s\b)")
_SPELLED_OUT = {"s": "super", "m": "laptop", "mobile": "laptop"}  # 4070S, 3060M, "4070 mobile"
_MEMORY = re.compile(r"(\d+)gb\Z")
_BARE_SIZE = re.compile(r".*[ _-]\d{1,3}(?=[gG]?\Z)", re.DOTALL)
MOST_NAMED = 8
_SAME_SIZE = 0.12  # above what ECC takes (7 %) and CUDA's own share (5 %), below 10 against 12 GB


class _Name(NamedTuple):
    key: frozenset[str]
    memory_gb: int | None
    form: str | None


@cache
def _words(name: str) -> tuple[str, ...]:
    words = re.findall(r"[a-z0-9]+", _GLUED.sub(r"\1 ", re.sub(r"(\d) +gb\b", r"\1gb", name.lower())))
    return tuple(_SPELLED_OUT.get(word, word) for word in words)


@cache
def _parse(name: str) -> _Name:
    words = _words(name)
    sizes = [int(size[1]) for word in words if (size := _MEMORY.match(word))]
    forms = [_FORMS[word] for word in words if word in _FORMS]
    key = frozenset(word for word in words if word not in _NOISE | _FORMS.keys() and not _MEMORY.match(word))
    return _Name(key, sizes[0] if sizes else None, forms[0] if forms else None)


def _meant(name: str) -> list[Card]:
    """A number at the end that is no part of a card's name is its memory."""
    return _candidates(name) or (_candidates(f"{size[0]}gb") if (size := _BARE_SIZE.match(name.strip())) else [])


def _candidates(name: str) -> list[Card]:
    asked = _parse(name)
    return [card for card in load() if _agrees(asked, card)] if asked.key else []


def _agrees(asked: _Name, card: Card) -> bool:
    known = _parse(card.name)
    return (known.key == asked.key
            and (asked.memory_gb is None or card.memory_gb is None or asked.memory_gb == card.memory_gb)
            and (asked.form is None or known.form is None or asked.form == known.form))


def _same_size(driver_mib: int, total_mib: int) -> bool:
    return abs(driver_mib - total_mib) <= _SAME_SIZE * driver_mib


def _unknown(name: str) -> UsageError:
    """With the cards that the name may mean: those it is a part of, or those that are spelled nearly so."""
    like = [card.name for card in named_like(name)] if _words(name) else []
    if like:
        left = len(like) - MOST_NAMED
        more = f"; fitgpt cards {' '.join(_words(name))} lists {left} more" if left > 0 else ""
        return UsageError(f"{name!r} does not say which card: {len(like)} may be meant." if len(like) > 1
                          else f"{name!r} is not the whole name of a card.",
                          f"One of: {', '.join(like[:MOST_NAMED])}{more}.")
    near = _nearest(name)
    return UsageError(f"{name!r} is not a card fitgpt knows.", f"The nearest it knows: {', '.join(near)}." if near
                      else f"fitgpt cards lists the {len(load())} it knows, such as RTX 4070.")


def _nearest(name: str) -> list[str]:
    import difflib

    by_words = {" ".join(sorted(_parse(card.name).key)): card.name for card in reversed(load())}
    close = difflib.get_close_matches(" ".join(sorted(_parse(name).key)), by_words, n=3, cutoff=0.6)
    return [by_words[words] for words in close]


# The table's cells.

def _card(row: dict[str, str]) -> Card:
    driver_mib, sms = _whole(row["driver_mib"]), _whole(row["sms"])
    usable_mib, usable_src = _whole(row["usable_mib"]), row["usable_src"]
    if usable_mib is None and driver_mib is not None:
        usable_mib, usable_src = usable_by_rule(driver_mib), "formula"
    outside_mib, outside_src = _whole(row["outside_mib"]), row["outside_src"]
    if outside_mib is None and sms is not None:
        outside_mib, outside_src = outside_by_rule(sms), "formula"
    return Card(
        name=row["name"], vendor=row["vendor"], cc=row["cc"], memory_gb=_whole(row["memory_gb"]),
        driver_mib=driver_mib, driver_src=row["driver_src"], usable_mib=usable_mib, usable_src=usable_src,
        outside_mib=outside_mib, outside_src=outside_src, sms=sms, boost_mhz=_whole(row["boost_mhz"]),
        bandwidth_gbs=_number(row["bandwidth_gbs"]), tflops=_number(row["tflops"]), tflops_src=row["tflops_src"],
        bf16={"yes": True, "no": False, "": None}[row["bf16"]], note=row["note"],
    )


def _whole(cell: str) -> int | None:
    return int(cell) if cell else None


def _number(cell: str) -> float | None:
    return float(cell) if cell else None
