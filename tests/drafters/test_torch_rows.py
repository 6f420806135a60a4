"""What drafting computes row by row is what training unrolls; trees, batches, cuts and forks change no row."""

import itertools
import operator
import random

import pytest
import torch

from draftsmith.drafters.rows import Level, TrueRows
from draftsmith.drafters.torch_rows import TorchRows
from tests.drafters.trained_fakes import batch_of, info_of, random_module
from tests.models.fakes import tiny_backend

FAMILIES = [
    ("eagle1", {}),
    ("eagle1", {"fc_bias": "true"}),
    ("eagle3", {}),
    ("eagle3", {"taps": "0-1-2", "norm_before_residual": "true"}),
    ("eagle3", {"norm_output": "true", "tap_norm": "true"}),
    ("mtp", {}),
    ("mtp", {"variant": "qwen", "qk_norm": "true"}),
    ("mtp", {"variant": "mimo", "qkv_bias": "true", "num_kv_heads": "4"}),
]
IDS = [f"{method}{'-' if changes else ''}{'-'.join(changes.values())}" for method, changes in FAMILIES]
# In float32 against the largest logits, about 100: either way strays 6e-5 from what float64 gives.
PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-10)]


def text_of(length, seed=0, vocab_size=64):
    dice = random.Random(seed)
    return [dice.randrange(vocab_size) for _ in range(length)]


class Case:
    """A module, its runner, and one text with the target's features of every row."""

    def __init__(self, method="eagle3", changes=None, dtype=torch.float64, length=20, seed=0):
        backend = tiny_backend(0, dtype=dtype)
        self.module = random_module(method, info_of(backend), changes, dtype=dtype, noise=0.5)
        self.runner = TorchRows(self.module)
        self.text = text_of(length, seed)
        self.batch = batch_of(backend, [self.text], self.module.taps)
        self.features = self.module.features(self.batch)[0]

    def rows(self, start, stop, sequence_id=0):
        """True rows `start` to `stop` - 1."""
        return TrueRows(sequence_id, self.text[start + 1 : stop + 1], self.features[start:stop])


@pytest.mark.parametrize("dtype,tolerance", PRECISIONS, ids=["float32", "float64"])
@pytest.mark.parametrize("method,changes", FAMILIES, ids=IDS)
def test_training_unrolls_what_drafting_computes(method, changes, dtype, tolerance):
    case = Case(method, changes, dtype)
    num_depths = 4
    with torch.no_grad():
        drafts = list(case.module.depths(case.batch, num_depths))
    for anchor in range(len(case.text) - 1):
        logits = case.runner.begin([case.rows(anchor, anchor + 1)])
        for depth, draft in enumerate(drafts):
            found = (draft.anchors == anchor).nonzero()
            if not len(found):  # the text ends before the token that would be judged
                assert anchor + 2 + depth >= len(case.text)
                break
            torch.testing.assert_close(draft.logits_AU[found[0, 0]], logits[0], rtol=tolerance, atol=tolerance)
            level = Level(0, [case.text[anchor + 2 + depth]], [depth - 1])
            logits = case.runner.extend([level])[0]


def test_nodes_of_a_tree_see_their_ancestors_alone():
    case = Case()
    case.runner.begin([case.rows(0, 10)])
    tokens, parents = [3, 4, 5, 6, 7, 8, 9], [-1, -1, 0, 0, 1, 2, 4]
    found = [*case.runner.extend([Level(0, tokens[:2], parents[:2])])[0]]
    found += [*case.runner.extend([Level(0, tokens[2:5], parents[2:5])])[0]]
    found += [*case.runner.extend([Level(0, tokens[5:], parents[5:])])[0]]
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        case.runner.begin([case.rows(10, 10)])
        for depth, step in enumerate(path):
            alone = case.runner.extend([Level(0, [tokens[step]], [depth - 1])])[0][0]
        torch.testing.assert_close(found[node], alone, rtol=0, atol=1e-12)


def test_speculative_rows_leave_no_trace():
    case, plain = Case(), Case()
    for start, stop in ((0, 3), (3, 4), (4, 9), (9, 15)):
        if start:
            case.runner.extend([Level(0, [1, 2], [-1, -1])])
            case.runner.extend([Level(0, [3], [1])])
        logits = case.runner.begin([case.rows(start, stop)])
        torch.testing.assert_close(logits, plain.runner.begin([case.rows(0, stop, stop)]), rtol=0, atol=1e-12)


