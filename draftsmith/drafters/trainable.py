"""What a drafter with weights shows the trainer: a module, a batch, and draft logits depth by depth.

One file per drafter holds its module (weights, forward, loss) beside its inference; the trainer knows this
file alone. Everything rests on one alignment: a target row t has read the tokens up to x_t, so its tap and its
law of x_{t+1} belong to it; at depth k an *anchor* row t drafts x_{t+2+k} from the taps of rows <= t and the
tokens x_{t+1} .. x_{t+1+k}, and is judged by the target's row t+1+k.

Shape letters: B texts, L rows of the longest, D width, V vocabulary, U draft vocabulary, A anchors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from draftsmith.core.losses import (
    DepthLoss,
    LossReport,
    geometric_weights,
    judged_loss,
    log_probabilities,
    loss_named,
    report,
)
from draftsmith.drafters.base import Drafter, Tap, TargetInfo
from draftsmith.errors import OptionError
from draftsmith.models.backend import Backend


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Whole texts of one target, padded at the end, with what the frozen target made of them.

    `tokens_BL`: int64. `lengths_B`: tokens of each text. `answer_BL`: bool, the token belongs to an answer, so
    drafting it is worth learning; padding is False. `taps`: [B, L, D] for every tap the module needs and
    always "last_hidden". `best_BL`: int64, the target's likeliest next token after each row
    whose next token belongs to an answer, 0 elsewhere. `log_total_BL`: logsumexp of the target's logits of these rows
    over its whole vocabulary, 0 elsewhere.
    """

    tokens_BL: torch.Tensor
    lengths_B: torch.Tensor
    answer_BL: torch.Tensor
    taps: Mapping[Tap, torch.Tensor]
    best_BL: torch.Tensor
    log_total_BL: torch.Tensor

    def anchors(self, depth: int) -> torch.Tensor:
        """Flat rows t of [B * L] whose x_{t+2+depth} belongs to an answer, int64 [A]."""
        return shift_left(self.answer_BL, 2 + depth).flatten().nonzero().squeeze(-1)


def shift_left(rows: torch.Tensor, steps: int) -> torch.Tensor:
    """Row t + steps at row t of [B, L, ..]; zeros where the rows have ended."""
    shifted = torch.zeros_like(rows)
    kept = rows.shape[1] - steps
    if kept > 0:
        shifted[:, :kept] = rows[:, steps:]
    return shifted


