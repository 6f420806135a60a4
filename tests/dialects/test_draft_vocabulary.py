"""d2t as offsets and as ids, t2d, orders of rows; everything that names no vocabulary."""

import pytest
import torch

from draftsmith.errors import ModelFileError, UnsupportedError
from tests.dialects.support import IDS, changed, foreign, published_of, read


@pytest.fixture(params=["eagle3", "eagle3-speculators"])
def dialect(request):
    return request.param


def ids_of(published, dialect):
    return read(published, dialect)[0].tensors["draft_ids"].tolist()


def test_offsets_by_hand(dialect):
    """Ids 0 2 3 5 6 8 ...: draft id 1 stands for 2, so its offset is 1; draft id 5 for 8: 3."""
    published = published_of("eagle3", dialect)
    assert IDS[:6] == [0, 2, 3, 5, 6, 8]
    assert published.load("d2t")[:6].tolist() == [0, 1, 1, 2, 2, 3]
    assert published.load("t2d")[:9].tolist() == [True, False, True, True, False, True, True, False, True]
    assert ids_of(published, dialect) == IDS


def test_ids_in_place_of_offsets_are_recognised_by_the_mask(dialect):
    published = published_of("eagle3", dialect)
    found, notes = read(changed(published, tensors={"d2t": torch.tensor(IDS)}), dialect)
    assert found.tensors["draft_ids"].tolist() == IDS
    assert "d2t holds ids" in notes["draft ids"]


def test_without_a_mask_offsets_are_believed(dialect):
    published = changed(published_of("eagle3", dialect), without=("t2d",))
    assert ids_of(published, dialect) == IDS


def test_rows_in_another_order_are_sorted(dialect):
    published = published_of("eagle3", dialect)
    order = torch.arange(len(IDS)).roll(5)
    shuffled = torch.tensor(IDS)[order]
    tensors = {"d2t": shuffled - torch.arange(len(IDS)), "lm_head.weight": published.load("lm_head.weight")[order]}
    found, notes = read(changed(published, tensors=tensors), dialect)
    assert "rows are sorted" in notes["draft ids"]
    assert found.tensors["draft_ids"].tolist() == IDS
    assert torch.equal(found.tensors["lm_head.weight"], published.load("lm_head.weight"))


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"d2t": torch.zeros(3, dtype=torch.int64)}, "'d2t' has shape"),
        ({"d2t": torch.zeros(len(IDS))}, "whole numbers"),
        ({"t2d": torch.ones(9, dtype=torch.bool)}, "'t2d' has shape"),
        ({"t2d": torch.ones(64, dtype=torch.bool)}, "do not name the same ids"),
    ],
)
def test_tensors_that_name_no_vocabulary(dialect, tensors, complaint):
    with pytest.raises(ModelFileError, match=complaint):
        read(changed(published_of("eagle3", dialect), tensors=tensors), dialect)


@pytest.mark.parametrize("shift", [-1, 30])
def test_ids_outside_the_vocabulary(dialect, shift):
    published = published_of("eagle3", dialect)
    tensors = {"d2t": published.load("d2t") + shift}
    with pytest.raises(ModelFileError, match="distinct ids from 0 to 63"):
        read(changed(published, tensors=tensors, without=("t2d",)), dialect)


def test_a_small_head_needs_offsets(dialect):
    with pytest.raises(ModelFileError, match="'d2t' is missing"):
        read(changed(published_of("eagle3", dialect), without=("d2t", "t2d")), dialect)


def test_vllms_list_of_ids():
    published = published_of("medusa-few", "medusa-vllm")
    assert published.load("token_map").tolist() == IDS
    assert (published.config["truncated_vocab_size"], published.config["original_lm_head"]) == (len(IDS), True)
    order = torch.arange(len(IDS)).flip(0)
    tensors = {"token_map": torch.tensor(IDS)[order], "lm_heads.0.weight": published.load("lm_heads.0.weight")[order]}
    found, _ = read(changed(published, tensors=tensors), "medusa-vllm")
    assert torch.equal(found.tensors["lm_heads.0.weight"], published.load("lm_heads.0.weight"))
    with pytest.raises(ModelFileError, match="'token_map' is missing"):
        read(changed(published, without=("token_map",)), "medusa-vllm")


@pytest.mark.parametrize(("dialect", "drafter"), [("medusa", "medusa-few"), ("medusa2", "medusa-target-few")])
def test_dialects_without_a_vocabulary_say_so(dialect, drafter):
    with pytest.raises(UnsupportedError, match="no draft vocabulary"):
        published_of(drafter, dialect)


def test_a_vocabulary_beside_the_targets_head_stays_with_us():
    """Others draft all ids with the target's own head; ours come back from the mark."""
    published = published_of("eagle2-few", "eagle1")
    assert read(published, "eagle1")[0].tensors["draft_ids"].tolist() == IDS
    assert "draft_ids" not in read(foreign(published), "eagle1")[0].tensors
    mark = {**published.config["draftsmith"], "draft_ids": [3, 2]}
    with pytest.raises(ModelFileError, match="must rise"):
        read(changed(published, {"draftsmith": mark}), "eagle1")
