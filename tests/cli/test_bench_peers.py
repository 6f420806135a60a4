"""`draftsmith bench --peer llama_cpp:...` over a worker that does everything wrong in turn, from flags to bundle."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.bench import bundle
from tests.cli.tiny import ENVIRONMENT, command, run

# What it does is told by the length of the prompt; anything else is answered well.
PEER = """#!{python}
import json, os, sys, time

for line in sys.stdin:
    request = json.loads(line)
    if "cancel" in request:
        continue

    def say(**body):
        print(json.dumps({{"key": request["key"], **body}}), flush=True)

    if request["command"] == "load":
        time.sleep({load_seconds})
        say(result={{"version": "1"}})
        continue
    what, n = len(request["ids"]), request["n"]
    ids, told, counters = [5] * n, n, {{"steps": n - 1}}
    if what == 2:
        ids[-1] = -7
    elif what == 3:
        ids, told = ids + [5, 5], n + 2
    elif what == 4:
        told = n - 1
    elif what == 5:
        print("Segmentation fault (core dumped)", flush=True)
    elif what == 6:
        print("out of luck", file=sys.stderr)
        os._exit(3)
    elif what == 7:
        say(error="no room: caf\\ud83d")
        continue
    elif what == 8:
        time.sleep(60)
    elif what == 9:
        counters = {{"steps": "many"}}
    elif what == 10:
        ids[0] = 10**9
    for _ in range(told):
        say(tokens=[5])
    say(result={{"ids": ids, "counters": counters}})
"""
FAULTS = {
    2: "ids that are no tokens",
    3: "22 tokens, and 20 were asked for",
    4: "20 tokens, and 19 were told as they came",
    5: "said what is no answer: 'Segmentation fault",
    6: "ended with status 3: out of luck",
    7: "no room: caf\ufffd",
    8: "no answer within 1 s",
    9: "steps is 'many', no count",
}


@pytest.fixture
def peer(tmp_path, tiny):
    """The option that names it."""

    def make(options=":timeout=1", load_seconds=0.0):
        path = tmp_path / "worker"
        path.write_text(PEER.format(python=sys.executable, load_seconds=load_seconds))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return f"worker=llama_cpp:model={tiny}:python={path}{options}"

    return make


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * size}) + "\n" for size in range(1, 12)))
    return path


def test_every_fault_is_counted_by_its_name_and_enters_no_figure(peer, prompts, tiny, tmp_path, capsys):
    output = tmp_path / "out"
    words = ["bench", "-m", tiny, "-p", prompts, "-o", output, "-d", "none", "--raw", "-n", "20", "--json"]
    assert run(*words, "--peer", peer()) == 0
    captured = capsys.readouterr()
    none, found = json.loads(captured.out)["results"]
    assert "Traceback" not in captured.err
    errors = {
        request.prompt + 1: request.error
        for run_ in bundle.read(output).runs
        for request in run_.requests
        if run_.arm == "worker"
    }
    assert {size for size, error in errors.items() if error is not None} == set(FAULTS)
    for size, told in FAULTS.items():
        assert told in errors[size]
    assert sum(found["failed_requests"].values()) == len(FAULTS)
    # Wrong ids, one of them beyond the vocabulary, are three answers that differ.
    assert (found["num_requests"], found["emitted_tokens"], found["divergent"]) == (3, 60, 3)
    assert (found["speedup"]["items"], found["tokens_per_step"]) == (3, 1.0)
    assert (none["num_requests"], none["failed_requests"]) == (11, {})
    for arguments in (["rescore", output], ["report", output, "--markdown"], ["compare", output, output]):
        assert run("bench", *arguments) == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (":log=/", "cannot write its log /: Is a directory"),
        (":log=/no/such/place", "cannot write its log /no/such/place: No such file"),
        (":python=/", "cannot start /: Permission denied"),
        (":python=/bin/true", "ended with status 0"),
        (":python=/bin/false", "ended with status 1"),
        (":python=/bin/echo", "said what is no answer"),
    ],
)
def test_a_peer_that_cannot_start_is_one_line(peer, prompts, tiny, tmp_path, capsys, options, told):
    selection = peer().replace(":python", ":threads=1:python") if "log" in options else f"x=llama_cpp:model={tiny}"
    assert run("bench", "-m", tiny, "-p", prompts, "-o", tmp_path / "out", "--peer", selection + options) == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_while_a_peer_loads_leaves_no_process(peer, prompts, tiny, tmp_path, number):
    words = ["-m", tiny, "-p", prompts, "-o", tmp_path / "out", "--peer", peer(load_seconds=0.5, options="")]
    process = subprocess.Popen(command("bench", *words), stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert b"starting worker" in process.stderr.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.005)
    began = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert b"Traceback" not in err
    until = time.monotonic() + 10
    while any(map(_is_there, found)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(_is_there, found))
    assert time.monotonic() - began < 10


def _is_there(process_id):
    try:
        os.kill(int(process_id), 0)
        with open(f"/proc/{process_id}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
