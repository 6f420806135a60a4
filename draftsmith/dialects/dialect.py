"""The contract of a dialect: how one project spells a drafter's config and tensors, as data where that is enough.

A dialect says what a published config means, under which names the native tensors stand, and what a config of its own
looks like; `convert` reads, checks and writes. One file per dialect, listed in `table`. Invariant: a dialect never
drops what changes a draft: it translates it, says so in a note, or refuses it by name.

Shape letters: V vocabulary, D width, U draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from draftsmith.dialects.published import Published
from draftsmith.drafters.checkpoint import Checkpoint
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
        """Embedding or head [V, D], in the narrowest common type that holds the stored values."""
        reader = TensorReader(self.spec, self.files.load)
        name = reader.embedding_name if part == "embedding" else reader.head_name
        matrix = reader.named(name, (self.spec.vocab_size, self.spec.width))
        return narrowest(matrix, torch.bfloat16, torch.float16, torch.float32)


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
    """What a published config means. `config`: the native one. `draft_ids`: ascending target ids [U], None for all.
    `rows`: order in which the published head rows become ascending, None if they are. `used`: tensors that were read
    for this.
    """

    config: Any
    draft_ids: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    used: frozenset[str] = frozenset()
    notes: tuple[Note, ...] = ()


class FromTarget(NamedTuple):
    """A published tensor that is the target's own. `always`: the dialect cannot go without it."""

    part: Part
    always: bool


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Names of a drafter's tensors in a dialect.

    `names`: native name -> published names, copies of one tensor. `aliases`: copies that may be missing, or that are
    understood and not written. `rows`: native tensors whose rows are published one by one. `from_target`:
    published names of the target's own matrices. `less_one`: native names of norms that are published less 1.
    `biases`: native names that are all left out where all are zero.
    """

    names: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    from_target: Mapping[str, FromTarget] = field(default_factory=dict)
    less_one: frozenset[str] = frozenset()
    biases: frozenset[str] = frozenset()


class Dialect(ABC):
    """How one project spells drafters. Final classes live in a file each."""

    name: ClassVar[str]
    title: ClassVar[str]
    """What people call it, for listings and messages."""
    methods: ClassVar[tuple[str, ...]]
    """Drafters it can hold; the first is what an import becomes."""
    weights_file: ClassVar[str] = "model.safetensors"
    unsaid: ClassVar[frozenset[str]] = frozenset()
    """Fields of the native config that the dialect has no word for; they travel under `MARK`."""
    marks_ids: ClassVar[bool] = False
    """Whether a draft vocabulary travels under `MARK`: others draft all ids, with the target's own head."""
    unread: ClassVar[frozenset[str]] = frozenset()
    """Published tensors that nobody reads."""

    @abstractmethod
    def recognises(self, published: Published) -> bool:
        """Whether a checkpoint is of this dialect."""

    def prepare(self, published: Published) -> Published:
        """The checkpoint under the names that the rest of the dialect uses, where others occur."""
        return published

    @abstractmethod
    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        """What the config (and the tensors that belong to it) mean. Raises `ModelFileError`, `UnsupportedError`."""

    @abstractmethod
    def spelling(self, config: Any, native: Iterable[str], target: Target) -> Spelling:
        """How native tensors of these names are spelt."""

    @abstractmethod
    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        """A published config, and what was translated. What stands under `MARK` is added to the mark.

        Raises `UnsupportedError` for what the dialect cannot express.
        """

    def concerns(self, name: str, target: Target) -> bool:
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


def marked_ids(published: Published, vocab_size: int) -> torch.Tensor | None:
    """The draft vocabulary that the mark holds. Raises `ModelFileError`."""
    ids = mark_of(published).get("draft_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(index) is int for index in ids):
        raise ModelFileError(f"{published.path}: config key '{MARK}.draft_ids' must be a list of ids")
    found = torch.tensor(ids)
    if ids[0] < 0 or ids[-1] >= vocab_size or not bool((found[1:] > found[:-1]).all()):
        raise ModelFileError(f"{published.path}: config key '{MARK}.draft_ids' must rise from 0 to below {vocab_size}")
    return found


def narrowest(tensor: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """The tensor in the first of some types that holds its values exactly, else as it is."""
    for dtype in dtypes:
        cast = tensor.to(dtype)
        if torch.equal(cast.to(tensor.dtype), tensor):
            return cast
    return tensor


def check_size(published: Published, key: str, found: Any, wanted: int, what: str, target: Target) -> None:
    """Raises `ModelFileError` unless a size of the checkpoint is that of the target."""
    if found != wanted:
        raise ModelFileError(
            f"{published.path}: config key {key!r} is {found!r}; the {what} of {target.name} is {wanted}: this drafter "
            "is of another target"
        )
