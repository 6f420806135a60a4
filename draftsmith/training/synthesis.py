"""Texts that the target writes all by itself: the user's turns and its own answers.

Called by `data synth`. The user's turn is opened by the chat template and a few of our own words, and the target
writes it to its end (Magpie, arXiv 2406.08464, with openers for models too small to find subjects by themselves).
Invariant: a text is a function of the model, the settings and its number; no text depends on another.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from draftsmith.errors import OptionError, PromptError
from draftsmith.training.jobs import Job, Message, Reply, Request
from draftsmith.training.openers import FOLLOW_UP_REQUESTS, FOLLOW_UPS, KINDS, SYSTEMS, Kind
from draftsmith.training.sieve import loop_start
from draftsmith.training.subjects import SLOTS
from draftsmith.training.texts import Dropped, Text
from draftsmith.training.turns import Turns

_WITH_SYSTEM = 0.35
"""Share of texts with a system message of ours; the others have the template's own or none."""
_PASTED = 0.65
"""Share of passages pasted into the request; the others stand before it as the target's own answer."""
_PROMPT_TOP_P = 0.95
"""Of the user's turns: a wild token in a request leads the whole text astray."""
_MIN_PASSAGE = 40
"""Characters; less is nothing to summarise."""
_SENTENCE_END = re.compile(r"[.!?][\"')\]]?(?=\s|$)")
_SAMPLE = 160

_Answering: TypeAlias = Generator[Request, Reply, Reply]


@dataclass(frozen=True, kw_only=True)
class SynthesisOptions:
    """What texts are like.

    `temperature`, `top_p`: of sampled answers; `greedy`: share of texts whose answers are greedy instead.
    `prompt_temperature`: of what the target writes as the user. `max_new_tokens`: of an answer; `max_prompt_tokens`:
    of a user's turn. `second_turns`: share of texts that go on after the answer. `kinds`: of `openers.KINDS`, all
    when empty. Raises `OptionError`.
    """

    temperature: float = 0.7
    top_p: float = 1.0
    greedy: float = 0.5
    prompt_temperature: float = 0.8
    max_new_tokens: int = 384
    max_prompt_tokens: int = 160
    second_turns: float = 0.25
    kinds: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("greedy", "second_turns"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} is a share, from 0 to 1; got {getattr(self, name)}")
        for name in ("max_new_tokens", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.prompt_temperature > 0:
            raise OptionError(
                f"prompt_temperature must be above 0, got {self.prompt_temperature}: greedy prompts are all the same"
            )
        known = [kind.name for kind in KINDS]
        for name in self.kinds:
            if name not in known:
                raise OptionError(f"unknown kind {name!r}; known are {', '.join(known)}")

    def chosen(self) -> list[Kind]:
        """The kinds asked for."""
        return [kind for kind in KINDS if not self.kinds or kind.name in self.kinds]


def openers_digest() -> str:
    """What tells whether the openers and subjects are still those that texts were begun with."""
    everything = (KINDS, FOLLOW_UPS, FOLLOW_UP_REQUESTS, SYSTEMS, SLOTS)
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:16]


def jobs(turns: Turns, options: SynthesisOptions, first: int) -> Iterator[Job]:
    """The texts from number `first` on, without end."""
    number = first
    while True:
        yield _Writing(turns, options, number).job()
        number += 1


class _Unusable(Exception):
    """A text that cannot be finished; its text is the reason."""


