"""Lossy rules by enumeration: the law of what they emit, its distance from the target's, and what they say it costs."""

import itertools

from draftsmith.core import tree as trees
from draftsmith.core.chance import outcomes
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.types import Proposal, ProposalKind, Rule
from tests.core.toys import Joint, Toy, as_law, sampler_of, score

TARGET, DRAFT = Toy.random(3, 300), Toy.random(3, 301)


def greedy_sampler(vocab_size, rule, **params):
    """A sampler at temperature 0, bound to a prompt of token 0."""
    return Sampler(SamplingParams(rule=rule, **params), (0,), frozenset(), vocab_size)


def drawn_chain(chance, length=2, draft=DRAFT):
    """A chain drawn from the draft, with its laws."""
    tokens = []
    for _ in range(length):
        tokens.append(chance.pick(draft.law(tokens).tolist()))
    return chain_of(*tokens, draft=draft)


def chain_of(*tokens, draft=DRAFT):
    """Given tokens as if they had been drawn."""
    laws = {n: as_law(draft.law(tokens[:n])) for n in range(len(tokens))}
    return Proposal(trees.chain(0, tokens), ProposalKind.IID, laws)


def best_chain(length=2, draft=DRAFT):
    """The draft's likeliest tokens, as point masses."""
    tokens = []
    for _ in range(length):
        tokens.append(int(draft.law(tokens).argmax()))
    return Proposal(trees.chain(0, tokens))


def steps(rule, drafting, target=TARGET, memory=None):
    """Every outcome of one step with its probability: a verdict, and what the rule remembers."""
    sampler = sampler_of(target.vocab_size, rule)

    def run(chance):
        proposal = drafting(chance)
        return rule.verify(proposal, score(proposal.tree, target), sampler, chance, memory)

    return outcomes(run)


def distance_and_cost(rule, drafting, length, target=TARGET, memory=None):
    """Total variation of the first tokens' law from the target's, and the mean sum of the costs told for them."""
    joint = Joint(target, sampler_of(target.vocab_size, Rule.CHAIN))
    mass = dict.fromkeys(itertools.product(range(target.vocab_size), repeat=length), 0.0)
    cost = 0.0
    for weight, (verdict, _) in steps(rule, drafting, target, memory):
        assert len(verdict.costs) == len(verdict.tokens)
        cost += weight * sum(verdict.costs[:length])
        for sequence, prob in joint.continued(verdict.tokens, length):
            mass[sequence] += weight * prob
    for sequence, prob in joint.continued((), length):
        mass[sequence] -= prob
    return 0.5 * sum(map(abs, mass.values())), cost
