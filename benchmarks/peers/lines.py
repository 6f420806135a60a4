"""JSON lines between a benchmark and a peer that lives in a virtual environment of its own.

The worker's end is `serve`, used by the scripts beside this file; the benchmark's end is `Peer`. One request
`{"command": NAME, ...arguments}` per line is answered by one line, `{"result": ...}` or `{"error": TEXT}`.
Standard library only, because the worker's environment has nothing of ours. Invariant: only answers go to
the pipe; whatever a library prints to standard output lands on standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class PeerError(RuntimeError):
    """A peer could not do what it was asked for, or has died."""


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("command")
        try:
            answer = {"result": commands[name](**request)}
        except Exception as error:  # the edge of the process: the benchmark decides what a failure means
            traceback.print_exc(file=sys.stderr)
            answer = {"error": f"{name}: {type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Peer:
    """A running worker. `threads` also limits what its libraries would start by themselves."""

    def __init__(self, python: str, script: Path, *, threads: int, log: Path | None = None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._log = log.open("a") if log else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=environment,
        )

    @property
    def process_id(self) -> int:
        """The worker's process."""
        return self._process.pid

    def call(self, command: str, **arguments: Any) -> Any:
        """Ask and wait. Raises `PeerError`."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"{command}: the peer ended with status {self._process.wait()}; see --peer-log")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End the worker."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        if not isinstance(self._log, int):
            self._log.close()
