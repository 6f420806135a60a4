"""Who calls the engine, and how: threads, event loops, callers that let go, interrupts, faults of parts.

Whatever a caller does, the others' outputs are their solo plain runs and nothing is left behind.
"""

import asyncio
import contextlib
import gc
import sys
import threading
import weakref

import pytest
import torch

from draftsmith.control.fixed import FixedController
from draftsmith.core.tree import chain
from draftsmith.core.types import Law, Proposal, ProposalKind
from draftsmith.engine import scheduler as scheduler_module
from draftsmith.errors import DraftsmithError, UnsoundError
from draftsmith.models.reference import ReferenceBackend
from tests.engine.fakes import VOCAB, OracleDrafter, tiny_engine
from tests.engine.scripted import DRAFTERS, ORACLE, PROMPTS, SCRIPTED, Scripted, plain_run

SECONDS = 60
"""Longest any of these may wait for another thread before it counts as stuck."""


@pytest.fixture(autouse=True)
def _oracle():
    OracleDrafter.known = []


def in_threads(*works):
    """Run all at once; raises what any of them raised. A thread that is stuck fails the test."""
    errors = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]


def assert_empty(engine):
    """Nobody is on the way and, reusable prefixes apart, nothing is held."""
    assert engine._scheduler.idle
    engine._model.backend.cache.check()
    engine.clear_prefixes()
    assert engine._model.backend.cache.used_bytes == 0


# -- threads and event loops -----------------------------------------------------------------------


def test_four_threads_equal_solo_runs():
    params = [
        {},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.8, "top_p": 0.9, "seed": 2, "n": 2},
        {"logprobs": 1},
    ]
    solo = {(at, i): plain_run(prompt, **params[i]) for at, prompt in enumerate(PROMPTS) for i in range(4)}
    engine = tiny_engine(controller="auto", max_batch=3, memory_bytes=1 << 20)

    def user(number):
        for turn in range(8):
            at, i = (number + turn) % 4, (number * turn) % 4
            drafter = DRAFTERS[(3 * number + turn) % len(DRAFTERS)]
            plain = solo[at, i]
            if turn % 2:
                result = engine.generate(PROMPTS[at], max_new_tokens=24, drafter=drafter, **params[i])
                found = [sample.token_ids for sample in result.samples or (result,)]
            else:
                taken = {}
                for event in engine.stream(PROMPTS[at], max_new_tokens=24, drafter=drafter, **params[i]):
                    taken[event.index] = (*taken.get(event.index, ()), *event.token_ids)
                found = [taken[index] for index in sorted(taken)]
            assert found == [sample.token_ids for sample in plain.samples or (plain,)]

    in_threads(*[lambda number=number: user(number) for number in range(4)])
    assert_empty(engine)


def test_threads_and_an_event_loop_together():
    solo = [plain_run(prompt).token_ids for prompt in PROMPTS]
    engine = tiny_engine(drafter="suffix", max_batch=4)

    async def one(prompt):
        return tuple([token async for event in engine.astream(prompt, max_new_tokens=24) for token in event.token_ids])

    async def loop():
        for _ in range(4):
            assert await asyncio.gather(*(one(prompt) for prompt in PROMPTS)) == solo
            assert [result.token_ids for result in await engine.agenerate(PROMPTS, max_new_tokens=24)] == solo

    def user():
        for turn in range(12):
            assert engine.generate(PROMPTS[turn % 4], max_new_tokens=24).token_ids == solo[turn % 4]
            engine.take_events()

    in_threads(lambda: asyncio.run(loop()), user, user)
    assert_empty(engine)


def test_a_drafter_is_made_once_for_all_threads(monkeypatch):
    engine = tiny_engine()
    made = []
    real = engine._make_drafter
    monkeypatch.setattr(engine, "_make_drafter", lambda text: (made.append(text), real(text))[1])
    barrier = threading.Barrier(4)

    def user():
        barrier.wait()
        engine.generate(PROMPTS[0], max_new_tokens=2, drafter="draft_model:model=other")

    in_threads(*[user] * 4)
    assert made == ["draft_model:model=other"]


