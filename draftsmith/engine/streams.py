"""What a caller holds while its requests run: one call, and the iterators that drive it.

Used by the engine for every way of calling it; the scheduler's sequences put their events into the call.
Invariants: a call's events stand in the order they came; an event is there before the count of live
sequences says that it was the last; whoever lets go of an iterator, even one never started, cancels
what is left of its call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, final

from draftsmith.engine.results import GenerationResult, TokenEvent

if TYPE_CHECKING:
    from draftsmith.engine.sequence import Sequence


@final
class Call:
    """The sequences of one generate or stream, and what their caller sees of them."""

    __slots__ = ("cancelled", "error", "events", "num_live", "sequences")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.events: deque[TokenEvent] = deque()
        self.num_live = 0
        self.error: BaseException | None = None
        self.cancelled = False

    @property
    def settled(self) -> bool:
        """Whether there is nothing to wait for: an event or an error is there, or all sequences have ended."""
        return bool(self.events) or self.error is not None or self.num_live == 0

    def take(self) -> TokenEvent | None:
        """The oldest event not taken yet, None when there is none. Raises the error that ended a sequence."""
        if self.events:
            return self.events.popleft()
        if self.error is not None:
            raise self.error
        return None


@final
class TokenStream(Iterator[TokenEvent]):
    """Events of a call as they come; closing or dropping it cancels."""

    _closed = True  # until it is made: an interrupt inside `__init__` leaves nothing to let go of

    def __init__(self, call: Call, advance: Callable[[Call], None], cancel: Callable[[Call], None]) -> None:
        self._call = call
        self._advance = advance
        self._cancel = cancel
        self._closed = False

    def __next__(self) -> TokenEvent:
        call = self._call
        try:
            while not self._closed:
                # Asked before the events: the last event comes before the count falls to 0.
                is_live = call.num_live > 0
                event = call.take()
                if event is not None:
                    return event
                if not is_live:
                    break
                self._advance(call)
        except BaseException:
            self.close()
            raise
        raise StopIteration

    @property
    def ready(self) -> bool:
        """Whether the next event, or the end, is there without a further step."""
        return self._closed or self._call.settled

    def advance(self) -> None:
        """Let the engine make one step, for all its requests, unless this stream is ready.

        For those who follow many streams at once and want to see what each step brought.
        """
        if not self.ready:
            self._advance(self._call)

    def results(self) -> list[GenerationResult]:
        """The samples as far as they have come; whole once the stream has ended."""
        return [sequence.result() for sequence in self._call.sequences]

    def close(self) -> None:
        """Cancel what still runs; nothing more is yielded."""
        self._cancel(self._call)
        self._closed = True

    def __del__(self) -> None:
        if not self._closed:
            self.close()


@final
class AsyncTokenStream(AsyncIterator[TokenEvent]):
    """`TokenStream` for asynchronous callers; cancelling the task that waits for an event cancels the call."""

    _closed = True  # see `TokenStream`

    def __init__(self, call: Call, advance: Callable[[Call], Awaitable[None]], cancel: Callable[[Call], None]) -> None:
        self._call = call
        self._advance = advance
        self._cancel = cancel
        self._closed = False

    async def __anext__(self) -> TokenEvent:
        call = self._call
        try:
            while not self._closed:
                is_live = call.num_live > 0
                event = call.take()
                if event is not None:
                    return event
                if not is_live:
                    break
                await self._advance(call)
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancel what still runs; nothing more is yielded. Never waits."""
        self._cancel(self._call)
        self._closed = True

    async def aclose(self) -> None:
        """`close`, under the name that asynchronous generators have."""
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            self.close()
