"""Names and config keys as other projects spell them, written out by hand: a round trip cannot notice a wrong one."""

import dataclasses

import pytest
import torch

from draftsmith.dialects.convert import export
from draftsmith.dialects.dialect import Choices
from draftsmith.dialects.llama_layer import layer_config, layer_shape
from draftsmith.dialects.table import dialect_named
from draftsmith.drafters.draft_layer import LayerShape
from draftsmith.errors import UnsupportedError
from tests.dialects.support import make_target, native_of, published_of, read

LAYER = {
    f"{part}.weight"
    for part in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "post_attention_layernorm",
    )
}


def both(*parts: str) -> set[str]:
    """Weight and bias of each."""
    return {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}


BOTH_NORMS = {"input_layernorm.weight", "hidden_norm.weight"}
NAMES = {
    ("eagle3", "eagle3"): {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    | {f"midlayer.{name}" for name in LAYER | BOTH_NORMS},
    ("eagle3-speculators", "eagle3.1"): {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    | {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}
    | {f"layers.0.{name}" for name in LAYER | BOTH_NORMS},
    ("eagle1", "eagle1"): {"fc.weight", "fc.bias"} | {f"layers.0.{name}" for name in LAYER},
    ("medusa", "medusa"): both(*(f"{head}.{layer}.linear" for head in "012" for layer in "01"))
    | {"0.2.weight", "1.2.weight", "2.2.weight"},
    ("medusa2", "medusa-target"): both("medusa_head.0.0.linear", "medusa_head.1.0.linear")
    | {"medusa_head.0.1.weight", "medusa_head.1.1.weight"},
    ("medusa-vllm", "medusa-few"): {f"blocks.{head}.layers.0.{kind}" for head in "01" for kind in ("weight", "bias")}
    | {"lm_heads.0.weight", "token_map"},
    ("hydra", "hydra-shared"): {f"hydra_mlp.{head}.0.linear.{kind}" for head in "01" for kind in ("weight", "bias")}
    | {f"hydra_mlp.{head}.0.res_connection.{kind}" for head in "01" for kind in ("weight", "bias")}
    | {f"hydra_lm_head.{head}.{kind}" for head in "01" for kind in ("weight", "bias")},
    ("hydra", "hydra++"): both(*(f"hydra_mlp.{head}.{place}.linear" for head in "01" for place in "13"))
    | {f"hydra_mlp.{head}.1.res_connection.{kind}" for head in "01" for kind in ("weight", "bias")}
    | {f"hydra_lm_head.{head}.1.{kind}" for head in "01" for kind in ("weight", "bias")}
    | {f"prefix_embeding_layer.layers.0.{name}" for name in LAYER | {"input_layernorm.weight"}}
    | {"prefix_embeding_layer.norm.weight"},
    ("mlp-speculator", "mlp-untied"): {
        f"speculator.{part}.{stage}.weight" for part in ("emb", "proj", "ln", "head") for stage in "01"
    }
    | {"speculator.ln.0.bias", "speculator.ln.1.bias"},
    ("mlp-speculator", "mlp"): {"speculator.emb.0.weight", "speculator.ln.0.weight", "speculator.ln.0.bias"}
    | {"speculator.proj.0.weight", "speculator.proj.1.weight"}
    | {f"speculator.head.{stage}.weight" for stage in "012"},
    ("mtp-deepseek", "mtp"): {
        f"model.layers.8.{name}"
        for name in LAYER
        | {"input_layernorm.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    },
    ("mtp-qwen", "mtp-qwen"): {
        f"mtp.layers.0.{name}"
        for name in LAYER | {"input_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    }
    | {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"},
    ("mtp-mimo", "mtp-mimo"): {
        f"model.mtp_layers.0.{name}"
        for name in LAYER
        | {f"self_attn.{part}_proj.bias" for part in "qkv"}
        | {"input_layernorm.weight", "token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight"}
        | {"final_layernorm.weight"}
    },
}  # fmt: skip


@pytest.mark.parametrize(("dialect", "drafter"), NAMES)
def test_names(dialect, drafter):
    assert published_of(drafter, dialect).names == NAMES[dialect, drafter]


@pytest.mark.parametrize(
    ("dialect", "drafter", "pairs"),
    [
        ("eagle3", "eagle3", {"midlayer.hidden_norm.weight": "hidden_norm.weight", "fc.weight": "fc.weight",
                              "midlayer.input_layernorm.weight": "input_layernorm.weight"}),
        ("eagle1", "eagle1", {"layers.0.mlp.up_proj.weight": "layer.mlp.up_proj.weight"}),
        ("medusa", "medusa", {"2.1.linear.bias": "blocks.2.1.bias", "1.2.weight": "lm_heads.1.weight"}),
        ("medusa-vllm", "medusa", {"blocks.2.layers.1.bias": "blocks.2.1.bias"}),
        ("hydra", "hydra++", {"hydra_mlp.1.3.linear.weight": "heads.1.blocks.0.weight",
                              "hydra_mlp.1.1.linear.weight": "heads.1.linear.weight",
                              "prefix_embeding_layer.norm.weight": "prefix_norm.weight"}),
        ("mlp-speculator", "mlp", {"speculator.proj.1.weight": "proj.1.weight",
                                   "speculator.head.2.weight": "lm_heads.0.weight"}),
        ("mtp-deepseek", "mtp", {"model.layers.8.enorm.weight": "token_norm.weight",
                                 "model.layers.8.hnorm.weight": "hidden_norm.weight",
                                 "model.layers.8.shared_head.norm.weight": "norm.weight"}),
        ("mtp-mimo", "mtp-mimo", {"model.mtp_layers.0.token_layernorm.weight": "token_norm.weight",
                                  "model.mtp_layers.0.final_layernorm.weight": "norm.weight"}),
    ],
)  # fmt: skip
def test_what_stands_under_a_name(dialect, drafter, pairs):
    published, native = published_of(drafter, dialect), native_of(drafter)
    for theirs, ours in pairs.items():
        assert torch.equal(published.load(theirs), native.tensors[ours]), theirs


def test_a_hydra_heads_bias_is_one_row_of_ours():
    published, native = published_of("hydra", "hydra"), native_of("hydra")
    assert torch.equal(published.load("hydra_lm_head.2.bias"), native.tensors["head_bias"][2])


def test_switches_of_the_prediction_layers():
    found = {name: read(published_of(drafter, name), name)[0].config for name, drafter in (
        ("mtp-deepseek", "mtp"), ("mtp-qwen", "mtp-qwen"), ("mtp-mimo", "mtp-mimo"))}  # fmt: skip
    keys = ("hidden_first", "norm_output", "raw_hidden")
    assert [found["mtp-deepseek"][key] for key in keys] == [False, False, False]
    assert [found["mtp-qwen"][key] for key in keys] == [False, True, False]
    assert [found["mtp-mimo"][key] for key in keys] == [True, True, True]


CONFIGS = {
    ("eagle3", "eagle3"): {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 43, "num_hidden_layers": 1},
    ("eagle3", "eagle3.1"): {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    ("eagle3-speculators", "eagle3"): {"speculators_model_type": "eagle3", "norm_before_residual": False},
    ("eagle1", "eagle1"): {"bias": True, "vocab_size": 64, "hidden_size": 32},
    ("medusa", "medusa"): {"medusa_num_heads": 3, "medusa_num_layers": 2, "medusa_fc_bias": True},
    ("medusa-vllm", "medusa"): {"num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": True, "model_type": "medusa"},
    ("hydra", "hydra++"): {"hydra_num_heads": 2, "hydra_num_layers": 2, "hydra_head_arch": "prefix-mlp"},
    ("mlp-speculator", "mlp"): {
        "emb_dim": 32,
        "inner_dim": 16,
        "n_predict": 3,
        "tie_weights": True,
        "scale_input": True,
    },
    ("mtp-mimo", "mtp-mimo"): {"num_nextn_predict_layers": 1, "num_hidden_layers": 8},
    ("mtp-qwen", "mtp-qwen"): {"mtp_num_hidden_layers": 1},
}


@pytest.mark.parametrize(("dialect", "drafter"), CONFIGS)
def test_config_keys(dialect, drafter):
    config = published_of(drafter, dialect).config
    assert {key: config[key] for key in CONFIGS[dialect, drafter]} == CONFIGS[dialect, drafter]


def test_false_switches_are_left_out_of_flat_configs():
    """`norm_output` false would be another drafter to SpecForge."""
    config = published_of("eagle3", "eagle3").config
    assert not {"norm_before_residual", "norm_output", "fc_norm"} & set(config)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({}, "llama"), ({"qkv_bias": True}, "llama"), ({"qk_norm": True}, "qwen3"),
     ({"qk_norm": True, "qkv_bias": True}, "qwen3")],
)  # fmt: skip
def test_layers_of_other_families(fields, kind):
    shape = LayerShape(width=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=48, **fields)
    config = layer_config(shape, 64, 256)
    assert (config["model_type"], config["attention_bias"]) == (kind, False)
    assert config.get("qkv_bias", False) == shape.qkv_bias
    assert LayerShape(**layer_shape(config, "here")[0]) == shape
    # Others say it by the family, or by one key for all four projections.
    for given in ({"model_type": "qwen2"}, {"model_type": "llama", "attention_bias": True}):
        plain = {key: value for key, value in layer_config(dataclasses.replace(shape, qk_norm=False), 64, 256).items()
                 if key != "qkv_bias"}  # fmt: skip
        assert layer_shape({**plain, **given}, "here")[0]["qkv_bias"]


def test_a_wider_layer_is_not_written():
    native = native_of("eagle3")
    wide = dataclasses.replace(native, config={**native.config, "width": 48})
    for dialect in ("eagle3", "eagle3-speculators"):
        with pytest.raises(UnsupportedError, match="48 wide beside a target of 32"):
            export(wide, dialect_named(dialect), make_target(), Choices())
