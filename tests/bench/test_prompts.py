"""Reading prompts files (the errors: tests/cli/test_bad_input.py)."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.bench.prompts import Prompt, load_prompts
from draftsmith.errors import PromptError


def write(tmp_path, *items):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_spec_bench_lines_keep_their_turns(tmp_path):
    path = write(tmp_path, {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": []})
    assert load_prompts(path) == [Prompt(prompt_id="81", turns=("one", "two"), category="writing")]


def test_plain_lines_and_both_kinds_mixed(tmp_path):
    path = write(
        tmp_path,
        {"prompt": "a"},
        {"prompt": "b", "id": "x", "category": "c"},
        {"turns": ["d"]},
        {"task_id": "HumanEval/0", "prompt": "def f():"},
    )
    assert [(item.prompt_id, item.text, item.category) for item in load_prompts(path)] == [
        ("1", "a", ""),
        ("x", "b", "c"),
        ("3", "d", ""),
        ("HumanEval/0", "def f():", ""),
    ]


def test_blank_lines_a_byte_order_mark_and_odd_line_ends(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\n{"prompt": "a\xe2\x80\xa8b"}\r\n\n  \n{"prompt": "c"}')
    assert [(item.prompt_id, item.text) for item in load_prompts(path)] == [("2", "a\u2028b"), ("5", "c")]


def test_limits(tmp_path):
    path = write(tmp_path, *({"prompt": f"{i}", "category": "ab"[i % 2]} for i in range(8)))

    def texts(**limits):
        return [item.text for item in load_prompts(path, **limits)]

    assert texts(limit=3) == ["0", "1", "2"]
    assert texts(per_category=2) == ["0", "1", "2", "3"]
    assert texts(per_category=2, limit=3) == ["0", "1", "2"]
    assert texts(limit=100) == texts()


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_any_text_comes_back(texts):
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), *({"prompt": text} for text in texts))
        assert [item.text for item in load_prompts(path)] == texts


@given(st.binary(max_size=60))
def test_any_bytes_are_prompts_or_one_clear_error(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        path.write_bytes(data)
        try:
            prompts = load_prompts(path)
        except PromptError as error:
            assert "prompts.jsonl" in str(error)
        else:
            assert prompts
            assert all(item.text.strip() for item in prompts)


def test_a_deeply_nested_line_is_an_error_too(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("[" * 200_000)
    with pytest.raises(PromptError, match="line 1"):
        load_prompts(path)


@pytest.mark.parametrize("more", ['"id": true', '"max_new_tokens": 0', '"system": " "'])
def test_an_entry_that_is_wrong_is_placed_once(tmp_path, more):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "x", {more}}}\n')
    with pytest.raises(PromptError) as caught:
        load_prompts(path)
    assert str(caught.value).startswith(f"{path}, line 1: ")
    assert str(caught.value).count("line 1") == 1
