"""The audit's maths: bets are fair under the null whatever they have learned, and grow where something is wrong."""

import itertools
import math

import numpy as np
import pytest

from draftsmith.core import pit
from draftsmith.core.eprocess import EProcess, Expert, HistogramBets, detectable, log_mean_exp, power, tokens_needed
from draftsmith.core.pit import STREAMS, Habits, Transforms, by_id, transform
from draftsmith.core.two_sample import PairBets, Sampled, detectable_by_pairs

RUNS, NUMBERS, ALPHA = 300, 150, 0.05
# Alarms out of 300 at probability 0.05 exceed this with probability below 1e-6.
MOST_ALARMS = 37


def _law(seed, size=6):
    weights = np.exp(np.random.default_rng(seed).normal(size=size))
    return weights / weights.sum()


# -- bets on numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", [Expert(4, 0.5), Expert(4, 8.0), Expert(4, 2.0, lagged=True)])
def test_wealth_is_a_martingale_of_mean_one(expert):
    """Exactly: the mean over every sequence of bins."""
    wealth = []
    for places in itertools.product(range(4), repeat=5):
        bets = HistogramBets((expert,))
        for place in places:
            bets.add((place + 0.5) / 4)
        wealth.append(math.exp(bets.log_wealth))
    assert np.mean(wealth) == pytest.approx(1, abs=1e-12)
    assert max(wealth) > 2


def _alarms(draw, add=lambda process, number: process.add({"a": number})):
    alarms = 0
    for seed in range(RUNS):
        process = EProcess(("a",))
        for number in draw(np.random.default_rng(seed)):
            add(process, number)
        alarms += process.alarms(ALPHA)
    return alarms


def test_false_alarms_are_as_rare_as_stated():
    """Looked at after every number, with a bound that could be broken: see the next test."""
    assert _alarms(lambda generator: generator.random(NUMBERS)) <= MOST_ALARMS


def test_bets_placed_after_looking_would_break_the_bound():
    """The same count with bets that have seen their number: the criterion above can fail."""

    def peeking(process, number):
        stream = process._streams["a"]
        for counts, expert in zip(stream._counts, stream._experts, strict=True):
            counts[0, min(int(number * expert.bins), expert.bins - 1)] += 3 * (not expert.lagged)
        process.add({"a": number})

    assert _alarms(lambda generator: generator.random(NUMBERS), peeking) > 2 * MOST_ALARMS


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: generator.random(400) ** 1.5,
        lambda generator: np.where(generator.random(400) < 0.2, 0.5, generator.random(400)),
        lambda generator: np.repeat(generator.random(200), 2),
    ],
    ids=["tilted", "peaked", "dependent"],
)
def test_what_is_not_uniform_or_not_independent_is_seen(draw):
    """All three have power above 0.99 at this length."""
    alarms = 0
    for seed in range(20):
        process = EProcess(("a", "b"))
        generator = np.random.default_rng(1000 + seed)
        for number in draw(generator):
            process.add({"a": number, "b": generator.random()})
        alarms += process.alarms(0.001)
        assert process.loudest == "a"
    assert alarms >= 19


def test_an_impossible_token_is_certain_evidence():
    process = EProcess(("a",))
    process.add({"a": 0.5})
    assert not process.alarms(0.5)
    process.add_impossible()
    assert process.alarms(1e-300) and process.count == 2


def test_detectable_drift_is_detected():
    """What is claimed in a report happens: a drift of that size, one stream of several, 9 times in 10."""
    alpha, count = 0.001, 600
    drift = detectable(count, alpha, 2)
    assert 0.05 < drift < 0.25
    found = 0
    for seed in range(40):
        generator = np.random.default_rng(50 + seed)
        process = EProcess(("a", "b"))
        for _ in range(count):
            lower = generator.random() < 0.5 + drift
            process.add({"a": generator.random() / 2 + (not lower) / 2, "b": generator.random()})
        found += process.alarms(alpha)
    assert found >= 30  # of 40; at 0.9 each, fewer have probability below 0.001


def test_power_grows_with_tokens_and_drift():
    assert power(300, 0.0, 0.01, 4) <= 0.05
    assert power(300, 0.4, 0.01, 4) == 1
    assert detectable(4, 0.001, 8) is None
    assert detectable(4000, 0.001, 8) < detectable(500, 0.001, 8)
    needed = tokens_needed(0.1, 0.001, 8)
    assert detectable(needed, 0.001, 8) == pytest.approx(0.1, rel=0.2)


def test_log_mean_exp_does_not_overflow():
    assert log_mean_exp([1000.0, 1000.0]) == pytest.approx(1000)
    assert log_mean_exp([0.0, math.log(3)]) == pytest.approx(math.log(2))


# -- from tokens to numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "last"), [((), ()), ((4, 1), ()), ((), (2, 0)), ((3,), (5, 1))])
def test_tokens_tile_the_unit_interval(first, last):
    """In any arrangement each token has an interval as long as its probability, and they do not overlap."""
    law = _law(3)
    law[5] = law[2]
    law /= law.sum()
    spans = [(transform(law, token, 0.0, first, last), transform(law, token, 1.0, first, last)) for token in range(6)]
    assert [high - low for low, high in spans] == pytest.approx(law.tolist(), abs=1e-12)
    ordered = sorted(spans)
    assert ordered[0][0] == pytest.approx(0) and ordered[-1][1] == pytest.approx(1)
    assert all(high == pytest.approx(low) for (_, high), (low, _) in itertools.pairwise(ordered))


