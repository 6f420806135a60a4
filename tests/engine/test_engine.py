"""The engine gives the plain run's tokens, whatever drafts, batches, preempts, cancels or is reused."""

import asyncio
import itertools
import random
import warnings

import pytest

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.view import SequenceView
from draftsmith.engine.engine import EngineSettings
from draftsmith.errors import CapacityError, OptionError, PromptError
from tests.engine.fakes import EOS, OracleDrafter, tiny_engine

ORACLE = "tests.engine.fakes:OracleDrafter"
DRAFTERS = [
    "ngram",
    "suffix",
    "suffix:tree=true",
    "draft_model:model=other",
    "draft_model:model=same",
    "hybrid",
    ORACLE,
    f"{ORACLE}:wrong_every=3",
    f"{ORACLE}:wrong_every=4:tree=true",
]
SAMPLINGS = {
    "greedy": {},
    "greedy+penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}},
    "coupled": {"temperature": 0.9, "seed": 11},
    "coupled+filters": {"temperature": 0.7, "seed": 5, "top_p": 0.8, "top_k": 40, "presence_penalty": 0.5},
}
PROMPTS = [list(b"abc abc abc"), list(b"x"), list(b"the cat sat on the mat"), list(b"12 34 12 34 12")]


@pytest.fixture(autouse=True)
def _oracle():
    OracleDrafter.known = []


def plain_run(prompt, max_new_tokens=40, engine=None, **params):
    result = (engine or tiny_engine()).generate(prompt, max_new_tokens=max_new_tokens, drafter="none", **params)
    OracleDrafter.known.append(list(prompt) + list(result.token_ids) + [1, 2, 3])
    return result


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_drafter_gives_the_plain_tokens(drafter, sampling):
    params = SAMPLINGS[sampling]
    for num_draft in (1, 3, 8, 16):
        engine = tiny_engine(controller=f"fixed:num_draft={num_draft}", drafter=drafter)
        for prompt in PROMPTS[:3]:
            plain = plain_run(prompt, **params)
            drafted = engine.generate(prompt, max_new_tokens=40, **params)
            assert drafted.token_ids == plain.token_ids
            assert drafted.text == plain.text
            assert drafted.finish_reason == plain.finish_reason


def test_the_oracle_really_makes_blocks():
    """The tests above would be empty if nothing was ever accepted."""
    plain = plain_run(PROMPTS[0])
    result = tiny_engine(drafter=ORACLE).generate(PROMPTS[0], max_new_tokens=40)
    assert result.token_ids == plain.token_ids
    assert result.statistics.tokens_per_step > 6
    assert result.origins.count("accepted") == result.statistics.accepted_tokens > 30


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("chunk_rows", [8, 64])
def test_shuffled_batch_with_arrivals_and_cancellations_equals_solo(sampling, chunk_rows):
    params = SAMPLINGS[sampling]
    shuffle = random.Random(3)
    prompts = [list(bytes(shuffle.choices(b"ab cd", k=shuffle.randint(1, 30)))) for _ in range(8)]
    solo = [plain_run(prompt, **params) for prompt in prompts]
    drafters = itertools.cycle(
        ["none", "ngram", "suffix:tree=true", f"{ORACLE}:wrong_every=3", "draft_model:model=other"]
    )
    engine = tiny_engine(chunk_rows=chunk_rows, controller="fixed:num_draft=4")
    order = list(range(8))
    shuffle.shuffle(order)
    streams = {}
    for number in order:
        streams[number] = engine.stream(prompts[number], max_new_tokens=40, drafter=next(drafters), **params)
        if len(streams) % 3 == 0:
            next(streams[number])
    cancelled = set(order[:2])
    for number in cancelled:
        next(streams[number])
        streams[number].close()
    for number in order:
        if number in cancelled:
            continue
        # Some events may have been taken by the arrivals above: replay from a fresh request too.
        tokens = [token for event in streams[number] for token in event.token_ids]
        assert tuple(tokens) == solo[number].token_ids[len(solo[number].token_ids) - len(tokens) :]
        assert len(tokens) > 0 or len(solo[number].token_ids) <= 17
        again = engine.generate(prompts[number], max_new_tokens=40, **params)
        assert again.token_ids == solo[number].token_ids


