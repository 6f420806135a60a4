"""What the controllers promise, measured: costs, best fixed lengths, changing traffic, verified rows, overhead.

    costs     the cost table predicts a step's seconds: median error over rows 1..64, contexts 64..4096 (goal: 8 %)
    mixed     auto against the best fixed length in hindsight and against plain, by drafter, batch and category
              (goals: at least 0.97 of each)
    phases    traffic that switches every 20 requests from copying to chatting: auto's share of what an oracle with the
              best fixed length per phase gains over the best single length (goal: 80 %)
    rows      prefix-scheduler against verify-all at batch 8: verified rows per step and tokens per second
    overhead  microseconds of a controller's calls (goal: 30 a step and 3 a request)

    python benchmarks/bench_control.py costs --model smollm2
    python benchmarks/bench_control.py mixed --model smollm2 --drafter suffix --drafter ngram --prompts QUESTIONS.jsonl
    python benchmarks/bench_control.py phases --model 1.5B.gguf --drafter draft_model:model=0.5B.gguf
    python benchmarks/bench_control.py rows --model smollm2 --drafter suffix
    python benchmarks/bench_control.py                     (overhead alone, which needs no quiet machine)

Needs a quiet machine but for `overhead`; `draftsmith calibrate` first, or with --calibrate. --quick is a short try.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import control_overhead
from control_arms import Arm, Block, demo_questions, file_questions, identical, make_arms, over, run_blocks, say

from draftsmith.bench.environment import MachineLoad, hardware, versions
from draftsmith.control.cost_table import CostTable
from draftsmith.engine.calibration import Forwards, Sweep, measure_verify
from draftsmith.engine.cost_store import cost_file, read_costs, write_costs
from draftsmith.engine.loading import LoadedModel, load_model

LENGTHS = (1, 2, 3, 4, 6, 8, 12)
COPYING, CHATTING = ("rewriting code", "filling JSON"), ("chatting",)
PHASE = 20
ANCHOR, ANCHOR_ROWS, ANCHOR_CONTEXT = 100, 8, 512


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", default="overhead", choices=sorted(SECTIONS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--drafter", action="append", help="a selection; repeatable [ngram and suffix]")
    parser.add_argument("--controller", action="append", help="beside auto, for mixed and overhead")
    parser.add_argument("--batch", type=int, action="append", help="requests at once; repeatable [1, 4, 8]")
    parser.add_argument("--prompts", default="builtin", help="questions for mixed and rows")
    parser.add_argument("--per-category", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="times that mixed asks its questions")
    parser.add_argument("--new-tokens", type=int, default=128, help="of questions from a file")
    parser.add_argument(
        "--demo-tokens", type=int, default=1024, help="most of the demo's, which have limits of their own"
    )
    parser.add_argument("--length", type=int, action="append", help=f"fixed lengths; repeatable [{LENGTHS}]")
    parser.add_argument("--phases", type=int, default=4, help="phases of 20 requests")
    parser.add_argument("--repeats", type=int, default=9, help="forwards of each size when calibrating")
    parser.add_argument("--calibrate", action="store_true", help="measure and keep the cost table first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.per_category, options.new_tokens, options.repeats, options.phases = 1, 24, 3, 2
        options.length = options.length or [1, 4]
    options.drafter = options.drafter or ["ngram", "suffix"]
    options.batch = options.batch or [1, 4, 8]
    options.length = options.length or LENGTHS
    return options


class Models:
    """The model and how others are loaded beside it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        say(f"loading {options.model}")
        self.model = self.load(options.model)
        self.costs = read_costs(self.model.identity)
        if options.calibrate:
            self.calibrate()
        if self.costs is None:
            say("no cost table is kept for this model: controllers start without one (--calibrate makes it)")

    def load(self, name: str) -> LoadedModel:
        """Another model under the same settings."""
        return load_model(name, backend=self._options.backend, threads=self._options.threads)

    def calibrate(self) -> CostTable:
        """Measure and keep."""
        about = {**self.model.identity, "model": self._options.model}
        sweep = Sweep(repeats=self._options.repeats, seed=self._options.seed)
        table = measure_verify(self.model.backend, sweep, about, lambda done, total, words: None)
        table = table.filled_from(self.costs)
        write_costs(table, cost_file(self.model.identity))
        self.costs = table
        return table


