"""Features on disk: the target scores each text once, however many passes are trained.

Called by the trainer when a cache directory is given. Shards of consecutive texts are written one by one, so an
interrupted filling goes on where it ended. Invariants: a shard appears whole or not at all and is marked with its
cache's key; features belong to one corpus and one target's weights on one backend, and any other use is refused by
name; a cache with more taps than asked for serves.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.drafters.base import Tap
from draftsmith.errors import DataError
from draftsmith.io.tensor_file import save_tensors
from draftsmith.training.corpus import ABOUT, Corpus
from draftsmith.training.features import LAST_HIDDEN, FeatureSource, MaskedText, TargetScorer, TextFeatures, narrow

FORMAT = 2
KEY = "features.json"
_ANEW = "delete the directory, or give another --cache"
_DIFFERENT = {
    "target": "a target with other weights or another backend",
    "texts": "another number of texts",
    "shards": "another number of shards",
}
"""How a cache's key differs, in words."""
SHARD_TOKENS = 1 << 14


def corpus_digest(corpus: Corpus) -> str:
    """sha256 over a corpus's files."""
    digest = hashlib.sha256()
    for file in [corpus.path / ABOUT, *sorted(corpus.path.glob("shard-*.safetensors"))]:
        digest.update(file.name.encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def shards_of(lengths: Sequence[int], kept: Sequence[int]) -> list[list[int]]:
    """The texts of each shard: consecutive kept ones, about `SHARD_TOKENS` tokens each."""
    shards: list[list[int]] = []
    room = 0
    for index in kept:
        if room <= 0:
            shards.append([])
            room = SHARD_TOKENS
        shards[-1].append(index)
        room -= lengths[index]
    return shards


@final
class CachedFeatures(FeatureSource):
    """Features of the texts `kept` of a corpus, from a directory that `fill` completes."""

    def __init__(
        self, path: Path, corpus: Corpus, kept: Sequence[int], scorer: TargetScorer, key: Mapping[str, Any]
    ) -> None:
        """`key`: what the features depend on beside corpus and taps. Raises `DataError` for a directory of another
        key, or one that lacks a tap that `scorer` gives.
        """
        self._path = path
        self._corpus = corpus
        self._wanted = scorer.taps
        self._shards = shards_of(corpus.lengths.tolist(), kept)
        self._place = {
            index: (shard, place) for shard, members in enumerate(self._shards) for place, index in enumerate(members)
        }
        self._opened: dict[int, tuple[Any, list[int]]] = {}
        self._scorer = scorer
        facts = {**key, "corpus": corpus_digest(corpus), "texts": len(kept), "shards": len(self._shards)}
        # What is missing is scored for all that the directory holds taps of.
        taps, self._mark = self._claim(facts)
        self._scorer = scorer.with_taps(taps)

    def text(self, index: int) -> MaskedText:
        return MaskedText(tokens=self._corpus.tokens(index), answer=self._corpus.answer(index))

    @property
    def missing(self) -> list[int]:
        """Shards that are not there yet."""
        return [shard for shard in range(len(self._shards)) if not self._file(shard).exists()]

    def fill(
        self,
        tell: Callable[[int, int], None],
        stop: Callable[[], bool] = lambda: False,
        own: Callable[[Sequence[int]], Sequence[int]] = lambda shards: shards,
    ) -> bool:
        """Score and write what is missing; `tell(done, all)` after each shard. False when `stop()` ended it.

        `own`: which of all shards are this process's to make.
        """
        for shard in own(range(len(self._shards))):
            if self._file(shard).exists():
                with self._named(shard):
                    self._open(shard)
                continue
            if stop():
                return False
            self._write(shard)
            tell(len(self._shards) - len(self.missing), len(self._shards))
        return True

    def features(self, indices: Sequence[int]) -> list[TextFeatures]:
        return [self._read(*self._place[index]) for index in indices]

    def _claim(self, facts: Mapping[str, Any]) -> tuple[frozenset[Tap], str]:
        """Have the directory hold features of this kind; the taps it holds, and the mark of its shards."""
        where = self._path / KEY
        wanted = json.loads(json.dumps({"draftsmith_features": FORMAT, **facts}))
        taps = sorted(map(str, self._wanted - {LAST_HIDDEN}))
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self._path)
            if where.exists():
                taps = self._held(json.loads(where.read_text(encoding="utf-8")), wanted, taps)
            else:
                others = [name.name for name in self._path.iterdir() if not name.name.startswith(".")]
                if others:
                    raise DataError(f"{self._path} holds other files ({others[0]}, ...); give a --cache of its own")
                text = json.dumps({**wanted, "taps": taps}, indent=1) + "\n"
                _write_whole(where, lambda path: path.write_text(text, encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{self._path}: cannot be used as a cache: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{where}: not valid JSON ({error}); {_ANEW}") from error
        mark = hashlib.sha256(json.dumps({**wanted, "taps": taps}, sort_keys=True).encode()).hexdigest()
        return frozenset(map(_tap, taps)), mark

    def _held(self, found: Any, wanted: Mapping[str, Any], taps: Sequence[str]) -> list[str]:
        """The taps of a cache that is there. Raises `DataError` unless it serves."""
        where = self._path / KEY
        if not isinstance(found, dict):
            raise DataError(f"{where}: damaged, an object is needed; {_ANEW}")
        if found.get("draftsmith_features") != FORMAT:
            raise DataError(f"{self._path} is a cache of another version, which does not say of which weights; {_ANEW}")
        differs = [_DIFFERENT.get(name, f"another {name}") for name in wanted if found.get(name) != wanted[name]]
        if differs:
            raise DataError(f"{self._path} holds features of {', '.join(differs)}; give another --cache directory")
        held = found.get("taps")
        known = set(map(str, self._scorer.known_taps))
        if not isinstance(held, list) or not all(isinstance(tap, str) and tap in known for tap in held):
            raise DataError(f"{where}: damaged, its taps are {held!r}; {_ANEW}")
        lacking = sorted(set(taps) - set(held))
        if lacking:
            raise DataError(f"{self._path} holds no features of {', '.join(lacking)}; give another --cache directory")
        return held

    def _file(self, shard: int) -> Path:
        return self._path / f"features-{shard:05d}.safetensors"

    def _write(self, shard: int) -> None:
        members = self._shards[shard]
        found = self._scorer.score([self.text(index) for index in members])
        tensors = {
            f"tap.{tap}": narrow(torch.cat([item.taps[tap] for item in found])) for tap in found[0].taps
        }  # fmt: skip
        tensors["best"] = torch.cat([item.best_L for item in found]).to(torch.int32)
        tensors["log_total"] = torch.cat([item.log_total_L for item in found])
        tensors["offsets"] = torch.tensor([0, *(len(item.best_L) for item in found)]).cumsum(0)
        try:
            _write_whole(self._file(shard), lambda path: save_tensors(tensors, path, self._about(shard)))
        except OSError as error:
            raise DataError(f"{self._file(shard)}: cannot be written ({error.strerror or error})") from error

    def _read(self, shard: int, place: int) -> TextFeatures:
        with self._named(shard):
            file, offsets = self._open(shard)
            start, end = offsets[place : place + 2]
            rows = {name: file.get_slice(name)[start:end] for name in file.keys() if name != "offsets"}
        taps: dict[Tap, torch.Tensor] = {}
        for name, tensor in rows.items():
            kind, _, tap = name.partition(".")
            if kind == "tap" and _tap(tap) in self._wanted:
                taps[_tap(tap)] = tensor
        return TextFeatures(taps=taps, best_L=rows["best"].to(torch.int64), log_total_L=rows["log_total"])

    def _open(self, shard: int) -> tuple[Any, list[int]]:
        """A shard, and where its texts begin and end. Raises `ValueError` for one that is not of this cache."""
        if shard not in self._opened:
            file = safe_open(str(self._file(shard)), framework="pt")
            if (file.metadata() or {}) != self._about(shard):
                raise ValueError("it is of another cache")
            offsets = [0, *accumulate(int(self._corpus.lengths[index]) for index in self._shards[shard])]
            taps = {f"tap.{tap}": [offsets[-1], self._scorer.width] for tap in self._scorer.taps}
            shapes = {**taps, "best": [offsets[-1]], "log_total": [offsets[-1]], "offsets": [len(offsets)]}
            if {name: file.get_slice(name).get_shape() for name in file.keys()} != shapes:
                raise ValueError("its tensors do not fit the texts")
            if file.get_tensor("offsets").tolist() != offsets:
                raise ValueError("its offsets do not fit the texts")
            self._opened[shard] = (file, offsets)
        return self._opened[shard]

    def _about(self, shard: int) -> dict[str, str]:
        return {"cache": self._mark, "shard": str(shard)}

    @contextmanager
    def _named(self, shard: int) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, ValueError) as error:
            problem = " ".join(str(error).split())
            raise DataError(
                f"{self._file(shard)}: not a readable shard of this cache ({problem}); delete it, and the same command "
                "makes it anew"
            ) from error


def _remove_leftovers(directory: Path) -> None:
    """Delete what killed processes left half-written."""
    for staging in directory.glob(".features*.*"):
        owner = staging.name.rpartition(".")[2]
        if owner.isdigit() and not _is_alive(int(owner)):
            staging.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's, or no number of a process
        pass
    return True


def _tap(name: str) -> Tap:
    return int(name) if name.isdigit() else name


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Have a file appear whole."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(staging)
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
