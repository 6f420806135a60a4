"""A tiny target on disk, random drafters for it, and their exports, for the tests of dialects."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftsmith.dialects.convert import export, import_published, read_native
from draftsmith.dialects.dialect import Choices, Target
from draftsmith.dialects.published import Published, in_memory
from draftsmith.dialects.table import dialect_named
from draftsmith.drafters.checkpoint import save_module
from draftsmith.io.files import open_model
from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import DecoderSpec
from tests.drafters.trained_fakes import info_of, random_module
from tests.models.fakes import tiny_spec, tiny_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
IDS = [token for token in range(64) if token % 3 != 1]
_ROOT = tempfile.TemporaryDirectory(prefix="draftsmith-dialects-")


@functools.cache
def target_directory(**changes) -> Path:
    """A model on disk; `changes` are config keys."""
    config = {**CONFIG, **changes}
    folder = Path(_ROOT.name) / f"target-{len(list(Path(_ROOT.name).iterdir()))}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    spec = DecoderSpec.from_config(config)
    own = {item: getattr(spec, item) for item in ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads",
                                                  "head_dim", "mlp_width", "tied_head", "qkv_bias")}  # fmt: skip
    weights = tiny_weights(tiny_spec(**own), seed=1)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


@functools.cache
def make_target(**changes) -> Target:
    """The target of `target_directory` as a conversion sees it."""
    files = open_model(str(target_directory(**changes)))
    return Target(name="tiny", spec=DecoderSpec.from_config(files.config), files=files)


@functools.cache
def make_info(**changes):
    """The same target, loaded."""
    target = make_target(**changes)
    return info_of(ReferenceBackend.from_weights(target.spec, target.files.load, dtype=torch.float32))


# Name of a drafter -> method, changes of its configuration, whether it has a draft vocabulary.
DRAFTERS = {
    "eagle3": ("eagle3", {}, True),
    "eagle3-all": ("eagle3", {"taps": "1-2-8"}, False),
    "eagle3.1": ("eagle3", {"norm_output": "true", "tap_norm": "true", "norm_before_residual": "true"}, True),
    "eagle1": ("eagle1", {"fc_bias": "true", "noise": "0.25"}, False),
    "eagle2-few": ("eagle2", {"num_heads": "8", "num_kv_heads": "4"}, True),
    "medusa": ("medusa", {"num_depths": "3", "num_layers": "2", "head": "own"}, False),
    "medusa-shared": ("medusa", {"head": "shared"}, False),
    "medusa-target": ("medusa", {"num_depths": "2"}, False),
    "medusa-few": ("medusa", {"head": "shared", "num_depths": "2"}, True),
    "medusa-target-few": ("medusa", {"num_depths": "2"}, True),
    "hydra": ("hydra", {"num_depths": "3", "num_layers": "3", "feature_weight": "0.5"}, False),
    "hydra++": ("hydra", {"num_depths": "2", "num_layers": "2", "head": "own", "prefix": "true"}, False),
    "hydra-shared": ("hydra", {"num_depths": "2", "head": "shared"}, False),
    "mlp": ("mlp_speculator", {"inner_width": "16"}, False),
    "mlp-untied": ("mlp_speculator", {"tied": "false", "num_depths": "2", "scale_input": "false"}, False),
    "mtp": ("mtp", {}, False),
    "mtp-biased": ("mtp", {"qkv_bias": "true", "qk_norm": "true"}, True),
    "mtp-qwen": ("mtp", {"variant": "qwen", "qk_norm": "true"}, False),
    "mtp-mimo": ("mtp", {"variant": "mimo", "qkv_bias": "true"}, True),
}
# Every dialect with the drafters it can hold.
HELD = {
    "eagle3": ("eagle3", "eagle3-all", "eagle3.1"),
    "eagle3-speculators": ("eagle3", "eagle3-all", "eagle3.1"),
    "eagle1": ("eagle1", "eagle2-few"),
    "medusa": ("medusa", "medusa-shared", "medusa-target"),
    "medusa2": ("medusa", "medusa-shared", "medusa-target"),
    "medusa-vllm": ("medusa", "medusa-shared", "medusa-target", "medusa-few", "medusa-target-few"),
    "hydra": ("hydra", "hydra++", "hydra-shared"),
    "mlp-speculator": ("mlp", "mlp-untied"),
    "mtp-deepseek": ("mtp", "mtp-biased"),
    "mtp-qwen": ("mtp-qwen",),
    "mtp-mimo": ("mtp-mimo",),
}
PAIRS = [(dialect, drafter) for dialect, drafters in HELD.items() for drafter in drafters]


@functools.cache
def native_of(drafter: str, dtype: torch.dtype = torch.float32):
    """A random native checkpoint."""
    method, changes, few = DRAFTERS[drafter]
    info, target = make_info(), make_target()
    module = random_module(method, info, changes, torch.tensor(IDS) if few else None, dtype=dtype, seed=len(drafter))
    path = Path(_ROOT.name) / f"{drafter}-{dtype}".replace("torch.", "")
    save_module(path, method, module, "tiny", info, {"steps": 7, "rank_accuracies": [[0.5, 0.25]]})
    return read_native(path, target)


def published_of(drafter: str, dialect: str, dtype: torch.dtype = torch.float32, **choices) -> Published:
    """An export, as it would be read from disk. Config and tensors may be changed by the caller."""
    found = export(native_of(drafter, dtype), dialect_named(dialect), make_target(), Choices(**choices))
    config = json.loads(json.dumps(found.config))
    return in_memory(Path("made"), config, {name: tensor.clone() for name, tensor in found.tensors.items()})


def read(published: Published, dialect: str, target: Target | None = None, **choices):
    """An import; the checkpoint and its notes."""
    found = import_published(
        published, dialect_named(dialect), target or make_target(), Choices(**choices), Path("out")
    )
    return found.checkpoint, dict(found.notes)


def changed(published: Published, config=None, tensors=None, without=()) -> Published:
    """A copy of a checkpoint in memory with other config keys and tensors."""
    own = {name: published.load(name) for name in published.names if name not in without}
    return in_memory(published.path, {**published.config, **(config or {})}, {**own, **(tensors or {})})


def foreign(published: Published) -> Published:
    """As another project would have written it: without what this package adds."""
    config = {key: value for key, value in published.config.items() if key != "draftsmith"}
    return in_memory(published.path, config, {name: published.load(name) for name in published.names})
