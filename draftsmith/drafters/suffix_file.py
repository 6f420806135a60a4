"""The file of a saved suffix index: the token ids of its responses, nothing of the tree's own layout.

Written and read by `suffix_index`, the same for the native and the Python index. Layout, little-endian:
magic "DSUFFIX\\0", version u32, label length u32, number of responses u64, number of tokens u64, CRC-32 of
everything after the header u32, then the label (UTF-8), the lengths (u32 each), the tokens (i32 each).
Invariant: a file is either complete and consistent or refused with one line; it is replaced atomically.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftsmith.errors import ModelFileError, OptionError

MAGIC = b"DSUFFIX\0"
VERSION = 1
HEADER = struct.Struct("<8sIIQQI")


def write_sequences(path: Path, label: str, lengths: Sequence[int], tokens: bytes) -> None:
    """Write responses (`tokens`: little-endian int32, end to end). OptionError when the file cannot be written."""
    name = label.encode()
    payload = name + np.asarray(lengths, dtype="<u4").tobytes() + tokens
    header = HEADER.pack(MAGIC, VERSION, len(name), len(lengths), len(tokens) // 4, zlib.crc32(payload))
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".part", delete=False) as file:
            temporary = file.name
            file.write(header)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise OptionError(f"cannot write the suffix index {path}: {error.strerror}; name a writable file") from error


def read_sequences(path: Path, label: str) -> tuple[list[int], bytes]:
    """Lengths and tokens of a saved index.

    Raises ModelFileError for a missing, foreign, truncated or corrupt file, OptionError for another label.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read the suffix index {path}: {error.strerror}") from error
    if len(data) < HEADER.size or data[:8] != MAGIC:
        raise ModelFileError(f"{path} is not a saved suffix index (wrong magic); save one with this program")
    _, version, label_len, num_sequences, num_tokens, checksum = HEADER.unpack_from(data)
    if version != VERSION:
        raise ModelFileError(f"suffix index {path} has format version {version}; this program reads version {VERSION}")
    expected = HEADER.size + label_len + 4 * (num_sequences + num_tokens)
    if len(data) != expected:
        raise ModelFileError(f"suffix index {path} is damaged: {len(data)} bytes instead of {expected}; save it again")
    if zlib.crc32(memoryview(data)[HEADER.size :]) != checksum:
        raise ModelFileError(f"suffix index {path} is damaged: its checksum does not fit; save it again")
    at = HEADER.size + label_len
    lengths: list[int] = np.frombuffer(data, dtype="<u4", count=num_sequences, offset=at).tolist()
    tokens = data[at + 4 * num_sequences :]
    if sum(lengths) != num_tokens or (num_tokens and int(np.frombuffer(tokens, dtype="<i4").min()) < 0):
        raise ModelFileError(f"suffix index {path} is damaged: its lengths or token ids make no sense; save it again")
    found = data[HEADER.size : at].decode(errors="replace")
    if found != label:
        raise OptionError(
            f"suffix index {path} was saved for {found!r}, not for {label!r}; use one saved for this model"
        )
    return lengths, tokens
