"""Drafters that come with the package, found by method for the target at hand.

Called by drafters with weights when no directory is named, and by the demo, which shows them. `assets/NAME/` holds one
trained drafter each, as the trainer writes them. Invariant: one is found only for a target of its sizes and of its
very vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.checkpoint import CONFIG, read_config, target_facts
from draftsmith.errors import OptionError
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.spellings import Spellings, vocabulary_digest

ASSETS = Path(__file__).parent.parent / "assets"


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A drafter of the package. `target`, `about`: as its config has them."""

    path: Path
    method: str
    target: Mapping[str, Any]
    about: Mapping[str, Any]

    def suits(self, spec: DecoderSpec, tokenizer: Spellings | None) -> bool:
        """Whether it was trained for such a target."""
        if any(self.target.get(key) != value for key, value in target_facts(spec).items()):
            return False
        digest = self.about.get("tokenizer")
        return digest is None or tokenizer is None or digest == vocabulary_digest(tokenizer)


def shipped_drafters(assets: Path | None = None) -> list[Shipped]:
    """All of them, by name. Raises `ModelFileError` for a broken one."""
    found = []
    for config in sorted((assets or ASSETS).glob(f"*/{CONFIG}")):
        described = read_config(config.parent)
        found.append(
            Shipped(
                path=config.parent,
                method=described["method"],
                target=described["target"],
                about=described["about"],
            )
        )
    return found


def weights_for(path: str, method: str, alike: frozenset[str], target: TargetInfo) -> Path:
    """The directory of a drafter's weights: the one named, or a shipped one when none is. Raises `OptionError`."""
    if path:
        return Path(path)
    known = shipped_drafters()
    for item in known:
        if item.method in {method, *alike} and item.suits(target.backend.spec, target.tokenizer):
            return item.path
    listed = ", ".join(f"{item.method} for {item.target.get('name')}" for item in known)
    raise OptionError(
        f"drafter {method} needs trained weights for this model: write {method}:path=DIRECTORY"
        + (f" (shipped: {listed})" if listed else "")
    )
