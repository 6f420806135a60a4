"""What verification rules that do not keep the target's law have in common, and how their outputs are labelled.

Named in `SamplingParams.rule` beside the lossless `Rule`s and asked by the engine's step; `core.verify` never comes
here. The rules: `core.lossy` (typical acceptance, lenience), `core.adasd`, `core.asd`, `core.synthetic`. Invariants:
nothing uses one by default; what came about under one says so (`core.fidelity`) in every record
made of it.

Shape letters: T tree nodes (root included).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from draftsmith.core.fidelity import Fidelity
from draftsmith.core.types import Law, Proposal, Rule, Verdict
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    import torch

    from draftsmith.core.chance import Chance
    from draftsmith.core.sampling import Sampler


class InexactRule(ABC):
    """A verification rule that changes what is written. Its subclasses are frozen dataclasses of its parameters.

    `name`: what selects it. `drafts_as`: drafters draw for it as for this lossless rule. `greedy`: it serves
    greedy requests alone (True), sampled ones alone (False), or both (None).
    """

    name: ClassVar[str]
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY
    drafts_as: ClassVar[Rule]
    greedy: ClassVar[bool | None] = False

    @abstractmethod
    def verify(
        self, proposal: Proposal, logits_TV: torch.Tensor, sampler: Sampler, chance: Chance, memory: Any
    ) -> tuple[Verdict, Any]:
        """The verdict, and what to remember for the request's next step.

        As `core.verify.decide`. `memory`: what the request's step before returned, None in its first. Raises
        `UnsoundError` for a proposal the rule cannot verify.
        """

    def goes_on(self, law: Law, memory: Any) -> bool:
        """Whether a drafter should draw a further token from `law`, after a first one. Asked before the draw."""
        return True

    @property
    def text(self) -> str:
        """The rule with its parameters, as `--rule` takes it."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}  # type: ignore[arg-type]
        return ":".join(
            [self.name, *(f"{key}={_spelled(value)}" for key, value in values.items() if value is not None)]
        )

    @property
    def label(self) -> str:
        """What every output under the rule is marked with."""
        return f"{self.fidelity.value} ({self.text})"

    def check_temperature(self, temperature: float) -> None:
        """Raises `OptionError` where the rule has no meaning at a temperature."""
        if self.greedy is True and temperature > 0:
            raise OptionError(
                f"rule {self.name} is for greedy requests (temperature 0), got temperature {temperature:g}; sampled "
                "requests have rules adasd, typical and lenience"
            )
        if self.greedy is False and temperature == 0:
            raise OptionError(f"rule {self.name} needs a temperature above 0; greedy requests have rule asd")

    def _require(self, name: str, allowed: str, *, if_not: bool) -> None:
        """Raises `OptionError` about a parameter when `if_not` is False."""
        if not if_not:
            raise OptionError(f"rule {self.name}: {name} is {getattr(self, name)!r}; allowed: {allowed}")


def rule_text(rule: Rule | InexactRule) -> str:
    """A rule as `--rule` takes it."""
    return rule.text if isinstance(rule, InexactRule) else rule.value


def fidelity_of(rule: Rule | InexactRule) -> Fidelity:
    """What outputs under a rule are worth."""
    return rule.fidelity if isinstance(rule, InexactRule) else Fidelity.EXACT


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_spelled, value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
