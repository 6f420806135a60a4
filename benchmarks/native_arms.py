"""The two sides of `bench_native.py` behind one face: this package's engine, and a peer in its own process.

An arm generates, scores m rows behind a context, reads a prompt, runs a batch and hands out logits; sections call
nothing else. Invariant: both sides get token ids and give times of the same meaning: `prompt_seconds` until the
first token is known, `decode_seconds` from there to the last, the work of the loop around the model included.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from draftsmith.bench.worker_process import SCRIPTS, WorkerProcess
from draftsmith.core.stats import EventLog
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel, load_model
from draftsmith.models.backend import RowGroup

SETTLE_SECONDS = 0.01
"""Threads of one side may still spin when the other is about to be timed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One generation. `decoded`: tokens that came after the first ones, in `decode_seconds`.

    `loop_seconds`: the part of `decode_seconds` that a peer's worker spent outside the peer, None where not known.
    """

    ids: list[int]
    decoded: int
    prompt_seconds: float
    decode_seconds: float
    loop_seconds: float | None = None

    @property
    def rate(self) -> float:
        """Decoded tokens per second."""
        return self.decoded / self.decode_seconds if self.decoded else 0.0


class Arm(ABC):
    """One side. What it cannot do raises NotImplementedError."""

    name: str

    @abstractmethod
    def generate(self, ids: list[int], n: int, stop: Sequence[int] = (), draft: str = "none") -> Run:
        """At most `n` greedy tokens after a prompt, nothing reused; a stop token ends them and is among them."""

    @abstractmethod
    def prefill(self, ids: list[int]) -> float:
        """Seconds to read a prompt up to the logits of its last token."""

    def score_rows(self, context: list[int], tokens: list[int], repeats: int) -> list[float]:
        """Milliseconds of scoring a chain of rows behind a context, logits for all, per try."""
        raise NotImplementedError

    def batch_rate(self, prompts: list[list[int]], n: int) -> float:
        """Tokens per second of all sequences together, `n` each, once all prompts are read."""
        raise NotImplementedError

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits [len(ids), V] after each token."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what it holds."""


class OwnArm(Arm):
    """This package: the engine for generations, its backend for single forwards."""

    def __init__(self, model: LoadedModel, load: Callable[[str], LoadedModel], name: str | None = None) -> None:
        """`load`: how a drafter gets its model."""
        self.name = name or f"draftsmith {model.backend_name}"
        self.model = model
        self._load = load
        self._engines: dict[tuple[str, int], Engine] = {}
        # The engines count their sequences from 0 over one shared cache.
        self._ids = itertools.count(1 << 40)
        self._held: tuple[int, list[int]] | None = None

    @classmethod
    def open(cls, model: str, *, backend: str, threads: int, name: str | None = None) -> OwnArm:
        """Load a model by name or file."""

        def load(text: str) -> LoadedModel:
            return load_model(text, backend=backend, threads=threads)

        return cls(load(model), load, name)

    def engine(self, drafter: str = "none", max_batch: int = 1) -> Engine:
        """An engine over the one copy of the weights, with a drafter and a controller of its own."""
        key = (drafter, max_batch)
        if key not in self._engines:
            settings = EngineSettings(drafter=drafter, max_batch=max_batch, prefix_cache=False)
            self._engines[key] = Engine(self.model, settings, load=self._load)
        return self._engines[key]

    def generate(self, ids: list[int], n: int, stop: Sequence[int] = (), draft: str = "none") -> Run:
        engine = self.engine(draft)
        engine.take_events()
        # The stop ids are the model's own ends; without them it goes on past those.
        result = engine.generate(ids, max_new_tokens=n, temperature=0.0, ignore_eos=not stop, stop_ids=frozenset(stop))
        statistics = result.statistics
        decoded = _after_prompts(engine.take_events())
        return Run(
            ids=list(result.token_ids),
            decoded=decoded,
            prompt_seconds=statistics.first_token_seconds,
            decode_seconds=statistics.total_seconds - statistics.first_token_seconds,
        )

    def prefill(self, ids: list[int]) -> float:
        self._release()
        sequence_id, cache = next(self._ids), self.model.backend.cache
        began = perf_counter()
        cache.open(sequence_id)
        self._append(sequence_id, ids, first_logit=len(ids) - 1)
        seconds = perf_counter() - began
        cache.close(sequence_id)
        return seconds

    def score_rows(self, context: list[int], tokens: list[int], repeats: int) -> list[float]:
        cache = self.model.backend.cache
        sequence_id = self._hold(context)
        times = []
        for _ in range(repeats):
            began = perf_counter()
            self._append(sequence_id, tokens, first_logit=0, keep=0)
            times.append(1e3 * (perf_counter() - began))
        assert cache.committed(sequence_id) == len(context)
        return times

    def batch_rate(self, prompts: list[list[int]], n: int) -> float:
        engine = self.engine("none", len(prompts))
        engine.take_events()
        results = engine.generate(prompts, max_new_tokens=n, temperature=0.0, ignore_eos=True)
        decoded = _after_prompts(engine.take_events())
        first = max(result.statistics.first_token_seconds for result in results)
        return decoded / (max(result.statistics.total_seconds for result in results) - first)

    def logits(self, ids: list[int]) -> np.ndarray:
        self._release()
        sequence_id, cache = next(self._ids), self.model.backend.cache
        cache.open(sequence_id)
        scored = self._append(sequence_id, ids, first_logit=0)
        cache.close(sequence_id)
        return scored.float().numpy()

    def _hold(self, context: list[int]) -> int:
        if self._held is None or self._held[1] != context:
            self._release()
            sequence_id = next(self._ids)
            self.model.backend.cache.open(sequence_id)
            self._append(sequence_id, context, first_logit=len(context))
            self._held = (sequence_id, list(context))
        return self._held[0]

    def _release(self) -> None:
        if self._held is not None:
            self.model.backend.cache.close(self._held[0])
            self._held = None

    def _append(self, sequence_id: int, tokens: Sequence[int], *, first_logit: int, keep: int | None = None) -> Any:
        cache, num_rows = self.model.backend.cache, len(tokens)
        cache.reserve(sequence_id, num_rows)
        with torch.inference_mode():
            scored = self.model.backend.score(
                [RowGroup(sequence_id, tokens, range(-1, num_rows - 1), min(first_logit, num_rows))]
            )
        cache.keep(sequence_id, range(num_rows if keep is None else keep))
        return scored.logits[0]

    def close(self) -> None:
        self._release()
        self._engines = {}


