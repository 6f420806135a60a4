"""From GGUF's names to Hugging Face's: configuration keys, tensor names, tokenizer data, end-of-answer ids.

Called by `io.gguf`. Facts are those of llama.cpp's converter (`convert_hf_to_gguf.py`) read backwards.
Invariant: a tensor that would change the numbers and has no place in a known architecture is refused,
never left out; an unknown architecture keeps its own names and is left to `DecoderSpec` to refuse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from draftsmith.errors import ModelFileError, UnsupportedError
from draftsmith.io.gguf_header import Metadata, TensorEntry

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "mistral",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "gemma2": "gemma2",
        "gemma3": "gemma3_text",
    }
)
"""GGUF architecture -> Hugging Face `model_type`. GGUF writes Mistral and SmolLM2 as `llama` too."""

PERMUTED = frozenset({"llama", "mistral"})
"""Architectures whose query and key rows the converter interleaves for llama.cpp's rotary embedding."""

_GLOBAL_NAMES = MappingProxyType({"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"})
_LAYER_NAMES = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_GEMMA_LAYER_NAMES = MappingProxyType(
    {
        **_LAYER_NAMES,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
_IGNORED = re.compile(r"rope_freqs\.weight|(blk\.\d+\.)?attn_rot_embd\.weight")
"""Rotary tables: the factors are read into the config, the frequencies follow from it."""

_END_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
"""Control tokens that end an answer or a text in every vocabulary that has them."""

_CONTROL = 3


def architecture_of(metadata: Metadata) -> str:
    """The file's own architecture name."""
    name = metadata.text("general.architecture")
    if not name:
        metadata.fail("metadata key 'general.architecture' is missing")
    return name


def tensor_names(architecture: str, tensors: Mapping[str, TensorEntry], where: str) -> dict[str, str]:
    """Hugging Face name -> GGUF name. Raises `UnsupportedError` for a tensor without a place, `ModelFileError` for
    two in one."""
    if architecture not in ARCHITECTURES:
        return {name: name for name in tensors}
    names: dict[str, str] = {}
    for name in tensors:
        if _IGNORED.fullmatch(name):
            continue
        translated = _hugging_face_name(architecture, name)
        if translated is None:
            raise UnsupportedError(f"{where}: tensor {name!r} has no place in architecture {architecture!r}")
        if translated in names:
            raise ModelFileError(f"{where}: tensors {names[translated]!r} and {name!r} both stand for {translated!r}")
        names[translated] = name
    return names


def _hugging_face_name(architecture: str, name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES and kind == "weight":
        return f"{_GLOBAL_NAMES[stem]}.weight"
    layer = _LAYER_TENSOR.fullmatch(name)
    table = _GEMMA_LAYER_NAMES if architecture.startswith("gemma") else _LAYER_NAMES
    if layer is None or layer[2] not in table:
        return None
    return f"model.layers.{int(layer[1])}.{table[layer[2]]}.{layer[3]}"


def translate_config(
    metadata: Metadata, tensors: Mapping[str, TensorEntry], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """A Hugging Face config. `rope_factors`: the `rope_freqs` tensor [head_dim / 2], if the file has one.

    An unknown architecture gives only its name as `model_type`.
    """
    architecture = architecture_of(metadata)
    if architecture not in ARCHITECTURES:
        return {"model_type": architecture}
    key = f"{architecture}.{{}}".format
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        metadata.fail("tensor 'token_embd.weight' is missing")
    num_heads = _per_layer_integer(metadata, key("attention.head_count"))
    width = metadata.require_integer(key("embedding_length"))
    head_dim = metadata.integer(key("attention.key_length")) or width // num_heads
    if not head_dim:
        metadata.fail(f"metadata key {key('embedding_length')!r} is {width}, too few for {num_heads} heads")
    if metadata.integer(key("attention.value_length"), head_dim) != head_dim:
        raise UnsupportedError(f"{metadata.where}: key and value heads of different sizes are not supported")
    epsilon = metadata.number(key("attention.layer_norm_rms_epsilon"))
    if epsilon is None:
        metadata.fail(f"metadata key {key('attention.layer_norm_rms_epsilon')!r} is missing")
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": _per_layer_integer(metadata, key("feed_forward_length")),
        "num_hidden_layers": _num_layers(metadata, key("block_count"), tensors),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _per_layer_integer(metadata, key("attention.head_count_kv"), num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.require_integer(key("context_length")),
        "rms_norm_eps": epsilon,
        "tie_word_embeddings": "output.weight" not in tensors,
        **_rope(metadata, key, head_dim, rope_factors),
    }
    if metadata.integer(key("expert_count"), 0):
        config["num_local_experts"] = metadata.integer(key("expert_count"))
    if architecture in PERMUTED:
        config["attention_bias"] = "blk.0.attn_output.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
        if metadata.integer(key("attention.sliding_window"), 0):
            config |= {"model_type": "mistral", "sliding_window": metadata.integer(key("attention.sliding_window"))}
    if architecture.startswith("gemma"):
        config |= _gemma(metadata, key, config)
    return config


def _num_layers(metadata: Metadata, key: str, tensors: Mapping[str, TensorEntry]) -> int:
    announced = metadata.require_integer(key)
    layers = {int(found[1]) for name in tensors if (found := _LAYER_TENSOR.fullmatch(name))}
    if layers != set(range(min(announced, len(layers) + 1))):
        metadata.fail(f"metadata key {key!r} announces {announced} layers, there are tensors of {len(layers)}")
    return announced


def _per_layer_integer(metadata: Metadata, key: str, default: int | None = None) -> int:
    """A number that newer files may write once per layer; all layers must agree."""
    value = metadata.values.get(key)
    if isinstance(value, np.ndarray):
        if not len(value) or (value != value[0]).any() or not np.issubdtype(value.dtype, np.integer) or value[0] < 1:
            raise UnsupportedError(
                f"{metadata.where}: metadata key {key!r} differs between layers, which is not supported"
            )
        return int(value[0])
    return metadata.require_integer(key) if default is None or value is not None else default


def _gemma(metadata: Metadata, key: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 2 and 3: soft caps, alternating windows, and the attention scale that no file states.

    The 27B models scale by width / heads, all others by the head size (llama.cpp tells them apart by their
    number of layers: 46 and 62).
    """
    is_gemma2 = config["model_type"] == "gemma2"
    num_layers = config["num_hidden_layers"]
    is_27b = num_layers == (46 if is_gemma2 else 62)
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    pattern = metadata.values.get(key("attention.sliding_window_pattern"))
    if isinstance(pattern, np.ndarray):
        sliding = [bool(value) for value in pattern]
    else:
        period = metadata.integer(key("attention.sliding_window_pattern"), 2 if is_gemma2 else 6) or 1
        sliding = [bool((layer + 1) % period) for layer in range(num_layers)]
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": metadata.number(key("attn_logit_softcapping"), 50.0 if is_gemma2 else None),
        "final_logit_softcapping": metadata.number(key("final_logit_softcapping"), 30.0 if is_gemma2 else None),
        "sliding_window": metadata.integer(key("attention.sliding_window"), 4096 if is_gemma2 else None),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
    }
    if not is_gemma2:
        found["rope_local_base_freq"] = metadata.number(key("rope.freq_base_swa"), 10_000.0)
    return found


def _rope(metadata: Metadata, key: Any, head_dim: int, factors: np.ndarray | None) -> dict[str, Any]:
    default_theta = 1_000_000.0 if key("") == "gemma3." else 10_000.0
    theta = metadata.number(key("rope.freq_base"), default_theta)
    found: dict[str, Any] = {"rope_theta": theta}
    rotated = metadata.integer(key("rope.dimension_count"), head_dim)
    if rotated != head_dim:
        found["partial_rotary_factor"] = (rotated or 0) / head_dim
    kind = metadata.text(key("rope.scaling.type"), "none")
    factor = metadata.number(key("rope.scaling.factor"), metadata.number(key("rope.scale_linear"), 1.0)) or 1.0
    if factor <= 0:
        metadata.fail(f"metadata key {key('rope.scaling.factor')!r} is {factor}, must be above 0")
    if factors is not None:
        if 2 * len(factors) != head_dim:
            metadata.fail(f"tensor {ROPE_FACTORS!r} has {len(factors)} factors for heads of {head_dim} dimensions")
        found["rope_scaling"] = _from_factors(factors, theta or default_theta, head_dim)
    elif kind == "yarn":
        found["rope_scaling"] = _yarn(metadata, key, factor)
    elif kind in ("linear", "none") and factor != 1.0:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind not in ("linear", "none"):
        found["rope_scaling"] = {"rope_type": kind, "factor": factor}
    return found


def _yarn(metadata: Metadata, key: Any, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = metadata.integer(key("rope.scaling.original_context_length"))
    if original:
        scaling["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        value = metadata.number(key(f"rope.scaling.yarn_{name}"))
        if value is not None:
            scaling[name] = value
    attention = metadata.number(key("rope.scaling.attn_factor"))
    if attention is not None and attention != 1.0:
        # llama.cpp multiplies this on top of YaRN's own factor; Hugging Face's key replaces it.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _from_factors(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Scaling rule behind a table of frequency divisors [head_dim / 2].

    The Llama 3.1 rule is recognised by computing its table anew (with the constants all published models
    share); any other table becomes `longrope`, which states a table as it is.
    """
    factor = float(factors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, context = 1.0, 4.0, 8192
    blend = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    if np.allclose(factors, 1 / ((1 - blend) / factor + blend), rtol=1e-3):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": context,
        }
    table = [float(value) for value in factors]
    return {"rope_type": "longrope", "short_factor": table, "long_factor": table, "attention_factor": 1.0}


def tokenizer_data(metadata: Metadata) -> dict[str, Any]:
    """Plain values for `Tokenizer.from_data`. Raises `ModelFileError` when the file has no vocabulary."""
    key = "tokenizer.ggml.{}".format
    tokens = metadata.strings(key("tokens"))
    if not tokens:
        metadata.fail("the file holds no vocabulary (metadata key 'tokenizer.ggml.tokens')")
    arrays: dict[str, Any] = {}
    for name in ("token_type", "scores"):
        values = metadata.array(key(name))
        if values is not None and len(values) != len(tokens):
            metadata.fail(f"metadata key {key(name)!r} has {len(values)} entries for {len(tokens)} tokens")
        arrays[name] = None if values is None else values.tolist()
    ids: dict[str, int | None] = {}
    # Old SentencePiece files leave the ids of <unk>, <s> and </s> out; llama.cpp knows them as 0, 1, 2.
    defaults = {"unknown": 0, "bos": 1, "eos": 2} if metadata.text(key("model")) == "llama" else {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        value = metadata.integer(key(f"{name}_token_id"), defaults.get(name))
        # Converters write 0xFFFFFFFF for "none".
        ids[name] = None if value == 0xFFFF_FFFF else value
        if ids[name] is not None and value is not None and value >= len(tokens):
            metadata.fail(
                f"metadata key {key(name + '_token_id')!r} is {value}, the vocabulary has {len(tokens)} tokens"
            )
    return {
        "kind": "gguf",
        "source": metadata.where,
        "architecture": architecture_of(metadata),
        "model": metadata.text(key("model")),
        "pre": metadata.text(key("pre")),
        "tokens": tokens,
        "token_types": arrays["token_type"],
        "scores": arrays["scores"],
        "merges": metadata.strings(key("merges")),
        "bos_id": ids["bos"],
        "eos_id": ids["eos"],
        "unk_id": ids["unknown"],
        "pad_id": ids["padding"],
        "eos_ids": sorted(_end_ids(tokens, arrays["token_type"], ids)),
        "add_bos": metadata.flag(key("add_bos_token")),
        "add_space_prefix": metadata.flag(key("add_space_prefix")),
    }


def _end_ids(tokens: list[str], types: list[int] | None, ids: Mapping[str, int | None]) -> set[int]:
    found = {ids[name] for name in ("eos", "eot", "eom")}
    if types is not None:
        found |= {index for index, kind in enumerate(types) if kind == _CONTROL and tokens[index] in _END_TEXTS}
    return {index for index in found if index is not None}
