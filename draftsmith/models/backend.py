"""The contract of a backend: score packed new rows of several sequences in one forward.

Called by the engine (target) and by standalone draft models. Nothing above `models` may know which
backend runs. Prompt chunk, plain decode and verification are one act: append rows, later
`cache.keep` some of them.

Shape letters: N packed rows, R logit rows of one sequence, V vocabulary, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from draftsmith.models.kv_cache import KVCache
from draftsmith.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The new rows of one sequence in this step.

    `tokens`: the rows' tokens. `parents[i] < i`: the row that row i hangs below, -1 for the sequence's
    last committed row; a row sees all committed rows and its ancestors, and its position is the
    committed length plus its depth. `first_logit`: logits are wanted from this row on
    (`len(tokens)`: none).
    """

    sequence_id: int
    tokens: Sequence[int]
    parents: Sequence[int]
    first_logit: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Result of one forward, per group: logits [R, V] in float32 (float64 for a float64 model), taps [rows, D]."""

    logits: Sequence[torch.Tensor]
    taps: Sequence[Mapping[int | str, torch.Tensor]]


class Backend(ABC):
    """A decoder with weights and a KV cache."""

    spec: DecoderSpec
    cache: KVCache

    @abstractmethod
    def score(self, groups: Sequence[RowGroup], taps: frozenset[int | str] = frozenset()) -> Scored:
        """Append the rows of each group to its sequence as speculative rows and score them.

        The cache's `reserve` must have made room. Afterwards `cache.keep(sequence_id, path)` keeps the
        rows named by `path` (indices into the group, ascending, a root-to-node path) and drops the rest.
        """

    def check_request(self, groups: Sequence[RowGroup], taps: frozenset[int | str]) -> None:
        """Assert what every backend asks of a call of `score`: rows in each group, logits of these, taps that exist."""
        assert all(len(group.tokens) for group in groups), "a group without rows"
        for group in groups:
            first, last = group.first_logit, len(group.tokens)
            assert 0 <= first <= last, f"logits are wanted from row {first} on, of {last} rows"
        unknown = taps - set(range(self.spec.num_layers + 1)) - {"last_hidden"}
        assert not unknown, f"unknown taps {sorted(map(str, unknown))}"

    @abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [N, D] of tokens (int64, [N]) as the first layer gets them, float32, for trained drafters."""

    @abstractmethod
    def head_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """The head's weights [N, D] of tokens (int64, [N]), float32: logits are `last_hidden` times them.

        A model's soft cap on logits (`spec.logit_cap`) comes after that.
        """

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes held by the weights."""
