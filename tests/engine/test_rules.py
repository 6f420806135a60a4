"""The law of what the whole engine emits, for every rule: chi-square against the exact law of the model.

A tiny model with a vocabulary of 6 drafts for another; requests come in one batch per rule, each with its own
seed. The first three tokens together are compared with their exact joint law, computed by scoring every
continuation. Each test raises a false alarm with probability at most 1e-6 (seeds are fixed, so a green test stays
green); `test_the_tests_have_power` shows that they would notice a wrong law.
"""

import functools
import itertools

import numpy as np
import pytest
import torch

from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Verdict
from draftsmith.engine import step as engine_step
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel
from draftsmith.engine.params import GenerationParams
from draftsmith.models.backend import RowGroup
from tests.core.checks import assert_law
from tests.engine.fakes import ByteTokenizer
from tests.models.fakes import tiny_backend

VOCAB = 6
DEPTH = 3
PROMPT = [1, 4, 2]
NUM_REQUESTS = 600
CHAIN, TREE = "draft_model:model=draft:max_draft=3", "draft_model:model=draft:tree=2x2"
PAIRS = [
    ("coupling", CHAIN),
    ("coupling", TREE),
    ("match", CHAIN),
    ("match", TREE),
    ("chain", CHAIN),
    ("block", CHAIN),
    ("recursive", CHAIN),
    ("recursive", TREE),
    ("traversal", CHAIN),
    ("traversal", TREE),
]
FILTERS = {"top_k": 5, "top_p": 0.95}


class _Digits(ByteTokenizer):
    vocab_size = VOCAB
    eos_ids = frozenset()


def small_model(seed):
    """Two layers of width 16 over six tokens, without an end token."""
    backend = tiny_backend(
        seed, vocab_size=VOCAB, width=16, num_heads=2, num_kv_heads=1, mlp_width=16, num_layers=1, max_context=64
    )
    return LoadedModel(
        name="small", backend_name="reference", backend=backend, tokenizer=_Digits(), chat=None, eos_ids=frozenset()
    )


def small_engine(drafter):
    settings = EngineSettings(
        drafter=drafter,
        controller="fixed:num_draft=6",
        memory_bytes=1 << 30,
        max_batch=64,
        prefix_cache=False,
    )
    return Engine(small_model(3), settings, load=lambda name: small_model(4))


@functools.cache
def exact_law(**params):
    """Probability of every sequence of `DEPTH` tokens after the prompt."""
    backend = small_model(3).backend
    settings = GenerationParams.create(temperature=1.0, **params)
    law = {(): 1.0}
    for depth in range(DEPTH):
        longer = {}
        for tokens, prob in law.items():
            ids = [*PROMPT, *tokens]
            backend.cache.open(0)
            backend.cache.reserve(0, len(ids))
            row_V = backend.score([RowGroup(0, ids, range(-1, len(ids) - 1), len(ids) - 1)]).logits[0][0]
            backend.cache.close(0)
            sampler = Sampler(settings.sampling, PROMPT, frozenset(), VOCAB)
            sampler.append(tokens)
            longer.update({(*tokens, t): prob * p for t, p in enumerate(sampler.law(row_V).tolist())})
        law = longer
        assert len(law) == VOCAB ** (depth + 1)
    return law


def draws(engine, num_requests, **params):
    """The first `DEPTH` tokens of as many requests, each with its own seed, all in flight together."""
    streams = [
        engine.stream(PROMPT, max_new_tokens=12, temperature=1.0, seed=seed, **params) for seed in range(num_requests)
    ]
    found = []
    for stream in streams:
        tokens = []
        while len(tokens) < DEPTH:
            tokens += next(stream).token_ids
        stream.close()
        found.append(tuple(tokens[:DEPTH]))
    return found


