"""One decoder layer in PyTorch, for drafters that train it: weights, rotary positions, attention over own rows.

Used by the modules of feature and multi-token drafters, in training and as their reference inference. Tensor
names are those of Llama checkpoints. Invariant: projections see rows alone, `mix` alone looks from row to row.

Shape letters: B texts, L rows, I input width, D width, H query heads, J key heads, K head size, S steps.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from draftsmith.errors import OptionError
from draftsmith.models.rope import cosines_and_sines, inverse_frequencies
from draftsmith.models.spec import DecoderSpec, RopeSpec

MOST_SIZE = 1 << 20
"""Of any side of a matrix: more is a slip of the pen."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of a draft layer; plain values that a checkpoint's config stores.

    `rope`: positions that are scaled (Llama 3.1's rule, YaRN); None for plain ones of `rope_theta`.
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    qk_norm: bool = False
    rope: RopeSpec | None = None

    def __post_init__(self) -> None:
        rope: Any = self.rope
        if isinstance(rope, dict):  # as a checkpoint's JSON has it
            object.__setattr__(self, "rope", RopeSpec(**rope))
        if self.rope is not None and self.rope.theta != self.rope_theta:
            raise OptionError(f"rope_theta is {self.rope_theta}; the scaled positions have {self.rope.theta}")
        for name in ("width", "num_heads", "num_kv_heads", "head_dim", "mlp_width"):
            if not 1 <= getattr(self, name) <= MOST_SIZE:
                raise OptionError(f"{name} is {getattr(self, name)}; allowed: 1 to {MOST_SIZE}")
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"{name} is {getattr(self, name)}; allowed: above 0")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise OptionError(
                f"{self.num_heads} heads of {self.head_dim} over {self.num_kv_heads} key heads: heads must be a "
                "multiple of key heads, and their size even"
            )

    @property
    def rotary(self) -> RopeSpec:
        """How queries and keys are rotated."""
        return self.rope or RopeSpec(theta=self.rope_theta)

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


def shape_like(spec: DecoderSpec, changed: Any, *also: str) -> dict[str, Any]:
    """Fields of a layer of the target's proportions, with what was chosen before training.

    `changed`: a dataclass whose sizes (and the fields `also`) replace the target's where they are not 0 or False.
    """
    shape = dataclasses.asdict(LayerShape.like(spec))
    for name in ("mlp_width", "num_heads", "num_kv_heads", *also):
        shape[name] = getattr(changed, name) or shape[name]
    return shape


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
        return self.normed(x, self.weight)

    def normed(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """x / rms(x) * factors."""
        normed: torch.Tensor = _RMSNorm.apply(x.to(factors.dtype), factors, self.eps)
        return normed


class _RMSNorm(torch.autograd.Function):
    """`F.rms_norm` is a chain of eight operations on the CPU and twice as many backwards; this is half of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.rsqrt(length.square() / x.shape[-1] + eps)
        normed = x * inverse
        ctx.save_for_backward(normed, weight, inverse)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *from_above: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        normed, weight, inverse = ctx.saved_tensors
        above = from_above[0]
        to_weight = (above * normed).flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, to_weight, None
        above = above * weight
        along = (above * normed).sum(dim=-1, keepdim=True) / normed.shape[-1]
        return torch.addcmul(above, normed, along, value=-1).mul_(inverse), to_weight, None


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
        """Queries, keys and values of rows [.., L, I] at rotations [L, K/2] (or [.., L, K/2])."""
        return Heads(self.queries(x, cosines, sines), *self.keys_and_values(x, cosines, sines))

    def queries(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """The rows' queries alone [.., L, H, K]."""
        queries = self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return rotate(queries if self.q_norm is None else self.q_norm(queries), cosines, sines)

    def keys_and_values(
        self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' keys and values alone [.., L, J, K]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        values = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return rotate(keys if self.k_norm is None else self.k_norm(keys), cosines, sines), values


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
    frequencies = inverse_frequencies(shape.rotary, shape.head_dim)
    longest = int(positions.max()) + 1 if positions.numel() else 0
    cosines, sines = cosines_and_sines(frequencies, shape.rotary.attention_factor, longest)
    return cosines[positions].to(torch.float32), sines[positions].to(torch.float32)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions: [.., L, H, K] with the pair (i, i + K/2), as Llama checkpoints store heads."""
    left, right = x.chunk(2, dim=-1)
    cosines, sines = cosines.unsqueeze(-2).to(x.dtype), sines.unsqueeze(-2).to(x.dtype)
    return torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)


def mix_causal(heads: Heads) -> torch.Tensor:
    """Causal attention of whole texts [B, L, H, K]."""
    group = heads.queries.shape[2] // heads.keys.shape[2]
    queries = heads.queries.transpose(1, 2)  # [B, H, L, K]
    return F.scaled_dot_product_attention(
        queries, spread(heads.keys, group), spread(heads.values, group), is_causal=True
    ).transpose(1, 2)


def spread(heads: torch.Tensor, group: int) -> torch.Tensor:
    """Keys or values [B, L, J, K] as every query head sees them [B, H, L, K]."""
    return heads.transpose(1, 2).repeat_interleave(group, dim=1)


@torch.no_grad()
def fill_normal(module: nn.Module, generator: torch.Generator, std: float | None = None) -> None:
    """Normal matrices, biases 0, norms 1, drawn in the order of the parameters' names.

    `std` None: 1 / sqrt(3 inputs), which is PyTorch's own spread (0.024 for 576 inputs) and suits any width.
    """
    for name, parameter in sorted(module.named_parameters()):
        if parameter.ndim > 1:
            size = (3 * parameter.shape[-1]) ** -0.5 if std is None else std
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * size
            parameter.copy_(drawn)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
