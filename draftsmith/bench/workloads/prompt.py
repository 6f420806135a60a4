"""The noun of a workload: one prompt, which is one conversation.

Made by the readers beside it and by `lengths`; used by everything in `bench`. Invariant: there is a turn, and
every text of a prompt is one that can be written as UTF-8 and is not blank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from draftsmith.errors import PromptError


@final
@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The user's side of one conversation.

    `turns`: what the user says, in order; each but the first follows the engine's own answer to the one before.
    `category` is empty where the data has none. `max_new_tokens`: its own limit on each answer; None is the run's.
    """

    prompt_id: str
    turns: tuple[str, ...]
    system: str | None = None
    category: str = ""
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.turns:
            raise PromptError("the prompt has no turns")
        for number, turn in enumerate(self.turns, 1):
            check_text(turn, "the prompt" if len(self.turns) == 1 else f"turn {number} of the prompt")
        if self.system is not None:
            check_text(self.system, "the system message")
        for name, value in (("id", self.prompt_id), ("category", self.category)):
            if not is_text(value):
                raise PromptError(f"the {name} holds half a character (an unpaired surrogate)")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise PromptError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


def check_text(text: str, name: str) -> None:
    """Raise `PromptError` unless `text` says something and can be encoded."""
    if not text.strip():
        raise PromptError(f"{name} is empty")
    if not is_text(text):
        raise PromptError(f"{name} holds half a character (an unpaired surrogate)")


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it: JSON's escapes can spell halves of characters, and those no file or model takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def mended(text: str) -> str:
    """The text with halves of characters put together where they belong to each other, else replaced by U+FFFD."""
    return text if is_text(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
