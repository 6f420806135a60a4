"""Drafting with heads: laws, shapes, what is kept of a sequence, checkpoints. Equality of output: test_contract."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.core.sampling import SamplingParams
from draftsmith.core.tree import children, depths, is_chain, path_tokens
from draftsmith.core.types import ProposalKind, Rule, Verdict
from draftsmith.drafters.base import Commit
from draftsmith.drafters.checkpoint import load_module, save_module
from draftsmith.drafters.rank_accuracy import KEY
from draftsmith.errors import ModelFileError, OptionError
from tests.drafters.loop import TABLE, Reading, TableBackend, always, make, target_info, target_of, view_of
from tests.drafters.trained import TOYS, new_module, toy_directory
from tests.drafters.trained_fakes import batch_of
from tests.models.fakes import tiny_backend

NAMES = sorted(name for name in TOYS if TOYS[name][0] in ("medusa", "hydra", "mlp_speculator", "gloeckle"))
PROMPT = [3, 1, 4, 1, 5]


def option(name, **more):
    """A selection of a toy."""
    return ":".join([f"{TOYS[name][0]}:path=toy/{name}", *(f"{key}={value}" for key, value in more.items())])


def logits_after(name, tokens, depth):
    """What training computes [V]: logits of x_{t+2+depth}, all `tokens` up to x_{t+1+depth} being given."""
    info = target_info({})
    module = load_module(toy_directory(name), TOYS[name][0], info)
    text = [*tokens, 0]
    batch = batch_of(info.backend, [text], module.needs, len(tokens))  # the added token is the only answer
    drafts = list(module.depths(batch, module.num_depths))
    assert drafts[depth].anchors.tolist() == [len(tokens) - 2 - depth]
    logits_V = torch.full((12,), -torch.inf)
    logits_V[module.draft_ids] = drafts[depth].logits_AU[0].detach()
    return logits_V


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tree", ["chain", "2x2"])
def test_what_is_drafted_is_what_was_trained(name, tree):
    """Recorded laws are those of the training forward, node by node, under each node's own path and penalties."""
    params = SamplingParams(
        temperature=0.8, top_p=0.95, frequency_penalty=0.7, repetition_penalty=1.2, banned_ids=frozenset({2}),
        rule=Rule.TRAVERSAL,
    )  # fmt: skip
    view = view_of([*PROMPT, 6, 7], len(PROMPT), params=params, seed=4)
    proposal = Reading(option(name, tree=tree)).propose([view], [6])[0]
    tree_depths = depths(proposal.tree.parents)
    assert proposal.kind is (ProposalKind.IID if tree == "chain" else ProposalKind.WITHOUT_REPLACEMENT)
    assert max(tree_depths) >= 2 and proposal.laws
    for node, law in proposal.laws.items():
        path = path_tokens(proposal.tree, node)
        logits_V = logits_after(name, [*view.tokens, *path], tree_depths[node])
        expected = view.sampler.law(logits_V, path)
        np.testing.assert_allclose(law.dense(12).numpy(), expected.numpy(), atol=2e-5)
    assert 2 not in proposal.tree.tokens[1:]


@pytest.mark.parametrize("name", NAMES)
def test_a_greedy_chain_is_the_likeliest_token_of_each_depth(name):
    view = view_of([*PROMPT, 6], len(PROMPT))
    tokens = Reading(option(name)).propose([view], [9])[0].tree.tokens
    module = load_module(toy_directory(name), TOYS[name][0], target_info({}))
    assert len(tokens) == 1 + module.num_depths
    for depth, token in enumerate(tokens[1:]):
        logits_V = logits_after(name, [*PROMPT, *tokens[: depth + 1]], depth)
        assert token == int(logits_V.argmax())


