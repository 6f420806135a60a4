"""EAGLE-3 as SafeAILab's code and SpecForge write it: a flat Llama config, the layer under `midlayer.`.

The embedding is left out and taken from the target. Layer ids are mostly left out too; where they stand (top level or
`eagle_config`) their convention is the producer's, see `layer_ids`. `norm_output` is read as "the normed output is fed
back" (EAGLE-3.1, vLLM) where `fc_norm` or our own mark shows that it is meant so; SpecForge means the norm before the
head by it, which everybody has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch

from draftsmith.dialects.dialect import (
    MARK,
    Choices,
    Described,
    Dialect,
    FromTarget,
    Note,
    Spelling,
    Target,
    check_size,
    mark_of,
)
from draftsmith.dialects.draft_vocabulary import MASK, OFFSETS, read_vocabulary, write_vocabulary
from draftsmith.dialects.layer_ids import default_taps, ids_of, taps_of
from draftsmith.dialects.llama_layer import config_fields, layer_config, layer_names, layer_shape
from draftsmith.dialects.published import Published
from draftsmith.drafters.checkpoint import Checkpoint, config_of
from draftsmith.drafters.eagle3 import Eagle3Config
from draftsmith.errors import ModelFileError, UnsupportedError

HEAD = "lm_head.weight"
IDS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_residual", "norm_output", "fc_norm")


class Eagle3Dialect(Dialect):
    """What both spellings of EAGLE-3 share."""

    methods = ("eagle3",)
    layer_prefix: str

    def spelling(self, config: Any, native: Iterable[str], target: Target) -> Spelling:
        names = layer_names(self.layer_prefix, config)
        for part in ("input_layernorm", "hidden_norm"):
            names[f"{part}.weight"] = (f"{self.layer_prefix}{part}.weight",)
        for part in ("fc", "norm", "lm_head"):
            names[f"{part}.weight"] = (f"{part}.weight",)
        if config.tap_norm:
            names |= {f"tap_norms.{tap}.weight": (f"fc_norm.{tap}.weight",) for tap in range(len(config.taps))}
        return Spelling(names=names, from_target={"embed_tokens.weight": FromTarget("embedding", always=False)})

    def vocabulary(self, checkpoint: Checkpoint, vocab_size: int) -> dict[str, torch.Tensor]:
        ids = checkpoint.tensors.get("draft_ids")
        return {} if ids is None or len(ids) == vocab_size else write_vocabulary(ids, vocab_size)


def describe_eagle3(
    published: Published,
    target: Target,
    choices: Choices,
    layer: Mapping[str, Any],
    switches: Mapping[str, bool],
    ids: tuple[Any, str],
) -> Described:
    """The native config from a layer's config, the switches of `SWITCHES`, and ids with their convention."""
    where, spec = str(published.path), target.spec
    check_size(published, "vocab_size", layer.get("vocab_size"), spec.vocab_size, "vocabulary", target)
    width = published.config.get("target_hidden_size") or layer.get("hidden_size")
    check_size(published, "target_hidden_size" if "target_hidden_size" in published.config else "hidden_size", width,
               spec.width, "width", target)  # fmt: skip
    if layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedError(f"{where}: {layer['num_hidden_layers']} draft layers; EAGLE-3 with one is supported")
    if published.config.get("norm_before_fc"):
        raise UnsupportedError(f"{where}: one norm over all taps together ('norm_before_fc') is not supported")
    shape, positions = layer_shape(layer, where)
    if shape["width"] != spec.width:
        raise UnsupportedError(
            f"{where}: a draft layer {shape['width']} wide beside a target of {spec.width} needs an embedding of its "
            "own, which is not supported"
        )
    taps, taps_note = taps_of(ids[0], ids[1], spec.num_layers, where)
    fields = {
        **shape,
        "taps": taps,
        "norm_before_residual": switches["norm_before_residual"],
        "norm_output": switches["norm_output"],
        "tap_norm": switches["fc_norm"],
    }
    config = config_fields(Eagle3Config, fields, choices.changes, where)
    if HEAD not in published.names:
        raise ModelFileError(f"{where}: tensor {HEAD!r} is missing")
    draft_ids, rows, ids_note = read_vocabulary(published, spec.vocab_size, published.shape(HEAD)[0])
    return Described(
        config=config,
        draft_ids=draft_ids,
        rows=rows,
        used=frozenset({OFFSETS, MASK} & published.names),
        notes=(taps_note, ids_note, positions, *switch_notes(config)),
    )


