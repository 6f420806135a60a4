"""The prompts of an audit: short, of different kinds, some to be copied so that drafts are accepted.

Read by `draftsmith audit`. Written for this project. Invariants: the first two share a long beginning and part in their
last words (reused prefixes); kinds that repeat their prompt and kinds that do not take turns.
"""

from __future__ import annotations

_RECIPE = (
    "Here is a recipe. Warm 300 g of milk, stir in 40 g of sugar, add 500 g of flour and 7 g of yeast, knead for "
    "ten minutes, let it rest for an hour, shape twelve rolls, let them rest again, bake them at 200 degrees for "
    "18 minutes."
)

PROMPTS = (
    f"{_RECIPE} Repeat the recipe word for word.",
    f"{_RECIPE} Repeat the recipe word for word, with water in place of milk.",
    "Tell me in a few sentences why the sea is salty.",
    "Write the numbers from one to twenty as words, separated by commas: one, two, three,",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return width *",
    "Invent a name for a small bakery by a river, and say what it smells like there.",
)


def audit_prompts(*, chat: bool) -> list[str] | list[list[dict[str, str]]]:
    """What is handed to the engine: messages for a model with a chat template, text to continue for others."""
    if not chat:
        return list(PROMPTS)
    return [[{"role": "user", "content": text}] for text in PROMPTS]
