"""JSON as section 4 wants it: no duplicate members, no floats, only the members that are named."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import Refused, Where

Object = dict[str, Any]

U64 = (1 << 64) - 1
_HEX = re.compile(r"[0-9a-f]*\Z")


def parse(data: bytes, where: Where) -> Object:
    """One JSON object; Refused for anything that two parsers could read differently."""

    def pairs(members: list[tuple[str, Any]]) -> Object:
        found: Object = {}
        for name, value in members:
            if name in found:
                raise Refused(where, f"member {name!r} occurs twice")
            found[name] = value
        return found

    def no_float(text: str) -> NoReturn:
        raise Refused(where, f"{text} is not an integer")

    def integer(text: str) -> int:
        if text.startswith("-") or len(text) > 20 or int(text) > U64:
            raise Refused(where, f"integer {text[:24]} is out of range")
        return int(text)

    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_float=no_float,
            parse_constant=no_float,
            parse_int=integer,
        )
        canonical(value)  # a lone surrogate shows here
    except (UnicodeError, json.JSONDecodeError, RecursionError) as e:
        raise Refused(where, f"not JSON in UTF-8: {e}") from None
    if not isinstance(value, dict):
        raise Refused(where, "not a JSON object")
    return value


def canonical(value: Object) -> bytes:
    """The canonical form that the MAC is taken over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def members(value: Any, names: set[str], where: Where) -> Mapping[str, Any]:
    """`value` as an object with exactly these members."""
    if not isinstance(value, dict):
        raise Refused(where, "not an object")
    if missing := sorted(names - value.keys()):
        raise Refused(where, f"missing member {missing[0]!r}")
    if unknown := sorted(value.keys() - names):
        raise Refused(where, f"unknown member {unknown[0]!r}")
    return value


def integer(value: Any, low: int, high: int, where: Where) -> int:
    """An integer within bounds."""
    if type(value) is not int:  # bool is an int in Python
        raise Refused(where, "not an integer")
    if not low <= value <= high:
        raise Refused(where, f"{value} is not within {low} to {high}")
    return value


def string(value: Any, where: Where) -> str:
    """A string."""
    if not isinstance(value, str):
        raise Refused(where, "not a string")
    return value


def array(value: Any, where: Where) -> list[Any]:
    """An array."""
    if not isinstance(value, list):
        raise Refused(where, "not an array")
    return value


def hexbytes(value: Any, length: int | None, where: Where) -> bytes:
    """A byte string in lower-case hex."""
    text = string(value, where)
    if not _HEX.match(text) or len(text) % 2:
        raise Refused(where, "not lower-case hex of whole bytes")
    if length is not None and len(text) != 2 * length:
        raise Refused(where, f"{len(text) // 2} bytes, not {length}")
    return bytes.fromhex(text)
