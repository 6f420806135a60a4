"""Low-rank changes of frozen linear layers (LoRA, 2106.09685), and freezing so that states on disk stay small.

Used where a whole target is tuned. Invariant: what is frozen is no parameter and is in no state; `merged_tensors` is
the module as if it had been trained whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
import torch.nn.functional as F
from torch import nn


@final
class LoraLinear(nn.Module):
    """W x + b + scale * B (A x), of which A [rank, inputs] and B [outputs, rank] are trained; B begins as zero."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, frozen: nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = frozen.weight.shape
        bias: torch.Tensor | None = frozen.bias
        self.scale = scale
        self.register_buffer("weight", frozen.weight.detach(), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        down = torch.randn(rank, inputs, generator=generator, dtype=torch.float32) * (3 * inputs) ** -0.5
        self.lora_a = nn.Parameter(down.to(frozen.weight.dtype))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank, dtype=frozen.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    def merged(self) -> torch.Tensor:
        """The one matrix that does the same."""
        return self.weight + self.scale * (self.lora_b @ self.lora_a)


def add_lora(module: nn.Module, rank: int, scale: float, generator: torch.Generator) -> None:
    """Give every linear layer inside a module a low-rank change, and freeze all the rest."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, LoraLinear(child, rank, scale, generator))
        else:
            add_lora(child, rank, scale, generator)
    for name, parameter in list(module.named_parameters(recurse=False)):
        freeze(module, name, parameter)


def freeze(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """Make a parameter a buffer that is not saved."""
    delattr(module, name)
    module.register_buffer(name, parameter.detach(), persistent=False)


@torch.no_grad()
def merged_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by name, frozen ones too, low-rank changes added in."""
    if isinstance(module, LoraLinear):
        yield f"{prefix}weight", module.merged()
        if module.bias is not None:
            yield f"{prefix}bias", module.bias
        return
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield f"{prefix}{name}", tensor
    for name, child in module.named_children():
        yield from merged_tensors(child, f"{prefix}{name}.")
