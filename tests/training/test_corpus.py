"""Prepared texts: what is written is read, and everything that does not fit is refused in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.errors import DataError, UserError
from draftsmith.training.corpus import Corpus, CorpusTarget, CorpusWriter, vocabulary_digest

TEXTS = [([1, 2, 3], [False, True, True]), ([4], [False]), ([5, 2, 2, 9], [False, False, True, True])]


class Letters:
    """A tokenizer, as far as a digest looks."""

    def __init__(self, letters, special=()):
        self.vocab_size = len(letters)
        self._letters, self._special = letters, special

    def token_text(self, token):
        return self._letters[token]

    def is_special(self, token):
        return token in self._special


TARGET = CorpusTarget(name="letters", vocab_size=12, tokenizer=vocabulary_digest(Letters("abcdefghij")))


@pytest.fixture
def corpus_dir(tmp_path):
    """A corpus of three texts in two shards."""
    write(tmp_path)
    return tmp_path


def write(path, texts=TEXTS, shard_tokens=4):
    writer = CorpusWriter(path, TARGET, shard_tokens=shard_tokens)
    for tokens, answer in texts:
        writer.add(tokens, answer)
    writer.finish()


@pytest.mark.parametrize("shard_tokens", [1, 4, 100])
def test_what_is_written_is_read(tmp_path, shard_tokens):
    write(tmp_path, shard_tokens=shard_tokens)
    corpus = Corpus.open(tmp_path)
    assert [(corpus.tokens(i).tolist(), corpus.answer(i).tolist()) for i in range(len(corpus))] == TEXTS
    assert corpus.tokens(0).dtype == torch.int64
    assert corpus.answer(0).dtype == torch.bool
    assert corpus.lengths.tolist() == [3, 1, 4]
    assert (corpus.num_tokens, corpus.answer_tokens) == (8, 4)
    assert corpus.counts.tolist() == [0, 0, 2, 1, 0, 0, 0, 0, 0, 1, 0, 0]
    assert corpus.target == TARGET
    with pytest.raises(IndexError):
        corpus.tokens(3)


def test_an_empty_corpus_is_one(tmp_path):
    write(tmp_path, texts=[])
    assert len(Corpus.open(tmp_path)) == 0


def test_the_layout_is_as_documented(corpus_dir):
    about = json.loads((corpus_dir / "data.json").read_text())
    assert {key: about[key] for key in ("draftsmith_data", "texts", "tokens", "answer_tokens")} == {
        "draftsmith_data": 1,
        "texts": 3,
        "tokens": 8,
        "answer_tokens": 4,
    }
    assert about["shards"] == [
        {"file": "shard-00000.safetensors", "texts": 2, "tokens": 4},
        {"file": "shard-00001.safetensors", "texts": 1, "tokens": 4},
    ]
    shard = load_file(corpus_dir / "shard-00000.safetensors")
    assert {name: tensor.dtype for name, tensor in shard.items()} == {
        "tokens": torch.int32,
        "answer": torch.uint8,
        "offsets": torch.int64,
    }
    assert load_file(corpus_dir / "counts.safetensors")["answer_counts"].shape == (12,)


def refusal(path):
    with pytest.raises(DataError) as caught:
        Corpus.open(path)
    message = str(caught.value)
    assert "\n" not in message
    assert isinstance(caught.value, UserError)
    return message


def change_about(path, **changes):
    where = path / "data.json"
    about = json.loads(where.read_text()) | changes
    where.write_text(json.dumps({key: value for key, value in about.items() if value is not None}))


def change_tensor(path, file, name, change):
    tensors = load_file(path / file)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    tensors[name] = change(tensors[name])
    save_file(tensors, path / file)


def test_nothing_there(tmp_path):
    assert "draftsmith data prepare" in refusal(tmp_path / "nowhere")
    assert "data.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"draftsmith_data": 2}, "format 2"),
        ({"draftsmith_data": None}, "draftsmith_data"),
        ({"draftsmith_data": True}, "format True"),
        ({"target": None}, "target"),
        ({"target": {"name": "x", "vocab_size": 12}}, "tokenizer"),
        ({"target": {"name": "x", "vocab_size": 0, "tokenizer": ""}}, "vocab_size"),
        ({"target": {"name": "x", "vocab_size": 12, "tokenizer": "", "more": 1}}, "more"),
        ({"shards": [{"file": "../data.json", "texts": 1, "tokens": 1}]}, "../data.json"),
        ({"shards": [{"file": "shard-00000.safetensors", "texts": 2}]}, "tokens"),
        ({"shards": [3]}, "object"),
        ({"texts": 4}, "says 4 texts"),
        ({"answer_tokens": 5}, "answer_tokens"),
        ({"texts": "3"}, "texts"),
    ],
)
def test_an_index_that_is_wrong(corpus_dir, changes, part):
    change_about(corpus_dir, **changes)
    assert part in refusal(corpus_dir)


def test_an_index_that_is_not_json(corpus_dir):
    (corpus_dir / "data.json").write_text('{"draftsmith_data": 1')
    assert "JSON" in refusal(corpus_dir)


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("offsets", lambda old: old + 1, "offsets"),
        ("offsets", lambda old: old[:-1].clone(), "offsets"),
        ("offsets", lambda old: old[:0].clone(), "offsets"),
        ("offsets", lambda old: torch.tensor([0, 0, 4]), "offsets"),
        ("offsets", lambda old: torch.tensor([0, 5, 4]), "offsets"),
        ("offsets", lambda old: old.to(torch.int32), "int64"),
        ("answer", lambda old: old[:-1].clone(), "answer marks"),
        ("answer", lambda old: old + 1, "answer mark"),
        ("tokens", lambda old: old[:-1].clone(), "tokens"),
        ("tokens", lambda old: old + 100, "vocabulary"),
        ("tokens", lambda old: old - 100, "vocabulary"),
        ("tokens", lambda old: old.reshape(1, -1).clone(), "list of int32"),
    ],
)
def test_a_shard_that_does_not_fit(corpus_dir, name, change, part):
    change_tensor(corpus_dir, "shard-00000.safetensors", name, change)
    message = refusal(corpus_dir)
    assert "shard-00000.safetensors" in message
    assert part in message


@pytest.mark.parametrize(
    "change", [lambda old: old[:-1].clone(), lambda old: old.to(torch.int32), lambda old: old + 1, lambda old: old * 0]
)
def test_counts_that_do_not_fit(corpus_dir, change):
    change_tensor(corpus_dir, "counts.safetensors", "answer_counts", change)
    assert "answer_counts" in refusal(corpus_dir)


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "counts.safetensors"])
def test_a_file_missing_cut_or_without_its_tensors(corpus_dir, name):
    path = corpus_dir / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert name in refusal(corpus_dir)
    save_file({"other": torch.zeros(1)}, path)
    assert "missing" in refusal(corpus_dir)
    path.unlink()
    assert f"{name} is missing" in refusal(corpus_dir)


def test_another_target_is_refused(corpus_dir):
    corpus = Corpus.open(corpus_dir)
    corpus.check_target("letters", 12, Letters("abcdefghij"))
    with pytest.raises(DataError, match="12 tokens, other has 13"):
        corpus.check_target("other", 13, Letters("abcdefghij"))
    for tokenizer in (Letters("abcdefghix"), Letters("abcdefghij", special={3}), Letters("abcdefghijk")):
        with pytest.raises(DataError, match="spells other tokens"):
            corpus.check_target("other", 12, tokenizer)
