"""A published checkpoint as it lies on disk: a config and tensors by name, whatever they are stored in.

Opened by `convert` for every source that is not of this package. Invariants: a pickle is read as tensors alone, code
in it is refused and never run; tensors of safetensors are read when asked for; whatever is wrong is a
`ModelFileError` that names the file.
"""

from __future__ import annotations

import json
import pickle
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.errors import ModelFileError
from draftsmith.io.catalogue import fetch, is_hub_id
from draftsmith.io.safetensors import read_json_object

CONFIG = "config.json"
_PICKLES = (".bin", ".pt", ".pth")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ("config.json", "*.index.json", "*.safetensors", "*.bin", "*.pt", "*.pth")
_NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"})


@final
class Published:
    """A checkpoint of another project. `path`: its directory or file; `config`: its config, empty if it has none."""

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        files: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        stored: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        """Use `open_published`. `files`: of each tensor the open file (safetensors) or the tensor itself. `stored`: its
        name in that file where it is another.
        """
        self.path = path
        self.config = config
        self._files = files
        self._shapes = shapes
        self._stored = stored

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def renamed(self, names: Mapping[str, str]) -> Published:
        """The same checkpoint with other names, each given by its present one. Raises `ModelFileError` for a clash."""
        fresh = {names.get(name, name): name for name in self._files}
        if len(fresh) < len(self._files):
            lost = next(name for name in self._files if fresh[names.get(name, name)] != name)
            raise ModelFileError(f"{self.path}: tensor {lost!r} stands there under two names")
        return Published(
            self.path,
            self.config,
            {new: self._files[old] for new, old in fresh.items()},
            {new: self._shapes[old] for new, old in fresh.items()},
            {new: self._stored.get(old, old) for new, old in fresh.items()},
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape; raises `ModelFileError` when there is none of that name."""
        if name not in self._shapes:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing")
        return self._shapes[name]

    def load(self, name: str) -> torch.Tensor:
        """A tensor as stored. Raises `ModelFileError`."""
        self.shape(name)
        found = self._files[name]
        if isinstance(found, torch.Tensor):
            return found.contiguous()
        with _readable(self.path):
            tensor: torch.Tensor = found.get_tensor(self._stored.get(name, name))
            return tensor


def in_memory(path: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Published:
    """A checkpoint that lies nowhere yet. `path`: its name in messages."""
    return Published(path, config, tensors, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


def open_published(source: str) -> Published:
    """Open a directory, a file of weights or a hub id `org/name`. Raises `ModelFileError`."""
    path = Path(source).expanduser()
    if not path.exists():
        if not is_hub_id(source):
            raise ModelFileError(f"{source}: no such directory or file, and not a hub id org/name")
        path = fetch(source, _PATTERNS)
    files: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    origins: dict[str, Path] = {}
    for file in _weight_files(path):
        for name, held, shape in _tensors_of(file):
            if name in files:
                raise ModelFileError(f"{path}: tensor {name!r} stands in {origins[name].name} and {file.name}")
            files[name], shapes[name], origins[name] = held, shape, file
    folder = path if path.is_dir() else path.parent
    config = read_json_object(folder / CONFIG) if (folder / CONFIG).exists() else {}
    return Published(path, config, files, shapes)


def _weight_files(path: Path) -> list[Path]:
    """The files that hold the weights: those of an index, else safetensors, else pickles."""
    if path.is_file():
        return [path]
    for index in _INDICES:
        if (path / index).exists():
            shards = read_json_object(path / index).get("weight_map")
            if not isinstance(shards, dict) or not all(_is_file_name(file) for file in shards.values()):
                raise ModelFileError(f"{path / index}: 'weight_map' must map tensor names to file names")
            return sorted({path / file for file in shards.values()})
    for suffixes in ((".safetensors",), _PICKLES):
        found = sorted(file for file in path.iterdir() if file.suffix in suffixes and file.name not in _NO_WEIGHTS)
        if found:
            return found
    raise ModelFileError(f"{path}: no weights here (*.safetensors, or *.bin and *.pt as PyTorch writes them)")


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and Path(value).name == value


def _tensors_of(file: Path) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    if file.suffix == ".safetensors":
        with _readable(file):
            opened = safe_open(str(file), framework="pt")
            names = list(opened.keys())
            for name in names:
                yield name, opened, tuple(opened.get_slice(name).get_shape())
        return
    for name, tensor in _read_pickle(file).items():
        yield name, tensor, tuple(tensor.shape)


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that PyTorch has written. Nothing but tensors is taken out of it."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).strip().splitlines()[0].split(". ")[0]
        raise ModelFileError(
            f"{file}: holds something other than tensors, which is not read because it could run code ({first})"
        ) from error
    except Exception as error:  # a damaged pickle may end in any
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelFileError(f"{file}: not a readable file of PyTorch tensors ({reason[:200]})") from error
    if not isinstance(found, Mapping) or not found:
        raise ModelFileError(f"{file}: holds a {type(found).__name__}; tensors by name are needed")
    for name, tensor in found.items():
        plain = isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized or tensor.device.type != "cpu":
            raise ModelFileError(f"{file}: entry {name!r} is not a plain tensor")
    return {name: tensor.detach() for name, tensor in found.items()}


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{file}: not a readable safetensors file ({' '.join(str(error).split())})") from error


def write_pickle(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Tensors by name as PyTorch writes them."""
    torch.save(dict(tensors), path)


def write_json(value: Mapping[str, Any], path: Path) -> None:
    """A config."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
