"""GGUF: every readable type, every architecture's translation, and what is refused."""

import time

import gguf
import numpy as np
import pytest
import torch
import transformers

from draftsmith.errors import ModelFileError, UnsupportedError
from draftsmith.io import gguf as gguf_module
from draftsmith.io.files import open_model
from draftsmith.io.gguf_header import READABLE_TYPES
from draftsmith.models.spec import DecoderSpec
from tests.io import samples

BLOCK_TYPES = [name for name, block in READABLE_TYPES.items() if block.elements > 1]


def random_blocks(kind, rows, columns):
    """Random blocks whose half-precision scales are finite."""
    block = READABLE_TYPES[kind]
    rng = np.random.default_rng(len(kind))
    stored = rng.integers(0, 256, (rows, columns // block.elements, block.nbytes), dtype=np.uint8)
    plain = gguf.quantize if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0") else None
    if plain is not None:
        return samples.quantised(rng.standard_normal((rows, columns)).astype(np.float32), kind)
    # The scales of K types are halves at the end (Q3_K, Q6_K) or at the start or middle; keep their exponents small.
    offsets = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for offset in offsets:
        stored[..., offset + 1] &= 0b1011_1111
    return stored.reshape(rows, -1)


class TestTypes:
    @pytest.mark.parametrize("kind", BLOCK_TYPES)
    def test_a_quantised_tensor_equals_the_gguf_packages_floats(self, kind, tmp_path, monkeypatch):
        monkeypatch.setattr(gguf_module, "CHUNK_ELEMENTS", 1 << 10)  # many chunks, the last one shorter
        stored = random_blocks(kind, 11, 512)
        expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
        tensors = samples.llama_tensors() | {"blk.0.ffn_up.weight": stored}
        path = samples.write_gguf(
            tmp_path / "m.gguf", samples.llama_metadata(), tensors, types={"blk.0.ffn_up.weight": kind}
        )
        files = open_model(str(path))
        name = "model.layers.0.mlp.up_proj.weight"
        loaded = files.load(name)
        assert np.isfinite(expected).all()
        assert loaded.shape == (11, 512) == files.shape(name)
        assert np.array_equal(loaded.numpy(), expected)
        raw = files.raw(name)
        assert (raw.type_name, raw.shape) == (kind, (11, 512))
        assert np.array_equal(raw.rows, stored)

    @pytest.mark.parametrize(("kind", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", None)])
    def test_floats_are_exact(self, kind, dtype, tmp_path):
        values = np.random.default_rng(1).standard_normal((7, 64)).astype(np.float32)
        stored = samples.quantised(values, "BF16") if dtype is None else values.astype(dtype)
        expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy() if dtype is None else stored.astype("f4")
        tensors = samples.llama_tensors() | {"blk.0.ffn_up.weight": stored}
        types = {"blk.0.ffn_up.weight": "BF16"} if dtype is None else None
        files = open_model(str(samples.write_gguf(tmp_path / "m.gguf", samples.llama_metadata(), tensors, types=types)))
        loaded = files.load("model.layers.0.mlp.up_proj.weight")
        assert np.array_equal(loaded.numpy(), expected)
        assert files.raw("model.layers.0.mlp.up_proj.weight").type_name == kind

    def test_load_gives_memory_of_its_own_in_the_asked_dtype(self, tmp_path):
        files = open_model(str(samples.small_gguf(tmp_path / "m.gguf")))
        name = "model.norm.weight"
        first = files.load(name)
        first.zero_()
        assert files.load(name).abs().sum() > 0
        assert files.load(name, torch.bfloat16).dtype == torch.bfloat16

    def test_raw_rows_of_queries_stand_in_hugging_face_order(self, tmp_path):
        files = open_model(str(samples.small_gguf(tmp_path / "m.gguf")))
        name = "model.layers.1.self_attn.q_proj.weight"
        raw = files.raw(name)
        assert raw.type_name == "Q5_0"
        values = gguf.dequantize(np.ascontiguousarray(raw.rows), gguf.GGMLQuantizationType.Q5_0)
        assert np.array_equal(values, files.load(name).numpy())


def tiny(kind, **changes):
    """A random Hugging Face model of one architecture."""
    sizes = {
        "vocab_size": 48,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{kind}Config")(**(sizes | changes))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.normal_()
    return model


def metadata_of(model, architecture, **changes):
    """Metadata as llama.cpp's converter writes it."""
    config = model.config
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": float(changes.pop("theta", 10_000.0)),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    return {f"{architecture}.{key}": value for key, value in (values | changes).items()}


GEMMA2_KEYS = {
    "attention.sliding_window": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
CASES = {
    "llama": ("llama", lambda: tiny("Llama", tie_word_embeddings=True), {}, {"interleaved": True}),
    "llama-untied-biased": (
        "llama",
        lambda: tiny("Llama", attention_bias=True, mlp_bias=True),
        {},
        {"interleaved": True},
    ),
    "mistral-window": (
        "llama",
        lambda: tiny("Mistral", sliding_window=16),
        {"attention.sliding_window": 16},
        {"interleaved": True},
    ),
    "qwen2": ("qwen2", lambda: tiny("Qwen2", head_dim=16), {}, {}),
    "qwen3": ("qwen3", lambda: tiny("Qwen3", rope_theta=1e6), {"theta": 1e6}, {}),
    "gemma2": (
        "gemma2",
        lambda: tiny("Gemma2", sliding_window=16, query_pre_attn_scalar=32),
        GEMMA2_KEYS,
        {"with_ones": True},
    ),
    "gemma3": (
        "gemma3",
        lambda: tiny("Gemma3Text", sliding_window=16, query_pre_attn_scalar=32),
        {"attention.sliding_window": 16, "theta": 1e6},
        {"with_ones": True},
    ),
}


class TestArchitectures:
    @pytest.mark.parametrize("case", CASES)
    def test_a_converted_model_comes_back(self, case, tmp_path):
        architecture, build, changes, how = CASES[case]
        model = build()
        path = samples.convert(
            tmp_path / "m.gguf", model, architecture, metadata_of(model, architecture, **dict(changes)), **how
        )
        files = open_model(str(path))
        expected = {name: value for name, value in model.state_dict().items() if name in files}
        left_out = set(model.state_dict()) - set(expected)
        assert left_out == ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
        assert set(files.tensor_names) == set(expected)
        for name, value in expected.items():
            # Adding and taking away Gemma's 1 may round the last bit.
            torch.testing.assert_close(files.load(name), value, rtol=0, atol=3e-7 if "with_ones" in how else 0)
            raw = files.raw(name)
            assert np.array_equal(raw.rows.reshape(-1).view(np.float32).reshape(raw.shape), files.load(name).numpy())
        assert DecoderSpec.from_config(files.config) == DecoderSpec.from_config(model.config.to_dict())

    def test_raw_norms_of_gemma_are_floats_without_the_one(self, tmp_path):
        architecture, build, changes, how = CASES["gemma2"]
        model = build()
        path = samples.convert(
            tmp_path / "m.gguf", model, architecture, metadata_of(model, architecture, **changes), **how
        )
        raw = open_model(str(path)).raw("model.norm.weight")
        assert raw.type_name == "F32"
        expected = model.state_dict()["model.norm.weight"].numpy()
        np.testing.assert_allclose(raw.rows.view(np.float32)[0], expected, atol=3e-7)

    @pytest.mark.parametrize(
        ("architecture", "num_layers", "expected"),
        [("gemma2", 46, 64 // 4), ("gemma3", 62, 64 // 4), ("gemma2", 26, 32)],
    )
    def test_the_27b_gemmas_scale_attention_by_width_over_heads(self, architecture, num_layers, expected, tmp_path):
        metadata = {
            f"{architecture}.{key}": value
            for key, value in {
                "block_count": num_layers,
                "context_length": 64,
                "embedding_length": 64,
                "feed_forward_length": 64,
                "attention.head_count": 4,
                "attention.head_count_kv": 2,
                "attention.key_length": 32,
                "attention.layer_norm_rms_epsilon": 1e-6,
                "attention.sliding_window": 32,
            }.items()
        }
        tensors = {f"blk.{layer}.attn_norm.weight": np.ones(64, np.float32) for layer in range(num_layers)}
        tensors["token_embd.weight"] = np.ones((8, 64), np.float32)
        files = open_model(str(samples.write_gguf(tmp_path / "m.gguf", metadata, tensors, architecture)))
        assert files.config["query_pre_attn_scalar"] == expected
        period = 2 if architecture == "gemma2" else 6
        kinds = files.config["layer_types"]
        assert [layer for layer, kind in enumerate(kinds) if kind == "full_attention"] == list(
            range(period - 1, num_layers, period)
        )

    def test_mixture_of_experts_is_refused_by_the_spec(self, tmp_path):
        files = open_model(str(samples.small_gguf(tmp_path / "m.gguf", model={"expert_count": 8})))
        with pytest.raises(UnsupportedError, match="mixture-of-experts"):
            DecoderSpec.from_config(files.config)

    def test_an_unknown_architecture_is_left_to_the_spec(self, tmp_path):
        tensors = {"token_embd.weight": np.ones((4, 32), np.float32), "blk.0.odd.weight": np.ones(32, np.float32)}
        files = open_model(str(samples.write_gguf(tmp_path / "m.gguf", {}, tensors, "mamba")))
        assert set(files.tensor_names) == set(tensors)
        with pytest.raises(UnsupportedError, match=r"'mamba'.*known: llama"):
            DecoderSpec.from_config(files.config)

    def test_a_tensor_without_a_place_is_refused(self, tmp_path):
        tensors = samples.llama_tensors() | {"blk.1.attn_sub_norm.weight": np.ones(64, np.float32)}
        path = samples.write_gguf(tmp_path / "m.gguf", samples.llama_metadata(), tensors)
        with pytest.raises(UnsupportedError, match=r"blk\.1\.attn_sub_norm\.weight"):
            open_model(str(path))

    def test_numbers_once_per_layer_are_read_when_all_agree(self, tmp_path):
        path = samples.small_gguf(tmp_path / "m.gguf", model={"attention.head_count_kv": [2, 2]})
        assert open_model(str(path)).config["num_key_value_heads"] == 2
        path = samples.small_gguf(tmp_path / "n.gguf", model={"attention.head_count_kv": [2, 1]})
        with pytest.raises(UnsupportedError, match="head_count_kv"):
            open_model(str(path))

    def test_single_precision_metadata_is_read_as_it_was_meant(self, tmp_path):
        config = open_model(str(samples.small_gguf(tmp_path / "m.gguf"))).config
        assert config["rms_norm_eps"] == 1e-5


class TestRope:
    def write(self, tmp_path, factors=None, **model):
        tensors = samples.llama_tensors()
        if factors is not None:
            tensors["rope_freqs.weight"] = factors.astype(np.float32)
        return open_model(str(samples.write_gguf(tmp_path / "m.gguf", samples.llama_metadata(**model), tensors)))

    @pytest.mark.parametrize("factor", [8.0, 32.0])
    def test_llama3_factors_become_the_rule_they_came_from(self, factor, tmp_path):
        """The factors as the converter computes them, from the inverse frequencies of transformers."""
        config = transformers.LlamaConfig(
            hidden_size=64,
            num_attention_heads=1,
            head_dim=64,
            rope_theta=500_000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        )
        scaled = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
        plain = 1.0 / 500_000.0 ** (torch.arange(0, 64, 2).float() / 64)
        files = self.write(
            tmp_path,
            (plain / scaled).numpy(),
            **{"rope.freq_base": 500_000.0, "attention.head_count": 1, "attention.head_count_kv": 1},
        )
        assert "rope_freqs.weight" not in files.tensor_names
        assert files.config["rope_scaling"] == {
            "rope_type": "llama3",
            "factor": pytest.approx(factor),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }

    def test_other_factors_are_stated_as_they_are_and_refused_by_the_spec(self, tmp_path):
        factors = np.linspace(1, 3, 8)
        files = self.write(tmp_path, factors)
        assert files.config["rope_scaling"]["long_factor"] == pytest.approx(factors)
        with pytest.raises(UnsupportedError, match="longrope"):
            DecoderSpec.from_config(files.config)

    def test_yarn(self, tmp_path):
        files = self.write(
            tmp_path,
            **{
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
        )
        rope = DecoderSpec.from_config(files.config).rope
        assert (rope.kind, rope.factor, rope.original_context, rope.beta_fast) == ("yarn", 4.0, 32, 16.0)
        assert rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)

    def test_linear(self, tmp_path):
        files = self.write(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
        assert files.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}

    def test_partial_rotation_is_refused_by_the_spec(self, tmp_path):
        files = self.write(tmp_path, **{"rope.dimension_count": 8})
        with pytest.raises(UnsupportedError, match="partial"):
            DecoderSpec.from_config(files.config)


class TestTokenizerData:
    def test_the_values_a_tokenizer_needs(self, tmp_path):
        data = open_model(str(samples.small_gguf(tmp_path / "m.gguf"))).tokenizer
        assert data["tokens"] == samples.TOKENS
        assert data["token_types"] == samples.TYPES
        assert data["merges"] == samples.MERGES
        assert (data["model"], data["pre"], data["architecture"], data["add_bos"]) == ("gpt2", "smollm", "llama", False)

    def test_end_ids_come_from_keys_and_from_well_known_control_tokens(self, tmp_path):
        files = open_model(str(samples.small_gguf(tmp_path / "m.gguf", tokenizer={"eot_token_id": 7})))
        expected = {7, samples.TOKENS.index("<|im_end|>"), samples.TOKENS.index("<|endoftext|>")}
        assert files.eos_ids == expected == set(files.tokenizer["eos_ids"])

    def test_a_file_without_a_vocabulary_opens_and_refuses_its_tokenizer(self, tmp_path):
        path = samples.write_gguf(tmp_path / "m.gguf", samples.llama_metadata(), samples.llama_tensors())
        files = open_model(str(path))
        assert files.eos_ids == frozenset()
        with pytest.raises(ModelFileError, match="no vocabulary"):
            _ = files.tokenizer

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"eos_token_id": 999_999}, "eos_token_id.*999999"),
            ({"token_type": [1, 2]}, "token_type.*2 entries"),
            ({"tokens": [1, 2]}, "array of strings"),
            ({"model": 3}, "must be a string"),
            ({"add_bos_token": "yes"}, "true or false"),
        ],
    )
    def test_contradictions_name_the_key(self, change, message, tmp_path):
        files = open_model(str(samples.small_gguf(tmp_path / "m.gguf", tokenizer=change)))
        with pytest.raises(ModelFileError, match=message):
            _ = files.tokenizer

    def test_chat_template_and_name(self, tmp_path):
        metadata = samples.llama_metadata() | {"tokenizer.chat_template": "{{ messages }}"}
        path = samples.write_gguf(tmp_path / "m.gguf", metadata, samples.llama_tensors())
        files = open_model(str(path))
        assert files.chat_template == "{{ messages }}"
        assert files.name == str(path)


class TestRealFile:
    def test_smollm2_opens_in_well_under_a_second(self):
        """The `gguf` package's reader needs 2.4 s for this vocabulary."""
        start = time.process_time()
        files = open_model("smollm2")
        assert len(files.tokenizer["tokens"]) == 49152
        assert time.process_time() - start < 1.0
        assert len(files.tensor_names) == 272
        assert files.config["tie_word_embeddings"]
