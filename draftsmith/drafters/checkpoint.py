"""Trained drafters on disk: a directory with `config.json` and `model.safetensors`.

Written by the trainer and by conversions, read by every drafter with weights. Invariants: a directory appears
whole or not at all; what does not fit the target or the method is refused by name before anything runs, and no
tensor is missing, unknown or misshapen.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.config_fields import read_fields
from draftsmith.drafters.trainable import DraftModule, Layout, TrainableDrafter
from draftsmith.errors import ModelFileError, OptionError
from draftsmith.io.staging import staged_directory
from draftsmith.io.tensor_file import save_tensors
from draftsmith.models.spec import DecoderSpec
from draftsmith.registry import DRAFTERS, load_class, parse_selection

FORMAT = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TARGET = "model"
"""Inside the directory of a method that changes its target: that target."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a directory holds. `config`: the module's own; `target`: what it was trained for; `about`: its history."""

    path: Path
    method: str
    config: Mapping[str, Any]
    target: Mapping[str, Any]
    about: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def drafter_class(method: str) -> type[TrainableDrafter]:
    """A drafter of the table. Raises `OptionError` for one without weights."""
    drafter = load_class(parse_selection(method, DRAFTERS, "drafter"))
    if not issubclass(drafter, TrainableDrafter):
        raise OptionError(f"drafter {method!r} has no weights to train")
    return drafter


def module_class(method: str) -> type[DraftModule]:
    """What is trained for a drafter of the table. Raises `OptionError` for one without weights."""
    return drafter_class(method).Module


def save_module(
    path: Path,
    method: str,
    module: DraftModule,
    target_name: str,
    target: TargetInfo,
    about: Mapping[str, Any],
    *,
    texts: Mapping[str, str] = types.MappingProxyType({}),
    dtype: torch.dtype | None = None,
) -> None:
    """Write a module as it is, its weights in `dtype` (None: the type they have). An older directory of that name is
    replaced.

    `about`: plain values about its training, kept for people; `texts`: files beside it, by name. Raises
    `OSError` as the system does, with nothing half-written left behind.
    """
    layout = module.layout(target)
    checkpoint = Checkpoint(
        path=path,
        method=method,
        config=dataclasses.asdict(module.config),
        target={"name": target_name, **target_facts(target.backend.spec)},
        about=about,
        tensors=layout.tensors,
    )
    _save(checkpoint, layout, texts, dtype)


def save_checkpoint(checkpoint: Checkpoint, *, texts: Mapping[str, str] = types.MappingProxyType({})) -> None:
    """Write a checkpoint to its path, in place of what is there; `texts` as for `save_module`. Raises `OSError`."""
    _save(checkpoint, Layout(tensors=checkpoint.tensors), texts, None)


def target_facts(spec: DecoderSpec) -> dict[str, int]:
    """The sizes by which a checkpoint knows its target."""
    return {"vocab_size": spec.vocab_size, "width": spec.width, "num_layers": spec.num_layers}


def _save(checkpoint: Checkpoint, layout: Layout, texts: Mapping[str, str], dtype: torch.dtype | None) -> None:
    described = {
        "draftsmith": FORMAT,
        "method": checkpoint.method,
        "config": dict(checkpoint.config),
        "target": dict(checkpoint.target),
        "about": dict(checkpoint.about),
    }
    with staged_directory(checkpoint.path) as staging:
        _write(staging, layout, described, texts, dtype)


def _write(
    path: Path, layout: Layout, described: Mapping[str, Any], texts: Mapping[str, str], dtype: torch.dtype | None
) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in layout.tensors.items()}
    if dtype is not None:
        tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    # Other loaders of model directories ask for this mark.
    save_tensors(tensors, path / WEIGHTS, metadata={"format": "pt"})
    (path / CONFIG).write_text(json.dumps({**layout.config, **described}, indent=1) + "\n", encoding="utf-8")
    for name, text in {**layout.texts, **texts}.items():
        (path / name).write_text(text, encoding="utf-8")
    if layout.target is not None:
        (path / TARGET).mkdir()
        _write(path / TARGET, layout.target, {}, {}, dtype)


