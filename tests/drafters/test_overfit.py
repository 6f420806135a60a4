"""Every recurrent family learns fifty texts of a tiny target by heart, and drafts them through the engine."""

import itertools

import pytest
import torch

from draftsmith.drafters.trainable import LossOptions, frequent_ids
from tests.drafters.trained_fakes import batch_of, checkpoint_of, info_of, random_module
from tests.engine.fakes import EOS, VOCAB, tiny_engine

# With a tied head a random model says the same token for ever, which any drafter learns.
SPEC = {"tied_head": False}
NUM_TEXTS, PROMPT_LEN, NEW_TOKENS, NUM_STEPS = 50, 6, 24, 110


@pytest.fixture(scope="module")
def texts():
    """Greedy answers of the tiny target to random prompts."""
    engine = tiny_engine(dtype=torch.float32, spec=SPEC)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (NUM_TEXTS, PROMPT_LEN), generator=generator).tolist()
    results = engine.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]


def train(method, changes, texts, draft_ids=None):
    """A module that knows the texts; the plainest loop there is.

    Cross-entropy, since laws of a random target are flat: their argmax is what greedy drafts have to say.
    """
    engine = tiny_engine(dtype=torch.float32, spec=SPEC)
    info = info_of(engine._model.backend, frozenset({EOS}))
    module = random_module(method, info, {"mlp_width": "512", **changes}, draft_ids=draft_ids, noise=0.0)
    module.train().requires_grad_(True)
    batch = batch_of(info.backend, texts, module.taps, PROMPT_LEN)
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=NUM_STEPS)
    options = LossOptions(loss="ce", num_depths=2)
    for _ in range(NUM_STEPS):
        optimiser.zero_grad()
        module.loss(batch, options).loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return checkpoint_of(method, module, info, f"overfit-{method}")


def acceptance(path, method, texts, options):
    """Share of drafting steps whose first draft is kept, and accepted tokens per drafting step."""
    drafter = f"{method}:path={path}{options}"
    engine = tiny_engine(dtype=torch.float32, spec=SPEC, drafter=drafter, controller="fixed:num_draft=4")
    engine.take_events()
    prompts = [text[:PROMPT_LEN] for text in texts]
    results = engine.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert [[*text[:PROMPT_LEN], *result.token_ids] for text, result in zip(texts, results, strict=True)] == texts
    steps = [record for record in engine.take_events().requests if record.drafted]
    return sum(record.accepted > 0 for record in steps) / len(steps), sum(r.accepted for r in steps) / len(steps)


CASES = {
    "eagle1": ("eagle1", {"noise": "0.001"}, ["eagle1:", "eagle2:"]),
    "eagle3": ("eagle3", {}, ["eagle3:", "eagle3:tree=dynamic:top_k=2"]),
    "eagle3.1": ("eagle3", {"norm_output": "true", "tap_norm": "true"}, ["eagle3:"]),
    "deepseek": ("mtp", {}, ["mtp:"]),
    "qwen": ("mtp", {"variant": "qwen", "qk_norm": "true"}, ["mtp:"]),
    "mimo": ("mtp", {"variant": "mimo", "qkv_bias": "true"}, ["mtp:"]),
}


VARIANTS = {"eagle3.1", "qwen", "mimo"}
"""Of families that are tried every time."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in CASES]
)
def test_fifty_texts_are_learned_by_heart(name, texts):
    method, changes, drafters = CASES[name]
    path = train(method, changes, texts)
    for text in drafters:
        kind, _, options = text.partition(":")
        first, per_step = acceptance(path, kind, texts, f":{options}" if options else "")
        assert first >= 0.9, f"{text}: {first:.3f} of first drafts are kept"
        assert per_step >= 1.5, f"{text}: {per_step:.2f} drafts are kept per step"


def test_a_small_draft_vocabulary_drafts_what_it_has(texts):
    answers = torch.tensor([*itertools.chain(*(text[PROMPT_LEN:] for text in texts))])
    ids = frequent_ids(torch.bincount(answers, minlength=VOCAB), 100)
    covered = float(torch.isin(answers, ids).float().mean())
    path = train("eagle3", {}, texts, draft_ids=ids)
    first, _ = acceptance(path, "eagle3", texts, "")
    assert first >= 0.9 * covered > 0.5
