"""`auto` stands for the best drafter there is, and what is told is the drafter it stands for."""

import pytest
import torch

from draftsmith.drafters import shipped
from draftsmith.drafters.checkpoint import save_module
from draftsmith.drafters.hybrid import HybridDrafter
from draftsmith.drafters.suffix import SuffixDrafter
from draftsmith.errors import OptionError
from tests.drafters.trained_fakes import info_of, random_module
from tests.engine.fakes import tiny_engine
from tests.models.fakes import tiny_backend

PROMPT = [5, 9, 2, 5, 9, 2, 7, 5, 9]


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """A package that ships an EAGLE-3 for the tiny target."""
    monkeypatch.setattr(shipped, "ASSETS", tmp_path)
    info = info_of(tiny_engine_backend())
    save_module(tmp_path / "tiny-eagle3", "eagle3", random_module("eagle3", info), "tiny", info, {})
    return tmp_path


def tiny_engine_backend():
    return tiny_backend(0, dtype=torch.float32, vocab_size=tiny_engine().spec.vocab_size)


def test_auto_without_a_shipped_drafter_is_suffix(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "ASSETS", tmp_path)
    engine = tiny_engine(drafter="auto")
    assert engine.drafter_name == "suffix"
    assert isinstance(engine.drafter("auto"), SuffixDrafter)
    engine.generate(PROMPT, max_new_tokens=8)
    engine.generate(PROMPT, max_new_tokens=8, drafter="auto")
    assert {row.drafter for row in engine.take_events().requests} == {"suffix"}


def test_auto_takes_the_shipped_drafter_beside_the_suffix_trees(assets):
    engine = tiny_engine(drafter="auto", controller="fixed:num_draft=4")
    assert engine.drafter_name == "hybrid:other=eagle3"
    assert isinstance(engine.drafter("auto"), HybridDrafter)
    plain = tiny_engine().generate(PROMPT, max_new_tokens=24)
    result = engine.generate(PROMPT, max_new_tokens=24)
    assert result.token_ids == plain.token_ids
    assert result.statistics.drafted_tokens > 0


def test_auto_takes_no_options():
    with pytest.raises(OptionError, match="auto:path=x: unknown option 'path'"):
        tiny_engine(drafter="auto:path=x")
