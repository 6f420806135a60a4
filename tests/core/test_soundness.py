"""The soundness rules, one named test each: the forbidden variant is biased, the allowed one is exact.

All by enumeration of drafts and acceptances on three tokens (two for reused noise), so a bias is a number
and not a suspicion. `BIASED` is far above rounding and below every bias found here.
"""

import itertools

import numpy as np
import pytest

from draftsmith.core import tree as trees
from draftsmith.core.chance import Chance, ScriptedChance, outcomes
from draftsmith.core.types import Proposal, ProposalKind, Rule, Tree
from draftsmith.core.verify import decide
from draftsmith.errors import UnsoundError
from tests.core.checks import EXACT, IID, WITHOUT, check_cut
from tests.core.toys import ROOT_TOKEN, SHAPES, Joint, Toy, as_law, bias, draw_child, sampled, sampler_of, score

BIASED = 0.01
TARGET, DRAFT = Toy.random(3, 200), Toy.random(3, 201)
RATIO_RULES = (Rule.CHAIN, Rule.BLOCK, Rule.RECURSIVE, Rule.TRAVERSAL)
TREE_RULES = (Rule.RECURSIVE, Rule.TRAVERSAL)


def bias_of(drafting, rule, target=TARGET, **params):
    return bias(drafting, target, sampler_of(target.vocab_size, rule, **params))


def grow(chance, draft, kind, expand, laws=None):
    """A tree grown node by node: `expand(path, depth)` says how many children a node gets, before drawing them."""
    tokens, parents, recorded = [ROOT_TOKEN], [-1], {}
    paths = {0: ()}
    node = 0
    while node < len(tokens):
        count = expand(paths[node])
        if count:
            recorded[node] = as_law((laws or draft).law(paths[node]))
            for _ in range(count):
                earlier = [tokens[other] for other in range(1, len(tokens)) if parents[other] == node]
                token = draw_child(chance, draft.law(paths[node]), kind, earlier)
                paths[len(tokens)] = (*paths[node], token)
                tokens.append(token)
                parents.append(node)
        node += 1
    return Proposal(Tree(tuple(tokens), tuple(parents)), kind, recorded)


def rebuild(proposal, order):
    """The proposal with its nodes in another order, or with fewer of them (what the rules forbid)."""
    place = {node: index for index, node in enumerate(order)}
    tree = Tree(
        tuple(proposal.tree.tokens[node] for node in order),
        (-1, *(place[proposal.tree.parents[node]] for node in order[1:])),
    )
    laws = {place[node]: proposal.laws[node] for node in order if place[node] in set(tree.parents)}
    return Proposal(tree, proposal.kind, laws)


# --- the law in the ratio is the law that drew the token ------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_law_in_the_ratio_is_the_law_that_drew(rule):
    cold = Toy(3, lambda path: DRAFT.law(path) ** 2 / (DRAFT.law(path) ** 2).sum())

    def two(path):
        return 1 if len(path) < 2 else 0

    assert bias_of(lambda chance: grow(chance, cold, IID, two), rule) < EXACT
    assert bias_of(lambda chance: grow(chance, cold, IID, two, laws=DRAFT), rule) > BIASED


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_argmax_draft_is_a_point_mass(rule):
    """Reporting an argmax with its softmax probability is biased; as a point mass it is exact."""

    def as_sampled(chance):
        token = int(DRAFT.law(()).argmax())
        return Proposal(trees.chain(ROOT_TOKEN, (token,)), IID, {0: as_law(DRAFT.law(()))})

    def as_point_mass(chance):
        return Proposal(as_sampled(chance).tree)

    assert bias_of(as_point_mass, rule) < EXACT
    assert bias_of(as_sampled, rule) > BIASED


@pytest.mark.parametrize("rule", TREE_RULES)
def test_independent_siblings_are_not_siblings_without_replacement(rule):
    """The kind is part of the law: distinct siblings judged as independent ones are biased."""

    def mislabelled(chance):
        honest = grow(chance, DRAFT, WITHOUT, lambda path: 0 if path else 2)
        return Proposal(honest.tree, IID, honest.laws)

    assert bias_of(lambda chance: grow(chance, DRAFT, WITHOUT, lambda path: 0 if path else 2), rule) < EXACT
    assert bias_of(mislabelled, rule) > BIASED


# --- a drawn sibling is never reordered or deleted afterwards ----------------------------------------------


@pytest.mark.parametrize("kind", (IID, WITHOUT))
@pytest.mark.parametrize("rule", TREE_RULES)
def test_drawn_siblings_stay_in_draw_order(rule, kind):
    def pair(chance):
        return grow(chance, DRAFT, kind, lambda path: 0 if path else 2)

    def by_probability(chance):
        proposal = pair(chance)
        order = sorted((1, 2), key=lambda node: -DRAFT.law(())[proposal.tree.tokens[node]])
        return rebuild(proposal, [0, *order])

    assert bias_of(pair, rule) < EXACT
    found = bias_of(by_probability, rule)
    # Independent siblings are exchangeable only as a set: sorting them still changes who is tried first.
    assert found > BIASED


