"""What the spellings of Medusa share: counting heads, and where blocks and output matrices stand.

How many heads and layers there are is counted from the tensors, because published configs have been wrong about it.
Invariant: heads are whole, or the one that lacks something is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from draftsmith.dialects.dialect import Choices, Dialect, FromTarget, Note, Spelling, Target
from draftsmith.dialects.llama_layer import config_fields
from draftsmith.dialects.published import Published
from draftsmith.drafters.medusa import MedusaConfig
from draftsmith.errors import ModelFileError


class MedusaHeads(Dialect):
    """Medusa in one spelling or another."""

    methods = ("medusa",)
    unsaid = frozenset({"head"})

    def spelt(self, config: MedusaConfig, block: str, matrix: str, *, one: bool) -> Spelling:
        """Names from patterns with {head} and {layer}. `one`: one output matrix is written for all heads."""
        heads, layers = range(config.num_depths), range(config.num_layers)
        names: dict[str, tuple[str, ...]] = {}
        for head in heads:
            for layer in layers:
                for kind in ("weight", "bias"):
                    published = f"{block.format(head=head, layer=layer)}.{kind}"
                    names[f"blocks.{head}.{layer}.{kind}"] = (published,)
        matrices = [matrix.format(head=head, layers=config.num_layers) for head in heads]
        from_target: dict[str, FromTarget] = {}
        if config.head == "own":
            names |= {f"lm_heads.{head}.weight": (matrices[head],) for head in heads}
        elif config.head == "shared":
            names["lm_heads.0.weight"] = (matrices[0],) if one else tuple(matrices)
        else:
            from_target = {name: FromTarget("head", always=True) for name in (matrices[:1] if one else matrices)}
        return Spelling(names=names, from_target=from_target)


def count_heads(published: Published, block: str, matrix: str) -> tuple[int, int, int, int]:
    """Heads, layers of each, output matrices, and width. `block`, `matrix`: patterns with groups head and layer.

    Raises `ModelFileError` when there are none.
    """
    blocks = [found for name in published.names if (found := re.fullmatch(block, name))]
    matrices = [found for name in published.names if (found := re.fullmatch(matrix, name))]
    if not blocks or not matrices:
        raise ModelFileError(f"{published.path}: no Medusa heads among the tensors")
    width = published.shape(blocks[0].string)[-1]
    heads = 1 + max(int(found["head"]) for found in blocks)
    return heads, 1 + max(int(found["layer"]) for found in blocks), len(matrices), width


def medusa_config(
    published: Published, target: Target, choices: Choices, counted: tuple[int, int, int, int], *, head: str
) -> MedusaConfig:
    """The native config. Raises `ModelFileError` for heads of another target."""
    heads, layers, _, width = counted
    if width != target.spec.width:
        raise ModelFileError(
            f"{published.path}: heads are {width} wide; {target.name} is {target.spec.width}: this drafter is of "
            "another target"
        )
    fields = {"width": width, "num_depths": heads, "num_layers": layers, "head": head}
    config: MedusaConfig = config_fields(MedusaConfig, fields, choices.changes, str(published.path))
    return config


def head_notes(config: MedusaConfig, given: Mapping[str, Any], counts: Iterable[str]) -> list[Note]:
    """How many heads there are, and what the config said where it said something else."""
    said = [given[key] for key in counts if isinstance(given.get(key), int)]
    differs = f" (the config says {said[0]})" if said and said[0] != config.num_depths else ""
    return [
        Note("heads", f"{config.num_depths} of {config.num_layers} layers, counted{differs}"),
        Note("features", "the target's last hidden state after its final norm; head k drafts x_{t+2+k}"),
    ]
