"""The contract of a dialect: how one project spells a drafter's config and tensors, as data where that is enough.

A dialect says what a published config means, under which names the native tensors stand, and what a config of its own
looks like; `convert` reads, checks and writes. One file per dialect, listed in `table`. Invariant: a dialect never
drops what changes a draft: it translates it, says so in a note, or refuses it by name.

Shape letters: V vocabulary, D width, U draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from draftsmith.dialects.published import Published
from draftsmith.drafters.checkpoint import Checkpoint, config_of
from draftsmith.errors import ModelFileError
from draftsmith.io.files import ModelFiles
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.weights import TensorReader

MARK = "draftsmith"
"""Key of an exported config under which stands what the dialect cannot say."""
EXPORT_FORMAT = 1
Part = Literal["embedding", "head"]


class Note(NamedTuple):
    """One line for the user: what it is about, and how it was translated."""

    topic: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target as its files describe it; it is not run. `name`: as the user wrote it."""

    name: str
    spec: DecoderSpec
    files: ModelFiles

    def matrix(self, part: Part) -> torch.Tensor:
        """Embedding or head [V, D] as stored, in the narrowest common type its values fit (GGUF blocks: float32)."""
        reader = TensorReader(self.spec, self.files.load)
        name = reader.embedding_name if part == "embedding" else reader.head_name
        return narrowest(reader.named(name, (self.spec.vocab_size, self.spec.width)))


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the user pins. `layer_ids`: auto, applied or outputs, see `layer_ids`. `changes`: fields of the native
    config that are set whatever the file says. `with_target`: write the target's own matrices too where optional.
    `num_draft`: tokens an export advises its engine to draft.
    """

    layer_ids: str = "auto"
    changes: Mapping[str, str] = field(default_factory=dict)
    with_target: bool = False
    num_draft: int = 4


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a published config means. `method`, `config`: the native ones. `draft_ids`: ascending target ids [U], None
    for all. `rows`: order in which the published head rows become ascending, None if they are. `used`: tensors that
    were read for this. `about`: history that travels with the weights.
    """

    method: str
    config: Any
    draft_ids: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    used: frozenset[str] = frozenset()
    about: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


class FromTarget(NamedTuple):
    """A published tensor that is the target's own. `always`: the dialect cannot go without it."""

    part: Part
    always: bool


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Names of a drafter's tensors in a dialect.

    `names`: native name -> published names; the first must be there, others are copies of it. `from_target`: published
    names of the target's own matrices. `less_one`: native names of norms that are published less 1. `optional`:
    published names that may be missing and are zero then.
    """

    names: Mapping[str, tuple[str, ...]]
    from_target: Mapping[str, FromTarget] = field(default_factory=dict)
    less_one: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


class Dialect(ABC):
    """How one project spells drafters. Final classes live in a file each."""

    name: ClassVar[str]
    title: ClassVar[str]
    """What people call it, for listings and messages."""
    methods: ClassVar[frozenset[str]]
    """Drafters it can hold."""
    weights_file: ClassVar[str] = "model.safetensors"
    unsaid: ClassVar[frozenset[str]] = frozenset()
    """Fields of the native config that the dialect has no word for; they travel under `MARK`."""

    @abstractmethod
    def recognises(self, published: Published) -> bool:
        """Whether a checkpoint is of this dialect."""

    @abstractmethod
    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        """What the config (and the tensors that belong to it) mean. Raises `ModelFileError`, `UnsupportedError`."""

    @abstractmethod
    def spelling(self, config: Any, native: Iterable[str]) -> Spelling:
        """How native tensors of these names are spelt."""

    @abstractmethod
    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        """A published config. Raises `UnsupportedError` for what the dialect cannot express."""

    def concerns(self, name: str) -> bool:
        """Whether a published tensor is the dialect's to account for; a whole model's others are not."""
        return True

    def vocabulary(self, checkpoint: Checkpoint, vocab_size: int) -> dict[str, torch.Tensor]:
        """Published tensors that say which ids are drafted. Raises `UnsupportedError` if it cannot."""
        return {}


def mark_of(published: Published) -> Mapping[str, Any]:
    """What an export of this package has left for its way back: `method`, `config`, `about`; empty for others'."""
    mark = published.config.get(MARK)
    if mark is None:
        return {}
    if not isinstance(mark, Mapping) or mark.get("export") != EXPORT_FORMAT:
        raise ModelFileError(f"{published.path}: config key {MARK!r} is not one that this version writes")
    for key, kind in (("method", str), ("config", Mapping), ("about", Mapping)):
        if not isinstance(mark.get(key), kind):
            raise ModelFileError(f"{published.path}: config key '{MARK}.{key}' must be a {kind.__name__}")
    return mark


def make_mark(checkpoint: Checkpoint, unsaid: frozenset[str], **more: Any) -> dict[str, Any]:
    """The value of `MARK` in an exported config."""
    config = dataclasses.asdict(config_of(checkpoint))
    return {
        "export": EXPORT_FORMAT,
        "method": checkpoint.method,
        "config": {key: value for key, value in config.items() if key in unsaid},
        "about": dict(checkpoint.about),
        **more,
    }


def unsaid_fields(published: Published, dialect: type[Dialect]) -> dict[str, Any]:
    """Fields of the native config that the mark holds. Raises `ModelFileError` for one that is not its to hold."""
    fields = dict(mark_of(published).get("config", {}))
    for key in sorted(set(fields) - dialect.unsaid):
        raise ModelFileError(f"{published.path}: config key '{MARK}.config.{key}' is not expected there")
    return fields


def narrowest(tensor: torch.Tensor, *also: torch.dtype) -> torch.Tensor:
    """The tensor in the narrowest of bfloat16, float16, float32 (and `also` first) that holds its values exactly."""
    for dtype in (*also, torch.bfloat16, torch.float16, torch.float32):
        cast = tensor.to(dtype)
        if dtype.itemsize <= tensor.dtype.itemsize and torch.equal(cast.to(tensor.dtype), tensor):
            return cast
    return tensor


def check_size(published: Published, key: str, found: Any, wanted: int, what: str, target: Target) -> None:
    """Raises `ModelFileError` unless a size of the checkpoint is that of the target."""
    if found != wanted:
        raise ModelFileError(
            f"{published.path}: config key {key!r} is {found!r}; the {what} of {target.name} is {wanted}: this drafter "
            "is of another target"
        )
