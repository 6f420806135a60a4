"""Rules that change what is written, through the whole engine: what they promise nevertheless, and their labels."""

import itertools

import pytest
import torch
from scipy import stats

from draftsmith.core.asd import ApproximateVerification
from draftsmith.core.fidelity import Fidelity
from draftsmith.core.lossy import TypicalAcceptance
from draftsmith.core.stats import EventLog, summarise
from draftsmith.core.synthetic import SyntheticAcceptance
from draftsmith.core.types import Rule
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.params import GenerationParams, parse_rule
from draftsmith.errors import OptionError, UnsoundError
from draftsmith.models.backend import RowGroup
from tests.bench.audit_fakes import EOS, PROMPTS, small_model

NEAR = "draft_model:model=near"
LOSSY = [
    ("typical:epsilon=0.09:delta=0.3", 1.0),
    ("lenience:factor=0.4", 1.0),
    ("adasd", 1.0),
    ("adasd:limit=0.3", 1.0),
    ("asd:gate=2", 0.0),
]
SYNTHETIC = ["synthetic:length=2.5", "synthetic:conditional=0.7"]


def small_engine(drafter=NEAR, num_draft=4, batch=8, **settings):
    settings = {"memory_bytes": 1 << 28, "controller": f"fixed:num_draft={num_draft}", **settings}
    return Engine(
        small_model(),
        EngineSettings(drafter=drafter, max_batch=batch, **settings),
        load=lambda name: small_model(2) if name == "other" else small_model(near=1),
    )


# -- names and parameters -----------------------------------------------------------------------------


def test_rules_are_read_as_they_are_written():
    assert parse_rule("chain") is Rule.CHAIN
    assert parse_rule("asd") == ApproximateVerification()
    assert parse_rule("asd:budget=2:mismatches=1") == ApproximateVerification(budget=2.0, mismatches=1)
    assert parse_rule("typical:delta=0.3:epsilon=0.09") == TypicalAcceptance(epsilon=0.09, delta=0.3)
    assert parse_rule("synthetic:survivals=0.9,0.5") == SyntheticAcceptance(survivals=(0.9, 0.5))
    assert parse_rule("draftsmith.core.lossy:Lenience:factor=0.5").name == "lenience"
    for text in ("typical:epsilon=0.09:delta=0.3", "asd:budget=0.125:gate=0.25:mismatches=2", "adasd:limit=0.5"):
        assert parse_rule(text).text == text and parse_rule(parse_rule(text).text) == parse_rule(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("chian", "unknown rule 'chian': did you mean chain? known are coupling, match"),
        ("chain:x=1", "rule chain has no options"),
        ("typical", "rule typical needs epsilon and delta; write typical:epsilon=VALUE:delta=VALUE"),
        ("typical:epsilon=0.1", "needs delta"),
        ("typical:epsilon=2:delta=0.3", "epsilon is 2.0; allowed: above 0 and up to 1"),
        ("lenience:factor=much", "'much' is not a number"),
        ("asd:gate=0.1:nothing=1", "allowed: budget, gate, mismatches; see draftsmith options asd"),
        ("asd:mismatches=1.5", "is not a whole number"),
        ("adasd:limit=0", "limit is 0.0"),
        ("synthetic", "give exactly one of"),
        ("synthetic:survivals=0.9,high", "is not a list of numbers with commas between"),
        ("synthetic:survivals=0.5,0.9", "never rise"),
        ("draftsmith.core.types:Rule", "is not an InexactRule"),
        ("draftsmith.core.nothing:Rule", "cannot load"),
    ],
)
def test_mistakes_are_told_in_one_line(text, told):
    with pytest.raises(OptionError) as caught:
        GenerationParams.create(temperature=0.0 if text.startswith("asd") else 1.0, rule=text)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("rule", "temperature"), LOSSY)
def test_the_wrong_temperature_is_refused(rule, temperature):
    instead = "rule asd" if temperature else "rules adasd, typical"
    with pytest.raises(OptionError, match=f"temperature.*{instead}"):
        GenerationParams.create(rule=rule, temperature=1.0 - temperature)


def test_chain_rules_refuse_trees_of_drafters_that_insist():
    engine = small_engine("suffix:tree=true:max_spec_factor=3:min_token_prob=0", num_draft=6)
    with pytest.raises(UnsoundError, match="rule lenience verifies chains"):
        for seed in range(20):
            engine.generate([0, 1, 2, 0, 1, 3, 0, 1], temperature=1.0, rule="lenience:factor=0.5", seed=seed)


