"""AdamW with a learning rate that rises, then falls along a cosine.

Called by the trainer. Invariant: the rate is a function of progress alone, so a continued run has the rates of an
uninterrupted one; norms and biases are not decayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BETAS = (0.9, 0.95)


def rate_factor(step: int, progress: float, warmup_steps: int, floor: float) -> float:
    """The rate of step `step` (from 0) over its peak.

    `progress`: share of the run that is done, 0 to 1. Rises over `warmup_steps`, then falls from 1 to `floor`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def make_optimiser(
    module: nn.Module, lr: float, weight_decay: float, part_of: Callable[[str], str] = lambda name: ""
) -> torch.optim.AdamW:
    """AdamW over a module's trained weights, matrices decayed.

    `part_of`: the part of the module that a weight's name belongs to; each group names its `part`.
    """
    parts: dict[str, list[nn.Parameter]] = {}
    for key, parameter in module.named_parameters():
        if parameter.requires_grad:
            parts.setdefault(part_of(key), []).append(parameter)
    groups: list[dict[str, Any]] = []
    for part, trained in parts.items():
        matrices = [parameter for parameter in trained if parameter.ndim > 1]
        rest = [parameter for parameter in trained if parameter.ndim <= 1]
        groups.append({"params": matrices, "weight_decay": weight_decay, "part": part})
        groups.append({"params": rest, "weight_decay": 0.0, "part": part})
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=BETAS, fused=True)
