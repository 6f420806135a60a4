"""Small recurrent drafters of every kind for the tests of the row runners, and a slow runner to compare with.

`KINDS` names the shapes; `make_parts` builds one beside a native target. `SlowRows` computes what follows a path row
by row in float64, with the weights that the packed ones stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from draftsmith import _native
from draftsmith.drafters.draft_layer import DraftLayer, LayerShape, rotate, rotations
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Module
from draftsmith.drafters.row_parts import RowParts
from draftsmith.models.native import NativeBackend
from tests.models.native_models import Model, make_native

VOCABULARY = 700

LAYER = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "mlp_width": 90}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"width": 64},
    "eagle3 odd": {"width": 56, "target_width": 40, "num_ids": 57, "taps": (0, 1, 2), "tap_norm": True},
    "eagle3 normed": {"width": 40, "norm_before_residual": True, "norm_output": True, "head_dim": 16, "num_heads": 6},
    "eagle3 one head": {"width": 33, "num_heads": 1, "num_kv_heads": 1, "head_dim": 48, "mlp_width": 7},
    "eagle1": {"width": 64, "fused": True, "fc_bias": True, "mlp_width": 48},
    "eagle1 odd": {"width": 50, "fused": True, "num_ids": 33},
    "mtp": {"width": 64, "fused": True, "normed": True},
    "mtp qwen": {
        "width": 40,
        "fused": True,
        "normed": True,
        "qk_norm": True,
        "qkv_bias": True,
        "feeds_normed": True,
        "head_dim": 16,
    },
    "mtp reversed": {
        "width": 72,
        "fused": True,
        "normed": True,
        "is_feature_first": True,
        "feeds_normed": True,
        "logit_cap": 4.0,
        "head_dim": 80,
    },
}


def make_target(width: int = 64, *, threads: int = 1, **options: Any) -> NativeBackend:
    """A native target whose embedding and head are all that counts."""
    fields = {"width": width, "head_dim": 16, "vocab_size": VOCABULARY, "embedding_scale": 1.5}
    return make_native(Model(fields), threads, **options)


def random_(module: nn.Module, seed: int) -> None:
    """Weights that keep the size of what they are multiplied with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(0.2 * noise + (0.0 if name.endswith("bias") else 1.0))


def make_parts(backend: NativeBackend, *, seed: int = 0, num_ids: int | None = None, **kind: Any) -> RowParts:
    """A drafter of a kind of `KINDS`, with random weights."""
    kind = {name: value for name, value in kind.items() if name != "target_width"}
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(VOCABULARY)
    if num_ids is not None:
        ids = torch.randperm(VOCABULARY, generator=generator)[:num_ids].sort().values
    if kind.pop("fused", False):
        return _fused(backend, ids, seed, **kind)
    target = SimpleNamespace(vocab_size=VOCABULARY, backend=backend)
    taps = kind.pop("taps", (0, 2))
    module = Eagle3Module(Eagle3Config(**{**LAYER, **kind}, taps=taps), target, None if num_ids is None else ids)
    random_(module, seed)
    return module.row_parts()


def _fused(
    backend: NativeBackend,
    ids: torch.Tensor,
    seed: int,
    *,
    width: int,
    fc_bias: bool = False,
    normed: bool = False,
    is_feature_first: bool = False,
    feeds_normed: bool = False,
    logit_cap: float | None = None,
    **shape: Any,
) -> RowParts:
    config = LayerShape(**{**LAYER, **shape}, width=width)
    layer, fuse = DraftLayer(config, width), nn.Linear(2 * width, width, bias=fc_bias)
    norms = nn.ParameterList(torch.ones(width) for _ in range(4))
    random_(nn.ModuleList([layer, fuse, norms]), seed)
    return RowParts(
        shape=config,
        layer=layer,
        draft_ids=ids,
        feature_width=width,
        fuse=fuse,
        embedding_norm=norms[0] if normed else None,
        feature_norm=norms[1] if normed else None,
        attention_norm=norms[2] if normed else None,
        final_norm=norms[3] if normed else None,
        logit_cap=logit_cap,
        is_feature_first=is_feature_first,
        feeds_normed=feeds_normed,
    )


