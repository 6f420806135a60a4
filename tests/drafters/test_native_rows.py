"""Recurrent drafters in C++: right against a slow runner, and the same bits whatever stands beside a row.

`Case` holds one drafter of `row_models.KINDS` on its runner, with features and tokens to feed it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith import _native
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.drafters.native_rows import NativeRows, NativeRowsOptions
from draftsmith.drafters.rows import Chain, ChainDraw, Level, TrueRows
from draftsmith.drafters.torch_rows import TorchRows
from draftsmith.errors import DraftsmithError, ModelFileError, OptionError
from tests.drafters.row_models import KINDS, VOCABULARY, SlowRows, make_parts, make_target
from tests.drafters.test_torch_rows import FAMILIES
from tests.drafters.test_torch_rows import IDS as FAMILY_IDS
from tests.drafters.trained_fakes import info_of, random_module
from tests.models.fakes import tiny_backend
from tests.models.native_models import KERNELS

_LONGEST = 1000


class Case:
    """One drafter, and what it is fed: sequence s has tokens and features of its own, row by row."""

    def __init__(self, name: str, *, threads: int = 1, kernels: str = "auto", bits: int = 8, cache: str = "float16"):
        kind = KINDS[name]
        self.backend = make_target(kind.get("target_width", kind["width"]), threads=threads, kernels=kernels)
        self.parts = make_parts(self.backend, **kind)
        self.rows = NativeRows(self.parts, self.backend, NativeRowsOptions(bits=bits, cache=cache))
        self.slow = SlowRows(self.parts, self.backend, bits)

    def text(self, seed: int, size: int) -> list[int]:
        return random.Random(seed).choices(range(VOCABULARY), k=size)

    def features(self, seed: int, size: int) -> torch.Tensor:
        # Drawn in one piece: what `randn` draws first depends on how much it draws.
        assert size <= _LONGEST
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(_LONGEST, self.parts.feature_width, generator=generator)[:size].clone()

    def true(self, sequence_id: int, seed: int, stop: int, start: int = 0) -> TrueRows:
        """Rows start..stop-1 of text `seed`."""
        return TrueRows(sequence_id, self.text(seed, stop)[start:], self.features(seed, stop)[start:])

    def draft(self, sequence_id: int, path: Sequence[int]) -> list[bytes]:
        """Logits along a path, one level at a time."""
        found = []
        for row, token in enumerate(path):
            found.append(bits_of(self.rows.extend([Level(sequence_id, [token], [row - 1])])[0][0]))
        return found


def bits_of(logits: torch.Tensor) -> bytes:
    return logits.numpy().tobytes()


def fresh(case: Case, seed: int, size: int, path: Sequence[int]) -> list[bytes]:
    """What follows `size` true rows and each token of a path, from a sequence that never was anything else."""
    case.rows.forget(-7)
    found = [bits_of(case.rows.begin([case.true(-7, seed, size)])[0]), *case.draft(-7, path)]
    case.rows.forget(-7)
    return found


# ---- right ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_slow_runner(name: str, bits: int, kernels: str) -> None:
    """What differs is that activations are quantised."""
    case = Case(name, bits=bits, kernels=kernels, cache="float32")
    path = case.text(9, 5)
    expected = torch.stack(case.slow.follow(case.text(1, 37), case.features(1, 37), path))
    found = [case.rows.begin([case.true(0, 1, 37)])[0]]
    found += [case.rows.extend([Level(0, [token], [row - 1])])[0][0] for row, token in enumerate(path)]
    logits = torch.stack(found).double()
    for mine, right in zip(logits, expected, strict=True):
        assert torch.corrcoef(torch.stack((mine, right)))[0, 1] > 0.999
    assert (logits - expected).abs().max() < 0.15 * expected.std()
    # Nearly the best where it is not the best.
    best = expected.gather(1, logits.argmax(1, keepdim=True)).squeeze(1)
    assert (expected.max(1).values - best).max() < 0.15 * expected.std()


@pytest.mark.parametrize("method,changes", FAMILIES, ids=FAMILY_IDS)
@pytest.mark.parametrize("draft_ids", [None, [3, 5, 7, 11, 100]], ids=["all", "few"])
def test_parts_compute_what_the_module_does(method: str, changes: dict[str, str], draft_ids: list[int] | None) -> None:
    backend = make_target(48)
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    module = random_module(method, info_of(backend), changes, ids, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(9, len(module.taps) * 48, generator=generator, dtype=torch.float64)
    tokens, path = list(range(9)), [11, 12, 13]
    expected = SlowRows(module.row_parts(), backend, None).follow(tokens, features, path)
    rows = TorchRows(module)
    found = [rows.begin([TrueRows(0, tokens, features)])[0]]
    found += [rows.extend([Level(0, [token], [row - 1])])[0][0] for row, token in enumerate(path)]
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    # And the C++ runner takes the very same parts.
    native = NativeRows(module.row_parts(), backend)
    logits = native.begin([TrueRows(0, tokens, features)])[0].double()
    assert torch.corrcoef(torch.stack((logits, found[0])))[0, 1] > 0.99
    assert native.chain([TrueRows(1, tokens, features)], [3])[0].tokens[0] in module.draft_ids


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", KINDS)
def test_a_chain_is_what_begin_and_extend_draft(name: str, kernels: str) -> None:
    case = Case(name, kernels=kernels)
    found = case.rows.chain([case.true(0, 1, 20)], [5])[0]
    logits = case.rows.begin([case.true(1, 1, 20)])[0]
    for step in range(5):
        best = int(logits.argmax())
        assert int(case.parts.draft_ids[best]) == found.tokens[step]
        assert found.probs[step] == pytest.approx(float(torch.softmax(logits.double(), 0)[best]), rel=1e-5)
        logits = case.rows.extend([Level(1, [found.tokens[step]], [step - 1])])[0][0]
    # What a chain leaves can be drafted on.
    assert bits_of(case.rows.extend([Level(0, found.tokens[-1:], [3])])[0][0]) == bits_of(logits)


DRAWS = {
    "everything": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=5.0),
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7),
    "min-p": SamplingParams(temperature=1.0, min_p=0.3),
    "all": SamplingParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01),
}


def draw_of(params: SamplingParams, num_ids: int, seed: int) -> ChainDraw:
    return ChainDraw(Sampler(params, [], frozenset(), num_ids), RequestRandom(seed), 10 * seed)


@pytest.mark.parametrize("params", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", KINDS)
def test_a_drawn_chain_is_what_is_drawn_from_begin_and_extend(name: str, kernels: str, params: SamplingParams) -> None:
    """And the likeliest token's probability is what comes with it."""
    case = Case(name, kernels=kernels, threads=2)
    ids = case.parts.draft_ids.numpy()
    unlikely = 0
    for seed in range(3):
        draw = draw_of(params, len(ids), seed)
        found = case.rows.chain([case.true(seed, seed, 20)], [5], 0.0, [draw])[0]
        logits = case.rows.begin([case.true(-1 - seed, seed, 20)])[0]
        for step, (token, prob) in enumerate(zip(found.tokens, found.probs, strict=True)):
            assert token == draw.token(logits, step, ids)
            assert prob == pytest.approx(float(torch.softmax(logits.double(), 0).max()), rel=1e-5)
            unlikely += token != int(ids[logits.argmax()])
            logits = case.rows.extend([Level(-1 - seed, [token], [step - 1])])[0][0]
    assert unlikely > 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_drawn_and_likeliest_chains_side_by_side(threads: int) -> None:
    alone, case = Case("eagle3"), Case("eagle3", threads=threads)
    depths, num_ids = [3, 1, 8, 2, 8, 4, 5], len(case.parts.draft_ids)
    draws = [None, *(draw_of(params, num_ids, seed) for seed, params in enumerate(DRAWS.values()))]
    expected = [
        alone.rows.chain([alone.true(i, i, 10 + i)], [depth], 0.0, [draws[i]])[0] for i, depth in enumerate(depths)
    ]
    assert case.rows.chain([case.true(i, i, 10 + i) for i in range(7)], depths, 0.0, draws) == expected
    # They end as likeliest ones do.
    reach = [list(itertools.accumulate(chain.probs, operator.mul)) for chain in expected]
    least = sorted(itertools.chain(*reach))[len(draws)]
    sizes = [next((place + 1 for place, each in enumerate(row) if each < least), len(row)) for row in reach]
    assert sizes != depths
    rows = [TrueRows(i, [], case.features(0, 0)) for i in range(7)]
    assert case.rows.chain(rows, depths, least, draws) == [
        Chain(chain.tokens[:size], chain.probs[:size]) for chain, size in zip(expected, sizes, strict=True)
    ]
    # Draws of one call say nothing about the next.
    again = [TrueRows(i, [], case.features(0, 0)) for i in range(7)]
    assert case.rows.chain(again, depths) == [
        alone.rows.chain([TrueRows(i, [], alone.features(0, 0))], [depth])[0] for i, depth in enumerate(depths)
    ]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["eagle3", "eagle3 odd", "eagle1", "mtp qwen", "mtp reversed"])
