"""Compact checks of verification, used by the ordinary tests and turned red by the planted faults.

Each raises when verification is wrong. Statistical ones have a false-alarm probability of at most 1e-6
each (chi-square; seeds are fixed, so a green check stays green) and state their power.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import torch
from scipy import stats

from draftsmith.core import draw
from draftsmith.core import tree as trees
from draftsmith.core import verify as verification
from draftsmith.core.chance import KeyedChance, ScriptedChance
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.tree_shapes import level_paths
from draftsmith.core.types import Law, Proposal, ProposalKind, Rule, Tree
from draftsmith.errors import UnsoundError
from tests.core.toys import (
    SHAPES,
    Joint,
    Toy,
    as_law,
    bias,
    draft_coupled,
    draft_keyed,
    expected_tokens,
    generate,
    sampled,
    sampler_of,
)

EXACT = 1e-12
FALSE_ALARM = 1e-6
IID, WITHOUT = ProposalKind.IID, ProposalKind.WITHOUT_REPLACEMENT


def check_exact(
    rule: Rule,
    kind: ProposalKind,
    shape: str,
    *,
    vocab_size: int = 3,
    seed: int = 0,
    target_zeros: int = 0,
    draft_zeros: int = 0,
    sparse: bool = False,
    **params: Any,
) -> None:
    """By enumeration: the emitted law, extended to four tokens, is the target's."""
    target = Toy.random(vocab_size, 2 * seed, zeros=target_zeros)
    draft = Toy.random(vocab_size, 2 * seed + 1, zeros=draft_zeros)
    found = bias(
        lambda chance: sampled(chance, draft, kind, SHAPES[shape], sparse),
        target,
        sampler_of(vocab_size, rule, **params),
        length=4 if vocab_size < 4 else 3,
    )
    assert found < EXACT, f"{rule.value} on {kind.value} {shape}: total variation {found:.3g} from the target"


def check_chain_vectors() -> None:
    """The published expectations on the two-token toy: tokens per step, token-wise and block."""
    target, draft = Toy.context_free((1 / 3, 2 / 3)), Toy.context_free((2 / 3, 1 / 3))
    printed = {
        Rule.CHAIN: {1: "1.6667", 2: "2.1111", 4: "2.6049", 8: "2.9220"},
        Rule.BLOCK: {1: "1.6667", 2: "2.2222", 4: "3.0494", 8: "4.1068"},
    }
    for rule, by_length in printed.items():
        for length, expected in by_length.items():
            shape = tuple(range(-1, length))
            found = expected_tokens(
                lambda chance, shape=shape: sampled(chance, draft, IID, shape), target, sampler_of(2, rule)
            )
            assert f"{found:.4f}" == expected, (rule, length, found)
            if length == 2:
                exact = {Rule.CHAIN: 10 / 9, Rule.BLOCK: 11 / 9}[rule]
                assert abs(found - 1 - exact) < EXACT, (rule, found)


def check_tree_vectors() -> None:
    """The published expectations on the three-token toy: tokens per step of the tree rules."""
    target, draft = Toy.context_free((0.5, 0.3, 0.2)), Toy.context_free((0.2, 0.3, 0.5))
    rules = (Rule.TRAVERSAL, Rule.RECURSIVE, Rule.MATCH)
    printed = {
        (WITHOUT, (2,)): ("1.82", "1.82", "1.613214"),
        (WITHOUT, (3,)): ("2", "2", "2"),
        (WITHOUT, (2, 2)): ("2.5284", "2.4924", "1.989246"),
        (WITHOUT, (3, 2)): ("2.856", "2.82", "2.613214"),
        (IID, (2,)): ("1.76", "1.76", "1.483"),
        (IID, (3,)): ("1.808", "1.808", "1.6161"),
        (IID, (2, 2)): ("2.3856", "2.3376", "1.716289"),
        (IID, (3, 2)): ("2.47008", "2.42208", "1.913676"),
    }
    for (kind, levels), row in printed.items():
        shape = trees.parents_of(level_paths(levels, 99))
        for rule, expected in zip(rules, row, strict=True):
            found = expected_tokens(
                lambda chance, kind=kind, shape=shape: sampled(chance, draft, kind, shape), target, sampler_of(3, rule)
            )
            digits = len(expected.partition(".")[2])
            assert f"{found:.{digits}f}" == expected, (kind, levels, rule, found)


def random_tree(generator: np.random.Generator, num_nodes: int, vocab_size: int) -> Tree:
    """Any tree in topological order, duplicate siblings included."""
    parents = (-1, *(int(generator.integers(node)) for node in range(1, num_nodes)))
    return Tree(tuple(int(token) for token in generator.integers(vocab_size, size=num_nodes)), parents)