class SlowRows:
    """Draft logits after true rows and a path of drafted tokens, in float64."""

    def __init__(self, parts: RowParts, backend: NativeBackend, bits: int | None) -> None:
        """`bits`: of the weights that are packed; None takes them as they are."""
        self._parts = parts
        self._bits = bits
        self._embed = backend.embed
        self._tap_width = backend.spec.width
        head = parts.head_UD
        self._head = backend.head_rows(parts.draft_ids).double() if head is None else self._matrix(head)

    def _matrix(self, weights: torch.Tensor) -> torch.Tensor:
        if self._bits is None:
            return weights.detach().double()
        packed = _native.pack_floats(weights.detach().float().contiguous().numpy(), self._bits)
        return torch.from_numpy(packed.dequantise()).double()

    def _apply(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        product = x @ self._matrix(linear.weight).t()
        return product if linear.bias is None else product + linear.bias.detach().double()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        mean = x.pow(2).mean(-1, keepdim=True)
        return x / (mean + self._parts.shape.norm_eps).sqrt() * weight.detach().double()

    def follow(self, tokens: Sequence[int], features: torch.Tensor, path: Sequence[int]) -> list[torch.Tensor]:
        """Logits [U] after the last true row and after each token of the path."""
        parts = self._parts
        taps = features.double()
        if parts.tap_norms is not None:
            stretches, weights = taps.split(self._tap_width, dim=-1), parts.tap_norms.split(self._tap_width)
            taps = torch.cat([self._norm(tap, norm) for tap, norm in zip(stretches, weights, strict=True)], dim=-1)
        hidden = taps if parts.reduce is None else self._apply(parts.reduce, taps)
        keys, values, found = [], [], []
        output = torch.empty(0)
        for row, token in enumerate([*tokens, *path]):
            is_true = row < len(tokens)
            h = hidden[row] if is_true else (self._norm(output, parts.final_norm) if parts.feeds_normed else output)
            residual, x = self._enter(self._embed(torch.tensor([token]))[0].double(), h)
            queries, key, value = self._heads(x, row)
            keys.append(key)
            values.append(value)
            if row < len(tokens) - 1:
                continue
            output = self._finish(residual, queries, torch.stack(keys), torch.stack(values))
            logits = self._norm(output, parts.final_norm) @ self._head.t()
            cap = parts.logit_cap
            found.append(logits if cap is None else cap * torch.tanh(logits / cap))
        return found

    def _enter(self, embedded: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._parts
        normed = self._norm(h, parts.feature_norm)
        both = [self._norm(embedded, parts.embedding_norm), normed]
        if parts.is_feature_first:
            both.reverse()
        pair = torch.cat(both)
        if parts.fuse is None:
            return (normed if parts.norms_residual else h), pair
        x = self._apply(parts.fuse, pair)
        return x, self._norm(x, parts.attention_norm)

    def _heads(self, x: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        attention, size = self._parts.layer.self_attn, self._parts.shape.head_dim
        queries, keys, values = (
            self._apply(linear, x).view(-1, size) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if attention.q_norm is not None and attention.k_norm is not None:
            queries, keys = self._norm(queries, attention.q_norm.weight), self._norm(keys, attention.k_norm.weight)
        cosines, sines = rotations(self._parts.shape, torch.tensor([position]))
        turned = [rotate(heads[None], cosines, sines)[0] for heads in (queries, keys)]
        return turned[0], turned[1], values

    def _finish(
        self, residual: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        layer, size = self._parts.layer, self._parts.shape.head_dim
        group = len(queries) // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        weights = torch.softmax(torch.einsum("hk,thk->ht", queries, keys) * size**-0.5, dim=-1)
        mixed = torch.einsum("ht,thk->hk", weights, values).flatten()
        x = residual + self._apply(layer.self_attn.o_proj, mixed)
        normed = self._norm(x, layer.post_attention_layernorm.weight)
        gate = torch.nn.functional.silu(self._apply(layer.mlp.gate_proj, normed))
        return x + self._apply(layer.mlp.down_proj, gate * self._apply(layer.mlp.up_proj, normed))
