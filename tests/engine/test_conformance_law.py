"""Public bug reports of other engines, as tests of this one: sampling, penalties, seeds, log-probabilities.

One test per kind of report; the docstring names the report's number in the project's list and one thread.
The chi-square tests of the laws themselves (20, 21) are in `test_rules.py`, the effects of options (42) in
`test_options.py`; stops and caches are in `test_conformance.py`, with what is not applicable yet.
"""

import dataclasses
import itertools

import pytest
import torch

from draftsmith.core import verify_rules
from draftsmith.core.draw import draw_iid, draw_without_replacement
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.tree import chain
from draftsmith.core.types import Law, Proposal, ProposalKind, Rule, Tree
from draftsmith.engine import step as engine_step
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.models.backend import RowGroup
from draftsmith.models.reference import ReferenceBackend
from tests.engine.fakes import VOCAB, ByteTokenizer, OracleDrafter, tiny_engine, tiny_model
from tests.engine.scripted import DRAFTERS, ORACLE, PROMPTS, SCRIPTED, SWITCH, Scripted, plain_run
from tests.models.fakes import tiny_spec, tiny_weights

RULES = [rule.value for rule in Rule]
RATIO = ["chain", "block", "recursive", "traversal"]
MODELS = ["draft_model:model=other", "draft_model:model=other:tree=2x2"]


@pytest.fixture(autouse=True)
def _oracle():
    OracleDrafter.known = []


def rows_of(prompt, tokens, **spec):
    """Logits [len(tokens), V] that the emitted tokens were chosen from, scored from scratch."""
    backend = tiny_model(**spec).backend
    ids = [*prompt, *tokens]
    backend.cache.open(0)
    backend.cache.reserve(0, len(ids))
    return backend.score([RowGroup(0, ids, range(-1, len(ids) - 1), 0)]).logits[0][len(prompt) - 1 : -1]


@pytest.fixture
def verified(monkeypatch):
    """Every proposal that reaches the verifier, with what it was verified with."""
    seen = []
    real = engine_step.verify

    def verify(proposal, logits_TV, sampler, random, position):
        seen.append((proposal, sampler, random, position))
        return real(proposal, logits_TV, sampler, random, position)

    monkeypatch.setattr(engine_step, "verify", verify)
    return seen


# -- sampling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("drafter", MODELS)
def test_the_law_that_drew_reaches_the_verifier(drafter, rule, verified):
    """19 and 21 (vllm#40149, DeepSpec#31): recorded laws and the draft noise give the drafted tokens again."""
    engine = tiny_engine(drafter=drafter, controller="fixed:num_draft=6")
    engine.generate(PROMPTS[2], max_new_tokens=20, temperature=1.0, top_p=0.9, rule=rule, seed=1, ignore_eos=True)
    drawn = 0
    for proposal, _, random, position in verified:
        tokens, parents = proposal.tree.tokens, proposal.tree.parents
        for parent, law in proposal.laws.items():
            nodes = [node for node in range(1, len(tokens)) if parents[node] == parent]
            if proposal.kind is ProposalKind.IID:
                again = draw_iid(law, random, position, nodes, VOCAB)
            else:
                again = draw_without_replacement(law, random, position, parent, len(nodes), VOCAB)
            assert tuple(tokens[node] for node in nodes) == again
            assert float(law.probs.double().sum()) == pytest.approx(1, abs=1e-6)
            drawn += 1
        assert set(parents[1:]) == set(proposal.laws)
    assert drawn > 20


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_were_not_drawn_are_point_masses(rule, verified):
    """22 (rtp-llm#1311): no law, verified by the walk; so even under a ratio rule the ids are the plain run's."""
    params = {"temperature": 1.0, "seed": 6}
    plain = plain_run(PROMPTS[0], **params)
    for drafter in DRAFTERS:
        if "model" in drafter and rule in RATIO:
            continue
        result = tiny_engine(drafter=drafter).generate(PROMPTS[0], max_new_tokens=24, rule=rule, **params)
        assert result.token_ids == plain.token_ids
    assert any(proposal.tree.num_drafted for proposal, *_ in verified)
    assert all(proposal.kind is ProposalKind.POINT_MASS and not proposal.laws for proposal, *_ in verified)


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5}, {"min_p": 0.3}])
def test_the_filtered_law_is_what_is_sampled(filters):
    """23 (vllm#10198): with every drafter and rule no token is outside the filters, and not all are the argmax."""
    sampler = Sampler(SamplingParams(temperature=1.0, **filters), [], frozenset(), VOCAB)
    others = 0
    for rule in RULES:
        for drafter in ("none", "ngram:min_ngram=1", *MODELS):
            engine = tiny_engine(drafter=drafter, controller="fixed:num_draft=4")
            params = {"temperature": 1.0, "rule": rule, "seed": 3, "ignore_eos": True, **filters}
            tokens = engine.generate(PROMPTS[2], max_new_tokens=16, **params).token_ids
            for row_V, token in zip(rows_of(PROMPTS[2], tokens), tokens, strict=True):
                assert sampler.law(row_V)[token] > 0
                others += token != int(row_V.argmax())
    assert others > 20 or "top_p" in filters


