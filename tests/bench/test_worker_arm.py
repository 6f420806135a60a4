"""Arms over worker processes: a worker made of a script with a fault for every request, and the real engines."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from draftsmith.bench import worker_arm
from draftsmith.bench.arms import Counters, Description, RunInfo, make_arm
from draftsmith.bench.peer_arms import LlamaCppArm
from draftsmith.bench.worker_arm import WorkerArm, WorkerSettings
from draftsmith.bench.worker_process import SCRIPTS
from draftsmith.errors import OptionError, UserError
from tests.bench.arm_driver import ask, error_of, run, run_one

GOOD, DIES, HANGS, RAISES, SLOW, DEAF = range(10, 16)
WORKER = """
import os, sys, time
sys.path.insert(0, {scripts!r})
from lines import serve

def load(path):
    print("a library's chatter")
    if path == "none":
        raise ValueError("no such model")
    return {{"path": path}}

def stream(emit, ids, n, stop, temperature, top_p, seed):
    what = ids[0]
    if what == 13:
        raise ValueError("not today")
    for count in range(n - 1 if what == 10 else 2):
        emit([100 + count])
    if what == 11:
        print("out of luck", file=sys.stderr)
        os._exit(3)
    if what == 12:
        time.sleep(60)
    if what == 14:
        for _ in range(300):
            time.sleep(0.02)
            emit([1])
    if what == 15:
        time.sleep(1.5)
    emit([2])
    counters = {{"steps": n - 1, "drafted": seed}}
    return {{"ids": [*range(100, 99 + n), 2], "counters": counters, "prompt_seconds": 0.5, "decode_seconds": 1.5}}

serve({{"load": load}}, {{"stream": stream}})
"""
NONSENSE = """
import json, sys, time
for line in sys.stdin:
    request = json.loads(line)
    key = request["key"]
    if request["command"] == "load":
        print(json.dumps({{"key": key, "result": {{}}}}), flush=True)
        if {is_deaf}:
            time.sleep(60)
    else:
        sys.stdout.write({says!r}.replace("KEY", str(key)))
        sys.stdout.flush()
        if {dies}:
            sys.exit(0)
