"""Prepared texts on disk: token ids of one target, and which of them belong to an answer.

Written by `training.prepare`, read by the trainer. A corpus is a directory: `data.json`, shards of tokens,
masks and offsets, and how often each token is in an answer. Invariant: a `Corpus` that opened is consistent in
itself; whatever does not fit is one `DataError` that names the file and what is wrong with it.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.errors import DataError
from draftsmith.io.tensor_file import save_tensors
from draftsmith.models.spellings import Spellings, vocabulary_digest

FORMAT = 1
ABOUT, COUNTS = "data.json", "counts.safetensors"
SHARD_TOKENS = 1 << 24
"""A shard is closed when it holds so many tokens: 80 MiB."""
_SHARD_TYPES = {"tokens": torch.int32, "answer": torch.uint8, "offsets": torch.int64}


@dataclass(frozen=True, kw_only=True)
class CorpusTarget:
    """Whose token ids these are. `vocab_size`: rows of the model's head; `tokenizer`: `vocabulary_digest`."""

    name: str
    vocab_size: int
    tokenizer: str


@dataclass(frozen=True, kw_only=True)
class _Shard:
    tokens: torch.Tensor
    answer: torch.Tensor
    offsets: torch.Tensor


@final
class Corpus:
    """Texts by number, from 0.

    `counts`: how often each token of the vocabulary is in an answer, int64 [V]. `lengths`: tokens of each text,
    int64 [texts]. Shards are mapped, not read, so a corpus may be larger than memory.
    """

    def __init__(
        self, path: Path, target: CorpusTarget, shards: Sequence[_Shard], counts: torch.Tensor, answer_tokens: int
    ) -> None:
        self.path = path
        self.target = target
        self.counts = counts
        self.answer_tokens = answer_tokens
        self._shards = shards
        self._firsts = [0]
        for shard in shards:
            self._firsts.append(self._firsts[-1] + len(shard.offsets) - 1)
        empty = torch.zeros(0, dtype=torch.int64)
        self.lengths = torch.cat([empty, *(shard.offsets.diff() for shard in shards)])

    @classmethod
    def open(cls, path: Path) -> Corpus:
        """Read and check a directory. Raises `DataError`."""
        about = _read_about(path)
        target = CorpusTarget(**about["target"])
        shards = [_read_shard(path, entry, target.vocab_size) for entry in about["shards"]]
        found = {
            "texts": sum(len(shard.offsets) - 1 for shard in shards),
            "tokens": sum(len(shard.tokens) for shard in shards),
            "answer_tokens": sum(int(shard.answer.sum(dtype=torch.int64)) for shard in shards),
        }
        for key, number in found.items():
            if about[key] != number:
                raise DataError(f"{path / ABOUT}: says {about[key]} {key}, its shards hold {number}; prepare it again")
        counts = _read_counts(path / COUNTS, target.vocab_size, found["answer_tokens"])
        return cls(path, target, shards, counts, found["answer_tokens"])

    def __len__(self) -> int:
        return self._firsts[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return int(self.lengths.sum())

    def tokens(self, index: int) -> torch.Tensor:
        """Token ids of a text, int64 [length]."""
        shard, start, end = self._place(index)
        return shard.tokens[start:end].to(torch.int64)

    def answer(self, index: int) -> torch.Tensor:
        """Which tokens of a text belong to an answer (its end token included), bool [length]."""
        shard, start, end = self._place(index)
        return shard.answer[start:end].to(torch.bool)

    def check_target(self, name: str, vocab_size: int, tokenizer: Spellings) -> None:
        """Raise `DataError` unless these texts are in the token ids of that target."""
        if self.target.vocab_size != vocab_size:
            raise DataError(
                f"{self.path}: prepared for {self.target.name} with {self.target.vocab_size} tokens, {name} has "
                f"{vocab_size}; prepare the texts again with --model {name}"
            )
        if self.target.tokenizer != vocabulary_digest(tokenizer):
            raise DataError(
                f"{self.path}: prepared for {self.target.name}, whose vocabulary spells other tokens than that of "
                f"{name}; prepare the texts again with --model {name}"
            )

    def _place(self, index: int) -> tuple[_Shard, int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        number = bisect.bisect_right(self._firsts, index) - 1
        shard = self._shards[number]
        start, end = shard.offsets[index - self._firsts[number] :][:2].tolist()
        return shard, start, end


@final
class CorpusWriter:
    """Fills a directory that is there and empty; `finish` completes it. Memory: one shard.

    To have a corpus appear whole or not at all, write it into `io.staging.staged_directory`.
    """

    def __init__(self, path: Path, target: CorpusTarget, shard_tokens: int = SHARD_TOKENS) -> None:
        self._path = path
        self._target = target
        self._shard_tokens = shard_tokens
        self._texts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pending = 0
        self._shards: list[dict[str, Any]] = []
        self._answer_tokens = 0
        self._counts = torch.zeros(target.vocab_size, dtype=torch.int64)

    def add(self, tokens: Sequence[int], answer: Sequence[bool]) -> None:
        """Take one text and its mask."""
        assert 0 < len(tokens) == len(answer)
        ids, mask = torch.tensor(tokens, dtype=torch.int64), torch.tensor(answer, dtype=torch.bool)
        assert 0 <= int(ids.min()) and int(ids.max()) < self._target.vocab_size
        self._counts += torch.bincount(ids[mask], minlength=self._target.vocab_size)
        self._answer_tokens += int(mask.sum())
        self._texts.append((ids.to(torch.int32), mask.to(torch.uint8)))
        self._pending += len(tokens)
        if self._pending >= self._shard_tokens:
            self._close_shard()

    def finish(self) -> None:
        """Write what is left, the counts, and last of all the file that makes the directory a corpus."""
        self._close_shard()
        save_tensors({"answer_counts": self._counts}, self._path / COUNTS)
        about = {
            "draftsmith_data": FORMAT,
            "target": {
                "name": self._target.name,
                "vocab_size": self._target.vocab_size,
                "tokenizer": self._target.tokenizer,
            },
            "texts": sum(entry["texts"] for entry in self._shards),
            "tokens": sum(entry["tokens"] for entry in self._shards),
            "answer_tokens": self._answer_tokens,
            "shards": self._shards,
        }
        (self._path / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    def _close_shard(self) -> None:
        if not self._texts:
            return
        name = f"shard-{len(self._shards):05d}.safetensors"
        lengths = torch.tensor([0, *(len(tokens) for tokens, _ in self._texts)], dtype=torch.int64)
        arrays = {
            "tokens": torch.cat([tokens for tokens, _ in self._texts]),
            "answer": torch.cat([mask for _, mask in self._texts]),
            "offsets": lengths.cumsum(0),
        }
        save_tensors(arrays, self._path / name)
        self._shards.append({"file": name, "texts": len(self._texts), "tokens": self._pending})
        self._texts, self._pending = [], 0


# -- reading ----------------------------------------------------------------------------------------


def _read_about(path: Path) -> dict[str, Any]:
    where = path / ABOUT
    try:
        about = json.loads(where.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} holds no prepared texts ({ABOUT} is missing); make some by `draftsmith data prepare`"
                        ) from error  # fmt: skip
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error})") from error
    number = about.get("draftsmith_data") if isinstance(about, dict) else None
    if number != FORMAT or isinstance(number, bool):
        raise DataError(
            f"{where}: format {number!r} is not known (key 'draftsmith_data' must be {FORMAT}); "
            "prepare the texts again with this version"
        )
    keys = {"target": dict, "texts": int, "tokens": int, "answer_tokens": int, "shards": list}
    _check_keys(about, keys, str(where))
    _check_keys(
        about["target"], {"name": str, "vocab_size": int, "tokenizer": str}, f"{where}: key 'target'", only=True
    )
    if about["target"]["vocab_size"] < 1:
        raise DataError(f"{where}: 'vocab_size' is {about['target']['vocab_size']}, must be at least 1")
    for entry in about["shards"]:
        _check_keys(entry, {"file": str, "texts": int, "tokens": int}, f"{where}: key 'shards'")
        if Path(entry["file"]).name != entry["file"]:
            raise DataError(f"{where}: shard {entry['file']!r} is not the name of a file beside it")
    return about


