"""Standalone draft models: laws, caches, limits. Equality with plain decoding is in test_contract."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from draftsmith.core.sampling import SamplingParams
from draftsmith.core.tree import is_chain, path_tokens
from draftsmith.core.types import ProposalKind, Rule
from draftsmith.errors import OptionError
from tests.drafters.loop import (
    TABLE,
    TableBackend,
    always,
    loaded,
    make,
    near_table,
    random_table,
    run,
    target_info,
    view_of,
)
from tests.models.fakes import tiny_backend

CHAIN = "draft_model:model=near"
TREE = "draft_model:model=near:tree=2x2:max_draft=6"
SMALL = 5


def small_info(seed=1, noise=0.8):
    """A target of five tokens and a draft model that differs from it a good deal."""
    table = random_table(SMALL, 4, sharpness=1.0)
    return TableBackend(table), target_info({"near": loaded(near_table(table, seed, noise), None)}, None, SMALL)


def joint(table, params, root, length):
    """Exact probabilities of the next `length` tokens of a Markov target, flat [V ** length]."""
    view = view_of([root], vocab_size=SMALL, params=params)
    probs = np.ones(1)
    last = np.array([root])
    laws = np.stack([view.sampler.law(table[token]).numpy() for token in range(SMALL)])
    for _ in range(length):
        probs = (probs[:, None] * laws[last]).reshape(-1)
        last = np.tile(np.arange(SMALL), len(last))
    return probs


def p_value(expected, counts):
    """Chi-square of counts against probabilities; cells expecting fewer than 8 are pooled."""
    expected = expected * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = expected < 8
    pooled = np.append(expected[~rare], expected[rare].sum())
    seen = np.append(counts[~rare], counts[rare].sum())
    keep = pooled > 0
    return stats.chisquare(seen[keep], pooled[keep]).pvalue


def unsure(confidence):
    """Stops where the draft model is unsure, which must not change the law."""
    return confidence > 0.45


@pytest.mark.parametrize(
    ("rule", "text", "keep_drafting"),
    [
        (Rule.CHAIN, CHAIN, always),
        (Rule.BLOCK, CHAIN, unsure),
        (Rule.RECURSIVE, TREE, unsure),
        (Rule.TRAVERSAL, TREE, always),
        (Rule.TRAVERSAL, CHAIN, unsure),
        (Rule.MATCH, TREE, always),
        (Rule.COUPLING, CHAIN, unsure),
    ],
)
def test_the_law_of_three_tokens_is_the_targets(rule, text, keep_drafting):
    """False alarm: seven tests at 1e-5 each."""
    target, info = small_info()
    params = SamplingParams(temperature=0.9, top_p=0.95, rule=rule)
    counts = np.zeros(SMALL**3)
    drafted = accepted = 0
    drafter = make(text, info)
    for start in range(0, 2000, 100):
        result = run(
            target, drafter, [[2]] * 100, 3, params, budget=lambda step: 6, seed=start, keep_drafting=keep_drafting
        )
        for tokens in result.emitted.values():
            counts[(tokens[0] * SMALL + tokens[1]) * SMALL + tokens[2]] += 1
        drafted += result.drafted
        accepted += result.accepted
    assert p_value(joint(target.table, params, 2, 3), counts) > 1e-5
    assert 0.15 * drafted < accepted < 0.95 * drafted


def test_the_recorded_law_is_the_samplers_on_the_draft_logits():
    """Conformance SAMP (vllm#10198), PEN (vllm#19482): filters and penalties see each node's own path."""
    _, info = small_info()
    drafter = make(TREE, info)
    table = info.load_model("near").backend.table
    params = SamplingParams(
        temperature=0.7, top_k=4, repetition_penalty=1.5, frequency_penalty=0.8, banned_ids=frozenset({3}),
        rule=Rule.TRAVERSAL,
    )  # fmt: skip
    view = view_of([0, 1, 4, 2], 2, params=params, vocab_size=SMALL)
    proposal = drafter.propose([view], [6], always)[0]
    assert proposal.kind is ProposalKind.WITHOUT_REPLACEMENT
    for node in set(proposal.tree.parents[1:]):
        expected = view.sampler.law(table[proposal.tree.tokens[node]], path_tokens(proposal.tree, node))
        np.testing.assert_allclose(proposal.laws[node].dense(SMALL).numpy(), expected.numpy(), atol=1e-6)
    assert 3 not in proposal.tree.tokens[1:]


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("text", [CHAIN, TREE])
def test_illegal_tokens_are_never_drafted(rule, text):
    params = SamplingParams(temperature=1.0, rule=rule, banned_ids=frozenset({1, 3}), min_tokens=3)
    drafter = make(text)
    for seed in range(30):
        view = view_of([0, 5, 7], 3, seed=seed, params=params, end_ids=frozenset({11}))
        proposal = drafter.propose([view], [6], always)[0]
        tree = proposal.tree
        assert not {1, 3} & set(tree.tokens[1:])
        for node in range(1, tree.num_nodes):
            if tree.tokens[node] == 11:
                assert len(path_tokens(tree, node)) > 3
        drafter.forget(0)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, rule=Rule.MATCH)])
