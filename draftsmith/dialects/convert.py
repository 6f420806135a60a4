"""Conversion of drafters between the layout of this package and published ones: read, check, write.

Called by the command line. A dialect gives names and meanings; here every tensor is accounted for: those that are
missing, unknown, misshapen, not finite, or a copy of the target's that differs from it are refused by name. Invariants:
nothing is written before everything was checked; an export read back is, bit for bit, what it was made of.

Shape letters: V vocabulary, D width, U draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.dialects.dialect import (
    EXPORT_FORMAT,
    MARK,
    Choices,
    Described,
    Dialect,
    Note,
    Spelling,
    Target,
    mark_of,
    marked_ids,
)
from draftsmith.dialects.expected import expected_tensors
from draftsmith.dialects.published import CONFIG, Published, in_memory, write_json, write_pickle
from draftsmith.dialects.table import DIALECTS, dialect_named
from draftsmith.dialects.taking import check_copies, draft_rows, shifted, take
from draftsmith.drafters.checkpoint import (
    Checkpoint,
    check_target,
    check_tensors,
    config_of,
    draft_ids_of,
    read_checkpoint,
    target_facts,
)
from draftsmith.errors import ModelFileError, OptionError, UnsupportedError
from draftsmith.io.staging import staged_directory
from draftsmith.io.tensor_file import save_tensors


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A drafter in native layout, not written yet, and how it was translated."""

    checkpoint: Checkpoint
    notes: tuple[Note, ...]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A drafter in a published layout, not written yet, and how it was translated."""

    config: Mapping[str, Any]
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
    """Translate a published checkpoint; `path`: where it will be written.

    Raises `ModelFileError` for what is wrong with the files, `UnsupportedError` for what we do not compute.
    """
    published = dialect.prepare(published)
    described, method = _described(published, dialect, target, choices)
    expected = expected_tensors(method, described.config, target.spec, described.draft_ids)
    spelling = dialect.spelling(described.config, expected, target)
    tensors: dict[str, torch.Tensor] = {}
    for name, like in expected.items():
        if name == "draft_ids":
            assert described.draft_ids is not None
            tensors[name] = described.draft_ids
        else:
            tensors[name] = take(published, spelling, name, tuple(like.shape), described.rows)
    head_ids = None if dialect.marks_ids else described.draft_ids
    notes = [*described.notes, *check_copies(published, spelling, target, head_ids)]
    _refuse_unknown(published, dialect, target, spelling, described)
    checkpoint = Checkpoint(
        path=path,
        method=method,
        config=dataclasses.asdict(described.config),
        target={"name": target.name, **target_facts(target.spec)},
        about=dict(mark_of(published).get("about", {})),
        tensors=tensors,
    )
    check_tensors(checkpoint, expected)
    return Imported(checkpoint=checkpoint, notes=tuple(notes))


def _described(published: Published, dialect: Dialect, target: Target, choices: Choices) -> tuple[Described, str]:
    """What the config means, with what an export of ours has left beside it; and the native method."""
    described = dialect.describe(published, target, choices)
    mark = mark_of(published)
    method = str(mark.get("method", dialect.methods[0]))
    if method not in dialect.methods:
        raise ModelFileError(f"{published.path}: config key '{MARK}.method' is {method!r}, not of {dialect.name}")
    fields = {key: value for key, value in mark.get("config", {}).items() if key not in choices.changes}
    for key in sorted(set(fields) - dialect.unsaid):
        raise ModelFileError(f"{published.path}: config key '{MARK}.config.{key}' is not expected there")
    try:
        config = dataclasses.replace(described.config, **fields)
    except (TypeError, OptionError) as error:
        raise ModelFileError(f"{published.path}: config key '{MARK}.config': {error}") from error
    ids = marked_ids(published, target.spec.vocab_size) if dialect.marks_ids else described.draft_ids
    return dataclasses.replace(described, config=config, draft_ids=ids), method


def _refuse_unknown(
    published: Published, dialect: Dialect, target: Target, spelling: Spelling, described: Described
) -> None:
    used = set(described.used) | set(spelling.from_target) | dialect.unread
    for table in (spelling.names, spelling.aliases, spelling.rows):
        used.update(name for names in table.values() for name in names)
    for name in sorted(published.names - used):
        if dialect.concerns(name, target):
            raise ModelFileError(f"{published.path}: tensor {name!r} is unknown to {dialect.title}")


def export(checkpoint: Checkpoint, dialect: Dialect, target: Target, choices: Choices) -> Exported:
    """Translate a native checkpoint. Raises `UnsupportedError` for what the dialect cannot say."""
    if checkpoint.method not in dialect.methods:
        others = ", ".join(name for name in DIALECTS if checkpoint.method in dialect_named(name).methods)
        raise UnsupportedError(
            f"{dialect.name} holds drafters of {', '.join(dialect.methods)}, not of {checkpoint.method}, which "
            + (f"{others} can hold" if others else "no published layout holds")
        )
    config, notes = dialect.config(checkpoint, target, choices)
    config[MARK] = _mark(checkpoint, dialect, config.pop(MARK, {}))
    ids = checkpoint.tensors.get("draft_ids")
    if ids is not None and dialect.marks_ids:
        notes.append(Note("draft ids", f"{len(ids)} here; others draft all, for the head is the target's own"))
    tensors = dialect.vocabulary(checkpoint, target.spec.vocab_size)
    spelling = dialect.spelling(config_of(checkpoint), checkpoint.tensors, target)
    tensors |= _spelled(checkpoint, dialect, spelling)
    for name, (part, always) in spelling.from_target.items():
        if always or choices.with_target:
            tensors[name] = draft_rows(target.matrix(part), part, None if dialect.marks_ids else ids)
            notes.append(Note(part, f"the target's, written as {name!r}"))
        else:
            notes.append(Note(part, "the target's, left out"))
    exported = Exported(config=config, tensors=tensors, weights_file=dialect.weights_file, notes=tuple(notes))
    _read_back(exported, checkpoint, dialect, target)
    return exported


def _mark(checkpoint: Checkpoint, dialect: Dialect, more: Mapping[str, Any]) -> dict[str, Any]:
    """What the dialect has no word for, so that the way back loses nothing."""
    ids = checkpoint.tensors.get("draft_ids")
    config = dataclasses.asdict(config_of(checkpoint))
    marked = {"draft_ids": ids.tolist()} if ids is not None and dialect.marks_ids else {}
    return {
        "export": EXPORT_FORMAT,
        "method": checkpoint.method,
        "config": {key: value for key, value in config.items() if key in dialect.unsaid},
        "about": dict(checkpoint.about),
        **marked,
        **more,
    }


def _spelled(checkpoint: Checkpoint, dialect: Dialect, spelling: Spelling) -> dict[str, torch.Tensor]:
    """Tensors under their published names."""
    shares = dialect.weights_file.endswith(".pt")  # safetensors want memory of its own for every tensor
    leaves_biases = bool(spelling.biases) and not any(bool(checkpoint.tensors[name].any()) for name in spelling.biases)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name == "draft_ids" or (leaves_biases and name in spelling.biases):
            continue
        if name in spelling.rows:
            found |= {row_name: row.clone() for row_name, row in zip(spelling.rows[name], tensor, strict=True)}
            continue
        written = tensor
        if name in spelling.less_one:
            written = shifted(tensor, -1, checkpoint.tensors["fc.weight"].dtype)
        for place, published in enumerate(spelling.names[name]):
            found[published] = written if place == 0 or shares else written.clone()
    return found


def _read_back(exported: Exported, checkpoint: Checkpoint, dialect: Dialect, target: Target) -> None:
    """Raises `UnsupportedError` when an export would come back as another drafter."""
    config = json.loads(json.dumps(exported.config))
    published = in_memory(Path(f"<{dialect.name}>"), config, exported.tensors)
    again = import_published(published, dialect, target, Choices(), checkpoint.path).checkpoint
    for key, value in dataclasses.asdict(config_of(checkpoint)).items():
        found = dataclasses.asdict(config_of(again))[key]
        if found != value:
            raise UnsupportedError(f"{dialect.name} cannot say {key} = {value!r}: it would be read as {found!r}")
    for name, tensor in checkpoint.tensors.items():
        other = again.tensors.get(name)
        if other is None or other.dtype != tensor.dtype or not torch.equal(other, tensor):
            raise UnsupportedError(f"{dialect.name} cannot hold the tensor {name!r} as it is")


def write_export(exported: Exported, path: Path) -> None:
    """Write an export in place of what is there. Raises `OSError`."""
    with staged_directory(path) as staging:
        tensors = {name: tensor.contiguous() for name, tensor in exported.tensors.items()}
        if exported.weights_file.endswith(".pt"):
            write_pickle(tensors, staging / exported.weights_file)
        else:
            save_tensors(tensors, staging / exported.weights_file, metadata={"format": "pt"})
        write_json(exported.config, staging / CONFIG)
