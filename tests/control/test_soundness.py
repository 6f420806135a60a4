"""No controller changes the law of what is emitted: draws, decisions and acceptances enumerated together.

A step's proposal is drawn token by token, the controller is asked before each draw and selects afterwards, exactly as
the engine does it; then verification is enumerated too and the emitted law compared with the target's. The published
counter-example is the other half: a scheduler that looks at the whole curve of what was drawn is biased by 0.15.
"""

import copy
import random

import numpy as np
import pytest

from draftsmith.control.base import RequestSignal
from draftsmith.control.choice import make_controller
from draftsmith.control.cost_table import CostTable
from draftsmith.core.chance import ScriptedChance, outcomes
from draftsmith.core.types import Budget, Proposal, ProposalKind, Rule, Tree
from draftsmith.errors import UnsoundError
from tests.control.simulation import QUANTISED, STAIRCASE, Drafting, simulate, stream
from tests.control.test_controllers import SELECTIONS
from tests.core.checks import EXACT
from tests.core.toys import ROOT_TOKEN, Toy, as_law, bias, draw_child, sampler_of, verdicts
from tests.engine.fakes import tiny_engine

ALL = [text for text in SELECTIONS if "argmax" not in text]
CHAIN_RULES = [Rule.CHAIN, Rule.BLOCK, Rule.COUPLING]
# The draft is sure of itself after one first token and not after the other, so that decisions differ between draws.
TARGET, DRAFT, OTHER = Toy.random(2, 7), Toy.random(2, 344, sharpness=2.0), Toy.random(2, 9, sharpness=1.5)
IID = ProposalKind.IID


def warmed(text, seed):
    """A controller that has seen some traffic of drawn chains, good and bad."""
    controller, rng = make_controller(text), random.Random(seed)
    drafting = Drafting(look=1e-4, per_depth=1e-4, kind=IID)
    streams = [stream(rng, [(40, 0.8), (20, 0.2)]) for _ in range(2)]
    simulate(controller, streams, [QUANTISED, STAIRCASE][seed % 2], drafting, seed=seed, until=30 + 13 * seed)
    return controller


def drawn_chain(chance, draft, budget, keep_drafting, foreseen=True):
    """As `drafters.drafting` draws one: the confidence is the likeliest token's, judged before the draw."""
    tokens, laws, confidence = [ROOT_TOKEN], {}, [1.0]
    while len(tokens) <= budget:
        law = draft.law(tokens[1:])
        if not keep_drafting(float(law.max())):
            break
        laws[len(tokens) - 1] = as_law(law)
        confidence.append(float(law.max()))
        tokens.append(draw_child(chance, law, IID, ()))
    return Proposal(Tree(tuple(tokens), tuple(range(-1, len(tokens) - 1))), IID, laws, tuple(confidence), foreseen)


def step_of(warm, foreseen=True):
    """One step of two requests; returns what the first one's proposal became."""

    def drafting(chance):
        controller = copy.deepcopy(warm)
        signals = [RequestSignal(number, "synthetic", 3, 20, 30) for number in (500, 501)]
        budgets = controller.budget(signals)
        asked = [(draft, budget) for draft, budget in zip((DRAFT, OTHER), budgets, strict=True) if budget]
        proposals = [
            drawn_chain(chance, draft, min(budget, 2 + (draft is DRAFT)), controller.keep_drafting, foreseen)
            for draft, budget in asked
        ]
        selected = controller.select(proposals) if proposals else []
        return selected[0] if budgets[0] else Proposal.empty(ROOT_TOKEN)

    return drafting


@pytest.mark.parametrize("rule", CHAIN_RULES)
@pytest.mark.parametrize("text", ALL)
def test_the_law_is_the_targets_under_every_controller(text, rule):
    for seed in (0, 1):
        assert bias(step_of(warmed(text, seed)), TARGET, sampler_of(2, rule)) < EXACT


def jagged(*seconds):
    """What 1 to 8 rows cost."""
    return CostTable(rows=tuple(range(1, 9)), contexts=(64,), verify=(seconds,), spread=((0.0,) * 8,))


RISING = jagged(1.0, 1.0, 1.1, 1.4, 1.6, 1.7, 1.75, 1.8)
CLIFF = jagged(1.0, 1.0, 1.1, 1.2, 1.3, 3.0, 4.0, 5.0)


def scheduler(options, costs=RISING):
    """A scheduler that knows what rows cost; a stale one has a past to go by."""
    controller = make_controller(f"prefix-scheduler:max_draft=3{options}")
    controller.start_from(costs)
    rng = random.Random(1)
    for _ in range(3):
        drafting = step_of(controller)
        chance = ScriptedChance()
        chance.pick = lambda probs: rng.choices(range(len(probs)), probs)[0]
        drafting(chance)
        signals = [RequestSignal(number, "synthetic", 3, 20, 30) for number in (500, 501)]
        controller.budget(signals)
        confidences = [rng.random(), rng.random()]
        controller.select([drawn_chain(chance, DRAFT, 3, lambda confidence: True) for _ in confidences])
    return controller


@pytest.mark.parametrize(
    ("options", "costs"), [("", RISING), (":stale=1", CLIFF), (":stale=2", CLIFF), (":threshold=0.75", RISING)]
)
def test_a_scheduler_that_decides_by_what_came_before_is_exact(options, costs):
    """Its lengths differ between draws, so there is something to be biased by."""
    drafting = step_of(scheduler(options, costs))
    assert len({proposal.tree.num_drafted for _, proposal in outcomes(drafting)}) >= 2
    for rule in CHAIN_RULES:
        assert bias(drafting, TARGET, sampler_of(2, rule)) < EXACT


