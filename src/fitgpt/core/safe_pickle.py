"""Pickle bytes to plain values (dict, list, str, int; on request tuple, float, bool, None). Nothing in the file can
import or run anything.

A pickle is a program for a stack machine. `parse` executes only the opcodes that build plain values and rejects the
pickle at the first other opcode. A restricted `pickle.Unpickler` is no substitute: it allocates what the file claims,
and took 8 GiB for a file of 10 bytes.

Used for nanoGPT's meta.pkl and torch's memory snapshots. Weights are read by torch's own loader (engine/weights.py).
"""

from __future__ import annotations

import io
import pickletools
from typing import Any

_CONSTANTS = frozenset({
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE",
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4",
})
_PYTHON_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONTAINERS = frozenset({"EMPTY_DICT", "EMPTY_LIST", "DICT", "LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MEMO_PUT = frozenset({"MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"})
_MEMO_GET = frozenset({"BINGET", "LONG_BINGET", "GET"})
_NO_VALUE = frozenset({"PROTO", "FRAME", "STOP"})
_MARK = object()
MAX_OBJECTS = 16_000_000  # on the stack, in the memo, and lists, dicts and tuples: about 2 GB. A byte can make one


class UnsafePickleError(Exception):
    """The pickle is damaged, or holds more than plain values. The message completes a sentence: "FILE: it …"."""


def parse(data: bytes, *, max_depth: int, more_types: bool = False) -> Any:
    """Pickle bytes (any protocol) to the dict, list, str or int they describe.

    `more_types`: tuple, float, bool and None too, from protocol 2 on. Raises UnsafePickleError for any other content,
    and for values nested deeper than `max_depth`.
    """
    try:
        value = _execute(data, more_types=more_types)
        _check_depth(value, max_depth)
    except (ValueError, IndexError, OverflowError) as error:
        raise UnsafePickleError(f"it is damaged or no pickle ({error})") from None
    return value


def _execute(data: bytes, *, more_types: bool) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    containers = 0
    for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
        name = opcode.name
        containers += name in _CONTAINERS
        if containers + len(memo) + len(stack) > MAX_OBJECTS:
            raise UnsafePickleError(f"it has more than {MAX_OBJECTS:,} objects")
        if name in _CONSTANTS:
            if isinstance(argument, bool):  # protocol 0 writes True as the INT "01"
                raise UnsafePickleError("it holds a bool")
            stack.append(argument)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "DICT":
            items = _pop_to_mark(stack)
            stack.append({})
            _set_items(stack, items)
        elif name == "LIST":
            stack.append(_pop_to_mark(stack))
        elif name == "SETITEM":
            _set_items(stack, [stack.pop(-2), stack.pop()])
        elif name == "SETITEMS":
            _set_items(stack, _pop_to_mark(stack))
        elif name == "APPEND":
            _extend(stack, [stack.pop()])
        elif name == "APPENDS":
            _extend(stack, _pop_to_mark(stack))
        elif name in _MEMO_PUT:
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in _MEMO_GET:
            if argument not in memo:
                raise ValueError("it reads a memo entry that it never wrote")
            stack.append(memo[argument])
        elif more_types and name in _PYTHON_CONSTANTS:
            stack.append(_PYTHON_CONSTANTS[name])
        elif more_types and name == "BINFLOAT":
            stack.append(argument)
        elif more_types and name == "TUPLE":
            stack.append(tuple(_pop_to_mark(stack)))
        elif more_types and name in _TUPLES:
            items = [stack.pop() for _ in range(_TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name not in _NO_VALUE:
            types = "dict, list, tuple, str, int, float, bool and None" if more_types else "dict, list, str and int"
            raise UnsafePickleError(f"it holds something other than {types} (opcode {name})")
    if len(stack) != 1:
        raise ValueError("it does not end with one value")
    return stack[0]


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    for index in range(len(stack) - 1, -1, -1):
        if stack[index] is _MARK:
            items = stack[index + 1:]
            del stack[index:]
            return items
    raise ValueError("a mark is missing")


def _set_items(stack: list[Any], items: list[Any]) -> None:
    if len(items) % 2 or not isinstance(stack[-1], dict):
        raise ValueError("keys and values of a dict do not match up")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int):
            raise UnsafePickleError("it holds a key that is neither str nor int")
        stack[-1][key] = value


def _extend(stack: list[Any], items: list[Any]) -> None:
    if not isinstance(stack[-1], list):
        raise ValueError("items are appended to something that is no list")
    stack[-1].extend(items)


def _check_depth(value: Any, max_depth: int) -> None:
    """Level by level, without recursion. A container is entered once, so a list that holds itself ends the loop."""
    level, seen = [value], set[int]()
    for _ in range(max_depth):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict | list | tuple) and id(item) not in seen:
                seen.add(id(item))
                inner.extend(item.values() if isinstance(item, dict) else item)
            elif item is _MARK:
                raise ValueError("a mark was never closed")
        if not inner:
            return
        level = inner
    raise UnsafePickleError(f"it is nested more than {max_depth} deep")
