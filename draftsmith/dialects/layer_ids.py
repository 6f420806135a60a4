"""Which of the target's hidden states EAGLE-3 reads: two conventions of numbering them, and one of ours.

Ours and that of vLLM and speculators: id k is the state after k layers ("applied"; the input of layer k counted from
0). Others number outputs: id k is the output of layer k, so k + 1 layers are applied ("outputs"). SGLang tells them
apart by the first id, which is 1 for outputs where everybody taps layers 2, L/2 and L - 3.
"""

from __future__ import annotations

from typing import Any

from draftsmith.dialects.dialect import Note
from draftsmith.errors import ModelFileError, OptionError

CONVENTIONS = ("auto", "applied", "outputs")


def default_taps(num_layers: int) -> tuple[int, ...]:
    """What EAGLE-3's code taps of a target of this depth: layers applied."""
    return (2, num_layers // 2, num_layers - 3)


def check_convention(convention: str) -> None:
    """Raises `OptionError`."""
    if convention not in CONVENTIONS:
        raise OptionError(f"layer ids are read as {', '.join(CONVENTIONS)}, not {convention!r}")


def taps_of(ids: Any, convention: str, num_layers: int, where: str) -> tuple[tuple[int, ...], Note]:
    """Layers applied, and how they were found. `ids` None: the defaults. Raises `ModelFileError`."""
    if ids is None:
        taps = default_taps(num_layers)
        _check(taps, num_layers, f"{where}: no layer ids in the config, and the usual ones")
        return taps, Note("taps", f"layers applied {_list(taps)}: no ids in the config, so 2, L/2, L-3 of {num_layers}")
    if not isinstance(ids, list | tuple) or not ids or not all(type(index) is int for index in ids):
        raise ModelFileError(f"{where}: layer ids are {ids!r}; a list of whole numbers is needed")
    pinned = convention != "auto"
    if not pinned:
        convention = "outputs" if ids[0] == 1 else "applied"
    taps = tuple(index + 1 for index in ids) if convention == "outputs" else tuple(ids)
    _check(taps, num_layers, f"{where}: layer ids {list(ids)} read as {convention}")
    meaning = "outputs of layers" if convention == "outputs" else "layers applied already"
    reason = "as told" if pinned else "the first id is 1" if convention == "outputs" else "the first id is not 1"
    return taps, Note("taps", f"layers applied {_list(taps)}: ids {_list(ids)} are {meaning} ({reason})")


def ids_of(taps: tuple[int, ...], convention: str) -> tuple[list[int], Note]:
    """Ids that say these taps. `convention` auto: layers applied."""
    if convention == "outputs":
        if taps[0] == 0:
            raise OptionError("tap 0 is the embedding's output, which is no layer's: write layer ids as applied")
        ids = [tap - 1 for tap in taps]
        return ids, Note("taps", f"layers applied {_list(taps)}, written {_list(ids)}: outputs of layers, as you said")
    warning = "; SGLang takes a first id of 1 for outputs" if taps[0] == 1 else ""
    return list(taps), Note("taps", f"written {_list(taps)}: layers applied, as vLLM reads them{warning}")


def _check(taps: tuple[int, ...], num_layers: int, where: str) -> None:
    if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] > num_layers:
        raise ModelFileError(f"{where}: {list(taps)} layers applied are needed, of a target that has {num_layers}")


def _list(numbers: Any) -> str:
    return ", ".join(map(str, numbers))
