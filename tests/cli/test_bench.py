"""`draftsmith bench` from flags to bundle, on the tiny model."""

import hashlib
import importlib.util
import json

import pytest

from draftsmith.bench import bundle
from draftsmith.bench.differences import first_difference
from draftsmith.bench.prompts import load_prompts
from draftsmith.bench.runs import Key
from draftsmith.bench.summary import summarise_run
from draftsmith.cli import bench as bench_module
from draftsmith.cli import tables
from tests.cli.tiny import CONTEXT, run, run_apart

TEXTS = ["abc", "say xyz", "hello", "123", "the end", "a b c"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"question_id": i, "category": ["copy", "chat"][i % 2], "turns": [text, "second turn"]}
        for i, text in enumerate(TEXTS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def bench(tiny, prompts, tmp_path, capsys):
    """Runs the command; returns its output, and the bundle's directory and summary."""

    def call(*arguments, path=prompts, code=0, name="out"):
        output = tmp_path / name
        assert run("bench", "-m", tiny, "-p", path, "-n", "20", "-o", output, *arguments) == code
        captured = capsys.readouterr()
        return captured, output, json.loads((output / "summary.json").read_text())

    return call


def test_the_bundle_holds_what_the_summary_was_computed_from(bench):
    captured, output, summary = bench("-d", "none,ngram,suffix", "--json")
    assert json.loads(captured.out) == summary
    assert captured.out.count("\n") == 1
    assert [result["arm"] for result in summary["results"]] == ["none", "ngram", "suffix"]
    assert summary["model"].endswith("tiny.gguf")
    backend = "native" if importlib.util.find_spec("draftsmith._native") else "reference"
    assert all(result["details"]["backend"] == backend for result in summary["results"])
    assert summary["versions"]["torch"]
    assert not summary["interrupted"]
    for result in summary["results"]:
        assert (result["num_requests"], result["failed_requests"]) == (6, {})
        assert result["emitted_tokens"] == 6 * 20
        assert (result["identical"], result["divergent"]) == (6, 0)
        assert set(result["categories"]) == {"copy", "chat"}
    measured = bundle.read(output)
    assert json.loads(json.dumps(summarise_run(measured))) == summary
    assert len(measured.runs) == 18
    for arm in ("none", "ngram", "suffix"):
        own = [run for run in measured.runs if run.arm == arm]
        assert sum(record.emitted for run in own for record in run.events.requests) == 120
        assert sum(len(request.token_ids) for run in own for request in run.requests) == 120
    config = json.loads((output / "config.json").read_text())
    assert config["max_new_tokens"] == 20
    assert len(config["prompts_sha256"]) == 64


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_bundle_holds_a_page_and_any_fault_of_it_costs_no_run(bench, monkeypatch):
    captured, output, _ = bench("-d", "none,suffix", "--limit", "2")
    assert "<svg" in (output / "report.html").read_text()
    assert "report.html" not in captured.err

    def fail(*_):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("draftsmith.cli.report.to_html", fail)
    captured, output, _ = bench("-d", "none,suffix", "--limit", "2", name="other")
    assert "no report.html (RuntimeError: no fonts); the bundle is whole" in captured.err
    assert bundle.read(output).runs


def test_tables_for_people(bench):
    captured, output, _ = bench("-d", "none,ngram")
    lines = captured.out.splitlines()
    assert lines[1].split()[0] == "arm"
    assert [line.split()[0] for line in lines[2:4]] == ["none", "ngram"]
    assert "6/6" in lines[3]
    assert any(line.startswith("copy (3)") for line in lines)
    assert "Only 6 blocks" in captured.out
    assert str(output) in captured.err
    assert all(len(line) <= 80 for line in lines[:12])


def test_an_arm_may_have_a_controller_of_its_own(bench):
    arms = ["none", "suffix", "suffix@fixed:num_draft=3", "suffix@prefix_scheduler"]
    captured, output, summary = bench("-d", ",".join(arms))
    assert [result["arm"] for result in summary["results"]] == arms
    told = [(result["details"]["drafter"], result["details"].get("controller")) for result in summary["results"]]
    assert told == [("none", None), ("suffix", "auto"), ("suffix", "fixed:num_draft=3"), ("suffix", "prefix_scheduler")]
    runs = bundle.read(output).runs
    fixed = [record for run in runs if run.arm == arms[2] for record in run.events.requests if record.drafted]
    assert max(record.drafted for record in fixed) == 3
    lines = captured.out.splitlines()
    assert lines[:4] == [f"[{place}] {name}" for place, name in enumerate(arms)]  # a long name has no room in a table
    assert all(result["identical"] == 6 for result in summary["results"])


@pytest.mark.parametrize(
    ("arms", "controller", "words"),
    [
        ("none,suffix@fixed:num_draft=x", "auto", "num_draft"),
        ("none,suffix@fixd", "auto", "suffix@fixd"),
        ("none@ema,suffix", "auto", "takes no controller"),
        ("none,suffix", "fixd", "unknown controller"),
        ("none,suffix", "fixed:lengths=3", "lengths"),
    ],
)
def test_a_wrong_controller_is_refused_before_a_model_is_loaded(arms, controller, words, capsys, tmp_path):
    output = tmp_path / "out"
    words_of = ["-m", tmp_path / "no.gguf", "-p", "builtin", "-d", arms, "--controller", controller, "-o", output]
    assert run("bench", *words_of) == 2
    assert words in capsys.readouterr().err
    assert not output.exists()


def test_labels_keep_what_tells_arms_apart():
    results = [{"arm": name, "speedup": None} for name in ("none", "mtp:path=a/x", "mtp:path=b/y")]
    assert tables._names(results) == ["none", "mtp:path=x", "mtp:path=y"]
    results[2]["arm"] = "mtp:path=b/x"
    assert tables._names(results) == ["none", "mtp:path=a/x", "mtp:path=b/x"]


def test_the_baseline_is_added_and_said_so(bench):
    captured, _, summary = bench("-d", "ngram", "--limit", "2")
    assert [result["arm"] for result in summary["results"]] == ["none", "ngram"]
    assert "none was added" in captured.err


def test_limits(bench):
    assert bench("-d", "none", "--limit", "2")[2]["prompts_given"] == 2
    assert bench("-d", "none", "--per-category", "1", name="two")[2]["prompts_given"] == 2


def test_concurrency_and_temperature_are_used(bench):
    _, output, summary = bench("-d", "none,ngram", "--concurrency", "3", "--temperature", "0.9", "--seed", "4")
    assert (summary["load"], summary["temperature"]) == ("closed:3", 0.9)
    assert [result["divergent"] for result in summary["results"]] == [0, 0]
    assert max(step.requests for run in bundle.read(output).runs for step in run.events.steps) == 3


def test_conversations_go_on_with_the_engines_own_answers(bench):
    _, output, summary = bench("-d", "none,ngram", "--max-turns", "2", "--limit", "2")
    assert [result["num_requests"] for result in summary["results"]] == [4, 4]
    assert [result["identical"] for result in summary["results"]] == [4, 4]
    for run_ in bundle.read(output).runs:
        first, second = run_.requests
        assert second.prompt_tokens > first.prompt_tokens + first.num_tokens


def test_an_open_loop_sends_when_requests_are_due(bench):
    _, output, summary = bench("-d", "none", "--load", "poisson:rate=50", "--targets", "ttft=5,e2e=9")
    (run_,) = bundle.read(output).runs
    dues = sorted(request.due for request in run_.requests)
    assert len(set(dues)) == len(dues) == 6
    assert all(request.sent >= request.due for request in run_.requests)
    assert summary["results"][0]["latency"]["goodput"]["met"] == 6


def test_a_trace_says_when_what_is_sent_and_how_much_is_wanted(bench, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1700000000.0, "prompt": 5, "output_len": 3}\r\n{"timestamp": 1700000000.1}\r\n'
        '{"timestamp": 1700000000.3, "prompt": 5, "output_len": 7}\r\n{"timesta'
    )
    captured, output, summary = bench("-d", "none,ngram", "--load", f"trace:{path}:scale=0.5")
    assert "left out of the trace" in captured.err and "line 4: half a line" in captured.err
    assert "3 requests, the last 0.15 s after the first" in captured.err
    for run_ in bundle.read(output).runs:
        found = {(request.prompt, request.num_tokens): request.due for request in run_.requests}
        assert found == {(5, 3): 0.0, (1, 20): pytest.approx(0.05), (5, 7): pytest.approx(0.15)}
    assert [result["num_requests"] for result in summary["results"]] == [3, 3]
    assert run("bench", "report", output, "--markdown") == 0
    bench("-d", "none", "--load", f"trace:{path}", "--requests", "1", name="first")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["holds no requests"]),
        (b"\xff\xfe\x00\n1\n", ["line 1", "UTF-8"]),
        ('{"timestamp": 3}\n{"timestamp": 1}\n', ["line 2", "sort it"]),
        ('{"when": 3}\n', ["line 1", "no time"]),
        ('{"timestamp": NaN}\n', ["line 1", "number of seconds"]),
        ('{"timestamp": 0, "prompt": 6}\n', ["request 1", "prompt 6", "none of the 6"]),
    ],
)
def test_a_trace_that_is_wrong_ends_it_before_the_model_is_loaded(content, parts, prompts, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    words = ["bench", "-m", "no such model", "-p", prompts, "-o", tmp_path / "out", "--load", f"trace:{path}"]
    assert run(*words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(part in line for part in parts), line


def test_a_trace_names_prompts_by_their_place_whatever_can_be_sent(bench, tiny, tmp_path, capsys):
    path, trace = tmp_path / "long.jsonl", tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("x" * CONTEXT, "abc", "xyz")))
    trace.write_text('{"timestamp": 0, "prompt": 2}\n')
    _, output, _ = bench("-d", "none", "--load", f"trace:{trace}", path=path)
    assert [request.prompt for run_ in bundle.read(output).runs for request in run_.requests] == [2]
    trace.write_text('{"timestamp": 0, "prompt": 0}\n')
    assert run("bench", "-m", tiny, "-p", path, "-o", tmp_path / "no", "--load", f"trace:{trace}") == 2
    assert "none of the 2 that can be sent" in capsys.readouterr().err


