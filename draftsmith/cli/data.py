"""`draftsmith data synth` and `data regenerate`: the target writes texts to train drafters on.

Called by `app`; composes training's jobs with an engine or a server. Invariants: everything that can be wrong with
the options is found before a model is loaded; whatever ends a run, the texts that are done are on disk, and the same
command goes on with the next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from draftsmith.cli.console import note
from draftsmith.cli.data_options import RegenerateOptions, SynthOptions
from draftsmith.cli.data_progress import TextBar
from draftsmith.cli.interrupts import INTERRUPTED, interrupts_held
from draftsmith.cli.loading import load_for_texts, request_settings
from draftsmith.errors import OptionError
from draftsmith.training import regenerate, synthesis
from draftsmith.training.jobs import Job, in_order
from draftsmith.training.sieve import Sieve
from draftsmith.training.text_store import TextStore, check_place
from draftsmith.training.texts import Dropped, Text

if TYPE_CHECKING:
    from draftsmith.cli.answering import ArmAnswerer

_DEFAULT_TEXTS = 1000
_SAMPLE = 160


@dataclass(frozen=True, kw_only=True)
class Goal:
    """When there are enough. `numbers`: texts looked at, kept or dropped."""

    texts: int | None = None
    answer_tokens: int | None = None
    numbers: int | None = None

    def __post_init__(self) -> None:
        for name in ("texts", "answer_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, got {value}")

    def progress(self, store: TextStore) -> tuple[int, int]:
        """How much there is, of how much."""
        if self.numbers is not None:
            return store.next_number, self.numbers
        if self.answer_tokens is not None:
            return store.answer_tokens, self.answer_tokens
        assert self.texts is not None
        return store.num_texts, self.texts

    def is_reached(self, store: TextStore) -> bool:
        """Whether nothing more is to be written."""
        done, total = self.progress(store)
        return done >= total


def run_synth(options: SynthOptions) -> int:
    """Have the target write prompts and answers; returns the exit code."""
    if options.texts is not None and options.answer_tokens is not None:
        raise OptionError("--texts and --answer-tokens are two ways to say when there are enough; give one of them")
    enough = _DEFAULT_TEXTS if options.answer_tokens is None and options.texts is None else options.texts
    goal = Goal(texts=enough, answer_tokens=options.answer_tokens)
    wanted = synthesis.SynthesisOptions(
        temperature=options.temperature,
        top_p=options.top_p,
        greedy=options.greedy,
        prompt_temperature=options.prompt_temperature,
        max_new_tokens=options.max_new_tokens,
        max_prompt_tokens=options.max_prompt_tokens,
        second_turns=options.second_turns,
        kinds=tuple(name.strip() for name in options.kinds.split(",") if name.strip()),
        seed=options.seed,
    )
    _check(options)
    request_settings(temperature=options.prompt_temperature)
    settings = {"model": options.model, "backend": options.backend, "dtype": options.dtype, **asdict(wanted)}
    settings["openers"] = synthesis.openers_digest()
    check_place(options.output, "synth", settings, partly=True)
    answerer, turns, files = load_for_texts(options, options.model, drafter=options.drafter, batch=options.batch)
    with TextStore(options.output, "synth", {**settings, **files}) as store:
        sieve = Sieve()
        for text in store.texts():
            sieve.keep(text)
        jobs = synthesis.jobs(turns, wanted, store.next_number)
        return _write(options, jobs, answerer, store, goal, sieve)


def run_regenerate(options: RegenerateOptions) -> int:
    """Have the target answer a file of prompts; returns the exit code."""
    from draftsmith.bench.prompts import BUILTIN, read_source

    if options.input == BUILTIN:
        raise OptionError("the built-in prompts are the benchmark's: a drafter trained on them could not be measured")
    if options.limit is not None and options.limit < 1:
        raise OptionError(f"limit must be at least 1, got {options.limit}")
    wanted = regenerate.AnswerOptions(
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
    )
    _check(options)
    loaded = read_source(options.input, limit=options.limit, max_turns=options.max_turns)
    for reason, number in loaded.skipped.items():
        note(f"{number} entries of {options.input} were left out: {reason}")
    conversations = [
        regenerate.Conversation(
            text_id=prompt.prompt_id,
            turns=prompt.turns,
            system=prompt.system,
            category=prompt.category,
            max_new_tokens=prompt.max_new_tokens,
        )
        for prompt in loaded.prompts
    ]
    source = {"endpoint": options.endpoint, "model": options.model} if options.endpoint else {
        "model": options.model or "smollm2", "backend": options.backend, "dtype": options.dtype
    }  # fmt: skip
    settings = {"prompts_sha256": loaded.sha256, "max_turns": options.max_turns, **source, **asdict(wanted)}
    goal = Goal(numbers=len(conversations))
    check_place(options.output, "regenerate", settings, partly=True)
    with (
        _answerer(options) as (answerer, facts),
        TextStore(options.output, "regenerate", {**settings, **facts}) as store,
    ):
        first = store.next_number
        jobs = regenerate.jobs(conversations[first:], wanted, first)
        return _write(options, jobs, answerer, store, goal, None)


@contextmanager
def _answerer(options: RegenerateOptions) -> Iterator[tuple[ArmAnswerer, dict[str, Any]]]:
    """Our engine, or the endpoint that was named; and what tells its model from another of the same name."""
    if not options.endpoint:
        model = options.model or "smollm2"
        answerer, _, files = load_for_texts(options, model, drafter=options.drafter, batch=options.batch)
        yield answerer, files
        return
    from draftsmith.bench.arms import RunInfo
    from draftsmith.bench.endpoint_arm import EndpointArm, EndpointOptions
    from draftsmith.cli.answering import ArmAnswerer

    asked = EndpointOptions(
        url=options.endpoint,
        api="chat",
        model=options.model or None,
        key_env=options.key_env or None,
        concurrency=options.batch,
        timeout=options.timeout,
    )
    arm = EndpointArm.create("endpoint", asked, RunInfo())
    try:
        # Where none was named it is the first that the server lists, today.
        yield ArmAnswerer(arm, is_remote=True), {"served_model": arm.open().model}
    finally:
        arm.close()


def _check(options: SynthOptions | RegenerateOptions) -> None:
    if options.batch < 1:
        raise OptionError(f"batch must be at least 1, got {options.batch}")
    request_settings(
        temperature=options.temperature, top_p=options.top_p, max_new_tokens=options.max_new_tokens, seed=options.seed
    )


def _write(
    options: SynthOptions | RegenerateOptions,
    jobs: Iterator[Job],
    answerer: ArmAnswerer,
    store: TextStore,
    goal: Goal,
    sieve: Sieve | None,
) -> int:
    """Write until the goal is reached, the jobs end, or Ctrl-C."""
    began, interrupted = perf_counter(), False
    if goal.is_reached(store):
        jobs = iter(())
    outcomes = in_order(
        jobs, answerer, at_once=options.batch, first=store.next_number, parked=store.parked, park=_held(store.park)
    )
    try:
        with TextBar(goal.progress(store)) as bar, closing(outcomes):
            for outcome in outcomes:
                with interrupts_held():
                    store.add(_sifted(outcome, sieve))
                bar.update(goal.progress(store)[0], store, answerer.num_tokens)
                if goal.is_reached(store):
                    break
    except KeyboardInterrupt:
        interrupted = True
    return _tell(options, store, answerer, perf_counter() - began, interrupted=interrupted)


def _held(park: Callable[[int, Text | Dropped], None]) -> Callable[[int, Text | Dropped], None]:
    def parked(number: int, outcome: Text | Dropped) -> None:
        with interrupts_held():
            park(number, outcome)

    return parked


def _sifted(outcome: Text | Dropped, sieve: Sieve | None) -> Text | Dropped:
    reason = sieve.judge(outcome) if sieve is not None and isinstance(outcome, Text) else None
    if reason is None or isinstance(outcome, Dropped):
        return outcome
    return Dropped(reason=reason, text_id=outcome.text_id, sample=outcome.said_by("user")[-1][:_SAMPLE])


def _tell(
    options: SynthOptions | RegenerateOptions,
    store: TextStore,
    answerer: ArmAnswerer,
    seconds: float,
    *,
    interrupted: bool,
) -> int:
    written = answerer.num_tokens
    speed = written / seconds if seconds else 0.0
    summary: dict[str, Any] = {
        "output": str(options.output),
        "texts": store.num_texts,
        "answer_tokens": store.answer_tokens,
        "cut_answers": store.cut_answers,
        "dropped": dict(store.dropped.most_common()),
        "written_tokens": written,
        "seconds": seconds,
        "tokens_per_second": speed,
        "interrupted": interrupted,
    }
    if options.json:
        print(json.dumps(summary, ensure_ascii=False))
    dropped = ", ".join(f"{number} {reason}" for reason, number in store.dropped.most_common()) or "none"
    note(f"{store.num_texts} texts with {store.answer_tokens} answer tokens in {options.output}; dropped: {dropped}")
    if written:
        note(f"{written} tokens written in {seconds:.0f} s, {speed:.0f} a second, prompts and dropped texts included")
    if interrupted:
        note("interrupted; the same command goes on from there")
    return INTERRUPTED if interrupted else 0
