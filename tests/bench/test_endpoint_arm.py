"""The arm over OpenAI-compatible servers: what it sends, how it counts, and every fault a server can have."""

from __future__ import annotations

import http.client
import socket
import time

import pytest

from draftsmith.bench.arms import Counters, RunInfo, make_arm
from draftsmith.bench.endpoint_servers import Reading, read_vllm
from draftsmith.errors import OptionError, UserError
from tests.bench.arm_driver import ask, error_of, run, run_one
from tests.bench.endpoint_server import Events, FakeServer, reply, say_slowly, say_words

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def server():
    made = FakeServer()
    yield made
    made.close()


@pytest.fixture
def make(server):
    made = []

    def open_arm(owner="me", options="", count_tokens=None, **model):
        server.gets["/v1/models"] = {"data": [{"id": "tiny", "owned_by": owner, **model}]}
        arm = make_arm(f"endpoint:url={server.url}{options}", RunInfo(count_tokens=count_tokens))
        made.append(arm)
        arm.description = arm.open()
        return arm

    yield open_arm
    for arm in made:
        arm.close()
        arm.close()


def plain(key=0, **more):
    return ask(key, None, text="Once", **more)


# -- what is sent -----------------------------------------------------------------------------------


def test_a_plain_server_gets_what_openai_knows_and_nothing_else(make, server):
    arm = make()
    answer, arrivals = run_one(arm, plain(n=9, temperature=0.5, top_p=0.9, seed=11))
    assert server.bodies == [
        {
            "model": "tiny",
            "prompt": "Once",
            "max_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 11,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert (answer.text, answer.num_tokens, answer.prompt_tokens) == ("one two three four", 4, 3)
    assert answer.finish_reason == "stop" and answer.token_ids is None and answer.counters is None
    assert len(arrivals) == 4
    assert arm.block_counters() is None
    assert "Authorization" not in server.headers[0]
    assert "end tokens" in error_of(arm, plain(ignore_eos=True))
    assert "use api=chat" in error_of(arm, ask(ids=(1, 2), messages=MESSAGES))


def test_chat_sends_messages(make, server, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")

    def chat(handler, body):
        assert handler.path_asked == "/v1/chat/completions"
        events = Events(handler)
        events.send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        events.send({"choices": [{"delta": {"reasoning_content": "hm "}}]})
        events.send({"choices": [{"delta": {"content": "yes"}, "finish_reason": "length"}]})
        events.usage(5, 7)
        events.done()

    server.answer = chat
    arm = make(options=":api=chat:key_env=A_KEY")
    answer, arrivals = run_one(arm, ask(messages=MESSAGES, n=9))
    assert server.bodies[0]["messages"] == MESSAGES and "prompt" not in server.bodies[0]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert (answer.text, answer.num_tokens, answer.finish_reason) == ("hm yes", 7, "length")
    assert len(arrivals) == 2
    assert "no messages" in error_of(arm, plain())
    assert "secret" not in str(arm.description)


def test_servers_get_the_fields_they_know(make, server):
    ids = (4, 5, 6)
    arm = make("vllm")
    run_one(arm, ask(7, ids, end_ids=(2, 1)))
    run_one(arm, ask(8, ids, end_ids=(), ignore_eos=True))
    first, second = server.bodies
    assert first["prompt"] == [4, 5, 6] and first["stop_token_ids"] == [1, 2] and first["return_token_ids"] is True
    assert "ignore_eos" not in first and second["ignore_eos"] is True and "stop_token_ids" not in second
    assert first["cache_salt"] != second["cache_salt"]
    run_one(arm, ask(9, ids, end_ids=()))
    assert not {"ignore_eos", "stop_token_ids"} & server.bodies[-1].keys(), "unknown end tokens are the server's own"
    run_one(make("sglang"), ask(0, ids, end_ids=(), ignore_eos=True))
    assert server.bodies[-1]["ignore_eos"] is True and server.bodies[-1]["prompt"] == [4, 5, 6]
    run_one(make("llamacpp"), ask(0, ids, seed=0xFFFFFFFF))
    assert server.bodies[-1]["cache_prompt"] is False and server.bodies[-1]["seed"] == 0
    run_one(make("somebody", ":kind=vllm"), ask(0, ids))
    assert server.bodies[-1]["prompt"] == [4, 5, 6]


def test_what_a_server_tells_of_itself(make, server):
    server.gets |= {"/version": {"version": "9.1"}, "/props": {"build_info": "b77-abc"}}
    server.gets["/get_server_info"] = {"version": "0.5", "speculative_algorithm": "NGRAM"}
    description = make("vllm", max_model_len=512).description
    assert (description.engine, description.model) == ("vllm 9.1", "tiny")
    assert description.details["max_model_len"] == 512 and description.details["prompts"] == "token ids"
    described = make("llamacpp", meta={"size": 600, "n_params": 1000}).description
    assert (described.engine, described.bits_per_weight) == ("llama_cpp b77-abc", 4.8)
    assert make("sglang").description.details["speculative_algorithm"] == "NGRAM"
    assert make(options=":model=tiny:api=chat").description.details["prompts"] == "messages"


# -- counting ---------------------------------------------------------------------------------------


def test_tokens_are_counted_by_their_ids(make, server):
    def speculate(handler, body):
        events = Events(handler)
        events.token("a", ids=[10])
        time.sleep(0.1)
        events.token("", ids=[11, 12, 13])  # half a character, and what came with it
        events.token("b", ids=[2], reason="stop")
        events.usage(3, 5)
        events.done()

    server.answer = speculate
    answer, arrivals = run_one(make("vllm"), ask(n=9))
    assert answer.token_ids == (10, 11, 12, 13, 2)
    assert [item.num_tokens for item in arrivals] == [1, 3, 1]
    assert arrivals[1].seconds - arrivals[0].seconds > 0.08
    assert answer.details["tokens_counted_by"] == "token ids"


def test_tokens_are_counted_by_running_totals(make, server):
    def llama(handler, body):
        events = Events(handler)
        events.token("a", timings={"predicted_n": 1})
        events.token("bcd", timings={"predicted_n": 4})
        timings = {"predicted_n": 5, "predicted_ms": 80.0, "draft_n": 6, "draft_n_accepted": 2}
        events.token("", reason="stop", timings=timings)
        events.done()

    server.answer = llama
    answer, arrivals = run_one(make("llamacpp"), ask(n=9))
    assert [item.num_tokens for item in arrivals] == [1, 3, 1]
    assert answer.counters == Counters(drafted=6, accepted=2)
    assert answer.details == {"tokens_counted_by": "timings", "predicted_n": 5, "predicted_ms": 80.0}
    assert answer.prompt_tokens == 3

    def running(handler, body):
        events = Events(handler)
        events.token("a", usage={"prompt_tokens": 9, "completion_tokens": 2})
        events.token("b", usage={"prompt_tokens": 9, "completion_tokens": 3}, reason="length")
        events.done()

    server.answer = running
    answer, arrivals = run_one(make(), plain())
    assert [item.num_tokens for item in arrivals] == [2, 1]
    assert (answer.prompt_tokens, answer.details["tokens_counted_by"]) == (9, "usage")


def test_tokens_are_counted_by_log_probabilities_and_the_end_token_is_not_lost(make, server):
    def listed(handler, body):
        events = Events(handler)
        for text in ("a", "b"):
            events.send({"choices": [{"text": text, "logprobs": {"tokens": [text, "x"]}}]})
        events.token("", reason="stop")
        events.usage(3, 5)
        events.done()

    server.answer = listed
    answer, arrivals = run_one(make(), plain(n=9))
    assert [item.num_tokens for item in arrivals] == [2, 2, 1]
    assert answer.details["tokens_counted_by"] == "log probabilities"


@pytest.mark.parametrize(
    ("count_tokens", "tells_usage", "numbers", "by"),
    [
        (lambda text: len(text) // 2, True, [2, 2, 4], "the total by usage, shared out by the caller's tokenizer"),
        (lambda text: len(text) // 2, False, [2, 2, 4], "the caller's tokenizer"),
        (None, True, [3, 2, 3], "the total by usage, shared out by one token a chunk"),
        (None, False, [1, 1, 1], "one token a chunk"),
    ],
)
def test_tokens_nobody_counted_are_estimated_and_it_says_so(make, server, count_tokens, tells_usage, numbers, by):
    def tell(handler, body):
        events = Events(handler)
        for text in ("abcd", "efgh", "ijklmnop"):
            events.token(text)
            time.sleep(0.03)
        # A server that tells usage only at the end, beside the reason.
        events.token("", reason="stop", **({"usage": {"completion_tokens": 8}} if tells_usage else {}))
        events.done()

    server.answer = tell
    answer, arrivals = run_one(make(count_tokens=count_tokens), plain(n=9))
    assert [item.num_tokens for item in arrivals] == numbers
    assert answer.details["tokens_counted_by"] == f"estimate: {by}"
    assert arrivals[2].seconds - arrivals[0].seconds > 0.04


def test_tokens_beyond_the_limit_are_a_fault_unless_they_are_an_estimate(make, server):
    def many(handler, body):
        events = Events(handler)
        events.token("a", ids=[1, 2, 3, 4, 5], reason="length")
        events.done()

    server.answer = many
    assert "tells of 5 tokens, and 4 were asked for" in error_of(make("vllm"), ask(n=4))

    def chatty(handler, body):
        events = Events(handler)
        for _ in range(6):
            events.token("a")
        events.token("", reason="length")
        events.done()

    server.answer = chatty
    assert run_one(make(), plain(n=4))[0].num_tokens == 6


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0"} %d.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0"} %d.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.79e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} %d.0
"""


def test_counters_of_a_block_are_the_difference_of_two_readings(make, server):
    server.gets["/metrics"] = METRICS % (10, 20, 12, 8, 4)
    arm = make("vllm")
    assert arm.block_counters() == Counters(drafts=0, drafted=0, accepted=0, accepted_at=(0, 0))
    server.gets["/metrics"] = METRICS % (15, 30, 19, 12, 7)
    assert arm.block_counters() == Counters(drafts=5, drafted=10, accepted=7, accepted_at=(4, 3))
    server.gets["/metrics"] = METRICS % (2, 4, 3, 2, 1)  # it was started anew meanwhile
    assert arm.block_counters() == Counters(drafts=2, drafted=4, accepted=3, accepted_at=(2, 1))
    del server.gets["/metrics"]
    assert arm.block_counters() is None
    two = (METRICS + METRICS.replace('engine="0"', 'engine="1"')) % (1, 2, 3, 4, 5, 10, 20, 30, 40, 50)
    assert read_vllm(two) == Reading(drafts=11, drafted=22, accepted=33, accepted_at=(44, 55))
    assert read_vllm("vllm:generation_tokens_total 3.0\n") is None


def test_sglang_tells_an_average(make, server):
    server.gets["/server_info"] = {"internal_states": [{"avg_spec_accept_length": 2.5}]}
    assert make("sglang").block_counters() == Counters(mean_length=2.5)
    server.gets["/server_info"] = {"internal_states": [{}]}
    assert make("sglang").block_counters() is None


# -- what goes wrong --------------------------------------------------------------------------------


def say(*parts, cut=False):
    """An answer of raw parts, whole or broken off."""

    def answer(handler, body):
        events = Events(handler)
        events.token("a")
        for part in parts:
            events.raw(part)
        if cut:
            events.cut()
        else:
            handler.wfile.write(b"0\r\n\r\n")

    return answer


def status(code, text):
    return lambda handler, body: reply(handler, text, status=code)


LAST = 'data: {"choices": [{"text": "z", "finish_reason": "%s"}]}\n\n'


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (status(400, '{"error": {"message": "too\\nlong", "code": 400}}'), "answered 400 Bad Request: too long"),
        (status(401, '{"detail": "who are you"}'), "answered 401 Unauthorized: who are you"),
        (status(503, "<html>come back later</html>"), "answered 503 Service Unavailable: <html>come back later"),
        (status(500, ""), "answered 500 Internal Server Error"),
        (status(307, ""), "answered 307 Temporary Redirect"),
        (status(200, '{"choices": []}'), "did not stream but sent application/json"),
        (lambda handler, body: handler.connection.shutdown(socket.SHUT_RDWR), "without an answer"),
        (lambda handler, body: handler.wfile.write(b"hello\r\n\r\n"), "does not speak HTTP"),
        (say(cut=True), "broke off in the middle of its answer, after 1 tokens"),
        (say('data: {"choi', cut=True), "broke off"),
        (say('data: {"choi'), 'broke off in the middle of an event: data: {"choi'),
        (say(), "broke off after 1 tokens without saying why"),
        (say("data: {oops}\n\n"), "sent what is no JSON: {oops}"),
        (say("data: 17\n\n"), "sent what is no object"),
        (say('data: {"model": 1}\n\n'), 'sent a chunk of unknown form: {"model": 1}'),
        (say('data: {"choices": 3}\n\n'), 'sent a chunk of unknown form: {"choices": 3}'),
        (say('data: {"choices": [17]}\n\n'), 'sent a chunk of unknown form: {"choices": [17]}'),
        (say('data: {"choices": [null]}\n\n'), 'sent a chunk of unknown form: {"choices": [null]}'),
        (
            lambda handler, body: Events(handler).token("a", ids=["x"]),
            'unknown form: {"choices": [{"index": 0, "text": "a"',
        ),
        (say('data: {"error": {"message": "out of memory"}}\n\n'), "gave up: out of memory"),
        (say(LAST % "abort"), "ended as abort"),
        (say("x" * 2000000, "x" * 3000000), "sent a line without end"),
    ],
)
def test_a_fault_is_one_clear_line_and_costs_one_request(make, server, answer, told):
    arm = make()
    server.answer = answer
    error = error_of(arm, plain())
    assert error.startswith(f"{server.url}/v1 ") and told in error
    assert len(error) < 400
    server.answer = say_words
    assert run_one(arm, plain(1))[0].error is None


def test_odd_but_right_streams_are_read(make, server):
    arm = make()
    server.answer = say(": a comment\n\n", "event: message\nid: 3\n", LAST % "stop")  # and no [DONE]
    assert run_one(arm, plain())[0].num_tokens == 2
    whole = (LAST % "stop").replace("z", "é").encode()
    place = whole.index("é".encode()) + 1
    server.answer = say(whole[:place], whole[place:], "data:[DONE]\r\n\r\n")
    answer, _ = run_one(arm, plain())
    assert answer.text == "aé"


def test_a_server_that_hangs_costs_the_timeout_once_per_block(make, server):
    arm = make(options=":timeout=1")
    server.answer = lambda handler, body: time.sleep(4)
    began = time.perf_counter()
    found = run(arm, plain(0), plain(1))
    assert all("within 1 s" in answer.error or "for 1 s" in answer.error for answer, _ in found.values())
    assert time.perf_counter() - began < 3
    assert "not asked again" in error_of(arm, plain(2))
    num_asked = len(server.bodies)
    server.answer = say_words
    arm.block_counters()
    assert run_one(arm, plain(3))[0].error is None
    assert len(server.bodies) == num_asked + 1


def test_a_server_that_dribbles_has_no_more_time_than_others(make, server):
    def dribble(handler, body):
        events = Events(handler)
        for _ in range(100):
            events.raw("d")
            time.sleep(0.05)

    server.answer = dribble
    began = time.perf_counter()
    assert "within 1 s" in error_of(make(options=":timeout=1"), plain())
    assert time.perf_counter() - began < 3


def test_a_dead_endpoint_fails_fast_and_is_asked_again_once_per_block(make, server):
    arm = make()
    server.close()
    began = time.perf_counter()
    assert "cannot be reached: connection refused" in error_of(arm, plain(0))
    assert "not asked again" in error_of(arm, plain(1))
    assert arm.block_counters() is None
    assert "not asked again" not in error_of(arm, plain(2))
    assert time.perf_counter() - began < 3
    with pytest.raises(UserError, match="connection refused"):
        arm.open()


def test_what_cannot_be_opened_says_why(server, monkeypatch):
    with pytest.raises(UserError, match="no model large; it lists tiny"):
        make_arm(f"endpoint:url={server.url}:model=large", RunInfo()).open()
    server.gets["/v1/models"] = {"data": []}
    with pytest.raises(UserError, match="lists no models"):
        make_arm(f"endpoint:url={server.url}", RunInfo()).open()
    del server.gets["/v1/models"]
    with pytest.raises(UserError, match="answered 404"):
        make_arm(f"endpoint:url={server.url}", RunInfo()).open()
    assert make_arm(f"endpoint:url={server.url}:model=any", RunInfo()).open().model == "any"
    server.gets["/v1/models"] = "<html>"
    with pytest.raises(UserError, match="no JSON"):
        make_arm(f"endpoint:url={server.url}", RunInfo()).open()


def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch):
    for key in ("secret\n", "s\u00e9cret", "two words"):
        monkeypatch.setenv("A_KEY", key)
        with pytest.raises(OptionError, match="no header can hold") as caught:
            make_arm("endpoint:url=http://h:1:key_env=A_KEY", RunInfo())
        assert key.strip() not in str(caught.value)


def test_selections():
    arm = make_arm("endpoint:url=http://[::1]:8000/v1:api=chat:concurrency=7", RunInfo())
    assert (arm.max_concurrency, str(arm._address)) == (7, "http://[::1]:8000/v1")
    assert make_arm("endpoint:url=https://host/a/v1", RunInfo())._address.root == "/a"
    for wrong, told in {
        "endpoint": "write endpoint:url",
        "endpoint:url=host:80": "not of the form",
        "endpoint:url=http://host:port": "port",
        "endpoint:url=http://h:1:api=smoke": "allowed: completions, chat",
        "endpoint:url=http://h:1:kind=x": "auto, vllm",
        "endpoint:url=http://h:1:key_env=NOT_THERE": "not set",
        "endpoint:url=http://h:1:timeout=-1": "above 0",
        "endpoint:url=http://h:1:concurrency=0": "at least 1",
    }.items():
        with pytest.raises(OptionError, match=told):
            make_arm(wrong, RunInfo())


# -- many at once -----------------------------------------------------------------------------------


def test_sixty_four_requests_at_once(make, server):
    def late(handler, body):
        time.sleep(0.5)
        say_words(handler, body)

    server.answer = late
    arm = make()
    began = time.perf_counter()
    found = run(arm, *(plain(key) for key in range(64)))
    assert all(answer.error is None for answer, _ in found.values())
    assert server.most_together > 32
    assert time.perf_counter() - began < 10


def test_what_is_cancelled_is_not_heard_of_again_and_the_server_notices(make, server):
    server.answer = say_slowly
    arm = make("vllm")
    arm.submit(ask(0))
    while server.num_together == 0:
        time.sleep(0.01)
    arm.cancel()
    server.answer = say_words
    assert set(run(arm, ask(1))) == {1}
    until = time.perf_counter() + 3
    while server.num_together and time.perf_counter() < until:
        time.sleep(0.02)
    assert server.num_together == 0
    assert arm.poll(0.01) == []


def test_no_fault_of_ours_leaves_a_request_without_an_answer(make, monkeypatch):
    def fail(*args, **named):
        raise RuntimeError("a bug")

    arm = make()
    monkeypatch.setattr(http.client.HTTPConnection, "request", fail)
    assert error_of(arm, plain()).endswith("RuntimeError: a bug")