def test_batch_of_prompts_keeps_order():
    solo = [plain_run(prompt).token_ids for prompt in PROMPTS]
    results = tiny_engine(drafter="suffix").generate(PROMPTS, max_new_tokens=40)
    assert [result.token_ids for result in results] == solo


@pytest.mark.parametrize("drafter", ["none", "draft_model:model=other", f"{ORACLE}:wrong_every=4"])
@pytest.mark.parametrize("sampling", ["greedy", "coupled+filters"])
def test_preemption_changes_nothing(drafter, sampling):
    params = SAMPLINGS[sampling]
    solo = [plain_run(prompt, 90, **params).token_ids for prompt in PROMPTS]
    roomy = tiny_engine(drafter=drafter)
    small = roomy._scheduler._bytes(roomy._make_sequences([1] * 4, _params(drafter))[0], 64)
    # Two sequences of 64 rows fit; when one of them grows to 128, the other has to go.
    engine = tiny_engine(drafter=drafter, memory_bytes=int(small * 2.5), prefix_cache=False)
    results = engine.generate(PROMPTS, max_new_tokens=90, **params)
    assert [result.token_ids for result in results] == solo
    assert sum(result.statistics.preemptions for result in results) > 0


def _params(drafter):
    from draftsmith.engine.params import GenerationParams

    return GenerationParams.create(drafter=drafter, max_new_tokens=8)


@pytest.mark.parametrize("drafter", ["none", "suffix", "draft_model:model=other"])
def test_prefix_reuse_changes_nothing(drafter):
    first, more = list(b"a long shared beginning, then "), list(b"something else entirely")
    without = tiny_engine(prefix_cache=False, drafter=drafter)
    engine = tiny_engine(drafter=drafter)
    turn = engine.generate(first, max_new_tokens=20)
    prompt = first + list(turn.token_ids) + more
    expected = without.generate(prompt, max_new_tokens=30)
    assert expected.statistics.reused_tokens == 0
    for prompt_again in (prompt, prompt, first + more):
        result = engine.generate(prompt_again, max_new_tokens=30)
        assert result.token_ids == without.generate(prompt_again, max_new_tokens=30).token_ids
        assert result.statistics.reused_tokens >= len(first)


def test_rejected_rows_never_enter_the_prefix_pool():
    """Conformance CACHE (vllm#57128): ask again after a run full of rejections."""
    engine = tiny_engine(drafter=f"{ORACLE}:wrong_every=2", controller="fixed:num_draft=6")
    plain = plain_run(PROMPTS[0])
    assert engine.generate(PROMPTS[0], max_new_tokens=40).token_ids == plain.token_ids
    longer = PROMPTS[0] + list(plain.token_ids)
    expected = plain_run(longer)
    again = engine.generate(longer, max_new_tokens=40)
    assert again.statistics.reused_tokens >= len(longer) - 2
    assert again.token_ids == expected.token_ids


def test_n_samples_share_the_prompt_and_differ():
    params = {"temperature": 1.0, "seed": 9, "max_new_tokens": 20}
    alone = tiny_engine(prefix_cache=False, max_batch=1).generate(PROMPTS[2], n=4, **params)
    engine = tiny_engine(prefix_cache=False, drafter="draft_model:model=other")
    together = engine.generate(PROMPTS[2], n=4, **params)
    assert [item.token_ids for item in together.samples] == [item.token_ids for item in alone.samples]
    assert len({item.token_ids for item in together.samples}) == 4
    assert [item.statistics.reused_tokens for item in together.samples] == [0] + [len(PROMPTS[2]) - 1] * 3


def test_a_perfect_draft_model_is_always_accepted():
    """Conformance KV (mlxcel#994): after full acceptance the last draft token is fed before the next proposal."""
    engine = tiny_engine(drafter="draft_model:model=same", controller="fixed:num_draft=4")
    for params in ({}, {"temperature": 1.0, "seed": 2}):
        result = engine.generate(PROMPTS[2], max_new_tokens=41, ignore_eos=True, **params)
        assert result.statistics.accepted_tokens == result.statistics.drafted_tokens == 32


