"""What a decoder is: one frozen description, read from a Hugging Face style config.

Called by the loaders, the cache and every backend; the decoder code knows architectures only through
the fields here. Invariant: whatever a config says that changes the numbers is either expressed by a
field or refused by name; nothing is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import ModelFileError, UnsupportedError
from draftsmith.models.spec_defaults import ARCHITECTURES, NOT_A_PLAIN_DECODER, ROPE_KINDS

SLIDING = "sliding_attention"
FULL = "full_attention"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one kind of layer.

    `kind`: "default", "linear", "llama3" or "yarn". `attention_factor` multiplies cosines and sines.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer.

    `layer_windows[i]`: how many positions layer i sees, itself included, or None for all. `rope` serves
    full layers, `window_rope` the others. `norm_offset`: norms multiply by 1 + weight. `sandwich_norms`:
    attention and MLP outputs are normed as well. `qk_norm`: queries and keys are normed per head.
    """

    architecture: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_context: int
    rope: RopeSpec
    window_rope: RopeSpec
    layer_windows: tuple[int | None, ...]
    attention_scale: float
    activation: str = "silu"
    norm_eps: float = 1e-6
    norm_offset: bool = False
    sandwich_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    tied_head: bool = False

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def window(self) -> int | None:
        """The window of the windowed layers (all share one), or None when every layer sees everything."""
        return next((window for window in self.layer_windows if window is not None), None)

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> DecoderSpec:
        """Read a Hugging Face config.

        Accepts the old `rope_scaling` and the newer `rope_parameters` forms, and a multimodal config of
        a known text model (`text_config`). Keys absent from the config take the architecture's published
        defaults. Raises `ModelFileError` naming a missing or inconsistent key, `UnsupportedError` naming
        an architecture or feature that is not a plain decoder of the known kinds.
        """
        architecture = _architecture(config)
        if isinstance(config.get("text_config"), Mapping):
            outer = config
            config = dict(outer["text_config"])
            for key in ("tie_word_embeddings", "quantization_config"):
                if key in outer:
                    config.setdefault(key, outer[key])
        keys = _Keys(config, ARCHITECTURES[architecture].defaults, architecture)
        _refuse(keys)
        return _build(architecture, keys)


class _Keys:
    """Typed reads from a config over its architecture's defaults; every failure names the key."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], architecture: str) -> None:
        self._config = config
        self._defaults = defaults
        self.architecture = architecture

    def get(self, key: str) -> Any:
        return self._config[key] if key in self._config else self._defaults.get(key)

    def integer(self, key: str) -> int:
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelFileError(f"config key {key!r} is {value!r}: a whole number >= 1 is needed")
        return value

    def number(self, key: str) -> float:
        return positive_number(self._needed(key), key)

    def optional_number(self, key: str) -> float | None:
        value = self.get(key)
        return None if value is None else positive_number(value, key)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelFileError(f"config key {key!r} is {value!r}: true or false is needed")
        return bool(value)

    def _needed(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelFileError(f"config of this {self.architecture} model lacks the key {key!r}")
        return value


def positive_number(value: Any, key: str) -> float:
    """A config value as a positive finite float; `ModelFileError` names the key otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelFileError(f"config key {key!r} is {value!r}: a number > 0 is needed")
    return float(value)


def _architecture(config: Mapping[str, Any]) -> str:
    name = config.get("model_type")
    if name is None:
        raise ModelFileError("config lacks the key 'model_type'")
    if name in ARCHITECTURES:
        return str(name)
    known = ", ".join(ARCHITECTURES)
    reason = NOT_A_PLAIN_DECODER.get(str(name))
    if reason is not None:
        raise UnsupportedError(f"architecture {name!r} is {reason}, which is not supported; known: {known}")
    raise UnsupportedError(f"architecture {name!r} is not supported; known: {known}")


def _refuse(keys: _Keys) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if keys.get(key):
            raise UnsupportedError(f"mixture-of-experts models are not supported (config key {key!r})")
    if keys.get("quantization_config"):
        raise UnsupportedError("weights quantised inside safetensors ('quantization_config') are not supported")
    if keys.get("use_bidirectional_attention"):
        raise UnsupportedError("bidirectional attention ('use_bidirectional_attention') is not supported")
    if keys.architecture.startswith("gemma3") and keys.get("attn_logit_softcapping") is not None:
        raise UnsupportedError("'attn_logit_softcapping' is not supported for gemma3")
    factor = keys.get("partial_rotary_factor")
    if factor is not None and factor != 1.0:
        raise UnsupportedError(f"partial rotary embeddings ('partial_rotary_factor' {factor!r}) are not supported")


