"""What a recurrent feature drafter is made of, as data: the weights and switches that the C++ row runner takes.

A drafter's module describes itself with `RowParts`; `drafters.native_rows` packs the description. Invariant: a row
computed from these parts is the row that the module computes.

Shape letters: D width, E width of the target's embedding, F features of a true row, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from draftsmith.drafters.draft_layer import DraftLayer, LayerShape


@dataclass(frozen=True, kw_only=True)
class RowParts:
    """A row has the embedding e [E] of its token and a feature h [D]: made of the target's features for a true row,
    fed back by its parent for a speculative one. What is None is left out.

    `reduce`: h of a true row from its F features; else they are h. `tap_norms`: norms of the features' stretches of E
    before that. `embedding_norm`, `feature_norm`: of e and h, before they stand side by side ([e; h], or [h; e] with
    `is_feature_first`). `fuse`: the stream x from these two, which attention reads after `attention_norm` and is added
    to; without it attention reads both, and is added to h (the normed one with `norms_residual`). `final_norm`: before
    the head, and with `feeds_normed` also before the layer's output is fed back. `head_UD`: None for the target's own
    rows, whose logits are capped by `logit_cap`. `draft_ids`: int64 [U], the token of each logit.
    """

    shape: LayerShape
    layer: DraftLayer
    draft_ids: torch.Tensor
    feature_width: int
    reduce: nn.Linear | None = None
    fuse: nn.Linear | None = None
    tap_norms: torch.Tensor | None = None
    embedding_norm: torch.Tensor | None = None
    feature_norm: torch.Tensor | None = None
    attention_norm: torch.Tensor | None = None
    final_norm: torch.Tensor | None = None
    head_UD: torch.Tensor | None = None
    logit_cap: float | None = None
    is_feature_first: bool = False
    norms_residual: bool = False
    feeds_normed: bool = False