@pytest.mark.parametrize("selection", ["draft_model:model=other", "draft_model:model=other:tree=2x2x1"])
def test_a_draft_model_after_rejections_proposes_what_a_fresh_one_does(selection):
    """Conformance KV: drafted rows that were not emitted leave nothing behind, spells without drafting neither."""

    def view(tokens):
        sampler = Sampler(SamplingParams(), tokens, frozenset(), 260)
        return SequenceView(7, list(tokens), len(PROMPTS[2]), sampler, RequestRandom(0))

    drafter = tiny_engine().drafter(selection)
    tokens = list(PROMPTS[2])
    shuffle = random.Random(0)
    for _ in range(12):
        seen = drafter.propose([view(tokens)], [6], lambda confidence: True)
        fresh = tiny_engine().drafter(selection).propose([view(tokens)], [6], lambda confidence: True)
        assert seen[0].tree == fresh[0].tree
        if seen[0].confidence is not None:
            assert seen[0].confidence == pytest.approx(fresh[0].confidence, abs=1e-12)
        accepted = shuffle.randint(0, 4)
        tokens += [*seen[0].tree.tokens[1 : 1 + accepted], shuffle.randrange(256), *([65] * shuffle.randint(0, 2))]


# -- stop rules ------------------------------------------------------------------------------------


def test_eos_inside_an_accepted_block_ends_it():
    """Conformance STOP (transformers#47912): nothing follows an end token, drafted or not."""
    free = plain_run(PROMPTS[0], ignore_eos=True, **SAMPLINGS["coupled"])
    ids = free.token_ids
    # The first block after the prompt step holds positions 1 to 17: end inside it.
    first = next(place for place in range(4, 15) if ids.index(ids[place]) == place)
    plain = plain_run(PROMPTS[0], stop_ids=[ids[first]], **SAMPLINGS["coupled"])
    OracleDrafter.known = [PROMPTS[0] + list(ids)]
    drafted = tiny_engine(drafter=ORACLE, controller="fixed:num_draft=16").generate(
        PROMPTS[0], max_new_tokens=40, stop_ids=[ids[first]], **SAMPLINGS["coupled"]
    )
    assert drafted.token_ids == plain.token_ids == ids[: first + 1]
    assert drafted.finish_reason == plain.finish_reason == "stop"
    assert len(drafted.origins) == len(drafted.token_ids)
    assert drafted.statistics.steps == 1


@pytest.mark.parametrize("drafter", ["none", ORACLE, f"{ORACLE}:wrong_every=3"])
def test_stop_string_ends_ids_text_and_logprobs_together(drafter):
    """Conformance STOP (sglang#27637): the string may lie across tokens and in the middle of a block."""
    ids = _ascii_engine("none").generate(PROMPTS[0], max_new_tokens=40, **_ASCII).token_ids
    OracleDrafter.known.append(PROMPTS[0] + list(ids))
    text = bytes(ids).decode()
    stop = text[9:12]
    at = text.find(stop)
    engine = _ascii_engine(drafter)
    result = engine.generate(PROMPTS[0], max_new_tokens=40, stop=[stop, "never"], logprobs=2, **_ASCII)
    assert result.finish_reason == "stop"
    assert result.text == text[:at]
    assert result.token_ids == ids[: at + 3]
    assert len(result.logprobs) == len(result.token_ids)
    streamed = list(engine.stream(PROMPTS[0], max_new_tokens=40, stop=[stop], **_ASCII))
    assert "".join(event.text for event in streamed) == text[:at]
    assert streamed[-1].finish_reason == "stop"
    assert all(event.finish_reason is None for event in streamed[:-1])


_ASCII = {"banned_ids": [*range(33), *range(127, 260)], "temperature": 1.0, "seed": 4}


