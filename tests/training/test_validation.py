"""Validation: figures against literal code in float64, and the replay against an engine that really decodes."""

import random

import pytest
import torch

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.types import Proposal, Tree
from draftsmith.core.verify import verify
from draftsmith.drafters.trainable import shift_left
from draftsmith.errors import DataError
from draftsmith.training.features import MaskedText, TargetScorer, collate
from draftsmith.training.validation import NO_DRAFT, Tally, answer_spans, judge_batch, replay, replay_batch
from tests.models.fakes import tiny_backend
from tests.training.tiny import VOCAB, greedy, job_of


def decode(draft, tokens, start, num_depths):
    """An engine in miniature: chains verified by `core.verify`; returns emitted tokens and steps after the prompt."""
    sampler = Sampler(SamplingParams(), tokens[:start], frozenset(), VOCAB)
    written, steps = start + 1, 0  # the first token comes from the prompt's own step
    while written < len(tokens):
        chain = []
        for depth in range(num_depths):
            if chain == tokens[written : written + depth]:
                chain.append(draft(written - 2, depth))
            else:  # beyond a wrong draft anything may stand: it cannot be reached
                chain.append(0)
        tree = Tree((tokens[written - 1], *chain), tuple(range(-1, num_depths)))
        rows = torch.zeros(len(tree.tokens), VOCAB)
        for node in range(len(tree.tokens)):
            right = tokens[written + node] if written + node < len(tokens) else 0
            rows[node, right] = 1.0
        verdict = verify(Proposal(tree), rows, sampler, RequestRandom(0), written - start)
        emitted = verdict.cut(len(tokens) - written).num_emitted
        written, steps = written + emitted, steps + 1
    return len(tokens) - start - 1, steps


@pytest.mark.parametrize("seed", range(30))
def test_the_replay_counts_what_an_engine_counts(seed):
    draw = random.Random(seed)
    length, num_depths = draw.randrange(2, 40), draw.randrange(1, 6)
    start = draw.randrange(1, length)
    tokens = [draw.randrange(VOCAB) for _ in range(length)]
    right = draw.choice([0.0, 0.5, 0.9, 1.0])
    drafts = [
        [
            tokens[row + 2 + depth] if row + 2 + depth < length and draw.random() < right else draw.randrange(VOCAB)
            for row in range(length)
        ]
        for depth in range(num_depths)
    ]
    expected = decode(lambda row, depth: drafts[depth][row], tokens, start, num_depths)
    answer = [place >= start for place in range(length)]
    anchored = [
        [
            drafts[depth][row] if row + 2 + depth < length and answer[row + 2 + depth] else NO_DRAFT
            for row in range(length)
        ]
        for depth in range(num_depths)
    ]
    found = replay(anchored, [*tokens[1:], 0], answer)
    assert (found.tokens, found.steps) == expected


def test_several_answers_and_none():
    assert list(answer_spans([False, True, True, False, True])) == [(1, 3), (4, 5)]
    assert list(answer_spans([])) == []
    assert list(answer_spans([True, True])) == [(0, 2)]
    found = replay([[NO_DRAFT] * 7], [0] * 7, [False, True, True, True, False, True, True])
    assert (found.tokens, found.steps) == (3, 3)


def literal(module, batch, num_depths):
    """Figures by loops over anchors, in float64."""
    rows = {depth: [] for depth in range(num_depths)}
    head = module.target_head_UD.double()
    for depth, draft in enumerate(module.depths(batch, num_depths)):
        for place, anchor in enumerate(draft.anchors.tolist()):
            text, row = divmod(anchor, batch.tokens_BL.shape[1])
            judge = row + 1 + depth
            assert batch.answer_BL[text, judge + 1]
            q = torch.softmax(draft.logits_AU[place].double(), -1)
            logits = head @ batch.taps["last_hidden"][text, judge].double()
            p = torch.exp(logits - batch.log_total_BL[text, judge].double())
            token = int(module.draft_ids[int(q.argmax())])
            hit = token == int(batch.best_BL[text, judge])
            rows[depth].append((text, row, token, hit, float(q.max()), float(torch.minimum(p, q).sum())))
    return rows


