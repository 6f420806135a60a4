"""Head families through the engine: trained on 50 short texts they draft them, and the ids stay the plain run's."""

import pytest
import torch

from draftsmith.core.types import Rule
from draftsmith.drafters.checkpoint import save_module
from draftsmith.drafters.rank_accuracy import KEY, rank_accuracies
from draftsmith.drafters.trainable import LossOptions
from tests.drafters.loop import target_of
from tests.drafters.trained import fit, new_module
from tests.drafters.trained_fakes import batch_of
from tests.engine.fakes import EOS, tiny_engine, tiny_model

PROMPT_LEN, ANSWER_LEN, COUNT = 6, 18, 50
SPEC = {"tied_head": False}
"""A tied head makes a random decoder repeat its last token, which is no text to learn."""
FAMILIES = {
    "medusa": ("medusa", {"num_layers": "2", "head": "own", "num_depths": "2"}),
    "hydra": ("hydra", {"head": "own", "num_depths": "2"}),
    "hydra++": ("hydra", {"prefix": "true", "head": "own", "num_depths": "2"}),
    "mlp": ("mlp_speculator", {"inner_width": "96", "num_depths": "2"}),
    "gloeckle": ("gloeckle", {"mlp_width": "192", "num_depths": "2"}),
}


@pytest.fixture(scope="module")
def prompts():
    noise = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (PROMPT_LEN,), generator=noise).tolist() for _ in range(COUNT)]


@pytest.fixture(scope="module")
def plain(prompts):
    """The target's own answers."""
    results = tiny_engine(spec=SPEC).generate(prompts, max_new_tokens=ANSWER_LEN, ignore_eos=True)
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def directory(tmp_path_factory, prompts, plain):
    """Checkpoints of the families, trained on the answers on first use."""
    known = {}

    def of(name):
        if name not in known:
            method, changes = FAMILIES[name]
            backend = tiny_model(**SPEC).backend
            target = target_of(backend, frozenset({EOS}))
            module = new_module(method, target, changes)
            texts = [[*prompt, *answer] for prompt, answer in zip(prompts, plain, strict=True)]
            batch = batch_of(backend, texts, module.needs, PROMPT_LEN)
            fit(module, batch, 120, lr=2e-2, options=LossOptions(loss="ce", decay=0.5, num_depths=2))
            known[name] = tmp_path_factory.mktemp("trained") / name
            about = {KEY: rank_accuracies(module, [batch], 4, 4)}
            save_module(known[name], method, module.bfloat16(), "tiny", target, about)
        return known[name]

    return of


def run(path, name, prompts, num_draft=2, tree="chain", **params):
    """Answers, and the share of steps with a draft whose first position was accepted."""
    engine = tiny_engine(
        spec=SPEC, drafter=f"{FAMILIES[name][0]}:path={path}:tree={tree}", controller=f"fixed:num_draft={num_draft}"
    )
    results = engine.generate(prompts, max_new_tokens=ANSWER_LEN, ignore_eos=True, **params)
    records = [record for record in engine.take_events().requests if record.drafted]
    share = sum(record.accepted > 0 for record in records) / max(1, len(records))
    return [result.token_ids for result in results], share, results


@pytest.mark.parametrize("name", FAMILIES)
def test_fifty_texts_are_learned(name, directory, prompts, plain):
    """First-position acceptance through the engine is at least 0.9, and the ids are the plain run's."""
    ids, share, _ = run(directory(name), name, prompts)
    assert ids == plain
    assert share >= 0.9


@pytest.mark.parametrize("name", ["hydra++", "mlp"])
def test_trees_chains_and_rules_keep_the_ids(name, directory, prompts):
    """Greedy, coupled and match ids are the plain run's through prompt chunks, prefix reuse and samples."""
    path, asked = directory(name), prompts[:6]
    for params in ({}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.7, "seed": 1, "rule": Rule.MATCH, "n": 2}):
        wanted = tiny_engine(spec=SPEC).generate(asked, max_new_tokens=ANSWER_LEN, ignore_eos=True, **params)
        for tree, num_draft in (("chain", 2), ("5", 5), ("2x2", 6)):
            ids, share, results = run(path, name, asked, num_draft, tree, **params)
            assert ids == [result.token_ids for result in wanted]
            assert [[sample.token_ids for sample in result.samples or ()] for result in results] == [
                [sample.token_ids for sample in result.samples or ()] for result in wanted
            ]
            assert share > (0 if params else 0.9)  # trained on greedy answers


@pytest.mark.parametrize("name", ["medusa", "hydra++", "gloeckle"])
def test_preempted_sequences_draft_again(name, directory, prompts):
    """Preemption drops a sequence's rows; they are scored again and the drafter hears them again."""
    wanted = tiny_engine(spec=SPEC).generate(prompts[:5], max_new_tokens=90, ignore_eos=True)
    selection = f"{FAMILIES[name][0]}:path={directory(name)}"
    rows_64 = tiny_model(**SPEC).backend.cache.sequence_bytes(64)
    roomy = tiny_engine(spec=SPEC, drafter=selection)
    drafter = roomy.drafter(selection)
    # Two sequences of 64 rows fit; when one of them grows to 128, the other has to go.
    engine = tiny_engine(
        spec=SPEC,
        drafter=selection,
        controller="fixed:num_draft=2",
        memory_bytes=int(2.5 * (rows_64 + drafter.bytes_per_token * 128)),
        prefix_cache=False,
    )
    results = engine.generate(prompts[:5], max_new_tokens=90, ignore_eos=True)
    assert [result.token_ids for result in results] == [result.token_ids for result in wanted]
    assert sum(result.statistics.preemptions for result in results) > 0
    records = engine.take_events().requests
    resumed = [record for record in records if record.prompt and 0 < record.position < 60]
    assert resumed
    for again in resumed:
        after = [record for record in records if record.request == again.request and record.step > again.step]
        assert any(record.drafted for record in after if record.position < again.position + 20)


def test_reused_prefixes_and_samples_draft_at_once(directory, prompts, plain):
    path = directory("hydra++")
    engine = tiny_engine(spec=SPEC, drafter=f"hydra:path={path}", controller="fixed:num_draft=2")
    longer = [*prompts[0], *plain[0][:6]]
    engine.generate(prompts[0], max_new_tokens=10, ignore_eos=True)
    engine.take_events()
    result = engine.generate(longer, max_new_tokens=ANSWER_LEN - 6, ignore_eos=True, n=2)
    assert result.statistics.reused_tokens > 0
    assert result.token_ids == plain[0][6:]
    records = [record for record in engine.take_events().requests if not record.prompt]
    assert all(record.drafted for record in records if record.position < ANSWER_LEN - 8)
