"""One decoder layer in PyTorch, for drafters that train it: weights, rotary positions, attention over own rows.

Used by the modules of feature and multi-token drafters, in training and as their reference inference. Tensor
names are those of Llama checkpoints. Invariant: projections see rows alone, `mix` alone looks from row to row.

Shape letters: B texts, L rows, I input width, D width, H query heads, J key heads, K head size, S steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from draftsmith.errors import OptionError
from draftsmith.models.rope import cosines_and_sines, inverse_frequencies
from draftsmith.models.spec import DecoderSpec, RopeSpec


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of a draft layer; plain values that a checkpoint's config stores."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "num_heads", "num_kv_heads", "head_dim", "mlp_width"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise OptionError(
                f"{self.num_heads} heads of {self.head_dim} over {self.num_kv_heads} key heads: heads must be a "
                "multiple of key heads, and their size even"
            )

    @classmethod
    def like(cls, spec: DecoderSpec) -> LayerShape:
        """A layer of the target's own proportions."""
        return cls(
            width=spec.width,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            mlp_width=spec.mlp_width,
            norm_eps=spec.norm_eps,
            rope_theta=spec.rope.theta,
        )


class Heads(NamedTuple):
    """Rotated queries [B, L, H, K], rotated keys and values [B, L, J, K]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in at least float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections and rotation of grouped-query attention over `input_width` inputs."""

    def __init__(self, shape: LayerShape, input_width: int) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_width, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(input_width, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(input_width, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.width, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None

    def heads(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> Heads:
        """Queries, keys and values of rows [B, L, I] at rotations [L, K/2] (or [B, L, K/2])."""
        size = self.shape.head_dim
        queries = self.q_proj(x).unflatten(-1, (-1, size))
        keys = self.k_proj(x).unflatten(-1, (-1, size))
        values = self.v_proj(x).unflatten(-1, (-1, size))
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return Heads(rotate(queries, cosines, sines), rotate(keys, cosines, sines), values)


class FeedForward(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """The parts of a layer that every family shares; norms before attention are the families' own."""

    def __init__(self, shape: LayerShape, input_width: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, input_width)
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)

    def finish(self, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Output [B, L, D] from the residual stream and what attention has mixed [B, L, H, K]."""
        x = residual + self.self_attn.o_proj(mixed.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))

    def initialise(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Small normal weights; biases 0 and norms 1."""
        fill_normal(self, generator, std)


def rotations(shape: LayerShape, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [..., K/2] of whole positions."""
    frequencies = inverse_frequencies(RopeSpec(theta=shape.rope_theta), shape.head_dim)
    longest = int(positions.max()) + 1 if positions.numel() else 0
    cosines, sines = cosines_and_sines(frequencies, 1.0, longest)
    return cosines[positions].to(torch.float32), sines[positions].to(torch.float32)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions: [.., L, H, K] with the pair (i, i + K/2), as Llama checkpoints store heads."""
    left, right = x.chunk(2, dim=-1)
    cosines, sines = cosines.unsqueeze(-2).to(x.dtype), sines.unsqueeze(-2).to(x.dtype)
    return torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)


def mix_causal(now: Heads, earlier: list[Heads]) -> torch.Tensor:
    """Attention of one unrolled step in training [B, L, H, K] (training-time test, EAGLE-3).

    `earlier[0]` are the rows of step 0, seen causally (`now` itself in step 0, with `earlier` empty); of the steps
    between and of `now` each row sees its own alone. One softmax over all of them.
    """
    group = now.queries.shape[2] // now.keys.shape[2]
    base = earlier[0] if earlier else now
    queries = now.queries.transpose(1, 2)  # [B, H, L, K]
    if not earlier:
        return F.scaled_dot_product_attention(
            queries, spread(base.keys, group), spread(base.values, group), is_causal=True
        ).transpose(1, 2)
    scale = queries.shape[-1] ** -0.5
    length = queries.shape[2]
    scores = torch.matmul(queries * scale, spread(base.keys, group).transpose(-1, -2))
    hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    own = [*earlier[1:], now]
    own_scores = torch.stack([(queries * scale * spread(step.keys, group)).sum(-1) for step in own], dim=-1)
    both = torch.cat((scores, own_scores), dim=-1)
    weights = torch.softmax(both, dim=-1, dtype=torch.promote_types(both.dtype, torch.float32)).to(scores.dtype)
    mixed = torch.matmul(weights[..., :length], spread(base.values, group))
    for place, step in enumerate(own):
        mixed = mixed + weights[..., length + place, None] * spread(step.values, group)
    return mixed.transpose(1, 2)


def spread(heads: torch.Tensor, group: int) -> torch.Tensor:
    """Keys or values [B, L, J, K] as every query head sees them [B, H, L, K]."""
    return heads.transpose(1, 2).repeat_interleave(group, dim=1)


@torch.no_grad()
def fill_normal(module: nn.Module, generator: torch.Generator, std: float) -> None:
    """Normal matrices, biases 0, norms 1, drawn in the order of the parameters' names."""
    for name, parameter in sorted(module.named_parameters()):
        if parameter.ndim > 1:
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * std
            parameter.copy_(drawn)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
