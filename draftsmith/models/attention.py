"""Attention of packed ragged rows over contiguous caches, planned once per step.

Called by the reference backend: `plan_group` once per sequence and step, `attend` once per layer.
Heads of one key/value group are folded into rows, so keys and values are never repeated. Invariant: a
row sees the committed rows its window reaches, its ancestors among the new rows, and itself.

On the CPU in float32 and float64 a row's result moreover does not depend on the rows scored with it, nor
on where its ancestors stand among them (`_ordered`); elsewhere PyTorch's fused kernel is used.

Shape letters: N packed rows, n rows of one group, H query heads, J kv heads, K head size, C visible rows
(committed and new), M = n * H / J folded rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from draftsmith.models.attention_mask import is_chain, row_depths, visibility
from draftsmith.models.layer_state import LayerState
from draftsmith.models.spec import DecoderSpec

VALUE_BLOCK = 256
"""Positions summed by one product. BLAS kernels sum a product of 256 terms in order, whatever the number of
rows; longer ones they may split (MKL: from 384), and where depends on the length."""

FEW_TERMS = 8
"""PyTorch sums products of fewer terms than this by itself, not by BLAS, when there are few rows too."""

FEW_ROWS = 3
"""Fewer rows than this against transposed keys take BLAS kernels that sum in another order."""

ROW_BLOCK = 128
"""Most new rows of a group handled at once: bounds the scores in memory, and rows see none behind them."""

Block: TypeAlias = tuple[int, int, torch.Tensor | None]
"""Visible rows start..end whose positions share a block, and a 0/1 mask when some between them do not."""


@dataclass(frozen=True, slots=True)
class KindPlan:
    """One kind of layer for one group; tuples have one entry per layer of the kind, all views of the cache.

    `keys` and `values` [J, C, K] are what the rows see, `slots` [2, J, n, K] where new rows go. `mask`
    [M, X] is added to the scores of the last X visible rows (None: everything is seen). `blocks` cover
    the visible rows in the order of their positions.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The rows `start .. start + num_rows` of the packed matrix, one sequence's, and its kinds of layers."""

    start: int
    num_rows: int
    kinds: tuple[KindPlan, ...]


def is_ordered(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention of this model runs in `_ordered`, whose order of sums depends on the row alone."""
    return spec.attention_cap is not None or (device.type == "cpu" and dtype != torch.bfloat16)


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
        seen = state.slots(oldest, end)
        kinds.append(
            KindPlan(
                keys=seen[:, 0].unbind(0),
                values=seen[:, 1].unbind(0),
                slots=state.slots(committed, end).unbind(0),
                mask=_mask(spec, parents, committed - oldest, window, seen),
                blocks=tuple(position_blocks(oldest, committed, parents, seen)),
            )
        )
    return GroupPlan(start, len(parents), tuple(kinds))


def _mask(
    spec: DecoderSpec, parents: Sequence[int], context: int, window: int | None, like: torch.Tensor
) -> torch.Tensor | None:
    if len(parents) == 1:
        return None
    folded = visibility(parents, context, window).repeat_interleave(spec.group_size, dim=0)
    # The fused kernel wants a mask over all visible rows.
    width = folded.shape[1] if is_ordered(spec, like.dtype, like.device) else context + len(parents)
    mask = torch.zeros((len(folded), width), dtype=like.dtype)
    mask[:, width - folded.shape[1] :].masked_fill_(~folded, -torch.inf)
    return mask.to(like.device)


def position_blocks(oldest: int, committed: int, parents: Sequence[int], like: torch.Tensor) -> list[Block]:
    """The visible rows `oldest ..` by blocks of `VALUE_BLOCK` positions, so that a row's block never moves.

    A new row's position is `committed` plus its depth: in a tree across a block's edge, rows of both blocks
    lie mixed, and each block's product skips the other's by a mask in the type of `like`.
    """
    context, num_rows = committed - oldest, len(parents)
    total = context + num_rows
    edges = range((oldest // VALUE_BLOCK + 1) * VALUE_BLOCK - oldest, total, VALUE_BLOCK)
    if is_chain(parents) or not edges or edges[-1] <= context:
        starts = [0, *edges]
        return [(start, end, None) for start, end in zip(starts, [*edges, total], strict=True)]
    columns = torch.cat([torch.arange(context), context + torch.tensor(row_depths(parents))])
    numbers = (columns + oldest) // VALUE_BLOCK
    blocks: list[Block] = []
    for number in numbers.unique().tolist():
        inside = numbers == number
        places = inside.nonzero()
        start, end = int(places[0]), int(places[-1]) + 1
        blocks.append((start, end, inside[start:end].to(like.device, like.dtype)))
    return blocks


def attend(spec: DecoderSpec, packed: torch.Tensor, groups: Sequence[GroupPlan], kind: int, place: int) -> torch.Tensor:
    """Write all new keys and values and attend: [N, H * K].

    `packed` [N, (H + 2 J) K] holds rotated and scaled queries, rotated keys, and values of all rows. The
    softmax is computed in float32 or better.
    """
    num_rows, row = packed.shape[0], packed.stride(0)
    group_size, num_kv_heads, head_dim = spec.group_size, spec.num_kv_heads, spec.head_dim
    width = num_kv_heads * head_dim
    # Strided views of the packed rows, one operation each: [J, N, H / J, K] and, per group, [2, J, n, K].
    queries = packed.as_strided(
        (num_kv_heads, num_rows, group_size, head_dim), (group_size * head_dim, row, head_dim, 1)
    )
    folded = queries.reshape(num_kv_heads, num_rows * group_size, head_dim)
    ordered = is_ordered(spec, packed.dtype, packed.device)
    parts = []
    for group in groups:
        plan, own = group.kinds[kind], folded
        first = group.start * row + group_size * width
        new = packed.as_strided((2, num_kv_heads, group.num_rows, head_dim), (width, head_dim, row, 1), first)
        plan.slots[place].copy_(new)
        if len(groups) > 1:
            own = folded.narrow(1, group.start * group_size, group.num_rows * group_size)
        parts.append(_in_row_blocks(spec, own, plan, place) if ordered else _fused(own, plan, place))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if num_rows == 1:
        return joined.reshape(1, group_size * width)
    return joined.unflatten(1, (num_rows, group_size)).transpose(0, 1).reshape(num_rows, -1)


def _fused(queries: torch.Tensor, plan: KindPlan, place: int) -> torch.Tensor:
    """PyTorch's own attention [J, M, K]."""
    keys, values = plan.keys[place], plan.values[place]
    return F.scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=plan.mask, scale=1.0)[0]


