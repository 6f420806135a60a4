"""Tokenizers for tests: the embedded model's, and small SentencePiece ones."""

import functools

from hypothesis import strategies as st

from draftsmith.io.files import open_model
from draftsmith.models.tokenizer import Tokenizer

spellable = st.text(
    st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"), max_size=60
)
"""Text the embedded vocabulary can spell: it lacks 21 bytes, among them six control characters."""

PIECES = ["▁", "a", "b", "c", "e", "h", "l", "o", "r", "w", "é", "x", "1", "2"]
"""Single characters; longer pieces below, with scores: the better, the earlier merged."""
MERGED = {
    "he": -1.0,
    "ll": -2.0,
    "llo": -3.0,
    "hello": -4.0,
    "▁w": -5.0,
    "or": -6.0,
    "▁wor": -6.5,
    "ab": -7.0,
    "bc": -7.0,
}


def sentencepiece_data(**changes):
    """Plain data of a small SentencePiece vocabulary, as a GGUF file holds it."""
    singles = dict.fromkeys(PIECES, -100.0)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = MERGED | singles
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, "<tool>", "<end_of_turn>"]
    data = {
        "kind": "gguf",
        "source": "test",
        "architecture": "llama",
        "model": "llama",
        "pre": None,
        "tokens": tokens,
        "token_types": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4, 3],
        "scores": [0.0] * 259 + list(pieces.values()) + [0.0, 0.0],
        "merges": None,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 0,
        "pad_id": None,
        "eos_ids": [2, tokens.index("<end_of_turn>")],
        "add_bos": None,
        "add_space_prefix": None,
    }
    return data | changes


@functools.cache
def embedded():
    """SmolLM2's byte-level tokenizer."""
    return Tokenizer.from_data(open_model("smollm2").tokenizer)


@functools.cache
def sentencepiece():
    """A small vocabulary without the space prefix, as Gemma's."""
    return Tokenizer.from_data(sentencepiece_data(add_space_prefix=False))


@functools.cache
def prefixed():
    """A small vocabulary with the space prefix, as Llama 2's."""
    return Tokenizer.from_data(sentencepiece_data())
