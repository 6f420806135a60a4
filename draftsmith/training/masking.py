"""From a conversation to token ids, with a mark on every token that the target would write itself.

Used by `training.prepare`. What belongs to an answer is found by rendering the messages up to it and with it, as the
engine does for each turn, and never by looking for marks in the text. Invariant: ids are those of a prompt the engine
would feed, followed by what the target answers; a template that does not go on from its own prompt is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from draftsmith.errors import PromptError
from draftsmith.models.chat import ChatTemplate
from draftsmith.models.tokenizer import Tokenizer
from draftsmith.training.texts import Text
from draftsmith.training.turns import encode_rendered

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A training text: ids, and for each whether the target writes it."""

    tokens: list[int]
    answer: list[bool]


class Unmasked(Exception):
    """A text that no mask can be made for; its text is the reason."""


@final
class Masker:
    """One target's template and vocabulary."""

    def __init__(self, chat: ChatTemplate, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids

    def mask(self, text: Text) -> list[Masked]:
        """The training texts of a conversation: one, or one per answer where the template rewrites the history.

        Raises `Unmasked`.
        """
        answers = [place for place, message in enumerate(text.messages) if message["role"] == "assistant"]
        if not answers:
            raise Unmasked("no answer")
        try:
            if self._keeps_history(text.messages, answers):
                return [self._masked(text, answers)]
            # What stood in an earlier turn looks otherwise later, so each answer is seen as it was asked for.
            return [self._masked(text, [place]) for place in answers]
        except PromptError as error:
            raise Unmasked(f"refused by the chat template: {error}") from error

    def _keeps_history(self, messages: Messages, answers: Sequence[int]) -> bool:
        """Whether the rendering of every prefix of the conversation is a prefix of its rendering."""
        rendered = [self._chat.render(messages[: place + 1], add_generation_prompt=False) for place in answers]
        whole = rendered[-1]
        return all(whole.startswith(part) for part in rendered)

    def _masked(self, text: Text, answers: Sequence[int]) -> Masked:
        """The conversation up to the last of `answers`, with those marked."""
        last = answers[-1]
        is_cut = text.finish_reason == "length" and last == len(text.messages) - 1
        whole = self._chat.render(text.messages[: last + 1], add_generation_prompt=False)
        tokens = encode_rendered(self._tokenizer, whole)
        answer = [False] * len(tokens)
        end = len(tokens)
        for place in answers:
            prompt = self._chat.render(text.messages[:place], add_generation_prompt=True)
            if not whole.startswith(prompt):
                raise Unmasked("the chat template does not go on from its own prompt")
            start = self._num_tokens(prompt, tokens)
            end = self._num_tokens(whole[: _content_end(text.messages[place]["content"], whole, len(prompt))], tokens)
            ends_itself = end < len(tokens) and tokens[end] in self._eos_ids
            if ends_itself and not (is_cut and place == last):
                end += 1
            answer[start:end] = [True] * (end - start)
        return Masked(tokens=tokens[:end], answer=answer[:end])

    def _num_tokens(self, beginning: str, tokens: Sequence[int]) -> int:
        """How many of a conversation's tokens its beginning takes; one across the border belongs to what follows."""
        return _common_len(encode_rendered(self._tokenizer, beginning), tokens)


def _content_end(content: str, whole: str, start: int) -> int:
    """Where an answer ends in the rendered conversation. Raises `Unmasked`."""
    for said in (content, content.strip()):
        found = whole.find(said, start)
        if found >= 0:
            return found + len(said)
    raise Unmasked("the chat template rewrites the answer")


def _common_len(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
