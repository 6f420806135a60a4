"""OpenVINO GenAI as a worker process: loads a GGUF file and answers requests on standard input (see `lines.py`).

Started with the peer environment's Python by the arm `openvino` and by `benchmarks/bench_native.py`. The pipeline runs
its own loop in C++: `generate` tells its own metrics, the first token apart from the rest, and `stream` what its
callback hears. Reuse of earlier prompts is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from lines import Cancelled, Emit, serve


class Listener(genai.StreamerBase):
    """Passes tokens on. The pipeline calls it from a thread of its own, so a cancellation is noted, not raised."""

    def __init__(self, emit: Emit) -> None:
        super().__init__()
        self._emit = emit
        self._began = perf_counter()
        self.first_seconds: float | None = None
        self.is_cancelled = False
        self.steps = 0

    def write(self, token: int | Sequence[int]) -> genai.StreamingStatus:
        """New tokens: one, or those of a whole step."""
        if self.first_seconds is None:
            self.first_seconds = perf_counter() - self._began
        else:
            self.steps += 1
        try:
            self._emit([token] if isinstance(token, int) else token)
        except Cancelled:
            self.is_cancelled = True
            return genai.StreamingStatus.CANCEL
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is held back."""


class Worker:
    """The commands. `load` comes first."""

    def __init__(self) -> None:
        self._path, self._threads = "", 0
        self._pipelines: dict[bool, genai.LLMPipeline] = {}

    def load(self, path: str, threads: int, n_ctx: int, draft: str = "none") -> dict[str, Any]:
        """Load a file, for `draft`; `n_ctx` is accepted for symmetry, the pipeline's memory grows by itself."""
        self._path, self._threads = path, threads
        self._pipelines = {}
        self._pipeline(draft != "none")
        return {"version": genai.__version__, "description": "OpenVINO's reading of the file"}

    def generate(self, ids: list[int], n: int, stop: Sequence[int] = (), draft: str = "none") -> dict[str, Any]:
        """At most `n` greedy tokens. `draft`: "none", or "lookup:K" for the pipeline's prompt lookup of K tokens."""
        result = self._run(ids, _config(n, stop, draft), draft, None)
        metrics = result.perf_metrics
        first = metrics.get_ttft().mean / 1e3
        return {
            "ids": [int(token) for token in result.tokens[0]],
            "prompt_seconds": first,
            "decode_seconds": metrics.get_generate_duration().mean / 1e3 - first,
        }

    def stream(
        self,
        emit: Emit,
        ids: list[int],
        n: int,
        stop: Sequence[int] = (),
        draft: str = "none",
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> dict[str, Any]:
        """`generate` that tells its tokens as they come, and samples where `temperature` is above 0."""
        config = _config(n, stop, draft)
        if temperature > 0:
            config.do_sample = True
            config.temperature, config.top_p, config.rng_seed = temperature, top_p, seed
        listener = Listener(emit)
        began = perf_counter()
        result = self._run(ids, config, draft, listener)
        if listener.is_cancelled:
            raise Cancelled
        first = listener.first_seconds or 0.0
        ids = [int(token) for token in result.tokens[0]]
        # The pipeline calls once a step, with what was accepted and one token more; it does not tell what it drafted.
        counters = {"steps": listener.steps, "accepted": max(len(ids) - 1 - listener.steps, 0)}
        return {
            "ids": ids,
            "prompt_seconds": first,
            "decode_seconds": perf_counter() - began - first,
            "counters": counters,
        }

    def prefill(self, ids: list[int]) -> float:
        """Seconds from nothing to the first token."""
        return self.generate(ids, 1)["prompt_seconds"]

    def _run(self, ids: list[int], config: genai.GenerationConfig, draft: str, listener: Listener | None) -> Any:
        prompt = ov.Tensor(np.array([ids], dtype=np.int64))
        pipeline = self._pipeline(draft != "none")
        return pipeline.generate(prompt, config) if listener is None else pipeline.generate(prompt, config, listener)

    def _pipeline(self, lookup: bool) -> genai.LLMPipeline:
        if lookup not in self._pipelines:
            scheduler = genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            more = {"prompt_lookup": True} if lookup else {}
            self._pipelines[lookup] = genai.LLMPipeline(
                self._path, "CPU", INFERENCE_NUM_THREADS=self._threads, scheduler_config=scheduler, **more
            )
        return self._pipelines[lookup]


def _config(n: int, stop: Sequence[int], draft: str) -> genai.GenerationConfig:
    """Greedy, at most `n` tokens."""
    config = genai.GenerationConfig()
    config.max_new_tokens = n
    config.do_sample = False
    config.ignore_eos = not stop
    if stop:
        config.stop_token_ids = set(stop)
    kind, _, width = draft.partition(":")
    if kind == "lookup":
        config.num_assistant_tokens = int(width)
        config.max_ngram_size = 2
    return config


def main() -> None:
    """Serve until standard input ends."""
    worker = Worker()
    serve({"load": worker.load, "generate": worker.generate, "prefill": worker.prefill}, {"stream": worker.stream})


if __name__ == "__main__":
    main()
