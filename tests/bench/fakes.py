"""An engine that answers from a script: known tokens, steps and times, so that every figure can be checked by hand."""

from dataclasses import dataclass, field

from draftsmith.bench.prompts import Prompt
from draftsmith.bench.runner import Workload
from draftsmith.core.stats import EventLog, RequestStepRecord, StepRecord
from draftsmith.errors import CapacityError, PromptError


@dataclass
class Spec:
    vocab_size: int = 1000


@dataclass
class Result:
    token_ids: tuple
    text: str = "text"
    finish_reason: str = "length"
    prompt_tokens: int = 3
    logprobs: tuple | None = None


@dataclass
class ScriptedEngine:
    """Emits `tokens_per_step` tokens a step. `changes`: prompt text -> output position where it goes astray."""

    name: str
    tokens_per_step: int = 1
    changes: dict = field(default_factory=dict)
    refuses: frozenset = frozenset()
    fails_on: frozenset = frozenset()
    calls: list = field(default_factory=list)
    spec: Spec = field(default_factory=Spec)
    on_call: object = None

    def __post_init__(self):
        self._log = EventLog()
        self._requests = self._steps = 0

    def encode(self, prompt):
        text = self._text(prompt)
        if text in self.refuses:
            raise PromptError(f"{text} is too long")
        return [ord(character) for character in text]

    def generate(self, prompts, max_new_tokens, **settings):
        self.calls.append((tuple(self._text(prompt) for prompt in prompts), max_new_tokens, settings))
        if self.on_call is not None:
            self.on_call(self)
        texts = [self._text(prompt) for prompt in prompts]
        first_request = self._requests
        self._requests += len(texts)
        if self.fails_on & set(texts):
            raise CapacityError("no room")
        self._record(first_request, len(texts), max_new_tokens)
        return [Result(self._tokens(text, max_new_tokens)) for text in texts]

    def take_events(self):
        log, self._log = self._log, EventLog()
        return log

    @staticmethod
    def _text(prompt):
        return prompt if isinstance(prompt, str) else prompt[-1]["content"]

    def _tokens(self, text, count):
        tokens = [(ord(text[0]) + i) % 1000 for i in range(count)]
        if text in self.changes:
            tokens[self.changes[text]] = 999
        return tuple(tokens)

    def _record(self, first, count, num_tokens):
        position = 0
        while position < num_tokens:
            size = 1 if position == 0 else min(self.tokens_per_step, num_tokens - position)
            self._log.append_step(StepRecord(self._steps, count * size, count, 0, 0.001, 0.01, 0.002, 0.003))
            for request in range(first, first + count):
                drafted = size - 1
                done = position + size >= num_tokens
                self._log.append_request(
                    RequestStepRecord(
                        self._steps, request, position, self.name, drafted, drafted, drafted, size,
                        "length" if done else None, position == 0,
                    )
                )  # fmt: skip
            self._steps += 1
            position += size


def workload(texts, *, categories=None, **settings):
    """A workload of short prompts."""
    categories = categories or [""] * len(texts)
    prompts = [
        Prompt(prompt_id=f"id{i}", turns=(text,), category=category)
        for i, (text, category) in enumerate(zip(texts, categories, strict=True))
    ]
    return Workload(prompts=prompts, settings={"max_new_tokens": 9}, **settings)
