"""Medusa-2 (2401.10774): the heads and their target are trained together, so the target becomes a model of its own.

The tuned target lies as a model directory inside the drafter's, which is heads as of Medusa-1. Loss: divergence of the
tuned target from the untuned one (self-distillation), plus the heads' under a schedule; at first the heads learn alone.
Invariant: heads read what the tuned target makes of a text and are judged by its laws, as they will be when they draft.

Shape letters: B texts, L rows, N rows, R rows with a law, D width, V vocabulary, U draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import nn

from draftsmith.core.losses import LossReport, head_loss, log_probabilities, loss_named
from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.checkpoint import TARGET
from draftsmith.drafters.decoder import BODY, HEAD, DecoderBody, fill_from, head_rows, make_head
from draftsmith.drafters.head_drafter import HeadDrafter, HeadOptions
from draftsmith.drafters.heads import target_width
from draftsmith.drafters.lora import add_lora, freeze, merged_tensors
from draftsmith.drafters.medusa import MedusaConfig, MedusaHeads, check_schedule, joint_loss
from draftsmith.drafters.model_directory import config_like, finished, open_target, tokenizer_texts
from draftsmith.drafters.trainable import Layout, LossOptions, TrainingBatch, shift_left
from draftsmith.errors import ModelFileError, OptionError
from draftsmith.models.spec import DecoderSpec
from draftsmith.registry import read_options

TUNE = ("lora", "full")
_BLOCK = 256
"""Rows whose logits over the whole vocabulary are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """`tune`: what is trained of the target: low-rank changes of its linear layers, or all of it. `rank`, `scale`: of
    these changes. `language`: the loss that keeps the target near what it was. `coefficient`, `schedule`: of the heads'
    loss, see `medusa.joint_loss`. `heads_first`: share of the run in which the heads learn alone; the target's learning
    rate then rises over as much. `target_rate`: that rate over the heads'.
    """

    tune: str = "lora"
    rank: int = 16
    scale: float = 2.0
    language: str = "kl"
    coefficient: float = 0.2
    schedule: str = "sine"
    heads_first: float = 0.1
    target_rate: float = 0.25