def _ascii_engine(drafter):
    return tiny_engine(drafter=drafter, controller="fixed:num_draft=16")


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 17])
@pytest.mark.parametrize("drafter", ["none", ORACLE, f"{ORACLE}:wrong_every=3:tree=true", "draft_model:model=same"])
def test_max_new_tokens_is_exact(limit, drafter):
    """Conformance LEN: the bonus token never passes the limit."""
    plain = plain_run(PROMPTS[2])
    result = tiny_engine(drafter=drafter, controller="fixed:num_draft=16").generate(PROMPTS[2], max_new_tokens=limit)
    assert result.token_ids == plain.token_ids[:limit]
    assert result.finish_reason == "length"


def test_context_limit_ends_with_length():
    spec = {"max_context": 32}
    for drafter in ("none", ORACLE, "ngram", "draft_model:model=other"):
        result = tiny_engine(spec=spec, drafter=drafter).generate(PROMPTS[0], max_new_tokens=500, ignore_eos=True)
        assert len(result.token_ids) == 32 - len(PROMPTS[0])
        assert result.finish_reason == "length"


def test_min_tokens_holds_back_end_ids_at_every_row():
    """Conformance STOP (vllm#32642): each row masks by its own output position."""
    free = plain_run(PROMPTS[0])
    stop = free.token_ids[2]
    params = {"stop_ids": [stop], "min_tokens": 12}
    plain = plain_run(PROMPTS[0], **params)
    assert stop not in plain.token_ids[:12]
    result = tiny_engine(drafter=ORACLE, controller="fixed:num_draft=16").generate(
        PROMPTS[0], max_new_tokens=40, **params
    )
    assert result.token_ids == plain.token_ids


