"""An arm over any server that speaks OpenAI's API: vLLM, SGLang, llama.cpp's, others.

Made by `arms.make_arm` from `endpoint:url=http://HOST:PORT/v1[:api=completions|chat][:model=NAME]...`, driven by the
runner. Each request has a thread that reads its stream and hands over what came through one queue. Invariants: a
request ends by its answer, its error or its timeout, whatever the server does; an endpoint nobody answers at is
asked again once per block and fails at once meanwhile.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self, final

from draftsmith.bench.arms import MOST_TIMEOUT, Answer, Arm, Arrival, Ask, Counters, Description, RunInfo
from draftsmith.bench.endpoint_http import Address, EndpointError, Exchange, Unreachable
from draftsmith.bench.endpoint_servers import (
    SERVERS,
    Reading,
    about,
    describe_server,
    read_sglang,
    read_vllm,
    recognise,
    special_fields,
)
from draftsmith.bench.endpoint_tally import Tally
from draftsmith.errors import OptionError, UserError

_ASIDE_SECONDS = 10.0
"""Most seconds for what is asked besides requests: models, versions, counters."""
_APIS = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Options of the endpoint arm.

    `api`: "completions" sends prompts as the run's token ids to servers that take them, "chat" sends messages, which
    the server's own template makes a prompt of. `model`: its name there; the first the server lists by default.
    `key_env`: environment variable that holds the API key. `kind`: which server it is, where its answer about models
    does not tell: vllm, sglang, llama_cpp or openai. `timeout`: most seconds per request.
    """

    url: str = ""
    api: str = "completions"
    model: str | None = None
    key_env: str | None = None
    kind: str = "auto"
    concurrency: int = 64
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.url:
            raise OptionError("endpoint needs a server: write endpoint:url=http://HOST:PORT/v1")
        if self.api not in _APIS:
            raise OptionError(f"endpoint: api is {self.api!r}; allowed: {', '.join(_APIS)}")
        if self.kind not in ("auto", *SERVERS):
            raise OptionError(f"endpoint: kind is {self.kind!r}; allowed: auto, {', '.join(SERVERS)}")
        if self.concurrency < 1:
            raise OptionError(f"endpoint: concurrency is {self.concurrency}; it must be at least 1")
        if not 0 < self.timeout <= MOST_TIMEOUT:
            raise OptionError(
                f"endpoint: timeout is {self.timeout:g}; it must be above 0 and at most {MOST_TIMEOUT:g} s (a day)"
            )
        if self.key_env is not None and not os.environ.get(self.key_env):
            raise OptionError(f"endpoint: key_env names {self.key_env}, which is not set")
        if not all("!" <= letter <= "~" for letter in os.environ.get(self.key_env or "", "")):
            raise OptionError(
                f"endpoint: {self.key_env} holds a space, a line break or a letter that no header can hold"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Flight:
    """A request on its way."""

    ask: Ask
    exchange: Exchange
    deadline: float


@dataclass(frozen=True, kw_only=True)
class _News:
    """What a request's thread has to say. `lost`: how nobody was there to answer it."""

    flight: _Flight
    items: list[Arrival | Answer]
    lost: str | None = None


@final
class EndpointArm(Arm):
    """One server."""

    Options = EndpointOptions
    is_outside = True

    def __init__(self, name: str, options: EndpointOptions, info: RunInfo) -> None:
        self.name = name
        self.max_concurrency = options.concurrency
        self._options = options
        self._info = info
        self._address = Address.parse(options.url)
        key = os.environ.get(options.key_env, "") if options.key_env else ""
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._server = SERVERS["openai"]
        self._model = options.model or ""
        self._salt = secrets.token_hex(8)
        self._flights: dict[int, _Flight] = {}
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._refused: list[Answer] = []
        self._lost: str | None = None
        self._reading: Reading | None = None

    @classmethod
    def create(cls, name: str, options: EndpointOptions, info: RunInfo) -> Self:
        """Make the arm a selection names."""
        return cls(name, options, info)

    # -- the contract -------------------------------------------------------------------------------

    def open(self) -> Description:
        """See who is there."""
        self.close()
        listed = self._listed_model()
        self._server = recognise(listed) if self._options.kind == "auto" else SERVERS[self._options.kind]
        self._model = self._options.model or str(listed.get("id", ""))
        if not self._model:
            raise UserError(f"{self._address} lists no models; name one: model=NAME")
        found = describe_server(self._server, listed, self._fetch)
        self._lost = None
        self.block_counters()
        sends_ids = self._options.api == "completions" and self._server.takes_ids
        return Description(
            engine=f"{self._server.name} {found.get('version') or found.get('build_info') or ''}".strip(),
            model=self._model,
            bits_per_weight=found.pop("bits_per_weight", None),
            details={
                **found,
                "url": str(self._address),
                "api": self._options.api,
                "prompts": "token ids" if sends_ids else "messages" if self._options.api == "chat" else "text",
                "connections": "one per request",
            },
        )

    def submit(self, ask: Ask) -> None:
        """Send it; what cannot be sent is answered at the next poll."""
        try:
            if self._lost is not None:
                raise EndpointError(f"{self._lost} a moment ago, and was not asked again")
            body = self._body(ask)
        except EndpointError as error:
            self._refused.append(self._failed(ask, str(error)))
            return
        timeout = self._options.timeout
        exchange = Exchange(self._address, self._headers, timeout)
        flight = _Flight(ask=ask, exchange=exchange, deadline=perf_counter() + timeout)
        self._flights[ask.key] = flight
        threading.Thread(target=self._fly, args=(flight, body), daemon=True).start()

    def poll(self, timeout: float) -> list[Arrival | Answer]:
        """What came, and what did not come in time."""
        if self._refused:
            refused, self._refused = self._refused, []
            return list(refused)
        if not self._flights:
            time.sleep(timeout)
            return []
        until = perf_counter() + timeout
        found: list[Arrival | Answer] = []
        while not found:
            wait = min([until, *(flight.deadline for flight in self._flights.values())]) - perf_counter()
            try:
                self._hear(self._news.get(timeout=max(wait, 0.0)), found)
                while True:
                    self._hear(self._news.get_nowait(), found)
            except queue.Empty:
                found += self._late()
            if perf_counter() >= until:
                break
        return found

    def cancel(self) -> None:
        """Close the connections, which a server takes for the end of its work."""
        for flight in self._flights.values():
            flight.exchange.abort()
        self._flights.clear()
        self._refused.clear()

    def close(self) -> None:
        """The server goes on without us."""
        self.cancel()

    def block_counters(self) -> Counters | None:
        """From the server's own counters; they hold the work of everybody who uses it."""
        lost, self._lost = self._lost, None
        if lost is not None:  # not asked here: it would be one more wait for a server that hangs
            self._reading = None
            return None
        try:
            if self._server.name == "vllm":
                before, self._reading = self._reading, read_vllm(self._aside().get(f"{self._address.root}/metrics"))
                return self._reading.since(before) if self._reading and before else None
            if self._server.name == "sglang":
                return read_sglang(about(self._server, self._fetch))
        except EndpointError:
            return None
        return None

    # -- inside -------------------------------------------------------------------------------------

    def _aside(self) -> Exchange:
        return Exchange(self._address, self._headers, min(_ASIDE_SECONDS, self._options.timeout))

    def _fetch(self, path: str) -> dict[str, Any]:
        return self._aside().get_json(self._address.root + path)

    def _listed_model(self) -> dict[str, Any]:
        try:
            listed = self._aside().get_json(f"{self._address.base}/models").get("data")
        except EndpointError as error:
            # A server without a list may still answer, if it is told which model.
            if isinstance(error, Unreachable) or not self._options.model:
                raise UserError(f"{self._address} {error}") from error
            return {}
        models = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
        wanted = self._options.model
        if wanted is None or not models:
            return models[0] if models else {}
        for model in models:
            if model.get("id") == wanted:
                return model
        raise UserError(
            f"{self._address} has no model {wanted}; it lists {', '.join(str(m.get('id')) for m in models)}"
        )

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": ask.max_new_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "seed": ask.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **special_fields(self._server, ask, self._salt),
        }
        if self._options.api == "chat":
            if ask.messages is None:
                raise EndpointError("gets a raw prompt, which has no messages; use api=completions")
            return {**body, "messages": [dict(message) for message in ask.messages]}
        if ask.ids is not None and self._server.takes_ids:
            return {**body, "prompt": [int(token) for token in ask.ids]}
        if ask.messages is not None:
            raise EndpointError("takes no token ids, so it must get the messages: use api=chat, or say kind=")
        return {**body, "prompt": ask.text}

    def _fly(self, flight: _Flight, body: dict[str, Any]) -> None:
        tally = Tally(flight.ask, self._info.count_tokens)
        path = self._address.base + _APIS[self._options.api]
        try:
            for arrival in _arrivals(flight.exchange.stream(path, body), tally):
                self._news.put(_News(flight=flight, items=[arrival]))
            self._news.put(_News(flight=flight, items=tally.finish(perf_counter())))
        except Exception as error:  # the edge of the thread: a request must end whatever happened to it
            told = str(error) if isinstance(error, EndpointError) else f"{type(error).__name__}: {error}"
            if tally.num_tokens and not tally.is_finished and "tokens" not in told:
                told += f", after {tally.num_tokens} tokens"
            lost = told if isinstance(error, Unreachable) else None
            self._news.put(_News(flight=flight, items=[self._failed(flight.ask, told)], lost=lost))

    def _hear(self, news: _News, found: list[Arrival | Answer]) -> None:
        key = news.flight.ask.key
        if self._flights.get(key) is not news.flight:
            return  # cancelled, or answered as late
        for item in news.items:
            found.append(item)
            if isinstance(item, Answer):
                del self._flights[key]
                self._lost = self._lost or news.lost

    def _late(self) -> Iterator[Answer]:
        now = perf_counter()
        for flight in [flight for flight in self._flights.values() if flight.deadline <= now]:
            del self._flights[flight.ask.key]
            flight.exchange.abort()
            told = f"gave no answer within {self._options.timeout:g} s"
            self._lost = self._lost or told
            yield self._failed(flight.ask, told)

    def _failed(self, ask: Ask, told: str) -> Answer:
        return Answer(key=ask.key, seconds=perf_counter(), error=f"{self._address} {told}")


def _arrivals(events: Iterator[tuple[float, dict[str, Any]]], tally: Tally) -> Iterator[Arrival]:
    for seconds, event in events:
        arrival = tally.take(seconds, event)
        if arrival is not None:
            yield arrival
