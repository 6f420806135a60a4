"""A linear layer prepared for scoring few rows at a time.

Called by the reference backend for every matrix of the decoder.

Shape letters: N rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """y = x W^T + b with a weight [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return F.linear(rows, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
