"""Faults planted into exports for `check_dialects.py`: each misreads a file the way loaders have misread them.

A fault changes config and tensors of a true export; `FAULTS` says into which case. Every one must be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def ids_off_by_one(config: dict[str, Any], tensors: Tensors) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    config[key] = [index + 1 for index in config.get(key, [2, 4, 5])]


def swapped_taps(config: dict[str, Any], tensors: Tensors) -> None:
    low, middle, high = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat((high, middle, low), dim=1)


def offsets_off_by_one(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"][5:] += 1


def ids_for_offsets(config: dict[str, Any], tensors: Tensors) -> None:
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = ids % 256  # kept inside the vocabulary, so that loading does not already fail


def swapped_halves(config: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)


def other_residual(config: dict[str, Any], tensors: Tensors) -> None:
    config["norm_before_residual"] = not config.get("norm_before_residual", False)


def other_feedback(config: dict[str, Any], tensors: Tensors) -> None:
    config["norm_output"] = not config.get("norm_output", False)


def swapped_norms(config: dict[str, Any], tensors: Tensors) -> None:
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    one, other = f"{prefix}hidden_norm.weight", f"{prefix}input_layernorm.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def swapped_ends(config: dict[str, Any], tensors: Tensors) -> None:
    """[hidden; embedding] for [embedding; hidden] and the other way round."""
    name = next(name for name in tensors if name.endswith(("fc.weight", "input_proj.weight")))
    tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)


def swapped_heads(config: dict[str, Any], tensors: Tensors) -> None:
    first, second = (f"blocks.{head}.layers.0.weight" for head in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def lost_biases(config: dict[str, Any], tensors: Tensors) -> None:
    config["medusa_fc_bias"] = False


def rotated_ids(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["token_map"] = tensors["token_map"].roll(1)


def swapped_stages(config: dict[str, Any], tensors: Tensors) -> None:
    first, second = (f"speculator.emb.{stage}.weight" for stage in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def one_head_alone(config: dict[str, Any], tensors: Tensors) -> None:
    """vLLM's class does not tie the heads of tied speculators: a file with the first alone leaves it with noise."""
    for name in [name for name in tensors if name.startswith("speculator.head.") and ".0." not in name]:
        tensors[name] = torch.zeros_like(tensors[name])


def unscaled_input(config: dict[str, Any], tensors: Tensors) -> None:
    config["scale_input"] = not config["scale_input"]


def unscaled_positions(config: dict[str, Any], tensors: Tensors) -> None:
    config["transformer_layer_config"]["rope_scaling"] = None


FAULTS: tuple[tuple[str, Callable[[dict[str, Any], Tensors], None]], ...] = (
    ("eagle3", ids_off_by_one),
    ("eagle3", swapped_taps),
    ("eagle3", offsets_off_by_one),
    ("eagle3", ids_for_offsets),
    ("eagle3", swapped_halves),
    ("eagle3", other_residual),
    ("eagle3", other_feedback),
    ("eagle3", swapped_norms),
    ("eagle3-taps", ids_off_by_one),
    ("eagle3.1", ids_off_by_one),
    ("eagle3.1", other_feedback),
    ("eagle3-speculators", offsets_off_by_one),
    ("eagle3-rope", unscaled_positions),
    ("eagle1", swapped_ends),
    ("medusa", swapped_heads),
    ("medusa", lost_biases),
    ("medusa-shared", rotated_ids),
    ("mlp", unscaled_input),
    ("mlp", one_head_alone),
    ("mlp-untied", swapped_stages),
    ("mtp-mimo", swapped_ends),
)