def test_rows_do_not_depend_on_what_is_beside_them(name: str, threads: int) -> None:
    alone, case = Case(name), Case(name, threads=threads)
    sizes = {0: 3, 1: 150, 2: 17, 3: 64, 4: 65, 5: 1, 6: 300, 7: 33, 8: 16}
    paths = {i: alone.text(100 + i, 4) for i in sizes}
    expected = {i: fresh(alone, i, size, paths[i]) for i, size in sizes.items()}
    order = list(sizes)
    for turn in range(3):
        random.Random(turn).shuffle(order)
        for i in order:
            case.rows.forget(i)
        cuts = {i: random.Random(i + turn).randint(0, sizes[i] - 1) for i in order}
        case.rows.append([case.true(i, i, cuts[i]) for i in order if i % 2])
        groups = [case.true(i, i, sizes[i], cuts[i] if i % 2 else 0) for i in order]
        begun = case.rows.begin(groups)
        assert [bits_of(row) for row in begun] == [expected[i][0] for i in order]
        for step in range(4):
            levels = [Level(i, [paths[i][step]], [step - 1]) for i in order]
            found = case.rows.extend(levels)
            assert [bits_of(rows[0]) for rows in found] == [expected[i][step + 1] for i in order]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_chains_of_different_depths_side_by_side(name: str, threads: int) -> None:
    alone, case = Case(name), Case(name, threads=threads)
    depths = [3, 1, 8, 2, 8]
    expected = [alone.rows.chain([alone.true(i, i, 10 + i)], [depth])[0] for i, depth in enumerate(depths)]
    assert case.rows.chain([case.true(i, i, 10 + i) for i in range(5)], depths) == expected
    again = case.rows.chain([TrueRows(i, [], case.features(0, 0)) for i in range(5)], depths)
    assert again == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_a_chain_ends_where_it_is_no_longer_likely(threads: int) -> None:
    """With the token that takes it below; its rows are as if it had been asked for so many, whatever runs beside it."""
    alone, case = Case("eagle3"), Case("eagle3", threads=threads)
    whole = [alone.rows.chain([alone.true(i, i, 10 + i)], [8])[0] for i in range(5)]
    reaches = [list(itertools.accumulate(chain.probs, operator.mul)) for chain in whole]
    least = sorted(reach[2] for reach in reaches)[2]
    lengths = [next((place + 1 for place, reach in enumerate(row) if reach < least), 8) for row in reaches]
    assert len(set(lengths)) > 1 and max(lengths) > 3
    found = case.rows.chain([case.true(i, i, 10 + i) for i in range(5)], [8] * 5, least)
    assert found == [Chain(chain.tokens[:size], chain.probs[:size]) for chain, size in zip(whole, lengths, strict=True)]
    for i, size in enumerate(lengths):
        again = alone.rows.chain([TrueRows(i, [], alone.features(0, 0))], [size])[0]
        level = Level(i, again.tokens[-1:], [size - 2])
        assert bits_of(case.rows.extend([level])[0][0]) == bits_of(alone.rows.extend([level])[0][0])
    # What comes next begins from the true rows, as after any chain.
    assert case.rows.chain([TrueRows(i, [], case.features(0, 0)) for i in range(5)], [8] * 5) == whole


