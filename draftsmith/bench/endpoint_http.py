"""HTTP with a server of completions: one connection per request, and every failure as one clear line.

Used by the endpoint arm and by the audit of endpoints. Plain `http.client`, because a request is one POST and its
answer is read as it comes, and because an environment's proxies have no business between us and a local server.
Invariant: whatever a server does wrong ends in an `EndpointError` in bounded time: the socket has a timeout at every
wait, and `Exchange.abort`, called from another thread, ends all waits at once.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final
from urllib.parse import urlsplit

from draftsmith.errors import OptionError

_SHOWN = 200
"""Most characters of what a server said that an error repeats."""
_MOST_LINE = 1 << 22
_MOST_BODY = 1 << 24
_MOST_ERROR_BODY = 1 << 16


class EndpointError(RuntimeError):
    """A server did not answer as it should."""


class Unreachable(EndpointError):
    """There is nobody to answer: no connection, or no sign of life within the timeout."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where an OpenAI-compatible server is. `base`: the path its API is under, "/v1" mostly."""

    is_secure: bool
    host: str
    port: int
    base: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """From `http://host[:port][/v1]`. Raises `OptionError`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise OptionError(f"url={url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"url={url} is not of the form http://HOST:PORT/v1")
        is_secure = parts.scheme == "https"
        base = parts.path.rstrip("/") or "/v1"
        return cls(is_secure=is_secure, host=parts.hostname, port=port or (443 if is_secure else 80), base=base)

    @property
    def root(self) -> str:
        """The path of what the server offers besides."""
        return self.base.removesuffix("/v1")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_secure else 'http'}://{host}:{self.port}{self.base}"


@final
class Exchange:
    """One request and its answer. `headers`: sent besides the usual ones."""

    def __init__(self, address: Address, headers: dict[str, str], timeout: float) -> None:
        """`timeout`: most seconds of a whole answer, and of a single wait of a stream; `abort` limits all of that."""
        self._address, self._headers, self._timeout = address, headers, timeout
        self._socket: socket.socket | None = None
        self._is_aborted = False

    def abort(self) -> None:
        """End it, from another thread: whatever it waits for fails now."""
        self._is_aborted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def get(self, path: str) -> str:
        """The body of a GET. Raises `EndpointError`."""
        return self._whole("GET", path, None)

    def get_json(self, path: str) -> dict[str, Any]:
        """The object a GET answers. Raises `EndpointError`."""
        return _object(self._whole("GET", path, None))

    def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The object a POST answers. Raises `EndpointError`."""
        return _object(self._whole("POST", path, body))

    def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> str:
        # A socket's timeout is that of one wait, and a server may send a byte now and then for ever.
        limit = threading.Timer(self._timeout, self.abort)
        limit.daemon = True
        limit.start()
        try:
            with self._telling(), self._sent(method, path, body) as response:
                data = response.read(_MOST_BODY + 1)
                if self._is_aborted:  # the end of the data was our own
                    raise EndpointError("was too slow")
                if len(data) > _MOST_BODY:
                    raise EndpointError(f"sent more than {_MOST_BODY >> 20} MiB")
                if response.length:
                    raise EndpointError(f"broke off {response.length} bytes before the end of its answer")
        except EndpointError as error:
            if self._is_aborted or isinstance(error.__cause__, TimeoutError):
                raise Unreachable(f"gave no answer within {self._timeout:g} s") from error
            raise
        finally:
            limit.cancel()
        return data.decode("utf-8", "replace")

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """The events a POST is answered by, and when each was here. Raises `EndpointError`.

        Ends at the server's `[DONE]`, or where it closes the connection between two events.
        """
        with self._telling(), self._sent("POST", path, body) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                said = short(response.read1(_MOST_ERROR_BODY).decode("utf-8", "replace"))
                raise EndpointError(f"did not stream but sent {kind}: {said}")
            for seconds, line in _lines(response):
                name, _, value = line.partition(":")
                if name != "data":
                    continue
                if value.strip() == "[DONE]":
                    return
                yield seconds, _object(value)

    @contextlib.contextmanager
    def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        address = self._address
        make = http.client.HTTPSConnection if address.is_secure else http.client.HTTPConnection
        connection = make(address.host, address.port, timeout=self._timeout)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise Unreachable(_why(error)) from error
            self._socket = connection.sock
            if self._is_aborted:
                raise EndpointError("cancelled")
            headers = {"Content-Type": "application/json", "Accept": "*/*", "Connection": "close", **self._headers}
            connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
            response = connection.getresponse()
            with response:
                if response.status != 200:
                    said = short(_message(response.read1(_MOST_ERROR_BODY).decode("utf-8", "replace")))
                    raise EndpointError(f"answered {response.status} {response.reason}" + (f": {said}" if said else ""))
                yield response
        finally:
            self._socket = None
            connection.close()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Turn what the libraries raise into one line."""
        try:
            yield
        except TimeoutError as error:
            raise Unreachable(f"said nothing for {self._timeout:g} s") from error
        except http.client.RemoteDisconnected as error:
            raise EndpointError("closed the connection without an answer") from error
        except http.client.IncompleteRead as error:
            raise EndpointError("broke off in the middle of its answer") from error
        except http.client.HTTPException as error:
            raise EndpointError(f"does not speak HTTP: {type(error).__name__} {short(str(error))}".strip()) from error
        except OSError as error:
            raise EndpointError(f"broke off: {_why(error)}") from error
        except ValueError as error:  # such as a host name that none can have
            raise EndpointError(f"cannot be asked: {short(str(error))}") from error


def _lines(response: http.client.HTTPResponse) -> Iterator[tuple[float, str]]:
    """Lines and when they were complete; read as they come, so that none waits for another."""
    rest = b""
    while part := response.read1(1 << 16):
        seconds = perf_counter()
        *whole, rest = (rest + part).split(b"\n")
        if len(rest) > _MOST_LINE:
            raise EndpointError("sent a line without end")
        for line in whole:
            yield seconds, line.decode("utf-8", "replace").strip()
    if rest.strip():
        raise EndpointError(f"broke off in the middle of an event: {short(rest.decode('utf-8', 'replace'))}")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EndpointError(f"sent what is no JSON: {short(text)}") from error
    if not isinstance(found, dict):
        raise EndpointError(f"sent what is no object: {short(text)}")
    return found


def _message(body: str) -> str:
    """What an error's body says, without its wrapping."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body
    inner = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return inner if isinstance(inner, str) else json.dumps(inner)


def error_in(event: dict[str, Any]) -> str | None:
    """What an event says went wrong; None where nothing did."""
    return short(_message(json.dumps(event))) if event.get("error") else None


def short(text: str) -> str:
    """As much as an error repeats of what a server said, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "cannot be reached: no connection in time"
    return f"cannot be reached: {error.strerror or error}".lower() if error.strerror else f"cannot be reached: {error}"
