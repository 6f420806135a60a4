"""The audit under a lossy rule: its cost with an interval, never a certificate; an account that lies is found out."""

import dataclasses
import json

import pytest

from draftsmith.bench.audit import AuditPlan, Case
from draftsmith.bench.audit_report import AuditReport, Check, Status, Verdict
from draftsmith.core.asd import ApproximateVerification
from draftsmith.core.intervals import mean_interval
from draftsmith.core.lossy import Lenience
from draftsmith.errors import OptionError
from tests.bench.audit_fakes import PROMPTS, random_laws, small_audit

T1 = Case(name="T 1", settings={"temperature": 1.0})


def audited(rule, *, greedy=False, drafter="draft_model:model=near", cases=None, **more):
    cases = cases or [Case(name="greedy", settings={}) if greedy else T1]
    cases = [Case(name=case.name, settings={**case.settings, "rule": rule}) for case in cases]
    more = {"max_new_tokens": 12, "prompts": PROMPTS * 2, **more}
    audit = small_audit(drafter, "coupling" if greedy else rule, cases=cases, **more)
    audit.run()
    return audit.report()


def cost_of(report):
    return next(check for check in report.checks if check.name.startswith("cost"))


@pytest.mark.parametrize("rule", ["lenience:factor=0.4", "typical:epsilon=0.09:delta=0.3", "adasd"])
def test_a_sampled_rule_is_lossy_and_has_a_price(rule):
    report = audited(rule)
    assert report.verdict is Verdict.LOSSY
    cost = cost_of(report)
    figures = cost.figures
    assert cost.status is Status.LOSSY
    assert 0 < figures["low"] < figures["total_variation"] < figures["high"] < 1
    assert figures["seen"] <= figures["high"]
    assert f"total variation {figures['total_variation']:.3f} per token" in cost.evidence
    assert "Lossy, as was asked: total variation about" in report.statement and rule in report.statement
    assert not any(check.name.startswith(("ids", "argmax", "law")) for check in report.checks)
    assert {check.status for check in report.checks if check is not cost} <= {Status.OK, Status.NOT_TESTED}
    document = json.loads(json.dumps(report.as_json()))
    assert (document["verdict"], document["tested"]["fidelity"]) == ("lossy", "lossy")
    assert document["total_variation"] == figures["total_variation"]
    assert document["total_variation_interval"] == [figures["low"], figures["high"]]


def test_greedy_misses_are_counted_from_the_target_s_rows():
    report = audited("asd:gate=1:budget=4", greedy=True)
    figures = cost_of(report).figures
    assert report.verdict is Verdict.LOSSY
    assert figures["misses"] > 0 and figures["changed"] > 0
    assert figures["total_variation"] == pytest.approx(figures["misses"] / figures["tokens"])
    assert 0 < figures["regret"] <= 4 * figures["answers"]
    assert "answers differ from the plain ones" in cost_of(report).evidence


def test_a_cost_of_nothing_is_still_lossy():
    report = audited("asd:budget=0", greedy=True)
    figures = cost_of(report).figures
    assert report.verdict is Verdict.LOSSY and figures["total_variation"] == 0.0 and figures["changed"] == 0
    assert figures["high"] == pytest.approx(3 / figures["tokens"]), "nothing seen is not nothing there"
    report = audited("lenience:factor=1")
    assert report.verdict is Verdict.LOSSY and cost_of(report).figures["total_variation"] == pytest.approx(0, abs=1e-9)


def test_the_estimate_is_the_true_total_variation():
    """Every token is followed by one law, every draft by another: the true cost of a drafted token is known.

    q = the draft's law, p the target's, factor 0.5: kept min(q, 2 p), the rest by what is left of 2 p over q.
    """
    target, draft = random_laws(5, 3, 1.2)
    kept = [min(q, 2 * p) for p, q in zip(target, draft, strict=True)]
    left = [max(2 * p - q, 0.0) for p, q in zip(target, draft, strict=True)]
    law = [k + (1 - sum(kept)) * r / sum(left) for k, r in zip(kept, left, strict=True)]
    true = 0.5 * sum(abs(a - p) for a, p in zip(law, target, strict=True))
    report = audited("lenience:factor=0.5", drafter="draft_model:model=other", laws=(target, draft), max_new_tokens=24)
    figures = cost_of(report).figures
    # Tokens that follow a whole draft, or a prompt, cost nothing: of 24 tokens about one in five.
    assert 0.6 * true < figures["total_variation"] < true
    assert 0 < figures["seen"] < true


