"""How good a drafter is on texts it was not trained on, in the engine's own terms.

Called by the trainer and by the live check. `judge_batch` asks a module for its drafts and holds them against the
target's full law; `replay` then walks an answer as the engine would: K drafts, greedy verification, a jump by what
was accepted. Invariant: on texts that are the target's own greedy answers `replay` counts exactly the engine's steps,
for drafts are teacher-forced only with tokens that are then right.

Shape letters: B texts, L rows, K depths, A anchors, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.core.losses import log_probabilities
from draftsmith.core.theory import expected_tokens
from draftsmith.core.types import Tree
from draftsmith.core.verify_rules import walk
from draftsmith.drafters.trainable import DraftModule, TrainingBatch, shift_left
from draftsmith.errors import DataError

NUM_BINS = 10
_CHUNK = 512
NO_DRAFT = -1


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Drafts of a batch, by depth and anchor row, [K, B, L]; rows that are no anchors hold -1 and 0.

    `tokens`: the draft's likeliest token, a target id. `hits`: whether it is the target's. `top`: the draft's own
    probability of it. `overlap`: mass that draft law and the target's full law share.
    """

    tokens: torch.Tensor
    hits: torch.Tensor
    top: torch.Tensor
    overlap: torch.Tensor


@torch.no_grad()
def judge_batch(module: DraftModule, batch: TrainingBatch, num_depths: int) -> Judged:
    """The module's teacher-forced drafts of every depth, and what the target thinks of them."""
    shape = (num_depths, *batch.tokens_BL.shape)
    judged = Judged(
        tokens=torch.full(shape, NO_DRAFT),
        hits=torch.zeros(shape, dtype=torch.bool),
        top=torch.zeros(shape),
        overlap=torch.zeros(shape),
    )
    best, log_total = batch.best_BL.flatten(), batch.log_total_BL.flatten()
    for depth, draft in enumerate(module.depths(batch, num_depths)):
        for start in range(0, len(draft.anchors), _CHUNK):
            anchors = draft.anchors[start : start + _CHUNK]
            judges = anchors + 1 + depth
            q_AU = log_probabilities(draft.logits_AU[start : start + _CHUNK]).exp()
            # Restricted to the draft ids, but not renormalised: what the target says elsewhere is lost to the draft.
            p_AU = (module.target_logits(batch, judges).float() - log_total[judges, None]).exp()
            top_A, places_A = q_AU.max(dim=-1)
            tokens_A = module.draft_ids[places_A]
            judged.tokens[depth].view(-1)[anchors] = tokens_A
            judged.hits[depth].view(-1)[anchors] = tokens_A == best[judges]
            judged.top[depth].view(-1)[anchors] = top_A.float()
            judged.overlap[depth].view(-1)[anchors] = torch.minimum(p_AU, q_AU).sum(dim=-1).clamp(max=1).float()
    return judged


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What decoding a text took. `tokens` emitted after the first of each answer, in `steps`."""

    tokens: int
    steps: int


def answer_spans(answer: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First token and end of every answer of a text."""
    start = None
    for place, inside in enumerate([*answer, False]):
        if inside and start is None:
            start = place
        elif not inside and start is not None:
            yield start, place
            start = None


def replay(drafts_KL: Sequence[Sequence[int]], best_L: Sequence[int], answer: Sequence[bool]) -> Replay:
    """Decode a text's answers with chains of K drafts under greedy verification.

    `drafts_KL[k][t]`: the draft of x_{t+2+k} at anchor t, -1 for none; `best_L`: the target's token after each row.
    The first token of an answer comes from the step that reads the prompt, so the first root is that token.
    """
    tokens = steps = 0
    for start, end in answer_spans(answer):
        root = max(start, 1)
        while root < end - 1:
            chain = []
            for drafts in drafts_KL:
                draft = drafts[root - 1]
                if draft == NO_DRAFT:
                    break
                chain.append(draft)
            tree = Tree((-2, *chain), tuple(range(-1, len(chain))))
            # The row of the answer's last token judges nothing that could still be emitted.
            verdict = walk(tree, _tokens_from(best_L, root))
            emitted = verdict.cut(end - 1 - root).num_emitted
            root += emitted
            tokens += emitted
            steps += 1
    return Replay(tokens=tokens, steps=steps)


def _tokens_from(best_L: Sequence[int], root: int) -> Callable[[int, Sequence[int]], int]:
    return lambda node, path: best_L[root + node]


def replay_batch(judged: Judged, batch: TrainingBatch) -> Replay:
    """`replay` of every text of a batch, added up."""
    found = [
        replay(judged.tokens[:, text].tolist(), batch.best_BL[text].tolist(), batch.answer_BL[text].tolist())
        for text in range(len(batch.tokens_BL))
    ]
    return Replay(tokens=sum(item.tokens for item in found), steps=sum(item.steps for item in found))


