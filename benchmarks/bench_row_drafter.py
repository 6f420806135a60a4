"""What a chain of K tokens costs with EAGLE-3's shape for SmolLM2 in the C++ row runner, from Python and back.

    python benchmarks/bench_row_drafter.py [--threads 2] [--bits 8,4] [--contexts 64,512,2048] [--batches 1,8]
        [--depths 1,2,4,8] [--calls 300] [--model smollm2] [--pin] [--json]

Weights are random (time does not depend on them): width 576, 9 heads of 64 over 3, MLP 1,536, three taps, 8,192 draft
tokens. Each call takes up 2 true rows per sequence and drafts K tokens; the rows are cut off again outside the clock.
"alone": chains back to back. "beside": before each chain the target scores 5 rows per sequence, as in a decode loop;
its weights push the drafter's out of the caches. Arms run interleaved. `--pin` keeps this thread and the others on
processors of their own, which steadies figures on a machine with other work (Linux, two threads). Figures are
microseconds, lower deciles with medians behind them.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Module
from draftsmith.drafters.native_rows import NativeRows, NativeRowsOptions
from draftsmith.drafters.rows import TrueRows
from draftsmith.engine.loading import load_model
from draftsmith.models.backend import Backend, RowGroup

NUM_IDS = 8192
PENDING = 2  # true rows that a chain begins with
SCORED = 5  # rows of a verification


def make_runner(target: Backend, bits: int) -> NativeRows:
    """A drafter of SmolLM2's own proportions with random weights."""
    spec = target.spec
    info = SimpleNamespace(vocab_size=spec.vocab_size, backend=target)
    config = Eagle3Config(
        width=spec.width,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        mlp_width=spec.mlp_width,
        taps=(2, spec.num_layers // 2, spec.num_layers - 3),
    )
    ids = torch.arange(min(NUM_IDS, spec.vocab_size))
    module = Eagle3Module(config, info, ids)  # type: ignore[arg-type]
    module.initialise(info, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    return NativeRows(module.row_parts(), target, NativeRowsOptions(bits=bits))


class Setting:
    """Sequences of one context length, ready for a chain."""

    def __init__(self, runner: NativeRows, target: Backend, context: int, batch: int) -> None:
        generator = torch.Generator().manual_seed(1)
        width = 3 * target.spec.width
        self.runner, self.target, self.context, self.batch = runner, target, context, batch
        features = torch.randn(context, width, generator=generator)
        tokens = torch.randint(0, NUM_IDS, (context,), generator=generator).tolist()
        for sequence in range(batch):
            runner.forget(sequence)
            runner.append([TrueRows(sequence, tokens, features)])
        pending = torch.randn(PENDING, width, generator=generator)
        self.groups = [TrueRows(sequence, tokens[:PENDING], pending) for sequence in range(batch)]

    def chain(self, depth: int) -> float:
        """Seconds of one chain per sequence."""
        depths = [depth] * self.batch
        start = time.perf_counter()
        self.runner.chain(self.groups, depths)
        seconds = time.perf_counter() - start
        for sequence in range(self.batch):
            self.runner.truncate(sequence, self.context)
        return seconds


def score(target: Backend, batch: int) -> None:
    """A verification step of sequences that stay as they are."""
    groups = []
    for sequence in range(batch):
        target.cache.reserve(sequence, SCORED)
        groups.append(RowGroup(sequence, [1] * SCORED, range(-1, SCORED - 1), 0))
    target.score(groups)
    for sequence in range(batch):
        target.cache.keep(sequence, [])


def decile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure(settings: dict[int, Setting], depths: Sequence[int], calls: int, before: Callable[[], None]) -> Any:
    """Microseconds per bits and depth: lower decile, median."""
    found: dict[int, dict[int, list[float]]] = {bits: {depth: [] for depth in depths} for bits in settings}
    for call in range(calls + 3):
        for bits, setting in settings.items():
            for depth in depths:
                before()
                seconds = setting.chain(depth)
                if call >= 3:
                    found[bits][depth].append(1e6 * seconds)
    return {
        bits: {depth: (decile(times), median(times)) for depth, times in of_bits.items()}
        for bits, of_bits in found.items()
    }


def pin() -> None:
    """This thread on the first processor allowed, the pool's on the second."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {first if int(thread) == threading.get_native_id() else second})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"bits": "8,4", "contexts": "64,512,2048", "batches": "1,8", "depths": "1,2,4,8"}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    bits, contexts, batches, depths = ([int(part) for part in getattr(arguments, name).split(",")] for name in numbers)
    target = load_model(arguments.model, backend="native", threads=arguments.threads).backend
    runners = {count: make_runner(target, count) for count in bits}
    if arguments.pin:
        pin()
    results = []
    for batch in batches:
        for sequence in range(batch):
            target.cache.open(sequence)
        for context in contexts:
            settings = {count: Setting(runner, target, context, batch) for count, runner in runners.items()}
            calls = max(20, arguments.calls // batch)
            for where, before in (("alone", lambda: None), ("beside", lambda: score(target, batch))):  # noqa: B023
                found = measure(settings, depths, calls, before)
                results.append({"batch": batch, "context": context, "where": where, "microseconds": found})
                if not arguments.json:
                    for count, times in found.items():
                        cells = "  ".join(f"K={depth} {low:6.0f} ({mid:6.0f})" for depth, (low, mid) in times.items())
                        print(f"batch {batch} context {context:5} {where:6} {count} bits:  {cells}", flush=True)
        for sequence in range(batch):
            target.cache.close(sequence)
    megabytes = {count: runner.weight_bytes / 1e6 for count, runner in runners.items()}
    if arguments.json:
        print(json.dumps({"settings": results, "megabytes": megabytes, "threads": arguments.threads}))
    else:
        print("weights: " + ", ".join(f"{size:.2f} MB at {count} bits" for count, size in megabytes.items()))


if __name__ == "__main__":
    main()
