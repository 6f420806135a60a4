"""The MLP speculator as IBM writes it and vLLM reads it: `speculator.emb`, `.proj`, `.ln` and `.head` by stage.

Tied checkpoints may hold index 0 alone (and projection 1): every other index is a copy. vLLM's class ties all but the
heads, so heads are written for every stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, final

import torch

from draftsmith.dialects.dialect import Choices, Described, Dialect, Note, Spelling, Target, check_size
from draftsmith.dialects.llama_layer import config_fields
from draftsmith.dialects.published import Published
from draftsmith.drafters.checkpoint import Checkpoint, config_of
from draftsmith.drafters.mlp_speculator import MlpSpeculatorConfig
from draftsmith.errors import ModelFileError, UnsupportedError

_PREFIX = "speculator."
_BARE = re.compile(r"(emb|proj|ln|head)\.\d+\.(weight|bias)")


@final
class MlpSpeculator(Dialect):
    """IBM's spelling."""

    name = "mlp-speculator"
    title = "MLP speculator (IBM, vLLM)"
    methods = ("mlp_speculator",)

    def recognises(self, published: Published) -> bool:
        if published.config.get("model_type") == "mlp_speculator":
            return True
        return {f"{_PREFIX}emb.0.weight", f"{_PREFIX}proj.0.weight"} <= published.names

    def prepare(self, published: Published) -> Published:
        return published.renamed({name: _PREFIX + name for name in published.names if _BARE.fullmatch(name)})

    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        where, given = str(published.path), published.config
        for key in ("emb_dim", "vocab_size", "n_predict"):
            if type(given.get(key)) is not int:
                raise ModelFileError(f"{where}: config key {key!r} is {given.get(key)!r}; a whole number is needed")
        for key in ("inner_dim", "tie_weights", "scale_input"):
            if not isinstance(given.get(key, 0), int):
                raise UnsupportedError(f"{where}: {key!r} is {given[key]!r}, of another kind of speculator")
        check_size(published, "emb_dim", given["emb_dim"], target.spec.width, "width", target)
        check_size(published, "vocab_size", given["vocab_size"], target.spec.vocab_size, "vocabulary", target)
        fields = {
            "width": given["emb_dim"],
            "inner_width": given.get("inner_dim") or given["emb_dim"],
            "num_depths": given["n_predict"],
            "tied": bool(given.get("tie_weights", False)),
            "scale_input": bool(given.get("scale_input", False)),
        }
        config = config_fields(MlpSpeculatorConfig, fields, choices.changes, where)
        return Described(config=config, notes=tuple(_notes(config)))

    def spelling(self, config: Any, native: Iterable[str], target: Target) -> Spelling:
        stages = range(config.num_depths)
        names: dict[str, tuple[str, ...]] = {}
        aliases: dict[str, tuple[str, ...]] = {}
        for name in native:
            kind, place, part = name.removeprefix("lm_").replace("heads.", "head.").split(".")
            of_stages = [f"{_PREFIX}{kind}.{stage}.{part}" for stage in stages]
            if not config.tied or (kind == "proj" and place == "0"):
                names[name] = (of_stages[int(place)],)
            elif kind == "head":
                names[name], aliases[name] = tuple(of_stages), tuple(of_stages[1:])
            else:
                first = int(place)
                names[name], aliases[name] = (of_stages[first],), tuple(of_stages[first + 1 :])
        return Spelling(names=names, aliases=aliases)

    def vocabulary(self, checkpoint: Checkpoint, vocab_size: int) -> dict[str, torch.Tensor]:
        if "draft_ids" in checkpoint.tensors:
            raise UnsupportedError(
                f"{self.name} has no draft vocabulary: a drafter for it is trained without --draft-vocab"
            )
        return {}

    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        native: MlpSpeculatorConfig = config_of(checkpoint)
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": target.spec.vocab_size,
            "emb_dim": native.width,
            "inner_dim": native.inner_width,
            "n_predict": native.num_depths,
            "top_k_tokens_per_head": [max(1, 5 - stage) for stage in range(native.num_depths)],
            "n_candidates": 5,
            "tie_weights": native.tied,
            "scale_input": native.scale_input,
        }
        return config, _notes(native)


def _notes(config: MlpSpeculatorConfig) -> list[Note]:
    tied = "shared by all but the first projection" if config.tied else "of each its own"
    scaled = "normed and divided by sqrt 2 first" if config.scale_input else "as it is"
    return [
        Note("stages", f"{config.num_depths}, weights {tied}; the embeddings are its own"),
        Note("features", f"the target's last hidden state after its final norm, {scaled}"),
    ]
