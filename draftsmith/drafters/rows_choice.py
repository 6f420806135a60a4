"""Which runner computes the rows of a recurrent drafter: the one place that knows them apart.

Called when such a drafter is made. Invariant: every runner computes the same rows; which one it is shows in the
time they take.
"""

from __future__ import annotations

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.native_rows import NativeRows, NativeRowsOptions
from draftsmith.drafters.recurrent_module import RecurrentModule
from draftsmith.drafters.rows import RowRunner
from draftsmith.drafters.torch_rows import TorchRows
from draftsmith.models.native import NativeBackend


def make_runner(module: RecurrentModule, target: TargetInfo, bits: int) -> RowRunner:
    """The fastest runner there is for this module beside this target's backend.

    `bits`: of the weights where they are quantised.
    """
    backend = target.backend
    if isinstance(backend, NativeBackend) and NativeRows.can_run(module.config, backend):
        return NativeRows(module.row_parts(), backend, NativeRowsOptions(bits=bits))
    return TorchRows(module)
