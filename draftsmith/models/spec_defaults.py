"""The table of known architectures: what each does beyond the common decoder, and its published defaults.

Read by `spec` alone. A config file may leave out keys that equal the architecture's defaults, so the
defaults here are those of the published config classes; adding an architecture is one entry.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What no config key says about an architecture.

    `window_rule`: "none" (never windowed), "all" (every layer when `sliding_window` is set), "switched"
    (layers from `max_window_layers` on when `use_sliding_window`), "pattern" (all but each n-th layer).
    """

    defaults: Mapping[str, Any]
    window_rule: str = "none"
    qk_norm: bool = False
    always_qkv_bias: bool = False
    norm_offset: bool = False
    sandwich_norms: bool = False
    scaled_embedding: bool = False
    query_scalar: bool = False


def _defaults(**values: Any) -> Mapping[str, Any]:
    common = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu"}
    return types.MappingProxyType({**common, **values})


_GEMMA = {
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Traits(
    defaults=_defaults(
        **_GEMMA,
        vocab_size=262_208,
        max_position_embeddings=131_072,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        sliding_window_pattern=6,
    ),
    window_rule="pattern",
    qk_norm=True,
    norm_offset=True,
    sandwich_norms=True,
    scaled_embedding=True,
    query_scalar=True,
)

_QWEN2 = Traits(
    defaults=_defaults(max_position_embeddings=32_768, sliding_window=4096, max_window_layers=28),
    window_rule="switched",
    always_qkv_bias=True,
)

ARCHITECTURES: Mapping[str, Traits] = types.MappingProxyType(
    {
        "llama": Traits(defaults=_defaults(max_position_embeddings=2048)),
        "mistral": Traits(
            defaults=_defaults(max_position_embeddings=131_072, num_key_value_heads=8, sliding_window=4096),
            window_rule="all",
        ),
        "qwen2": _QWEN2,
        "mimo": _QWEN2,  # and prediction layers, which are a drafter's
        "qwen3": Traits(
            defaults=_defaults(max_position_embeddings=32_768, sliding_window=4096, max_window_layers=28, head_dim=128),
            window_rule="switched",
            qk_norm=True,
        ),
        "gemma2": Traits(
            defaults=_defaults(
                **_GEMMA,
                vocab_size=256_000,
                max_position_embeddings=8192,
                final_logit_softcapping=30.0,
                attn_logit_softcapping=50.0,
                sliding_window_pattern=2,
            ),
            window_rule="pattern",
            norm_offset=True,
            sandwich_norms=True,
            scaled_embedding=True,
            query_scalar=True,
        ),
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
    }
)

NOT_A_PLAIN_DECODER: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(
            (
                "mixtral",
                "qwen2_moe",
                "qwen3_moe",
                "deepseek_v2",
                "deepseek_v3",
                "dbrx",
                "gpt_oss",
                "granitemoe",
                "jetmoe",
                "llama4",
                "olmoe",
                "phimoe",
                "glm4_moe",
            ),
            "a mixture of experts",
        ),
        **dict.fromkeys(
            (
                "mamba",
                "mamba2",
                "falcon_mamba",
                "falcon_h1",
                "jamba",
                "bamba",
                "zamba",
                "zamba2",
                "rwkv",
                "recurrent_gemma",
                "qwen3_next",
                "nemotron_h",
                "lfm2",
            ),
            "a recurrent (state-space) or hybrid model",
        ),
        **dict.fromkeys(
            (
                "llava",
                "llava_next",
                "qwen2_vl",
                "qwen2_5_vl",
                "qwen3_vl",
                "paligemma",
                "idefics3",
                "smolvlm",
                "mllama",
                "mistral3",
                "pixtral",
                "internvl",
                "gemma3n",
            ),
            "a vision-language model",
        ),
    }
)
