"""Files of other projects: pickles, shards, prefixes, what is damaged or would run code."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftsmith.dialects.published import open_published
from draftsmith.errors import ModelFileError
from tests.dialects.support import changed, foreign, published_of, read


def tensors_of(published):
    return {name: published.load(name) for name in published.names}


def write(folder, published, file_name):
    """A checkpoint on disk, in a file of a given kind."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(published.config)))
    if file_name.endswith(".safetensors"):
        save_file(tensors_of(published), folder / file_name)
    else:
        torch.save(tensors_of(published), folder / file_name)
    return folder


@pytest.mark.parametrize("file_name", ["pytorch_model.bin", "model.safetensors", "weights.pt", "weights.pth"])
@pytest.mark.parametrize(("dialect", "drafter"), [("eagle3", "eagle3"), ("medusa", "medusa"), ("eagle1", "eagle1")])
def test_files_of_every_kind(tmp_path, dialect, drafter, file_name):
    published = foreign(published_of(drafter, dialect))
    found, _ = read(open_published(str(write(tmp_path / "in", published, file_name))), dialect)
    expected, _ = read(published, dialect)
    assert {name: tensor.tolist() for name, tensor in found.tensors.items()} == {
        name: tensor.tolist() for name, tensor in expected.tensors.items()
    }


def test_older_pickles_and_files_alone(tmp_path):
    published = foreign(published_of("medusa", "medusa"))
    torch.save(tensors_of(published), tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    found, _ = read(open_published(str(tmp_path / "medusa_lm_head.pt")), "medusa")
    assert found.config["num_depths"] == 3


def test_shards(tmp_path):
    published = published_of("eagle3", "eagle3")
    tensors = tensors_of(published)
    names = sorted(tensors)
    where = {name: f"part-{place % 2}.safetensors" for place, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(dict(published.config)))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert open_published(str(tmp_path)).names == published.names
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    with pytest.raises(ModelFileError, match="file names"):
        open_published(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"gone\.safetensors: not a readable"):
        open_published(str(tmp_path))


def test_a_tensor_in_two_files(tmp_path):
    write(tmp_path, published_of("eagle3", "eagle3"), "one.safetensors")
    write(tmp_path, published_of("eagle3", "eagle3"), "two.safetensors")
    with pytest.raises(ModelFileError, match=r"stands in one\.safetensors and two\.safetensors"):
        open_published(str(tmp_path))


def test_prefixes_of_other_writers():
    published = foreign(published_of("medusa-shared", "medusa-vllm"))
    renamed = changed(published, without=published.names, tensors={
        f"medusa_heads.{name}": published.load(name) for name in published.names})  # fmt: skip
    assert read(renamed, "medusa-vllm")[0].config == read(published, "medusa-vllm")[0].config
    published = foreign(published_of("mlp", "mlp-speculator"))
    bare = {name.removeprefix("speculator."): published.load(name) for name in published.names}
    assert read(changed(published, without=published.names, tensors=bare), "mlp-speculator")[0].config["tied"]
    with pytest.raises(ModelFileError, match="under two names"):
        read(changed(published, tensors=bare), "mlp-speculator")


def test_tied_speculators_of_either_extent():
    """Published ones hold index 0 alone, or every index."""
    published = foreign(published_of("mlp", "mlp-speculator"))
    alone = changed(published, without=("speculator.head.1.weight", "speculator.head.2.weight"))
    extent = {f"speculator.emb.{stage}.weight": published.load("speculator.emb.0.weight") for stage in (1, 2)}
    extent |= {f"speculator.ln.{stage}.bias": published.load("speculator.ln.0.bias") for stage in (1, 2)}
    extent["speculator.proj.2.weight"] = published.load("speculator.proj.1.weight")
    expected, _ = read(published, "mlp-speculator")
    for version in (alone, changed(published, tensors=extent)):
        found, _ = read(version, "mlp-speculator")
        assert all(torch.equal(tensor, found.tensors[name]) for name, tensor in expected.tensors.items())


def test_heads_are_counted_whatever_the_config_says():
    published = changed(foreign(published_of("medusa", "medusa")), {"medusa_num_heads": 2})
    found, notes = read(published, "medusa")
    assert found.config["num_depths"] == 3
    assert "the config says 2" in notes["heads"]


def test_heads_inside_a_whole_model():
    """Medusa-2 and prediction layers lie among a model's own tensors, which are passed over."""
    own = {"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(2)}
    for dialect, drafter in (("medusa2", "medusa"), ("mtp-deepseek", "mtp"), ("mtp-mimo", "mtp-mimo"),
                             ("mtp-qwen", "mtp-qwen")):  # fmt: skip
        found, _ = read(changed(foreign(published_of(drafter, dialect)), tensors=own), dialect)
        assert not any("q_proj" in name and "model" in name for name in found.tensors)


def test_further_prediction_layers_are_passed_over_and_told():
    for dialect, drafter, key, further in (
        ("mtp-deepseek", "mtp", "num_nextn_predict_layers", "model.layers.9.enorm.weight"),
        ("mtp-qwen", "mtp-qwen", "mtp_num_hidden_layers", "mtp.layers.1.mlp.up_proj.weight"),
        ("mtp-mimo", "mtp-mimo", "num_nextn_predict_layers", "model.mtp_layers.1.input_proj.weight"),
    ):
        published = changed(foreign(published_of(drafter, dialect)), {key: 2}, {further: torch.ones(2)})
        assert "the first of 2" in read(published, dialect)[1]["layers"]


def test_norms_that_are_stored_less_one():
    published = published_of("mtp-qwen", "mtp-qwen")
    found, _ = read(published, "mtp-qwen")
    for theirs, ours in {
        "mtp.norm.weight": "norm.weight",
        "mtp.layers.0.self_attn.k_norm.weight": "layer.self_attn.k_norm.weight",
        "mtp.pre_fc_norm_hidden.weight": "hidden_norm.weight",
    }.items():
        torch.testing.assert_close(published.load(theirs) + 1, found.tensors[ours], rtol=0, atol=1e-7)
    assert torch.equal(published.load("mtp.fc.weight"), found.tensors["fc.weight"])


# -- damage ---------------------------------------------------------------------------------------------


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return (os.system, (self.command,))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, zipped):
    trace = tmp_path / "trace"
    content = {"fc.weight": torch.ones(2), "more": Code(f"touch {trace}")}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin: holds something other than tensors"):
        open_published(str(tmp_path))
    assert not trace.exists()


def test_a_plain_pickle_of_code_is_refused_and_not_run(tmp_path):
    trace = tmp_path / "trace"
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps(Code(f"touch {trace}"), protocol=2))
    with pytest.raises(ModelFileError, match=r"medusa_lm_head\.pt"):
        open_published(str(tmp_path))
    assert not trace.exists()


