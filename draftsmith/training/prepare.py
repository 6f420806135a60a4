"""From raw texts to the two corpora a drafter is trained and judged on.

Called by `data prepare`. Every text is read twice: once to find doubles and to draw the validation texts by the hash
of what their users first say, so that one prompt is never on both sides; once to make token ids. Invariant: the
output is there whole or not at all, and every text that was read is in it or counted as left out, by reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.errors import DataError, OptionError
from draftsmith.io import staging
from draftsmith.io.files import open_model
from draftsmith.models.chat import ChatTemplate
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.spellings import vocabulary_digest
from draftsmith.models.tokenizer import Tokenizer
from draftsmith.training.corpus import ABOUT, COUNTS, CorpusTarget, CorpusWriter
from draftsmith.training.masking import Masked, Masker, Unmasked
from draftsmith.training.texts import Text, find_files, read_texts

TRAIN, VALIDATION = "train", "validation"
_OURS = re.compile(rf"({TRAIN}|{VALIDATION})(/({re.escape(ABOUT)}|{re.escape(COUNTS)}|shard-\d+\.safetensors))?")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What preparation needs of a model; its weights are not read."""

    described: CorpusTarget
    masker: Masker


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """`max_len`: most tokens of a text. `validation`: share of prompts held out. Raises `OptionError`."""

    max_len: int = 2048
    validation: float = 0.05

    def __post_init__(self) -> None:
        if self.max_len < 2:
            raise OptionError(f"max_len must be at least 2, got {self.max_len}")
        if not 0 <= self.validation < 1:
            raise OptionError(f"validation is a share, from 0 to below 1; got {self.validation}")


@dataclass(kw_only=True)
class Figures:
    """What became of the texts. `read`: lines; `cut`: texts of more than `max_len` tokens; `left_out`: by reason.

    `split`: conversations whose answers became texts of their own because the template rewrites what was said.
    """

    read: int = 0
    cut: int = 0
    split: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    answer_tokens: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        sides = {
            side: {
                "texts": self.texts[side],
                "tokens": self.tokens[side],
                "answer_tokens": self.answer_tokens[side],
            }
            for side in (TRAIN, VALIDATION)
        }
        return {
            "texts_read": self.read,
            "texts_cut": self.cut,
            "conversations_split": self.split,
            "left_out": dict(self.left_out),
            **sides,
        }


def open_target(name: str) -> Target:
    """The tokenizer's side of a model. Raises `ModelFileError`, and `DataError` where it has no chat template."""
    files = open_model(name)
    spec = DecoderSpec.from_config(files.config)
    tokenizer = Tokenizer.from_data(files.tokenizer)
    if not files.chat_template:
        raise DataError(f"{name} has no chat template, so it cannot be trained for conversations")
    chat = ChatTemplate(files.chat_template, tokenizer.special_tokens)
    described = CorpusTarget(name=name, vocab_size=spec.vocab_size, tokenizer=vocabulary_digest(tokenizer))
    return Target(described=described, masker=Masker(chat, tokenizer, files.eos_ids | tokenizer.eos_ids))


def check_output(path: Path, *, force: bool) -> None:
    """Raise a `UserError` unless a prepared corpus may be written there."""
    staging.check_output(path, what="prepared texts", is_ours=lambda path: (path / TRAIN / ABOUT).exists())
    found = sorted(path.rglob("*")) if path.exists() else []
    for item in found:
        if not _OURS.fullmatch(item.relative_to(path).as_posix()):
            raise DataError(f"output {path} holds more than prepared texts ({item.name}); give another")
    if found and not force:
        raise DataError(f"{path} holds prepared texts already; give --force to replace them, or name another --output")


def prepare(
    inputs: Sequence[Path],
    target: Target,
    output: Path,
    options: PrepareOptions,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Figures:
    """Write `output`/train and `output`/validation (no such directory where the share is 0).

    `tell`: hears how many texts of how many are done. Raises `DataError` for texts that cannot be read or that give
    nothing to learn, with nothing written.
    """
    files = find_files(inputs)
    figures = Figures()
    held_out, total = _held_out(files, options.validation)
    try:
        with staging.staged_directory(output) as place:
            writers = {}
            for side in (TRAIN, VALIDATION) if options.validation else (TRAIN,):
                (place / side).mkdir()
                writers[side] = CorpusWriter(place / side, target.described)
            seen: set[bytes] = set()
            for path in files:
                for text in read_texts(path):
                    figures.read += 1
                    _take(text, target, options, writers, held_out, seen, figures)
                    tell(figures.read, total)
            if not figures.texts[TRAIN]:
                raise DataError(f"no text of {', '.join(map(str, inputs))} can be learnt from: {_reasons(figures)}")
            for writer in writers.values():
                writer.finish()
    except OSError as error:
        raise DataError(f"cannot write {output}: {error.strerror or error}") from error
    return figures


def _held_out(files: Sequence[Path], share: float) -> tuple[set[bytes], int]:
    """The prompts of the validation side, and how many texts there are."""
    prompts: set[bytes] = set()
    total = 0
    for path in files:
        for text in read_texts(path):
            total += 1
            prompts.add(_prompt_key(text))
    # One at least, and never all: a few texts are enough to try things out.
    number = min(max(1, round(share * len(prompts))), len(prompts) - 1) if share else 0
    return set(sorted(prompts)[:number]), total


def _take(
    text: Text,
    target: Target,
    options: PrepareOptions,
    writers: Mapping[str, CorpusWriter],
    held_out: set[bytes],
    seen: set[bytes],
    figures: Figures,
) -> None:
    key = _hash(json.dumps(text.messages))
    if key in seen:
        figures.left_out["the same text again"] += 1
        return
    seen.add(key)
    try:
        masked = target.masker.mask(text)
    except Unmasked as reason:
        figures.left_out[str(reason).partition(":")[0]] += 1
        return
    figures.split += len(masked) > 1
    side = VALIDATION if _prompt_key(text) in held_out else TRAIN
    for item in masked:
        cut = Masked(tokens=item.tokens[: options.max_len], answer=item.answer[: options.max_len])
        if not any(cut.answer):
            figures.left_out["no answer within max_len" if any(item.answer) else "empty answer"] += 1
            continue
        if max(cut.tokens) >= target.described.vocab_size:
            figures.left_out["a token that the model has no row for"] += 1
            continue
        figures.cut += len(cut.tokens) < len(item.tokens)
        writers[side].add(cut.tokens, cut.answer)
        figures.texts[side] += 1
        figures.tokens[side] += len(cut.tokens)
        figures.answer_tokens[side] += sum(cut.answer)


def _prompt_key(text: Text) -> bytes:
    return _hash("\0".join(text.said_by("user")[:1]))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _reasons(figures: Figures) -> str:
    if not figures.read:
        return "there are none"
    return "; ".join(f"{number} left out: {reason}" for reason, number in figures.left_out.items())