@pytest.mark.parametrize("name", NAMES)
def test_confidence_is_judged_before_the_draw(name):
    """Never the drawn token's own: stopping before a token because of that token would change its law."""
    asked = []
    view = view_of([*PROMPT, 6], len(PROMPT), params=SamplingParams(temperature=1.0, rule=Rule.CHAIN))
    proposal = Reading(option(name)).propose([view], [5], lambda value: asked.append(value) or len(asked) < 2)[0]
    assert proposal.tree.num_drafted == 1 and len(asked) == 2
    best = torch.softmax(logits_after(name, view.tokens, 0), dim=-1).max()
    assert asked[0] == pytest.approx(float(best), abs=1e-5)
    assert proposal.confidence == pytest.approx((1.0, asked[0]))


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("name", NAMES)
def test_illegal_tokens_are_never_drafted(name, rule):
    params = SamplingParams(
        temperature=1.0, rule=rule, banned_ids=frozenset({1, 3}), logit_bias={0: -float("inf")}, min_tokens=3
    )
    drafter = Reading(option(name, tree="3x2"))
    for seed in range(20):
        view = view_of([0, 5, 7], 3, seed=seed, params=params, end_ids=frozenset({11}))
        tree = drafter.propose([view], [9])[0].tree
        assert not {0, 1, 3} & set(tree.tokens[1:])
        for node in range(1, tree.num_nodes):
            assert tree.tokens[node] != 11 or len(path_tokens(tree, node)) > 3


@pytest.mark.parametrize("rule", list(Rule))
def test_nothing_is_drafted_where_the_draft_vocabulary_is_forbidden(rule):
    """The sampler falls back to the plain row when all is masked; a draft vocabulary can be masked as a whole."""
    ids = frozenset(TOYS["medusa-own"][2])
    for params in (
        SamplingParams(temperature=1.0, rule=rule, banned_ids=ids),
        SamplingParams(logit_bias={token: -float("inf") for token in ids}),
    ):
        view = view_of([4, 5, 4], 3, params=params)
        for tree in ("chain", "2x2"):
            proposal = Reading(option("medusa-own", tree=tree)).propose([view], [6])[0]
            assert proposal.tree.num_drafted == 0 and not proposal.laws


def test_requests_whose_rule_verifies_chains_get_chains():
    drafter = Reading(option("hydra", tree="2x2"))
    for rule in Rule:
        view = view_of(PROMPT, params=SamplingParams(temperature=1.0, rule=rule))
        proposal = drafter.propose([view], [6])[0]
        assert is_chain(proposal.tree.parents) == (rule in (Rule.CHAIN, Rule.BLOCK))
        assert proposal.tree.num_drafted == (3 if rule in (Rule.CHAIN, Rule.BLOCK) else 6)


def test_a_chain_of_a_coupled_request_is_the_targets_draw_where_the_law_is_right():
    """At temperature the draft guesses the target's own draw: a perfect draft law is always accepted."""
    params = SamplingParams(temperature=1.0)
    for seed in range(30):
        view = view_of(PROMPT, params=params, seed=seed)
        proposal = Reading(option("mlp")).propose([view], [1])[0]
        scores = view.sampler.scores(logits_after("mlp", PROMPT, 0))
        noise = view.random.target_gumbel(view.position, 12)
        assert proposal.tree.tokens[1] == int((scores.numpy() + noise).argmax())


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_each_alone(name):
    views = [view_of([(3 * index + place) % 12 for place in range(2 + index)], sequence_id=index) for index in range(5)]
    budgets = [1, 4, 2, 6, 3]
    together = Reading(option(name, tree="2x2")).propose(views, budgets)
    for view, budget, proposal in zip(views, budgets, together, strict=True):
        alone = Reading(option(name, tree="2x2")).propose([view], [budget])[0]
        assert alone.tree == proposal.tree and proposal.tree.num_drafted == budget


def test_nothing_is_drafted_below_an_end():
    info = dataclasses.replace(target_info({}), eos_ids=frozenset(range(12)))
    drafter, backend = make(option("mlp", tree="3x2"), info), TableBackend(TABLE)
    reading = Reading(option("mlp"))
    reading.drafter, reading.backend = drafter, backend
    assert reading.propose([view_of(PROMPT)], [9])[0].tree.parents == (-1, 0, 0, 0)


# -- trees --------------------------------------------------------------------------------------------


def test_a_static_tree_has_its_shape_and_fits_the_budget():
    drafter = Reading(option("hydra", tree="3x2x1", max_draft=12))
    view = view_of(PROMPT)
    parents = (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6)
    assert drafter.propose([view], [99])[0].tree.parents == parents
    assert drafter.propose([view], [5])[0].tree.parents == parents[:6]
    assert drafter.propose([view], [1])[0].tree.parents == parents[:2]


