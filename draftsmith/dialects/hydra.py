"""Hydra and Hydra++ as zankner/Hydra writes them: `hydra_lm_head.pt`, numbered by the places in its sequences.

Architecture `mlp` is Hydra, `prefix-mlp` Hydra++; the latter has a dropout between any two modules, so its numbers are
odd. The prefix layer is a one-layer Llama of the base model's own proportions, whose embedding nobody reads. Blocks
after a head's first are one shared object there; they may differ here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, final

import torch

from draftsmith.dialects.dialect import Choices, Described, Dialect, FromTarget, Note, Spelling, Target, check_size
from draftsmith.dialects.llama_layer import config_fields, layer_names
from draftsmith.dialects.published import Published
from draftsmith.drafters.checkpoint import Checkpoint, config_of
from draftsmith.drafters.draft_layer import LayerShape
from draftsmith.drafters.hydra import HydraConfig
from draftsmith.errors import ModelFileError, UnsupportedError

_PREFIX_LAYER = "prefix_embeding_layer"  # as its authors spell it
_HEAD = re.compile(r"hydra_mlp\.(?P<head>\d+)\.(?P<place>\d+)\.linear\.weight")


@final
class Hydra(Dialect):
    """Its authors' spelling."""

    name = "hydra"
    title = "Hydra and Hydra++ (zankner/Hydra)"
    methods = ("hydra",)
    weights_file = "hydra_lm_head.pt"
    unsaid = frozenset({"feature_weight", "head"})
    unread = frozenset({f"{_PREFIX_LAYER}.embed_tokens.weight"})

    def recognises(self, published: Published) -> bool:
        return any(name.startswith("hydra_mlp.") for name in published.names)

    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        where, given, spec = str(published.path), published.config, target.spec
        _check_given(published)
        found = [match for name in published.names if (match := _HEAD.fullmatch(name))]
        if not found:
            raise ModelFileError(f"{where}: no Hydra heads among the tensors")
        has_prefix = any(name.startswith(f"{_PREFIX_LAYER}.layers.") for name in published.names)
        places = {int(match["place"]) for match in found}
        width = published.shape(found[0].string)[0]
        check_size(published, "hydra_mlp (its width)", width, spec.width, "width", target)
        _check_embedding(target)
        fields = {
            "width": width,
            "num_depths": 1 + max(int(match["head"]) for match in found),
            "num_layers": len(places),
            "head": "own",
            "prefix": LayerShape.like(spec) if has_prefix else None,
        }
        config = config_fields(HydraConfig, fields, choices.changes, where)
        said = given.get("hydra_num_heads")
        differs = f" (the config says {said})" if isinstance(said, int) and said != config.num_depths else ""
        notes = [
            Note("heads", f"{config.num_depths} of {config.num_layers} layers, counted{differs}"),
            Note(
                "features", "the target's last hidden state after its final norm, then the drafted tokens' embeddings"
            ),
        ]
        if has_prefix:
            notes.append(
                Note("prefix layer", f"of the target's proportions, rope theta {spec.rope.theta:g}; row t at t")
            )
        return Described(config=config, notes=tuple(notes))

    def spelling(self, config: Any, native: Iterable[str], target: Target) -> Spelling:
        step, start, inner = (2, 1, ".1") if config.prefix is not None else (1, 0, "")
        names: dict[str, tuple[str, ...]] = {}
        for head in range(config.num_depths):
            for kind in ("weight", "bias"):
                first = f"hydra_mlp.{head}.{start}"
                names[f"heads.{head}.linear.{kind}"] = (f"{first}.linear.{kind}",)
                names[f"heads.{head}.res_connection.{kind}"] = (f"{first}.res_connection.{kind}",)
                for block in range(config.num_layers - 1):
                    place = start + step * (block + 1)
                    names[f"heads.{head}.blocks.{block}.{kind}"] = (f"hydra_mlp.{head}.{place}.linear.{kind}",)
        matrices = [f"hydra_lm_head.{head}{inner}.weight" for head in range(config.num_depths)]
        from_target: dict[str, FromTarget] = {}
        if config.head == "own":
            names |= {f"lm_heads.{head}.weight": (matrix,) for head, matrix in enumerate(matrices)}
        elif config.head == "shared":
            names["lm_heads.0.weight"] = tuple(matrices)
        else:
            from_target = {matrix: FromTarget("head", always=True) for matrix in matrices}
        if config.prefix is not None:
            names |= layer_names(f"{_PREFIX_LAYER}.layers.0.", config.prefix, "prefix_layer.layer.")
            norm = "input_layernorm.weight"
            names[f"prefix_layer.{norm}"] = (f"{_PREFIX_LAYER}.layers.0.{norm}",)
            names["prefix_norm.weight"] = (f"{_PREFIX_LAYER}.norm.weight",)
        biases = tuple(f"hydra_lm_head.{head}{inner}.bias" for head in range(config.num_depths))
        return Spelling(names=names, rows={"head_bias": biases}, from_target=from_target)

    def vocabulary(self, checkpoint: Checkpoint, vocab_size: int) -> dict[str, torch.Tensor]:
        if "draft_ids" in checkpoint.tensors:
            raise UnsupportedError("hydra has no draft vocabulary: a drafter for it is trained without --draft-vocab")
        return {}

    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        native: HydraConfig = config_of(checkpoint)
        _check_embedding(target)
        if native.prefix is not None and target.spec.rope.kind != "default":
            raise UnsupportedError(
                f"{target.name} scales its positions and its authors' code does so in the prefix layer"
            )
        config = {
            "hydra_num_heads": native.num_depths,
            "hydra_num_layers": native.num_layers,
            "hydra_head_arch": "mlp" if native.prefix is None else "prefix-mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": target.name,
        }
        notes = [Note("features", "the target's last hidden state after its final norm, then the drafted tokens'")]
        if native.head != "own":
            notes.append(
                Note("output", f"one matrix ({native.head}), written for each of the {native.num_depths} heads")
            )
        return config, notes


def _check_given(published: Published) -> None:
    """Raises `UnsupportedError` for variants that are other drafters."""
    given = published.config
    if given.get("hydra_head_arch", "mlp") not in ("mlp", "prefix-mlp"):
        raise UnsupportedError(f"{published.path}: Hydra of architecture {given['hydra_head_arch']!r} is not supported")
    if given.get("grounded_heads") is False:
        raise UnsupportedError(f"{published.path}: Hydra without the drafted tokens ('grounded_heads') is Medusa")
    if given.get("hidden_state_offset"):
        raise UnsupportedError(
            f"{published.path}: 'hidden_state_offset' {given['hidden_state_offset']} is not supported"
        )


def _check_embedding(target: Target) -> None:
    if target.spec.embedding_scale != 1.0:
        raise UnsupportedError(f"{target.name} scales its embeddings and Hydra's own code does not")
