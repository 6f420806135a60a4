"""Single tensors on their way from a published checkpoint: found, checked, compared with their copies.

Used by `convert`. Invariant: a shape is checked before a tensor is read, so a file cannot ask for more memory than
the drafter it claims to hold.

Shape letters: V vocabulary, D width, U draft vocabulary.
"""

from __future__ import annotations

import torch

from draftsmith.dialects.dialect import Note, Part, Spelling, Target, narrowest
from draftsmith.dialects.published import Published
from draftsmith.errors import ModelFileError

_ALIKE = 0.99
"""Least mean cosine of rows of a matrix that passes for the target's own; formats of few bits lose up to that."""
_SAMPLED_ROWS = 4096


def take(
    published: Published, spelling: Spelling, name: str, shape: tuple[int, ...], order: torch.Tensor | None
) -> torch.Tensor:
    """One native tensor. `order`: of rows of heads, None as they are. Raises `ModelFileError`."""
    if name in spelling.rows:
        return torch.stack([load(published, row, shape[1:]) for row in spelling.rows[name]])
    first, *copies = spelling.names[name]
    if name in spelling.biases and not any(spelling.names[bias][0] in published.names for bias in spelling.biases):
        weight = load_like(published, first.removesuffix("bias") + "weight")
        return torch.zeros(shape, dtype=weight.dtype)
    tensor = load(published, first, shape)
    aliases = spelling.aliases.get(name, ())
    for copy in dict.fromkeys((*copies, *aliases)):
        if copy in aliases and copy not in published.names:
            continue
        if not torch.equal(load(published, copy, shape), tensor):
            raise ModelFileError(f"{published.path}: tensors {first!r} and {copy!r} are one in this drafter and differ")
    if order is not None and name.startswith(("lm_head.", "lm_heads.")):
        tensor = tensor[order]
    if name not in spelling.less_one:
        return tensor
    return shifted(tensor, 1, published.load(spelling.names["fc.weight"][0]).dtype)


def load(published: Published, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A published tensor of finite numbers. Raises `ModelFileError`."""
    found = published.shape(name)
    if found != shape:
        raise ModelFileError(
            f"{published.path}: tensor {name!r} has shape {found}; {shape} is implied by config and target"
        )
    tensor = load_like(published, name)
    if not bool(torch.isfinite(tensor).all()):
        raise ModelFileError(f"{published.path}: tensor {name!r} holds a weight that is not finite")
    return tensor


def load_like(published: Published, name: str) -> torch.Tensor:
    """A published tensor of floating point. Raises `ModelFileError`."""
    tensor = published.load(name)
    if not tensor.is_floating_point():
        raise ModelFileError(f"{published.path}: tensor {name!r} is of {tensor.dtype}; floating point is needed")
    return tensor


def shifted(tensor: torch.Tensor, by: int, dtype: torch.dtype) -> torch.Tensor:
    """A norm's weights more or less 1, exactly. `dtype`: of the matrices, taken where it holds the result."""
    return narrowest(tensor.to(torch.float64) + by, dtype, tensor.dtype, torch.float32)


def draft_rows(matrix_VD: torch.Tensor, part: Part, draft_ids: torch.Tensor | None) -> torch.Tensor:
    """The target's matrix as a drafter writes it: of the draft ids alone where it is the head."""
    return matrix_VD if draft_ids is None or part == "embedding" else matrix_VD[draft_ids]


def check_copies(
    published: Published, spelling: Spelling, target: Target, draft_ids: torch.Tensor | None
) -> list[Note]:
    """Compare what should be the target's own with it. Raises `ModelFileError` when it is something else."""
    notes = []
    for name, (part, always) in spelling.from_target.items():
        if name not in published.names:
            if always:
                raise ModelFileError(f"{published.path}: tensor {name!r} is missing")
            notes.append(Note(part, f"the target's (no {name!r} in the file)"))
            continue
        own = draft_rows(target.matrix(part), part, draft_ids)
        likeness = _likeness(load(published, name, tuple(own.shape)), own)
        if likeness < _ALIKE:
            raise ModelFileError(
                f"{published.path}: tensor {name!r} is not the {part} of {target.name} (mean cosine {likeness:.3f}); "
                "a drafter with one of its own is not supported"
            )
        exact = "the same" if likeness == 1.0 else f"mean cosine {likeness:.4f}"
        notes.append(Note(part, f"the target's, so {name!r} is left out ({exact})"))
    return notes


def _likeness(found: torch.Tensor, own: torch.Tensor) -> float:
    """1.0 for equal matrices, else the mean cosine of some rows."""
    if torch.equal(found.float(), own.float()):
        return 1.0
    rows = torch.linspace(0, len(found) - 1, min(_SAMPLED_ROWS, len(found))).long()
    cosines = torch.nn.functional.cosine_similarity(found[rows].float(), own[rows].float(), dim=-1)
    return min(float(cosines.nan_to_num(0).mean()), 1 - 1e-9)