# -- labels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "temperature"), [*LOSSY, *((rule, 0.0) for rule in SYNTHETIC), ("chain", 1.0)])
def test_every_result_and_every_event_is_labelled(rule, temperature):
    engine = small_engine()
    wanted = Fidelity.SYNTHETIC if rule in SYNTHETIC else Fidelity.EXACT if rule == "chain" else Fidelity.LOSSY
    settings = {"max_new_tokens": 20, "temperature": temperature, "rule": rule, "seed": 3, "ignore_eos": True}
    result = engine.generate(PROMPTS[0], n=2, **settings)
    for sample in result.samples:
        told = sample.statistics
        assert told.fidelity is wanted and told.rule.startswith(rule.partition(":")[0])
        assert (told.total_variation is not None) == (wanted is Fidelity.LOSSY)
    stream = engine.stream(PROMPTS[0], **settings)
    events = list(stream)
    assert {event.fidelity for event in events} == {wanted}
    if wanted is Fidelity.LOSSY:
        costs = [cost for event in events for cost in event.costs]
        statistics = stream.results()[0].statistics
        assert len(costs) == statistics.emitted_tokens == 20
        assert all(0 <= cost <= 1 for cost in costs) and sum(costs) > 0
        assert statistics.total_variation == pytest.approx(sum(costs) / 20)
    else:
        assert all(event.costs is None for event in events)


