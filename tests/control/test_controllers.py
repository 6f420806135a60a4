"""One contract for every controller of the table."""

import dataclasses
import random

import pytest

from draftsmith.control import drafter_state, heuristic, prefix_scheduler
from draftsmith.control.base import RequestOutcome, RequestSignal, StepSeconds
from draftsmith.control.choice import make_controller
from draftsmith.core.tree import chain, validate
from draftsmith.core.types import Law, Proposal, ProposalKind, Tree
from draftsmith.errors import OptionError
from draftsmith.registry import CONTROLLERS, DRAFTERS, load_class, parse_selection, read_options

SELECTIONS = [
    "fixed",
    "fixed:num_draft=3",
    "auto",
    "goodput:cheap_look=0",
    "goodput:max_draft=5:margin=0.5",
    "goodput:latency=0.02",
    "ema",
    "ema:tiers=1=0+2+4:interval=2:warmup=3",
    "heuristic",
    "bandit",
    "bandit:policy=exp3:arms=0+2+5",
    "prefix-scheduler",
    "prefix-scheduler:stale=2:estimator=cells",
    "prefix-scheduler:estimator=logistic:max_draft=5",
    "prefix-scheduler:threshold=0.75",
    "prefix-scheduler:search=argmax",
]


def test_every_controller_of_the_table_is_here():
    assert {text.partition(":")[0] for text in SELECTIONS} >= set(CONTROLLERS)


def random_proposal(rng, budget):
    """A chain or a tree, of point masses or drawn, sometimes empty."""
    size = rng.randint(0, budget)
    if rng.random() < 0.5:
        tree = chain(7, range(size))
    else:
        parents = (-1, *[rng.randrange(node) for node in range(1, size + 1)])
        tree = Tree((7, *range(size)), parents)
    kind = rng.choice(list(ProposalKind)) if size else ProposalKind.POINT_MASS
    laws = {} if kind is ProposalKind.POINT_MASS else dict.fromkeys(set(tree.parents[1:]), Law(None))
    confidence = (1.0, *[rng.random() for _ in range(size)]) if rng.random() < 0.7 else None
    return Proposal(tree, kind, laws, confidence)


def drive(controller, steps, seed, lose=0.1):
    """Random traffic; yields (signals, budgets, proposals, selected) of each step."""
    rng = random.Random(seed)
    live = list(range(4))
    for step in range(steps):
        if rng.random() < 0.05:
            controller.forget(live.pop(rng.randrange(len(live))))
            live.append(100 + step)
        signals = [
            RequestSignal(number, rng.choice(["a", "b"]) if number % 2 else "a", rng.randint(1, 40), 10 * step)
            for number in live
            if rng.random() < 0.9
        ]
        budgets = controller.budget(signals)
        proposals = [random_proposal(rng, budget) for budget in budgets if budget]
        if proposals and rng.random() < lose:
            proposals.pop()  # the engine had no room for one request's rows
        selected = list(controller.select(proposals)) if proposals else []
        yield signals, budgets, proposals, selected
        if rng.random() < 0.9:  # steps with prompt rows are not reported
            rows = len(signals) + sum(proposal.tree.num_drafted for proposal in selected)
            controller.observe(*report(rng, signals, budgets, selected, rows))


def report(rng, signals, budgets, selected, rows):
    """Outcomes of a step, with and without the emitted tokens."""
    drafts = iter(selected)
    outcomes = []
    for signal, budget in zip(signals, budgets, strict=True):
        proposal = next(drafts, None) if budget else None
        drafted = proposal.tree.num_drafted if proposal else 0
        accepted = rng.randint(0, drafted)
        tokens = tuple(range(accepted + 1)) if rng.random() < 0.95 else ()
        outcomes.append(
            RequestOutcome(signal.sequence_id, signal.drafter, drafted, drafted, accepted, accepted + 1, tokens)
        )
    seconds = StepSeconds(max(rows, 1), rng.random() * 1e-3, rng.random() * 1e-2, rng.random() * 1e-3)
    return outcomes or [RequestOutcome(0, "a", 0, 0, 0, 1, (1,))], seconds