def check_greedy(context_free: bool = True) -> None:
    """The greedy walk emits the target's argmaxes, the lowest id among equals, for any tree.

    Logits are small integers, so ties abound; the tree often carries the argmax, so walks go deep.
    """
    vocab_size, bonuses = 3, 0
    params = SamplingParams(presence_penalty=0.0 if context_free else 1.0)
    for seed in range(300):
        generator = np.random.default_rng(seed)
        tree = random_tree(generator, 10, vocab_size)
        logits = torch.from_numpy(generator.integers(3, size=(10, vocab_size)).astype(np.float32))
        sampler = Sampler(params, (0,), frozenset(), vocab_size)
        verdict = verification.verify(Proposal(tree), logits, sampler, RequestRandom(seed), 0)
        node, path, emitted = 0, [], []
        while True:
            row = logits[node].tolist()
            if not context_free:
                row = [value - (token in emitted) for token, value in enumerate(row)]
            emitted.append(row.index(max(row)))
            matches = [n for n in range(10) if tree.parents[n] == node and tree.tokens[n] == emitted[-1]]
            if not matches:
                break
            node = matches[0]
            path.append(node)
        bonuses += len(path) > 1
        assert verdict.tokens == tuple(emitted), (seed, verdict, emitted)
        assert verdict.path == tuple(path), (seed, verdict, path)
    assert bonuses > 20, "the walks are too short to tell anything"


def check_plain_equals_speculative() -> None:
    """Seeded coupling and match: token for token the plain sampled run, for drafts of every origin."""
    target, draft = Toy.random(4, 10), Toy.random(4, 11, sharpness=0.5)
    for seed in range(60):
        plain = generate(target, sampler_of(4, Rule.COUPLING), RequestRandom(seed), 6)
        for rule in (Rule.COUPLING, Rule.MATCH):
            for shape in ("chain3", "two_two", "depth_first"):
                parents = SHAPES[shape]
                draftings = {
                    "coupled": lambda random, emitted, parents=parents: draft_coupled(draft, random, parents, emitted),
                    "iid": lambda random, emitted, parents=parents: draft_keyed(draft, random, IID, parents, emitted),
                }
                for origin, drafting in draftings.items():
                    found = generate(target, sampler_of(4, rule), RequestRandom(seed), 6, drafting)
                    assert found == plain, (seed, rule, shape, origin, found, plain)


