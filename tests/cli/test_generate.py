"""`draftsmith generate`: what goes to stdout, what to stderr, and that every option has an effect."""

import json
import re

import pytest

from draftsmith.cli.options import When
from draftsmith.cli.writing import wants_color
from tests.cli.tiny import ENVIRONMENT, run, run_apart

ALPHABET = "abcdefghijklmnopqrstuvwxyz "
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def generate(tiny, capsys):
    """Runs the command; returns (stdout, stderr)."""

    def call(*arguments, prompt="say xyz", model=tiny):
        # The default controller drafts only where that pays, which on a tiny model is a matter of chance.
        assert run("generate", "-m", model, "--controller", "fixed", *arguments, prompt) == 0
        return capsys.readouterr()

    return call


@pytest.fixture
def document(generate):
    """Runs the command with --json; returns the document."""
    return lambda *arguments, **more: json.loads(generate("--json", *arguments, **more).out)


def test_stdout_is_the_text_and_a_line_end(generate):
    captured = generate("-n", "30")
    text = captured.out
    assert text.endswith("\n")
    assert len(text) == 31
    assert text[:30] in ALPHABET * 3
    assert "\x1b" not in text


def test_the_summary_is_one_line_on_stderr(generate):
    lines = generate("-n", "30").err.splitlines()
    assert len(lines) == 1
    figures = r"[\d.]+ tokens/s \| [\d.]+ tokens per step \| \d+ of \d+ drafted tokens accepted"
    assert re.fullmatch(rf"30 tokens in [\d.]+ s \| {figures} \| length", lines[0])


def test_json_is_one_document_and_nothing_else(generate):
    captured = generate("--json", "-n", "60", "-d", "ngram")
    document = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert document["emitted_tokens"] == len(document["token_ids"]) == 60
    assert document["finish_reason"] == "length"
    assert document["drafter"] == "ngram"
    assert sum(document["origins"].values()) == 60
    assert document["tokens_per_step"] == pytest.approx(59 / document["steps"])
    assert document["accepted_tokens"] == document["origins"]["accepted"] > 0


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "hybrid"])
@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_drafters_do_not_change_the_text(generate, drafter, temperature):
    options = ["-n", "80", "-t", temperature, "--seed", "5"]
    assert generate("-d", drafter, *options).out == generate("-d", "none", *options).out


def test_colors_follow_origins_and_leave_the_text_alone(generate):
    colored = generate("-n", "80", "-d", "ngram", "--color", "always")
    plain = generate("-n", "80", "-d", "ngram", "--color", "never")
    assert ESCAPE.sub("", colored.out) == plain.out
    assert "\x1b[32m" in colored.out  # accepted tokens
    assert "drafted and accepted" in ESCAPE.sub("", colored.err)
    assert "drafted and accepted" not in plain.err


def test_colors_survive_characters_of_several_tokens(generate):
    """A character whose bytes come with different tokens is written when it is whole, once."""
    options = ["-n", "120", "-t", "1.6", "--seed", "3", "-d", "ngram"]
    text = generate(*options, "--color", "never").out
    assert "\ufffd" in text or any(ord(character) > 127 for character in text)
    assert ESCAPE.sub("", generate(*options, "--color", "always").out) == text


