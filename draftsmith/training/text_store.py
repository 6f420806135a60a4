"""A directory of raw texts that grows, run by run, until there are enough.

Filled by `data synth` and `data regenerate`. Kept texts go to shards, what was dropped to `dropped.ndjson`, both in the
order of their numbers, and `about.json` says how they came about. Invariants: every number up to the last is in one
of the two; whatever kills a run, the next one finds that again, cuts off what is torn or stands behind a gap,
and goes on at the first number that is missing.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, final

from draftsmith.errors import DataError
from draftsmith.training.texts import SHARDS, Dropped, Text, text_from, text_of

FORMAT = 1
ABOUT, DROPPED, PARKED, LOCK = "about.json", "dropped.ndjson", "parked.ndjson", ".lock"
SHARD_TEXTS = 5000
_PART = f"{ABOUT}.part"


@final
class TextStore:
    """The texts so far. `next_number`: of the text that comes next; `dropped`: how many, by reason.

    `parked`: outcomes of an earlier run that ended before their turn; `add` takes them like others when it comes.
    A context manager: outside of `with` nothing may be added.
    """

    def __init__(self, path: Path, made_by: str, settings: Mapping[str, Any], shard_texts: int = SHARD_TEXTS) -> None:
        """Open a directory, or begin one.

        `settings`: everything the texts depend on; a directory that was made with others is refused. Raises
        `DataError`, also when another process writes there.
        """
        self.path = path
        self.num_texts = 0
        self.answer_tokens = 0
        self.cut_answers = 0
        self.dropped: Counter[str] = Counter()
        self._shard_texts = shard_texts
        self._shard: IO[bytes] | None = None
        self._drops: IO[bytes] | None = None
        self._parking: IO[bytes] | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / LOCK).open("wb")
        except OSError as error:
            raise DataError(f"cannot write raw texts to {path}: {error.strerror or error}") from error
        try:
            self._claim()
            self._begin(made_by, settings)
            self.next_number = self._mend()
            self.parked = _parked(path / PARKED, self.next_number)
        except BaseException as error:
            self._lock.close()
            if isinstance(error, OSError):
                raise DataError(f"cannot write raw texts to {path}: {error.strerror or error}") from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed: OSError | None = None
        for file in (self._shard, self._drops, self._parking):
            try:
                if file is not None:
                    with file:
                        os.fsync(file.fileno())
            except OSError as problem:
                failed = problem  # a full disk: what did not reach it is still in the file's buffer
        self._shard = self._drops = self._parking = None
        self._lock.close()
        if failed is not None and error is None:
            raise DataError(f"cannot write raw texts to {self.path}: {failed.strerror or failed}") from failed

    def texts(self) -> Iterator[Text]:
        """The texts that are kept, in order."""
        for shard in self._shards():
            with shard.open("rb") as file:
                for number, line in enumerate(file, 1):
                    yield text_of(line, f"{shard}, line {number}")

    def add(self, outcome: Text | Dropped) -> None:
        """Take the next text, or the fact that it was dropped. Its line is with the system before this returns."""
        number = self.next_number
        try:
            if isinstance(outcome, Dropped):
                entry = {"number": number, "id": outcome.text_id, "reason": outcome.reason, "sample": outcome.sample}
                self._write(self._drops_file(), entry)
                self.dropped[_short(outcome.reason)] += 1
            else:
                self._write(self._shard_file(), {"number": number, **outcome.as_json()})
                self._count(outcome.answer_tokens, outcome.finish_reason)
        except OSError as error:
            raise DataError(f"cannot write raw texts to {self.path}: {error.strerror or error}") from error
        self.next_number = number + 1

    def park(self, number: int, outcome: Text | Dropped) -> None:
        """Keep what ended before its turn, for a run that goes on from here."""
        entry = (
            {"dropped": [outcome.reason, outcome.text_id, outcome.sample]}
            if isinstance(outcome, Dropped)
            else {"text": outcome.as_json()}
        )
        try:
            if self._parking is None:
                # Begun anew, with what still waits: what has been added since is of no use here.
                self._parking = (self.path / PARKED).open("wb")
                for waiting, earlier in sorted(self.parked.items()):
                    self.park(waiting, earlier)
            self._write(self._parking, {"number": number, **entry})
        except OSError as error:
            raise DataError(f"cannot write raw texts to {self.path}: {error.strerror or error}") from error

    # -- inside -------------------------------------------------------------------------------------

    def _count(self, answer_tokens: int, finish_reason: str) -> None:
        self.num_texts += 1
        self.answer_tokens += answer_tokens
        self.cut_answers += finish_reason == "length"

    def _write(self, file: IO[bytes], entry: Mapping[str, Any]) -> None:
        file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        file.flush()

    def _shards(self) -> list[Path]:
        return sorted(self.path.glob(SHARDS))

    def _shard_file(self) -> IO[bytes]:
        if self._shard is None or self.num_texts % self._shard_texts == 0:
            if self._shard is not None:
                os.fsync(self._shard.fileno())
                self._shard.close()
            number = self.num_texts // self._shard_texts
            self._shard = (self.path / f"texts-{number:05d}.jsonl").open("ab")
        return self._shard

    def _drops_file(self) -> IO[bytes]:
        if self._drops is None:
            self._drops = (self.path / DROPPED).open("ab")
        return self._drops

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{self.path}: another run is writing there; wait for it, or name another --output"
            ) from error

    def _begin(self, made_by: str, settings: Mapping[str, Any]) -> None:
        """Write down how the texts come about, unless it is there."""
        if not check_place(self.path, made_by, settings):
            whole = {"draftsmith_texts": FORMAT, "made_by": made_by, "settings": settings}
            part = self.path / _PART
            part.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(part, self.path / ABOUT)

    def _mend(self) -> int:
        """Find the first number that is missing, and cut off what stands behind it or is torn."""
        found: dict[int, _Line] = {}
        files = [*self._shards(), *([self.path / DROPPED] if (self.path / DROPPED).exists() else [])]
        for path in files:
            found |= {line.number: line for line in _lines(path)}
        ends = dict.fromkeys(files, 0)
        number = 0
        while number in found:
            line = found[number]
            ends[line.path] = line.end
            if line.reason is None:
                self._count(line.answer_tokens, line.finish_reason)
            else:
                self.dropped[_short(line.reason)] += 1
            number += 1
        for path, end in ends.items():
            if not end:
                path.unlink()
            elif path.stat().st_size > end:
                os.truncate(path, end)
        return number


def check_place(path: Path, made_by: str, settings: Mapping[str, Any]) -> bool:
    """Whether texts of these settings have been begun there; changes nothing. Raises `DataError` for anything else."""
    where = path / ABOUT
    try:
        others = sorted(item.name for item in path.iterdir()) if path.exists() else []
        written = where.read_text(encoding="utf-8") if where.exists() else None
    except OSError as error:
        raise DataError(f"cannot write raw texts to {path}: {error.strerror or error}") from error
    if written is None:
        foreign = [name for name in others if name not in (LOCK, _PART)]
        if foreign:
            raise DataError(f"{path} holds other files ({foreign[0]}); name a new or empty directory")
        return False
    try:
        about = json.loads(written)
        before, by, number = about["settings"], about["made_by"], about["draftsmith_texts"]
        names = {*before}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where}: not written by `draftsmith data`; name another --output") from error
    if (by, number) != (made_by, FORMAT):
        raise DataError(f"{path} was made by `draftsmith data {by}`, format {number}; name another --output")
    now = json.loads(json.dumps(settings))
    for key in sorted(names | {*now}):
        if before.get(key) != now.get(key):
            raise DataError(
                f"{path} was begun with {key} {before.get(key)!r}, now it is {now.get(key)!r}: go on with the same, "
                "or name another --output"
            )
    return True


def _short(reason: str) -> str:
    return reason.partition(":")[0]


@dataclass(frozen=True, slots=True)
class _Line:
    """Where a text stands, and what is counted of it. `reason`: why it was dropped, None for one that is kept."""

    number: int
    path: Path
    end: int
    reason: str | None
    answer_tokens: int
    finish_reason: str


def _parked(path: Path, next_number: int) -> dict[int, Text | Dropped]:
    """What is parked, from a number on. Nothing in there is needed, so a line that is torn or strange is left out."""
    found: dict[int, Text | Dropped] = {}
    if not path.exists():
        return found
    with path.open("rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
                number, dropped = entry["number"], entry.get("dropped")
                if dropped is None:
                    outcome: Text | Dropped = text_from(entry["text"], str(path))
                else:
                    outcome = Dropped(reason=dropped[0], text_id=dropped[1], sample=dropped[2])
            except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
                continue
            if number >= next_number:
                found[number] = outcome
    return found


def _lines(path: Path) -> Iterator[_Line]:
    """The lines of a file up to the first that is torn or none of ours."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                return
            if not isinstance(entry, dict) or type(entry.get("number")) is not int:
                return
            yield _Line(
                number=entry["number"],
                path=path,
                end=end,
                reason=str(entry.get("reason")) if path.name == DROPPED else None,
                answer_tokens=int(entry.get("answer_tokens", 0)),
                finish_reason=str(entry.get("finish_reason")),
            )
