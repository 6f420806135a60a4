"""What goes wrong around the native backend is a Python error that names it: never a crash, a hang or a wrong number.

Broken weights, impossible steps, options without sense, numbers that overflow on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith import _native
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel
from draftsmith.errors import DraftsmithError, ModelFileError, OptionError, UnsupportedError
from draftsmith.models.backend import RowGroup
from draftsmith.models.choice import open_backend
from draftsmith.models.native import NativeBackend, NativeOptions
from tests.engine.fakes import EOS, VOCAB, ByteTokenizer
from tests.models.fakes import tiny_spec, tiny_weights
from tests.models.native_models import KERNELS, PLAIN_TYPES, SUPER_TYPES, Model, feed, make_native, random_blocks

FIELDS: dict[str, Any] = {"head_dim": 16, "width": 32, "mlp_width": 32}
SPEC = tiny_spec(**FIELDS, qkv_bias=True, qk_norm=True)
BROKEN = [float("nan"), float("inf"), -float("inf")]


def make(change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None, **options: Any) -> NativeBackend:
    tensors = tiny_weights(SPEC, 0)
    change(tensors)
    return NativeBackend.from_weights(SPEC, tensors.__getitem__, options=NativeOptions(**options), threads=1)


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", BROKEN, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
    ],
)
def test_a_weight_that_is_not_finite_is_refused(name: str, value: float, bits: int) -> None:
    with pytest.raises(ModelFileError, match=f"{name}.*not finite"):
        make(lambda tensors: tensors[name].view(-1)[-1:].fill_(value), bits=bits)


def test_a_weight_beyond_half_precision_is_refused() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ModelFileError, match=r"up_proj.*too large"):
        make(lambda tensors: tensors[name].fill_(1e8))
    with pytest.raises(ModelFileError, match=r"up_proj.*too large"):
        make(lambda tensors: tensors[name].fill_(1e8), bits=4)


def test_weights_too_small_for_their_scales_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Their group scales are below what half precision holds: all of them became 0, and nobody heard of it."""
    names = ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight")

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors[names[0]].mul_(1e-8)
        tensors[names[1]].mul_(1e-5)
        tensors["model.layers.0.self_attn.o_proj.weight"].zero_()  # exact, and no news

    for bits in (8, 4):
        caplog.clear()
        make(shrink, bits=bits)
        assert f"weights of {names[0]}, {names[1]} are too small" in caplog.text
    caplog.clear()
    make()
    assert not caplog.text


@pytest.mark.parametrize(
    ("type_name", "place"),
    [(name, 208 if name == "Q6_K" else 0) for name in (*PLAIN_TYPES, *SUPER_TYPES)]
    + [(name, 2) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")],
)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
def test_a_block_whose_scale_is_not_finite_is_refused(type_name: str, place: int, bits: int) -> None:
    rows = random_blocks(type_name, 20, 256, np.random.default_rng(0))
    rows[13, place : place + 2] = np.array([bits], np.uint16).view(np.uint8)
    with pytest.raises(ValueError, match="scale is not finite"):
        _native.pack_ggml(type_name, rows, 256)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.v_proj.weight", "model.norm.weight", "model.layers.1.self_attn.q_proj.bias"]
)
def test_a_misshapen_or_missing_tensor_is_named(name: str) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1]

    with pytest.raises(ModelFileError, match=name):
        make(cut)
    with pytest.raises(ModelFileError, match=name):
        make(lambda tensors: tensors.__delitem__(name))


@pytest.mark.parametrize(
    ("type_name", "rows", "inputs"),
    [
        ("Q4_0", (4, 18), 64),
        ("Q4_0", (4, 18), 31),
        ("Q4_0", (4, 18), 0),
        ("Q4_0", (4, 18), -32),
        ("Q4_0", (0, 18), 32),
        ("Q4_0", (4, 0), 0),
        ("Q6_K", (4, 210), 32),
    ],
)
def test_rows_that_do_not_fit_their_type_are_refused(type_name: str, rows: tuple[int, int], inputs: int) -> None:
    with pytest.raises(ValueError, match=r"do not hold|without rows"):
        _native.pack_ggml(type_name, np.zeros(rows, np.uint8), inputs)


def test_packing_refuses_what_it_cannot_pack() -> None:
    assert _native.pack_ggml("Q3_K", np.zeros((1, 110), np.uint8), 256) is None
    assert _native.pack_ggml("no such type", np.zeros((1, 1), np.uint8), 1) is None
    for shape in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="without rows or columns"):
            _native.pack_floats(np.zeros(shape, np.float32), 8)
    with pytest.raises(ValueError, match="4 or 8 bits"):
        _native.pack_floats(np.zeros((1, 1), np.float32), 3)
    packed = _native.pack_floats(np.ones((3, 5), np.float32), 8)
    for outputs in ([3], [-1], [0, 1 << 30]):
        with pytest.raises(ValueError, match="no such output"):
            packed.select(np.array(outputs, np.int32))
    with pytest.raises(ValueError, match="without rows"):
        packed.select(np.array([], np.int32))


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 3}, "8 or 4 bits, not 3"),
        ({"cache": "int8"}, "not 'int8'"),
        ({"kernels": "mmx"}, "no instruction set 'mmx'.*portable"),
    ],
)
def test_an_option_without_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make(**options)


