"""The model card that a trained drafter carries: what it is, of what data, how good, made by which command.

Called by `training.run` at the end of a run. Invariant: every figure is one that the run measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.training.settings import TrainingSettings


def model_card(settings: TrainingSettings, facts: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """Markdown. `facts`: see `training.run`; `figures`: the validation of the weights that were kept, may be empty."""
    lines = [
        f"# {settings.output.name}",
        "",
        *_what(settings, facts),
        "",
        f'    draftsmith generate --model {facts["verified_by"]} --drafter {facts["drafter"]} "..."',
        "",
        "| | |",
        "|---|---|",
        f"| weights | {facts['parameters']:,} in {settings.dtype} |",
        f"| draft vocabulary | {facts['draft_vocab']:,} of {facts['vocab_size']:,} tokens |",
        f"| texts | {facts['texts']:,} of `{settings.data}`, {facts['text_tokens']:,} tokens |",
        f"| trained | {facts['steps']:,} steps, {facts['tokens']:,} tokens, {facts['seconds'] / 60:.0f} minutes |",
        f"| loss | {facts['loss']}, {facts['depths']} depths, weight {facts['decay']} per depth |",
        "",
    ]
    if figures:
        lines += ["## Validation", "", *_validation(figures, facts)]
    lines += ["## Made by", "", "    draftsmith train recipe.yaml", "", "with the `recipe.yaml` beside this file.", ""]
    return "\n".join(lines)


def _what(settings: TrainingSettings, facts: Mapping[str, Any]) -> list[str]:
    if facts["verified_by"] == settings.model:
        return [
            f"A `{settings.method}` drafter for `{settings.model}`, trained with Draftsmith. It changes no token of "
            "what the target writes; it makes writing faster where its drafts are right."
        ]
    return [
        f"A model and its `{settings.method}` drafter, trained together with Draftsmith from `{settings.model}`. The "
        f"model is one of its own: what it writes is not what `{settings.model}` writes. The drafter changes no token "
        "of that; how much it gains is told against the plain run of the same model."
    ]


def _validation(figures: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    depths = range(len(figures["accuracy"]))
    return [
        f"On {facts['validation_texts']} texts that were not trained on, after step {figures['step']}:",
        "",
        f"- {figures['greedy_tokens_per_step']:.2f} tokens per step at temperature 0, chains of {len(depths)} drafts "
        f"({figures['replayed_tokens']:,} tokens replayed)",
        f"- {figures['sampled_tokens_per_step']:.2f} tokens per step at temperature 1, forecast from the overlaps",
        f"- calibration error of the likeliest draft: {figures['calibration_error']:.3f}",
        *(
            [f"- the model's likeliest token is that of the model it comes from at {figures['agreement']:.3f} of rows"]
            if facts["tuned"]
            else []
        ),
        *(
            [f"- {facts['live']:.2f} tokens per step measured through the engine on its own greedy answers"]
            if facts.get("live")
            else []
        ),
        "",
        "| depth | " + " | ".join(str(depth) for depth in depths) + " |",
        "|---|" + "---|" * len(depths),
        "| accuracy | " + " | ".join(f"{figures['accuracy'][depth]:.3f}" for depth in depths) + " |",
        "| overlap | " + " | ".join(f"{figures['overlap'][depth]:.3f}" for depth in depths) + " |",
        "",
    ]
