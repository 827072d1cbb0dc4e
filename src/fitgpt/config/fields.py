"""Options of a command: a frozen dataclass whose fields are declared by `option`, each option once.

From the declaration come the flags, the config-file keys, the checks, `--help`, the tables in the docs, and every list
of options with a property in common (`options_with`).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_type_hints

from ..core.errors import UsageError

Rule = Callable[[Any], str | None]  # takes a value; returns what is wrong with it ("must be above 0"), or None

_LARGEST_INT = 2**63 - 1
_KINDS: dict[Any, str] = {
    int: "int", float: "float", bool: "bool", str: "text", tuple[str, ...]: "texts",
    bool | Literal["auto"]: "auto",
}
_WANTED = {"int": "a whole number, such as 8", "float": "a finite number, such as 0.1", "bool": "True or False",
           "auto": "True, False or auto", "text": "text", "texts": "text"}
BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_INT = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_EXACT = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?[eE]\+?[0-9]{1,3}")  # 1e6, 2.5e3


# ---- declaring options


class Assignment(NamedTuple):
    """One value given by the user: by a flag, or by a line of a config file."""

    key: str
    value: Any
    source: str  # "--batch_size=8", "config/x.py:12"


class OptionSpec(NamedTuple):
    """One option, as declared by `option`."""

    name: str
    kind: str                      # "int", "float", "bool", "auto" (True, False or auto), "text", "texts"
    default: Any
    help: str
    group: str                     # heading in --help
    rule: Rule | None
    choices: tuple[str, ...]
    short: str                     # "o" for -o
    positional: bool
    required: bool
    switches: Mapping[str, str]    # {"resume": "resume"}: --resume without a value means --init_from=resume
    synonyms: tuple[str, ...]      # names in other programs: not accepted, but recognised in "Did you mean"
    renamed: Mapping[str, str]     # values of earlier versions, each with its name today
    # Facts about an option of a run. `options_with` lists the options that have one.
    affects_memory: bool           # changes how much GPU memory a run allocates
    affects_speed: bool            # changes the tokens per second of training
    fixed_by_plan: bool            # `train --plan` refuses another value than the plan's
    fallback: bool                 # a fallback plan (after out of memory) may change it
    frozen_on_resume: bool         # a resumed run cannot change it
    nanogpt: bool                  # nanoGPT's train.py has it
    page: str                      # group of the web page that shows it: "size", "less", "more"; "": not shown


def option(default: Any, help: str, *, group: str = "options", rule: Rule | None = None,
           choices: Iterable[str] = (), short: str = "", positional: bool = False, required: bool = False,
           switches: Mapping[str, str] | None = None, synonyms: Iterable[str] = (),
           renamed: Mapping[str, str] | None = None, affects_memory: bool = False, affects_speed: bool = False,
           fixed_by_plan: bool | None = None, fallback: bool = False, frozen_on_resume: bool = False,
           nanogpt: bool = True, page: str = "") -> Any:
    """A dataclass field that declares an option; see OptionSpec. A plan fixes what affects memory, by default."""
    metadata = dict(help=help, group=group, rule=rule, choices=tuple(choices), short=short, positional=positional,
                    required=required, switches=dict(switches or {}), synonyms=tuple(synonyms),
                    renamed=dict(renamed or {}), affects_memory=affects_memory, affects_speed=affects_speed,
                    fixed_by_plan=affects_memory if fixed_by_plan is None else fixed_by_plan, fallback=fallback,
                    frozen_on_resume=frozen_on_resume, nanogpt=nanogpt, page=page)
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """Base of every options class: an instance that exists has passed the check of every option."""

    command: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in option_specs(type(self)).values():
            value = getattr(self, each.name)
            object.__setattr__(self, each.name, checked(each, value, f"{each.name}={shown(value)}"))


AnyOptions = TypeVar("AnyOptions", bound=Options)


_specs: dict[type[Options], dict[str, OptionSpec]] = {}


def option_specs(cls: type[Options]) -> dict[str, OptionSpec]:
    """The options of a class by name, in the order of declaration."""
    if cls not in _specs:
        hints = get_type_hints(cls)
        _specs[cls] = {f.name: OptionSpec(name=f.name, kind=_KINDS[hints[f.name]], default=f.default, **f.metadata)
                       for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # all are dataclasses
    return _specs[cls]


def options_with(cls: type[Options], **facts: Any) -> tuple[str, ...]:
    """Names of the options that have these facts, such as nanogpt=False, in the order of declaration."""
    return tuple(name for name, spec in option_specs(cls).items()
                 if all(getattr(spec, fact) == value for fact, value in facts.items()))


def build(cls: type[AnyOptions], assignments: Iterable[Assignment]) -> AnyOptions:
    """Options from assignments; a later assignment to the same option wins."""
    values = {each.key: each.value for each in assignments}
    for each in option_specs(cls).values():
        if each.required and values.get(each.name, each.default) == each.default:
            flag = f"-{each.short}" if each.short else f"--{each.name}"
            name = each.name.upper() if each.positional else f"{flag} {each.name.upper()}"
            raise UsageError(f"`fitgpt {cls.command}` needs {name}: {each.help}.", f"fitgpt {cls.command} --help")
    return cls(**values)


# ---- requirements between options


class Requires(NamedTuple):
    """Part of the declaration of a setting: it works only with some values of another option."""

    option: str
    values: tuple[Any, ...]        # that work; the first is the one the error suggests
    why: str = ""                  # the error's sentence, by default "SETTING works only with OPTION=VALUE"
    fix: str = ""                  # the flag the error suggests, by default --OPTION=VALUE
    adjusted: bool = False         # whoever turns the setting on for the user may set this option too

    def met_by(self, value: Any) -> bool:
        return value in self.values

    def problem(self, setting: str) -> tuple[str, str]:
        """The sentence of the error, and the flag that fixes it."""
        return (self.why or f"{setting} works only with {self}",
                self.fix or f"--{self.option}={shown(self.values[0])}")

    def __str__(self) -> str:
        return f"{self.option}={' or '.join(shown(value) for value in self.values)}"


# ---- values and rules


def parse_value(cls: type[Options], key: str, text: str, where: str = "") -> Any:
    """The text of a flag, converted to the option's type and checked by its rule."""
    one = option_specs(cls)[key]
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
        value = BOOLS.get(text.lower(), text.lower())
    elif one.kind == "text":
        value = _unquoted(text)
    return checked(one, value, where)


