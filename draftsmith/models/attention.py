"""Attention of packed ragged rows over contiguous caches, planned once per step.

Called by the reference backend: `plan_group` once per sequence and step, `attend` once per layer.
Heads of one key/value group are folded into rows, so keys and values are never repeated. Invariant: a
row sees the committed rows its window reaches, its ancestors among the new rows, and itself.

Shape letters: N packed rows, n rows of one group, H query heads, J kv heads, K head size, C visible rows
(committed and new).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from draftsmith.models.layer_state import LayerState
from draftsmith.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class KindPlan:
    """One kind of layer for one group; tuples have one entry per layer of the kind, all views of the cache.

    `keys` and `values` [1, J, C, K] are what the rows see, `slots` [2, J, n, K] where new rows go, `mask`
    [n * H/J, C] is added to the scores (None: everything is seen).
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The rows `start .. start + num_rows` of the packed matrix, one sequence's, and its kinds of layers."""

    start: int
    num_rows: int
    kinds: tuple[KindPlan, ...]


def row_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each row: 0 where the parent is -1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def plan_group(
    spec: DecoderSpec,
    states: Sequence[LayerState],
    windows: Sequence[int | None],
    committed: int,
    parents: Sequence[int],
    start: int,
) -> GroupPlan:
    """Views and masks for the rows that follow `committed` rows, hanging below each other as `parents` say."""
    kinds = []
    for state, window in zip(states, windows, strict=True):
        oldest = 0 if window is None else max(0, committed - window + 1)
        end = committed + len(parents)
        seen = state.slots(oldest, end).unsqueeze(1)
        mask = None
        if len(parents) > 1:
            mask = _mask(parents, committed - oldest, window, seen).repeat_interleave(spec.group_size, dim=0)
        kinds.append(
            KindPlan(
                keys=seen[:, :, 0].unbind(0),
                values=seen[:, :, 1].unbind(0),
                slots=state.slots(committed, end).unbind(0),
                mask=mask,
            )
        )
    return GroupPlan(start, len(parents), tuple(kinds))


def _mask(parents: Sequence[int], context: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """[n, context + n] with 0 where a row sees and -inf where it does not, in the dtype of `like`."""
    num_rows = len(parents)
    mask = torch.zeros((num_rows, context + num_rows), dtype=like.dtype, device=like.device)
    if all(parent == row - 1 for row, parent in enumerate(parents)):
        mask[:, context:] = torch.full_like(mask[:, context:], -torch.inf).triu_(1)
        depths = np.arange(num_rows)
    else:
        sees = np.zeros((num_rows, num_rows), dtype=bool)
        for row, parent in enumerate(parents):
            if parent >= 0:
                sees[row] = sees[parent]
            sees[row, row] = True
        mask[:, context:].masked_fill_(torch.from_numpy(~sees).to(like.device), -torch.inf)
        depths = np.array(row_depths(parents))
    if window is not None and context + int(depths.max()) >= window:
        positions = np.concatenate([np.arange(context), context + depths])
        too_old = positions[None, :] <= context + depths[:, None] - window
        mask.masked_fill_(torch.from_numpy(too_old).to(like.device), -torch.inf)
    return mask


def attend(spec: DecoderSpec, packed: torch.Tensor, groups: Sequence[GroupPlan], kind: int, place: int) -> torch.Tensor:
    """Write all new keys and values and attend: [N, H * K], columns over [H / J, J, K].

    `packed` [N, (H + 2 J) K] holds rotated queries, rotated keys and values of all rows. The softmax is
    computed in float32 or better.
    """
    num_rows, row = packed.shape[0], packed.stride(0)
    group_size, num_kv_heads, head_dim = spec.group_size, spec.num_kv_heads, spec.head_dim
    width = num_kv_heads * head_dim
    # Strided views of the packed rows, one operation each: [J, N, H / J, K] and, per group, [2, J, n, K].
    queries = packed.as_strided(
        (num_kv_heads, num_rows, group_size, head_dim), (group_size * head_dim, row, head_dim, 1)
    )
    folded = queries.reshape(1, num_kv_heads, num_rows * group_size, head_dim)
    parts = []
    for group in groups:
        plan, own = group.kinds[kind], folded
        first = group.start * row + group_size * width
        new = packed.as_strided((2, num_kv_heads, group.num_rows, head_dim), (width, head_dim, row, 1), first)
        plan.slots[place].copy_(new)
        if len(groups) > 1:
            own = folded.narrow(2, group.start * group_size, group.num_rows * group_size)
        if spec.attention_cap is None:
            mixed = F.scaled_dot_product_attention(
                own, plan.keys[place], plan.values[place], attn_mask=plan.mask, scale=spec.attention_scale
            )
        else:
            mixed = _capped_attention(spec, own, plan, place)
        # PyTorch's kernels leave [1, n * H/J, J, K] in memory: on their path nothing is copied below.
        parts.append(mixed.transpose(1, 2))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return joined.reshape(num_rows, group_size * width)


def _capped_attention(spec: DecoderSpec, folded: torch.Tensor, plan: KindPlan, place: int) -> torch.Tensor:
    """Attention whose scores pass through cap * tanh(score / cap) before the mask (Gemma 2, 2408.00118)."""
    assert spec.attention_cap is not None
    scores = torch.matmul(folded, plan.keys[place].transpose(-1, -2))
    scores = scores.mul_(spec.attention_scale / spec.attention_cap).tanh_().mul_(spec.attention_cap)
    if plan.mask is not None:
        scores.add_(plan.mask)
    exact = torch.promote_types(scores.dtype, torch.float32)
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=exact).to(scores.dtype), plan.values[place])
