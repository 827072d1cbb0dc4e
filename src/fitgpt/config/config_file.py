"""nanoGPT config file → settings, in order. The file is parsed with `ast` and never executed.

A file is a list of `name = expression` lines: literals, arithmetic on them and on names set above (or on the values of
options so far), and the few harmless calls that nanoGPT's own files make. Anything else is an error with its line.
"""

from __future__ import annotations

import ast
import difflib
import operator
import os
import shlex
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import UsageError
from ..core.files import read_limited
from ..core.units import show_bytes
from .fields import Assignment
from .training_script import is_training_script

EXAMPLES = Path(__file__).parents[1] / "example_configs"  # the repository's folder config/, which the package contains
MAX_FILE_BYTES = 2**16  # nanoGPT's have 2 KiB; one of 1 MiB took 40 s and 650 MB to parse
MAX_INT_BITS = 256     # far above any option, far below what takes time to compute
MAX_TEXT = 10_000      # characters of one string
MAX_NESTING = 100      # of one expression: three Python frames per level, well under the limit of 1000

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {"str": str, "int": int, "float": float}

READ_NOT_RUN = ("Config files are read, not run: they may set names to literals, to arithmetic on literals and on "
                "names set above, and to str(), int(), float() or time.time()")

WRITE_VALUE = "Write names and values, one per line: batch_size = 8"


class _NotAllowed(Exception):
    """A part of the file that is not allowed; an empty message stands for the general rule, READ_NOT_RUN."""

    def __init__(self, node: ast.AST, why: str = "") -> None:
        super().__init__(why)
        self.node: Any = node


def read_config(path: str, scope: Mapping[str, object], command: str) -> tuple[list[Assignment], set[str]]:
    """The assignments of a file, in order; and the names that some line reads, which need not be options.

    `scope`: values of names before the first line. `command`: for the fix of an error.
    """
    return parse_config(_read_text(path, command), path, scope)


def parse_config(source: str, path: str, scope: Mapping[str, object]) -> tuple[list[Assignment], set[str]]:
    """`read_config` of a text. `path`: its name in errors."""
    if len(source) > MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {show_bytes(MAX_FILE_BYTES)}, so it is not a config file.",
                         WRITE_VALUE)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in strings
            tree = ast.parse(source)
    except SyntaxError as error:
        text = _shortened((error.text or "").strip())
        raise UsageError(f"{path}:{error.lineno or 1}: `{text}` is not Python: {error.msg}.", WRITE_VALUE) from None
    except ValueError:
        raise UsageError(f"{path!r} holds a NUL byte, so it is not a config file.", WRITE_VALUE) from None
    except (RecursionError, MemoryError):
        raise UsageError(f"{path!r} is nested too deeply to be a config file.", WRITE_VALUE) from None

    names = dict(scope)
    settings: list[Assignment] = []
    for statement in tree.body:
        try:
            for name, value in _assigned(statement, names):
                names[name] = value
                settings.append(Assignment(name, value, f"{path}:{statement.lineno}"))
        except _NotAllowed as error:
            segment = ast.get_source_segment(source, error.node) or source.splitlines()[error.node.lineno - 1]
            where = f"{path}:{error.node.lineno}: `{_shortened(segment.strip())}`"
            if why := str(error):
                raise UsageError(f"{where} {why}.", WRITE_VALUE) from None
            raise UsageError(f"{where} is not allowed in a config file. {READ_NOT_RUN}.",
                             WRITE_VALUE) from None
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return settings, read


# ---- the file


