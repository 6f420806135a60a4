"""Recurrent drafters keep in step with the target whatever happens to a sequence, and draft what was asked for."""

import math
import random

import pytest
import torch

from draftsmith.core.sampling import SamplingParams
from draftsmith.core.tree import depths, path_tokens
from draftsmith.core.types import ProposalKind, Rule
from draftsmith.drafters.growth import Growth, verifies_trees
from draftsmith.drafters.rows import Level
from draftsmith.drafters.torch_rows import TorchRows
from draftsmith.errors import ModelFileError, OptionError
from draftsmith.registry import DRAFTERS, load_class, parse_selection, read_options
from tests.drafters.loop import Run, always, check_proposal, one_step, read_prompt, run, view_of
from tests.drafters.trained_fakes import checkpoint_of, info_of, random_module
from tests.models.fakes import tiny_backend

VOCAB = 64
METHODS = ["eagle1", "eagle3", "mtp"]
MODES = ["chain", "dynamic", "3x2x1"]


def drafter_of(method="eagle3", backend=None, draft_ids=None, eos_ids=frozenset(), **options):
    """A drafter with random float64 weights; equal arguments give equal weights."""
    backend = backend or tiny_backend(0)
    kind = load_class(parse_selection(method, DRAFTERS, "drafter"))
    module = random_module(method, info_of(backend), draft_ids=draft_ids, dtype=torch.float64)
    return kind(kind.Options(path="-", **options), module, TorchRows(module), info_of(backend, eos_ids))


def read(backend, drafter, tokens, sequence_id=0, chunk_rows=5, params=None):
    """A view of a sequence whose rows but the root's are scored and committed."""
    view = view_of(tokens, len(tokens), sequence_id, params=params, vocab_size=VOCAB)
    if sequence_id not in backend.cache:
        backend.cache.open(sequence_id)
    read_prompt(backend, drafter, view, chunk_rows)
    return view


def fresh_proposal(method, tokens, budget=6, params=None, **options):
    backend, drafter = tiny_backend(0), drafter_of(method, **options)
    return drafter.propose([read(backend, drafter, tokens, chunk_rows=600, params=params)], [budget], always)[0]


