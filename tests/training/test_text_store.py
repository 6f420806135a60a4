"""A store of raw texts goes on wherever it was cut off, and refuses what it did not make."""

import json
import random
import shutil

import pytest

from draftsmith.errors import DataError
from draftsmith.training.text_store import TextStore, check_place
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
    names = {item.name for item in path.iterdir()} - {".lock", "parked.ndjson"}
    return {name: (path / name).read_bytes() for name in sorted(names)}


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
    with TextStore(cut, "synth", SETTINGS, shard_texts=5) as store:
        assert store.parked == {number: outcome(number) for number in store.parked}
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


def test_files_of_others_in_its_directory_stay_as_they_are(tmp_path):
    """A rerun once deleted every texts-*.jsonl that had no numbers."""
    fill(tmp_path, 9)
    mine = {"texts-mine.jsonl": b'{"messages": []}\n', "texts-00009.jsonl": b"half a", "texts-1.jsonl": b""}
    for name, data in mine.items():
        (tmp_path / name).write_bytes(data)
    store = fill(tmp_path, 23)
    assert store.next_number == 23
    assert {name: (tmp_path / name).read_bytes() for name in mine} == mine
    assert {path.name for path in find_files([tmp_path])} > set(mine)


def test_a_file_of_others_in_its_way_stops_it(tmp_path):
    fill(tmp_path, 9)
    (tmp_path / "texts-00003.jsonl").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"texts-00003\.jsonl is not of this run"):
        fill(tmp_path, 23)
    assert (tmp_path / "texts-00003.jsonl").read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["texts-00000.jsonl", "dropped.ndjson"])
@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda line: line[:-9], "JSON"),
        (lambda line: b"", "JSON"),
        (lambda line: b"\xff" + line, "JSON"),
        (lambda line: b"[" * 100000, "JSON"),
        (lambda line: b"[1]", "number"),
        (lambda line: line.replace(b'"number": ', b'"number": -'), "number"),
        (lambda line: line.replace(b'"number": ', b'"numbers": '), "number"),
        (lambda line: line.replace(b'"number": ', b'"number": 0, "was": '), "behind"),
        (lambda line: b'{"number": 4, "reason": 3}', "reason"),
        (lambda line: b'{"number": 4}', "messages"),
    ],
)
def test_a_damaged_line_is_named_and_costs_nothing(tmp_path, name, damage, part):
    """It once cost every text behind it."""
    fill(tmp_path, 23, shard_texts=100)
    whole = (tmp_path / name).read_bytes()
    lines = whole.split(b"\n")
    lines[2] = damage(lines[2])
    (tmp_path / name).write_bytes(b"\n".join(lines))
    before = contents(tmp_path)
    with pytest.raises(DataError) as caught:
        fill(tmp_path, 23, shard_texts=100)
    assert f"{tmp_path / name}, line 3" in str(caught.value)
    assert part in str(caught.value)
    assert contents(tmp_path) == before
    # Without that line, everything else waits for its turn.
    (tmp_path / name).write_bytes(b"\n".join([*lines[:2], *lines[3:]]))
    with TextStore(tmp_path, "synth", SETTINGS, shard_texts=100) as store:
        assert store.parked == {number: outcome(number) for number in range(store.next_number + 1, 23)}
    fill(tmp_path, 23, shard_texts=100)
    assert (tmp_path / name).read_bytes() == whole


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("answer_tokens", '"x"'),
        ("answer_tokens", "-1"),
        ("answer_tokens", "null"),
        ("answer_tokens", "true"),
        ("temperature", "NaN"),
        ("temperature", "1" + "0" * 400),
        ("seed", "[]"),
        ("finish_reason", "[]"),
        ("messages", "3"),
    ],
)
def test_a_value_of_a_wrong_type_is_damage_too(tmp_path, key, value):
    fill(tmp_path, 3)
    path = tmp_path / "texts-00000.jsonl"
    lines = path.read_text().split("\n")
    lines[1] = lines[1][:-1] + f', "{key}": {value}}}'
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=f"line 2: '{key}'"):
        fill(tmp_path, 3)
    with pytest.raises(DataError, match=f"line 2: '{key}'"):
        list(read_texts(path))


def test_a_text_that_is_there_twice_stops_it(tmp_path):
    fill(tmp_path, 23)
    path = tmp_path / "texts-00001.jsonl"
    path.write_bytes((tmp_path / "texts-00000.jsonl").read_bytes())
    with pytest.raises(DataError, match=r"texts-00001\.jsonl, line 1: text 0 is in .*texts-00000\.jsonl, line 1 too"):
        fill(tmp_path, 23)


def test_a_complaint_with_half_a_character_is_kept(tmp_path):
    drop = Dropped(reason="refused: \ud800", text_id="a")
    with TextStore(tmp_path, "synth", SETTINGS) as store:
        store.park(1, drop)
        store.add(drop)
    with TextStore(tmp_path, "synth", SETTINGS) as store:
        assert store.parked == {1: drop}
        assert store.dropped == {"refused": 1}


@pytest.mark.parametrize("about", ["[]", '{"settings": [], "made_by": "synth", "draftsmith_texts": 1}', "[" * 100000])
def test_an_about_that_is_damaged_is_named(tmp_path, about):
    fill(tmp_path, 3)
    (tmp_path / "about.json").write_text(about)
    with pytest.raises(DataError, match=r"about\.json"):
        TextStore(tmp_path, "synth", SETTINGS)


def test_settings_known_in_part_are_compared_in_part(tmp_path):
    fill(tmp_path, 3)
    assert check_place(tmp_path, "synth", {"seed": 1}, partly=True)
    with pytest.raises(DataError, match="seed 1, now it is 2"):
        check_place(tmp_path, "synth", {"seed": 2}, partly=True)
    with pytest.raises(DataError, match="kinds"):
        check_place(tmp_path, "synth", {"seed": 1})


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
