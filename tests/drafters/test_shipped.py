"""Drafters without a directory come from the package, for the targets they were trained for alone."""

import dataclasses

import pytest
import torch

from draftsmith.drafters import shipped
from draftsmith.drafters.checkpoint import save_module
from draftsmith.drafters.eagle1 import Eagle1Drafter
from draftsmith.drafters.eagle3 import Eagle3Drafter
from draftsmith.errors import ModelFileError, OptionError
from draftsmith.models.spellings import vocabulary_digest
from tests.drafters.trained_fakes import info_of, random_module
from tests.models.fakes import tiny_backend
from tests.training.tiny import LETTERS


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
