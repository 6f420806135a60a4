"""`draftsmith chat`: a conversation, each answer reusing what was computed for the ones before.

Called by `app`. Works on a terminal and with lines piped in, one message a line. Invariant: a Ctrl-C
during an answer never interrupts a step half way: the answer ends at the next token and what was said
so far stays in the conversation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, final

from draftsmith.cli.interrupts import INTERRUPTED, stop_on_interrupt
from draftsmith.cli.loading import checked_text, load_engine, request_settings
from draftsmith.cli.options import ChatOptions
from draftsmith.cli.telling import Answer, answer_line, totals_line
from draftsmith.cli.writing import AnswerWriter, legend, wants_color
from draftsmith.errors import DraftsmithError, PromptError

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.results import TokenEvent

HELP = """\
/help   this text
/reset  forget the conversation (the system message stays)
/stats  tokens, speed and drafting so far
/quit   leave (so does Ctrl-D)
Ctrl-C stops an answer; a second Ctrl-C leaves."""


def run(options: ChatOptions) -> int:
    """Run the command; returns the exit code."""
    settings = request_settings(options)
    engine = load_engine(options, drafter=options.drafter)
    chat = Chat(engine, settings, options)
    lines = _typed_lines(quiet=options.json or not sys.stdout.isatty()) if sys.stdin.isatty() else _piped_lines()
    try:
        code = chat.converse(lines)
    finally:
        if options.json:
            print(json.dumps(chat.as_json(), ensure_ascii=False))
    return code


@final
@dataclass
class Chat:
    """One conversation with an engine."""

    engine: Engine
    settings: dict[str, Any]
    options: ChatOptions
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[tuple[str, Answer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()
        self.color = not self.options.json and wants_color(self.options.color, sys.stdout)

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = [{"role": "system", "content": self.options.system}] if self.options.system is not None else []

    def converse(self, lines: Iterator[str]) -> int:
        """Answer line after line until they end; returns the exit code."""
        interactive = sys.stdin.isatty()
        if interactive:
            _tell(f"{self.options.model} with drafter {self.engine.drafter_name}. /help lists the commands.")
            if self.color:
                _tell(legend())
        try:
            for line in lines:
                if line.startswith("/"):
                    if self._command(line.split()[0]):
                        return 0
                elif line.strip():
                    self._take_turn(line, interactive)
        except KeyboardInterrupt:
            return INTERRUPTED
        return 0

    def as_json(self) -> dict[str, Any]:
        """The conversation as one document."""
        turns = [{"prompt": prompt, **answer.as_json()} for prompt, answer in self.answers]
        return {"model": self.options.model, "drafter": self.engine.drafter_name, "turns": turns}

    def _command(self, name: str) -> bool:
        """Run a slash command; returns whether to leave."""
        if name in ("/quit", "/exit"):
            return True
        if name == "/help":
            _tell(HELP)
        elif name == "/reset":
            self.reset()
            _tell("the conversation is forgotten")
        elif name == "/stats":
            _tell(totals_line([answer for _, answer in self.answers]))
        else:
            _tell(f"unknown command {name}; /help lists them")
        return False

    def _take_turn(self, line: str, interactive: bool) -> None:
        self.messages.append({"role": "user", "content": line})
        try:
            answer = self._answer()
        except DraftsmithError as error:
            self.messages.pop()
            if not interactive:
                raise
            hint = "; /reset starts anew" if isinstance(error, PromptError) else ""
            _tell(f"error: {error}{hint}")
            return
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append((line, answer))
        _tell(answer_line(answer))

    def _answer(self) -> Answer:
        answer = Answer()
        writer = None if self.options.json else AnswerWriter(self.engine.tokenizer, color=self.color)
        stream = cast("Generator[TokenEvent, None, None]", self.engine.stream(self.messages, **self.settings))
        with stop_on_interrupt() as stop:
            for event in answer.timed(stream):
                if writer is not None:
                    writer.write(event)
                if stop.asked:
                    stream.close()  # cancels the request
                    answer.finish_reason = "interrupted"
                    break
        if writer is not None:
            writer.end()
        answer.close(self.engine.take_events())
        return answer


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield checked_text(line.rstrip("\n"), "a line of stdin")
    except UnicodeDecodeError as error:
        raise PromptError("a line of stdin is not UTF-8 text") from error


def _typed_lines(*, quiet: bool) -> Iterator[str]:
    """Lines typed on a terminal. `quiet`: stdout is not ours to prompt on."""
    import readline  # noqa: F401  (gives input() history and editing)

    interrupted = False
    while True:
        try:
            if quiet:
                print("> ", end="", file=sys.stderr, flush=True)
            line = input("" if quiet else "> ")
        except EOFError:
            _tell("")
            return
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            _tell("\nCtrl-C again or Ctrl-D leaves")
            continue
        interrupted = False
        yield line


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
