"""Medusa as vLLM reads it: `blocks.i.layers.j` and `lm_heads.i`, one output matrix for all with `original_lm_head`.

Biases are read only with `medusa_fc_bias`, so they are written with it. `token_map` lists the ids of a draft
vocabulary; vLLM's class reads it with one output matrix alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch

from draftsmith.dialects.dialect import Choices, Described, Note, Spelling, Target, check_size
from draftsmith.dialects.draft_vocabulary import read_ids
from draftsmith.dialects.medusa_heads import MedusaHeads, count_heads, head_notes, medusa_config
from draftsmith.dialects.published import Published
from draftsmith.drafters.checkpoint import Checkpoint, config_of
from draftsmith.drafters.medusa import MedusaConfig
from draftsmith.errors import ModelFileError, UnsupportedError

_IDS = "token_map"
_PREFIX = "medusa_heads."


@final
class MedusaVllm(MedusaHeads):
    """vLLM's spelling."""

    name = "medusa-vllm"
    title = "Medusa (vLLM)"

    def recognises(self, published: Published) -> bool:
        return any(f"{prefix}blocks.0.layers.0.weight" in published.names for prefix in ("", _PREFIX))

    def prepare(self, published: Published) -> Published:
        return published.renamed({name: name.removeprefix(_PREFIX) for name in published.names})

    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        given, spec = published.config, target.spec
        if "vocab_size" in given:
            check_size(published, "vocab_size", given["vocab_size"], spec.vocab_size, "vocabulary", target)
        if "hidden_size" in given:
            check_size(published, "hidden_size", given["hidden_size"], spec.width, "width", target)
        block, matrix = r"blocks\.(?P<head>\d+)\.layers\.(?P<layer>\d+)\.weight", r"lm_heads\.(?P<head>\d+)\.weight"
        counted = count_heads(published, block, matrix)
        shared = bool(given.get("original_lm_head")) or (counted[2] == 1 and counted[0] > 1)
        config = medusa_config(published, target, choices, counted, head="shared" if shared else "own")
        rows = published.shape("lm_heads.0.weight")[0]
        ids = order = None
        notes = head_notes(config, given, ("num_heads", "medusa_num_heads"))
        if _IDS in published.names:
            ids, order, note = read_ids(published, _IDS, spec.vocab_size, rows)
            notes.append(note)
        elif rows != spec.vocab_size:
            raise ModelFileError(f"{published.path}: tensor {_IDS!r} is missing, and {rows} output rows need it")
        has_bias = "blocks.0.layers.0.bias" in published.names
        if has_bias and not given.get("medusa_fc_bias"):
            notes.append(Note("biases", "used, though without 'medusa_fc_bias' vLLM drops them"))
        elif not has_bias:
            notes.append(Note("biases", "none in the file: zero"))
        used = frozenset({_IDS} & published.names)
        return Described(config=config, draft_ids=ids, rows=order, used=used, notes=tuple(notes))

    def spelling(self, config: Any, native: Iterable[str], target: Target) -> Spelling:
        found = self.spelt(config, "blocks.{head}.layers.{layer}", "lm_heads.{head}.weight", one=True)
        biases = frozenset(name for name in found.names if name.endswith(".bias"))
        return Spelling(names=found.names, from_target=found.from_target, biases=biases)

    def vocabulary(self, checkpoint: Checkpoint, vocab_size: int) -> dict[str, torch.Tensor]:
        ids = checkpoint.tensors.get("draft_ids")
        if ids is None:
            return {}
        native: MedusaConfig = config_of(checkpoint)
        if native.head == "own":
            raise UnsupportedError("vLLM's Medusa takes a draft vocabulary only with one output matrix for all heads")
        return {_IDS: ids}

    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        native: MedusaConfig = config_of(checkpoint)
        ids = checkpoint.tensors.get("draft_ids")
        has_bias = any(bool(tensor.any()) for name, tensor in checkpoint.tensors.items() if name.endswith(".bias"))
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": native.width,
            "vocab_size": target.spec.vocab_size,
            "truncated_vocab_size": target.spec.vocab_size if ids is None else len(ids),
            "num_heads": native.num_depths,
            "num_hidden_layers": native.num_layers,
            "max_paths": 64,
            "topk": 10,
            "medusa_fc_bias": has_bias,
            "original_lm_head": native.head != "own",
        }
        return config, head_notes(native, {}, ())
