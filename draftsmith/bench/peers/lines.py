"""JSON lines between a benchmark and an engine that lives in a virtual environment of its own: the worker's end.

Used by the scripts beside this file; the other end is `draftsmith.bench.worker_process`. A request
`{"key": N, "command": NAME, ...arguments}` is answered by any number of `{"key": N, "tokens": [...], "seconds": S}`
and one `{"key": N, "result": ...}` or `{"key": N, "error": TEXT}`; `{"cancel": N}` ends the requests up to N early.
Standard library only, because the worker's environment has nothing of ours. Invariant: only answers go to
the pipe; whatever a library prints to standard output lands on standard error.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

Emit = Callable[[Sequence[int]], None]
"""What a streaming command calls with its new tokens. Raises `Cancelled`."""


class Cancelled(Exception):
    """Nobody waits for this request any more."""


class Desk:
    """Takes requests from standard input and answers them one after another."""

    def __init__(self, commands: Mapping[str, Callable[..., Any]], streaming: Mapping[str, Callable[..., Any]]) -> None:
        self._commands, self._streaming = commands, streaming
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._cancelled = -1

    def run(self) -> None:
        """Until standard input ends. It is read in a thread, so that a cancellation is heard during a request."""
        threading.Thread(target=self._read, daemon=True).start()
        while (request := self._requests.get()) is not None:
            key, name = request.pop("key"), request.pop("command")
            try:
                answer = {"result": self._answer(key, name, request)}
            except Cancelled:
                answer = {"error": "cancelled"}
            except Exception as error:  # the edge of the process: the benchmark decides what a failure means
                traceback.print_exc(file=sys.stderr)
                answer = {"error": f"{name}: {type(error).__name__}: {error}"}
            self._write({"key": key, **answer})

    def _answer(self, key: int, name: str, arguments: dict[str, Any]) -> Any:
        if name not in self._streaming:
            return self._commands[name](**arguments)
        began = perf_counter()

        def emit(tokens: Sequence[int]) -> None:
            if key <= self._cancelled:
                raise Cancelled
            self._write({"key": key, "tokens": [int(token) for token in tokens], "seconds": perf_counter() - began})

        return self._streaming[name](emit, **arguments)

    def _read(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if "cancel" in request:
                self._cancelled = request["cancel"]
            else:
                self._requests.put(request)
        # Nobody is there any more: what still runs ends at its next tokens.
        self._cancelled = sys.maxsize
        self._requests.put(None)

    def _write(self, line: dict[str, Any]) -> None:
        self._answers.write(json.dumps(line) + "\n")
        self._answers.flush()


def serve(
    commands: Mapping[str, Callable[..., Any]], streaming: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Answer requests on standard input until it ends. `streaming`: commands whose first argument is an `Emit`."""
    Desk(commands, streaming or {}).run()