@pytest.mark.parametrize("cache", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["eagle3", "eagle3 normed", "mtp reversed"])
def test_a_branch_of_a_tree_is_a_chain(name: str, cache: str) -> None:
    """Levels of several rows, paths through any of them."""
    case = Case(name, cache=cache)
    generator = random.Random(5)
    case.rows.begin([case.true(0, 1, 30), case.true(1, 1, 46)])
    paths: list[list[int]] = []
    found: list[tuple[int, list[int], bytes]] = []
    for level in range(6):
        size = generator.randint(1, 7)
        tokens = generator.choices(range(VOCABULARY), k=size)
        parents = [generator.randint(-1, len(paths) - 1) if level else -1 for _ in tokens]
        rows = case.rows.extend([Level(0, tokens, parents), Level(1, tokens, parents)])
        for which, logits in enumerate(rows):
            for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                found.append((which, [*(paths[parent] if parent >= 0 else []), token], bits_of(logits[row])))
        paths += [
            [*(paths[parent] if parent >= 0 else []), token] for token, parent in zip(tokens, parents, strict=True)
        ]
    for which, path, logits in found:
        assert fresh(case, 1, (30, 46)[which], path)[-1] == logits


@pytest.mark.parametrize("name", ["eagle3", "eagle1"])
def test_cut_forked_and_forgotten_sequences_are_fresh_ones(name: str) -> None:
    case, path = Case(name), [7, 8, 9]
    case.rows.begin([case.true(0, 1, 90)])
    case.draft(0, path)
    case.rows.fork(0, 1, 90)
    case.rows.fork(0, 2, 40)
    case.rows.truncate(0, 25)
    assert [case.rows.num_rows(i) for i in (0, 1, 2, 3)] == [25, 90, 40, 0]
    expected = fresh(case, 1, 90, path)
    empty = TrueRows(1, [], case.features(0, 0))
    assert bits_of(case.rows.begin([empty])[0]) == expected[0]
    assert bits_of(case.rows.begin([case.true(2, 1, 90, 40)])[0]) == expected[0]
    assert bits_of(case.rows.begin([case.true(0, 1, 90, 25)])[0]) == expected[0]
    for i in range(3):
        assert case.draft(i, path) == expected[1:]
    case.rows.forget(1)
    assert case.rows.num_rows(1) == 0
    assert bits_of(case.rows.begin([case.true(1, 2, 12)])[0]) == fresh(case, 2, 12, [])[0]
    # The others are still what they were.
    assert bits_of(case.rows.begin([TrueRows(2, [], case.features(0, 0))])[0]) == expected[0]


