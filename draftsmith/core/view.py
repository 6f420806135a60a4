"""What a drafter or controller may see of one live sequence.

Owned and updated by the engine, read by drafters. Invariant: `tokens[-1]` is the root; every token in
`tokens` has been emitted or belongs to the prompt, nothing speculative ever appears here.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler


@dataclass(slots=True)
class SequenceView:
    """One live sequence. Read-only for everybody but the engine.

    `tokens`: prompt and emitted tokens, root last (the engine's own list: never mutate, never keep).
    `sampler`: the request's sampling transforms, bound to this sequence's history.
    `random`: the request's noise source.
    """

    sequence_id: int
    tokens: list[int]
    prompt_len: int
    sampler: Sampler
    random: RequestRandom

    @property
    def root(self) -> int:
        """The last emitted token."""
        return self.tokens[-1]

    @property
    def position(self) -> int:
        """Output position of the next token to be emitted (0 for the first)."""
        return len(self.tokens) - self.prompt_len
