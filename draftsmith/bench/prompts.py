"""Prompts of a benchmark run, read from a JSON-lines file.

Called by the command line and the runner. Two kinds of lines are understood and may be mixed:
Spec-Bench questions (`question_id`, `category`, `turns`, optional `reference`), of which the first turn is
used, and plain ones (`prompt`, optional `id` and `category`). Invariant: a prompt that is returned is
a non-empty string; a line that cannot be used stops the reading with an error that names it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import PromptError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a workload. `category` is empty where the data has none."""

    prompt_id: str
    text: str
    category: str = ""


def load_prompts(path: Path, *, limit: int | None = None, per_category: int | None = None) -> list[Prompt]:
    """Read a prompts file; keep the first `per_category` of each category, then the first `limit` of all.

    Raises `PromptError` naming the file, and the line where there is one to blame.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise PromptError(f"{path}, line {line}: not UTF-8 text; prompts files are JSON lines in UTF-8") from error
    except OSError as error:
        raise PromptError(f"cannot read the prompts file {path}: {error.strerror}") from error
    # Not splitlines(): it also splits at characters that JSON strings may hold, such as U+2028.
    prompts = [_read_line(line, f"{path}, line {i}", i) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not prompts:
        raise PromptError(f'{path} holds no prompts; expected lines such as {{"prompt": "..."}}')
    return select_prompts(prompts, limit=limit, per_category=per_category)


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


def _read_line(line: str, where: str, number: int) -> Prompt:
    try:
        item = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PromptError(f"{where}: not JSON ({error})") from error
    if not isinstance(item, dict):
        raise PromptError(f"{where}: expected a JSON object, found {_kind(item)}")
    if "turns" in item:
        text, key = _first_turn(item["turns"], where), "turns"
    elif "prompt" in item:
        text, key = item["prompt"], "prompt"
    else:
        keys = ", ".join(map(repr, item)) or "none"
        raise PromptError(f"{where}: neither 'prompt' nor 'turns' among its keys ({keys})")
    if not isinstance(text, str):
        raise PromptError(f"{where}: {key!r} must hold text, found {_kind(text)}")
    if not text.strip():
        raise PromptError(f"{where}: the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{where}: the prompt holds half a character (an unpaired surrogate)") from error
    category = item.get("category", "")
    if not isinstance(category, str):
        raise PromptError(f"{where}: 'category' must be text, found {_kind(category)}")
    prompt_id = item.get("question_id", item.get("id", item.get("task_id", number)))
    return Prompt(prompt_id=str(prompt_id), text=text, category=category)


def _first_turn(turns: Any, where: str) -> Any:
    if not isinstance(turns, list) or not turns:
        raise PromptError(f"{where}: 'turns' must be a non-empty list of texts")
    return turns[0]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