def check_width(config: Eagle3Config, target: Target) -> None:
    """Raises `UnsupportedError` for a layer that elsewhere would need an embedding of its own."""
    if config.width != target.spec.width:
        raise UnsupportedError(
            f"a draft layer {config.width} wide beside a target of {target.spec.width}: others would look for an "
            "embedding of its own"
        )


def switch_notes(config: Eagle3Config) -> list[Note]:
    """What the switches do, in words."""
    residual = "the normed feature (norm_before_residual)" if config.norm_before_residual else "the feature itself"
    fed_back = "the normed output (norm_output)" if config.norm_output else "the output before the norm"
    notes = [Note("residual", residual), Note("fed back", fed_back)]
    if config.tap_norm:
        notes.append(Note("taps' norms", "one for each tap (fc_norm)"))
    if config.qkv_bias:
        notes.append(Note("biases", "of queries, keys and values; vLLM's classes of EAGLE-3 have no place for them"))
    return notes


@final
class Eagle3(Eagle3Dialect):
    """SafeAILab's and SpecForge's spelling."""

    name = "eagle3"
    title = "EAGLE-3 (SafeAILab, SpecForge)"
    layer_prefix = "midlayer."

    def recognises(self, published: Published) -> bool:
        return any(name.startswith("midlayer.") for name in published.names)

    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        given, mark = published.config, mark_of(published)
        inner = given.get("eagle_config") or {}
        if not isinstance(inner, Mapping):
            raise ModelFileError(f"{published.path}: config key 'eagle_config' must be an object")
        if inner.get("use_aux_hidden_state") is False:
            raise UnsupportedError(f"{published.path}: EAGLE-3 without taps ('use_aux_hidden_state') is not supported")
        switches = {key: _flag(published, key) for key in SWITCHES}
        if not mark and not switches["fc_norm"] and "norm_output" not in choices.changes:
            if given.get("norm_output") is False:
                raise UnsupportedError(
                    f"{published.path}: 'norm_output' false is no norm before the head in SpecForge, which is not "
                    "supported; where it only means that outputs are fed back as they are: --set norm_output=false"
                )
            switches["norm_output"] = False
        convention = choices.layer_ids if choices.layer_ids != "auto" else mark.get("layer_ids", "auto")
        ids = given.get(IDS) or inner.get(IDS)
        return describe_eagle3(published, target, choices, given, switches, (ids, convention))

    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        native: Eagle3Config = config_of(checkpoint)
        ids = checkpoint.tensors.get("draft_ids")
        check_width(native, target)
        if native.qk_norm:
            raise UnsupportedError("normed queries and keys: write eagle3-speculators, whose layer may be Qwen's")
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer_config(native, target.spec.vocab_size, target.spec.max_context),
            "draft_vocab_size": target.spec.vocab_size if ids is None else len(ids),
        }
        # Left out where false: SpecForge takes `norm_output` false for something else.
        said = {
            "norm_before_residual": native.norm_before_residual,
            "norm_output": native.norm_output,
            "fc_norm": native.tap_norm,
        }
        config |= {key: True for key, value in said.items() if value}
        convention = "applied" if choices.layer_ids == "auto" else choices.layer_ids
        if native.taps == default_taps(target.spec.num_layers) and choices.layer_ids == "auto":
            note = Note("taps", f"no ids written: 2, L/2, L-3 of {target.spec.num_layers} layers is what loaders take")
        else:
            config[IDS], note = ids_of(native.taps, convention)
            config[MARK] = {"layer_ids": convention}
        notes = [note, *switch_notes(native)]
        if native.norm_output:
            notes.append(Note("norm_output", "as vLLM reads it; eagle3-speculators says it without doubt"))
        return config, notes


def _flag(published: Published, key: str) -> bool:
    value = published.config.get(key, False)
    if not isinstance(value, bool):
        raise ModelFileError(f"{published.path}: config key {key!r} is {value!r}; true or false is needed")
    return value
