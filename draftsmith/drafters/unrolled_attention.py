"""Attention of unrolled rows in training: every drafting row sees true rows up to itself and its own unrolled ones.

Used by `recurrent_module`. Only rows that draft something have queries, so prompts and padding cost no more than their
keys and values. Forward and backward are written out: scores pass through memory a few times instead of twenty.
Invariant: the same numbers as one softmax over true keys and own keys together (training-time test, EAGLE-3).

Shape letters: N drafting rows, B texts, L rows of a text, R drafting rows of a text, J kv heads, G query heads of each,
H = J * G, K head size, S own steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class DraftingRows:
    """Which rows draft. `flat_N`: rows of [B * L], ascending; `slots_N`: their places in [B * R]; `hidden_BRL`: true
    rows that a drafting row may not see.
    """

    flat_N: torch.Tensor
    slots_N: torch.Tensor
    hidden_BRL: torch.Tensor

    @classmethod
    def of(cls, drafting_BL: torch.Tensor) -> DraftingRows:
        """From a mask."""
        batch, length = drafting_BL.shape
        counts_B = drafting_BL.sum(dim=1)
        most = max(1, int(counts_B.max())) if batch else 1
        flat_N = drafting_BL.flatten().nonzero().squeeze(-1)
        texts_N = flat_N.div(length, rounding_mode="floor") if length else flat_N
        before_N = (counts_B.cumsum(0) - counts_B)[texts_N]
        slots_N = texts_N * most + torch.arange(len(flat_N), device=flat_N.device) - before_N
        # Slots that stand for no row see the first true row, so that nothing is divided by 0.
        places = flat_N.new_zeros(batch * most)
        places[slots_N] = flat_N - texts_N * length
        hidden_BRL = torch.arange(length, device=flat_N.device) > places.view(batch, most, 1)
        return cls(flat_N=flat_N, slots_N=slots_N, hidden_BRL=hidden_BRL)

    @property
    def places_N(self) -> torch.Tensor:
        """Positions of the rows in their texts."""
        return self.flat_N % self.hidden_BRL.shape[2]


def mix_unrolled(
    queries_NHK: torch.Tensor,
    keys_BLJK: torch.Tensor,
    values_BLJK: torch.Tensor,
    own: list[tuple[torch.Tensor, torch.Tensor]],
    rows: DraftingRows,
) -> torch.Tensor:
    """Mixed values [N, H, K]. `keys_BLJK`, `values_BLJK`: of all true rows; `own`: keys and values [N, J, K] of the
    rows' own steps, the present one included.
    """
    shape = (len(queries_NHK), 0, *keys_BLJK.shape[2:])
    keys_NSJK, values_NSJK = (
        torch.stack([step[part] for step in own], dim=1) if own else queries_NHK.new_zeros(shape) for part in (0, 1)
    )
    mixed: torch.Tensor = _Mix.apply(queries_NHK, keys_BLJK, values_BLJK, keys_NSJK, values_NSJK, rows)
    return mixed


class _Mix(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(
        ctx: Any,
        queries_NHK: torch.Tensor,
        keys_BLJK: torch.Tensor,
        values_BLJK: torch.Tensor,
        own_keys_NSJK: torch.Tensor,
        own_values_NSJK: torch.Tensor,
        rows: DraftingRows,
    ) -> torch.Tensor:
        layout = _Layout(rows, keys_BLJK.shape, queries_NHK.shape[1])
        queries_NJGK = queries_NHK.unflatten(1, (layout.num_kv_heads, -1)) * queries_NHK.shape[-1] ** -0.5
        queries = layout.padded(queries_NJGK)
        keys, values = layout.by_head(keys_BLJK), layout.by_head(values_BLJK)
        weights = torch.bmm(queries, keys.transpose(1, 2))
        layout.hide(weights)
        own_NSJG = torch.einsum("njgk,nsjk->nsjg", queries_NJGK, own_keys_NSJK)
        top_NJG = layout.packed(weights.amax(dim=-1, keepdim=True)).squeeze(-1)
        if own_NSJG.shape[1]:
            top_NJG = torch.maximum(top_NJG, own_NSJG.amax(dim=1))
        weights.sub_(layout.padded(top_NJG.unsqueeze(-1))).exp_()
        own_NSJG = (own_NSJG - top_NJG.unsqueeze(1)).exp_()
        total_NJG = layout.packed(weights.sum(dim=-1, keepdim=True)).squeeze(-1) + own_NSJG.sum(dim=1)
        weights.mul_(layout.padded(1 / total_NJG.unsqueeze(-1)))
        own_NSJG /= total_NJG.unsqueeze(1)
        mixed_NJGK = layout.packed(torch.bmm(weights, values))
        mixed_NJGK = mixed_NJGK + torch.einsum("nsjg,nsjk->njgk", own_NSJG, own_values_NSJK)
        ctx.layout = layout
        ctx.save_for_backward(
            queries_NJGK, queries, keys, values, own_keys_NSJK, own_values_NSJK, weights, own_NSJG, mixed_NJGK
        )
        return mixed_NJGK.flatten(1, 2)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *from_above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layout: _Layout = ctx.layout
        queries_NJGK, queries, keys, values, own_keys_NSJK, own_values_NSJK, weights, own_NSJG, mixed_NJGK = (
            ctx.saved_tensors
        )
        above_NJGK = from_above[0].unflatten(1, (layout.num_kv_heads, -1))
        above = layout.padded(above_NJGK)
        centre_NJG = (above_NJGK * mixed_NJGK).sum(dim=-1)
        to_values = torch.bmm(weights.transpose(1, 2), above)
        scores = torch.bmm(above, values.transpose(1, 2))
        scores.sub_(layout.padded(centre_NJG.unsqueeze(-1))).mul_(weights)
        own_above_NSJG = torch.einsum("njgk,nsjk->nsjg", above_NJGK, own_values_NSJK)
        own_scores_NSJG = own_NSJG * (own_above_NSJG - centre_NJG.unsqueeze(1))
        to_queries_NJGK = layout.packed(torch.bmm(scores, keys))
        to_queries_NJGK = to_queries_NJGK + torch.einsum("nsjg,nsjk->njgk", own_scores_NSJG, own_keys_NSJK)
        return (
            to_queries_NJGK.flatten(1, 2) * queries_NJGK.shape[-1] ** -0.5,
            layout.by_row(torch.bmm(scores.transpose(1, 2), queries)),
            layout.by_row(to_values),
            torch.einsum("nsjg,njgk->nsjk", own_scores_NSJG, queries_NJGK),
            torch.einsum("nsjg,njgk->nsjk", own_NSJG, above_NJGK),
            None,
        )


class _Layout:
    """Between packed rows [N, J, G, ..] and one matrix per text and kv head [B * J, R * G, ..]."""

    def __init__(self, rows: DraftingRows, keys_shape: torch.Size, num_heads: int) -> None:
        self._rows = rows
        self._batch, self._length, self.num_kv_heads, _ = keys_shape
        self._most = rows.hidden_BRL.shape[1]
        self._group = num_heads // self.num_kv_heads

    def padded(self, packed_NJGX: torch.Tensor) -> torch.Tensor:
        """[N, J, G, X] -> [B * J, R * G, X]; 0 where a text has fewer rows."""
        slots = packed_NJGX.new_zeros(self._batch * self._most, *packed_NJGX.shape[1:])
        slots.index_copy_(0, self._rows.slots_N, packed_NJGX)
        by_head = slots.unflatten(0, (self._batch, self._most)).transpose(1, 2)
        return by_head.reshape(self._batch * self.num_kv_heads, self._most * self._group, -1)

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        """[B * J, R * G, X] -> [N, J, G, X]."""
        by_head = padded.view(self._batch, self.num_kv_heads, self._most, self._group, -1).transpose(1, 2)
        return by_head.flatten(0, 1).index_select(0, self._rows.slots_N)

    def by_head(self, rows_BLJK: torch.Tensor) -> torch.Tensor:
        """[B, L, J, K] -> [B * J, L, K]."""
        return rows_BLJK.transpose(1, 2).flatten(0, 1).contiguous()

    def by_row(self, by_head: torch.Tensor) -> torch.Tensor:
        """[B * J, L, K] -> [B, L, J, K]."""
        return by_head.unflatten(0, (self._batch, self.num_kv_heads)).transpose(1, 2)

    def hide(self, scores: torch.Tensor) -> None:
        """Minus infinity, in place, where a row may not look."""
        by_row = scores.view(self._batch, self.num_kv_heads, self._most, self._group, -1)
        by_row.masked_fill_(self._rows.hidden_BRL[:, None, :, None, :], -torch.inf)
