"""Recurrent drafters beside a native target in an engine: the C++ runner drafts, and ids are the plain run's."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from draftsmith.drafters.native_rows import NativeRows
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel
from tests.drafters.trained_fakes import checkpoint_of, info_of, random_module
from tests.engine.fakes import EOS, VOCAB, ByteTokenizer
from tests.models.native_models import Model, make_native

PROMPTS = [list(b"You are a helpful machine. Who?"), list(b"You are a helpful machine. What?"), [7], list(b"abcabc")]
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9}]
SELECTIONS = ["eagle3", "eagle3:bits=8:tree=dynamic:top_k=3:depth=3", "eagle2", "eagle1:tree=3x2", "mtp:max_draft=3"]
FIELDS = {"head_dim": 16, "width": 32, "vocab_size": VOCAB}


def make_engine(threads: int, **settings: Any) -> Engine:
    model = LoadedModel(
        name="tiny",
        backend_name="native",
        backend=make_native(Model(FIELDS), threads),
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        chat=None,
        eos_ids=frozenset({EOS}),
    )
    return Engine(model, EngineSettings(**settings))


def selection(text: str) -> str:
    method, _, options = text.partition(":")
    info = info_of(make_native(Model(FIELDS)), frozenset({EOS}))
    path = checkpoint_of(method, random_module(method, info), info, f"native-{method}")
    return f"{method}:path={path}" + (f":{options}" if options else "")


def answers(engine: Engine, **params: Any) -> list[list[int]]:
    results = engine.generate(copy.deepcopy(PROMPTS), max_new_tokens=30, seed=3, ignore_eos=True, **params)
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("text", SELECTIONS)
def test_drafting_in_c_changes_no_token(text: str, threads: int) -> None:
    plain = make_engine(1)
    drafting = make_engine(threads, drafter=selection(text), controller="fixed:num_draft=5", max_batch=3, chunk_rows=18)
    for turn in range(2):
        for params in SAMPLINGS:
            assert answers(drafting, **params) == answers(plain, **params), f"turn {turn}, {params}"
    drafter: Any = next(iter(drafting._drafters.values()))
    assert isinstance(drafter._runner, NativeRows)
    records = drafting.take_events().requests
    assert sum(record.drafted for record in records) > 100