@pytest.mark.parametrize("seed", range(6))
def test_a_random_history_leaves_no_trace(seed: int) -> None:
    """Appends, drafts, cuts, forks and forgets of several sequences; what follows is always what a fresh one gives."""
    generator = random.Random(seed)
    name = generator.choice(list(KINDS))
    case, oracle = Case(name, threads=2), Case(name)
    held: dict[int, tuple[int, int]] = {}  # sequence -> text, rows
    for _ in range(40):
        act, i = generator.choice(["feed", "feed", "chain", "cut", "fork", "forget", "tree"]), generator.randrange(5)
        text, size = held.get(i, (i, 0))
        if act in ("feed", "chain", "tree"):
            more = size + generator.choice([1, 1, 2, 5, 20, 140])
            rows = case.true(i, text, more, size)
            held[i] = (text, more)
            if act == "feed":
                case.rows.append([rows])
            elif act == "chain":
                assert case.rows.chain([rows], [4])[0] == oracle.rows.chain([oracle.true(99, text, more)], [4])[0]
                oracle.rows.forget(99)
            else:
                expected, path = fresh(oracle, text, more, [3, 4]), [3, 4]
                assert bits_of(case.rows.begin([rows])[0]) == expected[0]
                assert case.draft(i, path) == expected[1:]
        elif act == "cut":
            held[i] = (text, generator.randint(0, size))
            case.rows.truncate(i, held[i][1])
        elif act == "fork" and size:
            copy = (i + 1) % 5
            held[copy] = (text, generator.randint(0, size))
            case.rows.fork(i, copy, held[copy][1])
        elif act == "forget":
            held.pop(i, None)
            case.rows.forget(i)
        for other, (_, rows_held) in held.items():
            assert case.rows.num_rows(other) == rows_held


