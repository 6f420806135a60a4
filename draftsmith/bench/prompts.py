"""Prompts of a benchmark run, from a file of any known data set or from the built-in set.

Called by the command line and the runner. A source is `builtin`, a file whose entries say what they are
(`workloads/formats.py`), or `NAME:FILE`, which reads the file as that data set and as nothing else. Nothing is
downloaded. Invariant: what cannot be used stops the reading with an error that names file and line, except
entries of collected data that hold no question, which are left out and counted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.bench.workloads.builtin import BUILTIN_PROMPTS
from draftsmith.bench.workloads.files import entries_of, read_file
from draftsmith.bench.workloads.formats import FORMATS, Format, Unusable, format_named, read_entry
from draftsmith.bench.workloads.prompt import Prompt
from draftsmith.errors import OptionError, PromptError

__all__ = ["BUILTIN", "Loaded", "Prompt", "load_prompts", "read_source", "select_prompts"]

BUILTIN = "builtin"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The prompts of a source. `formats`: what its entries were read as; `skipped`: how many were left out, by reason.

    `sha256` is that of the file as it is on disk, or of the built-in prompts.
    """

    source: str
    formats: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    skipped: Mapping[str, int]
    sha256: str


def read_source(
    source: str | Path, *, limit: int | None = None, per_category: int | None = None, max_turns: int | None = None
) -> Loaded:
    """Read a source; keep at most `max_turns` turns of each prompt, and those that `select_prompts` selects.

    Raises `PromptError` naming the file, and the line where there is one to blame.
    """
    if max_turns is not None and max_turns < 1:
        raise OptionError(f"max_turns must be at least 1, got {max_turns}")
    found = _builtin(max_turns) if str(source) == BUILTIN else _from_file(str(source), max_turns)
    kept = select_prompts(found.prompts, limit=limit, per_category=per_category)
    return dataclasses.replace(found, prompts=tuple(kept))


def load_prompts(
    source: str | Path, *, limit: int | None = None, per_category: int | None = None, max_turns: int | None = None
) -> list[Prompt]:
    """The prompts of `read_source`."""
    return list(read_source(source, limit=limit, per_category=per_category, max_turns=max_turns).prompts)


def select_prompts(
    prompts: Sequence[Prompt], *, limit: int | None = None, per_category: int | None = None
) -> list[Prompt]:
    """The first `per_category` prompts of each category, then the first `limit` of those, in order."""
    seen: Counter[str] = Counter()
    kept: list[Prompt] = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if per_category is None or seen[prompt.category] <= per_category:
            kept.append(prompt)
    return kept[:limit]


def _builtin(max_turns: int | None) -> Loaded:
    text = json.dumps([dataclasses.asdict(prompt) for prompt in BUILTIN_PROMPTS])
    return Loaded(
        source=BUILTIN,
        formats=(BUILTIN,),
        prompts=tuple(dataclasses.replace(prompt, turns=prompt.turns[:max_turns]) for prompt in BUILTIN_PROMPTS),
        skipped={},
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )


def _from_file(source: str, max_turns: int | None) -> Loaded:
    forced, path = _split(source)
    data = read_file(path)
    prompts: list[Prompt] = []
    formats: dict[str, None] = {}
    skipped: Counter[str] = Counter()
    for entry in entries_of(path, data):
        try:
            prompt, read_as = read_entry(entry, forced, max_turns)
        except Unusable as reason:
            skipped[str(reason)] += 1
        else:
            prompts.append(prompt)
            formats[read_as.name] = None
    if not prompts:
        left_out = "".join(f"; {number} left out: {reason}" for reason, number in skipped.items())
        raise PromptError(f'{path} holds no prompts; expected lines such as {{"prompt": "..."}}{left_out}')
    return Loaded(
        source=source,
        formats=tuple(formats),
        prompts=tuple(prompts),
        skipped=dict(skipped),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _split(source: str) -> tuple[Format | None, Path]:
    """The format that is asked for, if any, and the file."""
    name, colon, rest = source.partition(":")
    if not colon:
        return None, Path(source)
    forced = format_named(name)
    if forced is None and not Path(source).exists():
        known = ", ".join(item.name for item in FORMATS)
        raise PromptError(f"{source} is no file, and {name!r} is no data set; known: {known}")
    return (forced, Path(rest)) if forced is not None else (None, Path(source))