@pytest.mark.parametrize(
    "content", [torch.ones(2), [torch.ones(2)], {}, {"a": 1}, {"a": {"b": torch.ones(2)}}, {3: torch.ones(2)},
                {"a": torch.ones(2, 2).to_sparse()}, {"a": torch.ones(2, device="meta")}]
)  # fmt: skip
def test_pickles_of_something_else(tmp_path, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin"):
        open_published(str(tmp_path))


def test_a_tensor_that_claims_more_than_it_holds(tmp_path):
    """A stride of 0 makes two bytes a matrix of any size: it is refused by its shape, not filled."""
    published = foreign(published_of("medusa", "medusa"))
    huge = torch.ones(1).expand(1 << 20, 1 << 20)
    torch.save({**tensors_of(published), "0.0.linear.weight": huge}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelFileError, match=r"0\.0\.linear\.weight|another target"):
        read(open_published(str(tmp_path)), "medusa")


@settings(max_examples=60)
@given(cut=st.floats(0, 0.999), name=st.sampled_from(["model.safetensors", "pytorch_model.bin"]))
def test_truncated_files(tmp_path_factory, cut, name):
    folder = tmp_path_factory.mktemp("cut")
    file = write(folder, published_of("eagle1", "eagle1"), name) / name
    whole = file.read_bytes()
    file.write_bytes(whole[: int(cut * len(whole))])
    with pytest.raises(ModelFileError, match=name):
        read(open_published(str(folder)), "eagle1")


@settings(max_examples=60)
@given(place=st.floats(0, 0.3), byte=st.integers(0, 255), name=st.sampled_from(["model.safetensors", "weights.pt"]))
def test_changed_bytes_end_in_an_error_of_ours_or_in_numbers(tmp_path_factory, place, byte, name):
    folder = tmp_path_factory.mktemp("bytes")
    file = write(folder, published_of("eagle1", "eagle1"), name) / name
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] = byte
    file.write_bytes(bytes(content))
    try:
        read(open_published(str(folder)), "eagle1")
    except ModelFileError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": NaN', "\x00"])
def test_configs_that_are_none(tmp_path, content):
    write(tmp_path, published_of("eagle1", "eagle1"), "model.safetensors")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_published(str(tmp_path))


def test_a_hub_id_is_fetched(monkeypatch, tmp_path):
    write(tmp_path, published_of("eagle1", "eagle1"), "pytorch_model.bin")
    asked = []

    def fetch(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert "fc.weight" in open_published("org/drafter").names
    assert asked[0][0] == "org/drafter" and {"*.bin", "*.pt", "config.json"} <= set(asked[0][1])


def test_places_without_a_checkpoint(tmp_path):
    with pytest.raises(ModelFileError, match="no weights here"):
        open_published(str(tmp_path))
    with pytest.raises(ModelFileError, match="no such directory"):
        open_published(str(tmp_path / "gone"))
    (tmp_path / "training_args.bin").write_bytes(b"not looked at")
    with pytest.raises(ModelFileError, match="no weights here"):
        open_published(str(Path(tmp_path)))