@dataclass(frozen=True, kw_only=True)
class DepthDraft:
    """Draft logits of one depth over the draft ids; `anchors`: flat rows [A], see `TrainingBatch.anchors`."""

    anchors: torch.Tensor
    logits_AU: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TargetLaws:
    """The target's log-probabilities over the draft ids, [R, U], float32. `places`: which of them is that of each
    flat row of [B * L]; -1 where no answer follows, or one the draft vocabulary cannot say.
    """

    log_p_RU: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """How depths become one loss. `loss`: a name of `core.losses`; `decay`: weight decay^depth of each depth;
    `num_depths`: how many depths are unrolled (or heads trained). `progress`: share of the run that is done, 0 to 1,
    for losses with a schedule. Raises `OptionError`.
    """

    loss: str = "kl"
    decay: float = 0.8
    num_depths: int = 4
    progress: float = 1.0

    def __post_init__(self) -> None:
        loss_named(self.loss)
        if self.num_depths < 1:
            raise OptionError(f"num_depths is {self.num_depths}: at least 1 is needed")
        geometric_weights(self.num_depths, self.decay)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a module's directory holds. `tensors`: its weights; `config`: keys of `config.json` beside our own; `texts`:
    further files by name; `target`: a model directory inside, for methods that change their target.
    """

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    target: Layout | None = None


class DraftModule(nn.Module, ABC):
    """The trained part of one drafter family.

    Weights that come from the target (embedding, head rows) are buffers that are not saved. Invariant: what
    `depths` computes for an anchor is what inference computes for it, given that its drafts so far were right.
    """

    Config: ClassVar[type[Any]]
    """Frozen dataclass of plain values that fixes the architecture; stored with a checkpoint."""
    loss_defaults: ClassVar[LossOptions] = LossOptions()
    tunes_target: ClassVar[bool] = False
    """It changes its target, which is then a model of its own: the one in its directory, see `Layout.target`."""
    needs_ranks: ClassVar[bool] = False
    """Its drafter builds static trees from how often the candidate of each rank is right."""
    draft_ids: torch.Tensor
    """Target ids that are drafted, ascending [U]."""
    draft_places_V: torch.Tensor
    """Place of each target id among them, -1 for the others."""
    target_head_UD: torch.Tensor
    """The target's head rows of the draft ids."""

    def __init__(self, config: Any, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        """Room for the weights, not filled yet.

        `draft_ids`: int64 [U], ascending target ids that are drafted; None for the whole vocabulary.
        """
        super().__init__()
        self.config = config
        self.vocab_size = target.vocab_size
        ids = torch.arange(target.vocab_size) if draft_ids is None else draft_ids
        self.register_buffer("draft_ids", ids, persistent=draft_ids is not None)
        places_V = torch.full((target.vocab_size,), -1, dtype=torch.int64)
        places_V[ids] = torch.arange(len(ids))
        self.register_buffer("draft_places_V", places_V, persistent=False)
        self.register_buffer("target_head_UD", target.backend.head_rows(ids), persistent=False)
        self._logit_cap = target.backend.spec.logit_cap

    @classmethod
    @abstractmethod
    def configure(cls, target: TargetInfo, changes: Mapping[str, str]) -> Any:
        """The architecture that suits a target, with fields of `Config` changed as written by the user.

        Raises `OptionError` for an unknown field or an impossible value.
        """

    @abstractmethod
    def initialise(self, target: TargetInfo, generator: torch.Generator) -> None:
        """Fill the weights to train from: drawn from `generator`, or copied from the target where that helps."""

    @property
    def most_depths(self) -> int | None:
        """Tokens that can be drafted in a row; None where any number can."""
        return None

    @property
    @abstractmethod
    def needs(self) -> frozenset[Tap]:
        """Taps of the target that inference and training read."""

    @abstractmethod
    def depths(self, batch: TrainingBatch, num_depths: int) -> Iterator[DepthDraft]:
        """Teacher-forced draft logits of depth 0, 1, ...: right tokens are fed, own features where inference does."""

    def as_verified(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch as the model makes it that will verify the drafts: not the one it comes from if that is tuned."""
        return batch

    def part_of(self, name: str) -> str:
        """The part of the module that a weight belongs to, where parts learn at rates of their own."""
        return ""

    def rate_factor(self, part: str, progress: float) -> float:
        """What the learning rate of a part's weights is multiplied by when that share of the run is done."""
        return 1.0

    def writer(self) -> Backend | None:
        """A model that writes answers with the present weights, to be trained on; None: it cannot write alone."""
        return None

    def layout(self, target: TargetInfo) -> Layout:
        """What is written to disk."""
        return Layout(tensors=self.state_dict())

    def loss(self, batch: TrainingBatch, options: LossOptions) -> LossReport:
        """The weighted sum of the depths' losses against the target's laws; see `core.losses.report`.

        Anchors whose target would say a token outside the draft vocabulary are left out. Families with
        further terms (features, ground truth) override this.
        """
        return self.judged(batch, options, self.target_laws(batch))

    def judged(self, batch: TrainingBatch, options: LossOptions, laws: TargetLaws) -> LossReport:
        """The depths' losses against given laws, added up."""
        found = [
            self.depth_loss(batch, depth, draft, options, laws)
            for depth, draft in enumerate(self.depths(batch, options.num_depths))
        ]
        return report(found, geometric_weights(len(found), options.decay))

    def depth_loss(
        self,
        batch: TrainingBatch,
        depth: int,
        draft: DepthDraft,
        options: LossOptions,
        laws: TargetLaws | None = None,
    ) -> DepthLoss:
        """One depth's loss against the target's laws, restricted to the draft vocabulary.

        `laws`: what `target_laws` gives; who asks for several depths makes them once.
        """
        laws = laws or self.target_laws(batch)
        law_of_A = laws.places[draft.anchors + 1 + depth]
        return judged_loss(draft.logits_AU, laws.log_p_RU, law_of_A, loss_named(options.loss))

    @torch.no_grad()
    def target_laws(self, batch: TrainingBatch) -> TargetLaws:
        """The laws of all rows that may judge a draft of any depth, each made once."""
        judged_BL = shift_left(batch.answer_BL, 1)
        in_vocabulary_BL = self.draft_places_V[batch.best_BL] >= 0
        rows = (judged_BL & in_vocabulary_BL).flatten().nonzero().squeeze(-1)
        places = torch.full((batch.tokens_BL.numel(),), -1, dtype=torch.int64)
        places[rows] = torch.arange(len(rows))
        # Laws are not rounded to the type that drafts are computed in: they are what is learnt.
        with torch.autocast(self.target_head_UD.device.type, enabled=False):
            return TargetLaws(log_p_RU=log_probabilities(self.target_logits(batch, rows)), places=places)

    @torch.no_grad()
    def target_logits(self, batch: TrainingBatch, rows: torch.Tensor) -> torch.Tensor:
        """The target's logits [A, U] of flat rows over the draft ids."""
        hidden_AD = batch.taps["last_hidden"].flatten(0, 1)[rows]
        logits_AU = hidden_AD.to(self.target_head_UD.dtype) @ self.target_head_UD.t()
        return logits_AU if self._logit_cap is None else self._logit_cap * torch.tanh(logits_AU / self._logit_cap)


class TrainableDrafter(Drafter):
    """A drafter with weights of its own. `Module`: what is trained, saved and loaded for it."""

    Module: ClassVar[type[DraftModule]]
    directory_option: ClassVar[str] = "path"
    """The option that names a trained directory."""

    @classmethod
    def selection(cls, method: str, directory: Path) -> str:
        """How the drafter in a directory is asked for."""
        return f"{method}:{cls.directory_option}={directory}"


def frequent_ids(counts_V: torch.Tensor, size: int, always: Sequence[int] = ()) -> torch.Tensor:
    """The draft vocabulary: the `size` most frequent tokens, `always` among them, ascending, int64 [size].

    Ties and unseen tokens are taken by the smallest id (EAGLE-3 fills up the same way). Raises
    `OptionError` for a size that the vocabulary does not have.
    """
    if not len(set(always)) <= size <= len(counts_V) or size < 1:
        raise OptionError(
            f"a draft vocabulary of {size} tokens was asked for; allowed: {max(1, len(set(always)))} to {len(counts_V)}"
        )
    ranked_V = counts_V.to(torch.float64).clone()
    ranked_V[list(always)] = float("inf")
    return ranked_V.sort(descending=True, stable=True).indices[:size].sort().values