@pytest.mark.parametrize("text", SELECTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_the_contract_under_random_traffic(text, seed):
    controller = make_controller(text)
    for signals, budgets, proposals, selected in drive(controller, 400, seed):
        assert len(budgets) == len(signals)
        for signal, budget in zip(signals, budgets, strict=True):
            assert 0 <= budget <= signal.max_draft
        assert len(selected) == len(proposals)
        for before, after in zip(proposals, selected, strict=True):
            validate(after.tree)
            if before.kind is not ProposalKind.POINT_MASS:
                assert after is before  # deleting a drawn token changes the law
            pairs = set(zip(after.tree.tokens, after.tree.parents, strict=True))
            assert after.tree.tokens[0] == before.tree.tokens[0]
            assert len(pairs) == after.tree.num_nodes <= before.tree.num_nodes
            assert set(after.tree.tokens) <= set(before.tree.tokens)
            assert after.confidence is None or len(after.confidence) == after.tree.num_nodes
        assert controller.keep_drafting(0.3) in (True, False)
    assert controller.looks_at_tokens == ("argmax" in text)


@pytest.mark.parametrize(
    ("text", "module"), [("prefix-scheduler", prefix_scheduler), ("auto", drafter_state), ("heuristic", heuristic)]
)
def test_a_step_without_signals_is_not_judged_by_the_drafts_of_the_one_before(text, module, monkeypatch):
    """Regression: one token before its limit a request's last drafts were compared with a token of a later step."""
    judged = []

    def judge(proposal, outcome):
        judged.append(outcome.sequence_id)
        return []

    monkeypatch.setattr(module, "trials_of", judge)
    controller = make_controller(text)
    plain = [RequestOutcome(3, "a", 0, 0, 0, 1, (5,))], StepSeconds(1, 0.0, 1e-2, 1e-4)
    outcome = [RequestOutcome(3, "a", 2, 2, 2, 3, (1, 2, 3))], StepSeconds(3, 1e-6, 1e-2, 1e-4)
    for reported in (True, False, True):
        for _ in range(3):
            controller.budget([RequestSignal(3, "a", 8, 100)])
            controller.observe(*plain)
        budgets = controller.budget([RequestSignal(3, "a", 8, 100)])
        assert budgets[0] > 0
        controller.select([Proposal(chain(7, [1, 2]), confidence=(1.0, 0.9, 0.9))])
        judged.clear()
        if reported:  # steps with prompt rows are not
            controller.observe(*outcome)
            assert judged == [3]
        judged.clear()
        assert controller.budget([]) == []
        controller.observe(*plain)
        assert judged == []


def test_exp3_bears_steps_that_bring_nothing():
    controller = make_controller("bandit:policy=exp3")
    for _ in range(5):
        controller.budget([RequestSignal(0, "a", 8, 100)])
        controller.observe([RequestOutcome(0, "a", 0, 0, 0, 0)], StepSeconds(1, 0.0, 1e-2, 0.0))
    assert controller.budget([RequestSignal(0, "a", 8, 100)])[0] >= 0


def test_the_heuristics_best_threshold_may_be_nothing():
    controller = make_controller("heuristic:threshold=0.4:start=2")
    for step in range(12):
        controller.budget([RequestSignal(0, "a", 8, 100)])
        controller.select([Proposal(chain(7, [1, 2]), confidence=(1.0, 0.0, 0.0))])
        emitted = (1, 9) if step % 2 else (1, 2, 9)
        controller.observe(
            [RequestOutcome(0, "a", 2, 2, len(emitted) - 1, len(emitted), emitted)], StepSeconds(3, 0.0, 1e-2, 0.0)
        )
    assert controller.threshold == 0.0


@pytest.mark.parametrize("text", SELECTIONS)
def test_equal_traffic_gives_equal_decisions(text):
    def decisions():
        return [
            (budgets, [item.tree for item in selected])
            for _, budgets, _, selected in drive(make_controller(text), 200, 5)
        ]

    assert decisions() == decisions()


@pytest.mark.parametrize("text", SELECTIONS)
def test_unknown_requests_are_nothing_special(text):
    controller = make_controller(text)
    controller.forget(3)
    assert controller.budget([]) == []
    controller.observe([RequestOutcome(3, "a", 2, 2, 1, 2, (5, 6))], StepSeconds(3, 0.0, 0.0, 0.0))
    controller.forget(3)
    controller.forget(3)


def test_fixed_is_fixed():
    signals = [RequestSignal(0, "a", 40, 0), RequestSignal(1, "a", 2, 0)]
    assert make_controller("fixed").budget(signals) == [8, 2]
    assert make_controller("fixed:num_draft=3").budget(signals) == [3, 2]
    assert make_controller("fixed:num_draft=0").budget(signals) == [0, 0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fixed:num_draft=-1", "num_draft is -1"),
        ("fixed:num_draft=512", "allowed: 0 .* to 511"),
        ("goodput:max_draft=1000", "allowed: 1 to 511"),
        ("prefix-scheduler:max_draft=1000", "allowed: 1 to 511"),
        ("prefix-scheduler:stale=99999999999999999999", "allowed: 0 to 64"),
        ("heuristic:max_draft=1000", "max_draft <= 511"),
        ("heuristic:memory=99999999999999999999", "allowed: 6 to 100000"),
        ("bandit:arms=0+1000", "no length is above 511"),
        ("ema:tiers=1=1+1000", "no length is above 511"),
        ("ema:down=1", "down 1.0 is above up 0.0"),
        ("goodput:cheap_look=2", "cheap_look is 2.0; allowed: 0 .* to 1"),
        ("goodput:margin=inf", "'inf' is not a number"),
        ("goodput:measured=maybe", "'maybe' is neither true nor false"),
        ("goodput:max_draft=0", "max_draft is 0"),
        ("goodput:margin=-1", "margin is -1"),
        ("goodput:cheap_look=-1", "cheap_look is -1"),
        ("goodput:probe_min=0", "probe_min 0"),
        ("goodput:probe_min=9:probe_max=8", "probe_max 8"),
        ("goodput:alpha=2", "unknown option 'alpha'.*; see draftsmith options goodput$"),
        ("godput", "did you mean goodput[?]"),
    ],
)
def test_bad_options(text, complaint):
    with pytest.raises(OptionError, match=complaint):
        make_controller(text)


def test_hyphens_and_underscores_are_the_same():
    for name in ("prefix-scheduler", "prefix_scheduler"):
        assert parse_selection(f"{name}:max-draft=3", CONTROLLERS, "controller").options == {"max_draft": "3"}
    assert parse_selection("draft-model:model=x", DRAFTERS, "drafter").target == DRAFTERS["draft_model"]


def test_no_option_is_not_a_number():
    """A comparison with NaN is false whichever way it is written, so no range check sees it."""
    for name in sorted(CONTROLLERS):
        options = load_class(parse_selection(name, CONTROLLERS, "controller")).Options
        for field in dataclasses.fields(options):
            if "float" in str(field.type):
                with pytest.raises(OptionError, match="nan"):
                    read_options(options, {field.name: "nan"}, name)
