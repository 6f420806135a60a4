"""An OpenAI-compatible completion endpoint as an audited engine: vLLM, SGLang, a llama.cpp server, anybody's.

Called by `draftsmith audit --endpoint`. Speaks POST /v1/completions. What an endpoint does not tell, or tells as
nonsense, stays unknown: no event log, no logits; tokens are spellings, or whole characters where it tells none.
Invariant: whatever the other side sends or does not send, the caller meets an answer or an `EndpointError` of one line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, final

from draftsmith.bench import endpoint_http
from draftsmith.bench.audit_subject import Answer, Asked, Audited
from draftsmith.bench.endpoint_http import Address, Exchange
from draftsmith.bench.workloads.prompt import mended
from draftsmith.errors import OptionError, UserError

_AT_ONCE = 4
# Our names, theirs. `top_k` is an extension that the usual servers know.
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "stop": "stop",
    "logprobs": "logprobs",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


class EndpointError(UserError):
    """An endpoint could not be reached, or what it sent is no completion."""


@final
class EndpointAudited(Audited):
    """One endpoint. `url` may end in /v1 or in nothing; `model`: None takes the first it lists."""

    def __init__(self, url: str, *, model: str | None = None, timeout: float = 60.0) -> None:
        """Raises `OptionError` for what is no HTTP address."""
        address = Address.parse(url.rstrip("/").removesuffix("/completions"))
        base = address.base if address.base.endswith("/v1") else f"{address.base}/v1"
        self._address = replace(address, base=base)
        self._timeout = timeout
        self._model = model

    @property
    def model(self) -> str:
        """The model asked for."""
        if self._model is None:
            listed = self._fetch("/models", None).get("data")
            if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict) or "id" not in listed[0]:
                raise EndpointError(f"{self._address}/models lists no model; name one with --model")
            self._model = str(listed[0]["id"])
        return self._model

    def answer(self, asked: Sequence[Asked]) -> list[list[Answer]]:
        bodies = [self._body(item) for item in asked]
        if len(bodies) == 1:
            return [[self._one(bodies[0])]]
        with ThreadPoolExecutor(_AT_ONCE) as workers:
            return [[answer] for answer in workers.map(self._one, bodies)]

    def _body(self, asked: Asked) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "prompt": asked.prompt, "temperature": 0.0, "logprobs": 2}
        for name, value in asked.settings.items():
            if name not in _FIELDS:
                raise OptionError(f"{name} cannot be asked of an endpoint; allowed: {', '.join(sorted(_FIELDS))}")
            body[_FIELDS[name]] = value
        return body

    def _one(self, body: dict[str, Any]) -> Answer:
        return _answer_of(self._fetch("/completions", body), f"{self._address}/completions")

    def _fetch(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        exchange, place = Exchange(self._address, {}, self._timeout), self._address.base + path
        try:
            return exchange.get_json(place) if body is None else exchange.post_json(place, body)
        except endpoint_http.EndpointError as error:
            raise EndpointError(f"{self._address}{path} {error}") from error


def _answer_of(document: Mapping[str, Any], address: str) -> Answer:
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
        raise EndpointError(f"{address} sent no text: {json.dumps(document)[:120]}")
    text, told = mended(choice["text"]), choice.get("logprobs")
    tokens, logprobs, likeliest = None, None, None
    if isinstance(told, dict):
        tokens, logprobs, likeliest = (told.get(name) for name in ("tokens", "token_logprobs", "top_logprobs"))
    in_characters = not isinstance(tokens, list) or not all(isinstance(token, str | int) for token in tokens)
    if in_characters:
        tokens, logprobs, likeliest = list(text), None, None
    if not isinstance(logprobs, list) or not all(map(_is_real, logprobs)):
        logprobs = None
    if not isinstance(likeliest, list) or not all(
        isinstance(item, dict) and all(map(_is_real, item.values())) for item in likeliest
    ):
        likeliest = []
    usage = document.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    reason = choice.get("finish_reason")
    return Answer(
        tokens=tuple(tokens or ()),
        text=text,
        finish_reason=reason if isinstance(reason, str) else None,
        logprobs=None if logprobs is None else tuple(float(value) for value in logprobs),
        likeliest=tuple(likeliest),
        in_characters=in_characters,
        usage=(_whole(counts.get("completion_tokens")), _whole(counts.get("prompt_tokens"))),
    )


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
