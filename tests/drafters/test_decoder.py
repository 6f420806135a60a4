"""The decoder that can be trained is the one that the backends run."""

import pytest
import torch

from draftsmith.drafters.decoder import DecoderBody, fill_from, head_rows, make_head, model_tensors
from draftsmith.errors import ModelFileError
from draftsmith.models.backend import RowGroup
from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import RopeSpec
from tests.models.fakes import tiny_spec, tiny_weights
from tests.models.test_reference import VARIANTS

LLAMA3 = RopeSpec(theta=500.0, kind="llama3", factor=8.0, original_context=16)
CASES = {
    **VARIANTS,
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "num_kv_heads": 4},
    "ropes": {"rope": LLAMA3, "window_rope": RopeSpec(theta=100.0), "layer_windows": (None, 5), "head_dim": 12},
    "gemma": {
        "norm_offset": True,
        "sandwich_norms": True,
        "qk_norm": True,
        "activation": "gelu_tanh",
        "embedding_scale": 32**0.5,
        "attention_scale": 0.3,
        "layer_windows": (4, None),
        "attention_cap": 2.0,
        "logit_cap": 3.0,
    },
}
LENGTHS = (21, 1, 9)


def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=generator).tolist() for length in LENGTHS]


def trained_logits(body, head, cap):
    """Logits of every text, padded with tokens that must not matter."""
    tokens = torch.full((len(LENGTHS), max(LENGTHS)), 63)
    for row, text in enumerate(texts()):
        tokens[row, : len(text)] = torch.tensor(text)
    logits = body(tokens) @ head_rows(body, head).t()
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.float64, 1e-10)], ids=["f32", "f64"])
def test_logits_are_the_reference_backends(name, dtype, limit):
    spec = tiny_spec(**CASES[name])
    weights = tiny_weights(spec, 3)
    body, head = DecoderBody(spec).to(dtype), make_head(spec)
    fill_from(body, head if head is None else head.to(dtype), spec, weights.__getitem__, range(spec.num_layers))
    found = trained_logits(body, head, spec.logit_cap)
    again = ReferenceBackend.from_weights(spec, model_tensors(body, head).__getitem__, dtype=dtype)
    for backend in (ReferenceBackend.from_weights(spec, weights.__getitem__, dtype=dtype), again):
        for row, text in enumerate(texts()):
            backend.cache.open(row)
            backend.cache.reserve(row, len(text))
            expected = backend.score([RowGroup(row, text, range(-1, len(text) - 1), 0)]).logits[0]
            torch.testing.assert_close(found[row, : len(text)], expected, atol=limit, rtol=0)
            backend.cache.close(row)


@pytest.mark.parametrize("name", CASES)
def test_gradients_reach_every_weight_and_none_comes_from_behind(name):
    spec = tiny_spec(**CASES[name])
    body, head = DecoderBody(spec).double(), make_head(spec)
    head = head if head is None else head.double()
    fill_from(body, head, spec, tiny_weights(spec, 3).__getitem__, range(spec.num_layers))
    embedded = []
    body.embed_tokens.register_forward_hook(lambda module, given, out: embedded.append(out) or out.retain_grad())
    logits = trained_logits(body, head, spec.logit_cap)
    logits[0, 7].logsumexp(-1).backward()
    assert float(embedded[0].grad[0, 7].abs().max()) > 0
    assert float(embedded[0].grad[0, 8:].abs().max()) == 0
    assert float(embedded[0].grad[1:].abs().max()) == 0
    for key, parameter in body.named_parameters():
        assert parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()), key


def test_layers_and_tokens_may_be_fewer_or_more():
    source, spec = tiny_spec(num_layers=5), tiny_spec(num_layers=2, vocab_size=70)
    weights = tiny_weights(source, 0)
    body = DecoderBody(spec).double()
    fill_from(body, None, source, weights.__getitem__, (1, 4))
    for own, theirs in ((0, 1), (1, 4)):
        name = "self_attn.k_proj.weight"
        assert torch.equal(body.layers[own].get_parameter(name), weights[f"model.layers.{theirs}.{name}"])
    rows = weights["model.embed_tokens.weight"]
    assert torch.equal(body.embed_tokens.weight[:64], rows)
    torch.testing.assert_close(body.embed_tokens.weight[64:].detach(), rows.mean(0).expand(6, -1))
    narrow = DecoderBody(tiny_spec(num_layers=2, vocab_size=60)).double()
    fill_from(narrow, None, source, weights.__getitem__, (0, 1))
    assert torch.equal(narrow.embed_tokens.weight, rows[:60])


def test_what_is_missing_or_misshapen_is_named():
    spec = tiny_spec()
    weights = tiny_weights(spec, 0)
    body = DecoderBody(spec).double()
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        fill_from(body, None, spec, weights.__getitem__, range(2))
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(ModelFileError, match=r"up_proj\.weight' has shape \(3, 3\)"):
        fill_from(body, None, spec, weights.__getitem__, range(2))
