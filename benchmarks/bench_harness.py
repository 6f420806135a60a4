"""What the benchmark harness costs: tokens per second through it, and of the engine driven by nothing but a loop.

Both arms answer the same eight prompts at once on one engine, in turns; the loop is `Engine.generate` of a list. The
overhead is one less the ratio of rates, totals over totals, with its paired bootstrap interval over the rounds.

    python benchmarks/bench_harness.py [--model smollm2] [--drafter none] [--rounds 20]
"""

from __future__ import annotations

import argparse
from time import perf_counter

from draftsmith.bench.environment import MachineLoad
from draftsmith.bench.own_arm import OwnArm
from draftsmith.bench.prompts import load_prompts
from draftsmith.bench.runner import Workload, first_messages, run_block
from draftsmith.core.intervals import ratio_interval
from draftsmith.engine.engine import Engine

CONCURRENCY = 8
NEW_TOKENS = 128


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    engine = Engine.load(asked.model, drafter=asked.drafter, max_batch=CONCURRENCY, prefix_cache=False)
    prompts = load_prompts("builtin", per_category=1, max_turns=1)[:CONCURRENCY]
    messages = [first_messages(prompt) for prompt in prompts]
    work = Workload(prompts=prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True, concurrency=CONCURRENCY)
    arm = OwnArm(asked.drafter, engine, max_concurrency=CONCURRENCY)

    def bare() -> tuple[float, float]:
        began = perf_counter()
        results = engine.generate(messages, max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, seed=0)
        seconds = perf_counter() - began
        engine.take_events()
        return sum(len(result.token_ids) for result in results), seconds

    def harness() -> tuple[float, float]:
        run = run_block(arm, work, arm.encode, block=range(CONCURRENCY), number=0, repeat=0, order=0)
        assert run.is_whole
        return run.num_tokens, run.seconds

    bare(), harness()
    load = MachineLoad()
    found: dict[str, list[tuple[float, float]]] = {"bare": [], "harness": []}
    for number in range(asked.rounds):
        arms = [("bare", bare), ("harness", harness)]
        for name, measure in arms if number % 2 else arms[::-1]:
            found[name].append(measure())
    interval = ratio_interval(found["harness"], found["bare"])
    for name, runs in found.items():
        print(f"{name:8} {sum(tokens for tokens, _ in runs) / sum(seconds for _, seconds in runs):8.1f} tokens/s")
    low, high = 1 - interval.high, 1 - interval.low
    print(f"overhead {100 * (1 - interval.ratio):.2f} % ({100 * low:.2f} to {100 * high:.2f}), goal 2 %")
    print(f"other work kept {load.others() or 0.0:.2f} cores busy")


if __name__ == "__main__":
    main()
