"""Command line → assignments: flags, positional arguments and config files, in the order they were typed. Help."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ..core.errors import UsageError
from .config_file import read_config
from .fields import (
    BOOLS,
    Assignment,
    Options,
    OptionSpec,
    checked,
    nearest,
    option_specs,
    parse_value,
    shown,
    shown_flag,
)
from .training_script import is_training_script, trace_command


def walk(argv: Sequence[str], cls: type[Options], *, config_files: bool = True, borrowed: Iterable[str] = (),
         other_commands: Iterable[type[Options]] = ()) -> list[Assignment]:
    """The assignments in argv, in order; a later one wins. A config file counts at its position in argv.

    `borrowed`: options of other commands, which a config file may set too. `other_commands`: the options classes of the
    other commands, for "Did you mean".
    """
    positional = next((spec for spec in option_specs(cls).values() if spec.positional), None)
    found: list[Assignment] = []
    rest = list(argv)
    only_arguments = False  # after --
    while rest:
        token = rest.pop(0)
        if token == "--" and not only_arguments:
            only_arguments = True
        elif token.startswith("-") and token != "-" and not only_arguments:
            found.append(_flag(token, rest, cls, other_commands, found))
        elif config_files and (positional is None or (token.endswith(".py") and not _is_text(token, positional))):
            try:
                found += _from_file(token, cls, borrowed, other_commands, found)
            except UsageError:
                if not is_training_script(token):
                    raise
                raise UsageError(f"{token!r} is a training script: it imports torch or a package that needs it. "
                                 f"`fitgpt {cls.command}` takes config files, which are read and never run.",
                                 trace_command(token, _value_in(argv, "--gpu"))) from None
        elif positional is None:
            raise UsageError(f"`fitgpt {cls.command}` takes only options, and {token!r} is not one.",
                             f"fitgpt {cls.command} --help")
        elif positional.kind == "texts":
            found.append(Assignment(positional.name, (*_texts(found, positional.name), token), token))
        else:
            name = positional.name
            before = next((each.value for each in found if each.key == name and each.source == each.value), None)
            if before is not None:
                raise UsageError(f"`fitgpt {cls.command}` takes one {name}, but got {before!r} and {token!r}.",
                                 shlex.join(["fitgpt", cls.command, before]))
            found.append(Assignment(name, checked(positional, token, token), token))
    return found


def script_start(argv: Sequence[str], cls: type[Options]) -> int:
    """Where the command line of a script begins: the first argument that is neither an option nor its value, or -m.

    A saved trace (NAME.json) is no script: options that follow it are ours.
    """
    specs, takes_value = option_specs(cls), False
    for number, token in enumerate(argv):
        if takes_value:
            takes_value = False
        elif token in ("-m", "--") or not token.startswith("-"):
            return len(argv) if token.endswith(".json") else number + (token == "--")
        else:
            spec = specs.get(token.lstrip("-").replace("-", "_"))
            takes_value = spec is not None and spec.kind not in ("bool", "auto")
    return len(argv)


def _flag(token: str, rest: list[str], cls: type[Options], other_commands: Iterable[type[Options]],
          found: list[Assignment]) -> Assignment:
    """The assignment of a flag; takes its value from `rest` if it is not attached with an equals sign."""
    specs = option_specs(cls)
    typed, equals, text = token.partition("=")
    name = typed[2:].replace("-", "_")
    if not typed.startswith("--"):  # -o FOLDER, -oFOLDER or -o=FOLDER
        typed, equals, text = token[:2], token[2:3], token[2:].removeprefix("=")
        name = next((spec.name for spec in specs.values() if spec.short == typed[1:]), "")
    name = next((spec.name for spec in specs.values() if name in spec.also), name)
    if not name:  # --=8, -x, or -batch_size=8 with one dash
        long = token.partition("=")[0].lstrip("-").replace("-", "_")
        if long in specs:
            raise UsageError(f"{token!r} has one dash; an option's name takes two.", f"-{token}")
        raise _unknown(repr(token), long, cls, other_commands, "--{}" + token.lstrip("-")[len(long):])
    # Flags that stand for a value: --resume, --no-compile.
    stands_for: dict[str, tuple[str, Any]] = {
        switch: (spec.name, value) for spec in specs.values() for switch, value in spec.switches.items()}
    stands_for |= {f"no_{spec.name}": (spec.name, False) for spec in specs.values() if spec.kind in ("bool", "auto")}
    if name in stands_for:
        key, value = stands_for[name]
        if equals:
            raise UsageError(f"{token}: {typed} takes no value.", typed)
        return Assignment(key, value, typed)
    if name not in specs:
        raise _unknown(typed, name, cls, other_commands, "--{}" + token[len(typed):])
    spec = specs[name]
    where = token
    if not equals:
        following = rest[0] if rest else None
        if spec.kind in ("bool", "auto"):
            if following is None or following.lower() not in {*BOOLS, "auto"}:
                return Assignment(name, True, typed)
        elif following is None or re.match(r"--?[A-Za-z_]|--$", following):
            and_then = "" if following is None else f"; {following!r} looks like the next option"
            if spec.kind == "text" and following is not None:
                and_then += f" (write a value that begins with a dash as {typed}=-x)"
            raise UsageError(f"{typed} needs a value{and_then}: {spec.help}.",
                             f"{typed}={shown(spec.example if spec.default == '' else spec.default)}")
        text = rest.pop(0)
        where = f"{typed} {text}"
    if spec.kind == "texts":
        return Assignment(name, (*_texts(found, name), text), where)
    return Assignment(name, parse_value(cls, name, text, where), where)


def _value_in(argv: Sequence[str], flag: str) -> str:
    """The value of a flag anywhere in argv; empty if it is not there."""
    for token, following in pairwise((*argv, "")):
        name, equals, value = token.partition("=")
        if name == flag:
            return value if equals else following
    return ""


def _is_text(token: str, positional: OptionSpec) -> bool:
    """Whether the token is a text such as 'Killed python train.py', for an option that takes any text."""
    return positional.rule is None and " " in token and not os.path.exists(token)


def _texts(found: list[Assignment], key: str) -> tuple[str, ...]:
    """The values so far of an option that takes several."""
    return next((each.value for each in reversed(found) if each.key == key), ())


def _from_file(path: str, cls: type[Options], borrowed: Iterable[str], other_commands: Iterable[type[Options]],
               found: list[Assignment]) -> list[Assignment]:
    """The assignments of a config file, each with its line. The file may read what was assigned before it."""
    specs = option_specs(cls)
    if "=" in path and path.partition("=")[0].replace("-", "_") in specs:
        raise UsageError(f"{path!r} looks like an option without its dashes.", f"--{path}")
    scope = {spec.name: spec.default for spec in specs.values()} | {each.key: each.value for each in found}
    assigned, helpers = read_config(path, scope, cls.command)
    settings: list[Assignment] = []
    for name, value, where in assigned:
        if name in specs:
            valid = checked(specs[name], value, f"{where}: {name} = {value!r}", in_file=True)
            settings.append(Assignment(name, valid, where))
        elif name not in helpers and name not in borrowed:
            raise _unknown(f"{where}: {name}", name, cls, other_commands, f"{{}} = {value!r}")
    return settings


def _unknown(typed: str, name: str, cls: type[Options], other_commands: Iterable[type[Options]],
             form: str) -> UsageError:
    """An error that suggests the option meant: a synonym's, another command's, or the nearest in spelling.

    `form`: how to write it, with {} for its name: "--{}=8" for a flag, "{} = 8" in a config file.
    """
    what = f"{typed} is not an option of `fitgpt {cls.command}`."
    specs = option_specs(cls).values()
    meant = [spec.name for spec in specs if name.lower() in spec.synonyms]
    owners = [other for other in other_commands if name in option_specs(other)]
    if owners and not meant:
        owner = next((other for other in owners if other.command == "train"), owners[0])
        return UsageError(f"{what} It is an option of `fitgpt {owner.command}`.", f"fitgpt {owner.command} --help-all")
    words = [word for spec in specs for word in (spec.name, *spec.switches)]
    words += [f"no_{spec.name}" for spec in specs if spec.kind in ("bool", "auto") and form.startswith("--")]
    if near := meant or nearest(name, words):
        return UsageError(what, " or ".join(form.replace("{}", each) for each in near))
    return UsageError(what, f"fitgpt {cls.command} --help-all")


# ---- help

def listed_options(cls: type[Options], *, everything: bool = False) -> list[OptionSpec]:
    """The options in the help: of `train` the main ones; of `plan` and others that take a run's options, their own.

    `everything`: all of `train`, and those of a run that `plan` and others use. They accept the rest as well, so that
    the options of a `train` command can be given to them unchanged.
    """
    specs = option_specs(cls).values()
    if cls.own is not None:
        own = option_specs(cls.own)
        return [*own.values(), *(spec for spec in specs if everything and spec.planned and spec.name not in own)]
    return [spec for spec in specs if spec.main and not everything] or list(specs)


def help_text(cls: type[Options], *, everything: bool = False) -> str:
    """The help of a command: usage, summary, examples and its options by group, as wide as the terminal."""
    width = min(max(shutil.get_terminal_size().columns, 40), 100)
    column = 28 if width >= 70 else 6
    listed = listed_options(cls, everything=everything)
    lines = [f"usage: {cls.usage}", "", *textwrap.wrap(cls.summary, width)]
    if cls.examples:
        lines += ["", "examples", *(f"  {example}" for example in cls.examples)]
    for group, members in (_groups(listed) if everything or not listed[0].main else {"main options": listed}).items():
        lines += ["", group]
        for spec in members:
            sentence = textwrap.wrap(_sentence(spec), width - column, break_on_hyphens=False) or [""]
            flag = f"  {_flag_and_value(spec)}"
            lines.append(flag.ljust(column) + sentence.pop(0) if len(flag) + 2 <= column else flag)
            lines += [" " * column + line for line in sentence]
    if len(listed) < len(listed_options(cls, everything=True)):
        more = "every option" if cls.command == "train" else "the options of a run, such as --batch_size=8"
        lines += ["", *textwrap.wrap(f"fitgpt {cls.command} --help-all lists {more}.", width)]
    elif everything:
        lines += ["", *textwrap.wrap("An option that takes True or False also takes --option and --no-option. Dashes "
                                     "and underscores are the same; the last of two assignments wins.", width)]
    return "\n".join(lines) + "\n"


def markdown_table(cls: type[Options]) -> str:
    """The options for the docs: one table per group."""
    parts = []
    for group, members in _groups(option_specs(cls).values()).items():
        rows = [f"| `{_flag_name(spec)}` | `{shown(spec.default)}` | {_sentence(spec)} |" for spec in members]
        parts.append("\n".join([f"**{group}**", "", "| option | default | what it is |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _groups(specs: Iterable[OptionSpec]) -> dict[str, list[OptionSpec]]:
    groups: dict[str, list[OptionSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.group, []).append(spec)
    return groups


def _flag_name(spec: OptionSpec) -> str:
    name = spec.name.upper() if spec.positional and spec.kind == "texts" else shown_flag(spec)
    return f"-{spec.short}, {name}" if spec.short else name


def _flag_and_value(spec: OptionSpec) -> str:
    """--batch_size=12 with its default; a name in capitals where there is none; a switch that is off, alone."""
    if spec.positional and (spec.required or spec.kind == "texts"):
        return spec.name.upper()
    if spec.default is False:
        return _flag_name(spec)
    value = spec.name.upper() if spec.required or spec.default == "" else shown(spec.default)
    return f"{_flag_name(spec)}={value}"


def _sentence(spec: OptionSpec) -> str:
    choices = f" ({', '.join(spec.choices)})" if spec.choices else ""
    switches = "".join(f"; --{name} is short for --{spec.name}={value}" for name, value in spec.switches.items())
    return f"{spec.help}{choices}{switches}".replace("|", "/")
