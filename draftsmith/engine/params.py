"""What a caller may ask of one request, checked before anything runs.

Called by the Python API, the command line and the benchmark. Invariant: a `GenerationParams` that
exists is valid by itself; what depends on the model (ids inside the vocabulary, the context) is
checked when the request is submitted.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.core.inexact import InexactRule
from draftsmith.core.sampling import SamplingParams
from draftsmith.core.types import Rule
from draftsmith.errors import OptionError
from draftsmith.registry import RULES, load_class, parse_selection, read_options

_SAMPLING_FIELDS = frozenset(item.name for item in dataclasses.fields(SamplingParams))
_MAX_LOGPROBS = 64
_MAX_SAMPLES = 256


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """Settings of one request.

    `max_new_tokens`: most tokens to emit. `sampling`: the law's transforms and the verification rule.
    `seed`: fixes all noise of the request; None draws a fresh one (reported in the statistics).
    `stop`: strings that end the text (not part of it); `stop_ids`: token ids that end it.
    `ignore_eos`: the model's own end tokens do not end it. `logprobs`: None, or how many alternatives
    to report beside each emitted token's log-probability (of the untransformed law). `n`: samples.
    `drafter`: a drafter selection for this request, None for the engine's. `latency_target`: seconds per token that
    this request's class is promised: drafting never makes a step longer than that allows; None promises nothing.
    """

    max_new_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    drafter: str | None = None
    latency_target: float | None = None

    def __post_init__(self) -> None:
        _require_int("max_new_tokens", self.max_new_tokens, 1, None)
        _require_int("n", self.n, 1, _MAX_SAMPLES)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, _MAX_LOGPROBS)
        if self.seed is not None:
            _require_int("seed", self.seed, None, None)
        target = self.latency_target
        if target is not None and (isinstance(target, bool) or not isinstance(target, int | float) or not target > 0):
            raise OptionError(f"latency_target is {target!r}; allowed: seconds per token above 0, or None")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise OptionError(f"stop must hold non-empty strings, got {text!r}")
        for token in self.stop_ids:
            _require_int("a stop id", token, 0, None)
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if self.drafter is not None and not isinstance(self.drafter, str):
            raise OptionError(f"drafter must be a selection like 'ngram:max_ngram=4' or None, got {self.drafter!r}")

    @classmethod
    def create(cls, **settings: Any) -> GenerationParams:
        """Build from the flat keyword arguments of `Engine.generate`.

        Raises `OptionError` for an unknown name or a value outside its range.
        """
        own: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        for name, value in settings.items():
            if name in _SAMPLING_FIELDS:
                sampling[name] = value
            elif name in _OWN_FIELDS:
                own[name] = value
            else:
                allowed = ", ".join(sorted(_OWN_FIELDS | _SAMPLING_FIELDS))
                raise OptionError(f"unknown option {name!r}; allowed: {allowed}")
        if isinstance(sampling.get("rule"), str):
            sampling["rule"] = parse_rule(sampling["rule"])
        if "banned_ids" in sampling:
            sampling["banned_ids"] = frozenset(_items("banned_ids", sampling["banned_ids"], "token ids"))
        if not isinstance(sampling.get("logit_bias", {}), Mapping):
            raise OptionError(f"logit_bias must map token ids to numbers, got {sampling['logit_bias']!r}")
        stop = () if own.get("stop") is None else own["stop"]
        own["stop"] = (stop,) if isinstance(stop, str) else _items("stop", stop, "strings")
        own["stop_ids"] = frozenset(_items("stop_ids", own.get("stop_ids", ()), "token ids"))
        return cls(sampling=SamplingParams(**sampling), **own)

    def resolved_seed(self) -> int:
        """The seed of this request: the given one, or a fresh one."""
        return secrets.randbits(63) if self.seed is None else self.seed


_OWN_FIELDS = frozenset(item.name for item in dataclasses.fields(GenerationParams)) - {"sampling"}


def parse_rule(text: str) -> Rule | InexactRule:
    """The verification rule of a name, or of a lossy rule's `NAME[:key=value]*`. Raises `OptionError`."""
    lossless = {rule.value: "" for rule in Rule}
    name, colon, _ = text.partition(":")
    if name in lossless:
        if colon:
            raise OptionError(f"rule {name} has no options; write --rule {name}")
        return Rule(name)
    selection = parse_selection(text, {**lossless, **RULES}, "rule")
    rule_class = load_class(selection)
    if not issubclass(rule_class, InexactRule) or not dataclasses.is_dataclass(rule_class):
        raise OptionError(f"{selection.target} is not an InexactRule with its parameters as a dataclass")
    rule: InexactRule = read_options(rule_class, selection.options, f"rule {name}")
    return rule


def _items(name: str, value: object, what: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise OptionError(f"{name} must be a list of {what}, got {value!r}")
    items = tuple(value)
    for item in items:
        if not isinstance(item, Hashable):
            raise OptionError(f"{name} must be a list of {what}, got {item!r} in it")
    return items


def _require_int(name: str, value: object, low: int | None, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} must be a whole number, got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"between {low} and {high}"
        raise OptionError(f"{name} must be {span}, got {value}")


Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]
"""A raw string, chat messages (rendered through the chat template), or token ids."""