def test_an_open_loop_sends_every_prompt_of_every_length(bench, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "the quick brown fox jumps over the lazy dog " * 3}) + "\n")
    _, output, _ = bench("-d", "none", "--lengths", "32:5,48:7", "--load", "poisson:100", path=path)
    assert [request.num_tokens for run_ in bundle.read(output).runs for request in run_.requests] == [5, 7]


@pytest.mark.parametrize(
    "arguments",
    [
        ("-n", "1"),
        ("-n", "1", "--limit", "1"),
        ("-n", "100000", "--limit", "1"),
        ("-c", "50"),
        ("-c", "512", "--limit", "1"),
        ("-r", "3", "--max-seconds", "1e-9"),
        ("-r", "4", "--precision", "1e9", "--limit", "2"),
        ("-t", "0.7", "--top-p", "1e-9"),
        ("--load", "poisson:1e9"),
        ("--targets", "ttft=1e-9"),
    ],
    ids=" ".join,
)
def test_odd_sizes(bench, capsys, arguments):
    captured, output, summary = bench("-d", "none,ngram", *arguments)
    assert [result["failed_requests"] for result in summary["results"]] == [{}, {}]
    assert [result["divergent"] for result in summary["results"]] == [0, 0]
    assert captured.out.splitlines()[1].startswith("arm")
    assert run("bench", "rescore", output) == 0
    assert run("bench", "report", output, "--markdown") == 0
    assert run("bench", "compare", output, output) == 0
    assert "noise" in capsys.readouterr().out


