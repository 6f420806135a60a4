"""Models in a directory: `config.json`, one or several safetensors files, tokenizer files.

Opened by `io.files.open_model`. Shards are opened when one of their tensors is asked for. Invariant:
every missing or damaged piece is a `ModelFileError` that names the piece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.errors import ModelFileError, UnsupportedError
from draftsmith.io.files import ModelFiles, RawTensor

INDEX = "model.safetensors.index.json"


class SafetensorsFiles(ModelFiles):
    """A model directory as Hugging Face lays it out."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Read the config and the list of tensors. Raises `ModelFileError`."""
        self.name = name or str(path)
        self.path = path
        config = read_json_object(path / "config.json")
        if "draftsmith" in config and "model_type" not in config:
            method = config.get("method")
            raise ModelFileError(
                f"{path} holds a drafter and no model; name a model, and --drafter {method}:path={path}"
            )
        self._files = self._find_tensors()
        if config.get("tie_word_embeddings") is None and not any(
            name.endswith("lm_head.weight") for name in self._files
        ):
            # A config may leave the key to its class's default; without a head of its own the model is tied.
            config["tie_word_embeddings"] = True
        self.config: Mapping[str, Any] = MappingProxyType(config)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer: `generation_config.json` where it says so, else the config."""
        generation_path = self.path / "generation_config.json"
        generation = read_json_object(generation_path) if generation_path.exists() else {}
        where, given = generation_path, generation.get("eos_token_id")
        if given is None:
            text_config = self.config.get("text_config")
            inner = text_config.get("eos_token_id") if isinstance(text_config, Mapping) else None
            where, given = self.path / "config.json", self.config.get("eos_token_id", inner)
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(index) is int and index >= 0 for index in ids):
            raise ModelFileError(f"{where}: 'eos_token_id' is {given!r}, must be a token id or a list of them")
        return frozenset(ids)

    @cached_property
    def tokenizer(self) -> Mapping[str, Any]:
        """Plain data for `Tokenizer.from_data`."""
        path = self.path / "tokenizer.json"
        if not path.exists():
            raise ModelFileError(
                f"{self.path}: no tokenizer.json (a tokenizer.model alone is not read; "
                "transformers' `AutoTokenizer.from_pretrained(...).save_pretrained(...)` writes one)"
            )
        config_path = self.path / "tokenizer_config.json"
        return {
            "kind": "tokenizer.json",
            "source": str(path),
            "json": _read_text(path),
            "config": read_json_object(config_path) if config_path.exists() else {},
            "eos_ids": sorted(self.eos_ids),
        }

    @cached_property
    def chat_template(self) -> str | None:
        """`chat_template.jinja`, else `chat_template.json`, else the key of `tokenizer_config.json`."""
        jinja = self.path / "chat_template.jinja"
        if jinja.exists():
            return _read_text(jinja)
        for file_name in ("chat_template.json", "tokenizer_config.json"):
            path = self.path / file_name
            if path.exists():
                template = _named_template(read_json_object(path).get("chat_template"), path)
                if template is not None:
                    return template
        return None

    @property
    def tensor_names(self) -> Sequence[str]:
        """Names of all weights, in file order."""
        return tuple(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a weight."""
        file = self._open(self._file_of(name))
        return tuple(self._ask(name, lambda: file.get_slice(name).get_shape()))

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A weight as a fresh contiguous tensor."""
        file = self._open(self._file_of(name))
        stored: torch.Tensor = self._ask(name, lambda: file.get_tensor(name))
        if not stored.is_floating_point():
            raise UnsupportedError(f"{self.path}: tensor {name!r} is of type {stored.dtype}, floating point is needed")
        # The stored tensor may alias the mapped file; the caller gets memory of its own.
        return stored.to(dtype, copy=True).contiguous()

    def raw(self, name: str) -> RawTensor:
        """Refused: safetensors hold no ggml blocks."""
        raise UnsupportedError(f"{self.path}: {name!r} is not stored in ggml blocks; only GGUF files are")

    def _find_tensors(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index_path = self.path / INDEX
        if index_path.exists():
            weight_map = read_json_object(index_path).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ModelFileError(f"{index_path}: 'weight_map' must map tensor names to file names")
            for file in sorted(set(weight_map.values())):
                if Path(file).name != file:
                    raise ModelFileError(f"{index_path}: {file!r} is not a file name")
                if not (self.path / file).exists():
                    raise ModelFileError(f"{self.path / file}: shard is missing (named by {INDEX})")
            return {name: self.path / file for name, file in weight_map.items()}
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ModelFileError(f"{self.path}: no *.safetensors file")
        found: dict[str, Path] = {}
        for path in files:
            for name in self._open(path).keys():
                if name in found:
                    raise ModelFileError(f"{self.path}: tensor {name!r} stands in {found[name].name} and {path.name}")
                found[name] = path
        return found

    @cached_property
    def _opened(self) -> dict[Path, Any]:
        return {}

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelFileError(f"{path}: not a readable safetensors file ({_one_line(error)})") from error
        return self._opened[path]

    def _file_of(self, name: str) -> Path:
        path = self._files.get(name)
        if path is None:
            raise ModelFileError(f"{self.path}: no tensor {name!r}")
        return path

    def _ask(self, name: str, read: Any) -> Any:
        try:
            return read()
        except SafetensorError as error:
            raise ModelFileError(f"{self._files[name]}: no readable tensor {name!r} ({_one_line(error)})") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The object a JSON file holds. Raises `ModelFileError` naming the file."""
    if not path.exists():
        raise ModelFileError(f"{path}: file is missing")
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON ({_one_line(error)})") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds a JSON {type(value).__name__}, an object is needed")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: not UTF-8 text") from error


def _named_template(value: Any, path: Path) -> str | None:
    """A template, or the one called "default" in a list of named ones."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return next(
            (str(item["template"]) for item in value if item.get("name") == "default" and "template" in item), None
        )
    raise ModelFileError(f"{path}: 'chat_template' must be a string or a list of named templates")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
