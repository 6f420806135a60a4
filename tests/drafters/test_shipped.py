"""Drafters without a directory come from the package, for the targets they were trained for alone."""

import dataclasses
import json

import pytest
import torch

from draftsmith.drafters import shipped
from draftsmith.drafters.checkpoint import save_module
from draftsmith.drafters.eagle1 import Eagle1Drafter
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.engine.engine import Engine
from draftsmith.errors import ModelFileError, OptionError
from draftsmith.models.spellings import vocabulary_digest
from tests.drafters.trained_fakes import info_of, random_module
from tests.models.fakes import tiny_backend
from tests.training.tiny import LETTERS

ASSETS = shipped.ASSETS


class Capitals(type(LETTERS)):
    """The same ids for other texts."""

    def token_text(self, token):
        return f"T{token}"


@pytest.fixture
def info(tmp_path, monkeypatch):
    """A target, with an EAGLE-3 for it among the package's drafters."""
    monkeypatch.setattr(shipped, "ASSETS", tmp_path)
    info = dataclasses.replace(info_of(tiny_backend(0, dtype=torch.float32)), tokenizer=LETTERS)
    about = {"tokenizer": vocabulary_digest(LETTERS)}
    save_module(tmp_path / "tiny-eagle3", "eagle3", random_module("eagle3", info), "tiny", info, about)
    return info


def test_a_shipped_drafter_needs_no_path(info, tmp_path):
    assert isinstance(Eagle3Drafter.create(Eagle3Drafter.Options(), info), Eagle3Drafter)
    assert shipped.weights_for("", "eagle3", frozenset(), info) == tmp_path / "tiny-eagle3"
    assert shipped.weights_for("mine", "eagle3", frozenset(), info).name == "mine"


def test_other_methods_and_other_targets_find_none(info):
    with pytest.raises(OptionError, match=r"eagle1:path=DIRECTORY \(shipped: eagle3 for tiny\)"):
        Eagle1Drafter.create(Eagle1Drafter.Options(), info)
    assert shipped.weights_for("", "eagle2", frozenset({"eagle3"}), info).name == "tiny-eagle3"
    wider = dataclasses.replace(info_of(tiny_backend(0, dtype=torch.float32, num_layers=3)), tokenizer=LETTERS)
    for other in (wider, dataclasses.replace(info, tokenizer=Capitals())):
        with pytest.raises(OptionError, match="eagle3:path=DIRECTORY"):
            Eagle3Drafter.create(Eagle3Drafter.Options(), other)


def test_a_broken_asset_is_named(info, tmp_path):
    (tmp_path / "tiny-eagle3" / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"tiny-eagle3.config\.json: not valid JSON"):
        Eagle3Drafter.create(Eagle3Drafter.Options(), info)


def test_what_ships_is_small_and_says_how_it_was_made():
    known = shipped.shipped_drafters(ASSETS)
    assert {item.method for item in known} >= {"eagle3", "mtp"}
    sizes = [sum(file.stat().st_size for file in item.path.iterdir()) for item in known]
    assert max(sizes) < 20e6 and sum(sizes) < 60e6
    for item in known:
        log = [json.loads(line) for line in (item.path / "train.jsonl").read_text().splitlines()]
        begun = max(place for place, line in enumerate(log) if line["kind"] == "start" and line["step"] == 0)
        last_run = [line for line in log[begun:] if line["kind"] == "validation"]
        best = max(last_run, key=lambda line: line["greedy_tokens_per_step"])
        told = item.about["validation"]
        assert (told["step"], told["greedy_tokens_per_step"]) == (best["step"], best["greedy_tokens_per_step"])
        assert f"{told['greedy_tokens_per_step']:.2f} tokens per step" in (item.path / "README.md").read_text()
        assert len(item.about["tokenizer"]) == 64


@pytest.mark.parametrize(("method", "least"), [("eagle3", 1.4), ("mtp", 1.2)])
def test_the_shipped_drafter_drafts_for_smollm2(method, least):
    """Ids as without it, and drafts that come true: a wrong tap, offset or vocabulary would leave nothing."""
    prompt = [{"role": "user", "content": "Explain in three sentences why the sky is blue."}]
    engine = Engine.load("smollm2", drafter=method, controller="fixed:num_draft=3", prefix_cache=False)
    plain = engine.generate(prompt, max_new_tokens=64, drafter="none")
    result = engine.generate(prompt, max_new_tokens=64)
    assert result.statistics.drafter == method
    assert engine.backend_name != "native" or result.token_ids == plain.token_ids
    assert result.statistics.tokens_per_step > least
