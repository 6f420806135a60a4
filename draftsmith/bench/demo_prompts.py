"""The prompts of the demo: short tasks of five kinds that a small model does sensibly.

Read by the demo and by measurements of it. Written for this project. Invariant: each names its kind, a
title for the table, and the most tokens it needs; the kinds stand together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DemoPrompt:
    """One prompt of the demo."""

    kind: str
    title: str
    text: str
    max_new_tokens: int


DEMO_PROMPTS: tuple[DemoPrompt, ...] = (
    DemoPrompt(
        kind="chatting",
        title="virus and bacterium",
        text="What is the difference between a virus and a bacterium? Answer in a few sentences.",
        max_new_tokens=12,
    ),
    DemoPrompt(kind="copying", title="bricks", text="Repeat three times: I like bricks and stones.", max_new_tokens=20),
)