# -- what is reported ------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["ngram", f"{ORACLE}:wrong_every=3", f"{ORACLE}:tree=true"])
def test_logprobs_equal_the_plain_run(drafter):
    """Conformance LOGP: one entry per emitted token, each from its own row."""
    plain = plain_run(PROMPTS[0], logprobs=3)
    result = tiny_engine(drafter=drafter, controller="fixed:num_draft=8").generate(
        PROMPTS[0], max_new_tokens=40, logprobs=3
    )
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    for ours, theirs in zip(result.logprobs, plain.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert ours.top[0][0] == ours.token_id


def test_streams_never_split_a_character():
    engine = tiny_engine(drafter="suffix")
    for seed in range(20):
        params = {"max_new_tokens": 30, "temperature": 1.5, "seed": seed}
        whole = engine.generate(PROMPTS[2], **params)
        events = list(engine.stream(PROMPTS[2], **params))
        assert "".join(event.text for event in events) == whole.text
        assert whole.text == engine.tokenizer.decode(whole.token_ids)
        assert tuple(token for event in events for token in event.token_ids) == whole.token_ids


def test_event_log_counts_what_was_emitted():
    engine = tiny_engine(drafter=f"{ORACLE}:wrong_every=3")
    plain_run(PROMPTS[0])
    engine.take_events()
    results = engine.generate(PROMPTS, max_new_tokens=25)
    log = engine.take_events()
    assert sum(record.emitted for record in log.requests) == sum(len(result.token_ids) for result in results)
    assert all(record.accepted <= record.drafted for record in log.requests)
    assert sum(record.rows for record in log.steps) >= sum(len(prompt) for prompt in PROMPTS)
    assert [record.stop_reason for record in log.requests if record.stop_reason] == ["length"] * 4
    assert len(engine.take_events().steps) == 0


# -- callers ---------------------------------------------------------------------------------------


def test_async_twins_give_the_same():
    engine = tiny_engine(drafter="suffix")
    solo = [plain_run(prompt).token_ids for prompt in PROMPTS]

    async def one(prompt):
        return tuple([token async for event in engine.astream(prompt, max_new_tokens=40) for token in event.token_ids])

    async def run():
        streamed = await asyncio.gather(*(one(prompt) for prompt in PROMPTS))
        batch = await engine.agenerate(PROMPTS, max_new_tokens=40)
        return streamed, [result.token_ids for result in batch]

    streamed, batch = asyncio.run(run())
    assert streamed == solo
    assert batch == solo


def test_cancelled_async_task_frees_its_memory():
    engine = tiny_engine(prefix_cache=False)

    async def run():
        task = asyncio.create_task(engine.agenerate(PROMPTS[0], max_new_tokens=10_000, ignore_eos=True))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await engine.agenerate(PROMPTS[1], max_new_tokens=5)

    assert len(asyncio.run(run()).token_ids) <= 5
    assert engine._scheduler.running == []
    assert engine._model.backend.cache.used_bytes == 0


def test_closing_a_stream_frees_its_memory_and_nobody_elses():
    engine = tiny_engine(prefix_cache=False)
    other = engine.stream(PROMPTS[2], max_new_tokens=20)
    stream = engine.stream(PROMPTS[0], max_new_tokens=1000, ignore_eos=True)
    next(stream)
    stream.close()
    assert tuple(t for event in other for t in event.token_ids) == plain_run(PROMPTS[2], 20).token_ids
    assert engine._model.backend.cache.used_bytes == 0


def test_a_broken_drafter_fails_its_batch_and_not_the_engine():
    engine = tiny_engine()
    with pytest.raises(RuntimeError, match="broken"):
        engine.generate(PROMPTS[0], max_new_tokens=10, drafter="tests.engine.fakes:FailingDrafter")
    assert engine.generate(PROMPTS[0], max_new_tokens=10).token_ids == plain_run(PROMPTS[0], 10).token_ids


BAD = [
    ("", {}, PromptError),
    ([], {}, PromptError),
    ([300], {}, PromptError),
    ([1] * 5000, {}, PromptError),
    ([{"role": "user", "content": "hi"}], {}, PromptError),
    ([1.5], {}, PromptError),
    ("hi", {"max_new_tokens": 0}, OptionError),
    ("hi", {"max_new_tokens": -1}, OptionError),
    ("hi", {"temperature": -0.1}, OptionError),
    ("hi", {"top_p": 0.0}, OptionError),
    ("hi", {"top_p": 1.5}, OptionError),
    ("hi", {"n": 0}, OptionError),
    ("hi", {"stop": [""]}, OptionError),
    ("hi", {"logprobs": -1}, OptionError),
    ("hi", {"rule": "luck"}, OptionError),
    ("hi", {"drafter": "luck"}, OptionError),
    ("hi", {"drafter": "ngram:luck=1"}, OptionError),
    ("hi", {"luck": 1}, OptionError),
    ("hi", {"logit_bias": {999: 1.0}}, OptionError),
]


@pytest.mark.parametrize(("prompt", "params", "error"), BAD)
def test_bad_requests_are_refused_in_one_line(prompt, params, error):
    engine = tiny_engine()
    with pytest.raises(error) as caught:
        engine.generate(prompt, **params)
    assert "\n" not in str(caught.value)
    assert engine._scheduler.idle


def test_what_never_fits_is_refused():
    with pytest.raises(CapacityError):
        tiny_engine(memory_bytes=1000).generate(PROMPTS[0], max_new_tokens=200)


@pytest.mark.parametrize("settings", [{"max_batch": 0}, {"chunk_rows": 2, "max_batch": 8}, {"memory_bytes": -1}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(OptionError):
        tiny_engine(**settings)


def test_settings_that_leave_no_row_for_drafts_are_told_of():
    with pytest.warns(RuntimeWarning, match=r"nothing will be drafted: chunk_rows \(9\)"):
        EngineSettings(drafter="suffix", max_batch=8, chunk_rows=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EngineSettings(drafter="none", max_batch=8, chunk_rows=9)
        EngineSettings(drafter="suffix", max_batch=8, chunk_rows=16)


def test_eos_of_the_model_ends_the_answer():
    engine = tiny_engine()
    result = engine.generate(PROMPTS[0], max_new_tokens=30, logit_bias={EOS: 100.0})
    assert result.token_ids == (EOS,)
    assert result.finish_reason == "stop"
    assert result.text == ""
    ignored = engine.generate(PROMPTS[0], max_new_tokens=30, logit_bias={EOS: 100.0}, ignore_eos=True)
    assert len(ignored.token_ids) == 30