def test_costs_end_with_the_tokens_of_a_stop():
    engine = small_engine()
    settings = {"max_new_tokens": 40, "temperature": 1.0, "rule": "lenience:factor=0.2", "seed": 5}
    whole = engine.generate(PROMPTS[0], ignore_eos=True, **settings)
    stop = whole.token_ids[len(whole.token_ids) // 2]
    stream = engine.stream(PROMPTS[0], stop_ids=[stop], ignore_eos=True, **settings)
    for event in stream:
        assert len(event.costs) == len(event.token_ids)


# -- what stays true ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "temperature"), [*LOSSY, *((rule, 0.7) for rule in SYNTHETIC)])
def test_same_seed_same_text_alone_and_in_a_batch(rule, temperature):
    """With a fixed draft length: a lossy text depends on its drafts, but not on who shares its steps."""
    settings = {"max_new_tokens": 24, "temperature": temperature, "rule": rule, "seed": 9, "ignore_eos": True}
    alone = [small_engine(prefix_cache=False).generate(prompt, **settings).token_ids for prompt in PROMPTS]
    together = small_engine(prefix_cache=False).generate(PROMPTS, **settings)
    assert [result.token_ids for result in together] == alone


@pytest.mark.parametrize("drafter", [NEAR, "draft_model:model=near:tree=2x2", "suffix"])
def test_asd_without_a_budget_writes_the_greedy_ids(drafter):
    settings = {"max_new_tokens": 24, "ignore_eos": True}
    for prompt in PROMPTS[:2]:
        plain = small_engine("none").generate(prompt, **settings)
        found = small_engine(drafter).generate(prompt, rule="asd:budget=0", **settings)
        assert found.token_ids == plain.token_ids and found.statistics.total_variation == 0.0
        assert found.statistics.fidelity is Fidelity.LOSSY  # what was asked for was not exactness


def regrets(prompt, ids):
    """How far the logit of each token lies below the largest, from the target's own rows."""
    backend, tokens = small_model().backend, [*prompt, *ids[:-1]]
    backend.cache.open(0)
    backend.cache.reserve(0, len(tokens))
    rows = backend.score([RowGroup(0, tokens, range(-1, len(tokens) - 1), len(prompt) - 1)]).logits[0]
    return rows.max(dim=-1).values - rows[torch.arange(len(rows)), list(ids)]


@pytest.mark.parametrize("tight", [False, True])
def test_asd_changes_texts_and_keeps_its_budget(tight):
    """The regret is counted again from the target's rows; also where requests are preempted and resume."""
    prompts, settings = PROMPTS[:3], {"max_new_tokens": 60, "ignore_eos": True}
    engine = small_engine(prefix_cache=False)
    if tight:
        one = engine._make_sequences([1], GenerationParams.create(drafter=NEAR))[0]
        engine = small_engine(prefix_cache=False, memory_bytes=int(1.5 * engine._scheduler._bytes(one, 68)))
    found = engine.generate(prompts, rule="asd:budget=1.5:gate=1", **settings)
    plain = small_engine("none").generate(prompts, **settings)
    assert any(one.token_ids != other.token_ids for one, other in zip(found, plain, strict=True))
    assert (sum(result.statistics.preemptions for result in found) > 0) is tight
    spent = [regrets(prompt, result.token_ids) for prompt, result in zip(prompts, found, strict=True)]
    assert 0.5 < max(float(each.sum()) for each in spent) <= 1.5 + 1e-6
    for each, result in zip(spent, found, strict=True):
        assert result.statistics.total_variation == pytest.approx(int((each > 1e-9).sum()) / 60)


def test_lossy_rules_keep_more_than_exact_ones():
    def tokens_per_step(rule):
        engine = small_engine("draft_model:model=other")
        for seed in range(2):
            engine.generate(PROMPTS, rule=rule, seed=seed, max_new_tokens=40, temperature=1.0, ignore_eos=True)
        return summarise(engine.take_events()).tokens_per_step

    assert tokens_per_step("lenience:factor=0.3") > tokens_per_step("chain")
    assert tokens_per_step("typical:epsilon=0.05:delta=0.2") > tokens_per_step("match")


# -- synthetic rates ----------------------------------------------------------------------------------

RATES = {
    "fraction": "synthetic:fraction=0.55",
    "survivals": "synthetic:survivals=0.9,0.75,0.7,0.5,0.3,0.3,0.1,0.05",
    "length": "synthetic:length=3.3",
    "conditional": "synthetic:conditional=0.8",
}
FALSE_ALARM = 1e-6


def measured_rates(rule, num_draft, batch, drafter="synthetic", pairs=600):
    """The pairs that drafted `num_draft` deep, of enough requests; the tiny model's text is of no matter."""
    engine = small_engine(drafter, num_draft, batch, prefix_cache=False)
    log, seed = EventLog(), 0
    while sum(record.depth == num_draft for record in log.pairs()) < pairs:
        prompts = [PROMPTS[(seed + place) % 2] for place in range(batch)]
        streams = [
            engine.stream(prompt, max_new_tokens=96, rule=rule, seed=1000 * seed + place, ignore_eos=True)
            for place, prompt in enumerate(prompts)
        ]
        for stream in streams:
            assert all(event.fidelity is Fidelity.SYNTHETIC for event in stream)
        log.extend(engine.take_events())
        seed += 1
    return [record for record in log.pairs() if record.depth == num_draft]


def check_rates(rule, num_draft, records):
    """Binomial test of each depth's survival, and the mean within what its spread allows: false alarms 1e-6 each."""
    rates = parse_rule(rule).rates(num_draft)
    for place, rate in enumerate(rates, 1):
        survived = sum(record.accepted >= place for record in records)
        assert stats.binomtest(survived, len(records), rate).pvalue > FALSE_ALARM, (
            rule,
            place,
            survived / len(records),
        )
    mean = sum(record.emitted for record in records) / len(records)
    wanted = 1 + sum(rates)
    second = sum((2 * place - 1) * rate for place, rate in enumerate(rates, 1))
    spread = (max(0.0, second - sum(rates) ** 2) / len(records)) ** 0.5
    assert abs(mean - wanted) <= 5.0 * spread + 1e-9, (rule, num_draft, mean, wanted)
    return mean


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize(("num_draft", "batch"), [(2, 1), (5, 8)])
def test_measured_survivals_and_tokens_per_step_are_the_set_ones(kind, num_draft, batch):
    check_rates(RATES[kind], num_draft, measured_rates(RATES[kind], num_draft, batch, pairs=150))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_draft", "batch"), list(itertools.product(RATES, range(1, 9), (1, 8))))
def test_measured_survivals_and_tokens_per_step_in_full(kind, num_draft, batch):
    check_rates(RATES[kind], num_draft, measured_rates(RATES[kind], num_draft, batch, pairs=1500))


def test_rates_do_not_depend_on_the_drafter():
    check_rates(RATES["conditional"], 3, measured_rates(RATES["conditional"], 3, 8, NEAR, pairs=150))


def test_the_check_of_rates_has_power():
    """Records of another rate are told apart: the depths by the binomial test, the mean alone by its spread."""
    records = measured_rates(RATES["conditional"], 4, 8, pairs=200)
    with pytest.raises(AssertionError):
        check_rates("synthetic:conditional=0.6", 4, records)


def test_the_synthetic_drafter_never_ends_an_answer_by_itself():
    engine = small_engine("synthetic", 4)
    prompt = [0, EOS, 2, EOS, EOS]
    result = engine.generate(prompt, max_new_tokens=30, rule="synthetic:conditional=1", ignore_eos=True)
    accepted = [token for token, origin in zip(result.token_ids, result.origins, strict=True) if origin == "accepted"]
    assert accepted and EOS not in accepted


def test_the_synthetic_drafter_changes_nothing_under_an_exact_rule():
    for temperature in (0.0, 0.8):
        settings = {"max_new_tokens": 16, "temperature": temperature, "seed": 4}
        for prompt in PROMPTS[:2]:
            plain = small_engine("none").generate(prompt, **settings)
            assert small_engine("synthetic").generate(prompt, **settings).token_ids == plain.token_ids