@pytest.mark.parametrize(
    ("rule", "drafter", "filters"),
    [
        *((rule, drafter, FILTERS) for rule, drafter in PAIRS),
        ("coupling", TREE, {}),
        ("block", CHAIN, {}),
        ("recursive", TREE, {}),
        ("traversal", TREE, {}),
    ],
)
def test_the_law_of_three_tokens_is_the_models(rule, drafter, filters):
    """Conformance 20, 21 and 23 (transformers#28508, DeepSpec#31, vllm#10198)."""
    engine = small_engine(drafter)
    found = draws(engine, NUM_REQUESTS, rule=rule, **filters)
    log = engine.take_events()
    accepted = sum(record.accepted for record in log.requests)
    assert accepted > NUM_REQUESTS / 2, "too little was accepted to tell anything"
    assert sum(record.drafted for record in log.requests) > 1.5 * accepted
    assert_law(found, exact_law(**filters), f"{rule} with {drafter}")


def test_rules_with_penalties_have_the_penalised_law():
    """Conformance 25 and 26: the law of row i is the one after the drafts before it."""
    params = {"repetition_penalty": 1.5, "presence_penalty": 0.5}
    assert_law(draws(small_engine(TREE), NUM_REQUESTS, rule="traversal", **params), exact_law(**params), "penalised")


def test_samples_of_one_request_are_independent():
    """Pairs of first tokens of the two samples of a request have the product law, under a ratio rule too."""
    first = {}
    for tokens, prob in exact_law().items():
        first[tokens[0]] = first.get(tokens[0], 0.0) + prob
    pairs = {(a, b): first[a] * first[b] for a, b in itertools.product(range(VOCAB), repeat=2)}
    for rule, drafter in (("coupling", CHAIN), ("recursive", TREE)):
        engine = small_engine(drafter)
        found = [
            engine.generate(PROMPT, max_new_tokens=2, temperature=1.0, seed=seed, n=2, rule=rule).samples
            for seed in range(400)
        ]
        assert_law([tuple(sample.token_ids[0] for sample in pair) for pair in found], pairs, f"samples, {rule}")


WRONG = ["accept what was drafted", "emit the target's token after a rejection", "verify without the filters"]


@pytest.mark.parametrize("fault", WRONG)
def test_the_tests_have_power(fault, monkeypatch):
    """Three classic faults in the engine's verification are each noticed with the same number of requests."""
    real = engine_step.verify

    def verify(proposal, logits_TV, sampler, random, position):
        verdict = real(proposal, logits_TV, sampler, random, position)
        tree = proposal.tree
        if fault == WRONG[0] and tree.num_drafted and not verdict.path:
            noise_V = random.target_gumbel(position + 1, VOCAB)
            return Verdict((1,), (tree.tokens[1], sampler.sample(logits_TV[1], noise_V, tree.tokens[1:2])))
        if fault == WRONG[1] and len(verdict.path) < tree.num_drafted:
            last = verdict.path[-1] if verdict.path else 0
            noise_V = random.residual_gumbel(position, last, VOCAB)
            law_V = sampler.law(logits_TV[last], verdict.tokens[:-1]).numpy()
            with np.errstate(divide="ignore"):
                return Verdict(verdict.path, (*verdict.tokens[:-1], int((np.log(law_V) + noise_V).argmax())))
        return verdict

    if fault == WRONG[2]:
        law = Sampler.law

        def unfiltered(self, logits_V, path=()):
            return torch.softmax(logits_V, dim=-1) if len(path) else law(self, logits_V, path)

        monkeypatch.setattr(Sampler, "law", unfiltered)
        expected = dict(exact_law.__wrapped__(**FILTERS))
    else:
        monkeypatch.setattr(engine_step, "verify", verify)
        expected = exact_law(**FILTERS)
    with pytest.raises(AssertionError, match=r"chi-square|impossible"):
        assert_law(draws(small_engine(CHAIN), NUM_REQUESTS, rule="chain", **FILTERS), expected, fault)