@pytest.fixture
def judged(data, tmp_path):
    """A module, a batch and its judgement; an untrained module hits little, so its head is the target's."""
    job = job_of(data, tmp_path / "out")
    source, batches = job.validation
    batch = source.batch(batches[0])
    return job.module, batch, judge_batch(job.module, batch, 3)


def test_figures_equal_literal_loops(judged):
    module, batch, found = judged
    with torch.no_grad():
        expected = literal(module, batch, 3)
    tally = Tally(3)
    tally.add(found, batch)
    figures = tally.figures()
    for depth, rows in expected.items():
        assert int((found.tokens[depth] != NO_DRAFT).sum()) == len(rows)
        for text, row, token, hit, top, shared in rows:
            assert int(found.tokens[depth, text, row]) == token
            assert bool(found.hits[depth, text, row]) == hit
            assert float(found.top[depth, text, row]) == pytest.approx(top, rel=1e-4)
            assert float(found.overlap[depth, text, row]) == pytest.approx(shared, rel=1e-4)
        assert figures.accuracy[depth] == pytest.approx(sum(row[3] for row in rows) / len(rows))
        assert figures.overlap[depth] == pytest.approx(sum(row[5] for row in rows) / len(rows), rel=1e-4)
    everything = [row for rows in expected.values() for row in rows]
    error = 0.0
    for bin_ in range(10):
        inside = [row for row in everything if min(int(row[4] * 10), 9) == bin_]
        error += abs(sum(row[4] - row[3] for row in inside))
    assert figures.calibration_error == pytest.approx(error / len(everything), rel=1e-3)
    chances = {}
    for depth, rows in expected.items():
        for text, row, _, _, _, shared in rows:
            alive = chances.setdefault((text, row), [])
            if len(alive) == depth:
                alive.append(shared * (alive[-1] if alive else 1.0))
    mean = sum(1 + sum(alive) for alive in chances.values() if alive) / len(expected[0])
    assert figures.sampled_tokens_per_step == pytest.approx(mean, rel=1e-4)


def test_overlap_counts_what_the_draft_vocabulary_lacks(judged):
    module, batch, found = judged
    judges = shift_left(batch.answer_BL, 1)
    lost = ~torch.isin(batch.best_BL, module.draft_ids) & judges
    assert float(found.overlap.max()) < 1
    assert not found.hits[0][shift_left(lost, 1)].any()


def test_a_drafter_that_is_always_right_gains_its_depth():
    backend = tiny_backend(0, dtype=torch.float32)
    tokens = greedy(backend, [5, 9, 3], 13)
    text = MaskedText(tokens=torch.tensor(tokens), answer=torch.arange(16) >= 3)
    batch = collate([text], TargetScorer(backend, frozenset()).score([text]))
    assert batch.best_BL[0, 2:-1].tolist() == tokens[3:]
    drafts = [
        [tokens[row + 2 + depth] if 3 <= row + 2 + depth < 16 else NO_DRAFT for row in range(16)] for depth in range(3)
    ]
    found = replay(drafts, batch.best_BL[0].tolist(), text.answer.tolist())
    assert (found.tokens, found.steps) == (12, 3)


def test_tallies_add_up(judged):
    _, batch, found = judged
    once, twice = Tally(3), Tally(3)
    once.add(found, batch)
    twice.add(found, batch)
    twice.add(found, batch)
    assert torch.allclose(2 * once.sums, twice.sums)
    assert once.figures().greedy_tokens_per_step == twice.figures().greedy_tokens_per_step
    assert replay_batch(found, batch).steps == once.figures().replayed_steps


def test_nothing_to_judge_is_said():
    with pytest.raises(DataError, match="no answer of three tokens"):
        Tally(2).figures()
