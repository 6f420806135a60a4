"""From JSON to the records it was written from, with every value checked against the record's annotations.

Called by the bundle when it reads: its files lie open to editors and to machines that die. Invariant: what comes out
has the types that its class says, finite numbers and no absurd ones; anything else is a `ValueError` that names the
place.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

_Decoder: TypeAlias = Callable[[Any, str], Any]

_MOST = 2**53
"""No count and no time is larger: what is computed from them is floating point."""


def decode(value: Any, kind: Any, where: str) -> Any:
    """The value as `kind`: a dataclass of an object, a tuple of a list, a plain value as it is. Raises `ValueError`."""
    return _decoder(kind)(value, where)


def check_fields(values: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    """Those of `kinds` that are there have the kinds that are given for them. Raises `ValueError`."""
    for name in kinds.keys() & values.keys():
        decode(values[name], kinds[name], f"{where}: {name}")


@functools.cache
def kinds_of(record_class: Any) -> Mapping[str, Any]:
    """The kinds of a dataclass's fields by name."""
    hints = typing.get_type_hints(record_class)
    return {item.name: hints[item.name] for item in dataclasses.fields(record_class)}


# One for each kind, since an answer has thousands of values of few kinds.
@functools.cache
def _decoder(kind: Any) -> _Decoder:
    if dataclasses.is_dataclass(kind):
        return _record_decoder(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (_decoder(argument) for argument in arguments if argument is not types.NoneType)
        return lambda value, where: None if value is None else inner(value, where)
    if origin is tuple:
        return _tuple_decoder(arguments)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_decoder(arguments[1])
    return _plain_decoder(kind)


def _record_decoder(kind: Any) -> _Decoder:
    decoders = {name: _decoder(inner) for name, inner in kinds_of(kind).items()}
    fields = dataclasses.fields(kind)
    missing = dataclasses.MISSING
    needed = {item.name for item in fields if item.default is missing and item.default_factory is missing}

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        odd = (value.keys() - decoders.keys()) | (needed - value.keys())
        if odd:
            raise ValueError(f"{where}: fields missing or unknown: {', '.join(sorted(odd))[:100]}")
        return kind(**{name: decoders[name](item, f"{where}: {name}") for name, item in value.items()})

    return read


def _tuple_decoder(arguments: tuple[Any, ...]) -> _Decoder:
    if arguments[-1] is Ellipsis:
        each = _decoder(arguments[0])

        def read_all(value: Any, where: str) -> tuple[Any, ...]:
            if not isinstance(value, list):
                raise _wrong(value, where, "a list")
            return tuple([each(item, where) for item in value])

        return read_all
    decoders = [_decoder(argument) for argument in arguments]

    def read(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(decoders):
            raise _wrong(value, where, f"a list of {len(decoders)}")
        return tuple([each(item, where) for each, item in zip(decoders, value, strict=True)])

    return read


def _mapping_decoder(kind: Any) -> _Decoder:
    each = _decoder(kind)

    def read(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        return {name: each(item, where) for name, item in value.items()}

    return read


def _plain_decoder(kind: Any) -> _Decoder:
    kinds = (int, float) if kind is float else (kind,)

    def read(value: Any, where: str) -> Any:
        if kind is not Any and type(value) not in kinds:
            raise _wrong(value, where, getattr(kind, "__name__", str(kind)))
        if type(value) in (int, float) and not abs(value) <= _MOST:  # also what is no number at all
            raise _wrong(value, where, "a smaller number")
        return value

    return read


def _wrong(value: Any, where: str, expected: str) -> ValueError:
    return ValueError(f"{where} is {value!r:.40}, expected {expected}")
