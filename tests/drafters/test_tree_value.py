"""What a tree is expected to be worth is what it is worth: accuracies measured, the best tree chosen, the tree run."""

import pytest

from draftsmith.control.base import RequestOutcome
from draftsmith.control.trials import trials_of
from draftsmith.core.sampling import SamplingParams
from draftsmith.core.sequoia import best_tree
from draftsmith.core.tree import depths
from draftsmith.core.tree_shapes import level_paths
from draftsmith.core.types import Budget, Rule
from draftsmith.core.verify import verify
from draftsmith.models.backend import RowGroup
from tests.drafters.loop import TABLE, TableBackend, always, loaded, make, near_table, target_info, view_of

DEPTH = 3


def steps(shape, num_steps, params, seed):
    """Steps of one sampled text in which a draft model fills the shape: (proposal, outcome)."""
    target = TableBackend(TABLE)
    drafter = make("draft_model:model=near:max_draft=40", target_info({"near": loaded(near_table(TABLE, 1, 0.6))}))
    view = view_of([0, 1, 2], params=params, seed=seed)
    target.cache.open(0)
    target.cache.reserve(0, 2)
    target.score([RowGroup(0, view.tokens[:2], (-1, 0), 2)])
    target.cache.keep(0, range(2))
    for _ in range(num_steps):
        proposal = drafter.propose([view], [Budget(len(shape), shape)], always)[0]
        target.cache.reserve(0, proposal.tree.num_nodes)
        logits = target.score([RowGroup(0, proposal.tree.tokens, proposal.tree.parents, 0)]).logits[0]
        verdict = verify(proposal, logits, view.sampler, view.random, view.position)
        target.cache.keep(0, [0, *verdict.path[: verdict.num_emitted - 1]])
        view.tokens.extend(verdict.tokens)
        view.sampler.append(verdict.tokens)
        depth = max(depths(proposal.tree.parents))
        accepted, emitted = verdict.num_accepted, verdict.num_emitted
        yield proposal, RequestOutcome(0, "d", proposal.tree.num_drafted, depth, accepted, emitted, verdict.tokens)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, rule=Rule.TRAVERSAL)])
def test_the_chosen_trees_expected_tokens_are_measured_within_five_per_cent(params):
    """Sequoia's promise. Greedy texts run into a cycle, so theirs are drawn by the coupled rule at low temperature."""
    if params.temperature == 0:
        params = SamplingParams(temperature=0.7, rule=Rule.MATCH)
    shape = tuple(level_paths([3, 3, 2], 40))
    tried = [[0] * 3 for _ in range(DEPTH)]
    right = [[0] * 3 for _ in range(DEPTH)]
    for proposal, outcome in steps(shape, 900, params, 1):
        for trial in trials_of(proposal, outcome):
            tried[trial.depth - 1][trial.rank] += 1
            right[trial.depth - 1][trial.rank] += trial.accepted
    rows = [[hit / max(num, 1) for hit, num in zip(*pair, strict=True)] for pair in zip(right, tried, strict=True)]
    chosen = best_tree(rows, 7, DEPTH)
    emitted = [outcome.num_emitted for _, outcome in steps(chosen.paths, 1200, params, 2)]
    assert sum(emitted) / len(emitted) == pytest.approx(chosen.tokens, rel=0.05)
    assert any(path[-1] for path in chosen.paths) and chosen.depth > 1
