"""Every recurrent family learns fifty texts of a tiny target by heart, and drafts them through the engine."""

import itertools

import pytest
import torch

from tests.drafters.trained_fakes import batch_of, checkpoint_of, info_of, random_module
from tests.engine.fakes import EOS, VOCAB, tiny_engine

NUM_TEXTS, PROMPT_LEN, NEW_TOKENS = 50, 6, 24


@pytest.fixture(scope="module")
def texts():
    """Greedy answers of the tiny target to random prompts."""
    engine = tiny_engine(dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (NUM_TEXTS, PROMPT_LEN), generator=generator).tolist()
    results = engine.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]


def train(method, changes, texts, num_steps, draft_ids=None):
    """A module that knows the texts; the plainest loop there is."""
    engine = tiny_engine(dtype=torch.float32)
    info = info_of(engine._model.backend, frozenset({EOS}))
    module = random_module(method, info, changes, draft_ids=draft_ids, noise=0.0)
    module.train().requires_grad_(True)
    batch = batch_of(info.backend, texts, module.taps, PROMPT_LEN)
    optimiser = torch.optim.AdamW(module.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 8e-3, total_steps=num_steps)
    options = type(module).loss_defaults
    for _ in range(num_steps):
        optimiser.zero_grad()
        module.loss(batch, options).loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return checkpoint_of(method, module, info, f"overfit-{method}")


def acceptance(path, method, texts, options):
    """Share of drafting steps whose first draft is kept, and accepted tokens per drafting step."""
    engine = tiny_engine(dtype=torch.float32, drafter=f"{method}:path={path}{options}", controller="fixed:num_draft=4")
    engine.take_events()
    prompts = [text[:PROMPT_LEN] for text in texts]
    results = engine.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert [[*text[:PROMPT_LEN], *result.token_ids] for text, result in zip(texts, results, strict=True)] == texts
    steps = [record for record in engine.take_events().requests if record.drafted]
    return sum(record.accepted > 0 for record in steps) / len(steps), sum(r.accepted for r in steps) / len(steps)


CASES = {
    "eagle1": ("eagle1", {"noise": "0.001"}, 400, ["eagle1:", "eagle2:"]),
    "eagle3": ("eagle3", {}, 150, ["eagle3:", "eagle3:tree=dynamic:top_k=2"]),
    "eagle3.1": ("eagle3", {"norm_output": "true", "tap_norm": "true"}, 150, ["eagle3:"]),
    "deepseek": ("mtp", {}, 200, ["mtp:"]),
    "qwen": ("mtp", {"variant": "qwen", "qk_norm": "true"}, 200, ["mtp:"]),
    "mimo": ("mtp", {"variant": "mimo", "qkv_bias": "true"}, 200, ["mtp:"]),
}


@pytest.mark.parametrize("name", CASES)
def test_fifty_texts_are_learned_by_heart(name, texts):
    method, changes, num_steps, drafters = CASES[name]
    path = train(method, changes, texts, num_steps)
    for text in drafters:
        kind, _, options = text.partition(":")
        first, per_step = acceptance(path, kind, texts, f":{options}" if options else "")
        assert first >= 0.9, f"{text}: {first:.3f} of first drafts are kept"
        print(f"\n{name} {text} {first:.3f} {per_step:.2f}")


def test_a_small_draft_vocabulary_drafts_what_it_has(texts):
    counts = torch.bincount(torch.tensor([*itertools.chain(*texts)]), minlength=VOCAB)
    ids = (counts >= counts.sort(descending=True).values[160]).nonzero().squeeze(-1)
    path = train("eagle3", {}, texts, 150, draft_ids=ids)
    first, _ = acceptance(path, "eagle3", texts, "")
    assert first >= 0.7
