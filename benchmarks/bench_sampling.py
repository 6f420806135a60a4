"""Cost of sampling one row: native kernels, the Python they replace, and the usual full sort in PyTorch.

    python benchmarks/bench_sampling.py [--threads 1] [--calls 100] [--json]

Rows are a language model's (a bulk of standard deviation 3, twenty tokens up to 18 above it) or nearly flat (standard
deviation 0.3). The arms see the same row and noise in turn and must return the same token. The first two make their
noise themselves, the full sort is given it. Times are lower deciles, the calls that nothing else on the machine
disturbed; medians stand beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftsmith.core import accelerator
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams

VOCABULARIES = (49_152, 151_936)
NUM_ROWS = 8
HISTORY = 2000
PATH = (11, 12, 13)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 0.8, top-p 0.5": {"temperature": 0.8, "top_p": 0.5},
    "temperature 0.8, top-p 0.99": {"temperature": 0.8, "top_p": 0.99},
    "temperature 1, top-k 50": {"temperature": 1.0, "top_k": 50},
    "temperature 1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "greedy, penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "temperature 0.8, top-p 0.95, penalties": {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
    },
}


@dataclass(frozen=True)
class Timing:
    """Microseconds per row of each arm: lower decile and median."""

    rows: str
    vocabulary: int
    setting: str
    native: tuple[float, float]
    python: tuple[float, float]
    naive: tuple[float, float]


def make_rows(kind: str, vocab_size: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(NUM_ROWS):
        row = rng.normal(0, 3 if kind == "peaked" else 0.3, vocab_size)
        if kind == "peaked":
            row[rng.choice(vocab_size, 20, replace=False)] = np.linspace(18, 8, 20) + rng.normal(0, 1, 20)
        rows.append(torch.from_numpy(row.astype(np.float32)))
    return rows


def naive_sample(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], row: torch.Tensor, noise: torch.Tensor
) -> int:
    """Full-vocabulary counts, full sort, softmax and cumulative sum: the straightforward way in PyTorch."""
    if params.penalises:
        seen = torch.bincount(torch.tensor([*prompt, *output]), minlength=len(row)) > 0
        counts = torch.bincount(torch.tensor(output), minlength=len(row))
        penalty = params.repetition_penalty
        row = torch.where(seen, torch.where(row < 0, row * penalty, row / penalty), row)
        row = row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.temperature == 0:
        return int(row.argmax())
    row = row / params.temperature
    if params.top_k:
        row = torch.where(row < row.topk(params.top_k).values[-1], -torch.inf, row)
    if params.top_p < 1:
        ordered, ids = row.sort(descending=True)
        probs = ordered.softmax(-1)
        dropped = probs.cumsum(-1) - probs >= params.top_p
        row = row.index_put((ids[dropped],), torch.tensor(-torch.inf))
    if params.min_p:
        probs = row.softmax(-1)
        row = torch.where(probs < params.min_p * probs.max(), -torch.inf, row)
    return int((row.log_softmax(-1) + noise).argmax())


def measure(kind: str, vocab_size: int, setting: str, calls: int) -> Timing:
    params = SamplingParams(**SETTINGS[setting])
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, vocab_size, HISTORY).tolist()
    output = rng.integers(0, vocab_size, HISTORY // 10).tolist()
    sampler = Sampler(params, prompt, frozenset({0}), vocab_size)
    sampler.append(output)
    rows = make_rows(kind, vocab_size)
    native, python, naive, differing = [], [], [], 0
    for call in range(calls):
        row = rows[call % NUM_ROWS]

        def ours(row: torch.Tensor = row, call: int = call) -> int:
            return sampler.sample(row, RequestRandom(2).target_noise(call), PATH)

        tokens = []
        # In turns: the first arm after the full sort finds memory in disorder. Every arm finds the row in the cache,
        # as a head that has just written it leaves it.
        for is_native in (True, False) if call % 2 else (False, True):
            row.sum()
            with nullcontext() if is_native else python_only():
                token, seconds = timed(ours)
            tokens.append(token)
            (native if is_native else python).append(seconds)
        assert tokens[0] == tokens[1], "the native kernels and Python differ"
        noise = torch.from_numpy(RequestRandom(2).target_gumbel(call, vocab_size).copy())
        row.sum()
        other, seconds = timed(lambda row=row, noise=noise: naive_sample(params, prompt, [*output, *PATH], row, noise))
        naive.append(seconds)
        differing += tokens[0] != other
    # The naive arm computes in float32: a tie there may go the other way once in a long while.
    assert differing <= calls // 50, f"{differing} of {calls} tokens differ: the arms do not do the same"
    return Timing(kind, vocab_size, setting, spread(native), spread(python), spread(naive))


@contextmanager
def python_only() -> Iterator[None]:
    """The pure Python parts serve."""
    real = accelerator.native
    accelerator.native = lambda: None
    try:
        yield
    finally:
        accelerator.native = real


def spread(seconds: Sequence[float]) -> tuple[float, float]:
    low, middle = np.quantile(seconds, [0.1, 0.5]) * 1e6
    return float(low), float(middle)


def noise_spread(vocab_size: int) -> tuple[float, float]:
    return spread([timed(lambda i=i: len(RequestRandom(3).target_gumbel(i, vocab_size)))[1] for i in range(50)])


def timed(call: Callable[[], int]) -> tuple[int, float]:
    began = time.perf_counter()
    token = call()
    return token, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    timings = [
        measure(kind, size, setting, options.calls)
        for kind in ("peaked", "flat")
        for size in VOCABULARIES
        for setting in SETTINGS
    ]
    if options.json:
        print(json.dumps([timing.__dict__ for timing in timings]))
        return
    print(f"{options.threads} thread(s), microseconds per row, lower decile (median): native, Python, full sort")
    for timing in timings:
        ratios = f"{timing.python[0] / timing.native[0]:6.1f} x {timing.naive[0] / timing.native[0]:6.1f} x"
        print(
            f"{timing.rows:6} {timing.vocabulary:7d}  {timing.setting:38s} {show(timing.native)} {show(timing.python)} "
            f"{show(timing.naive)} {ratios}"
        )
    for size in VOCABULARIES:
        native = noise_spread(size)
        with python_only():
            python = noise_spread(size)
        print(f"{'':6} {size:7d}  {'(all the noise of one row)':38s} {show(native)} {show(python)}")


def show(times: tuple[float, float]) -> str:
    return f"{times[0]:8.0f} ({times[1]:6.0f})"


if __name__ == "__main__":
    main()
