"""Hydra and Hydra++ (2402.05109): heads that read the drafted tokens too.

Head k reads z and the embeddings of x_{t+1} .. x_{t+1+k} side by side and drafts x_{t+2+k}. Hydra's z is h_t itself;
Hydra++ puts a *prefix layer* in between, a decoder layer over all h up to t with keys and values of its own. A head
is R(in) + SiLU(L(in)) down to the target's width, further residual blocks, and an output matrix with a bias.

Shape letters: B texts, L rows, R rows of any kind, S sequences, D width, A anchors, U draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch import nn

from draftsmith.core.losses import LossReport, geometric_weights, label_loss, report
from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.draft_layer import LayerShape, RMSNorm, fill_normal
from draftsmith.drafters.head_drafter import HeadDrafter
from draftsmith.drafters.heads import HeadModule, check_count, check_heads, target_width
from draftsmith.drafters.last_row import LastRowLayer
from draftsmith.drafters.trainable import DepthDraft, LossOptions, TrainingBatch
from draftsmith.errors import OptionError
from draftsmith.registry import read_options


@dataclass(frozen=True, kw_only=True)
class HydraConfig:
    """`num_layers`: blocks of each head, the first included. `head`: see `heads.HEADS`. `prefix`: the prefix layer of
    Hydra++, None for Hydra. The rest concerns training alone (0: not wanted). `teacher_weight`: of the loss against the
    target's law; `label_weight`: of the cross-entropy of what the text says; `feature_weight`: of the smooth L1
    distance between what a head's output matrix reads and what the target's reads at the row it stands in for.
    `dropout`: share of the inputs of each block and output matrix that is left out. `noise`: alpha of the uniform noise
    on hidden states and embeddings, of amplitude alpha / sqrt(length of the text * width) (NEFTune, 2310.05914).
    """

    width: int
    num_depths: int = 4
    num_layers: int = 1
    head: str = "target"
    prefix: LayerShape | None = None
    feature_weight: float = 0.0
    teacher_weight: float = 1.0
    label_weight: float = 0.0
    dropout: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_heads(self.num_depths, self.head)
        check_count("num_layers", self.num_layers)
        for name in ("feature_weight", "teacher_weight", "label_weight", "noise"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise OptionError(f"{name} is {getattr(self, name)}: at least 0 is needed")
        if not self.teacher_weight and not self.label_weight:
            raise OptionError("teacher_weight and label_weight are both 0: nothing would be learned of what to draft")
        if not 0 <= self.dropout < 1:
            raise OptionError(f"dropout is {self.dropout}; allowed: 0 and up to below 1")
        prefix: Any = self.prefix
        if isinstance(prefix, dict):  # as a checkpoint's JSON has it
            object.__setattr__(self, "prefix", LayerShape(**prefix))
        if self.prefix is not None and self.prefix.width != self.width:
            raise OptionError(f"the prefix layer's width is {self.prefix.width}; the target's is {self.width}")


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """What may be chosen before training. `prefix`: true for Hydra++."""

    num_depths: int = 4
    num_layers: int = 1
    head: str = "target"
    prefix: bool = False
    feature_weight: float = 0.0
    teacher_weight: float = 1.0
    label_weight: float = 0.0
    dropout: float = 0.0
    noise: float = 0.0


class HydraHead(nn.Module):
    """Blocks of one head over `num_inputs` vectors side by side."""

    def __init__(self, width: int, num_inputs: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self._dropout = dropout
        self.linear = nn.Linear(num_inputs * width, width)
        self.res_connection = nn.Linear(num_inputs * width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers - 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the output matrix reads [R, D]."""
        inputs = self._dropped(inputs)
        x = self.res_connection(inputs) + F.silu(self.linear(inputs))
        for block in self.blocks:
            x = self._dropped(x)
            x = x + F.silu(block(x))
        return self._dropped(x)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        """In training a share of the numbers is left out, and the others stand in for it."""
        return F.dropout(x, self._dropout, self.training) if self._dropout else x

    @torch.no_grad()
    def initialise(self) -> None:
        """Pass z on: a head begins by saying what the target's own would."""
        for parameter in self.parameters():
            parameter.zero_()
        width = self.res_connection.out_features
        self.res_connection.weight[:, :width].copy_(torch.eye(width))


