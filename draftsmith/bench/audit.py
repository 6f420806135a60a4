"""The audit: does an engine with speculation write what it would write without?

Called by the command line and the tests. First the checks that compare ids, ends, lengths and counts
(`audit_checks`), then the statistical ones (`audit_law`), one round of each in turn, until the evidence is decisive
either way or the budget is spent. Invariants: all statistical checks together raise a false alarm with at most the
stated probability; what was not reached is reported as not tested; a report can be had at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeAlias, final

from draftsmith.bench.audit_checks import (
    Bench,
    BrokeDown,
    check_argmax,
    check_counts,
    check_ids,
    check_lengths,
    check_logprobs,
    check_stops,
    guarded,
)
from draftsmith.bench.audit_cost import CostTest
from draftsmith.bench.audit_law import LawTest, PairTest, SampledTest
from draftsmith.bench.audit_report import NOT_REACHED, AuditReport, Check, Status
from draftsmith.bench.audit_subject import Audited, Target
from draftsmith.bench.differences import NEAR_TIE
from draftsmith.core.fidelity import Fidelity
from draftsmith.core.inexact import fidelity_of
from draftsmith.core.types import Rule
from draftsmith.engine.params import parse_rule
from draftsmith.errors import OptionError

SAME_IDS = (Rule.COUPLING.value, Rule.MATCH.value)
"""Rules that promise the plain run's ids for each seed; the others promise its law."""

