"""Cost of sampling one row, against the usual full-sort implementation on the same rows and noise.

    python benchmarks/bench_sampling.py [--threads 1] [--calls 300] [--json]

Rows are shaped like a language model's (a bulk of standard deviation 3, twenty tokens up to 18 above it);
both arms see the same row and noise in turn, and must return the same token. Times are lower deciles, the
calls that nothing else on the machine disturbed; medians stand beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams

VOCABULARIES = (49_152, 151_936)
NUM_ROWS = 8
HISTORY = 2000
PATH = (11, 12, 13)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.8, top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "temperature 0.8, top-p 0.99": {"temperature": 0.8, "top_p": 0.99},
    "temperature 1, top-k 50": {"temperature": 1.0, "top_k": 50},
    "temperature 1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "greedy, penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "temperature 0.8, top-p 0.9, penalties": {
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
    },
}


@dataclass(frozen=True)
class Timing:
    """Microseconds per row of both arms: lower decile and median."""

    vocabulary: int
    setting: str
    ours: tuple[float, float]
    naive: tuple[float, float]


def make_rows(vocab_size: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(NUM_ROWS):
        row = rng.normal(0, 3, vocab_size)
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


def measure(vocab_size: int, setting: str, calls: int) -> Timing:
    params = SamplingParams(**SETTINGS[setting])
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, vocab_size, HISTORY).tolist()
    output = rng.integers(0, vocab_size, HISTORY // 10).tolist()
    sampler = Sampler(params, prompt, frozenset({0}), vocab_size)
    sampler.append(output)
    rows, random = make_rows(vocab_size), RequestRandom(2)
    ours, naive, differing = [], [], 0
    for call in range(calls):
        row = rows[call % NUM_ROWS]
        noise = random.target_gumbel(call, vocab_size)
        noise_tensor = torch.from_numpy(noise.copy())
        token, seconds = timed(lambda row=row, noise=noise: sampler.sample(row, noise, PATH))
        ours.append(seconds)
        other, seconds = timed(
            lambda row=row, noise=noise_tensor: naive_sample(params, prompt, [*output, *PATH], row, noise)
        )
        naive.append(seconds)
        differing += token != other
    # The naive arm computes in float32: a tie there may go the other way once in a long while.
    assert differing <= calls // 50, f"{differing} of {calls} tokens differ: the arms do not do the same"
    return Timing(vocab_size, setting, spread(ours), spread(naive))


def spread(seconds: Sequence[float]) -> tuple[float, float]:
    low, middle = np.quantile(seconds, [0.1, 0.5]) * 1e6
    return float(low), float(middle)


def noise_spread(vocab_size: int) -> tuple[float, float]:
    random = RequestRandom(3)
    return spread(
        [timed(lambda position=position: len(random.target_gumbel(position, vocab_size)))[1] for position in range(50)]
    )


def timed(call: Callable[[], int]) -> tuple[int, float]:
    began = time.perf_counter()
    token = call()
    return token, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    timings = [measure(size, setting, options.calls) for size in VOCABULARIES for setting in SETTINGS]
    if options.json:
        print(json.dumps([timing.__dict__ for timing in timings]))
        return
    print(f"{options.threads} thread(s), microseconds per row, lower decile (median)")
    for timing in timings:
        ratio = timing.naive[0] / timing.ours[0]
        print(f"{timing.vocabulary:7d}  {timing.setting:38s} {show(timing.ours)} {show(timing.naive)} {ratio:6.1f} x")
    for size in VOCABULARIES:
        print(f"{size:7d}  {'(noise of one row, not counted above)':38s} {show(noise_spread(size))}")


def show(times: tuple[float, float]) -> str:
    return f"{times[0]:8.0f} ({times[1]:6.0f})"


if __name__ == "__main__":
    main()
