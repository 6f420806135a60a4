"""How drafted siblings are drawn from a law, and the law each of them was drawn from.

Model drafters call the `draw_*` functions; the ratio rules replay the same laws through `SiblingLaw`.
Invariant: a draw depends on the recorded `Law` alone (never on logits it was rounded from) and on keyed
noise, so the law in a ratio is the law that drew the token.

Shape letters: V vocabulary, C candidates of a sparse law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from draftsmith.core.chance import Vector
from draftsmith.core.random import RequestRandom
from draftsmith.core.truncation import top_k
from draftsmith.core.types import Law, Proposal, ProposalKind
from draftsmith.errors import UnsoundError

Weights: TypeAlias = npt.NDArray[np.floating[Any]]
"""Entries of a law as recorded, [V] or [C], float32 or float64."""

Tokens: TypeAlias = npt.NDArray[np.int64]
"""Ids of some tokens, [C]."""

# Room for laws kept in half precision; anything further off is not a law.
_SUM_TOLERANCE = 1e-2
_SPARSE_BELOW = 0.25


def record_law(probs_V: torch.Tensor, ids: Tokens | None = None) -> Law:
    """The `Law` to draw from and to put into the proposal, for probabilities [V] of any float type.

    With `ids` (ascending) [C] they are these tokens' [C], and all others have none. Sparse then, and when less than a
    quarter of the vocabulary has mass; float32 throughout. Draw from the result, not from `probs_V`: rounding is
    harmless only when it comes before the draw. (Numpy: operations of torch wait for a pool of threads.)
    """
    probs = probs_V.detach().to("cpu", torch.float64).numpy().astype(np.float32)
    places = np.flatnonzero(probs)
    if ids is None and len(places) >= _SPARSE_BELOW * len(probs):
        return Law(torch.from_numpy(probs))
    tokens = places if ids is None else ids[places]
    return Law(torch.from_numpy(probs[places]), torch.from_numpy(tokens))


def support_size(law: Law) -> int:
    """Number of tokens with mass; more siblings than that would be blind guesses.

    It is known before anything is drawn, so a drafter may let it bound the number of children.
    """
    return int(np.count_nonzero(law.probs.detach().cpu().numpy()))


def draw_coupled(
    scores_V: torch.Tensor, random: RequestRandom, position: int, num_tokens: int = 1, ids: Tokens | None = None
) -> tuple[int, ...]:
    """Seeded coupling: the draft's best tokens under the target's own noise of an output position.

    `scores_V`: the draft's log-law over the target's vocabulary, up to a constant; with `ids` (ascending) [C] over
    these tokens alone. The first token is the draft's guess of the target's draw, the others are the runners-up, as
    many as have a chance. Report them as POINT_MASS (Daliri et al. 2408.07978).
    """
    scores = scores_V.detach().to("cpu", torch.float64).numpy()
    places = np.flatnonzero(scores > -np.inf)
    if len(places) < len(scores):
        scores, ids = scores[places], places if ids is None else ids[places]
    noise = random.target_noise(position)
    if num_tokens == 1:
        found = [noise.argmax(scores, ids)]
    else:
        noise_C = noise.shared_gumbel(len(scores)) if ids is None else noise.gumbel_at(ids)
        found = list(_largest(scores + noise_C, min(num_tokens, len(scores))))
    return tuple(found if ids is None else ids[found].tolist())


def draw_iid(
    law: Law, random: RequestRandom, root_position: int, nodes: Sequence[int], vocab_size: int
) -> tuple[int, ...]:
    """One independent draw from `law` for each of the sibling `nodes`, in their order (kind IID)."""
    ids, scores = _scores(law, vocab_size, nodes[0])
    found = [random.draft_noise(root_position, node).argmax(scores, ids) for node in nodes]
    return tuple(found if ids is None else ids[found].tolist())


def draw_without_replacement(
    law: Law, random: RequestRandom, root_position: int, parent: int, num_tokens: int, vocab_size: int
) -> tuple[int, ...]:
    """Distinct tokens in draw order, the children of node `parent` (kind WITHOUT_REPLACEMENT).

    Gumbel top-k, which has the law of drawing one after the other and renormalising (Sequoia, RSD). Once
    the law's mass is used up the rest is drawn uniformly from the tokens left, which is what the verifier
    assumes; ask for at most `support_size(law)` tokens to avoid that.
    """
    assert num_tokens <= vocab_size, f"{num_tokens} distinct tokens from a vocabulary of {vocab_size}"
    ids, scores = _scores(law, vocab_size, parent)
    noise = random.draft_noise(root_position, parent)
    noise_C = noise.gumbel(vocab_size) if ids is None else noise.gumbel_at(ids)
    drawn = _largest(scores + noise_C, min(num_tokens, int(np.count_nonzero(scores > -np.inf))))
    if ids is not None:
        drawn = tuple(ids[list(drawn)].tolist())
    if len(drawn) < num_tokens:
        # Noise of tokens without mass has not been looked at, so it is fresh for the uniform draws.
        noise_V = noise.gumbel(vocab_size)
        noise_V[list(drawn)] = -np.inf
        drawn += _largest(noise_V, num_tokens - len(drawn))
    return drawn


class SiblingLaw:
    """The law the next sibling was drawn from, while the children of one parent are tried in draw order.

    IID siblings share one law. Without replacement, tried tokens leave it and the rest is renormalised;
    when its mass is used up it is uniform over the untried tokens. Raises `UnsoundError` when the law is not
    one over the target's vocabulary, or a child cannot have come from it.
    """

    __slots__ = ("_ids", "_is_iid", "_parent", "_probs", "_tokens", "_total", "_tried", "_vocab_size")

    def __init__(self, proposal: Proposal, parent: int, vocab_size: int) -> None:
        # As recorded, divided by the total where it is read: an accepted child needs one entry only.
        self._ids, self._probs, self._total = _weights(proposal.laws[parent], vocab_size, parent)
        self._is_iid = proposal.kind is ProposalKind.IID
        self._tokens = proposal.tree.tokens
        self._parent = parent
        self._vocab_size = vocab_size
        self._tried: list[int] = []

    def prob(self, child: int) -> float:
        """Probability with which the child's token was drawn at its turn; above 0."""
        token = self._tokens[child]
        index = self._index(token)
        prob = 0.0 if index is None else float(self._probs[index]) / self._total
        if prob <= 0:
            raise UnsoundError(
                f"node {child} carries token {token}, which has probability 0 in what was left of the law of its "
                f"parent {self._parent}: siblings must stand in draw order, distinct unless the kind is iid, and the "
                "law recorded must be the law that drew them"
            )
        return prob

    def excess(self, weighted_V: Vector) -> Vector:
        """max(weighted - law, 0), elementwise, as a new array [V]."""
        probs = np.divide(self._probs, self._total, dtype=np.float64)
        if self._ids is None:
            left_V: Vector = np.subtract(weighted_V, probs, out=probs)
            return np.maximum(left_V, 0.0, out=left_V)
        left_V = weighted_V.copy()
        left_V[self._ids] = np.maximum(left_V[self._ids] - probs, 0.0)
        return left_V

    def reject(self, child: int) -> None:
        """The child was tried and rejected; the next sibling was drawn without it (unless IID)."""
        if self._is_iid:
            return
        token = self._tokens[child]
        self._tried.append(token)
        index = self._index(token)
        assert index is not None, "prob() was asked first and has checked it"
        self._probs = self._probs.astype(np.float64)
        self._probs[index] = 0.0
        self._total = float(self._probs.sum())
        if self._total == 0:
            self._ids = None
            self._probs = np.ones(self._vocab_size)
            self._probs[self._tried] = 0.0
            self._total = float(max(1, self._vocab_size - len(self._tried)))

    def _index(self, token: int) -> int | None:
        if self._ids is None:
            return token if 0 <= token < self._vocab_size else None
        hits = np.flatnonzero(self._ids == token)
        return int(hits[0]) if len(hits) else None


