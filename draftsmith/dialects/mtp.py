"""Multi-token prediction layers inside a target's checkpoint: DeepSeek's, Qwen's and MiMo's names.

The layer has the target's own proportions, which the target's config says; whether it has biases and norms of queries
and keys is told by its tensors. What is switched differently in each family stands in `drafters.mtp.VARIANTS`. Only the
first layer of several is taken. Experts and latent attention are refused by name.
"""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, final

from draftsmith.dialects.dialect import Choices, Described, Dialect, FromTarget, Note, Spelling, Target, check_size
from draftsmith.dialects.llama_layer import config_fields, layer_names, layer_shape
from draftsmith.dialects.published import Published
from draftsmith.drafters.checkpoint import Checkpoint, config_of
from draftsmith.drafters.mtp import VARIANTS, MtpConfig
from draftsmith.errors import UnsupportedError

_OURS = ("token_norm", "hidden_norm", "fc", "norm")


class MtpDialect(Dialect):
    """A prediction layer in one family's names."""

    methods = ("mtp",)
    weights_file = "model-mtp.safetensors"
    marks_ids = True
    variant: ClassVar[str]
    own_names: ClassVar[tuple[str, str, str, str]]
    """Published names of `_OURS`."""
    count_key: ClassVar[str] = "num_nextn_predict_layers"
    norms_less_one: ClassVar[bool] = False

    @abstractmethod
    def prefixes(self, target: Target) -> tuple[str, str]:
        """What the layer's tensors begin with: those of `_OURS`, and those of a decoder layer."""

    def copies(self, target: Target) -> dict[str, FromTarget]:
        """The target's own matrices among the layer's tensors."""
        return {}

    def concerns(self, name: str, target: Target) -> bool:
        return name.startswith(self.prefixes(target))

    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        given = published.config.get("text_config") or published.config
        where, spec = str(published.path), target.spec
        check_size(published, "vocab_size", given.get("vocab_size"), spec.vocab_size, "vocabulary", target)
        check_size(published, "hidden_size", given.get("hidden_size"), spec.width, "width", target)
        layer = self.prefixes(target)[1]
        names = {name for name in published.names if name.startswith(layer)}
        _refuse_kinds(where, names)
        shape, positions = layer_shape({**given, "model_type": "llama", "num_hidden_layers": 1}, where)
        shape["qkv_bias"] = f"{layer}self_attn.q_proj.bias" in names
        shape["qk_norm"] = f"{layer}self_attn.q_norm.weight" in names
        fields = {**shape, **dataclasses.asdict(VARIANTS[self.variant])}
        config = config_fields(MtpConfig, fields, choices.changes, where)
        notes = [*_switch_notes(config), positions]
        count = given.get(self.count_key, 1)
        if isinstance(count, int) and count > 1:
            notes.append(Note("layers", f"the first of {count}; it drafts further by feeding on its own output"))
        return Described(config=config, notes=tuple(notes))

    def spelling(self, config: Any, native: Iterable[str], target: Target) -> Spelling:
        outer, layer = self.prefixes(target)
        names = layer_names(layer, config)
        names["input_layernorm.weight"] = (f"{layer}input_layernorm.weight",)
        names |= {
            f"{ours}.weight": (f"{outer}{theirs}.weight",) for ours, theirs in zip(_OURS, self.own_names, strict=True)
        }
        less_one = {name for name in names if name.endswith("norm.weight")} if self.norms_less_one else set()
        return Spelling(names=names, from_target=self.copies(target), less_one=frozenset(less_one))

    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        native: MtpConfig = config_of(checkpoint)
        config = {**target.files.config, self.count_key: 1}
        return config, [
            *_switch_notes(native),
            Note("file", f"{self.weights_file} goes beside the target's own shards"),
        ]


def _refuse_kinds(where: str, names: Iterable[str]) -> None:
    """Raises `UnsupportedError` for layers that are not plain."""
    for name in sorted(names):
        if ".experts." in name or ".mlp.gate.weight" in name:
            raise UnsupportedError(f"{where}: a prediction layer with experts ({name!r}) is not supported")
        if ".kv_a_proj" in name or ".q_a_proj" in name:
            raise UnsupportedError(f"{where}: a prediction layer with latent attention ({name!r}) is not supported")


def _switch_notes(config: MtpConfig) -> list[Note]:
    order = "[hidden; embedding]" if config.hidden_first else "[embedding; hidden]"
    norm = "before" if config.raw_hidden else "after"
    return [
        Note("features", f"the target's last hidden state {norm} its final norm; the matrix reads {order}"),
        Note("fed back", "the normed output" if config.norm_output else "the output before the norm"),
    ]


@final
class MtpDeepSeek(MtpDialect):
    """DeepSeek's and GLM's: a decoder layer beyond the last, with copies of the target's ends."""

    name = "mtp-deepseek"
    title = "MTP layer (DeepSeek, GLM)"
    variant = "deepseek"
    own_names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")

    def recognises(self, published: Published) -> bool:
        return any(name.startswith("model.layers.") and name.endswith(".eh_proj.weight") for name in published.names)

    def prefixes(self, target: Target) -> tuple[str, str]:
        prefix = f"model.layers.{target.spec.num_layers}."
        return prefix, prefix

    def copies(self, target: Target) -> dict[str, FromTarget]:
        prefix, _ = self.prefixes(target)
        return {
            f"{prefix}embed_tokens.weight": FromTarget("embedding", always=False),
            f"{prefix}shared_head.head.weight": FromTarget("head", always=False),
        }


@final
class MtpQwen(MtpDialect):
    """Qwen3-Next's: under `mtp.`, norms stored less 1."""

    name = "mtp-qwen"
    title = "MTP layer (Qwen)"
    variant = "qwen"
    own_names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    count_key = "mtp_num_hidden_layers"
    norms_less_one = True

    def recognises(self, published: Published) -> bool:
        return "mtp.fc.weight" in published.names

    def prefixes(self, target: Target) -> tuple[str, str]:
        return "mtp.", "mtp.layers.0."

    def concerns(self, name: str, target: Target) -> bool:
        return name.startswith("mtp.") and not re.match(r"mtp\.layers\.[1-9]", name)


@final
class MtpMimo(MtpDialect):
    """MiMo's: under `model.mtp_layers.0.`, with Qwen2's layer."""

    name = "mtp-mimo"
    title = "MTP layer (MiMo)"
    variant = "mimo"
    own_names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")

    def recognises(self, published: Published) -> bool:
        return "model.mtp_layers.0.input_proj.weight" in published.names

    def prefixes(self, target: Target) -> tuple[str, str]:
        return "model.mtp_layers.0.", "model.mtp_layers.0."
