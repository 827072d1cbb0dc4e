"""One mechanism for every verb's options: a frozen dataclass of knobs, each declared once.

From the declaration come the flags, the config-file keys, the checks, `--help` and the tables in the docs.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_type_hints

from ..core.errors import UsageError
from .config_file import read_config

Rule = Callable[[Any], str | None]  # a value → what it must be, or None where it is

_LARGEST_INT = 2**63 - 1
_KINDS: dict[Any, str] = {
    int: "int", float: "float", bool: "bool", str: "text", tuple[str, ...]: "texts",
    bool | Literal["auto"]: "auto",
}
_WANTED = {"int": "a whole number, such as 8", "float": "a finite number, such as 0.1", "bool": "True or False",
           "auto": "True, False or auto", "text": "text", "texts": "text"}
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_INT = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_EXACT = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?[eE]\+?[0-9]{1,3}")  # 1e6, 2.5e3


class Assignment(NamedTuple):
    """One thing the user said: a flag, or a line of a config file."""

    key: str
    value: Any
    source: str  # "--batch_size=8", "config/x.py:12"


class Knob(NamedTuple):
    name: str
    kind: str
    default: Any
    help: str
    group: str
    rule: Rule | None
    choices: tuple[str, ...]
    short: str                     # "o" for -o
    positional: bool
    required: bool
    switches: Mapping[str, str]    # {"resume": "resume"}: a bare --resume gives the knob this value
    also: tuple[str, ...]          # what others call it: never accepted, only recognised in a hint


def knob(default: Any, help: str, *, group: str = "options", rule: Rule | None = None,
         choices: Iterable[str] = (), short: str = "", positional: bool = False, required: bool = False,
         switches: Mapping[str, str] | None = None, also: Iterable[str] = ()) -> Any:
    """A dataclass field that carries everything its flag needs."""
    told = dict(help=help, group=group, rule=rule, choices=tuple(choices), short=short, positional=positional,
                required=required, switches=dict(switches or {}), also=tuple(also))
    return dataclasses.field(default=default, metadata=told)


class Options:
    """Base of every options class: an instance that exists has passed every knob's check."""

    verb: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in knobs_of(type(self)).values():
            value = getattr(self, each.name)
            object.__setattr__(self, each.name, checked(each, value, f"{each.name}={shown(value)}"))


AnyOptions = TypeVar("AnyOptions", bound=Options)


_known: dict[type[Options], dict[str, Knob]] = {}


