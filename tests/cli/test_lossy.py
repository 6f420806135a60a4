"""Lossy and synthetic rules from the command line: labelled in every output, refused where exactness was asked for."""

import json
import re

import pytest

from draftsmith.bench import bundle
from tests.cli.tiny import run

LENIENT, SYNTHETIC = "lenience:factor=0.5", "synthetic:length=3"


@pytest.fixture
def call(tiny, capsys):
    """Runs a command over the tiny model; returns what was written."""

    def command(name, *arguments, code=0):
        assert run(name, "-m", tiny, *arguments) == code
        return capsys.readouterr()

    return command


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("say abc", "abcabc", "the end")))
    return path


@pytest.fixture
def bench(call, prompts, tmp_path):
    """Runs a benchmark; returns what was written, and its bundle."""

    def command(*arguments):
        output = tmp_path / "out"
        written = call("bench", "-p", prompts, "-n", "20", "-o", output, *arguments)
        return written, output

    return command


SAMPLED = ("-t", "0.9", "--controller", "fixed", "-n", "30")


def test_generate_says_it_before_all_figures_and_keeps_stdout_clean(call, other):
    captured = call("generate", *SAMPLED, "-d", f"draft_model:model={other}", "--rule", LENIENT, "abc")
    assert "LOSSY" not in captured.out and len(captured.out) > 10
    assert re.match(r"LOSSY, total variation 0\.\d{3} per token \(rule lenience:factor=0\.5\) \| 30 tok", captured.err)
    captured = call("generate", "-n", "30", "-d", "synthetic", "--controller", "fixed", "--rule", SYNTHETIC, "abc")
    assert captured.err.startswith("SYNTHETIC, the text means nothing (rule synthetic:length=3) | 30 tokens in")
    assert "3.00 tokens per step" in captured.err or "2.9" in captured.err


def test_documents_for_machines_say_it(call, other, stdin):
    words = (*SAMPLED, "--json", "-d", f"draft_model:model={other}")
    lossy = json.loads(call("generate", *words, "--rule", LENIENT, "abc").out)
    assert (lossy["rule"], lossy["fidelity"]) == (LENIENT, "lossy") and 0 <= lossy["total_variation"] < 1
    exact = json.loads(call("generate", *words, "--rule", "chain", "abc").out)
    assert (exact["rule"], exact["fidelity"], exact["total_variation"]) == ("chain", "exact", None)
    synthetic = json.loads(call("generate", "--json", "-n", "9", "--rule", SYNTHETIC, "abc").out)
    assert (synthetic["fidelity"], synthetic["total_variation"]) == ("synthetic", None)
    stdin("hello\n")
    turns = json.loads(call("chat", "--json", "-n", "9", "--rule", "asd").out)["turns"]
    assert (turns[0]["rule"], turns[0]["fidelity"], turns[0]["total_variation"]) == ("asd", "lossy", 0.0)


def test_chat_says_it_with_every_answer(call, stdin):
    stdin("hello\nsay abc\n/stats\n")
    captured = call("chat", "-n", "9", "--rule", "asd")
    assert captured.err.count("LOSSY, total variation 0.000 per token (rule asd)") == 3


def test_a_benchmark_s_arms_are_named_for_what_they_are(bench):
    captured, output = bench("-d", "none,suffix", "--rule", "asd:gate=1")
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["none", "suffix"]
    assert "(lossy)" in " ".join(lines[3:5]) and "(lossy)" not in lines[2]
    assert "suffix (lossy): LOSSY by rule asd:gate=1: total variation from the target's law 0.0" in captured.out
    summary = json.loads((output / "summary.json").read_text())
    none, suffix = summary["results"]
    assert (none["arm"], none["fidelity"], none["total_variation"]) == ("none", "exact", None)
    assert (suffix["arm"], suffix["fidelity"]) == ("suffix (lossy)", "lossy")
    assert suffix["details"]["rule"] == "asd:gate=1" and none["details"]["rule"] == "coupling"
    assert suffix["total_variation"] >= 0
    assert {"fidelity", "total_variation"} <= summary["definitions"].keys()
    assert {run_.arm for run_ in bundle.read(output).runs} == {"none", "suffix (lossy)"}