def test_chains_of_unforeseen_confidences_stay_whole():
    whole = {proposal.tree.num_drafted for _, proposal in outcomes(step_of(scheduler(""), foreseen=False))}
    assert whole == {3}


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.RECURSIVE])
def test_drawn_trees_keep_their_siblings(text, rule):
    """Shapes are asked for before anything is drawn, and nothing drawn is deleted."""
    warm = warmed(text, 1)

    def drafting(chance):
        controller = copy.deepcopy(warm)
        budget = controller.budget([RequestSignal(500, "synthetic", 4, 20, 30)])[0]
        shape = Budget.shape_of(budget) or ((0,), (1,), (0, 0))[:budget]
        tokens, parents, laws, nodes = [ROOT_TOKEN], [-1], {}, {(): 0}
        for path in sorted(shape[:4], key=lambda path: (len(path), path)):
            parent = nodes[path[:-1]]
            law = DRAFT.law([tokens[nodes[path[:depth]]] for depth in range(1, len(path))])
            earlier = [tokens[node] for node in range(1, len(tokens)) if parents[node] == parent]
            laws[parent] = as_law(law)
            nodes[path] = len(tokens)
            tokens.append(draw_child(chance, law, ProposalKind.WITHOUT_REPLACEMENT, earlier))
            parents.append(parent)
        kind = ProposalKind.WITHOUT_REPLACEMENT if laws else ProposalKind.POINT_MASS
        proposal = Proposal(Tree(tuple(tokens), tuple(parents)), kind, laws)
        return controller.select([proposal])[0] if budget else proposal

    assert bias(drafting, TARGET, sampler_of(2, rule)) < EXACT


# -- the published counter-example ---------------------------------------------------------------------

STEPS_PER_SECOND = (1.0, 0.5, 0.45)  # of one, two and three rows
COSTS = CostTable(
    rows=(1, 2, 3), contexts=(64,), verify=(tuple(1 / rate for rate in STEPS_PER_SECOND),), spread=((0.0,) * 3,)
)
P, Q = Toy.context_free((0.7, 0.3)), Toy.context_free((0.5, 0.5))


def published(search):
    """Survival .8 at depth 1; at depth 2 the conditional is .9 or nothing, depending on which token came first."""

    def drafting(chance):
        controller = make_controller(f"prefix-scheduler:search={search}")
        controller.start_from(COSTS)
        budget = controller.budget([RequestSignal(0, "head", 2, 64)])[0]
        assert budget == 2
        first, second = (draw_child(chance, Q.law(()), IID, ()) for _ in range(2))
        confidence = (1.0, 0.8, 0.9 if first == 0 else 0.0)
        law = as_law(Q.law(()))
        proposal = Proposal(Tree((ROOT_TOKEN, first, second), (-1, 0, 1)), IID, {0: law, 1: law}, confidence, True)
        return controller.select([proposal])[0]

    return drafting


def first_token_law(drafting):
    mass = np.zeros(2)
    for weight, verdict in verdicts(drafting, P, sampler_of(2, Rule.CHAIN)):
        mass[verdict.tokens[0]] += weight
    return mass


def test_looking_at_the_whole_curve_gives_the_published_law():
    """DSpark (2607.05147): p = (.7, .3), q = (.5, .5) and a retrospective argmax emit (.85, .15)."""
    assert first_token_law(published("argmax")) == pytest.approx([0.85, 0.15], abs=1e-6)
    assert make_controller("prefix-scheduler:search=argmax").looks_at_tokens


def test_stopping_at_the_first_non_improvement_does_not():
    assert first_token_law(published("first")) == pytest.approx([0.7, 0.3], abs=1e-12)
    assert bias(published("first"), P, sampler_of(2, Rule.CHAIN)) < EXACT


def test_the_engine_refuses_the_one_that_looks():
    """At temperature 0, and for point masses, looking is harmless and allowed."""
    engine = tiny_engine(drafter="draft_model:model=other", controller="prefix-scheduler:search=argmax")
    for rule in ("chain", "block", "recursive", "traversal"):
        with pytest.raises(UnsoundError, match="looks at drafted tokens"):
            engine.generate([1, 2, 3], max_new_tokens=24, temperature=1.0, rule=rule, ignore_eos=True)
    plain = tiny_engine().generate([1, 2, 3], max_new_tokens=12, ignore_eos=True)
    assert engine.generate([1, 2, 3], max_new_tokens=12, ignore_eos=True).token_ids == plain.token_ids
    sampled = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    assert engine.generate([1, 2, 3], **sampled).token_ids == tiny_engine().generate([1, 2, 3], **sampled).token_ids


# -- end to end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SELECTIONS)
@pytest.mark.parametrize("drafter", ["ngram:min_ngram=1", "suffix:tree=true", "draft_model:model=other", "hybrid"])
def test_ids_are_the_plain_runs(text, drafter):
    """Greedy and coupled ids are those of decoding without drafts, in a batch, under every controller."""
    prompts = [[1, 2, 3, 1, 2, 3, 1], [5], list(b"abc abc abc")]
    engine, plain = tiny_engine(drafter=drafter, controller=text, max_batch=2), tiny_engine(max_batch=2)
    for params in ({}, {"temperature": 1.0, "seed": 4}):
        settings = {"max_new_tokens": 20, "ignore_eos": True, **params}
        found, wanted = engine.generate(prompts, **settings), plain.generate(prompts, **settings)
        assert [item.token_ids for item in found] == [item.token_ids for item in wanted]
