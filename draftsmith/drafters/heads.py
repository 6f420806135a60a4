"""What the head families share: a module that drafts from the target's last row, depth by depth.

A head reads features of the last scored row (of x_0 .. x_t) and the tokens after it, and drafts x_{t+2+depth}; what it
carries from depth to depth is one row of numbers per node, its *state*. Medusa, Hydra, the MLP speculator and
Gloeckle's heads differ in three functions (`begin`, `logits`, `advance`); training and inference call the same three.

Shape letters: B texts, L rows, R rows of any kind, S sequences, K depths, D target width, F features, W state,
E entries kept of a row, U draft vocabulary, A anchors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, cast

import torch
from torch import nn

from draftsmith.drafters.base import Tap, TargetInfo
from draftsmith.drafters.trainable import DepthDraft, DraftModule, TrainingBatch, shift_left
from draftsmith.errors import OptionError

HEADS = ("target", "shared", "own")
"""Output matrices: the target's rows, frozen; one trained matrix for all depths; one per depth."""


MOST_PARTS = 64
"""Heads, and blocks of a head: more are a slip of the pen, and would be made before anybody asks for memory."""


def check_count(name: str, count: int) -> None:
    """Raises `OptionError` for fewer than one or too many of something."""
    if not 1 <= count <= MOST_PARTS:
        raise OptionError(f"{name} is {count}; allowed: 1 to {MOST_PARTS}")


def check_heads(num_depths: int, head: str) -> None:
    """Raises `OptionError` for what no family can be made of."""
    check_count("num_depths", num_depths)
    if head not in HEADS:
        raise OptionError(f"head is {head!r}; allowed: {', '.join(HEADS)}")


class HeadModule(DraftModule):
    """Weights of one head family; `config.num_depths` tokens are drafted at most."""

    needs_ranks = True
    independent: ClassVar[bool] = False
    """Drafted tokens are not looked at: all depths follow from the features at once."""
    entry_width: int = 0
    """Numbers kept of every row of a sequence (keys and values of layers of its own), E."""

    def make_heads(self, head: str, width: int, num_depths: int) -> None:
        """Room for the output matrices, [U, width] each."""
        count = {"target": 0, "shared": 1, "own": num_depths}[head]
        matrices = nn.ModuleList(nn.Linear(width, len(self.draft_ids), bias=False) for _ in range(count))
        self.lm_heads = cast("Sequence[nn.Linear]", matrices)
        self._target_outputs: nn.Module | None = None

    @torch.no_grad()
    def copy_heads(self) -> None:
        """Start trained output matrices from the target's rows, where widths agree."""
        for matrix in self.lm_heads:
            if matrix.weight.shape == self.target_head_UD.shape:
                matrix.weight.copy_(self.target_head_UD)

    def outputs(self, depth: int, x: torch.Tensor) -> torch.Tensor:
        """Products [.., U] of a depth's output matrix."""
        if len(self.lm_heads):
            return self.lm_heads[min(depth, len(self.lm_heads) - 1)](x)
        return x @ self.target_head_UD.t() if self._target_outputs is None else self._target_outputs(x)

    def draft_by(self, target_outputs: nn.Module) -> None:
        """Take the target's output rows from elsewhere from now on."""
        self._target_outputs = target_outputs

    def unembed(self, depth: int, x: torch.Tensor) -> torch.Tensor:
        """Logits [.., U], under the target's soft cap if it has one."""
        logits = self.outputs(depth, x)
        return logits if self._logit_cap is None else self._logit_cap * torch.tanh(logits / self._logit_cap)

    @property
    def num_depths(self) -> int:
        """Tokens that can be drafted in a row."""
        count: int = self.config.num_depths
        return count

    @property
    def most_depths(self) -> int:
        return self.num_depths

    @property
    def needs(self) -> frozenset[Tap]:
        return frozenset({"last_hidden"})

    # -- rows of its own (families with attention override these) ---------------------------------

    def features(self, hidden_BLD: torch.Tensor) -> torch.Tensor:
        """Features [B, L, F] of every row of whole texts, from the target's `last_hidden`."""
        return hidden_BLD

    def entries(self, hidden_RD: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """What is kept [R, E] of rows at these positions."""
        return hidden_RD.new_empty(len(hidden_RD), 0)

    def last_features(self, hidden_SD: torch.Tensor, entries: Sequence[torch.Tensor]) -> torch.Tensor:
        """Features [S, F] of each sequence's last row, from it and the entries [rows, E] of all its rows."""
        return hidden_SD

    # -- the family -------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, features_RF: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        """State [R, W] of roots: features of row t and x_{t+1}."""

    @abstractmethod
    def logits(self, depth: int, state_RW: torch.Tensor) -> torch.Tensor:
        """Draft logits [R, U] of what comes `depth` tokens below the roots' children."""

    def advance(self, depth: int, state_RW: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        """State of children: their parents' state, whose depth is given, and their own tokens."""
        return state_RW

    def all_logits(self, num_depths: int, state_RW: torch.Tensor) -> torch.Tensor:
        """Logits [K, R, U] of independent heads."""
        return torch.stack([self.logits(depth, state_RW) for depth in range(num_depths)])

    # -- training ---------------------------------------------------------------------------------

    def states(self, batch: TrainingBatch, num_depths: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per depth the anchors [A] and their states [A, W], right tokens fed."""
        num_depths = min(num_depths, self.num_depths)
        anchors = [batch.anchors(depth) for depth in range(num_depths)]
        rows = torch.cat(anchors).unique()  # ascending; a row may be an anchor at one depth and not at another
        hidden_BLD = batch.taps["last_hidden"].to(self.target_head_UD.dtype)
        features_RF = self.features(hidden_BLD).flatten(0, 1)[rows]
        tokens = [shift_left(batch.tokens_BL, 1 + depth).flatten()[rows] for depth in range(num_depths)]
        state_RW = self.begin(features_RF, tokens[0])
        for depth, anchors_A in enumerate(anchors):
            if depth:
                state_RW = self.advance(depth - 1, state_RW, tokens[depth])
            yield anchors_A, state_RW[torch.searchsorted(rows, anchors_A)]

    def depths(self, batch: TrainingBatch, num_depths: int) -> Iterator[DepthDraft]:
        for depth, (anchors_A, state_AW) in enumerate(self.states(batch, num_depths)):
            yield DepthDraft(anchors=anchors_A, logits_AU=self.logits(depth, state_AW))


def target_width(target: TargetInfo) -> int:
    """D."""
    return target.backend.spec.width