def test_a_waiting_thread_gets_its_tokens_as_they_come():
    """A thread that waits for the turn behind one that steps all the time must not wait until that one is done."""
    engine = tiny_engine(max_batch=4, prefix_cache=False)
    long_stream = engine.stream(PROMPTS[0], max_new_tokens=3000, ignore_eos=True)
    num_seen, seen_at_end = 0, []

    def long_user():
        nonlocal num_seen
        for event in long_stream:
            num_seen += len(event.token_ids)
            if len(seen_at_end) == 20:
                return

    def short_user():
        for _ in range(20):
            engine.generate(PROMPTS[1], max_new_tokens=5, ignore_eos=True)
            seen_at_end.append(num_seen)

    in_threads(long_user, short_user)
    # Twenty short answers take some hundred steps; queueing behind the long one would take all 3000.
    assert len(seen_at_end) == 20 and seen_at_end[-1] < 2500


@pytest.fixture
def held(monkeypatch):
    """A target whose next forward waits: (it has begun, let it go on)."""
    begun, go_on = threading.Event(), threading.Event()
    real = ReferenceBackend.score

    def score(self, groups, taps=frozenset()):
        begun.set()
        assert go_on.wait(SECONDS)
        return real(self, groups, taps)

    monkeypatch.setattr(ReferenceBackend, "score", score)
    yield begun, go_on
    go_on.set()


def test_submitting_and_cancelling_never_wait_for_a_step(held):
    """An event loop does both, and a step may take seconds."""
    begun, go_on = held
    engine = tiny_engine()
    first = engine.stream(PROMPTS[0], max_new_tokens=5)

    def watch():
        assert begun.wait(SECONDS)
        in_threads(
            lambda: engine.stream(PROMPTS[1], max_new_tokens=5).close(), lambda: engine.astream(PROMPTS[1]).close()
        )
        in_threads(first.close)
        go_on.set()

    in_threads(lambda: list(first), watch)
    assert_empty(engine)


def test_what_is_cancelled_during_a_step_is_freed_after_it(held):
    begun, go_on = held
    engine = tiny_engine(prefix_cache=False)
    first = engine.stream(PROMPTS[0], max_new_tokens=2)
    other = engine.stream(PROMPTS[1], max_new_tokens=500, ignore_eos=True)

    def watch():
        assert begun.wait(SECONDS)
        other.close()
        go_on.set()

    in_threads(lambda: list(first), watch)
    assert_empty(engine)


# -- callers that let go ---------------------------------------------------------------------------


def test_streams_nobody_reads_vanish():
    engine = tiny_engine(prefix_cache=False)
    for make in (engine.stream, engine.astream):
        make(PROMPTS[0], max_new_tokens=500).close()
        make(PROMPTS[0], max_new_tokens=500, n=3)  # dropped at once
        stream = make(PROMPTS[0], max_new_tokens=500)
        del stream
    gc.collect()
    assert_empty(engine)


