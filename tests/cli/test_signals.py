"""Ctrl-C and a reader that goes away, in processes of their own."""

import json
import resource
import shlex
import signal
import subprocess
import time

import pytest

from draftsmith.bench import bundle
from draftsmith.bench.summary import summarise_run
from tests.cli.tiny import ENVIRONMENT, command, run, run_apart


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


@pytest.fixture
def benchmark(tiny, tmp_path):
    """Starts a benchmark of 400 prompts; the process, its bundle, and a wait for lines in its journal."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(400)))
    started = []

    def call(*arguments, lines=6):
        words = ["bench", "-m", tiny, "-p", prompts, "-o", output, "-d", "none,ngram", "-n", "30", "--json"]
        process = start(*words, *arguments)
        started.append(process)
        journal = output / "journal.jsonl"
        while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.001)
        return process, output

    yield call
    for process in started:
        process.kill()
        process.communicate()


def use(output, capsys):
    """Score, show and compare what is left; the number of prompts."""
    assert run("bench", "rescore", output, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert run("bench", "report", output, "--markdown") == 0
    assert "stopped early" in capsys.readouterr().out
    code = run("bench", "compare", output, output)
    assert (code == 0) == (summary["prompts_measured"] > 0), capsys.readouterr().err
    return summary["prompts_measured"]


def test_ctrl_c_during_a_benchmark_keeps_what_was_measured(benchmark, capsys):
    process, output = benchmark()
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
    assert use(output, capsys) == summary["prompts_measured"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("lines", [0, 6])
def test_a_benchmark_that_is_ended_leaves_a_bundle_up_to_there(benchmark, capsys, number, lines):
    """`lines`: 0 is while it warms up, or before."""
    process, output = benchmark(lines=lines)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -number
    assert b"Traceback" not in err
    assert lines // 2 <= use(output, capsys) < 400


@pytest.mark.parametrize("lines", [0, 1])
def test_ctrl_c_before_anything_can_be_compared(benchmark, capsys, lines):
    process, output = benchmark(lines=lines)
    for _ in range(3):  # an impatient user
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, err = process.communicate(timeout=60)
    # The last of them may find the interpreter at its end, where no handler is left.
    assert process.returncode in (130, -signal.SIGINT), err
    assert b"Traceback" not in err
    use(output, capsys)


def test_a_disk_that_is_full_ends_a_benchmark_with_one_line(tiny, tmp_path, capsys):
    """The limit on the size of a file stands for the disk's."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "abc"}\n' * 60)
    words = ["bench", "-m", tiny, "-p", prompts, "-o", output, "-d", "none,ngram", "-n", "30"]
    limit = 100_000
    done = run_apart(*words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert "cannot write the bundle" in last and "File too large; what was measured before is kept" in last
    assert "Traceback" not in done.stderr
    assert 3 < use(output, capsys) < 60


@pytest.mark.parametrize("words", [["models"], ["bench", "--help"], ["bench", "compare"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line(tiny, tmp_path, words):
    if words[-1] == "compare":
        made = tmp_path / "out"
        assert run("bench", "-m", tiny, "-p", "builtin", "--limit", "1", "-n", "2", "-d", "none", "-o", made) == 0
        words = [*words, made, made]
    with open("/dev/full", "w") as full:
        done = run_apart(*words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == "draftsmith: error: No space left on device\n"


def test_streams_that_are_closed_are_no_fault(tiny, tmp_path):
    words = " ".join(map(shlex.quote, command("bench", "-m", tiny, "-p", "builtin", "--limit", "1", "-n", "2")))
    script = f"exec {words} -d none -o {tmp_path / 'out'} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", script], env=ENVIRONMENT, timeout=60, check=False).returncode == 0
    assert bundle.read(tmp_path / "out").runs
