"""Runs the arms of a benchmark on the same prompts, interleaved.

Called by the command line; drives arms through `bench.arms` from one thread. Invariants: within a block every arm
gets the same prompts, settings and seeds; the order of arms is shuffled per block and repeat from the seed; the
next turn of a conversation is built on the arm's own answer; a request that fails is on record with its reason.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from draftsmith.bench.arms import COUNTED_BY, Answer, Arm, Ask, Message
from draftsmith.bench.arrivals import OpenLoop
from draftsmith.bench.environment import Settling
from draftsmith.bench.prompts import Prompt
from draftsmith.bench.runs import ArmRun, RequestRun
from draftsmith.bench.workloads.prompt import mended
from draftsmith.errors import DraftsmithError, OptionError, PromptError

# Copying, so that drafters with a local index draft and the controllers see real verification steps.
_WARM_UP = "Repeat this line three times: one two three four five six seven eight nine ten, one two three four."
_WARM_UP_TOKENS = 32
_POLL_SECONDS = 0.05

Encode = Callable[[Sequence[Message] | None, str], list[int] | None]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts and how they are sent.

    `open_loop`: when each request of the only block is due; None sends `concurrency` at once and the next when one has
    ended (a closed loop). `timeout`: seconds without any sign of
    life after which what runs counts as failed. `raw`: no chat template. `end_ids`: the target's own end tokens as
    far as they are known; `ignore_eos` writes past them.
    """

    prompts: Sequence[Prompt]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    end_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    concurrency: int = 1
    open_loop: OpenLoop | None = None
    seed: int = 0
    raw: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise OptionError(f"concurrency must be at least 1, got {self.concurrency}")
        if not self.timeout > 0:
            raise OptionError(f"timeout must be above 0 seconds, got {self.timeout}")


def usable_prompts(workload: Workload, encode: Encode) -> tuple[list[int], dict[int, str]]:
    """Indices of the prompts whose first turn the target can take, and the reasons of those it cannot."""
    usable: list[int] = []
    failed: dict[int, str] = {}
    for index, prompt in enumerate(workload.prompts):
        try:
            if workload.raw and prompt.system:
                raise PromptError(f"prompt {prompt.prompt_id} has a system message, which a raw text cannot carry")
            encode(None if workload.raw else first_messages(prompt), prompt.text)
        except DraftsmithError as error:
            failed[index] = str(error)
        else:
            usable.append(index)
    return usable, failed


def first_messages(prompt: Prompt) -> list[Message]:
    """A conversation up to its first question."""
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.turns[0]}]


def blocks_of(workload: Workload, usable: Sequence[int]) -> list[tuple[int, ...]]:
    """The usable prompts in blocks of `concurrency`, each of one category; a category's last may be smaller.

    One category per block, so that a category's time is the time of its blocks. Blocks stand in the order of
    their first prompts. An open loop is one block, its prompts those a trace names, else one after another.
    """
    if workload.open_loop is not None:
        return [workload.open_loop.prompts(usable)] if usable else []
    by_category: dict[str, list[int]] = {}
    for index in usable:
        by_category.setdefault(workload.prompts[index].category, []).append(index)
    size = workload.concurrency
    return sorted(
        tuple(indices[start : start + size])
        for indices in by_category.values()
        for start in range(0, len(indices), size)
    )


def warm_up(arm: Arm, workload: Workload, encode: Encode) -> str | None:
    """One short answer per place to a prompt that is not measured; what it logs is thrown away. Returns what failed."""
    prompt = Prompt(prompt_id="warm-up", turns=(_WARM_UP,))
    work = Workload(
        prompts=[prompt],
        max_new_tokens=_WARM_UP_TOKENS,
        temperature=workload.temperature,
        top_p=workload.top_p,
        end_ids=workload.end_ids,
        ignore_eos=workload.ignore_eos,
        concurrency=workload.concurrency,
        raw=workload.raw,
        timeout=workload.timeout,
    )
    block = (0,) * min(workload.concurrency, 8)
    run = run_block(arm, work, encode, block=block, number=0, repeat=0, order=0)
    return next((request.error for request in run.requests if request.error is not None), None)


def measure(
    arms: Mapping[str, Arm], workload: Workload, encode: Encode, blocks: Sequence[Sequence[int]], *, repeat: int = 0
) -> Iterator[ArmRun]:
    """Every arm on every block once, in an order shuffled per block.

    After an engine of another process the machine is given time to come to rest.
    """
    settling, may_linger = Settling(), any(arm.is_outside for arm in arms.values())  # of warming up, too
    for number, block in enumerate(blocks):
        order = list(arms)
        random.Random(f"{workload.seed}/{number}/{repeat}" if repeat else f"{workload.seed}/{number}").shuffle(order)
        for place, name in enumerate(order):
            if may_linger:
                settling.wait()
            may_linger = arms[name].is_outside
            yield run_block(arms[name], workload, encode, block=block, number=number, repeat=repeat, order=place)


def run_block(
    arm: Arm, workload: Workload, encode: Encode, *, block: Sequence[int], number: int, repeat: int, order: int
) -> ArmRun:
    """One arm on one block, every turn of every prompt. Interrupts leave the arm without running requests."""
    arm.block_counters()
    arm.take_events()
    driver = _Block(arm, workload, encode, block)
    try:
        seconds = driver.run()
    except BaseException:
        arm.cancel()
        raise
    return ArmRun(
        repeat=repeat,
        block=number,
        arm=arm.name,
        order=order,
        seconds=seconds,
        requests=tuple(driver.done),
        events=arm.take_events(),
        counters=arm.block_counters(),
        memory_bytes=arm.memory_bytes(),
    )


