"""`draftsmith options`: every name of every table can be asked for, and every option is explained."""

import json

import pytest

from draftsmith.cli.registered import chosen, meanings, registered
from tests.cli.tiny import run

NAMES = chosen(None)


@pytest.mark.parametrize(("group", "name"), NAMES, ids=lambda value: value)
def test_every_option_has_its_meaning(group, name):
    told = registered(group, name)
    assert 10 < len(told.summary) < 160 and not told.summary.endswith(".")
    assert told.usage.startswith(f"--{group} {name}")
    assert [option.name for option in told.options if len(option.meaning) < 10] == []


def test_all_names_are_listed(capsys):
    assert run("options") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert shown == [name for _, name in NAMES]


def test_a_name_s_options_are_shown(capsys):
    assert run("options", "goodput") == 0
    shown = capsys.readouterr().out
    assert "--controller goodput:max_draft=16" in shown
    assert "cheap_look" in shown and "0.03" in shown and "share of a plain step" in " ".join(shown.split())
    assert run("options", "typical") == 0
    shown = capsys.readouterr().out
    assert "--rule typical:epsilon=VALUE:delta=VALUE" in shown and "required" in shown


def test_a_name_in_two_groups_is_shown_twice_or_chosen(capsys):
    def told(name):
        assert run("options", name, "--json") == 0
        return [(item["group"], item["name"]) for item in json.loads(capsys.readouterr().out)["names"]]

    assert told("synthetic") == [("drafter", "synthetic"), ("rule", "synthetic")]
    assert told("controller:auto") == [("controller", "auto")]
    assert told("prefix_scheduler") == [("controller", "prefix-scheduler")]
    assert told("coupling") == [("rule", "coupling")]


def test_for_machines(capsys):
    assert run("options", "fixed", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    option = document["names"][0]["options"][0]
    assert (option["name"], option["type"], option["default"]) == ("num_draft", "whole number", "8")


@pytest.mark.parametrize("name", ["goodputt", "controller:goodputt"])
def test_an_unknown_name_is_one_line(name, capsys):
    assert run("options", name) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "did you mean goodput? draftsmith options lists them" in captured.err


def test_an_option_s_meaning_ends_with_its_paragraph():
    docstring = """Some `c`: prose.

    `a`: one thing; see `b`. `b`: another
    one.

    And so on.
    """
    assert meanings(docstring, ("a", "b")) == {"a": "one thing; see `b`", "b": "another one"}