class PeerArm(Arm):
    """A worker process with one file loaded."""

    def __init__(self, name: str, worker: str, python: str, path: Path, *, threads: int, n_ctx: int, log: Path | None):
        self.name = name
        self._peer = WorkerProcess(python, SCRIPTS / worker, threads=threads, log=log)
        self.process_id = self._peer.process_id
        self.description: dict[str, Any] = self._peer.call("load", path=str(path), threads=threads, n_ctx=n_ctx)

    def generate(self, ids: list[int], n: int, stop: Sequence[int] = (), draft: str = "none") -> Run:
        found = self._peer.call("generate", ids=ids, n=n, stop=list(stop), draft=draft)
        inside = found.get("call_seconds")
        return Run(
            loop_seconds=None if inside is None else found["decode_seconds"] - inside,
            ids=found["ids"],
            decoded=len(found["ids"]) - 1,
            prompt_seconds=found["prompt_seconds"],
            decode_seconds=found["decode_seconds"],
        )

    def prefill(self, ids: list[int]) -> float:
        return self._peer.call("prefill", ids=ids)

    def score_rows(self, context: list[int], tokens: list[int], repeats: int) -> list[float]:
        return self._peer.call("score_rows", context=context, tokens=tokens, repeats=repeats)

    def batch_rate(self, prompts: list[list[int]], n: int) -> float:
        found = self._peer.call("generate_batch", prompts=prompts, n=n)
        return found["decoded"] / found["decode_seconds"]

    def logits(self, ids: list[int]) -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "logits.npy"
            self._peer.call("logits", ids=ids, path=str(path))
            return np.load(path)

    def close(self) -> None:
        self._peer.close()


class OpenVinoArm(PeerArm):
    """OpenVINO GenAI: whole generations only."""

    def score_rows(self, context: list[int], tokens: list[int], repeats: int) -> list[float]:
        raise NotImplementedError

    def batch_rate(self, prompts: list[list[int]], n: int) -> float:
        raise NotImplementedError

    def logits(self, ids: list[int]) -> np.ndarray:
        raise NotImplementedError


def settle() -> None:
    """Wait until the side that ran last is quiet."""
    time.sleep(SETTLE_SECONDS)


def _after_prompts(log: EventLog) -> int:
    """Tokens emitted by the steps after the last one that read prompt rows."""
    last = max((record.step for record in log.requests if record.prompt), default=-1)
    return sum(record.emitted for record in log.requests if record.step > last)