@pytest.mark.parametrize("drafter", ["none", "ngram:min_ngram=1", *MODELS])
def test_temperature_is_not_ignored(drafter):
    """24 (sglang#31214): above 0 seeds give different answers under every rule, at 0 the same."""
    engine = tiny_engine(drafter=drafter)
    for rule in RULES:
        answers = {engine.generate(PROMPTS[2], max_new_tokens=8, temperature=1.0, rule=rule, seed=s) for s in range(4)}
        assert len({answer.token_ids for answer in answers}) == 4
    greedy = {engine.generate(PROMPTS[2], max_new_tokens=8, seed=seed).token_ids for seed in range(4)}
    assert len(greedy) == 1


@pytest.mark.parametrize("rule", RULES)
def test_fixed_candidates_tried_as_point_masses_keep_the_law(rule):
    """Disputed (EAGLE#183, mlx-swift-lm#459): any fixed tree under any rule, id for id the plain sampled run."""

    def candidates(view, budget):
        first = [100, 101, 102, 103][:budget]
        second = first[: max(0, budget - len(first))]
        tokens = (view.root, *first, *second)
        return Proposal(Tree(tokens, (-1, *[0] * len(first), *[1 + i for i in range(len(second))])))

    Scripted.script = staticmethod(candidates)
    params = {"temperature": 1.0, "logit_bias": dict.fromkeys([100, 101, 102, 103], 6.0), "seed": 8}
    plain = plain_run(PROMPTS[2], **params)
    result = tiny_engine(drafter=SCRIPTED).generate(PROMPTS[2], max_new_tokens=24, rule=rule, **params)
    assert result.token_ids == plain.token_ids
    assert result.statistics.accepted_tokens > 5


@pytest.mark.parametrize("kind", [ProposalKind.POINT_MASS, ProposalKind.IID])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_has_any_probability(kind, rule, temperature):
    """Boundary: the target's rows are minus infinity at all drafts: none is kept or emitted, nothing is NaN."""
    banned = frozenset(range(64))
    law_V = torch.zeros(VOCAB)
    law_V[: len(banned)] = 1 / len(banned)

    def hopeless(view, budget):
        laws = {node: Law(law_V) for node in range(budget)} if kind is ProposalKind.IID else {}
        return Proposal(chain(view.root, [(view.position + i) % 64 for i in range(budget)]), kind, laws)

    Scripted.script = staticmethod(hopeless)
    for params in ({"banned_ids": banned}, {"logit_bias": dict.fromkeys(banned, -torch.inf)}):
        engine = tiny_engine(drafter=SCRIPTED, controller="fixed:num_draft=3")
        settings = {"max_new_tokens": 12, "temperature": temperature, "rule": rule, "seed": 2, "ignore_eos": True}
        result = engine.generate(PROMPTS[2], **settings, **params)
        assert len(result.token_ids) == 12
        assert banned.isdisjoint(result.token_ids)
        assert result.statistics.accepted_tokens == 0 < result.statistics.drafted_tokens
        if kind is ProposalKind.POINT_MASS or rule in ("coupling", "match") or temperature == 0:
            assert result.token_ids == tiny_engine().generate(PROMPTS[2], **settings, **params).token_ids


def test_the_residual_is_normalised_not_softmaxed(monkeypatch):
    """20 (transformers#28508): after a sure rejection the token has the law norm(max(p - q, 0)) exactly."""
    seen = []
    real = verify_rules.residual

    def residual(target_V, siblings, weight):
        left_V, mass = real(target_V, siblings, weight)
        seen.append((target_V, siblings.excess(target_V), left_V, mass))
        return left_V, mass

    monkeypatch.setattr(verify_rules, "residual", residual)
    engine = tiny_engine(drafter=MODELS[0])
    engine.generate(PROMPTS[2], max_new_tokens=24, temperature=1.0, rule="chain", seed=1)
    assert len(seen) > 5
    for target_V, excess_V, left_V, mass in seen:
        assert 0 < mass < 1
        assert left_V == pytest.approx(excess_V / excess_V.sum(), abs=1e-15)
        assert left_V.sum() == pytest.approx(1) and target_V.sum() == pytest.approx(1)