def test_a_tree_of_measured_accuracies(tmp_path):
    info = target_info({})
    module = new_module("medusa", info, {"num_depths": "3"})
    about = {KEY: [[0.5, 0.3, 0.1], [0.6, 0.2], [0.4]]}
    save_module(tmp_path / "heads", "medusa", module, "toy", info, about)
    # Worths: 0 .5, 00 .3, 1 .3, 10 .18, 000 .12, 2 .1, 01 .1; ties go to the shorter path.
    expected = [{(0,)}, {(1,)}, {(0, 0)}, {(1, 0)}, {(0, 0, 0)}, {(2,)}, {(0, 1)}]
    for budget in range(1, 8):
        reading = Reading(f"medusa:path={tmp_path / 'heads'}:tree=7")
        tree = reading.propose([view_of(PROMPT)], [budget])[0].tree
        paths = set(ranks_of(children(tree.parents)))
        assert paths == set().union(*expected[:budget])
    save_module(tmp_path / "heads", "medusa", module, "toy", info, {})
    with pytest.raises(OptionError, match="no measured accuracies"):
        make(f"medusa:path={tmp_path / 'heads'}:tree=7")
    save_module(tmp_path / "heads", "medusa", module, "toy", info, {KEY: [[0.5, 2.0]]})
    with pytest.raises(ModelFileError, match=KEY):
        make(f"medusa:path={tmp_path / 'heads'}")


def ranks_of(below, node=0, path=()):
    """Every node's path of sibling ranks, root left out."""
    for rank, child in enumerate(below[node]):
        yield (*path, rank)
        yield from ranks_of(below, child, (*path, rank))


# -- keeping up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_rows_kept_by_steps_are_those_read_in_one_go(name):
    """Steps that emit tell of several rows at once, some while nothing was drafted."""
    drafter, backend = make(option(name)), TableBackend(TABLE)
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 12, 40)]
    view = view_of(tokens[:4], 4)
    hidden = backend.hidden("last_hidden", torch.tensor(tokens))
    drafter.commit([Commit(view, None, {"last_hidden": hidden[:2]})])
    assert drafter.propose([view], [3], always)[0].tree.num_drafted == 0
    # The last prompt row is scored with the root, and a token comes out.
    for emitted in (1, 3, 1, 4, 2):
        start = len(view.tokens) - 1 if len(view.tokens) > 4 else 2
        fresh = tokens[len(view.tokens) : len(view.tokens) + emitted]
        view.tokens.extend(fresh)
        view.sampler.append(fresh)
        verdict = Verdict(tuple(range(1, emitted)), tuple(fresh))
        drafter.commit([Commit(view, verdict, {"last_hidden": hidden[start : len(view.tokens) - 1]})])
        alone = Reading(option(name)).propose([view_of(view.tokens, 4)], [3])[0]
        assert drafter.propose([view], [3], always)[0].tree == alone.tree
        assert alone.tree.num_drafted > 0


@pytest.mark.parametrize("name", NAMES)
def test_without_a_fresh_row_nothing_is_drafted(name):
    """Reused rows bring no taps: the copy drafts from its first own row on, with all it needs of the others."""
    reading = Reading(option(name))
    tokens = [*PROMPT, 6, 7, 8, 9]
    reading.propose([view_of(tokens, 5, sequence_id=1)], [3])
    cut = view_of([*tokens[:6], 2], 5, sequence_id=2)
    reading.fork(1, 2, 6)
    assert reading.drafter.propose([cut], [3], always)[0].tree.num_drafted == 0
    cut.tokens.append(4)
    cut.sampler.append([4])
    expected = Reading(option(name)).propose([view_of(cut.tokens, 5)], [3])[0]
    found = reading.propose([cut], [3])[0]
    assert found.tree == expected.tree and found.tree.num_drafted > 0
    # A copy of everything has the last row too.
    reading.fork(1, 3, 8)
    whole = reading.drafter.propose([view_of(tokens, 5, sequence_id=3)], [3], always)[0]
    assert whole.tree == reading.drafter.propose([view_of(tokens, 5, sequence_id=1)], [3], always)[0].tree
    assert whole.tree.num_drafted > 0