@pytest.mark.parametrize("kind", (IID, WITHOUT))
@pytest.mark.parametrize("rule", TREE_RULES)
def test_drawn_siblings_are_never_deleted(rule, kind):
    def pair(chance):
        return grow(chance, DRAFT, kind, lambda path: 0 if path else 2)

    def likelier_only(chance):
        proposal = pair(chance)
        best = max((1, 2), key=lambda node: DRAFT.law(())[proposal.tree.tokens[node]])
        return rebuild(proposal, [0, best])

    assert bias_of(likelier_only, rule) > BIASED


@pytest.mark.parametrize("kind", (IID, WITHOUT))
@pytest.mark.parametrize("rule", TREE_RULES)
def test_confidence_may_decide_what_to_expand(rule, kind):
    """Both siblings stay, only the likelier one gets children: exact."""

    def drafting(chance):
        root = grow(chance, DRAFT, kind, lambda path: 0 if path else 2)
        best = max((1, 2), key=lambda node: (DRAFT.law(())[root.tree.tokens[node]], -node))
        path = (root.tree.tokens[best],)
        drawn: list[int] = []
        for _ in range(2):
            drawn.append(draw_child(chance, DRAFT.law(path), kind, drawn))
        tree = Tree((*root.tree.tokens, *drawn), (*root.tree.parents, best, best))
        return Proposal(tree, kind, {0: root.laws[0], best: as_law(DRAFT.law(path))})

    assert bias_of(drafting, rule) < EXACT


@pytest.mark.parametrize("rule", TREE_RULES)
def test_number_of_children_may_follow_from_the_law_before_the_draw(rule):
    def drafting(chance):
        return grow(
            chance, DRAFT, WITHOUT, lambda path: 0 if len(path) > 1 else 1 if DRAFT.law(path).max() > 0.5 else 2
        )

    assert bias_of(drafting, rule) < EXACT


# --- a budget may not look at a token it can still drop ----------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_budget_looks_only_at_tokens_that_are_kept(rule):
    """Stopping after an unlikely token is exact; dropping that token is biased."""

    def stop_after(chance):
        return grow(
            chance,
            DRAFT,
            IID,
            lambda path: 0 if len(path) > 2 or (path and DRAFT.law(path[:-1])[path[-1]] < 0.4) else 1,
        )

    def drop(chance):
        kept = stop_after(chance)
        tokens = kept.tree.tokens
        law = DRAFT.law(tokens[1:-1])
        return rebuild(kept, range(len(tokens) - (law[tokens[-1]] < 0.4)))

    assert bias_of(stop_after, rule) < EXACT
    assert bias_of(drop, rule) > BIASED


@pytest.mark.parametrize("rule", Rule)
def test_point_masses_may_be_dropped(rule):
    for confidence in ((1.0, 0.2, 0.9, 0.5), (1.0, 0.9, 0.2, 0.5)):

        def drafting(chance, confidence=confidence):
            full = sampled(chance, DRAFT, ProposalKind.POINT_MASS, (-1, 0, 0, 1))
            tree = Tree(tuple(full.tree.tokens[node] for node in range(4)), full.tree.parents)
            return trees.cut(Proposal(tree, confidence=confidence), 2)

        assert bias_of(drafting, rule) < EXACT


def test_cut_refuses_drawn_tokens():
    check_cut()
    proposal = Proposal(trees.chain(0, (1, 2)), IID, {0: as_law(DRAFT.law(())), 1: as_law(DRAFT.law((1,)))})
    with pytest.raises(UnsoundError, match="give the drafter a budget before it draws"):
        trees.cut(proposal, 1)


# --- illegal tokens are masked before the draw ----------------------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_illegal_tokens_are_masked_before_the_draw(rule):
    """Token 0 is banned: a masked draft law is exact, removing it after the draw is not."""
    target = Toy(3, lambda path: np.array([0.0, 1.0, 1.0]) * TARGET.law(path) / TARGET.law(path)[1:].sum())
    masked = Toy(3, lambda path: np.array([0.0, 1.0, 1.0]) * DRAFT.law(path) / DRAFT.law(path)[1:].sum())

    def legal(chance):
        return grow(chance, masked, IID, lambda path: 1 if len(path) < 2 else 0)

    def redrawn(chance):
        """Drawn again from the masked law when illegal, with the unmasked law in the ratio."""
        tokens = []
        for _ in range(2):
            token = draw_child(chance, DRAFT.law(tokens), IID, ())
            tokens.append(token if token else draw_child(chance, masked.law(tokens), IID, ()))
        return Proposal(trees.chain(ROOT_TOKEN, tokens), IID, {n: as_law(DRAFT.law(tokens[:n])) for n in range(2)})

    assert bias_of(legal, rule, target) < EXACT
    assert bias_of(redrawn, rule, target) > BIASED