def assert_law(
    draws: list[tuple[int, ...]], law: dict[tuple[int, ...], float], what: str, false_alarm: float = FALSE_ALARM
) -> None:
    """Chi-square of outcomes against their law; an impossible outcome fails at once."""
    counts = Counter(draws)
    impossible = [outcome for outcome in counts if law.get(outcome, 0.0) <= 0]
    assert not impossible, f"{what}: impossible outcomes {impossible[:3]}"
    possible = [outcome for outcome, prob in law.items() if prob > 0]
    expected = np.array([law[outcome] for outcome in possible]) * len(draws)
    observed = np.array([counts[outcome] for outcome in possible])
    # Rare cells are pooled so that each holds at least five expected counts.
    order = np.argsort(expected)
    rare = order[: max(0, int(np.searchsorted(np.cumsum(expected[order]), 5.0)) + 1)] if expected.min() < 5 else []
    if len(rare):
        expected = np.append(np.delete(expected, rare), expected[rare].sum())
        observed = np.append(np.delete(observed, rare), observed[rare].sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    chance = float(stats.chi2.sf(statistic, len(expected) - 1))
    assert chance > false_alarm, f"{what}: chi-square {statistic:.1f} on {len(expected)} cells, p = {chance:.2g}"


def check_keyed_law(rule: Rule, kind: ProposalKind, shape: str, num_requests: int = 2000, vocab_size: int = 3) -> None:
    """Through `verify` with true keyed noise, step by step: chi-square of the first two tokens.

    False alarm 1e-6; power above 0.99 against a total variation of 0.1 (3 tokens, 9 cells).
    """
    target, draft = (Toy.random(vocab_size, seed, sharpness=0.7) for seed in (20, 21))
    sampler = sampler_of(vocab_size, rule)
    draws = [
        generate(
            target,
            sampler.fork(),
            RequestRandom(seed, sample=seed % 3),
            2,
            lambda random, emitted: draft_keyed(draft, random, kind, SHAPES[shape], emitted),
        )
        for seed in range(num_requests)
    ]
    law = dict(Joint(target, sampler).continued((), 2))
    assert_law(draws, law, f"{rule.value} on {kind.value} {shape}")


def check_redraft(num_requests: int = 4000) -> None:
    """Block verification, then a redraft from the new root: chi-square of three tokens on the two-token toy.

    False alarm 1e-6; power above 0.97 against the bias of reused draft noise (total variation 7/108).
    """
    target, draft = Toy.context_free((1 / 3, 2 / 3)), Toy.context_free((2 / 3, 1 / 3))
    sampler = sampler_of(2, Rule.BLOCK)
    draws = [
        generate(
            target,
            sampler.fork(),
            RequestRandom(seed),
            3,
            lambda random, emitted: draft_keyed(draft, random, IID, SHAPES["chain2"], emitted),
        )
        for seed in range(num_requests)
    ]
    assert_law(draws, dict(Joint(target, sampler).continued((), 3)), "block with redrafts")


def check_draws(num_requests: int = 4000) -> None:
    """The draw functions have the laws of their kinds: chi-square over pairs of siblings at two nodes.

    False alarm 1e-6 each; power above 0.999 against a total variation of 0.1.
    """
    probs = (0.4, 0.1, 0.3, 0.2)
    law = Law(torch.tensor(probs, dtype=torch.float32))
    independent, distinct = [], []
    for seed in range(num_requests):
        random = RequestRandom(seed)
        independent.append(draw.draw_iid(law, random, 3, (1, 2), 4))
        distinct.append(draw.draw_without_replacement(law, random, 3, 0, 2, 4))
    pairs = list(itertools.product(range(4), repeat=2))
    assert_law(independent, {(a, b): probs[a] * probs[b] for a, b in pairs}, "draw_iid")
    assert_law(
        distinct,
        {(a, b): probs[a] * probs[b] / (1 - probs[a]) if a != b else 0.0 for a, b in pairs},
        "draw_without_replacement",
    )


def check_zero_probability() -> None:
    """A token the target gives no mass is never accepted, even by a coin that shows exactly 0."""

    class ZeroCoin(RequestRandom):
        def accept_uniform(self, root_position: int, node: int) -> float:
            return 0.0

    assert not KeyedChance(ZeroCoin(0), 0).accept(1, 0.0, 0.25)
    assert KeyedChance(ZeroCoin(0), 0).accept(1, 1e-300, 0.25)
    target = Toy.context_free((0.0, 0.4, 0.6))
    proposal = Proposal(trees.chain(0, (0, 0)), IID, {n: as_law(np.array([0.9, 0.05, 0.05])) for n in (0, 1)})
    for rule in (Rule.CHAIN, Rule.BLOCK, Rule.RECURSIVE, Rule.TRAVERSAL):
        logits = torch.stack([target.logits(())] * 3)
        verdict = verification.verify(proposal, logits, sampler_of(3, rule), ZeroCoin(1), 0)
        assert 0 not in verdict.tokens and verdict.path == (), (rule, verdict)


def check_cut() -> None:
    """A controller that asks for unlikely drawn tokens to be cut is refused, and the law stays exact."""
    target, draft = Toy.random(3, 30), Toy.random(3, 31)

    def drafting(chance: ScriptedChance) -> Proposal:
        first = chance.pick(draft.law(()).tolist())
        second = chance.pick(draft.law((first,)).tolist())
        probs = (1.0, float(draft.law(())[first]), float(draft.law((first,))[second]))
        laws = {0: as_law(draft.law(())), 1: as_law(draft.law((first,)))}
        proposal = Proposal(trees.chain(0, (first, second)), IID, laws, confidence=probs)
        try:
            return trees.cut(proposal, sum(prob > 0.4 for prob in probs[1:]))
        except UnsoundError:
            return proposal

    found = bias(drafting, target, sampler_of(3, Rule.BLOCK))
    assert found < EXACT, f"cutting drawn tokens: total variation {found:.3g}"


def check_samples() -> None:
    """The samples of one request are independent: chi-square of pairs, false alarm 1e-6."""
    target = Toy.context_free((0.5, 0.3, 0.2))
    sampler = sampler_of(3, Rule.COUPLING)
    pairs = [
        tuple(generate(target, sampler, RequestRandom(seed, sample), 1)[0] for sample in (0, 1)) for seed in range(1000)
    ]
    probs = target.law(())
    law = {(a, b): float(probs[a] * probs[b]) for a in range(3) for b in range(3)}
    assert_law(pairs, law, "two samples of one request")