def _in_row_blocks(spec: DecoderSpec, queries: torch.Tensor, plan: KindPlan, place: int) -> torch.Tensor:
    """`_ordered` for any number of rows [J, M, K]."""
    keys, values, mask, group_size = plan.keys[place], plan.values[place], plan.mask, spec.group_size
    num_rows = queries.shape[1] // group_size
    if num_rows <= ROW_BLOCK:
        return _ordered(spec.attention_cap, queries, keys, values, mask, plan.blocks)
    assert mask is not None
    parts = []
    for start in range(0, num_rows, ROW_BLOCK):
        end = min(start + ROW_BLOCK, num_rows)
        num_visible, unseen = keys.shape[1] - (num_rows - end), num_rows - end
        rows = slice(start * group_size, end * group_size)
        part = _ordered(
            spec.attention_cap,
            queries[:, rows],
            keys[:, :num_visible],
            values[:, :num_visible],
            mask[rows, : mask.shape[1] - unseen],
            plan.blocks,
        )
        parts.append(part)
    return torch.cat(parts, dim=1)


def _ordered(
    cap: float | None,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: Sequence[Block],
) -> torch.Tensor:
    """Attention [J, M, K] whose sums run over the visible rows in order, in blocks fixed by position.

    A row that is not seen adds an exact zero, so a node of a tree gets the bits it gets in a chain. The
    softmax's denominator is summed in float64, where its order is lost in rounding to float32. With a cap,
    scores pass through cap * tanh(score / cap) before the mask (Gemma 2, 2408.00118).
    """
    num_folded = queries.shape[1]
    # Very few rows or terms would take kernels that sum in another way: copies of the rows avoid them, and
    # zeros that nobody sees.
    if keys.shape[1] < FEW_TERMS:
        mask = queries.new_zeros(num_folded, keys.shape[1]) if mask is None else mask
        keys, values, mask = _filled_up(keys, values, mask)
    copies = -(-FEW_ROWS // num_folded)
    if copies > 1:
        queries = torch.cat([queries] * copies, dim=1)
        mask = None if mask is None else torch.cat([mask] * copies)
    scores = torch.bmm(queries, keys.transpose(1, 2))
    if cap is not None:
        scores.div_(cap).tanh_().mul_(cap)
    if mask is not None:
        scores.narrow(2, keys.shape[1] - mask.shape[1], mask.shape[1]).add_(mask)
    exact = scores.float() if scores.dtype == torch.bfloat16 else scores
    weights = exact.sub_(exact.amax(dim=-1, keepdim=True)).exp_()
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64).to(values.dtype)
    mixed = _weighted_sum(weights.to(values.dtype), values, blocks).div_(total)
    return mixed if copies == 1 else mixed[:, :num_folded]


def _filled_up(
    keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values made up to `FEW_TERMS` rows by zeros, and a mask over all of them that hides those."""
    num_visible = keys.shape[1]
    missing = FEW_TERMS - num_visible
    seen = F.pad(mask, (num_visible - mask.shape[1], 0))
    return (
        F.pad(keys, (0, 0, 0, missing)),
        F.pad(values, (0, 0, 0, missing)),
        F.pad(seen, (0, missing), value=-torch.inf),
    )


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """[J, M, C] times [J, C, K], summed over C block by block."""
    num_visible = values.shape[1]
    if len(blocks) == 1:
        return torch.bmm(weights, values)
    mixed = None
    for start, end, inside in blocks:
        if start >= num_visible:
            break
        end = min(end, num_visible)
        block = weights[:, :, start:end]
        if inside is not None:
            block = block * inside[: end - start]
        if end - start < FEW_TERMS <= num_visible:
            # Zero weights for neighbours make up the number.
            first = min(start, num_visible - FEW_TERMS)
            block = F.pad(block, (start - first, first + FEW_TERMS - end))
            start, end = first, first + FEW_TERMS
        terms = values[:, start:end]
        mixed = torch.bmm(block, terms) if mixed is None else torch.baddbmm(mixed, block, terms)
    assert mixed is not None
    return mixed