def test_reports_and_rescores_say_it_too(bench, capsys):
    _, output = bench("-d", "none,synthetic", "--rule", "synthetic:conditional=0.7", "--controller", "fixed")
    assert run("bench", "report", output, "--markdown") == 0
    page = capsys.readouterr().out
    assert "synthetic (synthetic): SYNTHETIC by rule synthetic:conditional=0.7" in page
    assert page.count("synthetic (synthetic)") > 3
    assert run("bench", "rescore", output) == 0
    captured = capsys.readouterr()
    assert "SYNTHETIC by rule" in captured.out and "same figures" in captured.err
    summary = json.loads((output / "summary.json").read_text())
    assert summary["results"][1]["fidelity"] == "synthetic" and summary["results"][1]["total_variation"] is None
    # Six requests of one step each would do; the rate is tested with the engine.
    assert summary["results"][1]["accepted_tokens"] > 0


def test_a_lossy_run_is_not_compared_with_an_exact_one_arm_by_arm(bench, tmp_path, capsys):
    _, first = bench("-d", "none,suffix")
    first = first.rename(tmp_path / "first")
    _, second = bench("-d", "none,suffix", "--rule", "asd")
    assert run("bench", "compare", first, second, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [result["arm"] for result in document["results"]] == ["none"]
    assert document["only_in_first"] == ["suffix"] and document["only_in_second"] == ["suffix (lossy)"]
    assert document["settings"]["rule"] == ["coupling", "asd"]


ENDPOINTS = ("--endpoint", "http://x", "--plain-endpoint", "http://y")
BENCH = ("bench", "-p", "builtin", "-o", "x")
AUDIT = ("-n", "12", "--controller", "fixed")


def test_an_audit_measures_a_lossy_rule_and_never_calls_it_exact(call, other, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    drafter = f"draft_model:model={other}"
    captured = call("audit", *AUDIT, "-t", "1", "-d", drafter, "--rule", LENIENT, code=4)
    lines = captured.out.splitlines()
    assert any(
        re.match(r"cost, temperature 1.* lossy +total variation 0\.\d+ per token \(95 %: ", line) for line in lines
    )
    assert any(line.startswith("LOSSY. Lossy, as was asked: total variation about 0.") for line in lines)
    assert "EXACT" not in captured.out and not any(line.startswith(("ids", "law", "argmax")) for line in lines)
    document = json.loads(call("audit", *AUDIT, "--json", "-d", "suffix", "--rule", "asd:budget=0", code=4).out)
    assert (document["verdict"], document["total_variation"]) == ("lossy", 0.0)
    assert [check["name"] for check in document["checks"] if check["name"].startswith("cost")] == [
        "cost, greedy",
        "cost, greedy, penalties",
    ]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate", "--rule", "typical", "hi"], ["typical needs epsilon and delta"]),
        (["generate", "--rule", "typical:epsilon=0.1:delta=0.3", "hi"], ["temperature above 0", "asd"]),
        (["generate", "--rule", "asd", "-t", "1", "hi"], ["asd is for greedy requests"]),
        (["generate", "--rule", "asd:budget=-1", "hi"], ["budget is -1.0", "at least 0"]),
        (["generate", "--rule", "synthetic:survivals=0.2,0.4", "hi"], ["survivals", "never rise"]),
        (["generate", "--rule", "synthetic:length=2:fraction=0.5", "hi"], ["exactly one", "length", "fraction"]),
        (["generate", "--rule", "chain:factor=1", "hi"], ["chain has no options"]),
        (["demo", "--rule", "asd"], ["--rule"]),
        (["audit", "--rule", "synthetic:length=2"], ["nothing to audit"]),
        (["audit", "--rule", "adasd", "-t", "0"], ["adasd needs a temperature above 0"]),
        (["audit", "--rule", "asd", "-t", "0.7"], ["asd is for greedy requests"]),
        (["audit", "--rule", "asd", *ENDPOINTS], ["--rule asd", "endpoint"]),
        ([*BENCH, "--rule", "lenience:factor=0.5"], ["temperature above 0"]),
        ([*BENCH, "--rule", "asd", "-d", "suffix", "--baseline", "suffix"], ["suffix (lossy)"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes_are_one_line(arguments, parts, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    told = [line for line in captured.err.splitlines() if "was added" not in line]
    assert len(told) == 1
    for part in parts:
        assert part in told[0]
