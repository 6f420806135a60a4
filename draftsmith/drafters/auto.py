"""The drafter that was measured to be best for the target at hand, by the name `auto`.

Resolved by the engine when the target is known; what is then logged and reported is the drafter that was chosen.
So far that is `suffix` everywhere: a shipped EAGLE-3 beside it gains on free questions on the reference backend, but
loses on the demo's prompts and on the native backend (`docs/results.md` has the figures).
"""

from __future__ import annotations

from typing import final

from draftsmith.drafters.base import DrafterChoice, NoOptions, TargetInfo


@final
class AutoChoice(DrafterChoice):
    """What was measured to be best for the target at hand: suffix, so far everywhere."""

    @classmethod
    def choose(cls, options: NoOptions, target: TargetInfo) -> str:
        return "suffix"
