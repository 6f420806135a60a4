"""EAGLE-3 (2503.01840): one layer over fused taps of three depths of the target, unrolled on its own outputs.

Row t reads g_t, the three taps of row t through one matrix, and the token x_{t+1}; its output predicts x_{t+2}
and takes g's place in the next row. Training unrolls the same way (training-time test): every row sees true
rows before it and its own unrolled ones, exactly what drafting sees. EAGLE-3.1 differs in two switches.

Shape letters: B texts, L rows, D width, U draft vocabulary, A anchors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from draftsmith.drafters.base import Tap, TargetInfo
from draftsmith.drafters.draft_layer import DraftLayer, LayerShape, RMSNorm, fill_normal, shape_like
from draftsmith.drafters.recurrent import RecurrentDrafter
from draftsmith.drafters.recurrent_module import Entry, RecurrentModule
from draftsmith.drafters.row_parts import RowParts
from draftsmith.errors import OptionError
from draftsmith.registry import read_options


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerShape):
    """`taps`: which layers are fused, as layers applied. `norm_before_residual`: the residual is the normed feature
    (speculators) instead of g itself. `norm_output`: the normed output is fed back (EAGLE-3.1) instead of the raw
    one. `tap_norm`: each tap is normed before it is fused (EAGLE-3.1).
    """

    taps: tuple[int, ...]
    norm_before_residual: bool = False
    norm_output: bool = False
    tap_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "taps", tuple(self.taps))
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise OptionError(f"taps are {self.taps}: rising numbers of layers applied are needed")


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """What may be chosen before training. `taps`: written 2-15-27."""

    taps: str = ""
    mlp_width: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    norm_before_residual: bool = False
    norm_output: bool = False
    tap_norm: bool = False


@final
class Eagle3Module(RecurrentModule):
    """Weights of EAGLE-3."""

    Config = Eagle3Config
    config: Eagle3Config
    drafts_with_target_head = False

    def __init__(self, config: Eagle3Config, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        super().__init__(config, target, draft_ids)
        width, target_width, eps = config.width, target.backend.spec.width, config.norm_eps
        self.fc = nn.Linear(len(config.taps) * target_width, width, bias=False)
        self.tap_norms = nn.ModuleList(RMSNorm(target_width, eps) for _ in config.taps if config.tap_norm)
        self.input_layernorm = RMSNorm(target_width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.layer = DraftLayer(config, target_width + width)
        self.norm = RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, len(self.draft_ids), bias=False)

    @classmethod
    def configure(cls, target: TargetInfo, changes: Mapping[str, str]) -> Eagle3Config:
        spec = target.backend.spec
        changed = read_options(_Changes, changes, "eagle3")
        shape = shape_like(spec, changed)
        if changed.taps:
            try:
                taps = tuple(int(part) for part in changed.taps.split("-"))
            except ValueError as error:
                raise OptionError(f"eagle3: taps is {changed.taps!r}; write layers applied, like 2-15-27") from error
        else:
            # Those of the paper's code, and distinct ones where the target is too shallow for them.
            depth = spec.num_layers
            taps = tuple(sorted({min(2, depth), depth // 2, max(depth - 3, 0)}))
        if taps[-1] > spec.num_layers:
            raise OptionError(f"eagle3: tap {taps[-1]} is beyond the target's {spec.num_layers} layers")
        return Eagle3Config(
            **shape,
            taps=taps,
            norm_before_residual=changed.norm_before_residual,
            norm_output=changed.norm_output,
            tap_norm=changed.tap_norm,
        )

    def initialise(self, target: TargetInfo, generator: torch.Generator) -> None:
        fill_normal(self, generator)
        if self.lm_head.weight.shape == self.target_head_UD.shape:
            # The target's own rows: drafts begin with its geometry instead of having to find it.
            with torch.no_grad():
                self.lm_head.weight.copy_(self.target_head_UD)

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self.config.taps

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """g [.., D] from the taps side by side [.., taps * target width]."""
        if self.tap_norms:
            parts = features.chunk(len(self.tap_norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], dim=-1)
        return self.fc(features)

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor) -> Entry:
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        return Entry(normed if self.config.norm_before_residual else hidden, both)

    def feedback(self, output: torch.Tensor) -> torch.Tensor:
        return self.norm(output) if self.config.norm_output else output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(output))

    def row_parts(self) -> RowParts:
        taps: list[torch.Tensor] = [norm.weight for norm in self.tap_norms if isinstance(norm, RMSNorm)]
        return RowParts(
            shape=self.config,
            layer=self.layer,
            draft_ids=self.draft_ids,
            feature_width=self.fc.in_features,
            reduce=self.fc,
            tap_norms=torch.cat(taps) if taps else None,
            embedding_norm=self.input_layernorm.weight,
            feature_norm=self.hidden_norm.weight,
            final_norm=self.norm.weight,
            head_UD=self.lm_head.weight,
            norms_residual=self.config.norm_before_residual,
            feeds_normed=self.config.norm_output,
        )


@final
class Eagle3Drafter(RecurrentDrafter):
    """Drafts with EAGLE-3: one decoder layer over features of three depths of the target."""

    Module = Eagle3Module
    method = "eagle3"
