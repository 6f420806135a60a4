"""Multi-token heads of Gloeckle et al. (2404.19737): independent decoder layers side by side on the target's output.

Head k is one decoder layer over all h up to t, with keys and values of its own, and drafts x_{t+2+k}; all share the
target's output matrix. (The paper counts the target's own next-token head as its first.) The heads read the target's
normed last hidden state, so that a head whose layer does nothing says what the target says.

Shape letters: B texts, L rows, R rows of any kind, S sequences, D width, K depths, F = K D features, E entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import nn

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.draft_layer import LayerShape
from draftsmith.drafters.head_drafter import HeadDrafter
from draftsmith.drafters.heads import HeadModule, check_heads
from draftsmith.drafters.last_row import LastRowLayer
from draftsmith.drafters.trainable import DepthDraft, LossOptions, TrainingBatch
from draftsmith.registry import read_options


@dataclass(frozen=True, kw_only=True)
class GloeckleConfig(LayerShape):
    """The shape of every head's layer. `head`: see `heads.HEADS`; the paper's is the target's, shared."""

    num_depths: int = 3
    head: str = "target"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.num_depths, self.head)


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """What may be chosen before training; 0 leaves the target's own proportions."""

    num_depths: int = 3
    head: str = "target"
    mlp_width: int = 0


@final
class GloeckleModule(HeadModule):
    """Weights and training of the heads; the state is what all layers have put out, side by side."""

    Config = GloeckleConfig
    independent = True
    loss_defaults = LossOptions(decay=1.0)

    def __init__(self, config: GloeckleConfig, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        super().__init__(config, target, draft_ids)
        self.config: GloeckleConfig = config
        layers = nn.ModuleList(LastRowLayer(config) for _ in range(config.num_depths))
        self.layers = cast("Sequence[LastRowLayer]", layers)
        self.make_heads(config.head, config.width, config.num_depths)
        self._layer_entries: int = LastRowLayer.entries_of(config)
        self.entry_width = config.num_depths * self._layer_entries

    @classmethod
    def configure(cls, target: TargetInfo, changes: Mapping[str, str]) -> GloeckleConfig:
        changed = read_options(_Changes, changes, "gloeckle")
        shape = dataclasses.asdict(LayerShape.like(target.backend.spec))
        shape["mlp_width"] = changed.mlp_width or shape["mlp_width"]
        return GloeckleConfig(**shape, num_depths=changed.num_depths, head=changed.head)

    def initialise(self, target: TargetInfo, generator: torch.Generator) -> None:
        for layer in self.layers:
            layer.initialise(generator)
        self.copy_heads()

    def features(self, hidden_BLD: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(hidden_BLD) for layer in self.layers], dim=-1)

    def entries(self, hidden_RD: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer.entries(hidden_RD, positions_R) for layer in self.layers], dim=-1)

    def last_features(self, hidden_SD: torch.Tensor, entries: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [rows.split(self._layer_entries, dim=-1) for rows in entries]
        outputs = [layer.last(hidden_SD, [part[place] for part in parts]) for place, layer in enumerate(self.layers)]
        return torch.cat(outputs, dim=-1)

    def begin(self, features_RF: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        return features_RF

    def logits(self, depth: int, state_RW: torch.Tensor) -> torch.Tensor:
        width = self.config.width
        return self.unembed(depth, state_RW[:, depth * width : (depth + 1) * width])

    def all_logits(self, num_depths: int, state_RW: torch.Tensor) -> torch.Tensor:
        if self.config.head == "own":
            return super().all_logits(num_depths, state_RW)
        # One output matrix for all depths is read once.
        hidden_RKD = state_RW.unflatten(-1, (self.num_depths, -1))
        return self.unembed(0, hidden_RKD[:, :num_depths].transpose(0, 1))

    def depths(self, batch: TrainingBatch, num_depths: int) -> Iterator[DepthDraft]:
        """Head after head, so that one head's activations need not wait for another's."""
        hidden_BLD = batch.taps["last_hidden"].to(self.target_head_UD.dtype)
        for depth, layer in enumerate(self.layers[: min(num_depths, self.num_depths)]):
            anchors = batch.anchors(depth)
            yield DepthDraft(anchors=anchors, logits_AU=self.unembed(depth, layer(hidden_BLD).flatten(0, 1)[anchors]))


@final
class GloeckleDrafter(HeadDrafter):
    """Drafts with Gloeckle's heads: a transformer layer per position, over one shared output head."""

    Module = GloeckleModule
    method = "gloeckle"
