"""The drafter that was measured to be best for the target at hand, by the name `auto`.

Resolved by the engine when the target is known; what is then logged and reported is the drafter that was chosen.
Where steps are dear beside drafting (the reference backend) a shipped EAGLE-3 drafts what nothing can be copied for,
beside the suffix trees; on the native backend the suffix trees alone are faster (`docs/results.md` has the figures).
"""

from __future__ import annotations

from typing import final

from draftsmith.drafters.base import DrafterChoice, NoOptions, TargetInfo
from draftsmith.drafters.shipped import shipped_drafters
from draftsmith.models.native import NativeBackend

_ALONE = "suffix"
_BESIDE = {"eagle3": "hybrid:other=eagle3"}
"""By method of a shipped drafter, best first."""


@final
class AutoChoice(DrafterChoice):
    """The measured best."""

    @classmethod
    def choose(cls, options: NoOptions, target: TargetInfo) -> str:
        if isinstance(target.backend, NativeBackend):
            return _ALONE
        suited = {item.method for item in shipped_drafters() if item.suits(target)}
        return next((selection for method, selection in _BESIDE.items() if method in suited), _ALONE)
