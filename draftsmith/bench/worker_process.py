"""JSON lines between a benchmark and an engine that lives in a virtual environment of its own: the benchmark's end.

Used by the arms of other engines and by `benchmarks/bench_native.py`; the lines are described in `peers/lines.py`.
A thread reads what the worker says and notes when. Invariant: a worker that dies, or says what is no answer to
anything, ends in a `WorkerError` with one clear line, never in a wait without end.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import IO, Any, final

SCRIPTS = Path(__file__).parent / "peers"
"""Where the workers are."""
_SHOWN = 200
"""Most characters of what a worker printed that an error repeats."""


class WorkerError(RuntimeError):
    """A worker could not do what it was asked for, or has died."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """What a worker said. `seconds`: when it was heard. `body`: `tokens`, `result` or `error`, as in `lines.py`."""

    key: int
    seconds: float
    body: dict[str, Any]


@final
class WorkerProcess:
    """A running worker. Its libraries are told to use `threads` threads by themselves."""

    def __init__(self, python: str, script: Path, *, threads: int, log: Path | None = None) -> None:
        """`log`: gets what its libraries print; without one only the last line of a worker that dies is told.

        Raises `WorkerError` when it cannot be started.
        """
        try:
            self._log: IO[bytes] = log.open("a+b") if log else tempfile.TemporaryFile()
        except OSError as error:
            raise WorkerError(f"cannot write its log {log}: {error.strerror}") from error
        try:
            # In a session of its own, so that an interrupt from the keyboard reaches the benchmark alone.
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"cannot start {python}: {error.strerror}") from error
        self._heard: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self._to_say: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._last_key = -1
        self._is_over = False
        # Writing has a thread too: a long prompt does not fit the pipe, and a worker that hangs never empties it.
        for loop in (self._listen, self._talk):
            threading.Thread(target=loop, daemon=True).start()

    @property
    def process_id(self) -> int:
        """The worker's process."""
        return self._process.pid

    def ask(self, command: str, **arguments: Any) -> int:
        """Send a request; its number. That the worker is gone is told by what is heard next."""
        self._last_key += 1
        self._send({"key": self._last_key, "command": command, **arguments})
        return self._last_key

    def cancel(self) -> None:
        """Let everything asked for so far end early. It is answered all the same."""
        self._send({"cancel": self._last_key})

    def hear(self, timeout: float) -> Line | None:
        """The next line, None when there is none within `timeout` seconds. Raises `WorkerError`."""
        if self._is_over:
            raise WorkerError(self._obituary())
        try:
            seconds, text = self._heard.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None
        if not text.endswith("\n"):
            self._is_over = True
            raise WorkerError(self._obituary())
        return _parse(text, seconds, self._last_key)

    def call(self, command: str, timeout: float | None = None, **arguments: Any) -> Any:
        """Ask and wait for the result. Raises `WorkerError`; a worker that says nothing for `timeout` is ended."""
        key = self.ask(command, **arguments)
        while True:
            line = self.hear(threading.TIMEOUT_MAX if timeout is None else timeout)
            if line is None:
                self.kill()
                raise WorkerError(f"{command}: no answer within {timeout:g} s")
            if line.key != key or "tokens" in line.body:
                continue
            if "error" in line.body:
                raise WorkerError(str(line.body["error"]))
            return line.body["result"]

    def kill(self) -> None:
        """End it now, with whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self, patience: float = 20.0) -> None:
        """Let it end, and end it where it does not within `patience` seconds. Harmless when repeated."""
        self._to_say.put(None)
        try:
            self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._to_say.put(json.dumps(message) + "\n")

    def _talk(self) -> None:
        assert self._process.stdin
        # Closing flushes, and so may find the pipe broken once more.
        with contextlib.suppress(OSError), self._process.stdin as stream:
            while (text := self._to_say.get()) is not None:
                stream.write(text)
                stream.flush()

    def _listen(self) -> None:
        assert self._process.stdout
        with self._process.stdout as stream:
            for text in stream:
                self._heard.put((perf_counter(), text))
        self._heard.put((perf_counter(), ""))

    def _obituary(self) -> str:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "the worker closed its output"
        last = self._last_words()
        return f"the worker ended with status {status}" + (f": {last}" if last else "")

    def _last_words(self) -> str:
        if self._log.closed:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - 4096, 0))
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        return next((line.strip()[:_SHOWN] for line in reversed(lines) if line.strip()), "")


def _parse(text: str, seconds: float, last_key: int) -> Line:
    try:
        body = json.loads(text)
        key = body.pop("key")
        is_known = isinstance(key, int) and 0 <= key <= last_key
    except (ValueError, KeyError, TypeError, AttributeError):
        is_known = False
    if not is_known or not ({"result", "error"} & body.keys() or _are_tokens(body.get("tokens"))):
        raise WorkerError(f"the worker said what is no answer: {text.strip()[:_SHOWN]!r}")
    return Line(key=key, seconds=seconds, body=body)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
