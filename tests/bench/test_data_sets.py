"""Every data set the loader knows, every container, and what it does to files that are wrong."""

import gzip
import json
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.bench.prompts import Loaded, Prompt, load_prompts, read_source
from draftsmith.bench.workloads.formats import FORMATS, format_named
from draftsmith.errors import OptionError, PromptError

HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
SPEED = {
    "question_id": "a1b2", "category": "coding", "sub_category": None, "turns": ["one", "two"], "source": "made up",
    "src_id": "7", "difficulty": None, "multiturn": True,
}  # fmt: skip
SWE = {"repo": "a/b", "instance_id": "a__b-1", "problem_statement": "It breaks.", "patch": "", "hints_text": ""}
# data set -> (an entry as it is published, the prompt it makes)
ENTRIES = {
    "spec-bench": (
        {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["x"]},
        Prompt(prompt_id="81", turns=("one", "two"), category="writing"),
    ),
    "speed-bench": (SPEED, Prompt(prompt_id="a1b2", turns=("one", "two"), category="coding")),
    "deepspec": ({"turns": ["one"]}, Prompt(prompt_id="1", turns=("one",))),
    "sharegpt": (
        {"id": "x_0", "conversations": [HUMAN, GPT, {"from": "human", "value": "Bye"}]},
        Prompt(prompt_id="x_0", turns=("Hi", "Bye"), category="sharegpt"),
    ),
    "messages": (
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        Prompt(prompt_id="1", turns=("Hi",), system="Be brief."),
    ),
    "swe-bench": (SWE, Prompt(prompt_id="a__b-1", turns=("It breaks.",), category="swe-bench")),
    "humaneval": (
        {"task_id": "H/0", "prompt": "def f():", "canonical_solution": "", "test": "", "entry_point": "f"},
        Prompt(prompt_id="H/0", turns=("def f():",), category="humaneval"),
    ),
    "mbpp": (
        {"task_id": 2, "prompt": "Write f.", "code": "", "test_list": ["assert f"], "source_file": "x"},
        Prompt(prompt_id="2", turns=("Write f.",), category="mbpp"),
    ),
    "gsm8k": ({"question": "2+2?", "answer": "#### 4"}, Prompt(prompt_id="1", turns=("2+2?",), category="gsm8k")),
    "math-500": (
        {"problem": "2+2?", "solution": "4", "answer": "4", "subject": "Algebra", "unique_id": "test/1.json"},
        Prompt(prompt_id="test/1.json", turns=("2+2?",), category="Algebra"),
    ),
    "mt-bench": (
        {"prompt": ["one", "two"], "category": "stem", "prompt_id": 5, "reference": []},
        Prompt(prompt_id="5", turns=("one", "two"), category="stem"),
    ),
    "plain": (
        {"prompt": "Hi", "id": "p", "category": "c", "system": "Be brief.", "max_new_tokens": 9},
        Prompt(prompt_id="p", turns=("Hi",), category="c", system="Be brief.", max_new_tokens=9),
    ),
}


@pytest.fixture
def write(tmp_path):
    """Writes entries (or bytes) to a file of that name."""

    def call(content, name="data.jsonl"):
        path = tmp_path / name
        if not isinstance(content, bytes):
            content = "".join(json.dumps(item) + "\n" for item in content).encode()
        path.write_bytes(content)
        return path

    return call


def test_the_table_of_this_file_is_that_of_the_loader():
    assert {item.name for item in FORMATS} == set(ENTRIES)


@pytest.mark.parametrize("name", ENTRIES)
def test_each_data_set_is_recognised_and_can_be_forced(write, name):
    item, prompt = ENTRIES[name]
    path = write([item])
    assert load_prompts(path) == [prompt]
    assert load_prompts(f"{name}:{path}") == [prompt]
    assert load_prompts(f"{name.replace('-', '_').upper()}:{path}") == [prompt]
    assert read_source(f"{name}:{path}").formats == (name,)
    recognised = "plain" if name == "mt-bench" else name  # Spec-Bench took MT-Bench over, files and all
    assert read_source(path).formats == (recognised,)


def test_mt_bench_s_own_file_is_read_as_such_when_asked(write):
    path = write([ENTRIES["spec-bench"][0]])
    assert load_prompts(f"mt-bench:{path}") == load_prompts(path)


