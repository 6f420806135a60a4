"""OpenVINO GenAI as a worker process: loads a GGUF file and generates greedily (see `lines.py`).

Started by `bench_native.py` with the peer environment's Python. The pipeline runs its own loop in C++, so only
whole generations can be timed: times are the pipeline's own metrics, the first token apart from the rest.
Reuse of earlier prompts is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from lines import serve


class Worker:
    """The commands. `load` comes first."""

    def __init__(self) -> None:
        self._path, self._threads = "", 0
        self._pipelines: dict[bool, genai.LLMPipeline] = {}

    def load(self, path: str, threads: int, n_ctx: int) -> dict[str, Any]:
        """Load a file; `n_ctx` is accepted for symmetry, the pipeline's memory grows by itself."""
        self._path, self._threads = path, threads
        self._pipelines = {}
        self._pipeline(False)
        return {"version": genai.__version__, "description": "OpenVINO's reading of the file"}

    def generate(self, ids: list[int], n: int, stop: Sequence[int] = (), draft: str = "none") -> dict[str, Any]:
        """At most `n` greedy tokens. `draft`: "none", or "lookup:K" for the pipeline's prompt lookup of K tokens."""
        kind, _, width = draft.partition(":")
        config = genai.GenerationConfig()
        config.max_new_tokens = n
        config.do_sample = False
        config.ignore_eos = not stop
        if stop:
            config.stop_token_ids = set(stop)
        if kind == "lookup":
            config.num_assistant_tokens = int(width)
            config.max_ngram_size = 2
        result = self._pipeline(kind == "lookup").generate(ov.Tensor(np.array([ids], dtype=np.int64)), config)
        metrics = result.perf_metrics
        first = metrics.get_ttft().mean / 1e3
        return {
            "ids": [int(token) for token in result.tokens[0]],
            "prompt_seconds": first,
            "decode_seconds": metrics.get_generate_duration().mean / 1e3 - first,
        }

    def prefill(self, ids: list[int]) -> float:
        """Seconds from nothing to the first token."""
        return self.generate(ids, 1)["prompt_seconds"]

    def _pipeline(self, lookup: bool) -> genai.LLMPipeline:
        if lookup not in self._pipelines:
            scheduler = genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            more = {"prompt_lookup": True} if lookup else {}
            self._pipelines[lookup] = genai.LLMPipeline(
                self._path, "CPU", INFERENCE_NUM_THREADS=self._threads, scheduler_config=scheduler, **more
            )
        return self._pipelines[lookup]


def main() -> None:
    """Serve until standard input ends."""
    worker = Worker()
    serve({"load": worker.load, "generate": worker.generate, "prefill": worker.prefill})


if __name__ == "__main__":
    main()
