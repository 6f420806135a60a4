"""Planted faults: each one a mistake that has been made somewhere, and that the suite must notice.

A fault is a function that patches the package for as long as its context lasts. The tests beside each
layer hold the check that must turn red under it (`tests/core/test_faults_verify.py` for "verify").
Add one with `@fault("its name", layer="its layer")` on a function taking a `pytest.MonkeyPatch`; its
docstring says what it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.core import draw, verify, verify_rules
from draftsmith.core import tree as trees
from draftsmith.core.chance import Chance, KeyedChance
from draftsmith.core.draw import SiblingLaw
from draftsmith.core.random import KeyedNoise, Purpose, RequestRandom
from draftsmith.core.types import Proposal, ProposalKind, Tree, Verdict
from draftsmith.core.verify_rules import _Visit

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault. `layer`: whose tests must catch it."""

    name: str
    layer: str
    plant: Plant


FAULTS: dict[str, Fault] = {}


def fault(name: str, *, layer: str) -> Callable[[Plant], Plant]:
    """Register a function that plants a fault by patching."""

    def register(plant: Plant) -> Plant:
        assert name not in FAULTS, f"two faults are called {name!r}"
        assert plant.__doc__, f"fault {name!r} does not say what it breaks"
        FAULTS[name] = Fault(name=name, layer=layer, plant=plant)
        return plant

    return register


def of_layer(layer: str) -> list[str]:
    """Names of the faults of one layer, in the order they are written."""
    return [name for name, planted_fault in FAULTS.items() if planted_fault.layer == layer]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The package with one fault in it."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name].plant(patch)
        yield


# --- verify: walks ---------------------------------------------------------------------------------


@fault("accept greedy drafts unread", layer="verify")
def _accept_unread(patch: pytest.MonkeyPatch) -> None:
    """The walk goes to the first child whatever token it carries."""

    def walk(tree: Tree, token_at: Any) -> Verdict:
        node, path, emitted = 0, [], []
        for child in range(1, tree.num_nodes):
            if tree.parents[child] == node:
                path.append(child)
                emitted.append(tree.tokens[child])
                node = child
        return Verdict(tuple(path), (*emitted, token_at(node, emitted)))

    patch.setattr(verify, "walk", walk)


@fault("greedy walk reads the row before", layer="verify")
def _walk_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """After an accepted token the walk reads the row of the node before it."""
    real = verify_rules.walk
    patch.setattr(
        verify, "walk", lambda tree, token_at: real(tree, lambda node, path: token_at(max(node - 1, 0), path))
    )


@fault("ties go to the highest id", layer="verify")
def _ties_highest(patch: pytest.MonkeyPatch) -> None:
    """The greedy branch takes the last of equal logits, plain decoding the first."""

    def row_argmax(logits_TV: torch.Tensor) -> list[int]:
        return [len(row) - 1 - row[::-1].index(max(row)) for row in logits_TV.tolist()]

    patch.setattr(verify, "row_argmax", row_argmax)


@fault("penalties see the committed text only", layer="verify")
def _stale_penalties(patch: pytest.MonkeyPatch) -> None:
    """The law of a node ignores the drafted tokens above it."""
    real = verify_rules.target_law
    patch.setattr(verify_rules, "target_law", lambda sampler, rows, node, path: real(sampler, rows, node, ()))


@fault("penalties of the greedy walk are one token behind", layer="verify")
def _late_penalties(patch: pytest.MonkeyPatch) -> None:
    """The greedy walk hands the sampler a path without its last token."""
    real = verify_rules.walk
    patch.setattr(verify, "walk", lambda tree, token_at: real(tree, lambda node, path: token_at(node, path[:-1])))


@fault("match noise keyed by step", layer="verify")
def _noise_by_step(patch: pytest.MonkeyPatch) -> None:
    """Target noise is keyed by root position and node instead of the output position."""

    def target_token(self: KeyedChance, sampler: Any, logits_V: torch.Tensor, path: Any) -> int:
        noise_V = self._random.residual_gumbel(self._position, len(path), len(logits_V))
        return sampler.sample(logits_V, noise_V, path)

    patch.setattr(KeyedChance, "target_token", target_token)


@fault("one noise for all output positions", layer="verify")
def _constant_noise(patch: pytest.MonkeyPatch) -> None:
    """Target noise forgets the position, so tokens of one request are dependent."""
    real = RequestRandom.target_noise
    patch.setattr(RequestRandom, "target_noise", lambda self, position: real(self, 0))