def _unquoted(text: str) -> str:
    """The text without its quotes: nanoGPT reads flags as Python literals if it can, so '"\\n"' means a line break."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        try:
            literal = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
        return literal if isinstance(literal, str) else text
    return text


def checked(one: OptionSpec, value: Any, where: str) -> Any:
    """The value, converted to the option's type. `where`: what the UsageError names, such as "--batch_size=x"."""
    fits, value = _converted(one.kind, value)
    fix = f"--{one.name}={shown(one.default)} is the default." if not one.required else ""
    if not fits:
        wanted = f"one of {', '.join(one.choices)}" if one.choices else _WANTED[one.kind]
        raise UsageError(f"{where}: {one.name} takes {wanted}.", fix)
    if value in one.renamed:
        now = f"{one.name}={one.renamed[value]}"
        raise UsageError(f"{where}: {one.name}={value} is now {now}.", f"--{now}")
    if one.choices and value not in one.choices:
        near = nearest(str(value), one.choices, cutoff=0.5)
        raise UsageError(f"{where}: {one.name} is one of {', '.join(one.choices)}.",
                         f"Did you mean --{one.name}={near[0]}?" if near else fix)
    problem = one.rule(value) if one.rule else None
    if problem:
        raise UsageError(f"{where}: {one.name} {problem}.", fix)
    return value


def _converted(kind: str, value: Any) -> tuple[bool, Any]:
    """(whether the value is of that kind, the value converted to it). NaN and infinity are of no kind."""
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
    """A value as a user types it after `--option=`."""
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
    """Checks the text alone, against the limits of Linux file systems; whether the file exists is checked later."""
    if not value.strip():
        return "must not be empty"
    if not value.isprintable():
        return "contains a line break, a control character or a broken byte"
    if len(value.encode()) > 4095 or any(len(part.encode()) > 255 for part in re.split(r"[\\/]", value)):
        return "is too long for a path: at most 255 bytes per name and 4095 in total"
    return None


def plain_name(value: str) -> str | None:
    """Checks a folder name: valid on every operating system, and without a path in it."""
    reserved = re.fullmatch(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", value)
    if reserved or not value.isprintable() or value[-1:] in (".", " ") or re.search(r'[\\/:*?"<>|]', value):
        return "must be a plain name: no slashes, no control characters, no name reserved by Windows, no dot at the end"
    return None if len(value.encode()) <= 100 else "must be at most 100 bytes long"


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """At most two candidates that are spelled like the name, the nearest first."""
    return difflib.get_close_matches(name.lower(), list(candidates), n=2, cutoff=cutoff)
