"""What the frozen target makes of whole texts: taps of every row, and its law where an answer is judged.

Called by the trainer and by validation, through `FeatureSource`; `feature_cache.py` keeps the same on disk. Works
with every backend through its contract. Invariants: the backend's cache is left as it was found; the logits of a
forward never outlive it, so memory stays at `max_rows` rows of the vocabulary whatever the texts' lengths.

Shape letters: L rows of a text, R logit rows, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from draftsmith.core.verify import row_argmax
from draftsmith.drafters.base import Tap
from draftsmith.drafters.trainable import TrainingBatch
from draftsmith.errors import DraftsmithError
from draftsmith.models.backend import Backend, RowGroup
from draftsmith.training.corpus import Corpus

LAST_HIDDEN = "last_hidden"


@dataclass(frozen=True, kw_only=True)
class MaskedText:
    """One text: token ids, int64 [L], and which of them belong to an answer, bool [L]."""

    tokens: torch.Tensor
    answer: torch.Tensor

    @property
    def judged(self) -> torch.Tensor:
        """Rows whose next token belongs to an answer, bool [L]: those whose law a draft is held against."""
        judged = torch.zeros_like(self.answer)
        judged[:-1] = self.answer[1:]
        return judged


@dataclass(frozen=True, kw_only=True)
class TextFeatures:
    """Taps [L, D]; of judged rows the target's likeliest next token and the logsumexp of its logits, elsewhere 0."""

    taps: Mapping[Tap, torch.Tensor]
    best_L: torch.Tensor
    log_total_L: torch.Tensor


