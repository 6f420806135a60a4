"""Native to dialect to native, and dialect to native to dialect: the same bits, for every dialect and drafter."""

import json

import pytest
import torch

from draftsmith.dialects.convert import export, write_export
from draftsmith.dialects.dialect import Choices
from draftsmith.dialects.published import open_published
from draftsmith.dialects.table import DIALECTS, detect, dialect_named
from draftsmith.drafters.checkpoint import build_module, load_module, save_checkpoint
from tests.dialects.support import HELD, PAIRS, foreign, make_info, make_target, native_of, published_of, read


def assert_same(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def test_every_dialect_is_tried():
    assert set(HELD) == set(DIALECTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("dialect", "drafter"), PAIRS)
def test_native_to_dialect_to_native(dialect, drafter, dtype, tmp_path):
    native = native_of(drafter, dtype)
    exported = export(native, dialect_named(dialect), make_target(), Choices())
    write_export(exported, tmp_path / "out")
    published = open_published(str(tmp_path / "out"))
    assert detect(published).name == dialect
    again, _ = read(published, dialect)
    assert (again.method, dict(again.target)) == (native.method, dict(native.target))
    assert json.loads(json.dumps(again.config)) == native.config
    assert again.about == native.about
    assert_same(native.tensors, again.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("dialect", "drafter"), PAIRS)
def test_dialect_to_native_to_dialect(dialect, drafter, dtype, tmp_path):
    """Also of files that know nothing of us; what is the target's own is written where it was."""
    # A first id of 1 is ambiguous without our mark, so it is pinned.
    pinned = {"layer_ids": "applied"} if drafter == "eagle3-all" else {}
    made = foreign(published_of(drafter, dialect, dtype, with_target=True))
    native, _ = read(made, dialect, **pinned)
    again = export(native, dialect_named(dialect), make_target(), Choices(with_target=True, **pinned))
    assert_same({name: made.load(name) for name in made.names}, again.tensors)
    kept = {key: value for key, value in again.config.items() if key != "draftsmith"}
    assert json.loads(json.dumps(kept)) == made.config


@pytest.mark.parametrize(("dialect", "drafter"), PAIRS)
def test_drafts_stay_what_they_were(dialect, drafter, tmp_path):
    """The module built of an import computes what the module of the original does, through files."""
    info, native = make_info(), native_of(drafter)
    again, _ = read(published_of(drafter, dialect), dialect)
    save_checkpoint(again.__class__(**{**vars(again), "path": tmp_path / "native"}))
    ours, theirs = build_module(native, info), load_module(tmp_path / "native", native.method, info)
    assert ours.config == theirs.config
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_one_dialect_to_another():
    native, _ = read(published_of("eagle3.1", "eagle3"), "eagle3")
    between = export(native, dialect_named("eagle3-speculators"), make_target(), Choices())
    assert "layers.0.hidden_norm.weight" in between.tensors
    assert_same(
        between.tensors, {name: published_of("eagle3.1", "eagle3-speculators").load(name) for name in between.tensors}
    )
