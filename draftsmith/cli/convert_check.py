"""Whether an imported drafter drafts what its target says: a misread checkpoint is silent everywhere else.

Called by `cli.convert`. The target answers a few prompts of ours greedily, and at every position of its answers the
drafter is asked for one token. A drafter that fits has half of them right or more; one that reads the wrong layers has
a fifth; one of another target has none. For EAGLE-3 the other reading of layer ids is tried when the first does badly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.drafters.checkpoint import Checkpoint, build_module, config_of
from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.drafters.base import TargetInfo
    from draftsmith.engine.loading import LoadedModel
    from draftsmith.training.features import MaskedText

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain step by step how to bake a loaf of bread.",
    "Write a Python function that counts the words of a file.",
)
ANSWER_TOKENS = 40
LOW = 0.25
"""First-token acceptance below which something is probably misread."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """`accepted` of `positions` first drafts were the target's own token. `others`: the same with other taps."""

    positions: int
    accepted: int
    taps: tuple[int, ...] | None
    others: dict[tuple[int, ...], int]

    @property
    def share(self) -> float:
        """First-token acceptance."""
        return self.accepted / self.positions

    @property
    def warnings(self) -> list[str]:
        """What to look at, if anything."""
        if self.share >= LOW:
            return []
        found = [
            f"only {100 * self.share:.0f} % of first drafts are the target's; 50 to 90 % are usual. Is this the target "
            "it was trained for, and was it trained on chat like this?"
        ]
        better = [taps for taps, hits in self.others.items() if hits > max(2 * self.accepted, LOW * self.positions)]
        if better:
            taps = max(better, key=lambda each: self.others[each])
            written = "-".join(map(str, taps))
            found.append(
                f"with taps {written} it would be {100 * self.others[taps] / self.positions:.0f} %: convert again with "
                f"--set taps={written}"
            )
        return found

    def line(self) -> str:
        """One line for people."""
        return f"{self.accepted} of {self.positions} first drafts are the target's own token ({100 * self.share:.0f} %)"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"positions": self.positions, "accepted": self.accepted, "share": self.share}


def check_drafter(checkpoint: Checkpoint, model: str, *, backend: str, threads: int | None) -> Checked:
    """Load the target and try the drafter on text the target writes. Raises `DraftsmithError`s."""
    from draftsmith.cli.train import target_info
    from draftsmith.engine.loading import load_model

    loaded = load_model(model, backend=backend, threads=threads)
    target = target_info(loaded, lambda name: load_model(name, backend=backend, threads=threads))
    texts = written_texts(loaded)
    taps = getattr(config_of(checkpoint), "taps", None)
    accepted, positions = _first_drafts(checkpoint, target, texts)
    others: dict[tuple[int, ...], int] = {}
    if taps is not None and accepted < LOW * positions:
        for other in (tuple(tap - 1 for tap in taps), tuple(tap + 1 for tap in taps)):
            if other[0] >= 0 and other[-1] <= target.backend.spec.num_layers:
                config = {**checkpoint.config, "taps": other}
                others[other], _ = _first_drafts(dataclasses.replace(checkpoint, config=config), target, texts)
    return Checked(positions=positions, accepted=accepted, taps=taps, others=others)


def written_texts(loaded: LoadedModel) -> list[MaskedText]:
    """The target's greedy answers to `PROMPTS`. Raises `DraftsmithError` when it says nothing."""
    import torch

    from draftsmith.engine.engine import Engine, EngineSettings
    from draftsmith.training.features import MaskedText

    engine = Engine(loaded, EngineSettings(drafter="none", max_batch=len(PROMPTS), prefix_cache=False))
    asked = [text if loaded.chat is None else [{"role": "user", "content": text}] for text in PROMPTS]
    prompts = [engine.encode(prompt) for prompt in asked]
    results = engine.generate(prompts, max_new_tokens=ANSWER_TOKENS, temperature=0.0)
    found = []
    for prompt, result in zip(prompts, results, strict=True):
        tokens = torch.tensor([*prompt, *result.token_ids])
        if len(result.token_ids) > 2:
            found.append(MaskedText(tokens=tokens, answer=torch.arange(len(tokens)) >= len(prompt)))
    if not found:
        raise DraftsmithError(f"{loaded.name} answers with next to nothing, so there is nothing to draft")
    return found


def _first_drafts(checkpoint: Checkpoint, target: TargetInfo, texts: Sequence[MaskedText]) -> tuple[int, int]:
    """How many first drafts are right, and how many there are."""
    from draftsmith.drafters.rank_accuracy import rank_accuracies
    from draftsmith.training.features import TargetScorer, collate

    module = build_module(checkpoint, target).eval().requires_grad_(False)
    batch = collate(texts, TargetScorer(target.backend, module.needs).score(texts))
    positions = len(batch.anchors(0))
    share = rank_accuracies(module, [batch], 1, 1)[0][0]
    return round(share * positions), positions
