"""Estimators of acceptance for the prefix scheduler: P(node accepted | parent accepted) before the node is drawn.

`Tempered` takes a confidence (head, draft probability, suffix score) as a probability and sharpens or softens it by
depth until it fits what became of earlier ones (sequential temperature scaling, as vLLM does it online). `Logistic`
needs no confidence: a small regression on depth, the request's own record and a confidence where there is one. Both
learn from trials alone; what was not verified is never labelled. Invariant: estimates lie strictly between 0 and 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import final

from draftsmith.control.acceptance import Calibration, RequestOdds, cell_of
from draftsmith.control.trials import NodeTrial

_NUM_BINS = 16
_RANGE = 8.0  # logits are binned from -8 to 8
_MEMORY = 0.999
_TEMPERATURES = tuple(8.0 ** (step / 24.0 - 1.0) for step in range(49))  # 1/8 to 8
_POOLED_WEIGHT = 64.0  # trials that all depths together weigh as much as at one depth
_FIT_EVERY = 32  # trials of a depth between two fits
_MAX_DEPTH = 32
_RATE = 0.3  # of the regression's steps, shrinking as they add up
_RECORD_MEMORY = 0.9


class Estimator(ABC):
    """P(accepted | parent accepted)."""

    @abstractmethod
    def probability(self, request: int, depth: int, confidence: float | None) -> float:
        """Of a node at `depth` >= 1 of a request, before its token is known."""

    @abstractmethod
    def observe(self, request: int, trials: Iterable[NodeTrial], has_confidence: bool) -> None:
        """Learn what became of nodes."""

    def forget(self, request: int) -> None:
        """A request ended."""


@final
class Tempered(Estimator):
    """Confidence as logit over a temperature of its depth, chosen among 49 by likelihood over binned trials."""

    def __init__(self) -> None:
        self._trials = [[0.0] * _NUM_BINS for _ in range(_MAX_DEPTH + 1)]  # row 0: all depths
        self._accepted = [[0.0] * _NUM_BINS for _ in range(_MAX_DEPTH + 1)]
        self._since = [0] * (_MAX_DEPTH + 1)
        self.temperatures = [1.0] * (_MAX_DEPTH + 1)

    def probability(self, request: int, depth: int, confidence: float | None) -> float:
        if confidence is None:
            # Without one the depth's own mean must do.
            trials, accepted = self._blended(min(depth, _MAX_DEPTH))
            return (sum(accepted) + 1.0) / (sum(trials) + 2.0)
        return _sigmoid(_logit(confidence) / self.temperatures[min(depth, _MAX_DEPTH)])

    def observe(self, request: int, trials: Iterable[NodeTrial], has_confidence: bool) -> None:
        for trial in trials:
            place = _bin_of(_logit(trial.confidence)) if has_confidence else _NUM_BINS // 2
            for row in (0, min(trial.depth, _MAX_DEPTH)):
                counts, accepted = self._trials[row], self._accepted[row]
                counts[place] = _MEMORY * counts[place] + 1.0
                accepted[place] = _MEMORY * accepted[place] + trial.accepted
                self._since[row] += 1
            row = min(trial.depth, _MAX_DEPTH)
            if self._since[row] >= _FIT_EVERY:
                self._since[row] = 0
                self._fit(row)

    def _blended(self, row: int) -> tuple[list[float], list[float]]:
        """Trials of a depth and, with a fixed weight, of all depths together."""
        pooled = sum(self._trials[0])
        share = _POOLED_WEIGHT / max(pooled, _POOLED_WEIGHT)
        trials = [own + share * other for own, other in zip(self._trials[row], self._trials[0], strict=True)]
        accepted = [own + share * other for own, other in zip(self._accepted[row], self._accepted[0], strict=True)]
        return trials, accepted

    def _fit(self, row: int) -> None:
        trials, accepted = self._blended(row)
        filled = [
            (_centre(place), count, good)
            for place, (count, good) in enumerate(zip(trials, accepted, strict=True))
            if count > 1e-3
        ]

        def loss(temperature: float) -> float:
            total = 0.0
            for centre, count, good in filled:
                chance = _sigmoid(centre / temperature)
                total -= good * math.log(chance) + (count - good) * math.log(1.0 - chance)
            return total

        self.temperatures[row] = min(_TEMPERATURES, key=loss)


@final
class Cells(Estimator):
    """Counts by depth and tenth of confidence, and each request's odds against them (`control.acceptance`)."""

    def __init__(self) -> None:
        self._calibration = Calibration()
        self._odds: dict[int, RequestOdds] = {}

    def probability(self, request: int, depth: int, confidence: float | None) -> float:
        odds = self._odds.get(request)
        factor = odds.factor if odds is not None else 1.0
        chance = self._calibration.probability(cell_of(depth, confidence or 0.0))
        return chance * factor / (chance * factor + 1.0 - chance)

    def observe(self, request: int, trials: Iterable[NodeTrial], has_confidence: bool) -> None:
        cells = [
            (cell_of(trial.depth, trial.confidence if has_confidence else 0.0), trial.accepted) for trial in trials
        ]
        if cells:
            self._calibration.observe(cells, self._odds.setdefault(request, RequestOdds()))

    def forget(self, request: int) -> None:
        self._odds.pop(request, None)


@final
class Logistic(Estimator):
    """Online logistic regression on depth, the request's record so far, and the confidence where there is one."""

    def __init__(self) -> None:
        self.weights = [0.0] * 5
        self._squares = [1.0] * 5
        self._records: dict[int, float] = {}  # running mean of acceptances

    def _features(self, request: int, depth: int, confidence: float | None) -> tuple[float, ...]:
        record = self._records.get(request, 0.5)
        known = confidence is not None
        logit = _logit(confidence) if confidence is not None else 0.0
        return 1.0, math.log(depth), 4.0 * (record - 0.5), float(known), 0.5 * logit

    def probability(self, request: int, depth: int, confidence: float | None) -> float:
        features = self._features(request, depth, confidence)
        return _sigmoid(sum([weight * value for weight, value in zip(self.weights, features, strict=True)]))

    def observe(self, request: int, trials: Iterable[NodeTrial], has_confidence: bool) -> None:
        for trial in trials:
            features = self._features(request, trial.depth, trial.confidence if has_confidence else None)
            wrong = (
                self.probability(request, trial.depth, trial.confidence if has_confidence else None) - trial.accepted
            )
            for place, value in enumerate(features):
                gradient = wrong * value
                self._squares[place] += gradient * gradient
                self.weights[place] -= _RATE * gradient / math.sqrt(self._squares[place])
            record = self._records.get(request, 0.5)
            self._records[request] = _RECORD_MEMORY * record + (1.0 - _RECORD_MEMORY) * trial.accepted

    def forget(self, request: int) -> None:
        self._records.pop(request, None)


def _logit(probability: float) -> float:
    probability = min(max(probability, 1e-6), 1.0 - 1e-6)
    return math.log(probability / (1.0 - probability))


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(value, -14.0), 14.0)))


def _bin_of(logit: float) -> int:
    return min(max(int((logit + _RANGE) / (2 * _RANGE) * _NUM_BINS), 0), _NUM_BINS - 1)


def _centre(place: int) -> float:
    return (place + 0.5) * 2 * _RANGE / _NUM_BINS - _RANGE
