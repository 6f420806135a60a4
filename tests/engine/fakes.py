"""A byte tokenizer and a tiny model for engine tests: answers in milliseconds, no files.

The tokenizer has one token per byte (ids 0 to 255), then `<eos>` (256) and padding up to the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from draftsmith.core.types import Proposal, Tree
from draftsmith.drafters.base import Drafter
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel
from tests.models.fakes import tiny_backend

EOS = 256
VOCAB = 260


class ByteTokenizer:
    """Every byte is a token; what the engine needs of `models.tokenizer.Tokenizer`."""

    vocab_size = VOCAB
    eos_ids = frozenset({EOS})
    bos_id = None
    add_bos = False
    strips_leading_space = False

    def encode(self, text, *, special):
        return list(text.encode())

    def decode(self, ids):
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b""

    def is_special(self, token):
        return token >= 256

    def token_text(self, token):
        return f"<{token}>"

    def normalized_token_text(self, token):
        return f"<{token}>"

    def id_of(self, text):
        return None


def tiny_model(seed=0, dtype=torch.float64, **spec):
    backend = tiny_backend(seed, dtype=dtype, vocab_size=VOCAB, **spec)
    return LoadedModel(
        name="tiny",
        backend_name="reference",
        backend=backend,
        tokenizer=ByteTokenizer(),
        chat=None,
        eos_ids=frozenset({EOS}),
    )


def tiny_engine(seed=0, dtype=torch.float64, spec=None, draft_seed=1, **settings):
    """An engine over a tiny random model; `draft_model:model=tiny` loads another of the same vocabulary."""
    settings.setdefault("drafter", "none")
    settings.setdefault("controller", "fixed")
    settings.setdefault("memory_bytes", 1 << 28)
    spec = spec or {}
    return Engine(
        tiny_model(seed, dtype, **spec),
        EngineSettings(**settings),
        load=lambda name: tiny_model(draft_seed if name == "other" else seed, dtype, **spec),
    )


@dataclass(frozen=True, kw_only=True)
class OracleOptions:
    """`wrong_every`: every so many-th drafted token is wrong (0: never). `tree`: add a wrong sibling first."""

    wrong_every: int = 0
    tree: bool = False


class OracleDrafter(Drafter):
    """Knows the outputs it was told and proposes them, right or deliberately wrong: makes long accepted blocks."""

    Options = OracleOptions
    known: ClassVar[list[list[int]]] = []

    def __init__(self, options):
        self._options = options
        self._count = 0
        self.forgotten = []

    @classmethod
    def create(cls, options, target):
        return cls(options)

    def propose(self, views, budgets, keep_drafting):
        return [self._one(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _one(self, view, budget):
        tokens = view.tokens
        match = next((text for text in self.known if text[: len(tokens)] == tokens), None)
        if match is None:
            return Proposal.empty(view.root)
        tree_tokens, parents, last = [view.root], [-1], 0
        for token in match[len(tokens) :]:
            self._count += 1
            if self._options.tree and len(tree_tokens) + 1 <= budget:
                tree_tokens.append((token + 1) % VOCAB)
                parents.append(last)
            if len(tree_tokens) > budget:
                break
            wrong = self._options.wrong_every and self._count % self._options.wrong_every == 0
            tree_tokens.append((token + 2) % VOCAB if wrong else token)
            parents.append(last)
            last = len(tree_tokens) - 1
        return Proposal(Tree(tuple(tree_tokens), tuple(parents)))

    def forget(self, sequence_id):
        self.forgotten.append(sequence_id)


class FailingDrafter(OracleDrafter):
    """Breaks in the middle of a step."""

    def propose(self, views, budgets, keep_drafting):
        raise RuntimeError("this drafter is broken")
