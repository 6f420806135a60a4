"""How likely a drafted node is to be accepted once its parent is, learned from what became of earlier ones.

Used by controllers. `Calibration` belongs to a drafter and is shared by all requests: it says what a
drafter's confidence is worth at a depth; `RankAcceptance` what its second and later candidates are worth.
`RequestOdds` belongs to a request and says how much better or worse this request does than the calibration
expects. All forget, so all follow a change of regime.
Invariant: every estimate lies strictly between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, final

Trial: TypeAlias = tuple[int, bool]
"""Cell of a node whose parent was accepted, and whether it was accepted itself."""

_NUM_CONFIDENCES = 10
_DEPTH_CLASS = (0, 0, 1, 2, 2, 3)  # depths 1, 2, 3-4, 5 and more
_NUM_DEPTHS = 4
_FIRST_DEPTH = (1, 2, 3, 5)  # of each class
_FIRST_CELL = tuple(depth_class * _NUM_CONFIDENCES for depth_class in _DEPTH_CLASS)
_DEEPEST = len(_DEPTH_CLASS) - 1
_PRIOR = 0.5  # acceptance assumed before anything was seen
_PRIOR_WEIGHT = 4.0  # trials it weighs as much as
_CELL_WEIGHT = 10.0  # trials of a cell that weigh as much as all of its depth
_CELL_MEMORY = 0.98  # share of a cell's trials kept per further trial
NUM_RANKS = 6
"""Siblings that are told apart; later ones are not worth drafting."""
_SECOND_SHARE = 0.35  # of what the first child misses, guessed for the second one
_LATER_SHARE = 0.5  # of a child's chance, guessed for the one after it
_RANK_WEIGHT = 20.0  # trials that the guess weighs as much as
_ODDS_WEIGHT = 5.0  # trials that hold a request to the calibration
_ODDS_MEMORY = 0.95  # share of a request's trials kept per further trial


def cell_of(depth: int, confidence: float) -> int:
    """Cell of a node at `depth` >= 1 with a confidence in [0, 1]."""
    first = _FIRST_CELL[depth] if depth < _DEEPEST else _FIRST_CELL[_DEEPEST]
    return first + (int(confidence * _NUM_CONFIDENCES) if confidence < 1.0 else _NUM_CONFIDENCES - 1)


@final
class RequestOdds:
    """By what factor a request's odds of acceptance differ from the calibration's."""

    __slots__ = ("_accepted", "_expected", "_trials", "factor")

    def __init__(self) -> None:
        self._accepted = self._expected = self._trials = 0.0
        self.factor = 1.0
        """Multiplies p / (1 - p)."""

    def observe(self, expected: Sequence[float], accepted: int) -> None:
        """Nodes that the calibration gave these probabilities were tried; `accepted` of them were accepted."""
        keep = _ODDS_MEMORY ** len(expected)
        self._accepted = keep * self._accepted + accepted
        self._expected = keep * self._expected + sum(expected)
        self._trials = keep * self._trials + len(expected)
        weight, trials = _ODDS_WEIGHT, self._trials
        seen = (self._accepted + weight) / (trials - self._accepted + weight)
        foreseen = (self._expected + weight) / (trials - self._expected + weight)
        self.factor = seen / foreseen


@final
class Calibration:
    """Observed acceptance of one drafter by depth and confidence."""

    __slots__ = ("_accepted", "_by_depth", "_depth_accepted", "_depth_trials", "_prior", "_trials")

    def __init__(self, accuracies: Sequence[Sequence[float]] | None = None) -> None:
        """`accuracies[depth][rank]`: measured on calibration texts, where somebody has."""
        self._prior = [accuracies[min(depth, len(accuracies)) - 1][0] for depth in _FIRST_DEPTH] if accuracies else None
        num_cells = _NUM_DEPTHS * _NUM_CONFIDENCES
        self._trials = [0.0] * num_cells
        self._accepted = [0.0] * num_cells
        self._depth_trials = [0.0] * _NUM_DEPTHS
        self._depth_accepted = [0.0] * _NUM_DEPTHS
        self._by_depth = [_inside(chance) for chance in self._prior] if self._prior else [_PRIOR] * _NUM_DEPTHS

    def probability(self, cell: int) -> float:
        """Estimated P(accepted | parent accepted) of a node in a cell."""
        expected = _CELL_WEIGHT * self._by_depth[cell // _NUM_CONFIDENCES]
        return (self._accepted[cell] + expected) / (self._trials[cell] + _CELL_WEIGHT)

    def by_depth(self, depth: int) -> float:
        """Estimated P(accepted | parent accepted) at a depth, whatever the confidence."""
        return self._by_depth[_DEPTH_CLASS[depth] if depth < _DEEPEST else _DEPTH_CLASS[_DEEPEST]]

    def plan(self, odds: RequestOdds, depth: int, least: float) -> list[float]:
        """P(accepted) of the nodes of a chain not drafted yet, `depth` of them or down to one below `least`."""
        reach, factor, found = 1.0, odds.factor, []
        for level in range(1, depth + 1):
            probability = self._by_depth[_DEPTH_CLASS[level] if level < _DEEPEST else _DEPTH_CLASS[_DEEPEST]]
            likely = probability * factor
            reach *= likely / (likely + 1.0 - probability)
            if reach < least:
                break
            found.append(reach)
        return found

    def reaches(
        self, parents: Sequence[int], confidence: Sequence[float] | None, odds: RequestOdds, least: float
    ) -> list[float]:
        """P(accepted) of drafted nodes in their order, those below `least` left out."""
        reach, depth, found = [1.0], [0], []
        factor = odds.factor
        trials, accepted, by_depth = self._trials, self._accepted, self._by_depth
        for node in range(1, len(parents)):
            parent = parents[node]
            level = depth[parent] + 1
            likely = reach[parent]
            if likely >= least:
                first = _FIRST_CELL[level] if level < _DEEPEST else _FIRST_CELL[_DEEPEST]
                value = confidence[node] if confidence else 0.0
                cell = first + (int(value * _NUM_CONFIDENCES) if value < 1.0 else _NUM_CONFIDENCES - 1)
                expected = _CELL_WEIGHT * by_depth[first // _NUM_CONFIDENCES]
                probability = (accepted[cell] + expected) / (trials[cell] + _CELL_WEIGHT)
                weighted = probability * factor
                likely *= weighted / (weighted + 1.0 - probability)
                if likely >= least:
                    found.append(likely)
            elif parent == node - 1 == len(found) + 1:
                break  # a chain from here on: nothing below can be likelier
            reach.append(likely)
            depth.append(level)
        return found

    def observe(self, trials: Sequence[Trial], odds: RequestOdds) -> None:
        """Nodes whose parents were accepted were accepted themselves, or not, for a request with these odds."""
        odds.observe([self.probability(cell) for cell, _ in trials], sum([accepted for _, accepted in trials]))
        cell_trials, cell_accepted = self._trials, self._accepted
        depth_trials, depth_accepted = self._depth_trials, self._depth_accepted
        for cell, accepted in trials:
            cell_trials[cell] = _CELL_MEMORY * cell_trials[cell] + 1.0
            cell_accepted[cell] = _CELL_MEMORY * cell_accepted[cell] + accepted
            depth = cell // _NUM_CONFIDENCES
            depth_trials[depth] = _CELL_MEMORY * depth_trials[depth] + 1.0
            depth_accepted[depth] = _CELL_MEMORY * depth_accepted[depth] + accepted
        # A depth not seen yet is guessed from the one above it, which is reached more often.
        above = _PRIOR
        for depth in range(_NUM_DEPTHS):
            if self._prior:
                above = _inside(self._prior[depth])
            above = (depth_accepted[depth] + _PRIOR_WEIGHT * above) / (depth_trials[depth] + _PRIOR_WEIGHT)
            self._by_depth[depth] = above


@final
class RankAcceptance:
    """How often the second and later children of a node are the ones accepted, given that the node was.

    Rank 0 is the calibration's. What was not seen is guessed: the second child gets a share of what the first one
    misses, each later one a share of the one before.
    """

    __slots__ = ("_accepted", "_accuracies", "_trials", "version")

    def __init__(self, accuracies: Sequence[Sequence[float]] | None = None) -> None:
        self._accuracies = accuracies
        self._trials = [[0.0] * NUM_RANKS for _ in range(_NUM_DEPTHS)]
        self._accepted = [[0.0] * NUM_RANKS for _ in range(_NUM_DEPTHS)]
        self.version = 0
        """Grows with what was seen."""

    def table(self, calibration: Calibration, factor: float, num_depths: int) -> list[list[float]]:
        """P(this child is the accepted one | parent accepted) by depth and rank, for a request whose odds are better
        by `factor`.
        """
        rows = []
        for depth in range(1, num_depths + 1):
            level = _DEPTH_CLASS[depth] if depth < _DEEPEST else _DEPTH_CLASS[_DEEPEST]
            first = calibration.by_depth(depth)
            better = first * factor / (first * factor + 1.0 - first)
            missed, guess = 1.0 - first, first
            row = [better]
            for rank in range(1, NUM_RANKS):
                guess = _SECOND_SHARE * missed if rank == 1 else _LATER_SHARE * guess
                if self._accuracies is not None:
                    measured = self._accuracies[min(depth, len(self._accuracies)) - 1]
                    guess = measured[rank] if rank < len(measured) else _LATER_SHARE * guess
                weight = self._trials[level][rank] + _RANK_WEIGHT
                guess = (self._accepted[level][rank] + _RANK_WEIGHT * guess) / weight
                row.append(min(guess * (1.0 - better) / max(missed, 1e-3), 1.0 - better))
            rows.append(row)
        return rows

    def observe(self, depth: int, rank: int, accepted: bool) -> None:
        """A child of rank 1 or more was put to the test."""
        if rank >= NUM_RANKS:
            return
        level = _DEPTH_CLASS[depth] if depth < _DEEPEST else _DEPTH_CLASS[_DEEPEST]
        self._trials[level][rank] = _CELL_MEMORY * self._trials[level][rank] + 1.0
        self._accepted[level][rank] = _CELL_MEMORY * self._accepted[level][rank] + accepted
        self.version += 1


def _inside(chance: float) -> float:
    return min(max(chance, 0.01), 0.99)