def test_kinds_may_be_mixed(write):
    loaded = read_source(write([item for item, _ in ENTRIES.values()]))
    assert [prompt.turns for prompt in loaded.prompts] == [prompt.turns for _, prompt in ENTRIES.values()]
    assert set(loaded.formats) == set(ENTRIES) - {"mt-bench"}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_forced_data_set_refuses_other_entries(write, name):
    path = write([ENTRIES[name][0], {"text": "x"}])
    with pytest.raises(PromptError, match=rf"data.jsonl, line 2: not an entry of {name}.*'text'"):
        load_prompts(f"{name}:{path}")


def test_sources_with_colons(write, tmp_path):
    path = write([{"prompt": "a"}], "odd:name.jsonl")
    assert load_prompts(path)[0].text == "a"
    with pytest.raises(PromptError, match=r"'gsm9k' is no data set; known: .*gsm8k"):
        load_prompts(f"gsm9k:{path}")
    with pytest.raises(PromptError, match=r"absent\.jsonl"):
        load_prompts(f"gsm8k:{tmp_path}/absent.jsonl")
    assert format_named("nothing") is None


def test_at_most_so_many_turns(write):
    path = write([{"turns": ["a", "b", "c"]}])
    assert [len(load_prompts(path, max_turns=n)[0].turns) for n in (1, 2, 3, 4)] == [1, 2, 3, 3]
    with pytest.raises(OptionError, match="max_turns"):
        load_prompts(path, max_turns=0)


class TestContainers:
    """The same entries in lines, arrays, tables, and packed."""

    ITEMS = ({"prompt": "a\u2028b"}, {"prompt": "c", "id": 7})
    LINES = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in ITEMS).encode()

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("x.jsonl", LINES),
            ("x.txt", LINES),
            ("x.json", LINES),  # lines, whatever the name says
            ("x.json", json.dumps(ITEMS).encode()),
            ("x.json", b"\xef\xbb\xbf \n" + json.dumps(ITEMS, indent=2).encode() + b"\n\n"),
            ("x.JSON.gz", gzip.compress(json.dumps(ITEMS).encode(), mtime=0)),
            ("x.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ],
    )
    def test_json(self, write, name, content):
        assert [item.text for item in load_prompts(write(content, name))] == ["a\u2028b", "c"]

    @pytest.mark.parametrize(
        ("content", "parts"),
        [
            (b'[\n{"prompt": "a"},\n\n{"prompt": ', ["line 4", "entry 2", "not JSON"]),
            (b'[\n{"prompt": "a"}\n', ["line 2", "entry 1", "not JSON"]),
            (b'[\n{"prompt": "a"},\n]', ["line 3", "entry 2", "not JSON"]),
            (b'[{"prompt": "a"}\n{"prompt": "b"}]', ["line 1", "not JSON"]),
            (b'[{"prompt": "a"}] []', ["not JSON", "follows"]),
            (b'[{"prompt": "a"},\n7]', ["line 2", "entry 2", "a number"]),
            (b"[]", ["no prompts"]),
            (b'[{"prompt": "a"},\n' + b"[" * 200_000, ["line 2"]),
            (b"[" + b"1" * 5000 + b"]", ["line 1", "not JSON"]),
        ],
    )
    def test_arrays_that_are_wrong(self, write, content, parts):
        with pytest.raises(PromptError) as caught:
            load_prompts(write(content, "x.json"))
        for part in ["x.json", *parts]:
            assert part in str(caught.value)

    def test_a_number_of_too_many_digits_is_no_traceback(self, write):
        with pytest.raises(PromptError, match="line 1: not JSON"):
            load_prompts(write(b'{"prompt": ' + b"1" * 5000 + b"}"))

    @pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:9], lambda data: b"text"])
    def test_gzip_that_is_cut(self, write, damage):
        with pytest.raises(PromptError, match=r"x\.jsonl\.gz: not a whole gzip file"):
            load_prompts(write(damage(gzip.compress(self.LINES, mtime=0)), "x.jsonl.gz"))

    def test_a_folder_and_an_impossible_name(self, tmp_path):
        for source in (tmp_path, "a\0b"):
            with pytest.raises(PromptError, match="cannot read"):
                load_prompts(source)


