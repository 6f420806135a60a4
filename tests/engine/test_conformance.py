"""Public bug reports of other engines, as tests of this one: stops, caches, batches, lengths.

One test per kind of report; the docstring names the report's number in the project's list and one thread.
The law's side (sampling, penalties, seeds, log-probabilities, options) is in `test_conformance_law.py`. Not
applicable yet: recurrent state (12, 13, 14), grammars (32, 33, 34), tensor parallelism (29).
"""

import itertools
import random

import pytest
import torch

from draftsmith.core.tree import chain
from draftsmith.core.types import Proposal
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.models.backend import RowGroup
from tests.engine.fakes import EOS, VOCAB, OracleDrafter, tiny_engine, tiny_model
from tests.engine.scripted import DRAFTERS, ORACLE, PROMPTS, SCRIPTED, SWITCH, WRONG_AT, Scripted, plain_run

ASCII = {"banned_ids": [*range(33), *range(127, VOCAB)], "temperature": 1.0}


@pytest.fixture(autouse=True)
def _oracle():
    OracleDrafter.known = []


def assert_same(result, plain):
    """Everything a caller sees of a sample ends at the same token and is the plain run's."""
    assert result.token_ids == plain.token_ids
    assert result.text == plain.text
    assert result.finish_reason == plain.finish_reason
    assert len(result.origins) == len(result.token_ids) == result.statistics.emitted_tokens
    assert result.logprobs is None or [entry.token_id for entry in result.logprobs] == list(result.token_ids)


# -- stop rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [ORACLE, f"{ORACLE}:tree=true"])
def test_the_models_end_token_inside_a_block(drafter):
    """1 (transformers#47912): the block goes on behind the end token, the answer does not."""
    found = 0
    for seed in range(40):
        params = {"temperature": 1.0, "seed": seed, "logit_bias": {EOS: 3.5}, "logprobs": 0}
        free = plain_run(PROMPTS[0], ignore_eos=True, **params)
        if EOS in free.token_ids[2:12] and EOS not in free.token_ids[:2]:
            plain = plain_run(PROMPTS[0], **params)
            OracleDrafter.known = [PROMPTS[0] + list(free.token_ids)]
            engine = tiny_engine(drafter=drafter, controller="fixed:num_draft=30")
            result = engine.generate(PROMPTS[0], max_new_tokens=24, **params)
            assert_same(result, plain)
            assert result.token_ids[-1] == EOS and result.finish_reason == "stop"
            assert result.statistics.steps == 1 or "tree" in drafter
            found += 1
    assert found >= 3


@pytest.mark.parametrize("drafter", ["none", ORACLE, f"{ORACLE}:wrong_every=3"])
def test_the_first_rule_met_wins(drafter):
    """2 (sglang#31599): stop and limit in one block, in both orders and at the same token."""
    free = plain_run(PROMPTS[0], seed=4, **ASCII)
    place = next(i for i in range(5, 15) if free.token_ids.index(free.token_ids[i]) == i)
    engine = tiny_engine(drafter=drafter, controller="fixed:num_draft=16")
    for limit, stop in itertools.product((place - 1, place, place + 1, place + 2, 24), ("id", "string")):
        rules = {"stop_ids": [free.token_ids[place]]} if stop == "id" else {"stop": chr(free.token_ids[place])}
        result = engine.generate(PROMPTS[0], max_new_tokens=limit, seed=4, **rules, **ASCII)
        assert result.token_ids == free.token_ids[: min(limit, place + 1)]
        assert result.finish_reason == ("stop" if limit > place else "length")
        assert result.text == free.text[: min(limit, place)]


