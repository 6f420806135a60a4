"""A whole decoder in PyTorch that can be trained: what a standalone draft model is, and a target that is tuned.

Used by `student` and `medusa2`; the same `DecoderSpec` describes what the backends run. Weights are named as in
Hugging Face files, so they load from a model and are saved as one without a table of names. Invariants: logits are the
reference backend's to 1e-4 in float32; texts are padded at the end, and no row looks behind its own place.

Shape letters: B texts, L rows, N rows, D width, H query heads, J key heads, K head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import nn

from draftsmith.drafters.draft_layer import RMSNorm, rotate, spread
from draftsmith.models.rope import cosines_and_sines, inverse_frequencies
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.weights import Load, TensorReader

HEAD = "lm_head.weight"
BODY = "model."


class Turns(dict[int | None, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]):
    """By window (None: all rows are seen): cosines and sines [L, K/2], and which rows [L, L] each one sees (None: all
    before it).
    """


class Norm(RMSNorm):
    """A norm whose stored weight may leave a 1 out."""

    def __init__(self, width: int, spec: DecoderSpec) -> None:
        super().__init__(width, spec.norm_eps)
        self._offset = spec.norm_offset
        if spec.norm_offset:
            nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x, self.weight + 1) if self._offset else self.normed(x, self.weight)


class DecoderAttention(nn.Module):
    """Grouped-query attention of whole texts."""

    def __init__(self, spec: DecoderSpec, window: int | None) -> None:
        super().__init__()
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._spec, self._window = spec, window
        self.q_proj = nn.Linear(spec.width, queries, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.width, keys, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.width, keys, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(queries, spec.width, bias=spec.output_bias)
        self.q_norm = Norm(spec.head_dim, spec) if spec.qk_norm else None
        self.k_norm = Norm(spec.head_dim, spec) if spec.qk_norm else None

    def forward(self, x: torch.Tensor, turns: Turns) -> torch.Tensor:
        spec = self._spec
        cosines, sines, seen_LL = turns[self._window]
        queries = self.q_proj(x).unflatten(-1, (-1, spec.head_dim))
        keys = self.k_proj(x).unflatten(-1, (-1, spec.head_dim))
        values = self.v_proj(x).unflatten(-1, (-1, spec.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries_BHLK = rotate(queries, cosines, sines).transpose(1, 2)
        keys_BHLK = spread(rotate(keys, cosines, sines), spec.group_size)
        values_BHLK = spread(values, spec.group_size)
        if spec.attention_cap is None:
            mixed = F.scaled_dot_product_attention(
                queries_BHLK, keys_BHLK, values_BHLK, attn_mask=seen_LL, is_causal=seen_LL is None,
                scale=spec.attention_scale,
            )  # fmt: skip
        else:
            scores = queries_BHLK @ keys_BHLK.transpose(-1, -2) * spec.attention_scale
            scores = spec.attention_cap * torch.tanh(scores / spec.attention_cap)
            if seen_LL is None:
                seen_LL = _seen(x.shape[1], None)
            mixed = torch.softmax(scores.masked_fill(~seen_LL, -torch.inf), dim=-1) @ values_BHLK
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class DecoderMlp(nn.Module):
    """down(activation(gate x) * up x)."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self._is_silu = spec.activation == "silu"
        self.gate_proj = nn.Linear(spec.width, spec.mlp_width, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.width, spec.mlp_width, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.mlp_width, spec.width, bias=spec.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        active = F.silu(gate) if self._is_silu else F.gelu(gate, approximate="tanh")
        return self.down_proj(active * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One layer. With sandwich norms the norm after attention is about attention's output."""

    def __init__(self, spec: DecoderSpec, window: int | None) -> None:
        super().__init__()
        self.self_attn = DecoderAttention(spec, window)
        self.mlp = DecoderMlp(spec)
        self.input_layernorm = Norm(spec.width, spec)
        self.post_attention_layernorm = Norm(spec.width, spec)
        self.pre_feedforward_layernorm = Norm(spec.width, spec) if spec.sandwich_norms else None
        self.post_feedforward_layernorm = Norm(spec.width, spec) if spec.sandwich_norms else None

    def forward(self, x: torch.Tensor, turns: Turns) -> torch.Tensor:
        mixed = self.self_attn(self.input_layernorm(x), turns)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + mixed
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(mixed)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


@final
class DecoderBody(nn.Module):
    """Everything but the head: what Hugging Face files call `model`."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.width)
        layers = nn.ModuleList(DecoderLayer(spec, window) for window in spec.layer_windows)
        self.layers = cast("list[DecoderLayer]", layers)
        self.norm = Norm(spec.width, spec)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """`last_hidden` [B, L, D] of every row, after the final norm."""
        x = self.embed_tokens(tokens_BL)
        if self.spec.embedding_scale != 1:
            # Rounded to float32 and then to the model's type, as published implementations round it.
            x = x * torch.tensor(self.spec.embedding_scale, dtype=torch.float32).to(x.dtype)
        turns = _turns(self.spec, tokens_BL.shape[1], x.dtype)
        for layer in self.layers:
            x = layer(x, turns)
        return self.norm(x)


def make_head(spec: DecoderSpec) -> nn.Linear | None:
    """The output matrix; None where the embedding is it."""
    return None if spec.tied_head else nn.Linear(spec.width, spec.vocab_size, bias=False)


def head_rows(body: DecoderBody, head: nn.Linear | None) -> torch.Tensor:
    """The weights [V, D] that make logits of `last_hidden`."""
    return body.embed_tokens.weight if head is None else head.weight


@torch.no_grad()
def fill_from(body: DecoderBody, head: nn.Linear | None, source: DecoderSpec, load: Load, kept: Sequence[int]) -> None:
    """Copy the weights of a model described by `source`; layer i becomes the model's layer `kept[i]`.

    `load` gives a tensor by its Hugging Face name. A vocabulary that is padded otherwise is cut, or filled up with the
    mean row. Raises `ModelFileError` for missing and misshapen tensors.
    """
    reader = TensorReader(source, load)
    for name, parameter in body.named_parameters():
        if name == "embed_tokens.weight":
            continue
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            name = f"layers.{kept[int(number)]}.{rest}"
        parameter.copy_(reader.named(f"{reader.prefix}{name}", tuple(parameter.shape)))
    shape, vocab_size = (source.vocab_size, source.width), body.spec.vocab_size
    body.embed_tokens.weight.copy_(_resized(reader.named(reader.embedding_name, shape), vocab_size))
    if head is not None:
        head.weight.copy_(_resized(reader.named(reader.head_name, shape), vocab_size))


def _resized(rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
    missing = vocab_size - len(rows)
    return rows[:vocab_size] if missing <= 0 else torch.cat((rows, rows.mean(0).expand(missing, -1)))


def model_tensors(body: DecoderBody, head: nn.Linear | None) -> Mapping[str, torch.Tensor]:
    """Weights under their Hugging Face names."""
    tensors = {f"{BODY}{name}": tensor for name, tensor in body.state_dict().items()}
    return tensors if head is None else {**tensors, HEAD: head.weight}


def _turns(spec: DecoderSpec, num_rows: int, dtype: torch.dtype) -> Turns:
    found = Turns()
    for window in set(spec.layer_windows):
        rope = spec.rope if window is None else spec.window_rope
        frequencies = inverse_frequencies(rope, spec.head_dim)
        cosines, sines = cosines_and_sines(frequencies, rope.attention_factor, num_rows)
        seen_LL = None if window is None or window >= num_rows else _seen(num_rows, window)
        found[window] = cosines.to(dtype), sines.to(dtype), seen_LL
    return found


def _seen(num_rows: int, window: int | None) -> torch.Tensor:
    """Which rows each row sees: itself and those before it, as far as the window goes."""
    places = torch.arange(num_rows)
    back_LL = places[:, None] - places
    return (back_LL >= 0) if window is None else (back_LL >= 0) & (back_LL < window)
