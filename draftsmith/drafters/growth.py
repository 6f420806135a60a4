"""How a proposal grows: children are drawn under the request's rule, with the laws and confidences the rule needs.

Used by every drafter that has logits of its own (draft models, heads, feature drafters). Invariants: the law recorded
for a node is the law that drew its children; every transform of the request sees the node's own path; a token that
the request forbids is never drafted, also where the draft vocabulary holds no other.

Shape letters: V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from draftsmith.core.draw import Tokens, draw_coupled, draw_iid, draw_without_replacement, record_law, support_size
from draftsmith.core.sampling import Sampler
from draftsmith.core.truncation import weights_of
from draftsmith.core.types import Law, Proposal, ProposalKind, Rule, Tree
from draftsmith.core.view import SequenceView

_POINT_MASS_RULES = (Rule.COUPLING, Rule.MATCH)
_CHAIN_RULES = (Rule.CHAIN, Rule.BLOCK)


def verifies_trees(sampler: Sampler) -> bool:
    """Whether the request's rule verifies branching proposals."""
    return sampler.greedy or sampler.params.draft_rule not in _CHAIN_RULES


def takes_point_masses(sampler: Sampler) -> bool:
    """Whether what the request's rule verifies are point masses, whatever drew them."""
    return sampler.greedy or sampler.params.draft_rule in _POINT_MASS_RULES


class Growth:
    """One proposal under construction; node 0 is the root.

    `branches`: nodes may have several children, so sampled siblings are drawn without replacement.
    `draft_ids`: target ids (ascending, int64 [U]) of the logits it is given; None when these are [V].
    """

    __slots__ = (
        "_draft_ids",
        "_vocab_size",
        "branches",
        "confidence",
        "laws",
        "parents",
        "paths",
        "point_mass",
        "tokens",
        "view",
    )

    def __init__(
        self, view: SequenceView, vocab_size: int, *, branches: bool, draft_ids: torch.Tensor | None = None
    ) -> None:
        self.view = view
        self.tokens: list[int] = [view.root]
        self.parents: list[int] = [-1]
        self.paths: list[tuple[int, ...]] = [()]
        self.laws: dict[int, Law] = {}
        self.confidence: list[float] = [1.0]
        self.point_mass: bool = takes_point_masses(view.sampler)
        self.branches: bool = branches
        self._vocab_size = vocab_size
        self._draft_ids = draft_ids

    @property
    def num_drafted(self) -> int:
        """Nodes below the root."""
        return len(self.tokens) - 1

    def add(self, parent: int, token: int, confidence: float) -> int:
        """A new node below `parent`; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.paths.append((*self.paths[parent], token))
        self.confidence.append(confidence)
        return len(self.tokens) - 1

    def draw(self, node: int, logits_U: torch.Tensor, count: int) -> Sequence[int]:
        """Up to `count` distinct target ids for children of `node`, in draw order; `add` all of them.

        Fewer where the law has fewer tokens, none where the request forbids all that could be drafted or its rule wants
        no more.
        """
        sampler, path = self.view.sampler, self.paths[node]
        if sampler.context_free and (sampler.greedy or sampler.params.draft_rule is Rule.MATCH):
            places = _largest(logits_U, count)
            if places:  # none: the row is broken, which the sampler tells
                return places if self._draft_ids is None else self._draft_ids[places].tolist()
        tokens = self._draw(node, logits_U, path, count)
        if not sampler.context_free and not all(sampler.allows(token, path) for token in tokens):
            # Everything was forbidden, so the sampler fell back to the plain row: a matter of history, not of the draw.
            self.laws.pop(node, None)
            return ()
        return tokens

    def proposal(self) -> Proposal:
        """What has grown."""
        if self.point_mass:
            kind = ProposalKind.POINT_MASS
        else:
            kind = ProposalKind.WITHOUT_REPLACEMENT if self.branches else ProposalKind.IID
        return Proposal(
            Tree(tuple(self.tokens), tuple(self.parents)),
            kind,
            self.laws,
            # Siblings' own probabilities are for cutting point masses; drawn siblings stay, so they have none.
            None if kind is ProposalKind.WITHOUT_REPLACEMENT else tuple(self.confidence),
            foreseen=kind is ProposalKind.IID,  # whoever draws chains judges before the draw
        )

    def sampler_for(self, logits_U: torch.Tensor) -> tuple[Sampler, torch.Tensor, Tokens | None]:
        """The sampler of a row [U], the row for it, and what tokens it is of: None for the whole vocabulary.

        A request whose transforms name no token is served on the draft's own vocabulary; else what is missing there is
        minus infinity.
        """
        sampler = self.view.sampler
        if self._draft_ids is None:
            return sampler, logits_U, None
        if sampler.context_free:
            return sampler.narrowed(len(logits_U)), logits_U, self._draft_ids.numpy()
        logits_V = torch.full((self._vocab_size,), -torch.inf, dtype=logits_U.dtype)
        return sampler, logits_V.index_copy_(0, self._draft_ids, logits_U), None

    def _draw(self, node: int, logits_U: torch.Tensor, path: tuple[int, ...], count: int) -> Sequence[int]:
        view = self.view
        sampler, logits, ids = self.sampler_for(logits_U)
        if sampler.greedy or sampler.params.draft_rule is Rule.MATCH:
            places = _best(sampler, logits, path, count)
            return places if ids is None else ids[places].tolist()
        if sampler.params.draft_rule is Rule.COUPLING:
            return draw_coupled(sampler.scores(logits, path), view.random, view.position + len(path), count, ids)
        law = record_law(sampler.law(logits, path), ids)
        if node > 0 and not view.goes_on(law):
            return ()
        self.laws[node] = law
        if not self.branches:
            return draw_iid(law, view.random, view.position, [len(self.tokens)], self._vocab_size)
        count = min(count, support_size(law))
        return draw_without_replacement(law, view.random, view.position, node, count, self._vocab_size)


def confidences_of(logits_RU: torch.Tensor) -> list[tuple[float, float]]:
    """Of each row its largest probability, and the logarithm of the sum of exponentials; NaN for a broken row."""
    is_wide = logits_RU.dtype == torch.float64
    rows_RU = logits_RU.detach().to("cpu", torch.float64 if is_wide else torch.float32).contiguous().numpy()
    return [
        (1.0 / weight, float(row_U[best]) + math.log(weight))
        for row_U, (best, weight) in zip(rows_RU, weights_of(rows_RU), strict=True)
    ]


def _largest(logits: torch.Tensor, count: int) -> list[int]:
    """Places of the largest logits, minus infinity left out; none when the largest is not finite."""
    values, places = logits.max(dim=-1, keepdim=True) if count == 1 else torch.topk(logits, min(count, len(logits)))
    finite = torch.isfinite(values)
    return places[finite].tolist() if bool(finite[0]) else []


def _best(sampler: Sampler, logits_V: torch.Tensor, path: tuple[int, ...], count: int) -> list[int]:
    """The likeliest tokens after penalties, biases and masks; illegal ones only where there is no other."""
    best = sampler.argmax(logits_V, path)
    found = [best]
    left_V = logits_V.clone() if count > 1 else logits_V
    while len(found) < count:
        left_V[best] = -torch.inf
        best = sampler.argmax(left_V, path)
        if left_V[best] == -torch.inf or not sampler.allows(best, path):
            break
        found.append(best)
    return found
