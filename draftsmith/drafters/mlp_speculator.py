"""The MLP speculator of IBM (2404.19124): a small recurrent state eats one token per stage.

s_0 is h_t (normed and divided by sqrt 2 if `scale_input`); stage k eats x_{t+1+k} and drafts x_{t+2+k}:
s_{k+1} = GELU(LN_k(P_k s_k + a E_k[x_{t+1+k}])), logits W_k s_{k+1}. The factor a gives the token more weight the more
stages there are, and belongs to the trained number of stages however many run. Tied models share all but P_0.

Shape letters: R rows, D target width, I inner width, U draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.draft_layer import MOST_SIZE
from draftsmith.drafters.head_drafter import HeadDrafter
from draftsmith.drafters.heads import HeadModule, check_heads, target_width
from draftsmith.drafters.trainable import LossOptions
from draftsmith.errors import OptionError
from draftsmith.registry import read_options

_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MlpSpeculatorConfig:
    """`width`: the target's. `inner_width`: of the state. `num_depths`: stages trained. `tied`: stages share weights.
    `scale_input`: h_t is normed first.
    """

    width: int
    inner_width: int
    num_depths: int = 3
    tied: bool = True
    scale_input: bool = True

    def __post_init__(self) -> None:
        check_heads(self.num_depths, "own")
        if not 1 <= self.inner_width <= MOST_SIZE:
            raise OptionError(f"inner_width is {self.inner_width}; allowed: 1 to {MOST_SIZE}")


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """What may be chosen before training. `inner_width`: 0 for the target's width."""

    num_depths: int = 3
    inner_width: int = 0
    tied: bool = True
    scale_input: bool = True


class BiasedRMSNorm(nn.Module):
    """x / sqrt(mean x² + 1e-6) * weight + bias: no mean is taken off, but there is a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _unit(x) * self.weight + self.bias


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + _EPS)


@final
class MlpSpeculatorModule(HeadModule):
    """Weights and training of the MLP speculator; the state is s after the last token eaten."""

    Config = MlpSpeculatorConfig
    loss_defaults = LossOptions(decay=1.0)

    def __init__(self, config: MlpSpeculatorConfig, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        super().__init__(config, target, draft_ids)
        self.config: MlpSpeculatorConfig = config
        inner, count = config.inner_width, 1 if config.tied else config.num_depths
        num_projections = min(2, config.num_depths) if config.tied else config.num_depths
        self.emb = nn.ModuleList(nn.Embedding(target.vocab_size, inner) for _ in range(count))
        self.proj = nn.ModuleList(
            nn.Linear(inner if stage else config.width, inner, bias=False) for stage in range(num_projections)
        )
        self.ln = nn.ModuleList(BiasedRMSNorm(inner) for _ in range(count))
        self.make_heads("shared" if config.tied else "own", inner, config.num_depths)
        state_weight = 0.5 ** (0.5 / config.num_depths)
        self._token_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    @classmethod
    def configure(cls, target: TargetInfo, changes: Mapping[str, str]) -> MlpSpeculatorConfig:
        changed = read_options(_Changes, changes, "mlp_speculator")
        width = target_width(target)
        return MlpSpeculatorConfig(
            width=width,
            inner_width=changed.inner_width or width,
            num_depths=changed.num_depths,
            tied=changed.tied,
            scale_input=changed.scale_input,
        )

    @torch.no_grad()
    def initialise(self, target: TargetInfo, generator: torch.Generator) -> None:
        """Matrices and embeddings N(0, 1 / inner width), so that the factor a balances state and token."""
        std = self.config.inner_width**-0.5
        for name, parameter in sorted(self.named_parameters()):
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def begin(self, features_RF: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        state_RD = _unit(features_RF) * 0.5**0.5 if self.config.scale_input else features_RF
        return self._stage(0, state_RD, tokens_R)

    def logits(self, depth: int, state_RW: torch.Tensor) -> torch.Tensor:
        return self.unembed(depth, state_RW)

    def advance(self, depth: int, state_RW: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        return self._stage(depth + 1, state_RW, tokens_R)

    def _stage(self, stage: int, state: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        place = min(stage, len(self.emb) - 1)
        moved = self.proj[min(stage, len(self.proj) - 1)](state)
        mixed = torch.add(moved, self.emb[place](tokens_R), alpha=self._token_weight)
        return F.gelu(self.ln[place](mixed))


@final
class MlpSpeculatorDrafter(HeadDrafter):
    """Drafts with an MLP speculator: a recurrent state fed with each drafted token."""

    Module = MlpSpeculatorModule
    method = "mlp_speculator"
