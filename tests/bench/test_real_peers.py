"""The real engines behind the worker arms, where they are installed: `make test-slow` with

DRAFTSMITH_PEER_PYTHON=PEERS/bin/python         (llama-cpp-python, openvino-genai; benchmarks/peers/README.md)
DRAFTSMITH_TRANSFORMERS_PYTHON=...              (transformers with accelerate; this interpreter by default)
"""

from __future__ import annotations

import os
import sys

import pytest

from draftsmith.bench.arms import RunInfo, make_arm
from draftsmith.engine.loading import load_model
from draftsmith.engine.prompts import encode_prompt
from draftsmith.errors import UserError
from draftsmith.io.catalogue import resolve
from tests.bench.arm_driver import ask, run_one

pytestmark = pytest.mark.slow
PEER = os.environ.get("DRAFTSMITH_PEER_PYTHON")
TRANSFORMERS = os.environ.get("DRAFTSMITH_TRANSFORMERS_PYTHON", sys.executable)
ARMS = {
    "llama_cpp": f"llama_cpp:python={PEER}:tune=false",
    "openvino": f"openvino:python={PEER}",
    "transformers": f"transformers:python={TRANSFORMERS}",
}
DRAFTS = {"llama_cpp": ["lookup:4", "api:4"], "openvino": ["lookup:4"], "transformers": ["lookup:4", "assistant:MODEL"]}
QUESTION = "Repeat this line twice: one two three four five six seven eight nine ten."


@pytest.fixture(scope="module")
def prompt():
    model = load_model("smollm2", backend="native", threads=1)
    ids = encode_prompt([{"role": "user", "content": QUESTION}], model)
    return ids, model.eos_ids, model.tokenizer.decode


@pytest.fixture
def opened(prompt):
    arms = []

    def make(name, draft="none"):
        if name != "transformers" and not PEER:
            pytest.skip("DRAFTSMITH_PEER_PYTHON does not name the interpreter of the peers' environment")
        path = resolve("smollm2")
        text = f"{ARMS[name]}:model={path}:draft={draft.replace('MODEL', str(path))}"
        arm = make_arm(text, RunInfo(threads=1, context_len=512, decode=prompt[2]))
        arms.append(arm)
        try:
            description = arm.open()
        except UserError as error:
            if "No module named" in str(error) or "accelerate is required" in str(error):
                pytest.skip(f"{name} is not installed there: {error}")
            raise
        return arm, description

    yield make
    for arm in arms:
        arm.close()


@pytest.mark.parametrize("name", ARMS)
def test_plain_and_drafted_runs_agree(opened, prompt, name):
    """Greedy ids of the engine's own speculation are those of its plain run on a prompt without near ties."""
    ids, ends, _ = prompt
    plain_arm, description = opened(name)
    plain, arrivals = run_one(plain_arm, ask(0, ids, n=40, end_ids=ends))
    assert plain.error is None
    assert plain.finish_reason == "stop" and "three four five" in plain.text
    assert len(arrivals) > 0.9 * plain.num_tokens, "tokens should come one by one"
    assert 4 < description.bits_per_weight <= 32
    assert description.details["threads"] == 1
    longer, _ = run_one(plain_arm, ask(1, ids, n=40, end_ids=ends, ignore_eos=True))
    assert longer.num_tokens == 40 and longer.finish_reason == "length"
    assert longer.token_ids[: plain.num_tokens] == plain.token_ids
    plain_arm.close()
    for draft in DRAFTS[name]:
        arm, _ = opened(name, draft)
        drafted, arrivals = run_one(arm, ask(0, ids, n=40, end_ids=ends))
        assert drafted.token_ids == plain.token_ids, draft
        if not draft.startswith("api"):
            assert len(arrivals) < drafted.num_tokens, "accepted tokens should come together"
            assert drafted.counters.accepted > 0
        arm.close()


@pytest.mark.parametrize("name", ARMS)
def test_a_seed_gives_the_same_tokens_again(opened, prompt, name):
    ids, ends, _ = prompt
    arm, _ = opened(name)
    sampling = {"temperature": 0.8, "top_p": 0.9}
    found = [
        run_one(arm, ask(key, ids, n=24, end_ids=ends, seed=seed, **sampling))[0] for key, seed in enumerate((1, 1, 2))
    ]
    assert found[0].token_ids == found[1].token_ids != found[2].token_ids


@pytest.mark.parametrize("name", ARMS)
def test_a_cancelled_generation_ends_soon(opened, prompt, name):
    ids, _, _ = prompt
    arm, _ = opened(name)
    arm.submit(ask(0, ids, n=400, ignore_eos=True))
    while not arm.poll(5.0):
        pass
    arm.cancel()
    answer, _ = run_one(arm, ask(1, ids, n=3, ignore_eos=True))
    assert answer.error is None and answer.num_tokens == 3
