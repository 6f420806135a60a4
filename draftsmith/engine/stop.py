"""Stop rules, applied token by token inside an accepted path.

Called by the sequence for every emitted token. Invariant: the first rule met ends the sample at that
token; text already handed out never contains a stop string or a part of one that was found.
"""

from __future__ import annotations

from draftsmith.models.detokenizer import Detokenizer


class StopRules:
    """End ids, stop strings and the token limit of one sample, over its own detokenizer."""

    __slots__ = ("_detokenizer", "_end_ids", "_held", "_limit", "_longest", "_min_tokens", "_num_tokens", "_strings")

    def __init__(
        self, detokenizer: Detokenizer, end_ids: frozenset[int], strings: tuple[str, ...], limit: int, min_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._end_ids = end_ids
        self._strings = strings
        self._limit = limit
        self._min_tokens = min_tokens
        self._longest = max((len(text) for text in strings), default=0)
        self._num_tokens = 0
        self._held = ""  # text that could still become part of a stop string

    def add(self, token: int) -> tuple[str, str | None]:
        """Take one emitted token. Returns the text to hand out and the finish reason, if this token ends it."""
        self._num_tokens += 1
        past_minimum = self._num_tokens > self._min_tokens
        if token in self._end_ids and past_minimum:
            return self.flush(), "stop"
        text = self._held + self._detokenizer.add(token)
        if self._strings and past_minimum:
            cut = min((at for at in (text.find(stop) for stop in self._strings) if at >= 0), default=-1)
            if cut >= 0:
                self._held = ""
                return text[:cut], "stop"
        if self._num_tokens >= self._limit:
            self._held = ""
            return text + self._detokenizer.flush(), "length"
        keep = len(text) - self._num_held(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text still held back (the sample ended without a stop string)."""
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text

    def _num_held(self, text: str) -> int:
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._strings):
                return size
        return 0