# ---- what cannot be ------------------------------------------------------------------------------


def test_whatever_cannot_be_is_an_error_and_changes_nothing() -> None:
    case = Case("eagle3")
    rows, none = case.rows, case.features(0, 0)
    rows.begin([case.true(0, 1, 10)])
    expected = bits_of(rows.begin([TrueRows(0, [], none)])[0])
    good = case.true(0, 1, 12, 10)
    wrong = [
        lambda: rows.begin([TrueRows(5, [], none)]),  # a sequence without rows
        lambda: rows.chain([TrueRows(5, [], none)], [1]),
        lambda: rows.begin([good, good]),  # named twice
        lambda: rows.append([TrueRows(0, [VOCABULARY], case.features(0, 1))]),
        lambda: rows.append([TrueRows(0, [-1], case.features(0, 1))]),
        lambda: rows.append([TrueRows(0, [2**40], case.features(0, 1))]),
        lambda: rows.append([TrueRows(0, ["a"], case.features(0, 1))]),  # type: ignore[list-item]
        lambda: rows.append([TrueRows(0, [1, 2], case.features(0, 1))]),
        lambda: rows.append([TrueRows(0, [1], case.features(0, 1)[:, :-1])]),
        lambda: rows.append([TrueRows(0, [1], case.features(0, 1)[0])]),
        lambda: rows.append([TrueRows(2**70, [1], case.features(0, 1))]),
        lambda: rows.chain([good], []),
        lambda: rows.chain([good], [0]),
        lambda: rows.chain([good], [-3]),
        lambda: rows.chain([good], [2**31]),
        lambda: rows.chain([good], [2**25]),
        lambda: rows.chain([good], [1], 0.0, [None, None]),
        lambda: rows.extend([Level(5, [1], [-1])]),
        lambda: rows.extend([Level(0, [1], [0])]),
        lambda: rows.extend([Level(0, [1, 1], [-1, 0])]),  # a parent of the same level
        lambda: rows.extend([Level(0, [1], [-2])]),
        lambda: rows.extend([Level(0, [1], [])]),
        lambda: rows.extend([Level(0, [VOCABULARY], [-1])]),
        lambda: rows.extend([Level(0, [1], [-1]), Level(0, [1], [-1])]),
        lambda: rows.truncate(0, -1),
        lambda: rows.fork(0, 1, 11),
        lambda: rows.fork(0, 1, -1),
        lambda: rows.fork(0, 0, 5),
    ]
    for number, call in enumerate(wrong):
        with pytest.raises(DraftsmithError):
            call()
            pytest.fail(f"call {number} went through")
        assert rows.num_rows(0) == 10
    for change in (
        {3: 0.0},
        {3: math.inf},
        {3: math.nan},
        {4: -1},
        {5: 0.0},
        {5: 1.1},
        {5: math.nan},
        {6: 0.1},
        {6: math.nan},
    ):
        values = [change.get(place, value) for place, value in enumerate((1, 1, 1, 1.0, 0, 1.0, -math.inf))]
        with pytest.raises(ValueError, match="law"):
            rows._drafter.chain([0], [[]], [none.numpy()], [1], 0.0, [tuple(values)])
    assert bits_of(rows.begin([TrueRows(0, [], none)])[0]) == expected
    rows.truncate(0, 9)
    with pytest.raises(DraftsmithError, match="again"):
        rows.begin([TrueRows(0, [], none)])
    with pytest.raises(DraftsmithError, match="not begun"):
        rows.extend([Level(0, [1], [-1])])
    assert rows.begin([]).shape == (0, VOCABULARY) and rows.extend([]) == [] and rows.chain([], []) == []
    rows.append([])
    rows.append([TrueRows(6, [], none)])
    assert bits_of(rows.begin([case.true(0, 1, 10, 9)])[0]) == expected
    assert rows.extend([Level(0, [], [])])[0].shape == (0, VOCABULARY)


