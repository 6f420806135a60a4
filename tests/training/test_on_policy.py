"""Answers that the drafter writes itself: drawn by its law, the same again after an interruption, by number."""

import random

import pytest
import torch

from draftsmith.errors import OptionError
from draftsmith.training.on_policy import Asked, is_rewritten, write_answers
from draftsmith.training.processes import Processes
from draftsmith.training.run import carry_out, finish, with_own_answers
from draftsmith.training.state import read_state
from draftsmith.training.trainer import Listener
from tests.models.fakes import tiny_backend
from tests.training.test_trainer import losses_of, train, weights_of
from tests.training.tiny import greedy, job_of

STUDENT = {
    "method": "draft_model",
    "configure": {"width": "16", "heads": "2", "mlp_width": "24", "layers": "1"},
    "draft_vocab": None,
    "loss": "reverse_kl",
}
MIXED = {**STUDENT, "on_policy": 0.6, "refresh": 3, "accumulate": 2, "steps": 8}


def test_a_share_of_the_batches_evenly():
    for share in (0.0, 0.25, 0.5, 0.6, 1.0):
        found = [is_rewritten(number, share) for number in range(100)]
        assert sum(found) == round(100 * share)
        for start in range(80):
            assert abs(sum(found[start : start + 20]) - 20 * share) <= 1


def test_answers_are_the_models_own_whoever_is_written_with_them():
    backend = tiny_backend(2, dtype=torch.float32)
    draw = random.Random(0)
    asked = [
        Asked(prompt=draw.choices(range(1, 64), k=draw.randrange(1, 9)), limit=draw.randrange(1, 20), seed=seed)
        for seed in range(70)
    ]
    found = write_answers(backend, asked, frozenset(), 0.0)
    for one, answer in zip(asked, found, strict=True):
        assert [*one.prompt, *answer] == greedy(backend, one.prompt, one.limit)
    drawn = write_answers(backend, asked, frozenset({5, 9}), 1.3)
    for one, answer in zip(asked, drawn, strict=True):
        assert write_answers(backend, [one], frozenset({5, 9}), 1.3) == [answer]
        ends = [place for place, token in enumerate(answer) if token in (5, 9)]
        assert len(answer) <= one.limit and ends in ([], [len(answer) - 1])
        assert ends or len(answer) == one.limit
    assert drawn != found
    assert not list(backend.cache.sequence_ids)


def test_drawn_tokens_follow_the_law():
    """Chi-square of 4000 first tokens; false alarm probability 1e-4 at a fixed seed."""
    from scipy import stats

    backend = tiny_backend(2, dtype=torch.float32, vocab_size=8)
    asked = [Asked(prompt=[1, 2, 3], limit=1, seed=seed) for seed in range(4000)]
    counts = torch.bincount(torch.tensor(write_answers(backend, asked, frozenset(), 1.0)).flatten(), minlength=8)
    from draftsmith.models.backend import RowGroup

    backend.cache.open(0)
    backend.cache.reserve(0, 3)
    law = torch.softmax(backend.score([RowGroup(0, [1, 2, 3], [-1, 0, 1], 2)]).logits[0][0].double(), -1)
    assert stats.chisquare(counts.numpy(), 4000 * law.numpy()).pvalue > 1e-4