def _check_keys(found: Any, keys: Mapping[str, type], where: str, *, only: bool = False) -> None:
    if not isinstance(found, dict):
        raise DataError(f"{where} must be an object, found {found!r}")
    for key, kind in keys.items():
        if not isinstance(found.get(key), kind) or isinstance(found[key], bool):
            raise DataError(f"{where}: {key!r} must be of type {kind.__name__}, found {found.get(key)!r}")
    if only and set(found) != set(keys):
        raise DataError(f"{where} has unknown keys: {', '.join(sorted(set(found) - set(keys)))}")


def _read_tensors(where: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(str(where), framework="pt") as file:
            missing = set(names) - set(file.keys())
            if missing:
                raise DataError(f"{where}: tensor {sorted(missing)[0]!r} is missing")
            return {name: file.get_tensor(name) for name in names}
    except FileNotFoundError as error:
        raise DataError(f"{where} is missing; prepare the texts again") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"{where}: not a readable safetensors file ({' '.join(str(error).split())})") from error


def _read_shard(path: Path, entry: Mapping[str, Any], vocab_size: int) -> _Shard:
    where = path / entry["file"]
    arrays = _read_tensors(where, list(_SHARD_TYPES))
    for name, dtype in _SHARD_TYPES.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != 1:
            raise DataError(f"{where}: tensor {name!r} must be a list of {str(dtype).removeprefix('torch.')}")
    tokens, answer, offsets = (arrays[name] for name in _SHARD_TYPES)
    if len(answer) != len(tokens) or len(tokens) != entry["tokens"]:
        raise DataError(
            f"{where}: holds {len(tokens)} tokens with {len(answer)} answer marks; {entry['tokens']} are expected"
        )
    ends = [int(offsets[0]), int(offsets[-1])] if len(offsets) else []
    if len(offsets) != entry["texts"] + 1 or ends != [0, len(tokens)] or not bool((offsets.diff() > 0).all()):
        raise DataError(
            f"{where}: the offsets do not fit: they must rise from 0 to {len(tokens)} over {entry['texts']} texts"
        )
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise DataError(f"{where}: holds a token outside the vocabulary (0 to {vocab_size - 1})")
    if len(answer) and int(answer.max()) > 1:
        raise DataError(f"{where}: an answer mark is neither 0 nor 1")
    return _Shard(tokens=tokens, answer=answer, offsets=offsets)


def _read_counts(where: Path, vocab_size: int, answer_tokens: int) -> torch.Tensor:
    counts = _read_tensors(where, ["answer_counts"])["answer_counts"]
    if counts.dtype != torch.int64 or counts.shape != (vocab_size,):
        raise DataError(f"{where}: 'answer_counts' must be {vocab_size} numbers of int64, has shape {[*counts.shape]}")
    if int(counts.sum()) != answer_tokens or int(counts.min()) < 0:
        raise DataError(f"{where}: 'answer_counts' sums to {int(counts.sum())}, the shards hold {answer_tokens}")
    return counts.clone()
