"""The native backend computes the right thing: weights unpack exactly, logits are the reference's but for rounding.

Unpacked weights equal the `gguf` package's to the last bit for every supported type: products of scales and codes
have at most 25 bits and are rounded as that package rounds them. Logits differ by the 8 bits of activations.
"""

from __future__ import annotations

import logging
import math
from functools import cache

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith import _native
from draftsmith.engine.loading import load_model
from draftsmith.models.native import NativeBackend, NativeOptions
from tests.models.fakes import tiny_spec, tiny_weights
from tests.models.native_models import (
    HEADS,
    KERNELS,
    PLAIN_TYPES,
    SUPER_TYPES,
    Model,
    block_models,
    feed,
    float_models,
    make_native,
    make_reference,
    random_blocks,
    values_of,
)

TYPES = PLAIN_TYPES + SUPER_TYPES
TEXT = """The harbour lay quiet under a low grey sky. Two boats had come in before dawn, and the men who unloaded
them spoke little. Anna counted the crates as they were set down: twelve of herring, four of cod, one that nobody
could name. She wrote the numbers into a small blue book, turned the page, and wrote them again for the office.

def total(prices, rate=0.2):
    result = 0
    for price in prices:
        result += price * (1 + rate)
    return result

Water boils at 100 degrees Celsius at sea level and at lower temperatures on a mountain, because the pressure of
the air is lower there. For the same reason a cake may need a longer time in the oven. In 1902 the town had 3,150
inhabitants; by 1950 there were more than 9,000, most of them employed by the railway. The list of what they built
is long: a station, a school, two bridges, a library, a small theatre and a park with a pond for the children."""


# ---- packing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("outputs", [1, 15, 16, 40])
def test_blocks_unpack_to_exactly_what_they_stand_for(type_name: str, outputs: int) -> None:
    generator = np.random.default_rng(outputs)
    for columns in (256, 768) if type_name in SUPER_TYPES else (32, 96, 256):
        rows = random_blocks(type_name, outputs, columns, generator)
        packed = _native.pack_ggml(type_name, rows, columns)
        assert (packed.outputs, packed.inputs) == (outputs, columns)
        assert np.array_equal(packed.dequantise(), values_of(type_name, rows))


@pytest.mark.parametrize("type_name", TYPES)
def test_any_finite_scale_unpacks_exactly(type_name: str) -> None:
    """Scales of all sizes and signs, denormal ones and zeros too."""
    generator = np.random.default_rng(7)
    columns = 512
    rows = random_blocks(type_name, 64, columns, generator)
    factor_at = [at for at in (0, 2) if type_name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")] or [
        208 if type_name == "Q6_K" else 0
    ]
    blocks = rows.reshape(64 * columns // (256 if type_name in SUPER_TYPES else 32), -1)
    for at in factor_at:
        halves = generator.integers(0, 1 << 16, len(blocks), np.uint16)
        halves[halves & 0x7C00 == 0x7C00] &= 0x83FF  # neither infinite nor NaN
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    unpacked = _native.pack_ggml(type_name, rows, columns).dequantise()
    assert np.array_equal(unpacked, values_of(type_name, rows))


@pytest.mark.parametrize("type_name", TYPES)
def test_select_takes_outputs_in_the_order_named(type_name: str) -> None:
    rows = random_blocks(type_name, 40, 256, np.random.default_rng(1))
    packed = _native.pack_ggml(type_name, rows, 256)
    for chosen in ([39], [3, 0, 3, 17, 39], list(range(40))):
        part = packed.select(np.array(chosen, np.int32))
        assert part.outputs == len(chosen)
        assert np.array_equal(part.dequantise(), packed.dequantise()[chosen])


@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 100),
    bits=st.sampled_from([4, 8]),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_floats_are_packed_to_within_half_a_step(rows: int, columns: int, bits: int, size: float, seed: int) -> None:
    values = (size * np.random.default_rng(seed).standard_normal((rows, columns))).astype(np.float32)
    unpacked = _native.pack_floats(values, bits).dequantise()
    for start in range(0, columns, 32):
        part, found = values[:, start : start + 32], unpacked[:, start : start + 32]
        if bits == 8:
            step = np.abs(part).max(axis=1) / 127
        else:
            step = (np.maximum(part.max(axis=1), 0) - np.minimum(part.min(axis=1), 0)) / 15
        # Scale and minimum are half precision numbers: 2^-11 of each, over at most 15 or 127 steps.
        bound = step * (0.5 + (127 if bits == 8 else 30) * 2.0**-11) + 127 * 2.0**-25
        assert (np.abs(part - found) <= bound[:, None]).all()