def test_runners_up_come_after_masks_and_penalties(params):
    """Siblings of the likeliest token used to be the plain row's, banned ones among them."""
    order = near_table(TABLE, 1)[7].argsort()[::-1]
    banned = frozenset(int(token) for token in order[1:3])
    view = view_of([0, 5, 7], 3, params=dataclasses.replace(params, banned_ids=banned))
    tree = make("draft_model:model=near:tree=3").propose([view], [3], always)[0].tree
    assert tree.tokens[1:] == tuple(int(order[place]) for place in (0, 3, 4))


def test_requests_whose_rule_verifies_chains_get_chains():
    drafter = make(TREE)
    for rule in Rule:
        view = view_of([1, 2, 3], params=SamplingParams(temperature=1.0, rule=rule))
        proposal = drafter.propose([view], [6], always)[0]
        assert is_chain(proposal.tree.parents) == (rule in (Rule.CHAIN, Rule.BLOCK))
    greedy = view_of([1, 2, 3], params=SamplingParams(rule=Rule.CHAIN))
    assert not is_chain(drafter.propose([greedy], [6], always)[0].tree.parents)


def test_a_static_tree_has_its_shape_and_fits_the_budget():
    drafter = make("draft_model:model=near:tree=3x2x1:max_draft=20")
    view = view_of([1, 2, 3])
    assert drafter.propose([view], [20], always)[0].tree.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)
    assert drafter.propose([view], [5], always)[0].tree.parents == (-1, 0, 0, 0, 1, 1)


def test_all_sequences_share_one_forward_per_depth():
    info = target_info()
    backend = info.load_model("near").backend
    drafter = make(CHAIN, info)
    views = [view_of([1, 2, 3][: 1 + index % 3], sequence_id=index) for index in range(6)]
    drafter.propose(views, [4, 1, 4, 2, 4, 4], always)
    assert [len(call) for call in backend.calls] == [6, 5, 4, 4]
    assert backend.calls[0] == [1, 2, 3, 1, 2, 3]


def test_after_full_acceptance_two_tokens_are_fed_after_a_rejection_one():
    """Conformance KV (mlxcel#994): K drafts and a accepted: the draft cache drops K - 1 - a, or lacks one at a = K."""
    info = target_info()
    backend = info.load_model("near").backend
    drafter = make(CHAIN, info)
    tokens = [1, 2, 3]
    for num_accepted, fed in ((4, 3), (2, 2), (0, 1), (4, 1)):
        backend.calls.clear()
        proposal = drafter.propose([view_of(tokens, 3)], [4], always)[0]
        assert backend.calls == [[fed], [1], [1], [1]]
        assert backend.cache.tokens(0) == [*tokens, *proposal.tree.tokens[1:4]]
        emitted = list(proposal.tree.tokens[1 : 1 + num_accepted])
        wrong = (proposal.tree.tokens[1 + num_accepted] + 1) % 12 if num_accepted < 4 else 6
        tokens = [*tokens, *emitted, wrong]


def test_long_catch_ups_are_fed_in_chunks():
    info = target_info()
    backend = info.load_model("near").backend
    drafter = make(CHAIN, info)
    prompts = [[place % 11 for place in range(length)] for length in (1300, 40, 700)]
    together = drafter.propose(
        [view_of(tokens, sequence_id=index) for index, tokens in enumerate(prompts)], [3] * 3, always
    )
    assert max(sum(call) for call in backend.calls) <= 512
    for index, tokens in enumerate(prompts):
        alone = make(CHAIN).propose([view_of(tokens)], [3], always)[0]
        assert alone.tree == together[index].tree


def test_a_step_compares_only_what_is_new(monkeypatch):
    """Comparing the whole text with the cache costs milliseconds a step at long contexts."""
    from draftsmith.drafters import draft_model

    drafter, compared = make(CHAIN), []
    real = draft_model._common_len
    monkeypatch.setattr(
        draft_model, "_common_len", lambda left, right: compared.append(len(right)) or real(left, right)
    )
    tokens = [place % 11 for place in range(900)]
    for _ in range(4):
        proposal = drafter.propose([view_of(tokens, 900)], [4], always)[0]
        tokens = [*tokens, *proposal.tree.tokens[1:3], 0]
    assert compared[0] == 899 and max(compared[1:]) <= 3


