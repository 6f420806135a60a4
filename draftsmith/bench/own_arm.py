"""This package's engine as an arm of a benchmark.

Made by the command line over weights that several arms share, driven by the runner. Each arm has its own drafter,
controller and cache, so none learns from another. Invariant: the engine is stepped from the runner's thread alone,
and every event is seen before the next step is made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from draftsmith.bench.arms import Answer, Arm, Arrival, Ask, Description, Message
from draftsmith.bench.environment import resident_bytes
from draftsmith.bench.runs import BASELINE
from draftsmith.core.fidelity import marked
from draftsmith.core.stats import EventLog
from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.streams import TokenStream


@final
class OwnArm(Arm):
    """An engine with its drafter and controller, by the name they were asked for. `rule`: how drafts are verified.

    Its name says so where the rule does not keep the target's law, and with it every table and plot.
    """

    def __init__(self, name: str, engine: Engine, *, max_concurrency: int, rule: str = "coupling") -> None:
        from draftsmith.core.inexact import fidelity_of
        from draftsmith.engine.params import parse_rule

        self._fidelity = fidelity_of(parse_rule(rule))
        self.name = marked(name, self._fidelity)
        self.max_concurrency = max_concurrency
        self._engine = engine
        self._rule = rule
        self._streams: dict[int, TokenStream] = {}
        self._refused: list[Answer] = []

    def open(self) -> Description:
        """The engine is loaded already."""
        spec = self._engine.spec
        engine = self._engine
        details = {"backend": engine.backend_name, "drafter": engine.drafter_name, "rule": self._rule}
        if engine.drafter_name != BASELINE:
            details["controller"] = engine.controller_name
        bits = engine.bits_per_weight
        return Description(
            engine="draftsmith",
            model=self._engine.model_name,
            bits_per_weight=bits,
            fidelity=self._fidelity.value,
            details={
                **details,
                "layers": spec.num_layers,
                "vocabulary": spec.vocab_size,
                "identity": dict(self._engine.identity),
            },
        )

    def submit(self, ask: Ask) -> None:
        """Hand it to the engine; what the engine refuses is answered at the next poll."""
        prompt: Any = ask.ids if ask.ids is not None else ask.messages if ask.messages is not None else ask.text
        try:
            self._streams[ask.key] = self._engine.stream(
                prompt,
                max_new_tokens=ask.max_new_tokens,
                temperature=ask.temperature,
                top_p=ask.top_p,
                seed=ask.seed,
                ignore_eos=ask.ignore_eos,
                rule=self._rule,
            )
        except DraftsmithError as error:
            self._refused.append(Answer(key=ask.key, seconds=time.perf_counter(), error=str(error)))

    def poll(self, timeout: float) -> list[Arrival | Answer]:
        """One step of the engine, unless something is there already."""
        if self._refused:
            refused, self._refused = self._refused, []
            return list(refused)
        if not self._streams:
            time.sleep(timeout)
            return []
        if not any(stream.ready for stream in self._streams.values()):
            next(iter(self._streams.values())).advance()
        now = time.perf_counter()
        found: list[Arrival | Answer] = []
        for key in [key for key, stream in self._streams.items() if stream.ready]:
            self._take(key, now, found)
        return found

    def _take(self, key: int, now: float, found: list[Arrival | Answer]) -> None:
        stream = self._streams[key]
        while stream.ready:
            try:
                event = next(stream)
            except StopIteration:
                del self._streams[key]
                found.append(_answer(key, now, stream))
                return
            except DraftsmithError as error:
                del self._streams[key]
                found.append(Answer(key=key, seconds=now, error=str(error)))
                return
            if event.token_ids:
                found.append(Arrival(key=key, seconds=now, num_tokens=len(event.token_ids)))

    def cancel(self) -> None:
        """Drop what runs."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._refused.clear()

    def close(self) -> None:
        """Drop what runs; the weights belong to others too."""
        self.cancel()

    def encode(self, messages: Sequence[Message] | None, text: str) -> list[int] | None:
        """Token ids under the target's chat template. Raises `PromptError`."""
        return self._engine.encode(list(messages) if messages is not None else text)

    def take_events(self) -> EventLog:
        """The engine's log since the last call."""
        return self._engine.take_events()

    def memory_bytes(self) -> int | None:
        """Of this process, which all own arms share."""
        return resident_bytes()


def _answer(key: int, now: float, stream: TokenStream) -> Answer:
    result = stream.results()[0]
    if result.finish_reason not in ("stop", "length"):
        return Answer(key=key, seconds=now, error=f"ended as {result.finish_reason}")
    return Answer(
        key=key,
        seconds=now,
        prompt_tokens=result.prompt_tokens,
        token_ids=tuple(result.token_ids),
        num_tokens=len(result.token_ids),
        text=result.text,
        finish_reason=result.finish_reason,
        request=result.statistics.request,
        total_variation=result.statistics.total_variation,
    )
