"""The weights of a recurrent feature drafter: what training unrolls and what a row runner computes, written once.

Subclassed by EAGLE and multi-token prediction; `drafters.torch_rows` runs the same methods row by row. A true row t
reads the target's features of row t and token x_{t+1}; its output predicts x_{t+2}, and fed back it takes the
features' place in the row below. Invariant: training sees for every row what drafting sees: true rows before it, and
of the unrolled rows its own ones alone (training-time test, EAGLE-3, 2503.01840).

Shape letters: B texts, L rows, D width, F features of a row, U draft vocabulary, A anchors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch

from draftsmith.drafters.base import Tap, TargetInfo
from draftsmith.drafters.draft_layer import DraftLayer, Heads, LayerShape, rotations
from draftsmith.drafters.row_parts import RowParts
from draftsmith.drafters.trainable import DepthDraft, DraftModule, TrainingBatch, shift_left
from draftsmith.drafters.unrolled_attention import DraftingRows, mix_unrolled


class Entry(NamedTuple):
    """Rows as they enter the layer: the residual stream [.., D], and what its projections read [.., I]."""

    residual: torch.Tensor
    normed: torch.Tensor


class RecurrentModule(DraftModule):
    """One decoder layer that lives on its own outputs."""

    layer: DraftLayer
    drafts_with_target_head: ClassVar[bool] = True
    """Whether drafting reads the target's head; training always does."""

    def __init__(self, config: LayerShape, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        super().__init__(config, target, draft_ids)
        self.config: LayerShape = config
        self._embed = target.backend.embed

    @property
    @abstractmethod
    def taps(self) -> tuple[Tap, ...]:
        """The taps a true row reads, in the order in which they stand side by side."""

    @abstractmethod
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The hidden input [.., D] of true rows from their taps side by side [.., F]."""

    @abstractmethod
    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor) -> Entry:
        """Rows from embedded tokens and hidden inputs (features, or what was fed back)."""

    @abstractmethod
    def feedback(self, output: torch.Tensor) -> torch.Tensor:
        """The hidden input [.., D] of the next row from a row's output."""

    @abstractmethod
    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Draft logits [.., U] of rows' outputs."""

    def for_drafting(self) -> None:
        """Go without gradients, and without what only training reads."""
        if not self.drafts_with_target_head:
            self.target_head_UD = self.target_head_UD[:0].clone()
        self.eval().requires_grad_(False)

    @abstractmethod
    def row_parts(self) -> RowParts:
        """The same module as data, for the runner in C++."""

    def target_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's own head over the draft ids: logits [.., U] of final hidden states [.., D]."""
        logits = hidden @ self.target_head_UD.t()
        return logits if self._logit_cap is None else self._logit_cap * torch.tanh(logits / self._logit_cap)

    @property
    def needs(self) -> frozenset[Tap]:
        return frozenset(self.taps)

    @property
    def dtype(self) -> torch.dtype:
        """What the module computes in."""
        return self.layer.post_attention_layernorm.weight.dtype

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [.., D] of tokens."""
        return self._embed(tokens.flatten()).view(*tokens.shape, -1).to(self.layer.post_attention_layernorm.weight)

    def heads(self, entry: Entry, turn: tuple[torch.Tensor, torch.Tensor]) -> Heads:
        """Queries, keys and values of rows."""
        return self.layer.self_attn.heads(entry.normed, *turn)

    def finish(self, entry: Entry, mixed: torch.Tensor) -> torch.Tensor:
        """The rows' output [.., D], not normed."""
        return self.layer.finish(entry.residual, mixed)

    def turn(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotations of rows at positions."""
        cosines, sines = rotations(self.config, positions)
        like = self.layer.post_attention_layernorm.weight
        return cosines.to(like), sines.to(like)

    def features(self, batch: TrainingBatch) -> torch.Tensor:
        """What true rows read [B, L, F]."""
        return torch.cat([batch.taps[tap] for tap in self.taps], dim=-1).to(self.layer.post_attention_layernorm.weight)

    def unrolled(self, batch: TrainingBatch, features: torch.Tensor, num_depths: int) -> Iterator[torch.Tensor]:
        """Outputs [B, L, D] of depth 0, 1, ...: the row of anchor t at depth k reads x_{t+1+k}.

        Only rows that are an anchor at some depth are unrolled, the others' outputs are 0.
        """
        drafting_BL = torch.stack([shift_left(batch.answer_BL, 2 + depth) for depth in range(num_depths)]).any(dim=0)
        rows = DraftingRows.of(drafting_BL)
        embedded_BLD = self.embed(batch.tokens_BL)
        attention = self.layer.self_attn
        true = self.enter(shift_left(embedded_BLD, 1), self.fuse(features))
        keys_BLJK, values_BLJK = attention.keys_and_values(true.normed, *self.turn(torch.arange(drafting_BL.shape[1])))
        entry = Entry(*(part.flatten(0, 1).index_select(0, rows.flat_N) for part in true))
        embedded_XD, last = embedded_BLD.flatten(0, 1), embedded_BLD.shape[0] * embedded_BLD.shape[1] - 1
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for depth in range(num_depths):
            turn = self.turn(rows.places_N + depth)
            queries_NHK = attention.queries(entry.normed, *turn)
            if depth:
                own.append(attention.keys_and_values(entry.normed, *turn))
            output_ND = self.finish(entry, mix_unrolled(queries_NHK, keys_BLJK, values_BLJK, own, rows))
            yield (
                output_ND.new_zeros(last + 1, output_ND.shape[1])
                .index_copy(0, rows.flat_N, output_ND)
                .view_as(embedded_BLD)
            )
            # Where a text has ended any token may stand: its rows are no anchors from here on.
            following = embedded_XD.index_select(0, (rows.flat_N + 2 + depth).clamp(max=last))
            entry = self.enter(following, self.feedback(output_ND))

    def depths(self, batch: TrainingBatch, num_depths: int) -> Iterator[DepthDraft]:
        for depth, output in enumerate(self.unrolled(batch, self.features(batch), num_depths)):
            yield self.draft_at(batch, depth, output)

    def draft_at(self, batch: TrainingBatch, depth: int, output: torch.Tensor) -> DepthDraft:
        """The draft logits of a depth's anchors."""
        anchors = batch.anchors(depth)
        return DepthDraft(anchors=anchors, logits_AU=self.logits(output.flatten(0, 1).index_select(0, anchors)))
