"""A small completion endpoint over a Markov chain of words, honest or with a planted fault, for the audit's tests.

`served(fault)` gives its address while the context lasts. Faults of what is written: "greedy", "law", "stop", "limit",
"usage", "logprobs". Faults of the talking: "error", "hang", "die", "cut", "dribble", "error that hangs", "not json",
"deep", "list", "no text", "no models". Odd but understood: "characters", "surrogates", "nonsense beside".
"""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

WORDS = [" the", " sea", " is", " salt", " and", " deep", " blue", "."]
SIZE = len(WORDS)
# Seed 1: a chain whose greedy walk goes through five words.
_WEIGHTS = np.random.default_rng(1).normal(size=(SIZE, SIZE)) * 1.5
HANG_SECONDS = 3.0


def _write(body, fault):
    generator = np.random.default_rng([body.get("seed", 0), sum(map(ord, body["prompt"]))])
    state, temperature = len(body["prompt"]) % SIZE, body["temperature"]
    tokens, logprobs, likeliest, text, reason = [], [], [], "", "length"
    limit = body["max_tokens"] + (fault == "limit")
    stops = [] if fault == "stop" else body.get("stop") or []
    while len(tokens) < limit:
        logits = _WEIGHTS[state].copy()
        laws = logits - np.log(np.exp(logits).sum())
        if temperature > 0:
            law = np.exp(logits / temperature)
            law /= law.sum()
            if fault == "law" and tokens:
                law = 0.65 * law + 0.35 * np.eye(SIZE)[law.argmax()]
            word = int(generator.choice(SIZE, p=law))
        else:
            word = int(logits.argsort()[-2 if fault == "greedy" and len(tokens) == 9 else -1])
        tokens.append(WORDS[word])
        logprobs.append(float(laws[word]) + (fault == "logprobs" and len(tokens) == 4))
        likeliest.append({WORDS[other]: float(laws[other]) for other in logits.argsort()[-2:].tolist()})
        text += WORDS[word]
        state = word
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            text, reason = text[: min(found)], "stop"
            break
    told = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest}
    if fault == "characters":
        told = None
    if fault == "surrogates":
        text, told = "\ud83d" + text, None
    if fault == "nonsense beside":
        told = {
            "tokens": tokens,
            "token_logprobs": [math.nan] * len(tokens),
            "top_logprobs": [{"a": "x"}] * len(tokens),
        }
    usage = {"completion_tokens": len(tokens) + (fault == "usage"), "prompt_tokens": 3}
    return {"choices": [{"text": text, "finish_reason": reason, "logprobs": told}], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._send(json.dumps({"data": [] if self.server.fault == "no models" else [{"id": "words"}]}))

    def do_POST(self):
        fault = self.server.fault
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if fault == "hang":
            time.sleep(HANG_SECONDS)
        if fault == "dribble":
            self.send_response(200)
            self.end_headers()
            for _ in range(60):
                self.wfile.write(b" ")
                time.sleep(0.05)
            return
        if fault == "error that hangs":
            self.send_response(500)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"oh")
            time.sleep(HANG_SECONDS)
            return
        if fault == "stops" and len(self.server.bodies) > 40:
            self.connection.close()
            return
        if fault == "die":
            self.connection.close()
            return
        odd = {"not json": "<html>", "deep": "[" * 100_000, "list": "[1]", "no text": '{"choices": [{}]}'}
        if fault == "error":
            self._send('{"error":\n "out of memory"}', 500)
        elif fault == "cut":
            self._send(json.dumps(_write(body, None))[:40], promise=100_000)
        else:
            self._send(odd.get(fault) or json.dumps(_write(body, fault)))

    def _send(self, text, code=200, promise=None):
        raw = text.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(promise or len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *arguments):
        pass


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass


@contextmanager
def served(fault=None):
    """The address of a running server; `served(...)` also yields what it was asked."""
    server = _Quiet(("127.0.0.1", 0), _Handler)
    server.fault, server.bodies = fault, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