def test_draws_need_ids_in_ascending_order() -> None:
    backend = make_target(64)
    parts = make_parts(backend, **KINDS["eagle3"])
    parts = dataclasses.replace(parts, draft_ids=parts.draft_ids.flip(0))
    rows, features = NativeRows(parts, backend), torch.ones(1, parts.feature_width)
    assert len(rows.chain([TrueRows(0, [1], features)], [2])[0].tokens) == 2
    draw = draw_of(SamplingParams(temperature=1.0), len(parts.draft_ids), 0)
    with pytest.raises(DraftsmithError, match="ascending"):
        rows.chain([TrueRows(0, [1], features)], [2], 0.0, [draw])


def test_features_that_are_no_numbers_draft_something() -> None:
    case = Case("eagle3 odd", threads=2)
    for value in (float("nan"), float("inf"), -float("inf"), 3e38):
        features = case.features(0, 5)
        features[3:] = value
        num_ids = len(case.parts.draft_ids)
        for draw in (None, *(draw_of(params, num_ids, 1) for params in DRAWS.values())):
            chain = case.rows.chain([TrueRows(0, [1, 2, 3, 4, 5], features)], [6], 0.0, [draw])[0]
            assert set(chain.tokens) <= set(case.parts.draft_ids.tolist())
            assert all(0 <= prob <= 1 for prob in chain.probs)
            case.rows.forget(0)
    # The next sequence is none the worse for it.
    assert fresh(case, 1, 20, [3]) == fresh(Case("eagle3 odd"), 1, 20, [3])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_are_no_numbers_are_refused(value: float, bits: int) -> None:
    for name in ("reduce", "final_norm"):
        backend = make_target(64)
        parts = make_parts(backend, **KINDS["eagle3"])
        weights = getattr(parts, name)
        with torch.no_grad():
            (weights.weight if name == "reduce" else weights).view(-1)[3] = value
        with pytest.raises(ModelFileError, match="finite"):
            NativeRows(parts, backend, NativeRowsOptions(bits=bits))


def test_options_are_checked() -> None:
    with pytest.raises(OptionError):
        NativeRowsOptions(bits=5)
    with pytest.raises(OptionError):
        NativeRowsOptions(cache="int8")


def test_what_the_kernels_cannot_serve_is_known() -> None:
    backend = make_target(64)
    parts = make_parts(backend, **{**KINDS["eagle3"], "head_dim": 8})
    assert not NativeRows.can_run(parts.shape, backend)
    assert NativeRows.can_run(make_parts(backend, **KINDS["eagle3"]).shape, backend)
    assert not NativeRows.can_run(make_parts(backend, **KINDS["eagle3"]).shape, tiny_backend(0))


def _arguments() -> tuple[dict[str, Any], dict[str, Any]]:
    """Shape and weights of a small drafter, as the binding takes them."""
    packed = lambda rows, columns: _native.pack_floats(np.zeros((rows, columns), np.float32), 8)  # noqa: E731
    ones = np.ones(32, np.float32)
    shape = {
        "feature_width": 64, "embedding_width": 32, "width": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
        "mlp_width": 48, "num_ids": 20, "norm_eps": 1e-5, "attention_scale": 0.25, "attention_cap": 0.0,
        "logit_cap": 0.0, "embedding_scale": 1.0, "is_feature_first": False, "norms_residual": False,
        "feeds_normed": False,
    }  # fmt: skip
    weights = {
        "reduce": ([packed(32, 64)], None), "fuse": None,
        "qkv": ([packed(32, 64), packed(16, 64), packed(16, 64)], None), "output": ([packed(32, 32)], None),
        "gate_up": ([packed(48, 32), packed(48, 32)], None), "down": ([packed(32, 48)], None),
        "head": ([packed(20, 32)], None), "tap_norms": None, "embedding_norm": ones, "feature_norm": ones,
        "attention_norm": None, "mlp_norm": ones, "query_norm": None, "key_norm": None, "final_norm": ones,
        "embedding": packed(50, 32), "ids": np.arange(20, dtype=np.int32),
    }  # fmt: skip
    return shape, weights


