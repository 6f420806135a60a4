"""Several processes that train one module together, started by torchrun.

Called by the trainer. Batches of a step are dealt out; gradients, weighted by their rows, and counts are added
up. Invariants: every process ends a step with the same weights, and a step's numbers are those that one process
alone would have got from the same batches, but for the order of sums; a process that waits for one that is gone
raises `ProcessGone`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from draftsmith.errors import DraftsmithError, OptionError

_PATIENCE = timedelta(hours=2)
"""How long one process waits for another: the first may be writing a whole cache of features."""
_TOLD = timedelta(seconds=2)
"""How long a process with an error waits to hear of one of the first."""
_FAILED = "draftsmith/failed"


class ProcessGone(DraftsmithError):
    """Another process of this run has ended before its time."""


@contextmanager
def _in_company() -> Iterator[None]:
    """Around what takes part of all processes."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessGone("another process of this run went away") from error


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process's place among all. `store`: what they share beside the group."""

    rank: int = 0
    count: int = 1
    store: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this one writes and talks."""
        return self.rank == 0

    def add_up(self, *tensors: torch.Tensor) -> None:
        """Replace tensors of one type by their sums over all processes."""
        if self.count == 1:
            return
        together = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with _in_company():
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
        with _in_company():
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
        with _in_company():
            dist.all_gather_object(found, here)
        return found

    def meet(self) -> None:
        """Wait for the others."""
        if self.count > 1:
            with _in_company():
                dist.barrier()

    def own(self, items: Sequence[int]) -> Sequence[int]:
        """This process's share of work items, dealt in turns."""
        return items[self.rank :: self.count]

    def first_tells(self, error: DraftsmithError) -> bool:
        """Whether the first process has told what ended this one, so that it need not be told twice."""
        if self.store is None:
            return False
        try:
            if self.is_first:
                self.store.set(_FAILED, str(error))
                return False
            self.store.wait([_FAILED], _TOLD)
            return isinstance(error, ProcessGone) or self.store.get(_FAILED).decode() == str(error)
        except RuntimeError:  # nothing heard, or the first is gone and the store with it
            return False


@contextmanager
def processes() -> Iterator[Processes]:
    """Those torchrun started, or this one alone. Raises `OptionError` when they cannot meet."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count == "1":
        yield Processes()
        return
    try:
        store, rank, number = next(iter(dist.rendezvous("env://", timeout=_PATIENCE)))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=number, timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise OptionError(f"{count} processes were started but cannot meet: {' '.join(str(error).split())}") from error
    try:
        together = Processes(rank=rank, count=number, store=store)
        yield together
        with suppress(ProcessGone):
            together.meet()  # nobody hangs up while another still listens
    finally:
        dist.destroy_process_group()
