"""The audit of a true engine: exact, whatever drafts; what was not tested is said; budgets and interrupts hold."""

import json

import pytest

from draftsmith.bench.audit import AuditPlan
from draftsmith.bench.audit_checks import Bench, BrokeDown, check_counts, check_ids, check_stops
from draftsmith.bench.audit_report import AuditReport, Check, Status, Verdict
from draftsmith.bench.audit_subject import Answer, Asked, Audited, Target
from draftsmith.core.stats import EventLog, RequestStepRecord
from draftsmith.errors import DraftsmithError, OptionError, PromptError
from tests.bench.audit_fakes import PROMPTS, SMALL_CASES, random_laws, small_audit, small_model


def audited(*arguments, **more):
    audit = small_audit(*arguments, **more)
    audit.run()
    return audit.report()


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("draft_model:model=near", "coupling"),
        ("draft_model:model=near", "block"),
        ("draft_model:model=near:tree=2x2", "traversal"),
        ("suffix:tree=true", "match"),
        ("ngram:min_ngram=1", "chain"),
    ],
)
def test_a_true_engine_is_exact(drafter, rule):
    report = audited(drafter, rule, drift=0.2)
    assert report.verdict is Verdict.EXACT
    assert {check.status for check in report.checks} == {Status.OK}
    assert 0 < report.accepted < report.drafted
    assert any(check.name.startswith("ids by seed") for check in report.checks) == (rule in ("coupling", "match"))
    json.dumps(report.as_json())
    for part in (drafter, rule, "total variation per token", "at most 0.001 per audit"):
        assert part in report.statement


@pytest.mark.slow
def test_a_true_engine_passes_200_seeded_audits():
    """At alpha 0.05 each: more than 24 alarms have probability below 1e-4. (Measured: see docs/log.md.)"""
    alarms = 0
    for seed in range(200):
        laws = random_laws(5, seed, 1.2)
        more = {"laws": laws, "cases": SMALL_CASES[2:3], "max_new_tokens": 12, "drift": 0.15, "alpha": 0.05}
        report = audited("draft_model:model=other", ("chain", "block", "coupling")[seed % 3], seed=seed << 26, **more)
        alarms += report.verdict is Verdict.DRIFTING
    assert alarms <= 24


def test_a_true_engine_passes_seeded_audits():
    """6 audits with a false-alarm probability of 0.001 each."""
    for seed in range(6):
        more = {"laws": random_laws(5, seed, 1.2), "cases": SMALL_CASES[2:3], "max_new_tokens": 12, "drift": 0.25}
        report = audited("draft_model:model=other", ("chain", "block")[seed % 2], seed=seed << 26, **more)
        assert report.verdict is Verdict.EXACT


def test_without_accepted_drafts_nothing_was_tested():
    report = audited("draft_model:model=near", controller="fixed:num_draft=0", drift=0.3)
    assert report.verdict is Verdict.NOT_TESTED
    assert report.accepted == 0
    assert "no draft was accepted" in report.statement
    laws = [check for check in report.checks if check.name.startswith(("ids", "law"))]
    assert {check.status for check in laws} == {Status.NOT_TESTED}


def test_a_budget_is_kept_and_what_was_not_reached_is_said():
    report = audited(budget=700)
    assert report.tokens < 1000
    unreached = [check for check in report.checks if check.status is Status.NOT_TESTED]
    assert unreached and {check.evidence for check in unreached} == {
        "not reached: the budget of 700 tokens is spent, raise --budget"
    }
    assert "not tested: the budget of 700 tokens is spent, raise --budget." in report.statement
    late = audited(max_seconds=1e-9)
    assert late.verdict is Verdict.NOT_TESTED
    assert "no check was carried out: 1e-09 s are over, raise --max-seconds." in late.statement


def test_an_interrupted_audit_tells_what_it_found():
    audit = small_audit()

    def interrupt(doing, share):
        if doing.startswith("stop rules"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit.run(interrupt)
    report = audit.report(interrupted=True)
    assert report.interrupted and report.as_json()["interrupted"]
    assert report.checks[0].status is Status.OK
    assert report.checks[-1].status is Status.NOT_TESTED
    assert report.seconds > 0


def test_progress_goes_from_0_to_1():
    shares = []
    small_audit(drift=0.3).run(lambda doing, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[0] == 0 and 0.5 < shares[-1] <= 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("alpha", 0), ("alpha", 1.5), ("drift", 0.001), ("budget", 0), ("max_new_tokens", 2), ("max_seconds", 0.0)],
)
def test_plans_that_make_no_sense(field, value):
    with pytest.raises(OptionError, match=field):
        AuditPlan(subject="x", **{field: value})


# -- what a check does with an engine that is not ours ------------------------------------------------


