"""Hugging Face transformers as a worker process: a model directory or a GGUF file (see `lines.py`).

Started with the peer environment's Python by the arm `transformers`. Its own `generate` does everything: plain
decoding, prompt lookup, or an assistant model. Tokens are told as its streamer hears them. Invariant: the options of a
request are all that decides its output; what the model's files say about generation is put aside.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from lines import Emit, serve


class Listener:
    """What `generate` calls a streamer: hears the prompt first, then the new tokens of each step."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._has_prompt = False
        self._began = perf_counter()
        self.first_seconds: float | None = None
        self.ids: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        """New tokens."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        if self.first_seconds is None:
            self.first_seconds = perf_counter() - self._began
        new = tokens.reshape(-1).tolist()
        self.ids += new
        self._emit(new)

    def end(self) -> None:
        """Nothing is held back."""


class Forwards:
    """Counts the target's forwards and the rows they get, which is where drafts show."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.rows: list[int] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else arguments[0]
        self.rows.append(ids.shape[-1])

    def counters(self, num_prompt: int, num_tokens: int) -> dict[str, int]:
        """Of the request just done. Every forward gives one token of the target's own, the rest were drafts."""
        drafted = [rows - 1 for rows in self.rows]
        drafted[0] = self.rows[0] - num_prompt
        return {
            "steps": len(drafted) - 1,
            "drafts": sum(count > 0 for count in drafted),
            "drafted": sum(drafted),
            "accepted": max(num_tokens - len(drafted), 0),
        }


class Worker:
    """The commands. `load` comes first."""

    def __init__(self) -> None:
        self._model: Any = None
        self._forwards: Forwards | None = None
        self._drafting: dict[str, Any] = {}

    def load(self, path: str, threads: int, n_ctx: int, draft: str = "none", dtype: str = "float32") -> dict[str, Any]:
        """Load a target, and what `draft` needs: "none", "lookup:K" or "assistant:PATH". `n_ctx`: for symmetry."""
        import transformers

        torch.set_num_threads(threads)
        self._model, found = load_model(path, dtype)
        self._forwards = Forwards(self._model)
        kind, _, rest = draft.partition(":")
        self._drafting = {}
        if kind == "lookup":
            self._drafting = {"prompt_lookup_num_tokens": int(rest)}
        elif kind == "assistant":
            assistant, assistant_found = load_model(rest, dtype)
            self._drafting = {"assistant_model": assistant}
            found["assistant"] = assistant_found
        versions = {"version": transformers.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
        return {**found, **versions}

    def stream(
        self,
        emit: Emit,
        ids: list[int],
        n: int,
        stop: Sequence[int] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> dict[str, Any]:
        """At most `n` tokens, a stop token included."""
        from transformers import GenerationConfig

        if self._model is None or self._forwards is None:
            raise ValueError("load a model first")
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        config = GenerationConfig(
            max_new_tokens=n,
            eos_token_id=list(stop) or None,
            pad_token_id=0,
            **(sampling if temperature > 0 else {"do_sample": False}),
        )
        torch.manual_seed(seed)
        self._forwards.rows = []
        listener = Listener(emit)
        began = perf_counter()
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            out = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                streamer=listener,
                **self._drafting,
            )
        seconds = perf_counter() - began
        new = out[0, len(ids) :].tolist()
        if listener.ids != new:
            raise RuntimeError("the streamer heard other tokens than generate returned")
        first = listener.first_seconds or 0.0
        counters = self._forwards.counters(len(ids), len(new))
        return {"ids": new, "prompt_seconds": first, "decode_seconds": seconds - first, "counters": counters}


def load_model(path: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    """A model from a directory or a GGUF file, and what it is. Quantised files are unpacked into `dtype`."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    settings: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    is_file = os.path.isfile(path)
    if is_file:
        folder, settings["gguf_file"] = os.path.split(os.path.abspath(path))
        try:
            from transformers import GgufConfig

            # Newer versions may keep blocks packed, with kernels they download; here a file means one thing.
            settings["quantization_config"] = GgufConfig(dequantize=True)
        except ImportError:
            pass
    model = AutoModelForCausalLM.from_pretrained(folder if is_file else path, **settings).eval()
    model.generation_config = GenerationConfig()
    weights = list(model.parameters())
    num_bytes, num_weights = sum(w.nbytes for w in weights), sum(w.numel() for w in weights)
    found = {"bytes": num_bytes, "parameters": num_weights, "bits_per_weight": 8 * num_bytes / num_weights}
    if is_file:
        found["description"] = f"the file's blocks unpacked into {dtype} when loaded"
    return model, {**found, "dtype": dtype}


def main() -> None:
    """Serve until standard input ends."""
    worker = Worker()
    serve({"load": worker.load}, {"stream": worker.stream})


if __name__ == "__main__":
    main()
