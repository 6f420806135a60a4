"""`draftsmith audit` from flags to report and exit code, on the tiny model and on small endpoints."""

import json
import re

import pytest

from tests.bench.completion_server import served
from tests.cli.tiny import run
from tests.faults import planted

# Steps of the tiny model take as long as drafts: `auto` would hardly draft, and there would be nothing to audit.
QUICK = ("-n", "12", "--drift", "0.4", "--temperature", "0.8", "--controller", "fixed:num_draft=4")


@pytest.fixture
def audit(tiny, capsys):
    """Runs the command; returns its output."""

    def call(*arguments, code=0):
        assert run("audit", "-m", tiny, *QUICK, *arguments) == code
        return capsys.readouterr()

    return call


def test_a_report_for_people(audit):
    captured = audit("-d", "suffix")
    lines = captured.out.splitlines()
    assert lines[0].split() == ["check", "outcome", "evidence"]
    assert re.match(r"ids, greedy +ok +\d+ tokens equal", lines[1])
    assert any(re.match(r"law, temperature 0.8.* ok +\d+ tokens", line) for line in lines)
    assert max(map(len, lines)) <= 80
    statement = " ".join(captured.out.rpartition("\n\n")[2].split())
    assert statement.startswith("EXACT. ")
    for part in ("suffix", "coupling", "drafted tokens accepted", "total variation per token", "False alarms"):
        assert part in statement


def test_a_report_for_machines(audit, tmp_path):
    captured = audit("--json", "-o", tmp_path / "report.json", "--rule", "chain", "--seed", "5", "--alpha", "0.01")
    document = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert json.loads((tmp_path / "report.json").read_text()) == document
    assert (document["verdict"], document["false_alarm_probability"], document["tested"]["seed"]) == ("exact", 0.01, 5)
    assert 0 < document["accepted_tokens"] <= document["drafted_tokens"]
    names = [check["name"] for check in document["checks"]]
    assert not any(name.startswith("ids by seed") for name in names)  # chain promises the law alone
    law = document["checks"][-1]
    assert law["name"].startswith("law") and law["figures"]["detectable"] <= 0.45 and law["figures"]["alpha"] == 0.005


def test_same_seed_same_report(audit):
    def checks(*arguments):
        document = json.loads(audit("--json", *arguments).out)
        for check in document["checks"]:
            check["figures"].pop("accepted", None)  # the controller times its steps, and drafts as that pays
        return document["checks"]

    assert checks("--seed", "3") == checks("--seed", "3") != checks("--seed", "4")


def test_a_drifting_engine_has_its_exit_code_and_a_way_to_see_it_again(audit):
    with planted("greedy walk reads the row before"):
        captured = audit(code=1)
    assert "DRIFTING. Not what plain decoding writes: ids, greedy" in captured.out
    again = next(line for line in captured.out.splitlines() if line.startswith("To see it again"))
    assert json.loads(again.partition("): ")[2])["max_new_tokens"] == 12


def test_nothing_tested_is_no_success(audit):
    captured = audit("--controller", "fixed:num_draft=0", code=3)
    assert "NOT TESTED. Nothing was tested: no draft was accepted." in captured.out


def test_limits_are_kept(audit):
    document = json.loads(audit("--budget", "200", "--json").out)
    assert document["tokens"] < 500
    limit = "the budget of 200 tokens is spent, raise --budget"
    assert f"not reached: {limit}" in {check["evidence"] for check in document["checks"]}
    assert f"checks were not tested: {limit}." in document["statement"]


def test_endpoints(capsys):
    with served() as (url, _), served("law") as (other, _):
        arguments = ["audit", "--plain-endpoint", url, "-n", "24"]
        assert run(*arguments, "--endpoint", url) == 0
        assert "acceptance not visible" in " ".join(capsys.readouterr().out.split())
        assert run(*arguments, "--endpoint", other) == 1
        assert "DRIFTING" in capsys.readouterr().out


def test_a_server_that_goes_away_is_told_after_what_was_found(tmp_path, capsys):
    with served() as (url, _), served("stops") as (other, _):
        words = ["audit", "--plain-endpoint", url, "--endpoint", other, "-n", "24", "-o", tmp_path / "report.json"]
        assert run(*words, "--json") == 2
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document == json.loads((tmp_path / "report.json").read_text())
    assert document["interrupted"] and document["checks"][0]["status"] == "ok"
    assert captured.err.count("\n") == 1 and "closed the connection" in captured.err


def test_only_a_report_is_replaced(audit, tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text("my thesis")
    audit("-o", path, code=2)
    assert path.read_text() == "my thesis"
    path.write_text("")
    audit("-o", path)
    audit("-o", path)
    assert json.loads(path.read_text())["verdict"] == "exact"


def test_a_report_that_cannot_be_written_is_shown_all_the_same(audit):
    captured = audit("-o", "/dev/full", code=2)
    assert "EXACT" in captured.out
    assert "cannot write to output /dev/full: No space left" in captured.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--drafter", "none"], ["none", "suffix"]),
        (["--drafter", "sufix"], ["sufix"]),
        (["--rule", "luck"], ["luck", "coupling"]),
        (["--top-p", "0.9"], ["--temperature"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--alpha", "0"], ["alpha", "0.001"]),
        (["--drift", "2"], ["drift", "0.5"]),
        (["--budget", "0"], ["budget"]),
        (["-n", "3"], ["max_new_tokens", "8"]),
        (["--max-seconds", "0"], ["max_seconds"]),
        (["--output", "/no/such/place/report.json"], ["/no/such/place"]),
        (["--output", "/"], ["directory"]),
        (["--endpoint", "http://127.0.0.1:9"], ["--plain-endpoint"]),
        (["--endpoint", "nowhere", "--plain-endpoint", "http://x"], ["nowhere", "http://"]),
        (["--endpoint", "http://127.0.0.1:9", "--plain-endpoint", "http://127.0.0.1:9"], ["127.0.0.1:9", "refused"]),
        (["--endpoint", "http://[::1", "--plain-endpoint", "http://x"], ["url=http://[::1"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes_are_one_line(arguments, parts, capsys):
    assert run("audit", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    for part in parts:
        assert part in captured.err


def test_ctrl_c_shows_what_was_found(on_terminal, tiny):
    terminal = on_terminal("audit", "-m", tiny, "--drift", "0.02", "--budget", "1000000")
    terminal.wait_for("law, T")
    terminal.interrupt(after=0.3)
    before = terminal.wait_for("SO FAR (interrupted)")
    assert "ids, greedy" in before
    assert terminal.ends_with() == 130
