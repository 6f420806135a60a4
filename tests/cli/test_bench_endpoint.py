"""`draftsmith bench --peer endpoint:...` from flags to bundle, over a server that does everything wrong in turn."""

import json
import socket
import time

import pytest

from draftsmith.bench import bundle
from tests.bench.endpoint_server import Events, FakeServer, reply, say_words
from tests.cli.tiny import run

N = 8


def status(code, text):
    return lambda handler, body: reply(handler, text, status=code)


def parts(*pieces, cut=False):
    """A stream of one token and raw pieces, whole or broken off."""

    def answer(handler, body):
        events = Events(handler)
        events.token("a")
        for piece in pieces:
            events.raw(piece)
        if cut:
            events.cut()
        else:
            handler.wfile.write(b"0\r\n\r\n")

    return answer


def usages(*totals):
    """A stream whose chunks tell running totals."""

    def answer(handler, body):
        events = Events(handler)
        for total in totals:
            events.token("a", usage={"prompt_tokens": 3, "completion_tokens": total})
        events.token("", reason="stop")
        events.done()

    return answer


def stall(handler, body):
    Events(handler).token("a")
    time.sleep(2.5)


def half_escape(handler, body):
    """Half a character as JSON spells it: text that no file can hold. The rest of it never comes."""
    events = Events(handler)
    events.token("a\ud83d", reason="length")
    events.usage(3, 2)
    events.done()


def split_escape(handler, body):
    """A character in two chunks, half each."""
    events = Events(handler)
    events.token("\ud83d")
    events.token("\ude00", reason="stop")
    events.usage(3, 2)
    events.done()


def close(handler, body):
    handler.connection.shutdown(socket.SHUT_RDWR)


FAULTS = {
    "refuses": (status(429, '{"error": {"message": "too many"}}'), "answered 429 Too Many Requests: too many"),
    "fails": (status(500, "<html>\ncaf\ufffd</html>"), "answered 500 Internal Server Error"),
    "hangs up": (close, "closed the connection without an answer"),
    "breaks off": (parts(cut=True), "broke off in the middle of its answer, after 1 tokens"),
    "half a character": (parts(b'data: {"choices": [{"text": "\xc3', cut=True), "broke off"),
    "stalls": (stall, "1 s"),
    "too many": (usages(3, 999), "tells of 999 tokens, and 8 were asked for"),
    "none at all": (usages(0, 0), "tells of no tokens beside a text"),
    "backwards": (usages(5, 3), "tells 3 tokens in usage after 5"),
    "no number": (usages("x"), "tells completion_tokens as 'x'"),
    "no object": (parts('data: {"choices": [], "usage": [3]}\n\n'), 'unknown form: {"choices": [], "usage": [3]}'),
    "garbage": (parts("data: \x00\x01{{{\n\n"), "sent what is no JSON"),
    "surrogate": (status(400, '{"error": {"message": "\\ud83d oh"}}'), "answered 400 Bad Request: \ufffd oh"),
}
GOOD = {
    "fine": (say_words, "one two three four"),
    "half": (half_escape, "a\ufffd"),
    "split": (split_escape, "\U0001f600"),
}


@pytest.fixture
def server():
    made = FakeServer()
    made.answer = lambda handler, body: (FAULTS | GOOD).get(body["prompt"], (say_words, ""))[0](handler, body)
    yield made
    made.close()


@pytest.fixture
def bench(tiny, tmp_path, capsys):
    """Runs the command on prompts; returns what it printed, its output and the results by arm."""

    def call(prompts, *arguments, code=0, drafters="none,ngram"):
        path, output = tmp_path / "prompts.jsonl", tmp_path / "out"
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        words = ["bench", "-m", tiny, "-p", path, "-n", N, "-o", output, "-d", drafters, "--raw", "--json"]
        assert run(*words, *arguments) == code
        captured = capsys.readouterr()
        summary = json.loads(captured.out)
        return captured, output, {result["arm"]: result for result in summary["results"]}

    return call


def peer(server, options=""):
    return f"server=endpoint:url={server.url}:timeout=1{options}"


