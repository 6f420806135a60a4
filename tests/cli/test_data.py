"""`draftsmith data`: texts are written, interrupted, gone on with, answered by servers, and made ready."""

import json
import os
import signal
import subprocess

import pytest

from draftsmith.training.corpus import Corpus
from tests.bench.endpoint_server import Events, FakeServer, reply
from tests.cli.tiny import ENVIRONMENT, command, run, write_tiny

# The tiny model spells the alphabet: hotter it stumbles into bytes that are no text, colder it says one word.
SYNTH = (
    "-n 40 --max-prompt-tokens 60 -b 4 --seed 5 --second-turns 0.3 --greedy 0.1 -t 0.5 --prompt-temperature 0.5 "
    "--threads 1 --kinds question,talk,writing"
).split()


@pytest.fixture
def data(capsys):
    """Runs a command with --json; returns its document."""

    def call(*arguments, code=0):
        assert run("data", *arguments, "--json") == code
        captured = capsys.readouterr()
        return json.loads(captured.out) if code in (0, 130) else captured.err

    return call


def contents(path):
    """The texts and what was dropped; what is parked for a later run depends on when this one was stopped."""
    names = {"about.json", "dropped.ndjson", *(item.name for item in path.glob("texts-*.jsonl"))}
    return {name: (path / name).read_bytes() for name in sorted(names)}


def lines(path):
    return [json.loads(line) for item in sorted(path.glob("texts-*.jsonl")) for line in item.read_bytes().splitlines()]


def test_synth_writes_conversations(data, tiny_ending, tmp_path):
    output = tmp_path / "raw"
    told = data("synth", "-m", tiny_ending, "-o", output, "--texts", "6", *SYNTH)
    texts = lines(output)
    assert told["texts"] == len(texts) == 6
    assert told["answer_tokens"] == sum(text["answer_tokens"] for text in texts)
    assert told["written_tokens"] >= told["answer_tokens"]
    assert not told["interrupted"]
    for text in texts:
        assert {"id", "messages", "finish_reason", "temperature", "seed"} <= set(text)
        assert text["messages"][-1]["role"] == "assistant"
    assert told["dropped"]


def test_synth_goes_on_and_gives_the_same_as_in_one_go(data, tiny_ending, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    data("synth", "-m", tiny_ending, "-o", whole, "--texts", "6", *SYNTH)
    for texts in ("1", "3", "6", "6"):
        told = data("synth", "-m", tiny_ending, "-o", parts, "--texts", texts, *SYNTH)
    assert contents(parts) == contents(whole)
    assert told["written_tokens"] == 0
    tokens = str(sum(text["answer_tokens"] for text in lines(whole)[:-1]) + 1)
    by_tokens = tmp_path / "tokens"
    data("synth", "-m", tiny_ending, "-o", by_tokens, "--answer-tokens", tokens, *SYNTH)
    assert contents(by_tokens) == contents(whole)


def test_other_settings_do_not_mix(data, tiny_ending, tmp_path):
    arguments = ["synth", "-m", tiny_ending, "-o", tmp_path / "raw", "--texts", "2", *SYNTH]
    data(*arguments)
    error = data(*arguments, "--greedy", "0.2", code=2)
    assert "greedy" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_goes_on(data, tiny_ending, tmp_path, how):
    """Ctrl-C and kill -9 lose texts in flight, never a line."""
    whole, output = tmp_path / "whole", tmp_path / "stopped"
    process = subprocess.Popen(
        command("data", "synth", "-m", tiny_ending, "-o", output, "--texts", "5000", *SYNTH),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    shard = output / "texts-00000.jsonl"
    while not shard.exists() or shard.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, process.stderr.read()
        os.sched_yield()
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    assert b"Traceback" not in err
    kept = len(lines(output)) if how is signal.SIGINT else shard.read_bytes().count(b"\n")
    assert kept >= 5
    target = str(kept + 3)
    data("synth", "-m", tiny_ending, "-o", output, "--texts", target, *SYNTH)
    data("synth", "-m", tiny_ending, "-o", whole, "--texts", target, *SYNTH)
    assert contents(output) == contents(whole)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    talks = [
        {"id": "a", "prompt": "say abc"},
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "say it"}]},
        {"turns": ["one", "two"]},
        {"id": "long", "prompt": "x" * 5000},
        *({"prompt": f"say {n}"} for n in range(6)),
    ]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return path


def test_regenerate_answers_a_file(data, tiny_ending, tmp_path, prompts):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ["-i", prompts, "-m", tiny_ending, "-n", "40", "-b", "3", "--threads", "1", "-t", "0.5"]
    told = data("regenerate", "-o", whole, *options)
    texts = lines(whole)
    assert (told["texts"], told["dropped"]) == (9, {"refused": 1})
    assert [text["id"] for text in texts[:3]] == ["a", "2", "3"]
    assert [message["role"] for message in texts[2]["messages"]] == ["user", "assistant"] * 2
    assert texts[1]["messages"][0] == {"role": "system", "content": "be kind"}
    data("regenerate", "-o", parts, *options, "--limit", "4")
    data("regenerate", "-o", parts, *options)
    assert contents(parts) == contents(whole)
    prompts.write_text(prompts.read_text() + json.dumps({"prompt": "more"}) + "\n")
    assert "prompts_sha256" in data("regenerate", "-o", parts, *options, code=2)


