"""Writes an answer to stdout while it comes, colored by where each token came from.

Called by `generate`, `chat` and the demo. Invariant: without color the bytes written are the answer's text and
nothing else; with color they are the same text between escape codes.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from typing import TYPE_CHECKING, TextIO, final

from draftsmith.cli.options import When
from draftsmith.engine.results import Origin, TokenEvent
from draftsmith.models.detokenizer import Detokenizer

if TYPE_CHECKING:
    from draftsmith.models.tokenizer import Tokenizer

_CODES = {Origin.ACCEPTED: "32", Origin.CORRECTED: "33", Origin.BONUS: "36", Origin.PLAIN: ""}
ORIGIN_MEANINGS = {
    Origin.ACCEPTED: "drafted and accepted",
    Origin.CORRECTED: "the target's correction",
    Origin.BONUS: "bonus after a full draft",
    Origin.PLAIN: "not drafted",
}


def wants_color(when: When, stream: TextIO) -> bool:
    """Whether to color: `auto` means on a terminal, unless NO_COLOR is set."""
    if when is When.AUTO:
        return stream.isatty() and not os.environ.get("NO_COLOR")
    return when is When.ALWAYS


def paint(text: str, origin: Origin) -> str:
    """Text in the color of an origin."""
    code = _CODES[origin]
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text


def legend() -> str:
    """One line that explains the colors."""
    return "  ".join(
        paint(f"■ {meaning}" if _CODES[origin] else meaning, origin) for origin, meaning in ORIGIN_MEANINGS.items()
    )


@final
class OriginRuns:
    """Splits the text of an answer's events by where its characters came from."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._origins: deque[Origin] = deque()  # of the characters decoded and not yet handed out

    def of(self, event: TokenEvent) -> list[tuple[str, Origin]]:
        """The event's text in runs of one origin each."""
        # Text can lag behind its tokens (partial characters, possible stop strings), so characters wait with
        # their token's origin until the engine hands them out.
        for token, origin in zip(event.token_ids, event.origins, strict=True):
            self._origins.extend([origin] * len(self._detokenizer.add(token)))
        runs: list[tuple[str, Origin]] = []
        for character in event.text:
            origin = self._origins.popleft() if self._origins else Origin.PLAIN
            if runs and runs[-1][1] is origin:
                runs[-1] = (runs[-1][0] + character, origin)
            else:
                runs.append((character, origin))
        return runs


@final
class AnswerWriter:
    """Writes the events of one answer to a stream."""

    def __init__(self, tokenizer: Tokenizer, *, color: bool, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._runs = OriginRuns(tokenizer) if color else None
        self._last = "\n"

    def write(self, event: TokenEvent) -> None:
        """Write what an event brought, at once."""
        text = event.text
        if text:
            self._last = text[-1]
        if self._runs is not None:
            text = "".join(paint(part, origin) for part, origin in self._runs.of(event))
        self._stream.write(text)
        self._stream.flush()

    def end(self) -> None:
        """End the answer's last line if it is open."""
        if self._last != "\n":
            self._stream.write("\n")
            self._stream.flush()