def test_runs_of_other_prompts_are_not_compared(bench, tmp_path, capsys):
    first = bench("-d", "none,ngram", name="one")[1]
    path = tmp_path / "others.jsonl"
    path.write_text("".join(json.dumps({"prompt": text + "!"}) + "\n" for text in TEXTS))
    second = bench("-d", "none,ngram", name="two", path=path)[1]
    assert run("bench", "compare", first, second) == 2
    assert "no prompt in common" in capsys.readouterr().err
    # Half of the same prompts, and at other places: those are paired.
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS[::-1][:3]))
    third = bench("-d", "none,ngram", name="three", path=path)[1]
    assert run("bench", "compare", first, third, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["items"] == 3
    assert [item["identical"] for item in result["results"]] == [{"same": 3, "of": 3}] * 2


def test_a_mistake_leaves_the_old_bundle_where_it_is(bench, prompts, tmp_path):
    output = bench("-d", "none", "--limit", "1")[1]
    assert run("bench", "-m", "no such model", "-p", prompts, "-o", output, "--force") == 2
    assert bundle.read(output).runs


def test_repeats_and_rescoring(bench, capsys):
    _, output, summary = bench("-d", "none,suffix", "--limit", "2", "--repeats", "3")
    assert (summary["repeats"], summary["results"][1]["num_requests"]) == (3, 6)
    assert run("bench", "rescore", output, "--json") == 0
    assert json.loads(capsys.readouterr().out) == summary
    changed = json.loads((output / "summary.json").read_text())
    changed["results"][1]["tokens_per_step"] = 9.0
    (output / "summary.json").write_text(json.dumps(changed))
    assert run("bench", "rescore", output) == 1
    assert "results[1].tokens_per_step" in capsys.readouterr().err


def test_comparing_two_runs(bench, capsys):
    first = bench("-d", "none,ngram", "--limit", "3", name="one")[1]
    second = bench("-d", "none,ngram,suffix", "--limit", "3", "--seed", "7", name="two")[1]
    assert run("bench", "compare", first, second) == 0
    told = capsys.readouterr().out
    assert "settings: seed was 0, is 7" in told
    assert "only in the second run: suffix" in told
    rows = [line.split() for line in told.splitlines() if line.startswith(("none ", "ngram "))]
    assert [(row[0], row[-1] in ("noise", "faster", "slower")) for row in rows] == [("none", True), ("ngram", True)]
    assert all(len(line) <= 80 for line in told.splitlines() if line.startswith(("arm ", "none ", "ngram ")))
    assert "3/3" in told
    assert run("bench", "compare", first, second, "--json") == 0
    assert [item["arm"] for item in json.loads(capsys.readouterr().out)["results"]] == ["none", "ngram"]


def test_sampling_and_length_options_reach_the_answers(bench):
    def texts(*arguments, name):
        output = bench("-d", "none", *arguments, name=name)[1]
        return [json.loads(line)["text"] for line in (output / "outputs.jsonl").read_text().splitlines()]

    greedy = texts(name="greedy")
    warm = texts("-t", "1.5", "--seed", "1", name="warm")
    assert warm != greedy
    assert warm != texts("-t", "1.5", "--seed", "2", name="seed")
    assert greedy == texts("-t", "1.5", "--seed", "1", "--top-p", "0.01", name="top")
    assert greedy != texts("--raw", name="raw")


def test_no_prefix_is_reused_while_measuring(bench, tmp_path):
    path = tmp_path / "same.jsonl"
    path.write_text('{"prompt": "the very same prompt"}\n' * 3)
    _, output, _ = bench("-d", "none", path=path)
    steps = [step for run_ in bundle.read(output).runs for step in run_.events.steps]
    prompt_rows = [step.rows for step in steps if step.context == 0]
    assert len(prompt_rows) == 3
    assert len(set(prompt_rows)) == 1


@pytest.mark.parametrize("name", ["caf\udce9", "s3:", "file:x"], ids=ascii)
def test_names_that_are_no_text_or_look_like_addresses(tiny, tmp_path, name):
    path, output = tmp_path / f"{name}.jsonl", tmp_path / name
    path.write_text('{"prompt": "abc"}\n')
    words = ["-m", tiny, "-p", path, "-n", "2", "-d", "none", "-o", output]
    for arguments in (words, ["rescore", output], ["report", output, "-o", tmp_path / "page.md"]):
        done = run_apart("bench", *arguments)
        assert done.returncode == 0, done.stderr
    assert bundle.read(output).config["prompts"] == str(path)


def test_a_second_run_needs_force(bench, tiny, prompts, tmp_path, capsys):
    bench("-d", "none,ngram", "--limit", "1")
    assert run("bench", "-m", tiny, "-p", prompts, "-o", tmp_path / "out") == 2
    assert "--force" in capsys.readouterr().err
    _, output, summary = bench("-d", "none", "--limit", "2", "--force")
    assert summary["prompts_given"] == 2
    assert len(bundle.read(output).runs) == 2


def test_a_prompt_too_long_counts_as_failed_in_every_arm(bench, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "abc"}) + "\n" + json.dumps({"prompt": "x" * CONTEXT}) + "\n")
    captured, _, summary = bench("-d", "none,ngram", path=path)
    assert [item["num_requests"] for item in summary["results"]] == [1, 1]
    assert list(summary["failed_prompts"].values()) == [1]
    assert "1 prompt" in captured.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-d", "-"), "nothing to measure"),
        (("-d", "none,none"), "more than once"),
        (("-d", "none,"), "empty name"),
        (("--baseline", "other"), "none of the arms"),
        (("--targets", "ttft"), "SECONDS"),
        (("--repeats", "0"), "at least 1"),
        (("--precision", "0"), "above 0"),
        (("--max-turns", "0"), "at least 1"),
        (("--timeout", "0"), "above 0"),
        (("--load", "closed"), "closed"),
        (("--load", "poisson:2", "--requests", "0"), "requests must be from 1"),
        (("--requests", "3"), "--limit chooses"),
        (("-c", "513"), "at most 512"),
        (("--load", "closed:1000000"), "at most 512"),
        (("--load", "poisson:2", "-c", "8"), "both say how"),
        (("--load", "trace:/no/such/file"), "cannot read the trace"),
        (("--load", "trace:/"), "cannot read the trace"),
        (("--peer", "nobody"), "nobody"),
        (("--peer", "label=nobody:x=1"), "nobody"),
        (("--peer", "=endpoint:url=http://h:1"), "empty label"),
        (("--peer", "none=endpoint:url=http://h:1"), "more than once"),
    ],
)
def test_slips_are_found_before_the_model_is_loaded(arguments, reason, prompts, tmp_path, capsys):
    assert run("bench", "-m", "no such model", "-p", prompts, "-o", tmp_path / "out", *arguments) == 2
    assert reason in capsys.readouterr().err


