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
from ..core.units import parse_count


class Problem(NamedTuple):
    """What is wrong with a value: "must be at least 1", and the nearest value that would do."""

    text: str
    instead: Any = None  # None: the option's example or default


Rule = Callable[[Any], Problem | str | None]  # takes a value; returns what is wrong with it, or None

_LARGEST_INT = 2**63 - 1
_KINDS: dict[Any, str] = {
    int: "int", float: "float", bool: "bool", str: "text", tuple[str, ...]: "texts",
    bool | Literal["auto"]: "auto",
}
_WANTED = {"int": "a whole number, such as 8", "float": "a finite number, such as 0.1", "bool": "True or False",
           "auto": "True, False or auto", "text": "text", "texts": "text"}
BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


# ---- declaring options


class Assignment(NamedTuple):
    """One value given by the user: by a flag, or by a line of a config file."""

    key: str
    value: Any
    source: str  # "--batch_size=8", "config/x.py:12"


class OptionSpec(NamedTuple):
    """One option, as declared by `option`."""

    default: Any
    help: str
    name: str = ""                 # of the dataclass field
    kind: str = ""                 # by its type: "int", "float", "bool", "auto" (True, False or auto), "text", "texts"
    group: str = "options"         # heading in --help
    rule: Rule | None = None
    choices: tuple[str, ...] = ()
    short: str = ""                # "o" for -o
    positional: bool = False
    required: bool = False
    switches: Mapping[str, str] = {}  # {"resume": "resume"}: --resume without a value means --init_from=resume
    flag: str = ""                 # the name after the dashes as it is shown; "": the field's name
    example: str = ""              # a value for error messages, where the default is empty or there is none
    also: tuple[str, ...] = ()     # other names that are accepted
    synonyms: tuple[str, ...] = ()    # names in other programs: not accepted, but recognised in "Did you mean"
    also_values: Mapping[str, str] = {}  # other names of values that are accepted, each with the value it means
    meant: Mapping[str, str] = {}     # values that other programs have, each with the nearest choice
    # Facts about an option of a run. `options_with` lists the options that have one.
    affects_memory: bool = False   # changes how much GPU memory a run allocates
    affects_speed: bool = False    # changes the tokens per second of training
    fixed_by_plan: bool = False    # `train --plan` rejects a value other than the plan's; default: affects_memory
    fallback: bool = False         # a fallback plan (after out of memory) may change it
    frozen_on_resume: bool = False  # a resumed run cannot change it
    nanogpt: bool = True           # nanoGPT's train.py has it
    page: str = ""                 # group of the web page that shows it: "size", "less", "more"; "": not shown
    main: bool = False             # `fitgpt train --help` lists it; --help-all lists every option
    planned: bool = False          # `plan`, `fit` and `explain` use it; default: affects_memory or affects_speed


def option(default: Any, help: str, **attributes: Any) -> Any:
    """A dataclass field that declares an option; the attributes are those of OptionSpec."""
    affects_memory = attributes.get("affects_memory", False)
    attributes.setdefault("fixed_by_plan", affects_memory)
    attributes.setdefault("planned", affects_memory or attributes.get("affects_speed", False))
    return dataclasses.field(default=default, metadata={"option": OptionSpec(default, help, **attributes)})


class Options:
    """Base of every options class: an instance that exists has passed the check of every option.

    A class that is all that a command takes also declares the command's help.
    """

    command: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    usage: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()
    takes_config_files: ClassVar[bool] = False  # a .py argument is a config file
    takes_script: ClassVar[bool] = False        # the first argument and all after it are the option `script`
    own: ClassVar[type[Options] | None] = None  # of a command that takes the options of a run: those it adds

    def __post_init__(self) -> None:
        for spec in option_specs(type(self)).values():
            object.__setattr__(self, spec.name, checked(spec, getattr(self, spec.name)))


AnyOptions = TypeVar("AnyOptions", bound=Options)


_specs: dict[type[Options], dict[str, OptionSpec]] = {}


