"""What is trained for a standalone draft model: a decoder that learns its target's laws (DistillSpec, 2310.08461).

Its directory is a model like any other, so it drafts by `draft_model:model=DIRECTORY`. The student's row t+1+k judges
nothing but x_{t+2+k}: what it drafts at depth k of anchor t. So one forward over right tokens serves all depths, and
the loss counts each row once. Invariant: logits of a whole vocabulary exist a few rows at a time while it learns.

Shape letters: B texts, L rows, N rows, D width of the student, V vocabulary, A anchors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from draftsmith.core.losses import LossReport, head_loss, log_probabilities, loss_named, report
from draftsmith.drafters.base import Tap, TargetInfo
from draftsmith.drafters.decoder import DecoderBody, fill_from, head_rows, make_head
from draftsmith.drafters.draft_layer import fill_normal
from draftsmith.drafters.model_directory import config_like, finished, tokenizer_texts
from draftsmith.drafters.trainable import DepthDraft, DraftModule, Layout, LossOptions, TrainingBatch
from draftsmith.drafters.vocabulary import map_vocabularies
from draftsmith.errors import ModelFileError, OptionError, VocabularyError
from draftsmith.io.files import ModelFiles, open_model
from draftsmith.models.backend import Backend
from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.tokenizer import Tokenizer
from draftsmith.registry import read_options


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """`model`: keys of a Hugging Face config. `init`: the model it begins as, by name, "" for random weights; its layer
    i is that model's layer `layers[i]`.
    """

    model: dict[str, Any]
    init: str = ""
    layers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.layers) not in (0, self.spec.num_layers):
            raise OptionError(f"draft_model: {len(self.layers)} layers to begin as, for {self.spec.num_layers}")

    @functools.cached_property
    def spec(self) -> DecoderSpec:
        """The same decoder as backends read it. Raises `OptionError` for a config that is none."""
        try:
            return DecoderSpec.from_config(self.model)
        except ModelFileError as error:
            raise OptionError(f"draft_model: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """What may be chosen before training. `init`: a model to begin as, `layers` of it taken at even distances, the
    first and the last among them. Without it the sizes count (0: the target's, `mlp_width` in the target's proportion,
    two layers); `tied`: the output matrix is the embedding.
    """

    init: str = ""
    layers: int = 0
    width: int = 0
    heads: int = 0
    kv_heads: int = 0
    mlp_width: int = 0
    tied: bool | None = None

    def __post_init__(self) -> None:
        for item in ("layers", "width", "heads", "kv_heads", "mlp_width"):
            if getattr(self, item) < 0:
                raise OptionError(f"draft_model: {item} is {getattr(self, item)}: at least 1 is needed")


@final
class StudentModule(DraftModule):
    """Weights and loss of a standalone draft model; parameters are named as in its files."""

    Config = StudentConfig
    loss_defaults = LossOptions(decay=1.0, num_depths=4)

    def __init__(self, config: StudentConfig, target: TargetInfo, draft_ids: torch.Tensor | None) -> None:
        if draft_ids is not None:
            raise OptionError("draft_model has the target's whole vocabulary; leave the draft vocabulary out")
        super().__init__(config, target, None)
        self.config: StudentConfig = config
        if config.spec.vocab_size != target.vocab_size:
            raise OptionError(
                f"draft_model: a student of {config.spec.vocab_size} tokens; the target has {target.vocab_size}"
            )
        self.model = DecoderBody(config.spec)
        self.lm_head = make_head(config.spec)

    @classmethod
    def configure(cls, target: TargetInfo, changes: Mapping[str, str]) -> StudentConfig:
        changed: _Changes = read_options(_Changes, changes, "draft_model")
        if not changed.init:
            return StudentConfig(model=_config_of(target, changed))
        given = [name for name in ("width", "heads", "kv_heads", "mlp_width") if getattr(changed, name)]
        given += ["tied"] if changed.tied is not None else []
        if given:
            raise OptionError(
                f"draft_model: {', '.join(given)} cannot be chosen for a student that begins as {changed.init}; "
                "leave them out, or leave init out"
            )
        files = open_model(changed.init)
        _check_vocabulary(files, target)
        num_layers = DecoderSpec.from_config(files.config).num_layers
        if changed.layers > num_layers:
            raise OptionError(f"draft_model: layers is {changed.layers}; {changed.init} has {num_layers}")
        kept = spread_evenly(changed.layers or num_layers, num_layers)
        return StudentConfig(model=config_like(files, kept, target.vocab_size), init=changed.init, layers=kept)

    @torch.no_grad()
    def initialise(self, target: TargetInfo, generator: torch.Generator) -> None:
        if self.config.init:
            files = open_model(self.config.init)
            source = DecoderSpec.from_config(files.config)
            fill_from(self.model, self.lm_head, source, files.load, self.config.layers)
            return
        fill_normal(self, generator, 0.02)
        theirs, own = target.backend.spec, self.config.spec
        if own.width == theirs.width and theirs.embedding_scale == 1 and (theirs.tied_head or not own.tied_head):
            # Words mean what they mean to the target from the first step on. Logits begin small: an embedding that
            # fresh layers barely change would say its own token again, and be sure of it.
            self.model.embed_tokens.weight.copy_(target.backend.embed(torch.arange(own.vocab_size)))
            if self.lm_head is not None:
                self.lm_head.weight.copy_(self.target_head_UD)
            rows_VD = head_rows(self.model, self.lm_head)
            self.model.norm.weight.fill_(own.width**-0.5 / float(rows_VD.norm(dim=-1).mean()))

    @property
    def needs(self) -> frozenset[Tap]:
        return frozenset()

    def depths(self, batch: TrainingBatch, num_depths: int) -> Iterator[DepthDraft]:
        rows_N, hidden_ND = self._judged(batch)
        logits_NV = hidden_ND @ head_rows(self.model, self.lm_head).t()
        cap = self.config.spec.logit_cap
        if cap is not None:
            logits_NV = cap * torch.tanh(logits_NV / cap)
        for depth in range(num_depths):
            anchors_A = batch.anchors(depth)
            places_A = torch.searchsorted(rows_N, anchors_A + 1 + depth)
            # Depth 0 is all rows: the copy is not made.
            yield DepthDraft(anchors=anchors_A, logits_AU=logits_NV[places_A] if depth else logits_NV)

    def loss(self, batch: TrainingBatch, options: LossOptions) -> LossReport:
        """Each row's divergence once: all depths draft the same rows, and a row has one law. Reports one depth."""
        rows_N, hidden_ND = self._judged(batch)

        def judge(places: torch.Tensor) -> torch.Tensor:
            return log_probabilities(self.target_logits(batch, rows_N[places]))

        head_VD, loss = head_rows(self.model, self.lm_head), loss_named(options.loss)
        return report([head_loss(hidden_ND, head_VD, judge, loss, self.config.spec.logit_cap)])

    def _judged(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat rows that draft at depth 0, ascending, those of all deeper ones among them; and their outputs."""
        rows_N = batch.anchors(0) + 1
        return rows_N, self.model(batch.tokens_BL).flatten(0, 1)[rows_N]

    def writer(self) -> Backend:
        tensors = self.state_dict()
        return ReferenceBackend.from_weights(self.config.spec, tensors.__getitem__)

    def layout(self, target: TargetInfo) -> Layout:
        """A model directory."""
        config, texts = finished(self.config.model, target), tokenizer_texts(target)
        return Layout(tensors=self.state_dict(), config=config, texts=texts)


def spread_evenly(count: int, whole: int) -> list[int]:
    """`count` of the numbers 0 to whole - 1 at even distances, the first and the last among them."""
    if count == 1:
        return [0]
    return [round(place * (whole - 1) / (count - 1)) for place in range(count)]


def _config_of(target: TargetInfo, changed: _Changes) -> dict[str, Any]:
    """A Llama of chosen sizes."""
    spec = target.backend.spec
    width = changed.width or spec.width
    num_heads = changed.heads or spec.num_heads
    if width % num_heads or width // num_heads % 2:
        raise OptionError(
            f"draft_model: width {width} over {num_heads} heads; the width must be an even multiple of the heads"
        )
    num_kv_heads = changed.kv_heads or (spec.num_kv_heads if num_heads % spec.num_kv_heads == 0 else num_heads)
    if num_heads % num_kv_heads:
        raise OptionError(f"draft_model: {num_heads} heads over {num_kv_heads} kv_heads; heads must be a multiple")
    return {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": width,
        "intermediate_size": changed.mlp_width or max(1, round(width * spec.mlp_width / spec.width)),
        "num_hidden_layers": changed.layers or 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": width // num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": target.max_context,
        "tie_word_embeddings": True if changed.tied is None else changed.tied,
    }


def _check_vocabulary(files: ModelFiles, target: TargetInfo) -> None:
    """Raise `VocabularyError` unless a model has the target's token ids; rows of padding may differ in number."""
    size = DecoderSpec.from_config(files.config).vocab_size
    tokenizer = None if target.tokenizer is None else Tokenizer.from_data(files.tokenizer)
    shared = map_vocabularies(target.tokenizer, target.vocab_size, tokenizer, size, files.name)
    if not shared.is_identity:
        raise VocabularyError(
            f"draft_model: {files.name} has another vocabulary than the target, and a student begins as a model of the "
            "same one; take another init, or leave it out"
        )
