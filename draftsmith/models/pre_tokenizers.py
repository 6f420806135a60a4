"""How byte-level vocabularies cut text before merging, by the name GGUF files give it.

Called when a tokenizer is built from GGUF metadata. The patterns are those of the models' published
`tokenizer.json` files; which names share one follows llama.cpp. A wrong cut changes token ids without
any other sign, so an unknown name is refused; a file without a name warns and gets GPT-2's cut.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from draftsmith.errors import UnsupportedError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """Llama 3's and Qwen 2's pattern: a word takes one sign before it along."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, end: str) -> str:
    """GPT-4o's and Mistral's (tekken) pattern: a word ends where lower case turns to upper."""
    first = r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}{_UPPER}*{_LOWER}+{end}|{first}{_UPPER}+{_LOWER}*{end}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One way to cut text.

    `patterns`: applied one after the other, each match becomes a piece of its own. `words`: GPT-2's own
    pattern comes last. `ignore_merges`: a piece that is a token as a whole is that token. `add_bos`: a
    prompt starts with the begin token unless the file says otherwise. `nfc`: text is composed first.
    """

    patterns: tuple[str, ...] = ()
    words: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = Cut(words=True)
_DIGIT_BY_DIGIT = Cut(patterns=(r"\p{N}",), words=True)
_LLAMA3_PATTERN = _words(r"\p{N}{1,3}")
_LLAMA3 = Cut(patterns=(_LLAMA3_PATTERN,), ignore_merges=True, add_bos=True)
_QWEN_PATTERN = _words(r"\p{N}")
_GPT4O = Cut(patterns=(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"),))

CUTS: Mapping[str, Cut] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4", "mellum"), _GPT2),
        **dict.fromkeys(
            ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGIT_BY_DIGIT
        ),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
        **dict.fromkeys(("dbrx", "smaug-bpe"), Cut(patterns=(_LLAMA3_PATTERN,))),
        "qwen2": Cut(patterns=(_QWEN_PATTERN,), nfc=True),
        **dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), Cut(patterns=(_QWEN_PATTERN,))),
        "tekken": Cut(patterns=(_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
        "deepseek-coder": Cut(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    }
)


def cut_named(name: str | None, where: str) -> Cut:
    """The cut a GGUF file names. Raises `UnsupportedError` for an unknown name; none, or "default", warns."""
    if name in (None, "", "default"):
        warnings.warn(
            f"{where}: the file does not say how its vocabulary cuts text (tokenizer.ggml.pre); GPT-2's cut is used",
            stacklevel=2,
        )
        return _GPT2
    cut = CUTS.get(name or "")
    if cut is None:
        raise UnsupportedError(
            f"{where}: unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); known: {', '.join(CUTS)}"
        )
    return cut


def build_pre_tokenizer(cut: Cut) -> Any:
    """The `tokenizers` object for a cut; the last stage spells bytes as characters."""
    stages: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.words))
    return pre_tokenizers.Sequence(stages)


def build_normalizer(cut: Cut) -> Any:
    """Unicode composition where the model was trained with it, else None."""
    return normalizers.NFC() if cut.nfc else None