@dataclass
class _Talk:
    """A conversation under way: what has been said, and the request that runs. `limit`: a trace's on its answers."""

    prompt: int
    messages: list[Message]
    limit: int | None = None
    turn: int = 0
    due: float = 0.0
    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)


@final
class _Block:
    """Drives one arm through one block."""

    def __init__(self, arm: Arm, workload: Workload, encode: Encode, block: Sequence[int]) -> None:
        self._arm = arm
        self._work = workload
        self._encode = encode
        loop = workload.open_loop
        limits = [request.output_len for request in loop.requests] if loop is not None else []
        self._waiting = deque(
            _Talk(
                prompt,
                first_messages(workload.prompts[prompt]),
                due=0.0 if loop is None else loop.times[place],
                limit=limits[place] if limits else None,
            )
            for place, prompt in enumerate(block)
        )
        self._running: dict[int, _Talk] = {}
        self._places = workload.concurrency if loop is None else len(block)
        self._next_key = 0
        self._began = 0.0
        self.done: list[RequestRun] = []

    def run(self) -> float:
        """Returns the wall seconds from the first request to the last answer."""
        self._began = heard = time.perf_counter()
        ended = self._began
        while self._waiting or self._running:
            now = time.perf_counter()
            self._send_due(now - self._began)
            if not self._running:
                time.sleep(min(_POLL_SECONDS, max(self._waiting[0].due - (now - self._began), 0.0)))
                heard = time.perf_counter()
                continue
            for item in self._arm.poll(self._wait(now - self._began)):
                heard = ended = item.seconds
                if isinstance(item, Answer):
                    self._answered(item)
                else:
                    self._running[item.key].arrivals.append((item.seconds - self._began, item.num_tokens))
            if self._running and time.perf_counter() - heard > self._work.timeout:
                ended = time.perf_counter()
                self._give_up(ended)
        return ended - self._began

    def _wait(self, elapsed: float) -> float:
        if not self._waiting or len(self._running) >= self._limit:
            return _POLL_SECONDS
        return min(_POLL_SECONDS, max(self._waiting[0].due - elapsed, 0.0))

    @property
    def _limit(self) -> int:
        return min(self._places, self._arm.max_concurrency)

    def _send_due(self, elapsed: float) -> None:
        while self._waiting and len(self._running) < self._limit and self._waiting[0].due <= elapsed:
            self._send(self._waiting.popleft())

    def _send(self, talk: _Talk) -> None:
        prompt = self._work.prompts[talk.prompt]
        messages = None if self._work.raw else talk.messages
        text = str(talk.messages[-1]["content"])
        key, self._next_key = self._next_key, self._next_key + 1
        talk.sent = time.perf_counter() - self._began
        if self._work.open_loop is None and talk.turn == 0:
            talk.due = talk.sent
        self._running[key] = talk
        try:
            ids = self._encode(messages, text)
        except DraftsmithError as error:
            self._answered(Answer(key=key, seconds=time.perf_counter(), error=str(error)))
            return
        self._arm.submit(
            Ask(
                key=key,
                ids=ids,
                messages=messages,
                text=text,
                max_new_tokens=talk.limit or prompt.max_new_tokens or self._work.max_new_tokens,
                temperature=self._work.temperature,
                top_p=self._work.top_p,
                seed=self._work.seed,
                end_ids=frozenset() if self._work.ignore_eos else self._work.end_ids,
                ignore_eos=self._work.ignore_eos,
            )
        )

    def _answered(self, answer: Answer) -> None:
        talk = self._running.pop(answer.key)
        prompt = self._work.prompts[talk.prompt]
        ended = answer.seconds - self._began
        known: dict[str, Any] = {"error": answer.error and mended(answer.error)}
        if answer.error is None:
            known = {
                "prompt_tokens": answer.prompt_tokens,
                "num_tokens": answer.num_tokens,
                "token_ids": answer.token_ids,
                "text": mended(answer.text),
                "finish_reason": answer.finish_reason,
                "arrivals": tuple(talk.arrivals),
                "request": answer.request,
                "counters": answer.counters,
                "total_variation": answer.total_variation,
                "counted_by": answer.details.get(COUNTED_BY) if answer.token_ids is None else None,
            }
        self.done.append(
            RequestRun(
                prompt=talk.prompt,
                turn=talk.turn,
                prompt_id=prompt.prompt_id,
                category=prompt.category,
                due=talk.due,
                sent=talk.sent,
                ended=ended,
                **known,
            )
        )
        if answer.error is None and talk.turn + 1 < len(prompt.turns):
            said = [
                {"role": "assistant", "content": mended(answer.text)},
                {"role": "user", "content": prompt.turns[talk.turn + 1]},
            ]
            self._send(_Talk(talk.prompt, [*talk.messages, *said], talk.limit, turn=talk.turn + 1, due=ended))

    def _give_up(self, now: float) -> None:
        """Nothing has come for too long: what runs has failed."""
        self._arm.cancel()
        for key in list(self._running):
            self._answered(Answer(key=key, seconds=now, error=f"no sign of life for {self._work.timeout:g} s"))
