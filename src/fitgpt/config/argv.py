"""Command line → assignments: flags, positional arguments and config files, in the order they were typed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..core.errors import UsageError
from .config_file import read_config
from .fields import BOOLS, Assignment, Options, OptionSpec, checked, nearest, option_specs, parse_value, shown


def walk(argv: Sequence[str], cls: type[Options], *, config_files: bool = True, borrowed: Iterable[str] = (),
         other_commands: Iterable[type[Options]] = ()) -> list[Assignment]:
    """The assignments in argv, in order; a later one wins. A config file counts at its position in argv.

    `borrowed`: options of other commands, which a config file may set too. `other_commands`: the options classes of the
    other commands, for "Did you mean".
    """
    found: list[Assignment] = []
    rest = list(argv)
    literal = False
    while rest:
        token = rest.pop(0)
        if token == "--" and not literal:
            literal = True
        elif token.startswith("-") and token != "-" and not literal:
            found.append(_flag(token, rest, cls, other_commands, found))
        elif config_files and (token.endswith(".py") or not _positional(cls)):
            found += _from_file(token, cls, borrowed, other_commands, found)
        else:
            found.append(_bare(token, cls, found))
    return found


def _flag(token: str, rest: list[str], cls: type[Options], other_commands: Iterable[type[Options]],
          found: list[Assignment]) -> Assignment:
    """The assignment of a flag; takes its value from `rest` if it is not attached with an equals sign."""
    specs = option_specs(cls)
    typed, equals, text = token.partition("=")
    name = typed[2:].replace("-", "_")
    if not typed.startswith("--"):  # -o FOLDER, -oFOLDER or -o=FOLDER
        typed, attached = token[:2], token[2:].removeprefix("=")
        name = next((each.name for each in specs.values() if each.short == typed[1:]), "")
        equals, text = ("=" if len(token) > 2 else ""), attached
    if not name:  # --=8, -x, or -batch_size=8 with one dash
        long = token.partition("=")[0].lstrip("-").replace("-", "_")
        if long in specs:
            raise UsageError(f"{token!r} has one dash; an option's name takes two.", f"-{token}")
        raise _unknown(repr(token), long, cls, other_commands, "--")
    for each in specs.values():
        if name in each.switches:
            if equals:
                raise UsageError(f"{token}: {typed} takes no value.", f"Write {typed}, or --{each.name}=…")
            return Assignment(each.name, each.switches[name], typed)
    if name.startswith("no_") and name[3:] in specs and specs[name[3:]].kind in ("bool", "auto"):
        if equals:
            raise UsageError(f"{token}: {typed} takes no value.", f"Write {typed}, or --{name[3:]}={text}.")
        return Assignment(name[3:], False, typed)
    if name not in specs:
        raise _unknown(typed, name, cls, other_commands, "--")
    one = specs[name]
    where = token
    if not equals:
        following = rest[0] if rest else None
        if one.kind in ("bool", "auto"):
            if following is None or following.lower() not in {*BOOLS, "auto"}:
                return Assignment(name, True, typed)
        elif following is None or re.match(r"--?[A-Za-z_]|--$", following):
            and_then = "" if following is None else f"; {following!r} looks like the next option"
            dash = f" Write a value that begins with a dash as {typed}=-x." if one.kind == "text" else ""
            raise UsageError(f"{typed} needs a value{and_then}: {one.help}.",
                             f"{typed}={shown(one.default)} is the default.{dash}")
        text = rest.pop(0)
        where = f"{typed} {text}"
    if one.kind == "texts":
        return Assignment(name, (*_last(found, name, ()), text), where)
    return Assignment(name, parse_value(cls, name, text, where), where)


def _from_file(path: str, cls: type[Options], borrowed: Iterable[str], other_commands: Iterable[type[Options]],
               found: list[Assignment]) -> list[Assignment]:
    """The assignments of a config file, each with its line. The file may read what was assigned before it."""
    specs = option_specs(cls)
    key = path.partition("=")[0].replace("-", "_")
    if "=" in path and key in specs:
        raise UsageError(f"{path!r} looks like an option without its dashes.", f"--{path}")
    scope = {each.name: each.default for each in specs.values()} | {each.key: each.value for each in found}
    file = read_config(path, scope)
    settings: list[Assignment] = []
    for name, value, line in ((s.name, s.value, s.line) for s in file.settings):
        if name in specs:
            where = f"{path}:{line}"
            settings.append(Assignment(name, checked(specs[name], value, f"{where}: {name} = {value!r}"), where))
        elif name not in file.helpers and name not in borrowed:
            raise _unknown(f"{path}:{line}: {name}", name, cls, other_commands, "")
    return settings


def _bare(token: str, cls: type[Options], found: list[Assignment]) -> Assignment:
    """The assignment of a positional argument."""
    one = _positional(cls)
    if one is None:
        raise UsageError(f"`fitgpt {cls.command}` takes only options, and {token!r} is not one.",
                         f"fitgpt {cls.command} --help lists them all.")
    if one.kind == "texts":
        return Assignment(one.name, (*_last(found, one.name, ()), token), token)
    before = next((each.value for each in found if each.key == one.name and each.source == each.value), None)
    if before is not None:
        raise UsageError(f"`fitgpt {cls.command}` takes one {one.name}, but got {before!r} and {token!r}.")
    return Assignment(one.name, checked(one, token, token), token)


def _positional(cls: type[Options]) -> OptionSpec | None:
    return next((each for each in option_specs(cls).values() if each.positional), None)


def _last(found: list[Assignment], key: str, otherwise: Any) -> Any:
    return next((each.value for each in reversed(found) if each.key == key), otherwise)


def _unknown(typed: str, name: str, cls: type[Options], other_commands: Iterable[type[Options]],
             dashes: str) -> UsageError:
    """An error that suggests the option meant: a synonym's, another command's, or the nearest in spelling."""
    what = f"{typed} is not an option of `fitgpt {cls.command}`."
    specs = option_specs(cls).values()
    meant = [each.name for each in specs if name.lower() in each.synonyms]
    words = [word for each in specs for word in (each.name, *each.switches)]
    words += [f"no_{each.name}" for each in specs if each.kind in ("bool", "auto") and dashes]
    near = meant or nearest(name, words)
    owner = next((other for other in other_commands if name in option_specs(other)), None)
    if owner is not None and not meant:
        return UsageError(what, f"It is an option of `fitgpt {owner.command}`.")
    if near:
        return UsageError(what, f"Did you mean {' or '.join(dashes + each for each in near)}?")
    return UsageError(what, f"fitgpt {cls.command} --help lists them all.")
