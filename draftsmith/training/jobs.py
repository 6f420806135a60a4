"""Conversations that are written step by step, many at once, and come out in order.

A `Job` is a generator: it yields one `Request` at a time, is sent the `Reply`, and returns the finished `Text` or why
it was `Dropped`. Called by the command line with whatever answers requests. Invariant: outcomes come in the order
of the jobs, whichever ends first, so that what is decided along that order (duplicates, where a run stops) is the
same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from draftsmith.training.texts import Dropped, Text

_WINDOW = 6
"""Jobs begun and not handed out yet, in multiples of those at work: a long text holds up those behind it."""

Message: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a job asks to be written. `ids`: the prompt as the target's token ids, where messages cannot say it."""

    messages: Sequence[Message]
    ids: Sequence[int] | None = None
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What was written. `finish_reason`: "stop" or "length". `token_ids`: None where only text is told.

    `error`: why this request cannot be answered, and then nothing else counts.
    """

    text: str = ""
    finish_reason: str = ""
    num_tokens: int = 0
    token_ids: Sequence[int] | None = None
    error: str | None = None


Job: TypeAlias = Generator[Request, Reply, Text | Dropped]


class Answerer(Protocol):
    """Whoever writes: an engine, a server. Raises `UserError` from `wait` when it can go on with nothing at all."""

    def submit(self, key: int, request: Request) -> None:
        """Take a request; returns at once."""

    def wait(self) -> list[tuple[int, Reply]]:
        """At least one reply to what was submitted, by its key."""

    def cancel(self) -> None:
        """Drop what is being written."""


def in_order(
    jobs: Iterable[Job],
    answerer: Answerer,
    *,
    at_once: int,
    first: int = 0,
    parked: Mapping[int, Text | Dropped] | None = None,
    park: Callable[[int, Text | Dropped], None] = lambda number, outcome: None,
) -> Generator[Text | Dropped, None, None]:
    """Outcomes of the jobs, in their order, `at_once` of them being written at any time.

    Jobs are numbered from `first`. `park` hears of each that ended before its turn, so that a run that is stopped
    loses none of them: given as `parked`, they are not begun again.
    """
    source = iter(jobs)
    running: dict[int, Job] = {}
    done: dict[int, Text | Dropped] = dict(parked or {})
    begun = handed_out = first
    is_exhausted = False

    def send(number: int, job: Job, reply: Reply | None) -> None:
        try:
            request = next(job) if reply is None else job.send(reply)
        except StopIteration as end:
            done[number] = end.value
            if number != handed_out:
                park(number, end.value)
        else:
            running[number] = job
            answerer.submit(number, request)

    try:
        while True:
            while not is_exhausted and len(running) < at_once and begun - handed_out < _WINDOW * at_once:
                job = next(source, None)
                is_exhausted = job is None
                if job is not None:
                    if begun not in done:
                        send(begun, job, None)
                    begun += 1
            while handed_out in done and handed_out < begun:
                outcome = done.pop(handed_out)
                handed_out += 1
                yield outcome
            if running:
                for number, reply in answerer.wait():
                    send(number, running.pop(number), reply)
            elif is_exhausted and handed_out == begun:
                return
    finally:
        answerer.cancel()
