"""Tokenizers from GGUF metadata: byte-level ("gpt2") and SentencePiece ("llama") vocabularies.

Called by `Tokenizer.from_data` with the plain values `io.gguf` read. Facts follow llama.cpp's loader:
token types, defaults of the begin token, the space prefix, user-defined tokens matched in raw text.
Invariant: a vocabulary that cannot be rebuilt exactly is refused with the reason, never approximated
in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from draftsmith.errors import ModelFileError, UnsupportedError
from draftsmith.models.byte_alphabet import SPACE_MARK
from draftsmith.models.pre_tokenizers import Cut, build_normalizer, build_pre_tokenizer, cut_named
from draftsmith.models.vocabulary import BYTE_LEVEL, SENTENCEPIECE, BackendErrors, Vocabulary

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def vocabulary_from_gguf(data: Mapping[str, Any]) -> Vocabulary:
    """Build from the values of `ModelFiles.tokenizer`.

    Raises `UnsupportedError` for another kind of vocabulary or an unknown pre-tokenizer, `ModelFileError`
    for one that contradicts itself.
    """
    where, kind = data["source"], data["model"]
    tokens: Sequence[str] = data["tokens"]
    types = data["token_types"] or [_NORMAL] * len(tokens)
    with BackendErrors(where):
        if kind == "gpt2":
            cut = cut_named(data["pre"], where)
            backend, default_add_bos, strips = _byte_level(data, cut), cut.add_bos, False
        elif kind == "llama":
            prefix = data["add_space_prefix"] is not False
            backend, default_add_bos, strips = _sentencepiece(data, types, prefix), True, prefix
        else:
            raise UnsupportedError(f"{where}: tokenizer model {kind!r} is not supported; known: gpt2, llama")
        added = _add_tokens(backend, tokens, types)
    named = {
        "bos_token": data["bos_id"],
        "eos_token": data["eos_id"],
        "unk_token": data["unk_id"],
        "pad_token": data["pad_id"],
    }
    by_type = {index for index, token_type in enumerate(types) if token_type in (_CONTROL, _UNKNOWN)}
    if data["token_types"] is None:
        by_type |= {index for index in named.values() if index is not None}
    return Vocabulary(
        backend=backend,
        size=len(tokens),
        scheme=BYTE_LEVEL if kind == "gpt2" else SENTENCEPIECE,
        spellings=tokens,
        special_ids=frozenset(by_type),
        added_ids=frozenset(added),
        unused_ids=frozenset(index for index, token_type in enumerate(types) if token_type == _UNUSED),
        strips_leading_space=strips,
        eos_ids=frozenset(data["eos_ids"]),
        bos_id=data["bos_id"],
        add_bos=default_add_bos if data["add_bos"] is None else data["add_bos"],
        special_tokens={name: tokens[index] for name, index in named.items() if index is not None},
    )


def _add_tokens(backend: Any, tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    """Control tokens and user-defined ones are matched whole, in raw text."""
    added = [index for index, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED) and tokens[index]]
    backend.add_tokens([AddedToken(tokens[i], normalized=False, special=types[i] == _CONTROL) for i in added])
    return added


def _byte_level(data: Mapping[str, Any], cut: Cut) -> Any:
    if data["merges"] is None:
        raise ModelFileError(f"{data['source']}: a byte-level vocabulary without merges (tokenizer.ggml.merges)")
    vocabulary = {text: index for index, text in enumerate(data["tokens"])}
    merges = [_pair(merge, data["source"]) for merge in data["merges"]]
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=cut.ignore_merges))
    normalizer = build_normalizer(cut)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = build_pre_tokenizer(cut)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str, where: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelFileError(
            f"{where}: merge {merge[:40]!r} (tokenizer.ggml.merges) is not two tokens with a space between"
        )
    return left, right


def _sentencepiece(data: Mapping[str, Any], types: Sequence[int], add_space_prefix: bool) -> Any:
    tokens, scores = data["tokens"], data["scores"]
    if scores is None:
        raise ModelFileError(f"{data['source']}: a SentencePiece vocabulary without scores (tokenizer.ggml.scores)")
    if data["architecture"].startswith("gemma"):
        # Gemma's scores do not follow the order its pieces are merged in; the order of its tokens does.
        scores = range(0, -len(tokens), -1)
    pieces = {tokens[i]: i for i, kind in enumerate(types) if kind in (_NORMAL, _USER_DEFINED)}
    unknown = None if data["unk_id"] is None else tokens[data["unk_id"]]
    backend = Backend(
        models.BPE(
            {text: index for index, text in enumerate(tokens)},
            merges_from_scores(pieces, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    marks = [normalizers.Replace(" ", SPACE_MARK)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), *marks] if add_space_prefix else marks)
    stages = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if add_space_prefix else stages)
    return backend


def merges_from_scores(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges a scored vocabulary stands for, best first.

    SentencePiece merges, again and again, the neighbours whose union has the best score; so every split of
    a piece into two pieces is a merge with that piece's score. `pieces`: text -> id; `scores`: by id.
    """
    ranked: list[tuple[float, int, int, str]] = []
    for text, index in pieces.items():
        score = -scores[index]
        ranked += [
            (score, index, -cut, text) for cut in range(1, len(text)) if text[:cut] in pieces and text[cut:] in pieces
        ]
    ranked.sort()
    return [(text[:-cut], text[-cut:]) for _, _, cut, text in ranked]
