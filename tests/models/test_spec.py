"""Configs in, decoder specs out: published shapes, both rope forms, and every refusal by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.errors import ModelFileError, UnsupportedError, UserError
from draftsmith.models.rope import RotaryTable, inverse_frequencies
from draftsmith.models.spec import DecoderSpec, RopeSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
GEMMA3_4B_ON_THE_HUB: dict[str, Any] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def test_smollm2() -> None:
    spec = DecoderSpec.from_config(LLAMA)
    assert (spec.width, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (576, 30, 9, 3, 64)
    assert spec.group_size == 3
    assert spec.tied_head
    assert spec.rope == spec.window_rope == RopeSpec(theta=100_000.0)
    assert spec.attention_scale == 0.125
    assert spec.layer_windows == (None,) * 30
    assert spec.window is None
    assert not (spec.qkv_bias or spec.qk_norm or spec.norm_offset or spec.sandwich_norms)


def test_gemma3_hub_file_leaves_out_what_equals_the_defaults() -> None:
    spec = DecoderSpec.from_config(GEMMA3_4B_ON_THE_HUB)
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262_208, 8, 4, 256)
    assert spec.layer_windows[:7] == (1024,) * 5 + (None, 1024)
    assert spec.rope == RopeSpec(theta=1_000_000.0, kind="linear", factor=8.0)
    assert spec.window_rope == RopeSpec(theta=10_000.0)
    assert spec.embedding_scale == pytest.approx(2560**0.5)
    assert spec.tied_head
    assert spec.attention_cap is spec.logit_cap is None
    assert spec.qk_norm and spec.norm_offset and spec.sandwich_norms
    assert spec.activation == "gelu_tanh"


def test_gemma2_defaults() -> None:
    config = {**LLAMA, "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh"}
    spec = DecoderSpec.from_config(config)
    assert spec.layer_windows[:4] == (4096, None, 4096, None)
    assert (spec.attention_cap, spec.logit_cap) == (50.0, 30.0)
    assert spec.attention_scale == 256**-0.5
    assert not spec.qk_norm


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "mistral", "sliding_window": 100}, [100] * 4),
        ({"model_type": "qwen2", "sliding_window": 100, "max_window_layers": 2}, [None] * 4),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 3},
            [None, None, None, 100],
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 100,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [100, None, 100, None],
        ),
        ({"model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 3}, [5, 5, None, 5]),
        ({"model_type": "llama", "sliding_window": 100}, [None] * 4),
    ],
)
def test_layer_windows(changes: dict[str, Any], windows: list[int | None]) -> None:
    spec = DecoderSpec.from_config({**without(LLAMA, "hidden_act"), "num_hidden_layers": 4, **changes})
    assert list(spec.layer_windows) == windows


def test_biases_and_norms_by_architecture() -> None:
    qwen2 = DecoderSpec.from_config({**LLAMA, "model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 64)
    qwen3 = DecoderSpec.from_config({**LLAMA, "model_type": "qwen3"})
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    llama = DecoderSpec.from_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


def test_kv_heads_default_to_heads_for_old_llama_files() -> None:
    assert DecoderSpec.from_config(without(LLAMA, "num_key_value_heads")).num_kv_heads == 9


YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSpec(theta=1e5, kind="linear", factor=2.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
            RopeSpec(theta=7.0, kind="linear", factor=2.0),
        ),
        ({"rope_scaling": {"rope_type": "default"}}, RopeSpec(theta=1e5)),
        ({"rope_scaling": None}, RopeSpec(theta=1e5)),
        (
            {"rope_scaling": {"type": "yarn", **YARN}},
            RopeSpec(theta=1e5, kind="yarn", factor=4.0, original_context=2048, attention_factor=1.138629436111989),
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096, "attention_factor": 1.5}},
            RopeSpec(theta=1e5, kind="yarn", factor=2.0, original_context=4096, attention_factor=1.5),
        ),
        (
            {"rope_scaling": {"type": "llama3", **YARN, "low_freq_factor": 1, "high_freq_factor": 4}},
            RopeSpec(theta=1e5, kind="llama3", factor=4.0, original_context=2048),
        ),
    ],
)
def test_rope_forms(rope: dict[str, Any], expected: RopeSpec) -> None:
    spec = DecoderSpec.from_config({**LLAMA, **rope})
    assert spec.rope == spec.window_rope == expected


def test_nested_rope_parameters_of_transformers_5() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {**GEMMA3_4B_ON_THE_HUB["text_config"], "rope_scaling": None, "rope_parameters": nested}
    assert DecoderSpec.from_config(config) == DecoderSpec.from_config(
        {**GEMMA3_4B_ON_THE_HUB["text_config"], "architectures": ["Gemma3ForCausalLM"]}
    )


def test_rotary_rows_are_unit_complex_numbers_at_any_position() -> None:
    rope = RopeSpec(theta=10_000.0)
    table = RotaryTable(rope, 16, dtype=torch.float64, device=torch.device("cpu"))
    positions = torch.tensor([0, 5, 511, 512, 70_000, 3])
    rows = table.rows(positions, 70_001)
    angles = positions.float()[:, None] * inverse_frequencies(rope, 16)
    assert rows.shape == (6, 1, 8)
    torch.testing.assert_close(rows[:, 0].real, angles.cos().double(), atol=0, rtol=0)
    torch.testing.assert_close(rows[:, 0].imag, angles.sin().double(), atol=0, rtol=0)


@pytest.mark.parametrize(
    "key",
    ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelFileError, match=repr(key)):
        DecoderSpec.from_config(without(LLAMA, key))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads": 7}, "'hidden_size' 576 is not a multiple of 'num_attention_heads' 7"),
        ({"num_key_value_heads": 2}, "'num_attention_heads' 9 is not a multiple of 'num_key_value_heads' 2"),
        ({"head_dim": 63}, "'head_dim' 63 is odd"),
        ({"hidden_size": 0}, "'hidden_size' is 0"),
        ({"hidden_size": "576"}, "'hidden_size' is '576'"),
        ({"vocab_size": True}, "'vocab_size' is True"),
        ({"rms_norm_eps": -1.0}, "'rms_norm_eps' is -1.0"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"rope_theta": 0}, "'rope_theta' is 0"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'"),
        ({"rope_scaling": {"type": "linear"}}, "rope of type 'linear' lacks the key 'factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "lacks the key 'low_freq_factor'"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            "'high_freq_factor' 1.0 must be above",
        ),
        ({"model_type": "gemma3_text", "hidden_act": None, "layer_types": ["full_attention"]}, "'layer_types' has 1"),
    ],
)
def test_inconsistent_values_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        DecoderSpec.from_config({**LLAMA, **changes})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mixtral"}, "'mixtral' is a mixture of experts"),
        ({"model_type": "mamba2"}, "'mamba2' is a recurrent"),
        ({"model_type": "llava"}, "'llava' is a vision-language model"),
        ({"model_type": "gpt_neox"}, "'gpt_neox' is not supported; known: llama, mistral, qwen2"),
        ({"num_local_experts": 8}, "'num_local_experts'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'quantization_config'"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "'partial_rotary_factor'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"model_type": "gemma3_text", "hidden_act": None, "attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "'use_bidirectional_attention'"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["chunked_attention"] * 30,
            },
            "'chunked_attention'",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        DecoderSpec.from_config({**LLAMA, **changes})
    assert named in str(caught.value)


ROPE_KEYS = st.sampled_from(
    ["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "full_attention", "beta_fast"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ROPE_KEYS, inner, max_size=5),
    max_leaves=6,
)
KEYS = [
    *LLAMA,
    *("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("text_config", "head_dim", "attention_bias", "query_pre_attn_scalar", "final_logit_softcapping"),
    *("sliding_window_pattern", "partial_rotary_factor", "original_max_position_embeddings", "hidden_activation"),
]
KINDS = st.sampled_from([{"rope_type": kind} for kind in ("linear", "llama3", "yarn", "default")])


@given(
    architecture=st.sampled_from(["llama", "mistral", "qwen3", "gemma2", "gemma3_text"]),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON | KINDS, max_size=4),
    kind=KINDS | st.just({}),
)
@settings(max_examples=500, deadline=None)
def test_any_json_gives_a_spec_or_one_clear_line(
    architecture: str, changes: dict[str, Any], kind: dict[str, Any]
) -> None:
    config = {**LLAMA, "model_type": architecture, **changes}
    if isinstance(config.get("rope_scaling"), dict):
        config["rope_scaling"] = {**config["rope_scaling"], **kind}
    try:
        spec = DecoderSpec.from_config(config)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert spec.num_heads % spec.num_kv_heads == 0
        assert len(spec.layer_windows) == spec.num_layers


def test_an_absurd_number_of_layers_costs_nothing() -> None:
    """A list of all layers was made before any tensor was looked for: 8 GB for a thousand million."""
    with pytest.raises(ModelFileError, match="'num_hidden_layers' is 1000000000; at most 4096"):
        DecoderSpec.from_config({**LLAMA, "num_hidden_layers": 1_000_000_000})


def test_mimo_is_qwen2_with_a_key_that_says_so():
    """Its config says `attention_bias`, which elsewhere gives the output projection one too."""
    config = {**LLAMA, "model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    spec = DecoderSpec.from_config(config)
    assert (spec.qkv_bias, spec.output_bias, spec.window) == (True, False, None)
