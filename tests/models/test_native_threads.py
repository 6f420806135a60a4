"""The native backend among processes and threads: forks, systems without threads, several callers.

Whatever runs beside it, a row keeps its bits, and nothing hangs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.errors import UnsupportedError
from draftsmith.models.choice import open_backend
from tests.models.fakes import tiny_weights
from tests.models.native_models import Model, feed, make_native

FIELDS: dict[str, Any] = {"head_dim": 16, "width": 32, "mlp_width": 32}
_FORK = """
import os, sys, torch
from tests.models.native_models import Model, feed, make_native
model = Model({"head_dim": 16, "width": 32})
backend = make_native(model, int(sys.argv[1]))
backend.cache.open(0)
expected = feed(backend, 0, [1, 2, 3])[0]
child = os.fork()
if child == 0:
    backend.cache.open(1)
    mine = feed(backend, 1, [1, 2, 3])[0]
    other = make_native(model, int(sys.argv[1]))
    other.cache.open(0)
    same = torch.equal(mine, expected) and torch.equal(feed(other, 0, [1, 2, 3])[0], expected)
    sys.exit(0 if same else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
backend.cache.open(1)
assert torch.equal(feed(backend, 1, [1, 2, 3])[0], expected)
"""
_FORK_DURING_A_STEP = """
import os, signal, sys
from tests.models.native_models import Model, feed, make_native
backend = make_native(Model({"head_dim": 16, "width": 32}), 2)
backend.cache.open(0)
with backend._steps.lock:  # as if another thread were in a step
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        feed(backend, 0, [1, 2, 3])
        os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
_NO_THREADS = """
import resource
from draftsmith.errors import OptionError
from tests.models.native_models import Model, make_native
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), resource.RLIM_INFINITY))
try:
    make_native(Model({"head_dim": 16, "width": 32}), 1000)
except OptionError as error:
    print(error)
"""


def run(script: str, *arguments: str) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def in_two_threads(work: Callable[[int], None]) -> None:
    """Call work(0) and work(1) at the same time."""
    workers = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), "a thread hangs"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("threads", ["1", "3"])
def test_a_forked_child_scores(threads: str) -> None:
    assert run(_FORK, threads) == "0"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif("DRAFTSMITH_NATIVE" in os.environ, reason="the sanitizers need the address space")
def test_threads_that_cannot_be_started_are_named() -> None:
    assert "threads is 1000: cannot start 1000 threads" in run(_NO_THREADS)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_backend_serves_two_threads(threads: int) -> None:
    """Sequences of their own, one decoder: a step waits for the other's, and tables grow between them."""
    backend = make_native(Model({**FIELDS, "width": 64, "num_layers": 3}), threads)
    texts = [[(seed * place + place * place) % 64 for place in range(400)] for seed in (3, 5)]
    expected = []
    for index, text in enumerate(texts):
        backend.cache.open(index)
        expected.append(feed(backend, index, text)[0])
    failures: list[str] = []

    def work(index: int) -> None:
        try:
            for sequence in range(2 + index, 26, 2):
                backend.cache.open(sequence)
                size = (400, 150, 7, 40)[sequence // 2 % 4]
                parts = [feed(backend, sequence, texts[index][at : at + size])[0] for at in range(0, 400, size)]
                if not torch.equal(torch.cat(parts), expected[index]):
                    failures.append(f"sequence {sequence}")
        except Exception as error:
            failures.append(repr(error))

    in_two_threads(work)
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_does_not_wait_for_a_thread_it_does_not_have() -> None:
    assert run(_FORK_DURING_A_STEP) == "0"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_more_threads_than_processors_are_not_started(caplog: pytest.LogCaptureFixture) -> None:
    """A thousand threads that meet hundreds of times in a step took minutes for a token."""
    model = Model(FIELDS)
    processors = len(os.sched_getaffinity(0))
    tensors = tiny_weights(model.spec, 0)

    def raw(name: str) -> tuple[str, np.ndarray, tuple[int, ...]]:
        raise UnsupportedError("no blocks")

    before = threads_of_this_process()
    backend = open_backend(model.spec, tensors.__getitem__, raw, backend="native", threads=1024)[1]
    assert threads_of_this_process() - before < processors
    assert f"1024 threads were asked for; this process may use {processors}" in caplog.text
    backend.cache.open(0)
    assert torch.isfinite(feed(backend, 0, [1, 2, 3])[0]).all()  # type: ignore[arg-type]


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("threads", [1, 2])
def test_two_backends_score_at_once(threads: int) -> None:
    """Several Python threads, one pool: every row as alone."""
    backends = [make_native(Model({**FIELDS, "num_layers": 1}, seed=seed), threads) for seed in (1, 2)]
    texts = [[(seed * place + place * place) % 64 for place in range(12)] for seed in (3, 5)]
    expected = []
    for backend, text in zip(backends, texts, strict=True):
        backend.cache.open(0)
        expected.append(feed(backend, 0, text)[0])
    failures: list[str] = []

    def work(index: int) -> None:
        backend = backends[index]
        try:
            for sequence in range(1, 9):
                backend.cache.open(sequence)
                parts = [feed(backend, sequence, texts[index][start : start + 4])[0] for start in (0, 4, 8)]
                if not torch.equal(torch.cat(parts), expected[index]):
                    failures.append(f"backend {index}, sequence {sequence}")
        except Exception as error:
            failures.append(repr(error))

    in_two_threads(work)
    assert not failures