def _read_text(path: str, command: str) -> str:
    try:
        raw = read_limited(path if os.path.exists(path) else shipped(path) or path, MAX_FILE_BYTES, pipes=True)
    except FileNotFoundError:
        raise _not_found(f"There is no config file {path!r}.", path, command) from None
    except IsADirectoryError:
        run, nanogpt = (os.path.isfile(os.path.join(path, name)) for name in ("run.json", "ckpt.pt"))
        what = f"{path!r} is a folder; a config file was expected."
        if not run and not nanogpt:
            raise _not_found(what, path, command) from None
        what += "" if run else " nanoGPT's ckpt.pt is resumed with the config file and options it was trained with."
        raise UsageError(what, shlex.join(["fitgpt", "train", "--resume", f"--out_dir={path}"])) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"The config file {path!r} cannot be read: {why}.", f"fitgpt {command} --help") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path!r} is not UTF-8 text (byte {error.start} is {raw[error.start]:#04x}).",
                         "Save it as UTF-8.") from None


def shipped(path: str) -> Path | None:
    """The config that fitgpt comes with for "gpt2_124m", "gpt2_124m.py" or "config/gpt2_124m.py". None: no such one, or
    the user has one of that name in the folder config."""
    folder, name = os.path.split(path)
    found = EXAMPLES / f"{name.removesuffix('.py')}.py"
    is_shadowed = os.path.exists(os.path.join("config", found.name))
    return found if folder in ("", "config") and name and not is_shadowed and found.is_file() else None


def _not_found(what: str, path: str, command: str) -> UsageError:
    """An error that lists config files with similar names, else the files there are, and suggests the first."""
    folder, name = os.path.split(path)
    files = sorted({os.path.normpath(os.path.join(place, entry)) for place in (path, folder or ".", "config")
                    if os.path.isdir(place) for entry in os.listdir(place) if entry.endswith(".py")
                    and not is_training_script(os.path.join(place, entry))})
    near = [file for file in files if os.path.basename(file) in (name, name + ".py")]
    near = near or difflib.get_close_matches(os.path.normpath(path), files, n=2, cutoff=0.7)
    if not near:
        own = sorted(f"config/{file.name}" for file in EXAMPLES.glob("*.py"))
        near = difflib.get_close_matches(os.path.normpath(path), own, n=2, cutoff=0.7)
        files = files or own
    if not near:
        files = [file for file in files if os.path.dirname(file)] or files  # files of a folder before loose scripts
        what += f" There are: {', '.join(files[:9])}." if files else ""
    suggested = (near or files)[:1] or ["--help"]
    return UsageError(what, shlex.join(["fitgpt", command, *suggested]))


def _shortened(text: str) -> str:
    first, _, more = text.partition("\n")
    return first[:60] + " …" if more or len(first) > 60 else first


# ---- statements and expressions


def _assigned(statement: ast.stmt, names: Mapping[str, object]) -> list[tuple[str, object]]:
    """The names that a statement sets, with their values."""
    match statement:
        case ast.Assign(targets=targets, value=value) if all(isinstance(t, ast.Name) for t in targets):
            result = _value(value, names)
            return [(target.id, result) for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            return [(name, _value(value, names))]
        case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
            whole = ast.BinOp(left=ast.Name(id=name, ctx=ast.Load()), op=op, right=value)
            ast.copy_location(whole, statement)
            ast.copy_location(whole.left, target)
            return [(name, _value(whole, names))]
        case ast.Import(names=[ast.alias(name="time", asname=None)]) | ast.Pass():
            return []
        case ast.Expr(value=ast.Constant(value=str())):
            return []  # a docstring
        case _:
            raise _NotAllowed(statement)


def _value(node: ast.expr, names: Mapping[str, object], depth: int = 0) -> Any:
    """The value of an expression. Every intermediate result is small, so that no file takes long to read."""
    if depth > MAX_NESTING:
        raise _NotAllowed(node, "is nested too deeply")
    try:
        result = _computed(node, names, lambda child: _value(child, names, depth + 1))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _NotAllowed(node, f"cannot be computed: {error}") from None
    if isinstance(result, complex):
        raise _NotAllowed(node, "cannot be computed: the result is not a real number")
    if (isinstance(result, int) and result.bit_length() > MAX_INT_BITS) or (
            isinstance(result, str) and len(result) > MAX_TEXT):
        raise _NotAllowed(node, "is too large for a config file")
    return result


def _computed(node: ast.expr, names: Mapping[str, object], evaluate: Callable[[ast.expr], Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise _NotAllowed(node, "is not set above this line")
            return names[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = evaluate(left), evaluate(right)
            if isinstance(op, ast.Mod) and isinstance(a, str):  # '%999999999d' % 1
                raise _NotAllowed(node)
            if _is_huge(op, a, b):
                raise _NotAllowed(node, "is too large for a config file")
            return _BINARY[type(op)](a, b)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](evaluate(operand))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return evaluate(body) if evaluate(test) else evaluate(orelse)
        case ast.BoolOp(op=op, values=terms):
            result = evaluate(terms[0])
            for term in terms[1:]:
                if bool(result) == isinstance(op, ast.Or):
                    break
                result = evaluate(term)
            return result
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in _COMPARE for op in ops):
            terms = [evaluate(term) for term in (left, *rights)]
            pairs = zip(ops, terms, terms[1:], strict=False)
            return all(_COMPARE[type(op)](a, b) for op, a, b in pairs)
        case ast.JoinedStr(values=parts):
            text = ""
            for part in parts:
                text += str(evaluate(part))
                if len(text) > MAX_TEXT:  # before the rest is added: f"{x}{x}…"
                    raise _NotAllowed(node, "is too large for a config file")
            return text
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return evaluate(value)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _CONVERSIONS:
            return _CONVERSIONS[name](evaluate(argument))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr="time"), args=[], keywords=[]):
            return time.time()
        case _:
            raise _NotAllowed(node)


def _is_huge(op: ast.operator, a: object, b: object) -> bool:
    """Whether computing it would take long: 9**9**9, 'x' * 10**9."""
    if isinstance(op, ast.Pow) and isinstance(a, int) and isinstance(b, int):
        return b > 0 and a.bit_length() * b > 2 * MAX_INT_BITS
    if isinstance(op, ast.Mult):
        text, times = (a, b) if isinstance(a, str) else (b, a)
        return isinstance(text, str) and isinstance(times, int) and len(text) * times > MAX_TEXT
    return False
