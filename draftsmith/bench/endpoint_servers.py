"""What is known of the servers behind OpenAI-compatible endpoints: their extra fields, and where they tell counters.

Used by `endpoint_arm.py`. A server is recognised by what it answers about its models. Invariant: a plain OpenAI
server is sent no field that OpenAI's reference does not have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from draftsmith.bench.arms import Ask, Counters
from draftsmith.bench.endpoint_http import EndpointError

FetchObject = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Server:
    """One kind of server. `takes_ids`: prompts as token ids. `skips_ends`: can write past end tokens.

    `takes_stop_ids`: can be told which tokens end. `fields`: sent with every request. `reuse`: what is done about
    reuse of earlier prompts. `about`: where it tells of itself, below its root; the first path that answers counts.
    """

    name: str
    takes_ids: bool = True
    skips_ends: bool = True
    takes_stop_ids: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    reuse: str
    about: tuple[str, ...] = ()


SERVERS: Mapping[str, Server] = {
    server.name: server
    for server in (
        Server(name="vllm", fields={"return_token_ids": True}, reuse="off: a salt per request", about=("/version",)),
        Server(
            name="sglang",
            reuse="the server's own: start it with --disable-radix-cache",
            about=("/server_info", "/get_server_info"),
        ),
        Server(
            name="llama_cpp",
            takes_stop_ids=False,
            fields={"cache_prompt": False, "timings_per_token": True},
            reuse="off: cache_prompt is false",
            about=("/props",),
        ),
        Server(name="openai", takes_ids=False, skips_ends=False, takes_stop_ids=False, reuse="unknown"),
    )
}
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama_cpp", "llama.cpp": "llama_cpp"}


def recognise(model: Mapping[str, Any]) -> Server:
    """Which server lists a model like this."""
    return SERVERS[_OWNERS.get(str(model.get("owned_by", "")).lower(), "openai")]


def special_fields(server: Server, ask: Ask, salt: str) -> dict[str, Any]:
    """Fields of a request that only this server knows. Raises `EndpointError` for what it cannot do."""
    fields = dict(server.fields)
    if ask.ignore_eos:
        if not server.skips_ends:
            raise EndpointError("cannot be told to write past end tokens; if it is one that can, say kind=")
        fields["ignore_eos"] = True
    elif ask.end_ids and server.takes_stop_ids:
        fields["stop_token_ids"] = sorted(ask.end_ids)
    if server.name == "vllm":
        fields["cache_salt"] = f"{salt}-{ask.key}"
    if server.name == "llama_cpp":
        fields["seed"] = ask.seed % 0xFFFFFFFF  # it draws one of its own for the largest
    return fields


def describe_server(server: Server, model: Mapping[str, Any], fetch: FetchObject) -> dict[str, Any]:
    """Version and the like, as far as the server tells; `bits_per_weight` where it can be computed."""
    found: dict[str, Any] = {"server": server.name, "prefix_reuse": server.reuse}
    meta = model.get("meta")
    told_of_it = meta if isinstance(meta, dict) else {}
    size, parameters = number(told_of_it.get("size")), number(told_of_it.get("n_params"))
    if size and parameters:
        found["bits_per_weight"] = 8 * size / parameters
    told = {**model, **about(server, fetch)}
    for key in ("version", "build_info", "max_model_len", "speculative_algorithm", "speculative_num_steps"):
        if told.get(key) is not None:
            found[key] = told[key]
    return found


def about(server: Server, fetch: FetchObject) -> dict[str, Any]:
    """What a server tells of itself; empty where it does not."""
    for path in server.about:
        try:
            return fetch(path)
        except EndpointError:
            continue
    return {}


def number(value: Any) -> float | None:
    """A finite number, from JSON or from the text of a counter; None for whatever else a server says."""
    try:
        found = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


# -- counters ---------------------------------------------------------------------------------------

_SAMPLE = re.compile(r"^(vllm:spec_decode_num_\w+?)(?:_total)?\{([^}]*)\} (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d{1,4})"')


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a server's counters said at one moment, since it started."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()

    def since(self, earlier: Reading) -> Counters:
        """What came in between; all of it where the server has started again meanwhile."""
        if self.drafts < earlier.drafts or len(self.accepted_at) < len(earlier.accepted_at):
            earlier = Reading()
        return Counters(
            drafts=self.drafts - earlier.drafts,
            drafted=max(self.drafted - earlier.drafted, 0),
            accepted=max(self.accepted - earlier.accepted, 0),
            accepted_at=tuple(
                max(now - then, 0) for now, then in zip_longest(self.accepted_at, earlier.accepted_at, fillvalue=0)
            ),
        )


def read_vllm(metrics: str) -> Reading | None:
    """From vLLM's Prometheus text, engines added up; None where it does not speculate."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, text in _SAMPLE.findall(metrics):
        value = number(text)
        if value is None or value < 0:
            return None
        position = _POSITION.search(labels)
        if name.endswith("_per_pos") and position:
            place = int(position[1])
            positions[place] = positions.get(place, 0.0) + value
        else:
            sums[name] = sums.get(name, 0.0) + value
    prefix = "vllm:spec_decode_num_"
    if f"{prefix}drafts" not in sums:
        return None
    return Reading(
        drafts=int(sums[f"{prefix}drafts"]),
        drafted=int(sums.get(f"{prefix}draft_tokens", 0)),
        accepted=int(sums.get(f"{prefix}accepted_tokens", 0)),
        accepted_at=tuple(int(positions[place]) for place in sorted(positions)),
    )


def read_sglang(info: Mapping[str, Any]) -> Counters | None:
    """From SGLang's server info: an average since it started is all there is."""
    states = info.get("internal_states")
    listed = states if isinstance(states, list) else []
    lengths = [number(state.get("avg_spec_accept_length")) for state in listed if isinstance(state, dict)]
    told = [length for length in lengths if length]
    return Counters(mean_length=sum(told) / len(told)) if told else None


def request_counters(timings: Mapping[str, Any]) -> Counters | None:
    """From the timings llama.cpp's server adds to an answer."""
    drafted, accepted = (timings.get(name) for name in ("draft_n", "draft_n_accepted"))
    if type(drafted) is not int or drafted < 0:
        return None
    return Counters(drafted=drafted, accepted=accepted if type(accepted) is int and 0 <= accepted <= drafted else None)
