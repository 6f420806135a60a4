"""Arms of `bench_control.py`: one engine per drafter and controller over the same weights, run in turns.

Blocks of prompts go through every arm in an order drawn from the seed; ids are compared with the first arm's. Rates are
tokens over wall seconds of decoding and prompts together, totals over totals. Invariant: an arm keeps its engine, so
its controller learns as a served engine would; prefix reuse is off.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.bench.demo_prompts import DEMO_PROMPTS
from draftsmith.bench.environment import Settling
from draftsmith.bench.prompts import load_prompts
from draftsmith.core.intervals import rates_interval
from draftsmith.core.stats import EventLog
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt as all arms get it."""

    category: str
    ids: list[int]
    max_new_tokens: int


@dataclass
class Block:
    """What one arm did with one block of prompts."""

    categories: tuple[str, ...]
    tokens: int
    seconds: float
    ids: list[tuple[int, ...]]
    log: EventLog = field(repr=False)

    @property
    def label(self) -> str:
        """Its categories: a block of a large batch may hold two."""
        return " + ".join(sorted(set(self.categories)))


@dataclass
class Arm:
    """An engine under a name."""

    name: str
    engine: Engine
    blocks: list[Block] = field(default_factory=list)

    def rate(self, keep: Callable[[Block], bool] = lambda block: True) -> float:
        """Tokens per second over the blocks that are kept."""
        kept = [block for block in self.blocks if keep(block)]
        seconds = sum(block.seconds for block in kept)
        return sum(block.tokens for block in kept) / seconds if seconds else 0.0

    def parts(self) -> dict[str, float]:
        """Where the seconds of steps without prompt rows went, and what those steps did."""
        total = dict.fromkeys(("steps", "requests", "rows", "tokens", "draft", "verify", "sample", "other"), 0.0)
        for block in self.blocks:
            prompts = {record.step for record in block.log.requests if record.prompt}
            total["tokens"] += sum(record.emitted for record in block.log.requests if record.step not in prompts)
            for step in block.log.steps:
                if step.step not in prompts:
                    total["steps"] += 1
                    total["requests"] += step.requests
                    total["rows"] += step.rows
                    total["draft"] += step.draft_seconds
                    total["verify"] += step.verify_seconds
                    total["sample"] += step.sample_seconds
                    total["other"] += step.other_seconds
        return total


def make_arms(
    model: LoadedModel, load: Callable[[str], LoadedModel], drafter: str, controllers: Sequence[str], batch: int
) -> list[Arm]:
    """Plain decoding first, then the drafter under each controller; all warmed by a prompt with repetition."""
    arms = [Arm("plain", _engine(model, load, "none", "fixed:num_draft=0", batch))]
    arms += [Arm(controller, _engine(model, load, drafter, controller, batch)) for controller in controllers]
    for arm in arms:
        arm.engine.generate([[100, 101, 102, 103] * 8] * batch, max_new_tokens=16, ignore_eos=True)
        arm.engine.take_events()
    return arms


def _engine(
    model: LoadedModel, load: Callable[[str], LoadedModel], drafter: str, controller: str, batch: int
) -> Engine:
    settings = EngineSettings(drafter=drafter, controller=controller, max_batch=batch, prefix_cache=False)
    return Engine(model, settings, load=load)


def run_blocks(arms: Sequence[Arm], questions: Sequence[Question], batch: int, seed: int) -> None:
    """Every block of `batch` prompts through every arm."""
    settling = Settling()
    for start in range(0, len(questions), batch):
        block = questions[start : start + batch]
        order = list(arms)
        random.Random(f"{seed}/{start}").shuffle(order)
        for arm in order:
            settling.wait()
            began = time.perf_counter()
            most = max(question.max_new_tokens for question in block)
            results = arm.engine.generate([question.ids for question in block], max_new_tokens=most)
            seconds = time.perf_counter() - began
            ids = [result.token_ids for result in results]
            categories = tuple(question.category for question in block)
            tokens = sum(len(found) for found in ids)
            arm.blocks.append(Block(categories, tokens, seconds, ids, arm.engine.take_events()))
        so_far = ", ".join(f"{arm.name} {arm.rate():.1f}" for arm in arms)
        say(f"  {start + len(block)}/{len(questions)}: {so_far}")


def over(arm: Arm, other: Arm, keep: Callable[[Block], bool]) -> tuple[float, float, float]:
    """How many times as fast one arm is as the other on the blocks kept, with the ends of its 95 % interval."""
    pairs = [
        ((float(left.tokens), left.seconds), (float(right.tokens), right.seconds))
        for left, right in zip(arm.blocks, other.blocks, strict=True)
        if keep(left)
    ]
    found = rates_interval([[left for left, _ in pairs]], [[right for _, right in pairs]])
    return found.ratio, found.low, found.high


def identical(arms: Sequence[Arm]) -> dict[str, int]:
    """Answers whose ids are the first arm's."""
    wanted = [ids for block in arms[0].blocks for ids in block.ids]
    found = {}
    for arm in arms:
        own = [ids for block in arm.blocks for ids in block.ids]
        found[arm.name] = sum(left == right for left, right in zip(own, wanted, strict=True))
    return found


def demo_questions(engine: Engine, kinds: Sequence[str], count: int, most_tokens: int) -> list[Question]:
    """`count` questions of the demo's kinds, in turn and again and again, each time with another number before it.

    Answers end at the demo's own limit, and at `most_tokens`.
    """
    prompts = [prompt for prompt in DEMO_PROMPTS if prompt.kind in kinds]
    found = []
    for number in range(count):
        prompt = prompts[number % len(prompts)]
        messages: list[dict[str, Any]] = [dict(message) for message in prompt.messages]
        messages[0]["content"] = f"Number {number + 1}.\n{messages[0]['content']}"
        most = min(prompt.max_new_tokens, most_tokens)
        found.append(Question(category=prompt.kind, ids=engine.encode(messages), max_new_tokens=most))
    return found


def file_questions(engine: Engine, source: str, per_category: int, max_new_tokens: int) -> list[Question]:
    """First turns of a file's prompts (or of the built-in ones)."""
    return [
        Question(
            category=prompt.category or "-",
            ids=engine.encode([{"role": "user", "content": prompt.text}]),
            max_new_tokens=max_new_tokens,
        )
        for prompt in load_prompts(source, per_category=per_category)
    ]