def test_rewritten_batches_keep_their_prompts(data, tmp_path):
    job = job_of(data, tmp_path / "out", **{**MIXED, "on_policy": 1.0})
    source = with_own_answers(job, job.online, Processes())
    assert source.ready(0, range(2), lambda: False)
    for number in range(2):
        indices = job.order.batch(number)
        batch = source.numbered(number, indices)
        for row, index in enumerate(indices):
            tokens, answer = job.corpus.tokens(index), job.corpus.answer(index)
            start = int(answer.long().argmax())
            assert torch.equal(batch.tokens_BL[row, :start], tokens[:start])
            assert batch.answer_BL[row].nonzero()[0] == start
            assert int(batch.answer_BL[row].sum()) <= int(answer.sum())
        assert not torch.equal(batch.tokens_BL, job.online.batch(indices).tokens_BL)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An uninterrupted run of mixed batches."""
    output = tmp_path_factory.mktemp("whole") / "drafter"
    torch.set_num_threads(1)
    return output, *train(data, output, **MIXED)


def test_a_mixed_run_learns_and_differs_from_one_on_the_targets_texts(data, whole, tmp_path):
    losses = losses_of(whole[0])
    assert losses[-1][1] < losses[0][1]
    train(data, tmp_path / "drafter", **{**MIXED, "on_policy": 0.0})
    assert losses_of(tmp_path / "drafter") != losses


def test_in_bfloat16_it_learns_too(data, tmp_path, whole):
    train(data, tmp_path / "drafter", **{**MIXED, "on_policy": 0.0, "compute": "bfloat16"})
    train(data, tmp_path / "other", **{**MIXED, "on_policy": 0.0})
    mine, other = losses_of(tmp_path / "drafter"), losses_of(tmp_path / "other")
    assert mine[0][1] == pytest.approx(other[0][1], rel=0.02)
    assert mine[-1][1] < mine[0][1]


@pytest.mark.parametrize("at", [1, 3, 5, 7])
def test_a_continued_run_sees_the_same_texts(data, tmp_path, whole, at):
    """Steps 0 to 2, 3 to 5 and 6 to 7 share what was written at the first of them."""
    output, _, expected = whole
    _, stopped = train(data, tmp_path / "drafter", stop_after=at, **MIXED)
    assert stopped.progress.step == at
    tensors, _ = read_state(tmp_path / "drafter.state" / "last.safetensors")
    assert any(name.startswith("written.") for name in tensors)
    _, trainer = train(data, tmp_path / "drafter", **MIXED)
    assert losses_of(tmp_path / "drafter") == losses_of(output)
    for name, tensor in weights_of(trainer).items():
        assert torch.equal(tensor, weights_of(expected)[name]), name


def test_stopped_while_writing_nothing_has_changed(data, tmp_path, whole):
    asked = []

    def stop():
        asked.append(len(asked))
        return len(asked) > 3

    job = job_of(data, tmp_path / "drafter", **MIXED)
    trainer = carry_out(job, Listener(stop=stop), Processes(), tell=lambda line: None)
    assert trainer.progress.step == 0 and not trainer.finished
    train(data, tmp_path / "drafter", **MIXED)
    assert losses_of(tmp_path / "drafter") == losses_of(whole[0])


def test_only_models_write(data, tmp_path):
    with pytest.raises(OptionError, match=r"on_policy is 0\.5; .* cannot write answers by itself"):
        job_of(data, tmp_path / "out", on_policy=0.5)
    for wrong in ({"on_policy": 1.5}, {"refresh": 0}, {"write_temperature": -1.0}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            job_of(data, tmp_path / "out", **{**STUDENT, **wrong})


def test_a_state_from_before_these_settings_goes_on(data, tmp_path):
    """A run that an earlier version began has none of them in its state."""
    from draftsmith.training.trainer import check_identity

    job = job_of(data, tmp_path / "out")
    here = job.settings.identity
    older = {key: value for key, value in here.items() if key not in ("on_policy", "refresh", "write_temperature")}
    check_identity(older, here, tmp_path)
    with pytest.raises(OptionError, match="refresh 50, and this one has 7"):
        check_identity(older, {**here, "refresh": 7}, tmp_path)


def test_ranks_are_kept_where_trees_are_built_of_them(data, tmp_path):
    from draftsmith.drafters.checkpoint import read_checkpoint

    for method, changes in (("medusa", {"num_depths": "2"}), ("draft_model", STUDENT["configure"])):
        output = tmp_path / method
        job, trainer = train(
            data, output, **{**STUDENT, "method": method, "configure": changes, "steps": 2, "depths": 2}
        )
        if method == "draft_model":  # the toy's tokenizer has no files
            assert not job.module.needs_ranks
            continue
        finish(job, trainer)
        table = read_checkpoint(output).about["rank_accuracies"]
        assert len(table) == 2 and all(len(row) == 10 for row in table)
        best = read_checkpoint(output).about["validation"]
        assert [row[0] for row in table] == pytest.approx(best["accuracy"][:2], abs=1e-3)
