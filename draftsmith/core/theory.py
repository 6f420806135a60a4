"""What speculation is worth: expected tokens, speed-up, best draft length, value of a static tree.

Called by controllers, the advisor, the simulator and the trainer's reports. Sources: Leviathan et al.
(2211.17192) for chains, Sequoia (2402.12374) for trees, Daliri et al. (2408.07978) for coupling.
Invariant: every acceptance is a probability *given that the parent was accepted*, every cost is in units
of one plain decoding step of the target.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from draftsmith.errors import OptionError

Acceptance: TypeAlias = float | Sequence[float]
"""One probability for every depth, or one per depth (drafting deeper than that accepts nothing)."""


def acceptance(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """The mass two laws share, Σ min = 1 - total variation: [..., V] and [..., V] -> [...].

    It is the probability that a token drawn from the draft law survives chain rejection.
    """
    return torch.minimum(target_probs, draft_probs).sum(dim=-1)


def coupling_lower_bound(shared_mass: float) -> float:
    """The least acceptance of seeded coupling, (1 - TV) / (1 + TV), where the laws share `shared_mass` = 1 - TV."""
    _probability("shared mass", shared_mass)
    return shared_mass / (2 - shared_mass)


def survivals(conditional: Acceptance, length: int) -> list[float]:
    """P(depth i accepted) for i = 1 .. `length`: the running products of the conditional acceptances."""
    if length < 0:
        raise OptionError(f"draft length is {length}; allowed: at least 0")
    if isinstance(conditional, Sequence):
        rates = [*conditional[:length], *[0.0] * (length - len(conditional))]
    else:
        rates = [conditional] * length
    alive, found = 1.0, []
    for rate in rates:
        _probability("acceptance", rate)
        alive *= rate
        found.append(alive)
    return found


def expected_tokens(conditional: Acceptance, length: int) -> float:
    """Tokens per step of a chain of `length` drafts, 1 + Σ_i Π_{j<=i} a_j, the residual or bonus token included.

    With one acceptance a for all depths this is (1 - a^(length+1)) / (1 - a) (Leviathan, equation 1).
    """
    return 1.0 + math.fsum(survivals(conditional, length))


def expected_tree_tokens(parents: Sequence[int], rank_acceptance: Sequence[Sequence[float]]) -> float:
    """Tokens per step of a static tree: Σ over nodes of Π acceptance along the path; the root contributes 1.

    `rank_acceptance[d][r]`: probability that the child of rank r (draw order) of an accepted node at depth d
    is the one accepted, measured with the verification rule in use; the last row serves all deeper levels,
    ranks beyond a row are never accepted. One row is Sequoia's positional acceptance, rows per depth are
    Medusa's head accuracies.
    """
    if not rank_acceptance:
        raise OptionError("rank_acceptance is empty; give at least one row of probabilities")
    for row in rank_acceptance:
        for rate in row:
            _probability("rank acceptance", rate)
        if math.fsum(row) > 1 + 1e-9:
            raise OptionError(f"rank acceptances {list(row)} sum to more than 1; only one child can be accepted")
    values, depths, ranks = [1.0], [0], [0] * len(parents)
    for parent in parents[1:]:
        row = rank_acceptance[min(depths[parent], len(rank_acceptance) - 1)]
        rank = ranks[parent]
        ranks[parent] += 1
        values.append(values[parent] * row[rank] if rank < len(row) else 0.0)
        depths.append(depths[parent] + 1)
    return math.fsum(values)


def memory_bound(length: int) -> float:
    """The classic verification cost: scoring any number of rows takes as long as scoring one."""
    return 1.0


def speed_up(
    conditional: Acceptance, length: int, draft_cost: float, verify_cost: Callable[[int], float] = memory_bound
) -> float:
    """S(g) = E[tokens] / (g c + v(g)) for a chain of g = `length` drafts.

    `draft_cost` c: time of drafting one token; `verify_cost(g)`: time of scoring g + 1 rows; both over the
    time of a plain step, so v(0) is 1 where verification adds nothing of its own.
    """
    if not draft_cost >= 0:
        raise OptionError(f"draft cost is {draft_cost}; allowed: at least 0, in plain decoding steps")
    return expected_tokens(conditional, length) / (length * draft_cost + verify_cost(length))


@dataclass(frozen=True, kw_only=True)
class BestLength:
    """A draft length and the speed-up expected of it."""

    length: int
    speed_up: float


def best_length(
    conditional: Acceptance,
    draft_cost: float,
    verify_cost: Callable[[int], float] = memory_bound,
    *,
    max_length: int,
) -> BestLength:
    """The draft length of 0 .. `max_length` with the greatest speed-up, the shortest among equals.

    With `verify_cost` 1 drafting helps iff a > c, and then by at least (1 + a) / (1 + c). Every length is
    tried: with measured costs S(g) has steps and need not have a single peak.
    """
    best = BestLength(length=0, speed_up=speed_up(conditional, 0, draft_cost, verify_cost))
    for length in range(1, max_length + 1):
        gained = speed_up(conditional, length, draft_cost, verify_cost)
        if gained > best.speed_up:
            best = BestLength(length=length, speed_up=gained)
    return best


def extra_arithmetic(conditional: Acceptance, length: int, flop_ratio: float) -> float:
    """Arithmetic per emitted token over that of plain decoding, (g ĉ + g + 1) / E[tokens].

    `flop_ratio` ĉ: operations of drafting one token over those of one target row.
    """
    return (length * flop_ratio + length + 1) / expected_tokens(conditional, length)


def _probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise OptionError(f"{name} is {value}; allowed: 0 to 1")
