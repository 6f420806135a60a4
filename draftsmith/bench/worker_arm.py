"""An arm whose engine is a worker process with a Python of its own, driven over JSON lines.

The base of the arms in `peer_arms.py`; the runner calls it like every arm. Requests are worked on one at a time,
since none of these engines is asked for more. Invariant: a worker that dies, hangs or says nonsense costs the
requests it had, each answered by one line; what comes later fails at once until the arm is opened again, by a
caller or by itself between two blocks.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from draftsmith.bench.arms import Answer, Arm, Arrival, Ask, Counters, Description, RunInfo
from draftsmith.bench.environment import resident_bytes
from draftsmith.bench.worker_process import Line, WorkerError, WorkerProcess
from draftsmith.errors import UserError

_NOT_OPEN = "the arm is not open"
_CANCEL_SECONDS = 10.0
"""How long a cancelled request may take to end before its worker is ended instead."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How a worker is run. `python`: its interpreter. `timeout`: most seconds for loading, and for one request.

    `log`: a file that gets what its libraries print.
    """

    python: str
    script: Path
    threads: int
    timeout: float = 600.0
    log: Path | None = None


class WorkerArm(Arm):
    """One engine in one process. A subclass says what `load` is asked for, and what a request carries besides."""

    is_outside = True

    def __init__(self, name: str, settings: WorkerSettings, info: RunInfo) -> None:
        self.name = name
        self._settings = settings
        self._info = info
        self._process: WorkerProcess | None = None
        self._waiting: deque[Ask] = deque()
        self._refused: list[Answer] = []
        self._running: Ask | None = None
        self._running_key = -1
        self._num_told = 0
        self._deadline = 0.0
        self._ended_because: str | None = _NOT_OPEN

    @abstractmethod
    def load_arguments(self) -> Mapping[str, Any]:
        """What the worker's `load` gets."""

    @abstractmethod
    def describe(self, found: Mapping[str, Any]) -> Description:
        """From what `load` answered."""

    def stream_arguments(self) -> Mapping[str, Any]:
        """What every request carries besides its own fields."""
        return {}

    # -- the contract -------------------------------------------------------------------------------

    def open(self) -> Description:
        """Start the worker and load the model; again after it has died."""
        self.close()
        settings = self._settings
        try:
            self._process = WorkerProcess(settings.python, settings.script, threads=settings.threads, log=settings.log)
            found = self._process.call("load", settings.timeout, **self.load_arguments())
            if not isinstance(found, dict):
                raise WorkerError(f"load answered {found!r}")
        except WorkerError as error:
            self.close()
            raise UserError(f"{self.name}: {error}") from error
        except BaseException:  # such as Ctrl-C: a worker that is loading would not hear that it may end
            if self._process is not None:
                self._process.kill()
            raise
        self._ended_because = None
        return self.describe(found)

    def submit(self, ask: Ask) -> None:
        """Send it, or keep it until the one before is done."""
        if not ask.ids:
            error = f"{self.name}: takes token ids, and the prompt has none"
            self._refused.append(Answer(key=ask.key, seconds=perf_counter(), error=error))
            return
        self._waiting.append(ask)
        if self._ended_because is None and self._running is None:
            self._send_next()

    def poll(self, timeout: float) -> list[Arrival | Answer]:
        """What the worker said."""
        if self._refused:
            refused, self._refused = self._refused, []
            return list(refused)
        if self._ended_because is not None and (self._waiting or self._running):
            return self._fail_all(self._ended_because)
        if self._running is None or self._process is None:
            time.sleep(timeout)
            return []
        found: list[Arrival | Answer] = []
        try:
            left = self._deadline - perf_counter()
            line = self._process.hear(min(timeout, max(left, 0.0)))
            while line is not None:
                found += self._take(line)
                line = self._process.hear(0.0)
            if not found and self._running is not None and perf_counter() >= self._deadline:
                self._process.kill()
                raise WorkerError(f"no answer within {self._settings.timeout:g} s")
        except WorkerError as error:
            found += self._fail_all(str(error))
        return found

    def cancel(self) -> None:
        """Wait until the worker has dropped it, so that the next request finds it idle."""
        self._refused.clear()
        self._waiting.clear()
        if self._running is None or self._process is None or self._ended_because is not None:
            self._running = None
            return
        self._running = None
        until = perf_counter() + _CANCEL_SECONDS
        try:
            self._process.cancel()
            while (left := until - perf_counter()) > 0:
                line = self._process.hear(left)
                if line is not None and line.key == self._running_key and "tokens" not in line.body:
                    return
            raise WorkerError(f"a cancelled request went on for {_CANCEL_SECONDS:g} s, so its worker was ended")
        except WorkerError as error:
            self._end(str(error))

    def close(self) -> None:
        """End the worker."""
        self._waiting.clear()
        is_idle, self._running = self._running is None, None
        if self._process is not None:
            self._process.close(patience=20.0 if is_idle else 1.0)
        self._process = None
        self._ended_because = _NOT_OPEN

    def block_counters(self) -> None:
        """None are told; but a worker that was lost in the block before is started anew."""
        if self._ended_because in (None, _NOT_OPEN):
            return
        try:
            self.open()
        except UserError as error:
            self._ended_because = str(error).removeprefix(f"{self.name}: ")

    def process_id(self) -> int | None:
        """The worker."""
        return None if self._process is None else self._process.process_id

    def memory_bytes(self) -> int | None:
        """Of the worker."""
        process_id = self.process_id()
        return None if process_id is None else resident_bytes(process_id)

    # -- inside -------------------------------------------------------------------------------------

    def _send_next(self) -> None:
        assert self._process is not None
        ask = self._running = self._waiting.popleft()
        self._num_told = 0
        self._deadline = perf_counter() + self._settings.timeout
        fields: dict[str, Any] = {
            "ids": [int(token) for token in ask.ids or ()],
            "n": ask.max_new_tokens,
            "stop": [] if ask.ignore_eos else sorted(ask.end_ids),
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "seed": ask.seed,
        }
        self._running_key = self._process.ask("stream", **fields, **self.stream_arguments())

    def _take(self, line: Line) -> list[Arrival | Answer]:
        ask = self._running
        if ask is None or line.key != self._running_key:
            raise WorkerError(f"the worker answered request {line.key}, which is not running")
        if "tokens" in line.body:
            num_new = len(line.body["tokens"])
            self._num_told += num_new
            return [Arrival(key=ask.key, seconds=line.seconds, num_tokens=num_new)] if num_new else []
        answer = self._answer(ask, line)
        self._running = None
        if self._waiting:
            self._send_next()
        return [answer]

    def _answer(self, ask: Ask, line: Line) -> Answer:
        if "error" in line.body:
            return Answer(key=ask.key, seconds=line.seconds, error=f"{self.name}: {line.body['error']}")
        result = line.body["result"]
        try:
            ids = tuple(result.pop("ids"))
            counters = Counters(**result.pop("counters"))
            self._check(ask, ids)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WorkerError(f"the worker's result is unreadable: {type(error).__name__}: {error}") from error
        return Answer(
            key=ask.key,
            seconds=line.seconds,
            prompt_tokens=len(ask.ids or ()),
            token_ids=ids,
            num_tokens=len(ids),
            text=self._info.decode(ids) if self._info.decode else "",
            finish_reason="stop" if ids and ids[-1] in ask.end_ids and not ask.ignore_eos else "length",
            counters=counters if counters != Counters() else None,
            details=result,
        )

    def _check(self, ask: Ask, ids: tuple[Any, ...]) -> None:
        """Refuse ids that cannot be this request's: they would be counted as if it had written them."""
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError("ids that are no tokens")
        if len(ids) != self._num_told:
            raise ValueError(f"{len(ids)} tokens, and {self._num_told} were told as they came")
        if len(ids) > ask.max_new_tokens:
            raise ValueError(f"{len(ids)} tokens, and {ask.max_new_tokens} were asked for")

    def _fail_all(self, reason: str) -> list[Arrival | Answer]:
        """End the worker, and answer what it had."""
        asks = [*([self._running] if self._running else []), *self._waiting]
        self._end(reason)
        now = perf_counter()
        return [Answer(key=ask.key, seconds=now, error=f"{self.name}: {reason}") for ask in asks]

    def _end(self, reason: str) -> None:
        if self._process is not None:
            self._process.kill()
        self.close()
        self._ended_because = reason