def test_an_account_that_tells_too_little_is_found_out(monkeypatch):
    real = Lenience.verify

    def cheap(self, *arguments):
        verdict, memory = real(self, *arguments)
        return dataclasses.replace(verdict, costs=tuple(cost / 50 for cost in verdict.costs)), memory

    monkeypatch.setattr(Lenience, "verify", cheap)
    laws = random_laws(5, 3, 1.6)
    report = audited("lenience:factor=0.05", drafter="draft_model:model=other", laws=laws, max_new_tokens=24)
    assert report.verdict is Verdict.DRIFTING
    assert "its own account says" in cost_of(report).evidence and "Not what the rule says of itself" in report.statement


@pytest.mark.parametrize("told", [0.0, 1.0])
def test_a_greedy_account_must_agree_token_by_token(monkeypatch, told):
    real = ApproximateVerification.verify

    def wrong(self, *arguments):
        verdict, memory = real(self, *arguments)
        return dataclasses.replace(verdict, costs=(told,) * len(verdict.costs)), memory

    monkeypatch.setattr(ApproximateVerification, "verify", wrong)
    report = audited("asd:gate=1:budget=4", greedy=True)
    assert report.verdict is Verdict.DRIFTING and "tokens are not the greedy ones" in cost_of(report).evidence


def test_without_accepted_drafts_nothing_was_measured():
    report = audited("lenience:factor=0.5", controller="fixed:num_draft=0")
    assert report.verdict is Verdict.NOT_TESTED
    assert cost_of(report).evidence == "no draft was accepted"


def test_the_cost_is_measured_before_the_budget_is_spent():
    report = audited("lenience:factor=0.5", budget=1)
    assert report.verdict is Verdict.LOSSY and cost_of(report).status is Status.LOSSY
    assert {check.evidence for check in report.checks if check is not cost_of(report)} == {
        "not reached: the budget of 1 tokens is spent, raise --budget"
    }


def test_a_lossy_report_cannot_say_exact():
    ok = Check(name="stop rules", status=Status.OK, evidence="")
    told = {"tested": {"subject": ""}, "alpha": 0.001, "drafted": 9, "accepted": 5, "tokens": 10, "seconds": 1.0}
    assert AuditReport(checks=(ok,), **told).verdict is Verdict.EXACT
    assert AuditReport(checks=(ok,), is_lossy=True, **told).verdict is Verdict.NOT_TESTED


def test_plans_that_make_no_sense_are_refused():
    lossy = Case(name="a", settings={"temperature": 1.0, "rule": "lenience:factor=0.5"})
    with pytest.raises(OptionError, match="its cases mix them"):
        AuditPlan(subject="x", cases=[T1, lossy])
    with pytest.raises(OptionError, match="nothing to audit"):
        AuditPlan(subject="x", cases=[Case(name="a", settings={"rule": "synthetic:length=2"})])
    assert AuditPlan(subject="x", cases=[lossy]).is_lossy and not AuditPlan(subject="x").is_lossy


def test_intervals_by_hand():
    """Rates 1, 2, 3 of equal items: mean 2, standard error 1 / sqrt(3), t of two degrees of freedom 4.303."""
    found = mean_interval([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)])
    assert found.mean == 2.0 and found.high - found.mean == pytest.approx(4.3027 / 3**0.5, rel=1e-3)
    assert mean_interval([(1.0, 2.0), (3.0, 6.0)]).low == pytest.approx(0.5)
    assert mean_interval([(1.0, 2.0)]).low == -float("inf")
    with pytest.raises(ValueError, match="no size"):
        mean_interval([(0.0, 0.0)])
