"""What a verification costs: seconds of the target's forward against the rows it scored.

Called by the summary. Invariant: only steps without a prompt row count, because a prompt chunk asks for no logits of
most of its rows; a step is one forward, however many requests share it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftsmith.core.stats import EventLog

DEFINITIONS = {
    "verify_cost": "per number of rows scored in a step without prompt rows: steps, quartiles of the forward's seconds"
}


def verify_cost(log: EventLog) -> list[dict[str, Any]]:
    """Steps and quartiles of the verify seconds, by rows of the step, fewest first. Step numbers are unique."""
    prompt_steps = {record.step for record in log.requests if record.prompt}
    by_rows: dict[int, list[float]] = {}
    for step in log.steps:
        if step.step not in prompt_steps:
            by_rows.setdefault(step.rows, []).append(step.verify_seconds)
    found = []
    for rows, seconds in sorted(by_rows.items()):
        low, middle, high = (round(float(value), 9) for value in np.quantile(seconds, [0.25, 0.5, 0.75]))
        found.append({"rows": rows, "steps": len(seconds), "p25": low, "p50": middle, "p75": high})
    return found
