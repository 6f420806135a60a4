"""`draftsmith generate`: answer one prompt, streaming.

Called by `app`. Invariant: stdout holds the answer and nothing else (with --json one document); what is
said about the answer goes to stderr.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from draftsmith.cli.interrupts import INTERRUPTED
from draftsmith.cli.loading import checked_text, load_engine, request_settings
from draftsmith.cli.options import GenerateOptions
from draftsmith.cli.telling import Answer, answer_line
from draftsmith.cli.writing import AnswerWriter, legend, wants_color
from draftsmith.errors import OptionError, PromptError

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine


def run(options: GenerateOptions) -> int:
    """Run the command; returns the exit code."""
    prompt = _prompt(options)
    settings = request_settings(options)
    engine = load_engine(options, drafter=options.drafter)
    color = not options.json and wants_color(options.color, sys.stdout)
    writer = None if options.json else AnswerWriter(engine.tokenizer, color=color)
    answer, interrupted = _answer(engine, prompt, settings, writer, Answer(rule=options.rule))
    if writer is None:
        head = {
            "model": options.model,
            "drafter": engine.drafter_name,
            "controller": engine.controller_name,
            "prompt_tokens": len(engine.encode(prompt)),
        }
        print(json.dumps({**head, **answer.as_json()}, ensure_ascii=False))
    else:
        writer.end()
        if color:
            print(legend(), file=sys.stderr)
    print(answer_line(answer), file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _answer(
    engine: Engine, prompt: Any, settings: dict[str, Any], writer: AnswerWriter | None, answer: Answer
) -> tuple[Answer, bool]:
    interrupted = False
    stream = engine.stream(prompt, **settings)
    try:
        for event in answer.timed(stream):
            if writer is not None:
                writer.write(event)
    except KeyboardInterrupt:
        answer.finish_reason = "interrupted"
        interrupted = True
    answer.close(engine.take_events())
    return answer, interrupted


def _prompt(options: GenerateOptions) -> str | list[dict[str, str]]:
    from_stdin = options.prompt == "-"
    text = _stdin_text() if from_stdin else checked_text(options.prompt, "the prompt")
    if not text.strip():
        where = "stdin held no prompt" if from_stdin else "the prompt is empty"
        raise PromptError(f'{where}; say something, for example draftsmith generate "Tell me a joke."')
    if options.raw:
        if options.system is not None:
            raise OptionError("--system needs the chat template; leave out --raw, or write the message into the prompt")
        return text
    messages = [{"role": "user", "content": text}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return messages


def _stdin_text() -> str:
    try:
        return checked_text(sys.stdin.read(), "stdin")
    except UnicodeDecodeError as error:
        raise PromptError("stdin is not UTF-8 text") from error
