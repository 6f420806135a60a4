"""One contract for every drafter of the table, and for one that is not in it."""

import random

import pytest

from draftsmith.core.sampling import SamplingParams
from draftsmith.core.types import ProposalKind, Rule
from draftsmith.drafters.base import DrafterChoice
from draftsmith.registry import DRAFTERS, load_class, parse_selection
from tests.drafters.loop import TABLE, Reading, TableBackend, always, check_proposal, make, run, target_info, view_of

ECHO = "tests.drafters.loop:EchoDrafter"
SELECTIONS = [
    "none",
    "ngram",
    "ngram:min_ngram=1:prefer=earliest",
    "suffix",
    "suffix:tree=true:max_spec_factor=3",
    "draft_model:model=near",
    "draft_model:model=near:tree=3x2x1:max_draft=20",
    "draft_model:model=student",
    "draft_model:model=student:tree=3x2x1:max_draft=9",
    "hybrid",
    "hybrid:other=draft_model+model=near:threshold=1.5",
    "medusa:path=toy/medusa",
    "medusa:path=toy/medusa-own:tree=7",
    "medusa2:path=toy/medusa2:tree=6",
    "hydra:path=toy/hydra:tree=3x2x1:max_draft=9",
    "hydra:path=toy/hydra++",
    "mlp_speculator:path=toy/mlp:tree=8",
    "mlp_speculator:path=toy/mlp-untied",
    "gloeckle:path=toy/gloeckle:tree=2x2",
    "gloeckle:path=toy/gloeckle-own",
    "eagle1:path=toy/eagle1",
    "eagle1:path=toy/eagle1-few:tree=3x2x1:max_draft=9",
    "eagle2:path=toy/eagle1",
    "eagle3:path=toy/eagle3",
    "eagle3:path=toy/eagle3.1:tree=dynamic:top_k=2:depth=4",
    "mtp:path=toy/mtp",
    "mtp:path=toy/mtp-mimo:tree=2x2",
    "synthetic",
    ECHO,
]
# Its global tree remembers other sequences on purpose, so a sequence's own state is compared without it.
OWN_STATE = [text.replace("suffix", "suffix:max_cached_requests=0") for text in SELECTIONS if "hybrid" not in text]
PLAIN = "none"
PROMPTS = [[0, 1, 2, 3, 0, 1, 2], [5], [7, 7, 7, 7], [1, 2, 1, 2, 1, 2, 1, 2], [3, 4]]


def test_every_drafter_of_the_table_is_here():
    classes = {name: load_class(parse_selection(name, DRAFTERS, "drafter")) for name in DRAFTERS}
    drafters = {name for name, kind in classes.items() if not issubclass(kind, DrafterChoice)}
    assert {text.partition(":")[0] for text in SELECTIONS} >= drafters


def histories(rng, count):
    """Texts with much repetition, of odd lengths, prompts from empty to whole."""
    for _ in range(count):
        length = rng.choice([1, 2, 3, 5, 17, 40])
        tokens = [rng.randrange(3 if rng.random() < 0.7 else 12) for _ in range(length)]
        yield tokens, rng.randint(0, length)


@pytest.mark.parametrize("text", SELECTIONS)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, rule=Rule.TRAVERSAL)])
def test_proposals_keep_the_contract(text, params):
    drafter, rng = Reading(text), random.Random(3)
    views = [
        view_of(tokens, prompt_len, sequence_id=index, params=params)
        for index, (tokens, prompt_len) in enumerate(histories(rng, 40))
    ]
    for start in range(0, len(views), 8):
        batch = views[start : start + 8]
        for _ in range(2):  # asking again without news gives the same
            budgets = [1 + (start + place) % 9 for place in range(len(batch))]
            found = drafter.propose(batch, budgets)
            assert len(found) == len(batch)
            for proposal, view, budget in zip(found, batch, budgets, strict=True):
                check_proposal(proposal, view, budget)
        again = drafter.propose(batch, budgets)
        assert [item.tree for item in again] == [item.tree for item in found]


@pytest.mark.parametrize("text", SELECTIONS)
def test_unknown_sequences_are_nothing_special(text):
    drafter = make(text)
    drafter.forget(4)
    drafter.truncate(4, 0)
    drafter.fork(4, 5, 1)
    drafter.propose([view_of([1, 2, 1, 2], 2, sequence_id=4)], [3], always)
    drafter.forget(4)
    drafter.forget(4)
    assert drafter.propose([], [], always) == []


