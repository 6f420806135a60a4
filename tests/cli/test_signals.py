"""Ctrl-C and a reader that goes away, in processes of their own."""

import json
import os
import signal
import subprocess

import pytest

from draftsmith.bench import bundle
from draftsmith.bench.summary import summarise_run
from tests.cli.tiny import ENVIRONMENT, command


def start(*arguments):
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, start_new_session=True
    )


def test_ctrl_c_ends_generate_with_what_was_written(tiny):
    process = start("generate", "-m", tiny, "-n", "3900", "-d", "none", "hello")
    first = process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"interrupted" in err
    assert b"Traceback" not in err
    assert len(first + out) < 3900
    assert out.endswith(b"\n")


@pytest.mark.parametrize("words", [["generate", "-n", "3000", "hello"], ["models"]], ids=lambda words: words[0])
def test_a_reader_that_goes_away_ends_it_quietly(tiny, words):
    model = ["-m", tiny] if words[0] == "generate" else []
    process = start(words[0], *model, *words[1:])
    if words[0] == "generate":
        process.stdout.read(10)
    process.stdout.close()
    with process.stderr as stream:
        err = stream.read()
    assert process.wait(timeout=30) == 141
    assert b"Traceback" not in err
    assert b"Exception" not in err


def test_ctrl_c_during_a_benchmark_keeps_what_was_measured(tiny, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(400)))
    output = tmp_path / "out"
    process = start("bench", "-m", tiny, "-p", prompts, "-o", output, "-d", "none,ngram", "-n", "30", "--json")
    runs = output / "journal.jsonl"
    try:
        while not runs.exists() or runs.read_text().count("\n") < 6:
            assert process.poll() is None, process.stderr.read()
            os.sched_yield()
    finally:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    summary = json.loads(out)
    assert summary == json.loads((output / "summary.json").read_text())
    assert summary["interrupted"]
    measured = bundle.read(output)
    assert 3 <= summary["prompts_measured"] < 400
    assert json.loads(json.dumps(summarise_run(measured))) == summary