def _build(architecture: str, keys: _Keys) -> DecoderSpec:
    traits = ARCHITECTURES[architecture]
    width, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if keys.get("head_dim") is not None:
        head_dim = keys.integer("head_dim")
    elif width % num_heads:
        raise ModelFileError(f"'hidden_size' {width} is not a multiple of 'num_attention_heads' {num_heads}")
    else:
        head_dim = width // num_heads
    if head_dim % 2:
        raise ModelFileError(f"'head_dim' {head_dim} is odd: rotary embeddings need an even one")
    num_kv_heads = num_heads if keys.get("num_key_value_heads") is None else keys.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ModelFileError(
            f"'num_attention_heads' {num_heads} is not a multiple of 'num_key_value_heads' {num_kv_heads}"
        )
    num_layers = keys.integer("num_hidden_layers")
    activation_key = "hidden_activation" if keys.get("hidden_activation") is not None else "hidden_act"
    if keys.get(activation_key) not in _ACTIVATIONS:
        allowed = ", ".join(_ACTIVATIONS)
        raise UnsupportedError(f"{activation_key!r} {keys.get(activation_key)!r} is not supported; known: {allowed}")
    bias = keys.flag("attention_bias")
    max_context = keys.integer("max_position_embeddings")
    rope, window_rope = _ropes(keys, max_context)
    scalar = keys.number("query_pre_attn_scalar") if traits.query_scalar else float(head_dim)
    return DecoderSpec(
        architecture=architecture,
        vocab_size=keys.integer("vocab_size"),
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_width=keys.integer("intermediate_size"),
        max_context=max_context,
        rope=rope,
        window_rope=window_rope,
        layer_windows=_layer_windows(keys, num_layers),
        attention_scale=scalar**-0.5,
        activation=_ACTIVATIONS[keys.get(activation_key)],
        norm_eps=keys.number("rms_norm_eps"),
        norm_offset=traits.norm_offset,
        sandwich_norms=traits.sandwich_norms,
        qk_norm=traits.qk_norm,
        qkv_bias=bias or traits.always_qkv_bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        attention_cap=keys.optional_number("attn_logit_softcapping"),
        logit_cap=keys.optional_number("final_logit_softcapping"),
        embedding_scale=math.sqrt(width) if traits.scaled_embedding else 1.0,
        tied_head=keys.flag("tie_word_embeddings"),
    )


def _layer_windows(keys: _Keys, num_layers: int) -> tuple[int | None, ...]:
    rule = ARCHITECTURES[keys.architecture].window_rule
    if rule == "none" or keys.get("sliding_window") is None:
        return (None,) * num_layers
    if rule == "switched" and not keys.flag("use_sliding_window"):
        return (None,) * num_layers
    window = keys.integer("sliding_window")
    if rule == "all":
        return (window,) * num_layers
    kinds = keys.get("layer_types")
    if kinds is None and rule == "switched":
        first = keys.get("max_window_layers")
        kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    elif kinds is None:
        period = keys.integer("sliding_window_pattern")
        kinds = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise ModelFileError(f"'layer_types' has {len(kinds)} entries for 'num_hidden_layers' {num_layers}")
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise UnsupportedError(f"layer type {kind!r} is not supported; known: {SLIDING}, {FULL}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _ropes(keys: _Keys, max_context: int) -> tuple[RopeSpec, RopeSpec]:
    """The rope of full layers and of windowed layers."""
    given = keys.get("rope_parameters") or {}
    nested = {kind: given[kind] or {} for kind in (FULL, SLIDING) if kind in given}
    scaling = keys.get("rope_scaling") or {}
    theta, local_theta = keys.get("rope_theta"), keys.get("rope_local_base_freq")
    if nested:
        ropes = {kind: dict(nested.get(kind, {})) for kind in (FULL, SLIDING)}
    else:
        flat = dict(scaling or given)
        # Only the full layers of an architecture with a local theta carry the scaling.
        ropes = {FULL: flat, SLIDING: {} if local_theta is not None else dict(flat)}
    ropes[FULL].setdefault("rope_theta", theta)
    ropes[SLIDING].setdefault("rope_theta", theta if local_theta is None else local_theta)
    return _rope(ropes[FULL], keys, max_context), _rope(ropes[SLIDING], keys, max_context)


def _rope(values: Mapping[str, Any], keys: _Keys, max_context: int) -> RopeSpec:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UnsupportedError(f"rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    if values.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedError("partial rotary embeddings ('partial_rotary_factor') are not supported")
    theta = positive_number(values["rope_theta"], "rope_theta")
    if kind == "default":
        return RopeSpec(theta=theta)
    original = keys.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    original = max_context if original is None else int(positive_number(original, "original_max_position_embeddings"))
    if values.get("factor") is None and kind == "yarn":
        factor = max_context / original
    else:
        factor = _scaling_number(values, "factor", kind)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        low, high = (_scaling_number(values, name, kind) for name in ("low_freq_factor", "high_freq_factor"))
        if high <= low:
            raise ModelFileError(f"rope 'high_freq_factor' {high} must be above 'low_freq_factor' {low}")
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=factor,
            original_context=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context=original,
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, factor),
    )


def _scaling_number(values: Mapping[str, Any], key: str, kind: str) -> float:
    if values.get(key) is None:
        raise ModelFileError(f"rope scaling of type {kind!r} lacks the key {key!r}")
    return positive_number(values[key], key)


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """The factor on cosines and sines (YaRN, arXiv 2309.00071, eq. 22; `mscale` pair as DeepSeek uses it)."""
    if values.get("attention_factor") is not None:
        return positive_number(values["attention_factor"], "attention_factor")

    def scaled(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if mscale and all_dim:
        return scaled(float(mscale)) / scaled(float(all_dim))
    return scaled(1.0)