PENALTIES = {"repetition_penalty": 1.15, "presence_penalty": 0.4, "frequency_penalty": 0.3}
Tell: TypeAlias = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting of an audit. `settings`: sampling options of `Engine.generate`."""

    name: str
    settings: Mapping[str, Any]

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.settings.get("temperature", 0.0) == 0

    @property
    def fidelity(self) -> Fidelity:
        """What its rule promises."""
        rule = self.settings.get("rule", Rule.COUPLING)
        return fidelity_of(parse_rule(rule) if isinstance(rule, str) else rule)


DEFAULT_CASES = (
    Case(name="greedy", settings={}),
    Case(name="greedy, penalties", settings=PENALTIES),
    Case(name="T 0.8", settings={"temperature": 0.8}),
    Case(name="T 0.8, top-k 50", settings={"temperature": 0.8, "top_k": 50}),
    Case(name="T 1, top-p 0.9, penalties", settings={"temperature": 1.0, "top_p": 0.9, "min_tokens": 8, **PENALTIES}),
)


ENDPOINT_CASES = (
    Case(name="greedy", settings={}),
    Case(name="T 0.8", settings={"temperature": 0.8}),
    Case(
        name="T 1, top-p 0.9, penalties",
        settings={"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ),
)
"""What every completion endpoint understands."""


@dataclass(frozen=True, kw_only=True)
class AuditPlan:
    """What is asked for.

    `subject`: what is audited, in words. `same_ids`: whether sampled answers must be the plain run's with that seed.
    `alpha`: probability of a false alarm in the whole audit. `drift`: the total variation per token that each sampled
    setting should show 9 times in 10 before it is called tested. `budget`: most tokens the audited engine writes.
    Cases with a lossy rule make it an audit of what that costs; then all of them have one.
    """

    subject: str
    cases: Sequence[Case] = DEFAULT_CASES
    same_ids: bool = True
    max_new_tokens: int = 48
    alpha: float = 0.001
    drift: float = 0.1
    pairs: int = 120
    budget: int = 30_000
    max_seconds: float | None = None
    near_tie: float = NEAR_TIE
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise OptionError(f"alpha is {self.alpha!r}; allowed: a probability between 0 and 1, such as 0.001")
        if not 0.01 <= self.drift <= 0.5:
            raise OptionError(f"drift is {self.drift!r}; allowed: a total variation from 0.01 to 0.5")
        for name, least in (("budget", 1), ("max_new_tokens", 8), ("pairs", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} is {getattr(self, name)!r}; it must be at least {least}")
        fidelities = {case.fidelity for case in self.cases}
        if Fidelity.SYNTHETIC in fidelities:
            raise OptionError("synthetic acceptance writes nothing of the target's; there is nothing to audit")
        if len(fidelities) > 1:
            raise OptionError("an audit certifies an exact rule or measures a lossy one; its cases mix them")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise OptionError(f"max_seconds is {self.max_seconds!r}; it must be above 0")

    @property
    def is_lossy(self) -> bool:
        """Whether a lossy rule is measured, and nothing certified."""
        return any(case.fidelity is Fidelity.LOSSY for case in self.cases)


@final
class Audit:
    """One audit on its way. `run` carries it out; `report` tells what was found so far."""

    def __init__(
        self, plan: AuditPlan, audited: Audited, plain: Audited, target: Target | None, prompts: Sequence[Any]
    ) -> None:
        self._plan = plan
        if plan.is_lossy and target is None:
            raise OptionError("what a lossy rule costs is measured with the target's logits, which an endpoint hides")
        self._sampled = [case for case in plan.cases if plan.is_lossy or not case.is_greedy]
        # One part for each statistical check, one for exact ties.
        part = plan.alpha / (len(self._sampled) + 1)
        self._bench = Bench(
            audited=audited,
            plain=plain,
            target=target,
            prompts=prompts,
            max_new_tokens=plan.max_new_tokens,
            near_tie=plan.near_tie,
            alpha=part,
        )
        self._found: dict[str, Check] = {}
        self._waiting = self._quick_checks()
        self._tests = [self._sampled_test(index, case, part) for index, case in enumerate(self._sampled)]
        self._began = monotonic()
        self._seconds = 0.0

    def run(self, tell: Tell = lambda doing, share: None) -> None:
        """Carry it out. `tell` hears what is done next, and which share of the work is behind. Raises `UserError`s."""
        self._began = monotonic()
        try:
            if self._plan.is_lossy:  # the cost is what was asked for, so it comes before the time is spent
                self._run_tests(tell)
            self._run_checks(tell)
            if not self._plan.is_lossy and not any(check.status is Status.DIFFERS for check in self._found.values()):
                self._run_tests(tell)
        finally:
            self._seconds = monotonic() - self._began

    def report(self, *, interrupted: bool = False) -> AuditReport:
        """What was found so far."""
        differs = any(check.status is Status.DIFFERS for check in self._found.values())
        limit = self._limit()
        if differs:
            why = "a difference was found before"
        else:
            why = f"{NOT_REACHED}: {limit}" if limit else NOT_REACHED
        checks = [
            self._found.get(name) or Check(name=name, status=Status.NOT_TESTED, evidence=why) for name in self._waiting
        ]
        for test in self._tests:
            check = test.check()
            unreached = check.status is Status.NOT_TESTED and (differs or check.evidence == NOT_REACHED)
            checks.append(Check(name=check.name, status=check.status, evidence=why) if unreached else check)
        return AuditReport(
            checks=tuple(checks),
            tested=self._tested(),
            alpha=self._plan.alpha,
            drafted=self._bench.drafted if self._bench.audited.tells_drafts else None,
            accepted=self._bench.accepted if self._bench.audited.tells_drafts else None,
            tokens=self._bench.tokens,
            seconds=self._seconds,
            interrupted=interrupted,
            is_lossy=self._plan.is_lossy,
            limit=limit,
        )

    # -- inside -----------------------------------------------------------------------------------

    def _run_checks(self, tell: Tell) -> None:
        for index, (name, check) in enumerate(self._waiting.items()):
            if self._spent():
                return
            tell(name, 0.5 * index / len(self._waiting))
            self._found[name] = check(name)
            if self._found[name].status is Status.DIFFERS:
                return  # decisive: nothing later could make it exact

    def _run_tests(self, tell: Tell) -> None:
        while not self._spent() and not all(test.decided for test in self._tests):
            for test in self._tests:
                if self._spent() or test.decided:
                    continue
                tell(test.name, 0.5 + 0.5 * sum(other.progress for other in self._tests) / len(self._tests))
                try:
                    test.step()
                except BrokeDown as error:
                    test.broken = str(error)
                if test.alarmed:
                    return

    def _spent(self) -> bool:
        plan = self._plan
        late = plan.max_seconds is not None and monotonic() - self._began >= plan.max_seconds
        return late or self._bench.tokens >= plan.budget

    def _limit(self) -> str:
        """Which limit was reached, and what to raise; empty for none."""
        plan = self._plan
        if self._bench.tokens >= plan.budget:
            return f"the budget of {plan.budget} tokens is spent, raise --budget"
        if plan.max_seconds is not None and self._seconds >= plan.max_seconds:
            return f"{plan.max_seconds:g} s are over, raise --max-seconds"
        return ""

    def _settings(self, case: Case, **more: Any) -> dict[str, Any]:
        return {"max_new_tokens": self._plan.max_new_tokens, **case.settings, **more}

    def _quick_checks(self) -> dict[str, Callable[[str], Check]]:
        is_lossy = self._plan.is_lossy
        greedy = [case for case in self._plan.cases if case.is_greedy and not is_lossy]
        found: dict[str, Callable[[str], Check]] = {}

        def add(name: str, check: Any, settings: Mapping[str, Any]) -> None:
            found[name] = partial(_carry_out, check, self._bench, settings)

        for case in greedy:
            add(f"ids, {case.name}", check_ids, self._settings(case))
        if self._bench.target is not None:
            for case in greedy:
                add(f"argmax, {case.name}", check_argmax, self._settings(case))
        if self._plan.same_ids and not is_lossy:
            for case in self._sampled:
                add(f"ids by seed, {case.name}", check_ids, self._settings(case, seed=self._plan.seed))
        first = self._settings(self._plan.cases[0], seed=self._plan.seed)
        plainly = first if is_lossy else {"max_new_tokens": self._plan.max_new_tokens}
        add("stop rules", check_stops, plainly)
        add("max_new_tokens", check_lengths, plainly)
        add("log-probabilities", check_logprobs, first)
        if self._bench.audited.tells_drafts:
            add("counts", check_counts, self._settings((self._sampled or list(self._plan.cases))[0]))
        return found

    def _sampled_test(self, index: int, case: Case, alpha: float) -> SampledTest:
        name, settings = f"law, {case.name}", self._settings(case)
        seed = self._plan.seed + ((index + 1) << 24)
        if self._plan.is_lossy:
            return CostTest(f"cost, {case.name}", self._bench, settings, alpha, seed)
        if self._bench.target is not None:
            return LawTest(name, self._bench, settings, alpha, seed, drift=self._plan.drift)
        return PairTest(name, self._bench, settings, alpha, seed, pairs=self._plan.pairs)

    def _tested(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "subject": plan.subject,
            "settings": {case.name: dict(case.settings) for case in plan.cases},
            "prompts": len(self._bench.prompts),
            "max_new_tokens": plan.max_new_tokens,
            "same_ids": plan.same_ids,
            "fidelity": plan.cases[0].fidelity.value,
            "drift": plan.drift,
            "budget": plan.budget,
            "near_tie": plan.near_tie,
            "seed": plan.seed,
        }


def _carry_out(check: Any, bench: Bench, settings: Mapping[str, Any], name: str) -> Check:
    return guarded(name, check, bench, settings)
