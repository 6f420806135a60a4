"""What an interrupted run needs to go on: weights, optimiser, and where it was, in one file.

Called by the trainer. `last.safetensors` is the state to go on from, `best.safetensors` the weights of the best
validation. Invariants: a state appears whole or not at all, so whoever is killed while writing keeps the one
before; what is read back is, bit for bit, what was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.drafters.trainable import DraftModule
from draftsmith.errors import DataError, DraftsmithError
from draftsmith.io.tensor_file import save_tensors

FORMAT = "1"
LAST, BEST, LOG = "last.safetensors", "best.safetensors", "train.jsonl"


def write_state(path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and plain values. Raises `DraftsmithError` when the disk does not take them."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_tensors(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            staging,
            metadata={"format": FORMAT, "facts": json.dumps(facts)},
        )
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        staging.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        problem = error.strerror or _one_line(error)  # its text names the hidden file
        raise DraftsmithError(f"{path}: cannot be written ({problem}); {last_state(path.parent)}") from error
    finally:
        staging.unlink(missing_ok=True)


def read_state(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What `write_state` wrote. Raises `DataError` for a file that is not one."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if metadata.get("format") != FORMAT:
            raise DataError(f"{path}: written by another version; begin anew with --force")
        facts: dict[str, Any] = json.loads(metadata["facts"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a readable state ({_one_line(error)}); begin anew with --force") from error
    return tensors, facts


def last_state(directory: Path) -> str:
    """Where the state is to go on from, in words."""
    path = directory / LAST
    return f"the last good state is {path}" if path.exists() else "there is no state yet"


def way_on(directory: Path) -> str:
    """What the same command does after a run that was cut off."""
    is_there = (directory / LAST).exists()
    return f"{last_state(directory)}, and the same command {'goes on from there' if is_there else 'begins anew'}"


def best_fits(directory: Path, module: DraftModule) -> bool:
    """Whether the best weights are there, whole, and this module's."""
    try:
        found = weights_of(read_state(directory / BEST)[0])
    except DataError:
        return False
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    return {name: tensor.shape for name, tensor in found.items()} == shapes


def remove_leftovers(directory: Path) -> None:
    """Delete what a killed writer left half-written."""
    for name in (LAST, BEST, LOG):
        for staging in directory.glob(f".{name}.*"):
            staging.unlink(missing_ok=True)


def training_tensors(module: DraftModule, optimiser: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights as `weight.NAME`, the optimiser's memory as `optimiser.NUMBER.KEY`."""
    tensors = {f"weight.{name}": tensor for name, tensor in module.state_dict().items()}
    for number, memory in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{key}": value for key, value in memory.items()}
    return tensors


def weights_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights among a state's tensors."""
    return {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name.startswith("weight.")}


def restore(module: DraftModule, optimiser: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put weights and the optimiser's memory back."""
    module.load_state_dict(weights_of(tensors))
    memory: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimiser":
            number, _, key = rest.partition(".")
            memory.setdefault(int(number), {})[key] = tensor
    optimiser.load_state_dict({"state": memory, "param_groups": optimiser.state_dict()["param_groups"]})


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
