"""Linear layers laid out for scoring a few rows at once, which is what verification does.

Called by the reference backend for every matrix of the decoder, through `prepare`. BLAS kernels stream a
row-major weight badly for 3 to 16 rows; in blocks of columns they do not (`benchmarks/bench_reference.py`).
Within whole steps of SmolLM2 on 2 threads, row-major against blocked, all else equal: 23.5 against 27.9 ms
for one row, 41 against 32 for 4, 52 against 38 for 8. A part of the price of one row is that it is computed
as two, so that it gets the bits it gets in company.
Invariant: the layout changes speed and the last bits of the sums, nothing else; with blocks, those bits do
not depend on the number of rows either.

Shape letters: N rows, I inputs, O outputs, B blocks, W block width.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

BLOCK_WIDTH = 48
"""Outputs per block: three AVX-512 vectors of float32. Of 16, 32, 48, 64 and 96 the best at 1 to 32 rows."""

PACKED_ROWS = 16
"""Number of rows oneDNN's packed order is chosen for; it serves any number."""


class Linear(ABC):
    """y = x W^T + b."""

    @abstractmethod
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, I] -> [N, O]; rows may be further apart in memory than O."""

    @abstractmethod
    def weight_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int64, [N]) of the weight, [N, I]: the embedding of a model with tied head."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes held."""


def prepare(weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_embedding: bool = False) -> Linear:
    """The fastest layer for a weight [O, I] where it lies. `is_embedding`: `weight_rows` is called in every step."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkl.is_available():
        return BlockedLinear(weight, bias)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and can_pack():
        return PackedLinear(weight, bias, is_embedding=is_embedding)
    return DenseLinear(weight, bias)


class DenseLinear(Linear):
    """The weight as it is, for other devices and types."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight, self._bias)

    def weight_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._weight.index_select(0, ids)

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)


class BlockedLinear(Linear):
    """Float32 on the CPU: one small product per block of outputs, all in one batched call.

    Each block [I, W] is contiguous, so a weight is read once, in order, whatever the number of rows, and
    MKL sums a row's products in an order that does not depend on that number. The last block is filled up
    with zeros.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._num_outputs = len(weight)
        padding = -len(weight) % BLOCK_WIDTH
        padded = F.pad(weight, (0, 0, 0, padding))
        self._blocks_BIW = padded.view(-1, BLOCK_WIDTH, weight.shape[1]).transpose(1, 2).contiguous()
        self._bias_BNW = None
        if bias is not None:
            self._bias_BNW = F.pad(bias, (0, padding)).view(-1, 1, BLOCK_WIDTH)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        num_blocks, _, width = self._blocks_BIW.shape
        num_rows = rows.shape[0]
        if num_rows == 1:
            # A matrix-vector kernel would sum in another order; two rows cost the same.
            rows = torch.cat((rows, rows))
        spread = rows.expand(num_blocks, -1, -1)
        if self._bias_BNW is None:
            result = torch.bmm(spread, self._blocks_BIW)
        else:
            result = torch.baddbmm(self._bias_BNW, spread, self._blocks_BIW)
        joined = (result[:, 0] if num_rows == 1 else result.transpose(0, 1)).reshape(num_rows, num_blocks * width)
        return joined if num_blocks * width == self._num_outputs else joined.narrow(1, 0, self._num_outputs)

    def weight_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._blocks_BIW[ids // BLOCK_WIDTH, :, ids % BLOCK_WIDTH]

    @property
    def num_bytes(self) -> int:
        return self._blocks_BIW.nbytes + (0 if self._bias_BNW is None else self._bias_BNW.nbytes)


class PackedLinear(Linear):
    """Bfloat16 on the CPU, packed by oneDNN (through an internal interface that `can_pack` tries out)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_embedding: bool) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        self._bias = bias
        self._table = weight if is_embedding else None
        self._num_bytes = weight.nbytes * (2 if is_embedding else 1) + (0 if bias is None else bias.nbytes)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")

    def weight_rows(self, ids: torch.Tensor) -> torch.Tensor:
        table = self._packed.to_dense() if self._table is None else self._table
        return table.index_select(0, ids)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


@functools.cache
def can_pack() -> bool:
    """Whether this build of PyTorch packs bfloat16 weights for oneDNN."""
    rows, weight = torch.ones(2, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        result = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool((result == 16).all())