# --- context-dependent transforms see each node's own path -----------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_transforms_see_the_nodes_own_path(rule):
    """A penalty state of the committed text only is a bias."""

    class Stale:
        """The request's sampler, handing every row the root's path."""

        def __init__(self, sampler):
            self.params, self._sampler = sampler.params, sampler

        def law(self, logits_V, path):
            return self._sampler.law(logits_V, ())

    sampler = sampler_of(3, rule, presence_penalty=1.5)

    def run(chance, judged_by):
        proposal = sampled(chance, DRAFT, IID, SHAPES["chain2"])
        tree = Tree(tuple(proposal.tree.tokens[node] for node in range(3)), proposal.tree.parents)
        return decide(proposal, score(tree, TARGET), judged_by, chance).tokens

    joint = Joint(TARGET, sampler)
    for judged_by, is_exact in ((sampler, True), (Stale(sampler), False)):
        mass = dict.fromkeys(itertools.product(range(3), repeat=3), 0.0)
        for weight, tokens in outcomes(lambda chance, judged_by=judged_by: run(chance, judged_by)):
            for sequence, prob in joint.continued(tokens, 3):
                mass[sequence] += weight * prob
        for sequence, prob in joint.continued((), 3):
            mass[sequence] -= prob
        found = 0.5 * sum(map(abs, mass.values()))
        assert found < EXACT if is_exact else found > BIASED


# --- confidence heads see only tokens before the one they judge --------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_confidence_sees_only_tokens_before_the_one_it_judges(rule):
    """A head that judges position i from tokens before i may stop there; one that saw token i may not."""
    head = Toy.random(3, 202)

    def drafting(chance, sees_own_token):
        tokens: list[int] = []
        while len(tokens) < 2:
            token = draw_child(chance, DRAFT.law(tokens), IID, ())
            if head.law((*tokens, token) if sees_own_token else tokens)[0] < 0.3:
                break
            tokens.append(token)
        return Proposal(
            trees.chain(ROOT_TOKEN, tokens), IID, {n: as_law(DRAFT.law(tokens[:n])) for n in range(len(tokens))}
        )

    assert bias_of(lambda chance: drafting(chance, False), rule) < EXACT
    assert bias_of(lambda chance: drafting(chance, True), rule) > BIASED


# --- the ratio rules never share noise with a redraft ---------------------------------------------------------------


class _PositionCoins(Chance):
    """Coins keyed by output position: what an earlier step learnt of a coin still holds in a later one."""

    def __init__(self, chance, known, position):
        self._chance, self._known, self._position = chance, known, position

    def target_token(self, sampler, logits_V, path):
        return self._chance.target_token(sampler, logits_V, path)

    def emit(self, node, weights_V):
        return self._chance.emit(node, weights_V)

    def accept(self, node, numerator, denominator):
        threshold = min(1.0, numerator / denominator) if numerator > 0 else 0.0
        low, high = self._known.get(self._position + node, (0.0, 1.0))
        if high <= threshold or low >= threshold:
            return high <= threshold
        inside = (threshold - low) / (high - low)
        accepted = self._chance.pick((1.0 - inside, inside)) == 1
        self._known[self._position + node] = (low, threshold) if accepted else (threshold, high)
        return accepted


def _redraft_bias(rule, length, *, reuse_draws, reuse_coins=False):
    """Several steps on the two-token toy, two drafts a step; total variation of the first tokens."""
    target, draft = Toy.context_free((1 / 3, 2 / 3)), Toy.context_free((2 / 3, 1 / 3))
    sampler = sampler_of(2, rule)
    law = as_law(draft.law(()))

    def run(chance: ScriptedChance):
        draws, coins, emitted, steps = {}, {}, (), 0
        while len(emitted) < length:
            tokens = []
            for depth in range(2):
                key = len(emitted) + depth if reuse_draws else (steps, depth)
                if key not in draws:
                    draws[key] = chance.pick(draft.law(()).tolist())
                tokens.append(draws[key])
            proposal = Proposal(trees.chain(ROOT_TOKEN, tokens), IID, {0: law, 1: law})
            answers = _PositionCoins(chance, coins, len(emitted)) if reuse_coins else chance
            emitted += decide(proposal, score(proposal.tree, target), sampler, answers).tokens
            steps += 1
        return emitted[:length]

    mass = {sequence: -prob for sequence, prob in Joint(target, sampler).continued((), length)}
    for weight, sequence in outcomes(run):
        mass[sequence] += weight
    return 0.5 * sum(map(abs, mass.values()))


def test_redraft_never_meets_noise_already_looked_at():
    """Block and traversal look past the token they stop at; drawing there again with the same noise is biased.

    The bias is 7/108 = 0.065 on three tokens, and grows with the text. Chain rejection looks no further
    than it goes, so there the same reuse is harmless: that is how the fault hides.
    """
    for rule in (Rule.BLOCK, Rule.TRAVERSAL):
        assert _redraft_bias(rule, 3, reuse_draws=False) < EXACT
        assert _redraft_bias(rule, 3, reuse_draws=True) == pytest.approx(7 / 108, abs=EXACT)
        assert _redraft_bias(rule, 3, reuse_draws=True, reuse_coins=True) > 0.06
    assert _redraft_bias(Rule.BLOCK, 5, reuse_draws=True) > 0.08
    assert _redraft_bias(Rule.CHAIN, 3, reuse_draws=True) < EXACT
