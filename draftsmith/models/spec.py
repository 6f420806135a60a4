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
from draftsmith.models.config_keys import Keys
from draftsmith.models.spec_defaults import ARCHITECTURES, NOT_A_PLAIN_DECODER, ROPE_KINDS, Traits

SLIDING = "sliding_attention"
FULL = "full_attention"
MAX_LAYERS = 4096
"""Many times the deepest model in use; lists of layers are made before a tensor is looked for."""
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
    def num_parameters(self) -> int:
        """Weights of the matrices; norms and biases, a thousandth of them, are left out."""
        heads = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = self.width * (heads + 3 * self.mlp_width)
        return self.num_layers * layer + self.vocab_size * self.width * (1 if self.tied_head else 2)

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
        architecture = _architecture(Keys(config, {}, "config").text("model_type"))
        defaults, what = ARCHITECTURES[architecture].defaults, f"config of this {architecture} model"
        inner = Keys(config, {}, what).object("text_config")
        if inner:
            shared = ("tie_word_embeddings", "quantization_config")
            config = {key: config[key] for key in shared if key in config} | inner
        keys = Keys(config, defaults, what)
        _refuse(architecture, keys)
        return _build(architecture, keys)


def _architecture(name: str) -> str:
    if name in ARCHITECTURES:
        return name
    known = ", ".join(ARCHITECTURES)
    reason = NOT_A_PLAIN_DECODER.get(name)
    if reason is not None:
        raise UnsupportedError(f"architecture {name!r} is {reason}, which is not supported; known: {known}")
    raise UnsupportedError(f"architecture {name!r} is not supported; known: {known}")


def _refuse(architecture: str, keys: Keys) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if keys.get(key):
            raise UnsupportedError(f"mixture-of-experts models are not supported (config key {key!r})")
    if keys.get("quantization_config"):
        raise UnsupportedError("weights quantised inside safetensors ('quantization_config') are not supported")
    if keys.get("use_bidirectional_attention"):
        raise UnsupportedError("bidirectional attention ('use_bidirectional_attention') is not supported")
    if architecture.startswith("gemma3") and keys.get("attn_logit_softcapping") is not None:
        raise UnsupportedError("'attn_logit_softcapping' is not supported for gemma3")
    _refuse_partial_rotary(keys)


def _refuse_partial_rotary(keys: Keys) -> None:
    if keys.get("partial_rotary_factor") not in (None, 1.0):
        value = keys.get("partial_rotary_factor")
        raise UnsupportedError(f"partial rotary embeddings ('partial_rotary_factor' {value!r}) are not supported")


def _build(architecture: str, keys: Keys) -> DecoderSpec:
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
    if num_layers > MAX_LAYERS:
        raise ModelFileError(f"'num_hidden_layers' is {num_layers}; at most {MAX_LAYERS} are read")
    activation_key = "hidden_activation" if keys.get("hidden_activation") is not None else "hidden_act"
    activation = keys.text(activation_key)
    if activation not in _ACTIVATIONS:
        allowed = ", ".join(_ACTIVATIONS)
        raise UnsupportedError(f"{activation_key!r} {activation!r} is not supported; known: {allowed}")
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
        layer_windows=_layer_windows(traits, keys, num_layers),
        attention_scale=scalar**-0.5,
        activation=_ACTIVATIONS[activation],
        norm_eps=keys.number("rms_norm_eps"),
        norm_offset=traits.norm_offset,
        sandwich_norms=traits.sandwich_norms,
        qk_norm=traits.qk_norm,
        qkv_bias=bias or traits.always_qkv_bias,
        output_bias=bias and not traits.always_qkv_bias,
        mlp_bias=keys.flag("mlp_bias"),
        attention_cap=_optional(keys, "attn_logit_softcapping"),
        logit_cap=_optional(keys, "final_logit_softcapping"),
        embedding_scale=math.sqrt(width) if traits.scaled_embedding else 1.0,
        tied_head=keys.flag("tie_word_embeddings"),
    )


def _optional(keys: Keys, key: str) -> float | None:
    return None if keys.get(key) is None else keys.number(key)


def _layer_windows(traits: Traits, keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    rule = traits.window_rule
    if rule == "none" or keys.get("sliding_window") is None:
        return (None,) * num_layers
    if rule == "switched" and not keys.flag("use_sliding_window"):
        return (None,) * num_layers
    window = keys.integer("sliding_window")
    if rule == "all":
        return (window,) * num_layers
    if keys.get("layer_types") is not None:
        kinds = keys.texts("layer_types")
    elif rule == "switched":
        first = keys.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int):
            raise ModelFileError(f"config key 'max_window_layers' is {first!r}; a whole number is needed")
        kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    else:
        period = keys.integer("sliding_window_pattern")
        kinds = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise ModelFileError(f"'layer_types' has {len(kinds)} entries for 'num_hidden_layers' {num_layers}")
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise UnsupportedError(f"layer type {kind!r} is not supported; known: {SLIDING}, {FULL}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _ropes(keys: Keys, max_context: int) -> tuple[RopeSpec, RopeSpec]:
    """The rope of full layers and of windowed layers."""
    given, scaling = keys.object("rope_parameters"), keys.object("rope_scaling")
    theta, local_theta = keys.get("rope_theta"), keys.get("rope_local_base_freq")
    if FULL in given or SLIDING in given:
        nested = Keys(given, {}, "rope_parameters")
        full, sliding = nested.object(FULL), nested.object(SLIDING)
    else:
        full = scaling or given
        # Only the full layers of an architecture with a local theta carry the scaling.
        sliding = {} if local_theta is not None else full
    local = theta if local_theta is None else local_theta
    original = keys.get("original_max_position_embeddings")
    return (
        _rope({"rope_theta": theta} | full, original, max_context),
        _rope({"rope_theta": local} | sliding, original, max_context),
    )


def _rope(values: Mapping[str, Any], original_context: Any, max_context: int) -> RopeSpec:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UnsupportedError(f"rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    defaults = {"original_max_position_embeddings": max_context}
    if original_context is not None:
        values = {**values, "original_max_position_embeddings": original_context}
    keys = Keys(values, defaults, f"rope of type {kind!r}")
    _refuse_partial_rotary(keys)
    theta = keys.number("rope_theta")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=keys.number("factor"))
    original = keys.integer("original_max_position_embeddings")
    if kind == "llama3":
        low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
        if high <= low:
            raise ModelFileError(f"rope 'high_freq_factor' {high} must be above 'low_freq_factor' {low}")
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=keys.number("factor"),
            original_context=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if theta <= 1:
        raise ModelFileError(f"rope 'rope_theta' {theta} must be above 1 for type 'yarn'")
    factor = max_context / original if keys.get("factor") is None else keys.number("factor")
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context=original,
        beta_fast=keys.number("beta_fast") if keys.get("beta_fast") else 32.0,
        beta_slow=keys.number("beta_slow") if keys.get("beta_slow") else 1.0,
        truncate=keys.get("truncate") is None or keys.flag("truncate"),
        attention_factor=_yarn_attention_factor(keys, factor),
    )


def _yarn_attention_factor(keys: Keys, factor: float) -> float:
    """The factor on cosines and sines (YaRN, arXiv 2309.00071, eq. 22; `mscale` pair as DeepSeek uses it)."""
    if keys.get("attention_factor") is not None:
        return keys.number("attention_factor")

    def scaled(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if keys.get("mscale") and keys.get("mscale_all_dim"):
        return scaled(keys.number("mscale")) / scaled(keys.number("mscale_all_dim"))
    return scaled(1.0)