def test_color_auto_is_for_terminals_and_obeys_no_color(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    class Pipe:
        def isatty(self):
            return False

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_color(When.AUTO, Terminal())
    assert not wants_color(When.AUTO, Pipe())
    assert wants_color(When.ALWAYS, Pipe())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(When.AUTO, Terminal())


def test_prompt_from_stdin(generate, stdin):
    stdin("say xyz")
    assert generate("-n", "20", prompt="-").out == generate("-n", "20").out


def test_raw_and_system_change_the_prompt(document):
    plain = document("-n", "4")
    assert document("-n", "4", "--raw")["token_ids"] != plain["token_ids"]
    assert document("-n", "4", "--system", "Answer in capitals")["prompt_tokens"] > plain["prompt_tokens"]


def test_seed_and_temperature(document):
    def ids(*arguments):
        return document("-n", "60", *arguments)["token_ids"]

    assert ids("-t", "1.5", "--seed", "1") == ids("-t", "1.5", "--seed", "1")
    assert ids("-t", "1.5", "--seed", "1") != ids("-t", "1.5", "--seed", "2")
    assert ids("-t", "0", "--seed", "1") == ids("-t", "0", "--seed", "2")


@pytest.mark.parametrize(
    "options",
    [
        ["--top-k", "1"],
        ["--top-p", "0.01"],
        ["--min-p", "0.99"],
    ],
    ids=lambda options: options[0],
)
def test_cutting_the_law_to_its_top_is_greedy(document, options):
    greedy = document("-n", "40", "-d", "none")["token_ids"]
    assert document("-n", "40", "-t", "1.5", "--seed", "1", *options)["token_ids"] == greedy
    assert document("-n", "40", "-t", "1.5", "--seed", "1")["token_ids"] != greedy


@pytest.mark.parametrize("option", ["--repetition-penalty", "--presence-penalty", "--frequency-penalty"])
def test_penalties_change_the_text(document, option):
    options = ["-n", "100", "-t", "0.9", "--seed", "1"]
    assert document(*options, option, "1.9")["token_ids"] != document(*options)["token_ids"]


def test_rule_decides_how_drafts_are_verified(document, other):
    """A ratio rule keeps other tokens than the coupled walk does; on point masses match and coupling are one."""

    def ids(rule, drafter):
        options = ["-n", "100", "-t", "1.2", "--seed", "4", "-d", drafter]
        return document(*options, "--rule", rule)["token_ids"]

    model_drafter = f"draft_model:model={other}"
    assert ids("chain", model_drafter) != ids("coupling", model_drafter)
    assert ids("match", "ngram") == ids("coupling", "ngram") == ids("coupling", model_drafter)


def test_stop_texts_end_before_them(generate, document):
    text = generate("-n", "60", "--stop", "mno", "--stop", "zzz").out
    assert text.rstrip("\n").endswith("jkl")
    assert "mno" not in text
    assert document("-n", "60", "--stop", "mno")["finish_reason"] == "stop"


def test_ignore_eos_writes_on(tiny_ending, document):
    assert document("-n", "60", model=tiny_ending)["finish_reason"] == "stop"
    written_on = document("-n", "60", "--ignore-eos", model=tiny_ending)
    assert (written_on["finish_reason"], written_on["emitted_tokens"]) == ("length", 60)


def test_controller_limits_drafts(document):
    options = ["-n", "120", "-d", "ngram"]
    one = document(*options, "--controller", "fixed:num_draft=1")
    many = document(*options, "--controller", "fixed:num_draft=8")
    assert one["tokens_per_step"] <= 2 < many["tokens_per_step"]
    assert one["token_ids"] == many["token_ids"]


def test_dtype_and_threads_reach_the_engine(generate, monkeypatch):
    import torch

    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    generate("-n", "4", "--dtype", "bfloat16", "--threads", "1")
    assert 1 in seen


def test_characters_that_the_locale_lacks_do_not_end_the_answer(tiny):
    options = ["-n", "120", "-t", "1.6", "--seed", "3"]
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run_apart("generate", "-m", tiny, *options, "say xyz", env=environment)
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


def test_a_controller_without_a_drafter_is_told_to_have_nothing_to_do(tiny, capsys):
    for words, notes in (
        (["-d", "none", "--controller", "fixed"], 1),
        (["-d", "none"], 0),
        (["--controller", "fixed"], 0),
    ):
        assert run("generate", "-m", tiny, "-n", "3", *words, "abc") == 0
        assert capsys.readouterr().err.count("nothing drafts: --controller has nothing to decide") == notes
