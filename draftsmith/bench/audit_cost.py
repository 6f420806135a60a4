"""What a lossy rule costs: total variation from the target's law, with an interval, from answers of a real engine.

Called by `bench.audit` in place of the checks that a lossy rule cannot pass. Greedy answers tell it all by themselves:
a token that is not the target's greedy one has total variation 1. Of sampled answers the rule's own account is taken,
which it keeps from the laws it saw, and held against what the plain target says of the tokens: a drift that is seen in
them and is larger than the account is a difference. Invariant: items of every interval are prompts, so answers to one
prompt count once.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from draftsmith.bench.audit_checks import Bench
from draftsmith.bench.audit_law import SampledTest
from draftsmith.bench.audit_report import NOT_REACHED, Check, Status
from draftsmith.bench.audit_subject import Answer, Asked, Judged
from draftsmith.core.intervals import MeanInterval, mean_interval

LEVEL = 0.95
_ROUNDS = 3
_VIEWS = 3
"""Functions of a token into [0, 1] whose means are compared with what the target's law gives them."""


@dataclass
class _Tally:
    """One prompt's answers. `cost`: by the rule's account. `misses`, `near`: tokens that are not the greedy one, far
    from it and within a near tie. `regret`: of the misses, in logits. `drifts`: sums of each view less its mean.
    """

    tokens: int = 0
    cost: float = 0.0
    misses: int = 0
    near: int = 0
    regret: float = 0.0
    surprise: float = 0.0
    drifts: list[float] = field(default_factory=lambda: [0.0] * _VIEWS)


