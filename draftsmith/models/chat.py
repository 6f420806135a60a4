"""Chat templates: from messages to the text a model was trained to answer.

Called by the engine for list prompts and by the command line. Templates are Jinja text that comes with
the model, so they run in the sandbox and see plain data only. Invariant: a rendered prompt equals what
transformers' `apply_chat_template` renders for the same messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftsmith.errors import ModelFileError, PromptError

ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


class ChatTemplate:
    """One model's template."""

    def __init__(self, template: str | None, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: "bos_token", "eos_token", ... -> spelling, as `Tokenizer.special_tokens` has them.

        Raises `ModelFileError` when the template is not valid Jinja. A model without a template refuses to
        render, not to load.
        """
        self._special_tokens = dict(special_tokens)
        self._template = None if template is None else _compile(template)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation; `add_generation_prompt` opens the assistant's turn.

        Raises `PromptError` for messages that are malformed or that the template refuses, and when the
        model has no template.
        """
        if self._template is None:
            raise PromptError("this model has no chat template; give the prompt as plain text (--raw)")
        checked = _check_messages(messages)
        try:
            return self._template.render(
                messages=checked,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        # A template is a program: it may stop by `raise_exception`, or fail on what it did not expect.
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"the chat template refuses these messages: {reason}") from error


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    """Plain copies of the messages, each checked."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise PromptError("messages must be a non-empty list of {'role': ..., 'content': ...}")
    return [_check_message(message, number) for number, message in enumerate(messages, start=1)]


def _check_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"message {number} is {type(message).__name__}, must be {{'role': ..., 'content': ...}}")
    unknown = [key for key in message if key not in KEYS]
    if unknown:
        raise PromptError(f"message {number} has the unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"message {number} has the role {role!r}; known: {', '.join(ROLES)}")
    # Templates handle a missing key; a None they would print.
    checked = {key: value for key, value in message.items() if value is not None}
    if "content" in checked:
        checked["content"] = _text_of(checked["content"], number)
    elif not checked.get("tool_calls"):
        raise PromptError(f"message {number} ({role}) has no content")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(checked))
    except (TypeError, ValueError) as error:
        raise PromptError(f"message {number} holds a value that is no plain data: {error}") from error
    return plain


def _text_of(content: Any, number: int) -> str:
    """A message's text, written as a string or as a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise PromptError(f"the content of message {number} is {type(content).__name__}, must be text")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(f"message {number} has a content part of type {kind!r}; only text parts are supported")
        texts.append(part["text"])
    return "".join(texts)


def _compile(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise ModelFileError(
            f"the model's chat template is not valid Jinja: line {error.lineno}: {error.message}"
        ) from error
    except (TemplateError, RecursionError) as error:
        raise ModelFileError(f"the model's chat template is not valid Jinja: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, for training masks; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own convention)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML signs, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
