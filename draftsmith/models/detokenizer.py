"""Text of a growing token sequence, piece by piece.

One per sample, used by the engine's stop rules and by whoever prints a stream. Invariant: all pieces and
the final `flush` joined equal `Tokenizer.decode` of all ids, and no piece ends inside a character: up to
three bytes wait for the rest of theirs.
"""

from __future__ import annotations

import codecs

from draftsmith.models.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoding of one sequence of ids."""

    __slots__ = ("_decoder", "_holds", "_strip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = _new_decoder("replace")
        self._holds = False
        self._strip = tokenizer.strips_leading_space

    def add(self, token: int) -> str:
        """Take the next id; returns the text that is complete now, possibly none."""
        piece = self._tokenizer.token_bytes(token)
        if not self._holds and piece.isascii():
            text = piece.decode("ascii")
        else:
            text = self._decoder.decode(piece)
            self._holds = bool(self._decoder.getstate()[0])
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """End of the sequence: bytes still waiting become replacement characters."""
        text = self._decoder.decode(b"", True)
        self._holds = False
        return self._stripped(text) if self._strip else text

    def fork(self) -> Detokenizer:
        """An independent copy at the same point."""
        copy = Detokenizer(self._tokenizer)
        copy._decoder.setstate(self._decoder.getstate())
        copy._holds = self._holds
        copy._strip = self._strip
        return copy

    def _stripped(self, text: str) -> str:
        if text:
            self._strip = False
        return text.removeprefix(" ")