def test_a_batch_of_sequences_is_each_alone():
    first, second = Case(seed=1, length=70), Case(seed=2)
    runner = first.runner
    runner.append([first.rows(0, 66, 1), second.rows(0, 2, 2)])
    both = runner.begin([first.rows(66, 68, 1), second.rows(2, 5, 2)])
    levels = runner.extend([Level(1, [5, 6], [-1, -1]), Level(2, [7], [-1])])
    for case, sequence_id, stop, level in ((first, 1, 68, [5, 6]), (second, 2, 5, [7])):
        alone = TorchRows(case.module)
        torch.testing.assert_close(both[sequence_id - 1], alone.begin([case.rows(0, stop)])[0], rtol=0, atol=1e-12)
        single = alone.extend([Level(0, level, [-1] * len(level))])[0]
        torch.testing.assert_close(levels[sequence_id - 1], single, rtol=0, atol=1e-12)
    assert runner.num_rows(1) == 68 and runner.num_rows(2) == 5 and runner.num_rows(3) == 0


def test_cuts_and_forks_are_shorter_sequences():
    case = Case(length=80)
    case.runner.begin([case.rows(0, 70)])
    for length in (1, 40, 63, 64, 65, 69, 70):
        case.runner.fork(0, 1, length)
        assert case.runner.num_rows(1) == length
        logits = case.runner.begin([case.rows(length, length + 5, 1)])
        fresh = TorchRows(case.module).begin([case.rows(0, length + 5)])
        torch.testing.assert_close(logits, fresh, rtol=0, atol=1e-12)
        case.runner.truncate(1, length)
        torch.testing.assert_close(case.runner.begin([case.rows(length, length + 5, 1)]), fresh, rtol=0, atol=1e-12)
    assert case.runner.num_rows(0) == 70  # the source never notices
    torch.testing.assert_close(
        case.runner.begin([case.rows(70, 72)]), TorchRows(case.module).begin([case.rows(0, 72)]), rtol=0, atol=1e-12
    )
    case.runner.truncate(1, 0)
    case.runner.forget(0)
    case.runner.forget(0)
    case.runner.truncate(0, 3)
    case.runner.fork(0, 5, 3)
    assert case.runner.num_rows(0) == case.runner.num_rows(1) == case.runner.num_rows(5) == 0


def test_a_greedy_chain_is_level_by_level_the_likeliest_token():
    case, slow = Case(seed=3), Case(seed=3)
    ids = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]
    backend = tiny_backend(0)
    module = random_module("eagle3", info_of(backend), draft_ids=torch.tensor(ids), dtype=torch.float64)
    for each in (case, slow):
        each.runner = TorchRows(module)
    chains = case.runner.chain([case.rows(0, 4, 0), case.rows(0, 9, 1)], [1, 6])
    assert [len(chain.tokens) for chain in chains] == [1, 6]
    for chain, stop in zip(chains, (4, 9), strict=True):
        logits = slow.runner.begin([slow.rows(0, stop, stop)])[0]
        for depth, (token, prob) in enumerate(zip(chain.tokens, chain.probs, strict=True)):
            assert token == ids[int(logits.argmax())]
            assert prob == pytest.approx(float(torch.softmax(logits, dim=-1).max()), abs=1e-12)
            logits = slow.runner.extend([Level(stop, [token], [depth - 1])])[0][0]


def test_a_chain_ends_with_the_token_that_takes_it_below_what_is_asked():
    case, twin = Case(seed=3), Case(seed=3)
    whole = case.runner.chain([case.rows(0, 4, 0), case.rows(0, 9, 1)], [6, 6])
    least = whole[0].probs[0] * whole[0].probs[1] * 1.0001
    found = twin.runner.chain([twin.rows(0, 4, 0), twin.rows(0, 9, 1)], [6, 6], least)
    for chain, ended in zip(whole, found, strict=True):
        reaches = list(itertools.accumulate(chain.probs, operator.mul))
        size = next((place + 1 for place, reach in enumerate(reaches) if reach < least), 6)
        assert ended.tokens == chain.tokens[:size]
        assert ended.probs == pytest.approx(chain.probs[:size], abs=1e-12)
    assert len(found[0].tokens) == 2
