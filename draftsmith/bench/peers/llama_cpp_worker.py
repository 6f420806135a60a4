"""llama.cpp as a worker process: loads a GGUF file and answers requests on standard input (see `lines.py`).

Started with the peer environment's Python by the arm `llama_cpp` and by `benchmarks/bench_native.py`. A greedy token
is numpy's argmax over llama.cpp's own logits, a sampled one comes from its samplers. Every time is wall time seen here,
so it holds what this loop costs in Python; `call_seconds` says how much of it was spent inside llama.cpp. Flash
attention is faster for some work and slower for other, so `load` times both and every command uses the faster.

    echo '{"key": 0, "command": "load", "path": "model.gguf", "threads": 2, "n_ctx": 1024}' | python llama_cpp_worker.py
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import llama_cpp as C
import numpy as np
from lines import Emit, serve
from llama_context import Context, Model, Pick, Sampler, pick_best
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

AUTO, OFF = -1, 0
"""Flash attention as llama.cpp decides (on, where the model allows it), or off."""
WORK = ("decode", "prefill", "batch")
"""What is tuned apart: rows behind a context, a whole prompt, several sequences at once."""


class Worker:
    """The commands. `load` comes first."""

    def __init__(self) -> None:
        self._path = ""
        self._threads = self._n_ctx = 0
        self._model: Model | None = None
        self._contexts: dict[int, Context] = {}
        self._flash = dict.fromkeys(WORK, AUTO)
        self._held: list[int] = []
        self._api: C.Llama | None = None

    # -- commands ---------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """Version and the instruction sets this build uses on this processor."""
        return {"version": C.__version__, "system": C.llama_print_system_info().decode()}

    def load(self, path: str, threads: int, n_ctx: int, tune: bool = True) -> dict[str, Any]:
        """Load a file in place of the one before. `tune`: choose flash attention by measuring, else automatic."""
        for context in self._contexts.values():
            context.close()
        self._path, self._threads, self._n_ctx = path, threads, n_ctx
        self._api, self._held = None, []
        self._flash = dict.fromkeys(WORK, AUTO)
        self._model = Model(path)
        self._contexts = {flash: self._new_context(flash) for flash in ((AUTO, OFF) if tune else (AUTO,))}
        if tune:
            self._tune()
        chosen = {work: "automatic" if flash == AUTO else "off" for work, flash in self._flash.items()}
        return {**self._model.describe(), **self.info(), "flash_attention": chosen}

    def generate(self, ids: list[int], n: int, stop: Sequence[int] = (), draft: str = "none") -> dict[str, Any]:
        """At most `n` greedy tokens, a stop token included. `draft`: "none", "lookup:K" or "api:K".

        Both lookups draft K tokens with llama-cpp-python's own prompt lookup: "lookup" in this loop, with
        argmax over all rows and nothing copied, "api" in its high-level `Llama` class.
        """
        return self.stream(_drop, ids, n, stop, draft)

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
        kind, _, width = draft.partition(":")
        if kind == "api":
            sampling = {"temp": temperature, "top_p": top_p, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}
            return self._generate_api(emit, ids, n, set(stop), int(width), seed, sampling)
        lookup = None if kind == "none" else LlamaPromptLookupDecoding(num_pred_tokens=int(width))
        if temperature <= 0:
            return self._generate_loop(emit, ids, n, set(stop), lookup, pick_best)
        sampler = Sampler(self._decoder, temperature=temperature, top_p=top_p, seed=seed)
        try:
            return self._generate_loop(emit, ids, n, set(stop), lookup, sampler.pick)
        finally:
            sampler.close()

    def generate_batch(self, prompts: list[list[int]], n: int) -> dict[str, Any]:
        """`n` greedy tokens of each prompt in step with one another; all prompts have the same length."""
        if len({len(prompt) for prompt in prompts}) != 1:
            raise ValueError("prompts of one length are needed")
        context = self._new_context(self._flash["batch"], len(prompts))
        try:
            firsts = [context.feed_prompt(prompt, place)[0].argmax() for place, prompt in enumerate(prompts)]
            began, tokens, out = perf_counter(), np.array(firsts), [firsts]
            for step in range(n - 1):
                tokens = context.feed_step(tokens, len(prompts[0]) + step).argmax(axis=1)
                out.append(tokens)
            seconds = perf_counter() - began
        finally:
            context.close()
        return {"ids": np.array(out).T.tolist(), "decode_seconds": seconds, "decoded": len(prompts) * (n - 1)}

    def score_rows(self, context: list[int], tokens: list[int], repeats: int) -> list[float]:
        """Milliseconds of each of `repeats` calls that score the rows `tokens` after `context`, logits for all."""
        self._hold(context)
        times = []
        for _ in range(repeats):
            began = perf_counter()
            self._decoder.feed(tokens, len(context), every=True)
            times.append(1e3 * (perf_counter() - began))
            self._decoder.cut(len(context))
        return times

    def prefill(self, ids: list[int]) -> float:
        """Seconds from nothing to the last token's logits."""
        context = self._contexts[self._flash["prefill"]]
        self._fresh()
        began = perf_counter()
        context.feed(ids, 0, every=False)
        return perf_counter() - began

    def logits(self, ids: list[int], path: str) -> None:
        """Write logits [len(ids), V] in float32 to an .npy file."""
        self._fresh()
        np.save(path, self._decoder.feed(ids, 0, every=True))

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _decoder(self) -> Context:
        return self._contexts[self._flash["decode"]]

    def _new_context(self, flash: int, num_sequences: int = 1) -> Context:
        if self._model is None:
            raise ValueError("load a file first")
        return Context(self._model, threads=self._threads, n_ctx=self._n_ctx, flash=flash, num_sequences=num_sequences)

    def _tune(self) -> None:
        """Choose per kind of work by the best of alternating tries, which other load disturbs least."""
        ids = list(range(100, 100 + min(128, self._n_ctx // 2)))
        times: dict[str, dict[int, list[float]]] = {work: {AUTO: [], OFF: []} for work in WORK}
        for _ in range(3):
            for flash in (AUTO, OFF):
                self._flash = dict.fromkeys(WORK, flash)
                times["prefill"][flash].append(self.prefill(ids))
                self._held = []
                times["decode"][flash].append(min(self.score_rows(ids, [100], 12)))
                times["batch"][flash].append(self.generate_batch([ids[:32]] * 8, 6)["decode_seconds"])
        for work, tried in times.items():
            self._flash[work] = AUTO if min(tried[AUTO]) <= min(tried[OFF]) else OFF
        self._fresh()

    def _fresh(self) -> None:
        for context in self._contexts.values():
            context.clear()
        self._held = []

    def _hold(self, tokens: list[int]) -> None:
        if self._held != tokens:
            self._fresh()
            self._decoder.feed(tokens, 0, every=False)
            self._held = list(tokens)

    def _generate_loop(
        self, emit: Emit, ids: list[int], n: int, stop: set[int], lookup: LlamaPromptLookupDecoding | None, pick: Pick
    ) -> dict[str, Any]:
        self._fresh()
        context = self._decoder
        text = np.empty(len(ids) + n, dtype=np.intc)
        text[: len(ids)] = ids
        began = perf_counter()
        last = pick(context.feed(ids, 0, every=False), [])[0]
        text[len(ids)] = last
        emit([last])
        first, calls = perf_counter(), context.call_seconds
        length = len(ids) + 1
        count = dict.fromkeys(("steps", "drafts", "drafted", "accepted"), 0)
        while length < len(text) and last not in stop:
            drafted = text[:0] if lookup is None else lookup(text[:length])[: len(text) - length - 1]
            picked = pick(context.feed([last, *drafted], length - 1, every=True), drafted)
            count["steps"] += 1
            count["drafts"] += len(drafted) > 0
            count["drafted"] += len(drafted)
            count["accepted"] += len(picked) - 1
            if len(picked) <= len(drafted):
                context.cut(length + len(picked) - 1)
            end = next((place for place, token in enumerate(picked) if token in stop), len(picked) - 1)
            picked = picked[: end + 1]
            text[length : length + len(picked)] = picked
            length, last = length + len(picked), picked[-1]
            emit(picked)
        run = self._run(text[len(ids) : length].tolist(), began, first)
        return {**run, "steps": count["steps"], "counters": count, "call_seconds": context.call_seconds - calls}

    def _generate_api(
        self, emit: Emit, ids: list[int], n: int, stop: set[int], width: int, seed: int, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        lookup = LlamaPromptLookupDecoding(num_pred_tokens=width)
        if self._api is None:
            self._api = C.Llama(
                self._path,
                n_ctx=self._n_ctx,
                n_threads=self._threads,
                n_threads_batch=self._threads,
                draft_model=lookup,
                flash_attn=self._flash["decode"] != OFF,
                verbose=False,
            )
        self._api.draft_model = lookup
        self._api.set_seed(seed & 0xFFFFFFFF)
        self._api.reset()
        began, first, out = perf_counter(), 0.0, []
        for token in self._api.generate(ids, **sampling):
            out.append(int(token))
            emit(out[-1:])
            first = first or perf_counter()
            if len(out) == n or token in stop:
                break
        return {**self._run(out, began, first), "steps": None, "counters": {}, "call_seconds": None}

    @staticmethod
    def _run(ids: list[int], began: float, first: float) -> dict[str, Any]:
        return {"ids": ids, "prompt_seconds": first - began, "decode_seconds": perf_counter() - first}


def _drop(tokens: Sequence[int]) -> None:
    """Nobody listens."""


def main() -> None:
    """Serve until standard input ends."""
    worker = Worker()
    names = ("info", "load", "generate", "generate_batch", "score_rows", "prefill", "logits")
    serve({name: getattr(worker, name) for name in names}, {"stream": worker.stream})


if __name__ == "__main__":
    main()
