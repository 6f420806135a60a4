"""When requests are sent: a fixed number at once, or at times that do not wait for the engine.

Called by benchmarks under load. In a closed loop a slow engine is asked less, which hides its queue; an open loop
keeps its times whatever the engine does. Everything is made before the run, from a seed. Invariant: a specification
and a seed give the same times every time; the first ones do not depend on how many are asked for; Poisson and gamma
times at another rate are the same ones stretched, so that a sweep over rates compares like with like.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from draftsmith.bench.traces import TraceRequest, read_trace
from draftsmith.errors import OptionError, PromptError

_MOST_REQUESTS = 1_000_000
_FORMS = "closed:8, poisson:2.5, bursty:rate=2:cv=4, bursty:rate=2:on=5:off=15, trace:FILE, trace:FILE:scale=0.5"


@final
@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """`concurrency` requests at any time: the next is sent when one has ended, in the order of the prompts."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise OptionError(f"concurrency must be at least 1, got {self.concurrency}")


@final
@dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """Requests at given times, in seconds from the start of the run, ascending.

    `requests`: what a trace says of each of them; empty where nothing is said. `skipped`: the trace's lines that
    were left out, each with its reason.
    """

    times: tuple[float, ...]
    requests: tuple[TraceRequest, ...] = ()
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.times:
            raise OptionError("an open loop needs at least one request")
        if not all(math.isfinite(time) and time >= 0 for time in self.times):
            raise OptionError("the times of an open loop are finite and not negative")
        if any(later < earlier for earlier, later in itertools.pairwise(self.times)):
            raise OptionError("the times of an open loop must ascend")
        if self.requests and len(self.requests) != len(self.times):
            raise OptionError(f"{len(self.requests)} requests do not fit {len(self.times)} times")

    def prompts(self, usable: Sequence[int]) -> tuple[int, ...]:
        """Which prompt each request sends: the trace's, else one usable after another and round again.

        Raises `PromptError` where a trace names a prompt that is not among them.
        """
        chosen, known = [], set(usable)
        for number, request in enumerate(self.requests or (TraceRequest(),) * len(self.times)):
            if request.prompt is not None and request.prompt not in known:
                raise PromptError(
                    f"request {number + 1} of the trace asks for prompt {request.prompt}, which is none of the "
                    f"{len(usable)} that can be sent; prompts are counted from 0"
                )
            chosen.append(usable[number % len(usable)] if request.prompt is None else request.prompt)
        return tuple(chosen)


@final
@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Independent requests: gaps of the exponential law. `rate`: requests per second."""

    rate: float

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)

    def times(self, seed: int) -> Iterator[float]:
        """Times without end."""
        draw = random.Random(f"poisson/{seed}")
        return (time / self.rate for time in itertools.accumulate(draw.expovariate(1.0) for _ in itertools.count()))


@final
@dataclass(frozen=True, kw_only=True)
class GammaBursts:
    """Gaps of the gamma law: `cv` is their standard deviation over their mean. 1 is Poisson; above, requests flock."""

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _check_positive("rate", self.rate)
        _check_positive("cv", self.cv)
        if not 0.01 <= self.cv <= 100:
            raise OptionError(f"cv must be between 0.01 and 100, got {self.cv:g}")

    def times(self, seed: int) -> Iterator[float]:
        """Times without end."""
        draw = random.Random(f"gamma/{seed}")
        shape = self.cv**-2
        gaps = (draw.gammavariate(shape, 1.0) / shape for _ in itertools.count())
        return (time / self.rate for time in itertools.accumulate(gaps))


@final
@dataclass(frozen=True, kw_only=True)
class OnOffBursts:
    """Spells of `on` seconds with Poisson requests and of `off` seconds with none, in turn, beginning with one.

    `rate` is the mean over both, so within a spell requests come (on + off) / on times as often.
    """

    rate: float
    on: float
    off: float

    def __post_init__(self) -> None:
        for name in ("rate", "on", "off"):
            _check_positive(name, getattr(self, name))

    def times(self, seed: int) -> Iterator[float]:
        """Times without end."""
        inside = Poisson(rate=self.rate * (self.on + self.off) / self.on)
        for time in inside.times(seed):
            # `time` counts the seconds of the spells alone.
            spell, rest = divmod(time, self.on)
            yield spell * (self.on + self.off) + rest


@final
@dataclass(frozen=True, kw_only=True)
class Trace:
    """The times of a file, counted from its first request. `scale` multiplies them: 0.5 replays at double speed."""

    path: Path
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("scale", self.scale)


Arrivals = ClosedLoop | Poisson | GammaBursts | OnOffBursts | Trace


def parse_arrivals(text: str) -> Arrivals:
    """How requests arrive, from its command-line form. Raises `OptionError` that shows the forms."""
    kind, _, rest = text.partition(":")
    if kind == "closed":
        return ClosedLoop(concurrency=_whole(text, rest))
    if kind == "poisson":
        return Poisson(rate=_real(text, "rate", rest.removeprefix("rate=")))
    if kind == "bursty":
        values = _values(text, rest)
        if values.keys() == {"rate", "cv"}:
            return GammaBursts(**values)
        if values.keys() == {"rate", "on", "off"}:
            return OnOffBursts(**values)
        raise OptionError(f"arrivals {text!r}: bursty takes rate and cv, or rate, on and off; such as {_FORMS}")
    if kind == "trace" and rest:
        path, mark, scale = rest.rpartition(":scale=")
        return Trace(path=Path(path), scale=_real(text, "scale", scale)) if mark else Trace(path=Path(rest))
    raise OptionError(f"arrivals {text!r} are not known; write {_FORMS}")


def plan(arrivals: Arrivals, *, num_requests: int | None, num_prompts: int = 1, seed: int = 0) -> ClosedLoop | OpenLoop:
    """What to do in a run: the loop itself, or the times of `num_requests` requests.

    `num_requests`: None is one for each of the `num_prompts` prompts, and all that a trace holds; of a trace the first.
    """
    if num_requests is not None and not 1 <= num_requests <= _MOST_REQUESTS:
        raise OptionError(f"requests must be from 1 to {_MOST_REQUESTS}, got {num_requests}")
    if isinstance(arrivals, ClosedLoop):
        return arrivals
    if isinstance(arrivals, Trace):
        trace = read_trace(arrivals.path)
        first = trace.times[0]
        return OpenLoop(
            times=tuple((time - first) * arrivals.scale for time in trace.times[:num_requests]),
            requests=trace.requests[:num_requests],
            skipped=trace.skipped,
        )
    return OpenLoop(times=tuple(itertools.islice(arrivals.times(seed), num_requests or num_prompts)))


def _values(text: str, rest: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in rest.split(":"):
        name, mark, value = part.partition("=")
        if not mark or name in values:
            raise OptionError(f"arrivals {text!r}: {part!r} is not a new key=value; write {_FORMS}")
        values[name] = _real(text, name, value)
    return values


def _real(text: str, name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise OptionError(f"arrivals {text!r}: {name} must be a number, got {value!r}; write {_FORMS}") from error


def _whole(text: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise OptionError(f"arrivals {text!r}: a whole number of requests is needed, got {value!r}; write {_FORMS}")
    return int(value)


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise OptionError(f"{name} must be a number above 0, got {value:g}")