def test_what_the_kernels_cannot_serve_is_refused() -> None:
    tensors = tiny_weights(SPEC, 0)
    for threads in (0, -1, 1025, 1 << 40):
        with pytest.raises(OptionError, match=f"threads is {threads}"):
            NativeBackend.from_weights(SPEC, tensors.__getitem__, threads=threads)
    with pytest.raises(UnsupportedError, match="runs on the CPU, not on 'cuda'"):
        NativeBackend.from_weights(SPEC, tensors.__getitem__, device="cuda")
    for head_dim in (2, 8, 24, 72):
        with pytest.raises(UnsupportedError, match=f"multiple of 16 dimensions, .* have {head_dim}"):
            make_native(Model({**FIELDS, "head_dim": head_dim}))


def test_choice_of_a_backend() -> None:
    tensors = tiny_weights(SPEC, 0)

    def choose(**selection: Any) -> str:
        def raw(name: str) -> tuple[str, np.ndarray, tuple[int, ...]]:
            raise UnsupportedError("no blocks")

        return open_backend(SPEC, tensors.__getitem__, raw, threads=1, **selection)[0]

    assert choose() == "native"
    assert choose(dtype="float32") == "reference"
    assert choose(backend="native:bits=4:cache=float32:kernels=portable") == "native"
    for dtype in ("float32", "bfloat16", "float64"):
        with pytest.raises(OptionError, match=f"dtype {dtype} is for the reference backend"):
            choose(backend="native", dtype=dtype)
    for backend in ("native:bits=3", "native:cache=int4", "native:kernels=mmx", "native:speed=high", "natives"):
        with pytest.raises(OptionError):
            choose(backend=backend)
    with pytest.raises(UnsupportedError, match="not on 'cuda'"):
        choose(backend="native", device="cuda")


# ---- steps --------------------------------------------------------------------------------------


def score(backend: NativeBackend, tokens: list[int], parents: list[int], **others: Any) -> torch.Tensor:
    backend.cache.open(0)
    backend.cache.reserve(0, others.get("reserved", len(tokens)))
    group = RowGroup(0, tokens, parents, others.get("first_logit", 0))
    return backend.score([group], others.get("taps", frozenset())).logits[0]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([], []), AssertionError, "without rows"),
        (([1, 64], [-1, 0]), DraftsmithError, "token 64 is outside the vocabulary of 64"),
        (([-1], [-1]), DraftsmithError, "token -1 is outside"),
        (([1 << 31], [-1]), DraftsmithError, "2147483648"),
        (([1, 2], [-1, 1]), AssertionError, "row 1 hangs below row 1"),
        (([1, 2, 3], [-1, 2, 1]), AssertionError, "row 1 hangs below row 2"),
        (([1, 2], [-1, -2]), DraftsmithError, "parent must stand before it"),
        (([1, 2], [-1]), AssertionError, "2, 1"),
    ],
)
def test_an_impossible_step_is_an_error(
    arguments: tuple[list[int], list[int]], error: type[Exception], words: str
) -> None:
    backend = make()
    with pytest.raises(error, match=words):
        score(backend, *arguments)
    backend.cache.open(1)  # and the backend lives on
    assert torch.isfinite(feed(backend, 1, [1, 2, 3])[0]).all()


def test_rows_beyond_what_was_reserved_and_unknown_taps() -> None:
    with pytest.raises(AssertionError, match="beyond what was reserved"):
        score(make(), [1] * 65, list(range(-1, 64)), reserved=1)
    with pytest.raises(AssertionError, match="unknown taps"):
        score(make(), [1], [-1], taps=frozenset({"first_hidden", 3}))
    with pytest.raises(KeyError):
        make().score([RowGroup(5, [1], [-1], 0)])
    assert make().score([]).logits == []


def test_no_logits_are_asked_for() -> None:
    assert score(make(), [1, 2], [-1, 0], first_logit=2).shape == (0, 64)


@pytest.mark.parametrize("windows", [(None, None), (16, None), (16, 16)], ids=str)
def test_contexts_beyond_the_first_rotations(windows: tuple[int | None, ...]) -> None:
    """The tables of rotations grow at 512 positions, and again: a row behind them is the same as in one step."""
    model = Model({**FIELDS, "layer_windows": windows})
    whole, parts = make_native(model), make_native(model)
    tokens = [(7 * place + place * place) % 64 for place in range(2200)]
    whole.cache.open(0)
    parts.cache.open(0)
    whole.cache.reserve(0, 2200)
    expected = whole.score([RowGroup(0, tokens, range(-1, 2199), 2190)]).logits[0]
    for start in range(0, 2190, 500):
        feed(parts, 0, tokens[start : min(start + 500, 2190)])
    found = torch.cat([feed(parts, 0, [token])[0] for token in tokens[2190:]])
    assert torch.equal(found, expected)


