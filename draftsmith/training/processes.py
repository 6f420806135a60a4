"""Several processes that train one module together, started by torchrun.

Called by the trainer. Batches of a step are dealt out; gradients, weighted by their rows, and counts are added
up. Invariants: every process ends a step with the same weights, and a step's numbers are those that one process
alone would have got from the same batches, but for the order of sums.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from draftsmith.errors import OptionError

_PATIENCE = timedelta(hours=2)
"""How long one process waits for another: the first may be writing a whole cache of features."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process's place among all."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one writes and talks."""
        return self.rank == 0

    def add_up(self, *tensors: torch.Tensor) -> None:
        """Replace tensors of one type by their sums over all processes."""
        if self.count == 1:
            return
        together = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(together)
        start = 0
        for tensor in tensors:
            tensor.copy_(together[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()

    def any_of(self, here: bool) -> bool:
        """Whether it is true in any process."""
        if self.count == 1:
            return here
        found = torch.tensor(int(here))
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def mean(self, number: float) -> float:
        """The mean of a number over all processes, the same in each."""
        total = torch.tensor(number, dtype=torch.float64)
        self.add_up(total)
        return float(total) / self.count

    def gather(self, here: Any) -> list[Any]:
        """A plain value of every process, in order, in each."""
        if self.count == 1:
            return [here]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, here)
        return found

    def meet(self) -> None:
        """Wait for the others."""
        if self.count > 1:
            dist.barrier()

    def own(self, items: Sequence[int]) -> Sequence[int]:
        """This process's share of work items, dealt in turns."""
        return items[self.rank :: self.count]


@contextmanager
def processes() -> Iterator[Processes]:
    """Those torchrun started, or this one alone. Raises `OptionError` when they cannot meet."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count == "1":
        yield Processes()
        return
    try:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise OptionError(f"{count} processes were started but cannot meet: {' '.join(str(error).split())}") from error
    try:
        yield Processes(rank=dist.get_rank(), count=dist.get_world_size())
        # Nobody hangs up while another still listens.
        dist.barrier()
    finally:
        dist.destroy_process_group()
