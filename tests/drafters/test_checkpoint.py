"""A drafter's config.json that is wrong is told by the key, in one line, before anything is built."""

import json

import pytest

from draftsmith.drafters.checkpoint import build_module, config_of, read_checkpoint, save_module
from draftsmith.errors import ModelFileError
from tests.drafters.trained import new_module
from tests.drafters.trained_fakes import info_of
from tests.models.fakes import tiny_backend

METHODS = {"eagle3": {"taps": "0-1-2"}, "medusa": {}, "hydra": {"prefix": "true"}, "mlp_speculator": {}, "gloeckle": {}}
WRONG = [
    ("eagle3", "norm_eps", "1", "a finite number is needed"),
    ("eagle3", "norm_eps", 0, "allowed: above 0"),
    ("eagle3", "rope_theta", float("nan"), "a finite number is needed"),
    ("eagle3", "rope_theta", 0, "allowed: above 0"),
    ("eagle3", "rope", "yarn", "null is needed"),
    ("eagle3", "rope", {"type": "yarn"}, "config.rope.type' is not known"),
    ("eagle3", "rope", {}, "config.rope.theta' is missing"),
    ("eagle3", "width", None, "a whole number is needed"),
    ("eagle3", "width", 1 << 40, "allowed: 1 to"),
    ("eagle3", "num_heads", True, "a whole number is needed"),
    ("eagle3", "taps", [0, 1, 999], "beyond the target's"),
    ("eagle3", "taps", [0, "1"], "a list is needed"),
    ("eagle3", "tap_norm", 1, "true or false is needed"),
    ("eagle3", "zz", 1, "config.zz' is not known"),
    ("medusa", "num_depths", 10**9, "allowed: 1 to 64"),
    ("medusa", "num_layers", 10**9, "allowed: 1 to 64"),
    ("medusa", "head", 3, "a text is needed"),
    ("hydra", "prefix", {"width": 16}, "config.prefix.num_heads' is missing"),
    ("hydra", "num_depths", 0, "allowed: 1 to 64"),
    ("mlp_speculator", "inner_width", 10**12, "allowed: 1 to"),
    ("gloeckle", "mlp_width", 10**12, "allowed: 1 to"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    backend = tiny_backend(0)
    info = info_of(backend)
    places = {}
    for method, changes in METHODS.items():
        places[method] = tmp_path_factory.mktemp("drafters") / method
        save_module(places[method], method, new_module(method, info, changes), "tiny", info, {})
    return info, places


@pytest.mark.parametrize("method", METHODS)
def test_what_was_written_is_read(saved, method):
    info, places = saved
    checkpoint = read_checkpoint(places[method])
    assert build_module(checkpoint, info).config == config_of(checkpoint)


@pytest.mark.parametrize(("method", "key", "value", "part"), WRONG)
def test_wrong_values_are_told_by_their_key(saved, tmp_path, method, key, value, part):
    info, places = saved
    described = json.loads((places[method] / "config.json").read_text())
    described["config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "model.safetensors").write_bytes((places[method] / "model.safetensors").read_bytes())
    with pytest.raises(ModelFileError) as caught:
        build_module(read_checkpoint(tmp_path), info)
    assert part in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named(saved, tmp_path):
    info, places = saved
    described = json.loads((places["eagle3"] / "config.json").read_text())
    del described["config"]["width"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "model.safetensors").write_bytes((places["eagle3"] / "model.safetensors").read_bytes())
    with pytest.raises(ModelFileError, match=r"config\.width' is missing"):
        build_module(read_checkpoint(tmp_path), info)
