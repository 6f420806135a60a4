"""AdamW or Muon, with a learning rate that rises, then falls along a cosine.

Called by the trainer. Muon (Jordan 2024; scaled as in 2502.16982) moves matrices by the orthogonal factor of their
momentum; heads over a vocabulary, norms and biases stay with AdamW. Invariant: the rate is a function of
progress alone, so a continued run has the rates of an uninterrupted one; norms and biases are not decayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

BETAS = (0.9, 0.95)
_MOMENTUM = 0.95
_LIKE_ADAMW = 0.2
"""Root mean square of AdamW's usual updates, so that one learning rate suits both (2502.16982, section 2.2)."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Quintic that takes singular values to about 1, from Jordan's Muon; five rounds."""


def rate_factor(step: int, progress: float, warmup_steps: int, floor: float) -> float:
    """The rate of step `step` (from 0) over its peak.

    `progress`: share of the run that is done, 0 to 1. Rises over `warmup_steps`, then falls from 1 to `floor`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def make_optimiser(
    module: nn.Module, lr: float, weight_decay: float, name: str = "adamw", vocabulary: int = 0
) -> torch.optim.Optimizer:
    """The optimiser of a module's trained weights.

    `vocabulary`: rows of a matrix that is a head or an embedding, which Muon leaves to AdamW.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0}
    ]
    if name == "muon":
        hidden = [matrix for matrix in matrices if matrix.ndim == 2 and len(matrix) != vocabulary]
        left = {id(matrix) for matrix in hidden}
        others.insert(0, {"params": [matrix for matrix in matrices if id(matrix) not in left]})
        return Muon(hidden, others, lr=lr, weight_decay=weight_decay)
    others.insert(0, {"params": matrices})
    return torch.optim.AdamW(
        [group for group in others if group["params"]], lr=lr, betas=BETAS, weight_decay=weight_decay, fused=True
    )


class Muon(torch.optim.AdamW):
    """Muon over hidden matrices, AdamW over the rest: one optimiser with one state.

    PyTorch's own works in bfloat16, which costs a factor of three on processors without AMX.
    """

    def __init__(
        self, hidden: Sequence[nn.Parameter], others: Iterable[dict[str, Any]], *, lr: float, weight_decay: float
    ) -> None:
        groups = [{**group, "muon": False} for group in others if group["params"]]
        if hidden:
            groups.insert(0, {"params": list(hidden), "muon": True})
        super().__init__(groups, lr=lr, betas=BETAS, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; `closure` is not supported."""
        assert closure is None
        whole = self.param_groups
        for group in whole:
            if group["muon"]:
                for matrix in group["params"]:
                    self._turn(matrix, group["lr"], group["weight_decay"])
        # AdamW steps over every group it is shown.
        self.param_groups = [group for group in whole if not group["muon"]]
        try:
            if self.param_groups:
                super().step()
        finally:
            self.param_groups = whole

    def _turn(self, matrix: nn.Parameter, lr: float, weight_decay: float) -> None:
        if matrix.grad is None:
            return
        memory = self.state[matrix]
        if not memory:
            # AdamW, whose state this is, looks for a counter everywhere.
            memory.update({"step": torch.zeros(()), "momentum": torch.zeros_like(matrix)})
        memory["step"] += 1
        memory["momentum"].lerp_(matrix.grad, 1 - _MOMENTUM)
        update = orthogonal(matrix.grad.lerp(memory["momentum"], _MOMENTUM))
        matrix.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * _LIKE_ADAMW * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """Nearly U V^T of a matrix's U S V^T [M, N]: singular values between about 0.7 and 1.2."""
    a, b, c = _NEWTON_SCHULZ
    x = matrix.t() if len(matrix) > matrix.shape[1] else matrix
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(rounds):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if len(matrix) > matrix.shape[1] else x
