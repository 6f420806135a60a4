"""Endpoints are audited by their answers alone; whatever they send or do not send, there is one clear line."""

import json

import pytest

from draftsmith.bench.audit import ENDPOINT_CASES, Audit, AuditPlan
from draftsmith.bench.audit_endpoint import EndpointAudited, EndpointError
from draftsmith.bench.audit_report import Status, Verdict
from draftsmith.bench.audit_subject import Asked
from draftsmith.errors import OptionError
from tests.bench.completion_server import WORDS, served

PROMPTS = ["abc", "once", "hello you", "x" * 12]


def audit_of(url, plain_url, **plan):
    plan = {"max_new_tokens": 24, "pairs": 60, "near_tie": 0.01, "cases": ENDPOINT_CASES, **plan}
    settings = AuditPlan(subject="words", same_ids=False, **plan)
    audit = Audit(settings, EndpointAudited(url, timeout=20), EndpointAudited(plain_url, timeout=20), None, PROMPTS)
    audit.run()
    return audit.report()


def between(fault=None, plain_fault=None, **plan):
    with served(fault) as (url, _), served(plain_fault) as (plain_url, _):
        return audit_of(url, plain_url, **plan)


def status(report, name):
    return next(check.status for check in report.checks if check.name.startswith(name))


def test_two_honest_endpoints_are_exact():
    report = between()
    assert report.verdict is Verdict.EXACT
    assert {check.status for check in report.checks} == {Status.OK}
    assert (report.drafted, report.accepted) == (None, None)
    assert "acceptance not visible" in report.statement


@pytest.mark.parametrize(
    ("fault", "by"),
    [
        ("greedy", "ids, greedy"),
        ("stop", "stop rules"),
        ("limit", "max_new_tokens"),
        ("usage", "max_new_tokens"),
        ("logprobs", "log-probabilities"),
        ("law", "law, T 0.8"),
    ],
)
def test_an_endpoint_that_drifts_is_caught(fault, by):
    """The fault "limit" shows in the ids first (one more); "law" moves a third of the tokens to the likeliest."""
    report = between(fault)
    assert report.verdict is Verdict.DRIFTING
    differing = next(check for check in report.checks if check.status is Status.DIFFERS)
    assert differing.name.startswith(by) or fault == "limit"
    assert differing.reproduce[0]["prompt"] in PROMPTS


def test_near_ties_of_an_endpoint_are_told_as_such():
    report = between("greedy", near_tie=10.0)
    assert report.verdict in (Verdict.NUMERICS, Verdict.DRIFTING)
    assert status(report, "ids, greedy") is Status.NUMERICS
    assert 0 < report.margin < 10


def test_one_law_raises_no_alarm_in_many_audits():
    """12 audits of honest endpoints, each with a false-alarm probability of 0.001."""
    with served() as (url, _), served() as (plain_url, _):
        plans = [{"seed": seed << 26, "pairs": 24, "cases": ENDPOINT_CASES[1:2]} for seed in range(1, 13)]
        assert [audit_of(url, plain_url, **plan).verdict for plan in plans] == [Verdict.EXACT] * 12


def test_an_endpoint_without_tokens_is_compared_by_characters():
    report = between("characters", "characters")
    assert report.verdict is Verdict.EXACT
    assert status(report, "log-probabilities") is Status.NOT_TESTED


@pytest.mark.parametrize("fault", ["surrogates", "nonsense beside"])
def test_what_is_said_as_nonsense_is_not_told(fault):
    """Half a character is mended; what is no number beside a token is no log-probability."""
    report = between(fault, fault)
    assert report.verdict is Verdict.EXACT
    assert status(report, "log-probabilities") is Status.NOT_TESTED
    json.dumps(report.as_json(), allow_nan=False, ensure_ascii=False).encode()
    drifting = between("greedy", "nonsense beside")
    assert drifting.verdict is Verdict.DRIFTING


def test_what_is_asked_of_an_endpoint():
    with served() as (url, bodies):
        subject = EndpointAudited(f"{url}/v1/")
        settings = {"max_new_tokens": 5, "temperature": 0.5, "seed": 3, "stop": ["."], "presence_penalty": 0.1}
        asked = Asked(prompt="abc", settings=settings)
        (answer,) = subject.answer([asked])[0]
    assert bodies == [
        {
            "model": "words",
            "prompt": "abc",
            "temperature": 0.5,
            "logprobs": 2,
            "max_tokens": 5,
            "seed": 3,
            "stop": ["."],
            "presence_penalty": 0.1,
        }
    ]
    assert set(answer.tokens) <= set(WORDS) and answer.usage[1] == 3
    assert len(answer.logprobs) == len(answer.tokens) == len(answer.likeliest)


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("error", ["500", "out of memory"]),
        ("hang", ["gave no answer within 0.5 s"]),
        ("dribble", ["gave no answer within 0.5 s"]),
        ("error that hangs", ["500"]),
        ("die", ["closed the connection without an answer"]),
        ("cut", ["broke off"]),
        ("not json", ["no JSON", "<html>"]),
        ("deep", ["no JSON", "[["]),
        ("list", ["no object"]),
        ("no text", ["no text"]),
        ("no models", ["lists no model", "--model"]),
    ],
)
def test_every_way_of_failing_is_one_clear_line(fault, parts):
    with served(fault) as (url, _):
        with pytest.raises(EndpointError) as caught:
            EndpointAudited(url, timeout=0.5).answer([Asked(prompt="abc", settings={"max_new_tokens": 4})])
        assert "\n" not in str(caught.value)
        for part in (url, *parts):
            assert part in str(caught.value)


def test_nobody_there():
    with served() as (url, _):
        pass
    with pytest.raises(EndpointError, match="cannot be reached: connection refused"):
        EndpointAudited(url).answer([Asked(prompt="abc", settings={})])


def test_options_that_make_no_sense():
    for url in ("localhost:8000", "ftp://x/v1", ""):
        with pytest.raises(OptionError, match="http://"):
            EndpointAudited(url)
    for url in ("http://[::1", "http://h:99999", "http://h:x"):
        with pytest.raises(OptionError, match="url="):
            EndpointAudited(url)
    for url in ("http://a..b", "http://h\u20ac..x"):
        with pytest.raises(EndpointError, match="cannot be"):
            EndpointAudited(url, model="m").answer([Asked(prompt="abc", settings={})])
    with pytest.raises(OptionError, match="banned_ids"):
        EndpointAudited("http://x", model="m").answer([Asked(prompt="abc", settings={"banned_ids": [1]})])
