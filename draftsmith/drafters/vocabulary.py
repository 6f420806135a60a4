"""Translation between a draft model's vocabulary and the target's.

Called by the standalone draft model. Two tokens are the same when they stand for the same bytes (special
tokens: the same spelling). Equal vocabularies translate for free, padded ones lose the padding, different
ones meet in their intersection (token-level intersection, Timor et al. 2502.05202). Invariant: a draft id
maps to at most one target id and back, and everything outside the map has probability 0.

Shape letters: V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftsmith.errors import VocabularyError


class VocabularyMap:
    """Target ids to draft ids and back.

    `is_identity`: the shared ids are 0 to `num_shared` - 1 on both sides, so token sequences are equal too.
    """

    def __init__(
        self, draft_ids: torch.Tensor, target_ids: torch.Tensor, target_size: int, *, tokenizers: tuple[Any, Any] | None
    ) -> None:
        """`draft_ids[i]` is `target_ids[i]` (int64, equal lengths). `tokenizers`: (target, draft), to re-encode."""
        self.num_shared = len(target_ids)
        # Equal ids alone are not enough: with gaps between them the ids in the gaps stand for different tokens.
        counted = torch.arange(self.num_shared)
        self.is_identity = torch.equal(target_ids, counted) and torch.equal(draft_ids, counted)
        self._draft_ids = draft_ids
        self._target_ids = target_ids
        self._target_size = target_size
        self._tokenizers = tokenizers
        self._to_draft = {} if self.is_identity else dict(zip(target_ids.tolist(), draft_ids.tolist(), strict=True))
        self._spelled: dict[int, tuple[int, ...]] = {}

    def logits_to_target(self, logits_U: torch.Tensor) -> torch.Tensor:
        """Draft logits [U] as logits [V] over the target's ids, minus infinity outside the shared tokens.

        A softmax of the result is the draft law renormalised on the intersection.
        """
        if self.is_identity and self.num_shared == self._target_size == len(logits_U):
            return logits_U
        logits_V = torch.full((self._target_size,), -torch.inf, dtype=logits_U.dtype, device=logits_U.device)
        if self.is_identity:
            logits_V[: self.num_shared] = logits_U[: self.num_shared]
        else:
            shared = logits_U.index_select(0, self._draft_ids.to(logits_U.device))
            logits_V.index_copy_(0, self._target_ids.to(logits_U.device), shared)
        return logits_V

    def tokens_to_draft(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Per target token the draft tokens that spell it: one when shared, several or none otherwise."""
        return [self._spell(token) for token in tokens]

    def _spell(self, token: int) -> tuple[int, ...]:
        if self.is_identity:
            return (token,) if token < self.num_shared else ()
        shared = self._to_draft.get(token)
        if shared is not None:
            return (shared,)
        spelled = self._spelled.get(token)
        if spelled is None:
            assert self._tokenizers is not None, "different vocabularies need both tokenizers"
            target, draft = self._tokenizers
            # A token that is half a character has no text of its own; the draft model does without it.
            text = target.token_bytes(token).decode("utf-8", "ignore")
            spelled = self._spelled[token] = tuple(draft.encode(text, special=False)) if text else ()
        return spelled


def map_vocabularies(target: Any, target_size: int, draft: Any, draft_size: int, draft_name: str) -> VocabularyMap:
    """The map between two tokenizers with `target_size` and `draft_size` logits.

    Raises `VocabularyError` when nothing is shared, or when a tokenizer is missing and the sizes differ.
    """
    if target is None or draft is None:
        if target_size != draft_size:
            raise VocabularyError(
                f"draft model {draft_name} has {draft_size} token ids, the target {target_size}, and without both "
                "tokenizers they cannot be matched; use a draft model of the same vocabulary"
            )
        shared = torch.arange(target_size)
        return VocabularyMap(shared, shared, target_size, tokenizers=None)
    target_texts = _texts(target, target_size)
    draft_texts = _texts(draft, draft_size)
    num_common = min(len(target_texts), len(draft_texts))
    if target_texts[:num_common] == draft_texts[:num_common]:
        # The same vocabulary, padded or extended differently: extra rows have probability 0.
        shared = torch.arange(num_common)
        return VocabularyMap(shared, shared, target_size, tokenizers=None)
    target_of = {text: token for token, text in enumerate(target_texts) if text}
    pairs = [(token, target_of[text]) for token, text in enumerate(draft_texts) if text and text in target_of]
    if not pairs:
        raise VocabularyError(
            f"draft model {draft_name} shares no token with the target; use a draft model of the same family"
        )
    draft_ids, target_ids = torch.tensor(pairs).T.contiguous()
    return VocabularyMap(draft_ids, target_ids, target_size, tokenizers=(target, draft))


def _texts(tokenizer: Any, num_rows: int) -> list[str]:
    return [tokenizer.normalized_token_text(token) for token in range(min(tokenizer.vocab_size, num_rows))]