def read_config(path: Path) -> dict[str, Any]:
    """What a directory's config says, without its weights. Raises `ModelFileError` naming the file."""
    where = path / CONFIG
    try:
        described = json.loads(where.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{where}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(described, dict) or described.get("draftsmith") != FORMAT:
        raise ModelFileError(
            f"{where}: not a drafter of this package (key 'draftsmith' must be {FORMAT}); other projects' "
            "checkpoints are read by `draftsmith convert`"
        )
    for key, kind in (("method", str), ("config", dict), ("target", dict), ("about", dict)):
        if not isinstance(described.get(key), kind):
            raise ModelFileError(f"{where}: key {key!r} must be a {kind.__name__}")
    return described


def is_drafter(path: Path) -> bool:
    """Whether a directory holds a drafter of this package, readable or not in other respects."""
    try:
        read_config(path)
    except ModelFileError:
        return False
    return True


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and check a directory's own consistency. Raises `ModelFileError` naming the file."""
    described = read_config(path)
    weights = path / WEIGHTS
    try:
        with safe_open(str(weights), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{weights}: not a readable safetensors file ({error})") from error
    return Checkpoint(
        path=path,
        method=described["method"],
        config=described["config"],
        target=described["target"],
        about=described["about"],
        tensors=tensors,
    )


def read_method(path: Path, method: str, alike: frozenset[str] = frozenset()) -> Checkpoint:
    """`read_checkpoint` of one method, or of one with the same weights. Raises `ModelFileError` for another's."""
    checkpoint = read_checkpoint(path)
    if checkpoint.method not in {method, *alike}:
        raise ModelFileError(f"{path}: holds weights of drafter {checkpoint.method!r}, not of {method!r}")
    return checkpoint


def load_module(path: Path, method: str, target: TargetInfo) -> DraftModule:
    """A module with the weights of a directory, in float32. Raises `ModelFileError` for whatever does not fit."""
    return build_module(read_method(path, method), target)


def build_module(checkpoint: Checkpoint, target: TargetInfo) -> DraftModule:
    """A checkpoint's module. Raises `ModelFileError` for a wrong target, config or tensor."""
    check_target(checkpoint, target.backend.spec)
    config = config_of(checkpoint)
    module = module_class(checkpoint.method)(config, target, draft_ids_of(checkpoint, target.vocab_size))
    check_taps(module, target.backend.spec.num_layers, str(checkpoint.path))
    check_tensors(checkpoint, module.state_dict())
    module.load_state_dict(dict(checkpoint.tensors))
    return module


def config_of(checkpoint: Checkpoint) -> Any:
    """A checkpoint's architecture as its module's `Config`. Raises `ModelFileError`."""
    kind = module_class(checkpoint.method).Config
    return read_fields(kind, checkpoint.config, f"{checkpoint.path / CONFIG}: key 'config")


def check_taps(module: DraftModule, num_layers: int, where: str) -> None:
    """Raises `ModelFileError` for features that a target of so many layers does not have."""
    for tap in sorted(tap for tap in module.needs if isinstance(tap, int)):
        if not 0 <= tap <= num_layers:
            raise ModelFileError(f"{where}: reads tap {tap}, which is beyond the target's {num_layers} layers")


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, torch.Tensor]) -> None:
    """Raises `ModelFileError` for a tensor that is missing, unknown, of another shape or not finite."""
    where = checkpoint.path / WEIGHTS
    for name in sorted(set(expected) ^ set(checkpoint.tensors)):
        raise ModelFileError(f"{where}: tensor {name!r} is {'missing' if name in expected else 'unknown'}")
    for name, tensor in checkpoint.tensors.items():
        if tensor.shape != expected[name].shape:
            raise ModelFileError(
                f"{where}: tensor {name!r} has shape {tuple(tensor.shape)}; {tuple(expected[name].shape)} "
                "is implied by the config"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelFileError(f"{where}: tensor {name!r} holds a weight that is not finite")


def check_target(checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    """Raises `ModelFileError` for a target other than the one that was trained for."""
    for key, value in target_facts(spec).items():
        if checkpoint.target.get(key) != value:
            raise ModelFileError(
                f"{checkpoint.path}: trained for a target with {key} {checkpoint.target.get(key)} "
                f"({checkpoint.target.get('name')}); this target's is {value}"
            )


def draft_ids_of(checkpoint: Checkpoint, vocab_size: int) -> torch.Tensor | None:
    """The target ids it drafts, None for all of them. Raises `ModelFileError`."""
    ids = checkpoint.tensors.get("draft_ids")
    if ids is None:
        return None
    where = f"{checkpoint.path / WEIGHTS}: tensor 'draft_ids'"
    if ids.dtype != torch.int64 or ids.ndim != 1 or len(ids) == 0:
        raise ModelFileError(f"{where} must be a list of int64")
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        raise ModelFileError(f"{where} must rise from at least 0 to below {vocab_size}")
    return ids
