"""How a token's spelling in a vocabulary stands for bytes.

Called by the tokenizer for every id it meets (once each). Two schemes exist: byte-level vocabularies
spell each byte as one printable character (GPT-2's table); SentencePiece vocabularies spell text as it
is, with `▁` for a space and `<0x0A>` for a byte that has no token. Invariant: both directions of the
byte-level table are exact inverses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

SPACE_MARK = "▁"
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_table() -> dict[int, str]:
    """Byte -> character: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}


CHARACTER_OF_BYTE: Mapping[int, str] = MappingProxyType(_byte_level_table())
_LATIN1_OF_CHARACTER = str.maketrans({character: chr(byte) for byte, character in CHARACTER_OF_BYTE.items()})
_ALPHABET = frozenset(CHARACTER_OF_BYTE.values())


def byte_level_bytes(spelling: str) -> bytes:
    """Bytes of a byte-level token. One that uses other characters is taken as plain text, as the field does."""
    if not _ALPHABET.issuperset(spelling):
        return spelling.encode()
    return spelling.translate(_LATIN1_OF_CHARACTER).encode("latin-1")


def sentencepiece_bytes(spelling: str) -> bytes:
    """Bytes of a SentencePiece token."""
    byte = byte_of_fallback(spelling)
    return spelling.replace(SPACE_MARK, " ").encode() if byte is None else bytes([byte])


def byte_of_fallback(spelling: str) -> int | None:
    """The byte a fallback token such as `<0x0A>` stands for; None for any other token."""
    found = _FALLBACK.fullmatch(spelling)
    return int(found[1], 16) if found else None
