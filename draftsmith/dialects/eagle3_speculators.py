"""EAGLE-3 as the speculators library writes it: the layer's config nested, the layer under `layers.0.`.

The embedding is usually a copy of the target's and is checked against it. Layer ids count layers applied. Where
`norm_before_residual` is left out vLLM takes it as true, and so do we; `norm_output` means that the normed output is
fed back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from draftsmith.dialects.dialect import Choices, Described, Note, Target
from draftsmith.dialects.eagle3 import IDS, SWITCHES, Eagle3Dialect, check_width, describe_eagle3, switch_notes
from draftsmith.dialects.layer_ids import ids_of
from draftsmith.dialects.llama_layer import layer_config
from draftsmith.dialects.published import Published
from draftsmith.drafters.checkpoint import Checkpoint, config_of
from draftsmith.drafters.eagle3 import Eagle3Config
from draftsmith.errors import ModelFileError

_LAYER = "transformer_layer_config"
_WHEN_LEFT_OUT = {"norm_before_residual": True, "norm_output": False, "fc_norm": False}


@final
class Eagle3Speculators(Eagle3Dialect):
    """The speculators library's spelling."""

    name = "eagle3-speculators"
    title = "EAGLE-3 (speculators, vLLM)"
    layer_prefix = "layers.0."

    def recognises(self, published: Published) -> bool:
        return published.config.get("speculators_model_type") == "eagle3"

    def describe(self, published: Published, target: Target, choices: Choices) -> Described:
        given = published.config
        layer = given.get(_LAYER)
        if not isinstance(layer, Mapping):
            raise ModelFileError(f"{published.path}: config key {_LAYER!r} must be an object")
        switches = {key: given.get(key) for key in SWITCHES}
        for key, value in switches.items():
            if value is None:
                switches[key] = _WHEN_LEFT_OUT[key]
            elif not isinstance(value, bool):
                raise ModelFileError(f"{published.path}: config key {key!r} is {value!r}; true or false is needed")
        convention = "applied" if choices.layer_ids == "auto" else choices.layer_ids
        found = {key: bool(value) for key, value in switches.items()}
        return describe_eagle3(published, target, choices, layer, found, (given.get(IDS), convention))

    def config(self, checkpoint: Checkpoint, target: Target, choices: Choices) -> tuple[dict[str, Any], list[Note]]:
        native: Eagle3Config = config_of(checkpoint)
        ids = checkpoint.tensors.get("draft_ids")
        check_width(native, target)
        written, note = ids_of(native.taps, "applied")
        architecture = target.files.config.get("architectures")
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": choices.num_draft,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        config = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {
                    "name_or_path": target.name,
                    "architectures": architecture if isinstance(architecture, list) else [],
                },
            },
            _LAYER: layer_config(native, target.spec.vocab_size, target.spec.max_context),
            "draft_vocab_size": target.spec.vocab_size if ids is None else len(ids),
            "target_hidden_size": None,
            "norm_before_residual": native.norm_before_residual,
            "norm_output": native.norm_output,
            "norm_before_fc": False,
            "fc_norm": native.tap_norm,
            "tie_word_embeddings": False,
            IDS: written,
        }
        verifier = Note("verifier", f"{target.name}, which is what `vllm serve DIR` would load as the target")
        return config, [note, *switch_notes(native), verifier]
