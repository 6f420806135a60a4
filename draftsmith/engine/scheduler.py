"""Continuous batching: who takes part in the next step, with how many rows.

Called by the engine, from one thread at a time (`submit`, `check_fits` and `note_cancelled` from any).
Decoding sequences come first, then prompt chunks, then new admissions, first come first served.
Invariants: a sequence is waiting, running or ended; the bytes of cache and drafters together stay within
the budget; a preempted sequence resumes with the same draws, since noise is keyed by position.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from contextlib import ExitStack

from draftsmith.control.base import MAX_NODES, Controller, RequestSignal
from draftsmith.core.stats import EventLog
from draftsmith.engine.prefix import PrefixPool, drafter_bytes
from draftsmith.engine.sequence import Sequence
from draftsmith.engine.step import Slot, run_step
from draftsmith.engine.streams import Call
from draftsmith.errors import CapacityError
from draftsmith.models.backend import Backend

_POOL_CAPACITY = 16
_MAX_ROWS = MAX_NODES + 1
"""Most rows of one sequence in one step: what `KVCache.sequence_bytes` assumes of windowed layers."""
_MAX_RECORDS = 1 << 19
"""Request-steps on record before the older half is dropped; they hold a quarter of a gigabyte at most."""


class Scheduler:
    """Queues, memory and the plan of each step for one target."""

    def __init__(
        self,
        target: Backend,
        controller: Controller,
        *,
        memory_bytes: int,
        max_batch: int,
        chunk_rows: int,
        prefix_cache: bool,
    ) -> None:
        self._target = target
        self._cache = target.cache
        self._controller = controller
        self._memory_bytes = memory_bytes
        self._max_batch = max_batch
        self._chunk_rows = chunk_rows
        self._pool = PrefixPool(target.cache, _POOL_CAPACITY if prefix_cache else 0)
        self._prefix_cache = prefix_cache
        self._num_steps = 0
        self._submitted: deque[Sequence] = deque()
        self._cancelled: deque[Call] = deque()
        self._free: int | None = None
        self._promised = 0
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: list[Sequence] = []
        self.log = EventLog()

    def check_fits(self, sequence: Sequence) -> None:
        """Raises `CapacityError` when the sequence could not even run alone."""
        longest = sequence.view.prompt_len + sequence.params.max_new_tokens
        needed = self._bytes(sequence, longest)
        if needed > self._memory_bytes:
            raise CapacityError(
                f"{longest} tokens (prompt and max_new_tokens) need {needed / 2**20:.1f} MiB of cache, drafter "
                f"{sequence.drafter_name} included; the budget is {self._memory_bytes / 2**20:.1f} MiB; "
                "ask for fewer tokens or raise memory_bytes"
            )

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence that `check_fits` let pass. Any thread may, also while a step runs."""
        self._submitted.append(sequence)

    def note_cancelled(self, call: Call) -> None:
        """A caller has let go: the next step or `reap` ends what is left of its sequences. Any thread may."""
        self._cancelled.append(call)

    @property
    def has_cancelled(self) -> bool:
        """Whether there are cancelled calls that `reap` has not seen yet."""
        return bool(self._cancelled)

    @property
    def idle(self) -> bool:
        """Whether no sequence is on its way."""
        return not (self._submitted or self.waiting or self.running)

    def step(self) -> bool:
        """Run one step. Returns False when there was nothing to do."""
        self.reap()
        self._receive()
        plan = self._plan()
        if not plan:
            return False
        run_step(plan, self._target, self._controller, self.log, self._num_steps)
        self._num_steps += 1
        if len(self.log.requests) > _MAX_RECORDS:
            self._shorten_log()
        for slot in plan:
            if slot.sequence.finish_reason is not None:
                self._retire(slot.sequence)
            elif not slot.sequence.live:
                self._release(slot.sequence)
                self.running.remove(slot.sequence)
        self.reap()
        return True

    def abort(self, error: BaseException) -> None:
        """A step broke off, at whatever point: what was running fails with `error`, what waits can go on.

        Nothing the step left behind survives: rows without an owner are closed, prefixes it was about to
        keep are dropped.
        """
        broken, self.running = self.running, []
        for sequence in broken:
            self.waiting.pop(sequence.id, None)
            sequence.fail(error)
        with ExitStack() as stack:  # each is released even if a drafter fails to forget another
            stack.callback(self._pool.close_others)
            for sequence in broken:
                self._pool.discard(sequence.id)
                stack.callback(self._release, sequence)

    def _shorten_log(self) -> None:
        first = self.log.requests[len(self.log.requests) // 2].step
        warnings.warn(
            f"the event log is full: records before step {first} are dropped; call take_events() more often",
            RuntimeWarning,
            stacklevel=2,
        )
        self.log = EventLog(
            (step for step in self.log.steps if step.step >= first),
            (request for request in self.log.requests if request.step >= first),
        )

    def take_log(self) -> EventLog:
        """The event log so far; a new one begins."""
        log, self.log = self.log, EventLog()
        return log

    def clear_prefixes(self) -> None:
        """Forget all reusable prefixes."""
        self._pool.clear()

    # -- planning ---------------------------------------------------------------------------------

    def _plan(self) -> list[Slot]:
        self._free, self._promised = None, 0
        plan = self._plan_decoding()
        rows_left = self._chunk_rows - sum(1 + slot.budget for slot in plan)
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # preempted for the sake of an older one
            committed = self._cache.committed(sequence.id)
            pending = len(sequence.view.tokens) - committed
            if pending > 1 and rows_left > 0:
                rows_left -= self._plan_chunk(plan, sequence, min(pending, rows_left, _MAX_ROWS))
        while rows_left > 0 and (admitted := self._admit()) is not None:
            pending = len(admitted.view.tokens) - self._cache.committed(admitted.id)
            rows_left -= self._plan_chunk(plan, admitted, min(pending, rows_left, _MAX_ROWS))
        return [slot for slot in plan if slot.sequence in self.running]

    def _plan_decoding(self) -> list[Slot]:
        slots = []
        for sequence in self.running:
            committed = self._cache.committed(sequence.id)
            if len(sequence.view.tokens) - committed == 1:
                slots.append(Slot(sequence, committed, 1, draws=True, from_prompt=sequence.view.position == 0))
        self._set_budgets(slots)
        plan = []
        for slot in slots:  # oldest first: the youngest gives way
            if slot.sequence not in self.running:
                continue
            if not self._make_room(slot.sequence, 1 + slot.budget, may_preempt=False):
                slot.budget = 0
                if not self._make_room(slot.sequence, 1, may_preempt=True):
                    continue
            plan.append(slot)
        return [slot for slot in plan if slot.sequence in self.running]

    def _set_budgets(self, slots: list[Slot]) -> None:
        drafting, signals = [], []
        for slot in slots:
            sequence = slot.sequence
            # The step emits one token more than it accepts: drafting up to the limit itself is waste.
            max_draft = min(sequence.remaining, self._chunk_rows // self._max_batch, _MAX_ROWS) - 1
            if max_draft >= 1 and sequence.drafter.drafts and not slot.from_prompt:
                drafting.append(slot)
                signals.append(
                    RequestSignal(
                        sequence.id,
                        sequence.drafter_name,
                        max_draft,
                        slot.committed,
                        sequence.remaining,
                        sequence.drafter.pending(sequence.view),
                        sequence.drafter.traits,
                        sequence.params.latency_target,
                    )
                )
        for slot, signal, budget in zip(drafting, signals, self._controller.budget(signals), strict=True):
            assert 0 <= budget <= signal.max_draft, "a controller exceeded max_draft"
            slot.budget = budget

    def _plan_chunk(self, plan: list[Slot], sequence: Sequence, size: int) -> int:
        # The oldest must get on, or sequences that all read prompts could wait for each other for ever.
        if not self._make_room(sequence, size, may_preempt=sequence is self.running[0]):
            return 0
        committed = self._cache.committed(sequence.id)
        draws = committed + size == len(sequence.view.tokens)
        plan.append(Slot(sequence, committed, size, draws=draws, from_prompt=size > 1 or sequence.view.position == 0))
        return size

    def _admit(self) -> Sequence | None:
        if len(self.running) >= self._max_batch:
            return None
        for sequence in self.waiting.values():
            sibling = sequence.sibling
            if sibling is not None and not self._prompt_done(sibling):
                continue  # its sibling is still reading the same prompt
            if not self._fits(sequence):
                return None
            # Never in no queue, even if interrupted here.
            self.running.append(sequence)
            del self.waiting[sequence.id]
            self._open(sequence)
            self._free = None
            return sequence
        return None

    def _prompt_done(self, sequence: Sequence) -> bool:
        if sequence in self.running:
            return self._cache.committed(sequence.id) >= sequence.view.prompt_len - 1
        return not sequence.live

    def _open(self, sequence: Sequence) -> None:
        tokens = sequence.view.tokens
        candidates = [(other.id, other.drafter) for other in self.running if other is not sequence]
        if not self._prefix_cache:
            candidates = [pair for pair in candidates if sequence.sibling and pair[0] == sequence.sibling.id]
        hit = self._pool.find(tokens, candidates)
        if hit is not None and sequence.drafter.needs and hit.drafter is not sequence.drafter:
            hit = None  # taps of reused rows would be missing: the rows are scored again
        if hit is not None:
            self._pool.fork(hit, sequence.id, sequence.drafter)
            if sequence.view.position == 0:
                sequence.reused = hit.length
        else:
            self._cache.open(sequence.id)
        reused = self._cache.tokens(sequence.id)
        assert reused == tokens[: len(reused)], "a reused prefix is not the prompt's"

    # -- memory -----------------------------------------------------------------------------------

    def _bytes(self, sequence: Sequence, num_tokens: int) -> int:
        return self._cache.sequence_bytes(num_tokens) + drafter_bytes(sequence.drafter, num_tokens)

    def _room(self) -> int:
        """Bytes nobody holds, and no drafter will have learned from this step's tokens."""
        if self._free is None:
            drafters = sum(drafter_bytes(item.drafter, len(item.view.tokens)) for item in self.running)
            self._free = self._memory_bytes - self._cache.used_bytes - drafters - self._pool.drafter_bytes()
        return self._free - self._promised

    def _evict_for(self, needed: int) -> bool:
        """Give up one reusable prefix, unless even giving up all would not do."""
        if needed > self._room() + self._pool.num_bytes():
            return False
        self._free = None
        return self._pool.evict_oldest()

    def _fits(self, sequence: Sequence) -> bool:
        needed = self._bytes(sequence, len(sequence.view.tokens) + 1)
        for other in self.running:  # what is admitted shall read its prompt to the end
            pending = len(other.view.tokens) - self._cache.committed(other.id)
            if pending > 1:
                needed += self._cache.growth_bytes(other.id, pending)
        while needed > self._room():
            if not self._evict_for(needed):
                return False
        return True

    def _make_room(self, sequence: Sequence, num_rows: int, *, may_preempt: bool) -> bool:
        """Reserve rows; gives up reusable prefixes first, then the youngest sequence. False: no room."""
        growth = self._cache.growth_bytes(sequence.id, num_rows)
        num_new = self._cache.committed(sequence.id) + num_rows + 1 - len(sequence.view.tokens)
        learned = sequence.drafter.bytes_per_token * max(num_new, 0)
        needed = growth + learned
        while needed > 0 and needed > self._room():
            if self._evict_for(needed):
                continue
            if not may_preempt:
                return False
            victim = self.running[-1]
            assert len(self.running) > 1, "alone it fits: `check_fits` saw to that"
            self._preempt(victim)
            if victim is sequence:
                return False
        self._cache.reserve(sequence.id, num_rows)
        if self._free is not None:
            self._free -= growth
        self._promised += learned
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._free = None
        self.waiting[sequence.id] = sequence
        self.waiting.move_to_end(sequence.id, last=False)
        self.running.remove(sequence)
        self._cache.close(sequence.id)
        sequence.drafter.truncate(sequence.id, 0)
        sequence.preemptions += 1

    def reap(self) -> bool:
        """End what has been cancelled and give its memory back. Returns whether there was anything."""
        if not self._cancelled:
            return False
        self._receive()
        while self._cancelled:
            for sequence in self._cancelled[0].sequences:
                if not sequence.live:
                    continue
                sequence.end("cancelled")
                self.waiting.pop(sequence.id, None)
                if sequence in self.running:
                    self._retire(sequence)
                else:  # it waited, or its caller was interrupted before it was queued
                    self._release(sequence)
            self._cancelled.popleft()
        return True

    def _receive(self) -> None:
        while self._submitted:
            sequence = self._submitted[0]
            self.waiting[sequence.id] = sequence
            self._submitted.popleft()  # only now: an interrupt in between must not lose it

    def _retire(self, sequence: Sequence) -> None:
        if self._prefix_cache:
            self._controller.forget(sequence.id)
            self._pool.add(sequence.id, sequence.drafter)
        else:
            self._release(sequence)
        self.running.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._controller.forget(sequence.id)
        if sequence.id in self._cache:  # it may be waiting, or its admission failed
            self._cache.close(sequence.id)
        sequence.drafter.forget(sequence.id)
