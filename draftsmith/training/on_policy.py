"""Answers that the drafter in training writes itself, for its target to judge (on-policy distillation, 2310.08461).

Called by the trainer through `FeatureSource`. A share of the batches keep their prompts and get answers of the present
weights, written anew every so many steps, many at once. Invariants: what was written is part of the run's state, so a
continued run sees the same texts, bit for bit; an answer depends on weights, seed and its own number alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.types import Proposal
from draftsmith.core.verify import verify
from draftsmith.drafters.trainable import DraftModule, TrainingBatch
from draftsmith.errors import OptionError
from draftsmith.models.backend import Backend, RowGroup
from draftsmith.training.batches import BatchOrder
from draftsmith.training.features import FeatureSource, MaskedText, TargetScorer, TextFeatures, collate
from draftsmith.training.processes import Processes
from draftsmith.training.settings import TrainingSettings
from draftsmith.training.trainer import count_steps
from draftsmith.training.validation import answer_spans

AT_ONCE = 32
"""Answers written at a time: a step over many costs little more than one over few."""
_PREFIX = "written."


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt, the most tokens of its answer, and the seed that draws it."""

    prompt: Sequence[int]
    limit: int
    seed: int


@dataclass(slots=True)
class _Writing:
    """An answer on its way: all tokens, and how many of them the cache has."""

    asked: Asked
    sampler: Sampler
    random: RequestRandom
    tokens: list[int]
    fed: int = 0

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.asked.prompt) :]


def write_answers(
    backend: Backend,
    asked: Sequence[Asked],
    ends: frozenset[int],
    temperature: float,
    stop: Callable[[], bool] = lambda: False,
) -> list[list[int]] | None:
    """Answers in order, their end tokens included; None when `stop()` says so before the last is written."""
    params = SamplingParams(temperature=temperature)
    waiting = deque(enumerate(asked))
    live: dict[int, _Writing] = {}
    written: list[list[int]] = [[] for _ in asked]
    while waiting or live:
        if stop():
            for number in live:
                backend.cache.close(number)
            return None
        while waiting and len(live) < AT_ONCE:
            number, one = waiting.popleft()
            sampler = Sampler(params, list(one.prompt), ends, backend.spec.vocab_size)
            live[number] = _Writing(one, sampler, RequestRandom(one.seed), list(one.prompt))
            backend.cache.open(number)
        for number in _step(backend, live, ends):
            written[number] = live.pop(number).answer
            backend.cache.close(number)
    return written


def _step(backend: Backend, live: Mapping[int, _Writing], ends: frozenset[int]) -> list[int]:
    """One more token of each; the numbers of those that have ended."""
    groups = []
    for number, one in live.items():
        rows = one.tokens[one.fed :]
        backend.cache.reserve(number, len(rows))
        groups.append(RowGroup(number, rows, range(-1, len(rows) - 1), len(rows) - 1))
    ended = []
    for (number, one), logits in zip(live.items(), backend.score(groups).logits, strict=True):
        backend.cache.keep(number, range(len(one.tokens) - one.fed))
        one.fed = len(one.tokens)
        place = len(one.answer)
        verdict = verify(Proposal.empty(one.tokens[-1]), logits, one.sampler, one.random, place)
        token = verdict.tokens[0]
        one.tokens.append(token)
        one.sampler.append([token])
        if token in ends or place + 1 >= one.asked.limit:
            ended.append(number)
    return ended


def is_rewritten(number: int, share: float) -> bool:
    """Whether a batch's answers are the drafter's own: evenly spread over the batches, `share` of them."""
    return math.floor((number + 1) * share) > math.floor(number * share)


def check_writer(settings: TrainingSettings, module: DraftModule) -> None:
    """Raise `OptionError` when answers are wanted of a module that writes nothing by itself."""
    if settings.on_policy and module.writer() is None:
        raise OptionError(
            f"on_policy is {settings.on_policy}; a {settings.method} drafter cannot write answers by itself, a "
            "standalone draft model can"
        )


