"""A directory of raw texts that grows, run by run, until there are enough.

Filled by `data synth` and `data regenerate`. Kept texts go to shards, what was dropped to `dropped.ndjson`, both in the
order of their numbers, and `about.json` says how they came about. Invariants: every number up to the last is in one
of the two; whatever kills a run, the next one finds that again, cuts off a torn last line, parks what stands behind
a gap, and goes on at the first number that is missing; a line that is damaged otherwise, and files of others,
stay as they are.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, final

from draftsmith.errors import DataError
from draftsmith.training.texts import Dropped, Text, dropped_from, json_of, text_from, text_of

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
        self.parked: dict[int, Text | Dropped] = {}
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
                _write(self._drops_file(), number, outcome)
                self.dropped[_short(outcome.reason)] += 1
            else:
                _write(self._shard_file(), number, outcome)
                self._count(outcome.answer_tokens, outcome.finish_reason)
        except OSError as error:
            raise DataError(f"cannot write raw texts to {self.path}: {error.strerror or error}") from error
        self.next_number = number + 1

    def park(self, number: int, outcome: Text | Dropped) -> None:
        """Keep what ended before its turn, for a run that goes on from here."""
        try:
            if self._parking is None:
                # Begun anew, with what still waits: what has been added since is of no use here.
                self._park_anew()
                self._parking = (self.path / PARKED).open("ab")
            _write(self._parking, number, outcome)
        except OSError as error:
            raise DataError(f"cannot write raw texts to {self.path}: {error.strerror or error}") from error

    # -- inside -------------------------------------------------------------------------------------

    def _count(self, answer_tokens: int, finish_reason: str) -> None:
        self.num_texts += 1
        self.answer_tokens += answer_tokens
        self.cut_answers += finish_reason == "length"

    def _shard_path(self, number: int) -> Path:
        return self.path / f"texts-{number:05d}.jsonl"

    def _shards(self) -> list[Path]:
        """Ours, which have numbers without a gap: a shard is begun when the one before is full and on disk."""
        return list(itertools.takewhile(Path.exists, map(self._shard_path, itertools.count())))

    def _shard_file(self) -> IO[bytes]:
        is_full = self.num_texts % self._shard_texts == 0
        if self._shard is None or is_full:
            if self._shard is not None:
                os.fsync(self._shard.fileno())
                self._shard.close()
                self._shard = None
            path = self._shard_path(self.num_texts // self._shard_texts)
            if is_full and path.exists() and path.stat().st_size:
                raise DataError(f"{path} is not of this run and stands in its way; move it to another place")
            self._shard = path.open("ab")
        return self._shard

    def _park_anew(self) -> None:
        """Put what waits in place of what is parked, whole and on disk."""
        part = self.path / f"{PARKED}.part"
        with part.open("wb") as file:
            for number, outcome in sorted(self.parked.items()):
                _write(file, number, outcome)
            os.fsync(file.fileno())
        os.replace(part, self.path / PARKED)

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
            with part.open("w", encoding="utf-8") as file:
                file.write(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a name without what it holds would make the directory nobody's
            os.replace(part, self.path / ABOUT)

    def _mend(self) -> int:
        """Find the first number that is missing, park what stands behind it, and cut off that and torn last lines."""
        found: dict[int, _Line] = {}
        files = [*self._shards(), *filter(Path.exists, [self.path / DROPPED])]
        for path in files:
            for line, _ in _lines(path):
                if line.number in found:
                    raise DataError(f"{line.where}: text {line.number} is in {found[line.number].where} too; "
                                    "remove one of the two lines")  # fmt: skip
                found[line.number] = line
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
        self.parked = _parked(self.path / PARKED, number)
        if len(found) > number:
            self.parked |= {line.number: outcome for path in files for line, outcome in _lines(path)
                            if line.number > number}  # fmt: skip
            self._park_anew()
        for path, end in ends.items():
            if path.stat().st_size > end:
                os.truncate(path, end)
        return number


def check_place(path: Path, made_by: str, settings: Mapping[str, Any], *, partly: bool = False) -> bool:
    """Whether texts of these settings have been begun there; changes nothing. Raises `DataError` for anything else.

    `partly`: more settings will be known later, so that those which are missing here are no difference.
    """
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
        names = {*before.keys()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{where}: not written by `draftsmith data`; name another --output") from error
    if (by, number) != (made_by, FORMAT):
        raise DataError(f"{path} was made by `draftsmith data {by}`, format {number}; name another --output")
    now = json.loads(json.dumps(settings))
    for key in sorted(now if partly else names | {*now}):
        if before.get(key) != now.get(key):
            raise DataError(
                f"{path} was begun with {key} {before.get(key)!r}, now it is {now.get(key)!r}: go on with the same, "
                "or name another --output"
            )
    return True


def _short(reason: str) -> str:
    return reason.partition(":")[0]


def _write(file: IO[bytes], number: int, outcome: Text | Dropped) -> None:
    entry = {"number": number, **outcome.as_json()}
    # Half a character, as a server's complaint may hold one, becomes the JSON escape it came from.
    file.write(json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
    file.flush()


@dataclass(frozen=True, slots=True)
class _Line:
    """Where a text stands, and what is counted of it. `reason`: why it was dropped, None for one that is kept."""

    number: int
    path: Path
    place: int
    end: int
    reason: str | None
    answer_tokens: int
    finish_reason: str

    @property
    def where(self) -> str:
        return f"{self.path}, line {self.place}"


def _lines(path: Path) -> Iterator[tuple[_Line, Text | Dropped]]:
    """The lines of a file but a last one that is torn. Raises `DataError` for one that is damaged otherwise."""
    end, last = 0, -1
    with path.open("rb") as file:
        for place, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                number, outcome = _read(line, f"{path}, line {place}")
                if number <= last:
                    raise DataError(f"{path}, line {place}: text {number} stands behind text {last}")
            except DataError as error:
                raise DataError(f"{error}; repair or remove that line, or the file if it is not of this run") from error
            last = number
            yield (
                _Line(
                    number=number,
                    path=path,
                    place=place,
                    end=end,
                    reason=outcome.reason if isinstance(outcome, Dropped) else None,
                    answer_tokens=outcome.answer_tokens if isinstance(outcome, Text) else 0,
                    finish_reason=outcome.finish_reason if isinstance(outcome, Text) else "",
                ),
                outcome,
            )


def _read(line: bytes, where: str) -> tuple[int, Text | Dropped]:
    """What `_write` wrote. Raises `DataError`."""
    entry = json_of(line, where)
    number = entry.get("number") if isinstance(entry, dict) else None
    if type(number) is not int or number < 0:
        raise DataError(f"{where}: expected an object with a 'number'")
    return number, dropped_from(entry, where) if "reason" in entry else text_from(entry, where)


def _parked(path: Path, next_number: int) -> dict[int, Text | Dropped]:
    """What is parked, from a number on. Nothing in there is needed, so a line that is torn or strange is left out."""
    found: dict[int, Text | Dropped] = {}
    if not path.exists():
        return found
    with path.open("rb") as file:
        for line in file:
            try:
                number, outcome = _read(line, str(path))
            except DataError:
                continue
            if number >= next_number:
                found[number] = outcome
    return found
