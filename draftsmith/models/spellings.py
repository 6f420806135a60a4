"""Whose token ids these are: one digest over everything a vocabulary says.

Called where token ids are kept on disk (prepared texts, trained drafters) and read again beside a target. Invariant:
equal digests mean that every id stands for the same text.
"""

from __future__ import annotations

import hashlib
import json
from typing import Protocol


class Spellings(Protocol):
    """What a digest needs of a tokenizer."""

    vocab_size: int

    def token_text(self, token: int) -> str: ...
    def is_special(self, token: int) -> bool: ...


def vocabulary_digest(tokenizer: Spellings) -> str:
    """sha256 of a vocabulary: every id's spelling, and whether it is a mark rather than text."""
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        entry = [tokenizer.token_text(token), tokenizer.is_special(token)]
        digest.update(json.dumps(entry).encode() + b"\n")
    return digest.hexdigest()
