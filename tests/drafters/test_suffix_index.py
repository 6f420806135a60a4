"""The suffix index against brute-force counting, and its native form against the Python one.

Called by pytest. The oracle keeps the sequences as plain lists and counts occurrences; it knows no tree.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.drafters.suffix_index import FORCE_PYTHON, Draft, PythonSuffixIndex, SuffixIndex, open_index
from draftsmith.errors import OptionError

NATIVE = open_index().is_native
needs_native = pytest.mark.skipif(not NATIVE, reason="the native extension is not built")


def make_python(max_depth: int, max_cached: int = -1) -> SuffixIndex:
    return PythonSuffixIndex(max_depth, max_cached)


MAKERS = [make_python, open_index] if NATIVE else [make_python]
both = pytest.mark.parametrize("make", MAKERS)
Maker = Callable[..., SuffixIndex]


class Oracle:
    """Local and cached texts as lists; drafts by counting."""

    def __init__(self, max_depth: int, max_cached: int) -> None:
        self.max_depth = max_depth
        self.max_cached = max_cached
        self.texts: dict[int, list[int]] = {}
        self.cached: dict[int, list[int]] = {}

    def start(self, request: int, prompt: list[int]) -> None:
        self.texts[request] = list(prompt)
        if self.max_cached != 0:
            self.cached.pop(request, None)
            self.cached[request] = []
            while 0 < self.max_cached < len(self.cached):
                del self.cached[next(iter(self.cached))]

    def extend(self, request: int, tokens: list[int]) -> None:
        self.texts[request] += tokens
        if request in self.cached:
            self.cached[request] += tokens

    def counts(self, texts: list[list[int]], match: list[int]) -> dict[tuple[int, ...], int]:
        """Occurrences of every continuation of `match` that keeps within the depth."""
        found: dict[tuple[int, ...], int] = {}
        for text in texts:
            for at in range(len(text) - len(match) + 1):
                if text[at : at + len(match)] == match:
                    tail = text[at + len(match) : at + self.max_depth]
                    for length in range(len(tail) + 1):
                        found[tuple(tail[:length])] = found.get(tuple(tail[:length]), 0) + 1
        return found

    def best_tree(
        self, request: int, max_tokens: int, factor: float, min_prob: float
    ) -> tuple[list[float], float, int, bool]:
        """Estimates (falling), score, match length and source of the best tree draft; ties decided by the rules."""
        best: tuple[list[float], float, int, bool] = ([], 0.0, 0, False)
        pattern = self.texts[request][-self.max_depth :]
        for texts, is_global in (([self.texts[request]], False), (list(self.cached.values()), True)):
            own = best
            for length in range(1, len(pattern)):
                found = self.counts(texts, pattern[len(pattern) - length :])
                if not found:
                    break
                matched = found.pop(())
                budget = min(max_tokens, int(length * factor + 1e-6))
                top = sorted((c for c in found.values() if c / matched >= min_prob), reverse=True)[:budget]
                score = sum(top) / matched
                if score > own[1] or (top and score == own[1] and own[2] and own[3] == is_global):
                    own = ([count / matched for count in top], score, length, is_global)
            best = own
        return best


def play(seed: int, index: SuffixIndex, oracle: Oracle, num_steps: int, alphabet: int) -> list[int]:
    """Random starts, extensions, stops and evictions on both; the active requests."""
    rng = random.Random(seed)
    active: list[int] = []
    for step in range(num_steps):
        kind = rng.random()
        if kind < 0.25 or not active:
            request = step if rng.random() < 0.8 else rng.randrange(step + 1)
            if request in active:
                continue
            prompt = [rng.randrange(alphabet) for _ in range(rng.randrange(12))]
            index.start_request(request, prompt)
            oracle.start(request, prompt)
            active.append(request)
        elif kind < 0.35 and len(active) > 1:
            request = active.pop(rng.randrange(len(active)))
            index.stop_request(request)
            del oracle.texts[request]
        elif kind < 0.42:
            request = rng.randrange(step + 1)
            index.evict_request(request)
            oracle.cached.pop(request, None)
        else:
            tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 6))]
            request = rng.choice(active)
            index.extend_request(request, tokens)
            oracle.extend(request, tokens)
    return active


@both
@pytest.mark.parametrize("seed", range(12))
def test_trees_equal_counting(make: Maker, seed: int) -> None:
    """Score, estimates, match length and source of tree drafts are those of brute-force counting."""
    max_depth, max_cached, alphabet = [(2, -1, 2), (4, 2, 2), (5, -1, 3), (8, 3, 2), (6, 1, 4), (8, 0, 3)][seed % 6]
    index, oracle = make(max_depth, max_cached), Oracle(max_depth, max_cached)
    for request in play(seed, index, oracle, 60, alphabet):
        for max_tokens, factor, min_prob in ((4, 1.0, 0.1), (12, 2.0, 0.0), (3, 0.5, 0.4)):
            draft = index.speculate(request, max_tokens, factor, 0.0, min_prob, True)
            estimates, score, match_len, is_global = oracle.best_tree(request, max_tokens, factor, min_prob)
            assert sorted(draft.probs, reverse=True) == estimates
            assert (draft.score, draft.match_len, draft.from_global) == (score, match_len, is_global)


@both
@pytest.mark.parametrize("seed", range(12))
def test_paths_follow_the_counts(make: Maker, seed: int) -> None:
    """Each token of a path is a most frequent continuation, its estimate is the counted one, and it stops rightly."""
    max_depth, max_cached, alphabet = [(3, -1, 2), (6, 2, 2), (7, -1, 3), (8, 0, 2)][seed % 4]
    index, oracle = make(max_depth, max_cached), Oracle(max_depth, max_cached)
    drafted = 0
    for request in play(100 + seed, index, oracle, 60, alphabet):
        draft = index.speculate(request, 5, 1.0, 0.0, 0.2)
        texts = list(oracle.cached.values()) if draft.from_global else [oracle.texts[request]]
        text = oracle.texts[request]
        counts = oracle.counts(texts, text[len(text) - draft.match_len :])
        assert draft.parents == tuple(range(-1, len(draft.tokens) - 1))
        for depth, prob in enumerate(draft.probs):
            path = draft.tokens[: depth + 1]
            rivals = [counts.get((*path[:-1], token), 0) for token in range(alphabet)]
            assert counts[path] == max(rivals)
            assert prob == counts[path] / counts[()] >= 0.2
        going_on = [counts.get((*draft.tokens, token), 0) for token in range(alphabet)]
        if draft.tokens and len(draft.tokens) < min(5, draft.match_len):
            assert max(going_on) / counts[()] < 0.2
        assert draft.score == pytest.approx(sum(draft.probs), abs=1e-12)
        drafted += len(draft.tokens)
    assert drafted or max_depth == 3


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 5), st.lists(st.integers(0, 3), max_size=40)),
        st.tuples(st.just("extend"), st.integers(0, 5), st.lists(st.integers(0, 3), min_size=1, max_size=9)),
        st.tuples(st.just("repeat"), st.integers(0, 5), st.integers(1, 12)),
        st.tuples(st.just("stop"), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.integers(0, 5)),
    ),
    min_size=5,
    max_size=40,
)


def apply(index: SuffixIndex, operation: tuple, texts: dict[int, list[int]]) -> None:
    """Carry out one drawn operation where it makes sense."""
    kind, request, *rest = operation
    if kind == "start" and request not in texts:
        index.start_request(request, rest[0])
    elif kind == "extend" and request in texts:
        index.extend_request(request, rest[0])
    elif kind == "repeat" and request in texts:
        index.extend_request(request, texts[request][-rest[0] :])
    elif kind == "stop":
        index.stop_request(request)
    elif kind == "evict":
        index.evict_request(request)


def note(operation: tuple, texts: dict[int, list[int]]) -> None:
    """The texts of active requests after the operation."""
    kind, request, *rest = operation
    if kind == "start":
        texts.setdefault(request, list(rest[0]))
    elif kind == "extend" and request in texts:
        texts[request] += rest[0]
    elif kind == "repeat" and request in texts:
        texts[request] += texts[request][-rest[0] :]
    elif kind == "stop":
        texts.pop(request, None)


@needs_native
@settings(max_examples=150)
@given(operations=OPERATIONS, max_depth=st.integers(2, 9), max_cached=st.sampled_from([-1, 0, 1, 3]), data=st.data())
def test_native_drafts_equal_python_drafts(
    operations: list, max_depth: int, max_cached: int, data: st.DataObject
) -> None:
    """Token for token, over any history of starts, growth, stops and evictions; the native tree stays sound."""
    indexes = make_python(max_depth, max_cached), open_index(max_depth, max_cached)
    texts: dict[int, list[int]] = {}
    for operation in operations:
        for index in indexes:
            apply(index, operation, texts)
        note(operation, texts)
        for request in texts:
            settings_drawn = (data.draw(st.integers(0, 12)), data.draw(st.sampled_from([0.5, 1.0, 2.0])))
            for tree in (False, True):
                drafts = [index.speculate(request, *settings_drawn, 0.5, 0.15, tree) for index in indexes]
                assert drafts[0] == drafts[1]
    indexes[1].check()
    assert indexes[0].cached_sequences() == indexes[1].cached_sequences()
    assert indexes[0].num_tokens == indexes[1].num_tokens
    assert indexes[0].num_cached == indexes[1].num_cached


@needs_native
def test_native_stays_sound_at_full_depth() -> None:
    """Long texts of much repetition at depth 64: segments, wide nodes, removal in any order."""
    rng = random.Random(5)
    index, twin = open_index(64), PythonSuffixIndex(64)
    pieces = [[rng.randrange(300) for _ in range(rng.randrange(5, 90))] for _ in range(12)]
    for request in range(12):
        for one in (index, twin):
            one.start_request(request, pieces[request])
        for _ in range(8):
            piece = rng.choice(pieces)
            tokens = [*piece[rng.randrange(len(piece)) :], rng.randrange(300)]
            for one in (index, twin):
                one.extend_request(request, tokens)
        assert index.speculate(request, 16) == twin.speculate(request, 16)
    index.check()
    for request in rng.sample(range(12), 8):
        for one in (index, twin):
            one.evict_request(request)
        index.check()
        for other in range(12):
            assert index.speculate(other, 16, tree=True) == twin.speculate(other, 16, tree=True)
    assert index.num_tokens == twin.num_tokens > 0


@both
def test_worked_example(make: Maker) -> None:
    """After 1 2 3 1 2 the open suffix counts in the denominator: 3 has been seen once of two occurrences of 2."""
    index = make(8)
    index.start_request(0, [1, 2, 3, 1, 2])
    assert index.speculate(0, 4) == Draft((3, 1), (-1, 0), (0.5, 0.5), 1.0, 2, False)
    assert index.speculate(0, 4, 1.0, 0.0, 0.6) == Draft()
    assert index.speculate(0, 0) == Draft()
    assert index.speculate(0, 4, 0.0, 1.0) == Draft((3,), (-1,), (0.5,), 0.5, 2, False)


@both
@pytest.mark.parametrize(
    ("history", "drafted"),
    [
        ([[1, 2], [1, 3], [1, 4]], 2),  # a new child goes last
        ([[1, 2], [1, 3], [1, 2], [1, 3]], 3),  # the leader of a group goes to the front of the next
        ([[1, 2], [1, 3], [1, 4], [1, 3], [1, 4]], 3),  # who does not lead goes to its end
        ([[1, 2], [1, 3], [1, 4], [1, 4], [1, 3]], 4),
    ],
)
def test_order_of_equal_counts(make: Maker, history: list[list[int]], drafted: int) -> None:
    """The order is that of arctic-inference 0.3.0, of which these are outputs."""
    index = make(8)
    for request, tokens in enumerate(history):
        index.start_request(request, [])
        index.extend_request(request, tokens)
    index.start_request(99, [9, 1])
    assert index.speculate(99, 1, min_prob=0.0).tokens == (drafted,)


@both
def test_ties_go_to_the_local_tree_and_the_longer_match(make: Maker) -> None:
    index = make(8)
    index.start_request(0, [5, 6, 7, 8])
    index.extend_request(0, [5, 6])
    index.extend_request(0, [7, 8])
    assert not index.speculate(0, 4).from_global
    index.start_request(1, [3, 4, 5, 6, 3, 4])
    draft = index.speculate(1, 1, 0.0, 1.0)
    assert (draft.tokens, draft.match_len, draft.from_global) == ((5,), 2, False)


@both
def test_eviction_is_first_in_first_out(make: Maker) -> None:
    index = make(8, 2)
    for request in range(4):
        index.start_request(request, [])
        index.extend_request(request, [10 + request, 20 + request, 30 + request])
        index.stop_request(request)
    assert (index.num_cached, index.num_tokens) == (2, 6)
    lengths, tokens = index.cached_sequences()
    assert (lengths, list(struct.unpack("<6i", tokens))) == ([3, 3], [12, 22, 32, 13, 23, 33])
    index.start_request(2, [])  # a used id evicts its response first, then nothing is over the cap
    assert index.cached_sequences()[0] == [3, 0]
    index.evict_request(3)
    index.evict_request(77)
    assert (index.num_cached, index.num_tokens) == (1, 0)


@both
def test_evicted_request_goes_on_locally(make: Maker) -> None:
    """A request whose response is evicted while it runs still drafts from its own text."""
    index = make(8, 1)
    index.start_request(0, [1, 2, 3])
    index.start_request(1, [])
    index.extend_request(0, [1, 2])
    assert index.num_tokens == 0
    assert index.speculate(0, 4).tokens[0] == 3
    assert index.request_len(0) == 5


@both
def test_no_global_tree(make: Maker) -> None:
    index = make(8, 0)
    index.start_request(0, [])
    index.extend_request(0, [1, 2, 3])
    index.add_sequences([2], struct.pack("<2i", 1, 2))
    assert (index.num_cached, index.num_tokens, index.cached_sequences()) == (0, 0, ([], b""))


@both
def test_misuse_is_named(make: Maker) -> None:
    index = make(8)
    index.start_request(3, [1])
    with pytest.raises(KeyError, match="request 3 is active already"):
        index.start_request(3, [1])
    with pytest.raises(KeyError, match="request 4 is not active"):
        index.extend_request(4, [1])
    with pytest.raises(KeyError, match="request 4 is not active"):
        index.speculate(4, 1)
    with pytest.raises(ValueError, match="must not be negative: -1"):
        index.extend_request(3, [2, -1])
    with pytest.raises(ValueError, match="factor must be at least 0"):
        index.speculate(3, 1, -1.0)
    assert index.request_len(4) == -1
    index.stop_request(4)
    assert index.memory_bytes > 0


@pytest.mark.parametrize(("max_depth", "max_cached"), [(1, -1), (70_000, -1), (8, -2), (8, 2**31)])
def test_options_outside_their_range(max_depth: int, max_cached: int) -> None:
    with pytest.raises(OptionError, match="suffix index: max_"):
        open_index(max_depth, max_cached)


def test_python_index_serves_without_the_extension() -> None:
    """Without the extension the Python index serves and one line, once, says so; the variable asks for it silently."""
    program = (
        "import sys; sys.modules['draftsmith._native'] = None\n"
        "from draftsmith.drafters.suffix_index import open_index\n"
        "print(open_index().is_native, open_index(8).is_native)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False False\n"
    assert run.stderr.count("\n") == 1
    assert "pure Python one serves" in run.stderr


def test_variable_forces_the_python_index(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(FORCE_PYTHON, "1")
    assert not open_index().is_native
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(FORCE_PYTHON, "0")
    assert open_index().is_native == NATIVE
