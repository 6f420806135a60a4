"""Linear layers of a drafter over 8-bit or 4-bit weights, on the threads of the target's native backend.

Called by `drafters.rows_choice` for drafters whose arithmetic stays in PyTorch but for its products, which read nearly
all of a drafter's weights. Invariant: what a row gives depends on that row alone, bit for bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import nn

from draftsmith.errors import ModelFileError
from draftsmith.models.native import NativeBackend

if TYPE_CHECKING:
    from draftsmith import _native


@final
class PackedLinear(nn.Module):
    """Stands for an `nn.Linear` [.., inputs] -> [.., outputs] without gradients."""

    def __init__(self, weights: _native.Packed, bias: torch.Tensor | None, backend: NativeBackend) -> None:
        from draftsmith import _native

        super().__init__()
        self._outputs = weights.outputs
        self._bias = None if bias is None else bias.detach().to(torch.float32)
        self._linear = _native.PackedLinear(weights, backend.threads, backend.options.pin, backend.kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Products in float32, in the type of `x`."""
        rows = x.to(torch.float32).reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous().numpy()
        out = np.empty((len(rows), self._outputs), np.float32)
        self._linear.multiply(rows, out)
        found = torch.from_numpy(out).view(*x.shape[:-1], self._outputs)
        return (found if self._bias is None else found + self._bias).to(x.dtype)


def packed(weights: torch.Tensor, bits: int) -> _native.Packed:
    """A matrix quantised to 8 or 4 bits. Raises `ModelFileError` for weights that are not finite."""
    from draftsmith import _native

    try:
        return _native.pack_floats(weights.detach().to(torch.float32).contiguous().numpy(), bits)
    except ValueError as error:
        raise ModelFileError(f"the drafter's weights: {error}") from error


def pack_linears(module: nn.Module, backend: NativeBackend, bits: int) -> None:
    """Put a `PackedLinear` in the place of every linear layer inside a module."""
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear):
            module.set_submodule(name, PackedLinear(packed(child.weight, bits), child.bias, backend))


def target_outputs(ids: torch.Tensor, backend: NativeBackend) -> PackedLinear:
    """The target's own output rows of these tokens, as they were packed."""
    is_whole = len(ids) == backend.spec.vocab_size
    head = backend.head if is_whole else backend.head.select(ids.to(torch.int32).numpy())
    return PackedLinear(head, None, backend)
