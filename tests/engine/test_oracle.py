"""The engine gives the tokens of `examples/plain_speculation.py`, which has no cache, no batch and no scheduler.

Both run on the same tiny float64 model, so ids are compared exactly, plain and with prompt lookup.
"""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler
from draftsmith.engine import loading
from draftsmith.engine.params import GenerationParams
from draftsmith.models.backend import RowGroup
from tests.engine.fakes import EOS, VOCAB, tiny_engine, tiny_model

PATH = Path(__file__).parents[2] / "examples" / "plain_speculation.py"
EXAMPLE = runpy.run_path(str(PATH), run_name="plain_speculation")
SAMPLINGS = {
    "greedy": {},
    "greedy+penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.5},
    "greedy+bias": {"logit_bias": {5: 2.0, 120: -torch.inf}, "banned_ids": [65, 66], "min_tokens": 12},
    "coupled": {"temperature": 0.9, "seed": 11},
    "coupled+penalties": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "coupled+filters": {"temperature": 0.7, "seed": 5, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
}
DRAFTS = {"plain": "none", "prompt lookup": "ngram:min_ngram=1:max_ngram=3:max_draft=8"}
PROMPTS = [list(b"abc abc abc"), list(b"x"), list(b"the cat sat on the mat, the cat sat")]
SPECS = {"full": {}, "windowed": {"layer_windows": (None, 8)}}
NUM_TOKENS = 30


def scorer(spec):
    """The example's `score` over the tiny model: everything from scratch, in a sequence of its own."""
    backend = tiny_model(**spec).backend

    def score(ids):
        backend.cache.open(0)
        backend.cache.reserve(0, len(ids))
        logits_NV = backend.score([RowGroup(0, ids, range(-1, len(ids) - 1), 0)]).logits[0]
        backend.cache.close(0)
        return logits_NV

    return score


def speculate(score, draft, prompt, params, end_ids):
    """What the example emits."""
    settings = GenerationParams.create(**params)
    sampler = Sampler(settings.sampling, prompt, end_ids, VOCAB)
    random = RequestRandom(params.get("seed", 0), 0)
    return EXAMPLE["speculate"](score, draft, prompt, NUM_TOKENS, sampler, random, end_ids)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_engine_equals_the_example(sampling, spec):
    params = SAMPLINGS[sampling]
    score = scorer(SPECS[spec])
    for prompt in PROMPTS:
        free = speculate(score, EXAMPLE["no_draft"], prompt, params, frozenset({EOS}))
        # An id that the run meets in its middle, so that the end falls inside it.
        for end_ids in (frozenset({EOS}), frozenset({EOS, free.tokens[len(free.tokens) // 2]})):
            plain = speculate(score, EXAMPLE["no_draft"], prompt, params, end_ids)
            lookup = speculate(score, EXAMPLE["prompt_lookup"], prompt, params, end_ids)
            assert lookup.tokens == plain.tokens
            assert lookup.steps <= plain.steps == len(plain.tokens)
            for selection in DRAFTS.values():
                engine = tiny_engine(spec=SPECS[spec], drafter=selection)
                result = engine.generate(prompt, max_new_tokens=NUM_TOKENS, stop_ids=end_ids - {EOS}, **params)
                assert list(result.token_ids) == plain.tokens, (selection, prompt, end_ids)
                assert result.finish_reason == ("stop" if plain.tokens[-1] in end_ids else "length")


def test_the_comparison_is_not_empty():
    """Prompt lookup accepts something in both, and takes equally few steps where both draft the same."""
    score = scorer({})
    prompt = list(b"abc abc abc")
    lookup = speculate(score, EXAMPLE["prompt_lookup"], prompt, {}, frozenset())
    assert lookup.steps < len(lookup.tokens)
    engine = tiny_engine(drafter=DRAFTS["prompt lookup"])
    result = engine.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert result.statistics.accepted_tokens > 0
    # The engine's first token comes with the prompt and is no step of its own; its last step drafts less.
    assert abs(result.statistics.steps + 1 - lookup.steps) <= 1


def test_example_runs(monkeypatch, capsys):
    """`main` as a reader starts it, on the tiny model in place of the default one."""
    monkeypatch.setattr(loading, "load_model", lambda name: tiny_model())
    monkeypatch.setattr(sys, "argv", [str(PATH), "abc abc", "abc abc"])
    EXAMPLE["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plain: 40 tokens in 40 forwards")
    assert lines[1].startswith("prompt lookup: 40 tokens in ")
    assert int(lines[1].split()[5]) < 40
    assert lines[2] == "same ids: True"
