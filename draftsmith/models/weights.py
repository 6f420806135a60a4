"""Decoder weights, loaded by Hugging Face tensor names and fused for few, large operations.

Called once by the reference backend. Invariant: every tensor is checked against the shape the spec
implies before it is used, and a missing or misshapen one is named. Head dimensions of queries and keys
are reordered so that a rotary pair is adjacent; scores do not notice.

Shape letters: V vocabulary, D width, H query heads, J kv heads, K head size, M MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from draftsmith.errors import ModelFileError
from draftsmith.models.linear import Linear, prepare
from draftsmith.models.spec import DecoderSpec

Load: TypeAlias = Callable[[str], torch.Tensor]
"""A tensor by its Hugging Face name; `KeyError` (or `ModelFileError`) when there is none."""

_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
"""Where the decoder's tensors stand in a plain, an older and a newer multimodal, and a headless checkpoint."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norm weights are the factors really multiplied by (offset included)."""

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    mlp_out_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything a decoder multiplies by. `embedding` [V, D] is None where the head's weight serves."""

    embedding: torch.Tensor | None
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Unscaled embeddings [N, D] of tokens (int64, [N])."""
        return self.head.weight_rows(tokens) if self.embedding is None else self.embedding.index_select(0, tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        total = self.head.num_bytes + self.final_norm.nbytes
        total += 0 if self.embedding is None else self.embedding.nbytes
        for layer in self.layers:
            linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
            norms = (
                layer.attention_norm,
                layer.qk_norm,
                layer.attention_out_norm,
                layer.mlp_norm,
                layer.mlp_out_norm,
            )
            total += sum(linear.num_bytes for linear in linears)
            total += sum(norm.nbytes for norm in norms if norm is not None)
        return total


class TensorReader:
    """Finds a decoder's tensors by Hugging Face name and checks them against what the spec implies."""

    def __init__(self, spec: DecoderSpec, load: Load) -> None:
        self._spec = spec
        self._load = load
        self.prefix = self._find_prefix()

    @property
    def head_name(self) -> str:
        """Name of the head's weight; a tied head is the embedding."""
        if self._spec.tied_head:
            return self.embedding_name
        return "language_model.lm_head.weight" if self.prefix == _PREFIXES[1] else "lm_head.weight"

    @property
    def embedding_name(self) -> str:
        """Name of the embedding."""
        return f"{self.prefix}embed_tokens.weight"

    def named(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of a known shape. Raises `ModelFileError` naming a missing or misshapen one."""
        try:
            tensor = self._load(name)
        except KeyError:
            raise ModelFileError(f"the model's weights lack the tensor {name!r}") from None
        check_shape(name, tuple(tensor.shape), shape)
        return tensor

    def norm(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """The factors a norm really multiplies by."""
        weight = self.named(name, (size,)).to(dtype)
        return weight + 1.0 if self._spec.norm_offset else weight

    def _find_prefix(self) -> str:
        for prefix in _PREFIXES:
            try:
                self._load(f"{prefix}norm.weight")
            except (KeyError, ModelFileError):
                continue
            return prefix
        return _PREFIXES[0]


def check_shape(name: str, found: tuple[int, ...], implied: tuple[int, ...]) -> None:
    """Raise `ModelFileError` unless a tensor has the shape the config implies."""
    if found != implied:
        raise ModelFileError(f"tensor {name!r} has shape {found}; the config implies {implied}")


class WeightReader:
    """Loads, checks and fuses the tensors of one checkpoint."""

    def __init__(self, spec: DecoderSpec, load: Load, *, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._tensors = TensorReader(spec, load)
        self._prefix = self._tensors.prefix
        self._dtype = dtype
        self._device = device
        self._head_pairs, self._qkv_rows = (order.to(device) for order in _orders(spec))

    def read(self) -> DecoderWeights:
        """All weights of the decoder. Raises `ModelFileError` naming a missing or misshapen tensor."""
        spec = self._spec
        shape = (spec.vocab_size, spec.width)
        embedding = self._tensor(self._tensors.embedding_name, shape)
        if spec.tied_head:
            head = prepare(embedding, is_embedding=True)
        else:
            head = prepare(self._tensor(self._tensors.head_name, shape))
        return DecoderWeights(
            embedding=None if spec.tied_head else embedding,
            layers=tuple(self._layer(layer) for layer in range(spec.num_layers)),
            final_norm=self._norm(f"{self._prefix}norm.weight"),
            head=head,
        )

    def _layer(self, index: int) -> LayerWeights:
        spec = self._spec
        at = f"{self._prefix}layers.{index}."
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        after_attention = f"{at}post_attention_layernorm.weight"
        qkv, qkv_bias = self._stacked(
            {f"{at}self_attn.q_proj": queries, f"{at}self_attn.k_proj": keys, f"{at}self_attn.v_proj": keys},
            spec.width,
            spec.qkv_bias,
        )
        gate_up = {f"{at}mlp.gate_proj": spec.mlp_width, f"{at}mlp.up_proj": spec.mlp_width}
        down = {f"{at}mlp.down_proj": spec.width}
        rows = self._qkv_rows
        return LayerWeights(
            attention_norm=self._norm(f"{at}input_layernorm.weight"),
            qkv=prepare(qkv.index_select(0, rows), None if qkv_bias is None else qkv_bias.index_select(0, rows)),
            qk_norm=self._qk_norm(at) if spec.qk_norm else None,
            output=prepare(*self._stacked({f"{at}self_attn.o_proj": spec.width}, queries, spec.output_bias)),
            attention_out_norm=self._norm(after_attention) if spec.sandwich_norms else None,
            mlp_norm=self._norm(f"{at}pre_feedforward_layernorm.weight" if spec.sandwich_norms else after_attention),
            gate_up=prepare(*self._stacked(gate_up, spec.width, spec.mlp_bias)),
            down=prepare(*self._stacked(down, spec.mlp_width, spec.mlp_bias)),
            mlp_out_norm=self._norm(f"{at}post_feedforward_layernorm.weight") if spec.sandwich_norms else None,
        )

    def _qk_norm(self, at: str) -> torch.Tensor:
        """Factors of the per-head norms of queries and keys [H + J, K]."""
        spec = self._spec
        q_norm = self._norm(f"{at}self_attn.q_norm.weight", spec.head_dim)[self._head_pairs]
        k_norm = self._norm(f"{at}self_attn.k_norm.weight", spec.head_dim)[self._head_pairs]
        return torch.cat([q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1)])

    def _stacked(
        self, parts: Mapping[str, int], width: int, has_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of linears stacked along the output; `parts` gives the output size by name."""
        weight = torch.cat([self._tensor(f"{name}.weight", (size, width)) for name, size in parts.items()])
        if not has_bias:
            return weight, None
        return weight, torch.cat([self._tensor(f"{name}.bias", (size,)) for name, size in parts.items()])

    def _norm(self, name: str, size: int | None = None) -> torch.Tensor:
        """A norm's factor. Kept in float32 for half precision models, whose norms compute in float32."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        return self._tensors.norm(name, size or self._spec.width, dtype).to(self._device)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._tensors.named(name, shape).to(device=self._device, dtype=self._dtype)


def _orders(spec: DecoderSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of one head's dimensions, and of the rows of the stacked qkv: pairs (i, i + K/2) adjacent."""
    num_rotated = spec.num_heads + spec.num_kv_heads
    head_pairs = torch.arange(spec.head_dim).view(2, -1).t().reshape(-1)
    rows = torch.arange((num_rotated + spec.num_kv_heads) * spec.head_dim)
    rotated = torch.arange(num_rotated)[:, None] * spec.head_dim + head_pairs
    rows[: num_rotated * spec.head_dim] = rotated.reshape(-1)
    return head_pairs, rows