@pytest.fixture
def server():
    server = FakeServer()
    yield server
    server.close()


def say_what_was_asked(handler, body):
    """A chat that repeats the user's last words; refuses long ones as servers do."""
    said = body["messages"][-1]["content"]
    if len(said) > 1000:
        reply(handler, json.dumps({"error": {"message": "too long for the context"}}), status=400)
        return
    events = Events(handler)
    for word in f"you said {said}".split(" "):
        events.send({"choices": [{"index": 0, "delta": {"content": word + " "}, "finish_reason": None}]})
    events.send({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    events.usage(3, 5)
    events.done()


def test_regenerate_by_a_server(data, server, tmp_path, prompts):
    server.answer = say_what_was_asked
    output = tmp_path / "out"
    told = data("regenerate", "-i", prompts, "-o", output, "--endpoint", f"{server.url}/v1", "-b", "3")
    texts = lines(output)
    assert (told["texts"], told["dropped"]) == (9, {"refused": 1})
    assert texts[0]["messages"] == [
        {"role": "user", "content": "say abc"},
        {"role": "assistant", "content": "you said say abc "},
    ]
    assert len(texts[2]["messages"]) == 4
    assert told["answer_tokens"] == 5 * 10
    assert server.bodies[0]["model"] == "tiny"


def test_a_server_that_fails_keeps_what_was_answered(data, server, tmp_path, prompts, monkeypatch):
    monkeypatch.setattr("draftsmith.cli.answering._PAUSE_SECONDS", 0.01)

    def fail_later(handler, body):
        if len(server.bodies) > 3:
            reply(handler, '{"error": "out of memory"}', status=500)
        else:
            say_what_was_asked(handler, body)

    server.answer = fail_later
    output = tmp_path / "out"
    arguments = ["regenerate", "-i", prompts, "-o", output, "--endpoint", f"{server.url}/v1", "-b", "1"]
    error = data(*arguments, code=2)
    assert "out of memory" in error
    assert error.splitlines()[-1].startswith("draftsmith: error: ")
    assert [text["id"] for text in lines(output)] == ["a", "2"]
    server.answer = say_what_was_asked
    assert data(*arguments)["texts"] == 9


@pytest.mark.parametrize("batch", ["1", "3"])
@pytest.mark.parametrize("how", ["content_filter", "tool_calls", "500", "break", "unknown"])
def test_a_prompt_that_a_server_never_answers_costs_that_prompt_alone(
    data, server, tmp_path, prompts, monkeypatch, how, batch
):
    """It once ended every run, at the same place."""
    monkeypatch.setattr("draftsmith.cli.answering._PAUSE_SECONDS", 0.01)

    def fail_at_one(handler, body):
        if body["messages"][-1]["content"] != "say abc":
            say_what_was_asked(handler, body)
        elif how == "500":
            reply(handler, '{"error": "it broke"}', status=500)
        elif how == "break":
            Events(handler).cut()
        elif how == "unknown":
            Events(handler).send({"choices": [None]})
        else:
            events = Events(handler)
            events.send({"choices": [{"index": 0, "delta": {"content": "I"}, "finish_reason": how}]})
            events.done()

    server.answer = fail_at_one
    output = tmp_path / "out"
    arguments = ["regenerate", "-i", prompts, "-o", output, "--endpoint", f"{server.url}/v1", "-b", batch]
    told = data(*arguments)
    assert (told["texts"], told["dropped"]) == (8, {"refused": 2})
    first = json.loads((output / "dropped.ndjson").read_bytes().splitlines()[0])
    assert first["id"] == "a"
    assert ("ended as" if how in ("content_filter", "tool_calls") else "") in first["reason"]
    assert "AttributeError" not in first["reason"]


def test_a_server_that_lets_nobody_in_ends_the_run(data, server, tmp_path, prompts, monkeypatch):
    monkeypatch.setattr("draftsmith.cli.answering._PAUSE_SECONDS", 0.01)

    def limit(handler, body):
        if body["messages"][-1]["content"] == "say abc":
            reply(handler, '{"error": "too many requests"}', status=429)
        else:
            say_what_was_asked(handler, body)

    server.answer = limit
    error = data("regenerate", "-i", prompts, "-o", tmp_path / "out", "--endpoint", f"{server.url}/v1", code=2)
    assert "too many requests; what was written is kept" in error


def test_another_model_under_the_same_name_is_refused(data, server, tmp_path, prompts):
    model, output = tmp_path / "model.gguf", tmp_path / "out"
    write_tiny(model, ends=True)
    synth = ["synth", "-m", model, "-o", tmp_path / "synth", "--texts", "1", *SYNTH]
    regenerate = ["regenerate", "-i", prompts, "-m", model, "-o", output, "-n", "9", "--threads", "1", "--limit", "2"]
    for arguments in (synth, regenerate):
        data(*arguments)
        data(*arguments, "--threads", "2")
    write_tiny(model, ends=True, seed=1)
    for arguments in (synth, regenerate):
        error = data(*arguments, code=2)
        assert "was begun with model_" in error
        assert error.count("\n") == 1
    server.answer = say_what_was_asked
    served = ["regenerate", "-i", prompts, "-o", tmp_path / "served", "--endpoint", f"{server.url}/v1"]
    data(*served)
    server.gets["/v1/models"] = {"data": [{"id": "bigger"}]}
    assert "served_model 'tiny', now it is 'bigger'" in data(*served, code=2)


def test_only_prepared_texts_are_replaced(data, tiny, tmp_path, monkeypatch):
    ready = tmp_path / "work" / "ready"
    (ready / "train").mkdir(parents=True)
    (ready / "train" / "data.json").touch()
    monkeypatch.chdir(ready)
    for place in (".", "..", ready, tmp_path / "work"):
        assert "working directory" in data("prepare", "-i", tmp_path, "-m", tiny, "-o", place, "--force", code=2)
    monkeypatch.chdir(tmp_path)
    for name in ("thesis.txt", "train/thesis.txt", "other/data.json"):
        (ready / name).parent.mkdir(exist_ok=True)
        (ready / name).touch()
        error = data("prepare", "-i", tmp_path, "-m", tiny, "-o", ready, "--force", code=2)
        assert "holds more than prepared texts" in error
        (ready / name).unlink()
    (ready / "other").rmdir()
    assert "holds no raw texts" in data("prepare", "-i", tmp_path, "-m", tiny, "-o", ready, "--force", code=2)


def test_from_nothing_to_a_corpus(data, tiny_ending, tmp_path):
    raw, ready = tmp_path / "raw", tmp_path / "ready"
    data("synth", "-m", tiny_ending, "-o", raw, "--texts", "6", *SYNTH)
    told = data("prepare", "-i", raw, "-m", tiny_ending, "-o", ready, "--validation", "0.2")
    train, held = Corpus.open(ready / "train"), Corpus.open(ready / "validation")
    assert told["texts_read"] == len(train) + len(held) == 6
    assert told["train"]["answer_tokens"] == train.answer_tokens > 0
    assert len(held) == 1
    assert "--force" in data("prepare", "-i", raw, "-m", tiny_ending, "-o", ready, code=2)
    again = data(
        "prepare", "-i", raw, "-m", tiny_ending, "-o", ready, "--force", "--max-len", "64", "--validation", "0"
    )
    assert max(Corpus.open(ready / "train").lengths.tolist()) <= 64
    assert again["texts_cut"] + sum(again["left_out"].values()) > 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["synth", "--texts", "1", "--answer-tokens", "1"], "--answer-tokens"),
        (["synth", "--texts", "0"], "texts"),
        (["synth", "--kinds", "nonsense"], "nonsense"),
        (["synth", "--greedy", "2"], "greedy"),
        (["synth", "--batch", "0"], "batch"),
        (["synth", "--temperature", "-1"], "temperature"),
        (["synth", "--top-p", "0"], "top_p"),
        (["synth", "--prompt-temperature", "0"], "prompt_temperature"),
        (["regenerate", "-i", "nowhere.jsonl"], "nowhere.jsonl"),
        (["regenerate", "-i", "builtin"], "benchmark"),
        (["synth", "-m", "nowhere.gguf"], "nowhere.gguf"),
        (["prepare", "-i", "nowhere"], "nowhere"),
        (["prepare", "-i", "nowhere", "--max-len", "0"], "max_len"),
    ],
)
def test_mistakes_are_told_in_a_line_and_leave_nothing(data, tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    error = data(*arguments, "-o", tmp_path / "out", code=2)
    assert error.count("\n") == 1
    assert part in error
    assert not (tmp_path / "out").exists()


def test_outputs_of_others_are_left_alone(data, tiny, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    assert "thesis.txt" in data("synth", "-m", tiny, "-o", tmp_path, code=2)
    assert "no prepared texts" in data("prepare", "-i", tmp_path, "-m", tiny, "-o", tmp_path, code=2)


def test_no_endpoint_there(data, tmp_path, prompts):
    error = data("regenerate", "-i", prompts, "-o", tmp_path / "out", "--endpoint", "http://127.0.0.1:9/v1", code=2)
    assert "127.0.0.1:9" in error


@pytest.mark.parametrize("timeout", ["0", "nan", "1e30"])
def test_a_timeout_is_at_most_a_day(data, tmp_path, prompts, timeout):
    url = "http://127.0.0.1:9/v1"
    error = data("regenerate", "-i", prompts, "-o", tmp_path / "out", "--endpoint", url, "--timeout", timeout, code=2)
    assert f"timeout is {float(timeout):g}; it must be above 0 and at most 86400 s" in error
