"""Fixtures of the command line's tests."""

import io
import signal

import pytest

from draftsmith.bench.environment import Settling
from tests.cli.terminal import Terminal
from tests.cli.tiny import write_tiny

# Started in the background by a shell, tests inherit that Ctrl-C is ignored, and so would every command they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    """A benchmark does not wait for a machine at rest, which it never is while other tests run."""
    monkeypatch.setattr(Settling, "_LIMIT", 0.0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny model on disk."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    """A model of the same vocabulary and other weights, as a drafter."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "other.gguf", seed=1)


@pytest.fixture(scope="session")
def tiny_ending(tmp_path_factory):
    """The tiny model, ending its answer after z."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "ending.gguf", ends=True)


@pytest.fixture
def stdin(monkeypatch):
    """Sets what the command reads from stdin."""

    def feed(text):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    return feed


@pytest.fixture
def on_terminal():
    """Starts commands on pseudo-terminals; ends them with the test."""
    opened = []

    def start(*arguments):
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()
