"""EAGLE-2's dynamic tree (2406.16858, section 4): a tree that grows where the draft believes it will be accepted.

Used by recurrent drafters with `tree=dynamic`. The value of a node is the product of its path's draft
probabilities. Each level expands the `top_k` best of the newest nodes into `top_k` children each; at the end the best
of all nodes stay, ties toward the shallower one, so a kept node's parent is kept too. Invariant: the tree is a
function of context and target noise alone, so it is a point mass, which every rule verifies exactly.

Shape letters: V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import final

import numpy as np
import torch

from draftsmith.core.truncation import weights_of
from draftsmith.core.types import Proposal, Rule, Tree
from draftsmith.core.view import SequenceView
from draftsmith.drafters.drafting import Draft, place_of
from draftsmith.drafters.growth import Growth, confidences_of


@final
class DynamicDraft(Draft):
    """`budget`: nodes below the root that stay. `depth`: longest path. `top_k`: nodes expanded, and how many children
    each of them gets.
    """

    def __init__(
        self,
        view: SequenceView,
        vocab_size: int,
        budget: int,
        eos_ids: frozenset[int],
        *,
        depth: int,
        top_k: int,
        draft_ids: torch.Tensor | None = None,
    ) -> None:
        super().__init__(Growth(view, vocab_size, branches=True, draft_ids=draft_ids), budget, eos_ids)
        self._draft_ids = draft_ids
        self._max_depth = depth
        self._top_k = top_k
        self._values = [0.0]
        self._depth = 0

    def extend(self, logits: Iterable[torch.Tensor], keep_drafting: Callable[[float], bool]) -> None:
        growth, rows = self.growth, list(logits)
        level, self.level = self.level, []
        found = confidences_of(torch.stack(rows))
        if not keep_drafting(max(confidence for confidence, _ in found)):
            return
        first = len(growth.tokens)
        for node, logits_U, (_, total) in zip(level, rows, found, strict=True):
            for token, log_prob in self._ranked(node, logits_U, total):
                # Never above the parent's, or a node could outlive its parent.
                value = self._values[node] + min(0.0, log_prob)
                growth.add(node, token, math.exp(value - self._values[node]))
                self._values.append(value)
        self._depth += 1
        if self._depth < self._max_depth:
            # What is not among the best now never will be, nor what hangs below it: it need not be scored.
            best = set(self._best(range(1, len(growth.tokens)), self.budget))
            newest = [node for node in range(first, len(growth.tokens)) if not self._is_end(node)]
            self.level = sorted(best.intersection(self._best(newest, self._top_k)))

    def _best(self, nodes: Iterable[int], count: int) -> list[int]:
        paths = self.growth.paths
        return sorted(nodes, key=lambda node: (-self._values[node], len(paths[node]), node))[:count]

    def _ranked(self, node: int, logits_U: torch.Tensor, total: float) -> list[tuple[int, float]]:
        """The likeliest children of a node with their log-probabilities; `total`: logsumexp of the row.

        Under coupling the target's noise is known: the law given the noise is estimated by a softmax over the draft's
        noisy scores, whose first token is what a coupled chain would draft.
        """
        growth = self.growth
        sampler, path = growth.view.sampler, growth.paths[node]
        if sampler.greedy:
            drawn = growth.draw(node, logits_U, self._top_k)
            return [(token, float(logits_U[place_of(token, self._draft_ids)]) - total) for token in drawn]
        sampler, logits, ids = growth.sampler_for(logits_U)
        if sampler.params.draft_rule is Rule.COUPLING:
            drawn = growth.draw(node, logits_U, self._top_k)
            noise = growth.view.random.target_noise(growth.view.position + len(path))
            noise_C = noise.shared_gumbel(len(logits)) if ids is None else noise.gumbel_at(ids)
            scores = sampler.scores(logits, path).numpy() + noise_C
            ((best, weight),) = weights_of(scores[None])
            total = float(scores[best]) + math.log(weight)
            drawn_scores = scores[list(drawn) if ids is None else np.searchsorted(ids, drawn)]
            return list(zip(drawn, (drawn_scores - total).tolist(), strict=True))
        law = sampler.law(logits, path)
        probs, places = torch.topk(law, min(self._top_k, len(law)))
        tokens = places.tolist() if ids is None else ids[places.numpy()].tolist()
        found = zip(tokens, probs.log().tolist(), probs.tolist(), strict=True)
        return [(token, log_prob) for token, log_prob, prob in found if prob > 0 and sampler.allows(token, path)]

    def proposal(self) -> Proposal:
        growth = self.growth
        kept = [0, *sorted(self._best(range(1, len(growth.tokens)), self.budget))]
        place = {node: index for index, node in enumerate(kept)}
        return Proposal(
            Tree(
                tuple(growth.tokens[node] for node in kept),
                (-1, *(place[growth.parents[node]] for node in kept[1:])),
            ),
            confidence=tuple(growth.confidence[node] for node in kept),
        )
