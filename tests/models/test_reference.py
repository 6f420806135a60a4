"""The reference backend: one answer however rows are cut into steps, trees and batches."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.errors import ModelFileError, OptionError
from draftsmith.models.attention_mask import row_depths
from draftsmith.models.backend import RowGroup
from draftsmith.models.linear import BLOCK_WIDTH, BlockedLinear, DenseLinear, PackedLinear, can_pack, prepare
from draftsmith.models.reference import ReferenceBackend
from tests.models.fakes import tiny_backend, tiny_spec, tiny_weights

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"layer_windows": (7, 7)},
    "mixed": {"num_layers": 3, "layer_windows": (None, 7, None), "qk_norm": True},
    "capped": {"layer_windows": (7, None), "attention_cap": 3.0, "logit_cap": 5.0, "sandwich_norms": True},
    "one-head": {"num_heads": 1, "num_kv_heads": 1, "qkv_bias": True, "tied_head": False},
}
LIMIT = 1e-10
"""Differences allowed in float64 between logits of a few units."""


def text(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(64) for _ in range(length)]


def chain(num_rows: int) -> list[int]:
    return list(range(-1, num_rows - 1))


def in_one_go(backend: ReferenceBackend, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, V] of a sequence of its own, scored as one chunk and forgotten."""
    backend.cache.open(-1)
    backend.cache.reserve(-1, len(tokens))
    logits = backend.score([RowGroup(-1, tokens, chain(len(tokens)), 0)]).logits[0]
    backend.cache.close(-1)
    return logits


def feed(backend: ReferenceBackend, sequence_id: int, tokens: list[int]) -> torch.Tensor:
    backend.cache.reserve(sequence_id, len(tokens))
    logits = backend.score([RowGroup(sequence_id, tokens, chain(len(tokens)), 0)]).logits[0]
    backend.cache.keep(sequence_id, range(len(tokens)))
    return logits


def random_parents(num_rows: int, generator: random.Random) -> list[int]:
    return [generator.randint(max(-1, row - 4), row - 1) if row else -1 for row in range(num_rows)]