def option_specs(cls: type[Options]) -> dict[str, OptionSpec]:
    """The options of a class by name, in the order of declaration."""
    if cls not in _specs:
        types = get_type_hints(cls)
        _specs[cls] = {field.name: field.metadata["option"]._replace(name=field.name, kind=_KINDS[types[field.name]])
                       for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # all are dataclasses
    return _specs[cls]


def options_with(cls: type[Options], **facts: Any) -> tuple[str, ...]:
    """Names of the options that have these facts, such as nanogpt=False, in the order of declaration."""
    return tuple(name for name, spec in option_specs(cls).items()
                 if all(getattr(spec, fact) == value for fact, value in facts.items()))


def build(cls: type[AnyOptions], assignments: Iterable[Assignment]) -> AnyOptions:
    """Options from assignments; a later assignment to the same option wins."""
    values = {each.key: each.value for each in assignments}
    for spec in option_specs(cls).values():
        if spec.required and values.get(spec.name, spec.default) == spec.default:
            flag = f"-{spec.short}" if spec.short else f"--{spec.name}"
            name = spec.name.upper() if spec.positional else f"{flag} {spec.name.upper()}"
            raise UsageError(f"`fitgpt {cls.command}` needs {name}: {spec.help}.", cls.examples[0])
    return cls(**values)


class Requires(NamedTuple):
    """Part of the declaration of a setting: it works only with some values of another option."""

    option: str
    values: tuple[Any, ...]        # that work; the first is the one the error suggests
    why: str = ""                  # the error's sentence, by default "SETTING works only with OPTION=VALUE"
    fix: str = ""                  # the flag the error suggests, by default --OPTION=VALUE
    adjusted: bool = False         # whoever turns the setting on for the user may set this option too

    def __str__(self) -> str:
        return f"{self.option}={' or '.join(shown(value) for value in self.values)}"


# ---- values


def parse_value(cls: type[Options], key: str, text: str, where: str = "") -> Any:
    """The text of a flag, converted to the option's type and checked by its rule."""
    spec = option_specs(cls)[key]
    value: Any = text
    if spec.kind == "int":
        if re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text) and len(text) < 40:
            value = int(text)
        elif re.fullmatch(r"[+-]?[0-9]+(\.[0-9]+)?[eE]\+?[0-9]{1,3}", text):  # 1e6, 2.5e3
            value = float(text)
        elif re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?[kKmMbB]", text):  # 10k, 1.5M
            value = parse_count(text)
    elif spec.kind == "float":
        try:
            value = float(text)
        except ValueError:
            value = text
    elif spec.kind in ("bool", "auto"):
        value = BOOLS.get(text.lower(), text.lower())
    elif spec.kind == "text" and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        try:  # nanoGPT reads flags as Python literals if it can, so '"\n"' means a line break
            literal = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            literal = text
        value = literal if isinstance(literal, str) else text
    return checked(spec, value, where or f"--{key}={text}")


def checked(spec: OptionSpec, given: Any, where: str = "", *, in_file: bool = False) -> Any:
    """The value, converted to the option's type. `where`: what the UsageError names, by default "batch_size=x";
    `in_file`: its fix is a line of a config file, not a flag: a flag does not replace a value that is invalid there."""
    fits, value = _converted(spec.kind, given)

    def error(problem: str, instead: Any = None) -> UsageError:
        if instead is None:
            instead = spec.example if spec.example and (spec.required or not spec.default) else spec.default
        place = where or f"{spec.name}={shown(given)}"
        fix = f"{spec.name} = {instead!r}" if in_file else f"{shown_flag(spec)}={shown(instead)}"
        return UsageError(f"{place}: {spec.name} {problem}.", fix)

    if not fits:
        raise error(f"takes one of {', '.join(spec.choices)}" if spec.choices else f"takes {_WANTED[spec.kind]}")
    if spec.kind == "text":
        value = spec.also_values.get(value.lower(), value)
    if spec.choices and value not in spec.choices:
        near = [spec.meant[value]] if value in spec.meant else nearest(str(value), spec.choices, cutoff=0.5)
        raise error(f"is one of {', '.join(spec.choices)}", near[0] if near else None)
    problem = spec.rule(value) if spec.rule else None
    if problem:
        raise error(*problem) if isinstance(problem, Problem) else error(problem)
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


def shown_flag(spec: OptionSpec) -> str:
    """--all-cards"""
    return f"--{spec.flag or spec.name}"


def shown(value: Any) -> str:
    """A value as a user types it after `--option=`."""
    plain = isinstance(value, str) and re.fullmatch(r"[\w./:@+-]+", value)
    return str(value) if plain or isinstance(value, bool | int | float) else repr(value)


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """At most two candidates that are spelled like the name, the nearest first."""
    return difflib.get_close_matches(name.lower(), list(candidates), n=2, cutoff=cutoff)


# ---- rules


def must(holds: Callable[[Any], Any], problem: str, instead: Any = None) -> Rule:
    """A rule from a condition, what is wrong where it does not hold, and a value that would do."""
    return lambda value: None if holds(value) else Problem(problem, instead)


def optional(rule: Rule) -> Rule:
    """The same rule for a text that may be empty."""
    return lambda text: rule(text) if text else None


def between(low: float, high: float) -> Rule:
    def rule(value: float) -> Problem | None:
        if value < low:
            return Problem(f"must be at least {low:,}", low)
        return Problem(f"must be at most {high:,}", high) if value > high else None

    return rule


LARGEST_COUNT = 2**31 - 1
count = between(1, LARGEST_COUNT)
count_or_0 = between(0, LARGEST_COUNT)
positive = must(lambda value: value > 0, "must be above 0")
non_negative = must(lambda value: value >= 0, "must not be below 0", 0)
fraction = must(lambda value: 0 <= value < 1, "must be at least 0 and below 1")


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
