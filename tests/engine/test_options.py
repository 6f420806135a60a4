"""Every option of a request and every setting of the engine: what it does, and what it refuses.

Conformance 42 (mlx-lm#1297, transformers#46936): options that are parsed and then ignored. The table of
effects must name every field there is.
"""

import dataclasses

import pytest

from draftsmith.core.sampling import SamplingParams
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import load_model
from draftsmith.engine.params import GenerationParams
from draftsmith.errors import CapacityError, OptionError, PromptError
from tests.engine.fakes import EOS, VOCAB, tiny_engine, tiny_model
from tests.engine.scripted import PROMPTS

MODEL = "draft_model:model=other"


def _run(prompt=PROMPTS[0], **params):
    return tiny_engine().generate(prompt, **{"max_new_tokens": 20, **params})


SAMPLED = {"temperature": 1.0, "seed": 3}
EFFECTS = {
    "max_new_tokens": lambda: len(_run(max_new_tokens=5).token_ids) == 5,
    "temperature": lambda: _run(temperature=1.0, seed=3).token_ids != _run().token_ids,
    "top_k": lambda: _run(top_k=1, **SAMPLED).token_ids == _run().token_ids,
    "top_p": lambda: _run(top_p=1e-9, **SAMPLED).token_ids == _run().token_ids,
    "min_p": lambda: _run(min_p=0.999999, **SAMPLED).token_ids == _run().token_ids,
    "repetition_penalty": lambda: _run(repetition_penalty=2.0).token_ids != _run().token_ids,
    "presence_penalty": lambda: _run(presence_penalty=2.0).token_ids != _run().token_ids,
    "frequency_penalty": lambda: _run(frequency_penalty=2.0).token_ids != _run().token_ids,
    "logit_bias": lambda: _run(logit_bias={7: 1e4}).token_ids == (7,) * 20,
    "banned_ids": lambda: _run().token_ids[0] not in _run(banned_ids=[_run().token_ids[0]]).token_ids,
    "min_tokens": lambda: len(_run(min_tokens=6, logit_bias={EOS: 1e4}).token_ids) == 7,
    "rule": lambda: (
        tiny_engine(drafter=MODEL).generate(PROMPTS[0], max_new_tokens=20, rule="chain", **SAMPLED).token_ids
        != _run(**SAMPLED).token_ids
    ),
    "seed": lambda: _run(temperature=1.0, seed=4).token_ids != _run(**SAMPLED).token_ids,
    "stop": lambda: "abc" not in _run(stop="abc", logit_bias={97: 1e4}).text and _run(stop="zzz").text == _run().text,
    "stop_ids": lambda: _run(stop_ids=[_run().token_ids[0]]).finish_reason == "stop",
    "ignore_eos": lambda: len(_run(ignore_eos=True, logit_bias={EOS: 1e4}).token_ids) == 20,
    "logprobs": lambda: [len(item.top) for item in _run(logprobs=2).logprobs] == [2] * 20 and _run().logprobs is None,
    "n": lambda: len(_run(n=3, **SAMPLED).samples) == 3,
    "drafter": lambda: _run(drafter=MODEL).statistics.drafted_tokens > 0,
    "latency_target": lambda: _promised(latency_target=0.25) == {0.25} and _promised() == {None},
}
SETTING_EFFECTS = {
    "drafter": lambda: _stats(drafter=MODEL).drafted_tokens > 0,
    "controller": lambda: _stats(drafter=MODEL, controller="fixed:num_draft=0").drafted_tokens == 0,
    "memory_bytes": lambda: _refused(memory_bytes=5000),
    "max_batch": lambda: max(step.requests for step in _log(max_batch=2).steps) == 2,
    "chunk_rows": lambda: max(step.rows for step in _log(chunk_rows=9).steps) == 9,
    "prefix_cache": lambda: _reused(prefix_cache=False) == 0 and _reused(prefix_cache=True) == len(PROMPTS[2]) - 1,
}


def _promised(**params):
    """What the controller hears of promises (what it makes of them: tests/control/test_goodput.py)."""
    engine = tiny_engine(drafter=MODEL, controller="auto")
    heard, budget = set(), engine.controller.budget

    def listening(signals):
        heard.update(signal.latency for signal in signals)
        return budget(signals)

    engine.controller.budget = listening
    engine.generate(PROMPTS[0], max_new_tokens=8, **params)
    return heard


def _stats(**settings):
    return tiny_engine(**settings).generate(PROMPTS[0], max_new_tokens=20).statistics


def _log(**settings):
    engine = tiny_engine(**settings)
    engine.generate(PROMPTS, max_new_tokens=5)
    return engine.take_events()


def _reused(**settings):
    engine = tiny_engine(**settings)
    engine.generate(PROMPTS[2], max_new_tokens=3)
    return engine.generate(PROMPTS[2], max_new_tokens=3).statistics.reused_tokens


