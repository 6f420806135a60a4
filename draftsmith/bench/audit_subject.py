"""What an audit asks, and whom: the contract of an audited engine, and ours behind it.

Called by the audit's checks. `Audited` is all they know of what they audit; `bench.audit_endpoint` has another one.
`Target` says what should have come: logits of the plain model and the law after the transforms, from one forward over
the answer as it was given. Invariant: nothing here looks inside the audited engine; answers and counts are what any
caller gets.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch

from draftsmith.bench.runs import BASELINE
from draftsmith.core.sampling import Sampler
from draftsmith.core.stats import EventLog
from draftsmith.core.types import Rule
from draftsmith.engine.engine import Engine
from draftsmith.engine.loading import LoadedModel
from draftsmith.engine.params import GenerationParams
from draftsmith.engine.prompts import encode_prompt
from draftsmith.engine.results import GenerationResult, RequestStatistics
from draftsmith.models.backend import RowGroup

Token: TypeAlias = int | str
_SCORED_ID = -1  # of no request: engines count theirs from 0
_CHUNK_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request. `settings`: keyword arguments of `Engine.generate`, seed included."""

    prompt: Any
    settings: Mapping[str, Any]

    def but(self, **changed: Any) -> Asked:
        """The request with some settings changed."""
        return Asked(prompt=self.prompt, settings={**self.settings, **changed})

    def shown(self) -> dict[str, Any]:
        """For reports: what to ask for to see it again."""
        return {"prompt": self.prompt, **{name: _plain(value) for name, value in self.settings.items()}}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else value


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One sample of an answer.

    `tokens`: ids, or spellings where an endpoint tells no ids; characters (`in_characters`) where it tells neither.
    `logprobs`: of the emitted tokens, None where not told. `likeliest`: per token, those of the likeliest ones.
    `usage`: tokens the engine says it wrote, and read. `statistics`: the engine's own, for a single request. `cost`:
    under a lossy rule, the total variation that the engine says its tokens have, summed.
    """

    tokens: tuple[Token, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[float, ...] | None = None
    likeliest: tuple[Mapping[Token, float], ...] = ()
    in_characters: bool = False
    usage: tuple[int | None, int | None] = (None, None)
    statistics: RequestStatistics | None = None
    cost: float | None = None

    @property
    def num_tokens(self) -> int | None:
        """Tokens written, None where nobody tells."""
        return self.usage[0] if self.in_characters else len(self.tokens)


class Audited(ABC):
    """An engine as its callers see it. `tells_drafts`: its event log says what was drafted and accepted."""

    tells_drafts: bool = False

    @abstractmethod
    def answer(self, asked: Sequence[Asked]) -> list[list[Answer]]:
        """The samples of each request, all requests at once. Raises `DraftsmithError` when it cannot be asked."""

    def take_events(self) -> EventLog | None:
        """The event log since the last call, None where there is none."""
        return None

    def rest(self) -> None:
        """Give back what it keeps between requests (the plain engine may share its memory)."""


@final
class EngineAudited(Audited):
    """Our engine, with one of its drafters."""

    tells_drafts = True

    def __init__(self, engine: Engine, drafter: str) -> None:
        self._engine = engine
        self._drafter = drafter

    def answer(self, asked: Sequence[Asked]) -> list[list[Answer]]:
        if len(asked) == 1:
            result = self._engine.generate(asked[0].prompt, **self._settings(asked[0]))
            return [[_answer_of(sample) for sample in result.samples or (result,)]]
        # One stream each: requests of one `generate` would share their seed.
        streams = [self._engine.stream(item.prompt, **self._settings(item)) for item in asked]
        return [_collect(list(stream), item) for stream, item in zip(streams, asked, strict=True)]

    def take_events(self) -> EventLog:
        return self._engine.take_events()

    def rest(self) -> None:
        self._engine.clear_prefixes()

    def _settings(self, asked: Asked) -> dict[str, Any]:
        return {**asked.settings, "drafter": self._drafter}


def _answer_of(result: GenerationResult) -> Answer:
    entries, total_variation = result.logprobs, result.statistics.total_variation
    return Answer(
        tokens=tuple(result.token_ids),
        text=result.text,
        finish_reason=result.finish_reason,
        logprobs=None if entries is None else tuple(entry.logprob for entry in entries),
        usage=(result.statistics.emitted_tokens, result.statistics.prompt_tokens),
        statistics=result.statistics,
        cost=None if total_variation is None else total_variation * len(result.token_ids),
    )


def _collect(events: Sequence[Any], asked: Asked) -> list[Answer]:
    wanted = asked.settings.get("logprobs") is not None
    samples = []
    for index in range(asked.settings.get("n", 1)):
        own = [event for event in events if event.index == index]
        samples.append(
            Answer(
                tokens=tuple(token for event in own for token in event.token_ids),
                text="".join(event.text for event in own),
                finish_reason=own[-1].finish_reason if own else None,
                logprobs=tuple(entry.logprob for event in own for entry in event.logprobs or ()) if wanted else None,
                cost=sum(costs) if (costs := [cost for event in own for cost in event.costs or ()]) else None,
            )
        )
    return samples


# -- what should have come ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judged:
    """One emitted token beside the target's row.

    `law_V`: the law it should have been drawn from, [V]. `scores_V`: the logits after every transform before the
    temperature, [V]; the largest one's token is the greedy one. `logprob`: its log-probability in the raw row.
    """

    position: int
    token: int
    law_V: np.ndarray[Any, np.dtype[np.float64]]
    scores_V: np.ndarray[Any, np.dtype[np.float64]]
    logprob: float

    @property
    def greedy_gap(self) -> float:
        """How far its score lies below the largest; 0 for the greedy token and for its equals."""
        return float(self.scores_V.max() - self.scores_V[self.token])

    @property
    def shortfall(self) -> float:
        """How far its score lies below the last one the truncation kept; 0 where it was kept."""
        kept_V = self.scores_V[self.law_V > 0]
        return max(0.0, float(kept_V.min() - self.scores_V[self.token]))


@final
class Target:
    """The plain target: scores what was emitted, in one forward, and applies the request's transforms row by row."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    @property
    def vocab_size(self) -> int:
        """Length of a row."""
        return self._model.backend.spec.vocab_size

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a prompt."""
        return encode_prompt(prompt, self._model)

    def decode(self, tokens: Sequence[Token]) -> str:
        """The text of some ids."""
        return self._model.tokenizer.decode([token for token in tokens if isinstance(token, int)])

    def judge(self, asked: Asked, tokens: Sequence[Token]) -> Iterator[Judged]:
        """Every emitted token with the law it should have had, given what was really emitted before it."""
        emitted = [token for token in tokens if isinstance(token, int)]
        if not emitted:
            return
        prompt_ids = self.encode(asked.prompt)
        params = GenerationParams.create(**asked.settings)
        end_ids = params.stop_ids if params.ignore_eos else params.stop_ids | self._model.eos_ids
        sampler = Sampler(params.sampling, prompt_ids, end_ids, self.vocab_size)
        # The same transforms at temperature 1 and without truncation give the scores that greedy compares.
        bare = dataclasses.replace(params.sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, rule=Rule.COUPLING)
        scorer = Sampler(bare, prompt_ids, end_ids, self.vocab_size)
        for position, (token, row_V) in enumerate(zip(emitted, self._rows(prompt_ids, emitted), strict=True)):
            yield Judged(
                position,
                token,
                sampler.law(row_V).numpy(),
                scorer.scores(row_V).numpy(),
                float(torch.log_softmax(row_V.double(), dim=-1)[token]),
            )
            sampler.append([token])
            scorer.append([token])

    def _rows(self, prompt_ids: Sequence[int], emitted: Sequence[int]) -> Iterator[torch.Tensor]:
        """The logits that chose each emitted token, from a sequence of its own."""
        backend, ids = self._model.backend, [*prompt_ids, *emitted[:-1]]
        first = len(prompt_ids) - 1
        backend.cache.open(_SCORED_ID)
        try:
            for start in range(0, len(ids), _CHUNK_ROWS):
                chunk = ids[start : start + _CHUNK_ROWS]
                backend.cache.reserve(_SCORED_ID, len(chunk))
                wanted = min(max(first - start, 0), len(chunk))
                group = RowGroup(_SCORED_ID, chunk, range(-1, len(chunk) - 1), wanted)
                yield from backend.score([group]).logits[0]
                backend.cache.keep(_SCORED_ID, range(len(chunk)))
        finally:
            backend.cache.close(_SCORED_ID)


def plain_of(engine: Engine) -> EngineAudited:
    """The same kind of engine, writing without a drafter."""
    return EngineAudited(engine, BASELINE)