# -- penalties and processors ----------------------------------------------------------------------

PENALTIES = [{"repetition_penalty": 1.8}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.0}]


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_each_penalty_with_each_drafter(drafter, penalty):
    """25 (vllm#18902): the penalty changes the answer, and drafting does not."""
    for params in ({}, {"temperature": 0.7, "seed": 4}):
        plain = plain_run(PROMPTS[0], **params, **penalty)
        assert plain.token_ids != tiny_engine().generate(PROMPTS[0], max_new_tokens=24, **params).token_ids
        result = tiny_engine(drafter=drafter).generate(PROMPTS[0], max_new_tokens=24, **params, **penalty)
        assert result.token_ids == plain.token_ids


@pytest.mark.parametrize("penalty", PENALTIES)
def test_penalties_see_the_earlier_drafts_of_their_own_block(penalty):
    """26 (vllm#19482): one block holds the whole penalised run, so a stale row would break it."""
    plain = plain_run(PROMPTS[0], 32, **penalty)
    for drafter in (ORACLE, f"{ORACLE}:tree=true"):
        engine = tiny_engine(drafter=drafter, controller="fixed:num_draft=63")
        result = engine.generate(PROMPTS[0], max_new_tokens=32, **penalty)
        assert result.token_ids == plain.token_ids
        assert result.statistics.tokens_per_step > 5


@pytest.mark.parametrize("rule", ["coupling", "match"])
def test_processors_act_on_every_row(rule):
    """27 (vllm#42744): ban, force and min_p in the middle of blocks that an unbiased run proposes."""
    free = plain_run(PROMPTS[0], 32, temperature=1.0, seed=7)
    engine = tiny_engine(drafter=ORACLE, controller="fixed:num_draft=16")
    for token in set(free.token_ids[1:20]):
        params = {"temperature": 1.0, "seed": 7, "logit_bias": {token: -torch.inf}, "rule": rule}
        result = engine.generate(PROMPTS[0], max_new_tokens=32, **params)
        assert token not in result.token_ids
        assert result.token_ids == tiny_engine().generate(PROMPTS[0], max_new_tokens=32, **params).token_ids
    forced = engine.generate(PROMPTS[0], max_new_tokens=32, temperature=1.0, seed=7, logit_bias={9: 1e4}, rule=rule)
    assert forced.token_ids == (9,) * 32
    greedy = plain_run(PROMPTS[0], 32)
    sure = engine.generate(PROMPTS[0], max_new_tokens=32, temperature=1.0, seed=7, min_p=0.999999, rule=rule)
    assert sure.token_ids == greedy.token_ids and sure.statistics.tokens_per_step > 5


# -- seeds and log-probabilities -------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_fixes_the_answer(rule):
    """28 (vllm#6038): given, with every rule; drawn and reported when none is given; any whole number."""
    params = {"temperature": 1.0, "rule": rule, "max_new_tokens": 12}
    for drafter in ("none", "ngram:min_ngram=1", *MODELS):
        first, second = tiny_engine(drafter=drafter), tiny_engine(drafter=drafter)
        for seed in (0, -1, 2**80 + 3):
            assert first.generate(PROMPTS[2], seed=seed, **params) != first.generate(
                PROMPTS[2], seed=seed + 1, **params
            )
        drawn = [first.generate(PROMPTS[2], **params) for _ in range(3)]
        # The tiny model often says the same under different seeds, so it is the seeds that must differ.
        assert len({result.statistics.seed for result in drawn}) == 3
        again = [second.generate(PROMPTS[2], seed=result.statistics.seed, **params) for result in drawn]
        assert [result.token_ids for result in again] == [result.token_ids for result in drawn]


