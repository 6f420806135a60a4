"""`draftsmith demo`: the views, the table, differences and the exit code."""

import json
import re

import pytest

from draftsmith.bench.demo_prompts import DEMO_PROMPTS
from draftsmith.bench.runs import Difference, Key
from draftsmith.cli import demo as demo_module
from draftsmith.cli import demo_view
from draftsmith.cli.console import OutputConsole
from tests.cli.tiny import run

KINDS = ["rewriting code", "filling JSON", "summarising", "extracting", "chatting"]


@pytest.fixture
def short(monkeypatch):
    """One prompt of each kind, few tokens."""
    prompts = tuple(
        type(item)(kind=item.kind, title=item.title, task="say abc", max_new_tokens=60) for item in DEMO_PROMPTS[:5]
    )
    monkeypatch.setattr(demo_module, "DEMO_PROMPTS", prompts)
    return prompts


def test_the_prompts_are_twelve_of_five_kinds_one_of_each_first():
    assert len(DEMO_PROMPTS) == 12
    assert [item.kind for item in DEMO_PROMPTS[:5]] == KINDS
    assert len({item.title for item in DEMO_PROMPTS}) == 12
    for item in DEMO_PROMPTS:
        roles = [message["role"] for message in item.messages]
        assert roles in (["user"], ["user", "assistant", "user"])
        assert item.messages[-1]["content"] == item.task


def test_plain_lines_and_the_table(tiny, short, capsys):
    assert run("demo", "-m", tiny, "-d", "ngram", "--controller", "fixed") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for number, item in enumerate(short, 1):
        assert f"[{number}/5] {item.kind}: {item.title}" in out
    assert out.count("same ids") == 5
    table = out[out.index("prompt kind") :].splitlines()
    rows = [re.split(r"  +", line.strip()) for line in table[1:7]]
    assert [row[0] for row in rows] == [*KINDS, "all"]
    assert {row[1] for row in rows} == {"ngram"}
    assert all(row[-1] == f"{row[2]} of {row[2]}" for row in rows)
    assert float(rows[0][3]) > 1.2
    assert "trained" not in out
    assert "Why it is faster" in out
    assert "Why the text is the same" in out


def test_json(tiny, short, capsys):
    assert run("demo", "-m", tiny, "--json", "-d", "suffix") == 0
    out = capsys.readouterr().out
    document = json.loads(out)
    assert out.count("\n") == 1
    assert [item["arm"] for item in document["results"]] == ["none", "suffix"]
    assert list(document["results"][1]["categories"]) == KINDS
    assert document["results"][1]["divergent"] == 0
    assert len(document["outputs"]) == 10
    pairs = {}
    for item in document["outputs"]:
        pairs.setdefault(item["prompt"], set()).add(tuple(item["token_ids"]))
    assert all(len(ids) == 1 for ids in pairs.values())


class Trained:
    """Stands for a drafter of the package."""

    def __init__(self, method):
        self.method = method

    def suits(self, spec, tokenizer):
        return self.method != "medusa"


@pytest.fixture
def shipped(monkeypatch):
    """Two drafters that suit the model and one that does not; one of them is the one compared anyway."""
    drafters = [Trained("suffix"), Trained("medusa"), Trained("ngram")]
    monkeypatch.setattr("draftsmith.drafters.shipped.shipped_drafters", lambda: drafters)