@final
class _Writing:
    """One text while it is written."""

    def __init__(self, turns: Turns, options: SynthesisOptions, number: int) -> None:
        self._turns = turns
        self._options = options
        self._random = random.Random(f"{options.seed}/{number}")
        self._id = f"synth-{number:07d}"
        self._kind = self._random.choices(options.chosen(), [kind.weight for kind in options.chosen()])[0]
        is_greedy = self._random.random() < options.greedy
        self._temperature = 0.0 if is_greedy else options.temperature
        self._filled: dict[str, str] = {}
        self._messages: list[Message] = []
        self._answer_tokens = 0
        self._seed = 0

    def job(self) -> Job:
        """Write it: a passage where the kind wants one, the user's turn, the answer, perhaps a second of both."""
        try:
            reply = yield from self._first_turn()
            if reply.finish_reason == "stop" and self._random.random() < self._options.second_turns:
                reply = yield from self._second_turn(reply)
        except _Unusable as reason:
            said = next((message["content"] for message in self._messages if message["role"] == "user"), "")
            return Dropped(reason=str(reason), text_id=self._id, sample=said[:_SAMPLE])
        return Text(
            messages=self._messages,
            text_id=self._id,
            finish_reason=reply.finish_reason,
            temperature=self._temperature,
            seed=self._seed,
            answer_tokens=self._answer_tokens,
            details={"kind": self._kind.name},
        )

    def _first_turn(self) -> _Answering:
        draw, kind = self._random, self._kind
        systems = kind.systems or SYSTEMS
        if self._turns.takes_system and draw.random() < _WITH_SYSTEM:
            self._messages.append({"role": "system", "content": self._fill(draw.choice(systems))})
        said = draw.choice((*kind.openers, *kind.requests))
        if not kind.passages:
            yield from self._user_turn(self._fill(said), said in kind.requests)
            return (yield from self._answer())
        passage, is_there = yield from self._passage()
        # Pasted, it stands above a question that is still to be written, and mostly below a request.
        is_above = said not in kind.requests or draw.random() < 0.3
        self._filled["text"] = "your text" if is_there else f"the text {'above' if is_above else 'below'}"
        said_filled = self._fill(said)
        if not is_there:
            said_filled = f"{passage}\n\n{said_filled}" if is_above else f"{said_filled}\n\n{passage}"
        yield from self._user_turn(said_filled, said in kind.requests)
        return (yield from self._answer())

    def _second_turn(self, reply: Reply) -> _Answering:
        """What the user says next, and the answer to it; the text stays as it was where nothing comes of it."""
        before = list(self._messages)
        try:
            said = self._random.choice((*FOLLOW_UPS, *FOLLOW_UP_REQUESTS))
            yield from self._user_turn(self._fill(said), said in FOLLOW_UP_REQUESTS)
            return (yield from self._answer())
        except _Unusable:
            self._messages = before
            return reply

    def _passage(self) -> Generator[Request, Reply, tuple[str, bool]]:
        """A passage, and whether it now stands in the conversation as an answer of the target's."""
        request = self._fill(self._random.choice(self._kind.passages))
        is_said = self._random.random() >= _PASTED
        messages = [{"role": "user", "content": request}]
        reply = yield self._request(messages, self._options.max_new_tokens, self._temperature)
        reply = self._checked(reply)
        passage = reply.text.strip()
        if reply.finish_reason == "length":
            ends = [found.end() for found in _SENTENCE_END.finditer(passage)]
            passage, is_said = passage[: ends[-1]] if ends else passage, False
        if len(passage) < _MIN_PASSAGE:
            raise _Unusable("short passage")
        if is_said:
            self._messages += [*messages, {"role": "assistant", "content": reply.text}]
            self._answer_tokens += reply.num_tokens
        return passage, is_said

    def _user_turn(self, said: str, is_whole: bool) -> Generator[Request, Reply, None]:
        """What the user says; unless it is whole, the target writes on from it."""
        content, is_ended = said, True
        if not is_whole:
            options = self._options
            try:
                ids = self._turns.user_ids(self._messages, said)
            except PromptError as error:
                raise _Unusable(f"refused: {error}") from error
            reply = yield self._request(
                self._messages, options.max_prompt_tokens, options.prompt_temperature, ids=ids, top_p=_PROMPT_TOP_P
            )
            self._checked(reply)
            written, is_ended = self._turns.written(reply)
            content = (said + written).strip()
        if not content:
            raise _Unusable("empty prompt")
        self._messages.append({"role": "user", "content": content})
        if not is_ended:
            raise _Unusable("endless prompt")

    def _answer(self) -> _Answering:
        request = self._request(self._messages, self._options.max_new_tokens, self._temperature)
        reply = self._checked((yield request))
        if not reply.text.strip():
            raise _Unusable("empty answer")
        self._seed = request.seed
        self._messages.append({"role": "assistant", "content": reply.text})
        self._answer_tokens += reply.num_tokens
        return reply

    def _request(
        self,
        messages: Sequence[Message],
        max_new_tokens: int,
        temperature: float,
        *,
        ids: Sequence[int] | None = None,
        top_p: float | None = None,
    ) -> Request:
        return Request(
            messages=list(messages),
            ids=ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=self._options.top_p if top_p is None else top_p,
            seed=self._random.getrandbits(31),
        )

    def _fill(self, text: str) -> str:
        """A text with its braces filled; the same word for the same brace throughout a conversation."""
        return re.sub(r"\{(\w+)\}", lambda found: self._word(found[1]), text)

    def _word(self, name: str) -> str:
        if name not in self._filled:
            first = name.removesuffix("2")
            others = {self._filled.get(first), self._filled.get(f"{first}2")}
            if first == "number":
                word = str(self._random.choice((self._random.randint(2, 20), self._random.randint(2, 300))))
            else:
                word = self._random.choice([word for word in SLOTS[first] if word not in others])
            self._filled[name] = word
        return self._filled[name]

    def _checked(self, reply: Reply) -> Reply:
        """The reply without the loop it may end in: it then counts as cut."""
        if reply.error is not None:
            raise _Unusable(f"refused: {reply.error}")
        place = loop_start(reply.text)
        if place is None:
            return reply
        text = reply.text[:place].rstrip()
        return Reply(text=text, finish_reason="length", num_tokens=self._turns.num_tokens(text))
