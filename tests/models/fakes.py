"""Tiny random decoders that answer in milliseconds, for everybody's tests.

`tiny_backend(seed)` is a two-layer model of width 32 in float64; `spec` fields may be overridden, so
`tiny_backend(0, layer_windows=(None, 8))` has a windowed layer. Equal arguments give equal weights.
"""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import DecoderSpec, RopeSpec

DEFAULTS: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 64,
    "width": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_width": 48,
    "max_context": 4096,
    "rope": RopeSpec(theta=10_000.0),
    "tied_head": True,
}


def tiny_spec(**overrides: Any) -> DecoderSpec:
    """A small spec; fields that follow from others (scale, windows, local rope) are filled in."""
    values = {**DEFAULTS, **overrides}
    values.setdefault("window_rope", values["rope"])
    values.setdefault("layer_windows", (None,) * values["num_layers"])
    values.setdefault("attention_scale", values["head_dim"] ** -0.5)
    return DecoderSpec(**values)


def tiny_weights(spec: DecoderSpec, seed: int) -> dict[str, torch.Tensor]:
    """Random float64 weights under Hugging Face names, large enough that logits spread by a few units."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, spec.width)}
    if not spec.tied_head:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.width)
    norms = ["model.norm"]
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}"
        linears = {
            "self_attn.q_proj": (queries, spec.width, spec.qkv_bias),
            "self_attn.k_proj": (keys, spec.width, spec.qkv_bias),
            "self_attn.v_proj": (keys, spec.width, spec.qkv_bias),
            "self_attn.o_proj": (spec.width, queries, spec.output_bias),
            "mlp.gate_proj": (spec.mlp_width, spec.width, spec.mlp_bias),
            "mlp.up_proj": (spec.mlp_width, spec.width, spec.mlp_bias),
            "mlp.down_proj": (spec.width, spec.mlp_width, spec.mlp_bias),
        }
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{at}.{name}.bias"] = (rows,)
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
        if spec.sandwich_norms:
            norms += [f"{at}.pre_feedforward_layernorm", f"{at}.post_feedforward_layernorm"]
        if spec.qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"{at}.self_attn.{name}.weight"] = (spec.head_dim,)
    shapes.update({f"{name}.weight": (spec.width,) for name in norms})
    return {name: _random(name, shape, spec, generator) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], spec: DecoderSpec, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    if "norm" in name:
        return 0.1 * noise + (0.0 if spec.norm_offset else 1.0)
    if name.endswith("embed_tokens.weight"):
        return 0.5 * noise
    return noise * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)


def tiny_backend(
    seed: int = 0, dtype: torch.dtype = torch.float64, vocab_size: int = 64, **spec_fields: Any
) -> ReferenceBackend:
    """A reference backend over `tiny_weights`, on the CPU."""
    spec = tiny_spec(vocab_size=vocab_size, **spec_fields)
    weights = tiny_weights(spec, seed)
    return ReferenceBackend.from_weights(spec, weights.__getitem__, dtype=dtype)
