"""What a user can get wrong: one clear line on stderr, exit code 2, nothing on stdout, never a traceback."""

import json
import os
import stat

import pytest

from tests.cli.tiny import CONTEXT, run, run_apart, write_tiny
from tests.io.samples import byte_level_metadata, llama_metadata, llama_tensors, write_gguf


@pytest.fixture
def complaint(capsys):
    """Runs a command that must fail; returns its one line."""

    def call(*arguments):
        assert run(*arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        assert lines[0].startswith("draftsmith: error: ")
        return lines[0]

    return call


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate"], ["PROMPT", "generate --help"]),
        (["generate", "--tempratur", "1", "hi"], ["--tempratur", "--temperature"]),
        (["generate", "a", "b"], ["(b)"]),
        (["generate", "--temperature", "warm", "hi"], ["--temperature"]),
        (["generate", "--max-new-tokens", "3.5", "hi"], ["--max-new-tokens"]),
        (["generate", "--color", "red", "hi"], ["red", "auto", "always", "never"]),
        (["generat", "hi"], ["generat", "--help"]),
        (["--nonsense"], ["--nonsense"]),
        (["bench"], ["--prompts"]),
        (["bench", "raport", "bundle"], ["raport", "compare, report, rescore", "bench --help"]),
        (["bench", "compare", "bundle"], ["AFTER"]),
        (["bench", "rescore", "/dev/null"], ["/dev/null", "not a readable bundle"]),
        (["bench", "--prompts", "p.jsonl"], ["--output"]),
        (["generate", "--temperature", "-0.1", "hi"], ["temperature", "-0.1"]),
        (["generate", "--temperature", "nan", "hi"], ["temperature", "nan"]),
        (["generate", "--top-p", "0", "hi"], ["top_p", "0"]),
        (["generate", "--top-p", "1.01", "hi"], ["top_p", "1.01"]),
        (["generate", "--top-k", "-1", "hi"], ["top_k", "-1"]),
        (["generate", "--min-p", "2", "hi"], ["min_p", "2"]),
        (["generate", "--repetition-penalty", "0", "hi"], ["repetition_penalty"]),
        (["generate", "--max-new-tokens", "0", "hi"], ["max_new_tokens", "at least 1"]),
        (["generate", "--max-new-tokens", "-7", "hi"], ["max_new_tokens", "-7"]),
        (["generate", "--rule", "luck", "hi"], ["luck", "coupling"]),
        (["generate", "--stop", "", "hi"], ["stop"]),
        (["generate", ""], ["empty"]),
        (["generate", "  \n"], ["empty"]),
        (["generate", "--raw", "--system", "x", "hi"], ["--system", "--raw"]),
        (["chat", "--top-p", "7"], ["top_p", "7"]),
        (["demo", "--drafter", "none"], ["none"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options(complaint, arguments, parts):
    line = complaint(*arguments)
    for part in parts:
        assert part in line


def test_empty_stdin(complaint, stdin):
    stdin("")
    assert "stdin" in complaint("generate", "-")


@pytest.mark.parametrize("words", [["generate", "-"], ["chat"]], ids=lambda words: words[0])
def test_stdin_that_is_not_text(tiny, words):
    done = run_apart(*words, "-m", tiny, text=False, input=b"caf\xe9 \xff\n")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"UTF-8" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_prompt_that_is_not_text(complaint):
    assert "UTF-8" in complaint("generate", "caf\udce9")


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("--drafter", "oracle", "suffix"),
        ("--drafter", "ngram:length=3", "max_ngram"),
        ("--drafter", "ngram:max_ngram", "key=value"),
        ("--drafter", "ngram:max_ngram=x", "whole number"),
        ("--drafter", "no.such.module:Drafter", "no.such"),
        ("--drafter", "os:path", "not a class"),
        ("--drafter", ":Drafter", "cannot load"),
        ("--drafter", "json:JSONDecoder", "not a Drafter"),
        ("--drafter", "draftsmith.drafters.base:Drafter", "all its methods"),
        ("--controller", "draftsmith.control.base:Controller", "all its methods"),
        ("--controller", "os:path", "not a class"),
        ("--controller", "oracle", "auto"),
        ("--backend", "abacus", "reference"),
        ("--dtype", "int3", "float32"),
        ("--threads", "0", "at least 1"),
        ("--threads", "100000", "at most"),
    ],
)
def test_choices(complaint, tiny, option, value, known):
    line = complaint("generate", "-m", tiny, option, value, "hi")
    assert known in line


def test_a_prompt_longer_than_the_context(complaint, tiny):
    line = complaint("generate", "-m", tiny, "x" * CONTEXT)
    assert str(CONTEXT - 1) in line


def test_an_answer_the_memory_budget_cannot_hold_is_not_a_traceback(complaint, tiny, monkeypatch):
    monkeypatch.setattr("draftsmith.engine.engine.default_memory_bytes", lambda: 1 << 16)
    assert "MiB" in complaint("generate", "-m", tiny, "-n", "3000", "hi")


class TestModelFiles:
    """Everything that can be wrong with a model file."""

    def test_missing(self, complaint, tmp_path):
        assert "nowhere.gguf" in complaint("generate", "-m", tmp_path / "nowhere.gguf", "hi")

    def test_unknown_name(self, complaint):
        assert "smollm2" in complaint("generate", "-m", "smolm2", "hi")

    def test_truncated(self, complaint, tiny, tmp_path):
        path = tmp_path / "half.gguf"
        whole = tiny.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert "half.gguf" in complaint("generate", "-m", path, "hi")

    def test_empty(self, complaint, tmp_path):
        path = tmp_path / "empty.gguf"
        path.touch()
        assert "empty.gguf" in complaint("generate", "-m", path, "hi")

    def test_wrong_magic(self, complaint, tiny, tmp_path):
        path = tmp_path / "other.gguf"
        path.write_bytes(b"GGML" + tiny.read_bytes()[4:])
        line = complaint("generate", "-m", path, "hi")
        assert "other.gguf" in line
        assert "GGUF" in line

    def test_unknown_tensor_type(self, complaint, tiny, tmp_path):
        path = tmp_path / "newer.gguf"
        whole = bytearray(tiny.read_bytes())
        name = b"output_norm.weight"
        # name, number of dimensions (u32), one dimension (u64), then the type (u32)
        place = whole.index(name) + len(name) + 4 + 8
        whole[place : place + 4] = (199).to_bytes(4, "little")
        path.write_bytes(whole)
        line = complaint("generate", "-m", path, "hi")
        assert "newer.gguf" in line
        assert "199" in line

    def test_missing_key(self, complaint, tmp_path):
        metadata = llama_metadata() | byte_level_metadata()
        del metadata["llama.embedding_length"]
        path = write_gguf(tmp_path / "keyless.gguf", metadata, llama_tensors())
        assert "embedding_length" in complaint("generate", "-m", path, "hi")

    def test_missing_key_in_config_json(self, complaint, tmp_path):
        from safetensors.torch import save_file

        from tests.io.samples import tiny_tensors

        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
        save_file(tiny_tensors(), tmp_path / "model.safetensors")
        line = complaint("generate", "-m", tmp_path, "hi")
        assert "num_hidden_layers" in line or "vocab_size" in line or "num_attention_heads" in line

    def test_unknown_architecture(self, complaint, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
        (tmp_path / "model.safetensors").write_bytes(b"")
        line = complaint("generate", "-m", tmp_path, "hi")
        assert "llama" in line or "safetensors" in line

    def test_no_chat_template(self, complaint, tmp_path):
        path = write_tiny(tmp_path / "bare.gguf", template=None)
        assert "--raw" in complaint("generate", "-m", path, "hi")

    def test_drafter_of_another_vocabulary(self, complaint, tiny, tmp_path):
        other = write_tiny(tmp_path / "other.gguf", model="gpt2", tokens=None)
        line = complaint("generate", "-m", tiny, "-d", f"draft_model:model={other}", "hi")
        assert "other.gguf" in line


class TestBench:
    """Everything that can be wrong with a benchmark."""

    @pytest.fixture
    def prompts(self, tmp_path):
        def write(text):
            path = tmp_path / "prompts.jsonl"
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            return path

        return write

    @pytest.fixture
    def bench(self, complaint, tiny, tmp_path):
        def call(path, *arguments, output="out"):
            return complaint("bench", "-m", tiny, "--prompts", path, "--output", tmp_path / output, *arguments)

        return call

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ('{"prompt": "a"}\n{"prompt": "b"\n', ["line 2", "JSON"]),
            ('{"prompt": "a"}\n\n["b"]\n', ["line 3", "object"]),
            ('{"text": "a"}', ["line 1", "prompt", "turns", "text"]),
            ('{"prompt": "a"}\n{"prompt": 3}', ["line 2", "text", "number"]),
            ('{"prompt": "a"}\n{"prompt": " "}', ["line 2", "empty"]),
            ('{"turns": []}', ["line 1", "turns"]),
            ('{"turns": [7]}', ["line 1", "turns"]),
            ('{"prompt": "a", "category": 1}', ["line 1", "category"]),
            (b'{"prompt": "a"}\n{"prompt": "\xff"}', ["line 2", "UTF-8"]),
            ('{"prompt": "a"}\n{"prompt": "\\ud83d"}', ["line 2", "surrogate"]),
            ("", ["no prompts"]),
        ],
    )
    def test_prompts_file(self, bench, prompts, text, parts):
        line = bench(prompts(text))
        assert "prompts.jsonl" in line
        for part in parts:
            assert part in line

    def test_a_data_set_that_is_not_known(self, bench, prompts):
        line = bench(f"gsm9k:{prompts('{}')}")
        assert "gsm9k" in line
        assert "gsm8k" in line

    def test_missing_prompts_file(self, bench, tmp_path):
        assert "absent.jsonl" in bench(tmp_path / "absent.jsonl")
        assert str(tmp_path) in bench(tmp_path)

    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (["--limit", "0"], "limit"),
            (["--per-category", "-1"], "per_category"),
            (["--concurrency", "0"], "concurrency"),
            (["--drafters", "none,,ngram"], "empty name"),
            (["--drafters", "ngram,ngram"], "more than once"),
            (["--drafters", "none,oracle"], "oracle"),
            (["--max-new-tokens", "0"], "max_new_tokens"),
            (["--temperature", "-1"], "temperature"),
        ],
    )
    def test_options(self, bench, prompts, arguments, part):
        assert part in bench(prompts('{"prompt": "a"}'), *arguments)

    def test_output_that_is_a_file(self, bench, prompts, tmp_path):
        (tmp_path / "out").write_text("x")
        assert "out" in bench(prompts('{"prompt": "a"}'))

    def test_output_with_other_peoples_files(self, bench, prompts, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("x")
        assert "other files" in bench(prompts('{"prompt": "a"}'), "--force")
        assert (tmp_path / "out" / "thesis.txt").exists()

    @pytest.mark.parametrize("content", ['{"model_type": "llama"}', "[]", '{"drafters": ', "drafters"])
    def test_output_with_a_config_that_is_no_bundle_s(self, bench, prompts, tmp_path, content):
        """A model's directory holds a `config.json` too; `--force` must not take it for an old bundle."""
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text(content)
        assert "other files" in bench(prompts('{"prompt": "a"}'), "--force")
        assert (tmp_path / "out" / "config.json").read_text() == content

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_output_without_permission(self, bench, prompts, tmp_path):
        (tmp_path / "locked").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        assert "locked" in bench(prompts('{"prompt": "a"}'), output="locked/out")

    def test_output_below_a_file(self, bench, prompts, tmp_path):
        (tmp_path / "file").write_text("x")
        assert "cannot write" in bench(prompts('{"prompt": "a"}'), output="file/out")

    def test_no_prompt_fits(self, bench, prompts):
        line = bench(prompts(json.dumps({"prompt": "x" * CONTEXT})))
        assert str(CONTEXT - 1) in line


def test_a_mistake_found_by_a_real_process_has_no_traceback(tmp_path):
    done = run_apart("generate", "-m", tmp_path / "no.gguf", "hi")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("draftsmith: error: ")
    assert done.stderr.count("\n") == 1


def test_memory_that_is_not_there_is_told_in_one_line(complaint, monkeypatch):
    """Whatever asked for it, imports included: it was a traceback of a hundred lines."""

    def nothing_left(*_, **__):
        raise MemoryError

    monkeypatch.setattr("draftsmith.cli.generate.load_engine", nothing_left)
    assert "not enough memory" in complaint("generate", "hi")
