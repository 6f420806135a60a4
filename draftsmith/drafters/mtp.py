"""Multi-token prediction (DeepSeek-V3, 2412.19437; Qwen3-Next; MiMo): one decoder layer with the target's own ends.

Row t joins the target's last hidden state of row t and the embedding of x_{t+1}, each normed, through one matrix; a
decoder layer and a final norm follow, and the target's head gives the law of x_{t+2}. One layer drafts many tokens by
feeding on its own output. Published families differ in switches, see `VARIANTS`.

Training unrolls K steps with weights beta^k as FastMTP (2509.18362) does, but a row of step k > 0 sees the true rows
before it and its own unrolled ones (EAGLE-3's mask), not the other rows of its step: that is what drafting computes,
since only true rows stay in its cache. FastMTP's plain causal mask per step would train for a cache nobody keeps.
"""

from __future__ import annotations

import dataclasses
import types
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
from draftsmith.drafters.trainable import LossOptions
from draftsmith.errors import OptionError
from draftsmith.registry import read_options


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The switches of a published family, see `MtpConfig`."""

    hidden_first: bool = False
    norm_output: bool = False
    raw_hidden: bool = False


VARIANTS: Mapping[str, Variant] = types.MappingProxyType(
    {
        "deepseek": Variant(),
        "qwen": Variant(norm_output=True),
        "mimo": Variant(hidden_first=True, norm_output=True, raw_hidden=True),
    }
)


@dataclass(frozen=True, kw_only=True)
class MtpConfig(LayerShape):
    """`hidden_first`: the matrix reads [hidden; embedding] (MiMo) instead of [embedding; hidden]. `norm_output`: the
    normed output is fed back (Qwen, MiMo) instead of the raw one (DeepSeek). `raw_hidden`: true rows read the target's
    last hidden state before its final norm (MiMo) instead of after it.
    """

    hidden_first: bool = False
    norm_output: bool = False
    raw_hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """What may be chosen before training. `variant`: whose switches."""

    variant: str = "deepseek"
    mlp_width: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False


@final
class MtpModule(RecurrentModule):
    """Weights of a multi-token prediction layer."""

    Config = MtpConfig
    config: MtpConfig
    loss_defaults = LossOptions(decay=0.6, num_depths=3)

    def __init__(self, config: MtpConfig, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        super().__init__(config, target, draft_ids)
        width, eps = config.width, config.norm_eps
        self.token_norm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = RMSNorm(width, eps)
        self.layer = DraftLayer(config, width)
        self.norm = RMSNorm(width, eps)
        self._taps: tuple[Tap, ...] = (target.backend.spec.num_layers if config.raw_hidden else "last_hidden",)

    @classmethod
    def configure(cls, target: TargetInfo, changes: Mapping[str, str]) -> MtpConfig:
        changed = read_options(_Changes, changes, "mtp")
        if changed.variant not in VARIANTS:
            raise OptionError(f"mtp: unknown variant {changed.variant!r}; known are {', '.join(VARIANTS)}")
        variant = VARIANTS[changed.variant]
        shape = shape_like(target.backend.spec, changed, "qkv_bias", "qk_norm")
        return MtpConfig(**shape, **dataclasses.asdict(variant))

    def initialise(self, target: TargetInfo, generator: torch.Generator) -> None:
        fill_normal(self, generator)

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self._taps

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor) -> Entry:
        both = [self.token_norm(embedded), self.hidden_norm(hidden)]
        if self.config.hidden_first:
            both.reverse()
        joined = self.fc(torch.cat(both, dim=-1))
        return Entry(joined, self.input_layernorm(joined))

    def feedback(self, output: torch.Tensor) -> torch.Tensor:
        return self.norm(output) if self.config.norm_output else output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        return self.target_head(self.norm(output))

    def row_parts(self) -> RowParts:
        return RowParts(
            shape=self.config,
            layer=self.layer,
            draft_ids=self.draft_ids,
            feature_width=self.config.width,
            fuse=self.fc,
            embedding_norm=self.token_norm.weight,
            feature_norm=self.hidden_norm.weight,
            attention_norm=self.input_layernorm.weight,
            final_norm=self.norm.weight,
            logit_cap=self._logit_cap,
            is_feature_first=self.config.hidden_first,
            feeds_normed=self.config.norm_output,
        )


@final
class MtpDrafter(RecurrentDrafter):
    """Drafts with a multi-token prediction layer, as models come with (DeepSeek, Qwen, MiMo)."""

    Module = MtpModule
    method = "mtp"