class TestParquet:
    """SPEED-Bench comes as Parquet."""

    @pytest.fixture
    def table(self, tmp_path):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (it is in the extra `bench`)")
        from pyarrow import Table, parquet

        def call(items, name="test.parquet"):
            path = tmp_path / name
            parquet.write_table(Table.from_pylist(items), path)
            return path

        return call

    def test_rows(self, table):
        path = table([SPEED, {**SPEED, "question_id": "c3d4", "turns": ["three"]}])
        loaded = read_source(path)
        assert [prompt.turns for prompt in loaded.prompts] == [("one", "two"), ("three",)]
        assert loaded.formats == ("speed-bench",)
        packed = path.with_name("test.parquet.gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert read_source(packed).prompts == loaded.prompts

    def test_placeholders_are_refused_by_name(self, table):
        hole = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
        path = table([SPEED, {**SPEED, "question_id": "c3d4", "turns": ["one", hole]}])
        with pytest.raises(PromptError, match=r"test\.parquet, row 2: question c3d4 is a placeholder.*script"):
            load_prompts(path)

    def test_rows_that_are_wrong(self, table):
        for item, part in [({"x": 1}, "no known format"), ({"prompt": None}, "null"), ({"turns": [1]}, "'turns'")]:
            with pytest.raises(PromptError, match=rf"row 1.*{part}"):
                load_prompts(table([item]))
        with pytest.raises(PromptError, match="no prompts"):
            load_prompts(table([]))

    @settings(max_examples=40)
    @given(data=st.data())
    def test_damaged_bytes_are_one_error_or_prompts(self, data):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (it is in the extra `bench`)")
        from pyarrow import BufferOutputStream, Table, parquet

        stream = BufferOutputStream()
        parquet.write_table(Table.from_pylist([SPEED] * 3), stream)
        content = bytearray(stream.getvalue().to_pybytes())
        for _ in range(data.draw(st.integers(0, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        expect_prompts_or_one_error(bytes(content[: data.draw(st.integers(0, len(content)))]), "x.parquet")

    def test_without_pyarrow_the_error_says_what_to_install(self, write, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(PromptError, match=r"x\.parquet: .*pyarrow.*pip install"):
            load_prompts(write(b"PAR1", "x.parquet"))


class TestChats:
    """ShareGPT's two dialects, and messages."""

    @pytest.mark.parametrize(
        ("said", "turns"),
        [
            ([HUMAN, GPT], ("Hi",)),
            ([GPT, HUMAN], ("Hi",)),
            ([{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}], ("A",)),
            ([HUMAN, HUMAN, GPT, HUMAN], ("Hi\n\nHi", "Hi")),
            ([HUMAN, GPT, {"from": "human", "value": " "}, GPT, HUMAN], ("Hi",)),
        ],
    )
    def test_sharegpt_turns(self, write, said, turns):
        assert load_prompts(write([{"conversations": said}]))[0].turns == turns

    def test_sharegpt_entries_without_a_question_are_left_out_and_counted(self, write):
        empty, answer = {"conversations": []}, {"conversations": [GPT]}
        blank = {"conversations": [{"from": "human", "value": ""}, GPT]}
        middle = {"conversations": [HUMAN, GPT, {"from": "system", "value": "x"}]}
        first = {"conversations": [{"from": "system", "value": "S"}, HUMAN]}
        loaded = read_source(write([empty, answer, blank, middle, first]))
        assert [(prompt.system, prompt.turns, prompt.prompt_id) for prompt in loaded.prompts] == [("S", ("Hi",), "5")]
        assert loaded.skipped == {
            "nothing the user says": 2, "an empty first turn": 1, "a system message in the middle": 1
        }  # fmt: skip
        with pytest.raises(PromptError, match=r"no prompts.*2 left out: nothing the user says"):
            load_prompts(write([empty, answer]))

    @pytest.mark.parametrize(
        ("item", "part"),
        [
            ({"conversations": 7}, "'conversations' must be a list of messages, found a number"),
            ({"conversations": ["x"]}, "found text at place 1"),
            ({"conversations": [{"from": "human"}]}, "message 1 of 'conversations' must hold text, found null"),
            ({"conversations": [{"from": "tool", "value": "x"}]}, "by 'tool'"),
            ({"conversations": [{"value": "x"}]}, "by None"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must hold text, found a list"),
            ({"messages": []}, "no message of the user"),
            ({"messages": [{"role": "user", "content": " "}]}, "empty"),
            ({"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}, "come first"),
        ],
    )
    def test_malformed_chats(self, write, item, part):
        with pytest.raises(PromptError) as caught:
            load_prompts(write([{"prompt": "a"}, item]))
        assert "data.jsonl, line 2: " in str(caught.value)
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("item", "part"),
    [
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt": "a", "max_new_tokens": True}, "max_new_tokens"),
        ({"prompt": "a", "id": []}, "'id' must be text or a whole number, found a list"),
        ({"prompt": "a", "id": False}, "'id' must be text or a whole number, found true or false"),
        ({"prompt": "a", "id": "\ud800"}, "the id holds half a character"),
        ({"prompt": "a", "category": "\ud800"}, "the category holds half"),
        ({"prompt": "a", "system": "  "}, "the system message is empty"),
        ({"prompt": "a", "system": 5}, "'system' must hold text, found a number"),
        ({"turns": ["a", ""]}, "turn 2 of the prompt is empty"),
        ({"turns": ["a", "\ud800"]}, "turn 2 of the prompt holds half"),
        ({"turns": "a"}, "'turns' must be a non-empty list"),
        ({"question": "a"}, "no known format"),
        ({"question": 1, "answer": 2}, "'question' must hold text"),
        ({}, "(none)"),
    ],
)
def test_malformed_entries(write, item, part):
    with pytest.raises(PromptError) as caught:
        load_prompts(write([{"prompt": "a"}, item]))
    assert "data.jsonl, line 2: " in str(caught.value)
    assert part in str(caught.value)


def test_null_is_as_good_as_absent(write):
    path = write([{"prompt": "a", "system": None, "category": None, "id": None, "max_new_tokens": None}])
    assert load_prompts(path) == [Prompt(prompt_id="1", turns=("a",))]


def expect_prompts_or_one_error(content, name, source="{}"):
    """What every file must lead to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            loaded = read_source(source.format(path))
        except PromptError as error:
            assert name in str(error)
        else:
            assert isinstance(loaded, Loaded)
            for prompt in loaded.prompts:
                assert all(turn.strip() for turn in prompt.turns)
                json.dumps([prompt.prompt_id, prompt.category, prompt.turns], ensure_ascii=False).encode()


KEYS = st.sampled_from(sorted({key for item, _ in ENTRIES.values() for key in item} | {"role", "content"}))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=4)
    | st.sampled_from(["user", "human", "gpt", "system"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["from", "value", "role", "content"]), inner, max_size=3)
    ),
    max_leaves=8,
)
MUTANTS = st.builds(
    lambda name, changes: {**ENTRIES[name][0], **changes},
    st.sampled_from(sorted(ENTRIES)),
    st.dictionaries(KEYS, VALUES, max_size=2),
)


@settings(max_examples=250)
@given(
    items=st.lists(MUTANTS | st.dictionaries(KEYS, VALUES, max_size=5) | VALUES, min_size=1, max_size=3),
    array=st.booleans(),
    forced=st.sampled_from(["", *sorted(ENTRIES)]),
    cut=st.none() | st.integers(0, 200),
)
def test_any_entries_are_prompts_or_one_error(items, array, forced, cut):
    text = json.dumps(items, indent=1) if array else "\n".join(map(json.dumps, items))
    source = f"{forced}:{{}}" if forced else "{}"
    expect_prompts_or_one_error(text.encode()[:cut], "x.json" if array else "x.jsonl", source)


@settings(max_examples=150)
@given(content=st.binary(max_size=60), name=st.sampled_from(["x.jsonl", "x.json", "x.json.gz", "x.parquet"]))
def test_any_bytes_are_prompts_or_one_error(content, name):
    expect_prompts_or_one_error(content, name)
    expect_prompts_or_one_error(gzip.compress(content, mtime=0), "x.json.gz")
    expect_prompts_or_one_error(b"[" + content, "x.json")


class TestBuiltin:
    """The built-in set."""

    PROMPTS = read_source("builtin").prompts

    def test_eight_kinds_of_six_some_of_several_turns(self):
        kinds = [prompt.category for prompt in self.PROMPTS]
        assert len(set(kinds)) == 8
        assert all(kinds.count(kind) == 6 for kind in kinds)
        for kind in set(kinds):
            assert any(len(prompt.turns) > 1 for prompt in self.PROMPTS if prompt.category == kind), kind

    def test_ids_and_texts_are_unique_and_tidy(self):
        assert len({prompt.prompt_id for prompt in self.PROMPTS}) == len(self.PROMPTS)
        turns = [turn for prompt in self.PROMPTS for turn in prompt.turns]
        assert len(set(turns)) == len(turns)
        assert all(turn == turn.strip() and "  \n" not in turn for turn in turns)

    def test_selection_and_turns(self):
        assert len(load_prompts("builtin", per_category=2)) == 16
        assert all(len(prompt.turns) == 1 for prompt in load_prompts("builtin", max_turns=1))
        assert read_source("builtin", limit=1).sha256 == read_source("builtin").sha256

    def test_code_in_the_prompts_is_code(self):
        for prompt in self.PROMPTS:
            for block in prompt.text.split("```python\n")[1:]:
                compile(block.split("```")[0], prompt.prompt_id, "exec")

    def test_a_file_of_that_name_can_still_be_read(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("builtin").write_text('{"prompt": "mine"}')
        assert load_prompts("./builtin")[0].text == "mine"
