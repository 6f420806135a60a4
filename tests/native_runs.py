"""Runs of a real model on the native backend, each compared with the plain run and each row of logits with all others.

`Runs` is what tests/test_native_speculation.py and tests/test_native_qwen.py check by. A plain run is alone, of one
thread, and made once. Beyond the ids, each row of logits that any run of any model ever computes is hashed under the
text it follows: a text has one hash, whatever computed it. Nothing is forgiven a near tie here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel, load_model
from draftsmith.models.backend import RowGroup, Scored
from tests.models.native_models import paths_of

SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "coupled": {"temperature": 0.8, "top_p": 0.95, "seed": 3}}
QUESTIONS = [
    "Repeat this list twice: apple, pear, plum, apple, pear, plum.",
    "Rename x to total in: x = 0\nfor i in range(3):\n    x = x + i\nprint(x)",
    'Fill in: {"name": "Ann", "age": 31} -> {"name": "Bob", "age": 42} -> {"name": "Cy", "age": ',
    "Count from 1 to 20.",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Translate to Spanish: good morning, good night.",
    "Summarise: The cat sat on the mat. The cat was black. The mat was red.",
]


class Rows:
    """The hash of every row of logits, under the text that it follows."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, bytes] = {}
        self.num_met_again = 0

    def watch(self, model: LoadedModel) -> None:
        backend = model.backend
        score = backend.score

        def watched(groups: Sequence[RowGroup], taps: frozenset[int | str] = frozenset()) -> Scored:
            scored = score(groups, taps)
            for group, logits in zip(groups, scored.logits, strict=True):
                behind = backend.cache.tokens(group.sequence_id)
                paths = list(paths_of(list(group.tokens), list(group.parents)))[group.first_logit :]
                for path, row in zip(paths, logits.numpy(), strict=True):
                    self._meet(np.array([*behind, *path], np.int32).tobytes(), row)
            return scored

        backend.score = watched  # type: ignore[method-assign]

    def _meet(self, text: bytes, row: np.ndarray) -> None:
        found = hashlib.blake2b(row, digest_size=8).digest()
        known = self._hashes.setdefault(text, found)
        assert found == known, f"a row behind {len(text) // 4 - 1} tokens differs"
        self.num_met_again += known is not found


@cache
def rows_of(model: str, kernels: str) -> Rows:
    """A model's rows, whether it is a target or drafts."""
    return Rows()


@lru_cache(maxsize=4)  # both places on one thread and on two: large models leave no memory for more
def watched_model(name: str, threads: int, kernels: str, place: int) -> LoadedModel:
    """A model whose rows are hashed; `place` tells targets and draft models apart."""
    model = load_model(name, backend=f"native:kernels={kernels}", threads=threads)
    rows_of(name, kernels).watch(model)
    return model


class Runs:
    """Runs of one target, of at most `num_tokens`; whatever model a drafter names, it gets `draft`."""

    def __init__(self, target: str, draft: str, num_tokens: int) -> None:
        self.target = target
        self.draft = draft
        self.num_tokens = num_tokens
        self._plain: dict[tuple[int, str, str], tuple[int, ...]] = {}

    def engine(self, threads: int = 1, kernels: str = "auto", num_draft: int = 6, **settings: Any) -> Engine:
        models = [watched_model(name, threads, kernels, place) for place, name in enumerate((self.target, self.draft))]
        for model in models:
            held = model.backend.cache
            for sequence in held.sequence_ids:  # an engine before this one kept them as prefixes
                held.close(sequence)
        settings = {"drafter": "none", "prefix_cache": False, **settings}
        chosen = EngineSettings(controller=f"fixed:num_draft={num_draft}", **settings)
        return Engine(models[0], chosen, load=lambda _: models[1])

    def plain(self, question: int, sampling: str, kernels: str = "auto") -> tuple[int, ...]:
        key = (question, sampling, kernels)
        if key not in self._plain:
            engine = self.engine(kernels=kernels)
            result = engine.generate(prompt(question), max_new_tokens=self.num_tokens, **SAMPLINGS[sampling])
            self._plain[key] = tuple(result.token_ids)
        return self._plain[key]

    def check_alone(self, engine: Engine, drafter: str, sampling: str, question: int, kernels: str = "auto") -> int:
        """Returns how many draft tokens were accepted."""
        expected = self.plain(question, sampling, kernels)
        params = {"max_new_tokens": self.num_tokens, "drafter": drafter, **SAMPLINGS[sampling]}
        found = engine.generate(prompt(question), **params)
        assert tuple(found.token_ids) == expected, (drafter, sampling, QUESTIONS[question])
        return int(found.statistics.accepted_tokens)

    def check_batch(self, engine: Engine, drafters: Sequence[str], samplings: Sequence[str], seed: int) -> None:
        """Eight requests in any order, each with a drafter and a sampling of its own, arriving while others run."""
        order = random.Random(seed).sample(range(len(QUESTIONS)), len(QUESTIONS))
        expected = {number: self.plain(number, samplings[number % len(samplings)]) for number in order}
        streams: dict[int, Iterator[Any]] = {}
        found: dict[int, list[int]] = {number: [] for number in order}
        for place, number in enumerate(order):
            streams[number] = engine.stream(
                prompt(number),
                max_new_tokens=self.num_tokens,
                drafter=drafters[place % len(drafters)],
                **SAMPLINGS[samplings[number % len(samplings)]],
            )
            event = next(streams[order[place // 2]], None)
            found[order[place // 2]].extend(event.token_ids if event else ())
        for number, stream in streams.items():
            found[number].extend(token for event in stream for token in event.token_ids)
        for number in order:
            assert tuple(found[number]) == expected[number], (order, drafters, QUESTIONS[number])


def prompt(question: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTIONS[question]}]