# --- verify: ratio rules ---------------------------------------------------------------------------


@fault("accept sampled drafts unread", layer="verify")
def _accept_all(patch: pytest.MonkeyPatch) -> None:
    """Every coin says yes."""
    patch.setattr(KeyedChance, "accept", lambda self, node, numerator, denominator: True)


@fault("divide, and accept a probability of 0", layer="verify")
def _divide(patch: pytest.MonkeyPatch) -> None:
    """The coin is compared with a ratio, and equality counts as acceptance."""

    def accept(self: KeyedChance, node: int, numerator: float, denominator: float) -> bool:
        return self._random.accept_uniform(self._position, node) <= numerator / denominator

    patch.setattr(KeyedChance, "accept", accept)


@fault("skip the residual", layer="verify")
def _skip_residual(patch: pytest.MonkeyPatch) -> None:
    """A rejection emits from the target law itself."""

    def residual(target_V: np.ndarray, siblings: SiblingLaw, weight: float) -> tuple[np.ndarray, float]:
        return target_V, float(siblings.excess(weight * target_V).sum())

    patch.setattr(verify_rules, "residual", residual)


@fault("softmax of the residual", layer="verify")
def _softmax_residual(patch: pytest.MonkeyPatch) -> None:
    """Softmax where plain normalising is due."""

    def residual(target_V: np.ndarray, siblings: SiblingLaw, weight: float) -> tuple[np.ndarray, float]:
        left_V = siblings.excess(weight * target_V)
        return np.exp(left_V) / np.exp(left_V).sum(), float(left_V.sum())

    patch.setattr(verify_rules, "residual", residual)


@fault("residual not renormalised between siblings", layer="verify")
def _raw_residual(patch: pytest.MonkeyPatch) -> None:
    """The second sibling is judged against a law that does not sum to 1."""

    def residual(target_V: np.ndarray, siblings: SiblingLaw, weight: float) -> tuple[np.ndarray, float]:
        left_V = siblings.excess(weight * target_V)
        return (left_V, float(left_V.sum())) if left_V.any() else (target_V, 0.0)

    patch.setattr(verify_rules, "residual", residual)


@fault("rejected siblings stay in the draft law", layer="verify")
def _no_removal(patch: pytest.MonkeyPatch) -> None:
    """Draws without replacement are judged as if they were independent."""
    patch.setattr(SiblingLaw, "reject", lambda self, child: None)


@fault("draft law tempered after the draw", layer="verify")
def _other_temperature(patch: pytest.MonkeyPatch) -> None:
    """The law in the ratio is recomputed at half the temperature it was drawn with."""
    real = SiblingLaw.__init__

    def init(self: SiblingLaw, proposal: Proposal, parent: int, vocab_size: int) -> None:
        real(self, proposal, parent, vocab_size)
        self._probs = self._probs**2
        self._total = float(self._probs.sum())

    patch.setattr(SiblingLaw, "__init__", init)


@fault("bonus from the row before the last", layer="verify")
def _bonus_row(patch: pytest.MonkeyPatch) -> None:
    """A fully accepted chain takes its bonus token from the row above."""
    real = verify_rules.target_law

    def target_law(sampler: Any, rows: Any, node: int, path: Any) -> np.ndarray:
        return real(sampler, rows, node - 1 if node == len(rows) - 1 else node, path)

    patch.setattr(verify_rules, "target_law", target_law)


@fault("block scan stops at the first failure", layer="verify")
def _first_failure(patch: pytest.MonkeyPatch) -> None:
    """Block verification keeps the prefix before the first failed coin instead of the last success."""

    def block(proposal: Proposal, rows: torch.Tensor, sampler: Any, chance: Chance) -> Verdict:
        tokens, last = proposal.tree.tokens, len(proposal.tree.tokens) - 1
        weight, kept, emit_V = 1.0, 0, None
        for node in range(last + 1):
            path = [tokens[step] for step in range(1, node + 1)]
            target_V = verify_rules.target_law(sampler, rows, node, path)
            left_V, accept = target_V, weight
            if node < last:
                siblings = SiblingLaw(proposal, node, len(target_V))
                left_V, mass = verify_rules.residual(target_V, siblings, weight)
                total = mass + 1 - weight
                accept = mass / total if total > 0 else 1.0
                weight = min(1.0, weight * target_V[tokens[node + 1]] / siblings.prob(node + 1))
            if node and not chance.accept(node, accept, 1.0):
                break  # going on here would be block verification
            kept, emit_V = node, left_V
        kept_tokens = [tokens[step] for step in range(1, kept + 1)]
        return Verdict(tuple(range(1, kept + 1)), (*kept_tokens, chance.emit(kept, emit_V)))

    patch.setattr(verify, "traversal", block)