def _weights(law: Law, vocab_size: int, node: int) -> tuple[Tokens | None, Weights, float]:
    """The ids of a sparse law, the law's entries as recorded, and their total. Raises `UnsoundError`.

    The tokens were drawn in proportion to the entries, so the exact law is entries / total.
    """
    probs_C = law.probs.detach()
    if probs_C.dtype not in (torch.float32, torch.float64):
        probs_C = probs_C.to(torch.float64)
    probs: Weights = probs_C.cpu().numpy()
    ids: Tokens | None = None
    if law.ids is None:
        fits = probs.shape == (vocab_size,)
    else:
        ids = law.ids.detach().cpu().numpy()
        fits = ids.ndim == 1 and probs.shape == ids.shape and len(ids) > 0
        fits = fits and 0 <= int(ids.min()) and int(ids.max()) < vocab_size
    if not fits:
        raise UnsoundError(
            f"the law of node {node} (shape {tuple(probs.shape)}) is not one over the target's vocabulary of "
            f"{vocab_size}; record laws in target ids"
        )
    total = float(probs.sum(dtype=np.float64))
    if not (abs(total - 1.0) <= _SUM_TOLERANCE and probs.min() >= 0):
        raise UnsoundError(
            f"the law of node {node} sums to {total:.6g} (smallest entry {float(probs.min()):.6g}); "
            "record the normalised law that drew the tokens"
        )
    return ids, probs, total


def _scores(law: Law, vocab_size: int, node: int) -> tuple[Tokens | None, Vector]:
    """The ids of a sparse law, ascending, and the logarithm of the entries, minus infinity where there is no mass."""
    ids, probs, _ = _weights(law, vocab_size, node)
    with np.errstate(divide="ignore"):
        scores: Vector = np.log(probs, dtype=np.float64)
    if ids is not None and (ids[1:] < ids[:-1]).any():
        order = np.argsort(ids)
        return ids[order], scores[order]
    return ids, scores


def _largest(scores_V: Vector, count: int) -> tuple[int, ...]:
    """Ids of the `count` >= 1 largest scores, largest first, equals by id."""
    if count == 1:
        return (int(scores_V.argmax()),)
    near = top_k(scores_V, count)  # several times faster than a partition that moves indices
    return tuple(int(token) for token in sorted(near, key=lambda token: (-scores_V[token], token)))
