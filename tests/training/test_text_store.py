"""A store of raw texts goes on wherever it was cut off, and refuses what it did not make."""

import json
import random
import shutil

import pytest

from draftsmith.errors import DataError
from draftsmith.training.text_store import TextStore
from draftsmith.training.texts import Dropped, Text, find_files, read_texts

SETTINGS = {"model": "m", "kinds": ("a", "b"), "seed": 1}


def outcome(number):
    """Every fourth text is dropped, others differ in length."""
    if number % 4 == 3:
        return Dropped(reason=f"reason {number % 3}: in detail", text_id=f"t{number}", sample="è")
    messages = [{"role": "user", "content": f"say {number} " + "é\u2028" * (number % 5)}]
    return Text(
        messages=[*messages, {"role": "assistant", "content": str(number)}],
        text_id=f"t{number}",
        answer_tokens=number,
        finish_reason="length" if number % 5 == 0 else "stop",
        details={"kind": "count"},
    )


def fill(path, upto, shard_texts=5):
    with TextStore(path, "synth", SETTINGS, shard_texts=shard_texts) as store:
        for number in range(store.next_number, upto):
            store.add(outcome(number))
    return store


def contents(path):
    return {item.name: item.read_bytes() for item in sorted(path.iterdir()) if item.name != ".lock"}


def test_what_is_added_is_read(tmp_path):
    store = fill(tmp_path, 23)
    kept = [outcome(number) for number in range(23) if number % 4 != 3]
    texts = [text for path in find_files([tmp_path]) for text in read_texts(path)]
    assert [text.messages for text in texts] == [text.messages for text in kept]
    assert [text.text_id for text in texts] == [text.text_id for text in kept]
    assert store.num_texts == len(kept) == 18
    assert store.answer_tokens == sum(text.answer_tokens for text in kept)
    assert store.cut_answers == sum(text.finish_reason == "length" for text in kept)
    assert store.dropped == {"reason 0": 2, "reason 1": 2, "reason 2": 1}
    assert [path.name for path in find_files([tmp_path])] == [f"texts-{number:05d}.jsonl" for number in range(4)]


def test_reopened_it_counts_the_same(tmp_path):
    before = fill(tmp_path, 23)
    after = fill(tmp_path, 23)
    for name in ("num_texts", "answer_tokens", "cut_answers", "dropped", "next_number"):
        assert getattr(after, name) == getattr(before, name)


@pytest.mark.parametrize("seed", range(30))
def test_cut_off_anywhere_it_ends_up_the_same(tmp_path, seed):
    """Bytes missing at the end of any file, as after kill -9 or a crash of the machine."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    fill(whole, 23)
    shutil.copytree(whole, cut)
    draw = random.Random(seed)
    for name in draw.sample([*(path.name for path in find_files([cut])), "dropped.ndjson"], draw.randint(1, 3)):
        data = (cut / name).read_bytes()
        (cut / name).write_bytes(data[: draw.randrange(len(data) + 1)])
    fill(cut, 23)
    assert contents(cut) == contents(whole)


def test_a_reader_leaves_a_torn_last_line_out(tmp_path):
    fill(tmp_path, 3)
    path = tmp_path / "texts-00000.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    assert len(list(read_texts(path))) == 2
    path.write_bytes(data.rstrip(b"\n"))
    assert len(list(read_texts(path))) == 3


def test_what_is_parked_waits_for_its_turn(tmp_path):
    with TextStore(tmp_path, "synth", SETTINGS) as store:
        store.add(outcome(0))
        for number in (5, 2, 3):
            store.park(number, outcome(number))
        store.add(outcome(1))
        store.add(outcome(2))
    with TextStore(tmp_path, "synth", SETTINGS) as store:
        assert store.parked == {number: outcome(number) for number in (3, 5)}
        store.park(7, outcome(7))
    path = tmp_path / "parked.ndjson"
    assert path.read_bytes().count(b"\n") == 3
    path.write_bytes(path.read_bytes()[:-4] + b"\n[]\n")
    with TextStore(tmp_path, "synth", SETTINGS) as store:
        assert store.parked == {number: outcome(number) for number in (3, 5)}


@pytest.mark.parametrize("change", [{"seed": 2}, {"kinds": ("a",)}, {"more": 1}])
def test_other_settings_are_refused_by_name(tmp_path, change):
    fill(tmp_path, 3)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=next(iter(change))):
        TextStore(tmp_path, "synth", {**SETTINGS, **change})
    assert contents(tmp_path) == before


def test_what_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=r"thesis\.txt"):
        TextStore(tmp_path, "synth", SETTINGS)
    made = tmp_path / "made"
    fill(made, 3)
    with pytest.raises(DataError, match="data synth"):
        TextStore(made, "regenerate", SETTINGS)
    (made / "about.json").write_text("{}")
    with pytest.raises(DataError, match=r"about\.json"):
        TextStore(made, "synth", SETTINGS)


def test_two_runs_cannot_write_to_one_place(tmp_path):
    with TextStore(tmp_path, "synth", SETTINGS), pytest.raises(DataError, match="another run"):
        TextStore(tmp_path, "synth", SETTINGS)
    fill(tmp_path, 2)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("[1]", "object"),
        ("{", "JSON"),
        ('{"prompt": "x"}', "messages"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "nobody", "content": "x"}]}', "message 1"),
        ('{"messages": [{"role": "user", "content": 3}]}', "message 1"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        ('{"messages": [{"role": "user", "content": "x"}], "seed": "y"}', "seed"),
        ('{"messages": [{"role": "user", "content": "x"}], "finish_reason": "tired"}', "tired"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, line, part):
    path = tmp_path / "mine.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(DataError) as caught:
        list(read_texts(path))
    assert f"{path}, line 2" in str(caught.value)
    assert part in str(caught.value)


def test_files_are_found(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="no raw texts"):
        find_files([tmp_path])
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "a.jsonl").touch()
    assert [path.name for path in find_files([tmp_path, tmp_path / "b.jsonl"])] == ["a.jsonl", "b.jsonl", "b.jsonl"]
