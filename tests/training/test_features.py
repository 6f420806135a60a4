"""Features: whatever the chunks, those of scoring each text alone in one forward; and the same from disk."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftsmith.errors import DataError
from draftsmith.models.backend import RowGroup
from draftsmith.training.corpus import Corpus
from draftsmith.training.feature_cache import CachedFeatures
from draftsmith.training.features import (
    MaskedText,
    OnlineFeatures,
    RememberedFeatures,
    TargetScorer,
    collate,
    split_rows,
)
from tests.models.fakes import tiny_backend

TAPS = frozenset({0, 1, 2})


def some_texts(lengths=(7, 1, 12, 5), seed=0):
    random = torch.Generator().manual_seed(seed)
    return [
        MaskedText(
            tokens=torch.randint(0, 64, (length,), generator=random),
            answer=torch.arange(length) >= length // 2,
        )
        for length in lengths
    ]


def alone(backend, text):
    """One forward over one text, all its logits."""
    backend.cache.open(99)
    backend.cache.reserve(99, len(text.tokens))
    tokens = text.tokens.tolist()
    scored = backend.score([RowGroup(99, tokens, range(-1, len(tokens) - 1), 0)], TAPS | {"last_hidden"})
    backend.cache.close(99)
    return scored.logits[0], scored.taps[0]


@pytest.mark.parametrize("max_rows", [1, 3, 8, 512])
def test_features_do_not_depend_on_the_forwards(max_rows):
    backend = tiny_backend(0)
    texts = some_texts()
    found = TargetScorer(backend, TAPS, max_rows).score(texts)
    for text, features in zip(texts, found, strict=True):
        logits, taps = alone(backend, text)
        assert set(features.taps) == TAPS | {"last_hidden"}
        for tap, rows in taps.items():
            torch.testing.assert_close(features.taps[tap], rows.float(), rtol=1e-5, atol=1e-5)
        judged = torch.zeros(len(text.tokens), dtype=torch.bool)
        judged[:-1] = text.answer[1:]
        assert torch.equal(features.best_L, torch.where(judged, logits.argmax(-1), 0))
        expected = torch.where(judged, torch.logsumexp(logits, -1), 0.0).float()
        torch.testing.assert_close(features.log_total_L, expected)
    assert backend.cache.sequence_ids == []


def test_a_window_and_another_sequence_are_left_alone():
    backend = tiny_backend(0, layer_windows=(None, 4))
    backend.cache.open(5)
    texts = some_texts((20, 3))
    found = TargetScorer(backend, TAPS, 4).score(texts)
    _, taps = alone(backend, texts[0])
    torch.testing.assert_close(found[0].taps[2], taps[2].float(), rtol=1e-5, atol=1e-5)
    assert backend.cache.sequence_ids == [5]


def test_a_failed_forward_leaves_no_sequence_open(monkeypatch):
    backend = tiny_backend(0)
    calls = []
    score = backend.score

    def failing(groups, taps):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(groups, taps)

    monkeypatch.setattr(backend, "score", failing)
    with pytest.raises(KeyboardInterrupt):
        TargetScorer(backend, TAPS, 4).score(some_texts())
    assert backend.cache.sequence_ids == []


def test_rows_are_split_in_order_and_within_bounds():
    lengths = [5, 1, 9, 4]
    groups = list(split_rows(lengths, 4))
    assert all(sum(end - start for _, start, end in group) <= 4 for group in groups)
    assert all(len({place for place, _, _ in group}) == len(group) for group in groups)
    for place, length in enumerate(lengths):
        pieces = [(start, end) for group in groups for where, start, end in group if where == place]
        assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
        assert pieces[-1][1] == length


def test_a_batch_is_padded_at_the_end():
    backend = tiny_backend(0)
    texts = some_texts((3, 6))
    batch = collate(texts, TargetScorer(backend, TAPS).score(texts))
    assert batch.tokens_BL.shape == (2, 6)
    assert batch.lengths_B.tolist() == [3, 6]
    assert batch.tokens_BL[0, :3].tolist() == texts[0].tokens.tolist()
    assert not batch.answer_BL[0, 3:].any()
    assert {tap: rows.shape for tap, rows in batch.taps.items()} == dict.fromkeys(TAPS | {"last_hidden"}, (2, 6, 32))


def online(data, backend, max_rows=512):
    corpus = Corpus.open(data)
    return corpus, OnlineFeatures(corpus, TargetScorer(backend, TAPS, max_rows))


def cached(path, data, backend, kept=None, taps=TAPS, **key):
    corpus = Corpus.open(data)
    scorer = TargetScorer(backend, taps)
    return CachedFeatures(path, corpus, range(len(corpus)) if kept is None else kept, scorer, {"model": "tiny", **key})


def same(left, right, atol):
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.best_L, other.best_L)
        assert torch.equal(one.log_total_L, other.log_total_L)
        assert set(one.taps) == set(other.taps)
        for tap in one.taps:
            torch.testing.assert_close(one.taps[tap].float(), other.taps[tap].float(), rtol=1e-3, atol=atol)


def test_the_cache_holds_what_scoring_gives(data, tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.training.feature_cache.SHARD_TOKENS", 60)
    backend = tiny_backend(0, dtype=torch.float32)
    cache = cached(tmp_path / "cache", data, backend)
    told = []
    assert cache.fill(lambda done, whole: told.append((done, whole)))
    assert told[-1][0] == told[-1][1] > 2
    corpus, source = online(data, backend)
    indices = [3, 0, len(corpus) - 1]
    same(cache.features(indices), source.features(indices), atol=1e-3)
    assert not [file for file in (tmp_path / "cache").iterdir() if file.name.startswith(".")]


def test_filling_goes_on_where_it_stopped(data, tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.training.feature_cache.SHARD_TOKENS", 60)
    backend = tiny_backend(0, dtype=torch.float32)
    cache = cached(tmp_path / "cache", data, backend)
    answers = iter([False, False, True])
    assert not cache.fill(lambda done, whole: None, lambda: next(answers))
    first = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").glob("features-*")}
    assert len(first) == 2
    again = cached(tmp_path / "cache", data, backend)
    assert again.fill(lambda done, whole: None)
    assert not again.missing
    assert all(file.stat().st_mtime_ns == before for file, before in first.items())


def test_a_cache_of_another_run_is_refused(data, tmp_path):
    backend = tiny_backend(0, dtype=torch.float32)
    cached(tmp_path / "cache", data, backend)
    with pytest.raises(DataError, match="another model; give another --cache"):
        cached(tmp_path / "cache", data, backend, model="other")
    with pytest.raises(DataError, match="another number of texts"):
        cached(tmp_path / "cache", data, backend, kept=[0, 1])
    cached(tmp_path / "three", data, backend, kept=range(3))
    with pytest.raises(DataError, match="another corpus;"):
        cached(tmp_path / "three", data / "validation", backend, kept=range(3))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(DataError, match=r"other files \(thesis.txt"):
        cached(tmp_path / "mine", data, backend)
    (tmp_path / "cache" / "features.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        cached(tmp_path / "cache", data, backend)


def test_a_cache_with_more_taps_serves(data, tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.training.feature_cache.SHARD_TOKENS", 60)
    backend = tiny_backend(0, dtype=torch.float32)
    wide = cached(tmp_path / "cache", data, backend)
    answers = iter([False, True])
    wide.fill(lambda done, whole: None, lambda: next(answers))
    narrow = cached(tmp_path / "cache", data, backend, taps=frozenset())
    assert narrow.fill(lambda done, whole: None)
    last = len(Corpus.open(data)) - 1
    assert set(narrow.features([last])[0].taps) == {"last_hidden"}
    # What the narrow one scored is there for the wide one too.
    same(wide.features([0, last]), online(data, backend)[1].features([0, last]), atol=1e-3)
    with pytest.raises(DataError, match="holds no features of 7"):
        cached(tmp_path / "cache", data, backend, taps=TAPS | {7})


def test_a_cache_of_an_earlier_version_is_refused(data, tmp_path):
    """It knew its target by name alone."""
    backend = tiny_backend(0, dtype=torch.float32)
    cached(tmp_path / "cache", data, backend)
    key = tmp_path / "cache" / "features.json"
    key.write_text(json.dumps({**json.loads(key.read_text()), "draftsmith_features": 1}))
    with pytest.raises(DataError, match=r"another version, .* of which weights; delete the directory"):
        cached(tmp_path / "cache", data, backend)


@pytest.mark.parametrize("taps", [["0", "77"], ["zero"], "0", [1], None])
def test_taps_that_cannot_be_are_named(data, tmp_path, taps):
    backend = tiny_backend(0, dtype=torch.float32)
    cached(tmp_path / "cache", data, backend)
    key = tmp_path / "cache" / "features.json"
    key.write_text(json.dumps({**json.loads(key.read_text()), "taps": taps}))
    with pytest.raises(DataError, match=r"features\.json: damaged, its taps are"):
        cached(tmp_path / "cache", data, backend)


def _without_a_tap(tensors, about):
    tensors.pop("tap.1")


def _with_long_texts(tensors, about):
    tensors["offsets"][1] += 1


def _with_fewer_rows(tensors, about):
    tensors["best"] = tensors["best"][1:]


def _of_another_place(tensors, about):
    about["shard"] = "7"


def _without_a_mark(tensors, about):
    about.clear()


@pytest.mark.parametrize(
    "damage", [_without_a_tap, _with_long_texts, _with_fewer_rows, _of_another_place, _without_a_mark]
)
def test_a_shard_that_does_not_fit_is_named(data, tmp_path, damage):
    backend = tiny_backend(0, dtype=torch.float32)
    cached(tmp_path / "cache", data, backend).fill(lambda done, whole: None)
    shard = next((tmp_path / "cache").glob("features-*"))
    with safe_open(str(shard), framework="pt") as file:
        tensors, about = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()
    damage(tensors, about)
    save_file(tensors, str(shard), metadata=about)
    with pytest.raises(DataError, match=r"features-00000\.safetensors: not a readable shard of this cache .*delete it"):
        cached(tmp_path / "cache", data, backend).features([0])
    with pytest.raises(DataError, match="delete it"):
        cached(tmp_path / "cache", data, backend).fill(lambda done, whole: None)


def test_a_shard_of_another_cache_is_not_taken(data, tmp_path):
    """The same texts, scored by other weights: every shape fits."""
    for seed in (0, 1):
        backend = tiny_backend(seed, dtype=torch.float32)
        cached(tmp_path / str(seed), data, backend, weights=seed).fill(lambda done, whole: None)
    shutil.copy(tmp_path / "1" / "features-00000.safetensors", tmp_path / "0")
    with pytest.raises(DataError, match="of another cache"):
        cached(tmp_path / "0", data, tiny_backend(0, dtype=torch.float32), weights=0).features([0])


def test_what_a_killed_process_left_goes(data, tmp_path):
    process = subprocess.Popen(["true"])
    process.wait()
    cache = tmp_path / "cache"
    cache.mkdir()
    left, own = (cache / f".features-00000.safetensors.{number}" for number in (process.pid, os.getpid()))
    left.touch()
    own.touch()
    cached(cache, data, tiny_backend(0, dtype=torch.float32))
    assert not left.exists() and own.exists()


def test_a_damaged_shard_is_named(data, tmp_path):
    backend = tiny_backend(0, dtype=torch.float32)
    cache = cached(tmp_path / "cache", data, backend)
    cache.fill(lambda done, whole: None)
    shard = next((tmp_path / "cache").glob("features-*"))
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.raises(DataError, match=r"features-00000\.safetensors: not a readable shard"):
        cache.features([0])


def test_states_too_large_for_float16_are_kept_in_bfloat16(data, tmp_path):
    backend = tiny_backend(0, dtype=torch.float32)
    cache = cached(tmp_path / "cache", data, backend)
    score = cache._scorer.score
    cache._scorer.score = lambda texts: [_scaled(item) for item in score(texts)]
    cache.fill(lambda done, whole: None)
    found = cache.features([0])[0]
    assert found.taps[1].dtype == torch.bfloat16
    assert found.taps[0].dtype == torch.float16
    assert bool(torch.isfinite(found.taps[1]).all())


def _scaled(item):
    taps = {tap: rows * 1e7 if tap == 1 else rows for tap, rows in item.taps.items()}
    return type(item)(taps=taps, best_L=item.best_L, log_total_L=item.log_total_L)


@pytest.mark.parametrize("room", [0, 20_000, 1 << 29])
def test_remembered_features_are_the_same_however_often_asked(data, room):
    _, source = online(data, tiny_backend(0, dtype=torch.float32))
    remembered = RememberedFeatures(source, room)
    first = remembered.features([0, 5, 2])
    second = remembered.features([2, 0, 5, 1])
    for place, again in ((0, 1), (1, 2), (2, 0)):
        same([first[place]], [second[again]], atol=0)
    same(first, source.features([0, 5, 2]), atol=1e-3)


def test_the_key_is_plain(data, tmp_path):
    cached(tmp_path / "cache", data, tiny_backend(0, dtype=torch.float32))
    key = json.loads((tmp_path / "cache" / "features.json").read_text())
    assert {"model", "corpus", "texts", "draftsmith_features"} <= set(key)
