"""What a model on disk offers, whatever its format: the one type the layers above see.

`open_model` is called by the engine, the benchmark and the command line. Configuration keys and tensor
names are those of Hugging Face, for GGUF files too; tokenizer data are plain values that
`draftsmith.models.tokenizer` builds from. Invariants: tensors are read when asked for, never before;
whatever is wrong with a file is a `ModelFileError` that names the file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch


class RawTensor(NamedTuple):
    """A tensor as stored: ggml type name, bytes [rows, bytes of a row] (uint8, read only), logical shape.

    The rows stand in the order of the Hugging Face tensor of that name.
    """

    type_name: str
    rows: np.ndarray
    shape: tuple[int, ...]


class ModelFiles(ABC):
    """An opened model.

    `name`: as the user wrote it. `path`: the file or directory. `config`: keys of a Hugging Face
    `config.json`.
    """

    name: str
    path: Path
    config: Mapping[str, Any]

    @property
    @abstractmethod
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer, as the model files name them (the tokenizer adds its own)."""

    @property
    @abstractmethod
    def chat_template(self) -> str | None:
        """The chat template's Jinja text, or None."""

    @property
    @abstractmethod
    def tokenizer(self) -> Mapping[str, Any]:
        """Plain data for `Tokenizer.from_data`. Raises `ModelFileError` when the model has none."""

    @property
    @abstractmethod
    def tensor_names(self) -> Sequence[str]:
        """Hugging Face names of all weights, in file order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a weight. Raises `ModelFileError` when there is no such weight."""

    @abstractmethod
    def load(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A weight as a fresh contiguous CPU tensor. Raises `ModelFileError` when it is missing."""

    @abstractmethod
    def raw(self, name: str) -> RawTensor:
        """A weight as stored (quantised). Raises `UnsupportedError` for formats without ggml blocks."""

    def __contains__(self, name: object) -> bool:
        return name in self.tensor_names


def open_model(name: str) -> ModelFiles:
    """Open a model by catalogue name, path of a `.gguf` file, directory with safetensors, or hub id.

    Raises `ModelFileError` when it cannot be found or read, `UnsupportedError` for a known format or
    type that is not read.
    """
    from draftsmith.io.catalogue import resolve

    path = resolve(name)
    if path.is_dir():
        from draftsmith.io.safetensors import SafetensorsFiles

        return SafetensorsFiles(path, name=name)
    from draftsmith.io.gguf import GgufFiles

    return GgufFiles(path, name=name)
