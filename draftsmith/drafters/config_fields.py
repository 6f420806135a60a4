"""A dataclass from the plain values of a JSON file, every field of the type it is declared with.

Used where a drafter's directory is read. Invariant: what comes out holds no value of another type; what is wrong is
told by the key it stands under.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from draftsmith.errors import ModelFileError, OptionError


def read_fields(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """An instance of `kind`. Raises `ModelFileError`, its message beginning with `where` and the key."""
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            raise ModelFileError(f"{where}.{key}' is not known; known are {', '.join(fields)}")
    for name, item in fields.items():
        is_needed = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if is_needed and name not in values:
            raise ModelFileError(f"{where}.{name}' is missing")
    read = {key: _read(hints[key], value, f"{where}.{key}") for key, value in values.items()}
    try:
        return kind(**read)
    except OptionError as error:
        raise ModelFileError(f"{where}': {error}") from error


def _read(hint: Any, value: Any, where: str) -> Any:
    for option in _options(hint):
        if dataclasses.is_dataclass(option) and isinstance(option, type) and isinstance(value, Mapping):
            return read_fields(option, value, where)
        if _fits(option, value):
            return value
    needed = " or ".join(_named(option) for option in _options(hint))
    raise ModelFileError(f"{where}' is {value!r}; {needed} is needed")


def _options(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _fits(hint: Any, value: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin is types.NoneType:
        return value is None
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if origin in (list, tuple):
        inner = typing.get_args(hint)[0]
        return isinstance(value, list | tuple) and all(_fits(inner, item) for item in value)
    if origin is dict:
        return isinstance(value, Mapping)
    return type(value) is origin


def _named(hint: Any) -> str:
    origin = typing.get_origin(hint) or hint
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text",
             types.NoneType: "null"}  # fmt: skip
    if origin in (list, tuple):
        return "a list"
    return words.get(origin, "an object")
