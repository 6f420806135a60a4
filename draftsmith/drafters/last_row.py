"""A draft layer over the target's rows of which only the last row's output is wanted.

Used by head families with attention (Hydra++'s prefix layer, Gloeckle's heads). Training runs whole texts; inference
keeps keys and values of every row and asks for the output of the last one alone. Invariant: both give the same.

Shape letters: B texts, L rows, R rows, S sequences, D width, H query heads, J key heads, G queries per key head,
K head size, E = 2 J K numbers kept of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from draftsmith.drafters.draft_layer import DraftLayer, LayerShape, RMSNorm, fill_normal, mix_causal, rotate
from draftsmith.models.rope import inverse_frequencies


class LastRowLayer(nn.Module):
    """A decoder layer of Llama's kind, norm before attention included."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.layer = DraftLayer(shape, shape.width)
        self._frequencies = inverse_frequencies(shape.rotary, shape.head_dim)

    @staticmethod
    def entries_of(shape: LayerShape) -> int:
        """E of a layer of this shape."""
        return 2 * shape.num_kv_heads * shape.head_dim

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Small normal weights, and outputs of zero: the layer begins as the identity."""
        fill_normal(self, generator, 0.02)
        self.layer.self_attn.o_proj.weight.zero_()
        self.layer.mlp.down_proj.weight.zero_()

    def turn(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [R, K/2] of positions; angles are formed in float32, as everywhere."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies.to(positions.device)
        scale = self.shape.rotary.attention_factor
        return (angles.cos() * scale).to(like.dtype), (angles.sin() * scale).to(like.dtype)

    def forward(self, hidden_BLD: torch.Tensor) -> torch.Tensor:
        """Outputs [B, L, D] of whole texts, every row seeing itself and those before it."""
        turn = self.turn(torch.arange(hidden_BLD.shape[1], device=hidden_BLD.device), hidden_BLD)
        heads = self.layer.self_attn.heads(self.input_layernorm(hidden_BLD), *turn)
        return self.layer.finish(hidden_BLD, mix_causal(heads))

    def entries(self, hidden_RD: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Rotated keys and values [R, E] of rows at these positions."""
        attention, size = self.layer.self_attn, self.shape.head_dim
        x = self.input_layernorm(hidden_RD)
        keys = attention.k_proj(x).unflatten(-1, (-1, size))
        if attention.k_norm is not None:
            keys = attention.k_norm(keys)
        keys = rotate(keys, *self.turn(positions_R, hidden_RD))
        return torch.cat((keys.flatten(-2), attention.v_proj(x)), dim=-1)

    def last(self, hidden_SD: torch.Tensor, entries: Sequence[torch.Tensor]) -> torch.Tensor:
        """Output [S, D] of each sequence's last row; `entries` [rows, E] hold all its rows, the last included."""
        attention, shape = self.layer.self_attn, self.shape
        queries = attention.q_proj(self.input_layernorm(hidden_SD)).unflatten(-1, (-1, shape.head_dim))
        if attention.q_norm is not None:
            queries = attention.q_norm(queries)
        positions = torch.tensor([len(rows) - 1 for rows in entries], device=hidden_SD.device)
        queries = rotate(queries, *self.turn(positions, hidden_SD)) * shape.head_dim**-0.5
        mixed = [self._mix(queries_HK, rows) for queries_HK, rows in zip(queries, entries, strict=True)]
        return self.layer.finish(hidden_SD, torch.stack(mixed))

    def _mix(self, queries_HK: torch.Tensor, rows_RE: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        both = rows_RE.unflatten(-1, (2, shape.num_kv_heads, shape.head_dim))
        queries_JGK = queries_HK.view(shape.num_kv_heads, -1, shape.head_dim)
        weights_JGR = torch.softmax(queries_JGK @ both[:, 0].permute(1, 2, 0), dim=-1)
        return (weights_JGR @ both[:, 1].transpose(0, 1)).view_as(queries_HK)