"""


class FakeArm(WorkerArm):
    def __init__(self, script: Path, *, timeout: float = 10.0, path: str = "model", python: str = sys.executable):
        settings = WorkerSettings(python=python, script=script, threads=1, timeout=timeout)
        super().__init__("fake", settings, RunInfo(decode=lambda ids: " ".join(map(str, ids))))
        self._path = path

    def load_arguments(self):
        return {"path": self._path}

    def describe(self, found):
        return Description(engine="fake", model=found.get("path", ""))


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER.format(scripts=str(SCRIPTS)))
    return path


@pytest.fixture
def make(script):
    made = []

    def open_arm(**settings):
        arm = FakeArm(**{"script": script, **settings})
        made.append(arm)
        arm.open()
        return arm

    yield open_arm
    for arm in made:
        arm.close()
        arm.close()


def test_a_request_is_told_token_by_token(make):
    arm = make()
    answer, arrivals = run_one(arm, ask(ids=(GOOD, 1), n=4, seed=7))
    assert answer.token_ids == (100, 101, 102, 2)
    assert (answer.finish_reason, answer.prompt_tokens, answer.text) == ("stop", 2, "100 101 102 2")
    assert answer.counters == Counters(steps=3, drafted=7)
    assert answer.details == {"prompt_seconds": 0.5, "decode_seconds": 1.5}
    assert [item.num_tokens for item in arrivals] == [1, 1, 1, 1]
    assert run_one(arm, ask(ids=(GOOD,), end_ids=()))[0].finish_reason == "length"
    if sys.platform == "linux":
        assert arm.memory_bytes() > 1 << 20


def test_times_are_those_at_which_tokens_came(make):
    _, arrivals = run_one(make(), ask(ids=(DEAF,), n=3))
    assert arrivals[1].seconds - arrivals[0].seconds < 1
    assert arrivals[2].seconds - arrivals[1].seconds > 1.4


def test_requests_wait_for_one_another(make):
    found = run(make(), *(ask(key, (GOOD, key)) for key in range(3)))
    assert [found[key][0].error for key in range(3)] == [None] * 3
    assert found[0][0].seconds < found[1][0].seconds < found[2][0].seconds


def test_what_the_engine_refuses_costs_one_request(make):
    arm = make()
    assert error_of(arm, ask(ids=(RAISES,))) == "fake: stream: ValueError: not today"
    assert "takes token ids" in error_of(arm, ask(ids=None, text="words"))
    assert run_one(arm, ask(ids=(GOOD,)))[0].error is None


def test_a_worker_that_dies_fails_what_it_had_and_can_be_opened_again(make):
    arm = make()
    found = run(arm, ask(0, (DIES,)), ask(1, (GOOD,)))
    assert found[0][0].error == found[1][0].error == "fake: the worker ended with status 3: out of luck"
    assert len(found[0][1]) == 2
    assert "status 3" in error_of(arm, ask(2, (GOOD,)))
    arm.open()
    assert run_one(arm, ask(3, (GOOD,)))[0].error is None


def test_a_lost_worker_is_started_anew_between_blocks(make, script):
    arm = make()
    assert "status 3" in error_of(arm, ask(0, (DIES,)))
    assert arm.block_counters() is None
    assert run_one(arm, ask(1, (GOOD,)))[0].error is None
    assert "status 3" in error_of(arm, ask(2, (DIES,)))
    script.unlink()
    arm.block_counters()
    assert "ended with status 2" in error_of(arm, ask(3, (GOOD,)))
    arm.close()
    arm.block_counters()
    assert error_of(arm, ask(4, (GOOD,))) == "fake: the arm is not open"


def test_a_worker_that_hangs_is_ended(make):
    arm = make(timeout=0.6)
    process_id = arm._process.process_id
    began = time.perf_counter()
    assert error_of(arm, ask(ids=(HANGS,))) == "fake: no answer within 0.6 s"
    assert time.perf_counter() - began < 3
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("Segmentation fault, says a library\n", "said what is no answer: 'Segmentation fault"),
        ("[1, 2]\n", "no answer"),
        ('{"key": 99, "tokens": [1]}\n', "no answer"),
        ('{"key": 0, "tokens": [1]}\n', "request 0, which is not running"),
        ('{"key": KEY, "tokens": "abc"}\n', "no answer"),
        ('{"key": KEY}\n', "no answer"),
        ('{"key": KEY, "result": {"no": 1}}\n', "result is unreadable: KeyError"),
        ('{"key": KEY, "result": {"ids": [1], "counters": {"luck": 3}}}\n', "result is unreadable: TypeError"),
        ('{"key": KEY, "result": null}\n', "result is unreadable"),
    ],
)
def test_nonsense_ends_the_worker(make, tmp_path, says, told):
    (tmp_path / "nonsense.py").write_text(NONSENSE.format(says=says, is_deaf=False, dies=False))
    arm = make(script=tmp_path / "nonsense.py")
    assert told in error_of(arm, ask(n=2))
    assert arm._process is None


def test_half_a_line_is_a_death_not_nonsense(make, tmp_path):
    (tmp_path / "half.py").write_text(NONSENSE.format(says='{"key": KEY, "tok', is_deaf=False, dies=True))
    assert "the worker ended with status 0" in error_of(make(script=tmp_path / "half.py"), ask())


def test_a_prompt_longer_than_the_pipe_does_not_block_who_sends_it(make, tmp_path):
    (tmp_path / "deaf.py").write_text(NONSENSE.format(says="", is_deaf=True, dies=False))
    arm = make(script=tmp_path / "deaf.py", timeout=0.8)
    assert "no answer within" in error_of(arm, ask(ids=tuple(range(100000))))


def test_a_cancelled_request_is_not_heard_of_again(make):
    arm = make()
    arm.submit(ask(0, (SLOW,)))
    arm.submit(ask(1, (GOOD,)))
    assert arm.poll(5.0)
    began = time.perf_counter()
    arm.cancel()
    assert time.perf_counter() - began < 2
    assert set(run(arm, ask(2, (GOOD,)))) == {2}
    arm.cancel()
    assert arm.poll(0.01) == []


def test_a_worker_that_does_not_hear_a_cancellation_is_ended(make, monkeypatch):
    monkeypatch.setattr(worker_arm, "_CANCEL_SECONDS", 0.3)
    arm = make()
    arm.submit(ask(0, (HANGS,)))
    heard = 0
    while heard < 2:  # a cancellation is heard at the next token, and there are two
        heard += len(arm.poll(5.0))
    arm.cancel()
    assert "worker was ended" in error_of(arm, ask(1, (GOOD,)))
    arm.open()
    assert run_one(arm, ask(2, (GOOD,)))[0].error is None


def test_what_cannot_be_opened_is_one_line(script, tmp_path):
    with pytest.raises(UserError, match=r"^fake: load: ValueError: no such model$"):
        FakeArm(script, path="none").open()
    with pytest.raises(UserError, match=r"^fake: cannot start /no/python: No such file or directory$"):
        FakeArm(script, python="/no/python").open()
    (tmp_path / "lacking.py").write_text("import an_engine_nobody_has")
    with pytest.raises(UserError, match="ended with status 1: ModuleNotFoundError: No module named 'an_engine_nobody"):
        FakeArm(tmp_path / "lacking.py").open()
    (tmp_path / "asleep.py").write_text("import time; time.sleep(60)")
    with pytest.raises(UserError, match=r"load: no answer within 0.3 s"):
        FakeArm(tmp_path / "asleep.py", timeout=0.3).open()


def test_an_arm_that_is_not_open_answers_so(script):
    assert error_of(FakeArm(script), ask(ids=(GOOD,))) == "fake: the arm is not open"


def test_closing_leaves_no_process(make):
    arm = make()
    process_id = arm._process.process_id
    arm.submit(ask(0, (HANGS,)))
    arm.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_selections(tmp_path):
    model = tmp_path / "a model.gguf"
    model.touch()
    arm = make_arm(f"llama_cpp:model={model}:draft=lookup:4:python=/a/python", RunInfo(threads=3))
    assert isinstance(arm, LlamaCppArm)
    assert arm.stream_arguments() == {"draft": "lookup:4"}
    assert (arm._settings.python, arm._settings.threads) == ("/a/python", 3)
    assert make_arm(f"openvino:model={model}:threads=2", RunInfo(threads=3)).load_arguments()["threads"] == 2
    for wrong, told in {
        "llama_cpp": "write model=FILE",
        "llama_cpp:model=/no/file": "no such file",
        f"llama_cpp:model={model}:draft=lookup": "allowed: none, lookup:K, api:K",
        f"openvino:model={model}:draft=api:3": "allowed: none, lookup:K",
        f"transformers:model={model}:draft=assistant:": "assistant:MODEL",
        f"transformers:model={model}:dtype=int8": "float32, bfloat16",
        f"llama_cpp:model={model}:threads=0": "at least 1",
        f"llama_cpp:model={model}:timeout=0": "above 0",
        f"llama_cpp:model={model}:colour=red": "unknown option 'colour'",
        "gpt:model=x": "known are llama_cpp, transformers, openvino, endpoint",
        "llama_cpp:lookup:4": "not of the form key=value",
    }.items():
        with pytest.raises(OptionError, match=told):
            make_arm(wrong, RunInfo())
