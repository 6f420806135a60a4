"""A conversation as the target reads and writes it: token ids, and the user's turn opened for the target to fill.

Used by synthesis and by preparation. Invariant: ids of messages are those the engine feeds for the same messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from draftsmith.errors import PromptError, UnsupportedError
from draftsmith.models.chat import ChatTemplate
from draftsmith.models.tokenizer import Tokenizer
from draftsmith.training.jobs import Message, Reply

_SLOT = "Draftsmith-Slot-7391"


@final
class Turns:
    """One target's way with conversations. `takes_system`: its template has a place for a system message."""

    def __init__(self, chat: ChatTemplate, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        """Raises `UnsupportedError` for a template that does not show the user's text as it is."""
        self._chat = chat
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        user = [{"role": "user", "content": _SLOT}]
        _, after = self._around(user)
        ids = tokenizer.encode(after, special=True)
        is_mark = bool(ids) and tokenizer.is_special(ids[0])
        self._end_ids = eos_ids | ({ids[0]} if is_mark else frozenset())
        self._end_text = "" if is_mark else after.strip()
        self.takes_system = self._renders([{"role": "system", "content": "Be kind."}, *user])

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt for an answer to these messages. Raises `PromptError`."""
        return encode_rendered(self._tokenizer, self._chat.render(messages, add_generation_prompt=True))

    def num_tokens(self, text: str) -> int:
        """Tokens that a text takes."""
        return len(self._tokenizer.encode(text, special=False))

    def user_ids(self, messages: Sequence[Message], opener: str) -> list[int]:
        """The conversation so far and a user's turn that begins with `opener`, for the target to write on."""
        before, _ = self._around([*messages, {"role": "user", "content": _SLOT}])
        return encode_rendered(self._tokenizer, before + opener)

    def written(self, reply: Reply) -> tuple[str, bool]:
        """What was written of a user's turn, and whether the turn was ended."""
        assert reply.token_ids is not None
        text, is_ended = reply.text, reply.finish_reason == "stop"
        place = next((place for place, token in enumerate(reply.token_ids) if token in self._end_ids), None)
        if place is not None:
            text, is_ended = self._tokenizer.decode(reply.token_ids[:place]), True
        if self._end_text and self._end_text in text:
            text, is_ended = text.partition(self._end_text)[0], True
        return text, is_ended

    def _around(self, messages: Sequence[Message]) -> tuple[str, str]:
        """The template's text before and after the slot."""
        before, found, after = self._chat.render(messages, add_generation_prompt=False).rpartition(_SLOT)
        if not found:
            raise UnsupportedError("the chat template does not show the user's text as it is: give prompts of your own "
                                   "to `draftsmith data regenerate`")  # fmt: skip
        return before, after

    def _renders(self, messages: Sequence[Mapping[str, str]]) -> bool:
        try:
            self._around(messages)
        except PromptError:
            return False
        return True


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a rendered conversation, with a begin token where the tokenizer wants one and the template has none."""
    ids = tokenizer.encode(text, special=True)
    has_begin = not ids or ids[0] == tokenizer.bos_id
    return ids if has_begin or not tokenizer.add_bos or tokenizer.bos_id is None else [tokenizer.bos_id, *ids]
