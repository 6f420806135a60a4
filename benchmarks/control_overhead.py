"""What controllers cost per step, for `bench_control.py`: budget, select and observe over synthetic traffic.

Requests get chains whose tokens are right with a given probability; nothing but the controller's own calls is timed.
The goal is 30 us a step and 3 us a request: a line is fitted through the batch sizes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.control.base import RequestOutcome, RequestSignal, StepSeconds
from draftsmith.control.choice import make_controller
from draftsmith.core.tree import chain
from draftsmith.core.types import Proposal

BATCHES = (1, 2, 4, 8, 16)
LENGTH = 8
CONTEXT = 300


def overhead(text: str, batch: int, probability: float, num_steps: int, level: float) -> float:
    """Median microseconds of a step's three calls. `level`: seconds of a draft pass (0: retrieval)."""
    rng, controller, spent = random.Random(0), make_controller(text), []
    for step in range(num_steps):
        signals = [RequestSignal(number, "d", 64, CONTEXT + step, 200) for number in range(batch)]
        began = time.perf_counter()
        budgets = controller.budget(signals)
        taken = time.perf_counter() - began
        lengths = [next(place for place in range(99) if rng.random() >= probability) for _ in signals]
        proposals = []
        for budget, length in zip(budgets, lengths, strict=True):
            if budget:
                size = min(budget, LENGTH)
                tokens = [place if place < length else 99 for place in range(size)]
                proposals.append(Proposal(chain(0, tokens), confidence=(1.0, *[0.8] * size)))
        began = time.perf_counter()
        selected = controller.select(proposals) if proposals else []
        taken += time.perf_counter() - began
        drafts, rows, outcomes = iter(selected), batch, []
        for number, (budget, length) in enumerate(zip(budgets, lengths, strict=True)):
            drafted = next(drafts).tree.num_drafted if budget else 0
            accepted = min(drafted, length)
            rows += drafted
            outcomes.append(
                RequestOutcome(number, "d", drafted, drafted, accepted, accepted + 1, tuple(range(accepted + 1)))
            )
        depth = max(outcome.depth for outcome in outcomes)
        seconds = StepSeconds(rows, 5e-6 * batch + level * depth, 5e-3 + 1e-4 * rows, 1e-4)
        began = time.perf_counter()
        controller.observe(outcomes, seconds)
        spent.append(taken + time.perf_counter() - began)
    return 1e6 * statistics.median(spent[num_steps // 4 :])


def run(controllers: Sequence[str], num_steps: int) -> dict[str, Any]:
    """Per controller and kind of drafter: microseconds by batch, and the line through them."""
    found: dict[str, Any] = {}
    for text in controllers:
        for kind, level in (("retrieval", 0.0), ("model", 5e-4)):
            by_batch = {batch: overhead(text, batch, 0.6, num_steps, level) for batch in BATCHES}
            slope, start = np.polyfit(list(by_batch), list(by_batch.values()), 1)
            found[f"{text}, {kind}"] = {"us": by_batch, "us_per_step": float(start), "us_per_request": float(slope)}
    return found
