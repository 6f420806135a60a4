"""Every planted fault that changes an engine's output is caught by the audit, by what the engine emits alone.

False alarm of each audit: 0.001. Where a law drifts, the fault's own size decides how many tokens it takes; the
budgets below leave a factor of two or more. The targets of the ratio rules are small laws, found by search, for which
a fault moves a lot of probability.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from draftsmith.bench.audit_report import Status, Verdict
from draftsmith.drafters import growth
from draftsmith.errors import UnsoundError
from tests.bench.audit_fakes import SMALL_CASES, random_laws, small_audit
from tests.engine import faults as _registered
from tests.faults import FAULTS, planted

SAME = "draft_model:model=same"
CHAIN = "draft_model:model=other"
TREE = "draft_model:model=other:tree=2x2"
WIDE = "draft_model:model=other:tree=3x2"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a fault shows, and the line of the report that shows it."""

    by: str
    drafter: str = CHAIN
    rule: str = "coupling"
    more: dict[str, Any] = field(default_factory=dict)


def _law(rule, laws, drafter=CHAIN, **more):
    """Ratio rules over small laws, one sampled setting, looked at closely."""
    more = {"laws": laws, "max_new_tokens": 12, "cases": SMALL_CASES[2:3], "drift": 0.03, **more}
    return Setting(by="law", drafter=drafter, rule=rule, more={"controller": "fixed:num_draft=6", **more})


_GREEDY = {"cases": SMALL_CASES[:1]}
_TWO_TOKENS = [[1 / 3, 2 / 3], [2 / 3, 1 / 3]]

CAUGHT = {
    # the walk
    "accept greedy drafts unread": Setting(by="ids"),
    "greedy walk reads the row before": Setting(by="ids"),
    "ties go to the highest id": Setting(by="argmax", more={"ties": True}),
    "penalties of the greedy walk are one token behind": Setting(by="ids"),
    "match noise keyed by step": Setting(by="ids by seed"),
    "one noise for all output positions": Setting(by="law", more={"cases": SMALL_CASES[2:3]}),
    # the ratio rules
    "penalties see the committed text only": Setting(by="law", rule="chain", more={"cases": SMALL_CASES[4:5]}),
    "accept sampled drafts unread": Setting(by="law", rule="chain", more={"cases": SMALL_CASES[2:3]}),
    "skip the residual": _law("chain", random_laws(5, 40, 1.5)),
    "softmax of the residual": _law("chain", random_laws(5, 40, 1.5)),
    "residual not renormalised between siblings": _law("recursive", random_laws(5, 59, 1.5), WIDE),
    "rejected siblings stay in the draft law": _law("recursive", random_laws(5, 55, 1.5), WIDE),
    "draft law tempered after the draw": _law("chain", random_laws(5, 58, 1.0)),
    "bonus from the row before the last": Setting(by="law", rule="chain", more={"cases": SMALL_CASES[2:4]}),
    "block scan stops at the first failure": _law("block", random_laws(4, 48, 1.0)),
    "traversal forgets the weight of the path": _law("block", random_laws(4, 30, 1.5)),
    # draws and noise
    "redraft reuses noise already looked at": _law(
        "block", _TWO_TOKENS, max_new_tokens=8, prompts=[[0]] * 4, controller="fixed:num_draft=2", drift=0.025
    ),
    "one coin for all siblings": _law("chain", random_laws(4, 5, 1.2)),
    "residual drawn with the draft's noise": _law("chain", random_laws(4, 1, 1.2)),
    "samples of one request share noise": Setting(by="law", more={"cases": SMALL_CASES[2:3]}),
    "siblings sorted by probability": _law("recursive", random_laws(4, 3, 1.2), WIDE),
    "purpose left out of the key": _law("chain", random_laws(4, 1, 1.2)),
    # cache, step, stop rules, reuse
    "keep moves nothing": Setting(by="ids", drafter=TREE, more={"controller": "fixed:num_draft=6"}),
    "keep is off by one": Setting(by="ids"),
    "rejected rows are kept": Setting(by="ids"),
    "positions count slots, not depth": Setting(by="ids", drafter=TREE, more={"controller": "fixed:num_draft=6"}),
    "siblings see each other": Setting(by="ids", drafter=TREE, more={"controller": "fixed:num_draft=6"}),
    "only the last token of a block is checked for its end": Setting(
        by="stop rules", drafter=SAME, more={"cases": SMALL_CASES[:1]}
    ),
    "the bonus token passes the limit": Setting(by="max_new_tokens"),
    "text goes on to the end of the block": Setting(by="stop rules", drafter=SAME, more=_GREEDY),
    "logprobs come from the root's row": Setting(by="log-probabilities"),
    "penalties forget emitted tokens": Setting(by="ids"),
    "batch rows in another order than batch logits": Setting(by="ids"),
    "a reused prefix is one token too long": Setting(by="ids"),
}

