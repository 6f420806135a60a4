"""`draftsmith bench` from flags to bundle, on the tiny model."""

import hashlib
import importlib.util
import json

import pytest

from draftsmith.bench import bundle
from draftsmith.bench.differences import first_difference
from draftsmith.bench.prompts import load_prompts
from draftsmith.bench.summary import summarise_run
from draftsmith.cli import bench as bench_module
from draftsmith.core.stats import EventLog
from tests.cli.tiny import CONTEXT, run

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
    assert [result["drafter"] for result in summary["results"]] == ["none", "ngram", "suffix"]
    assert summary["model"].endswith("tiny.gguf")
    assert summary["backend"] == ("native" if importlib.util.find_spec("draftsmith._native") else "reference")
    assert summary["versions"]["torch"]
    assert not summary["interrupted"]
    for result in summary["results"]:
        assert (result["num_prompts"], result["failed_prompts"]) == (6, 0)
        assert result["emitted_tokens"] == 6 * 20
        assert (result["identical_prompts"], result["divergent_prompts"]) == (6, 0)
        assert set(result["categories"]) == {"copy", "chat"}
    assert summarise_run(bundle.read(output)) == summary
    outputs = [json.loads(line) for line in (output / "outputs.jsonl").read_text().splitlines()]
    assert len(outputs) == 18
    for result, name in zip(summary["results"], ["0-none", "1-ngram", "2-suffix"], strict=True):
        log = EventLog.load(output / f"events-{name}.jsonl")
        own = [item for item in outputs if item["drafter"] == result["drafter"]]
        assert sum(record.emitted for record in log.requests) == sum(len(item["token_ids"]) for item in own) == 120
    config = json.loads((output / "config.json").read_text())
    assert config["max_new_tokens"] == 20
    assert len(config["prompts_sha256"]) == 64


def test_tables_for_people(bench):
    captured, output, _ = bench("-d", "none,ngram")
    lines = captured.out.splitlines()
    assert lines[0].split()[0] == "drafter"
    assert [line.split()[0] for line in lines[1:3]] == ["none", "ngram"]
    assert "6/6" in lines[2]
    assert any(line.startswith("copy (3)") for line in lines)
    assert "Only 6 blocks" in captured.out
    assert str(output) in captured.err
    assert all(len(line) <= 80 for line in lines[:7])


def test_the_baseline_is_added_and_said_so(bench):
    captured, _, summary = bench("-d", "ngram", "--limit", "2")
    assert [result["drafter"] for result in summary["results"]] == ["none", "ngram"]
    assert "none was added" in captured.err


def test_limits(bench):
    assert bench("-d", "none", "--limit", "2")[2]["prompts_given"] == 2
    assert bench("-d", "none", "--per-category", "1", name="two")[2]["prompts_given"] == 2


def test_concurrency_and_temperature_are_used(bench):
    _, output, summary = bench("-d", "none,ngram", "--concurrency", "3", "--temperature", "0.9", "--seed", "4")
    for result in summary["results"]:
        assert (result["concurrency"], result["temperature"]) == (3, 0.9)
        assert result["divergent_prompts"] == 0
    log = EventLog.load(output / "events-0-none.jsonl")
    assert max(step.requests for step in log.steps) == 3


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
    log = EventLog.load(output / "events-0-none.jsonl")
    prompt_rows = [step.rows for step in log.steps if step.context == 0]
    assert len(prompt_rows) == 3
    assert len(set(prompt_rows)) == 1


def test_a_second_run_needs_force(bench, tiny, prompts, tmp_path, capsys):
    bench("-d", "none,ngram", "--limit", "1")
    assert run("bench", "-m", tiny, "-p", prompts, "-o", tmp_path / "out") == 2
    assert "--force" in capsys.readouterr().err
    _, output, summary = bench("-d", "none", "--limit", "2", "--force")
    assert summary["prompts_given"] == 2
    assert not (output / "events-1-ngram.jsonl").exists()


def test_a_prompt_too_long_counts_as_failed_in_every_arm(bench, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "abc"}) + "\n" + json.dumps({"prompt": "x" * CONTEXT}) + "\n")
    captured, _, summary = bench("-d", "none,ngram", path=path)
    assert [(item["num_prompts"], item["failed_prompts"]) for item in summary["results"]] == [(1, 1), (1, 1)]
    assert "1 prompt" in captured.err


def test_a_difference_is_found_with_its_gap(bench, monkeypatch):
    """One arm of another model: differences are real, and the gap is measured at the first of them."""

    def astray(runs):
        found = {}
        for run_ in runs:
            for index, output in enumerate(run_.outputs):
                if run_.drafter == "ngram" and output.prompt == 1:
                    changed = (*output.token_ids[:7], 5, *output.token_ids[8:])
                    object.__setattr__(run_.outputs[index], "token_ids", changed)
                    found["ngram", 1] = 7
        return found

    monkeypatch.setattr(bench_module, "find_differences", astray)
    captured, output, summary = bench("-d", "none,ngram")
    ngram = summary["results"][1]
    assert (ngram["identical_prompts"], ngram["divergent_prompts"], ngram["near_ties"]) == (5, 1, 0)
    assert "1 prompts differ" in captured.out
    records = [json.loads(line) for line in (output / "outputs.jsonl").read_text().splitlines()]
    ids = {item["drafter"]: item["token_ids"] for item in records if item["prompt"] == 1}
    different = next(item["first_difference"] for item in records if item["first_difference"])
    assert different["position"] == first_difference(ids["none"], ids["ngram"]) == 7
    assert different["gap"] is None or different["gap"] > 1e-4


def test_the_built_in_prompts_need_no_file(bench):
    _, output, summary = bench("-d", "none", "--limit", "2", path="builtin")
    assert summary["results"][0]["num_prompts"] == 2
    config = json.loads((output / "config.json").read_text())
    assert (config["prompts"], config["prompts_read_as"]) == ("builtin", ["builtin"])
    assert load_prompts(output / "prompts.jsonl") == load_prompts(
        "builtin", limit=2
    )  # a bundle's prompts can be run again


def test_a_data_set_is_named_before_its_file_and_what_is_left_out_is_said(bench, tmp_path):
    path = tmp_path / "chats.json"
    said = [{"from": "human", "value": "abc"}]
    path.write_text(json.dumps([{"conversations": []}, {"conversations": said, "max_new_tokens": 3}]))
    captured, output, _ = bench("-d", "none", path=f"sharegpt:{path}")
    assert "1 entries" in captured.err
    assert "nothing the user says" in captured.err
    assert "max_new_tokens of single prompts" in captured.err
    config = json.loads((output / "config.json").read_text())
    assert config["prompts_left_out"] == {"nothing the user says": 1}
    assert config["prompts_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