def test_by_id_is_the_cumulative_law():
    law = _law(1)
    assert [by_id(law, token, 1.0) for token in range(6)] == pytest.approx(np.cumsum(law).tolist())


def test_tilts_are_fair_bets_whatever_was_learned():
    habits = Habits()
    generator = np.random.default_rng(5)
    for step in range(50):
        law = _law(step)
        fair = math.fsum(p * math.exp(habits.tilt("c", law, token, 4.0)) for token, p in enumerate(law))
        assert fair == pytest.approx(1, abs=1e-12)
        habits.note("c", law, int(generator.integers(6)))


def test_arrangements_never_see_their_token():
    """The numbers of a token depend on earlier tokens alone: two answers that part only now have the same spans."""
    spans = []
    for token in (1, 2):
        transforms = Transforms()
        for answer in ((3, 4, 1), (3, 3, 2)):
            transforms.start([0, 0])
            for position, earlier in enumerate(answer):
                transforms.next(_law(position), earlier, (7, 0, position))
        transforms.start([0, 0])
        transforms.next(_law(0), 3, (8, 0, 0))
        arranged = [transforms._habits.arrangement(context) for context in transforms._contexts()]
        transforms.next(_law(1), token, (8, 0, 1))
        spans.append(arranged)
    assert spans[0] == spans[1]


def test_shares_are_reproducible_and_no_engine_draws_them():
    from draftsmith.core.random import RequestRandom

    assert pit.share(3, 0, 5, 1) == pit.share(3, 0, 5, 1)
    drawn = {pit.share(3, sample, position, which) for sample in (0, 1) for position in (0, 1) for which in (0, 1)}
    assert len(drawn) == 8
    assert pit.share(3, 0, 0, 0) != RequestRandom(3).accept_uniform(0, 0)


def _emit(generator, laws, drift):
    for law in laws:
        favoured = int(law.argmax())
        token = favoured if generator.random() < drift else int(generator.choice(len(law), p=law))
        yield law, token


@pytest.mark.parametrize(("drift", "alarms"), [(0.0, range(3)), (0.3, range(11, 13))])
def test_tokens_of_the_law_pass_and_others_do_not(drift, alarms):
    """12 runs of 50 answers of 10 tokens; alpha 0.01, so 3 false alarms or more have probability 0.0002 at most."""
    found = 0
    for seed in range(12):
        generator = np.random.default_rng([seed, 77])
        process, transforms = EProcess(pit.ARRANGEMENTS, pit.TILTS), Transforms()
        for answer in range(50):
            process.start()
            transforms.start([0])
            laws = [_law(position) for position in range(10)]
            for position, (law, token) in enumerate(_emit(generator, laws, drift)):
                process.add(*transforms.next(law, token, (answer + 1000 * seed, 0, position)))
        found += process.alarms(0.01)
    assert found in alarms


def test_streams_are_named_once():
    assert len(set(STREAMS)) == len(STREAMS) == 8


# -- pairs of answers --------------------------------------------------------------------------------


def _answer(generator, law, length=16):
    return Sampled(tuple(int(token) for token in generator.choice(len(law), p=law, size=length)), None)


def test_the_bets_on_a_pair_and_on_its_mirror_image_are_fair():
    """Exactly: whatever was learned, the wealth after a pair and after the swapped pair has the mean from before."""
    generator = np.random.default_rng(2)
    history = [(_answer(generator, _law(0)), _answer(generator, _law(1))) for _ in range(10)]
    last = (Sampled((1, 2, 3), -1.0), Sampled((1, 5), -2.0))

    def wealth(*pairs):
        bets = PairBets()
        for first, second in pairs:
            bets.add("p", first, second)
        return math.exp(bets.log_e)

    mean = (wealth(*history, last) + wealth(*history, last[::-1])) / 2
    assert mean == pytest.approx(wealth(*history), rel=1e-12)
    assert wealth(*history, last) != pytest.approx(wealth(*history, last[::-1]))


@pytest.mark.parametrize(("other", "alarms"), [(0, range(3)), (9, range(19, 21))])
def test_pairs_of_one_law_pass_and_of_two_do_not(other, alarms):
    """20 runs of 50 pairs at alpha 0.01: 3 false alarms or more have probability 0.001 at most."""
    found = 0
    for seed in range(20):
        generator = np.random.default_rng([seed, 5])
        bets = PairBets()
        for pair in range(50):
            bets.add(pair % 3, _answer(generator, _law(0)), _answer(generator, _law(other)))
        found += bets.alarms(0.01)
    assert found in alarms


def test_the_drift_that_pairs_are_said_to_find_shrinks_with_their_number():
    generator = np.random.default_rng(8)
    answers = {prompt: [_answer(generator, _law(prompt)) for _ in range(20)] for prompt in range(3)}
    few, many = (detectable_by_pairs(answers, pairs, 0.001) for pairs in (25, 100))
    assert few is None or few > many
    assert 0 < many < 0.4
    assert detectable_by_pairs({}, 50, 0.001) is None
    assert detectable_by_pairs(answers, 3, 0.001) is None
