"""Saved suffix indexes: what was saved drafts the same, and nothing damaged or foreign is read.

Called by pytest. Files are the same for the native and the Python index.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.drafters.suffix_file import HEADER
from draftsmith.drafters.suffix_index import PythonSuffixIndex, SuffixIndex, open_index
from draftsmith.errors import ModelFileError, OptionError, UserError

NATIVE = open_index().is_native
needs_native = pytest.mark.skipif(not NATIVE, reason="the native extension is not built")
Maker = Callable[..., SuffixIndex]
MAKERS: list[Maker] = [PythonSuffixIndex, open_index] if NATIVE else [PythonSuffixIndex]
both = pytest.mark.parametrize("make", MAKERS)


@both
@pytest.mark.parametrize("make_other", MAKERS)
def test_saved_index_drafts_the_same(make: Maker, make_other: Maker, tmp_path: Path) -> None:
    """A file written by either index and read by either one gives the drafts of the index that was saved."""
    rng = random.Random(2)
    index = make(12)
    for request in range(9):
        index.start_request(request, [])
        index.extend_request(request, [rng.randrange(4) for _ in range(rng.randrange(80))])
        index.stop_request(request)
    index.save(tmp_path / "suffixes", "vocabulary")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["suffixes"]
    other = make_other(12)
    other.load(tmp_path / "suffixes", "vocabulary")
    assert other.cached_sequences() == index.cached_sequences()
    for request in range(50, 70):
        prompt = [rng.randrange(4) for _ in range(8)]
        for one in (index, other):
            one.start_request(request, prompt)
        assert index.speculate(request, 8) == other.speculate(request, 8)
    capped = make_other(12, 3)
    capped.load(tmp_path / "suffixes", "vocabulary")
    assert capped.cached_sequences()[0] == index.cached_sequences()[0][6:9]


def saved(path: Path) -> bytes:
    index = open_index(8)
    for request, tokens in enumerate([[1, 2, 3, 4], [], [5, 6]]):
        index.start_request(request, [])
        index.extend_request(request, tokens)
    index.save(path, "v")
    return path.read_bytes()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Every truncation and every flipped byte is refused with one line, and the index is left as it was."""
    path = tmp_path / "suffixes"
    good = saved(path)
    index = open_index(8)
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(ModelFileError):
            index.load(path, "v")
    path.write_bytes(good + b"\0")
    with pytest.raises(ModelFileError, match="damaged"):
        index.load(path, "v")
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :])
        with pytest.raises(UserError) as caught:
            index.load(path, "v")
        assert "\n" not in str(caught.value)
    assert index.num_cached == 0


def test_foreign_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "suffixes"
    saved(path)
    index = open_index(8)
    with pytest.raises(OptionError, match="saved for 'v', not for 'w'"):
        index.load(path, "w")
    with pytest.raises(ModelFileError, match="No such file"):
        index.load(tmp_path / "nothing", "v")
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelFileError, match="wrong magic"):
        index.load(path, "v")
    with pytest.raises(OptionError, match="cannot write the suffix index"):
        index.save(tmp_path / "no" / "such" / "directory", "v")
    assert not (tmp_path / "no").exists()


@settings(max_examples=200)
@given(header=st.binary(max_size=HEADER.size + 8), body=st.binary(max_size=60), label=st.integers(0, 2**32 - 1))
def test_any_bytes_are_refused_or_read(
    header: bytes, body: bytes, label: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever a file holds, reading it either works or raises a user's error."""
    path = tmp_path_factory.getbasetemp() / "fuzz"
    crafted = HEADER.pack(b"DSUFFIX\0", 1, label % 7, label % 5, len(body) // 4, 0) + body
    for data in (header, header + body, crafted):
        path.write_bytes(data)
        index = open_index(8)
        try:
            index.load(path)
        except UserError:
            assert index.num_cached == 0
        else:
            assert HEADER.unpack_from(data)[3:5] == (index.num_cached, index.num_tokens)


@needs_native
def test_crafted_lengths_do_not_reach_the_tree() -> None:
    index = open_index(8)
    with pytest.raises(ValueError, match="do not fit"):
        index.add_sequences([3], struct.pack("<2i", 1, 2))
    with pytest.raises(ValueError, match="must not be negative"):
        index.add_sequences([2], struct.pack("<2i", 1, -2))
    assert index.num_cached == 0
