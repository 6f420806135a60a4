"""Engines with recurrent drafters: the output is the plain run's whatever happens, and their state follows."""

import pytest
import torch

from draftsmith.engine.params import GenerationParams
from tests.drafters.trained_fakes import info_of, random_checkpoint
from tests.engine.fakes import EOS, tiny_engine, tiny_model

SYSTEM = list(b"You are a helpful machine. ")
PROMPTS = [SYSTEM + list(text) for text in (b"Who?", b"What is it?", b"Who are you then?")] + [[7], list(b"abcabc")]
SAMPLINGS = [{}, {"temperature": 0.9}, {"repetition_penalty": 1.3, "logit_bias": {5: 2.0}}]
SELECTIONS = ["eagle1", "eagle2", "eagle3", "eagle3:tree=dynamic:top_k=3:depth=3", "eagle3:tree=3x2", "mtp"]


def selection(text):
    method, _, options = text.partition(":")
    path = random_checkpoint(method, info_of(tiny_model(0, torch.float32).backend, frozenset({EOS})))
    return f"{method}:path={path}" + (f":{options}" if options else "")


def engine(**settings):
    settings.setdefault("controller", "fixed:num_draft=5")
    return tiny_engine(dtype=torch.float64, **settings)


@pytest.fixture(scope="module")
def plain():
    """Answers of the plain run, by (prompt, sampling)."""
    runs = engine(prefix_cache=False)
    return [
        [runs.generate(prompt, max_new_tokens=20, seed=3, n=2 if params else 1, **params) for params in SAMPLINGS]
        for prompt in PROMPTS
    ]


def ids(result):
    return [sample.token_ids for sample in result.samples or (result,)]


@pytest.mark.parametrize("text", SELECTIONS)
def test_prefixes_samples_and_batches_change_nothing(text, plain):
    drafting = engine(drafter=selection(text), max_batch=3, chunk_rows=18)
    drafting.take_events()
    for _turn in range(2):  # the second time every prompt has been seen
        for number, params in enumerate(SAMPLINGS):
            n = 2 if params else 1
            for result, expected in zip(
                drafting.generate(PROMPTS, max_new_tokens=20, seed=3, n=n, **params), plain, strict=True
            ):
                assert ids(result) == ids(expected[number])
    records = drafting.take_events().requests
    drafting_steps = [record for record in records if not record.prompt]
    # Only the last token of an answer is never drafted below: nothing was skipped for want of features.
    idle = [record for record in drafting_steps if not record.drafted and record.emitted and not record.stop_reason]
    assert not idle, idle[:3]
    drafter = next(iter(drafting._drafters.values()))
    drafting.clear_prefixes()
    assert not drafter._features and not drafter._runner._states


@pytest.mark.parametrize("text", ["eagle3", "eagle2", "mtp"])
def test_preempted_sequences_come_back_with_the_same_draws(text):
    """Short prompts fit side by side; their long answers do not."""
    chosen, prompts = selection(text), [[7], [70, 71], [170]]
    roomy = engine(drafter=chosen, prefix_cache=False)
    sequence = roomy._make_sequences([1], GenerationParams.create())[0]
    tight = engine(drafter=chosen, memory_bytes=int(1.5 * roomy._scheduler._bytes(sequence, 92)), prefix_cache=False)
    for params in SAMPLINGS[:2]:
        params = {**params, "max_new_tokens": 90, "seed": 3, "ignore_eos": True}
        expected = roomy.generate(prompts, drafter="none", **params)
        found = tight.generate(prompts, **params)
        assert [ids(result) for result in found] == [ids(result) for result in expected]
        assert sum(result.statistics.preemptions for result in found) > 0


@pytest.mark.parametrize("rule", ["chain", "block", "recursive", "traversal", "match"])
@pytest.mark.parametrize("text", SELECTIONS)
def test_every_rule_runs(text, rule):
    drafting = engine(drafter=selection(text))
    result = drafting.generate(PROMPTS[0], max_new_tokens=15, temperature=1.0, rule=rule, seed=1, ignore_eos=True)
    assert len(result.token_ids) == 15
    assert result.statistics.drafted_tokens > 0
