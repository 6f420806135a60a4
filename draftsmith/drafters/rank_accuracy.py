"""How often a draft module's candidate of each rank is right, depth by depth: what static trees are built from.

Called by the trainer at validation; the result is stored with the checkpoint under `KEY` and read by drafters.
Invariant: every anchor of the texts counts once per depth, those included whose right token cannot be drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from draftsmith.drafters.trainable import DraftModule, TrainingBatch
from draftsmith.errors import ModelFileError

KEY = "rank_accuracies"
"""Name of the table in a checkpoint's `about`."""


@torch.no_grad()
def rank_accuracies(
    module: DraftModule, batches: Iterable[TrainingBatch], num_depths: int, num_ranks: int
) -> list[list[float]]:
    """`[depth][rank]`: share of anchors at which the candidate of that rank is the target's likeliest token.

    Right tokens are fed, so a depth's shares hold given that everything before it was right. Depths the module
    does not have are left out, and so are ranks beyond its vocabulary.
    """
    num_ranks = min(num_ranks, len(module.draft_ids))
    hits = torch.zeros(num_depths, num_ranks, dtype=torch.int64)
    anchors = torch.zeros(num_depths, dtype=torch.int64)
    depths_seen = 0
    for batch in batches:
        for depth, draft in enumerate(module.depths(batch, num_depths)):
            right_A = module.draft_places_V[batch.best_BL.flatten()[draft.anchors + 1 + depth]]
            ranked_AR = draft.logits_AU.topk(num_ranks, dim=-1).indices
            hits[depth] += (ranked_AR == right_A[:, None]).sum(dim=0).cpu()
            anchors[depth] += len(right_A)
            depths_seen = max(depths_seen, depth + 1)
    shares = hits / anchors.clamp_min(1)[:, None]
    found: list[list[float]] = shares[:depths_seen].tolist()
    return found


def read_accuracies(about: Mapping[str, Any], where: str) -> list[list[float]] | None:
    """The table stored with a checkpoint, None if there is none. Raises `ModelFileError` for something else."""
    table = about.get(KEY)
    if table is None:
        return None
    rows = table if isinstance(table, list) else [None]
    if not all(isinstance(row, list) and row and all(_is_share(item) for item in row) for row in rows):
        raise ModelFileError(f"{where}: key '{KEY}' must be one list of numbers from 0 to 1 per depth")
    return [[float(item) for item in row] for row in rows]


def _is_share(item: object) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool) and 0 <= item <= 1
