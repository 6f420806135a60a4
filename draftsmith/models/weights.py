"""Decoder weights, loaded by Hugging Face tensor names and fused for few, large operations.

Called once by the reference backend. Invariant: every tensor is checked against the shape the spec
implies before it is used, and a missing or misshapen one is named. Head dimensions of queries and keys
are reordered so that a rotary pair is adjacent; scores do not notice.

Shape letters: V vocabulary, D width, H query heads, J kv heads, K head size, M MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from draftsmith.errors import ModelFileError
from draftsmith.models.linear import Linear
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
    """Everything a decoder multiplies by. `embedding` [V, D] is not scaled; `head` maps D to V."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear

    @property
    def num_bytes(self) -> int:
        """Bytes held; a head that shares the embedding's storage counts once."""
        total = self.embedding.nbytes + self.final_norm.nbytes
        if self.head.weight.data_ptr() != self.embedding.data_ptr():
            total += self.head.num_bytes
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


class WeightReader:
    """Loads, checks and fuses the tensors of one checkpoint."""

    def __init__(self, spec: DecoderSpec, load: Load, *, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._load = load
        self._dtype = dtype
        self._device = device
        self._prefix = self._find_prefix()
        # Pairs (i, i + K/2) become neighbours, so a rotation is one complex product.
        half = spec.head_dim // 2
        self._pairs = torch.arange(spec.head_dim).view(2, half).t().reshape(-1)

    def read(self) -> DecoderWeights:
        """All weights of the decoder. Raises `ModelFileError` naming a missing or misshapen tensor."""
        spec = self._spec
        embedding = self._tensor(f"{self._prefix}embed_tokens.weight", (spec.vocab_size, spec.width))
        head = embedding if spec.tied_head else self._head_weight()
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(self._layer(layer) for layer in range(spec.num_layers)),
            final_norm=self._norm(f"{self._prefix}norm.weight"),
            head=Linear(head),
        )

    def _find_prefix(self) -> str:
        for prefix in _PREFIXES:
            try:
                self._load(f"{prefix}norm.weight")
            except (KeyError, ModelFileError):
                continue
            return prefix
        return _PREFIXES[0]

    def _head_weight(self) -> torch.Tensor:
        shape = (self._spec.vocab_size, self._spec.width)
        name = "language_model.lm_head.weight" if self._prefix == _PREFIXES[1] else "lm_head.weight"
        return self._tensor(name, shape)

    def _layer(self, index: int) -> LayerWeights:
        spec = self._spec
        at = f"{self._prefix}layers.{index}."
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        mlp_norm = "pre_feedforward_layernorm" if spec.sandwich_norms else "post_attention_layernorm"
        qk_norm = None
        if spec.qk_norm:
            q_norm = self._pair_up(self._norm(f"{at}self_attn.q_norm.weight", spec.head_dim), dim=0)
            k_norm = self._pair_up(self._norm(f"{at}self_attn.k_norm.weight", spec.head_dim), dim=0)
            qk_norm = torch.cat([q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1)])
        sandwich = {
            name: self._norm(f"{at}{name}.weight") if spec.sandwich_norms else None
            for name in ("post_attention_layernorm", "post_feedforward_layernorm")
        }
        qkv = self._fused(
            [
                (f"{at}self_attn.{name}", size)
                for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
            ],
            spec.width,
            spec.qkv_bias,
            reordered=2,
        )
        gate_up = [(f"{at}mlp.gate_proj", spec.mlp_width), (f"{at}mlp.up_proj", spec.mlp_width)]
        return LayerWeights(
            attention_norm=self._norm(f"{at}input_layernorm.weight"),
            qkv=qkv,
            qk_norm=qk_norm,
            output=self._fused([(f"{at}self_attn.o_proj", spec.width)], queries, spec.output_bias),
            attention_out_norm=sandwich["post_attention_layernorm"],
            mlp_norm=self._norm(f"{at}{mlp_norm}.weight"),
            gate_up=self._fused(gate_up, spec.width, spec.mlp_bias),
            down=self._fused([(f"{at}mlp.down_proj", spec.width)], spec.mlp_width, spec.mlp_bias),
            mlp_out_norm=sandwich["post_feedforward_layernorm"],
        )

    def _fused(self, parts: Iterable[tuple[str, int]], width: int, has_bias: bool, reordered: int = 0) -> Linear:
        """One linear from several stacked along the output; the first `reordered` parts pair up their heads."""
        weights, biases = [], []
        for index, (name, size) in enumerate(parts):
            weight = self._tensor(f"{name}.weight", (size, width))
            weights.append(self._pair_up(weight) if index < reordered else weight)
            if has_bias:
                bias = self._tensor(f"{name}.bias", (size,))
                biases.append(self._pair_up(bias) if index < reordered else bias)
        return Linear(torch.cat(weights), torch.cat(biases) if has_bias else None)

    def _pair_up(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        heads = tensor.unflatten(dim, (-1, self._spec.head_dim))
        return heads.index_select(dim + 1, self._pairs.to(tensor.device)).flatten(dim, dim + 1)

    def _norm(self, name: str, size: int | None = None) -> torch.Tensor:
        """A norm's factor. Kept in float32 for half precision models, whose norms compute in float32."""
        weight = self._named(name, (size or self._spec.width,)).to(torch.promote_types(self._dtype, torch.float32))
        return (weight + 1.0 if self._spec.norm_offset else weight).to(self._device)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._named(name, shape).to(device=self._device, dtype=self._dtype)

    def _named(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            tensor = self._load(name)
        except KeyError:
            raise ModelFileError(f"the model's weights lack the tensor {name!r}") from None
        if tuple(tensor.shape) != shape:
            raise ModelFileError(f"tensor {name!r} has shape {tuple(tensor.shape)}; the config implies {shape}")
        return tensor
