"""EAGLE-1 (2401.15077) and EAGLE-2 (2406.16858): one layer that continues the target's own last hidden states.

Row t reads f_t, the target's last hidden state after its final norm, and the token x_{t+1}; its output is the guess of
f_{t+1} itself, so the target's own head turns it into a draft law, and fed back it takes f's place. There is no norm
before attention and none at the end. EAGLE-2 is the same weights with a dynamic tree.

Shape letters: B texts, L rows, D width, U draft vocabulary, A anchors.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from draftsmith.core.losses import LossReport, geometric_weights, report
from draftsmith.drafters.base import Tap, TargetInfo
from draftsmith.drafters.draft_layer import DraftLayer, LayerShape, fill_normal, shape_like
from draftsmith.drafters.recurrent import RecurrentDrafter, RecurrentOptions
from draftsmith.drafters.recurrent_module import Entry, RecurrentModule
from draftsmith.drafters.row_parts import RowParts
from draftsmith.drafters.trainable import LossOptions, TrainingBatch
from draftsmith.errors import OptionError
from draftsmith.registry import read_options

_LAW_WEIGHT = 0.1
_NOISE_LENGTH = 512


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(LayerShape):
    """`fc_bias`: the matrix over [embedding; feature] has a bias (older checkpoints). `noise`: amplitude of the uniform
    noise that training adds to features of a text of 512 tokens; twice that for half as many, 0 for none.
    """

    fc_bias: bool = False
    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.noise < float("inf"):
            raise OptionError(f"noise is {self.noise}: at least 0 is needed")


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """What may be chosen before training."""

    mlp_width: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    fc_bias: bool = False
    noise: float = 0.1


@final
class Eagle1Module(RecurrentModule):
    """Weights and loss of EAGLE-1."""

    Config = Eagle1Config
    config: Eagle1Config
    loss_defaults = LossOptions(num_depths=1)

    def __init__(self, config: Eagle1Config, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        super().__init__(config, target, draft_ids)
        self.fc = nn.Linear(2 * config.width, config.width, bias=config.fc_bias)
        self.layer = DraftLayer(config, config.width)

    @classmethod
    def configure(cls, target: TargetInfo, changes: Mapping[str, str]) -> Eagle1Config:
        changed = read_options(_Changes, changes, "eagle1")
        shape = shape_like(target.backend.spec, changed)
        return Eagle1Config(**shape, fc_bias=changed.fc_bias, noise=changed.noise)

    def initialise(self, target: TargetInfo, generator: torch.Generator) -> None:
        fill_normal(self, generator)

    @property
    def taps(self) -> tuple[Tap, ...]:
        return ("last_hidden",)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor) -> Entry:
        joined = self.fc(torch.cat((embedded, hidden), dim=-1))
        return Entry(joined, joined)

    def feedback(self, output: torch.Tensor) -> torch.Tensor:
        return output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return self.target_head(output)

    def row_parts(self) -> RowParts:
        return RowParts(
            shape=self.config,
            layer=self.layer,
            draft_ids=self.draft_ids,
            feature_width=self.config.width,
            fuse=self.fc,
            logit_cap=self._logit_cap,
        )

    def loss(self, batch: TrainingBatch, options: LossOptions) -> LossReport:
        """SmoothL1 of the features, and 0.1 times the loss of the laws (the paper's cross-entropy has the gradient of
        "kl"). In training mode the features that are read carry uniform noise, the same for the same batch.

        Features are learned at every anchor, also where the target would say a token outside the draft vocabulary.
        """
        features_BLD = self.features(batch)
        read = features_BLD + self.config.noise * _noise(batch, features_BLD) if self.training else features_BLD
        depths, laws = [], self.target_laws(batch)
        for depth, output in enumerate(self.unrolled(batch, read, options.num_depths)):
            draft = self.draft_at(batch, depth, output)
            law = self.depth_loss(batch, depth, draft, options, laws)
            guessed_AD = output.flatten(0, 1)[draft.anchors]
            true_AD = features_BLD.flatten(0, 1)[draft.anchors + 1 + depth]
            # A batch without anchors teaches nothing: a mean over no rows would be NaN.
            distance = F.smooth_l1_loss(guessed_AD, true_AD, reduction="sum") / max(1, guessed_AD.numel())
            depths.append(dataclasses.replace(law, loss=distance + _LAW_WEIGHT * law.loss))
        return report(depths, geometric_weights(len(depths), options.decay))


def _noise(batch: TrainingBatch, features_BLD: torch.Tensor) -> torch.Tensor:
    """Uniform noise of amplitude 512 / length, a function of the tokens so that a resumed run repeats it."""
    seed = zlib.crc32(batch.tokens_BL.cpu().contiguous().numpy().tobytes())
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(features_BLD.shape, generator=generator, dtype=torch.float32).to(features_BLD)
    lengths = batch.lengths_B.to(features_BLD).clamp_min(1)[:, None, None]
    return (2 * drawn - 1) * (_NOISE_LENGTH / lengths)


@final
class Eagle1Drafter(RecurrentDrafter):
    """Drafts with EAGLE-1: one decoder layer that goes on from the target's last features."""

    Module = Eagle1Module
    method = "eagle1"
    alike = frozenset({"eagle2"})


@dataclass(frozen=True, kw_only=True)
class Eagle2Options(RecurrentOptions):
    """As `RecurrentOptions`, with a dynamic tree unless told otherwise."""

    max_draft: int = 16
    tree: str = "dynamic"


@final
class Eagle2Drafter(RecurrentDrafter):
    """Drafts EAGLE-2's dynamic trees with EAGLE-1's weights."""

    Options = Eagle2Options
    Module = Eagle1Module
    method = "eagle2"
    alike = frozenset({"eagle1"})