@pytest.mark.parametrize("text", OWN_STATE)
def test_a_spell_without_drafting_costs_nothing_but_time(text):
    """Conformance KV (vllm#49548): the drafter catches up before its next proposal."""
    rng = random.Random(1)
    tokens, seen = [0, 1, 2, 0, 1], Reading(text)
    for spell in (0, 1, 0, 7, 0, 3, 30, 0):
        tokens = tokens + [rng.randrange(3) for _ in range(spell + 1)]
        view = view_of(tokens, 5, sequence_id=9)
        fresh = Reading(text).propose([view_of(tokens, 5, sequence_id=9)], [6])
        assert seen.propose([view], [6])[0].tree == fresh[0].tree


@pytest.mark.parametrize("text", OWN_STATE)
def test_a_fork_goes_on_like_a_fresh_sequence(text):
    rng = random.Random(2)
    tokens = [rng.randrange(3) for _ in range(30)]
    for length in (1, 4, 20, 29, 30):
        drafter = Reading(text)
        drafter.propose([view_of(tokens, 5, sequence_id=1)], [5])
        drafter.fork(1, 2, length)
        own = [*tokens[:length], 2, 1, 2, 1]
        view = view_of(own, min(5, length), sequence_id=2)
        fresh = Reading(text).propose([view], [5])[0]
        assert drafter.propose([view], [5])[0].tree == fresh.tree
        drafter.forget(2)
        source = view_of([*tokens, 1], 5, sequence_id=1)  # the source never notices
        assert drafter.propose([source], [5])[0].tree == Reading(text).propose([source], [5])[0].tree


@pytest.mark.parametrize("text", OWN_STATE)
def test_a_cut_sequence_forgets_what_was_cut(text):
    """Conformance CACHE (llama.cpp#21815): an index that outlives a cut proposes text that is no longer there."""
    rng = random.Random(5)
    tokens = [rng.randrange(3) for _ in range(30)]
    for length in (0, 1, 6, 29, 30):
        drafter = Reading(text)
        drafter.propose([view_of(tokens, 5, sequence_id=1)], [5])
        drafter.truncate(1, length)
        other = [*tokens[:length], 5, 6, 5, 6, 5]
        view = view_of(other, min(5, len(other)), sequence_id=1)
        assert drafter.propose([view], [5])[0].tree == Reading(text).propose([view], [5])[0].tree


BUDGETS = {
    "constant": lambda step: 4,
    "one": lambda step: 1,
    "on and off": lambda step: (0, 0, 5, 1, 0, 9)[step % 6],
    "late": lambda step: 0 if step < 6 else 7,
}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "greedy with penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, banned_ids=frozenset({3})),
    "coupled": SamplingParams(temperature=0.8),
    "coupled with filters": SamplingParams(temperature=1.2, top_k=6, top_p=0.9, presence_penalty=0.4, min_tokens=6),
    "match": SamplingParams(temperature=1.0, rule=Rule.MATCH),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("text", SELECTIONS)
def test_greedy_and_coupled_output_is_the_plain_runs(text, sampling):
    params, ends = SAMPLINGS[sampling], frozenset({11})
    plain = [
        run(TableBackend(TABLE), make(PLAIN), [prompt], 24, params, seed=index, end_ids=ends).emitted[0]
        for index, prompt in enumerate(PROMPTS)
    ]
    drafter = make(text)
    for budget in BUDGETS.values():
        together = run(TableBackend(TABLE), drafter, PROMPTS, 24, params, budget=budget, end_ids=ends)
        assert [together.emitted[index] for index in range(len(PROMPTS))] == plain


@pytest.mark.parametrize("text", [text for text in SELECTIONS if text not in (PLAIN, ECHO, "synthetic")])
def test_drafts_are_accepted_at_all(text):
    """The tests above would pass with a drafter that is always wrong."""
    result = run(TableBackend(TABLE), make(text), PROMPTS, 60)
    assert result.accepted > 0.2 * result.drafted > 0


def test_drafts_of_retrieval_are_point_masses_under_every_rule():
    for rule in Rule:
        for text in ("ngram", "suffix", "hybrid"):
            view = view_of([0, 1, 2, 0, 1, 2, 0, 1], 4, params=SamplingParams(temperature=1.0, rule=rule))
            proposal = make(text, target_info()).propose([view], [4], always)[0]
            assert proposal.tree.num_drafted and proposal.kind is ProposalKind.POINT_MASS
