"""Medusa (2401.10774): one small head per depth reads the target's last hidden state and nothing else.

Head k is `num_layers` residual blocks x + SiLU(W x + b) and an output matrix; it drafts x_{t+2+k} from h_t. Medusa-1
trains the heads of a frozen target; `medusa2` trains heads and target together, by `joint_loss`.

Shape letters: R rows, D width, K depths, U draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import nn

from draftsmith.core.losses import LossReport
from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.head_drafter import HeadDrafter
from draftsmith.drafters.heads import HeadModule, check_count, check_heads, target_width
from draftsmith.drafters.trainable import LossOptions
from draftsmith.errors import OptionError
from draftsmith.registry import read_options

_SCHEDULES = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: progress,
    "sine": lambda progress: math.sin(math.pi / 2 * progress),
}


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """`width`: the target's. `num_layers`: residual blocks of each head. `head`: see `heads.HEADS`."""

    width: int
    num_depths: int = 4
    num_layers: int = 1
    head: str = "target"

    def __post_init__(self) -> None:
        check_heads(self.num_depths, self.head)
        check_count("num_layers", self.num_layers)


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """What may be chosen before training."""

    num_depths: int = 4
    num_layers: int = 1
    head: str = "target"


class MedusaHeads(HeadModule):
    """Weights of Medusa's heads, and what they draft."""

    independent = True
    loss_defaults = LossOptions(decay=0.8)

    def __init__(self, config: MedusaConfig, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        super().__init__(config, target, draft_ids)
        self.config: MedusaConfig = config
        blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.num_layers))
            for _ in range(config.num_depths)
        )
        self.blocks = cast("Sequence[Sequence[nn.Linear]]", blocks)
        self.make_heads(config.head, config.width, config.num_depths)

    @torch.no_grad()
    def initialise(self, target: TargetInfo, generator: torch.Generator) -> None:
        """Blocks of zero and the target's rows: every head begins as the target's own."""
        for head in self.blocks:
            for block in head:
                nn.init.zeros_(block.weight)
                nn.init.zeros_(block.bias)
        self.copy_heads()

    def begin(self, features_RF: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        return features_RF

    def hidden(self, depth: int, state_RD: torch.Tensor) -> torch.Tensor:
        """What a head's output matrix reads [R, D]."""
        for block in self.blocks[depth]:
            state_RD = state_RD + F.silu(block(state_RD))
        return state_RD

    def logits(self, depth: int, state_RW: torch.Tensor) -> torch.Tensor:
        return self.unembed(depth, self.hidden(depth, state_RW))

    def all_logits(self, num_depths: int, state_RW: torch.Tensor) -> torch.Tensor:
        if self.config.head == "own":
            return super().all_logits(num_depths, state_RW)
        # One output matrix for all depths is read once.
        return self.unembed(0, torch.stack([self.hidden(depth, state_RW) for depth in range(num_depths)]))


@final
class MedusaModule(MedusaHeads):
    """Training of Medusa-1: the target is frozen."""

    Config = MedusaConfig

    @classmethod
    def configure(cls, target: TargetInfo, changes: Mapping[str, str]) -> MedusaConfig:
        changed = read_options(_Changes, changes, "medusa")
        return MedusaConfig(
            width=target_width(target),
            num_depths=changed.num_depths,
            num_layers=changed.num_layers,
            head=changed.head,
        )


@final
class MedusaDrafter(HeadDrafter):
    """Drafts with Medusa heads: one layer per position, from the target's last row."""

    Module = MedusaModule
    method = "medusa"


def check_schedule(name: str) -> None:
    """Raises `OptionError` for a schedule that is not known."""
    if name not in _SCHEDULES:
        raise OptionError(f"unknown schedule {name!r}; known are {', '.join(_SCHEDULES)}")


def joint_loss(
    language_loss: torch.Tensor,
    heads: LossReport,
    progress: float,
    *,
    coefficient: float = 0.2,
    schedule: str = "sine",
) -> torch.Tensor:
    """Medusa-2's objective: the language model's loss plus coefficient * s(progress) times the heads' loss.

    `language_loss`: of the target being tuned (cross-entropy, or KL to the untuned one). `heads`: their report
    with weights 0.8^k. `progress`: share of the training done, 0 to 1. `schedule`: constant, linear or sine.
    """
    check_schedule(schedule)
    if not 0 <= progress <= 1:
        raise OptionError(f"progress is {progress}; allowed: 0 to 1")
    return language_loss + coefficient * _SCHEDULES[schedule](progress) * heads.loss