@final
class OnPolicyFeatures(FeatureSource):
    """Another source, with a share of its batches rewritten."""

    def __init__(
        self,
        source: FeatureSource,
        settings: TrainingSettings,
        module: DraftModule,
        order: BatchOrder,
        scorer: TargetScorer,
        ends: frozenset[int],
        together: Processes,
    ) -> None:
        """`ends`: tokens that end an answer. See `check_writer`."""
        self._source, self._settings, self._module = source, settings, module
        self._order, self._scorer, self._ends, self._together = order, scorer, ends, together
        self._end = count_steps(settings, order) * settings.accumulate
        if settings.num_passes is not None:
            self._end = min(self._end, order.num_batches(settings.num_passes))
        self._span = -1
        self._texts: dict[int, list[MaskedText]] = {}

    def text(self, index: int) -> MaskedText:
        return self._source.text(index)

    def features(self, indices: Sequence[int]) -> list[TextFeatures]:
        return self._source.features(indices)

    def numbered(self, number: int, indices: Sequence[int]) -> TrainingBatch:
        if not is_rewritten(number, self._settings.on_policy):
            return self._source.batch(indices)
        texts = self._texts[number]
        return collate(texts, self._scorer.score(texts))

    def ready(self, step: int, numbers: range, stop: Callable[[], bool]) -> bool:
        """Write the answers of all steps up to the next refresh, where that has not been done."""
        span = step // self._settings.refresh
        if span == self._span:
            return True
        steps_left = self._settings.refresh - step % self._settings.refresh
        reached = range(numbers.start, min(numbers.start + steps_left * self._settings.accumulate, self._end))
        due = [number for number in reached if is_rewritten(number, self._settings.on_policy)]
        own = self.write(self._together.own(due), stop)
        if self._together.any_of(own is None) or own is None:
            return False
        self._texts = {number: texts for part in self._together.gather(own) for number, texts in part.items()}
        self._span = span
        return True

    def state(self) -> dict[str, torch.Tensor]:
        if self._span < 0:
            return {}
        tensors = {f"{_PREFIX}span": torch.tensor(self._span)}
        for number, texts in self._texts.items():
            at = f"{_PREFIX}{number}."
            tensors[f"{at}tokens"] = torch.cat([text.tokens for text in texts])
            tensors[f"{at}lengths"] = torch.tensor([len(text.tokens) for text in texts])
            tensors[f"{at}prompts"] = torch.tensor([int((~text.answer).sum()) for text in texts])
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(_PREFIX)}
        self._texts = {}
        self._span = int(own.pop("span", torch.tensor(-1)))
        for number in {int(name.partition(".")[0]) for name in own}:
            parts = own[f"{number}.tokens"].split(own[f"{number}.lengths"].tolist())
            prompts = own[f"{number}.prompts"].tolist()
            self._texts[number] = [_masked(part, size) for part, size in zip(parts, prompts, strict=True)]

    def write(self, numbers: Sequence[int], stop: Callable[[], bool]) -> dict[int, list[MaskedText]] | None:
        """Texts of batches with answers of the present weights; None when `stop()` said so."""
        backend = self._module.writer()
        assert backend is not None
        asked: list[Asked] = []
        for number in numbers:
            for place, index in enumerate(self._order.batch(number)):
                asked.append(self._ask(self.text(index), number, place, backend.spec.max_context))
        answers = write_answers(backend, asked, self._ends, self._settings.write_temperature, stop)
        if answers is None:
            return None
        texts = [
            _masked(torch.tensor([*one.prompt, *answer]), len(one.prompt))
            for one, answer in zip(asked, answers, strict=True)
        ]
        sizes = [len(self._order.batch(number)) for number in numbers]
        ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()
        return {number: texts[end - size : end] for number, size, end in zip(numbers, sizes, ends, strict=True)}

    def _ask(self, text: MaskedText, number: int, place: int, max_context: int) -> Asked:
        """The text up to its first answer, and as many tokens as that has."""
        start, end = next(answer_spans(text.answer.tolist()))
        start = min(max(start, 1), max_context - 1)
        seed = (self._settings.seed * 1_000_003 + number) * 65_537 + place
        return Asked(
            prompt=text.tokens[:start].tolist(), limit=max(1, min(end, max_context) - start), seed=seed % (1 << 63)
        )


def _masked(tokens: torch.Tensor, prompt_len: int) -> MaskedText:
    return MaskedText(tokens=tokens, answer=torch.arange(len(tokens)) >= prompt_len)
