"""Counts the tokens of a streamed answer, chunk by chunk, by the best the server tells.

Used by `endpoint_arm.py`, one tally per request. Token ids are best; then a running count (usage, timings), then log
probabilities, one entry a token. With none of them chunks are held back, and at the end the server's total, or the
caller's tokenizer's, is shared out among them by their text. Invariant: what is handed out adds up to the answer's
tokens, and `counted_by` says how.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, final

from draftsmith.bench.arms import COUNTED_BY, Answer, Arrival, Ask
from draftsmith.bench.endpoint_http import EndpointError, error_in, short
from draftsmith.bench.endpoint_servers import request_counters
from draftsmith.bench.workloads.prompt import mended

_KEPT_TIMINGS = ("prompt_ms", "predicted_ms", "prompt_n", "predicted_n")


@final
class Tally:
    """One request. `count_tokens`: the caller's tokenizer, None without one."""

    def __init__(self, ask: Ask, count_tokens: Callable[[str], int] | None) -> None:
        self._ask = ask
        self._count_tokens = count_tokens
        self._text: list[str] = []
        self._ids: list[int] | None = None
        self._counted = 0
        self._counted_by: str | None = None
        self._held: list[tuple[float, str]] = []
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}
        self._last_seconds = 0.0

    @property
    def num_tokens(self) -> int:
        """Counted so far; of chunks that are held back, their number."""
        return self._counted or len(self._held)

    @property
    def is_finished(self) -> bool:
        """Whether the server has said why it ended."""
        return self._finish_reason is not None

    def take(self, seconds: float, event: dict[str, Any]) -> Arrival | None:
        """A chunk; what became visible with it. Raises `EndpointError`."""
        if (problem := error_in(event)) is not None:
            raise EndpointError(f"gave up: {problem}")
        try:
            return self._take(seconds, event)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EndpointError(f"sent a chunk of unknown form: {short(json.dumps(event))}") from error

    def _take(self, seconds: float, event: dict[str, Any]) -> Arrival | None:
        self._usage = _told(event, "usage") or self._usage
        self._timings = _told(event, "timings") or self._timings
        choices = event["choices"]
        if not choices:
            return None
        choice = choices[0]
        text = _text(choice)
        self._text.append(text)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        num_new = self._count(choice, event)
        if num_new is None:
            if text:
                self._held.append((seconds, text))
            return None
        self._last_seconds = seconds
        self._counted += num_new
        return Arrival(key=self._ask.key, seconds=seconds, num_tokens=num_new) if num_new > 0 else None

    def _count(self, choice: dict[str, Any], event: dict[str, Any]) -> int | None:
        """New tokens of a chunk, None where the server does not tell. One way of counting per answer."""
        by = self._counted_by
        if by is None and self._held:
            return None  # too late to count: the server told nothing of the chunks before
        if by in (None, "token ids") and isinstance(choice.get("token_ids"), list):
            self._counted_by = "token ids"
            new = choice["token_ids"]
            if not all(type(token) is int and token >= 0 for token in new):
                raise ValueError("ids that are no tokens")
            self._ids = (self._ids or []) + new
            return len(new)
        running = {"usage": _count(_told(event, "usage"), "completion_tokens")}
        running["timings"] = _count(_told(event, "timings"), "predicted_n")
        for name, total in running.items():
            if by in (None, name) and total is not None:
                self._counted_by = name
                if total < self._counted:
                    raise EndpointError(f"tells {total} tokens in {name} after {self._counted}")
                return total - self._counted
        entries = choice.get("logprobs") or {}
        listed = entries.get("tokens") or entries.get("content")
        if by in (None, "log probabilities") and isinstance(listed, list):
            self._counted_by = "log probabilities"
            return len(listed)
        # The first chunk of a chat says only whose turn it is: it does not decide how tokens are counted.
        return 0 if by is not None else None

    def finish(self, seconds: float) -> list[Arrival | Answer]:
        """What was held back, and the answer. Raises `EndpointError` where there is none."""
        reason = self._finish_reason
        if reason is None:
            raise EndpointError(f"broke off after {self.num_tokens} tokens without saying why")
        if reason not in ("stop", "length"):
            raise EndpointError(f"ended as {reason}")
        total = _count(self._usage, "completion_tokens")
        is_told = total is not None or self._counted_by is not None
        found: list[Arrival | Answer] = []
        if self._counted_by is None:
            found += self._shared_out(total)
        elif total is not None and self._ids is None and total > self._counted:
            # Such as an end token that had no chunk of its own.
            rest = total - self._counted
            found.append(Arrival(key=self._ask.key, seconds=self._last_seconds or seconds, num_tokens=rest))
            self._counted = total
        if is_told:
            self._check()
        prompt_tokens = _count(self._usage, "prompt_tokens")
        timings = {name: self._timings[name] for name in _KEPT_TIMINGS if name in self._timings}
        answer = Answer(
            key=self._ask.key,
            seconds=seconds,
            prompt_tokens=len(self._ask.ids or ()) if prompt_tokens is None else prompt_tokens,
            token_ids=None if self._ids is None else tuple(self._ids),
            num_tokens=self._counted,
            text=mended("".join(self._text)),
            finish_reason=reason,
            counters=request_counters(self._timings),
            details={COUNTED_BY: self._counted_by, **timings},
        )
        return [*found, answer]

    def _check(self) -> None:
        """Refuse counts that cannot be: they would make a speed of tokens that nobody wrote or asked for."""
        if self._counted > self._ask.max_new_tokens:
            raise EndpointError(f"tells of {self._counted} tokens, and {self._ask.max_new_tokens} were asked for")
        if self._counted == 0 and any(self._text):
            raise EndpointError("tells of no tokens beside a text")

    def _shared_out(self, total: int | None) -> list[Arrival]:
        """Arrivals of chunks whose tokens nobody counted; `total` of them together, where the server told that."""
        count = self._count_tokens
        by = "the caller's tokenizer" if count else "one token a chunk"
        if total is None:
            total = count(mended("".join(self._text))) if count else len(self._held)
            self._counted_by = f"estimate: {by}"
        else:
            self._counted_by = f"estimate: the total by usage, shared out by {by}"
        weights = [max(count(mended(text)), 1) if count else 1 for _, text in self._held]
        whole = sum(weights)
        arrivals, weight, handed_out = [], 0, 0
        for (seconds, _), own in zip(self._held, weights, strict=True):
            weight += own
            so_far = round(total * weight / whole)
            if so_far > handed_out:
                arrivals.append(Arrival(key=self._ask.key, seconds=seconds, num_tokens=so_far - handed_out))
                handed_out = so_far
        self._counted = total if arrivals else 0
        return arrivals


def _text(choice: dict[str, Any]) -> str:
    """Of a completion's chunk or of a chat's, thoughts included."""
    delta = choice.get("delta")
    if delta is None:
        return str(choice.get("text") or "")
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return str(thought) + str(delta.get("content") or "")


def _told(event: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object in a chunk; empty where there is none."""
    found = event.get(name) or {}
    if not isinstance(found, dict):
        raise TypeError(f"{name} is no object")
    return found


def _count(told: Mapping[str, Any], name: str) -> int | None:
    """A number of tokens in such an object; None where it is not told."""
    found = told.get(name)
    if found is None:
        return None
    if type(found) is not int or found < 0:
        raise EndpointError(f"tells {name} as {found!r:.40}")
    return found