SAME_OUTPUT = {
    "divide, and accept a probability of 0": "coins are never exactly 0, so no outcome changes",
    "unlikely drawn tokens are cut": "the engine's controllers cut by themselves and refuse sampled proposals",
    "the draft cache is not cut after a rejection": "lossless: it costs acceptance alone",
}
REFUSED = {"nothing once the draft mass is used up": "the verifier notices by itself and refuses the request"}


def test_every_fault_is_accounted_for():
    assert _registered.__doc__
    assert set(CAUGHT) | set(SAME_OUTPUT) | set(REFUSED) == set(FAULTS)
    assert len(CAUGHT) == 34


@pytest.fixture(autouse=True)
def _sorted_draws_reach_the_drafter(monkeypatch):
    """The drafter has its own name for the function that a fault of `core.draw` replaces."""
    from draftsmith.core import draw

    def drawn(*arguments):
        return draw.draw_without_replacement(*arguments)

    monkeypatch.setattr(growth, "draw_without_replacement", drawn)


def audited(setting, **more):
    audit = small_audit(setting.drafter, setting.rule, **{**setting.more, **more})
    audit.run()
    return audit.report()


@pytest.mark.parametrize("name", CAUGHT)
def test_a_planted_fault_is_caught(name):
    setting = CAUGHT[name]
    with planted(name):
        report = audited(setting)
    differing = [check for check in report.checks if check.status is Status.DIFFERS]
    assert report.verdict is Verdict.DRIFTING
    assert len(differing) == 1 and differing[0].name.startswith(setting.by), differing
    if "broke down" not in differing[0].evidence:
        assert differing[0].reproduce


@pytest.mark.parametrize("name", SAME_OUTPUT)
def test_a_fault_that_changes_no_output_is_no_drift(name):
    with planted(name):
        report = audited(Setting(by="law", rule="chain", more={"cases": [SMALL_CASES[0], SMALL_CASES[2]]}))
    assert report.verdict is Verdict.EXACT


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_that_the_engine_notices_is_told(name):
    with planted(name), pytest.raises(UnsoundError):
        audited(_law("recursive", random_laws(5, 59, 1.5), WIDE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["skip the residual", "one coin for all siblings", "draft law tempered after the draw"]
)
def test_faults_of_a_law_are_caught_with_other_seeds(name):
    """Power: ten audits with seeds of their own, each of which must see it."""
    for seed in range(10):
        with planted(name):
            assert audited(CAUGHT[name], seed=1000 * (seed + 1)).verdict is Verdict.DRIFTING


def test_the_settings_are_exact_without_a_fault():
    """What the law's faults are planted in, one of each rule: no fault, no alarm, and something was tested."""
    kept = {setting.rule: setting for setting in CAUGHT.values() if "laws" in setting.more}
    assert set(kept) == {"chain", "recursive", "block"}
    for setting in kept.values():
        report = audited(dataclasses.replace(setting, more={**setting.more, "drift": 0.08}))
        assert report.verdict is Verdict.EXACT
        assert report.accepted > 100
