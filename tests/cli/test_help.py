"""Help fits one screen and stays quick; the version is told."""

import json
import re
import subprocess
import sys

import pytest

import draftsmith.cli.options as options
from draftsmith.cli.app import app
from tests.cli.tiny import ENVIRONMENT, run

COMMANDS = [
    *["demo", "generate", "chat", "bench", "bench compare", "bench report", "bench rescore", "audit"],
    *["data synth", "data regenerate", "data prepare", "train", "calibrate", "convert", "models"],
    "options",
]
ARGUMENTS = ("prompt", "bundle", "bundles", "first", "second", "recipe", "source", "name")


@pytest.mark.parametrize(
    "words", [[], *(name.split() for name in COMMANDS)], ids=lambda words: " ".join(words) or "top"
)
def test_help_fits_one_screen(words, capsys):
    assert run(*words, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= (55 if words == ["train"] else 40)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_the_help_and_explained(name, capsys):
    run(*name.split(), "--help")
    shown = capsys.readouterr().out
    command = next(item for item in app.registered_commands if item.name == name)
    if command.cls.elsewhere:
        also = " ".join(shown.partition("Also, as in `draftsmith generate --help`: ")[2].split())
        assert also.startswith(", ".join(f"--{field.replace('_', '-')}" for field in command.cls.elsewhere))
        run("generate", "--help")
        shown += capsys.readouterr().out
    for flag in [
        f"--{field.rstrip('_').replace('_', '-')}"  # `from_` is --from
        for field in command.callback.__annotations__
        if field not in ARGUMENTS
    ]:
        line = next(line for line in shown.splitlines() if re.match(rf" +(-\w, )?{flag}( |$)", line))
        assert re.search(rf"{flag}( [A-Z,.]+)?  +\w.{{5,}}", line), f"{flag} has no explanation"


def test_no_words_at_all_show_the_help(capsys):
    assert run() == 0
    assert "Usage: draftsmith COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_a_group_of_commands_has_a_help_of_its_own(words, capsys):
    assert run("data", *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Usage: draftsmith data COMMAND" in "\n".join(lines)
    start = lines.index("Commands:") + 1
    assert [line.split()[0] for line in lines[start : start + 3]] == ["synth", "regenerate", "prepare"]


@pytest.mark.parametrize("word", ["nonsense", "--nonsense"])
def test_what_a_group_has_not_points_to_that_help(word, capsys):
    assert run("data", word) == 2
    error = capsys.readouterr().err
    assert word in error
    assert error.endswith("see draftsmith data --help\n")


def test_top_level_help_lists_the_commands_in_one_line_each(capsys):
    run("--help")
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("Commands:") + 1
    assert [line.split("  ")[1] for line in lines[start : start + len(COMMANDS)]] == COMMANDS


def test_help_imports_nothing_heavy():
    """Torch alone would take longer to import than a reader waits for a help page."""
    code = (
        "import sys, json; from draftsmith.cli.app import run; run(['--help']); run(['bench', '--help']);"
        "print(json.dumps([name for name in ('torch', 'numpy', 'rich', 'transformers') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_version(capsys):
    assert run("--version") == 0
    name, number = capsys.readouterr().out.split()
    assert name == "draftsmith"
    assert number[0].isdigit()


def test_every_options_class_is_frozen():
    for name in ("GenerateOptions", "ChatOptions", "BenchOptions", "AuditOptions", "DemoOptions", "ModelsOptions"):
        assert getattr(options, name).__dataclass_params__.frozen
