"""A tiny model with real files: a target that can be tuned and copied, and a vocabulary that students share."""

import dataclasses
import json

import torch
from safetensors.torch import save_file

from draftsmith.drafters.base import TargetInfo
from draftsmith.engine.loading import load_model
from draftsmith.models.tokenizer import Tokenizer
from tests.io.samples import SPECIAL, TOKENS, byte_level_metadata, write_gguf
from tests.models.fakes import tiny_spec, tiny_weights

VOCAB = len(TOKENS)
END = TOKENS.index("<|im_end|>")


def tokenizer(tmp_path):
    """The samples' byte-level vocabulary, read from a GGUF file of nothing else."""
    from draftsmith.io.gguf_header import read_header
    from draftsmith.io.gguf_translate import tokenizer_data

    path = write_gguf(tmp_path / "vocabulary.gguf", byte_level_metadata(), {})
    return Tokenizer.from_data(tokenizer_data(read_header(memoryview(path.read_bytes()), path).metadata))


def write_model(path, seed=0, vocab_size=VOCAB, files=None, **fields):
    """A directory with random weights; `fields` of the spec. Returns its name."""
    spec = tiny_spec(vocab_size=vocab_size, **{"tied_head": False, "max_context": 128, **fields})
    path.mkdir(parents=True)
    tensors = {name: tensor.to(torch.float32) for name, tensor in tiny_weights(spec, seed).items()}
    save_file(tensors, path / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": spec.width,
        "intermediate_size": spec.mlp_width,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied_head,
        "eos_token_id": END,
    }
    (path / "config.json").write_text(json.dumps(config))
    for name, text in (files or tokenizer(path).as_files()).items():
        (path / name).write_text(text)
    (path / "vocabulary.gguf").unlink(missing_ok=True)
    return str(path)


def target_of(name, backend="reference"):
    """What a drafter is told of a model on disk."""
    model = load_model(name, backend=backend)
    return TargetInfo(
        vocab_size=model.backend.spec.vocab_size,
        max_context=model.backend.spec.max_context,
        eos_ids=model.eos_ids,
        tokenizer=model.tokenizer,
        load_model=lambda other: load_model(other, backend=backend),
        make_drafter=None,
        backend=model.backend,
        name=name,
    )


def nameless(target):
    """The same target without files."""
    return dataclasses.replace(target, name="")


assert set(SPECIAL) < set(TOKENS)
