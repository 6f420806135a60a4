"""EAGLE-1 and EAGLE-2 as SafeAILab's code writes them: a flat Llama config, the layer under `layers.0.`, and `fc`.

Whether `fc` has a bias is told by the tensors (the config's `bias` is often left out and means true). The embedding is
mostly in the file, a frozen copy of the target's. Both methods have the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from draftsmith.dialects.dialect import Choices, Described, Dialect, FromTarget, Note, Spelling, Target, check_size
from draftsmith.dialects.llama_layer import config_fields, layer_config, layer_names, layer_shape
from draftsmith.dialects.published import Published
from draftsmith.drafters.checkpoint import Checkpoint, config_of
from draftsmith.drafters.eagle1 import Eagle1Config
from draftsmith.errors import UnsupportedError

_PREFIX = "layers.0."


@final
class Eagle1(Dialect):
    """SafeAILab's spelling."""

    name = "eagle1"
    title = "EAGLE-1 and 2 (SafeAILab)"
    methods = ("eagle1", "eagle2")
    unsaid = frozenset({"noise"})
    marks_ids = True

    def recognises(self, published: Published) -> bool:
        names = published.names
        if "fc.weight" not in names or f"{_PREFIX}self_attn.q_proj.weight" not in names:
            return False
        return f"{_PREFIX}hidden_norm.weight" not in names

    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        where, given, spec = str(published.path), published.config, target.spec
        check_size(published, "vocab_size", given.get("vocab_size"), spec.vocab_size, "vocabulary", target)
        check_size(published, "hidden_size", given.get("hidden_size"), spec.width, "width", target)
        if given.get("num_hidden_layers", 1) != 1:
            raise UnsupportedError(f"{where}: {given['num_hidden_layers']} draft layers; EAGLE with one is supported")
        _check_embedding(target)
        shape, positions = layer_shape(given, where)
        fields = {**shape, "fc_bias": "fc.bias" in published.names}
        config = config_fields(Eagle1Config, fields, choices.changes, where)
        bias = "with" if config.fc_bias else "without"
        notes = (Note("features", "the target's last hidden state after its final norm"), positions,
                 Note("fc", f"{bias} a bias, as the tensors say; reads [embedding; feature]"))  # fmt: skip
        return Described(config=config, notes=notes)

    def spelling(self, config: Any, native: Iterable[str], target: Target) -> Spelling:
        names = {**layer_names(_PREFIX, config), "fc.weight": ("fc.weight",)}
        if config.fc_bias:
            names["fc.bias"] = ("fc.bias",)
        return Spelling(names=names, from_target={"embed_tokens.weight": FromTarget("embedding", always=False)})

    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        native: Eagle1Config = config_of(checkpoint)
        _check_embedding(target)
        layer = layer_config(native, target.spec.vocab_size, target.spec.max_context)
        config = {"architectures": ["LlamaForCausalLM"], **layer, "bias": native.fc_bias}
        notes = [Note("features", "the target's last hidden state after its final norm")]
        if native.fc_bias:
            notes.append(Note("fc", "with a bias, which vLLM's class of EAGLE-1 has no place for"))
        return config, notes


def _check_embedding(target: Target) -> None:
    if target.spec.embedding_scale != 1.0:
        raise UnsupportedError(
            f"{target.name} scales its embeddings by {target.spec.embedding_scale:g} and EAGLE-1's other loaders do "
            "not, so its weights cannot be exchanged"
        )