def test_near_its_context_limit_the_draft_model_stops_and_generation_goes_on():
    """Conformance LEN (vllm#48894): the draft's limit is not the target's."""
    info = target_info({"near": loaded(near_table(TABLE, 1), max_context=16)})
    target = TableBackend(TABLE)
    plain = run(target, make("none"), [[1, 2, 3]], 40)
    result = run(target, make(CHAIN, info), [[1, 2, 3]], 40)
    assert result.emitted == plain.emitted
    drafted = [proposal.tree.num_drafted for proposal in result.proposals]
    assert drafted[0] == 4 and set(drafted[-10:]) == {0}
    backend = info.load_model("near").backend
    assert backend.calls  # it was used at all
    drafter = make(CHAIN, info)
    for length in range(10, 20):
        proposal = drafter.propose([view_of([1] * length, sequence_id=length)], [8], always)[0]
        assert proposal.tree.num_drafted == min(8, max(0, 16 - length))
        if length < 16:
            assert backend.cache.committed(length) < 16


def test_nothing_is_drafted_below_an_end():
    table = np.full((12, 12), -9.0)
    for token in range(12):
        table[token, 11 if token == 3 else (token + 1) % 12] = 9.0
    info = target_info({"near": loaded(table)}, eos_ids=frozenset({11}))
    assert make(CHAIN, info).propose([view_of([1, 2])], [8], always)[0].tree.tokens == (2, 3, 11)
    tree = make("draft_model:model=near:tree=2x1x1", info).propose([view_of([1, 3])], [8], always)[0].tree
    assert tree.tokens[1] == 11 and 1 not in tree.parents[2:]


def test_keep_drafting_hears_the_best_tokens_probability_before_each_draw():
    """Never the drawn token's: stopping before a token because of that token would change its law."""
    info = target_info()
    table, asked = info.load_model("near").backend.table, []
    params = SamplingParams(temperature=1.0, rule=Rule.CHAIN)
    proposal = make(CHAIN, info).propose(
        [view_of([1, 2], params=params)], [5], lambda confidence: asked.append(confidence) or len(asked) < 4
    )[0]
    assert proposal.tree.num_drafted == 3
    best = [float(torch.softmax(table[token], 0).max()) for token in proposal.tree.tokens]
    assert asked == pytest.approx(best)
    assert proposal.confidence == pytest.approx((1.0, *best[:3]))


def test_windowed_layers_are_rolled_back_too():
    """A draft model with sliding windows drops old rows; a long rejected tail must not leave it blind."""
    spec = {"layer_windows": (None, 8), "vocab_size": 12}
    info = target_info({"near": loaded(TABLE)})
    info.load_model("near").backend = tiny_backend(3, **spec)
    fresh_info = target_info({"near": loaded(TABLE)})
    drafter, rng, tokens = make("draft_model:model=near:max_draft=12", info), np.random.default_rng(0), [1, 2, 3]
    for _ in range(8):
        fresh_info.load_model("near").backend = tiny_backend(3, **spec)
        seen = drafter.propose([view_of(tokens, 3)], [12], always)[0]
        fresh = make("draft_model:model=near:max_draft=12", fresh_info).propose([view_of(tokens, 3)], [12], always)[0]
        assert seen.tree == fresh.tree
        tokens = [*tokens, *seen.tree.tokens[1 : 1 + int(rng.integers(0, 4))], int(rng.integers(0, 12))]


def test_memory_is_counted():
    info = target_info()
    drafter = make(CHAIN, info)
    assert drafter.bytes_per_token >= info.load_model("near").backend.cache.bytes_per_token > 0
    drafter.propose([view_of([1] * 100)], [4], always)
    assert info.load_model("near").backend.cache.used_bytes <= drafter.bytes_per_token * 104
    drafter.forget(0)
    assert info.load_model("near").backend.cache.used_bytes == 0


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("", "write draft_model:model=VALUE"),
        (":model=", "write draft_model:model=NAME"),
        (":model=near:max_draft=0", "max_draft is 0"),
        (":model=near:tree=3x0", "children per level"),
        (":model=near:tree=abc", "write auto, chain, or children per level like 3x2x1"),
    ],
)
def test_bad_options(option, complaint):
    with pytest.raises(OptionError, match=complaint):
        make(f"draft_model{option}")
