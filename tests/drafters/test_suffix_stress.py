"""Long random lives of the native suffix index with every invariant checked; `make sanitize` runs it instrumented.

Called by pytest. The checks are `SuffixTree::check` (brute force over the whole tree) and the Python index.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from draftsmith.drafters.suffix_index import PythonSuffixIndex, open_index

pytestmark = pytest.mark.skipif(not open_index().is_native, reason="the native extension is not built")


def live(rng: random.Random, num_steps: int) -> int:
    """One random life of a native index beside its Python twin; the number of drafts compared."""
    depth, alphabet = rng.choice([2, 3, 4, 6, 8, 16]), rng.choice([2, 3, 5, 40])
    pair = open_index(depth, cap := rng.choice([-1, 0, 1, 2, 3])), PythonSuffixIndex(depth, cap)
    active: list[int] = []
    num_drafts = 0
    for step in range(num_steps):
        kind, request = rng.random(), rng.randrange(step + 1)
        if kind < 0.12 or not active:
            if request in active:
                continue
            prompt = [rng.randrange(alphabet) for _ in range(rng.randrange(60))]
            for index in pair:
                index.start_request(request, prompt)
            active.append(request)
        elif kind < 0.2:
            for index in pair:
                index.evict_request(request) if kind < 0.16 else index.stop_request(request)
            if kind >= 0.16 and request in active:
                active.remove(request)
        else:
            request = rng.choice(active)
            tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 9))]
            for index in pair:
                index.extend_request(request, tokens)
        for request in active[-2:]:
            wanted = (rng.choice([1, 4, 20]), rng.choice([0.0, 0.5, 1.0, 2.0]), rng.choice([0.0, 1.5, -1.0]))
            arguments = (request, *wanted, rng.choice([0.0, 0.1, 0.4]), rng.random() < 0.5)
            assert pair[0].speculate(*arguments) == pair[1].speculate(*arguments)
            num_drafts += 1
        if step % 10 == 0:
            pair[0].check()
    pair[0].check()
    assert pair[0].cached_sequences() == pair[1].cached_sequences()
    return num_drafts


def test_random_lives() -> None:
    rng = random.Random(11)
    assert sum(live(rng, 80) for _ in range(25)) > 1000


@pytest.mark.slow
def test_many_random_lives() -> None:
    rng = random.Random(12)
    assert sum(live(rng, rng.choice([20, 100, 300])) for _ in range(300)) > 10_000


@pytest.mark.slow
def test_repetitive_traffic_grows_and_shrinks_soundly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Realistic traffic through a small cap: everything is built, evicted and built again in reused memory."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from repetitive_tokens import traffic

    index = open_index(64, 12)
    sizes = []
    for request_id, request in enumerate(traffic(40_000, seed=3)):
        index.start_request(request_id, request.prompt)
        index.extend_request(request_id, request.response)
        index.stop_request(request_id)
        if request_id % 10 == 0:
            index.check()
            sizes.append(index.memory_bytes)
    assert index.num_cached == 12
    assert sizes[-1] < 3 * max(sizes[1:4])


def test_threads_cannot_break_an_index() -> None:
    """Each index is meant for one thread; two all the same leave it sound."""
    index = open_index(8)
    failures: list[BaseException] = []

    def work(request: int) -> None:
        rng = random.Random(request)
        try:
            index.start_request(request, [rng.randrange(4) for _ in range(5000)])
            for _ in range(200):
                index.extend_request(request, [rng.randrange(4)])
                index.speculate(request, 8)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    index.check()
    assert index.num_tokens == 600
