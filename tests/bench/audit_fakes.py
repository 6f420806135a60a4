"""A target with a vocabulary of a dozen tokens, engines over it, and the audit of them: milliseconds an answer.

Used by the audit's tests and its measurements. The vocabulary is spelled "abcdefghij", then `<eos>` and one more
special token.
"""

from __future__ import annotations

import numpy as np
import torch

from draftsmith.bench.audit import PENALTIES, Audit, AuditPlan, Case
from draftsmith.bench.audit_subject import EngineAudited, Target, plain_of
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel
from draftsmith.models.reference import ReferenceBackend
from tests.engine.fakes import ByteTokenizer
from tests.models.fakes import tiny_spec, tiny_weights

LETTERS = "abcdefghij"
EOS = 10
VOCAB = 12
PROMPTS = [[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 0, 1, 5, 3, 8], [3], [7, 7, 4, 1]]


class LetterTokenizer(ByteTokenizer):
    """One token per letter."""

    vocab_size = VOCAB
    eos_ids = frozenset({EOS})

    def encode(self, text, *, special):
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[token] for token in ids if token < EOS)

    def token_bytes(self, token):
        return LETTERS[token].encode() if token < EOS else b""

    def is_special(self, token):
        return token >= EOS


SEED = 5


def small_model(seed=SEED, *, ties=False, sharpness=1.5, near=None):
    """A random decoder. `ties` gives pairs of letters the same head, so that their logits are equal.

    `near`: mix in the weights of another seed, for a draft model that is often right.
    """
    spec = tiny_spec(
        vocab_size=VOCAB, num_layers=1, width=16, num_heads=2, num_kv_heads=1, mlp_width=16, tied_head=False
    )
    weights = tiny_weights(spec, seed)
    if near is not None:
        others = tiny_weights(spec, near)
        weights = {name: 0.9 * own + 0.3 * others[name] for name, own in weights.items()}
    head = weights["lm_head.weight"]
    head *= sharpness
    if ties:
        head[1:EOS:2] = head[0:EOS:2]
    backend = ReferenceBackend.from_weights(spec, weights.__getitem__, dtype=torch.float64)
    return LoadedModel(
        name="small",
        backend_name="reference",
        backend=backend,
        tokenizer=LetterTokenizer(),
        chat=None,
        eos_ids=frozenset({EOS}),
    )


def law_model(probs):
    """A model for which every token is followed by the same law."""
    vocab, width = len(probs), 16
    spec = tiny_spec(
        vocab_size=vocab, num_layers=1, width=width, num_heads=2, num_kv_heads=1, mlp_width=16, tied_head=False
    )
    weights = {name: torch.zeros_like(value) for name, value in tiny_weights(spec, 0).items()}
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    weights["model.norm.weight"][:] = 1.0
    # The norm makes 4 of the 1 (the root of the width).
    weights["lm_head.weight"][:, 0] = torch.tensor(probs, dtype=torch.float64).log() / width**0.5
    backend = ReferenceBackend.from_weights(spec, weights.__getitem__, dtype=torch.float64)
    return LoadedModel(
        name="law",
        backend_name="reference",
        backend=backend,
        tokenizer=LetterTokenizer(),
        chat=None,
        eos_ids=frozenset(),
    )


def random_laws(vocab, seed, spread=1.0):
    """A law for the target and one for the drafter."""
    generator = np.random.default_rng([vocab, seed])
    weights = [np.exp(spread * generator.normal(size=vocab)) for _ in range(2)]
    return [(each / each.sum()).tolist() for each in weights]


SMALL_CASES = (
    Case(name="greedy", settings={}),
    Case(name="greedy, penalties", settings=PENALTIES),
    Case(name="T 1", settings={"temperature": 1.0}),
    Case(name="T 0.8, top-k 4", settings={"temperature": 0.8, "top_k": 4}),
    Case(name="T 1, top-p 0.9, penalties", settings={"temperature": 1.0, "top_p": 0.9, "min_tokens": 6, **PENALTIES}),
)


def small_audit(
    drafter="draft_model:model=near",
    rule="coupling",
    *,
    seed=0,
    controller="fixed:num_draft=4",
    cases=SMALL_CASES,
    prompts=PROMPTS,
    ties=False,
    laws=None,
    **plan,
):
    """An audit of a small engine, not run yet. Draft models: "same", "near" and "other".

    `laws`: those of a target and a drafter ("other") over a vocabulary of their own.
    """
    model = law_model(laws[0]) if laws else small_model(ties=ties)
    settings = EngineSettings(drafter=drafter, controller=controller, memory_bytes=1 << 28, max_batch=8)
    engine = Engine(model, settings, load=lambda name: law_model(laws[1]) if laws else _draft_model(name, ties))
    plain = Engine(model, EngineSettings(drafter="none", controller="fixed", memory_bytes=1 << 28, prefix_cache=False))
    cases = [
        Case(name=case.name, settings={**case.settings, **({} if case.is_greedy else {"rule": rule})}) for case in cases
    ]
    return Audit(
        AuditPlan(
            subject=f"small, {drafter}, {rule}",
            cases=cases,
            same_ids=rule in ("coupling", "match"),
            **{"max_new_tokens": 24, "seed": seed, "budget": 60_000, **plan},
        ),
        EngineAudited(engine, drafter),
        plain_of(plain),
        Target(model),
        [[token % len(laws[0]) if laws else token for token in prompt] for prompt in prompts],
    )


def _draft_model(name, ties):
    if name == "other":
        return small_model(2, ties=ties)
    return small_model(near=1 if name == "near" else None, ties=ties)