def test_steps_without_drafts_draft_lengths_and_batch_mates_move_no_draw():
    """28 (vllm#10863): one seed, one answer, however the steps fall."""
    params = {"temperature": 1.0, "seed": 12, "max_new_tokens": 24}
    plain = plain_run(PROMPTS[2], **params)
    controllers = [f"{SWITCH}:on={on}:off={off}:num_draft=5" for on, off in ((1, 1), (2, 1), (1, 4))]
    for controller, drafter in itertools.product([*controllers, "fixed:num_draft=11"], DRAFTERS):
        engine = tiny_engine(drafter=drafter, controller=controller, max_batch=4)
        others = [engine.stream(prompt, max_new_tokens=9, temperature=0.5, seed=12) for prompt in PROMPTS[:3]]
        assert engine.generate(PROMPTS[2], **params).token_ids == plain.token_ids
        assert all(len(list(other)) > 0 for other in others)


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_log_probabilities_are_those_of_the_emitted_rows(drafter):
    """30 (vllm#17876): one entry per token, of the untransformed law; at temperature, cut by a stop, in samples."""
    params = {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.7, "top_k": 50, "n": 2, "logprobs": 3}
    free = plain_run(PROMPTS[0], **params)
    stop = free.token_ids[13]
    result = tiny_engine(drafter=drafter).generate(PROMPTS[0], max_new_tokens=24, stop_ids=[stop], **params)
    assert stop in result.token_ids or stop in free.token_ids[:1]
    for sample in result.samples:
        rows_RV = torch.log_softmax(rows_of(PROMPTS[0], sample.token_ids), dim=-1)
        assert [entry.token_id for entry in sample.logprobs] == list(sample.token_ids)
        for entry, row_V in zip(sample.logprobs, rows_RV, strict=True):
            assert entry.logprob == pytest.approx(float(row_V[entry.token_id]), abs=1e-9)
            best = torch.topk(row_V, 3)
            assert [token for token, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-9)


# -- vocabularies and numerics ---------------------------------------------------------------------


class _Renamed(ByteTokenizer):
    """The byte tokenizer with its ids turned by 57; only the first `vocab_size` of them in a smaller vocabulary."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def encode(self, text, *, special):
        ids = [(token - 57) % VOCAB for token in super().encode(text, special=special)]
        return [token for token in ids if token < self.vocab_size]

    def token_bytes(self, token):
        return super().token_bytes((token + 57) % VOCAB)

    def token_text(self, token):
        return super().token_text((token + 57) % VOCAB)

    normalized_token_text = token_text


@pytest.mark.parametrize("vocab_size", [VOCAB, 230])
def test_a_draft_model_with_other_ids(vocab_size):
    """36 (rtp-llm#1311): the target itself under other ids, equal widths and fewer: every draft is right."""

    def load(name):
        spec = tiny_spec(vocab_size=VOCAB)
        weights = tiny_weights(spec, 0)
        embedding = weights["model.embed_tokens.weight"]
        weights["model.embed_tokens.weight"] = torch.roll(embedding, -57, 0)[:vocab_size].contiguous()
        backend = ReferenceBackend.from_weights(
            tiny_spec(vocab_size=vocab_size), weights.__getitem__, dtype=torch.float64
        )
        return dataclasses.replace(tiny_model(), backend=backend, tokenizer=_Renamed(vocab_size))

    settings = EngineSettings(drafter="draft_model:model=x", controller="fixed:num_draft=4", memory_bytes=1 << 28)
    engine = Engine(tiny_model(), settings, load=load)
    # Only tokens that the smaller vocabulary knows are read and emitted, so that it still predicts all of them.
    prompt = list(b"thecatsatonthematthecatsat")
    known = {(token + 57) % VOCAB for token in range(vocab_size)}
    ban = {"banned_ids": set(range(VOCAB)) - known}
    for params in ({}, {"temperature": 1.0, "seed": 2}, {"temperature": 1.0, "seed": 2, "rule": "match"}):
        plain = plain_run(prompt, 21, ignore_eos=True, **ban, **params)
        result = engine.generate(prompt, max_new_tokens=21, ignore_eos=True, **ban, **params)
        assert result.token_ids == plain.token_ids
        assert result.statistics.drafted_tokens >= 16
        if params.get("rule") != "match":
            assert result.statistics.accepted_tokens == result.statistics.drafted_tokens


def test_a_difference_in_float32_is_a_near_tie():
    """41 (mlx-lm#1423): where ids differ at all, the exact top-2 gap there is tiny."""
    for drafter, prompt in itertools.product(("none", *MODELS, "suffix:tree=true"), PROMPTS):
        plain = tiny_engine(dtype=torch.float32, prefix_cache=False).generate(prompt, max_new_tokens=40)
        engine = tiny_engine(dtype=torch.float32, drafter=drafter, chunk_rows=24)
        result = engine.generate(prompt, max_new_tokens=40)
        if result.token_ids != plain.token_ids:
            place = next(i for i in range(40) if result.token_ids[i] != plain.token_ids[i])
            best = torch.topk(rows_of(prompt, plain.token_ids)[place], 2).values
            assert float(best[0] - best[1]) < 1e-4, (drafter, prompt, place)
