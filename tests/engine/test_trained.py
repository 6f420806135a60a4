"""Engines with recurrent drafters: the output is the plain run's whatever happens, and their state follows."""

import pytest
import torch

from draftsmith.engine.scheduler import Scheduler
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
def test_preempted_sequences_come_back_with_the_same_draws(text, plain, monkeypatch):
    chosen = selection(text)
    roomy = engine(drafter=chosen)
    one = roomy._scheduler._bytes(roomy._make_sequences([1], _params(roomy))[0], 60)
    tight = engine(drafter=chosen, memory_bytes=int(1.4 * one), max_batch=4, chunk_rows=40)
    preempted = []
    real = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, sequence: (preempted.append(1), real(self, sequence))[1])
    for number in (0, 1):
        params = SAMPLINGS[number]
        found = tight.generate(PROMPTS, max_new_tokens=20, seed=3, n=2 if params else 1, **params)
        for result, expected in zip(found, plain, strict=True):
            assert ids(result) == ids(expected[number])
    assert preempted


def _params(engine):
    from draftsmith.engine.params import GenerationParams

    return GenerationParams.create(max_new_tokens=20)


@pytest.mark.parametrize("rule", ["chain", "block", "recursive", "traversal", "match"])
@pytest.mark.parametrize("text", SELECTIONS)
def test_every_rule_runs(text, rule):
    drafting = engine(drafter=selection(text))
    result = drafting.generate(PROMPTS[0], max_new_tokens=15, temperature=1.0, rule=rule, seed=1, ignore_eos=True)
    assert len(result.token_ids) == 15
    assert result.statistics.drafted_tokens > 0
