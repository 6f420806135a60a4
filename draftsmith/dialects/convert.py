"""Conversion of drafters between the layout of this package and published ones: read, check, write.

Called by the command line. A dialect gives names and meanings; here every tensor is accounted for: those that are
missing, unknown, misshapen, not finite, or a copy of the target's that differs from it are refused by name. Invariant:
nothing is written before everything was checked, and a directory appears whole or not at all.

Shape letters: V vocabulary, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftsmith.dialects.dialect import Choices, Described, Dialect, Note, Part, Spelling, Target, narrowest
from draftsmith.dialects.expected import expected_tensors
from draftsmith.dialects.published import CONFIG, Published, write_json, write_pickle
from draftsmith.drafters.checkpoint import (
    Checkpoint,
    check_target,
    check_tensors,
    config_of,
    described_target,
    draft_ids_of,
    read_checkpoint,
)
from draftsmith.errors import ModelFileError, UnsupportedError
from draftsmith.io.staging import staged_directory

_ALIKE = 0.99
"""Least mean cosine of rows of a matrix that passes for the target's own; formats of few bits lose that much."""
_SAMPLED_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A drafter in native layout, not written yet."""

    checkpoint: Checkpoint
    notes: tuple[Note, ...]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A drafter in a published layout, not written yet."""

    config: Mapping[str, object]
    tensors: Mapping[str, torch.Tensor]
    weights_file: str
    notes: tuple[Note, ...]


def read_native(path: Path, target: Target) -> Checkpoint:
    """A native checkpoint, checked for a target that need not be loaded. Raises `ModelFileError`."""
    checkpoint = read_checkpoint(path)
    check_target(checkpoint, target.spec)
    ids = draft_ids_of(checkpoint, target.spec.vocab_size)
    check_tensors(checkpoint, expected_tensors(checkpoint.method, config_of(checkpoint), target.spec, ids))
    return checkpoint


def import_published(published: Published, dialect: Dialect, target: Target, choices: Choices, path: Path) -> Imported:
    """Translate a published checkpoint; `path`: where it will be written. Raises `ModelFileError` and others."""
    described = dialect.describe(published, target, choices)
    expected = expected_tensors(described.method, described.config, target.spec, described.draft_ids)
    spelling = dialect.spelling(described.config, expected)
    tensors: dict[str, torch.Tensor] = {}
    used = set(described.used)
    for name, like in expected.items():
        if name == "draft_ids":
            assert described.draft_ids is not None
            tensors[name] = described.draft_ids
            continue
        tensors[name] = _taken(published, spelling, name, like, described)
        used.update(spelling.names[name])
    notes = [*described.notes, *_from_target(published, spelling, target)]
    used |= set(spelling.from_target)
    for name in sorted(published.names - used):
        if dialect.concerns(name):
            raise ModelFileError(f"{published.path}: tensor {name!r} is unknown to {dialect.title}")
    checkpoint = Checkpoint(
        path=path,
        method=described.method,
        config=dataclasses.asdict(described.config),
        target={"name": target.name, **described_target(target.spec)},
        about=described.about,
        tensors=tensors,
    )
    check_tensors(checkpoint, expected)
    return Imported(checkpoint=checkpoint, notes=tuple(notes))


def _taken(
    published: Published, spelling: Spelling, name: str, like: torch.Tensor, described: Described
) -> torch.Tensor:
    """One native tensor from the published one, and a look at its copies."""
    first, *copies = spelling.names[name]
    if first not in published.names and first in spelling.optional:
        dtype = published.load(next(iter(sorted(published.names)))).dtype
        return torch.zeros(like.shape, dtype=dtype if dtype.is_floating_point else torch.float32)
    if first not in published.names:
        raise ModelFileError(f"{published.path}: tensor {first!r} is missing")
    tensor = _loaded(published, first, tuple(like.shape))
    for copy in copies:
        if copy in published.names and not torch.equal(_loaded(published, copy, tuple(like.shape)), tensor):
            raise ModelFileError(f"{published.path}: tensors {first!r} and {copy!r} are one in this drafter and differ")
    if described.rows is not None and name.startswith(("lm_head.", "lm_heads.")):
        tensor = tensor[described.rows]
    return shifted(tensor, 1) if name in spelling.less_one else tensor