@pytest.mark.parametrize("name", ["hydra++", "gloeckle"])
def test_a_gap_in_the_rows_is_never_papered_over(name):
    """A drafter that missed rows must not take later ones for theirs."""
    drafter, backend = make(option(name)), TableBackend(TABLE)
    tokens = [*PROMPT, 6, 7, 8, 9]
    hidden = backend.hidden("last_hidden", torch.tensor(tokens))
    view = view_of(tokens, 5)
    drafter.commit([Commit(view, Verdict((), (9,)), {"last_hidden": hidden[6:8]})])
    assert drafter.propose([view], [3], always)[0].tree.num_drafted == 0
    drafter.truncate(0, 0)
    drafter.commit([Commit(view, None, {"last_hidden": hidden[:8]})])
    assert drafter.propose([view], [3], always)[0].tree.num_drafted > 0


def test_memory_is_counted():
    for name in NAMES:
        reading = Reading(option(name))
        reading.propose([view_of([1] * 100)], [4])
        held = sum(known.rows._room.numel() * 4 for known in reading.drafter._known.values() if known.rows.length)
        assert held <= reading.drafter.bytes_per_token * 100
        assert (held > 0) == (name in ("hydra++", "gloeckle", "gloeckle-own"))
        reading.forget(0)
        assert not reading.drafter._known


# -- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_comes_back_as_it_was(name, tmp_path):
    info = target_info({})
    method, changes, draft_ids = TOYS[name]
    module = new_module(method, info, changes, None if draft_ids is None else torch.tensor(draft_ids))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    save_module(tmp_path / "a", method, module.bfloat16(), "toy", info, {"steps": 3})
    again = load_module(tmp_path / "a", method, info)
    assert again.config == module.config
    for key, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor.to(again.state_dict()[key].dtype))
        assert not tensor.is_floating_point() or again.state_dict()[key].dtype == torch.float32
    assert not any("target" in key for key in again.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_is_refused(name, tmp_path):
    info = target_info({})
    method, changes, draft_ids = TOYS[name]
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    path = tmp_path / "a"
    save_module(path, method, new_module(method, info, changes, ids), "toy", info, {})
    with pytest.raises(ModelFileError, match="width 12"):
        load_module(path, method, target_of(tiny_backend(0, vocab_size=12)))
    other = "medusa" if method != "medusa" else "hydra"
    with pytest.raises(ModelFileError, match=f"holds weights of drafter '{method}', not of '{other}'"):
        make(f"{other}:path={path}")
    weights, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    lacking = sorted(key for key in weights if key != "draft_ids")[-1]
    save_file({key: tensor for key, tensor in weights.items() if key != lacking}, path / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"tensor '{lacking}' is missing"):
        make(f"{method}:path={path}")
    save_file(weights | {lacking: weights[lacking][:-1].contiguous()}, path / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"tensor '{lacking}' has shape"):
        make(f"{method}:path={path}")
    config["config"]["num_depths"] = 0
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="num_depths is 0"):
        make(f"{method}:path={path}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("medusa", "write medusa:path=DIRECTORY"),
        ("medusa:path=nowhere", "cannot be read"),
        ("medusa:path=toy/medusa:max_draft=0", "max_draft is 0"),
        ("hydra:path=toy/hydra:tree=3x0", "children per level"),
        ("hydra:path=toy/hydra:tree=many", "auto, chain, a number of nodes like 24, or children per level like 3x2x1"),
        ("hydra:path=toy/hydra:tree=2x2x2x2", "drafts 3 at most"),
        ("gloeckle:path=toy/hydra", "not of 'gloeckle'"),
    ],
)
def test_bad_options(text, complaint):
    with pytest.raises((OptionError, ModelFileError), match=complaint):
        make(text)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_depths": "0"}, "num_depths is 0"),
        ({"head": "both"}, "head is 'both'"),
        ({"num_layers": "0"}, "num_layers is 0"),
        ({"colour": "red"}, "unknown option 'colour'"),
    ],
)
def test_bad_architectures(changes, complaint):
    for kind in ("medusa", "hydra"):
        with pytest.raises(OptionError, match=complaint):
            new_module(kind, target_info({}), changes)