def text_of(length, seed=0):
    dice = random.Random(seed)
    return [dice.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("tree", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_a_fork_goes_on_like_a_fresh_sequence(method, tree):
    backend, text = tiny_backend(0), text_of(30)
    for length in (1, 4, 20, 29):
        for last in (text[length], (text[length] + 1) % VOCAB):  # the source's own next token, or another
            drafter = drafter_of(method, tree=tree)
            view = read(backend, drafter, text)
            before = drafter.propose([view], [6], always)[0].tree
            drafter.fork(0, 1, length)
            backend.cache.fork(0, 1, length)
            own = [*text[:length], last, 7, 1]
            copy = read(backend, drafter, own, 1)
            assert drafter.propose([copy], [6], always)[0].tree == fresh_proposal(method, own, tree=tree).tree
            drafter.forget(1)
            assert drafter.propose([view], [6], always)[0].tree == before
            backend.cache.close(0)
            backend.cache.close(1)


def test_a_fork_may_be_asked_at_once():
    """All rows but the root's were reused, so no commit comes in between."""
    backend, text = tiny_backend(0), text_of(30)
    for length, proposed in ((12, False), (12, True), (29, True)):
        drafter = drafter_of()
        view = read(backend, drafter, text)
        if proposed:
            drafter.propose([view], [6], always)
        drafter.fork(0, 1, length)
        own = [*text[:length], 9]
        copy = view_of(own, sequence_id=1, vocab_size=VOCAB)
        assert drafter.propose([copy], [6], always)[0].tree == fresh_proposal("eagle3", own).tree
        backend.cache.close(0)


@pytest.mark.parametrize("method", METHODS)
def test_a_cut_sequence_goes_on_like_a_fresh_one(method):
    backend, text = tiny_backend(0), text_of(30)
    for length in (0, 1, 6, 28, 29):
        for proposed in (False, True):
            drafter = drafter_of(method)
            view = read(backend, drafter, text)
            if proposed:
                drafter.propose([view], [6], always)
            drafter.truncate(0, length)
            if length:
                backend.cache.truncate(0, length)
            else:
                backend.cache.close(0)
            own = [*text[:length], 5, 6, 5]
            view = read(backend, drafter, own)
            assert drafter.propose([view], [6], always)[0].tree == fresh_proposal(method, own).tree
            backend.cache.close(0)


@pytest.mark.parametrize("method", METHODS)
def test_a_spell_without_drafting_costs_nothing_but_time(method):
    """Also one longer than what is fed at once."""
    backend, drafter = tiny_backend(0), drafter_of(method)
    text = text_of(1100)
    for length in (3, 4, 9, 20, 21, 1100) if method == "eagle3" else (3, 9, 20, 50):
        view = read(backend, drafter, text[:length], chunk_rows=200)
        assert drafter.propose([view], [4], always)[0].tree == fresh_proposal(method, text[:length], 4).tree


@pytest.mark.parametrize("tree", MODES)
def test_rejected_drafts_leave_no_trace(tree):
    backend, drafter = tiny_backend(0), drafter_of(tree=tree)
    view = read(backend, drafter, text_of(9))
    result = Run({0: []})
    for budget in (5, 5, 0, 7, 1, 0, 0, 6):
        one_step(backend, drafter, [view], budget, 1000, always, result)
        known = list(view.tokens)
        assert drafter.propose([view], [6], always)[0].tree == fresh_proposal("eagle3", known, tree=tree).tree


def test_without_every_feature_nothing_is_proposed():
    backend, drafter = tiny_backend(0), drafter_of()
    view = view_of(text_of(5), vocab_size=VOCAB)
    assert drafter.propose([view], [3], always)[0].tree.num_drafted == 0
    view = read(backend, drafter, text_of(5))
    view.tokens.append(1)
    assert drafter.propose([view], [3], always)[0].tree.num_drafted == 0
    alone = view_of([3], sequence_id=4, vocab_size=VOCAB)
    assert drafter.propose([alone], [3], always)[0].tree.num_drafted == 0


def test_what_is_forgotten_is_gone():
    backend, drafter = tiny_backend(0), drafter_of()
    for sequence_id in range(3):
        drafter.propose([read(backend, drafter, text_of(9), sequence_id)], [3], always)
    drafter.fork(1, 5, 4)
    for sequence_id in (0, 1, 2, 5):
        drafter.forget(sequence_id)
    assert not drafter._features and not drafter._runner._states


# -- what is drafted ----------------------------------------------------------------------------------


SAMPLED = {rule: SamplingParams(temperature=1.0, rule=rule) for rule in Rule}


@pytest.mark.parametrize("draft_ids", [None, torch.arange(0, VOCAB, 3)], ids=["all", "a third"])
@pytest.mark.parametrize("tree", MODES)
def test_every_rule_gets_what_it_can_verify(tree, draft_ids):
    backend = tiny_backend(0)
    for number, (rule, params) in enumerate(SAMPLED.items()):
        drafter = drafter_of(tree=tree, draft_ids=draft_ids)
        view = read(backend, drafter, text_of(9), number, params=params)
        proposal = drafter.propose([view], [6], always)[0]
        check_proposal(proposal, view, 6, VOCAB)
        assert proposal.tree.num_drafted == 6
        kind = ProposalKind.POINT_MASS
        if rule in (Rule.CHAIN, Rule.BLOCK) or (rule in (Rule.RECURSIVE, Rule.TRAVERSAL) and tree == "chain"):
            kind = ProposalKind.IID
            assert proposal.tree.parents == (-1, 0, 1, 2, 3, 4, 5)
        elif rule in (Rule.RECURSIVE, Rule.TRAVERSAL) and tree != "dynamic":
            kind = ProposalKind.WITHOUT_REPLACEMENT
        assert proposal.kind is kind
        if draft_ids is not None:
            assert set(proposal.tree.tokens[1:]) <= set(draft_ids.tolist())
            for law in proposal.laws.values():
                dense = law.dense(VOCAB)
                assert float(dense.sum()) == pytest.approx(1, abs=1e-6)
                assert float(dense[draft_ids].sum()) == pytest.approx(1, abs=1e-6)


class _Whole(Growth):
    """Draws as if every row were one of the whole vocabulary."""

    def sampler_for(self, logits_U):
        logits_V = torch.full((self._vocab_size,), -torch.inf, dtype=logits_U.dtype)
        return self.view.sampler, logits_V.index_copy(0, self._draft_ids, logits_U), None


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("rule", list(Rule))
def test_a_draft_vocabulary_draws_what_the_whole_one_would(rule, options):
    draft_ids = torch.arange(0, VOCAB, 3)
    for seed in range(40):
        params = SamplingParams(temperature=0.8, rule=rule, **options)
        view = view_of(text_of(9, seed), 4, params=params, vocab_size=VOCAB)
        logits_U = torch.randn(len(draft_ids), generator=torch.Generator().manual_seed(seed))
        branches = verifies_trees(view.sampler)
        pair = [kind(view, VOCAB, branches=branches, draft_ids=draft_ids) for kind in (Growth, _Whole)]
        drawn = [list(growth.draw(0, logits_U, 3 if branches else 1)) for growth in pair]
        assert drawn[0] == drawn[1] and set(drawn[0]) <= set(draft_ids.tolist())
        laws = [growth.laws[0].dense(VOCAB) if growth.laws else None for growth in pair]
        assert (laws[0] is None) == (rule in (Rule.COUPLING, Rule.MATCH))
        if laws[0] is not None:
            torch.testing.assert_close(laws[0], laws[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", [Rule.CHAIN, Rule.RECURSIVE])
def test_the_recorded_law_is_the_modules_own(rule):
    params = SamplingParams(temperature=0.7, rule=rule)
    backend, ids = tiny_backend(0), torch.arange(0, VOCAB, 2)
    drafter = drafter_of(tree="2x2", draft_ids=ids)
    view = read(backend, drafter, text_of(9), params=params)
    proposal = drafter.propose([view], [6], always)[0]
    runner, true = drafter._runner, drafter._catch_up(view)
    for node, law in proposal.laws.items():
        logits = runner.begin([true])[0]
        path = path_tokens(proposal.tree, node)
        for depth, token in enumerate(path):
            logits = runner.extend([Level(0, [token], [depth - 1])])[0][0]
        expected = torch.zeros(VOCAB, dtype=torch.float64)
        expected[ids] = torch.softmax(logits / 0.7, dim=-1)
        torch.testing.assert_close(law.dense(VOCAB).double(), expected, rtol=0, atol=1e-6)


POINT_MASSES = {
    "greedy": SamplingParams(),
    "coupling": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "top-p": SamplingParams(temperature=0.9, top_p=0.8),
    "min-p": SamplingParams(temperature=1.3, min_p=0.2),
    "match": SamplingParams(temperature=1.0, rule=Rule.MATCH),
}


@pytest.mark.parametrize("draft_ids", [None, torch.arange(0, VOCAB, 3)], ids=["all", "a third"])
@pytest.mark.parametrize("params", POINT_MASSES.values(), ids=POINT_MASSES)
def test_chains_of_point_masses_are_the_same_in_one_call_and_level_by_level(params, draft_ids):
    quick, slow = (drafter_of(draft_ids=draft_ids, tree=tree) for tree in ("chain", "1x1x1x1x1x1x1"))
    for seed in range(4):
        text = text_of(10, seed)
        found = [
            drafter.propose([read(tiny_backend(0), drafter, text, seed, params=params)], [7], always)[0]
            for drafter in (quick, slow)
        ]
        assert found[0].tree == found[1].tree
        assert found[0].kind is ProposalKind.POINT_MASS
        if params.rule is Rule.MATCH or not params.temperature:  # a tree's node has its own token's probability
            assert found[0].confidence == pytest.approx(found[1].confidence, abs=1e-12)


@pytest.mark.parametrize("tree", MODES)
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED[Rule.COUPLING], SAMPLED[Rule.TRAVERSAL]])
def test_drafting_stops_when_told_to_before_a_draw(tree, params):
    backend, drafter = tiny_backend(0), drafter_of(tree=tree)
    view = read(backend, drafter, text_of(9), params=params)
    heard = []

    def twice(confidence):
        heard.append(confidence)
        return len(heard) <= 2

    proposal = drafter.propose([view], [6], twice)[0]
    assert max(depths(proposal.tree.parents)) == 2
    assert len(heard) >= 3
    first = torch.softmax(drafter._runner.begin([drafter._catch_up(view)])[0], dim=-1).max()
    assert heard[0] == pytest.approx(float(first), abs=1e-9)


@pytest.mark.parametrize("tree", MODES)
def test_nothing_is_drafted_below_an_end(tree):
    backend, ends = tiny_backend(0), frozenset(range(0, VOCAB, 4))
    drafter = drafter_of(tree=tree, eos_ids=ends)
    found = 0
    for seed in range(12):
        view = read(backend, drafter, text_of(9, seed), seed)
        tree_found = drafter.propose([view], [8], always)[0].tree
        parents = {tree_found.tokens[parent] for parent in tree_found.parents[1:] if parent > 0}
        assert not parents & ends
        found += len(ends & set(tree_found.tokens[1:]))
    assert found > 0


def test_penalties_and_bans_are_heard():
    params = SamplingParams(repetition_penalty=3.0, banned_ids=frozenset(range(1, VOCAB, 2)), logit_bias={2: 1.0})
    backend = tiny_backend(0)
    for number, tree in enumerate(MODES):
        drafter = drafter_of(tree=tree)
        view = read(backend, drafter, text_of(9), number, params=params)
        proposal = drafter.propose([view], [6], always)[0]
        assert proposal.tree.num_drafted and not any(token % 2 for token in proposal.tree.tokens[1:])


# -- EAGLE-2's tree -----------------------------------------------------------------------------------


def literal_tree(log_probs_of, root, top_k, depth, budget):
    """Section 4 of the paper, word for word: expand the top-k nodes of each layer, then rerank all nodes.

    `log_probs_of(path)`: the draft's log-probabilities after a path of tokens.
    """
    nodes = []  # (path, value)
    layer = [((), 0.0)]
    for _ in range(depth):
        below = []
        for path, value in layer:
            log_probs = log_probs_of(path)
            for token in sorted(range(len(log_probs)), key=lambda token: -log_probs[token])[:top_k]:
                below.append(((*path, token), value + log_probs[token]))
        nodes += below
        layer = sorted(below, key=lambda node: -node[1])[:top_k]
    best = sorted(nodes, key=lambda node: (-node[1], len(node[0])))[:budget]
    return {path for path, _ in best}


@pytest.mark.parametrize("top_k,depth,budget", [(3, 4, 12), (2, 6, 5), (4, 2, 40), (1, 5, 5), (8, 3, 3)])
def test_the_dynamic_tree_is_the_papers(top_k, depth, budget):
    backend = tiny_backend(0)
    drafter = drafter_of(tree="dynamic", top_k=top_k, depth=depth, max_draft=50)
    for seed in range(3):
        view = read(backend, drafter, text_of(9, seed), seed)
        proposal = drafter.propose([view], [budget], always)[0]
        true, runner = drafter._catch_up(view), drafter._runner

        def log_probs_of(path, true=true, runner=runner, seed=seed):
            logits = runner.begin([true])[0]
            for place, token in enumerate(path):
                logits = runner.extend([Level(seed, [token], [place - 1])])[0][0]
            return torch.log_softmax(logits, dim=-1).tolist()

        expected = literal_tree(log_probs_of, view.root, top_k, depth, budget)
        tree = proposal.tree
        assert {path_tokens(tree, node) for node in range(1, tree.num_nodes)} == expected
        for node in range(1, tree.num_nodes):
            *path, token = path_tokens(tree, node)
            assert proposal.confidence[node] == pytest.approx(math.exp(log_probs_of(path)[token]), abs=1e-9)


def test_equal_values_never_part_a_child_from_its_parent():
    """Probabilities of exactly 1 give a child its parent's value; the shallower node comes first (EAGLE's code lost
    the parent there)."""
    from draftsmith.drafters.dynamic_tree import DynamicDraft

    view = view_of([1, 2], vocab_size=4)
    for budget in range(1, 12):
        draft = DynamicDraft(view, 4, budget, frozenset(), depth=6, top_k=3)
        sure = torch.tensor([0.0, 200.0, 100.0, 0.0])
        while draft.level:
            draft.extend([sure] * len(draft.level), always)
        proposal = draft.proposal()
        check_proposal(proposal, view, budget, 4)
        chain = [1] * min(budget, 6)
        assert proposal.tree.tokens[1 : 1 + len(chain)].count(1) >= min(1, len(chain))
        assert any(path_tokens(proposal.tree, node) == tuple(chain) for node in range(1, proposal.tree.num_nodes))


# -- options and files --------------------------------------------------------------------------------


def create(text, backend):
    selection = parse_selection(text, DRAFTERS, "drafter")
    kind = load_class(selection)
    return kind.create(read_options(kind.Options, selection.options, text), info_of(backend))


@pytest.mark.parametrize(
    "text,said",
    [
        ("eagle3", "path=DIRECTORY"),
        ("eagle3:path=x:tree=3xx2", "children per level"),
        ("eagle3:path=x:tree=dynamc", "write auto, chain, dynamic, or children per level like 3x2x1"),
        ("eagle3:path=x:max_draft=0", "max_draft is 0"),
        ("eagle3:path=x:top_k=3", "tree=dynamic"),
        ("eagle2:path=x:depth=0", "depth is 0"),
        ("mtp:path=x:unknown=3", "unknown option"),
    ],
)
def test_wrong_options_are_named(text, said):
    with pytest.raises(OptionError, match=said):
        create(text, tiny_backend(0))


def test_weights_are_those_of_the_method():
    backend = tiny_backend(0, dtype=torch.float32)
    info = info_of(backend)
    paths = {method: checkpoint_of(method, random_module(method, info), info, f"of-{method}") for method in METHODS}
    with pytest.raises(ModelFileError, match="'mtp', not of 'eagle3'"):
        create(f"eagle3:path={paths['mtp']}", backend)
    for text in ("eagle1", "eagle2"):
        drafter = create(f"{text}:path={paths['eagle1']}", backend)
        result = run(backend, drafter, [[1, 2, 3]], 6)
        assert result.drafted > 0
    create(f"eagle1:path={checkpoint_of('eagle2', random_module('eagle2', info), info, 'of-eagle2')}", backend)
