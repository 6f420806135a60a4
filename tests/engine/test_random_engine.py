"""Random use of the engine: whatever is mixed, each finished output is its solo plain run and nothing is left over.

A scenario is one engine of random settings and a random series of arrivals, reads, cancellations, batches
and resets, all from one seed (named when it fails). After every step the queues, the cache and the
memory in use are checked; at the end every request is drained and every owner of state must be empty.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from draftsmith.drafters.draft_model import ModelDrafter
from draftsmith.drafters.hybrid import HybridDrafter
from draftsmith.drafters.ngram import NgramDrafter
from draftsmith.drafters.suffix import SuffixDrafter
from draftsmith.engine.params import GenerationParams
from draftsmith.engine.prefix import PrefixPool
from draftsmith.engine.scheduler import Scheduler
from draftsmith.engine.sequence import Sequence
from tests.engine.fakes import OracleDrafter, tiny_engine

ORACLE = "tests.engine.fakes:OracleDrafter"
DRAFTERS = [
    "none",
    "ngram",
    "ngram:min_ngram=1:max_draft=3",
    "suffix",
    "suffix:tree=true",
    "hybrid",
    "draft_model:model=other",
    "draft_model:model=other:tree=2x2x1",
    "draft_model:model=same:max_draft=4",
    f"{ORACLE}:wrong_every=3",
    f"{ORACLE}:wrong_every=4:tree=true",
]
CONTROLLERS = [
    *["auto", "auto", "fixed:num_draft=1", "fixed:num_draft=4", "fixed:num_draft=30", "ema", "heuristic", "bandit"],
    *["prefix-scheduler", "prefix-scheduler:stale=2:estimator=logistic"],
]
SMALL_DRAFTERS = [drafter for drafter in DRAFTERS if "model" not in drafter]
ASCII = {"banned_ids": frozenset([*range(33), *range(127, 260)])}
SAMPLINGS = [
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 40, "presence_penalty": 0.5, "rule": "match"},
    {"temperature": 1.1, "min_p": 0.02, "min_tokens": 9, **ASCII},
    {"temperature": 1.0, **ASCII},
]
SPECS = [{}, {"layer_windows": (None, 8)}, {"layer_windows": (12, 12)}, {"max_context": 48}]
PROMPTS = [
    list(b"abc abc abc"),
    list(b"x"),
    list(b"the cat sat on the mat"),
    list(b"12 34 12 34 12"),
    list(b"the cat sat on the hat and then it sat"),
    list(b"abc abc abc abd"),
    list(b"a prompt that nearly fills the sixty-four rows of a slot"),
    list(b"the cat sat on the mat and the dog sat on the hat and it sat"),
]
LONGEST = 90
MAX_STEPS = 4000
_solo: dict[tuple, object] = {}
_solo_engines: dict[int, object] = {}


def solo(spec, prompt, params):
    """The plain run of a request that has the engine for itself."""
    key = (spec, tuple(prompt), tuple(sorted((name, repr(value)) for name, value in params.items())))
    if key not in _solo:
        if spec not in _solo_engines:
            _solo_engines[spec] = tiny_engine(spec=SPECS[spec], prefix_cache=False, max_batch=1)
        plain = _solo_engines[spec].generate(prompt, **{**params, "drafter": "none"})
        _solo[key] = plain
        for result in plain.samples or (plain,):
            OracleDrafter.known.append([*prompt, *result.token_ids, 1, 2, 3])
    return _solo[key]


@dataclass
class Stream:
    """A request under way and what came of it so far, per sample."""

    prompt: list[int]
    params: dict
    events: object
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=dict)

    def take(self):
        event = next(self.events, None)
        if event is not None:
            assert event.index not in self.reasons, "an event after the last"
            self.tokens.setdefault(event.index, []).extend(event.token_ids)
            self.text[event.index] = self.text.get(event.index, "") + event.text
            self.logprobs.setdefault(event.index, []).extend(event.logprobs or ())
            if event.finish_reason is not None:
                self.reasons[event.index] = event.finish_reason
        return event is not None


class Scenario:
    """One engine and its random users."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        # Every third scenario is a crowd of long requests in memory for little more than one.
        self.is_tight = seed % 3 == 0
        self.spec = self.dice.randrange(3 if self.is_tight else len(SPECS))
        self.max_batch = 4 if self.is_tight else self.dice.choice([1, 2, 3, 4, 8])
        self.drafters = self.dice.sample(SMALL_DRAFTERS if self.is_tight else DRAFTERS, 3)
        self.prompts = [prompt for prompt in PROMPTS if len(prompt) < SPECS[self.spec].get("max_context", 100)]
        self.settings = {
            "spec": SPECS[self.spec],
            "max_batch": self.max_batch,
            "chunk_rows": self.max_batch * self.dice.choice([1, 2, 5, 9, 40]),
            "controller": self.dice.choice(CONTROLLERS),
            "prefix_cache": self.dice.random() < 0.7,
            "drafter": self.drafters[0],
        }
        roomy = tiny_engine(**self.settings)
        longest = max(self._bytes(roomy, drafter) for drafter in self.drafters)
        self.memory_bytes = int(longest * (1.25 if self.is_tight else self.dice.choice([1.0, 1.3, 2.1, 20])))
        self.engine = tiny_engine(memory_bytes=self.memory_bytes, **self.settings)
        self.streams = []
        self.finished = []
        self.num_steps = 0

    def _bytes(self, engine, drafter):
        params = GenerationParams.create(drafter=drafter)
        return engine._scheduler._bytes(engine._make_sequences([1], params)[0], LONGEST)

    def params(self, prompt, limit):
        dice = self.dice
        params = {**dice.choice(SAMPLINGS), "seed": dice.randrange(3), "max_new_tokens": limit}
        if dice.random() < 0.2:
            params["n"] = dice.randint(2, 3)
        if dice.random() < 0.3:
            params["logprobs"] = dice.choice([0, 2])
        free = solo(self.spec, prompt, {**params, "max_new_tokens": 25})
        if dice.random() < 0.3:
            params["stop_ids"] = frozenset([dice.choice(free.token_ids)])
        if "banned_ids" in params and dice.random() < 0.5 and len(free.text) > 8:
            at = dice.randrange(2, len(free.text) - 3)
            params["stop"] = (free.text[at : at + 3], "never")
        return params

    def arrive(self):
        prompt = self.dice.choice(self.prompts)
        limit = min(self.dice.choice([70] if self.is_tight else [1, 2, 7, 25, 70]), LONGEST - len(prompt))
        params = self.params(prompt, limit)
        solo(self.spec, prompt, params)
        events = self.engine.stream(prompt, drafter=self.dice.choice(self.drafters), **params)
        self.streams.append(Stream(prompt, params, events))

    def read(self):
        if self.streams:
            stream = self.dice.choice(self.streams)
            for _ in range(self.dice.choice([1, 3, 100])):
                if not stream.take():
                    self.streams.remove(stream)
                    self.finished.append(stream)
                    break

    def let_go(self):
        if self.streams:
            stream = self.streams.pop(self.dice.randrange(len(self.streams)))
            if self.dice.random() < 0.5:
                stream.events.close()
            # Otherwise it is dropped, read or not, and must vanish all the same.

    def batch(self):
        prompts = self.dice.sample(self.prompts, self.dice.randint(1, 3))
        params = {**self.dice.choice(SAMPLINGS), "seed": 0, "max_new_tokens": 12}
        expected = [solo(self.spec, prompt, params) for prompt in prompts]
        results = self.engine.generate(prompts, drafter=self.dice.choice(self.drafters), **params)
        for result, plain in zip(results, expected, strict=True):
            assert result.token_ids == plain.token_ids
            assert len(result.origins) == len(result.token_ids) == result.statistics.emitted_tokens

    def ratio(self):
        """Ratio rules have another law of ids, so here they only have to end and to disturb nobody."""
        result = self.engine.generate(
            self.dice.choice(self.prompts),
            max_new_tokens=9,
            temperature=1.0,
            rule=self.dice.choice(["chain", "block", "recursive", "traversal"]),
            drafter=self.dice.choice(self.drafters),
            ignore_eos=True,
        )
        assert len(result.token_ids) == 9

    def reset(self):
        self.engine.clear_prefixes()
        self.engine.take_events()

    def run(self, num_actions):
        actions = [self.arrive] * 6 + [self.read] * 8 + [self.let_go] * 2 + [self.batch, self.ratio, self.reset]
        for _ in range(num_actions):
            self.dice.choice(actions)()
        for stream in self.streams:
            while stream.take():
                pass
        for stream in self.finished + self.streams:
            self.compare(stream)

    def compare(self, stream):
        plain = solo(self.spec, stream.prompt, stream.params)
        for index, sample in enumerate(plain.samples or (plain,)):
            assert tuple(stream.tokens[index]) == sample.token_ids
            assert stream.text[index] == sample.text
            assert stream.reasons[index] == sample.finish_reason
            if sample.logprobs is not None:
                for ours, theirs in zip(stream.logprobs[index], sample.logprobs, strict=True):
                    assert ours.token_id == theirs.token_id
                    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)

    # -- what must hold after every step ----------------------------------------------------------

    def check(self):
        self.num_steps += 1
        assert self.num_steps < MAX_STEPS, "no end in sight"
        scheduler, cache = self.engine._scheduler, self.engine._model.backend.cache
        cache.check()
        running, waiting = scheduler.running, list(scheduler.waiting.values())
        ids = Counter(sequence.id for sequence in running + waiting)
        assert not ids or max(ids.values()) == 1, "a sequence in two queues"
        assert len(running) <= self.max_batch
        assert all(sequence.live for sequence in running + waiting)
        assert set(cache.sequence_ids) == {sequence.id for sequence in running} | set(scheduler._pool._entries)
        for sequence in running:
            assert cache.committed(sequence.id) < len(sequence.view.tokens)
            assert cache.written(sequence.id) == cache.committed(sequence.id)
            assert sequence.view.tokens[: cache.committed(sequence.id)] == cache.tokens(sequence.id)
        drafts = [drafter._cache for drafter in self.models()]
        for draft in drafts:
            draft.check()
        used = cache.used_bytes + sum(draft.used_bytes for draft in drafts)
        assert used <= self.memory_bytes, f"{used} bytes in use, {self.memory_bytes} allowed"

    def models(self):
        found = []
        for drafter in self.engine._drafters.values():
            parts = drafter._both if isinstance(drafter, HybridDrafter) else (drafter,)
            found += [part for part in parts if isinstance(part, ModelDrafter)]
        return found

    def check_empty(self):
        engine = self.engine
        engine.clear_prefixes()
        assert engine._scheduler.idle
        assert engine._model.backend.cache.used_bytes == 0
        assert not getattr(engine._scheduler._controller, "_requests", None)
        for drafter in engine._drafters.values():
            for part in drafter._both if isinstance(drafter, HybridDrafter) else (drafter,):
                if isinstance(part, ModelDrafter):
                    assert not part._known and not part._cache.sequence_ids
                elif isinstance(part, NgramDrafter):
                    assert not part._indexes
                elif isinstance(part, SuffixDrafter):
                    assert all(part.index.request_len(number) < 0 for number in range(next(engine._ids)))


