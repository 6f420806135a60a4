"""Text to token ids and back, for any vocabulary the model files bring.

Built from plain data (`io.files.ModelFiles.tokenizer`), on top of the `tokenizers` library. Called by the
engine, the chat template, standalone draft models. Decoding is ours: every id has fixed bytes, and a text
is the join of them, decoded once. Invariants: `decode(ids)` equals what `Detokenizer` streams for the
same ids; `encode` never adds a begin or end token; with a byte-level vocabulary of all 256 bytes and no
normaliser, `decode(encode(text)) == text` (SmolLM2's lacks 21 bytes and drops what needs them).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from draftsmith.models.byte_alphabet import SPACE_MARK, byte_level_bytes, byte_of_fallback, sentencepiece_bytes
from draftsmith.models.gguf_vocabulary import vocabulary_from_gguf
from draftsmith.models.vocabulary import SENTENCEPIECE, Vocabulary, files_of, vocabulary_from_json


class Tokenizer:
    """A tokenizer bound to one vocabulary.

    `vocab_size`: number of ids it knows (a model may pad its rows beyond it). `eos_ids`: tokens that end an
    answer. `bos_id`, `add_bos`: the begin token, and whether a raw prompt starts with it. `special_tokens`:
    spellings for chat templates. `strips_leading_space`: decoded text drops one leading space.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._lock = threading.Lock()
        self._bytes: list[bytes | None] = [None] * vocabulary.size
        self.vocab_size = vocabulary.size
        self.eos_ids = vocabulary.eos_ids
        self.bos_id = vocabulary.bos_id
        self.add_bos = vocabulary.add_bos
        self.special_tokens = vocabulary.special_tokens
        self.strips_leading_space = vocabulary.strips_leading_space

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Tokenizer:
        """Build from `ModelFiles.tokenizer`. Raises `ModelFileError` (damaged), `UnsupportedError` (unknown kind)."""
        return Tokenizer(vocabulary_from_gguf(data) if data["kind"] == "gguf" else vocabulary_from_json(data))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text; no begin or end token is added.

        `special`: whether the spelling of a special token (`<|im_start|>`) stands for that token (a rendered
        chat) or for its characters (text of a user).
        """
        text = text.encode("utf-8", "replace").decode()  # lone surrogates are no text
        with self._lock:  # the switch belongs to the backend, which all threads share
            self._backend.encode_special_tokens = not special
            return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special tokens left out, bytes that are no UTF-8 replaced by U+FFFD."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to decoded text: empty for special and unused tokens and for ids beyond `vocab_size`."""
        if not 0 <= token < self.vocab_size:
            return b""
        found = self._bytes[token]
        if found is None:
            found = self._bytes[token] = self._spell(token)
        return found

    def token_text(self, token: int) -> str:
        """The vocabulary's own spelling (`ĠParis`, `▁Paris`, `<0x0A>`); empty for ids beyond `vocab_size`."""
        if not 0 <= token < self.vocab_size:
            return ""
        spellings = self._vocabulary.spellings
        return (self._backend.id_to_token(token) or "") if spellings is None else spellings[token]

    def normalized_token_text(self, token: int) -> str:
        """A spelling two vocabularies can be compared by.

        Ordinary tokens: their bytes, as UTF-8 with surrogate escapes. Special tokens: NUL and their spelling.
        Empty for tokens that must not be matched: unused ones, and a fallback byte whose character has a
        token of its own. No two tokens share a text other than the empty one.
        """
        if token in self._vocabulary.special_ids:
            return f"\0{self.token_text(token)}"
        value = self.token_bytes(token)
        if self._vocabulary.scheme == SENTENCEPIECE and token not in self._vocabulary.added_ids:
            is_fallback = byte_of_fallback(self.token_text(token)) is not None
            if is_fallback and value < b"\x80" and self.id_of(value.decode().replace(" ", SPACE_MARK)) is not None:
                return ""
        return value.decode("utf-8", "surrogateescape")

    def id_of(self, text: str) -> int | None:
        """Id of a token by its vocabulary spelling."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def is_special(self, token: int) -> bool:
        """Whether a token is a mark (begin, end, role) rather than text."""
        return token in self._vocabulary.special_ids

    def as_files(self) -> dict[str, str]:
        """Files of a model directory, by name, from which the same tokenizer is read again."""
        return files_of(self._vocabulary)

    def _spell(self, token: int) -> bytes:
        vocabulary = self._vocabulary
        if token in vocabulary.special_ids or token in vocabulary.unused_ids:
            return b""
        text = self.token_text(token)
        if vocabulary.scheme == SENTENCEPIECE:
            return sentencepiece_bytes(text)
        return text.encode() if token in vocabulary.added_ids else byte_level_bytes(text)