@fault("traversal forgets the weight of the path", layer="verify")
def _no_weight(patch: pytest.MonkeyPatch) -> None:
    """A child's probability is not multiplied by its parent's."""

    def weight_of(self: _Visit, child: int, token: int) -> float:
        return min(1.0, float(self.target_V[token]) / self.siblings.prob(child))

    patch.setattr(_Visit, "weight_of", weight_of)


@fault("nothing once the draft mass is used up", layer="verify")
def _no_fallback(patch: pytest.MonkeyPatch) -> None:
    """Siblings drawn after the law ran dry are judged as if nothing could have drawn them."""
    real = SiblingLaw.reject

    def reject(self: SiblingLaw, child: int) -> None:
        real(self, child)
        if len(self._tried) >= 2:
            self._probs = np.zeros_like(self._probs)

    patch.setattr(SiblingLaw, "reject", reject)


# --- verify: draws and noise -----------------------------------------------------------------------


@fault("redraft reuses noise already looked at", layer="verify")
def _reuse_noise(patch: pytest.MonkeyPatch) -> None:
    """Draft noise is keyed by output position, so a redraft meets what a block has already judged."""
    real = RequestRandom.draft_noise
    patch.setattr(RequestRandom, "draft_noise", lambda self, root_position, node: real(self, root_position + node, 0))


@fault("one coin for all siblings", layer="verify")
def _one_coin(patch: pytest.MonkeyPatch) -> None:
    """Accept coins forget the node."""
    real = RequestRandom.accept_uniform
    patch.setattr(RequestRandom, "accept_uniform", lambda self, root_position, node: real(self, root_position, 0))


@fault("residual drawn with the draft's noise", layer="verify")
def _shared_purpose(patch: pytest.MonkeyPatch) -> None:
    """The purpose is left out of the key of the residual."""

    def residual_gumbel(self: RequestRandom, root_position: int, node: int, vocab_size: int) -> np.ndarray:
        return self.draft_noise(root_position, node).gumbel(vocab_size)

    patch.setattr(RequestRandom, "residual_gumbel", residual_gumbel)


@fault("samples of one request share noise", layer="verify")
def _shared_samples(patch: pytest.MonkeyPatch) -> None:
    """The sample index is left out of the key."""
    real = RequestRandom.__init__
    patch.setattr(RequestRandom, "__init__", lambda self, seed, sample=0: real(self, seed, 0))


@fault("siblings sorted by probability", layer="verify")
def _sorted_siblings(patch: pytest.MonkeyPatch) -> None:
    """Drawn siblings are put in order of their probability before they are proposed."""
    real = draw.draw_without_replacement

    def sorted_draw(law: Any, *arguments: Any) -> tuple[int, ...]:
        return tuple(sorted(real(law, *arguments), key=lambda token: -law.prob(token)))

    patch.setattr(draw, "draw_without_replacement", sorted_draw)


@fault("unlikely drawn tokens are cut", layer="verify")
def _cut_drawn(patch: pytest.MonkeyPatch) -> None:
    """The guard against cutting sampled tokens is gone."""
    real = trees.cut

    def cut(proposal: Proposal, max_drafted: int) -> Proposal:
        blind = Proposal(proposal.tree, ProposalKind.POINT_MASS, proposal.laws, proposal.confidence)
        shorter = real(blind, max_drafted)
        return Proposal(shorter.tree, proposal.kind, proposal.laws, shorter.confidence)

    patch.setattr(trees, "cut", cut)


@fault("purpose left out of the key", layer="verify")
def _no_purpose(patch: pytest.MonkeyPatch) -> None:
    """Coins, draft draws, residuals and target noise come from one stream."""
    real = RequestRandom._noise

    def noise(self: RequestRandom, purpose: Purpose, position: int, node: int) -> KeyedNoise:
        return real(self, Purpose.TARGET, position, node)

    patch.setattr(RequestRandom, "_noise", noise)
