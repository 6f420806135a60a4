"""How long requests took, and how many of them were quick enough.

Called by the summary, on requests that were answered. Invariant: a distribution is over all requests or all gaps
of a run pooled, never a mean of means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from draftsmith.bench.runs import RequestRun
from draftsmith.errors import OptionError

DEFINITIONS = {
    "ttft": "seconds from when a request was due to its first visible token (closed loop: from when it was sent)",
    "tpot": "seconds from the first visible token to the end, over the tokens after those that came first",
    "itl_step": "seconds between two arrivals of a request, however many tokens the later one brought",
    "itl_token": "the same gap shared out over the tokens it brought, one entry for each",
    "e2e": "seconds from when a request was due to its end",
    "goodput": "requests per second of wall time that met every target: ttft, tpot or e2e, in seconds",
}
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a quick request keeps to, in seconds; None: anything."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @staticmethod
    def parse(text: str) -> Targets:
        """Read `ttft=0.5,tpot=0.05`. Raises `OptionError`."""
        found: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            try:
                seconds = float(value)
            except ValueError:
                seconds = -1.0
            if name not in ("ttft", "tpot", "e2e") or not seconds > 0:
                raise OptionError(f"latency target {part!r}: write ttft=SECONDS, tpot=SECONDS or e2e=SECONDS")
            found[name] = seconds
        return Targets(**found)

    def met_by(self, request: RequestRun) -> bool:
        """Whether an answered request kept to all of them."""
        for limit, value in ((self.ttft, ttft(request)), (self.tpot, tpot(request)), (self.e2e, e2e(request))):
            if limit is not None and value is not None and value > limit:
                return False
        return True


def ttft(request: RequestRun) -> float | None:
    """Seconds to the first token; None for a request without any."""
    return request.arrivals[0][0] - request.due if request.arrivals else None


def e2e(request: RequestRun) -> float:
    """Seconds to the end."""
    return request.ended - request.due


def tpot(request: RequestRun) -> float | None:
    """Seconds per token after the first arrival; None where nothing came after it."""
    if len(request.arrivals) < 2:
        return None
    later = sum(count for _, count in request.arrivals[1:])
    return (request.arrivals[-1][0] - request.arrivals[0][0]) / later


def gaps(request: RequestRun) -> list[tuple[float, int]]:
    """Seconds before each arrival but the first, and its tokens."""
    times = request.arrivals
    return [(later[0] - earlier[0], later[1]) for earlier, later in pairwise(times)]


def samples(requests: Sequence[RequestRun]) -> dict[str, list[float]]:
    """Every single value that the distributions are made of, by name."""
    steps = [gap for request in requests for gap in gaps(request)]
    return {
        "ttft": [value for request in requests if (value := ttft(request)) is not None],
        "tpot": [value for request in requests if (value := tpot(request)) is not None],
        "itl_step": [gap for gap, _ in steps],
        "itl_token": [gap / count for gap, count in steps for _ in range(count)],
        "e2e": [e2e(request) for request in requests],
    }


def latencies(requests: Sequence[RequestRun], seconds: float, targets: Targets) -> dict[str, Any]:
    """Distributions over answered requests; `seconds`: the wall time in which they were."""
    found: dict[str, Any] = {
        **{name: _distribution(values) for name, values in samples(requests).items()},
        "requests_per_second": _rounded(len(requests) / seconds if seconds else None),
        "goodput": None,
    }
    if targets != Targets():
        good = sum(map(targets.met_by, requests))
        found["goodput"] = {"requests_per_second": _rounded(good / seconds if seconds else None), "met": good}
    return found


def _distribution(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    data = np.asarray(values, np.float64)
    quantiles = np.quantile(data, list(_QUANTILES.values()))
    return {
        "count": len(data),
        "mean": _rounded(float(data.mean())),
        **{name: _rounded(float(value)) for name, value in zip(_QUANTILES, quantiles, strict=True)},
        "max": _rounded(float(data.max())),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
