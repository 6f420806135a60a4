"""Files are told apart by what they hold, never by where they lie."""

import shutil
from time import perf_counter

import pytest

from draftsmith.io.fingerprint import file_facts


def test_a_copy_elsewhere_under_another_name_is_the_same(tmp_path):
    first = tmp_path / "a.gguf"
    first.write_bytes(b"GGUF" + bytes(range(256)) * 40)
    (tmp_path / "deep").mkdir()
    second = tmp_path / "deep" / "b.gguf"
    second.write_bytes(first.read_bytes())
    assert file_facts(first) == file_facts(second) and file_facts(first)["bytes"] == 4 + 256 * 40


@pytest.mark.parametrize("place", [0, 100_000, 2_000_000, 5_000_000, 7_999_999])
def test_another_weight_of_the_same_size_is_another_file(tmp_path, place):
    path = tmp_path / "model.gguf"
    data = bytearray(8_000_000)
    path.write_bytes(data)
    before = file_facts(path)
    # As another training would: everything behind one place differs a little.
    for changed in range(place, len(data), 50_000):
        data[changed] = 1
    path.write_bytes(data)
    assert file_facts(path)["bytes"] == before["bytes"] and file_facts(path)["digest"] != before["digest"]


def test_a_directory_is_its_config_and_its_weights(tmp_path):
    first = tmp_path / "first"
    first.mkdir()
    (first / "config.json").write_text("{}")
    (first / "a.safetensors").write_bytes(b"weights")
    (first / "b.safetensors").write_bytes(b"more")
    second = tmp_path / "second"
    shutil.copytree(first, second)
    (second / "README.md").write_text("takes no part")
    assert file_facts(first) == file_facts(second)
    (second / "config.json").write_text('{"a": 1}')
    assert file_facts(first) != file_facts(second)
    (second / "config.json").write_text("{}")
    (second / "b.safetensors").rename(second / "c.safetensors")
    assert file_facts(first) != file_facts(second)


def test_gigabytes_take_no_time(tmp_path):
    path = tmp_path / "large.gguf"
    with path.open("wb") as stream:
        stream.truncate(6 << 30)  # sparse
    began = perf_counter()
    assert file_facts(path)["bytes"] == 6 << 30
    assert perf_counter() - began < 2.0
