"""Compares what arms wrote, token id by token id, and measures how close a differing choice was.

Called by the benchmark and the demo. Invariant: comparison is on token ids, never on text; a difference
is reported with its place, and never explained away without a measured gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from draftsmith.bench.runs import BASELINE, ArmRun, Difference, Key
from draftsmith.core.random import RequestRandom
from draftsmith.errors import DraftsmithError

NEAR_TIE = 1e-4
"""A gap below this may tip either way with the rounding of float32: not a fault of the drafter."""

_ALTERNATIVES = 64


class Scorer(Protocol):
    """What is needed of an engine to look at one choice again."""

    @property
    def spec(self) -> Any:
        """The target's shape (`vocab_size`)."""

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a prompt."""

    def generate(self, prompt: Any, **params: Any) -> Any:
        """Generate for one prompt."""


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """The first position where two outputs differ (the shorter one's length when it is a prefix); None if equal."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def find_differences(runs: Iterable[ArmRun], baseline: str) -> dict[Key, int]:
    """Where an arm first leaves the baseline, by answer; the first repeat's answers are compared."""
    answers: dict[Key, tuple[int, ...]] = {}
    for run in runs:
        for request in run.requests:
            if request.error is None and request.token_ids is not None:
                answers.setdefault(Key(run.arm, request.prompt, request.turn), request.token_ids)
    found: dict[Key, int] = {}
    for place, ids in answers.items():
        expected = answers.get(Key(baseline, place.prompt, place.turn))
        if expected is not None:
            position = first_difference(expected, ids)
            if position is not None:
                found[place] = position
    return found


def explain(
    scorer: Scorer, prompt: Any, baseline: Sequence[int], other: Sequence[int], settings: Mapping[str, Any]
) -> Difference:
    """Measure how close the two arms' choices were where they first differ.

    Scores the common beginning once more and compares the two tokens under the law they were chosen by:
    log-probabilities when greedy; divided by the temperature, the position's noise added, when sampling.
    """
    position = first_difference(baseline, other)
    assert position is not None, "the outputs do not differ"
    if position >= min(len(baseline), len(other)):
        return Difference(position=position, gap=None)
    ids = [*scorer.encode(prompt), *baseline[:position]]
    try:
        result = scorer.generate(ids, max_new_tokens=1, ignore_eos=True, logprobs=_ALTERNATIVES, drafter=BASELINE)
    except DraftsmithError:
        return Difference(position=position, gap=None)
    scores = dict(result.logprobs[0].top)
    tokens = (baseline[position], other[position])
    if not all(token in scores for token in tokens):
        return Difference(position=position, gap=None)
    temperature = settings.get("temperature", 0.0)
    if temperature > 0:
        noise = RequestRandom(settings.get("seed", 0)).target_gumbel(position, scorer.spec.vocab_size)
        scores = {token: scores[token] / temperature + float(noise[token]) for token in tokens}
    return Difference(position=position, gap=abs(scores[tokens[0]] - scores[tokens[1]]))
