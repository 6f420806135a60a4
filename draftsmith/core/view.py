"""What a drafter or controller may see of one live sequence.

Owned and updated by the engine, read by drafters. Invariant: `tokens[-1]` is the root; every token in
`tokens` has been emitted or belongs to the prompt, nothing speculative ever appears here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.core.inexact import InexactRule
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Law


@dataclass(slots=True)
class SequenceView:
    """One live sequence. Read-only for everybody but the engine.

    `tokens`: prompt and emitted tokens, root last (the engine's own list: never mutate, never keep).
    `sampler`: the request's sampling transforms, bound to this sequence's history.
    `random`: the request's noise source. `memory`: what an inexact rule remembers of the request's steps.
    """

    sequence_id: int
    tokens: list[int]
    prompt_len: int
    sampler: Sampler
    random: RequestRandom
    memory: Any = None

    @property
    def root(self) -> int:
        """The last emitted token."""
        return self.tokens[-1]

    @property
    def position(self) -> int:
        """Output position of the next token to be emitted (0 for the first)."""
        return len(self.tokens) - self.prompt_len

    def goes_on(self, law: Law) -> bool:
        """Whether the request's rule wants a further token, to be drawn from `law`, after a draft's first."""
        rule = self.sampler.params.rule
        return not isinstance(rule, InexactRule) or rule.goes_on(law, self.memory)