@final
class HydraModule(HeadModule):
    """Weights and training of Hydra and Hydra++; the state is z and the embeddings so far, side by side."""

    Config = HydraConfig
    loss_defaults = LossOptions(decay=1.0)
    """Cross-entropy against the target's law is `kl` up to a constant: Hydra++'s teacher loss."""

    def __init__(self, config: HydraConfig, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        super().__init__(config, target, draft_ids)
        self.config: HydraConfig = config
        self.prefix_layer: LastRowLayer | None = None
        self.prefix_norm: RMSNorm | None = None
        if config.prefix is not None:
            self.prefix_layer = LastRowLayer(config.prefix)
            self.prefix_norm = RMSNorm(config.width, config.prefix.norm_eps)
            self.entry_width = LastRowLayer.entries_of(config.prefix)
        heads = nn.ModuleList(
            HydraHead(config.width, 2 + depth, config.num_layers, config.dropout) for depth in range(config.num_depths)
        )
        self.heads = cast("Sequence[HydraHead]", heads)
        self.make_heads(config.head, config.width, config.num_depths)
        self.head_bias = nn.Parameter(torch.zeros(config.num_depths, len(self.draft_ids)))
        self._embed = target.backend.embed

    @classmethod
    def configure(cls, target: TargetInfo, changes: Mapping[str, str]) -> HydraConfig:
        changed = read_options(_Changes, changes, "hydra")
        prefix = LayerShape.like(target.backend.spec) if changed.prefix else None
        return HydraConfig(width=target_width(target), **{**dataclasses.asdict(changed), "prefix": prefix})

    @torch.no_grad()
    def initialise(self, target: TargetInfo, generator: torch.Generator) -> None:
        if self.prefix_layer is not None and self.prefix_norm is not None:
            self.prefix_layer.initialise(generator)
            fill_normal(self.prefix_norm, generator, 0.02)
        for head in self.heads:
            head.initialise()
        self.head_bias.zero_()
        self.copy_heads()

    # -- the prefix layer -------------------------------------------------------------------------

    def features(self, hidden_BLD: torch.Tensor) -> torch.Tensor:
        if self.prefix_layer is None or self.prefix_norm is None:
            return hidden_BLD
        return self.prefix_norm(self.prefix_layer(hidden_BLD))

    def entries(self, hidden_RD: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        if self.prefix_layer is None:
            return super().entries(hidden_RD, positions_R)
        return self.prefix_layer.entries(hidden_RD, positions_R)

    def last_features(self, hidden_SD: torch.Tensor, entries: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.prefix_layer is None or self.prefix_norm is None:
            return hidden_SD
        return self.prefix_norm(self.prefix_layer.last(hidden_SD, entries))

    # -- the heads --------------------------------------------------------------------------------

    def begin(self, features_RF: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        return self.advance(-1, features_RF, tokens_R)

    def advance(self, depth: int, state_RW: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        return torch.cat((state_RW, self._embed(tokens_R).to(state_RW.dtype)), dim=-1)

    def logits(self, depth: int, state_RW: torch.Tensor) -> torch.Tensor:
        return self._logits_of(depth, self.heads[depth](state_RW))

    def _logits_of(self, depth: int, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self.unembed(depth, hidden_RD) + self.head_bias[depth]

    def loss(self, batch: TrainingBatch, options: LossOptions) -> LossReport:
        """Each depth's loss against the target's law, what the text says and the target's hidden state, by the weights
        of the configuration. In training mode heads read noisy features and embeddings, where noise is wanted.
        """
        config = self.config
        targets_RD = batch.taps["last_hidden"].flatten(0, 1).to(self.target_head_UD.dtype)
        found, laws = [], self.target_laws(batch)
        for depth, (anchors_A, state_AW) in enumerate(self._noisy_states(batch, options.num_depths)):
            hidden_AD = self.heads[depth](state_AW)
            draft = DepthDraft(anchors=anchors_A, logits_AU=self._logits_of(depth, hidden_AD))
            one = self.depth_loss(batch, depth, draft, options, laws)
            loss = config.teacher_weight * one.loss
            if config.label_weight:
                said_A = batch.tokens_BL.flatten()[anchors_A + 2 + depth]
                loss = loss + config.label_weight * label_loss(draft.logits_AU, self.draft_places_V[said_A])
            if config.feature_weight and len(anchors_A):
                loss = loss + config.feature_weight * F.smooth_l1_loss(hidden_AD, targets_RD[anchors_A + 1 + depth])
            found.append(dataclasses.replace(one, loss=loss))
        return report(found, geometric_weights(len(found), options.decay))

    def _noisy_states(self, batch: TrainingBatch, num_depths: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """`states`, with noise on what the prefix layer or the heads read of the target and on the embeddings."""
        if not self.training or not self.config.noise:
            yield from self.states(batch, num_depths)
            return
        width, longest = self.config.width, batch.tokens_BL.shape[1]
        size_B = self.config.noise / (batch.lengths_B.clamp_min(1) * width).to(torch.float32).sqrt()
        hidden_BLD = batch.taps["last_hidden"]
        taps = {**batch.taps, "last_hidden": hidden_BLD + _uniform(hidden_BLD, size_B[:, None, None])}
        for anchors_A, state_AW in self.states(dataclasses.replace(batch, taps=taps), num_depths):
            features_AD, embedded_AE = state_AW[:, :width], state_AW[:, width:]
            noise_AE = _uniform(embedded_AE, size_B[anchors_A // longest, None])
            yield anchors_A, torch.cat((features_AD, embedded_AE + noise_AE), dim=-1)


def _uniform(like: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Uniform noise from -size to size, drawn from the generator that the trainer seeds for each batch."""
    return ((2 * torch.rand(like.shape) - 1) * size).to(like)


@final
class HydraDrafter(HeadDrafter):
    """Drafts with Hydra or Hydra++ heads: Medusa heads that see the tokens drafted before."""

    Module = HydraModule
    method = "hydra"