def test_a_difference_is_found_with_its_gap(bench, monkeypatch):
    """One answer of one arm is changed: the difference is real, and the gap is measured at the first of them."""

    def astray(runs, baseline):
        for run_ in runs:
            for request in run_.requests:
                if run_.arm == "ngram" and request.prompt == 1:
                    ids = request.token_ids
                    object.__setattr__(request, "token_ids", (*ids[:7], 5, *ids[8:]))
        return {Key("ngram", 1, 0): 7}

    monkeypatch.setattr(bench_module, "find_differences", astray)
    captured, output, summary = bench("-d", "none,ngram")
    ngram = summary["results"][1]
    assert (ngram["identical"], ngram["divergent"], ngram["near_ties"]) == (5, 1, 0)
    assert "1 answers differ" in captured.out
    records = [json.loads(line) for line in (output / "outputs.jsonl").read_text().splitlines()]
    ids = {item["arm"]: item["token_ids"] for item in records if item["prompt"] == 1}
    different = next(item["first_difference"] for item in records if item["first_difference"])
    assert different["position"] == first_difference(ids["none"], ids["ngram"]) == 7
    assert different["gap"] is None or different["gap"] > 1e-4


def test_the_built_in_prompts_need_no_file(bench):
    _, output, summary = bench("-d", "none", "--limit", "2", path="builtin")
    assert summary["results"][0]["num_requests"] == 2
    config = json.loads((output / "config.json").read_text())
    assert (config["prompts"], config["prompts_read_as"]) == ("builtin", ["builtin"])
    # A bundle's prompts can be run again.
    assert load_prompts(output / "prompts.jsonl", max_turns=1) == load_prompts("builtin", limit=2, max_turns=1)


def test_a_data_set_is_named_before_its_file_and_what_is_left_out_is_said(bench, tmp_path):
    path = tmp_path / "chats.json"
    said = [{"from": "human", "value": "abc"}]
    path.write_text(json.dumps([{"conversations": []}, {"conversations": said, "max_new_tokens": 3}]))
    captured, output, _ = bench("-d", "none", path=f"sharegpt:{path}")
    assert "1 entries" in captured.err
    assert "nothing the user says" in captured.err
    assert [request.num_tokens for run_ in bundle.read(output).runs for request in run_.requests] == [3]
    config = json.loads((output / "config.json").read_text())
    assert config["prompts_left_out"] == {"nothing the user says": 1}
    assert config["prompts_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_prompts_at_lengths(bench, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "the quick brown fox jumps over the lazy dog " * 3}) + "\n")
    _, output, summary = bench("-d", "none", "--lengths", "32:5,48:7", path=path)
    found = {request.category: request.num_tokens for run_ in bundle.read(output).runs for request in run_.requests}
    assert sorted(found.values()) == [5, 7]
    assert len(summary["results"][0]["categories"]) == 2
