"""A tiny model with real files: a target that can be tuned and copied, and a vocabulary that students share."""

import functools
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftsmith.drafters.base import TargetInfo
from draftsmith.engine.loading import load_model
from draftsmith.io.files import open_model
from draftsmith.models.tokenizer import Tokenizer
from tests.io.samples import TOKENS, byte_level_metadata, llama_metadata, llama_tensors, write_gguf
from tests.models.fakes import tiny_spec, tiny_weights

VOCAB = len(TOKENS)
SIZES = {"width": 64, "head_dim": 16, "mlp_width": 96, "tied_head": False, "max_context": 128}
"""Such as the native backend serves; with a tied head a random model says the same token for ever."""
END = TOKENS.index("<|im_end|>")


@functools.cache
def tokenizer(pre="smollm"):
    """The samples' byte-level vocabulary, read from a GGUF file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_gguf(path, llama_metadata() | byte_level_metadata(pre=pre), llama_tensors())
        return Tokenizer.from_data(open_model(str(path)).tokenizer)


def write_model(path, seed=0, vocab_size=VOCAB, files=None, **fields):
    """A directory with random weights; `fields` of the spec. Returns its name."""
    spec = tiny_spec(vocab_size=vocab_size, **{**SIZES, **fields})
    path.mkdir(parents=True)
    tensors = {name: tensor.to(torch.float32) for name, tensor in tiny_weights(spec, seed).items()}
    if not spec.tied_head:
        tensors["lm_head.weight"] *= 4  # laws with a favourite, which a little training does not turn over
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
    for name, text in (tokenizer().as_files() if files is None else files).items():
        (path / name).write_text(text)
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