def _build(shape: dict[str, Any], weights: dict[str, Any], **changes: Any) -> _native.RowDrafter:
    settings = {"owns_head": True, "cache_type": "float16", "threads": 1, "pin": False, "kernels": "auto", **changes}
    return _native.RowDrafter(shape, weights, **settings)


def test_the_binding_refuses_what_does_not_fit() -> None:
    shape, weights = _arguments()
    _build(shape, weights)
    packed = lambda rows, columns: _native.pack_floats(np.zeros((rows, columns), np.float32), 8)  # noqa: E731
    shapes: list[dict[str, Any]] = [
        *({name: value} for name in shape if type(shape[name]) is int for value in (0, -1, 7, 2**30, 2**31 - 1)),
        {"head_dim": 24}, {"num_heads": 3}, {"norms_residual": True, "feature_width": 63},
    ]  # fmt: skip
    for change in shapes:
        with pytest.raises((ValueError, RuntimeError)):
            _build({**shape, **change}, weights)
    short = np.ones(31, np.float32)
    for name, value in [
        *((name, ([packed(5, 5)], None)) for name in ("reduce", "fuse", "qkv", "output", "gate_up", "down", "head")),
        *((name, short) for name in weights if name.endswith("norm") or name == "tap_norms"),
        ("output", ([packed(32, 32)], short)), ("output", ([None], None)), ("mlp_norm", None), ("embedding", None),
        ("embedding", packed(50, 31)), ("reduce", None), ("attention_norm", np.ones(32, np.float32)),
        ("ids", np.arange(19, dtype=np.int32)), ("ids", np.arange(31, 51, dtype=np.int32)),
        ("ids", -np.ones(20, np.int32)),
    ]:  # fmt: skip
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            _build(shape, {**weights, name: value})
            pytest.fail(f"{name} went through")
    with pytest.raises(ValueError, match="final norm"):
        _build({**shape, "feeds_normed": True}, {**weights, "final_norm": None})
    with pytest.raises(ValueError, match="residual"):
        _build({**shape, "norms_residual": True}, {**weights, "feature_norm": None})
    for changes in ({"threads": 0}, {"threads": -1}, {"kernels": "z80"}, {"cache_type": "int8"}):
        with pytest.raises(ValueError):
            _build(shape, weights, **changes)


def test_the_binding_refuses_arrays_of_other_shapes() -> None:
    drafter = _build(*_arguments())
    feature, logits = np.ones((1, 64), np.float32), np.empty((1, 20), np.float32)
    with pytest.raises(ValueError, match="rotation"):
        drafter.append([0], [[1]], [feature])
    table = np.ones((40, 8), np.float32)
    with pytest.raises(ValueError):
        drafter.set_rotation(table, table[:39])
    with pytest.raises(ValueError):
        drafter.set_rotation(table[:, :7].copy(), table[:, :7].copy())
    drafter.set_rotation(table, table)
    drafter.begin([0], [[1]], [feature], logits)
    for size in ((1, 19), (2, 20), (0, 20)):
        with pytest.raises(ValueError, match="logits"):
            drafter.begin([0], [[1]], [feature], np.empty(size, np.float32))
        with pytest.raises(ValueError, match="logits"):
            drafter.extend([0], [[1]], [[-1]], np.empty(size, np.float32))
    for wrong in (logits.astype(np.float64), np.empty((1, 40), np.float32)[:, ::2], np.empty(20, np.float32)):
        with pytest.raises((ValueError, TypeError)):
            drafter.begin([0], [[1]], [feature], wrong)
    with pytest.raises(ValueError):
        drafter.begin([0, 1], [[1]], [feature], logits)
    with pytest.raises(ValueError):
        drafter.begin([0], [[1]], [], logits)
    with pytest.raises(ValueError, match="rotation"):
        drafter.append([0], [[1] * 40], [np.ones((40, 64), np.float32)])
    assert drafter.num_rows(0) == 1
