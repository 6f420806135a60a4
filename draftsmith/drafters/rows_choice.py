"""Which runner computes the rows of a recurrent drafter: the one place that knows them apart.

Called when such a drafter is made. Invariant: every runner computes the same rows; which one it is shows in the
time they take.
"""

from __future__ import annotations

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.recurrent_module import RecurrentModule
from draftsmith.drafters.rows import RowRunner
from draftsmith.drafters.torch_rows import TorchRows


def make_runner(module: RecurrentModule, target: TargetInfo) -> RowRunner:
    """The fastest runner there is for this module beside this target's backend."""
    return TorchRows(module)
