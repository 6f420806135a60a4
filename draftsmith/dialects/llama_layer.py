"""A draft layer's proportions between a Hugging Face config and our `LayerShape`.

Used by every dialect whose drafter has a decoder layer. Invariant: a config that asks for something our layer does not
compute (windows, other activations, sandwich norms, ...) is refused by name; the draft's own config counts, and what it
leaves out is its architecture's default, never the target's value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from draftsmith.dialects.dialect import Note
from draftsmith.drafters.draft_layer import LayerShape
from draftsmith.errors import ModelFileError, OptionError, UnsupportedError
from draftsmith.models.spec import DecoderSpec, RopeSpec

_NAMES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "post_attention_layernorm",
)
_BIASED = frozenset({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"})


def layer_shape(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Note]:
    """Fields of a `LayerShape` from a Llama-like config. Raises `ModelFileError`, `UnsupportedError`."""
    try:
        spec = DecoderSpec.from_config({"model_type": "llama", "tie_word_embeddings": False, **config})
    except (ModelFileError, UnsupportedError) as error:
        raise type(error)(f"{where}: {error}") from error
    refused = {
        "a sliding window": spec.window is not None,
        f"activation {spec.activation!r}": spec.activation != "silu",
        "norms after attention and MLP": spec.sandwich_norms,
        "norms of weight 1 + w": spec.norm_offset,
        "biases in the MLP": spec.mlp_bias,
        "capped attention": spec.attention_cap is not None,
        "an attention scale of its own": spec.attention_scale != spec.head_dim**-0.5,
    }
    for feature, found in refused.items():
        if found:
            raise UnsupportedError(f"{where}: a draft layer with {feature} is not supported")
    if config.get("attn_output_gate"):
        raise UnsupportedError(f"{where}: a draft layer with gated attention ('attn_output_gate') is not supported")
    fields = dataclasses.asdict(LayerShape.like(spec))
    fields["qkv_bias"] = spec.qkv_bias or bool(config.get("qkv_bias"))
    fields["qk_norm"] = spec.qk_norm
    fields["rope"] = None if spec.rope.kind == "default" else spec.rope
    scaled = "" if spec.rope.kind == "default" else f", scaled as {spec.rope.kind} by {spec.rope.factor:g}"
    return fields, Note("positions", f"row t stands at t; rope theta {spec.rope.theta:g}{scaled}, the draft's own")


def layer_config(shape: LayerShape, vocab_size: int, max_context: int) -> dict[str, Any]:
    """A Llama-like config of one layer, read back by `layer_shape` as the same shape; Qwen3's where queries and keys
    are normed. Biases of queries, keys and values alone are `qkv_bias`, which EAGLE's own code and vLLM know.
    """
    kind = "qwen3" if shape.qk_norm else "llama"
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None if shape.rope is None else _scaling(shape.rope),
        "max_position_embeddings": max_context,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }
    if shape.qkv_bias:
        config["qkv_bias"] = True
    return config


def layer_names(prefix: str, shape: LayerShape, native: str = "layer.") -> dict[str, tuple[str, ...]]:
    """Native name -> published name of a layer's tensors, Llama's own names on both sides."""
    names: dict[str, tuple[str, ...]] = {}
    for part in _NAMES:
        if part.endswith(("q_norm", "k_norm")) and not shape.qk_norm:
            continue
        names[f"{native}{part}.weight"] = (f"{prefix}{part}.weight",)
        if part in _BIASED and shape.qkv_bias:
            names[f"{native}{part}.bias"] = (f"{prefix}{part}.bias",)
    return names


def config_fields(kind: type[Any], fields: Mapping[str, Any], changes: Mapping[str, str], where: str) -> Any:
    """A native config from fields, some set by the user. Raises `OptionError` or `ModelFileError`."""
    try:
        return kind(**{**fields, **parsed_changes(kind, changes)})
    except (TypeError, OptionError) as error:
        raise (OptionError if changes else ModelFileError)(f"{where}: {error}") from error


def parsed_changes(kind: type[Any], changes: Mapping[str, str]) -> dict[str, Any]:
    """Changes as written, `KEY=VALUE`, in the types of a config's plain fields. Raises `OptionError`."""
    known = {item.name: str(item.type) for item in dataclasses.fields(kind)}
    found: dict[str, Any] = {}
    for key, text in changes.items():
        hint = known.get(key, "")
        try:
            if hint == "bool":
                found[key] = {"true": True, "false": False}[text.lower()]
            elif hint == "tuple[int, ...]":
                found[key] = tuple(int(part) for part in text.split("-"))
            else:
                found[key] = {"int": int, "float": float, "str": str}[hint](text)
        except (KeyError, ValueError) as error:
            allowed = [name for name, its in known.items() if its in ("bool", "int", "float", "str", "tuple[int, ...]")]
            raise OptionError(f"--set {key}={text}: fields that can be set are {', '.join(allowed)}") from error
    return found


def _scaling(rope: RopeSpec) -> dict[str, Any]:
    kept = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        kept |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        kept |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.attention_factor,
        }
    if rope.kind != "linear":
        kept["original_max_position_embeddings"] = rope.original_context
    return kept
