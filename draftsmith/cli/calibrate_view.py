"""How `draftsmith calibrate` shows a cost table: as text for people, or as JSON.

Called by the command. Invariants: all times are milliseconds and say of what; a dash stands where nothing was
measured, and what is too little to count is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.cli.console import note

if TYPE_CHECKING:
    from draftsmith.control.cost_table import CostTable

ASKED = "drafters"
"""In a table's `about`: drafters that were to be measured."""
OTHER_CORES = "other_cores"
"""In a table's `about`: cores that other programs kept busy meanwhile; None where unknown."""
_BUSY_CORES = 0.1
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)
_LEAST = 5e-7  # seconds: what three digits of milliseconds can show


def print_costs(table: CostTable, path: Path, *, as_json: bool) -> None:
    """Print a table that is kept at `path`."""
    warning = busy_warning(table)
    if as_json:
        print(json.dumps({"file": str(path), **table.as_json()}))
        if warning is not None:
            note(warning)
        return
    _print_forwards(table)
    more = [(table.request, ""), (_times(1000.0, table.request_context), "per 1000 tokens of its context")]
    print(f"each further sequence of a batch: {_parts(more)}")
    own = [(table.own_step, "per step"), (table.own_request, "per sequence"), (table.own_row, "per row")]
    print(f"the engine's own work: {_parts(own)}")
    for name, cost in sorted(table.draft.items()):
        start = (_times(1000.0, cost.pending) or 0.0, "per 1000 tokens of prompt to read first")
        parts = _parts([(cost.request, "per sequence"), (cost.level, "per pass"), start])
        print(f"drafter {name}: {parts} (typically {100 * cost.error:.0f} % off)")
    lacking = missing(table)
    if lacking:
        print(f"not measured: {', '.join(lacking)}; run draftsmith calibrate again")
    if warning is not None:
        print(warning)
    print(f"kept in {path}")


def missing(table: CostTable) -> list[str]:
    """What was to be measured and was not."""
    drafters = [name for name in table.about.get(ASKED, ()) if name not in table.draft]
    return [*(["the engine's own work"] if table.own_step is None else []), *(f"drafter {name}" for name in drafters)]


def busy_warning(table: CostTable) -> str | None:
    """A line about a table that was measured beside other programs."""
    busy = table.about.get(OTHER_CORES)
    if busy is None or busy <= _BUSY_CORES:
        return None
    return f"measured while {busy:.1f} cores were busy with other work: measure again on a quiet machine"


def _print_forwards(table: CostTable) -> None:
    print(f"{table.about.get('model')}: milliseconds per forward, by rows and by tokens of context")
    print("Rows are the tokens that the model scores at once: the last one written and the drafts behind it.")
    rows_here = [rows for rows in _SHOWN_ROWS if rows <= table.rows[-1]]
    heads = [f"{rows} row{'s' if rows > 1 else ''}" for rows in rows_here]
    print(f"{'context':>8}" + "".join(f"{head:>10}" for head in heads) + "   spread of repeats")
    for context, spread in zip(table.contexts, table.spread, strict=True):
        cells = "".join(f"{1e3 * table.verify_seconds(rows, context):>10.2f}" for rows in rows_here)
        print(f"{context:>8}{cells}   {100 * sorted(spread)[len(spread) // 2]:.0f} %")


def _times(factor: float, seconds: float | None) -> float | None:
    return None if seconds is None else factor * seconds


def _parts(parts: Sequence[tuple[float | None, str]]) -> str:
    """Seconds, each with what it is for."""
    known = [(seconds, of) for seconds, of in parts if seconds is not None]
    if not known:
        return "-"
    shown = [f"{1e3 * seconds:.3f} ms {of}".strip() for seconds, of in known if seconds >= _LEAST]
    return " + ".join(shown) or "under 0.001 ms"
