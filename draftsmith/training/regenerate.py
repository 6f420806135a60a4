"""Answers of the target to prompts that somebody else wrote.

Called by `data regenerate`. Invariant: every conversation gives a text, or the reason why there is none; answers that
a file of prompts held are never among its messages.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from draftsmith.training.jobs import Job, Message, Request
from draftsmith.training.texts import Dropped, Text

_SAMPLE = 160


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The user's side. `max_new_tokens`: its own limit on each answer, None for the run's."""

    text_id: str
    turns: Sequence[str]
    system: str | None = None
    category: str = ""
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are drawn. `seed`: of the run; each answer has one of its own."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0


def jobs(conversations: Iterable[Conversation], options: AnswerOptions, first: int) -> Iterator[Job]:
    """A job for each conversation; `first`: the number of the first of them."""
    for number, conversation in enumerate(conversations, first):
        yield _job(conversation, options, random.Random(f"{options.seed}/{number}"))


def _job(conversation: Conversation, options: AnswerOptions, draw: random.Random) -> Job:
    """Turn by turn. An answer that was cut, or is none, ends the conversation: what follows would not fit it."""
    messages: list[Message] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    num_tokens = answered = 0
    finish_reason, seed, problem = "stop", 0, ""
    for turn in conversation.turns:
        asked = [*messages, {"role": "user", "content": turn}]
        seed = draw.getrandbits(31)
        reply = yield Request(
            messages=asked,
            max_new_tokens=conversation.max_new_tokens or options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=seed,
        )
        problem = f"refused: {reply.error}" if reply.error else "" if reply.text else "empty answer"
        if problem:
            break
        messages = [*asked, {"role": "assistant", "content": reply.text}]
        num_tokens += reply.num_tokens
        answered += 1
        finish_reason = reply.finish_reason
        if finish_reason == "length":
            break
    if not answered:
        return Dropped(reason=problem, text_id=conversation.text_id, sample=conversation.turns[0][:_SAMPLE])
    missing = {"unanswered_turns": len(conversation.turns) - answered} if answered < len(conversation.turns) else {}
    return Text(
        messages=messages,
        text_id=conversation.text_id,
        finish_reason=finish_reason,
        temperature=options.temperature,
        seed=seed,
        answer_tokens=num_tokens,
        details={"category": conversation.category, **missing, **({"problem": problem} if problem else {})},
    )