def _tell_errors(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    levels = sorted(point["machine"] for point in found)
    say(f"a forward of {ANCHOR_ROWS} rows took {levels[0]:.2f} to {levels[-1]:.2f} of what was calibrated")
    result: dict[str, Any] = {"machine": [levels[0], statistics.median(levels), levels[-1]]}
    for name, keep in (
        ("one sequence", lambda point: point["requests"] == 1),
        ("batches", lambda p: p["requests"] > 1),
    ):
        for kind in ("error", "error_in_seconds"):
            part = sorted(abs(point[kind]) for point in found if keep(point))
            result[f"{name}, {kind}"] = {"median": statistics.median(part), "p90": part[int(0.9 * len(part))]}
            say(f"{name}: median {kind} {100 * statistics.median(part):.1f} %, 90 % within "
                f"{100 * part[int(0.9 * len(part))]:.1f} %, {len(part)} points")  # fmt: skip
    for low, high in ((1, 8), (9, 16), (17, 32), (33, 64)):
        part = [abs(point["error"]) for point in found if low <= point["rows"] <= high]
        say(f"  rows {low}-{high}: {100 * statistics.median(part):.1f} %")
    return result


def costs(options: argparse.Namespace) -> dict[str, Any]:
    """Errors of predicted forwards: random rows, contexts and batches that calibration never saw.

    A shared machine changes its speed by a quarter within minutes, so every forward is timed in turns with one of fixed
    size, and what is compared is how much longer it takes than that. The error in seconds is told beside it.
    """
    models = Models(options)
    table = models.costs or models.calibrate()
    rng = random.Random(options.seed + 1)
    forwards = Forwards(models.model.backend, rng)
    found: list[dict[str, Any]] = []
    top = min(4096, table.contexts[-1])
    num_contexts, num_rows = (6, 4) if options.quick else (32, 8)

    def compare(groups: list[tuple[int, int]], context: int) -> None:
        rows, requests = sum(count for _, count in groups), len(groups)
        # One at a time in turn with the anchor: what both are slow at then is the machine's doing.
        pairs = [(forwards.time([(ANCHOR, ANCHOR_ROWS)]), forwards.time(groups)) for _ in range(5)]
        anchor, seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
        predicted = table.verify_seconds(rows, context, requests)
        level = anchor / table.verify_seconds(ANCHOR_ROWS, ANCHOR_CONTEXT)
        found.append(
            {
                "rows": rows,
                "context": context,
                "requests": requests,
                "seconds": seconds,
                "machine": level,
                "error": predicted * level / seconds - 1,
                "error_in_seconds": predicted / seconds - 1,
            }
        )

    try:
        forwards.open(ANCHOR)
        forwards.extend(ANCHOR, ANCHOR_CONTEXT)
        forwards.open(0)
        for context in sorted(rng.randint(64, top) for _ in range(num_contexts)):
            forwards.extend(0, context)
            for rows in (rng.randint(1, 64) for _ in range(num_rows)):
                compare([(0, rows)], context)
        for number in range(1, 9):
            forwards.open(number)
            forwards.extend(number, 300)
        for _ in range(num_contexts):
            count, rows = rng.randint(2, 8), rng.randint(1, 8)
            compare([(number, rows) for number in range(1, 1 + count)], 300)
    finally:
        forwards.close()
    return {"points": found} | _tell_errors(found)


def fixed_lengths(options: argparse.Namespace) -> list[str]:
    """The fixed controllers that hindsight may choose from."""
    return [f"fixed:num_draft={length}" for length in options.length]


def mixed(options: argparse.Namespace) -> dict[str, Any]:
    """Auto against the best fixed length in hindsight, and against plain on every category."""
    models, found = Models(options), dict[str, Any]()
    for drafter in options.drafter:
        for batch in options.batch:
            controllers = [*fixed_lengths(options), "auto", *(options.controller or [])]
            arms = make_arms(models.model, models.load, drafter, controllers, batch)
            engine = arms[0].engine
            questions = file_questions(engine, options.prompts, options.per_category, options.new_tokens)
            questions += demo_questions(engine, ("rewriting code",), max(len(questions) // 8, 3), options.demo_tokens)
            questions *= options.rounds
            random.Random(options.seed).shuffle(questions)
            if batch > 1:
                # So that a block has one category and one limit, as far as they fill it.
                questions.sort(key=lambda question: (question.max_new_tokens, question.category))
            say(f"{drafter}, batch {batch}: {len(questions)} questions, {len(arms)} arms")
            run_blocks(arms, questions, batch, options.seed)
            found[f"{drafter}, batch {batch}"] = _mixed_result(arms)
    return found


def _mixed_result(arms: Sequence[Arm]) -> dict[str, Any]:
    rates = {arm.name: arm.rate() for arm in arms}
    best = max((name for name in rates if name.startswith("fixed")), key=rates.__getitem__)
    best = best if rates[best] > rates["plain"] else "plain"
    auto = next(arm for arm in arms if arm.name == "auto")
    categories = sorted({block.label for block in auto.blocks})
    by_category = {}
    for category in categories:

        def keep(block: Block, category: str = category) -> bool:
            return block.label == category

        by_category[category] = over(auto, arms[0], keep)
    result = {
        "rates": rates,
        "best_fixed": best,
        "auto_over_best_fixed": rates["auto"] / rates[best],
        "auto_over_plain": rates["auto"] / rates["plain"],
        "auto_over_plain_by_category": by_category,
        "parts": {arm.name: arm.parts() for arm in arms},
        "identical": identical(arms),
    }
    worst = min(by_category, key=lambda name: by_category[name][0])
    low, high = by_category[worst][1:]
    say(f"auto {rates['auto']:.1f}, best fixed {best} {rates[best]:.1f}: {result['auto_over_best_fixed']:.3f}; over "
        f"plain {result['auto_over_plain']:.3f}, worst category {worst} {by_category[worst][0]:.3f} "
        f"({low:.2f}-{high:.2f})")  # fmt: skip
    return result


def phases(options: argparse.Namespace) -> dict[str, Any]:
    """How much of an oracle's gain auto gets where traffic changes."""
    models, found = Models(options), dict[str, Any]()
    for drafter in options.drafter:
        arms = make_arms(models.model, models.load, drafter, [*fixed_lengths(options), "auto"], 1)
        engine = arms[0].engine
        size = 4 if options.quick else PHASE
        questions, kinds = [], []
        for phase in range(options.phases):
            kind = COPYING if phase % 2 == 0 else CHATTING
            questions += demo_questions(engine, kind, size, options.demo_tokens)
            kinds += [phase % 2] * size
        run_blocks(arms, questions, 1, options.seed)
        found[drafter] = _phases_result(arms, kinds)
    return found


def _phases_result(arms: Sequence[Arm], kinds: Sequence[int]) -> dict[str, Any]:
    """An oracle runs each kind of phase with the length (or none) that was best in it."""
    fixed = [arm for arm in arms if arm.name != "auto"]
    auto = next(arm for arm in arms if arm.name == "auto")
    chosen, tokens, seconds = {}, 0, 0.0
    for kind in sorted(set(kinds)):

        def own(arm: Arm, kind: int = kind) -> tuple[int, float]:
            blocks = [block for block, which in zip(arm.blocks, kinds, strict=True) if which == kind]
            return sum(block.tokens for block in blocks), sum(block.seconds for block in blocks)

        best = max(fixed, key=lambda arm: own(arm)[0] / own(arm)[1])
        chosen[("copying", "chatting")[kind]] = best.name
        tokens, seconds = tokens + own(best)[0], seconds + own(best)[1]
    oracle = tokens / seconds
    single = max(fixed, key=lambda arm: arm.rate())
    gain = oracle - single.rate()
    share = (auto.rate() - single.rate()) / gain if gain > 0 else float("inf")
    say(f"oracle {oracle:.1f} {chosen}, best single {single.name} {single.rate():.1f}, auto {auto.rate():.1f}: "
        f"{100 * share:.0f} % of the gain")  # fmt: skip
    return {
        "oracle": oracle,
        "chosen": chosen,
        "single": single.name,
        "rates": {arm.name: arm.rate() for arm in arms},
        "share_of_gain": share,
        "identical": identical(arms),
    }


def rows(options: argparse.Namespace) -> dict[str, Any]:
    """Verified rows and speed of the prefix scheduler against verify-all, batch 8."""
    models, found = Models(options), dict[str, Any]()
    for drafter in options.drafter:
        controllers = ["fixed:num_draft=8", "prefix-scheduler", "prefix-scheduler:stale=2", "auto"]
        arms = make_arms(models.model, models.load, drafter, controllers, 8)
        questions = file_questions(arms[0].engine, options.prompts, options.per_category, options.new_tokens)
        run_blocks(arms, questions, 8, options.seed)
        verify_all = arms[1]
        found[drafter] = {}
        for arm in arms:
            parts = arm.parts()
            per_step = parts["rows"] / max(parts["requests"], 1)
            found[drafter][arm.name] = {
                "rows_per_request_step": per_step,
                "rate": arm.rate(),
                "over_verify_all": arm.rate() / verify_all.rate(),
            }
            say(f"{drafter}, {arm.name}: {per_step:.2f} rows per request and step, {arm.rate():.1f} tokens/s")
        found[drafter]["identical"] = identical(arms)
    return found


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a controller's calls."""
    names = options.controller or ["auto", "prefix-scheduler", "ema", "heuristic", "bandit", "fixed"]
    found = control_overhead.run(names, 200 if options.quick else 1000)
    for name, figures in found.items():
        by_batch = ", ".join(f"{batch}: {value:.0f}" for batch, value in figures["us"].items())
        line = f"{figures['us_per_step']:.0f} a step + {figures['us_per_request']:.1f} a request"
        say(f"{name}: us by batch {by_batch}; {line}")
    return found


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "costs": costs,
    "mixed": mixed,
    "phases": phases,
    "rows": rows,
    "overhead": overhead,
}


def main() -> None:
    """Run one section."""
    options = parse(sys.argv[1:])
    load = MachineLoad()
    found = SECTIONS[options.section](options)
    others = load.others()
    if others is not None and others > 0.1:
        say(f"{others:.1f} cores were busy with other work: these figures say little")
    document = {
        "section": options.section,
        "model": options.model,
        "hardware": hardware(options.threads),
        "versions": versions(),
        "other_cores": others,
        "figures": found,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
