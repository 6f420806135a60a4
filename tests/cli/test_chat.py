"""`draftsmith chat`: piped and on a terminal, commands, prefix reuse, Ctrl-C."""

import json

import pytest

from draftsmith.cli import chat as chat_module
from draftsmith.cli.loading import load_engine
from tests.cli.tiny import CONTEXT, run


@pytest.fixture
def chat(tiny, capsys, stdin):
    """Runs a conversation with piped lines; returns (stdout, stderr)."""

    def call(lines, *arguments, code=0):
        stdin("".join(f"{line}\n" for line in lines))
        assert run("chat", "-m", tiny, "-n", "20", *arguments) == code
        return capsys.readouterr()

    return call


def test_each_line_gets_an_answer_and_a_summary(chat):
    captured = chat(["hello", "", "say abc"])
    assert len(captured.out.splitlines()) == 2
    assert all(len(line) == 20 for line in captured.out.splitlines())
    assert captured.err.count("20 tokens in") == 2


def test_json_is_one_document_with_all_turns(chat):
    captured = chat(["hello", "say abc"], "--json")
    document = json.loads(captured.out)
    assert [turn["prompt"] for turn in document["turns"]] == ["hello", "say abc"]
    assert all(turn["emitted_tokens"] == 20 for turn in document["turns"])


def test_the_conversation_is_remembered_and_reused(tiny, stdin, monkeypatch, capsys):
    engines = []

    def spy(choice, *, drafter):
        engines.append(load_engine(choice, drafter=drafter))
        engines[-1].asked = []
        stream = engines[-1].stream

        def recording(prompt, **params):
            engines[-1].asked.append([dict(message) for message in prompt])
            return stream(prompt, **params)

        engines[-1].stream = recording
        return engines[-1]

    monkeypatch.setattr(chat_module, "load_engine", spy)
    stdin("one\ntwo\n/reset\nthree\n")
    assert run("chat", "-m", tiny, "-n", "8", "--system", "Be short") == 0
    roles = [[message["role"] for message in asked] for asked in engines[0].asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    first_answer = engines[0].asked[1][2]["content"]
    assert first_answer == capsys.readouterr().out.splitlines()[0]


def test_the_second_turn_computes_only_what_is_new(chat, monkeypatch):
    seen = []
    monkeypatch.setattr(chat_module, "answer_line", lambda answer: seen.append(answer) or "")
    chat(["tell me the whole alphabet, please, from the beginning to the end", "and now?"], "-d", "none")
    rows = [sum(step.rows for step in answer.events.steps) for answer in seen]
    prompt_rows = [count - answer.counts.pairs for count, answer in zip(rows, seen, strict=True)]
    assert prompt_rows[1] < prompt_rows[0]


def test_commands(chat):
    captured = chat(["hello", "/stats", "/help", "/nonsense", "/quit", "never said"])
    assert len(captured.out.splitlines()) == 1
    assert "1 answer |" in captured.err
    assert "drafted tokens accepted" in captured.err
    assert "/reset" in captured.err
    assert "unknown command /nonsense" in captured.err


def test_stats_before_any_answer(chat):
    assert "nothing was said yet" in chat(["/stats"]).err


def test_a_conversation_that_outgrows_the_context_is_an_error_in_a_script(chat):
    captured = chat(["x" * CONTEXT], code=2)
    assert str(CONTEXT - 1) in captured.err
    assert captured.out == ""


def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(tiny, on_terminal):
    terminal = on_terminal("chat", "-m", tiny, "-n", "3000", "--controller", "fixed:num_draft=1")
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("xyz")
    terminal.interrupt()
    terminal.wait_for("| interrupted")
    terminal.wait_for("> ")
    terminal.type("/stats\n")
    terminal.wait_for("1 answer |")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.ends_with() == 0


def test_on_a_terminal_ctrl_c_twice_leaves(tiny, on_terminal):
    terminal = on_terminal("chat", "-m", tiny, "-n", "20")
    terminal.wait_for("> ")
    terminal.interrupt(after=0.5)
    terminal.wait_for("Ctrl-C again")
    terminal.wait_for("> ")
    terminal.interrupt(after=0.5)
    assert terminal.ends_with() == 130


def test_on_a_terminal_an_error_does_not_end_the_conversation(tiny, on_terminal):
    terminal = on_terminal("chat", "-m", tiny, "-n", "20", "--color", "never")
    for _ in range(2):
        terminal.wait_for("> ")
        terminal.type("x" * 3000 + "\n")  # one fits the context, two do not
    terminal.wait_for("/reset starts anew")
    terminal.type("/quit\n")
    assert terminal.ends_with() == 0
