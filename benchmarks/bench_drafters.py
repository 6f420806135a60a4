"""What the training-free drafters cost per step.

N-gram: a proposal after each of NUM_STEPS new tokens at growing contexts, and the catch-up with a whole
prompt. Suffix drafter: propose plus commit per token over its index, the global tree filled with seeded
repetitive traffic. Medians and 99th percentiles in microseconds of this process alone; the machine's load
shows in the latter. Controllers: `bench_control.py`.

Usage: python benchmarks/bench_drafters.py [--steps N] [--global-tokens N] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from repetitive_tokens import traffic

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.types import Verdict
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import Commit, Drafter, TargetInfo
from draftsmith.drafters.ngram import NgramDrafter, NgramOptions
from draftsmith.drafters.suffix import SuffixDrafter, SuffixOptions

Result = TypeVar("Result")
VOCAB = 49_152
BUDGET = 16


@dataclass
class Timings:
    """Seconds of each part of a step, by name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, call: Callable[..., Result], *arguments: object) -> Result:
        """Run and time one part."""
        began = time.perf_counter()
        result = call(*arguments)
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def summary(self) -> dict[str, tuple[float, float]]:
        """Median and 99th percentile per part, microseconds."""
        found = {}
        for name, values in self.seconds.items():
            ordered = sorted(values)
            found[name] = (1e6 * ordered[len(ordered) // 2], 1e6 * ordered[len(ordered) * 99 // 100])
        return found


def target() -> TargetInfo:
    """A target the retrieval drafters need nothing of."""

    def refuse(name: str) -> Drafter:
        raise ValueError(name)

    return TargetInfo(
        vocab_size=VOCAB,
        max_context=1 << 20,
        eos_ids=frozenset({2}),
        tokenizer=None,
        load_model=refuse,
        make_drafter=refuse,
        backend=None,
    )


def view_of(tokens: list[int], prompt_len: int, sequence_id: int = 0) -> SequenceView:
    """A greedy sequence."""
    sampler = Sampler(SamplingParams(), (), frozenset(), VOCAB)
    return SequenceView(sequence_id, tokens, prompt_len, sampler, RequestRandom(0))


def always(confidence: float) -> bool:
    """Never stop drafting."""
    return True


def texts() -> Iterator[tuple[list[int], list[int]]]:
    """Endless seeded requests: prompt and response."""
    for seed in itertools.count():
        for request in traffic(1 << 17, seed=seed):
            yield list(request.prompt), list(request.response)


def long_text(num_tokens: int) -> list[int]:
    """One long text of repetitive traffic."""
    found: list[int] = []
    for prompt, response in texts():
        found += prompt + response
        if len(found) >= num_tokens:
            return found[:num_tokens]
    raise AssertionError("endless")


def bench_ngram(context: int, num_steps: int) -> dict[str, tuple[float, float]]:
    """A proposal per new token at a context, and the first one, which reads the whole prompt."""
    text, timings = long_text(context + num_steps), Timings()
    drafter = NgramDrafter.create(NgramOptions(), target())
    view = view_of(text[:context], context)
    timings.time("catch-up with the prompt", drafter.commit, [Commit(view, None)])
    for token in text[context:]:
        view.tokens.append(token)
        timings.time("propose", drafter.propose, [view], [BUDGET], always)
    return timings.summary()


def bench_suffix(global_tokens: int, num_steps: int, tree: bool) -> dict[str, tuple[float, float]]:
    """Propose plus commit per emitted token, with `global_tokens` in the global tree."""
    drafter = SuffixDrafter.create(SuffixOptions(tree=tree, max_cached_requests=-1), target())
    timings, stream = Timings(), texts()
    number = 0
    while drafter.index.num_tokens < global_tokens:
        prompt, response = next(stream)
        number += 1
        view = view_of(prompt + response, len(prompt), number)
        drafter.commit([Commit(view, None)])
        drafter.forget(number)
    while len(timings.seconds.get("propose", ())) < num_steps:
        prompt, response = next(stream)
        number += 1
        view = view_of(prompt, len(prompt), number)
        drafter.commit([Commit(view, None)])
        for token in response:
            timings.time("propose", drafter.propose, [view], [BUDGET], always)
            view.tokens.append(token)
            timings.time("commit", drafter.commit, [Commit(view, Verdict((), (token,)))])
        drafter.forget(number)
    return timings.summary()


def main() -> None:
    """Run everything and print a line per part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="timed steps per row")
    parser.add_argument("--global-tokens", type=int, default=200_000, help="tokens in the suffix drafter's global tree")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    results: dict[str, dict[str, tuple[float, float]]] = {}
    for context in (1 << 10, 1 << 13, 1 << 15):
        results[f"ngram at {context} tokens"] = bench_ngram(context, options.steps)
    for tree in (False, True):
        name = f"suffix {'tree' if tree else 'path'}, {options.global_tokens} tokens in the global tree"
        results[name] = bench_suffix(options.global_tokens, options.steps, tree)
    for name, parts in results.items():
        figures = "; ".join(f"{part} {median:.1f} us (p99 {high:.1f})" for part, (median, high) in parts.items())
        print(f"{name}: {figures}")
    if options.json is not None:
        document = {"python": platform.python_version(), "machine": platform.machine(), "microseconds": results}
        options.json.write_text(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
