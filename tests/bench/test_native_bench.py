"""The comparison with other engines (`benchmarks/bench_native.py`), over a tiny model and a peer made of a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.bench.worker_process import SCRIPTS, WorkerError
from tests.engine.fakes import EOS, tiny_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEER = """
import os, sys
sys.path.insert(0, {peers!r})
from lines import serve

def load(path, threads, n_ctx):
    print("a library's chatter")
    os.write(1, b"and more of it\\n")
    return {{"path": path}}

def generate(ids, n, stop, draft):
    return {{"ids": [draft == "none"] * n, "prompt_seconds": 1.0, "decode_seconds": 2.0, "call_seconds": 1.5}}

def prefill(ids):
    raise ValueError("no prompts today")

def score_rows(context, tokens, repeats):
    os._exit(3)

serve({{"load": load, "generate": generate, "prefill": prefill, "score_rows": score_rows}})
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def make_arm(name: str) -> Any:
    from native_arms import OwnArm

    return OwnArm(tiny_model(0, dtype=torch.float32), lambda _: tiny_model(1, dtype=torch.float32), name)


@pytest.fixture
def own() -> Any:
    return make_arm("own")


def test_a_peer_answers_whatever_its_libraries_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import native_arms

    (tmp_path / "worker.py").write_text(PEER.format(peers=str(SCRIPTS)))
    monkeypatch.setattr(native_arms, "SCRIPTS", tmp_path)
    settings: dict[str, Any] = {"threads": 1, "n_ctx": 64, "log": tmp_path / "log"}
    arm = native_arms.PeerArm("peer", "worker.py", sys.executable, Path("a.gguf"), **settings)
    try:
        assert arm.description == {"path": "a.gguf"}
        run = arm.generate([1], 5)
        assert (run.decoded, run.rate, run.loop_seconds) == (4, 2.0, 0.5)
        with pytest.raises(WorkerError, match="no prompts today"):
            arm.prefill([1])
        assert arm.generate([1], 2).decoded == 1
        with pytest.raises(WorkerError, match="status 3"):
            arm.score_rows([1], [2], 1)
    finally:
        arm.close()
    assert "a library's chatter" in (tmp_path / "log").read_text()


def test_our_arm_counts_tokens_after_the_first_step(own: Any) -> None:
    plain = own.generate([5, 6, 7], 20)
    assert (len(plain.ids), plain.decoded) == (20, 19)
    assert plain.prompt_seconds > 0
    assert plain.rate > 0
    drafted = own.generate([5, 6, 7], 20, draft="ngram:min_ngram=1")
    assert drafted.ids == plain.ids
    stopped = own.generate([5, 6, 7], 20, stop=[EOS, plain.ids[3]])
    assert stopped.ids == plain.ids[: plain.ids.index(plain.ids[3]) + 1]
    assert own.batch_rate([[5, 6], [7, 8], [9, 5]], 4) > 0


def test_scoring_rows_leaves_the_context_as_it_was(own: Any) -> None:
    cache = own.model.backend.cache
    assert len(own.score_rows([5, 6, 7], [8, 9], 3)) == 3
    assert len(own.score_rows([5, 6, 7], [8], 1)) == 1
    assert len(cache.sequence_ids) == 1
    assert own.prefill([5, 6, 7]) > 0
    assert cache.sequence_ids == []


def test_quality_of_the_reference_itself_is_perfect(own: Any) -> None:
    from native_quality import quality

    ids = np.random.default_rng(0).integers(1, 60, 40).tolist()
    found = quality([own], make_arm("reference"), ids, 40, 20)
    assert found["positions"] == 2 * 14
    judged = found["arms"]["own"]
    assert judged["kl"] == pytest.approx(0, abs=1e-9)
    assert judged["agreement"] == 1
    logits = torch.from_numpy(own.logits(ids[:20])).double().log_softmax(-1)
    losses = [-float(logits[i, ids[i + 1]]) for i in range(5, 19)]
    logits = torch.from_numpy(own.logits(ids[20:])).double().log_softmax(-1)
    losses += [-float(logits[i, ids[21 + i]]) for i in range(5, 19)]
    assert judged["perplexity"] == pytest.approx(np.exp(np.mean(losses)))


def test_sections_give_tables(own: Any) -> None:
    import native_speed
    from native_speculation import Question, Way, speculation

    other = make_arm("other")
    assert native_speed.plain([own, other], [5, 6], 6, 2)["ratios"].keys() == {"other"}
    assert native_speed.prefill([own, other], [5] * 9, 2)["rates"].keys() == {"own", "other"}
    assert native_speed.batch([own, other], [[5, 6], [7, 8]], 4, 2)["gains"].keys() == {"own", "other"}
    assert len(native_speed.rows([own, other], [5, 6], [7, 8, 9], (1, 3), 2, 2)["table"]) == 3
    ways = [Way(own, "none"), Way(own, "ngram"), Way(other, "none")]
    questions = [Question(category="a", ids=[5, 6, 5, 6]), Question(category="b", ids=[7, 8, 9])]
    found = speculation(ways, questions, 12, [])
    assert found["same_ids_as_plain"] == {"own plain": 2, "own ngram": 2, "other plain": 2}
    assert found["ratios"]["own ngram"].keys() == {"own plain", "other plain"}
    assert set(found["rates"]) == {"a", "b", "all"}
