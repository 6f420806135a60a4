"""A thin layer over llama.cpp's own C functions: a model, and a context that is fed rows.

Used by the scripts beside it, inside the peer's environment. The low-level API, because the high-level
class copies logits and builds Python objects per token, which would be counted against llama.cpp.
Invariant: `call_seconds` holds all time inside `llama_decode` and the wait for its logits, so that wall time
less it is what this loop adds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import llama_cpp as C
import numpy as np

MAX_ROWS = 512
"""Most rows of one call (`n_batch`); longer prompts are fed in several."""


class Model:
    """A GGUF file in memory, repacked for this processor where llama.cpp knows how (its default)."""

    def __init__(self, path: str) -> None:
        C.llama_backend_init()
        params = C.llama_model_default_params()
        params.n_gpu_layers = 0
        self.handle = C.llama_model_load_from_file(path.encode(), params)
        if not self.handle:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.vocab_size = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self.handle))

    def describe(self) -> dict[str, Any]:
        """Format, bytes and bits per weight of the tensors."""
        text = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.handle, text, 256)
        num_bytes, num_params = C.llama_model_size(self.handle), C.llama_model_n_params(self.handle)
        return {
            "description": text.value.decode(),
            "bytes": num_bytes,
            "parameters": num_params,
            "bits_per_weight": 8 * num_bytes / num_params,
        }


class Context:
    """Key-value memory of `num_sequences` sequences and a batch to fill."""

    def __init__(self, model: Model, *, threads: int, n_ctx: int, flash: int = -1, num_sequences: int = 1) -> None:
        """`n_ctx`: per sequence. `flash`: flash attention, -1 lets llama.cpp decide, 0 off, 1 on."""
        params = C.llama_context_default_params()
        params.n_ctx = n_ctx * num_sequences
        params.n_batch = params.n_ubatch = MAX_ROWS
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash
        params.no_perf = True
        self.handle = C.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise ValueError(f"llama.cpp cannot make a context of {n_ctx} tokens")
        self.call_seconds = 0.0
        self._memory = C.llama_get_memory(self.handle)
        self._vocab_size = model.vocab_size
        self._batch = C.llama_batch_init(MAX_ROWS, 0, 1)
        as_array = np.ctypeslib.as_array
        self._tokens = as_array(self._batch.token, (MAX_ROWS,))
        self._positions = as_array(self._batch.pos, (MAX_ROWS,))
        self._wanted = as_array(self._batch.logits, (MAX_ROWS,))
        as_array(self._batch.n_seq_id, (MAX_ROWS,))[:] = 1
        for row in range(MAX_ROWS):
            self._batch.seq_id[row][0] = 0

    def clear(self) -> None:
        """Forget everything."""
        C.llama_memory_clear(self._memory, False)

    def cut(self, length: int, sequence: int = 0) -> None:
        """Forget a sequence's tokens after the first `length`."""
        if not C.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise ValueError("llama.cpp cannot cut this model's memory")

    def feed(self, tokens: Sequence[int] | np.ndarray, position: int, *, every: bool) -> np.ndarray:
        """Append a chain of rows to sequence 0; logits [rows, V], or [1, V] of the last. A view: use it at once."""
        rows = np.empty(0)
        for start in range(0, len(tokens), MAX_ROWS):
            part = tokens[start : start + MAX_ROWS]
            count = len(part)
            self._tokens[:count] = part
            self._positions[:count] = np.arange(position + start, position + start + count)
            self._wanted[:count] = every
            self._wanted[count - 1] = start + count == len(tokens) or every
            rows = self._decode(count, count if every else int(self._wanted[count - 1]))
            if every and len(tokens) > MAX_ROWS:
                raise ValueError(f"logits of more than {MAX_ROWS} rows at once")
        return rows

    def feed_step(self, tokens: Sequence[int] | np.ndarray, position: int) -> np.ndarray:
        """Append one row to each sequence 0, 1, ...; logits [sequences, V]."""
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = position
        self._wanted[:count] = 1
        for row in range(count):
            self._batch.seq_id[row][0] = row
        rows = self._decode(count, count)
        for row in range(count):
            self._batch.seq_id[row][0] = 0
        return rows

    def feed_prompt(self, tokens: Sequence[int], sequence: int) -> np.ndarray:
        """Append a prompt of at most MAX_ROWS tokens to one sequence; logits [1, V] of its last row."""
        for row in range(len(tokens)):
            self._batch.seq_id[row][0] = sequence
        rows = self.feed(tokens, 0, every=False)
        for row in range(len(tokens)):
            self._batch.seq_id[row][0] = 0
        return rows

    def _decode(self, num_rows: int, num_logits: int) -> np.ndarray:
        began = perf_counter()
        self._batch.n_tokens = num_rows
        status = C.llama_decode(self.handle, self._batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status}")
        pointer = C.llama_get_logits(self.handle) if num_logits else None
        self.call_seconds += perf_counter() - began
        if pointer is None:
            C.llama_synchronize(self.handle)
            return np.empty(0)
        return np.ctypeslib.as_array(pointer, (num_logits * self._vocab_size,)).reshape(num_logits, -1)

    def close(self) -> None:
        """Give the memory back."""
        C.llama_batch_free(self._batch)
        C.llama_free(self.handle)


Pick = Callable[[np.ndarray, Sequence[int]], list[int]]
"""From the logits of the last token's row and the drafted ones: the drafts that stay, and one token more."""


def pick_best(rows: np.ndarray, drafted: Sequence[int]) -> list[int]:
    """Greedy."""
    best = rows.argmax(axis=1)
    wrong = np.flatnonzero(best[:-1] != drafted)
    return best[: (int(wrong[0]) if len(wrong) else len(drafted)) + 1].tolist()


class Sampler:
    """llama.cpp's own samplers: temperature, then top-p, then a draw from a seeded generator.

    A draft stays while it is what was drawn, so that the generator is asked once per token with or without drafts.
    """

    def __init__(self, context: Context, *, temperature: float, top_p: float, seed: int) -> None:
        self._context = context.handle
        self._chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_temp(temperature))
        if top_p < 1:
            C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_top_p(top_p, 1))
        C.llama_sampler_chain_add(self._chain, C.llama_sampler_init_dist(seed & 0xFFFFFFFF))

    def pick(self, rows: np.ndarray, drafted: Sequence[int]) -> list[int]:
        """Sampled. Rows are told from behind, because a prompt's only logits are its last row's."""
        out: list[int] = []
        for place in range(len(drafted) + 1):
            out.append(C.llama_sampler_sample(self._chain, self._context, place - len(drafted) - 1))
            if place < len(drafted) and out[-1] != drafted[place]:
                break
        return out

    def close(self) -> None:
        """Give the memory back."""
        C.llama_sampler_free(self._chain)
