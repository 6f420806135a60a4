"""SmolLM2 from its GGUF file: our logits equal transformers' on weights read by another reader.

Our side goes through `draftsmith.io`; the oracle's weights come from the `gguf` library, with the one
reordering llama.cpp applies to query and key rows undone here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import gguf
import pytest
import torch
import transformers

from draftsmith.io.catalogue import resolve
from draftsmith.io.files import open_model
from draftsmith.models.backend import RowGroup
from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import DecoderSpec

# "The capital of France is Paris, and the capital of Japan is Tokyo. One, two, three, four, five, six, seven."
TOKENS = [504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 3085, 314, 19081, 30]
TOKENS += [1963, 28, 827, 28, 1296, 28, 1876, 28, 2531, 28, 2976, 28, 4962, 30]
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = {"attn_q": 9, "attn_k": 3}


def oracle_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Dequantised tensors under Hugging Face names, straight from the `gguf` library."""
    for tensor in gguf.GGUFReader(resolve("smollm2")).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if tensor.name == "token_embd.weight":
            yield "model.embed_tokens.weight", values
        elif tensor.name == "output_norm.weight":
            yield "model.norm.weight", values
        else:
            match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
            assert match, tensor.name
            layer, name = match.groups()
            if name in HEADS:
                values = values.view(HEADS[name], -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
            yield f"model.layers.{layer}.{NAMES[name]}.weight", values


@pytest.fixture(scope="module")
def backend() -> ReferenceBackend:
    files = open_model("smollm2")
    return ReferenceBackend.from_weights(DecoderSpec.from_config(files.config), files.load)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """The oracle's logits of the text."""
    config = transformers.LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    model.load_state_dict(dict(oracle_tensors()), strict=False, assign=True)
    model.tie_weights()
    # Buffers were made on the meta device too.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits[0]


def score(backend: ReferenceBackend, tokens: list[int]) -> torch.Tensor:
    backend.cache.reserve(0, len(tokens))
    logits = backend.score([RowGroup(0, tokens, range(-1, len(tokens) - 1), 0)]).logits[0]
    backend.cache.keep(0, range(len(tokens)))
    return logits


def test_logits_equal_transformers(backend: ReferenceBackend, expected: torch.Tensor) -> None:
    backend.cache.open(0)
    torch.testing.assert_close(score(backend, TOKENS), expected, atol=1e-4, rtol=0)
    backend.cache.truncate(0, 10)
    steps = [score(backend, [token]) for token in TOKENS[10:14]] + [score(backend, TOKENS[14:])]
    torch.testing.assert_close(torch.cat(steps), expected[10:], atol=1e-4, rtol=0)
    backend.cache.close(0)


def test_the_model_knows_its_language(expected: torch.Tensor) -> None:
    """A wrong reading that both sides share would leave the text improbable: about 10.8 nats a token."""
    log_probs = torch.log_softmax(expected[:-1], dim=-1)
    nats = -log_probs.gather(1, torch.tensor(TOKENS[1:])[:, None]).mean()
    assert nats < 2.0
