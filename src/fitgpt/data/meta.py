"""What does nanoGPT's meta.pkl say? Read without unpickling: nothing in the file can run or import anything.

A pickle is a program for a small stack machine. This reader plays only the instructions that build dicts,
lists, strings and whole numbers, and refuses the file at the first instruction of any other kind.
"""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import DataError
from ..core.units import MiB, show_bytes

MAX_BYTES = 64 * MiB   # the vocabulary of any character set is far below one
MAX_DEPTH = 8          # nanoGPT's own file has depth 2

_CONSTANTS = frozenset({
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE",
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4",
})
_REMEMBER = frozenset({"MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"})
_RECALL = frozenset({"BINGET", "LONG_BINGET", "GET"})
_MARK = object()


@dataclass(frozen=True)
class Meta:
    """itos[i] is the character of token i; empty where the file holds only a vocabulary size."""

    vocab_size: int
    itos: tuple[str, ...]


class _Refused(Exception):
    pass


def read(path: Path) -> Meta:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _refusal(path, f"it is {show_bytes(size)}, and the limit is {show_bytes(MAX_BYTES)}")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", "Make it readable for this user.") from error
    try:
        return _meta(plain_value(data))
    except _Refused as refused:
        raise _refusal(path, str(refused)) from None
    except (ValueError, IndexError, OverflowError) as error:
        raise _refusal(path, f"it is damaged or no pickle ({error})") from None


def plain_value(data: bytes) -> Any:
    """The dict, list, str or int that a pickle describes; _Refused, ValueError or IndexError for any other."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for instruction, argument, _ in pickletools.genops(io.BytesIO(data)):
        name = instruction.name
        if name in _CONSTANTS:
            if isinstance(argument, bool):  # protocol 0 writes True as the INT "01"
                raise _Refused("it holds a bool")
            stack.append(argument)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "DICT":
            items = _since_mark(stack)
            stack.append({})
            _set_items(stack, items)
        elif name == "LIST":
            stack.append(_since_mark(stack))
        elif name == "SETITEM":
            _set_items(stack, [stack.pop(-2), stack.pop()])
        elif name == "SETITEMS":
            _set_items(stack, _since_mark(stack))
        elif name == "APPEND":
            _extend(stack, [stack.pop()])
        elif name == "APPENDS":
            _extend(stack, _since_mark(stack))
        elif name in _REMEMBER:
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in _RECALL:
            if argument not in memo:
                raise ValueError("it recalls what it never stored")
            stack.append(memo[argument])
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise _Refused(f"it holds something other than dict, list, str and int (instruction {name})")
    if len(stack) != 1:
        raise ValueError("it does not end with one value")
    _check_depth(stack[0])
    return stack[0]


def _since_mark(stack: list[Any]) -> list[Any]:
    for index in range(len(stack) - 1, -1, -1):
        if stack[index] is _MARK:
            items = stack[index + 1:]
            del stack[index:]
            return items
    raise ValueError("a mark is missing")


def _set_items(stack: list[Any], items: list[Any]) -> None:
    if len(items) % 2 or not isinstance(stack[-1], dict):
        raise ValueError("key and value do not pair up in a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int):
            raise _Refused("a key is neither str nor int")
        stack[-1][key] = value


def _extend(stack: list[Any], items: list[Any]) -> None:
    if not isinstance(stack[-1], list):
        raise ValueError("items are appended to what is no list")
    stack[-1].extend(items)


def _check_depth(value: Any) -> None:
    level, seen = [value], set[int]()
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict | list) and id(item) not in seen:
                seen.add(id(item))
                inner.extend(item.values() if isinstance(item, dict) else item)
            elif item is _MARK:
                raise ValueError("a mark was never closed")
        if not inner:
            return
        level = inner
    raise _Refused(f"it is nested more than {MAX_DEPTH} deep")


def _meta(value: Any) -> Meta:
    if not isinstance(value, dict):
        raise _Refused("it does not hold a dict")
    vocab_size = value.get("vocab_size")
    if not isinstance(vocab_size, int) or not 1 <= vocab_size < 2**31:
        raise _Refused("its 'vocab_size' is not a whole number above 0")
    itos = value.get("itos", {})
    characters = dict(enumerate(itos)) if isinstance(itos, list) else itos
    if not isinstance(characters, dict):
        raise _Refused("its 'itos' is neither dict nor list")
    if not characters:
        return Meta(vocab_size, ())
    if len(characters) != vocab_size or any(token not in characters for token in range(vocab_size)):
        raise _Refused(f"its 'itos' does not name each token from 0 to {vocab_size - 1}")
    ordered = tuple(characters[token] for token in range(vocab_size))
    if any(not isinstance(character, str) or len(character) != 1 for character in ordered):
        raise _Refused("its 'itos' holds something other than single characters")
    if len(set(ordered)) != vocab_size:
        raise _Refused("its 'itos' gives two tokens the same character")
    if value.get("stoi") != {character: token for token, character in enumerate(ordered)}:
        raise _Refused("its 'stoi' is not the inverse of its 'itos'")
    return Meta(vocab_size, ordered)


def _refusal(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is refused: {why}. fitgpt reads from it only the dict of dicts, lists, strings and whole numbers "
        "that nanoGPT's prepare.py writes, and never unpickles.",
        f"Write it again with nanoGPT's prepare.py, or move it away if the dataset uses GPT-2's tokenizer: "
        f"mv {path} {path}.refused",
    )
