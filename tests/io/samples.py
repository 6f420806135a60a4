"""Small model files for tests: GGUF files written by the `gguf` package, safetensors directories.

`convert` is llama.cpp's conversion of a Hugging Face model, written from its description: names through
the `gguf` package's own table, query and key rows of Llama interleaved, Gemma's norms plus one.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = list(bytes_to_unicode().values())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġ Ġ", "1 2"]
TOKENS = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL, "<note>", "[PAD]"]
TYPES = [1] * (len(BYTES) + len(MERGES)) + [3] * len(SPECIAL) + [4, 5]
WIDTH, HEADS, KV_HEADS, MLP, LAYERS, CONTEXT = 64, 4, 2, 96, 2, 128
SHAPES = {
    "attn_norm": (WIDTH,),
    "ffn_norm": (WIDTH,),
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH * KV_HEADS // HEADS, WIDTH),
    "attn_v": (WIDTH * KV_HEADS // HEADS, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (MLP, WIDTH),
    "ffn_up": (MLP, WIDTH),
    "ffn_down": (WIDTH, MLP),
}


def byte_level_metadata(**changes):
    """Tokenizer metadata of a small byte-level vocabulary; a change to None leaves a key out."""
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "bos_token_id": TOKENS.index("<|im_start|>"),
        "eos_token_id": TOKENS.index("<|im_end|>"),
        "padding_token_id": TOKENS.index("<|endoftext|>"),
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


def llama_metadata(**changes):
    """Model metadata of a tiny Llama."""
    values = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.freq_base": 10_000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    return {f"llama.{key}": value for key, value in (values | changes).items()}


def llama_tensors(seed=0):
    """Float tensors of a tiny Llama under GGUF's names."""
    rng = np.random.default_rng(seed)
    tensors = {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": shape for name, shape in SHAPES.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in tensors.items()}


def write_gguf(path, metadata, tensors, architecture="llama", types=None):
    """Write a GGUF file. `types`: ggml type name by tensor name, for arrays that hold blocks as bytes."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        writer.add_tensor(name, array, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def quantised(array, kind):
    """An array as blocks of bytes."""
    return gguf.quantize(array, gguf.GGMLQuantizationType[kind])


def small_gguf(path, model=None, tokenizer=None, drop=()):
    """A tiny valid Llama with some quantised tensors and a vocabulary."""
    tensors = {name: array for name, array in llama_tensors().items() if name not in drop}
    types = {}
    for name, kind in {
        "token_embd.weight": "Q8_0",
        "blk.0.ffn_up.weight": "Q4_1",
        "blk.1.attn_q.weight": "Q5_0",
    }.items():
        if name in tensors:
            tensors[name], types[name] = quantised(tensors[name], kind), kind
    metadata = llama_metadata(**(model or {})) | byte_level_metadata(**(tokenizer or {}))
    return write_gguf(path, metadata, tensors, types=types)


def convert(path, model, architecture, metadata, with_ones=False, interleaved=False):
    """Write a Hugging Face model as llama.cpp's converter does."""
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    config = model.config
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        array = tensor.float().numpy()
        if interleaved and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if with_ones and name.endswith("norm.weight"):
            array = array + 1
        tensors[f"{names.get_name(stem)}.{kind}"] = np.ascontiguousarray(array)
    return write_gguf(path, metadata, tensors, architecture)


def write_directory(path, config, tensors, shards=1, **files):
    """A safetensors directory; `files`: further file names -> JSON values or texts."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    parts = [names[start::shards] for start in range(shards)]
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        file = "model.safetensors" if shards == 1 else f"model-{number:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, value in files.items():
        file = path / name.replace("__", ".")
        file.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def tiny_tensors(seed=0):
    """Two small weights in different types."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(8, 4, generator=generator),
        "model.norm.weight": torch.randn(4, generator=generator).to(torch.bfloat16),
    }
