"""The memory budget: what counts, what gives way, and that it is never exceeded between steps."""

import pytest

from draftsmith.engine.params import GenerationParams
from draftsmith.engine.scheduler import Scheduler
from tests.engine.fakes import OracleDrafter, tiny_engine
from tests.engine.scripted import PROMPTS, Scripted, plain_run

FAT = "tests.engine.test_memory:Fat"
ROWS_64 = tiny_engine()._model.backend.cache.sequence_bytes(64)


class Fat(Scripted):
    """A drafter that holds much for every token, and grows with every token."""

    bytes_per_token = 4000


@pytest.fixture(autouse=True)
def _oracle():
    OracleDrafter.known = []


@pytest.fixture
def peaks(monkeypatch):
    """Bytes in use after every step, of the target's cache, of each draft model's, and of fat drafters."""
    seen = []
    real = Scheduler.step

    def step(self):
        worked = real(self)
        drafters = {item.drafter for item in self.running if hasattr(item.drafter, "_cache")}
        fat = sum(Fat.bytes_per_token * len(item.view.tokens) for item in self.running if isinstance(item.drafter, Fat))
        seen.append(self._cache.used_bytes + sum(drafter._cache.used_bytes for drafter in drafters) + fat)
        return worked

    monkeypatch.setattr(Scheduler, "step", step)
    return seen


def needed(engine, num_tokens, drafter="none"):
    sequence = engine._make_sequences([1], GenerationParams.create(drafter=drafter))[0]
    return engine._scheduler._bytes(sequence, num_tokens)


@pytest.mark.parametrize("windows", [(8, 8), (None, 8), (700, 700)])
@pytest.mark.parametrize("chunk_rows", [64, 512, 2048])
def test_one_request_fits_into_what_it_is_said_to_need(chunk_rows, windows, peaks):
    """Windowed layers hold the rows of a step beside their window: a step of more rows than counted would not fit."""
    settings = {"spec": {"layer_windows": windows}, "chunk_rows": chunk_rows}
    memory_bytes = needed(tiny_engine(**settings), 1510)
    engine = tiny_engine(memory_bytes=memory_bytes, **settings)
    result = engine.generate([number % 250 for number in range(1500)], max_new_tokens=10, ignore_eos=True)
    assert len(result.token_ids) == 10
    assert max(peaks) <= memory_bytes
    assert max(step.rows for step in engine.take_events().steps) <= 512


@pytest.mark.parametrize("drafter", ["draft_model:model=other", FAT])
def test_what_drafters_learn_counts(drafter, peaks):
    """Between two growths of the target's slot a drafter grows all the same."""
    solo = [plain_run(prompt, 230).token_ids for prompt in PROMPTS]
    memory_bytes = int(1.5 * needed(tiny_engine(), 252, drafter))
    engine = tiny_engine(drafter=drafter, memory_bytes=memory_bytes, controller="fixed:num_draft=4", prefix_cache=False)
    results = engine.generate(PROMPTS, max_new_tokens=230)
    assert [result.token_ids for result in results] == solo
    assert sum(result.statistics.preemptions for result in results) > 0
    assert max(peaks) <= memory_bytes


def test_the_first_rows_of_a_draft_model_count(peaks):
    """Its slots start with more rows than a short request has tokens."""
    drafter = "draft_model:model=other"
    prompts = [[number] for number in range(8)]
    solo = [plain_run(prompt, 9).token_ids for prompt in prompts]
    memory_bytes = int(3.9 * 2 * ROWS_64)
    engine = tiny_engine(drafter=drafter, memory_bytes=memory_bytes, prefix_cache=False)
    results = engine.generate(prompts, max_new_tokens=9)
    assert [result.token_ids for result in results] == solo
    assert 4 * ROWS_64 <= max(peaks) <= memory_bytes


def test_reusable_prefixes_are_not_given_up_in_vain():
    """A request that would not fit even without them waits, and they stay until it can be admitted."""
    engine = tiny_engine(memory_bytes=int(2.9 * ROWS_64))
    engine.generate(PROMPTS[0], max_new_tokens=5)
    running = engine.stream(PROMPTS[2], max_new_tokens=20, ignore_eos=True)
    next(running)
    waiting = engine.stream(list(range(100)), max_new_tokens=5, ignore_eos=True)
    next(running)
    assert len(engine._scheduler._pool) == 1 and len(engine._scheduler.waiting) == 1
    assert len([token for event in running for token in event.token_ids]) == 18
    assert len([token for event in waiting for token in event.token_ids]) == 5


def test_prompts_read_side_by_side_do_not_block_each_other():
    """Each holds part of the memory the other one needs; the older one gets on."""
    prompts = [[number % 250 for number in range(first, first + 400)] for first in range(3)]
    solo = [plain_run(prompt, 40).token_ids for prompt in prompts]
    for chunk_rows in (8, 24, 500):
        engine = tiny_engine(chunk_rows=chunk_rows, memory_bytes=int(8 * 1.4 * ROWS_64), prefix_cache=False)
        results = engine.generate(prompts, max_new_tokens=40)
        assert [result.token_ids for result in results] == solo