def test_an_async_stream_left_half_read_vanishes():
    engine = tiny_engine(prefix_cache=False)

    async def run():
        async for event in engine.astream(PROMPTS[0], max_new_tokens=500, ignore_eos=True):
            assert event.token_ids
            break
        stream = engine.astream(PROMPTS[0], max_new_tokens=500, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        gc.collect()
        return await engine.agenerate(PROMPTS[1], max_new_tokens=5)

    assert asyncio.run(run()).token_ids == plain_run(PROMPTS[1], 5).token_ids
    assert_empty(engine)


def test_a_closed_stream_yields_nothing_more():
    engine = tiny_engine(prefix_cache=False)
    stream = engine.stream(PROMPTS[0], max_new_tokens=500)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    assert_empty(engine)


def test_a_stream_collected_in_the_middle_of_a_step_does_no_harm(monkeypatch):
    """A finalizer may run in the thread that holds the turn: it must neither wait for it nor change the queues."""
    engine = tiny_engine(prefix_cache=False)
    expected = plain_run(PROMPTS[0], 6).token_ids
    real = ReferenceBackend.score
    dropped = []

    def score(self, groups, taps=frozenset()):
        if not dropped:
            stream = engine.stream(PROMPTS[1], max_new_tokens=500)
            cycle = [stream]
            cycle.append(cycle)
            dropped.append(weakref.ref(stream))
            del stream, cycle
            gc.collect()
            assert dropped[0]() is None
        return real(self, groups, taps)

    monkeypatch.setattr(ReferenceBackend, "score", score)
    results = []
    in_threads(lambda: results.append(engine.generate(PROMPTS[0], max_new_tokens=6)))
    assert results[0].token_ids == expected
    assert_empty(engine)


# -- faults ----------------------------------------------------------------------------------------


class Nosy(FixedController):
    """A controller that looks at tokens it may drop."""

    looks_at_tokens = True


class Refusing(Scripted):
    """A drafter that raises an error on purpose."""

    def propose(self, views, budgets, keep_drafting):
        raise UnsoundError("this drafter refuses")


def drawn(view, budget, width=1):
    """A uniform draw that pretends to be one; two siblings make it a tree."""
    law = Law(torch.full((VOCAB,), 1 / VOCAB))
    if width == 1:
        return Proposal(chain(view.root, [7]), ProposalKind.IID, {0: law})
    tree = chain(view.root, [7])
    return Proposal(type(tree)((*tree.tokens, 8), (-1, 0, 0)), ProposalKind.IID, {0: law})


@pytest.mark.parametrize("fault", ["rule", "law", "controller", "drafter", "row"])
def test_an_error_raised_on_purpose_ends_its_own_request_alone(fault, monkeypatch):
    controller = "tests.engine.test_callers:Nosy:num_draft=4" if fault == "controller" else "fixed:num_draft=4"
    engine = tiny_engine(controller=controller, prefix_cache=False)
    expected = plain_run(PROMPTS[0], temperature=1.0, seed=3).token_ids
    OracleDrafter.known = [[*PROMPTS[0], *expected]]
    other = engine.stream(PROMPTS[0], max_new_tokens=24, temperature=1.0, seed=3, drafter=ORACLE)
    tokens = list(next(other).token_ids)
    width = 2 if fault == "rule" else 1
    Scripted.script = staticmethod(lambda view, budget: drawn(view, budget, width))
    if fault == "law":
        Scripted.script = staticmethod(lambda view, budget: Proposal(chain(view.root, [7]), ProposalKind.IID))
    drafter = "tests.engine.test_callers:Refusing" if fault == "drafter" else SCRIPTED
    if fault == "row":
        real = ReferenceBackend.score

        def score(self, groups, taps=frozenset()):
            scored = real(self, groups, taps)
            for group, logits in zip(groups, scored.logits, strict=True):
                if 99 in group.tokens and len(logits):
                    logits[0, 3] = torch.nan
            return scored

        monkeypatch.setattr(ReferenceBackend, "score", score)
    with pytest.raises(DraftsmithError):
        engine.generate([5, 99], max_new_tokens=20, temperature=1.0, rule="chain", drafter=drafter, ignore_eos=True)
    tokens += [token for event in other for token in event.token_ids]
    assert tuple(tokens) == expected
    assert_empty(engine)


def test_a_bug_ends_what_runs_and_spares_what_waits():
    engine = tiny_engine(max_batch=2)
    running = engine.stream(PROMPTS[0], max_new_tokens=24)
    next(running)
    broken = engine.stream(PROMPTS[1], max_new_tokens=24, drafter="tests.engine.fakes:FailingDrafter")
    waiting = engine.stream(PROMPTS[2], max_new_tokens=24)
    for stream in (broken, running):
        with pytest.raises(RuntimeError, match="broken"):
            list(stream)
    tokens = [token for event in waiting for token in event.token_ids]
    assert tuple(tokens) == plain_run(PROMPTS[2]).token_ids
    assert_empty(engine)


def interrupted_at(number, work):
    """Run `work` with an interrupt at its `number`-th call inside the package. False: it made fewer calls.

    Python handles signals when it enters a function and when a built-in one has returned, and so does this.
    """
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        if event not in ("call", "c_return") or not frame.f_globals.get("__name__", "").startswith("draftsmith."):
            return
        count += 1
        if count == number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    with contextlib.suppress(KeyboardInterrupt):  # one that hits a finalizer is swallowed there
        try:
            work()
        finally:
            sys.setprofile(None)
    return count >= number


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_leaves_the_engine_whole():
    """Ctrl-C at one of many places of a step: other callers get right tokens or a clear error, and all goes on."""
    solo = [plain_run(prompt, 12).token_ids for prompt in PROMPTS]
    num_interrupts, number = 0, 1
    while True:
        engine = tiny_engine(drafter="hybrid:other=draft_model+model=other", max_batch=2, controller="auto")
        engine.generate(PROMPTS[2], max_new_tokens=3)
        others = [engine.stream(prompt, max_new_tokens=12) for prompt in PROMPTS[:2]]
        tokens = [list(next(others[0]).token_ids), []]

        def own(engine=engine):
            engine.generate(PROMPTS[2:], max_new_tokens=4)
            engine.stream(PROMPTS[3], max_new_tokens=30).close()

        if not interrupted_at(number, own):
            break
        num_interrupts += 1
        for place, stream in enumerate(others):
            try:
                tokens[place] += [token for event in stream for token in event.token_ids]
                assert tuple(tokens[place]) == solo[place]
            except DraftsmithError as error:
                assert "interrupted" in str(error)
        assert [result.token_ids for result in engine.generate(PROMPTS, max_new_tokens=12)] == solo
        while engine._scheduler.step():
            pass
        assert_empty(engine)
        assert not engine._scheduler._controller._requests
        number += 1 + number // 12
    assert num_interrupts > 50


@pytest.mark.parametrize("begin", ["stream", "astream"])
def test_an_interrupt_while_a_stream_is_made_leaves_nothing_behind(begin, monkeypatch):
    """At every place, and Python has nothing to write about an iterator that was half made."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    number, engine = 1, tiny_engine()
    while interrupted_at(number, lambda: getattr(engine, begin)(PROMPTS[0], max_new_tokens=20)):
        faults = [fault.exc_value for fault in unraisable if not isinstance(fault.exc_value, KeyboardInterrupt)]
        assert not faults, number
        if unraisable:  # the interrupt itself fell into the finalizer, which then could not cancel
            unraisable.clear()
            engine.generate(PROMPTS[1], max_new_tokens=1)
            while engine._scheduler.step():
                pass
        assert engine._scheduler.idle, number
        number += 1
    assert number > 20


# -- a long life -----------------------------------------------------------------------------------


def test_the_event_log_is_bounded(monkeypatch):
    monkeypatch.setattr(scheduler_module, "_MAX_RECORDS", 40)
    engine = tiny_engine()
    with pytest.warns(RuntimeWarning, match="event log is full"):
        engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
    log = engine.take_events()
    assert 15 <= len(log.requests) <= 40
    assert {record.step for record in log.requests} == {record.step for record in log.steps}


def test_many_requests_leave_nothing_behind():
    """Objects alive after 200 requests of every kind and after 400 are equally many, the event log taken away."""
    engine = tiny_engine(controller="auto", dtype=torch.float32)
    drafters = [text.replace("suffix", "suffix:max_cached_requests=20") for text in DRAFTERS if "hybrid" not in text]

    def use(first):
        for number in range(first, first + 200):
            prompt = [number % 250, number // 250, *PROMPTS[number % 4]]
            stream = engine.stream(prompt, max_new_tokens=8, drafter=drafters[number % len(drafters)], n=1 + number % 2)
            if number % 5:
                list(stream)
        del stream
        engine.take_events()
        engine.clear_prefixes()
        gc.collect()
        return len(gc.get_objects())

    use(0)
    before, after = use(200), use(400)
    assert after - before < 300
    assert_empty(engine)
