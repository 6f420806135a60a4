"""A server on this machine that speaks OpenAI's streaming API as it is told to, faults included."""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeServer:
    """`answer(handler, body)` writes what a POST is answered by; `gets`: path -> object or text of a GET."""

    def __init__(self):
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.gets: dict[str, object] = {"/v1/models": {"data": [{"id": "tiny", "owned_by": "me"}]}}
        self.answer = say_words
        self.num_together = self.most_together = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                found = outer.gets.get(self.path)
                text = found if isinstance(found, str) else json.dumps(found)
                reply(self, text, status=404 if found is None else 200)

            def do_POST(self):
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.headers.append(dict(self.headers))
                self.path_asked = self.path
                with outer._lock:
                    outer.num_together += 1
                    outer.most_together = max(outer.most_together, outer.num_together)
                try:
                    outer.answer(self, outer.bodies[-1])
                except OSError:
                    pass  # the client went away, as some tests have it
                finally:
                    with outer._lock:
                        outer.num_together -= 1
                self.close_connection = True

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def reply(handler, text, *, status=200, kind="application/json", length=None):
    """A whole answer; `length` claims another than it has."""
    payload = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(payload) if length is None else length))
    handler.end_headers()
    handler.wfile.write(payload)


class Events:
    """A streamed answer, in chunks as HTTP/1.1 sends them."""

    def __init__(self, handler):
        self._handler = handler
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()

    def raw(self, text):
        data = text.encode() if isinstance(text, str) else text
        self._handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self._handler.wfile.flush()

    def send(self, event):
        self.raw(f"data: {json.dumps(event)}\n\n")

    def token(self, text, *, ids=None, reason=None, **more):
        choice = {"index": 0, "text": text, "finish_reason": reason}
        if ids is not None:
            choice["token_ids"] = ids
        self.send({"choices": [choice], **more})

    def usage(self, prompt_tokens, completion_tokens):
        self.send({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})

    def done(self):
        self.raw("data: [DONE]\n\n")
        self._handler.wfile.write(b"0\r\n\r\n")

    def cut(self):
        """Break the connection as a process that dies does."""
        self._handler.wfile.flush()
        self._handler.connection.shutdown(socket.SHUT_RDWR)


def say_words(handler, body):
    """Four words, one a chunk, the last with the reason; usage last."""
    events = Events(handler)
    for place, word in enumerate(("one", " two", " three", " four")):
        events.token(word, reason="stop" if place == 3 else None)
    if body.get("stream_options", {}).get("include_usage"):
        events.usage(3, 4)
    events.done()


def say_slowly(handler, body):
    """As long as somebody listens."""
    events = Events(handler)
    for _ in range(500):
        events.token("a ")
        time.sleep(0.02)
