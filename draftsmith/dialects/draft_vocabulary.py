"""Which target ids a drafter can say: `d2t` and `t2d` of EAGLE-3, and the ascending list of ids that we keep.

`d2t` [U] int64 holds offsets: draft id j stands for target id j + d2t[j]. `t2d` [V] bool marks the same ids. Invariant:
ids are distinct and inside the vocabulary, and the two tensors agree, or the file is refused.

Shape letters: V vocabulary, U draft vocabulary.
"""

from __future__ import annotations

import torch

from draftsmith.dialects.dialect import Note
from draftsmith.dialects.published import Published
from draftsmith.errors import ModelFileError

OFFSETS, MASK = "d2t", "t2d"


def read_vocabulary(
    published: Published, vocab_size: int, draft_size: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, Note]:
    """Ascending ids, the order of the published rows if they are not ascending, and a note.

    `draft_size`: rows of the draft's head. Raises `ModelFileError`.
    """
    where = str(published.path)
    if OFFSETS not in published.names:
        if draft_size != vocab_size:
            raise ModelFileError(
                f"{where}: tensor {OFFSETS!r} is missing, and a head of {draft_size} rows needs it "
                f"(the vocabulary has {vocab_size})"
            )
        return None, None, Note("draft ids", f"all {vocab_size}")
    offsets = _integers(published, OFFSETS, draft_size)
    ids = torch.arange(draft_size) + offsets
    kind = "offsets"
    if MASK in published.names:
        marked = _mask(published, vocab_size)
        if not _is_same(ids, marked):
            # Offsets that point elsewhere than the mask may be ids themselves; the mask decides.
            if not _is_same(offsets, marked):
                raise ModelFileError(f"{where}: tensors {OFFSETS!r} and {MASK!r} do not name the same ids")
            ids, kind = offsets, "ids (the mask says so)"
    return _ascending(published, OFFSETS, ids, vocab_size, f"{OFFSETS} holds {kind}")


def read_ids(
    published: Published, name: str, vocab_size: int, draft_size: int
) -> tuple[torch.Tensor, torch.Tensor | None, Note]:
    """As `read_vocabulary`, of a tensor that lists the ids themselves."""
    ids = _integers(published, name, draft_size)
    return _ascending(published, name, ids, vocab_size, f"listed by {name}")


def _ascending(
    published: Published, name: str, ids: torch.Tensor, vocab_size: int, how: str
) -> tuple[torch.Tensor, torch.Tensor | None, Note]:
    """Ids in ascending order, and the order of rows that makes them so. Raises `ModelFileError`."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids):
        raise ModelFileError(f"{published.path}: tensor {name!r} must name distinct ids from 0 to {vocab_size - 1}")
    order, note = None, f"{len(ids)} of {vocab_size}, {how}"
    if not bool((ids[1:] > ids[:-1]).all()):
        ids, order = ids.sort()
        note += "; not ascending in the file, so the head's rows are sorted"
    return ids, order, Note("draft ids", note)


def write_vocabulary(draft_ids: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` of ascending ids."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[draft_ids] = True
    return {OFFSETS: draft_ids - torch.arange(len(draft_ids)), MASK: mask}


def _integers(published: Published, name: str, size: int) -> torch.Tensor:
    shape = published.shape(name)
    if shape != (size,):
        raise ModelFileError(f"{published.path}: tensor {name!r} has shape {shape}; the head has {size} rows")
    found = published.load(name)
    if found.dtype not in (torch.int64, torch.int32):
        raise ModelFileError(f"{published.path}: tensor {name!r} is of {found.dtype}; whole numbers are needed")
    return found.to(torch.int64)


def _mask(published: Published, vocab_size: int) -> torch.Tensor:
    """The ids that `t2d` marks."""
    shape = published.shape(MASK)
    if shape != (vocab_size,):
        raise ModelFileError(f"{published.path}: tensor {MASK!r} has shape {shape}; the vocabulary has {vocab_size}")
    return published.load(MASK).to(torch.bool).nonzero().squeeze(-1)


def _is_same(ids: torch.Tensor, marked: torch.Tensor) -> bool:
    return torch.equal(ids.sort().values, marked)
