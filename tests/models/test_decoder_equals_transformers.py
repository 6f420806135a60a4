"""Our decoder's logits equal transformers' on tiny random models of every architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from draftsmith.models.backend import RowGroup
from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import DecoderSpec

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 50_000.0},
    "llama-mha-tied": {"model_type": "llama", "num_key_value_heads": 6, "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {"model_type": "llama", "head_dim": 16},
    "llama-linear-rope": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-llama3-rope": {"model_type": "llama", "rope_scaling": LLAMA3},
    "llama-yarn": {"model_type": "llama", "rope_scaling": YARN},
    "llama-yarn-attention-factor": {"model_type": "llama", "rope_scaling": {**YARN, "attention_factor": 1.3}},
    "llama-yarn-mscale": {
        "model_type": "llama",
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0, "truncate": False},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-biases-yarn": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "rope_scaling": YARN},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 11,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
    },
    "gemma2-no-caps": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 11,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 12,
        "rope_theta": 100_000.0,
        "rope_local_base_freq": 5_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3-layer-types": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
}
TEXT_LEN = 60


def random_model(config: dict[str, Any], seed: int = 0) -> transformers.PreTrainedModel:
    """A transformers model whose every parameter is random, norms and biases too."""
    arguments = {key: value for key, value in config.items() if key != "model_type"}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **arguments), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.dim() == 1 else 0.2))
    return model.eval()


def our_logits(backend: ReferenceBackend, tokens: list[int]) -> torch.Tensor:
    """Logits of all rows of one prompt, scored in one go."""
    backend.cache.open(0)
    backend.cache.reserve(0, len(tokens))
    group = RowGroup(0, tokens, range(-1, len(tokens) - 1), 0)
    return backend.score([group]).logits[0]


@pytest.mark.parametrize("form", ["as given", "as saved"])
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, form: str) -> None:
    config = {**BASE, **CASES[name]}
    model = random_model(config)
    # transformers 5 saves `rope_parameters` and `layer_types`; hub files mostly have the older keys.
    read = config if form == "as given" else model.config.to_dict()
    state = model.state_dict()
    backend = ReferenceBackend.from_weights(DecoderSpec.from_config(read), state.__getitem__)
    tokens = torch.randint(0, 96, (TEXT_LEN,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.3, "logits too flat to tell a fault"
    torch.testing.assert_close(our_logits(backend, tokens), expected, atol=1e-4, rtol=0)
