"""Random tiny decoders for the tests of the native backend, in floats or in blocks of any ggml type.

`FLOATS` and `BLOCKS` are hypothesis strategies of model descriptions; `make_native` and `make_reference` build the
same model on either backend, the reference on the values that the native one's packed weights stand for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import torch
from hypothesis import strategies as st

from draftsmith import _native
from draftsmith.models.backend import RowGroup
from draftsmith.models.native import NativeBackend, NativeOptions
from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import DecoderSpec
from tests.models.fakes import tiny_spec, tiny_weights

KERNELS = _native.instruction_sets()
PLAIN_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
SUPER_TYPES = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
# Per type: where its fp16 scale stands in a block, where a minimum or None, and for what scale weights have a
# standard deviation of about 1, with the minimum (in scales) that centres them.
HEADS: dict[str, tuple[int, int | None, float, float]] = {
    "Q4_0": (0, None, 1 / 4.6, 0),
    "Q4_1": (0, 2, 1 / 4.6, -7.5),
    "Q5_0": (0, None, 1 / 9.2, 0),
    "Q5_1": (0, 2, 1 / 9.2, -15.5),
    "Q8_0": (0, None, 1 / 74, 0),
    "IQ4_NL": (0, None, 1 / 70, 0),
    "Q4_K": (0, 2, 1 / 270, 7.5),
    "Q5_K": (0, 2, 1 / 540, 15.5),
    "Q6_K": (208, None, 1 / 1370, 0),
    "IQ4_XS": (0, None, 1 / 1300, 0),
}


def random_blocks(type_name: str, rows: int, columns: int, generator: np.random.Generator) -> np.ndarray:
    """Rows of blocks of random bits, uint8, for weights that keep a product's size."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    scale_at, min_at, unit, centre = HEADS[type_name]
    blocks = generator.integers(0, 256, (rows, columns // size, num_bytes), np.uint8)
    scales = (unit * columns**-0.5 * generator.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
    blocks[..., scale_at : scale_at + 2] = scales[..., None].view(np.uint8)
    if min_at is not None:
        mins = (scales * centre).astype(np.float16)
        blocks[..., min_at : min_at + 2] = mins[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(type_name: str, rows: np.ndarray) -> np.ndarray:
    """What blocks stand for, as the `gguf` package reads them."""
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[type_name])


@dataclass(frozen=True)
class Model:
    """A description that `repr` prints in full: fields of the spec, a seed, block types (none: floats)."""

    fields: dict[str, Any]
    seed: int = 0
    types: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> DecoderSpec:
        return tiny_spec(**self.fields)


def stored(model: Model) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, np.ndarray]]]:
    """All tensors as floats, and those kept in blocks as blocks."""
    tensors, blocks = tiny_weights(model.spec, model.seed), {}
    generator = np.random.default_rng(model.seed)
    for number, name in enumerate(sorted(tensors) if model.types else ()):
        shape = tensors[name].shape
        if len(shape) == 2:
            type_name = model.types[number % len(model.types)]
            rows = random_blocks(type_name, *shape, generator)
            blocks[name] = (type_name, rows)
            tensors[name] = torch.from_numpy(values_of(type_name, rows))
    return tensors, blocks


def make_native(model: Model, threads: int = 1, **options: Any) -> NativeBackend:
    """The model on the native backend."""
    tensors, blocks = stored(model)

    def raw(name: str) -> tuple[str, np.ndarray, tuple[int, ...]]:
        if name in blocks:
            return *blocks[name], tuple(tensors[name].shape)
        return "F32", np.empty(0, np.uint8), tuple(tensors[name].shape)

    settings = NativeOptions(**{**model.options, **options})
    return NativeBackend.from_weights(model.spec, tensors.__getitem__, raw=raw, options=settings, threads=threads)


