"""Whoever writes training texts: our engine, or a server, behind the arms the benchmark has for both.

Called by `data`. Invariant: a prompt that cannot be answered costs that prompt alone, also where the server fails at
it and answers others; a server that answers nothing ends the run with one line, after some tries, and with everything
kept that was written.
"""

from __future__ import annotations

import re
import time
from typing import final

from draftsmith.bench.arms import Answer, Arm, Ask
from draftsmith.errors import UserError
from draftsmith.training.jobs import Reply, Request

_POLL_SECONDS = 0.5
_TRIES = 3
_PAUSE_SECONDS = 2.0
# What a server answers to a prompt it cannot take (too long, malformed) or will not (a filter), whatever comes next.
_PROMPTS_OWN_FAULT = re.compile(r"\S+ (answered (400|413|422)\b|ended as (?!abort))")
# What it answers to whoever asks: no access, no such model, too many requests.
_ANYBODYS = re.compile(r"\S+ answered 4")
_PROBE = Request(messages=[{"role": "user", "content": "Say hello."}], max_new_tokens=16)
_PROBE_KEY = -1


class EndpointFailed(UserError):
    """A server did not answer."""


@final
class ArmAnswerer:
    """An arm as an `Answerer`. `num_tokens`: written so far. `is_remote`: its failures are a server's."""

    def __init__(self, arm: Arm, *, is_remote: bool) -> None:
        self.num_tokens = 0
        self._arm = arm
        self._is_remote = is_remote
        self._asked: dict[int, tuple[Request, int]] = {}
        self._doubted: dict[int, str] = {}
        """Errors of prompts whose tries are used up, until a probe tells whether the server answers others."""

    def submit(self, key: int, request: Request) -> None:
        """Hand it to the arm."""
        self._send(key, request, 1)

    def wait(self) -> list[tuple[int, Reply]]:
        """What came, at least one reply."""
        assert self._asked
        found: list[tuple[int, Reply]] = []
        while not found:
            for item in self._arm.poll(_POLL_SECONDS):
                if isinstance(item, Answer):
                    found += self._heard(item)
        self._arm.take_events()  # nobody reads them, and they would grow
        self.num_tokens += sum(reply.num_tokens for _, reply in found)
        return found

    def cancel(self) -> None:
        """Drop what runs."""
        self._asked.clear()
        self._doubted.clear()
        self._arm.cancel()

    def _heard(self, item: Answer) -> list[tuple[int, Reply]]:
        """What is settled by an answer."""
        request, tries = self._asked.pop(item.key)
        if item.key == _PROBE_KEY:
            if item.error is not None:
                raise _failed(next(iter(self._doubted.values())))
            settled = [(key, Reply(error=error)) for key, error in self._doubted.items()]
            self._doubted.clear()
            return settled
        if item.error is None or not self._may_pass(item.error):
            return [(item.key, _reply(item))]
        if tries < _TRIES:
            self._again(item.key, request, tries)
        else:
            self._doubt(item.key, item.error)
        return []

    def _send(self, key: int, request: Request, tries: int) -> None:
        self._asked[key] = (request, tries)
        self._arm.submit(
            Ask(
                key=key,
                ids=request.ids,
                messages=request.messages,
                text="",
                max_new_tokens=request.max_new_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=request.seed,
            )
        )

    def _may_pass(self, error: str) -> bool:
        return self._is_remote and _PROMPTS_OWN_FAULT.match(error) is None

    def _again(self, key: int, request: Request, tries: int) -> None:
        time.sleep(_PAUSE_SECONDS * tries)
        self._arm.block_counters()  # has it ask a server again that was not there
        self._send(key, request, tries + 1)

    def _doubt(self, key: int, error: str) -> None:
        """The server or the prompt? It is asked something that any server can answer."""
        if _ANYBODYS.match(error):
            raise _failed(error)
        self._doubted[key] = error
        if _PROBE_KEY not in self._asked:
            self._arm.block_counters()
            self._send(_PROBE_KEY, _PROBE, 1)


def _failed(error: str) -> EndpointFailed:
    return EndpointFailed(f"{error}; what was written is kept, and the same command goes on from there")


def _reply(answer: Answer) -> Reply:
    if answer.error is not None:
        return Reply(error=answer.error)
    return Reply(
        text=answer.text,
        finish_reason=answer.finish_reason,
        num_tokens=answer.num_tokens,
        token_ids=answer.token_ids,
    )
