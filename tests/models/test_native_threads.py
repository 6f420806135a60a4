"""The native backend among processes and threads: forks, systems without threads, several callers.

Whatever runs beside it, a row keeps its bits, and nothing hangs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("threads", ["1", "3"])
def test_a_forked_child_scores(threads: str) -> None:
    assert run(_FORK, threads) == "0"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif("DRAFTSMITH_NATIVE" in os.environ, reason="the sanitizers need the address space")
def test_threads_that_cannot_be_started_are_named() -> None:
    assert "threads is 1000: cannot start 1000 threads" in run(_NO_THREADS)


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

    workers = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), "a thread hangs"
    assert not failures