def play(seed, monkeypatch, num_actions):
    scenario = Scenario(seed)
    step = Scheduler.step

    def checked(self):
        worked = step(self)
        if self is scenario.engine._scheduler:
            scenario.check()
        return worked

    monkeypatch.setattr(Scheduler, "step", checked)
    scenario.run(num_actions)
    scenario.check_empty()
    return scenario


def play_all(seeds, num_actions):
    """Play the scenarios of all seeds; what the engine did in them, counted."""
    done = Counter()
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            for owner, method in COUNTED:
                _count(patch, done, owner, method)
            OracleDrafter.known = []
            _solo.clear()
            try:
                play(seed, patch, num_actions)
            except (AssertionError, RuntimeError) as error:
                raise AssertionError(f"seed {seed}: {error}") from error
    return done


COUNTED = [(Scheduler, "_preempt"), (PrefixPool, "fork"), (PrefixPool, "evict_oldest"), (Sequence, "end")]


def _count(patch, done, owner, method):
    real = getattr(owner, method)

    def counted(self, *args):
        done[method] += 1
        return real(self, *args)

    patch.setattr(owner, method, counted)


@pytest.mark.parametrize("block", range(2))
def test_random_use(block):
    done = play_all(range(6 * block, 6 * block + 6), 25)
    # Without these the scenarios would be tame.
    assert all(done[method] > 0 for _, method in COUNTED), done


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_much_random_use(block):
    play_all(range(1000 + 20 * block, 1020 + 20 * block), 40)