@dataclass(frozen=True, kw_only=True)
class Medusa2Config(Tuning, MedusaConfig):
    """Heads, and how they were trained together with their target."""

    head: str = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tune not in TUNE:
            raise OptionError(f"tune is {self.tune!r}; allowed: {', '.join(TUNE)}")
        if self.rank < 1:
            raise OptionError(f"rank is {self.rank}: at least 1 is needed")
        for name in ("scale", "coefficient", "target_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise OptionError(f"{name} is {getattr(self, name)}; allowed: above 0")
        if not 0 <= self.heads_first < 1:
            raise OptionError(f"heads_first is {self.heads_first}; allowed: 0 and up to below 1")
        loss_named(self.language)
        check_schedule(self.schedule)


@dataclass(frozen=True, kw_only=True)
class _Changes(Tuning):
    """What may be chosen before training."""

    num_depths: int = 4
    num_layers: int = 1
    head: str = "own"


@final
class Medusa2Module(MedusaHeads):
    """Heads, and while they are trained the target as `backbone`; loaded from a checkpoint it is heads alone."""

    Config = Medusa2Config
    config: Medusa2Config
    tunes_target = True
    untuned_head_VD: torch.Tensor

    def __init__(self, config: Medusa2Config, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        super().__init__(config, target, draft_ids)
        self.backbone: nn.ModuleDict | None = None
        self._model: dict[str, Any] = {}

    @classmethod
    def configure(cls, target: TargetInfo, changes: Mapping[str, str]) -> Medusa2Config:
        changed = read_options(_Changes, changes, "medusa2")
        return Medusa2Config(width=target_width(target), **dataclasses.asdict(changed))

    def initialise(self, target: TargetInfo, generator: torch.Generator) -> None:
        """Heads as of Medusa-1, and the target's own weights to tune. Raises `ModelFileError` for one without files."""
        super().initialise(target, generator)
        files = open_target(target, "medusa2")
        spec = DecoderSpec.from_config(files.config)
        body, head = DecoderBody(spec), make_head(spec)
        fill_from(body, head, spec, files.load, range(spec.num_layers))
        self._model = config_like(files, range(spec.num_layers), spec.vocab_size)
        if self.config.tune == "lora":
            add_lora(body, self.config.rank, self.config.scale, generator)
            if head is not None:
                freeze(head, "weight", head.weight)
        self.backbone = nn.ModuleDict({"model": body} if head is None else {"model": body, "lm_head": head})
        # What the target was: its laws are what the tuned one is held to.
        everything = torch.arange(spec.vocab_size)
        self.register_buffer("untuned_head_VD", target.backend.head_rows(everything), persistent=False)

    def part_of(self, name: str) -> str:
        return "target" if name.startswith("backbone.") else ""

    def rate_factor(self, part: str, progress: float) -> float:
        if not part:
            return 1.0
        first = self.config.heads_first
        risen = 1.0 if first == 0 else min(1.0, max(0.0, progress - first) / first)
        return self.config.target_rate * risen

    # -- the tuned target -------------------------------------------------------------------------

    def _hidden(self, batch: TrainingBatch) -> torch.Tensor:
        """`last_hidden` [B, L, D] of the tuned target."""
        assert self.backbone is not None
        hidden: torch.Tensor = self.backbone["model"](batch.tokens_BL)
        return hidden

    def _head(self) -> torch.Tensor:
        """The tuned target's output matrix [V, D]."""
        assert self.backbone is not None
        body, head = self.backbone["model"], self.backbone["lm_head"] if "lm_head" in self.backbone else None
        assert isinstance(body, DecoderBody) and (head is None or isinstance(head, nn.Linear))
        return head_rows(body, head)

    def _own_rows(self) -> torch.Tensor:
        """Its rows [U, D] of the draft ids."""
        head_VD = self._head()
        return head_VD if len(self.draft_ids) == len(head_VD) else head_VD[self.draft_ids]

    def outputs(self, depth: int, x: torch.Tensor) -> torch.Tensor:
        if self.backbone is None or len(self.lm_heads):
            return super().outputs(depth, x)
        # Heads that say their drafts with the target's matrix do not pull at it.
        return x @ self._own_rows().detach().t()

    @torch.no_grad()
    def target_logits(self, batch: TrainingBatch, rows: torch.Tensor) -> torch.Tensor:
        """The logits [A, U] of whoever made the batch's features: the tuned target, while there is one."""
        if self.backbone is None:
            return super().target_logits(batch, rows)
        head_UD = self._own_rows()
        return self._capped(batch.taps["last_hidden"].flatten(0, 1)[rows].to(head_UD.dtype) @ head_UD.t())

    def as_verified(self, batch: TrainingBatch) -> TrainingBatch:
        if self.backbone is None:
            return batch
        with torch.no_grad():
            return self._seen(batch, self._hidden(batch))

    @torch.no_grad()
    def _seen(self, batch: TrainingBatch, hidden_BLD: torch.Tensor) -> TrainingBatch:
        """The batch with the tuned target's features, likeliest tokens and totals; no gradient goes there."""
        rows = shift_left(batch.answer_BL, 1).flatten().nonzero().squeeze(-1)
        head_VD, hidden_ND = self._head(), hidden_BLD.flatten(0, 1)
        best, log_total = torch.zeros_like(batch.best_BL).flatten(), torch.zeros_like(batch.log_total_BL).flatten()
        for block in torch.split(rows, _BLOCK):
            logits_NV = self._capped(hidden_ND[block] @ head_VD.t()).float()
            best[block] = logits_NV.argmax(dim=-1)
            log_total[block] = torch.logsumexp(logits_NV, dim=-1).to(log_total.dtype)
        return dataclasses.replace(
            batch,
            taps={**batch.taps, "last_hidden": hidden_BLD.detach()},
            best_BL=best.view_as(batch.best_BL),
            log_total_BL=log_total.view_as(batch.log_total_BL),
        )

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._logit_cap is None else self._logit_cap * torch.tanh(logits / self._logit_cap)

    # -- the loss ---------------------------------------------------------------------------------

    def loss(self, batch: TrainingBatch, options: LossOptions) -> LossReport:
        """Heads alone at first; then `medusa.joint_loss`. The report's figures are the heads'."""
        first = self.config.heads_first
        alone = options.progress < first
        with torch.set_grad_enabled(torch.is_grad_enabled() and not alone):
            hidden_BLD = self._hidden(batch)
        seen = self._seen(batch, hidden_BLD)
        laws = self.target_laws(seen)
        # Heads read the tuned target with its gradient, and are judged by it without.
        read = dataclasses.replace(seen, taps={**seen.taps, "last_hidden": hidden_BLD})
        heads = self.judged(read, options, laws)
        if alone:
            return heads
        joint = joint_loss(
            self._language(batch, hidden_BLD),
            heads,
            (options.progress - first) / (1 - first),
            coefficient=self.config.coefficient,
            schedule=self.config.schedule,
        )
        return dataclasses.replace(heads, loss=joint)

    def _language(self, batch: TrainingBatch, hidden_BLD: torch.Tensor) -> torch.Tensor:
        """How far the tuned target's laws are from the untuned one's, a mean over rows that an answer follows."""
        rows = shift_left(batch.answer_BL, 1).flatten().nonzero().squeeze(-1)
        untuned_ND = batch.taps["last_hidden"].flatten(0, 1)[rows]

        def judge(places: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                untuned_VD = self.untuned_head_VD
                return log_probabilities(self._capped(untuned_ND[places].to(untuned_VD.dtype) @ untuned_VD.t()))

        hidden_ND = hidden_BLD.flatten(0, 1)[rows]
        return head_loss(hidden_ND, self._head(), judge, loss_named(self.config.language), self._logit_cap).loss

    # -- on disk ----------------------------------------------------------------------------------

    def layout(self, target: TargetInfo) -> Layout:
        """The heads, and the tuned target beside them."""
        own = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("backbone.")}
        if self.backbone is None:
            return Layout(tensors=own)
        names = {"model": BODY, "lm_head": HEAD.removesuffix("weight")}
        tensors = {
            name: tensor
            for part, prefix in names.items()
            if part in self.backbone
            for name, tensor in merged_tensors(self.backbone[part], prefix)
        }
        model = Layout(tensors=tensors, config=finished(self._model, target), texts=tokenizer_texts(target))
        return Layout(tensors=own, target=model)


@final
class Medusa2Drafter(HeadDrafter):
    """Drafts with the heads of a target that was tuned with them."""

    Module = Medusa2Module
    method = "medusa2"

    @classmethod
    def create(cls, options: HeadOptions, target: TargetInfo) -> Self:
        """Load a checkpoint. Raises `ModelFileError` beside another target than the one it was trained with."""
        own = Path(options.path) / TARGET
        if (
            options.path
            and target.name
            and own.is_dir()
            and not (Path(target.name).exists() and own.samefile(target.name))
        ):
            raise ModelFileError(
                f"{options.path} holds heads of a target that was tuned with them, not of {target.name}; "
                f"take that target: --model {own}"
            )
        return super().create(options, target)