def _loaded(published: Published, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    found = published.shape(name)
    if found != shape:
        raise ModelFileError(
            f"{published.path}: tensor {name!r} has shape {found}; {shape} is implied by config and target"
        )
    tensor = published.load(name)
    if not tensor.is_floating_point():
        raise ModelFileError(f"{published.path}: tensor {name!r} is of {tensor.dtype}; floating point is needed")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelFileError(f"{published.path}: tensor {name!r} holds a weight that is not finite")
    return tensor


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """A norm's weights more or less 1, in a type that holds them exactly: the tensor's own where that does."""
    return narrowest(tensor.to(torch.float64) + by, tensor.dtype)


def _from_target(published: Published, spelling: Spelling, target: Target) -> list[Note]:
    """Compare what should be the target's own with it. Raises `ModelFileError` when it is something else."""
    notes = []
    for name, (part, always) in spelling.from_target.items():
        if name not in published.names:
            if always:
                raise ModelFileError(f"{published.path}: tensor {name!r} is missing")
            notes.append(Note(part, f"the target's (no {name!r} in the file)"))
            continue
        found = _loaded(published, name, (target.spec.vocab_size, target.spec.width))
        likeness = _likeness(found, target.matrix(part))
        if likeness < _ALIKE:
            raise ModelFileError(
                f"{published.path}: tensor {name!r} is not the {part} of {target.name} (mean cosine {likeness:.3f}); "
                f"drafters with one of their own are not supported"
            )
        exact = "the same" if likeness == 1.0 else f"mean cosine {likeness:.4f}"
        notes.append(Note(part, f"the target's; {name!r} is left out ({exact})"))
    return notes


def _likeness(found_VD: torch.Tensor, own_VD: torch.Tensor) -> float:
    """1.0 for equal matrices, else the mean cosine of some rows."""
    if torch.equal(found_VD.float(), own_VD.float()):
        return 1.0
    rows = torch.linspace(0, len(found_VD) - 1, min(_SAMPLED_ROWS, len(found_VD))).long()
    cosines = torch.nn.functional.cosine_similarity(found_VD[rows].float(), own_VD[rows].float(), dim=-1)
    return min(float(cosines.nan_to_num(0).mean()), 1 - 1e-9)


def export(checkpoint: Checkpoint, dialect: Dialect, target: Target, choices: Choices) -> Exported:
    """Translate a native checkpoint. Raises `UnsupportedError` for what the dialect cannot say."""
    if checkpoint.method not in dialect.methods:
        held = ", ".join(sorted(dialect.methods))
        raise UnsupportedError(f"{dialect.name} holds drafters of {held}, not of {checkpoint.method}")
    config, notes = dialect.config(checkpoint, target, choices)
    native = config_of(checkpoint)
    spelling = dialect.spelling(native, checkpoint.tensors)
    tensors = dialect.vocabulary(checkpoint, target.spec.vocab_size)
    for name, tensor in checkpoint.tensors.items():
        if name == "draft_ids":
            continue
        written = shifted(tensor, -1) if name in spelling.less_one else tensor
        for place, published in enumerate(spelling.names[name]):
            tensors[published] = written if place == 0 or dialect.weights_file.endswith(".pt") else written.clone()
    for name, (part, always) in spelling.from_target.items():
        if always or choices.with_target:
            tensors[name] = target_rows(target, part, checkpoint)
            notes.append(Note(part, f"the target's, written as {name!r}"))
        else:
            notes.append(Note(part, "the target's, left out"))
    return Exported(config=config, tensors=tensors, weights_file=dialect.weights_file, notes=tuple(notes))


def target_rows(target: Target, part: Part, checkpoint: Checkpoint) -> torch.Tensor:
    """The target's matrix for a drafter that writes it: of the draft ids alone where it is the head."""
    matrix = target.matrix(part)
    ids = checkpoint.tensors.get("draft_ids")
    return matrix if ids is None or part == "embedding" else matrix[ids]


def write_export(exported: Exported, path: Path) -> None:
    """Write an export in place of what is there. Raises `OSError`."""
    with staged_directory(path) as staging:
        tensors = {name: tensor.contiguous() for name, tensor in exported.tensors.items()}
        if exported.weights_file.endswith(".pt"):
            write_pickle(tensors, staging / exported.weights_file)
        else:
            save_file(tensors, staging / exported.weights_file, metadata={"format": "pt"})
        write_json(exported.config, staging / CONFIG)