def test_trained_drafters_follow_on_what_repeats_nothing(tiny, short, shipped, capsys):
    assert run("demo", "-m", tiny, "-d", "hybrid") == 0
    out = capsys.readouterr().out
    part = out[out.index("The drafters that come trained for this model (suffix, ngram), where nothing repeats:") :]
    assert "[5/5] chatting" in part
    assert part.count("same ids") == 2
    table = part[part.index("prompt kind") :]
    found = [tuple(re.split(r"  +", line.strip())[:3]) for line in table.splitlines() if line.startswith("chatting")]
    assert found == [("chatting", "hybrid", "1"), ("chatting", "suffix", "1"), ("chatting", "ngram", "1")]
    assert "A trained drafter proposes there too" in out
    assert run("demo", "-m", tiny, "-d", "suffix", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [item["arm"] for item in document["results"]] == ["none", "suffix"]
    assert [item["arm"] for item in document["trained"]["results"]] == ["none", "ngram"]
    assert [(item["arm"], item["kind"]) for item in document["trained"]["outputs"]] == [
        ("none", "chatting"),
        ("ngram", "chatting"),
    ]


def test_a_difference_of_a_trained_drafter_counts_too(tiny, short, shipped, monkeypatch, capsys):
    found = iter([{}, {Key("ngram", 4, 0): 7}])
    monkeypatch.setattr(demo_module, "find_differences", lambda runs, baseline: next(found))
    monkeypatch.setattr(demo_module, "explain", lambda *arguments: Difference(position=7, gap=2e-3))
    assert run("demo", "-m", tiny, "-d", "suffix") == 1
    assert f"{short[4].title}: ngram differs from plain at token 7" in capsys.readouterr().out


def test_arms_take_turns_in_going_first(tiny, short, monkeypatch):
    orders = []
    spied = demo_module.summarise_run
    monkeypatch.setattr(demo_module, "summarise_run", lambda measured: orders.append(measured) or spied(measured))
    run("demo", "-m", tiny, "-d", "ngram")
    first = [run.arm for run in orders[0].runs if run.order == 0]
    assert first == ["none", "ngram", "none", "ngram", "none"]


@pytest.mark.parametrize(
    ("gap", "code", "words"), [(3e-5, 0, "near tie"), (2e-3, 1, "does not explain"), (None, 1, "not be")]
)
def test_a_difference_is_shown_and_excused_only_by_a_near_tie(tiny, short, monkeypatch, capsys, gap, code, words):
    monkeypatch.setattr(demo_module, "find_differences", lambda runs, baseline: {Key("ngram", 2, 0): 7})
    monkeypatch.setattr(demo_module, "explain", lambda *arguments: Difference(position=7, gap=gap))
    assert run("demo", "-m", tiny, "-d", "ngram") == code
    out = capsys.readouterr().out
    assert f"{short[2].title}: ngram differs from plain at token 7" in out
    assert words in out
    assert "0 of 1" in out
    assert "4 of 5" in out


@pytest.mark.parametrize(("others", "warned"), [(0.1, False), (1.2, True), (None, False)])
def test_speeds_measured_beside_other_work_come_with_a_warning(tiny, short, monkeypatch, capsys, others, warned):
    monkeypatch.setattr(demo_module.MachineLoad, "others", lambda self: others)
    run("demo", "-m", tiny, "-d", "ngram")
    assert ("take the speeds with caution" in capsys.readouterr().out) is warned


def test_a_slow_machine_sees_one_prompt_of_each_kind(tiny, monkeypatch, capsys):
    monkeypatch.setattr(demo_module, "LAST_START_SECONDS", 0.0)
    prompts = tuple(type(item)(kind=item.kind, title=item.title, task="abc", max_new_tokens=4) for item in DEMO_PROMPTS)
    monkeypatch.setattr(demo_module, "DEMO_PROMPTS", prompts)
    assert run("demo", "-m", tiny, "-d", "ngram") == 0
    out = capsys.readouterr().out
    assert "5 of 12 prompts shown" in out
    assert "[6/12]" not in out


def test_two_columns_on_a_terminal(tiny, on_terminal):
    terminal = on_terminal("demo", "-m", tiny, "-d", "ngram", "--threads", "1", "--controller", "fixed:num_draft=2")
    terminal.wait_for("[1/12] rewriting code")
    terminal.wait_for("plain")
    terminal.wait_for("╭")  # the frame of a column
    terminal.wait_for("tokens per step, same ids")
    terminal.interrupt()
    assert terminal.ends_with() == 130


def test_a_column_shows_the_end_of_a_long_answer():
    from rich.text import Text

    lines = demo_view._tail(Text("\n".join(f"line {i}" for i in range(30))), 20, 5).plain.splitlines()
    assert lines == [f"line {i}" for i in range(25, 30)]
    wrapped = demo_view._tail(Text("word " * 40), 20, 3).plain.splitlines()
    assert len(wrapped) == 3
    assert max(map(len, wrapped)) <= 20


def test_no_markup_in_answers_is_interpreted(capsys):
    import sys

    OutputConsole(sys.stdout).print("[bold]x[/bold] [1/12]")
    assert capsys.readouterr().out == "[bold]x[/bold] [1/12]\n"
