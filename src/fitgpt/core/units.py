"""Parse and format byte sizes, counts and durations. GiB is 2**30; it is used only here and in show/."""

from __future__ import annotations

import codecs
import re
import unicodedata

from .errors import UsageError

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
LARGEST = 10**100  # of a size or a count that is parsed

_BYTE_UNITS = {"": 1, "b": 1, "k": KiB, "kb": 10**3, "kib": KiB, "m": MiB, "mb": 10**6, "mib": MiB,
               "g": GiB, "gb": 10**9, "gib": GiB, "t": TiB, "tb": 10**12, "tib": TiB}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
# 2,118 and 1_000: a group of three digits after a comma are thousands. 6,5: one or two digits are decimals.
_NUMBER = (r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+,[0-9]{1,2}"
           r"|[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?|\.[0-9]+")
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*\Z")
_ARABIC_SEPARATORS = {"٫": ".", "٬": ","}


def ascii_digits(text: str) -> str:
    """The text with full-width, Arabic-Indic, Devanagari and other decimal digits written as 0 to 9."""
    return "".join(_ARABIC_SEPARATORS.get(sign, str(unicodedata.decimal(sign, sign)))
                   for sign in unicodedata.normalize("NFKC", text))


def parse_bytes(text: str, unit: str = "") -> int:
    """'11.5GiB', '2118 MiB', '6,5 GB', '8G' (= GiB) or plain bytes. '8' and '2118' are not bytes: they have the given
    unit, and without one they are an error."""
    nbytes = _parse(text, _BYTE_UNITS, "a size such as 11.5GiB or 2118MiB")
    if 0 < nbytes < MiB and text.strip()[-1].isdigit():
        if unit:
            return parse_bytes(f"{text.strip()}{unit}")
        likely = "GiB" if nbytes < 512 else "MiB"
        raise UsageError(f"{text!r} is a size without a unit.", f"{text.strip()}{likely}, for instance.")
    return nbytes


def optional_bytes(text: str, unit: str = "") -> int | None:
    """Bytes of an option that may be empty."""
    return parse_bytes(text, unit) if text else None


def parse_count(text: str) -> int:
    """'10B', '500M', '1_000_000' or a plain whole number."""
    return _parse(text, _COUNT_UNITS, "a count such as 10B, 500M or 20000")


def _parse(text: str, units: dict[str, int], wanted: str) -> int:
    match = _QUANTITY.match(ascii_digits(text))
    unit = units.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{text!r} is not {wanted}.")
    decimal_comma = re.fullmatch(r"[0-9]+,[0-9]{1,2}", match[1])
    number = float(match[1].replace("_", "").replace(",", "." if decimal_comma else "")) * unit
    if number > LARGEST:
        raise UsageError(f"{text!r:.60} is not {wanted}.")
    return round(number)


def show_bytes(nbytes: int) -> str:
    """The unit that leaves one to four digits before the point: 512 B, 33.5 MiB, 11.46 GiB."""
    for unit, name in ((2**60, "EiB"), (2**50, "PiB"), (TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}" if unit >= GiB else f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def show_count(count: float) -> str:
    """123.59M, 10.0B, 412."""
    for unit, name, digits in ((10**12, "T", 2), (10**9, "B", 2), (10**6, "M", 2), (10**3, "k", 1)):
        if abs(count) >= unit:
            return f"{count / unit:.{digits}f}{name}"
    return f"{count:g}"


def show_steps(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps:,} steps"


def show_seconds(seconds: float) -> str:
    """0.4 s, 59 s, 3 min 20 s, 7 h 05 min, 3 d 4 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h" if whole < 100 * 86400 else f"{whole // 86400:,} d"


def with_article(name: str) -> str:
    """Before letters that are spelled out: an RTX 4070, an A100, a GTX 1080, a T4."""
    return f"{'an' if name[0] in 'AEFHILMNORSX' else 'a'} {name}"


# ---- signs, for terminals that have only ASCII

NEAREST_SIGNS = "fitgpt"  # as `errors=` of a stream or of str.encode
_PLAIN = {"×": "x", "·": ".", "←": "<-", "→": "->", "±": "+/-", "−": "-", "–": "-", "—": "-", "…": "...",
          "≤": "<=", "≥": ">=", "│": "|", "┤": "|", "└": "+", "─": "-", "●": "*", "○": "o", "✓": "ok"}


def _nearest_signs(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    signs = (_PLAIN.get(sign, sign.encode("ascii", "backslashreplace").decode())
             for sign in error.object[error.start:error.end])
    return "".join(signs), error.end


codecs.register_error(NEAREST_SIGNS, _nearest_signs)