@pytest.mark.parametrize("drafter", ["none", ORACLE, f"{ORACLE}:wrong_every=4:tree=true"])
def test_stop_strings_anywhere_cut_everything_at_one_token(drafter):
    """3 (sglang#27637): every substring of a run as stop string, found by brute force over its tokens."""
    free = plain_run(PROMPTS[0], seed=4, **ASCII)
    engine = tiny_engine(drafter=drafter, controller="fixed:num_draft=9")
    for start, size in itertools.product(range(0, 20, 3), (1, 2, 5)):
        stops = [free.text[start : start + size], "never to be seen"]
        count = next(n for n in range(1, 25) if stops[0] in free.text[:n])  # a token is a character here
        result = engine.generate(PROMPTS[0], max_new_tokens=24, seed=4, stop=stops, logprobs=1, **ASCII)
        assert result.token_ids == free.token_ids[:count]
        assert result.text == free.text[: free.text.find(stops[0])]
        assert result.finish_reason == "stop"
        assert len(result.logprobs) == len(result.origins) == count == result.statistics.emitted_tokens


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2, "rule": "match"}]
)
def test_min_tokens_masks_each_row_by_its_own_position(sampling):
    """4 (vllm#32642): the end is certain as soon as it is allowed, and drafted everywhere."""
    Scripted.script = staticmethod(lambda view, budget: Proposal(chain(view.root, _with_ends(view, budget))))
    for min_tokens, num_draft in itertools.product((0, 1, 2, 5, 6), (1, 4, 7)):
        params = {"logit_bias": {EOS: 100.0}, "min_tokens": min_tokens, "max_new_tokens": 12, **sampling}
        plain = plain_run(PROMPTS[2], **params)
        engine = tiny_engine(drafter=SCRIPTED, controller=f"fixed:num_draft={num_draft}")
        result = engine.generate(PROMPTS[2], **params)
        assert_same(result, plain)
        assert result.token_ids.index(EOS) == min_tokens == len(result.token_ids) - 1


def _with_ends(view, budget):
    known = next(text for text in OracleDrafter.known if text[: len(view.tokens)] == view.tokens)
    following = [token for token in known[len(view.tokens) :] if token != EOS]
    return [*(following + [EOS] * budget)[: budget - 1], EOS]


def test_nothing_passes_the_limit_whatever_is_drafted():
    """6 (transformers#28508), and K larger than the tokens left: the last step drafts less and keeps less."""
    plain = plain_run(PROMPTS[2])
    for drafter in (ORACLE, f"{ORACLE}:tree=true", "draft_model:model=same", WRONG_AT):
        for limit, num_draft in itertools.product((1, 2, 3, 5, 9), (1, 2, 8, 16)):
            engine = tiny_engine(drafter=drafter, controller=f"fixed:num_draft={num_draft}")
            result = engine.generate(PROMPTS[2], max_new_tokens=limit)
            assert result.token_ids == plain.token_ids[:limit]
            assert result.statistics.emitted_tokens == limit
            log = engine.take_events()
            assert sum(record.emitted for record in log.requests) == limit
            for record in log.requests:
                assert record.drafted <= max(0, limit - record.position - 1)


# -- caches ----------------------------------------------------------------------------------------


def rebuilt_rows(model, tokens):
    """Keys and values of every layer kind for these tokens, scored in one go."""
    cache = model.backend.cache
    cache.open(-7)
    cache.reserve(-7, len(tokens))
    model.backend.score([RowGroup(-7, tokens, range(-1, len(tokens) - 1), len(tokens))])
    cache.keep(-7, range(len(tokens)))
    rows = [(state.first, state.slots(state.first, len(tokens)).clone()) for state in cache.layers(-7)]
    cache.close(-7)
    return rows


@pytest.mark.parametrize("spec", [{}, {"layer_windows": (None, 8)}, {"layer_windows": (6, 6)}])
@pytest.mark.parametrize("drafter", [WRONG_AT, f"{ORACLE}:wrong_every=2:tree=true"])
def test_after_every_step_the_cache_is_one_built_from_the_kept_tokens(drafter, spec):
    """7 and 9 (mlxcel#994, mlx-swift-lm#308): K - a rows go, a stay where they belong, whatever a is."""
    plain = tiny_engine(spec=spec).generate(PROMPTS[0], max_new_tokens=30)
    OracleDrafter.known = [PROMPTS[0] + list(plain.token_ids) + [1] * 9]
    for num_draft in (1, 3, 6):
        engine = tiny_engine(spec=spec, drafter=drafter, controller=f"fixed:num_draft={num_draft}")
        cache, tokens = engine._model.backend.cache, list(PROMPTS[0])
        for event in engine.stream(PROMPTS[0], max_new_tokens=30):
            tokens += event.token_ids
            assert event.token_ids == plain.token_ids[: len(tokens) - len(PROMPTS[0])][-len(event.token_ids) :]
            (sequence_id,) = cache.sequence_ids
            held = cache.tokens(sequence_id)
            assert held == tokens[: len(held)]
            assert event.finish_reason is not None or len(held) == len(tokens) - 1
            for ours, (first, theirs) in zip(cache.layers(sequence_id), rebuilt_rows(engine._model, held), strict=True):
                start = max(ours.first, first)  # a windowed layer may have let go of different old rows
                assert start <= max(0, len(held) - 5)
                kept = ours.slots(start, len(held))
                assert torch.allclose(kept, theirs[:, :, :, start - first :], atol=1e-10, rtol=0)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 2}])
