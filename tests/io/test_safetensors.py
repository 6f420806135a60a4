"""Safetensors directories: single, sharded, and each missing or damaged piece named."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.errors import ModelFileError, UnsupportedError, UserError
from draftsmith.io.files import open_model
from tests.io import samples

CONFIG = {"model_type": "llama", "vocab_size": 8, "eos_token_id": 5}


@pytest.fixture
def directory(tmp_path):
    return samples.write_directory(tmp_path / "model", CONFIG, samples.tiny_tensors())


@pytest.fixture
def sharded(tmp_path):
    return samples.write_directory(tmp_path / "sharded", CONFIG, samples.tiny_tensors(), shards=2)


class TestReading:
    @pytest.mark.parametrize("shards", [1, 2])
    def test_tensors_come_back(self, tmp_path, shards):
        tensors = samples.tiny_tensors()
        files = open_model(str(samples.write_directory(tmp_path / "m", CONFIG, tensors, shards=shards)))
        assert set(files.tensor_names) == set(tensors)
        for name, value in tensors.items():
            assert files.shape(name) == tuple(value.shape)
            assert torch.equal(files.load(name, value.dtype), value)
            assert torch.equal(files.load(name), value.float())
        assert dict(files.config) == CONFIG | {"tie_word_embeddings": True}
        assert "lm_head.weight" not in files

    @pytest.mark.parametrize(
        ("stated", "has_head", "expected"),
        [(None, False, True), (None, True, None), (False, False, False), (True, True, True)],
    )
    def test_a_model_without_a_head_is_tied_unless_it_says_otherwise(self, tmp_path, stated, has_head, expected):
        config = CONFIG if stated is None else CONFIG | {"tie_word_embeddings": stated}
        tensors = samples.tiny_tensors() | ({"lm_head.weight": torch.ones(8, 4)} if has_head else {})
        files = open_model(str(samples.write_directory(tmp_path / "m", config, tensors)))
        assert files.config.get("tie_word_embeddings") is expected

    def test_several_files_without_an_index(self, directory):
        from safetensors.torch import save_file

        save_file({"lm_head.weight": torch.ones(8, 4)}, directory / "extra.safetensors")
        assert "lm_head.weight" in open_model(str(directory))

    def test_load_gives_memory_of_its_own(self, directory):
        files = open_model(str(directory))
        name = "model.embed_tokens.weight"
        files.load(name).zero_()
        assert files.load(name).abs().sum() > 0

    def test_shards_are_opened_when_needed(self, sharded):
        broken = sharded / "model-00002-of-00002.safetensors"
        broken.write_bytes(b"not safetensors")
        files = open_model(str(sharded))
        weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
        by_file = {file: name for name, file in weight_map.items()}
        files.load(by_file["model-00001-of-00002.safetensors"])
        with pytest.raises(ModelFileError, match=r"00002-of-00002\.safetensors: not a readable"):
            files.load(by_file[broken.name])

    def test_raw_blocks_are_refused(self, directory):
        with pytest.raises(UnsupportedError, match="only GGUF"):
            open_model(str(directory)).raw("model.norm.weight")

    @pytest.mark.parametrize(
        ("generation", "config", "expected"),
        [
            (None, {"eos_token_id": 5}, {5}),
            (None, {"eos_token_id": [5, 6]}, {5, 6}),
            (None, {}, set()),
            (None, {"text_config": {"eos_token_id": 4}}, {4}),
            ({"eos_token_id": [1, 2]}, {"eos_token_id": 5}, {1, 2}),
            ({}, {"eos_token_id": 5}, {5}),
        ],
    )
    def test_end_ids(self, tmp_path, generation, config, expected):
        extra = {} if generation is None else {"generation_config__json": generation}
        path = samples.write_directory(tmp_path / "m", config, samples.tiny_tensors(), **extra)
        assert open_model(str(path)).eos_ids == expected

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({}, None),
            ({"tokenizer_config__json": {"chat_template": "a"}}, "a"),
            ({"tokenizer_config__json": {"chat_template": [{"name": "x", "template": "n"}]}}, None),
            (
                {
                    "tokenizer_config__json": {
                        "chat_template": [{"name": "rag", "template": "n"}, {"name": "default", "template": "d"}]
                    }
                },
                "d",
            ),
            ({"chat_template__json": {"chat_template": "b"}, "tokenizer_config__json": {"chat_template": "a"}}, "b"),
            ({"chat_template__jinja": "c", "tokenizer_config__json": {"chat_template": "a"}}, "c"),
        ],
    )
    def test_chat_template(self, tmp_path, files, expected):
        path = samples.write_directory(tmp_path / "m", CONFIG, samples.tiny_tensors(), **files)
        assert open_model(str(path)).chat_template == expected

    def test_tokenizer_data(self, tmp_path):
        path = samples.write_directory(
            tmp_path / "m",
            CONFIG,
            samples.tiny_tensors(),
            tokenizer__json={"version": "1.0"},
            tokenizer_config__json={"bos_token": "<s>"},
        )
        data = open_model(str(path)).tokenizer
        assert json.loads(data["json"]) == {"version": "1.0"}
        assert data["config"] == {"bos_token": "<s>"}
        assert data["eos_ids"] == [5]
        assert data["source"].endswith("tokenizer.json")


class TestDamage:
    def refused(self, path, pattern, use=lambda files: None):
        with pytest.raises(ModelFileError, match=pattern) as caught:
            use(open_model(str(path)))
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)

    def test_no_config(self, directory):
        (directory / "config.json").unlink()
        self.refused(directory, r"config\.json: file is missing")

    @pytest.mark.parametrize("text", ["{", "[1]", '"x"', "\ud800".encode("utf-8", "surrogatepass"), "[" * 5000])
    def test_bad_config(self, directory, text):
        (directory / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        self.refused(directory, r"config\.json: (not valid JSON|holds a JSON|not UTF-8)")

    def test_no_weights(self, directory):
        (directory / "model.safetensors").unlink()
        self.refused(directory, r"no \*\.safetensors file")

    @pytest.mark.parametrize("keep", [0, 4, 20, 100, -1])
    def test_truncated_weights(self, directory, keep):
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        self.refused(directory, r"model\.safetensors: not a readable safetensors file")

    def test_missing_shard(self, sharded):
        (sharded / "model-00002-of-00002.safetensors").unlink()
        self.refused(sharded, r"model-00002-of-00002\.safetensors: shard is missing")

    @pytest.mark.parametrize(
        ("index", "pattern"),
        [
            ("{", "not valid JSON"),
            ("{}", "'weight_map' must map"),
            ('{"weight_map": {"a": 1}}', "'weight_map' must map"),
            ('{"weight_map": {"a": "../../secret.safetensors"}}', "not a file name"),
        ],
    )
    def test_bad_index(self, sharded, index, pattern):
        (sharded / "model.safetensors.index.json").write_text(index)
        self.refused(sharded, f"index.json: .*{pattern}")

    def test_index_names_a_tensor_the_shard_lacks(self, sharded):
        path = sharded / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
        path.write_text(json.dumps(index))
        self.refused(sharded, "no readable tensor 'lm_head.weight'", lambda files: files.load("lm_head.weight"))
        self.refused(sharded, "no readable tensor 'lm_head.weight'", lambda files: files.shape("lm_head.weight"))

    def test_a_tensor_in_two_files(self, directory):
        (directory / "copy.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
        self.refused(directory, r"stands in copy\.safetensors and model\.safetensors")

    def test_missing_tensor(self, directory):
        self.refused(directory, "no tensor 'lm_head.weight'", lambda files: files.load("lm_head.weight"))

    def test_integer_tensor(self, tmp_path):
        path = samples.write_directory(tmp_path / "m", CONFIG, {"w": torch.ones(4, dtype=torch.int32)})
        with pytest.raises(UnsupportedError, match="int32"):
            open_model(str(path)).load("w")

    def test_no_tokenizer(self, directory):
        self.refused(directory, r"no tokenizer\.json", lambda files: files.tokenizer)

    @pytest.mark.parametrize("value", ["end", -1, [1, "x"], True, 1.5])
    def test_bad_end_ids(self, directory, value):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        self.refused(directory, r"generation_config\.json: 'eos_token_id'", lambda files: files.eos_ids)

    def test_bad_chat_template(self, directory):
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3}))
        self.refused(directory, r"tokenizer_config\.json: 'chat_template'", lambda files: files.chat_template)

    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(data=st.data())
    def test_any_damage_ends_in_a_user_error_or_none(self, data, tmp_path_factory):
        path = tmp_path_factory.getbasetemp() / "fuzzed"
        samples.write_directory(path, CONFIG, samples.tiny_tensors(), generation_config__json={"eos_token_id": [1, 2]})
        name = data.draw(st.sampled_from(["model.safetensors", "config.json", "generation_config.json"]))
        changed = bytearray((path / name).read_bytes())
        at = data.draw(st.integers(0, len(changed)))
        new = data.draw(st.binary(max_size=9))
        changed[at : at + data.draw(st.integers(0, 9))] = new
        (path / name).write_bytes(changed)
        try:
            files = open_model(str(path))
            _ = files.eos_ids
            for tensor in files.tensor_names:
                assert files.load(tensor).shape == files.shape(tensor)
        except UserError as error:
            assert "\n" not in str(error)
