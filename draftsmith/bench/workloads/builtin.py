"""The built-in prompts: six of each of eight kinds, so that a first benchmark needs no file.

Read by `bench.prompts` for the source `builtin`, and by `lengths` as text to fill with. Written for this project;
no text was taken from anywhere. Invariant: ids and order never change meaning between versions, because results
name them; a changed text is a new id.
"""

from __future__ import annotations

from draftsmith.bench.workloads.builtin_code import EDITING, EXTRACTION, WRITING
from draftsmith.bench.workloads.builtin_talk import CHAT, MATH, REASONING
from draftsmith.bench.workloads.builtin_text import SUMMARISING, TRANSLATION
from draftsmith.bench.workloads.prompt import Prompt

# kind -> the turns of each prompt
_KINDS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("chat", CHAT),
    ("reasoning", REASONING),
    ("math", MATH),
    ("code writing", WRITING),
    ("code editing", EDITING),
    ("extraction", EXTRACTION),
    ("summarising", SUMMARISING),
    ("translation", TRANSLATION),
)

BUILTIN_PROMPTS: tuple[Prompt, ...] = tuple(
    Prompt(prompt_id=f"{kind.replace(' ', '-')}-{number}", turns=turns, category=kind)
    for kind, prompts in _KINDS
    for number, turns in enumerate(prompts, 1)
)
