"""The C++ row runner among processes and threads: forks, a fork in the middle of a call, several callers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.drafters.test_native_rows import Case, fresh

_FORK = """
import os, signal, sys
from tests.drafters.test_native_rows import Case, fresh
case = Case("eagle3", threads=int(sys.argv[1]))
expected = fresh(case, 1, 30, [3, 4])
case.rows.append([case.true(0, 1, 20)])
with case.rows._calls.lock:  # as if another thread were in a call
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        other = Case("eagle3", threads=int(sys.argv[1]))
        begun = case.rows.begin([case.true(0, 1, 30, 20)])[0].numpy().tobytes()
        same = [begun, *case.draft(0, [3, 4])] == expected == fresh(other, 1, 30, [3, 4])
        os._exit(0 if same else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert fresh(case, 1, 30, [3, 4]) == expected
"""
_FORKS_DURING_CALLS = """
import os, signal, threading
from tests.drafters.test_native_rows import Case, fresh
case = Case("eagle3", threads=2)
expected = fresh(case, 1, 200, [3, 4])
stop = threading.Event()
def work():
    while not stop.is_set():
        case.rows.forget(5)
        case.rows.begin([case.true(5, 2, 700)])
        case.draft(5, [1, 2, 3])
worker = threading.Thread(target=work)
worker.start()
codes = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        mine = fresh(case, 1, 200, [3, 4])
        case.rows.truncate(5, 3)
        case.rows.forget(5)
        os._exit(0 if mine == expected else 3)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
worker.join()
print(codes)
"""


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("threads", ["1", "3"])
def test_a_forked_child_drafts(threads: str) -> None:
    assert run(_FORK, threads) == "0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_children_forked_while_a_thread_drafts() -> None:
    """Whatever the other thread was in the middle of, the child finds rows that count whole."""
    assert run(_FORKS_DURING_CALLS) == str([0] * 20)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_runner_serves_two_threads(threads: int) -> None:
    case, failures = Case("mtp qwen", threads=threads), []
    expected = [fresh(Case("mtp qwen"), seed, 150, [5, 6, 7]) for seed in (1, 2)]

    def work(index: int) -> None:
        try:
            for turn in range(10):
                sequence, size = 2 * turn + index, (150, 20, 1, 64)[turn % 4]
                for start in range(0, 149, size):
                    case.rows.append([case.true(sequence, 1 + index, min(start + size, 149), start)])
                begun = case.rows.begin([case.true(sequence, 1 + index, 150, 149)])[0].numpy().tobytes()
                if [begun, *case.draft(sequence, [5, 6, 7])] != expected[index]:
                    failures.append(f"sequence {sequence}")
        except Exception as error:
            failures.append(repr(error))

    workers = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), "a thread hangs"
    assert not failures