def _refused(**settings):
    try:
        tiny_engine(**settings).generate(PROMPTS[0], max_new_tokens=20)
    except CapacityError:
        return True
    return False


def test_every_option_is_in_the_table_below():
    """42 (mlx-lm#1297)."""
    options = {item.name for cls in (GenerationParams, SamplingParams) for item in dataclasses.fields(cls)}
    assert set(EFFECTS) == options - {"sampling"}
    assert set(SETTING_EFFECTS) == {item.name for item in dataclasses.fields(EngineSettings)}


@pytest.mark.parametrize("option", EFFECTS)
def test_every_option_has_an_effect(option):
    """42 (mlx-lm#1297): parsed is not enough."""
    assert EFFECTS[option]()


@pytest.mark.parametrize("setting", SETTING_EFFECTS)
def test_every_setting_has_an_effect(setting):
    """42 (transformers#46936)."""
    assert SETTING_EFFECTS[setting]()


# -- what is refused -------------------------------------------------------------------------------

BAD_PROMPTS = [
    None,
    5,
    b"abc",
    {"role": "user", "content": "x"},
    [[]],
    ["hi", None],
    [True, 2],
    [1, "a"],
    "\ud800",
    {1},
]
BAD_PARAMS = [
    {"stop": 5},
    {"stop": [5]},
    {"stop": ""},
    {"stop": False},
    {"drafter": ""},
    {"drafter": "os:path"},
    {"drafter": ":Name"},
    {"drafter": "draftsmith.drafters.base:Drafter"},
    {"stop": [[]]},
    {"stop_ids": 5},
    {"stop_ids": "7"},
    {"stop_ids": ["a"]},
    {"stop_ids": [-1]},
    {"stop_ids": [VOCAB]},
    {"stop_ids": [True]},
    {"banned_ids": 5},
    {"banned_ids": ["x"]},
    {"banned_ids": [{}]},
    {"banned_ids": range(VOCAB)},
    {"logit_bias": [1]},
    {"logit_bias": 5},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {1: "a"}},
    {"drafter": 5},
    {"rule": 5},
    {"ignore_eos": "no"},
    {"n": 2.0},
    {"latency_target": 0},
    {"latency_target": -1.0},
    {"latency_target": "fast"},
    {"n": 257},
    {"seed": "x"},
    {"seed": 1.0},
    {"logprobs": True},
    {"logprobs": 65},
    {"temperature": "1"},
    {"temperature": None},
    {"temperature": float("nan")},
    {"top_k": 1.5},
    {"min_tokens": -1},
    {"max_new_tokens": "5"},
    {"max_new_tokens": True},
]
BAD_SETTINGS = [
    {"drafter": 5},
    {"drafter": "ngram:min_ngram=0"},
    {"controller": 5},
    {"controller": "luck"},
    {"memory_bytes": "1"},
    {"memory_bytes": 1.5},
    {"memory_bytes": 0},
    {"max_batch": True},
    {"chunk_rows": 4.0},
    {"prefix_cache": "no"},
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=ascii)
def test_prompts_of_the_wrong_kind_are_refused_in_one_line(prompt):
    engine = tiny_engine()
    for call in (engine.generate, engine.stream, engine.encode):
        with pytest.raises(PromptError) as caught:
            call(prompt)
        assert "\n" not in str(caught.value)
    assert engine._scheduler.idle


def test_text_the_model_has_no_rows_for_is_refused():
    """A tokenizer may know more tokens than its model has rows; that must not break the batch."""
    engine = Engine(tiny_model(), EngineSettings(drafter="none", controller="fixed", memory_bytes=1 << 24))
    engine.tokenizer.encode = lambda text, *, special: [1, VOCAB]
    with pytest.raises(PromptError, match=f"token id {VOCAB} is outside"):
        engine.generate("hi")


@pytest.mark.parametrize("params", BAD_PARAMS, ids=str)
def test_values_of_the_wrong_kind_are_refused_in_one_line(params):
    engine = tiny_engine()
    for call in (engine.generate, engine.stream, engine.astream):
        with pytest.raises(OptionError) as caught:
            call("hi", **params)
        assert "\n" not in str(caught.value)
    assert engine._scheduler.idle


@pytest.mark.parametrize("settings", BAD_SETTINGS, ids=str)
def test_bad_settings_are_refused_in_one_line(settings):
    with pytest.raises(OptionError) as caught:
        tiny_engine(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [{"name": 5}, {"threads": "4"}, {"threads": True}, {"threads": 0}, {"threads": 100_000}, {"dtype": "int4"}],
)
def test_bad_loading_is_refused_before_anything_is_read(arguments):
    with pytest.raises(OptionError):
        load_model(**{"name": "nowhere", **arguments})
