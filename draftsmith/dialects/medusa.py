"""Medusa as FasterDecoding writes it: heads alone (Medusa-1) or beside the model they were trained with (Medusa-2).

Head i has blocks `i.j.linear` and the output matrix `i.LAYERS`. A Medusa-2 checkpoint holds them under `medusa_head.`
in the shards of a whole model whose own weights were changed too: that model must be the target.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch

from draftsmith.dialects.dialect import Choices, Described, Note, Spelling, Target
from draftsmith.dialects.medusa_heads import MedusaHeads, count_heads, head_notes, medusa_config
from draftsmith.dialects.published import Published
from draftsmith.drafters.checkpoint import Checkpoint, config_of
from draftsmith.drafters.medusa import MedusaConfig
from draftsmith.errors import UnsupportedError

_BLOCK = r"(?P<head>\d+)\.(?P<layer>\d+)\.linear\.weight"
_MATRIX = r"(?P<head>\d+)\.\d+\.weight"
_INSIDE = "medusa_head."


class FasterDecodingHeads(MedusaHeads):
    """Both spellings of FasterDecoding, which differ in a prefix."""

    prefix = ""

    def recognises(self, published: Published) -> bool:
        return f"{self.prefix}0.0.linear.weight" in published.names

    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        prefix = self.prefix.replace(".", r"\.")
        counted = count_heads(published, prefix + _BLOCK, prefix + _MATRIX)
        config = medusa_config(published, target, choices, counted, head="own")
        return Described(config=config, notes=tuple(head_notes(config, published.config, ("medusa_num_heads",))))

    def spelling(self, config: Any, native: Iterable[str], target: Target) -> Spelling:
        block, matrix = f"{self.prefix}{{head}}.{{layer}}.linear", f"{self.prefix}{{head}}.{{layers}}.weight"
        return self.spelt(config, block, matrix, one=False)

    def vocabulary(self, checkpoint: Checkpoint, vocab_size: int) -> dict[str, torch.Tensor]:
        if "draft_ids" in checkpoint.tensors:
            raise UnsupportedError(f"{self.name} has no draft vocabulary; medusa-vllm has")
        return {}

    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        native: MedusaConfig = config_of(checkpoint)
        config = {
            "medusa_num_heads": native.num_depths,
            "medusa_num_layers": native.num_layers,
            "base_model_name_or_path": target.name,
            "hidden_size": native.width,
            "vocab_size": target.spec.vocab_size,
            "medusa_fc_bias": True,  # else vLLM, which reads these names too, would drop the biases
        }
        notes = head_notes(native, {}, ())
        if native.head != "own":
            notes.append(
                Note("output", f"one matrix ({native.head}), written for each of the {native.num_depths} heads")
            )
        return config, notes


@final
class Medusa(FasterDecodingHeads):
    """Heads in a file of their own."""

    name = "medusa"
    title = "Medusa-1 (FasterDecoding)"
    weights_file = "medusa_lm_head.pt"


@final
class Medusa2(FasterDecodingHeads):
    """Heads in the checkpoint of a whole model."""

    name = "medusa2"
    title = "Medusa-2 (FasterDecoding)"
    prefix = _INSIDE
    weights_file = "model-medusa.safetensors"

    def concerns(self, name: str, target: Target) -> bool:
        return name.startswith(_INSIDE)

    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        found = super().describe(published, target, choices)
        note = Note("target", "the model in this checkpoint, whose weights were trained with the heads, not its base")
        return Described(config=found.config, notes=(*found.notes, note))

    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        own, notes = super().config(checkpoint, target, choices)
        config = {**target.files.config, **{key: own[key] for key in ("medusa_num_heads", "medusa_num_layers")}}
        return config, [*notes, Note("file", f"{self.weights_file} goes beside the target's own shards")]