@final
class CostTest(SampledTest):
    """The cost of one setting."""

    def __init__(self, name: str, bench: Bench, settings: Mapping[str, Any], alpha: float, seed: int) -> None:
        super().__init__(name, bench, settings, alpha, seed)
        self._is_greedy = settings.get("temperature", 0.0) == 0
        self._rounds = 1 if self._is_greedy else _ROUNDS
        self._tallies = [_Tally() for _ in bench.prompts]
        self._changed = 0
        self._last: Asked | None = None

    @property
    def alarmed(self) -> bool:
        return self.broken is not None or self._fault() is not None

    @property
    def decided(self) -> bool:
        return self._round >= self._rounds or self.alarmed

    @property
    def progress(self) -> float:
        return 1.0 if self.decided else self._round / self._rounds

    def _round_of(self, asked: list[Asked]) -> None:
        answers = self._bench.ask(asked)
        for tally, item, samples in zip(self._tallies, asked, answers, strict=True):
            self._read(tally, item, samples[0])
        self._last = asked[0]
        if self._is_greedy:
            plain = self._bench.ask_plain([item.but(rule="coupling") for item in asked])
            changed = (samples[0].tokens != own.tokens for samples, own in zip(answers, plain, strict=True))
            self._changed = sum(changed)

    def _read(self, tally: _Tally, item: Asked, answer: Answer) -> None:
        assert self._bench.target is not None
        tally.tokens += len(answer.tokens)
        tally.cost += answer.cost or 0.0
        for judged in self._bench.target.judge(item, answer.tokens):
            if self._is_greedy:
                self._read_greedy(tally, judged)
            else:
                surprise, drifts = _seen(judged)
                tally.surprise += surprise
                tally.drifts = [before + drift for before, drift in zip(tally.drifts, drifts, strict=True)]

    def _read_greedy(self, tally: _Tally, judged: Judged) -> None:
        if judged.greedy_gap > self._bench.near_tie:
            tally.misses += 1
            tally.regret += judged.greedy_gap
        elif judged.token != int(judged.scores_V.argmax()):
            tally.near += 1

    def _fault(self) -> str | None:
        """Where the rule's account cannot be right."""
        if not self._num_tokens:
            return None
        if self._is_greedy:
            misses, near = (sum(getattr(tally, name) for tally in self._tallies) for name in ("misses", "near"))
            told = sum(tally.cost for tally in self._tallies)
            if misses - 0.5 <= told <= misses + near + 0.5:
                return None
            return f"{misses} tokens are not the greedy ones, its own account says {told:g}"
        # Each view in both directions, after each round.
        level = 1 - 2 * self._alpha / (2 * _VIEWS * _ROUNDS)
        for view in range(_VIEWS):
            for sign in (1, -1):
                beyond = [(sign * tally.drifts[view] - tally.cost, tally.tokens) for tally in self._tallies]
                if mean_interval(beyond, level=level).low > 0:
                    seen = abs(sum(tally.drifts[view] for tally in self._tallies)) / self._num_tokens
                    account = sum(tally.cost for tally in self._tallies) / self._num_tokens
                    return f"its tokens show a total variation of {seen:.3f}, its own account says {account:.3f}"
        return None

    @property
    def _num_tokens(self) -> int:
        return sum(tally.tokens for tally in self._tallies)

    def check(self) -> Check:
        figures: dict[str, Any] = {"tokens": self._num_tokens, "accepted": self.accepted, "level": LEVEL}
        fault = self.broken or self._fault()
        if fault is not None:
            shown = [] if self._last is None else [self._last.shown()]
            return Check(name=self.name, status=Status.DIFFERS, evidence=fault, figures=figures, reproduce=shown)
        if not self._num_tokens or self.accepted == 0:
            why = "no draft was accepted" if self._num_tokens else NOT_REACHED
            return Check(name=self.name, status=Status.NOT_TESTED, evidence=why, figures=figures)
        told = self._greedy_figures(figures) if self._is_greedy else self._sampled_figures(figures)
        return Check(name=self.name, status=Status.LOSSY, evidence=told, figures=figures)

    def _greedy_figures(self, figures: dict[str, Any]) -> str:
        misses = sum(tally.misses for tally in self._tallies)
        regret = sum(tally.regret for tally in self._tallies)
        self._put_cost(figures, [float(tally.misses) for tally in self._tallies])
        figures |= {"misses": misses, "regret": regret, "answers": len(self._tallies), "changed": self._changed}
        each = f", {regret / misses:.2f} logits below them on average" if misses else ""
        return (
            f"{_told(figures)}: {misses} of {self._num_tokens} tokens are not the greedy ones{each}; "
            f"{self._changed} of {len(self._tallies)} answers differ from the plain ones"
        )

    def _sampled_figures(self, figures: dict[str, Any]) -> str:
        self._put_cost(figures, [tally.cost for tally in self._tallies])
        level, seen = 1 - (1 - LEVEL) / _VIEWS, 0.0
        for view in range(_VIEWS):
            found = mean_interval([(tally.drifts[view], tally.tokens) for tally in self._tallies], level=level)
            seen = max(seen, found.low, -found.high)
        surprise = sum(tally.surprise for tally in self._tallies) / self._num_tokens
        figures |= {"seen": seen, "surprise": surprise}
        return (
            f"{_told(figures)} by the rule's account over {self._num_tokens} tokens, at least {seen:.3f} by the tokens "
            f"alone; surprise {surprise:+.3f} nats against the target's entropy"
        )

    def _put_cost(self, figures: dict[str, Any], costs: Sequence[float]) -> None:
        sizes = [tally.tokens for tally in self._tallies]
        found = mean_interval(list(zip(costs, sizes, strict=True)), level=LEVEL)
        figures |= {"total_variation": found.mean, "low": max(0.0, found.low), "high": self._upper(found)}

    def _upper(self, found: MeanInterval) -> float:
        # Where nothing was seen its mean may still be up to 3 in so many tokens (the rule of three).
        return min(1.0, max(found.high, 3 / self._num_tokens) if found.mean == 0 else found.high)


def _told(figures: Mapping[str, Any]) -> str:
    return (
        f"total variation {figures['total_variation']:.3f} per token ({100 * LEVEL:.0f} %: {figures['low']:.3f} to "
        f"{figures['high']:.3f})"
    )


def _seen(judged: Judged) -> tuple[float, list[float]]:
    """The token's surprise less the law's entropy (nats), and each view of it less the view's mean under the law.

    The views: whether it is the likeliest token; its probability over the likeliest one's; whether it is more likely
    than exp(-entropy). No drift of such a mean exceeds the total variation.
    """
    law_V, token = judged.law_V, judged.token
    own, most, squares = float(law_V[token]), float(law_V.max()), float((law_V**2).sum())
    probs = law_V[law_V > 0]
    entropy = float(-(probs * np.log(probs)).sum())
    is_typical_V = law_V > math.exp(-entropy)
    drifts = [
        float(own == most) - float(law_V[law_V == most].sum()),
        (own - squares) / most,
        float(is_typical_V[token]) - float(law_V[is_typical_V].sum()),
    ]
    # A token that the law has not: its surprise is left out, since one of them would hide all others.
    return (-math.log(own) - entropy if own > 0 else 0.0), drifts