@pytest.mark.parametrize("off", [1, 2, 7])
def test_drafting_switched_on_and_off(off, params):
    """8 (vllm#49548), and a request switching drafting on and off: the drafter has caught up when asked again."""
    controller = f"{SWITCH}:on=1:off={off}:num_draft=3"
    plain = plain_run(PROMPTS[2], 33, **params)
    for drafter in ("draft_model:model=same", *DRAFTERS):
        engine = tiny_engine(drafter=drafter, controller=controller)
        result = engine.generate(PROMPTS[2], max_new_tokens=33, **params)
        assert_same(result, plain)
        if drafter == "draft_model:model=same":
            assert result.statistics.accepted_tokens == result.statistics.drafted_tokens > 0


@pytest.mark.parametrize("spec", [{}, {"layer_windows": (None, 8)}])
def test_positions_stay_contiguous_in_every_slot_and_reuse(spec):
    """10 (llama.cpp#26478): every (K, a) in several slots at once, then on reused prefixes of those slots."""
    solo = {}
    plain = tiny_engine(spec=spec, prefix_cache=False)
    for prompt in PROMPTS[:3]:
        ids = list(plain.generate(prompt, max_new_tokens=24).token_ids)
        for length in (0, 9, 20):
            key = tuple(prompt + ids[:length])
            solo[key] = plain.generate(list(key), max_new_tokens=24).token_ids
            OracleDrafter.known.append([*key, *solo[key], *[1] * 9])
    for num_draft in (1, 2, 5):
        engine = tiny_engine(spec=spec, drafter=WRONG_AT, controller=f"fixed:num_draft={num_draft}", max_batch=3)
        for _ in range(2):
            results = engine.generate([list(key) for key in solo], max_new_tokens=24)
            assert [result.token_ids for result in results] == list(solo.values())
        assert spec or max(result.statistics.reused_tokens for result in results) > 20
        engine._model.backend.cache.check()


def test_rejected_tokens_are_not_found_in_the_prefix_cache():
    """15 (vllm#57128): ask with the very tokens that were drafted and rejected."""
    plain = plain_run(PROMPTS[0])
    engine = tiny_engine(drafter=WRONG_AT, controller="fixed:num_draft=3")
    assert engine.generate(PROMPTS[0], max_new_tokens=24).token_ids == plain.token_ids
    for length in (4, 5, 11, 18):
        rejected = [*plain.token_ids[:length], (plain.token_ids[length] + 1) % VOCAB, *plain.token_ids[length + 1 : 20]]
        prompt = PROMPTS[0] + rejected
        expected = plain_run(prompt, 10)
        result = engine.generate(prompt, max_new_tokens=10, drafter="none")
        assert result.token_ids == expected.token_ids
        assert result.statistics.reused_tokens == len(PROMPTS[0]) + length


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_no_request_sees_anothers_tokens(seed):
    """17 (vllm#14645): each request has an alphabet of its own, so a leak is a foreign letter."""
    shuffle = random.Random(seed)
    engine = tiny_engine(controller="fixed:num_draft=4", chunk_rows=40)
    requests, streams = [], {}
    for number in range(8):
        own = range(30 * number, 30 * number + 30)
        params = {
            "banned_ids": [token for token in range(VOCAB) if token not in own],
            "temperature": 1.0,
            "seed": number,
            "max_new_tokens": shuffle.randint(5, 30),
        }
        prompt = [shuffle.choice(own) for _ in range(shuffle.randint(1, 20))]
        requests.append((prompt, params, plain_run(prompt, **params).token_ids))
    order = shuffle.sample(range(8), 8)
    tokens = {number: [] for number in order}
    for number in order:
        prompt, params, _ = requests[number]
        streams[number] = engine.stream(prompt, drafter=shuffle.choice(DRAFTERS), **params)
        other = shuffle.choice(list(streams))
        tokens[other] += [token for event in itertools.islice(streams[other], 2) for token in event.token_ids]
    for number in shuffle.sample(order, 8):
        tokens[number] += [token for event in streams[number] for token in event.token_ids]
        assert tuple(tokens[number]) == requests[number][2]