def make_reference(model: Model) -> ReferenceBackend:
    """The model in float64 on the weights that the native backend computes with."""
    tensors, blocks = stored(model)
    bits = model.options.get("bits", 8)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name not in blocks:
            packed = _native.pack_floats(tensor.float().contiguous().numpy(), bits)
            tensors[name] = torch.from_numpy(packed.dequantise())
    return ReferenceBackend.from_weights(model.spec, tensors.__getitem__, dtype=torch.float64)


def _fields(
    draw: st.DrawFn, widths: st.SearchStrategy[int], heads: st.SearchStrategy[tuple[int, int, int]]
) -> dict[str, Any]:
    num_heads, num_kv_heads, head_dim = draw(heads)
    window = draw(st.sampled_from([1, 3, 8, 16, 17, 40]))
    return {
        "vocab_size": draw(st.sampled_from([16, 33, 50, 64, 131])),
        "width": draw(widths),
        "mlp_width": draw(widths),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "layer_windows": draw(st.sampled_from([(None, None), (window, None), (None, window), (window, window)])),
        "attention_cap": draw(st.sampled_from([None, 5.0])),
        "logit_cap": draw(st.sampled_from([None, 8.0])),
        "embedding_scale": draw(st.sampled_from([1.0, 3.0])),
        "activation": draw(st.sampled_from(["silu", "gelu_tanh"])),
        **{
            name: draw(st.booleans())
            for name in ("qk_norm", "qkv_bias", "output_bias", "mlp_bias", "sandwich_norms", "norm_offset", "tied_head")
        },
    }


@st.composite
def float_models(draw: st.DrawFn) -> Model:
    """Models stored as floats: no size need be a multiple of anything."""
    widths = st.sampled_from([7, 24, 32, 48, 65, 96, 150])
    heads = st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from([16, 32, 64, 80])).map(
        lambda sizes: (sizes[0] * sizes[1], sizes[1], sizes[2])
    )
    fields = _fields(draw, widths, heads)
    return Model(fields, draw(st.integers(0, 99)), options={"bits": draw(st.sampled_from([8, 4]))})


@st.composite
def block_models(draw: st.DrawFn) -> Model:
    """Models stored in blocks, of several types side by side."""
    if draw(st.booleans()):
        widths, types = st.sampled_from([32, 64, 160]), PLAIN_TYPES
        heads = st.sampled_from([(2, 1, 16), (4, 2, 32), (2, 2, 80), (6, 2, 16), (1, 1, 64)])
    else:
        widths, types = st.sampled_from([256, 512]), PLAIN_TYPES + SUPER_TYPES
        heads = st.sampled_from([(4, 2, 64), (8, 1, 32), (16, 4, 16), (2, 2, 128)])
    fields = _fields(draw, widths, heads)
    chosen = draw(st.lists(st.sampled_from(types), min_size=1, max_size=5))
    return Model(fields, draw(st.integers(0, 99)), types=tuple(chosen))


def feed(
    backend: NativeBackend | ReferenceBackend,
    sequence_id: int,
    tokens: list[int],
    taps: frozenset[int | str] = frozenset(),
) -> tuple[torch.Tensor, dict[int | str, torch.Tensor]]:
    """Score a chain and keep it; logits of all its rows, and taps."""
    backend.cache.reserve(sequence_id, len(tokens))
    scored = backend.score([RowGroup(sequence_id, tokens, range(-1, len(tokens) - 1), 0)], taps)
    backend.cache.keep(sequence_id, range(len(tokens)))
    return scored.logits[0], dict(scored.taps[0])


def random_tree(generator: random.Random, num_rows: int, reach: int = 4) -> list[int]:
    """Parents of a random forest; with a small `reach`, deep."""
    return [generator.randint(max(-1, row - reach), row - 1) for row in range(num_rows)]


def paths_of(tokens: list[int], parents: list[int]) -> Iterator[tuple[int, ...]]:
    """The tokens from the top down to each row."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    yield from paths
