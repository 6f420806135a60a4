"""What a benchmark runs: an arm is one way of answering prompts, ours or another engine's.

Written once for each kind of engine, driven by the runner alone. The runner asks and polls from one thread, so an arm
whose engine works by itself hands over what came through a queue. Invariants: an arm answers every request it took
with exactly one `Answer`, failed ones too; times are `time.perf_counter()` when the harness could first see the
tokens; nothing is reused from one request to another unless the arm says so in `describe`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from draftsmith.core.stats import EventLog
from draftsmith.errors import OptionError
from draftsmith.registry import ARMS, load_class, parse_selection, read_options

Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. `key`: unique within an arm. `ids`: the prompt's token ids where the run's tokenizer made them,
    None where only text can be sent. `messages`: the conversation so far (a raw prompt: None and `text`).

    `seed`: of the request; the same for every arm. `end_ids`: the model's own end tokens, empty where unknown or where
    `ignore_eos` asks to write past them.
    """

    key: int
    ids: Sequence[int] | None
    messages: Sequence[Message] | None
    text: str
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    end_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Tokens of a request that became visible together."""

    key: int
    seconds: float
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What an engine says about its speculation, where it has no event log of ours; None: unknown.

    `drafts`: drafts that were verified. `drafted`, `accepted`: tokens. `steps`: forwards of the target after the one
    that read the prompt. `accepted_at`: accepted tokens by their place in the draft. `mean_length`: tokens per step on
    average since the engine started, from engines that tell nothing finer: it holds work of others too.
    """

    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    steps: int | None = None
    accepted_at: tuple[int, ...] | None = None
    mean_length: float | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for what is no count: an engine said it, and all counts are added up."""
        counts = {name: getattr(self, name) for name in ("drafts", "drafted", "accepted", "steps")}
        counts |= {f"accepted_at[{place}]": count for place, count in enumerate(self.accepted_at or ())}
        for name, count in counts.items():
            if count is not None and (type(count) is not int or count < 0):
                raise ValueError(f"{name} is {count!r:.40}, no count")


MOST_TIMEOUT = 86400.0
"""Seconds; the system's own waits cannot be much longer than a few of these."""

COUNTED_BY = "tokens_counted_by"
"""Among the details of an answer without ids: how its tokens were counted; "estimate: ..." where nobody did."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The end of a request. `token_ids`: None where the engine tells only text; `num_tokens` is its own count then.

    `finish_reason`: "stop" or "length". `error`: why it failed, and then no other field counts but `key` and
    `seconds`. `request`: its number in the arm's event log, None without one. `details`: what else the engine told,
    such as times measured in its own process. `total_variation`: per token, under a lossy rule of ours.
    """

    key: int
    seconds: float
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] | None = None
    num_tokens: int = 0
    text: str = ""
    finish_reason: str = ""
    request: int | None = None
    counters: Counters | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    total_variation: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Description:
    """What an arm is, for the bundle and the report. `details`: versions, options, anything else worth citing.

    `fidelity`: what its texts are worth (`core.fidelity`); None where nobody tells, as of other engines.
    """

    engine: str
    model: str
    bits_per_weight: float | None = None
    fidelity: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a run gives to every arm made for it. `context_len`: room for a prompt and its answer, in tokens.

    `count_tokens`, `decode`: of the run's tokenizer, for engines that tell only text or only ids; None without one.
    """

    threads: int = 1
    context_len: int = 2048
    count_tokens: Callable[[str], int] | None = None
    decode: Callable[[Sequence[int]], str] | None = None


class Arm(ABC):
    """One way of answering. `name`: the selection it was asked for by, unique in a run."""

    name: str
    max_concurrency: int = 1
    """Requests it can work on at once; more wait in the runner."""
    is_outside: ClassVar[bool] = False
    """Its engine is another process, which may keep processors busy after an answer."""

    @abstractmethod
    def open(self) -> Description:
        """Load what it needs. Raises `UserError` with one clear line when it cannot run here."""

    @abstractmethod
    def submit(self, ask: Ask) -> None:
        """Take a request; returns at once."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Arrival | Answer]:
        """Go on with the work, and what came of it: at least one item unless `timeout` seconds went by.

        An engine that works in this thread does about one step and returns. Arrivals of a request stand before its
        answer.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Drop all requests that run; nothing more is heard of them."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, processes included. Harmless when repeated or never opened."""

    def encode(self, messages: Sequence[Message] | None, text: str) -> list[int] | None:
        """Token ids of a prompt, where this arm's engine is the one that encodes for all; None where it cannot."""
        return None

    def take_events(self) -> EventLog:
        """The event log since the last call; empty for engines that keep none of ours."""
        return EventLog()

    def block_counters(self) -> Counters | None:
        """Counters of all requests together since the last call, where the engine does not tell them one by one.

        The runner calls it once before each block and once after the last, so an arm may take it for the border
        between blocks.
        """
        return None

    def process_id(self) -> int | None:
        """The engine's process where it is one this arm has started and that runs."""
        return None

    def memory_bytes(self) -> int | None:
        """Resident memory of the engine's process now, None where unknown."""
        return None


def make_arm(text: str, info: RunInfo) -> Arm:
    """The arm of another engine that `llama_cpp:model=FILE` or `LABEL=llama_cpp:model=FILE` names.

    Raises `OptionError`.
    """
    name, arm_class, options = _selected(text)
    arm: Arm = arm_class.create(name, options, info)
    return arm


def check_arm(text: str) -> str:
    """The name of the arm that a text asks for: its label, else the text. Raises `OptionError` where there is none."""
    return _selected(text)[0]


def _selected(text: str) -> tuple[str, Any, Any]:
    label, mark, rest = text.partition("=")
    # A selection has a colon before its first equals sign.
    name, selection_text = (label.strip(), rest) if mark and ":" not in label else (text, text)
    if not name:
        raise OptionError(f"arm {text!r} has an empty label; write LABEL=ENGINE:key=value, or no label")
    selection = parse_selection(selection_text, ARMS, "arm")
    arm_class: Any = load_class(selection)
    return name, arm_class, read_options(arm_class.Options, selection.options, f"arm {selection_text}")
