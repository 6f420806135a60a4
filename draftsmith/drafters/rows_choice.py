"""What computes a trained drafter's rows beside which target: the one place that knows backends apart.

Called when such a drafter is made. Invariant: whatever computes them, they are the same rows but for the rounding of
quantised weights; which one it is shows in the time they take.
"""

from __future__ import annotations

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.heads import HeadModule
from draftsmith.drafters.native_rows import NativeRows, NativeRowsOptions
from draftsmith.drafters.packed_linear import pack_linears, target_outputs
from draftsmith.drafters.recurrent_module import RecurrentModule
from draftsmith.drafters.rows import RowRunner
from draftsmith.drafters.torch_rows import TorchRows
from draftsmith.errors import OptionError
from draftsmith.models.native import NativeBackend


def check_bits(bits: int) -> None:
    """Raises `OptionError` unless weights can be quantised to that many bits."""
    if bits not in (4, 8):
        raise OptionError(f"bits is {bits}; allowed: 8 or 4")


def make_runner(module: RecurrentModule, target: TargetInfo, bits: int) -> RowRunner:
    """The fastest runner there is for this module beside this target's backend.

    `bits`: of the weights where they are quantised.
    """
    backend = target.backend
    if isinstance(backend, NativeBackend) and NativeRows.can_run(module.config, backend):
        return NativeRows(module.row_parts(), backend, NativeRowsOptions(bits=bits))
    return TorchRows(module)


def prepare_heads(module: HeadModule, target: TargetInfo, bits: int) -> None:
    """Have heads draft as fast as they can beside this target's backend; nothing can be trained after that."""
    backend = target.backend
    if isinstance(backend, NativeBackend):
        pack_linears(module, backend, bits)
        if not len(module.lm_heads):
            module.draft_by(target_outputs(module.draft_ids, backend))
