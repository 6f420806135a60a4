"""An arm that answers from a script: known tokens, steps and times, so that every figure can be checked by hand."""

import time
from dataclasses import dataclass, field

from draftsmith.bench.arms import Answer, Arm, Arrival, Counters, Description
from draftsmith.bench.differences import find_differences
from draftsmith.bench.prompts import Prompt
from draftsmith.bench.runner import Workload, blocks_of, measure, usable_prompts
from draftsmith.bench.runs import Difference, Measured
from draftsmith.core.stats import EventLog, RequestStepRecord, StepRecord
from draftsmith.errors import PromptError

NUM_TOKENS = 9


@dataclass
class ScriptedArm(Arm):
    """Emits `tokens_per_step` tokens a step, all requests in step. `changes`: prompt text -> output position where it
    goes astray. `fails_on`: texts it fails to answer; `silent_on`: texts it never answers. `logs`: keeps an event log.
    """

    name: str
    tokens_per_step: int = 1
    changes: dict = field(default_factory=dict)
    refuses: frozenset = frozenset()
    fails_on: frozenset = frozenset()
    silent_on: frozenset = frozenset()
    logs: bool = True
    counts: bool = False
    max_concurrency: int = 64
    step_seconds: float = 0.0
    asked: list = field(default_factory=list)
    on_poll: object = None

    def __post_init__(self):
        self._running = {}
        self._log = EventLog()
        self._requests = self._steps = 0
        self.closed = 0

    def open(self):
        return Description(engine="scripted", model="fake", bits_per_weight=4.5)

    def encode(self, messages, text):
        if text in self.refuses:
            raise PromptError(f"{text} is too long")
        return [ord(character) for character in text]

    def submit(self, ask):
        self.asked.append(ask)
        self._running[ask.key] = (ask, self._requests, [])
        self._requests += 1

    def poll(self, timeout):
        if self.on_poll is not None:
            self.on_poll(self)
        time.sleep(self.step_seconds)
        now = time.perf_counter()
        found, rows, records = [], 0, []
        for key, (ask, request, tokens) in list(self._running.items()):
            if ask.text in self.silent_on:
                continue
            if ask.text in self.fails_on:
                del self._running[key]
                found.append(Answer(key=key, seconds=now, error="no room"))
                continue
            position = len(tokens)
            size = 1 if position == 0 else min(self.tokens_per_step, ask.max_new_tokens - position)
            tokens += self._tokens(ask, position, size)
            done = len(tokens) == ask.max_new_tokens
            rows += size
            records.append((request, position, size, "length" if done else None))
            found.append(Arrival(key=key, seconds=now, num_tokens=size))
            if done:
                del self._running[key]
                found.append(self._answer(ask, request, tokens, now))
        if records:
            self._record(rows, records)
        elif not found:
            time.sleep(timeout)
        return found

    def cancel(self):
        self._running.clear()

    def close(self):
        self.cancel()
        self.closed += 1

    def take_events(self):
        log, self._log = self._log, EventLog()
        return log if self.logs else EventLog()

    def memory_bytes(self):
        return 1000

    def _tokens(self, ask, position, size):
        first = ord(ask.text[0])
        return [
            999 if self.changes.get(ask.text) == place else (first + place) % 900
            for place in range(position, position + size)
        ]

    def _answer(self, ask, request, tokens, now):
        steps = 1 + -(-(len(tokens) - 1) // self.tokens_per_step)
        counters = Counters(
            drafts=steps - 1, drafted=len(tokens) - steps, accepted=len(tokens) - steps, steps=steps - 1
        )
        return Answer(
            key=ask.key,
            seconds=now,
            prompt_tokens=3,
            token_ids=tuple(tokens),
            num_tokens=len(tokens),
            text="text of " + ask.text,
            finish_reason="length",
            request=request if self.logs else None,
            counters=counters if self.counts else None,
        )

    def _record(self, rows, records):
        self._log.append_step(StepRecord(self._steps, rows, len(records), 0, 0.001, 0.01, 0.002, 0.003))
        for request, position, size, reason in records:
            drafted = size - 1
            self._log.append_request(
                RequestStepRecord(
                    self._steps, request, position, self.name, drafted, drafted, drafted, size, reason, position == 0
                )
            )
        self._steps += 1


def workload(texts, *, categories=None, **settings):
    """A workload of short prompts; a text that is a tuple holds the turns of one."""
    categories = categories or [""] * len(texts)
    prompts = [
        Prompt(prompt_id=f"id{i}", turns=(text,) if isinstance(text, str) else text, category=category)
        for i, (text, category) in enumerate(zip(texts, categories, strict=True))
    ]
    return Workload(prompts=prompts, max_new_tokens=NUM_TOKENS, **settings)


def config(arms, work, failed=(), **more):
    """What the command line would write down."""
    return {
        "model": "fake",
        "baseline": next(iter(arms)),
        "arms": list(arms),
        "descriptions": {name: {"engine": "scripted", "bits_per_weight": 4.5} for name in arms},
        "load": f"closed:{work.concurrency}",
        "targets": {},
        "hardware": {"cores": 2},
        "versions": {"python": "3"},
        "temperature": 0.0,
        "num_prompts": len(work.prompts),
        "failed_prompts": {str(key): value for key, value in dict(failed).items()},
        **more,
    }


def with_seconds(run, seconds):
    """The run as if it had taken so long."""
    return type(run)(**{**{name: getattr(run, name) for name in run.__dataclass_fields__}, "seconds": seconds})


def measured_run(arms, work, *, seconds=None, stop_after=None, gap=None, repeats=1, **more):
    """Measure all; `seconds`: (arm, block, repeat) -> wall seconds in place of the clock's."""
    encode = next(iter(arms.values())).encode
    usable, failed = usable_prompts(work, encode)
    runs = []
    for repeat in range(repeats):
        for run in measure(arms, work, encode, blocks_of(work, usable), repeat=repeat):
            if seconds is not None:
                run = with_seconds(run, seconds(run.arm, run.block, run.repeat))
            runs.append(run)
            if stop_after is not None and len(runs) == stop_after:
                break
    baseline = next(iter(arms))
    differences = {key: Difference(position=place, gap=gap) for key, place in find_differences(runs, baseline).items()}
    return Measured(
        config=config(arms, work, failed, **more),
        runs=tuple(runs),
        differences=differences,
        failed=failed,
        interrupted=stop_after is not None,
    )
