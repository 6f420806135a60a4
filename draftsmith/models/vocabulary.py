"""What every source of tokenizer data comes down to, and the source `tokenizer.json`.

Made by `vocabulary_from_json` here or `vocabulary_from_gguf`, used by `Tokenizer` alone. Invariant: all
ids in it lie below `size`; the backend neither truncates nor pads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tokenizers import Tokenizer as Backend

from draftsmith.errors import ModelFileError, UnsupportedError

BYTE_LEVEL, SENTENCEPIECE = "byte-level", "sentencepiece"
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_OWN_KEY = "draftsmith"
"""In a `tokenizer_config.json` that this package wrote: what `tokenizer.json` cannot say."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The facts a tokenizer needs.

    `size`: number of ids. `scheme`: how a spelling turns into bytes. `spellings`: by id, or None when the
    backend knows them. `special_ids`: left out of decoded text. `added_ids`: spelled as plain text (special
    ones included). `unused_ids`: padding rows, never produced. `strips_leading_space`: the first space of a
    text belongs to the encoder, not to the text. `special_tokens`: names a chat template may use
    ("bos_token", ...) -> spelling.
    """

    backend: Any
    size: int
    scheme: str
    spellings: Sequence[str] | None
    special_ids: frozenset[int]
    added_ids: frozenset[int]
    unused_ids: frozenset[int]
    strips_leading_space: bool
    eos_ids: frozenset[int]
    bos_id: int | None
    add_bos: bool
    special_tokens: Mapping[str, str]


class BackendErrors(AbstractContextManager[None]):
    """Turns what the `tokenizers` library raises (a bare `Exception`, nothing finer) into `ModelFileError`."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Exactly `Exception`: a fault of ours is of a subclass and passes through. A damaged file can also make
        # the library panic, which is no `Exception` at all and has no importable name.
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            reason = " ".join(str(error).split())
            raise ModelFileError(f"{self._where}: not a usable vocabulary ({reason})") from error


def vocabulary_from_json(data: Mapping[str, Any]) -> Vocabulary:
    """From the text of a `tokenizer.json` (`json`) and the values of a `tokenizer_config.json` (`config`).

    Raises `ModelFileError` for a damaged file, `UnsupportedError` for a decoder that is neither byte-level
    nor SentencePiece.
    """
    where, config = data["source"], data["config"]
    with BackendErrors(where):
        backend = Backend.from_str(data["json"])
        backend.no_truncation()
        backend.no_padding()
    scheme, strips_leading_space = _scheme(backend, where)
    added = backend.get_added_tokens_decoder()
    special_tokens = {name: text for name in _NAMED_TOKENS if (text := _content(config.get(name))) is not None}
    named_ids = {name: backend.token_to_id(text) for name, text in special_tokens.items()}
    bos_id = named_ids.get("bos_token")
    eos_id = named_ids.get("eos_token")
    size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
    own = config.get(_OWN_KEY)
    special, unused = (_ids(own, key, size, where) for key in ("special_ids", "unused_ids"))
    return Vocabulary(
        backend=backend,
        size=size,
        scheme=scheme,
        spellings=None,
        special_ids=special | {index for index, token in added.items() if token.special},
        added_ids=frozenset(added),
        unused_ids=unused,
        strips_leading_space=strips_leading_space,
        eos_ids=frozenset(data["eos_ids"]) | (frozenset() if eos_id is None else {eos_id}),
        bos_id=bos_id,
        add_bos=_adds_bos(backend, config, bos_id),
        special_tokens=special_tokens,
    )


def files_of(vocabulary: Vocabulary) -> dict[str, str]:
    """`tokenizer.json` and `tokenizer_config.json` from which `vocabulary_from_json` makes the same again."""
    added = vocabulary.backend.get_added_tokens_decoder()
    marked = {index for index, token in added.items() if token.special}
    config = {
        **vocabulary.special_tokens,
        "add_bos_token": vocabulary.add_bos,
        "tokenizer_class": "PreTrainedTokenizerFast",
        _OWN_KEY: {
            "special_ids": sorted(vocabulary.special_ids - marked),
            "unused_ids": sorted(vocabulary.unused_ids),
        },
    }
    return {
        "tokenizer.json": vocabulary.backend.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=1, ensure_ascii=False) + "\n",
    }


def _ids(own: Any, key: str, size: int, where: str) -> frozenset[int]:
    """Token ids that this package noted beside a vocabulary; none where it did not write it."""
    given = own.get(key, []) if isinstance(own, Mapping) else []
    if not isinstance(given, list) or not all(type(index) is int and 0 <= index < size for index in given):
        raise ModelFileError(f"{where}: '{_OWN_KEY}.{key}' of its config is {given!r}, must be a list of token ids")
    return frozenset(given)


def _content(value: Any) -> str | None:
    """A token's text, written as a string or as an object with its options."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) and text else None


def _scheme(backend: Any, where: str) -> tuple[str, bool]:
    """Scheme and leading-space rule, read off the decoder."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    stages = {stage["type"]: stage for stage in _stages(decoder)}
    if "ByteLevel" in stages:
        return BYTE_LEVEL, False
    if "Metaspace" in stages:
        return SENTENCEPIECE, stages["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in stages:
        strip = stages.get("Strip", {})
        return SENTENCEPIECE, strip.get("content") == " " and strip.get("start", 0) > 0
    kinds = ", ".join(stages)
    raise UnsupportedError(f"{where}: decoder {kinds} is not supported; byte-level and SentencePiece are")


def _stages(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for stage in decoder.get("decoders", ()):
        yield from _stages(stage)


def _adds_bos(backend: Any, config: Mapping[str, Any], bos_id: int | None) -> bool:
    """What `tokenizer_config.json` says, else what the post-processor of `tokenizer.json` does."""
    if bos_id is None:
        return False
    if isinstance(config.get("add_bos_token"), bool):
        return bool(config["add_bos_token"])
    return list(backend.encode("a", add_special_tokens=True).ids[:1]) == [bos_id]
