"""Speculative decoding on one page: no engine, no cache, no batch. Read this first.

One step: draft a few tokens below the last emitted one (the root), score root and drafts in a single
forward of the target, walk down while the target's own token is the drafted one, emit what was
accepted plus one more. The output is the plain run's, token for token, at any temperature, because the
target's token at an output position is a pure function of its logits and of noise keyed by that position.

Everything is scored from scratch in every step, so it is slow; the engine's tests use it as their oracle.

    python examples/plain_speculation.py "The quick brown fox jumps over the lazy dog. The quick brown"
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams

Score = Callable[[list[int]], torch.Tensor]
"""Token ids [N] -> logits [N, V]: row i is the target's view of what follows token i."""
Draft = Callable[[list[int]], list[int]]
"""Token ids so far -> guessed continuation, possibly empty."""


@dataclass
class Run:
    """Emitted ids, and how many target forwards they took."""

    tokens: list[int]
    steps: int


def speculate(
    score: Score,
    draft: Draft,
    prompt: Sequence[int],
    limit: int,
    sampler: Sampler,
    random: RequestRandom,
    end_ids: frozenset[int] = frozenset(),
) -> Run:
    """Emit `limit` tokens after `prompt`, or up to an end id."""
    tokens, steps = list(prompt), 0
    while len(tokens) - len(prompt) < limit:
        emitted = step(score, draft(tokens), tokens, len(tokens) - len(prompt), sampler, random)
        steps += 1
        for token in emitted[: limit - (len(tokens) - len(prompt))]:
            tokens.append(token)
            sampler.append([token])
            if token in end_ids:
                return Run(tokens[len(prompt) :], steps)
    return Run(tokens[len(prompt) :], steps)


def step(
    score: Score, drafted: list[int], tokens: list[int], position: int, sampler: Sampler, random: RequestRandom
) -> list[int]:
    """One verification. `position` is the output position of the first token to be emitted."""
    logits_NV = score(tokens + drafted)
    root_row = len(tokens) - 1
    emitted: list[int] = []
    for depth, guess in enumerate([*drafted, None]):
        logits_V = logits_NV[root_row + depth]
        # `emitted` holds accepted drafts: penalties at this row must see them.
        if sampler.greedy:
            token = sampler.argmax(logits_V, emitted)
        else:
            noise_V = random.target_gumbel(position + depth, len(logits_V))
            token = sampler.sample(logits_V, noise_V, emitted)
        emitted.append(token)
        if token != guess:
            break  # a correction, or the bonus token after the last draft
    return emitted


def no_draft(tokens: list[int]) -> list[int]:
    """Plain decoding is speculation with nothing drafted."""
    return []


def prompt_lookup(tokens: list[int], longest: int = 3, num_draft: int = 8) -> list[int]:
    """What followed the latest earlier occurrence of the longest matching suffix."""
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                return tokens[start + size : start + size + num_draft]
    return []


def main() -> None:
    """Generate with and without drafts on the default model and compare."""
    from draftsmith.engine.loading import load_model
    from draftsmith.models.backend import RowGroup

    model = load_model("smollm2")
    cache = model.backend.cache

    def score(ids: list[int]) -> torch.Tensor:
        cache.open(0)
        cache.reserve(0, len(ids))
        logits = model.backend.score([RowGroup(0, ids, range(-1, len(ids) - 1), 0)]).logits[0]
        cache.close(0)
        return logits

    prompt = model.tokenizer.encode(" ".join(sys.argv[1:]) or "one two three one two three one two", special=True)
    runs = {}
    for name, draft in (("plain", no_draft), ("prompt lookup", prompt_lookup)):
        sampler = Sampler(SamplingParams(), prompt, model.eos_ids, model.backend.spec.vocab_size)
        runs[name] = run = speculate(score, draft, prompt, 40, sampler, RequestRandom(0), model.eos_ids)
        print(f"{name}: {len(run.tokens)} tokens in {run.steps} forwards: {model.tokenizer.decode(run.tokens)!r}")
    print("same ids:", runs["plain"].tokens == runs["prompt lookup"].tokens)


if __name__ == "__main__":
    main()
