"""A seeded generator of request traffic with realistic repetition, as token ids.

Used by the suffix index's benchmark and tests. Four kinds of request share one vocabulary with Zipf
frequencies: `template` (forms and reports from a stock of templates with fresh slots), `edit` (an earlier
answer, pasted into the prompt, comes back with small changes), `records` (JSON- or code-like rows of one schema
with varying values) and `chat` (free text from a stock of phrases and single words). Invariant: the same
arguments give the same requests on every machine; nothing here is real text.

Usage: python benchmarks/repetitive_tokens.py [NUM_TOKENS [SEED]]  (prints a summary)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

VOCAB_SIZE = 49152
KINDS = ("template", "edit", "records", "chat")
SHARES = (0.25, 0.25, 0.25, 0.25)


@dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """One request: its kind, prompt and response."""

    kind: str
    prompt: list[int]
    response: list[int]


class TrafficGenerator:
    """Draws requests one after another; `edit` requests refer to the responses drawn before."""

    def __init__(self, seed: int, vocab_size: int = VOCAB_SIZE) -> None:
        self._rng = np.random.Generator(np.random.PCG64(seed))
        # Stocks depend on a seed of their own, so that traffic of another seed still shares them.
        stock = np.random.Generator(np.random.PCG64(20_261_129))
        weights = 1.0 / np.arange(1, vocab_size + 1) ** 1.05
        self._cumulative = np.cumsum(weights / weights.sum())
        self._ids = stock.permutation(vocab_size)
        self._templates = [self._template(stock) for _ in range(60)]
        self._schemas = [self._schema(stock) for _ in range(80)]
        self._phrases = [self._words(stock, int(stock.integers(3, 12))) for _ in range(4000)]
        self._earlier: list[list[int]] = []

    def _words(self, rng: np.random.Generator, num: int) -> list[int]:
        ranks = np.searchsorted(self._cumulative, rng.random(num), side="right")
        return self._ids[np.minimum(ranks, len(self._ids) - 1)].tolist()

    def _template(self, rng: np.random.Generator) -> list[list[int]]:
        """Fixed stretches of text; a slot lies between each two."""
        return [self._words(rng, int(rng.integers(4, 30))) for _ in range(int(rng.integers(6, 20)))]

    def _schema(self, rng: np.random.Generator) -> list[tuple[list[int], list[list[int]]]]:
        """Keys, each with the values it takes (few values: an enumeration; none: free)."""
        keys = []
        for _ in range(int(rng.integers(3, 9))):
            key = self._words(rng, int(rng.integers(2, 6)))
            num_values = int(rng.choice([0, 0, 2, 5, 20]))
            keys.append((key, [self._words(rng, int(rng.integers(1, 4))) for _ in range(num_values)]))
        return keys

    def draw(self) -> TokenRequest:
        """The next request."""
        kind = KINDS[int(self._rng.choice(len(KINDS), p=SHARES))]
        prompt, response = getattr(self, f"_draw_{kind}")()
        self._earlier.append(response)
        return TokenRequest(kind=kind, prompt=prompt, response=response)

    def _draw_template(self) -> tuple[list[int], list[int]]:
        rng = self._rng
        # A few templates make most of the traffic.
        template = self._templates[min(int(rng.exponential(12)), len(self._templates) - 1)]
        slots = [self._words(rng, int(rng.integers(1, 8))) for _ in template]
        prompt = self._words(rng, int(rng.integers(10, 40)))
        response = []
        for part, slot in zip(template, slots, strict=True):
            response += part
            if rng.random() < 0.9:
                response += slot
                prompt += slot
        return prompt, response

    def _draw_edit(self) -> tuple[list[int], list[int]]:
        rng = self._rng
        source = self._earlier[-1 - int(rng.integers(min(len(self._earlier), 400)))] if self._earlier else []
        prompt = self._words(rng, int(rng.integers(8, 30))) + source
        response: list[int] = []
        at = 0
        while at < len(source):
            kept = int(rng.geometric(1 / 40))
            response += source[at : at + kept]
            at += kept
            change = rng.random()
            if change < 0.6:
                response += self._words(rng, int(rng.integers(1, 5)))
            if change > 0.3:
                at += int(rng.integers(1, 5))
        return prompt, response or self._words(rng, 40)

    def _draw_records(self) -> tuple[list[int], list[int]]:
        rng = self._rng
        schema = self._schemas[min(int(rng.exponential(15)), len(self._schemas) - 1)]
        opening, closing = self._words(rng, 2), self._ids[:2].tolist()
        response = list(opening)
        prompt = self._words(rng, int(rng.integers(10, 60)))
        for _ in range(int(rng.integers(5, 30))):
            for key, values in schema:
                response += key
                if values:
                    response += values[min(int(rng.exponential(len(values) / 3)), len(values) - 1)]
                else:
                    value = self._words(rng, int(rng.integers(1, 6)))
                    response += value
                    if rng.random() < 0.5:
                        prompt += value
            response += closing
        return prompt, response

    def _draw_chat(self) -> tuple[list[int], list[int]]:
        rng = self._rng
        texts = []
        for num in (int(rng.integers(5, 30)), int(rng.integers(20, 90))):
            text: list[int] = []
            for _ in range(num):
                if rng.random() < 0.6:
                    text += self._phrases[min(int(rng.exponential(500)), len(self._phrases) - 1)]
                else:
                    text += self._words(rng, int(rng.integers(1, 6)))
            texts.append(text)
        return texts[0], texts[1]


def traffic(num_tokens: int, seed: int = 0) -> Iterator[TokenRequest]:
    """Requests until their responses hold `num_tokens` tokens (the last one is cut there)."""
    generator = TrafficGenerator(seed)
    left = num_tokens
    while left > 0:
        request = generator.draw()
        cut = request.response[:left]
        yield TokenRequest(kind=request.kind, prompt=request.prompt, response=cut)
        left -= len(cut)


def main(arguments: list[str]) -> None:
    """Print what the generator makes."""
    num_tokens = int(arguments[0]) if arguments else 1_000_000
    requests = list(traffic(num_tokens, int(arguments[1]) if len(arguments) > 1 else 0))
    for kind in KINDS:
        own = [request for request in requests if request.kind == kind]
        prompts, responses = (
            sum(len(text) for text in texts) for texts in ([r.prompt for r in own], [r.response for r in own])
        )
        print(f"{kind:9} {len(own):6} requests, {prompts:8} prompt tokens, {responses:8} response tokens")


if __name__ == "__main__":
    main(sys.argv[1:])