@pytest.mark.parametrize(
    "drafter", ["ngram:min_ngram=1", "suffix:max_cached_requests=0", "draft_model:model=other", ORACLE]
)
def test_acceptance_does_not_depend_on_load(drafter):
    """18 (sglang#32666): steps, drafts and acceptances of a request in a full batch are those it has alone."""
    for params in ({}, {"temperature": 0.8, "seed": 3}):
        for prompt in PROMPTS:
            plain_run(prompt, **params)
        engine = tiny_engine(drafter=drafter, controller="fixed:num_draft=4", prefix_cache=False)
        alone = [engine.generate(prompt, max_new_tokens=24, **params) for prompt in PROMPTS]
        together = engine.generate(PROMPTS, max_new_tokens=24, **params)
        for one, other in zip(alone, together, strict=True):
            assert_same(other, one)
            for name in ("steps", "drafted_tokens", "accepted_tokens"):
                assert getattr(one.statistics, name) == getattr(other.statistics, name)
        assert sum(result.statistics.accepted_tokens for result in alone) > 0 or drafter.startswith("suffix")


def test_no_drafts_cost_no_rows_and_no_drafting(monkeypatch):
    """19 (vllm#5000): with K = 0 the steps are the plain run's, row for row, and the drafter is not asked."""
    plain = tiny_engine(prefix_cache=False)
    plain.generate(PROMPTS, max_new_tokens=24)
    engine = tiny_engine(drafter=SCRIPTED, controller="fixed:num_draft=0", prefix_cache=False)
    monkeypatch.setattr(Scripted, "script", staticmethod(lambda view, budget: pytest.fail("asked to draft")))
    engine.generate(PROMPTS, max_new_tokens=24)
    ours, theirs = engine.take_events(), plain.take_events()
    assert [(step.rows, step.requests, step.context) for step in ours.steps] == [
        (step.rows, step.requests, step.context) for step in theirs.steps
    ]


# -- lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["draft_model:model=short", "draft_model:model=short:tree=2x2"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}])
def test_a_draft_model_of_a_smaller_context(drafter, params):
    """37 (vllm#48894): drafts stop near its limit, generation goes on; also when the prompt alone is too long."""
    for prompt in (PROMPTS[2], PROMPTS[2] * 2):
        plain = plain_run(prompt, 30, **params)
        engine = Engine(
            tiny_model(),
            EngineSettings(drafter=drafter, controller="fixed:num_draft=4", memory_bytes=1 << 28),
            load=lambda name: tiny_model(max_context=32),
        )
        result = engine.generate(prompt, max_new_tokens=30, **params)
        assert_same(result, plain)
        drafted = {record.position: record.drafted for record in engine.take_events().requests}
        room = 32 - len(prompt)
        assert any(drafted[place] > 0 for place in drafted if 0 < place < room - 4) or room < 0
        assert all(drafted[place] == 0 for place in drafted if place > room + 1)


@pytest.mark.parametrize(
    "drafter", [ORACLE, f"{ORACLE}:wrong_every=4:tree=true", "draft_model:model=other:max_draft=16"]
)
def test_every_batch_and_draft_length_up_to_the_limits(drafter):
    """38 (vllm#32591): every (batch, K), where chunk_rows leaves each sequence K + 1 rows and not one more."""
    solo = [plain_run(prompt, 12).token_ids for prompt in PROMPTS]
    for batch, num_draft in itertools.product((1, 2, 3, 4), (1, 2, 3, 8)):
        engine = tiny_engine(
            drafter=drafter,
            controller="fixed:num_draft=99",
            max_batch=batch,
            chunk_rows=batch * (num_draft + 1),
            prefix_cache=False,
        )
        results = engine.generate(PROMPTS[:batch], max_new_tokens=12)
        assert [result.token_ids for result in results] == solo[:batch]
        log = engine.take_events()
        assert max(step.rows for step in log.steps) <= batch * (num_draft + 1)
        assert max(record.drafted for record in log.requests) <= num_draft


@pytest.mark.parametrize("length", range(1, 7))
def test_prompts_around_the_length_of_an_ngram(length):
    """39 (llama.cpp#21815): prompts shorter than, equal to and longer than n; an empty one is refused elsewhere."""
    for prompt in ([7] * length, list(range(length))):
        plain = plain_run(prompt)
        for drafter in ("ngram:min_ngram=3:max_ngram=4", "ngram:min_ngram=1:max_ngram=6", "suffix", "hybrid"):
            engine = tiny_engine(drafter=drafter)
            assert_same(engine.generate(prompt, max_new_tokens=24), plain)
            assert_same(engine.generate(prompt, max_new_tokens=24), plain)
