"""Raw texts to corpora: nothing lost without a count, no prompt on both sides, all or nothing on disk."""

import json

import pytest
import torch

from draftsmith.engine.loading import load_model
from draftsmith.engine.prompts import encode_prompt
from draftsmith.errors import DataError, OptionError
from draftsmith.training.corpus import Corpus
from draftsmith.training.prepare import PrepareOptions, check_output, open_target, prepare
from tests.cli.tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="module")
def target(model):
    return open_target(model)


def talk(number, said="hello world"):
    return [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": f"{said} {number}"}]


def write(path, conversations, **keys):
    path.write_text("".join(json.dumps({"messages": messages, **keys}) + "\n" for messages in conversations))
    return path


def all_texts(corpus):
    return [corpus.tokens(index).tolist() for index in range(len(corpus))]


def test_texts_become_what_the_engine_feeds(tmp_path, model, target):
    raw = write(tmp_path / "raw.jsonl", [talk(n) for n in range(40)])
    figures = prepare([raw], target, tmp_path / "out", PrepareOptions(validation=0.1))
    train, held = Corpus.open(tmp_path / "out/train"), Corpus.open(tmp_path / "out/validation")
    loaded = load_model(model, backend="reference")
    assert (figures.read, len(train), len(held)) == (40, 36, 4)
    train.check_target(model, loaded.backend.spec.vocab_size, loaded.tokenizer)
    prompts = [encode_prompt(talk(n)[:1], loaded) for n in range(40)]
    for corpus in (train, held):
        for index in range(len(corpus)):
            tokens, answer = corpus.tokens(index).tolist(), corpus.answer(index).tolist()
            start = answer.index(True)
            assert tokens[:start] in prompts
            assert all(answer[start:])
            assert tokens[-1] in loaded.eos_ids
        counts = torch.zeros(train.target.vocab_size, dtype=torch.int64)
        for index in range(len(corpus)):
            counts += torch.bincount(corpus.tokens(index)[corpus.answer(index)], minlength=len(counts))
        assert torch.equal(corpus.counts, counts)
    assert figures.as_json()["train"] == {
        "texts": 36,
        "tokens": train.num_tokens,
        "answer_tokens": train.answer_tokens,
    }


def test_a_prompt_is_on_one_side_only(tmp_path, target):
    """The same question answered three times must not be learnt on one side and judged on the other."""
    conversations = [talk(n, said) for said in ("hello", "world", "hello world") for n in range(20)]
    raw = write(tmp_path / "raw.jsonl", conversations)
    prepare([raw], target, tmp_path / "out", PrepareOptions(validation=0.25))
    sides = [Corpus.open(tmp_path / "out" / side) for side in ("train", "validation")]
    assert [len(side) for side in sides] == [45, 15]
    prompts = [
        {tuple(side.tokens(index)[~side.answer(index)].tolist()) for index in range(len(side))} for side in sides
    ]
    assert not prompts[0] & prompts[1]


def test_the_split_stays_when_texts_are_added_elsewhere(tmp_path, target):
    first, second = (write(tmp_path / name, [talk(n) for n in part]) for name, part in
                     (("a.jsonl", range(20)), ("b.jsonl", range(20, 40))))  # fmt: skip
    prepare([first, second], target, tmp_path / "one", PrepareOptions(validation=0.2))
    prepare([second, first], target, tmp_path / "two", PrepareOptions(validation=0.2))
    for side in ("train", "validation"):
        one, two = (all_texts(Corpus.open(tmp_path / name / side)) for name in ("one", "two"))
        assert sorted(one) == sorted(two)


def test_long_doubled_and_useless_texts_are_counted(tmp_path, target):
    long_prompt = [{"role": "user", "content": "x" * 300}, *talk(1)[1:]]
    long_answer = [*talk(2)[:1], {"role": "assistant", "content": "y" * 300}]
    raw = write(tmp_path / "raw.jsonl", [talk(0), talk(0), long_prompt, long_answer, talk(3)[:1], talk(4), talk(5)])
    figures = prepare([raw], target, tmp_path / "out", PrepareOptions(max_len=100, validation=0.0))
    assert figures.left_out == {"the same text again": 1, "no answer within max_len": 1, "no answer": 1}
    assert figures.cut == 1
    corpus = Corpus.open(tmp_path / "out/train")
    assert sorted(corpus.lengths.tolist())[-1] == 100
    assert len(corpus) == 4
    assert not (tmp_path / "out/validation").exists()


def test_small_sets_have_both_sides(tmp_path, target):
    for count in (1, 2, 3):
        raw = write(tmp_path / f"{count}.jsonl", [talk(n) for n in range(count)])
        prepare([raw], target, tmp_path / f"out{count}", PrepareOptions(validation=0.05))
        sides = [len(Corpus.open(tmp_path / f"out{count}" / side)) for side in ("train", "validation")]
        assert sides == ([1, 0] if count == 1 else [count - 1, 1])


def test_failure_leaves_nothing_and_the_older_output(tmp_path, target):
    good = write(tmp_path / "good.jsonl", [talk(n) for n in range(5)])
    output = tmp_path / "out"
    prepare([good], target, output, PrepareOptions())
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text(good.read_text() + "{}\n")
    empty = write(tmp_path / "empty.jsonl", [])
    useless = write(tmp_path / "useless.jsonl", [talk(1)[:1]])
    for raw, part in ((bad, "line 6"), (empty, "there are none"), (useless, "no answer")):
        with pytest.raises(DataError, match=part):
            prepare([raw], target, output, PrepareOptions())
        raw.unlink()
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_a_failure_half_way_leaves_nothing(tmp_path, target):
    raw = write(tmp_path / "raw.jsonl", [talk(n) for n in range(5)])

    def stop(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([raw], target, tmp_path / "out", PrepareOptions(), stop)
    assert [path.name for path in tmp_path.iterdir()] == ["raw.jsonl"]


def test_outputs_are_not_overwritten_unasked(tmp_path, target):
    raw = write(tmp_path / "raw.jsonl", [talk(n) for n in range(5)])
    output = tmp_path / "out"
    check_output(output, force=False)
    output.mkdir()
    check_output(output, force=False)
    prepare([raw], target, output, PrepareOptions())
    with pytest.raises(DataError, match="--force"):
        check_output(output, force=False)
    check_output(output, force=True)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    for force in (False, True):
        with pytest.raises(OptionError, match="no prepared texts"):
            check_output(foreign, force=force)
        with pytest.raises(OptionError, match="is a file"):
            check_output(raw, force=force)


def test_options_are_checked():
    for options in ({"max_len": 1}, {"validation": 1.0}, {"validation": -0.1}):
        with pytest.raises(OptionError, match=next(iter(options))):
            PrepareOptions(**options)


def test_a_model_without_a_template(tmp_path):
    path = write_tiny(tmp_path / "bare.gguf", template=None)
    with pytest.raises(DataError, match="no chat template"):
        open_target(str(path))