class Tally:
    """Sums over batches; one vector, so that processes can add theirs up; not finite where a draft law was not."""

    def __init__(self, num_depths: int) -> None:
        self._num_depths = num_depths
        # Per depth: anchors, hits, overlap. Then anchors and tokens per step at temperature 1; replayed tokens and
        # steps. Then per bin of the draft's top probability: drafts, their probabilities, their hits. Then judged rows,
        # and those whose likeliest token is the untuned target's.
        self.sums = torch.zeros(3 * num_depths + 4 + 3 * NUM_BINS + 2, dtype=torch.float64)

    def add(self, judged: Judged, batch: TrainingBatch) -> None:
        """Count a batch."""
        drafted = judged.tokens != NO_DRAFT
        by_depth, chance, replayed, bins, _ = self._views()
        by_depth[0] += drafted.sum(dim=(1, 2))
        by_depth[1] += judged.hits.sum(dim=(1, 2))
        by_depth[2] += judged.overlap.double().sum(dim=(1, 2))
        chance[0] += drafted[0].sum()
        chance[1] += (1 + judged.overlap.double().cumprod(dim=0).sum(dim=0))[drafted[0]].sum()
        found = replay_batch(judged, batch)
        replayed += torch.tensor([found.tokens, found.steps], dtype=torch.float64)
        top = judged.top[drafted].double()
        places = (top.nan_to_num() * NUM_BINS).long().clamp(max=NUM_BINS - 1)
        for row, values in enumerate((torch.ones_like(top), top, judged.hits[drafted].double())):
            bins[row].index_add_(0, places, values)

    def compare(self, verified: TrainingBatch, original: TrainingBatch) -> None:
        """Count the rows at which the model that verifies says what the target it comes from says."""
        judged_BL = shift_left(original.answer_BL, 1)
        same = verified.best_BL[judged_BL] == original.best_BL[judged_BL]
        self._views()[-1].add_(torch.tensor([same.numel(), int(same.sum())], dtype=torch.float64))

    def figures(self) -> Figures:
        """The figures of what was counted. Raises `DataError` when nothing was."""
        by_depth, chance, replayed, bins, agreement = self._views()
        if not float(by_depth[0, 0]):
            raise DataError("the validation texts hold no answer of three tokens or more, so nothing can be judged")
        rows = by_depth[0].clamp(min=1)
        steps = float(replayed[1])
        return Figures(
            accuracy=tuple((by_depth[1] / rows).tolist()),
            overlap=tuple((by_depth[2] / rows).tolist()),
            calibration_error=float((bins[1] - bins[2]).abs().sum() / bins[0].sum()),
            greedy_tokens_per_step=float(replayed[0]) / steps if steps else 1.0,
            sampled_tokens_per_step=float(chance[1] / chance[0]),
            replayed_tokens=int(replayed[0]),
            replayed_steps=int(steps),
            rows=int(by_depth[0, 0]),
            agreement=float(agreement[1] / agreement[0]) if float(agreement[0]) else 1.0,
        )

    def _views(self) -> tuple[torch.Tensor, ...]:
        depths, chance, replayed, bins, agreement = self.sums.split([3 * self._num_depths, 2, 2, 3 * NUM_BINS, 2])
        return depths.view(3, -1), chance, replayed, bins.view(3, -1), agreement


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A validation.

    `accuracy[k]`: share of anchors whose draft of depth k is the target's likeliest token, all before it being right.
    `overlap[k]`: mean 1 - TV(draft law, target's full law). `calibration_error`: mean distance, over ten bins of the
    draft's top probability, between it and the share of hits. `greedy_tokens_per_step`: replayed, emitted over
    steps after the prompt. `sampled_tokens_per_step`: mean over anchors of 1 + Σ_k Π_{j<=k} overlap_j, a forecast for
    chain rejection at temperature 1. `rows`: anchors of depth 0. `agreement`: share of judged rows at which the model
    that verifies says what the untuned target says: 1 unless the method tunes it.
    """

    accuracy: tuple[float, ...]
    overlap: tuple[float, ...]
    calibration_error: float
    greedy_tokens_per_step: float
    sampled_tokens_per_step: float
    replayed_tokens: int
    replayed_steps: int
    rows: int
    agreement: float = 1.0

    @property
    def forecast_tokens_per_step(self) -> float:
        """Tokens per step if acceptances were independent: what `core.theory` makes of the mean accuracies."""
        return expected_tokens(self.accuracy, len(self.accuracy))


def judge_batches(module: DraftModule, batches: Iterable[TrainingBatch], num_depths: int) -> Tally:
    """Count batches, each as the model makes it that verifies the module's drafts."""
    tally = Tally(num_depths)
    for batch in batches:
        verified = module.as_verified(batch)
        tally.add(judge_batch(module, verified, num_depths), verified)
        tally.compare(verified, batch)
    return tally


def as_plain(figures: Figures) -> dict[str, Any]:
    """For logs: figures with four digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return [rounded(item) for item in value]
        return round(value, 4) if isinstance(value, float) else value

    return {key: rounded(value) for key, value in vars(figures).items()}