# ---- logits -------------------------------------------------------------------------------------


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("type_name", TYPES)
def test_sums_at_their_extremes_do_not_overflow(kernels: str, type_name: str) -> None:
    """Codes and activations as large as they get, in every row: kernels sum a group's products in 16 or 32 bits."""
    width = 256
    spec = tiny_spec(
        width=width, mlp_width=64, vocab_size=64, num_layers=1, layer_windows=(None,), head_dim=16, tied_head=False
    )
    tensors = tiny_weights(spec, 0)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = torch.ones_like(tensor)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensor)  # the embedding reaches the head as it is
    signs = torch.ones(64, width, dtype=torch.float64)
    signs[1], signs[2, ::2], signs[3, 16:32], signs[4, 1::4] = -1, -1, -1, -1
    tensors["model.embed_tokens.weight"] = signs
    generator = np.random.default_rng(0)
    rows = random_blocks(type_name, 64, width, generator)
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks, drawn = rows.reshape(64, width // size, num_bytes), rows.reshape(64, width // size, num_bytes).copy()
    for row, pattern in enumerate((0xFF, 0x00, 0x7F, 0x80, 0xF0, 0x0F, 0xAA, 0x55)):
        blocks[row::8] = pattern
    scale_at, min_at, _, _ = HEADS[type_name]
    for place in (scale_at, *(() if min_at is None else (min_at,))):
        blocks[..., place : place + 2] = drawn[..., place : place + 2]
    values = torch.from_numpy(values_of(type_name, rows)).double()
    tensors["lm_head.weight"] = values

    def raw(name: str) -> tuple[str, np.ndarray, tuple[int, ...]]:
        if name == "lm_head.weight":
            return type_name, rows, (64, width)
        return "F32", np.empty(0, np.uint8), tuple(tensors[name].shape)

    options = NativeOptions(kernels=kernels)
    backend = NativeBackend.from_weights(spec, tensors.__getitem__, raw=raw, options=options, threads=1)
    backend.cache.open(0)
    logits, taps = feed(backend, 0, list(range(40)), frozenset({"last_hidden"}))
    hidden = taps["last_hidden"].double()
    assert (hidden.abs() - 1).abs().max() < 1e-4, "then all activations are 127 or -127"
    assert torch.allclose(logits.double(), hidden @ values.T, rtol=1e-4, atol=1e-4 * float(values.abs().sum(1).max()))


@pytest.mark.parametrize("kernels", KERNELS)
@given(model=st.one_of(float_models(), block_models()))
@settings(max_examples=12)
def test_logits_and_taps_are_the_references(kernels: str, model: Model) -> None:
    tokens = [(7 * place + place * place) % model.spec.vocab_size for place in range(50)]
    taps = frozenset({0, 1, 2, "last_hidden"})
    backends = (make_native(model, kernels=kernels, cache="float32"), make_reference(model))
    for backend in backends:
        backend.cache.open(0)
    found, expected = (feed(backend, 0, tokens, taps) for backend in backends)
    assert torch.allclose(found[1][0].double(), expected[1][0], rtol=1e-5, atol=1e-6)
    for tap in (1, 2, "last_hidden"):
        assert relative_error(found[1][tap], expected[1][tap]) < 0.06, tap
    assert relative_error(found[0], expected[0]) < 0.06


@given(model=st.one_of(float_models(), block_models()))
@settings(max_examples=12)
def test_instruction_sets_and_caches_agree_but_for_rounding(model: Model) -> None:
    tokens = [(5 * place + place * place) % model.spec.vocab_size for place in range(40)]
    logits = {}
    for kernels in KERNELS:
        for kind in ("float32", "float16", "bfloat16") if kernels == KERNELS[0] else ("float32",):
            backend = make_native(model, kernels=kernels, cache=kind)
            backend.cache.open(0)
            logits[kernels, kind] = feed(backend, 0, tokens)[0]
    first = logits[KERNELS[0], "float32"]
    for name, rows in logits.items():
        assert relative_error(rows, first) < 0.05, name


def test_every_architecture_like_set_of_features_is_right() -> None:
    """What no random draw may miss: each feature alone changes the logits, and to the reference's."""
    plain = {"head_dim": 32, "width": 64, "mlp_width": 96, "vocab_size": 50, "tied_head": True}
    features: dict[str, dict[str, object]] = {
        "plain": {},
        "window": {"layer_windows": (8, None)},
        "scale": {"attention_scale": 0.5},
        "attention cap": {"attention_cap": 0.5, "attention_scale": 1.0},
        "logit cap": {"logit_cap": 1.0},
        "embedding scale": {"embedding_scale": 8.0},
        "gelu": {"activation": "gelu_tanh"},
        "offset": {"norm_offset": True},
        "qk norm": {"qk_norm": True},
        "sandwich": {"sandwich_norms": True},
        "qkv bias": {"qkv_bias": True},
        "output bias": {"output_bias": True},
        "mlp bias": {"mlp_bias": True},
        "head": {"tied_head": False},
        "one kv head": {"num_kv_heads": 1},
        "epsilon": {"norm_eps": 1e-1},
    }
    tokens = [(3 * place) % 50 for place in range(30)]
    logits = {}
    for name, fields in features.items():
        model = Model({**plain, **fields}, seed=1)
        backends = (make_native(model), make_reference(model))
        for backend in backends:
            backend.cache.open(0)
        found, expected = (feed(backend, 0, tokens)[0] for backend in backends)
        assert relative_error(found, expected) < 0.04, name
        logits[name] = expected
    for name, rows in logits.items():
        # The fakes' weights make up for the offset.
        assert name in ("plain", "offset") or relative_error(rows, logits["plain"]) > 0.05, f"{name} changes nothing"


def test_requantised_types_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    spec = tiny_spec(head_dim=16, width=32)
    tensors = tiny_weights(spec, 0)
    names = [name for name in tensors if tensors[name].dim() == 2]

    def raw(name: str) -> tuple[str, np.ndarray, tuple[int, ...]]:
        type_name = ("Q3_K", "F16", "F32", "IQ3_S")[names.index(name) % 4]
        return type_name, np.zeros((1, 1), np.uint8), tuple(tensors[name].shape)

    with caplog.at_level(logging.WARNING):
        NativeBackend.from_weights(spec, tensors.__getitem__, raw=raw, options=NativeOptions(bits=4), threads=1)
    (record,) = caplog.records
    message = record.getMessage()
    assert "\n" not in message and "F16, IQ3_S, Q3_K" in message and "4 bits" in message
    caplog.clear()
    make_native(Model({"head_dim": 16, "width": 32, "mlp_width": 64}, types=("Q8_0", "Q4_0")))
    make_native(Model({"head_dim": 16, "width": 32}))
    assert not caplog.records


# ---- a real model -------------------------------------------------------------------------------


@cache
def log_probs(backend: str) -> tuple[list[int], torch.Tensor]:
    model = load_model("smollm2", backend=backend, threads=1)
    tokens = model.tokenizer.encode(TEXT, special=False)[:256]
    model.backend.cache.open(0)
    return tokens, torch.log_softmax(feed(model.backend, 0, tokens)[0].double(), dim=-1)


def test_smollm2_keeps_its_law() -> None:
    tokens, found = log_probs("native")
    _, expected = log_probs("reference")
    divergence = float((expected.exp() * (expected - found)).sum(dim=-1).mean())
    nats = [float(-rows[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).mean()) for rows in (found, expected)]
    print(f"mean KL {divergence:.5f}, perplexity {math.exp(nats[0]):.3f}, reference {math.exp(nats[1]):.3f}")
    assert len(tokens) > 200
    assert divergence < 0.008
    assert abs(nats[0] - nats[1]) < 0.01