def knobs_of(cls: type[Options]) -> dict[str, Knob]:
    if cls not in _known:
        hints = get_type_hints(cls)
        _known[cls] = {f.name: Knob(name=f.name, kind=_KINDS[hints[f.name]], default=f.default, **f.metadata)
                       for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # all are dataclasses
    return _known[cls]


def build(cls: type[AnyOptions], assignments: Iterable[Assignment]) -> AnyOptions:
    """The options that the assignments, in order, amount to."""
    values = {each.key: each.value for each in assignments}
    for each in knobs_of(cls).values():
        if each.required and values.get(each.name, each.default) == each.default:
            flag = f"-{each.short}" if each.short else f"--{each.name}"
            name = each.name.upper() if each.positional else f"{flag} {each.name.upper()}"
            raise UsageError(f"`fitgpt {cls.verb}` needs {name}: {each.help}.", f"fitgpt {cls.verb} --help")
    return cls(**values)


# ---- values and rules


def parse_value(cls: type[Options], key: str, text: str, where: str = "") -> Any:
    """A flag's text as the knob's type, checked by its rule."""
    one = knobs_of(cls)[key]
    where = where or f"--{key}={text}"
    value: Any = text
    if one.kind == "int":
        if _INT.fullmatch(text) and len(text) < 40:
            value = int(text)
        elif _EXACT.fullmatch(text):
            value = float(text)
    elif one.kind == "float":
        try:
            value = float(text)
        except ValueError:
            value = text
    elif one.kind in ("bool", "auto"):
        value = _BOOLS.get(text.lower(), text.lower())
    elif one.kind == "text":
        value = _unquoted(text)
    return checked(one, value, where)


def _unquoted(text: str) -> str:
    """nanoGPT takes flags as Python literals where it can, so '"\\n"' means a line break there, and here."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        try:
            literal = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
        return literal if isinstance(literal, str) else text
    return text


def checked(one: Knob, value: Any, where: str) -> Any:
    """The value in the knob's own type, or a UsageError that names where it came from."""
    fits, value = _converted(one.kind, value)
    fix = f"--{one.name}={shown(one.default)} is the default." if not one.required else ""
    if not fits:
        wanted = f"one of {', '.join(one.choices)}" if one.choices else _WANTED[one.kind]
        raise UsageError(f"{where}: {one.name} takes {wanted}.", fix)
    if one.choices and value not in one.choices:
        near = nearest(str(value), one.choices, cutoff=0.5)
        raise UsageError(f"{where}: {one.name} is one of {', '.join(one.choices)}.",
                         f"Did you mean --{one.name}={near[0]}?" if near else fix)
    problem = one.rule(value) if one.rule else None
    if problem:
        raise UsageError(f"{where}: {one.name} {problem}.", fix)
    return value


def _converted(kind: str, value: Any) -> tuple[bool, Any]:
    """Whether a value is of a kind, and the value as that kind. NaN and infinity are of none."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in ("int", "float") and not (number and -1e300 < value < 1e300):
        return False, value
    if kind == "int":
        whole = value == int(value) and abs(value) <= (_LARGEST_INT if isinstance(value, int) else 2**53)
        return whole, int(value) if whole else value
    if kind == "float":
        return True, float(value)
    if kind == "texts":
        return isinstance(value, tuple | list) and all(isinstance(v, str) for v in value), value
    if kind == "text":
        return isinstance(value, str), value
    if kind == "auto" and value == "auto":
        return True, value
    return isinstance(value, bool) or (number and value in (0, 1)), bool(value)


def shown(value: Any) -> str:
    """A value as one would type it after `--knob=`."""
    plain = isinstance(value, str) and re.fullmatch(r"[\w./:@+-]+", value)
    return str(value) if plain or isinstance(value, bool | int | float) else repr(value)


def positive(value: float) -> str | None:
    return None if value > 0 else "must be above 0"


def non_negative(value: float) -> str | None:
    return None if value >= 0 else "must not be below 0"


def fraction(value: float) -> str | None:
    return None if 0 <= value < 1 else "must be at least 0 and below 1"


def between(low: float, high: float) -> Rule:
    def rule(value: float) -> str | None:
        if value < low:
            return f"must be at least {low:,}"
        return f"must be at most {high:,}" if value > high else None

    return rule


def not_empty(value: str) -> str | None:
    return None if value.strip() else "must not be empty"


def path_like(value: str) -> str | None:
    """The limits are those of Linux file systems; what is on the disk is checked where it is used."""
    if not value.strip():
        return "must not be empty"
    if not value.isprintable():
        return "holds a character that no path should: a line break, a control character or a broken byte"
    if len(value.encode()) > 4095 or any(len(part.encode()) > 255 for part in re.split(r"[\\/]", value)):
        return "is too long for a path: 255 bytes a name, 4095 in all"
    return None


def plain_name(value: str) -> str | None:
    """A name that is one folder on every system, and never leaves the folder it is made in."""
    reserved = re.fullmatch(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", value)
    if reserved or not value.isprintable() or value[-1:] in (".", " ") or re.search(r'[\\/:*?"<>|]', value):
        return "must be a plain name: no slashes, no control characters, no name Windows keeps, no dot at the end"
    return None if len(value.encode()) <= 100 else "must be at most 100 bytes long"


# ---- argv

Elsewhere = Callable[[], Iterable[type[Options]]]


def walk(argv: Sequence[str], cls: type[Options], *, config_files: bool = True, borrowed: Iterable[str] = (),
         elsewhere: Elsewhere = tuple) -> list[Assignment]:
    """What argv says, in order; a later assignment wins. Config files are read where they stand in argv.

    `borrowed`: keys a config file may set for another verb's sake. `elsewhere`: the other verbs' classes, asked
    for only when a hint is needed.
    """
    found: list[Assignment] = []
    rest = list(argv)
    literal = False
    while rest:
        token = rest.pop(0)
        if token == "--" and not literal:
            literal = True
        elif token.startswith("-") and token != "-" and not literal:
            found.append(_flag(token, rest, cls, elsewhere, found))
        elif config_files and (token.endswith(".py") or not _positional(cls)):
            found += _from_file(token, cls, borrowed, elsewhere, found)
        else:
            found.append(_bare(token, cls, found))
    return found


def _flag(token: str, rest: list[str], cls: type[Options], elsewhere: Elsewhere,
          found: list[Assignment]) -> Assignment:
    knobs = knobs_of(cls)
    typed, equals, text = token.partition("=")
    name = typed[2:].replace("-", "_")
    if not typed.startswith("--"):  # -o FOLDER, -oFOLDER, -o=FOLDER
        typed, attached = token[:2], token[2:].removeprefix("=")
        name = next((each.name for each in knobs.values() if each.short == typed[1:]), "")
        equals, text = ("=" if len(token) > 2 else ""), attached
    if not name:  # --=8, -x, or -batch_size=8 with one dash
        long = token.partition("=")[0].lstrip("-").replace("-", "_")
        if long in knobs:
            raise UsageError(f"{token!r} has one dash, and a knob's name takes two.", f"-{token}")
        raise _unknown(repr(token), long, cls, elsewhere, "--")
    for each in knobs.values():
        if name in each.switches:
            if equals:
                raise UsageError(f"{token}: {typed} takes no value.", f"Write {typed}, or --{each.name}=…")
            return Assignment(each.name, each.switches[name], typed)
    if name.startswith("no_") and name[3:] in knobs and knobs[name[3:]].kind in ("bool", "auto"):
        if equals:
            raise UsageError(f"{token}: {typed} takes no value.", f"Write {typed}, or --{name[3:]}={text}.")
        return Assignment(name[3:], False, typed)
    if name not in knobs:
        raise _unknown(typed, name, cls, elsewhere, "--")
    one = knobs[name]
    where = token
    if not equals:
        following = rest[0] if rest else None
        if one.kind in ("bool", "auto"):
            if following is None or following.lower() not in {*_BOOLS, "auto"}:
                return Assignment(name, True, typed)
        elif following is None or re.match(r"--?[A-Za-z_]|--$", following):
            and_then = "" if following is None else f"; {following!r} looks like the next flag"
            dash = f" A value that begins with a dash is written {typed}=-x." if one.kind == "text" else ""
            raise UsageError(f"{typed} needs a value{and_then}: {one.help}.",
                             f"{typed}={shown(one.default)} is the default.{dash}")
        text = rest.pop(0)
        where = f"{typed} {text}"
    if one.kind == "texts":
        return Assignment(name, (*_last(found, name, ()), text), where)
    return Assignment(name, parse_value(cls, name, text, where), where)


def _from_file(path: str, cls: type[Options], borrowed: Iterable[str], elsewhere: Elsewhere,
               found: list[Assignment]) -> list[Assignment]:
    knobs = knobs_of(cls)
    key = path.partition("=")[0].replace("-", "_")
    if "=" in path and key in knobs:
        raise UsageError(f"{path!r} looks like a flag without its dashes.", f"--{path}")
    scope = {each.name: each.default for each in knobs.values()} | {each.key: each.value for each in found}
    file = read_config(path, scope)
    settings: list[Assignment] = []
    for name, value, line in ((s.name, s.value, s.line) for s in file.settings):
        if name in knobs:
            where = f"{path}:{line}"
            settings.append(Assignment(name, checked(knobs[name], value, f"{where}: {name} = {value!r}"), where))
        elif name not in file.helpers and name not in borrowed:
            raise _unknown(f"{path}:{line}: {name}", name, cls, elsewhere, "")
    return settings


def _bare(token: str, cls: type[Options], found: list[Assignment]) -> Assignment:
    one = _positional(cls)
    if one is None:
        raise UsageError(f"`fitgpt {cls.verb}` takes only flags, and {token!r} is none.",
                         f"fitgpt {cls.verb} --help lists them all.")
    if one.kind == "texts":
        return Assignment(one.name, (*_last(found, one.name, ()), token), token)
    before = next((each.value for each in found if each.key == one.name and each.source == each.value), None)
    if before is not None:
        raise UsageError(f"`fitgpt {cls.verb}` takes one {one.name}, and got {before!r} and {token!r}.")
    return Assignment(one.name, checked(one, token, token), token)


def _positional(cls: type[Options]) -> Knob | None:
    return next((each for each in knobs_of(cls).values() if each.positional), None)


def _last(found: list[Assignment], key: str, otherwise: Any) -> Any:
    return next((each.value for each in reversed(found) if each.key == key), otherwise)


def _unknown(typed: str, name: str, cls: type[Options], elsewhere: Elsewhere,
             dashes: str) -> UsageError:
    """Which knob was meant: one known by another name, one of another verb, or the nearest in spelling."""
    what = f"{typed} is not a knob of `fitgpt {cls.verb}`."
    knobs = knobs_of(cls).values()
    meant = [each.name for each in knobs if name.lower() in each.also]
    words = [word for each in knobs for word in (each.name, *each.switches)]
    words += [f"no_{each.name}" for each in knobs if each.kind in ("bool", "auto") and dashes]
    near = meant or nearest(name, words)
    owner = next((other for other in elsewhere() if name in knobs_of(other)), None)
    if owner is not None and not meant:
        return UsageError(what, f"It is one of `fitgpt {owner.verb}`.")
    if near:
        return UsageError(what, f"Did you mean {' or '.join(dashes + each for each in near)}?")
    return UsageError(what, f"fitgpt {cls.verb} --help lists them all.")


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> list[str]:
    import difflib

    return difflib.get_close_matches(name.lower(), list(candidates), n=2, cutoff=cutoff)