def test_the_decoder_itself_checks_what_it_is_handed() -> None:
    """Arrays that do not belong together, by the binding alone: an error before memory is touched."""
    decoder = make()._decoder
    good: dict[str, Any] = {
        "tokens": np.array([1, 2], np.int32),
        "parents": np.array([-1, 0], np.int32),
        "group_rows": np.array([2], np.int32),
        "committed": np.array([0], np.int32),
        "slot_data": np.array([torch.empty(1 << 14).data_ptr()], np.uint64),
        "slot_first": np.array([0], np.int32),
        "slot_capacity": np.array([64], np.int32),
        "logit_rows": np.array([0, 1], np.int32),
        "logits": np.empty((2, 64), np.float32),
        "tap_layers": np.array([], np.int32),
        "taps": [],
        "last_hidden": None,
    }
    bad: list[tuple[str, Any]] = [
        ("parents", np.array([-1], np.int32)),
        ("group_rows", np.array([3], np.int32)),
        ("group_rows", np.array([1], np.int32)),
        ("group_rows", np.array([0], np.int32)),
        ("group_rows", np.array([], np.int32)),
        ("group_rows", np.array([2**31 - 1], np.int32)),
        ("committed", np.array([63], np.int32)),
        ("committed", np.array([-1], np.int32)),
        ("committed", np.array([2**31 - 1], np.int32)),
        ("slot_data", np.array([0], np.uint64)),
        ("slot_first", np.array([1], np.int32)),
        ("slot_first", np.array([], np.int32)),
        ("slot_capacity", np.array([1], np.int32)),
        ("logit_rows", np.array([0, 2], np.int32)),
        ("logit_rows", np.array([-1, 0], np.int32)),
        ("logits", np.empty((1, 64), np.float32)),
        ("logits", np.empty((2, 63), np.float32)),
        ("tap_layers", np.array([0], np.int32)),
        ("last_hidden", np.empty((1, 32), np.float32)),
    ]
    for name, value in bad:
        with pytest.raises(ValueError):
            decoder.score(**{**good, name: value})
    with pytest.raises(ValueError, match="rotation"):
        decoder.set_rotation(1, np.zeros((4, 8), np.float32), np.zeros((4, 8), np.float32))


def test_a_position_without_a_rotation_is_refused() -> None:
    backend = make()
    backend._decoder.set_rotation(0, np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32))
    with pytest.raises(DraftsmithError, match="no rotation"):
        score(backend, [1] * 5, list(range(-1, 4)))


# ---- numbers that break on the way --------------------------------------------------------------


def exploding(kernels: str) -> LoadedModel:
    """Finite weights whose MLP overflows: silu(gate) * up is beyond float32."""
    spec = tiny_spec(**{**FIELDS, "vocab_size": VOCAB})
    tensors = tiny_weights(spec, 0)
    tensors["model.layers.0.post_attention_layernorm.weight"].fill_(3e38)
    backend = NativeBackend.from_weights(spec, tensors.__getitem__, options=NativeOptions(kernels=kernels), threads=1)
    return LoadedModel(
        name="exploding",
        backend_name="native",
        backend=backend,
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        chat=None,
        eos_ids=frozenset({EOS}),
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_activations_that_are_not_numbers_surface(kernels: str) -> None:
    model = exploding(kernels)
    model.backend.cache.open(0)
    assert not torch.isfinite(feed(model.backend, 0, [1, 2, 3])[0]).any()  # type: ignore[arg-type]
    model.backend.cache.close(0)
    engine = Engine(model, EngineSettings(drafter="none", controller="fixed", memory_bytes=1 << 26))
    for params in ({}, {"temperature": 1.0, "seed": 1}):
        with pytest.raises(DraftsmithError, match="NaN"):
            engine.generate("abc", max_new_tokens=4, **params)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_broken_row_leaves_its_mates_alone(kernels: str) -> None:
    """NaN in one sequence's cache: the others' rows keep their bits, in this step and in the next."""
    backend = make_native(Model({**FIELDS, "width": 40, "mlp_width": 40}), kernels=kernels)
    for sequence in (0, 1, 2):
        backend.cache.open(sequence)
        feed(backend, sequence, [1, 2, 3])
        backend.cache.reserve(sequence, 3)
    for state in backend.cache.layers(1):
        state.rows_LJCK.fill_(float("nan"))
    groups = [RowGroup(sequence, [4, 5, 6], [-1, 0, 0], 0) for sequence in (0, 1, 2)]
    first, broken, third = backend.score(groups).logits
    assert broken.isnan().all()
    assert torch.equal(first, third) and torch.isfinite(first).all()
    for sequence in (0, 1, 2):
        backend.cache.keep(sequence, [0])
    backend.cache.close(1)
    backend.cache.open(3)
    assert torch.equal(feed(backend, 3, [1, 2, 3, 4])[0][-1], first[0])