class Told(Audited):
    """Answers what it is told, the same to every request; counts in `log`."""

    def __init__(self, answer, log=None):
        self._answer = answer
        self._log = log
        self.tells_drafts = log is not None

    def answer(self, asked):
        if isinstance(self._answer, Exception):
            raise self._answer
        return [[self._answer] for _ in asked]

    def take_events(self):
        return self._log


def bench_of(audited_, plain, target=None):
    return Bench(
        audited=audited_,
        plain=plain,
        target=target,
        prompts=[PROMPTS[0]],
        max_new_tokens=8,
        near_tie=1e-4,
        alpha=0.001,
    )


def test_the_gap_at_a_difference_decides_between_drift_and_rounding():
    target = Target(small_model())
    asked = Asked(prompt=PROMPTS[0], settings={})
    judged = next(target.judge(asked, [1]))
    best, second = (-judged.scores_V).argsort()[:2].tolist()
    plain, other = (Answer(tokens=(token, 0), text="", finish_reason="length") for token in (best, second))
    bench = bench_of(Told(other), Told(plain), target)
    check = check_ids("ids", bench, {})
    assert check.status is Status.DIFFERS and check.figures["position"] == 0
    assert check.figures["gap"] == pytest.approx(float(judged.scores_V[best] - judged.scores_V[second]))
    bench.near_tie = check.figures["gap"] + 1e-9
    near = check_ids("ids", bench, {})
    assert near.status is Status.NUMERICS
    assert near.figures["largest_gap"] == check.figures["gap"]
    report = AuditReport(checks=(near,), tested={"subject": "x"}, alpha=0.1, drafted=2, accepted=1, tokens=2, seconds=1)
    assert report.verdict is Verdict.NUMERICS
    assert report.margin == check.figures["gap"] and f"{report.margin:.1e}" in report.statement


def test_an_engine_that_breaks_is_a_finding_and_a_refusal_is_not():
    plain = Told(Answer(tokens=(1,), text="b", finish_reason="length"))
    with pytest.raises(BrokeDown, match="IndexError: gone"):
        bench_of(Told(IndexError("gone")), plain).ask([Asked(prompt="x", settings={})])
    for refusal in (PromptError("too long"), DraftsmithError("no")):
        with pytest.raises(DraftsmithError):
            check_ids("ids", bench_of(Told(refusal), plain), {})


def _record(**changed):
    values = {"step": 1, "request": 0, "position": 0, "drafter": "x", "drafted": 3, "depth": 3, "accepted": 1}
    return RequestStepRecord(**{**values, "emitted": 2, "stop_reason": None, "prompt": False, **changed})


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (_record(), None),
        (_record(accepted=2, stop_reason="stop"), None),
        (_record(accepted=2), "nothing cut it"),
        (_record(accepted=4, emitted=2), "4 accepted of 3"),
        (_record(accepted=0), "nothing cut it"),
        (_record(emitted=3, accepted=2), "the answer 2"),
        (_record(depth=5), "depth 5"),
    ],
)
def test_counts_that_contradict_each_other(record, told):
    answer = Answer(tokens=(1, 2), text="bc", finish_reason="length")
    check = check_counts("counts", bench_of(Told(answer, EventLog([], [record])), Told(answer)), {})
    assert check.status is (Status.OK if told is None else Status.DIFFERS)
    assert told is None or told in check.evidence


def test_an_exact_report_needs_something_tested():
    def report(*statuses, accepted=5):
        checks = tuple(Check(name=str(index), status=status, evidence="") for index, status in enumerate(statuses))
        shown = {"tested": {"subject": "x"}, "alpha": 0.1, "drafted": 9, "tokens": 2, "seconds": 1}
        return AuditReport(checks=checks, accepted=accepted, **shown).verdict

    assert report(Status.OK, Status.NOT_TESTED) is Verdict.EXACT
    assert report(Status.NOT_TESTED) is Verdict.NOT_TESTED
    assert report(Status.OK, accepted=0) is Verdict.NOT_TESTED
    assert report(Status.OK, Status.DIFFERS, accepted=0) is Verdict.DRIFTING
    assert report(Status.OK, accepted=None) is Verdict.EXACT


def test_stops_are_judged_by_the_ids_that_came():
    """A stop planned from the plain answer, and an answer that parted from it before: no drift, and not tested."""
    target = Target(small_model())
    plain = Answer(tokens=(0, 1, 2, 3, 4, 5, 6, 7), text="abcdefgh", finish_reason="length")
    elsewhere = Answer(tokens=(9, 9, 9, 9, 9, 9, 9, 9), text="j" * 8, finish_reason="length")
    assert check_stops("stops", bench_of(Told(elsewhere), Told(plain), target), {}).status is Status.NOT_TESTED
    passed = check_stops("stops", bench_of(Told(plain), Told(plain), target), {})
    assert passed.status is Status.DIFFERS and passed.evidence == "goes on after the stop"