def test_every_fault_is_counted_by_its_name_and_enters_no_figure(bench, server, capsys):
    prompts = [name for pair in zip(FAULTS, list(GOOD) * 9, strict=False) for name in pair]
    captured, output, results = bench(prompts, "--peer", peer(server))
    found = results["server"]
    assert sum(found["failed_requests"].values()) == len(FAULTS)
    for name, (_, told) in FAULTS.items():
        assert any(told in reason for reason in found["failed_requests"]), (name, list(found["failed_requests"]))
    rows = [json.loads(line) for line in (output / "outputs.jsonl").read_text().splitlines()]
    own = {row["prompt"]: row for row in rows if row["arm"] == "server"}
    for place, name in enumerate(prompts):
        assert (own[place]["error"] is not None) == (name in FAULTS), own[place]
        if name in GOOD:
            assert own[place]["text"] == GOOD[name][1]
    answered = [row for row in own.values() if row["error"] is None]
    assert found["num_requests"] == found["num_blocks"] == len(answered) == len(FAULTS)
    assert found["emitted_tokens"] == sum(row["num_tokens"] for row in answered) <= 4 * len(answered)
    assert found["speedup"]["items"] == len(answered)
    assert found["tokens_counted_by"] == {
        "estimate: the total by usage, shared out by the caller's tokenizer": len(answered)
    }
    for name in ("none", "ngram"):
        assert (results[name]["num_requests"], results[name]["failed_requests"]) == (len(prompts), {})
    assert "Traceback" not in captured.err
    assert run("bench", "rescore", output) == 0
    assert "requests failed and are in no figure" in capsys.readouterr().out
    assert run("bench", "report", output, "--markdown") == 0
    assert f"{len(FAULTS)} of {len(prompts)} requests failed" in capsys.readouterr().out
    assert run("bench", "compare", output, output) == 0


def test_a_server_that_dies_in_the_middle_costs_what_it_did_not_answer(bench, server):
    def answer(handler, body):
        if body["prompt"] == "the end":
            server.close()
            close(handler, body)
        else:
            say_words(handler, body)

    server.answer = answer
    _, output, results = bench(["a", "b", "the end", "c", "d"], "--peer", peer(server))
    found = results["server"]
    assert found["num_requests"] == 2
    assert sum(found["failed_requests"].values()) == 3
    assert any("connection refused" in reason for reason in found["failed_requests"])
    assert results["ngram"]["speedup"]["items"] == 5
    assert run("bench", "rescore", output) == 0


def test_a_server_that_is_alone_and_only_fails(bench, server, capsys):
    server.answer = status(503, "later")
    captured, output, results = bench(["a", "b"], "--peer", peer(server), drafters="-")
    assert results["server"]["num_requests"] == 0
    assert results["server"]["tokens_per_second"] is None
    assert sum(results["server"]["failed_requests"].values()) == 2
    assert "failed while warming up" in captured.err
    for words in (["rescore", output], ["report", output, "--markdown"], ["report", output]):
        assert run("bench", *words) == 0
    assert run("bench", "compare", output, output) == 2
    assert "no block of prompts was finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:9", "connection refused"),
        ("http://a..b:80", "cannot be asked"),
        ("http://127.0.0.1:1:api=chat:model=x", "connection refused"),
        ("http://[::1", "url="),
        ("http://h:99999", "url="),
    ],
)
def test_a_server_that_nobody_can_ask_ends_it_before_anything_is_replaced(bench, tiny, tmp_path, capsys, url, told):
    _, output, _ = bench(["a"])
    words = [
        "bench",
        "-m",
        tiny,
        "-p",
        "builtin",
        "--limit",
        "1",
        "-o",
        output,
        "--force",
        "--peer",
        f"x=endpoint:url={url}",
    ]
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("draftsmith: error: ")
    assert told in captured.err.splitlines()[-1]
    assert bundle.read(output).runs


@pytest.mark.parametrize("says", ["nan", "x", "-3", "1e999"])
def test_counters_that_are_none_are_unknown(bench, server, says):
    server.gets["/v1/models"] = {"data": [{"id": "tiny", "owned_by": "vllm", "meta": {"size": "x", "n_params": 2}}]}
    server.gets["/metrics"] = f'vllm:spec_decode_num_drafts_total{{engine="0"}} {says}\n'
    server.answer = say_words
    assert bench(["a"], "--peer", peer(server))[2]["server"]["drafts"] is None
