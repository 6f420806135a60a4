"""Model directories of trained decoders: the config and the tokenizer files that make weights a model.

Used by the modules that train whole decoders. Invariant: what is written loads by `open_model` like any model, with the
target's own token ids, special tokens and chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.drafters.base import TargetInfo
from draftsmith.errors import ModelFileError
from draftsmith.io.files import ModelFiles, open_model
from draftsmith.models.spec import FULL, SLIDING, DecoderSpec

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""What other engines call an architecture."""
_NOT_KEPT = (
    "text_config",
    "vision_config",
    "architectures",
    "auto_map",
    "torch_dtype",
    "dtype",
)


def config_like(files: ModelFiles, kept: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """The config of a decoder that has the layers `kept` of a model, and a vocabulary of its own size."""
    spec = DecoderSpec.from_config(files.config)
    inner = files.config.get("text_config")
    given = {**files.config, **(inner if isinstance(inner, Mapping) else {})}
    config = {key: value for key, value in given.items() if key not in _NOT_KEPT}
    config |= {"model_type": spec.architecture, "vocab_size": vocab_size, "num_hidden_layers": len(kept)}
    config["tie_word_embeddings"] = spec.tied_head
    if spec.architecture == "gemma3":
        config["model_type"] = "gemma3_text"
    if spec.window is not None:
        config["layer_types"] = [FULL if spec.layer_windows[layer] is None else SLIDING for layer in kept]
    return config


def finished(config: Mapping[str, Any], target: TargetInfo) -> dict[str, Any]:
    """A config with what the target's vocabulary decides."""
    found = dict(config)
    kind = _CLASSES.get(found["model_type"])
    if kind is not None:
        found["architectures"] = [kind]
    if target.eos_ids:
        found["eos_token_id"] = sorted(target.eos_ids)
    if target.tokenizer is not None and target.tokenizer.bos_id is not None:
        found["bos_token_id"] = target.tokenizer.bos_id
    return found


def tokenizer_texts(target: TargetInfo) -> dict[str, str]:
    """The target's tokenizer files by name, its chat template among them; none for a target without a tokenizer."""
    if target.tokenizer is None:
        return {}
    texts: dict[str, str] = dict(target.tokenizer.as_files())
    template = open_model(target.name).chat_template if target.name else None
    return {**texts, "chat_template.jinja": template} if template else texts


def open_target(target: TargetInfo, why: str) -> ModelFiles:
    """The target's own files. Raises `ModelFileError` for a target that has none."""
    if not target.name:
        raise ModelFileError(f"{why} needs the target's weights, and this target has no files")
    return open_model(target.name)
