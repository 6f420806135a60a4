"""The header of a GGUF file (versions 2 and 3): metadata and the table of tensors.

Called by `io.gguf`. A vocabulary of 150k tokens is read in about a tenth of a second, where the
`gguf` package's reader takes seconds. Invariant: nothing is believed before it is checked against the
bytes that are left, so a damaged file ends in one `ModelFileError`, never in a crash, a hang or an
allocation larger than the file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from draftsmith.errors import ModelFileError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 2
MAX_STRINGS = 1 << 22
"""Most strings an array may hold: several times the largest vocabulary in use."""
MAX_TENSOR_BYTES = 1 << 46
MAX_NAME_BYTES = 1024
"""Longest metadata key or tensor name; real ones stay below 64."""

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, struct.Struct] = MappingProxyType(
    {
        number: struct.Struct("<" + code)
        for number, code in {
            0: "B",
            1: "b",
            2: "H",
            3: "h",
            4: "I",
            5: "i",
            6: "f",
            7: "B",
            10: "Q",
            11: "q",
            12: "d",
        }.items()
    }
)
_FLOAT32, _BOOL = 6, 7
_NUMPY = MappingProxyType(
    {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}
)
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class BlockFormat(NamedTuple):
    """Storage of a tensor type: elements and bytes of one block."""

    elements: int
    nbytes: int


READABLE_TYPES: Mapping[str, BlockFormat] = MappingProxyType(
    {
        "F32": BlockFormat(1, 4),
        "F16": BlockFormat(1, 2),
        "BF16": BlockFormat(1, 2),
        "Q4_0": BlockFormat(32, 18),
        "Q4_1": BlockFormat(32, 20),
        "Q5_0": BlockFormat(32, 22),
        "Q5_1": BlockFormat(32, 24),
        "Q8_0": BlockFormat(32, 34),
        "Q2_K": BlockFormat(256, 84),
        "Q3_K": BlockFormat(256, 110),
        "Q4_K": BlockFormat(256, 144),
        "Q5_K": BlockFormat(256, 176),
        "Q6_K": BlockFormat(256, 210),
    }
)
_TYPE_NAMES = MappingProxyType(
    {
        0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
        11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
        19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
        27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: type name, shape (rows first, as PyTorch counts), first byte in the file, size in bytes."""

    type_name: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Metadata:
    """Metadata values by key, with checks of their types. `where` names the file in messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string."""
        return self._get(key, default, str, "a string")

    def integer(self, key: str, default: int | None = None) -> int | None:
        """A whole number of at least 0."""
        value = self._get(key, default, int, "a whole number")
        if value is not None and value < 0:
            self.fail(f"metadata key {key!r} is {value}, must not be negative")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number."""
        value = self._get(key, default, (int, float), "a number")
        if value is not None and not np.isfinite(value):
            self.fail(f"metadata key {key!r} is {value}, must be finite")
        return None if value is None else float(value)

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """True or false."""
        return self._get(key, default, bool, "true or false")

    def strings(self, key: str) -> list[str] | None:
        """An array of strings, or None when the key is absent."""
        value = self._get(key, None, list, "an array of strings")
        if value and not isinstance(value[0], str):
            self.fail(f"metadata key {key!r} must be an array of strings")
        return value

    def array(self, key: str) -> np.ndarray | None:
        """An array of numbers, or None when the key is absent."""
        return self._get(key, None, np.ndarray, "an array of numbers")

    def require_integer(self, key: str) -> int:
        """A whole number of at least 1 that must be there."""
        value = self.integer(key)
        if not value:
            self.fail(f"metadata key {key!r} is missing" if value is None else f"metadata key {key!r} is 0")
        return value

    def fail(self, message: str) -> NoReturn:
        """Raise `ModelFileError` about this file."""
        raise ModelFileError(f"{self.where}: {message}")

    def _get(self, key: str, default: Any, kinds: type | tuple[type, ...], what: str) -> Any:
        value = self.values.get(key, default)
        is_bool_as_number = isinstance(value, bool) and kinds is not bool
        if value is not default and (is_bool_as_number or not isinstance(value, kinds)):
            self.fail(f"metadata key {key!r} must be {what}, is {type(value).__name__}")
        return value


class Header(NamedTuple):
    """What stands before the tensor data."""

    metadata: Metadata
    tensors: dict[str, TensorEntry]


def read_header(data: Any, path: Path) -> Header:
    """Read the header from a buffer with the whole file (bytes or mmap).

    Raises `ModelFileError` (damaged, wrong magic or version) and `UnsupportedError` (known tensor type
    that is not read, big-endian or split file).
    """
    cursor = _Cursor(data, str(path))
    version = _check_magic(cursor)
    num_tensors, num_values = cursor.u64("tensor count"), cursor.u64("metadata count")
    # The smallest entry: an empty key, its value type and one byte; an empty name, no dimension, type, offset.
    cursor.check_count(num_values, 13, "metadata entries")
    cursor.check_count(num_tensors, 24, "tensors")
    values: dict[str, Any] = {"gguf.version": version}
    for _ in range(num_values):
        key = cursor.string("metadata key", MAX_NAME_BYTES)
        if key in values:
            cursor.fail(f"metadata key {key!r} stands twice")
        values[key] = cursor.value(cursor.u32(f"type of metadata key {key!r}"), key)
    metadata = Metadata(values, str(path))
    if (metadata.integer("split.count", 0) or 0) > 1:
        raise UnsupportedError(
            f"{path}: one part of a split GGUF file; merge the parts with `gguf-split --merge` first"
        )
    return Header(metadata, _read_tensor_table(cursor, num_tensors, metadata))


def _check_magic(cursor: _Cursor) -> int:
    size = len(cursor.data)
    magic = bytes(cursor.data[:4])
    if size < 4 or magic != MAGIC:
        found = f"the file starts with {magic!r}" if size else "the file is empty"
        cursor.fail(f"not a GGUF file: {found}, a GGUF file starts with {MAGIC!r}")
    cursor.position = 4
    version = cursor.u32("version")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedError(f"{cursor.where}: a big-endian GGUF file; only little-endian files are read")
    if version not in VERSIONS:
        cursor.fail(f"GGUF version {version} is not read; versions {' and '.join(map(str, VERSIONS))} are")
    return version


def _read_tensor_table(cursor: _Cursor, num_tensors: int, metadata: Metadata) -> dict[str, TensorEntry]:
    table: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = cursor.string("tensor name", MAX_NAME_BYTES)
        if name in table:
            cursor.fail(f"tensor {name!r} stands twice in the tensor table")
        num_dims = cursor.u32(f"dimensions of tensor {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            cursor.fail(f"tensor {name!r} has {num_dims} dimensions, 1 to {MAX_DIMS} are allowed")
        dims = [cursor.u64(f"shape of tensor {name!r}") for _ in range(num_dims)]
        type_number = cursor.u32(f"type of tensor {name!r}")
        table[name] = (
            _type_name(type_number, name, cursor),
            tuple(reversed(dims)),
            cursor.u64(f"offset of tensor {name!r}"),
        )
    alignment = metadata.integer("general.alignment", 32) or 0
    if alignment == 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        cursor.fail(f"metadata key 'general.alignment' is {alignment}, must be a power of two")
    data_start = -(-cursor.position // alignment) * alignment
    return {
        name: _locate(name, type_name, shape, data_start + offset, cursor)
        for name, (type_name, shape, offset) in table.items()
    }


def _type_name(number: int, tensor: str, cursor: _Cursor) -> str:
    name = _TYPE_NAMES.get(number)
    if name is None:
        cursor.fail(f"tensor {tensor!r} has the unknown type {number}; types read are {', '.join(READABLE_TYPES)}")
    if name not in READABLE_TYPES:
        raise UnsupportedError(
            f"{cursor.where}: tensor {tensor!r} is of type {name}, which is not read; "
            f"types read are {', '.join(READABLE_TYPES)}"
        )
    return name


def _locate(name: str, type_name: str, shape: tuple[int, ...], start: int, cursor: _Cursor) -> TensorEntry:
    block = READABLE_TYPES[type_name]
    nbytes = block.nbytes
    for size in shape:
        if not size:
            cursor.fail(f"tensor {name!r} has a dimension of 0")
        nbytes *= size
    if shape[-1] % block.elements:
        cursor.fail(
            f"tensor {name!r} has rows of {shape[-1]} elements, {type_name} needs a multiple of {block.elements}"
        )
    nbytes //= block.elements
    if nbytes > MAX_TENSOR_BYTES or start + nbytes > len(cursor.data):
        cursor.fail(
            f"truncated or damaged: tensor {name!r} should fill bytes {start} to {start + nbytes}, "
            f"the file has {len(cursor.data)}"
        )
    return TensorEntry(type_name, shape, start, nbytes)


class _Cursor:
    """A reading position in the file; every read is checked against what is left."""

    def __init__(self, data: Any, where: str) -> None:
        self.data = data
        self.where = where
        self.position = 0

    def fail(self, message: str) -> NoReturn:
        raise ModelFileError(f"{self.where}: {message}")

    def check_count(self, count: int, nbytes_each: int, what: str) -> None:
        left = len(self.data) - self.position
        if count * nbytes_each > left:
            self.fail(f"truncated or damaged: {count} {what} announced, {left} bytes left")

    def take(self, nbytes: int, what: str) -> int:
        """Move on by `nbytes` and return where they start."""
        start = self.position
        if start + nbytes > len(self.data):
            self.fail(f"truncated: the file ends inside the {what}")
        self.position = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.data, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.data, self.take(8, what))[0]

    def string(self, what: str, limit: int = MAX_TENSOR_BYTES) -> str:
        length = self.u64(f"length of a {what}")
        if length > limit:
            self.fail(f"damaged: a {what} of {length} bytes")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            self.fail(f"a {what} is not UTF-8")

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        what = f"value of metadata key {key!r}"
        if kind in _SCALARS:
            scalar = _SCALARS[kind]
            value = scalar.unpack_from(self.data, self.take(scalar.size, what))[0]
            if kind == _BOOL:
                return bool(value)
            # 1e-05 stored as float32 is meant as 1e-05, not as 9.999999747378752e-06.
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            self.fail(f"metadata key {key!r} has the unknown value type {kind}")
        element_kind = self.u32(what)
        count = self.u64(what)
        if element_kind in _SCALARS:
            self.check_count(count, _SCALARS[element_kind].size, f"elements of metadata key {key!r}")
            start = self.take(count * _SCALARS[element_kind].size, what)
            # A copy, so that nothing keeps the file mapped.
            return np.frombuffer(self.data, _NUMPY[element_kind], count, start).copy()
        if element_kind == _STRING:
            return self._strings(count, key)
        if element_kind == _ARRAY and depth < MAX_ARRAY_DEPTH:
            self.check_count(count, 12, f"arrays of metadata key {key!r}")
            return [self.value(_ARRAY, key, depth + 1) for _ in range(count)]
        self.fail(f"metadata key {key!r} is an array of the unknown value type {element_kind}")

    def _strings(self, count: int, key: str) -> list[str]:
        """The hot loop of opening a model: hundreds of thousands of strings."""
        self.check_count(count, 8, f"strings of metadata key {key!r}")
        if count > MAX_STRINGS:
            self.fail(f"metadata key {key!r} has {count} strings, at most {MAX_STRINGS} are read")
        data, position, size = self.data, self.position, len(self.data)
        read_length, strings = _U64.unpack_from, []
        try:
            for _ in range(count):
                start = position + 8
                position = start + read_length(data, position)[0]
                if position > size:
                    break
                strings.append(data[start:position].decode())
        except (struct.error, UnicodeDecodeError) as error:
            reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "is cut off by the end of the file"
            self.fail(f"string {len(strings)} of metadata key {key!r} {reason}")
        if len(strings) < count:
            self.fail(f"truncated: the file ends inside the value of metadata key {key!r}")
        self.position = position
        return strings