class FeatureSource(ABC):
    """Texts by number, with their features."""

    @abstractmethod
    def text(self, index: int) -> MaskedText:
        """The text alone."""

    @abstractmethod
    def features(self, indices: Sequence[int]) -> list[TextFeatures]:
        """What the target makes of texts, in order."""

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """Texts and features as a drafter's module takes them."""
        return collate([self.text(index) for index in indices], self.features(indices))

    # -- what a source may do beyond that: batches that change while training goes on ----------------

    def ready(self, step: int, numbers: range, stop: Callable[[], bool]) -> bool:
        """Make ready for a step, whose batches have these numbers; False when `stop()` ended it."""
        return True

    def numbered(self, number: int, indices: Sequence[int]) -> TrainingBatch:
        """The batch of that number, of texts `indices`."""
        return self.batch(indices)

    def state(self) -> dict[str, torch.Tensor]:
        """What a run's state has to keep of the source."""
        return {}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state` gave, found among a state's tensors."""
        del tensors


def collate(texts: Sequence[MaskedText], features: Sequence[TextFeatures]) -> TrainingBatch:
    """Pad at the end and stack."""

    def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    return TrainingBatch(
        tokens_BL=padded([text.tokens for text in texts]),
        lengths_B=torch.tensor([len(text.tokens) for text in texts]),
        answer_BL=padded([text.answer for text in texts]),
        taps={tap: padded([item.taps[tap].to(torch.float32) for item in features]) for tap in features[0].taps},
        best_BL=padded([item.best_L for item in features]),
        log_total_BL=padded([item.log_total_L for item in features]),
    )


@dataclass(slots=True)
class _Gathered:
    """The pieces of one text's features, first rows first."""

    sequence_id: int
    done: int = 0
    taps: dict[Tap, list[torch.Tensor]] = field(default_factory=dict)
    best: list[torch.Tensor] = field(default_factory=list)
    log_total: list[torch.Tensor] = field(default_factory=list)


@final
class OnlineFeatures(FeatureSource):
    """Scores a corpus's texts whenever they are asked for."""

    def __init__(self, corpus: Corpus, scorer: TargetScorer) -> None:
        self._corpus = corpus
        self._scorer = scorer

    def text(self, index: int) -> MaskedText:
        return MaskedText(tokens=self._corpus.tokens(index), answer=self._corpus.answer(index))

    def features(self, indices: Sequence[int]) -> list[TextFeatures]:
        return self._scorer.score([self.text(index) for index in indices])


@final
class RememberedFeatures(FeatureSource):
    """Another source's features kept in memory, in half precision, as far as `room` bytes go."""

    def __init__(self, source: FeatureSource, room: int = 1 << 29) -> None:
        self._source = source
        self._room = room
        self._kept: dict[int, TextFeatures] = {}

    def text(self, index: int) -> MaskedText:
        return self._source.text(index)

    def features(self, indices: Sequence[int]) -> list[TextFeatures]:
        asked = [index for index in indices if index not in self._kept]
        found = dict(zip(asked, self._source.features(asked), strict=True)) if asked else {}
        for index, features in found.items():
            # The first use is of the kept form too: a figure must not depend on how often it was asked for.
            found[index] = TextFeatures(
                taps={tap: narrow(rows) for tap, rows in features.taps.items()},
                best_L=features.best_L,
                log_total_L=features.log_total_L,
            )
            size = sum(rows.nbytes for rows in found[index].taps.values())
            if size <= self._room:
                self._room -= size
                self._kept[index] = found[index]
        return [found[index] if index in found else self._kept[index] for index in indices]


_HALF_MAX = 6e4
"""Hidden states below this fit float16, which has three bits more than bfloat16; float16 ends at 65504."""


def narrow(rows: torch.Tensor) -> torch.Tensor:
    """Rows in half their size, in the finer of two types that holds them."""
    fits = not rows.numel() or float(rows.abs().max()) < _HALF_MAX
    return rows.to(torch.float16 if fits else torch.bfloat16)


@final
class TargetScorer:
    """Scores whole texts with a backend of which it is the only user meanwhile."""

    def __init__(self, backend: Backend, taps: frozenset[Tap], max_rows: int = 512) -> None:
        """`taps`: what is wanted beside "last_hidden"; `max_rows`: most rows of one forward."""
        assert max_rows > 0
        self._backend = backend
        self._taps = taps | {LAST_HIDDEN}
        self._max_rows = max_rows

    @property
    def taps(self) -> frozenset[Tap]:
        """What `score` gives of every row."""
        return self._taps

    @property
    def known_taps(self) -> frozenset[Tap]:
        """What the target has."""
        return frozenset(range(self._backend.spec.num_layers + 1)) | {LAST_HIDDEN}

    @property
    def width(self) -> int:
        """Numbers of a tap's row."""
        return self._backend.spec.width

    def with_taps(self, taps: frozenset[Tap]) -> TargetScorer:
        """The same target with other taps."""
        return TargetScorer(self._backend, taps, self._max_rows)

    @torch.no_grad()
    def score(self, texts: Sequence[MaskedText]) -> list[TextFeatures]:
        """Features of texts, in order; several texts share a forward, long ones take several."""
        cache = self._backend.cache
        first_id = max(cache.sequence_ids, default=-1) + 1
        work = [_Gathered(first_id + place) for place in range(len(texts))]
        open_ids: set[int] = set()
        try:
            for pieces in split_rows([len(text.tokens) for text in texts], self._max_rows):
                for place, start, _ in pieces:
                    if start == 0:
                        cache.open(work[place].sequence_id)
                        open_ids.add(work[place].sequence_id)
                self._forward(texts, work, pieces)
                for place, _, end in pieces:
                    if end == len(texts[place].tokens):
                        cache.close(work[place].sequence_id)
                        open_ids.discard(work[place].sequence_id)
        finally:
            for sequence_id in open_ids:
                cache.close(sequence_id)
        return [
            TextFeatures(
                taps={tap: torch.cat(parts) for tap, parts in item.taps.items()},
                best_L=torch.cat(item.best),
                log_total_L=torch.cat(item.log_total),
            )
            for item in work
        ]

    def _forward(
        self, texts: Sequence[MaskedText], work: Sequence[_Gathered], pieces: Sequence[tuple[int, int, int]]
    ) -> None:
        groups, judged_rows = [], []
        for place, start, end in pieces:
            judged = texts[place].judged[start:end].nonzero().squeeze(-1)
            judged_rows.append(judged)
            # Logits are as dear as several layers: none for a prompt before its answer.
            first_logit = int(judged[0]) if len(judged) else end - start
            tokens = texts[place].tokens[start:end].tolist()
            groups.append(RowGroup(work[place].sequence_id, tokens, range(-1, end - start - 1), first_logit))
            self._backend.cache.reserve(work[place].sequence_id, end - start)
        scored = self._backend.score(groups, self._taps)
        for group, judged, logits_RV, taps, (place, start, end) in zip(
            groups, judged_rows, scored.logits, scored.taps, pieces, strict=True
        ):
            self._backend.cache.keep(group.sequence_id, range(end - start))
            best, log_total = torch.zeros(end - start, dtype=torch.int64), torch.zeros(end - start)
            if len(judged):
                wanted_RV = logits_RV if len(judged) == len(logits_RV) else logits_RV[judged - group.first_logit]
                likeliest = row_argmax(wanted_RV)
                if likeliest is None:
                    raise DraftsmithError(
                        "the target gives logits that are not finite; these texts or its weights are broken"
                    )
                best[judged] = torch.tensor(likeliest)
                log_total[judged] = torch.logsumexp(wanted_RV, dim=-1).to("cpu", torch.float32)
            work[place].best.append(best)
            work[place].log_total.append(log_total)
            for tap, rows in taps.items():
                work[place].taps.setdefault(tap, []).append(rows.detach().cpu().to(torch.float32))


def split_rows(lengths: Sequence[int], max_rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut texts into pieces (place, start, end), grouped into forwards of at most `max_rows` rows, in order.

    A text's pieces come in different forwards, each after the other.
    """
    group: list[tuple[int, int, int]] = []
    room = max_rows
    for place, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + room)
            group.append((place, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield group
                group, room = [], max_rows
    if group:
        yield group