def path_to(node: int, parents: list[int]) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@pytest.mark.parametrize("variant", VARIANTS)
@given(cuts=st.lists(st.integers(1, 30), min_size=1, max_size=8))
@settings(max_examples=10, deadline=None)
def test_any_chunking_equals_one_go(variant: str, cuts: list[int]) -> None:
    backend = tiny_backend(1, **VARIANTS[variant])
    tokens = text(sum(cuts))
    backend.cache.open(0)
    position, parts = 0, []
    for size in cuts:
        parts.append(feed(backend, 0, tokens[position : position + size]))
        position += size
    torch.testing.assert_close(torch.cat(parts), in_one_go(backend, tokens), atol=LIMIT, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("context", [0, 1, 3, 20])
def test_tree_rows_equal_their_paths_as_chains(variant: str, context: int) -> None:
    backend = tiny_backend(2, **VARIANTS[variant])
    generator = random.Random(context)
    parents = random_parents(24, generator)
    tokens, prompt = text(24, seed=1), text(context)
    backend.cache.open(0)
    if context:
        feed(backend, 0, prompt)
    backend.cache.reserve(0, 24)
    logits = backend.score([RowGroup(0, tokens, parents, 0)]).logits[0]
    for node in range(24):
        path = [tokens[row] for row in path_to(node, parents)]
        expected = in_one_go(backend, prompt + path)[-1]
        torch.testing.assert_close(logits[node], expected, atol=LIMIT, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_going_on_after_keep_equals_a_fresh_sequence(variant: str) -> None:
    """After each step the cache equals one built from the kept tokens alone."""
    backend = tiny_backend(3, **VARIANTS[variant])
    generator = random.Random(7)
    kept = text(5)
    backend.cache.open(0)
    feed(backend, 0, kept)
    for step in range(25):
        num_rows = generator.randint(1, 9)
        parents, tokens = random_parents(num_rows, generator), text(num_rows, seed=step)
        backend.cache.reserve(0, num_rows)
        logits = backend.score([RowGroup(0, tokens, parents, 0)]).logits[0]
        path = path_to(generator.randint(-1, num_rows - 1), parents)
        backend.cache.keep(0, path)
        backend.cache.check()
        if path:
            kept += [tokens[row] for row in path]
            torch.testing.assert_close(logits[path[-1]], in_one_go(backend, kept)[-1], atol=LIMIT, rtol=0)
    assert backend.cache.tokens(0) == kept


@pytest.mark.parametrize("variant", VARIANTS)
def test_fork_and_truncate_equal_a_fresh_sequence(variant: str) -> None:
    backend = tiny_backend(4, **VARIANTS[variant])
    prompt, more = text(30), text(4, seed=9)
    backend.cache.open(0)
    feed(backend, 0, prompt)
    length = backend.cache.reusable_len(0, 24)
    assert length == 24
    backend.cache.fork(0, 1, length)
    expected = in_one_go(backend, prompt[:24] + more)[24:]
    torch.testing.assert_close(feed(backend, 1, more), expected, atol=LIMIT, rtol=0)
    backend.cache.truncate(0, length)
    torch.testing.assert_close(feed(backend, 0, more), expected, atol=LIMIT, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_packed_batch_equals_one_by_one(variant: str) -> None:
    backend = tiny_backend(5, **VARIANTS[variant])
    generator = random.Random(3)
    wanted: frozenset[int | str] = frozenset({1, "last_hidden"})
    groups: list[RowGroup] = []
    expected: list[tuple[torch.Tensor, Mapping[int | str, torch.Tensor]]] = []
    for sequence_id, (context, num_rows) in enumerate([(0, 12), (9, 1), (30, 6), (2, 1), (15, 9)]):
        backend.cache.open(sequence_id)
        prompt = text(context, seed=sequence_id)
        if context:
            feed(backend, sequence_id, prompt)
        parents, tokens = random_parents(num_rows, generator), text(num_rows, seed=50 + sequence_id)
        group = RowGroup(sequence_id, tokens, parents, num_rows // 2)
        backend.cache.reserve(sequence_id, num_rows)
        alone = backend.score([group], wanted)
        expected.append((alone.logits[0], alone.taps[0]))
        backend.cache.keep(sequence_id, ())
        groups.append(group)
    order = [3, 0, 4, 2, 1]
    scored = backend.score([groups[place] for place in order], wanted)
    for place, logits, taps in zip(order, scored.logits, scored.taps, strict=True):
        torch.testing.assert_close(logits, expected[place][0], atol=LIMIT, rtol=0)
        for tap in wanted:
            torch.testing.assert_close(taps[tap], expected[place][1][tap], atol=LIMIT, rtol=0)


def test_attention_over_long_contexts_with_whole_blocks_out_of_sight() -> None:
    """Windows far behind a chunk leave blocks of keys that a row sees nothing of."""
    backend = tiny_backend(6, layer_windows=(7, 40))
    tokens = text(1500)
    parts = []
    backend.cache.open(0)
    for start in range(0, 1500, 300):
        parts.append(feed(backend, 0, tokens[start : start + 300]))
    logits = in_one_go(backend, tokens)
    assert logits.isfinite().all()
    torch.testing.assert_close(torch.cat(parts), logits, atol=LIMIT, rtol=0)


def test_logits_only_for_the_rows_asked_for() -> None:
    backend = tiny_backend(7)
    everything = in_one_go(backend, text(6))
    for first in range(7):
        backend.cache.open(0)
        backend.cache.reserve(0, 6)
        logits = backend.score([RowGroup(0, text(6), chain(6), first)]).logits[0]
        assert logits.shape == (6 - first, 64)
        torch.testing.assert_close(logits, everything[first:], atol=LIMIT, rtol=0)
        backend.cache.close(0)
    assert backend.score([]).logits == []


def test_taps_are_the_residual_stream_and_the_normed_end() -> None:
    spec = tiny_spec(num_layers=3, embedding_scale=2.5, tied_head=False)
    weights = tiny_weights(spec, 8)
    backend = ReferenceBackend.from_weights(spec, weights.__getitem__, dtype=torch.float64)
    tokens = text(5)
    backend.cache.open(0)
    backend.cache.reserve(0, 5)
    wanted: frozenset[int | str] = frozenset({0, 1, 2, 3, "last_hidden"})
    scored = backend.score([RowGroup(0, tokens, chain(5), 0)], wanted)
    taps = scored.taps[0]
    assert taps.keys() == wanted
    torch.testing.assert_close(taps[0], 2.5 * weights["model.embed_tokens.weight"][tokens], atol=1e-12, rtol=0)
    end = taps[3]
    normed = end / (end.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * weights["model.norm.weight"]
    torch.testing.assert_close(taps["last_hidden"], normed, atol=1e-12, rtol=0)
    logits = taps["last_hidden"] @ weights["lm_head.weight"].T
    torch.testing.assert_close(scored.logits[0], logits, atol=1e-12, rtol=0)
    shallow = tiny_spec(num_layers=1, embedding_scale=2.5, tied_head=False)
    one_layer = ReferenceBackend.from_weights(shallow, weights.__getitem__, dtype=torch.float64)
    one_layer.cache.open(0)
    one_layer.cache.reserve(0, 5)
    after_one = one_layer.score([RowGroup(0, tokens, chain(5), 5)], frozenset({1})).taps[0][1]
    torch.testing.assert_close(taps[1], after_one, atol=1e-12, rtol=0)
    with pytest.raises(AssertionError, match="unknown taps"):
        backend.score([RowGroup(0, tokens, chain(5), 0)], frozenset({4}))


def test_results_may_be_changed_in_place_and_differentiated_through() -> None:
    backend = tiny_backend(9)
    backend.cache.open(0)
    backend.cache.reserve(0, 3)
    scored = backend.score([RowGroup(0, text(3), chain(3), 0)], frozenset({1, "last_hidden"}))
    scored.logits[0].div_(2.0)
    weight = torch.ones(32, dtype=torch.float64, requires_grad=True)
    for tap in (1, "last_hidden"):
        (scored.taps[0][tap] * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 0.2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_lower_precision_stays_close_to_float64(variant: str, dtype: torch.dtype, limit: float) -> None:
    spec = tiny_spec(**VARIANTS[variant])
    # Weights that bfloat16 holds exactly, so that only the arithmetic differs.
    weights = {name: tensor.to(torch.bfloat16).double() for name, tensor in tiny_weights(spec, 10).items()}
    exact = ReferenceBackend.from_weights(spec, weights.__getitem__, dtype=torch.float64)
    rough = ReferenceBackend.from_weights(spec, weights.__getitem__, dtype=dtype)
    tokens = text(40)
    expected = in_one_go(exact, tokens)
    logits = in_one_go(rough, tokens)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < limit
    rough.cache.open(0)
    feed(rough, 0, tokens[:20])
    backend_step = torch.cat([feed(rough, 0, tokens[20:21]), feed(rough, 0, tokens[21:])])
    assert (backend_step - expected[20:]).abs().max() < limit


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 16, 40])
@pytest.mark.parametrize("outputs", [1, BLOCK_WIDTH, BLOCK_WIDTH + 5, 4 * BLOCK_WIDTH])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_layout_computes_the_same_product(num_rows: int, outputs: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, 24, generator=generator).bfloat16().float()
    bias = torch.randn(outputs, generator=generator).bfloat16().float() if has_bias else None
    rows = torch.randn(num_rows, 24, generator=generator).bfloat16().float()
    expected = torch.nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    layers = [DenseLinear(weight, bias), BlockedLinear(weight, bias)]
    for layer in layers:
        torch.testing.assert_close(layer(rows).double(), expected, atol=1e-5, rtol=0)
    ids = torch.tensor([0, outputs - 1, outputs // 2])
    for layer in layers:
        assert torch.equal(layer.weight_rows(ids), weight[ids])
    if can_pack():
        half = PackedLinear(weight.bfloat16(), None if bias is None else bias.bfloat16(), is_embedding=True)
        torch.testing.assert_close(half(rows.bfloat16()).double(), expected, atol=0.2, rtol=0.01)
        assert torch.equal(half.weight_rows(ids).float(), weight[ids])


def test_layout_follows_device_and_type() -> None:
    weight = torch.zeros(8, 8)
    assert isinstance(prepare(weight.double()), DenseLinear)
    assert isinstance(prepare(weight), BlockedLinear) == torch.backends.mkl.is_available()
    assert isinstance(prepare(weight.bfloat16()), PackedLinear) == can_pack()


@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_lies_on_the_device_asked_for(variant: str) -> None:
    """The meta device needs no hardware, and refuses arithmetic with the CPU as an accelerator does."""
    spec = tiny_spec(**VARIANTS[variant])
    backend = ReferenceBackend.from_weights(spec, tiny_weights(spec, 0).__getitem__, device="meta")
    for sequence_id in (0, 1):
        backend.cache.open(sequence_id)
        backend.cache.reserve(sequence_id, 20)
    groups = [RowGroup(0, text(20), chain(20), 3), RowGroup(1, text(5), [-1, 0, 0, 2, 1], 0)]
    scored = backend.score(groups, frozenset({1, "last_hidden"}))
    assert [logits.shape for logits in scored.logits] == [(17, 64), (5, 64)]
    assert {logits.device.type for logits in scored.logits} == {"meta"}
    assert scored.taps[1]["last_hidden"].device.type == "meta"
    backend.cache.keep(1, (0, 2, 3))
    backend.cache.fork(1, 2, 2)
    backend.cache.reserve(2, 1)
    assert backend.score([RowGroup(2, [4], [-1], 0)]).logits[0].shape == (1, 64)


def test_weight_bytes_count_a_tied_embedding_once() -> None:
    sizes: dict[str, Any] = {"vocab_size": 96, "width": 48, "num_heads": 6, "mlp_width": 96}
    tied = tiny_backend(0, dtype=torch.float32, **sizes)
    apart = tiny_backend(0, dtype=torch.float32, tied_head=False, **sizes)
    assert apart.weight_bytes - tied.weight_bytes == 96 * 48 * 4
    parameters = sum(tensor.numel() for tensor in tiny_weights(tied.spec, 0).values())
    assert parameters * 4 <= tied.weight_bytes <= parameters * 4 * 1.5


def test_missing_and_misshapen_tensors_are_named() -> None:
    spec = tiny_spec(tied_head=False, qkv_bias=True)
    weights = tiny_weights(spec, 0)
    for name in weights:
        partial = {key: tensor for key, tensor in weights.items() if key != name}
        with pytest.raises(ModelFileError, match=name.removeprefix("model.")):
            ReferenceBackend.from_weights(spec, partial.__getitem__)
        wrong = {**weights, name: torch.zeros(3, 3, 3)}
        with pytest.raises(ModelFileError, match=r"has shape \(3, 3, 3\)"):
            ReferenceBackend.from_weights(spec, wrong.__getitem__)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
def test_decoders_inside_other_checkpoints_are_found(prefix: str) -> None:
    spec = tiny_spec()
    plain = tiny_weights(spec, 0)
    moved = {name.replace("model.", prefix, 1): tensor for name, tensor in plain.items()}
    found = ReferenceBackend.from_weights(spec, moved.__getitem__, dtype=torch.float64)
    expected = in_one_go(tiny_backend(0), text(9))
    assert torch.equal(in_one_go(found, text(9)), expected)


def test_options_are_checked() -> None:
    spec = tiny_spec()
    load = tiny_weights(spec, 0).__getitem__
    with pytest.raises(OptionError, match="float16"):
        ReferenceBackend.from_weights(spec, load, dtype=torch.float16)
    with pytest.raises(OptionError, match="threads is 0"):
        ReferenceBackend.from_weights(spec, load, threads=0)
    before = torch.get_num_threads()
    try:
        ReferenceBackend.from_weights(spec, load, threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_row_depths() -> None:
    assert row_depths([-1, 0, 0, 1, -1, 4, 3]) == [0, 1, 1, 2, 0, 1, 3]
    assert row_depths([]) == []
